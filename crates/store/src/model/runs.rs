//! Runs, jobs and steps, and what a change of one of them leads to.

use std::collections::BTreeMap;
use std::time::Duration;

use kici_engine::check::CheckResult;
use kici_engine::concurrency::SlotAsk;
use kici_engine::event::Event;
use kici_engine::hosts::Fanout;
use kici_engine::ids::{AgentId, DeliveryRowId, InstanceId, JobId, RunId, SourceId};
use kici_engine::lock::{Need, Retry};
use kici_engine::plan::{HostResults, JobKind};
use kici_engine::state::{FailureClass, FailureReason, JobStatus, RunStatus, StepStatus};
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::{ClaimedJob, Expansion, Generated, JobRef, NewRun, QueueEntry, RosterHost, words};

words! {
    /// Where the log of a step is.
    LogState("log state") {
        /// Being written.
        Open = "open",
        /// Sealed in the object store.
        Sealed = "sealed",
    }
}

/// A stored run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Its id.
    pub id: RunId,
    /// Organisation.
    pub org: String,
    /// The source of the event.
    pub source_id: SourceId,
    /// The delivery that caused it.
    pub delivery_id: Option<DeliveryRowId>,
    /// Its deduplication key.
    pub dedup_key: String,
    /// `owner/name`.
    pub repo: String,
    /// Full ref.
    pub git_ref: Option<String>,
    /// Commit.
    pub sha: String,
    /// Name of the workflow.
    pub workflow_name: String,
    /// Title.
    pub run_name: String,
    /// Digest of the lock document.
    pub lock_digest: String,
    /// The event; with its payload only where an expression may look at it.
    pub event: Event,
    /// Type of the trigger that matched.
    pub trigger_kind: String,
    /// Its status.
    pub status: RunStatus,
    /// Why it did not succeed.
    pub failure_reason: Option<FailureReason>,
    /// For people.
    pub failure_message: Option<String>,
    /// When a cancel was asked for.
    pub cancel_requested_at: Option<Ts>,
    /// By whom.
    pub cancelled_by: Option<String>,
    /// From 1.
    pub attempt: u32,
    /// The run that this one repeats.
    pub parent_run_id: Option<RunId>,
    /// Validated inputs.
    pub inputs: BTreeMap<String, Json>,
    /// The request that caused it.
    pub request_id: String,
    /// Events that led to this one.
    pub chain_depth: u32,
    /// When it was created.
    pub created_at: Ts,
    /// When its first job started.
    pub started_at: Option<Ts>,
    /// When its last job ended.
    pub finished_at: Option<Ts>,
    /// Limit of the whole run.
    pub timeout: Option<Duration>,
    /// `started_at` plus the limit.
    pub deadline: Option<Ts>,
    /// It has or had a slot of this group, or waits for one.
    pub concurrency: Option<SlotAsk>,
    /// When its logs were removed because of their age.
    pub logs_expired_at: Option<Ts>,
}

/// A stored job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// Its run.
    pub run_id: RunId,
    /// Unique in the run.
    pub name: String,
    /// Key in the lock.
    pub base_name: String,
    /// Index in the lock document.
    pub job_index: u32,
    /// Short label of the variant.
    pub variant_label: Option<String>,
    /// Matrix values.
    pub matrix: Option<BTreeMap<String, String>>,
    /// For people.
    pub display_name: String,
    /// Its status.
    pub status: JobStatus,
    /// What it needs has ended as asked.
    pub needs_satisfied: bool,
    /// When it became ready for an agent.
    pub ready_at: Option<Ts>,
    /// How many variants may run at once.
    pub max_parallel: Option<u32>,
    /// The first failing variant ends the others.
    pub fail_fast: bool,
    /// Concurrency group that it takes turns in by itself, once it asked for a slot.
    pub group_name: Option<String>,
    /// Why it did not succeed.
    pub failure_reason: Option<FailureReason>,
    /// Class of the reason.
    pub failure_class: Option<FailureClass>,
    /// For people; also the reason of a skip.
    pub failure_message: Option<String>,
    /// What the agent saw: exit code, signal, memory.
    pub evidence: Option<Json>,
    /// The agent that has or had it.
    pub agent_id: Option<AgentId>,
    /// Of the last claim; 0 before the first.
    pub dispatch_epoch: u32,
    /// From 1; raised by `retry`.
    pub attempt: u32,
    /// Named results.
    pub outputs: BTreeMap<String, String>,
    /// Why no agent takes it.
    pub routing_reason: Option<String>,
    /// Bytes of log.
    pub log_bytes: u64,
    /// When it was created.
    pub created_at: Ts,
    /// When its start was granted.
    pub started_at: Option<Ts>,
    /// When it ended.
    pub finished_at: Option<Ts>,
    /// Last sign of life.
    pub last_heartbeat_at: Option<Ts>,
    /// Limit from the start of the checkout.
    pub timeout: Option<Duration>,
    /// When a cancel is enforced at the latest.
    pub cancel_deadline: Option<Ts>,
    /// Its place in a fan-out over hosts; only that host's agent runs it.
    pub fanout: Option<Fanout>,
    /// What it does, where it does not run steps only.
    pub kind: Option<JobKind>,
}

/// An edge between stored jobs.
#[derive(Clone, Debug, PartialEq)]
pub struct NeedEdge {
    /// Unique name of the job that waits.
    pub job_name: String,
    /// The job it waits for by its base name, or all jobs of a group (`whole_group`), and how that must end.
    pub need: Need,
    /// Base name of the job that makes the group, where the edge stands for the whole of it.
    pub generator: Option<String>,
    /// The jobs of the group are known and have edges of their own.
    pub resolved: bool,
}

/// A stored step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Its job.
    pub job_id: JobId,
    /// The delivery it belongs to.
    pub epoch: u32,
    /// `kind-owner-ordinal`, as in the name of its log.
    pub step_key: String,
    /// Place in the job.
    pub ordinal: u32,
    /// For people.
    pub name: String,
    /// Its status.
    pub status: StepStatus,
    /// Exit code.
    pub exit_code: Option<i32>,
    /// For people.
    pub message: Option<String>,
    /// Named results.
    pub outputs: BTreeMap<String, String>,
    /// When it started.
    pub started_at: Option<Ts>,
    /// When it ended.
    pub finished_at: Option<Ts>,
    /// Bytes of log.
    pub log_bytes: u64,
    /// Lines of log.
    pub log_lines: u64,
    /// Bytes that the cap left out.
    pub missing_bytes: u64,
    /// Lines that the cap left out.
    pub missing_lines: u64,
    /// Its failure does not fail the job.
    pub failure_allowed: bool,
    /// Markdown that it wrote.
    pub summary: Option<String>,
    /// Where its log is.
    pub log_state: Option<LogState>,
    /// Which attempt it is at, or ended with.
    pub attempt: u32,
    /// What its check found.
    pub check: Option<CheckResult>,
    /// What differs.
    pub drift: Option<String>,
    /// The group of steps it runs in.
    pub group: Option<String>,
}

/// A change of a step, from the agent that has the job.
#[derive(Clone, Debug)]
pub struct StepWrite {
    /// The delivery.
    pub job: JobRef,
    /// `kind-owner-ordinal`.
    pub step_key: String,
    /// Place in the job.
    pub ordinal: u32,
    /// For people.
    pub name: String,
    /// The status it reached.
    pub status: StepStatus,
    /// When, by the agent's clock.
    pub at: Ts,
    /// Exit code.
    pub exit_code: Option<i32>,
    /// For people.
    pub message: Option<String>,
    /// Named results.
    pub outputs: BTreeMap<String, String>,
    /// Bytes of log.
    pub log_bytes: u64,
    /// Lines of log.
    pub log_lines: u64,
    /// Bytes that the cap left out.
    pub missing_bytes: u64,
    /// Lines that the cap left out.
    pub missing_lines: u64,
    /// Its failure does not fail the job.
    pub failure_allowed: bool,
    /// Markdown that it wrote.
    pub summary: Option<String>,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// What its check found.
    pub check: Option<CheckResult>,
    /// What differs.
    pub drift: Option<String>,
    /// The group of steps it runs in.
    pub group: Option<String>,
}

/// What became of a [`StepWrite`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepWritten {
    /// Written.
    Applied,
    /// The step had ended, or this is a repetition; nothing changed.
    Unchanged,
    /// The job is at another epoch.
    Stale,
}

/// The end of a job.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// The delivery.
    pub job: JobRef,
    /// The agent that reports it; none when the orchestrator decides (loss, deadline).
    pub agent_id: Option<AgentId>,
    /// `success`, `failed` or `cancelled`.
    pub status: JobStatus,
    /// Why it did not succeed.
    pub reason: Option<FailureReason>,
    /// For people.
    pub message: Option<String>,
    /// Named results.
    pub outputs: BTreeMap<String, String>,
    /// What the agent saw.
    pub evidence: Option<Json>,
    /// Bytes of log.
    pub log_bytes: u64,
    /// When, by the agent's clock; none takes the store's.
    pub at: Option<Ts>,
}

/// What became of a [`JobResult`].
#[derive(Clone, Debug)]
pub enum JobFinished {
    /// Written, with all that follows.
    Applied(Box<Effects>),
    /// The job had ended already, in this status.
    Duplicate(JobStatus),
    /// The job is at another epoch.
    Stale,
    /// The job belongs to another agent, or does not exist.
    NotOwned,
}

/// What follows from a change of jobs.
#[derive(Clone, Debug)]
pub struct Effects {
    /// The run after the change.
    pub run: Run,
    /// Jobs that ended in it, also those skipped or cancelled in consequence.
    pub finished_jobs: Vec<FinishedJob>,
    /// Jobs that became ready for an agent.
    pub newly_queued: Vec<JobId>,
    /// Agents that must be told to stop a job: cancelled with its run, or by a failing sibling.
    pub to_stop: Vec<HeldJob>,
    /// Deliveries that failed and whose jobs wait for an agent again.
    pub retried: Vec<JobRef>,
    /// The run ended with this change.
    pub run_finished: bool,
}

/// A job that ended, see [`Effects`].
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedJob {
    /// Its last delivery; epoch 0 when it was never claimed.
    pub job: JobRef,
    /// Unique name in the run.
    pub name: String,
    /// How it ended.
    pub status: JobStatus,
    /// Why it did not succeed.
    pub reason: Option<FailureReason>,
    /// The agent that had it.
    pub agent_id: Option<AgentId>,
}

/// A base name that a job needs, all of whose variants have ended.
#[derive(Clone, Debug, PartialEq)]
pub struct NeedResult {
    /// Aggregate status: any failure, else any cancelled, else success if any succeeded, else skipped.
    pub status: JobStatus,
    /// Outputs of the variants, merged in order of creation.
    pub outputs: BTreeMap<String, String>,
    /// Host by host, for a job on hosts.
    pub hosts: Option<HostResults>,
}

/// A job whose needs are met and whose condition must be judged now.
#[derive(Clone, Debug)]
pub struct ReadyJob {
    /// Its run.
    pub run: Run,
    /// The job.
    pub job: Job,
    /// The lock document, JSON of `kici_engine::lock::Workflow`.
    pub lock_json: std::sync::Arc<Vec<u8>>,
    /// What it needs, by base name.
    pub needs: BTreeMap<String, NeedResult>,
    /// The host that it is pinned to; none when it is not known any more, or the job is not pinned.
    pub host: Option<RosterHost>,
}

/// The verdict on a [`ReadyJob`].
#[derive(Clone, Debug)]
pub enum Activation {
    /// Give it to an agent.
    Enqueue(QueueEntry),
    /// Emit an event for its repository and wait for the runs that come of it.
    Invoke {
        /// Its name.
        event: String,
        /// Its document.
        payload: Json,
        /// It needs a slot of this group first.
        slot: Option<SlotAsk>,
        /// It is a success when nobody listens.
        optional: bool,
    },
    /// It waits until somebody lets it go on.
    Hold {
        /// Why, for people.
        reason: String,
    },
    /// Its condition is false.
    Skip {
        /// Why, for people.
        reason: String,
    },
    /// It cannot run.
    Fail {
        /// Why.
        reason: FailureReason,
        /// For people.
        message: String,
    },
}

/// How a job that failed may be tried again.
#[derive(Clone, Debug, PartialEq)]
pub struct Again {
    /// How often and after what.
    pub policy: Retry,
    /// Nobody took it by then: expired. None waits for ever.
    pub expires_at: Option<Ts>,
}

/// Judges jobs whose needs are met, and those that failed. Called inside a transaction that may be repeated: pure, no I/O,
/// quick.
pub trait Activate: Send + Sync {
    /// The verdict on `job`.
    fn activate(&self, job: &ReadyJob) -> Activation;

    /// What the workflow says about trying a job again that failed; none does not. `needs` of the job is empty here.
    fn again(&self, job: &ReadyJob) -> Option<Again> {
        let _ = job;
        None
    }

    /// What becomes of the jobs that a generator made, now that it has ended well.
    ///
    /// # Errors
    /// Why they cannot join the run, in words; the generator then fails.
    fn expand(&self, made: &Generated) -> Result<Expansion, String> {
        Err(format!("nobody here can plan the jobs of `{}`", made.job.name))
    }

    /// Places a job of a new run at an agent, so that it never waits in the queue; none leaves it there. When the
    /// transaction is repeated, the same job gets the same answer.
    fn place(&self, job: JobId, entry: &QueueEntry, digest: &str) -> Option<AgentId> {
        let _ = (job, entry, digest);
        None
    }

    /// The transaction is committed: these jobs are at the agents that [`place`](Self::place) named.
    fn placed(&self, jobs: Vec<ClaimedJob>) {
        let _ = jobs;
    }
}

/// Who asked to cancel a run, and how.
#[derive(Clone, Debug)]
pub struct CancelRequest {
    /// The run.
    pub run_id: RunId,
    /// For people: a user, `timeout`, a newer run.
    pub by: String,
    /// Why.
    pub reason: FailureReason,
    /// No hooks: jobs are ended at once in the database, agents kill.
    pub force: bool,
}

/// What a cancel led to.
#[derive(Clone, Debug)]
pub enum CancelOutcome {
    /// No such run.
    NotFound,
    /// It had ended before, like this.
    AlreadyTerminal(RunStatus),
    /// Cancelled, or being cancelled.
    Cancelling {
        /// What changed at once, and in `to_stop` which agents must be told.
        effects: Box<Effects>,
    },
}

/// A job that an agent holds.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldJob {
    /// The delivery.
    pub job: JobRef,
    /// The agent.
    pub agent_id: AgentId,
    /// The instance that watches it; none is unknown.
    pub owner: Option<InstanceId>,
    /// Its start was granted.
    pub started: bool,
}

/// What a re-run led to.
#[derive(Clone, Debug)]
pub enum Rerun {
    /// No such run.
    NotFound,
    /// The run has not ended yet.
    StillOpen(RunStatus),
    /// Nothing to repeat: every job ended well.
    NothingFailed,
    /// The new run, for `run_create`; its jobs are `Pending` or, where they are not repeated, `Succeeded`.
    Planned(Box<NewRun>),
}

/// Which runs to list.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// Of this source.
    pub source_id: Option<SourceId>,
    /// Caused by this delivery.
    pub delivery_id: Option<DeliveryRowId>,
    /// Of this repository.
    pub repo: Option<String>,
    /// On this full ref.
    pub git_ref: Option<String>,
    /// Of this commit.
    pub sha: Option<String>,
    /// Of this workflow.
    pub workflow_name: Option<String>,
    /// In one of these statuses; empty is all.
    pub statuses: Vec<RunStatus>,
}
