//! From a workflow and an event to a run: which jobs it has, which of them start at once, and what an agent gets.
//!
//! Three steps, all pure: [`plan_run`] when the event is processed, [`activate`] each time the needs of a job are met, and
//! [`job_spec`] when a job is offered to an agent. What is decided once is stored by the caller; what depends on the results
//! of other jobs is decided in [`activate`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::event::Event;
use crate::ids::RunId;
use crate::jobspec::JobSpec;
use crate::lock::{Need, Selector, Workflow};
use crate::state::{FailureReason, JobStatus};

/// Most jobs of one run, variants included.
pub const MAX_JOBS: usize = 1000;

/// The run itself, as expressions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunInfo {
    /// Its id.
    pub id: RunId,
    /// From 1; a re-run has its parent's plus one.
    pub attempt: u32,
}

/// What a plan, an activation and a job's specification are made from.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    /// The workflow, from the stored lock document.
    pub workflow: &'a Workflow,
    /// The event. Its `inputs` are validated. Its payload may be null where [`wants_payload`] says no.
    pub event: &'a Event,
    /// The run.
    pub run: RunInfo,
}

/// What became of a job that others need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeedResult {
    /// Aggregate status, see [`crate::needs::aggregate`].
    pub status: JobStatus,
    /// Its outputs, see [`crate::needs::merge_outputs`].
    #[serde(default)]
    pub outputs: BTreeMap<String, String>,
}

/// Results of the needed jobs by base name.
pub type Needs = BTreeMap<String, NeedResult>;

/// What a job does once its needs are met.
#[derive(Clone, Debug, PartialEq)]
pub enum Activation {
    /// Goes to the queue and waits for an agent with this selector (rendered, checked).
    Enqueue {
        /// Which agents may run it.
        selector: Selector,
    },
    /// Does not run: its condition is false.
    Skip {
        /// For people.
        reason: String,
    },
    /// Fails before it runs.
    Fail {
        /// The class of fault.
        reason: FailureReason,
        /// For people.
        message: String,
    },
}

/// When a planned job starts.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// When its needs are met; [`activate`] decides then.
    AfterNeeds,
    /// Decided now: it needs nothing, or cannot ever run.
    Now(Activation),
}

/// One job of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct JobPlan {
    /// Unique in the run: the key of the job, with its values if it is a variant.
    pub name: String,
    /// Key of the job in the workflow.
    pub base_name: String,
    /// Position in the workflow's `jobs`.
    pub job_index: usize,
    /// Values of the variant for people.
    pub variant_label: Option<String>,
    /// Values of the variant.
    pub matrix: BTreeMap<String, String>,
    /// What people see.
    pub display_name: String,
    /// Edges, one per needed base name.
    pub needs: Vec<Need>,
    /// When it starts.
    pub start: Start,
    /// How many variants may run at once.
    pub max_parallel: Option<u32>,
    /// The first failing variant ends the others.
    pub fail_fast: bool,
    /// Limit from the start of the checkout, in milliseconds.
    pub timeout_ms: Option<u64>,
}

/// A run to create.
#[derive(Clone, Debug, PartialEq)]
pub struct RunPlan {
    /// Title of the run.
    pub run_name: String,
    /// Limit of the whole run, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// Its jobs, in file order, variants in the order of the matrix.
    pub jobs: Vec<JobPlan>,
    /// What went otherwise than written, for the decision trace.
    pub notes: Vec<String>,
}

/// What planning decided.
#[derive(Clone, Debug, PartialEq)]
pub enum Planned {
    /// Create this run.
    Run(RunPlan),
    /// The workflow's condition is false: no run, the decision is recorded.
    Declined {
        /// For the trace.
        reason: String,
    },
}

/// A workflow that cannot become a run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The workflow's condition cannot be evaluated.
    #[error("`if` of workflow `{workflow}`: {problem}")]
    Condition {
        /// Its name.
        workflow: String,
        /// Why.
        problem: String,
    },
    /// More than [`MAX_JOBS`].
    #[error("workflow `{workflow}` makes {count} jobs; at most {MAX_JOBS} are allowed in one run")]
    TooManyJobs {
        /// Its name.
        workflow: String,
        /// How many.
        count: usize,
    },
}

/// The job that [`activate`] and [`job_spec`] look at.
#[derive(Clone, Copy, Debug)]
pub struct JobRef<'a> {
    /// Name with its variant.
    pub name: &'a str,
    /// Position in the workflow's `jobs`.
    pub job_index: usize,
    /// Values of the variant.
    pub matrix: &'a BTreeMap<String, String>,
    /// Results of the jobs it needs.
    pub needs: &'a Needs,
}

/// Plans the run of a workflow that an event has matched.
///
/// # Errors
/// [`PlanError`]. A fault of a single job (matrix, condition, labels) fails that job in the plan, not the plan.
pub fn plan_run(scope: Scope<'_>) -> Result<Planned, PlanError> {
    let _ = scope;
    unimplemented!()
}

/// Decides what a job does whose needs are met. Never panics: a job that is not in the workflow fails with a message.
pub fn activate(scope: Scope<'_>, job: JobRef<'_>) -> Activation {
    let _ = (scope, job);
    unimplemented!()
}

/// What an agent gets for a job. The environment is rendered as far as the orchestrator may.
///
/// # Errors
/// A message for the job's row (reason `expr_error`) when a template cannot be rendered; [`activate`] finds the same before.
pub fn job_spec(scope: Scope<'_>, job: JobRef<'_>) -> Result<JobSpec, String> {
    let _ = (scope, job);
    unimplemented!()
}

/// True when an expression of the workflow, outside of `run` texts, may look at `event.payload`; only then the payload is
/// loaded and shipped.
pub fn wants_payload(workflow: &Workflow) -> bool {
    let _ = workflow;
    unimplemented!()
}

/// What expressions see at dispatch: `event`, `repo`, `ref`, `sha`, `branch`, `inputs`, `vars`, `matrix`, `needs`, `run`.
/// What the event lacks is the empty text, never an unknown name.
pub fn context(scope: Scope<'_>, matrix: &BTreeMap<String, String>, needs: &Needs) -> BTreeMap<String, Json> {
    let _ = (scope, matrix, needs);
    unimplemented!()
}
