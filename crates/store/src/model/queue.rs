//! The dispatch queue.

use std::collections::BTreeMap;

use kici_engine::ids::{AgentId, InstanceId, JobId, RunId};
use kici_engine::lock::Selector;
use kici_engine::state::{FailureReason, QueueStatus};
use kici_engine::time::Ts;

use super::{Effects, Job, JobRef, NeedResult, Run};

/// A distinct selector of rows that wait. Matching is done in memory once per selector, not once per row.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingSelector {
    /// Names it in [`ClaimRequest`]; equal exactly when selector, machine and pin are.
    pub digest: String,
    /// Which agents may take its rows.
    pub selector: Selector,
    /// Only agents on this machine.
    pub requires_machine_id: Option<String>,
    /// Only this agent.
    pub pinned_agent_id: Option<AgentId>,
    /// Rows that wait.
    pub waiting: u64,
}

/// An agent asks for work.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The agent.
    pub agent_id: AgentId,
    /// The selectors that it satisfies.
    pub digests: Vec<String>,
    /// Its free slots.
    pub limit: u32,
    /// Jobs it rejected a moment ago.
    pub except: Vec<JobId>,
}

/// A job handed to an agent by a claim, with all that an offer needs.
#[derive(Clone, Debug)]
pub struct ClaimedJob {
    /// The delivery, at its new epoch.
    pub job_ref: JobRef,
    /// The agent that claimed it.
    pub agent_id: AgentId,
    /// The job.
    pub job: Job,
    /// Its run, with event, source and lock digest.
    pub run: Run,
    /// What it needs, by base name.
    pub needs: BTreeMap<String, NeedResult>,
}

/// A row of the queue.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueRow {
    /// The job.
    pub job_id: JobId,
    /// Its run.
    pub run_id: RunId,
    /// Name of the workflow.
    pub workflow_name: String,
    /// Unique name of the job in the run.
    pub job_name: String,
    /// Its status.
    pub status: QueueStatus,
    /// Higher goes first.
    pub priority: i16,
    /// Its selector.
    pub selector_digest: String,
    /// Which agents may take it.
    pub selector: Selector,
    /// Only agents on this machine.
    pub requires_machine_id: Option<String>,
    /// When it was first queued; a row that returns keeps it.
    pub created_at: Ts,
    /// Nobody took it by then: expired.
    pub expires_at: Option<Ts>,
    /// When it was handed over.
    pub dispatched_at: Option<Ts>,
    /// Times a delivery was undone.
    pub dispatch_attempts: u32,
    /// Of the last claim.
    pub dispatch_epoch: u32,
    /// The agent that has or had it.
    pub agent_id: Option<AgentId>,
    /// The instance that watches it; none is unknown, never "not mine".
    pub owner_instance_id: Option<InstanceId>,
    /// An answer must come by then.
    pub ack_deadline: Option<Ts>,
    /// When the agent took it.
    pub acked_at: Option<Ts>,
    /// When its start was granted.
    pub started_at: Option<Ts>,
    /// The agent must be back by then.
    pub recovery_deadline: Option<Ts>,
    /// The agent that may come back.
    pub recovery_agent_id: Option<AgentId>,
    /// Since when nobody could ever run it.
    pub unroutable_since: Option<Ts>,
    /// Only this agent may run it.
    pub pinned_agent_id: Option<AgentId>,
    /// When it ended.
    pub finished_at: Option<Ts>,
    /// Why no agent could be started for it, the last time it was tried; none once it was handed over.
    pub last_provisioning_error: Option<String>,
}

impl QueueRow {
    /// The delivery that this row is at.
    pub fn job_ref(&self) -> JobRef {
        JobRef { run_id: self.run_id, job_id: self.job_id, epoch: self.dispatch_epoch }
    }
}

/// The state that a requeue leaves; another state means that somebody else was faster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequeueFrom {
    /// `dispatched`, an answer is due and did not come.
    AwaitingAck(AgentId),
    /// `dispatched` to this agent, which refused it or lost contact, and not started.
    NotStarted(AgentId),
    /// `recovering`, past its deadline, and not started.
    RecoveryExpired,
}

/// A delivery to undo.
#[derive(Clone, Debug)]
pub struct RequeueRequest {
    /// The delivery.
    pub job: JobRef,
    /// What it must be in.
    pub from: RequeueFrom,
    /// For the history and for people.
    pub reason: String,
    /// Deliveries that may be undone before the job fails.
    pub budget: u32,
    /// It counts against the budget. One that does not (the agent took leave before it began) adds no time to wait either, so
    /// that the limit of waiting ends what the budget does not.
    pub counts: bool,
    /// New time limit of waiting, if it counts.
    pub expires_at: Option<Ts>,
}

/// What became of a [`RequeueRequest`].
#[derive(Clone, Debug)]
pub enum Requeued {
    /// It waits again; so many deliveries were undone.
    Requeued {
        /// Deliveries undone so far.
        attempts: u32,
    },
    /// Undone too often: the job failed.
    GaveUp(Box<Effects>),
    /// Somebody else was faster.
    Lost,
}

/// Answer to a guarded update of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// Done.
    Applied,
    /// The row was not in the expected state.
    Lost,
}

/// Answer to a request to start.
#[derive(Clone, Debug, PartialEq)]
pub enum StartVerdict {
    /// Granted now.
    Granted {
        /// The job started as the first of its run.
        run_started: bool,
    },
    /// Granted before, to the same delivery.
    AlreadyGranted,
    /// Another epoch, another agent, cancelled or ended.
    Denied,
}

/// Answer to an agent that came back with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// It goes on.
    Resumed {
        /// Its start had been granted.
        started: bool,
        /// A cancel was asked for meanwhile.
        cancelling: bool,
    },
    /// It must drop the job.
    Abandon,
}

/// What to do with a delivery whose agent is out of contact.
#[derive(Clone, Debug)]
pub struct RecoverRequest {
    /// The delivery.
    pub job: JobRef,
    /// Its agent.
    pub agent_id: AgentId,
    /// The agent must be back by then.
    pub deadline: Ts,
}

/// A job that ended without a result of its agent.
#[derive(Clone, Debug)]
pub struct FailRequest {
    /// The delivery; the row must be at this epoch and not terminal.
    pub job: JobRef,
    /// Only if the row is in one of these; empty is any that is not terminal.
    pub only_from: Vec<QueueStatus>,
    /// What the queue row ends as.
    pub queue_status: QueueStatus,
    /// Why.
    pub reason: FailureReason,
    /// For people.
    pub message: String,
    /// No agent can be running it any more: if its `retry` allows, it is tried again instead.
    pub retry: bool,
}

/// One entry of the history of deliveries.
#[derive(Clone, Debug, PartialEq)]
pub struct DispatchRecord {
    /// The job.
    pub job_id: JobId,
    /// The delivery.
    pub epoch: u32,
    /// To this agent.
    pub agent_id: AgentId,
    /// By this instance.
    pub instance_id: InstanceId,
    /// When it was claimed.
    pub dispatched_at: Ts,
    /// When it ended.
    pub ended_at: Option<Ts>,
    /// How: `completed`, `requeued`, `failed`, `cancelled`.
    pub outcome: Option<String>,
    /// Why.
    pub reason: Option<String>,
}

/// Who may speak for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// The agent has the job at this epoch, or had it when it ended.
    Owned,
    /// The agent once had it, at this older epoch.
    FormerlyOwned,
    /// Neither.
    NotOwned,
}

/// Which rows of the queue to list, oldest first.
#[derive(Clone, Debug, Default)]
pub struct QueueFilter {
    /// In one of these statuses; empty is all that are not terminal.
    pub statuses: Vec<QueueStatus>,
    /// Held by this agent.
    pub agent_id: Option<AgentId>,
    /// Of this run.
    pub run_id: Option<RunId>,
    /// At most so many; the store allows up to 500.
    pub limit: u32,
}

/// Rows of the queue by what they wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Wait for an agent.
    pub pending: u64,
    /// Handed over.
    pub dispatched: u64,
    /// Their agent is out of contact.
    pub recovering: u64,
}

/// Why nobody takes a row, see `Store::queue_routing_set`.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The job.
    pub job_id: JobId,
    /// For people; none clears it.
    pub reason: Option<String>,
    /// Since when it is unroutable: kept when set before; none clears it.
    pub unroutable_since: Option<Ts>,
}
