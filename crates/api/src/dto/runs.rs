//! Runs, jobs and steps.

use std::collections::BTreeMap;

use kici_engine::check::{CheckMode, CheckResult};
use kici_engine::ids::{DeliveryRowId, JobId, RunId};
use kici_engine::state::{FailureClass, FailureReason, JobStatus, RunStatus, StepStatus};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use utoipa::ToSchema;

/// One run in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: RunId,
    /// Name of the source whose event started it.
    pub source: String,
    /// `owner/name`.
    pub repo: String,
    /// Full ref, when the event names one.
    #[serde(rename = "ref")]
    pub git_ref: Option<String>,
    /// The commit it runs at.
    pub sha: String,
    /// Name of the workflow.
    pub workflow: String,
    /// The run's own name: `run_name` rendered, else the workflow's name.
    pub name: String,
    /// What started it: `push`, `manual`, ….
    pub trigger: String,
    /// Its status.
    #[schema(value_type = String)]
    pub status: RunStatus,
    /// What its steps may change: `apply`, `check` or `check-fail-on-drift`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub check_mode: CheckMode,
    /// Why it did not succeed.
    pub failure: Option<FailureView>,
    /// 1 for the first run, one more for each re-run of it.
    pub attempt: u32,
    /// The run that this one repeats.
    #[schema(value_type = Option<String>)]
    pub parent_run_id: Option<RunId>,
    /// When somebody asked to cancel it.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub cancel_requested_at: Option<Ts>,
    /// When it was created.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When its first job started.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub started_at: Option<Ts>,
    /// When it ended.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Ts>,
}

/// Why a run or a job did not succeed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FailureView {
    /// The reason.
    #[schema(value_type = String)]
    pub reason: FailureReason,
    /// The class of the reason: who has to act.
    #[schema(value_type = String)]
    pub class: FailureClass,
    /// One sentence for people.
    pub message: Option<String>,
    /// Facts that prove it: signal, peak memory and limit, last contact.
    #[schema(value_type = Option<Object>)]
    pub evidence: Option<Json>,
}

/// One run with its jobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunDetail {
    /// The run.
    pub run: RunView,
    /// The delivery that started it; none for a manual run.
    #[schema(value_type = Option<String>)]
    pub delivery_id: Option<DeliveryRowId>,
    /// Who cancelled it, as `type:id`.
    pub cancelled_by: Option<String>,
    /// Inputs of a manual run.
    #[schema(value_type = Object)]
    pub inputs: BTreeMap<String, Json>,
    /// The request that led to it.
    pub request_id: Option<String>,
    /// Its jobs in the order of the workflow.
    pub jobs: Vec<JobView>,
    /// Its slots in concurrency groups, and those of its jobs, in the order in which they were asked for.
    #[serde(default)]
    pub slots: Vec<SlotView>,
}

/// A slot of a concurrency group that a run or a job has or had, or waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlotView {
    /// The job; none when it is the run as a whole.
    #[schema(value_type = Option<String>)]
    pub job_id: Option<JobId>,
    /// Name of the group; it belongs to the repository.
    pub group: String,
    /// How many may be active at once.
    pub max: u32,
    /// `queued`, `active`, `completed` or `cancelled`.
    pub status: String,
    /// Its place among those that wait, from 1.
    pub place: Option<u32>,
    /// How many wait.
    pub waiting: u32,
    /// While it waits: the runs that have the slots.
    #[schema(value_type = Vec<String>)]
    pub held_by: Vec<RunId>,
    /// A newer run that cancels this one.
    #[schema(value_type = Option<String>)]
    pub superseded_by: Option<RunId>,
    /// When it was asked for.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When it was given.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub acquired_at: Option<Ts>,
    /// When it was given back, or the wait ended.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ended_at: Option<Ts>,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: JobId,
    /// The run it belongs to.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// Unique in the run, with matrix values: `test (linux, 1.95)`.
    pub name: String,
    /// The name in the workflow file.
    pub base_name: String,
    /// What people see.
    pub display_name: String,
    /// The matrix values of this job.
    #[schema(value_type = Object)]
    pub matrix: BTreeMap<String, Json>,
    /// The jobs it waits for.
    pub needs: Vec<NeedView>,
    /// `generate` makes other jobs, `invoke` starts other workflows and no agent has it; absent for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Its status.
    #[schema(value_type = String)]
    pub status: JobStatus,
    /// Why it did not succeed.
    pub failure: Option<FailureView>,
    /// The agent that has or had it.
    pub agent_id: Option<String>,
    /// How often it was handed to an agent.
    pub epoch: u32,
    /// 1 for the first attempt, one more for each retry.
    pub attempt: u32,
    /// Hand-overs before the last one, oldest first; only in the detail of a run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<HandOverView>,
    /// Why nobody takes it while it waits or is held, and what it waits for.
    pub routing_reason: Option<String>,
    /// Its outputs.
    pub outputs: BTreeMap<String, String>,
    /// Bytes of its logs.
    pub log_bytes: u64,
    /// Its limit in milliseconds.
    pub timeout_ms: Option<u64>,
    /// When it was created.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When its needs were met.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ready_at: Option<Ts>,
    /// When its steps were granted a start.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub started_at: Option<Ts>,
    /// When it ended.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Ts>,
}

/// One time that a job was handed to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HandOverView {
    /// Its number; steps and logs are kept by it.
    pub epoch: u32,
    /// The agent.
    pub agent_id: String,
    /// When it was claimed for the agent.
    #[schema(value_type = String, format = DateTime)]
    pub at: Ts,
    /// When it was over.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ended_at: Option<Ts>,
    /// `retried` after a failure, `requeued` when it was never started there.
    pub outcome: Option<String>,
    /// Why it was over.
    pub reason: Option<String>,
}

/// One edge to a needed job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NeedView {
    /// Base name of the needed job; of a group whose jobs are not known yet the job that makes them.
    pub job: String,
    /// The group of generated jobs that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The aggregate statuses that satisfy the need.
    #[schema(value_type = Vec<String>)]
    pub when: Vec<JobStatus>,
}

/// One step of a job at one epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StepView {
    /// The job it belongs to.
    #[schema(value_type = String)]
    pub job_id: JobId,
    /// The hand-over it belongs to.
    pub epoch: u32,
    /// `kind-owner-ordinal`, unique in the job and epoch.
    pub key: String,
    /// Its place in the job, from 0.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its status.
    #[schema(value_type = String)]
    pub status: StepStatus,
    /// Exit code of its command.
    pub exit_code: Option<i32>,
    /// One sentence for people.
    pub message: Option<String>,
    /// True when its failure does not fail the job.
    pub failure_allowed: bool,
    /// Its outputs.
    pub outputs: BTreeMap<String, String>,
    /// What it wrote to `$KICI_SUMMARY`.
    pub summary: Option<String>,
    /// Which attempt it is at, or ended with, from 1.
    pub attempt: u32,
    /// What its `check` found: `in_sync`, `applied`, `would_change`, or `no_check` in a run that only checks.
    #[schema(value_type = Option<String>)]
    pub check: Option<CheckResult>,
    /// What its `check` wrote to `$KICI_DRIFT`.
    pub drift: Option<String>,
    /// The group of steps that it runs beside.
    pub group: Option<String>,
    /// Its log.
    pub log: LogTotals,
    /// When it started.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub started_at: Option<Ts>,
    /// When it ended.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Ts>,
}

/// How much log a step has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogTotals {
    /// Bytes that are stored.
    pub bytes: u64,
    /// Lines that are stored.
    pub lines: u64,
    /// Bytes that were left out between head and tail because the log was over its limit.
    pub missing_bytes: u64,
    /// Lines that were left out.
    pub missing_lines: u64,
    /// True when nothing will be added any more.
    pub complete: bool,
}

/// Filters of the list of runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct RunFilter {
    /// Only these statuses, comma separated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Only this workflow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workflow: Option<String>,
    /// Only this repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Only this source, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Only this full ref.
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    pub git_ref: Option<String>,
    /// Only this commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha: Option<String>,
    /// Only runs that this delivery started.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub delivery: Option<DeliveryRowId>,
    /// Only runs created at this instant or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, format = DateTime)]
    pub since: Option<Ts>,
}

impl RunFilter {
    /// The statuses that are asked for; empty means all.
    ///
    /// # Errors
    /// The word that is not a status, with the list of those that are.
    pub fn statuses(&self) -> Result<Vec<RunStatus>, kici_engine::state::UnknownWord> {
        let words = self.status.as_deref().unwrap_or_default().split(',').map(str::trim);
        words.filter(|word| !word.is_empty()).map(str::parse).collect()
    }
}

/// Starts a workflow by hand.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TriggerRun {
    /// Name of the source.
    pub source: String,
    /// Name of the workflow; it must have a `manual` trigger.
    pub workflow: String,
    /// `owner/name`; may be left out where the source has one repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Branch, tag, full ref or commit; the default branch when left out.
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    pub git_ref: Option<String>,
    /// Values for the workflow's inputs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    pub inputs: BTreeMap<String, Json>,
    /// `apply` (the default), `check` or `check-fail-on-drift`.
    #[serde(default, skip_serializing_if = "CheckMode::is_apply")]
    #[schema(value_type = String)]
    pub check_mode: CheckMode,
}

/// A run that was created or found again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunAccepted {
    /// Its id.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// True when the same `Idempotency-Key` had created it before.
    pub existing: bool,
}

/// Cancels a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CancelRun {
    /// Do not run cancel hooks, kill at once.
    pub force: bool,
}

/// What a cancel has done so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CancelAccepted {
    /// The run.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// Its status now.
    #[schema(value_type = String)]
    pub status: RunStatus,
    /// Agents that were told to stop.
    pub agents_notified: u32,
    /// Agents that have to stop and are out of contact; they are told when they come back.
    pub unreachable: Vec<String>,
    /// Jobs that had not started and are cancelled.
    pub pending_cancelled: u32,
}

/// Repeats a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RerunRun {
    /// Take over the successful jobs with their outputs and repeat only the others.
    pub failed_only: bool,
}
