//! The steps of a job, one after the other. Knows no session: an agent and a local run use the same engine.

mod check;
mod command;
mod composite;
mod emit;
pub mod environment;
pub mod exec;
pub mod files;
mod generate;
mod group;
mod hooks;
mod init;
mod kept;
mod probe;
mod shell;
mod step;
pub mod tree;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use kici_engine::check::CheckMode;
use kici_engine::expr::{self, Context, Functions};
use kici_engine::jobspec::JobSpec;
use kici_engine::lock::Value;
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_engine::time::Clock;
use kici_sys::cgroup::Usage;
use serde_json::{Map, Value as Json, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::confine::JobConfinement;
use crate::container::Inside;
use crate::mask::Masker;
use crate::ports::Reporter;
use crate::spool::Spool;
use crate::stash::Stash;
use crate::stop::Stop;
use composite::Frame;
use environment::{Environment, Variables};
pub use kept::prepare;
use tree::Tree;

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
    /// Keys of git's configuration for its steps.
    pub git_config: Vec<(String, String)>,
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
    /// What its commands are confined by.
    pub confine: Arc<JobConfinement>,
    /// The container that its commands run in; none: they run on this host.
    pub container: Option<Arc<Inside>>,
    /// Whether what it leaves running is ended with it.
    pub orphan_cleanup: bool,
    /// Its caches and artifacts; none where nothing is kept.
    pub stash: Option<Arc<Stash>>,
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
    /// What it used, where that is counted.
    pub usage: Usage,
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
            usage: Usage::default(),
        }
    }

    /// The same end, judged by what the job used: a failure for want of memory is one of its own kind.
    #[must_use]
    pub fn with_usage(self, usage: Usage) -> Self {
        let failed = self.status == JobStatus::Failed
            && matches!(self.reason, Some(FailureReason::StepFailed | FailureReason::InitFailed));
        if !failed || usage.oom_kills == 0 {
            return Self { usage, ..self };
        }
        let mib = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| (bytes >> 20).to_string());
        let (limit, peak) = (mib(usage.memory_limit_bytes), mib(usage.peak_memory_bytes));
        let message = format!("{}; the job was over its memory limit of {limit} MiB (peak {peak} MiB)", self.message);
        Self { usage, message, reason: Some(FailureReason::OomKilled), ..self }
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
    run.init(reporter, stop).await;
    let mut next = 0;
    while next < job.spec.steps.len() {
        let stop_now = stop.borrow().clone();
        if let Some(outcome) = run.note_stop(&stop_now) {
            run.rest(next, StepStatus::Cancelled, reporter).await;
            let outcome = run.at_end(outcome, reporter, stop).await;
            return run.end(outcome).await;
        }
        let end = group_end(job, next);
        run.enter(next);
        if job.spec.steps[next].group.is_some() {
            run.group(next..end, reporter, stop).await;
        } else {
            let done = run.perform(next, reporter, stop).await;
            run.absorb(done);
        }
        run.leave(end - 1, end);
        next = end;
    }
    // A step that ended well although a cancel came is a real result, and beats it.
    let mut outcome = run.outcome.take().unwrap_or_else(|| run.untroubled());
    match run.outputs() {
        Ok(outputs) => outcome.outputs = outputs,
        Err(message) if outcome.status == JobStatus::Success && !job.spec.check_mode.is_check() => {
            outcome = Outcome::new(JobStatus::Failed, Some(FailureReason::ExprError), message);
        }
        Err(_) => {}
    }
    // Before the hooks, which see how it went.
    let outcome = run.hand_over(outcome, reporter, stop).await;
    let outcome = run.at_end(outcome, reporter, stop).await;
    let outcome = run.save_own(outcome, reporter, stop).await;
    run.end(outcome).await
}

/// Where the step or the group that begins at `from` ends.
fn group_end(job: &Job, from: usize) -> usize {
    let steps = &job.spec.steps;
    match steps[from].group {
        None => from + 1,
        group => from + steps[from..].iter().take_while(|step| step.group == group).count(),
    }
}

/// The state of a job between its steps.
struct Run<'a> {
    job: &'a Job,
    environment: Environment,
    /// Results by step id, as expressions see them.
    results: Map<String, Json>,
    /// The uses of step files, by their place in the job's list.
    frames: Vec<Frame>,
    output_bytes: AtomicUsize,
    /// Steps that found drift and left it.
    drifted: Vec<usize>,
    began: Instant,
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
            environment: Environment::new(&job.host, job.job_facing.iter().cloned()).with_git(&job.git_config),
            results: Map::new(),
            frames: job.spec.composites.iter().map(|_| Frame::default()).collect(),
            output_bytes: AtomicUsize::new(0),
            drifted: Vec::new(),
            began: Instant::now(),
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

    /// Takes in what a step brought about.
    fn absorb(&mut self, done: step::Done) {
        if let Some(stop) = &done.stopped {
            self.stopping = true;
            self.outcome.get_or_insert_with(|| Outcome::of_stop(stop));
        }
        if done.deadline && !self.stopping {
            self.deadline_reached();
        }
        self.note(&done);
        if let Some(failure) = done.failure {
            self.outcome.get_or_insert(failure);
        }
        if done.drift {
            self.drifted.push(done.index);
        }
        self.environment.take(done.exports);
        self.environment.extend_path(&done.path);
        self.trees.extend(done.trees);
    }

    /// The end of a job without a failure: a success, unless drift counts as one.
    fn untroubled(&self) -> Outcome {
        if self.drifted.is_empty() || self.job.spec.check_mode != CheckMode::CheckFailOnDrift {
            return Outcome::new(JobStatus::Success, None, "");
        }
        let names: Vec<String> = self.drifted.iter().map(|at| step::plain_name(&self.job.spec.steps[*at])).collect();
        let message = self.job.masker.mask_text(&format!("drift found by: {}", names.join(", ")));
        Outcome::new(JobStatus::Failed, Some(FailureReason::DriftDetected), message)
    }

    fn context(&self, env: &Variables, at: Option<u32>) -> Context {
        let mut context = Context::from(self.job.spec.context.clone());
        let status = match self.standing() {
            expr::Outcome::Success => "success",
            expr::Outcome::Failure => "failed",
            expr::Outcome::Cancelled => "cancelled",
        };
        let frame = self.frame_at(at);
        if let Some(frame) = frame {
            context.set("inputs", json!(frame.inputs));
        }
        context
            .set("agent", self.job.agent.clone())
            .set("env", json!(env))
            .set("steps", frame.map_or_else(|| self.results.clone(), |frame| frame.results.clone()))
            .set("job", json!({ "status": status }));
        context
    }

    fn functions(&self) -> Functions {
        let hash_files = match &self.job.container {
            Some(inside) => crate::hash_files::in_container(inside),
            None => crate::hash_files::in_dir(&self.job.workspace),
        };
        Functions { outcome: Some(self.standing()), hash_files: Some(hash_files) }
    }

    fn render(&self, value: &Value, env: &Variables, at: Option<u32>) -> Result<String, String> {
        match value {
            Value::Static { r#static } => Ok(r#static.clone()),
            Value::Template { template, .. } => {
                expr::render(template, &self.context(env, at), &self.functions()).map_err(|error| error.to_string())
            }
        }
    }

    fn render_all(
        &self,
        values: &BTreeMap<String, Value>,
        env: &Variables,
        at: Option<u32>,
    ) -> Result<Variables, String> {
        values.iter().map(|(name, value)| Ok((name.clone(), self.render(value, env, at)?))).collect()
    }

    /// The environment of the job, and of the use of a step file in it.
    fn seen_at(&self, at: Option<u32>) -> Result<Variables, String> {
        let spec = &self.job.spec;
        let below = self.environment.of_step([&spec.variables], []).0;
        let mut layers = vec![spec.variables.clone(), self.render_all(&spec.env, &below, None)?];
        layers.extend(self.frame_at(at).map(|frame| frame.env.clone()));
        Ok(self.environment.of_step(&layers, []).0)
    }

    /// Reports the steps from `from` on without running them.
    async fn rest(&self, from: usize, status: StepStatus, reporter: &dyn Reporter) {
        for index in from..self.job.spec.steps.len() {
            self.report_without_run(index, status, None, reporter).await;
        }
    }

    fn outputs(&self) -> Result<BTreeMap<String, String>, String> {
        let env = self.environment.of_step([&self.job.spec.variables], []).0;
        self.render_all(&self.job.spec.outputs, &env, None)
    }

    async fn end(mut self, mut outcome: Outcome) -> Outcome {
        if self.job.orphan_cleanup || outcome.status == JobStatus::Cancelled {
            for tree in &mut self.trees {
                outcome.strays_killed += tree.kill().await;
            }
        }
        outcome
    }
}

/// The limit of a step, which is shorter once the job is on its way out.
fn limit_of(limit: Duration, after_stop: bool) -> Duration {
    if after_stop { limit.min(AFTER_CANCEL_LIMIT) } else { limit }
}

/// How a command ended, in words.
pub(crate) fn describe(status: std::process::ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended in an unknown way".to_owned(),
    }
}

#[cfg(test)]
mod composite_tests;
#[cfg(test)]
mod emit_tests;
#[cfg(test)]
mod kept_tests;
#[cfg(test)]
mod language_tests;
#[cfg(test)]
mod stop_tests;
#[cfg(test)]
mod tests;
