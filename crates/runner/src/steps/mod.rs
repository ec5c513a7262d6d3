//! The steps of a job, one after the other. Knows no session: an agent and a local run use the same engine.

pub mod environment;
pub mod exec;
pub mod files;
mod shell;
mod step;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kici_engine::expr::{self, Context, Functions};
use kici_engine::jobspec::JobSpec;
use kici_engine::lock::Value;
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_engine::time::Clock;
use kici_sys::process::Tree;
use serde_json::{Map, Value as Json, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::key::step_key;
use crate::mask::Masker;
use crate::ports::{Reporter, StepReport};
use crate::spool::Spool;
use crate::stop::Stop;
use environment::{Environment, Variables};

/// Limit of a step that runs because it asked to be run after a cancel or a timeout.
pub const AFTER_CANCEL_LIMIT: Duration = Duration::from_secs(300);
/// Outputs of all steps of a job, in bytes.
pub const MAX_JOB_OUTPUT_BYTES: usize = 8 * 1024 * 1024;
/// Outputs of one step, in bytes.
pub const MAX_STEP_OUTPUT_BYTES: usize = 1024 * 1024;

/// A job that is ready for its first step.
pub struct Job {
    /// What to run.
    pub spec: JobSpec,
    /// The checkout; steps start here.
    pub workspace: PathBuf,
    /// A private directory outside the checkout.
    pub scratch: PathBuf,
    /// Allowed variables of the host.
    pub host: Variables,
    /// The `KICI_*` variables of the job.
    pub job_facing: Vec<(&'static str, String)>,
    /// What expressions see as `agent`.
    pub agent: Json,
    /// Values that must not be shown.
    pub masker: Arc<Masker>,
    /// Its logs.
    pub spool: Arc<Spool>,
    /// Now.
    pub clock: Arc<dyn Clock>,
    /// Limit of a step that names none.
    pub step_timeout: Duration,
    /// When the job is over.
    pub deadline: Option<Instant>,
}

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// `success`, `failed` or `cancelled`.
    pub status: JobStatus,
    /// Why not success.
    pub reason: Option<FailureReason>,
    /// In one line.
    pub message: String,
    /// Outputs of the job.
    pub outputs: BTreeMap<String, String>,
    /// Exit code of the step that failed it.
    pub exit_code: Option<i32>,
    /// Signal that ended that step.
    pub signal: Option<i32>,
    /// Key of that step as `kind/owner/ordinal`.
    pub failed_step: String,
    /// Processes that were left behind and ended.
    pub strays_killed: u32,
    /// The job is somebody else's: nothing may be reported.
    pub abandoned: bool,
}

impl Outcome {
    /// An end that no step brought about.
    pub fn new(status: JobStatus, reason: Option<FailureReason>, message: impl Into<String>) -> Self {
        Self {
            status,
            reason,
            message: message.into(),
            outputs: BTreeMap::new(),
            exit_code: None,
            signal: None,
            failed_step: String::new(),
            strays_killed: 0,
            abandoned: false,
        }
    }

    /// What a stopped job ends as.
    pub fn of_stop(stop: &Stop) -> Self {
        match stop {
            Stop::Graceful { reason, message, .. } | Stop::Force { reason, message } => {
                let class = reason.class();
                let cancelled = class == kici_engine::state::FailureClass::Cancelled;
                let status = if cancelled { JobStatus::Cancelled } else { JobStatus::Failed };
                Self::new(status, Some(*reason), message.clone())
            }
            Stop::Run | Stop::Abandon { .. } => {
                Self { abandoned: true, ..Self::new(JobStatus::Cancelled, None, "given to another agent") }
            }
        }
    }
}

/// Runs the steps, ends what they left behind, and renders the outputs of the job.
pub async fn run(job: &Job, reporter: &dyn Reporter, stop: &mut watch::Receiver<Stop>) -> Outcome {
    let mut run = Run::new(job);
    for index in 0..job.spec.steps.len() {
        let stop_now = stop.borrow().clone();
        if let Some(outcome) = run.note_stop(&stop_now) {
            run.rest(index, StepStatus::Cancelled, reporter).await;
            return run.end(outcome).await;
        }
        run.step(index, reporter, stop).await;
    }
    // A step that ended well although a cancel came is a real result, and beats it.
    let mut outcome = run.outcome.take().unwrap_or_else(|| Outcome::new(JobStatus::Success, None, ""));
    match run.outputs() {
        Ok(outputs) => outcome.outputs = outputs,
        Err(message) if outcome.status == JobStatus::Success => {
            outcome = Outcome::new(JobStatus::Failed, Some(FailureReason::ExprError), message);
        }
        Err(_) => {}
    }
    run.end(outcome).await
}

/// The state of a job between its steps.
struct Run<'a> {
    job: &'a Job,
    environment: Environment,
    /// Results by step id, as expressions see them.
    results: Map<String, Json>,
    output_bytes: usize,
    /// Set by the first thing that made the job other than a success.
    outcome: Option<Outcome>,
    /// True once the job is on its way out by a cancel or its deadline.
    stopping: bool,
    trees: Vec<Tree>,
}

impl<'a> Run<'a> {
    fn new(job: &'a Job) -> Self {
        Self {
            job,
            environment: Environment::new(&job.host, job.job_facing.iter().cloned()),
            results: Map::new(),
            output_bytes: 0,
            outcome: None,
            stopping: false,
            trees: Vec::new(),
        }
    }

    /// What expressions call `success()`, `failure()` and `cancelled()`.
    fn standing(&self) -> expr::Outcome {
        match &self.outcome {
            None => expr::Outcome::Success,
            Some(outcome) if outcome.status == JobStatus::Cancelled => expr::Outcome::Cancelled,
            Some(_) => expr::Outcome::Failure,
        }
    }

    /// Between two steps: a graceful stop lets the steps go on that ask for it; a forced one ends the job here.
    fn note_stop(&mut self, stop: &Stop) -> Option<Outcome> {
        match stop {
            Stop::Run => {
                if !self.stopping && self.job.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    self.deadline_reached();
                }
                None
            }
            Stop::Graceful { more_steps: true, .. } => {
                if !self.stopping {
                    self.stopping = true;
                    self.outcome = Some(Outcome::of_stop(stop));
                }
                None
            }
            Stop::Graceful { .. } | Stop::Force { .. } | Stop::Abandon { .. } => Some(match self.outcome.take() {
                Some(earlier) if !matches!(stop, Stop::Abandon { .. }) => earlier,
                _ => Outcome::of_stop(stop),
            }),
        }
    }

    fn deadline_reached(&mut self) {
        self.stopping = true;
        let message = "the job ran longer than its limit";
        self.outcome = Some(Outcome::new(JobStatus::Failed, Some(FailureReason::JobTimeout), message));
    }

    fn fail(&mut self, outcome: Outcome) {
        self.outcome.get_or_insert(outcome);
    }

    fn context(&self, env: &Variables) -> Context {
        let mut context = Context::from(self.job.spec.context.clone());
        let status = match self.standing() {
            expr::Outcome::Success => "success",
            expr::Outcome::Failure => "failed",
            expr::Outcome::Cancelled => "cancelled",
        };
        context
            .set("agent", self.job.agent.clone())
            .set("env", json!(env))
            .set("steps", self.results.clone())
            .set("job", json!({ "status": status }));
        context
    }

    fn functions(&self) -> Functions {
        Functions { outcome: Some(self.standing()), hash_files: Some(crate::hash_files::in_dir(&self.job.workspace)) }
    }

    fn render(&self, value: &Value, env: &Variables) -> Result<String, String> {
        match value {
            Value::Static { r#static } => Ok(r#static.clone()),
            Value::Template { template, .. } => {
                expr::render(template, &self.context(env), &self.functions()).map_err(|error| error.to_string())
            }
        }
    }

    fn render_all(&self, values: &BTreeMap<String, Value>, env: &Variables) -> Result<Variables, String> {
        values.iter().map(|(name, value)| Ok((name.clone(), self.render(value, env)?))).collect()
    }

    /// Reports the steps from `from` on without running them.
    async fn rest(&self, from: usize, status: StepStatus, reporter: &dyn Reporter) {
        for (index, step) in self.job.spec.steps.iter().enumerate().skip(from) {
            let name = step::plain_name(step);
            reporter.step(StepReport::new(step_key(index), name, status, self.job.clock.now())).await;
        }
    }

    fn outputs(&self) -> Result<BTreeMap<String, String>, String> {
        let env = self.environment.of_step([&self.job.spec.variables], []).0;
        self.render_all(&self.job.spec.outputs, &env)
    }

    async fn end(mut self, mut outcome: Outcome) -> Outcome {
        for tree in &mut self.trees {
            outcome.strays_killed += tree.kill().await;
        }
        outcome
    }
}

/// How a command ended, in words.
fn describe(status: std::process::ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended in an unknown way".to_owned(),
    }
}

#[cfg(test)]
mod tests;
