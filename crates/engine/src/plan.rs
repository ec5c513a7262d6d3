//! From a workflow and an event to a run: which jobs it has, which of them start at once, and what an agent gets.
//!
//! Three steps, all pure: [`plan_run`] when the event is processed, [`activate`] each time the needs of a job are met, and
//! [`job_spec`] when a job is offered to an agent. What is decided once is stored by the caller; what depends on the results
//! of other jobs is decided in [`activate`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::concurrency::SlotAsk;
use crate::event::Event;
use crate::expr::{self, Context, Expr, ExprError, Functions};
use crate::hosts::{DEFAULT_MAX_HOSTS, Fanout, Host, HostMatcher, HostSelector, targets};
use crate::ids::{AgentId, RunId};
use crate::lock::{Job, Matrix, MatrixTable, Need, Selector, Value, Workflow};
use crate::matrix::{self, Variant};
use crate::state::{FailureReason, JobStatus, words};

mod activate;
mod containers;
mod context;
mod gates;
mod members;

use activate::broken_rules;
pub use activate::{activate, checkout_of, input_variables, job_spec};
pub use context::{context, wants_payload};
pub use gates::held_back;
pub use members::{merge, plan_members};

use context::{json, rendered};

/// Most jobs of one run, variants included; jobs of a fan-out over hosts are counted apart.
pub const MAX_JOBS: usize = 1000;
/// Most jobs of one run that are pinned to hosts.
pub const MAX_HOST_JOBS: usize = 4096;
/// Longest title of a run or job, in characters.
const MAX_TITLE_CHARS: usize = 200;

/// The run itself, as expressions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunInfo<'a> {
    /// Its id.
    pub id: RunId,
    /// Repository whose code it runs, `owner/name`. An event may tell of another one.
    pub repo: &'a str,
    /// The full ref that it runs for; none for a commit without one. An event may tell of another one.
    pub git_ref: Option<&'a str>,
    /// The commit that it runs. An event may tell of another one.
    pub sha: &'a str,
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
    pub run: RunInfo<'a>,
}

impl<'a> Scope<'a> {
    /// The branch of the code that runs: the event's where the run is for the event's ref, else that of the run's ref.
    fn branch(&self) -> Option<&'a str> {
        match self.run.git_ref {
            own if own == self.event.git_ref.as_deref() => self.event.branch(),
            own => own.and_then(|own| own.strip_prefix("refs/heads/")),
        }
    }
}

/// What became of a job that others need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeedResult {
    /// Aggregate status, see [`crate::needs::aggregate`].
    pub status: JobStatus,
    /// Its outputs, see [`crate::needs::merge_outputs`].
    #[serde(default)]
    pub outputs: BTreeMap<String, String>,
    /// Of a job that ran on hosts.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<HostResults>,
}

/// What became of a `runs_on_all` job, host by host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostResults {
    /// Outputs by host.
    pub by_host: BTreeMap<String, BTreeMap<String, String>>,
    /// Which hosts ended how.
    pub summary: HostSummary,
}

/// The hosts of a `runs_on_all` job by how its job on them ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSummary {
    /// How many hosts.
    pub total: usize,
    /// It succeeded.
    pub succeeded_hosts: Vec<String>,
    /// It failed.
    pub failed_hosts: Vec<String>,
    /// It did not run: the host was out of contact, or an earlier one failed.
    pub skipped_hosts: Vec<String>,
    /// It was cancelled.
    pub cancelled_hosts: Vec<String>,
}

impl HostResults {
    /// From the jobs of a fan-out in their order; none of none.
    pub fn collect<'a>(
        jobs: impl IntoIterator<Item = (&'a AgentId, JobStatus, &'a BTreeMap<String, String>)>,
    ) -> Option<Self> {
        let mut all = Self::default();
        for (host, status, outputs) in jobs {
            let host = host.to_string();
            all.summary.total += 1;
            let list = match status {
                JobStatus::Success => &mut all.summary.succeeded_hosts,
                JobStatus::Skipped => &mut all.summary.skipped_hosts,
                JobStatus::Cancelled => &mut all.summary.cancelled_hosts,
                _ => &mut all.summary.failed_hosts,
            };
            list.push(host.clone());
            all.by_host.insert(host, outputs.clone());
        }
        (all.summary.total > 0).then_some(all)
    }
}

/// The known hosts when a run is planned.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// All of them.
    pub hosts: Vec<Host>,
    /// Most hosts of one job.
    pub max_hosts: usize,
}

impl Default for Fleet {
    fn default() -> Self {
        Self { hosts: Vec::new(), max_hosts: DEFAULT_MAX_HOSTS }
    }
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
        /// Only this agent may.
        pinned: Option<AgentId>,
        /// It must get a slot of this group first.
        slot: Option<SlotAsk>,
    },
    /// Emits an event of this name for the workflows of its repository and waits for the runs that it starts.
    Invoke {
        /// Its name.
        event: String,
        /// Its document.
        payload: serde_json::Value,
        /// It must get a slot of this group first.
        slot: Option<SlotAsk>,
    },
    /// Does not run until somebody lets it.
    Hold {
        /// For people.
        reason: String,
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
    /// When its needs are met, and for a job on a host when its turn comes; [`activate`] decides then.
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
    /// Its place in a fan-out over hosts.
    pub fanout: Option<Fanout>,
    /// What people see.
    pub display_name: String,
    /// Edges, one per needed base name.
    pub needs: Vec<Need>,
    /// Edges to groups whose jobs do not exist yet.
    pub groups: Vec<GroupEdge>,
    /// What it does, where it does not run steps only.
    pub kind: Option<JobKind>,
    /// When it starts.
    pub start: Start,
    /// How many variants may run at once.
    pub max_parallel: Option<u32>,
    /// The first failing variant ends the others.
    pub fail_fast: bool,
    /// Limit from the start of the checkout, in milliseconds.
    pub timeout_ms: Option<u64>,
}

/// A need on the jobs of a group that do not exist yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupEdge {
    /// The group.
    pub group: String,
    /// Key of the job that makes its jobs.
    pub generator: String,
    /// Statuses that satisfy it.
    pub run_on: Vec<JobStatus>,
}

words! {
    /// A job that does more, or other things, than running steps.
    JobKind("job kind") {
        /// Makes other jobs.
        Generate = "generate",
        /// Starts other workflows and waits for them; no agent has it.
        Invoke = "invoke",
    }
}

impl JobKind {
    /// The kind of a job of a workflow.
    pub fn of(job: &Job) -> Option<Self> {
        match (&job.generate, &job.invoke) {
            (Some(_), _) => Some(Self::Generate),
            (None, Some(_)) => Some(Self::Invoke),
            (None, None) => None,
        }
    }
}

/// A run to create.
#[derive(Clone, Debug, PartialEq)]
pub struct RunPlan {
    /// Title of the run.
    pub run_name: String,
    /// Limit of the whole run, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// It must get a slot of this group before anything runs.
    pub concurrency: Option<SlotAsk>,
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
    /// The workflow's concurrency group cannot be named.
    #[error("`concurrency` of workflow `{workflow}`: {problem}")]
    Concurrency {
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
    /// Its place in a fan-out over hosts.
    pub fanout: Option<&'a Fanout>,
    /// Results of the jobs it needs.
    pub needs: &'a Needs,
}

/// True when planning must know the hosts.
pub fn wants_hosts(workflow: &Workflow) -> bool {
    workflow.jobs.iter().any(|job| job.runs_on_all.is_some())
}

/// Plans the run of a workflow that an event has matched. The hosts of a `runs_on_all` job are settled here, so that a run
/// has all its jobs from the start; whether each host can be reached is asked when its turn comes.
///
/// # Errors
/// [`PlanError`]. A fault of a single job (matrix, condition, labels) fails that job in the plan, not the plan.
pub fn plan_run(scope: Scope<'_>, fleet: &Fleet) -> Result<Planned, PlanError> {
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
    let concurrency = context::slot(workflow.concurrency.as_ref(), &context)
        .map_err(|problem| PlanError::Concurrency { workflow: workflow.name.clone(), problem })?;
    match broken_rules(&workflow.rules, &context) {
        Ok(None) => {}
        Ok(Some(reason)) => return Ok(Planned::Declined { reason }),
        Err(problem) => return Err(PlanError::Rules { workflow: workflow.name.clone(), problem }),
    }
    let mut notes = Vec::new();
    let run_name = run_name(scope, &context, &mut notes);
    let mut jobs: Vec<JobPlan> = Vec::new();
    let mut on_hosts = 0;
    for (index, job) in workflow.jobs.iter().enumerate() {
        let (parts, fault) = match parts(job, &context, fleet) {
            Ok(parts) => (parts, None),
            Err(fault) => (vec![Part::Whole], Some(fault)),
        };
        on_hosts += parts.iter().filter(|part| matches!(part, Part::Host(_))).count();
        let count = jobs.len() + parts.len();
        if count - on_hosts > MAX_JOBS || on_hosts > MAX_HOST_JOBS {
            return Err(PlanError::TooManyJobs { workflow: workflow.name.clone(), count });
        }
        for part in parts {
            jobs.push(plan_job(workflow, index, part, fault.clone(), &mut context));
        }
        context.set("matrix", json(&BTreeMap::<String, String>::new()));
    }
    Ok(Planned::Run(RunPlan { run_name, timeout_ms: workflow.timeout_ms, concurrency, jobs, notes }))
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

/// What keeps a job from ever running.
type Fault = (FailureReason, String);

/// One of the jobs that a job of the workflow becomes.
enum Part {
    /// It is one job.
    Whole,
    /// A combination of its matrix.
    Variant(Variant),
    /// A host that it runs on.
    Host(Fanout),
}

/// Plans one job, variant or job on a host. Leaves its matrix in `context`.
fn plan_job(workflow: &Workflow, index: usize, part: Part, fault: Option<Fault>, context: &mut Context) -> JobPlan {
    let job = &workflow.jobs[index];
    let (name, label, matrix, fanout) = match part {
        Part::Whole => (job.name.clone(), None, BTreeMap::new(), None),
        Part::Variant(variant) => (variant.job_name(&job.name), Some(variant.label), variant.values, None),
        Part::Host(fanout) => {
            let host = fanout.host.to_string();
            (format!("{} ({host})", job.name), Some(host), BTreeMap::new(), Some(fanout))
        }
    };
    context.set("matrix", json(&matrix));
    if let Some(fanout) = &fanout {
        context.set("fanout", fanout.context());
    }
    let start = match fault {
        Some((reason, message)) => Start::Now(Activation::Fail { reason, message }),
        None if job.needs.is_empty() && job.needs_groups.is_empty() && fanout.is_none() => {
            Start::Now(activate::decide(workflow, job, context, None))
        }
        None => Start::AfterNeeds,
    };
    JobPlan {
        display_name: display_name(job, &name, label.as_deref(), context),
        name,
        base_name: job.name.clone(),
        job_index: index,
        variant_label: label,
        matrix,
        fanout,
        needs: job.needs.clone(),
        groups: job
            .needs_groups
            .iter()
            .map(|need| GroupEdge {
                group: need.group.clone(),
                // The compiler lets no group through that nobody makes.
                generator: members::generator_of(workflow, &need.group)
                    .map_or_else(String::new, |job| job.name.clone()),
                run_on: need.run_on.clone(),
            })
            .collect(),
        kind: JobKind::of(job),
        start,
        max_parallel: job.max_parallel,
        fail_fast: job.fail_fast,
        timeout_ms: job.timeout_ms,
    }
}

/// The jobs that a job of the workflow becomes.
fn parts(job: &Job, context: &Context, fleet: &Fleet) -> Result<Vec<Part>, Fault> {
    if let Some(selector) = &job.runs_on_all {
        return hosts(job, selector, fleet);
    }
    let fault = |message: String| (FailureReason::ExprError, message);
    let computed;
    let table = match &job.matrix {
        None => return Ok(vec![Part::Whole]),
        Some(Matrix::Table(table)) => table,
        Some(Matrix::Expr(text)) => {
            computed = matrix_of(text, context).map_err(fault)?;
            &computed
        }
    };
    let variants = matrix::expand(table).map_err(|error| fault(error.to_string()))?;
    Ok(variants.into_iter().map(Part::Variant).collect())
}

fn hosts(job: &Job, selector: &HostSelector, fleet: &Fleet) -> Result<Vec<Part>, Fault> {
    let fault = |message: String| (FailureReason::NoHosts, format!("runs_on_all: {message}"));
    let matcher = HostMatcher::compile(selector).map_err(|error| fault(error.to_string()))?;
    let found = targets(&matcher, job.include_uninitialized, &fleet.hosts);
    if found.len() > fleet.max_hosts {
        return Err(fault(format!(
            "{} hosts match; at most {} are allowed, see `roster.max_fanout_hosts`",
            found.len(),
            fleet.max_hosts
        )));
    }
    if found.is_empty() {
        let known = fleet.hosts.len();
        return Err(fault(format!(
            "none of the {known} known hosts matches; `host preview` shows what a selector means"
        )));
    }
    let total = u32::try_from(found.len()).unwrap_or(u32::MAX);
    Ok((0..).zip(found).map(|(index, host)| Part::Host(Fanout { host: host.agent_id.clone(), index, total })).collect())
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
    let tells_apart = matches!(value, Value::Template { template, .. }
        if template.contains("matrix") || template.contains("fanout"));
    match label {
        Some(label) if !tells_apart => format!("{text} ({label})"),
        _ => text,
    }
}

#[cfg(test)]
mod tests;
