//! Runs to be created.

use std::collections::BTreeMap;
use std::time::Duration;

use kici_engine::concurrency::SlotAsk;
use kici_engine::event::Event;
use kici_engine::hosts::Fanout;
use kici_engine::ids::{AgentId, DeliveryRowId, JobId, RunId, SourceId};
use kici_engine::lock::{GitCredentials, Selector};
use kici_engine::plan::{JobKind, JobPlan};
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::ClaimedJob;

/// A run to be created with all its jobs.
#[derive(Clone, Debug)]
pub struct NewRun {
    /// Minted by the caller.
    pub id: RunId,
    /// Organisation.
    pub org: String,
    /// The source of the event.
    pub source_id: SourceId,
    /// The delivery that caused it; none for a manual run.
    pub delivery_id: Option<DeliveryRowId>,
    /// Two runs with the same key are one: the second adopts the first.
    pub dedup_key: String,
    /// `owner/name`.
    pub repo: String,
    /// Full ref.
    pub git_ref: Option<String>,
    /// Commit.
    pub sha: String,
    /// Name of the workflow.
    pub workflow_name: String,
    /// Rendered title.
    pub run_name: String,
    /// Digest of the lock document.
    pub lock_digest: String,
    /// JSON of `kici_engine::lock::Workflow`; may be empty when the document is known to be stored.
    pub lock_json: Vec<u8>,
    /// The event; with its payload only where an expression may look at it.
    pub event: Event,
    /// Type of the trigger that matched.
    pub trigger_kind: String,
    /// Validated inputs.
    pub inputs: BTreeMap<String, Json>,
    /// The request that caused it.
    pub request_id: String,
    /// Events that led to this one.
    pub chain_depth: u32,
    /// Limit of the whole run.
    pub timeout: Option<Duration>,
    /// It needs a slot of this group before anything of it runs.
    pub concurrency: Option<SlotAsk>,
    /// From 1; raised by re-runs.
    pub attempt: u32,
    /// The run that this one repeats.
    pub parent_run_id: Option<RunId>,
    /// Its jobs, in lock order.
    pub jobs: Vec<NewJob>,
    /// Who waits for whom.
    pub needs: Vec<NewNeed>,
}

/// A job of a [`NewRun`].
#[derive(Clone, Debug)]
pub struct NewJob {
    /// Minted by the caller; also the id of its queue row.
    pub id: JobId,
    /// Unique in the run, with matrix values: `test (linux, 1)`.
    pub name: String,
    /// Key in the lock: `test`.
    pub base_name: String,
    /// Index in the lock document.
    pub job_index: u32,
    /// Short label of the variant.
    pub variant_label: Option<String>,
    /// Matrix values.
    pub matrix: Option<BTreeMap<String, String>>,
    /// Its place in a fan-out over hosts.
    pub fanout: Option<Fanout>,
    /// For people.
    pub display_name: String,
    /// How many variants of `base_name` may run at once.
    pub max_parallel: Option<u32>,
    /// The first failing variant ends the others.
    pub fail_fast: bool,
    /// Limit from the start of the checkout.
    pub timeout: Option<Duration>,
    /// What it does, where it does not run steps only.
    pub kind: Option<JobKind>,
    /// What it starts as.
    pub start: JobStart,
}

impl NewJob {
    /// A planned job.
    pub fn of_plan(id: JobId, plan: JobPlan, start: JobStart) -> Self {
        Self {
            id,
            start,
            name: plan.name,
            base_name: plan.base_name,
            // A workflow has at most some thousand jobs.
            job_index: u32::try_from(plan.job_index).unwrap_or(u32::MAX),
            variant_label: plan.variant_label,
            matrix: (!plan.matrix.is_empty()).then_some(plan.matrix),
            fanout: plan.fanout,
            display_name: plan.display_name,
            max_parallel: plan.max_parallel,
            fail_fast: plan.fail_fast,
            timeout: plan.timeout_ms.map(Duration::from_millis),
            kind: plan.kind,
        }
    }
}

/// What a new job starts as.
#[derive(Clone, Debug)]
pub enum JobStart {
    /// Waits for what it needs.
    Pending,
    /// Ready for an agent.
    Queued(QueueEntry),
    /// Its condition is false.
    Skipped {
        /// Why, for people.
        reason: String,
    },
    /// Could not be planned.
    Failed {
        /// Why.
        reason: FailureReason,
        /// For people.
        message: String,
    },
    /// Copied from the run that this one repeats: it ended well there.
    Succeeded {
        /// Its outputs there.
        outputs: BTreeMap<String, String>,
    },
}

/// What a queue row holds besides its job.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueEntry {
    /// Which agents may take it; canonical labels, fully rendered.
    pub selector: Selector,
    /// Only agents on this machine (a local source).
    pub requires_machine_id: Option<String>,
    /// Nobody took it by then: expired. None waits for ever.
    pub expires_at: Option<Ts>,
    /// Higher goes first; default 0.
    pub priority: i16,
    /// Only this agent may take it.
    pub pinned_agent_id: Option<AgentId>,
    /// It needs a slot of this group first.
    pub slot: Option<SlotAsk>,
    /// What its workflow declares for git; none is the default.
    pub git_credentials: Option<Box<GitCredentials>>,
}

/// An edge between jobs of a [`NewRun`].
#[derive(Clone, Debug)]
pub struct NewNeed {
    /// Unique name of the job that waits.
    pub job_name: String,
    /// Base name of the job it waits for.
    pub upstream: String,
    /// Statuses of the upstream that let it run.
    pub run_on: Vec<JobStatus>,
    /// The group of generated jobs that the edge is about.
    pub group: Option<String>,
    /// Base name of the job that makes the group, where the edge stands for the whole of it; `upstream` then is no job.
    pub generator: Option<String>,
    /// The jobs of the group are known and have edges of their own.
    pub resolved: bool,
}

impl NewNeed {
    /// The edges of a planned job.
    pub fn of_plan(plan: &JobPlan) -> impl Iterator<Item = Self> + '_ {
        let jobs = plan.needs.iter().map(|need| Self {
            job_name: plan.name.clone(),
            upstream: need.job.clone(),
            run_on: need.run_on.clone(),
            group: need.group.clone(),
            generator: None,
            resolved: false,
        });
        let groups = plan.groups.iter().map(|edge| Self {
            job_name: plan.name.clone(),
            upstream: whole_group(&edge.group),
            run_on: edge.run_on.clone(),
            group: Some(edge.group.clone()),
            generator: Some(edge.generator.clone()),
            resolved: false,
        });
        jobs.chain(groups)
    }
}

/// What stands for all jobs of a group where the name of one would; no job can have this name.
pub fn whole_group(group: &str) -> String {
    format!("group:{group}")
}

/// What became of a [`NewRun`].
#[derive(Clone, Debug)]
pub struct CreatedRun {
    /// The run: the new one, or the one adopted because of its `dedup_key`.
    pub run_id: RunId,
    /// False when it existed before.
    pub created: bool,
    /// Jobs that wait for an agent.
    pub ready: Vec<JobId>,
    /// Jobs that were placed at an agent at once.
    pub placed: Vec<ClaimedJob>,
    /// Its status after creation.
    pub status: RunStatus,
}
