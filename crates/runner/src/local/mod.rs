//! A run without an orchestrator: the jobs of one workflow, one after the other, in a directory of this machine.
//!
//! The plan, the conditions, the needs and the steps are those of an orchestrator and its agents. What is missing: other
//! machines (labels are rendered and not looked at), the checkout (steps work on the files as they are), and everything that
//! outlives the program.

mod board;
mod ignored;
mod invoke;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use kici_engine::compile::compile_fragment;
use kici_engine::event::Event;
use kici_engine::ids::{IdSource, JobId, RunId};
use kici_engine::lock::{self, Workflow};
use kici_engine::plan::{self, JobRef, PlanError, Planned, RunInfo, Scope};
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_engine::time::Clock;
pub use kici_protocol::agent::StepKey;
use kici_sys::process::ProcessId;
use serde_json::Value as Json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

pub use board::{Board, Entry};

use crate::mask::Masker;
use crate::ports::{Emission, Emitted, Generated, Reporter, StepReport};
use crate::spool::{Limits, Next, Spool};
use crate::stash::Stash;
use crate::stash::local::{OfJob, Shelf};
use crate::steps::environment::{HOST_VARIABLES, Variables, job_facing};
use crate::steps::{self, Outcome};
use crate::stop::{Stop, strengthen};

/// Log bytes of one job that wait for the screen before its commands are paused.
const UNSHOWN_BYTES: u64 = 8 << 20;
/// Log bytes that are shown at once.
const SHOW_BYTES: usize = 256 << 10;

/// Where and how jobs run.
#[derive(Clone)]
pub struct Settings {
    /// The files: steps start here. A job without checkout gets an empty directory instead.
    pub workspace: PathBuf,
    /// A private, empty directory outside of it. The caller deletes it.
    pub scratch: PathBuf,
    /// Variables that steps inherit, see [`host_variables`].
    pub host: Variables,
    /// Now.
    pub clock: Arc<dyn Clock>,
    /// Fresh ids.
    pub ids: Arc<dyn IdSource>,
    /// Limit of a step that names none.
    pub step_timeout: Duration,
    /// Only this job and what it needs.
    pub only: Option<String>,
    /// The workflows of the repository; those that listen to the event of a job with `invoke` run as part of it.
    pub workflows: Arc<Vec<Workflow>>,
}

/// Hears how a local run goes.
pub trait Screen: Send + Sync {
    /// A word about the run as a whole, before its first job.
    fn note(&self, text: &str);
    /// A job starts.
    fn job_starts(&self, job: &Entry);
    /// A step has a new status.
    fn step(&self, job: &str, report: &StepReport);
    /// Finished, masked lines of a step: `<microseconds> <o|e|m> <text>\n` each.
    fn lines(&self, job: &str, step: &StepKey, lines: &[u8]);
    /// A job has ended.
    fn job_ends(&self, job: &Entry, took: Duration);
}

/// How a local run ended.
#[derive(Debug)]
pub struct Summary {
    /// Its status.
    pub status: RunStatus,
    /// Its jobs, in the order of the plan.
    pub jobs: Vec<Ended>,
}

/// A job of a run that has ended.
#[derive(Debug)]
pub struct Ended {
    /// What became of it.
    pub entry: Entry,
    /// How long it ran; none when it did not start.
    pub took: Option<Duration>,
}

/// Why there was no run.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The workflow cannot become a run.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The workflow's condition is false.
    #[error("workflow `{workflow}` declines: {reason}")]
    Declined {
        /// Its name.
        workflow: String,
        /// Why.
        reason: String,
    },
    /// `only` names no job.
    #[error("{0}")]
    NoSuchJob(String),
    /// A directory or log of the run cannot be made.
    #[error("{path}: {error}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// The variables of an environment that steps may see, as on an agent: a fixed list and the names of `pass`.
pub fn host_variables(all: impl IntoIterator<Item = (String, String)>, pass: &[String]) -> Variables {
    let allowed = |name: &String| HOST_VARIABLES.contains(&name.as_str()) || pass.contains(name);
    all.into_iter().filter(|(name, _)| allowed(name) && !name.starts_with("KICI_")).collect()
}

/// Runs the jobs of `workflow` for `event`, one after the other. Told to stop, it ends the running job as an agent would and
/// cancels the others.
///
/// # Errors
/// [`LocalError`] when nothing was run, or when the disk fails in between.
pub async fn run(
    settings: &Settings,
    workflow: &Workflow,
    event: &Event,
    screen: &dyn Screen,
    stop: &watch::Receiver<Stop>,
) -> Result<Summary, LocalError> {
    let repo = event.repo.as_deref().unwrap_or_default();
    let (git_ref, sha) = (event.git_ref.as_deref(), event.sha.as_deref().unwrap_or_default());
    let run = RunInfo { id: RunId::mint(&*settings.ids), repo, git_ref, sha, attempt: 1 };
    run_of(settings, Scope { workflow, event, run }, screen, stop).await
}

async fn run_of(
    settings: &Settings,
    scope: Scope<'_>,
    screen: &dyn Screen,
    stop: &watch::Receiver<Stop>,
) -> Result<Summary, LocalError> {
    let workflow = scope.workflow;
    let plan = match plan::plan_run(scope, &plan::Fleet::default())? {
        Planned::Run(plan) => plan,
        Planned::Declined { reason } => return Err(LocalError::Declined { workflow: workflow.name.clone(), reason }),
    };
    let limit = plan.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
    let mut board = Board::new(scope, plan, settings.only.as_deref()).map_err(LocalError::NoSuchJob)?;
    let kept = board.entries().iter().map(|entry| entry.plan.job_index).collect();
    ignored::keys(workflow, &kept).iter().for_each(|text| screen.note(text));
    let shelf = Arc::new(Shelf::new(settings.scratch.join("artifacts")));
    let mut took: BTreeMap<usize, Duration> = BTreeMap::new();
    let (tell, mut told) = watch::channel(stop.borrow().clone());
    while let Some(at) = board.next() {
        if let Some((reason, message)) = stopping(&stop.borrow(), limit) {
            board.stop(reason, &message);
            break;
        }
        board.start(at);
        screen.job_starts(&board.entries()[at]);
        let start = Instant::now();
        let job = Job { settings, shelf: &shelf, scope: board.scope(), board: &board, at, screen };
        let (outcome, made) = tokio::select! {
            ended = job.run(&mut told) => ended?,
            never = relay(stop.clone(), &tell, limit, over_limit()) => match never {},
        };
        board.finish(at, &outcome, made);
        took.insert(at, start.elapsed());
        screen.job_ends(&board.entries()[at], start.elapsed());
    }
    if let Some((reason, message)) = stopping(&stop.borrow(), None) {
        board.stop(reason, &message);
    }
    let status = board.run_status();
    let ended = |(at, entry): (usize, &Entry)| Ended { entry: entry.clone(), took: took.get(&at).copied() };
    Ok(Summary { status, jobs: board.entries().iter().enumerate().map(ended).collect() })
}

/// Why no further job may start.
fn stopping(stop: &Stop, limit: Option<Instant>) -> Option<(FailureReason, String)> {
    match stop {
        Stop::Graceful { reason, message, .. } | Stop::Force { reason, message } => Some((*reason, message.clone())),
        Stop::Abandon { .. } => Some((FailureReason::CancelledByUser, "the run was given up".to_owned())),
        Stop::Run if limit.is_some_and(|limit| limit <= Instant::now()) => Some(over_limit()),
        Stop::Run => None,
    }
}

fn over_limit() -> (FailureReason, String) {
    (FailureReason::WorkflowTimeout, "the run took longer than its limit".to_owned())
}

/// Passes on what a run, or a job, is told, and tells it that its time is up, in these words.
async fn relay(
    mut stop: watch::Receiver<Stop>,
    tell: &watch::Sender<Stop>,
    limit: Option<Instant>,
    over: (FailureReason, String),
) -> std::convert::Infallible {
    let late = async {
        match limit {
            Some(limit) => sleep_until(limit).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(late);
    let (mut open, mut timed) = (true, false);
    loop {
        strengthen(tell, stop.borrow_and_update().clone());
        tokio::select! {
            changed = stop.changed(), if open => open = changed.is_ok(),
            () = &mut late, if !timed => {
                timed = true;
                let (reason, message) = over.clone();
                strengthen(tell, Stop::Graceful { reason, message, grace: DEFAULT_GRACE, more_steps: true });
            }
            else => std::future::pending().await,
        }
    }
}

/// From SIGTERM to SIGKILL where the job names no time.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(10);

struct Job<'a> {
    settings: &'a Settings,
    shelf: &'a Arc<Shelf>,
    scope: Scope<'a>,
    board: &'a Board<'a>,
    at: usize,
    screen: &'a dyn Screen,
}

/// How a job ended, and the jobs that it made.
type JobEnd = (Outcome, Option<Vec<lock::Job>>);

impl Job<'_> {
    /// How it ended, and the jobs that it made.
    async fn run(&self, stop: &mut watch::Receiver<Stop>) -> Result<JobEnd, LocalError> {
        if let Some(invocation) = self.board.entries()[self.at].invocation() {
            return Ok((self.invoke(invocation, stop).await?, None));
        }
        self.own_steps(stop).await
    }

    /// Runs the steps of the job itself. Apart, since what they need of the stack is there only while they run: runs in runs go
    /// deep.
    fn own_steps<'b>(&'b self, stop: &'b mut watch::Receiver<Stop>) -> BoxFuture<'b, Result<JobEnd, LocalError>> {
        Box::pin(async move {
            let dir = self.settings.scratch.join(format!("job-{}", self.at));
            let io = |path: &Path, error: io::Error| LocalError::Io { path: path.to_owned(), error };
            let job = match self.prepare(&dir) {
                Ok(Ok(job)) => job,
                Ok(Err(message)) => {
                    return Ok((Outcome::new(JobStatus::Failed, Some(FailureReason::ExprError), message), None));
                }
                Err(error) => return Err(io(&dir, error)),
            };
            let show = Show {
                job: &self.board.entries()[self.at].plan.name,
                screen: self.screen,
                spool: &job.spool,
                workflow: self.scope.workflow,
                job_index: self.board.entries()[self.at].plan.job_index,
                turn: Mutex::new(()),
                made: Mutex::default(),
            };
            let work = async {
                let outcome = match steps::prepare(&job, &show, stop).await {
                    Some(outcome) => outcome,
                    None => steps::run(&job, &show, stop).await,
                };
                job.spool.close();
                outcome
            };
            let (outcome, shown) = tokio::join!(work, show.follow());
            shown.map_err(|error| io(&dir, error))?;
            Ok((outcome, show.made.into_inner().unwrap_or_else(PoisonError::into_inner)))
        })
    }

    /// The job as the engine of steps wants it; the inner error fails the job.
    fn prepare(&self, dir: &Path) -> io::Result<Result<steps::Job, String>> {
        let entry = &self.board.entries()[self.at];
        let needs = self.board.needs_of(self.at);
        let plan = &entry.plan;
        let reference = JobRef {
            name: &plan.name,
            job_index: plan.job_index,
            matrix: &plan.matrix,
            fanout: plan.fanout.as_ref(),
            needs: &needs,
        };
        let spec = match plan::job_spec(self.scope, reference) {
            Ok(spec) => spec,
            Err(message) => return Ok(Err(message)),
        };
        if spec.container.is_some() || !spec.services.is_empty() {
            let message = "the job asks for containers, and a local run starts none; give it to an agent that has Docker or Podman";
            return Ok(Err(message.to_owned()));
        }
        let definition = &self.scope.workflow.jobs[plan.job_index];
        let scratch = dir.join("scratch");
        std::fs::create_dir_all(&scratch)?;
        let workspace = if definition.checkout.enabled {
            self.settings.workspace.clone()
        } else {
            let empty = dir.join("workspace");
            std::fs::create_dir_all(&empty)?;
            empty
        };
        let stash_workspace = workspace.clone();
        let job_facing = job_facing(self.scope.run.id, JobId::mint(&*self.settings.ids), &spec, &scratch)?;
        let limits =
            Limits { max_step_bytes: 0, max_unacked_bytes: UNSHOWN_BYTES, pressure: crate::config::Pressure::Pause };
        let spool = Spool::create(&dir.join("spool"), limits)?;
        Ok(Ok(steps::Job {
            workspace,
            scratch,
            host: self.settings.host.clone(),
            job_facing,
            git_config: Vec::new(),
            agent: this_machine(),
            masker: Arc::new(Masker::default()),
            spool,
            clock: Arc::clone(&self.settings.clock),
            step_timeout: self.settings.step_timeout,
            confine: Arc::default(),
            container: None,
            orphan_cleanup: true,
            stash: Some(Arc::new(Stash::new(
                Arc::new(OfJob { shelf: Arc::clone(self.shelf), job: definition.name.clone() }),
                stash_workspace,
                None,
                dir.join("stash"),
                Arc::default(),
            ))),
            deadline: definition.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms)),
            spec,
        }))
    }
}

/// What expressions see as `agent`.
fn this_machine() -> Json {
    serde_json::json!({
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
        "host": kici_sys::host::hostname(),
        "labels": [],
    })
}

/// Shows a job's log as it grows; the screen stands in for the orchestrator that acknowledges it.
struct Show<'a> {
    job: &'a str,
    screen: &'a dyn Screen,
    spool: &'a Spool,
    workflow: &'a Workflow,
    job_index: usize,
    /// Two tasks show; the lines of a step must not change places.
    turn: Mutex<()>,
    /// The jobs that it made.
    made: Mutex<Option<Vec<lock::Job>>>,
}

impl Show<'_> {
    async fn follow(&self) -> io::Result<()> {
        while !self.drain()? {
            self.spool.more().await;
        }
        Ok(())
    }

    /// Shows everything that is written by now; true when nothing will follow.
    fn drain(&self) -> io::Result<bool> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.spool.next(SHOW_BYTES, u64::MAX)? {
                Next::Data(key, offset, bytes) => {
                    self.screen.lines(self.job, &key, &bytes);
                    self.spool.ack(&key, offset + bytes.len() as u64, false);
                }
                Next::Seal(key, seal) => self.spool.ack(&key, seal.offset, true),
                Next::Wait => return Ok(false),
                Next::Done => return Ok(true),
            }
        }
    }
}

#[async_trait]
impl Reporter for Show<'_> {
    async fn step(&self, report: StepReport) {
        // The log of a step stands before its result; a disk that fails here fails the run in `follow`.
        let _ = self.drain();
        self.screen.step(self.job, &report);
    }

    async fn emit(&self, _emission: Emission) -> Emitted {
        Emitted::Nowhere("this run is local, only an orchestrator delivers events")
    }

    async fn generated(&self, document: Vec<u8>) -> Generated {
        let judged = compile_fragment(self.workflow, self.job_index, &document).map_err(|error| error.to_string());
        match judged.and_then(|jobs| plan::merge(self.workflow, self.job_index, jobs.clone()).map(|_| jobs)) {
            Ok(jobs) => {
                let count = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
                *self.made.lock().unwrap_or_else(PoisonError::into_inner) = Some(jobs);
                Generated::Kept(count)
            }
            Err(why) => Generated::Refused(why),
        }
    }

    fn tree(&self, _keeper: ProcessId) {}
}
