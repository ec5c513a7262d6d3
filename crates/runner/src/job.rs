//! The life of one job on this agent: accepted and written down, checked out, started once the orchestrator grants it, run,
//! reported.

mod accept;
mod contained;
mod dir;
mod prepare;

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use kici_engine::check::CheckResult;
use kici_engine::jobspec::JobSpec;
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_engine::time::{Clock, Ts};
use kici_protocol::agent::{AgentFrame, Evidence, JobOffer, JobUpdate, StepUpdate, agent_frame};
use kici_sys::process::{ProcessId, Spawn};
use secrecy::SecretString;
use serde_json::Value as Json;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::checkout::{self, Checkout, CheckoutError, Source};
use crate::config::Config;
use crate::confine::{Host, JobConfinement};
use crate::container::{Inside, Wanted};
use crate::credentials::{Access, JobServices, Opening, Remote};
use crate::emit::EventDesk;
use crate::journal::Journal;
use crate::key::{JobKey, checkout_key, step_file_name};
use crate::mask::Masker;
use crate::ports::{Emission, Emitted, Generated, Reporter, StepReport};
use crate::session::Session;
use crate::spool::Spool;
use crate::stash::{Home, Stash};
use crate::steps::tree::{Pipes, Tree};
use crate::steps::{self, Outcome};
use crate::stop::{Stop, stopped};
use accept::{Accepted, accept};
pub use dir::{LOCK, lock, remove, remove_now};

/// The orchestrator's word on the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// None yet.
    Waiting,
    /// User code may run.
    Granted,
    /// The job is not ours.
    Denied(String),
}

/// What a job tells the agent.
#[derive(Debug)]
pub enum JobEvent {
    /// It is written down: acknowledge it.
    Accepted,
    /// It could not be written down: reject it.
    NotAccepted(String),
    /// It is as good as prepared: ask for the start.
    AskStart,
    /// A word that may be lost.
    Say(Box<agent_frame::Frame>),
    /// It is gone from this agent, with everything it left; nothing was or will be reported.
    Dropped,
    /// Its workspace is gone.
    Cleaned,
}

/// A word that must not be lost, for the outbox.
#[derive(Debug)]
pub struct Posting {
    /// Of which job.
    pub job: JobKey,
    /// The word.
    pub frame: agent_frame::Frame,
    /// It is the last one of the job.
    pub last: bool,
    /// Told when it is on disk.
    pub kept: Option<oneshot::Sender<()>>,
}

/// What a job needs of its agent.
pub struct Ctx {
    /// Which job.
    pub key: JobKey,
    /// Settings.
    pub config: Arc<Config>,
    /// Now.
    pub clock: Arc<dyn Clock>,
    /// Facts.
    pub journal: Arc<Journal>,
    /// Its logs.
    pub spool: Arc<Spool>,
    /// Values that must not be shown.
    pub masker: Arc<Masker>,
    /// To the agent.
    pub events: mpsc::Sender<(JobKey, JobEvent)>,
    /// To the outbox.
    pub outbox: mpsc::Sender<Posting>,
    /// Told to stop.
    pub stop: watch::Receiver<Stop>,
    /// Told the grant.
    pub grant: watch::Receiver<Grant>,
    /// The connection.
    pub sessions: watch::Receiver<Option<Session>>,
    /// Name of the agent and its labels, for expressions.
    pub agent: Json,
    /// What this host has to confine it.
    pub host: Arc<Host>,
    /// Since when its steps run, by their file names.
    pub running: Mutex<BTreeMap<String, Ts>>,
    /// What its steps started, to be ended where nothing else can.
    pub trees: Mutex<Vec<ProcessId>>,
    /// What it asks for of the container engine.
    pub wanted: Option<Wanted>,
    /// The container of its steps, once it runs.
    pub inside: Arc<OnceLock<Arc<Inside>>>,
    /// Opens its socket.
    pub services: Arc<dyn JobServices>,
    /// Where its credentials come from.
    pub remote: Arc<Remote>,
}

/// Runs one job from its offer to its end.
pub async fn run(mut ctx: Ctx, offer: JobOffer, spec: JobSpec) {
    let dir = ctx.config.work_dir.join(ctx.key.file_name());
    let Accepted { lock: _lock, confine, stash, access } = match accept(&ctx, &offer, &spec, &dir).await {
        Ok(accepted) => accepted,
        Err(message) => {
            remove(&dir).await;
            ctx.tell(JobEvent::NotAccepted(message)).await;
            return;
        }
    };
    ctx.tell(JobEvent::Accepted).await;
    let whole = async {
        match &access {
            Ok(access) => ctx.work(&dir, offer, spec, access.as_ref(), &confine, stash).await,
            Err(message) => Outcome::new(JobStatus::Failed, Some(FailureReason::SandboxFailed), message.clone()),
        }
    };
    // Nobody else would end it: the agent would hold its slot, and the orchestrator wait for its result.
    let work = AssertUnwindSafe(whole).catch_unwind().await;
    let outcome = match work {
        Ok(outcome) => outcome,
        Err(panic) => {
            let outcome = ctx.panicked(&*panic);
            let trees = std::mem::take(&mut *ctx.trees.lock().unwrap_or_else(PoisonError::into_inner));
            let kill = move || trees.into_iter().map(kici_sys::process::kill_leftovers).sum();
            Outcome { strays_killed: tokio::task::spawn_blocking(kill).await.unwrap_or_default(), ..outcome }
        }
    };
    let outcome = ctx.leave(outcome, confine.ok()).await;
    let failed = outcome.status == JobStatus::Failed;
    ctx.spool.close();
    if outcome.abandoned {
        ctx.tell(JobEvent::Dropped).await;
    } else {
        ctx.report(outcome).await;
    }
    if let Err(error) = ctx.journal.done(ctx.key) {
        tracing::warn!(job = %ctx.key, %error, "cannot write down that a job is done");
    }
    if let Ok(Some(access)) = access {
        // After the result, which nothing may hold up: tokens of a job that is over are ended in its name too.
        access.close().await;
    }
    ctx.clean(failed).await;
    remove(&dir).await;
    ctx.tell(JobEvent::Cleaned).await;
}

impl Ctx {
    async fn tell(&self, event: JobEvent) {
        // The agent is gone only when the program ends.
        let _ = self.events.send((self.key, event)).await;
    }

    /// Counts how long steps take.
    fn measure(&self, report: &StepReport) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let name = step_file_name(&report.key);
        if report.status == StepStatus::Running {
            running.entry(name).or_insert(report.at);
        } else if let Some(since) = running.remove(&name).filter(|_| report.status.is_terminal()) {
            let metric = match report.key == checkout_key() {
                true => "kici_agent_clone_duration_seconds",
                false => "kici_agent_step_duration_seconds",
            };
            metrics::histogram!(metric).record(report.at.since(since));
        }
    }

    /// The end of a job that a fault of the agent ended.
    fn panicked(&self, panic: &(dyn Any + Send)) -> Outcome {
        if matches!(*self.stop.borrow(), Stop::Abandon { .. }) {
            return Outcome::of_stop(&self.stop.borrow());
        }
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        let message = format!("a fault of the agent ended the job: {}", text.unwrap_or("it panicked"));
        tracing::error!(job = %self.key, message, "a job panicked");
        Outcome::new(JobStatus::Failed, Some(FailureReason::SandboxFailed), self.masker.mask_text(&message))
    }

    /// The caches and artifacts of the job.
    fn stash(&self, dir: &Path, confine: &Result<Arc<JobConfinement>, String>) -> Arc<Stash> {
        let (token, sessions) = (self.config.agent_token.clone(), self.sessions.clone());
        let depot = crate::stash::remote::Remote::new(self.key, &self.config.orchestrator_url, token, sessions);
        let (depot, scratch) = (Arc::new(depot), dir.join("stash"));
        if self.has_container() {
            return Arc::new(Stash::inside(depot, Arc::clone(&self.inside), scratch));
        }
        // Without a confinement no job runs.
        let confine = confine.as_ref().map_or_else(|_| Arc::default(), Arc::clone);
        let config = &self.config;
        let home = config.host_env.get("HOME").filter(|_| confine.keeps_home()).map(|dir| Home {
            dir: PathBuf::from(dir),
            writable: config.isolation.writable.clone(),
            hidden: [&config.state_dir, &config.work_dir, &config.runtime_dir]
                .into_iter()
                .chain(&config.private_files)
                .cloned()
                .collect(),
        });
        Arc::new(Stash::new(depot, dir.join("workspace"), home, scratch, confine))
    }

    /// The socket of the job.
    async fn access(&self, dir: &Path, offer: &JobOffer, stash: &Arc<Stash>) -> Result<Option<Access>, String> {
        let opening = |socket_dir, git| Opening {
            dir: socket_dir,
            // From a container it is reached through this program.
            uid: match &self.config.isolation.user {
                Some(user) if !self.has_container() => user.uid,
                _ => kici_sys::host::uid(),
            },
            git,
            events: Arc::new(EventDesk::new(
                self.key,
                self.config.agent_token.clone(),
                self.sessions.clone(),
                Arc::clone(&self.masker),
            )),
            remote: Arc::clone(&self.remote),
            stash: Arc::clone(stash),
            masker: Arc::clone(&self.masker),
            clock: Arc::clone(&self.clock),
        };
        let opened = Access::open(
            &*self.services,
            &self.config,
            self.key,
            offer.git.clone(),
            dir,
            self.has_container(),
            opening,
        )
        .await;
        opened.map_err(|error| format!("the socket of the job cannot be opened: {error}"))
    }

    /// Ends what is left of the job and judges its end by what it used.
    async fn leave(&self, outcome: Outcome, confine: Option<Arc<JobConfinement>>) -> Outcome {
        let outcome = self.leave_container(outcome).await;
        let Some(confine) = confine else { return outcome };
        let mut outcome = match self.inside.get() {
            Some(_) => outcome,
            None => outcome.with_usage(confine.usage()),
        };
        let keep = !self.config.isolation.orphan_cleanup && outcome.status != JobStatus::Cancelled;
        if !keep {
            let ended = tokio::task::spawn_blocking(move || confine.end());
            outcome.strays_killed += ended.await.unwrap_or_default();
        }
        if outcome.strays_killed > 0 {
            metrics::counter!("kici_agent_orphans_killed_total").increment(u64::from(outcome.strays_killed));
            tracing::info!(job = %self.key, killed = outcome.strays_killed, "what the job left running was ended");
        }
        outcome
    }

    async fn work(
        &mut self,
        dir: &Path,
        offer: JobOffer,
        spec: JobSpec,
        access: Option<&Access>,
        confine: &Result<Arc<JobConfinement>, String>,
        stash: Arc<Stash>,
    ) -> Outcome {
        let sandbox_failed = |message| Outcome::new(JobStatus::Failed, Some(FailureReason::SandboxFailed), message);
        let confine = match confine {
            Ok(confine) => Arc::clone(confine),
            Err(message) => return sandbox_failed(message.clone()),
        };
        let limit = (offer.job_timeout_ms > 0).then(|| Duration::from_millis(offer.job_timeout_ms));
        let deadline = limit.map(|limit| Instant::now() + limit);
        let (workspace, scratch) = (dir.join("workspace"), dir.join("scratch"));
        let source = offer.checkout.as_ref().map(|source| {
            let own = Source {
                url: source.url.clone(),
                git_ref: source.git_ref.clone(),
                sha: source.sha.clone(),
                depth: source.depth,
                basic: source.basic.as_ref().map(|b| (b.user.clone(), SecretString::from(b.secret.clone()))),
                ssh: None,
                submodules: source.submodules,
                lfs: source.lfs,
                tags: source.tags,
            };
            (checkout::below(&workspace, &source.path), own.at(&source.other_ref))
        });
        let source = match source {
            Some((Err(message), _)) => {
                return Outcome::new(JobStatus::Failed, Some(FailureReason::CheckoutFailed), message);
            }
            Some((Ok(place), source)) => Some((place, source)),
            None => None,
        };
        let checkout = async {
            match &source {
                Some((place, source)) => self.checkout(place, &scratch, source, access, &confine, deadline).await,
                None => Ok(()),
            }
        };
        let contained = match self.beside(checkout, &workspace, &scratch, access, deadline).await {
            Ok(contained) => contained,
            Err(outcome) => return *outcome,
        };
        let restores = !spec.cache.is_empty() || !spec.artifacts.download.is_empty();
        if !restores {
            // What is left to prepare takes less than the answer.
            self.tell(JobEvent::AskStart).await;
        }
        let mut job = match self.prepare(spec, workspace, scratch, access, confine, contained, stash) {
            Ok(job) => job,
            Err(error) => return sandbox_failed(format!("the workspace cannot be prepared: {error}")),
        };
        job.deadline = deadline;
        if restores {
            let mut stop = self.stop.clone();
            if let Some(outcome) = steps::prepare(&job, self, &mut stop).await {
                return outcome;
            }
            self.tell(JobEvent::AskStart).await;
        }
        if let Err(outcome) = self.wait_for_grant(deadline).await {
            return *outcome;
        }
        if let Err(error) = self.journal.started(self.key) {
            // A restart could not tell that user code had run, and the job would be handed out again.
            return sandbox_failed(format!("the start cannot be written down: {error}"));
        }
        let mut stop = self.stop.clone();
        steps::run(&job, self, &mut stop).await
    }

    async fn checkout(
        &self,
        workspace: &Path,
        scratch: &Path,
        source: &Source,
        access: Option<&Access>,
        confine: &JobConfinement,
        deadline: Option<Instant>,
    ) -> Result<(), Box<Outcome>> {
        let io = |error: io::Error| {
            let message = format!("the log of the checkout cannot be kept: {error}");
            Box::new(Outcome::new(JobStatus::Failed, Some(FailureReason::CheckoutFailed), message))
        };
        let mut report = StepReport::new(checkout_key(), "checkout", StepStatus::Running, self.clock.now());
        self.step(report.clone()).await;
        let mut log = self.spool.open(&checkout_key()).await.map_err(io)?;
        for host in access.map_or(&[][..], |access| &access.insecure) {
            let mut lines = crate::lines::Lines::default();
            let why = "git gets no credentials in the steps, because the connection is not encrypted";
            lines.say(self.clock.now(), &format!("{host}: {why}; the agent's git.allow_insecure_http allows it"));
            log.append(&lines).await.map_err(io)?;
        }
        // It runs beside the steps' confinement, as the agent, but ends with the job, also when the agent dies.
        let start = |spawn: Spawn| -> io::Result<(Tree, Pipes)> {
            let (tree, pipes) = Tree::spawn(&confine.grouped(spawn)?)?;
            tree.keeper().into_iter().for_each(|keeper| self.tree(keeper));
            Ok((tree, pipes))
        };
        let mut stop = self.stop.clone();
        let result = Checkout {
            workspace,
            scratch,
            host: &self.config.agent_env,
            start: &start,
            timeout: self.config.git_timeout,
            deadline,
            log: &mut log,
            masker: &self.masker,
            helper: access.map(|access| &access.helper),
            clock: &*self.clock,
            stop: &mut stop,
        }
        .run(source)
        .await;
        let outcome = result.err().map(|error| match error {
            CheckoutError::Stopped(stop) => Outcome::of_stop(&stop),
            error if deadline.is_some_and(|deadline| deadline <= Instant::now()) => {
                let message = format!("the job ran longer than its limit during its checkout: {error}");
                Outcome::new(JobStatus::Failed, Some(FailureReason::JobTimeout), message)
            }
            error => Outcome::new(
                JobStatus::Failed,
                Some(FailureReason::CheckoutFailed),
                self.masker.mask_text(&error.to_string()),
            ),
        });
        if let Some(outcome) = &outcome {
            let mut lines = crate::lines::Lines::default();
            lines.say(self.clock.now(), &outcome.message);
            log.append(&lines).await.map_err(io)?;
            report.message = outcome.message.clone();
        }
        report.log = log.close(self.clock.now()).await.map_err(io)?;
        report.at = self.clock.now();
        report.status = match outcome.as_ref().map(|outcome| outcome.status) {
            None => StepStatus::Success,
            Some(JobStatus::Cancelled) => StepStatus::Cancelled,
            Some(_) => StepStatus::Failed,
        };
        if !outcome.as_ref().is_some_and(|outcome| outcome.abandoned) {
            self.step(report).await;
        }
        outcome.map_or(Ok(()), |outcome| Err(Box::new(outcome)))
    }

    /// No user code runs before this returned.
    async fn wait_for_grant(&mut self, deadline: Option<Instant>) -> Result<(), Box<Outcome>> {
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            stop = stopped(&mut self.stop) => Err(Box::new(Outcome::of_stop(&stop))),
            grant = self.grant.wait_for(|grant| *grant != Grant::Waiting) => match grant.map(|grant| grant.clone()) {
                Ok(Grant::Granted) => Ok(()),
                Ok(Grant::Denied(detail)) => {
                    tracing::info!(job = %self.key, detail, "the start was denied; the job is dropped");
                    Err(Box::new(Outcome::of_stop(&Stop::Abandon { grace: Duration::ZERO })))
                }
                _ => Err(Box::new(Outcome::of_stop(&Stop::Abandon { grace: Duration::ZERO }))),
            },
            () = late => {
                let message = "the job ran longer than its limit before its start was granted";
                Err(Box::new(Outcome::new(JobStatus::Failed, Some(FailureReason::JobTimeout), message)))
            }
        }
    }

    /// Puts the result into the outbox and waits until it is on disk.
    async fn report(&self, outcome: Outcome) {
        let update = JobUpdate {
            job: Some(self.key.to_ref()),
            state: outcome.status.as_str().to_owned(),
            at_us: self.clock.now().as_micros(),
            reason: outcome.reason.map_or("", FailureReason::as_str).to_owned(),
            message: self.masker.mask_text(&outcome.message),
            outputs: outcome.outputs.into_iter().map(|(k, v)| (k, self.masker.mask_text(&v))).collect(),
            evidence: Some(Evidence {
                exit_code: outcome.exit_code,
                signal: outcome.signal,
                peak_memory_bytes: outcome.usage.peak_memory_bytes,
                memory_limit_bytes: outcome.usage.memory_limit_bytes,
                failed_step: outcome.failed_step,
                strays_killed: outcome.strays_killed,
            }),
            log_bytes: self.spool.total_bytes(),
            cancel_deadline_us: 0,
        };
        let (kept, on_disk) = oneshot::channel();
        let frame = agent_frame::Frame::JobUpdate(update);
        // Both ends live as long as the agent.
        let _ = self.outbox.send(Posting { job: self.key, frame, last: true, kept: Some(kept) }).await;
        let _ = on_disk.await;
    }
}

#[async_trait]
impl Reporter for Ctx {
    async fn step(&self, report: StepReport) {
        let terminal = report.status.is_terminal();
        self.measure(&report);
        if terminal {
            metrics::counter!("kici_agent_steps_total", "status" => report.status.as_str()).increment(1);
            metrics::counter!("kici_agent_log_bytes_total").increment(report.log.offset);
        }
        let frame = agent_frame::Frame::StepUpdate(step_update(self.key, report));
        if terminal {
            // The outbox lives as long as the agent.
            let _ = self.outbox.send(Posting { job: self.key, frame, last: false, kept: None }).await;
        } else {
            self.tell(JobEvent::Say(Box::new(frame))).await;
        }
    }

    async fn emit(&self, emission: Emission) -> Emitted {
        crate::emit::send(self.key, emission, self.config.agent_token.as_ref(), self.sessions.clone()).await
    }

    async fn generated(&self, document: Vec<u8>) -> Generated {
        crate::generated::send(self.key, document, self.config.agent_token.as_ref(), self.sessions.clone()).await
    }

    fn tree(&self, keeper: ProcessId) {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner).push(keeper);
        if let Err(error) = self.journal.tree(self.key, keeper) {
            tracing::warn!(job = %self.key, %error, "cannot write down a process; a crash of the agent would leave it behind");
        }
    }
}

fn step_update(job: JobKey, report: StepReport) -> StepUpdate {
    StepUpdate {
        job: Some(job.to_ref()),
        step: Some(report.key),
        name: report.name,
        state: report.status.as_str().to_owned(),
        at_us: report.at.as_micros(),
        exit_code: report.exit_code,
        message: report.message,
        outputs: report.outputs.into_iter().collect(),
        log_bytes: report.log.offset,
        log_lines: report.log.lines,
        missing_bytes: report.log.missing_bytes,
        missing_lines: report.log.missing_lines,
        failure_allowed: report.failure_allowed,
        summary: report.summary,
        attempt: report.attempt,
        check_result: report.check.map_or("", CheckResult::as_str).to_owned(),
        drift: report.drift,
        group: report.group,
    }
}

/// The result of a job that was held when an earlier process of this agent died.
pub fn restarted(job: JobKey, at: Ts) -> AgentFrame {
    let update = JobUpdate {
        job: Some(job.to_ref()),
        state: JobStatus::Failed.as_str().to_owned(),
        at_us: at.as_micros(),
        reason: FailureReason::AgentRestarted.as_str().to_owned(),
        message: "the agent was restarted while it held the job; what the job left running was ended".to_owned(),
        ..JobUpdate::default()
    };
    AgentFrame { seq: 0, frame: Some(agent_frame::Frame::JobUpdate(update)) }
}
