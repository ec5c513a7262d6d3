//! From a workflow and an event to a run: which jobs it has, which of them start at once, and what an agent gets.
//!
//! Three steps, all pure: [`plan_run`] when the event is processed, [`activate`] each time the needs of a job are met, and
//! [`job_spec`] when a job is offered to an agent. What is decided once is stored by the caller; what depends on the results
//! of other jobs is decided in [`activate`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::event::Event;
use crate::expr::{self, Context, Expr, ExprError, Functions};
use crate::ids::RunId;
use crate::lock::{Job, Matrix, MatrixTable, Need, Selector, Value, Workflow};
use crate::matrix::{self, Variant};
use crate::state::{FailureReason, JobStatus};

mod activate;
mod context;

use activate::broken_rules;
pub use activate::{activate, input_variables, job_spec};
pub use context::{context, wants_payload};

use context::{json, rendered};

/// Most jobs of one run, variants included.
pub const MAX_JOBS: usize = 1000;
/// Longest title of a run or job, in characters.
const MAX_TITLE_CHARS: usize = 200;

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
    /// A rule of the workflow cannot be evaluated.
    #[error("`rules` of workflow `{workflow}`: {problem}")]
    Rules {
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
    let workflow = scope.workflow;
    let mut context = context(scope, &BTreeMap::new(), &Needs::new());
    if let Some(condition) = &workflow.condition {
        let verdict = expr::eval_bool(condition, &context, &Functions::default());
        let fault =
            |error: ExprError| PlanError::Condition { workflow: workflow.name.clone(), problem: error.to_string() };
        if !verdict.map_err(fault)? {
            return Ok(Planned::Declined { reason: format!("`if` is false: {condition}") });
        }
    }
    match broken_rules(&workflow.rules, &context) {
        Ok(None) => {}
        Ok(Some(reason)) => return Ok(Planned::Declined { reason }),
        Err(problem) => return Err(PlanError::Rules { workflow: workflow.name.clone(), problem }),
    }
    let mut notes = Vec::new();
    let run_name = run_name(scope, &context, &mut notes);
    let mut jobs = Vec::new();
    for (index, job) in workflow.jobs.iter().enumerate() {
        let (variants, fault) = match variants(job, &context) {
            Ok(variants) => (variants, None),
            Err(message) => (vec![None], Some(message)),
        };
        if jobs.len() + variants.len() > MAX_JOBS {
            let count = jobs.len() + variants.len();
            return Err(PlanError::TooManyJobs { workflow: workflow.name.clone(), count });
        }
        for variant in variants {
            jobs.push(plan_job(workflow, index, variant, fault.clone(), &mut context));
        }
        context.set("matrix", json(&BTreeMap::<String, String>::new()));
    }
    Ok(Planned::Run(RunPlan { run_name, timeout_ms: workflow.timeout_ms, jobs, notes }))
}

/// As written, else the first line of the head commit's message, else the name of the workflow. A title never fails a run.
fn run_name(scope: Scope<'_>, context: &Context, notes: &mut Vec<String>) -> String {
    if let Some(value) = &scope.workflow.run_name {
        match rendered(value, context).map(|text| title(&text)) {
            Ok(Some(text)) => return text,
            Ok(None) => notes.push("run_name is empty".to_owned()),
            Err(error) => notes.push(format!("run_name: {error}")),
        }
    }
    let message = scope.event.commit_message.as_deref().and_then(|text| title(text.trim().lines().next()?));
    message.unwrap_or_else(|| scope.workflow.name.clone())
}

/// One line for people, at most [`MAX_TITLE_CHARS`]; none when nothing is left.
fn title(text: &str) -> Option<String> {
    let line: String =
        text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_TITLE_CHARS).collect();
    (!line.is_empty()).then_some(line)
}

/// Plans one job or variant. `fault` is what keeps it from ever running. Leaves its matrix in `context`.
fn plan_job(
    workflow: &Workflow,
    index: usize,
    variant: Option<Variant>,
    fault: Option<String>,
    context: &mut Context,
) -> JobPlan {
    let job = &workflow.jobs[index];
    let name = variant.as_ref().map_or_else(|| job.name.clone(), |variant| variant.job_name(&job.name));
    let (label, matrix) = variant.map_or_else(Default::default, |variant| (Some(variant.label), variant.values));
    context.set("matrix", json(&matrix));
    let start = match fault {
        Some(message) => Start::Now(Activation::Fail { reason: FailureReason::ExprError, message }),
        None if job.needs.is_empty() => Start::Now(activate::decide(workflow, job, context)),
        None => Start::AfterNeeds,
    };
    JobPlan {
        display_name: display_name(job, &name, label.as_deref(), context),
        name,
        base_name: job.name.clone(),
        job_index: index,
        variant_label: label,
        matrix,
        needs: job.needs.clone(),
        start,
        max_parallel: job.max_parallel,
        fail_fast: job.fail_fast,
        timeout_ms: job.timeout_ms,
    }
}

/// The variants of a job; one that is none where it has no matrix.
fn variants(job: &Job, context: &Context) -> Result<Vec<Option<Variant>>, String> {
    let computed;
    let table = match &job.matrix {
        None => return Ok(vec![None]),
        Some(Matrix::Table(table)) => table,
        Some(Matrix::Expr(text)) => {
            computed = matrix_of(text, context)?;
            &computed
        }
    };
    let variants = matrix::expand(table).map_err(|error| error.to_string())?;
    Ok(variants.into_iter().map(Some).collect())
}

fn matrix_of(text: &str, context: &Context) -> Result<MatrixTable, String> {
    let trimmed = text.trim();
    let source = trimmed.strip_prefix("${{").and_then(|rest| rest.strip_suffix("}}")).unwrap_or(trimmed);
    let expr = Expr::parse(source.trim()).map_err(|error| format!("matrix: {error}"))?;
    if expr.references().iter().any(|reference| reference.root == "needs") {
        return Err("matrix: it is evaluated when the run is planned, before `needs` has results; \
                    build it from `event`, `inputs` or `vars`"
            .to_owned());
    }
    let value = expr.eval_json(context, &Functions::default()).map_err(|error| format!("matrix: {error}"))?;
    matrix::from_json(&value).map_err(|error| error.to_string())
}

/// A fixed title is the same for all variants, so their values are added to it.
fn display_name(job: &Job, name: &str, label: Option<&str>, context: &Context) -> String {
    let Some(value) = &job.display_name else { return name.to_owned() };
    let Some(text) = rendered(value, context).ok().and_then(|text| title(&text)) else { return name.to_owned() };
    let tells_apart = matches!(value, Value::Template { template, .. } if template.contains("matrix"));
    match label {
        Some(label) if !tells_apart => format!("{text} ({label})"),
        _ => text,
    }
}

#[cfg(test)]
mod tests;
