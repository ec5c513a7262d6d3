//! The agent: one task that owns the session, the jobs and the outbox, and decides everything from the events that reach it.

mod after_cancel;
mod condition;
mod frames;
mod held;
mod http;
mod idle;
mod leave;
mod post;
mod reset;
mod signals;
mod state;
mod writer;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kici_engine::state::FailureReason;
use kici_engine::time::Clock;
use kici_protocol::agent::{AgentFrame, Heartbeat, JobHeartbeat, JobOffer, agent_frame};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::claim::{self, NoToken};
use crate::config::Config;
use crate::confine::Host;
use crate::credentials::JobServices;
use crate::doctor;
use crate::job::{JobEvent, Posting};
use crate::key::JobKey;
use crate::outbox::Outbox;
use crate::session::{self, Cut, LinkEvent, Session};
use crate::stop::{Stop, strengthen};
use held::Held;
use http::Health;
use idle::Scaler;
use kici_telemetry::metrics::Metrics;
use leave::Leave;
use post::{Post, Settled};
use reset::Resets;
pub use signals::signals;
pub use state::StartError;
use state::State;
use writer::Kept;

/// Events that may wait for the agent.
const EVENTS: usize = 1_024;
/// Words that may wait for the outbox.
const POSTINGS: usize = 1_024;
/// How often the agent looks at the time.
const TICK: Duration = Duration::from_secs(1);
/// From SIGTERM to SIGKILL for a job that this agent has lost.
const FENCE_GRACE: Duration = Duration::from_secs(5);
/// How long a stopping agent waits for its outbox.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// No new work while less is free.
const MIN_FREE_BYTES: u64 = 32 * 1024 * 1024;
/// No new work while more results wait.
const MAX_WAITING: usize = 100;
/// A start that was not answered is asked for again after this long.
const ASK_AGAIN: Duration = Duration::from_secs(15);
/// How often old outbox records are looked for.
const EXPIRY_EVERY: Duration = Duration::from_secs(3_600);

/// What an operator or the system asks of a running agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Take no more work, end when idle.
    Drain,
    /// End soon: jobs get `shutdown_grace`, then they are cancelled; a second time they are killed.
    Stop,
}

/// How the agent ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// What the program exits with: 0, 78 (EX_CONFIG) when only an operator can mend it, 1 otherwise.
    pub exit: u8,
    /// Why, unless it was asked to.
    pub message: Option<String>,
}

/// A live session as the agent sees it.
struct Link {
    out: mpsc::Sender<AgentFrame>,
    seq: u64,
    heartbeat: Duration,
    last_heartbeat: Instant,
}

/// The agent.
pub struct Agent {
    config: Arc<Config>,
    clock: Arc<dyn Clock>,
    state: State,
    host: Arc<Host>,
    cluster: Option<String>,
    jobs: BTreeMap<JobKey, Held>,
    /// Offers of a newer epoch that wait for the end of the older one.
    deferred: Vec<JobOffer>,
    post: Post,
    /// Tells the senders of logs that the result of their job is settled, by the name of the record.
    log_ends: BTreeMap<String, watch::Sender<bool>>,
    outbox: Arc<Mutex<Option<Arc<Outbox>>>>,
    link: Option<Link>,
    sessions: watch::Sender<Option<Session>>,
    job_events: mpsc::Sender<(JobKey, JobEvent)>,
    postings: mpsc::Sender<Posting>,
    services: Arc<dyn JobServices>,
    tasks: TaskTracker,
    holding: Arc<AtomicBool>,
    labels: Vec<String>,
    draining: bool,
    leave: Leave,
    /// Told to stop: when jobs are cancelled, and how often it was said.
    stopping: Option<(Instant, u32)>,
    /// Since when no job is held.
    idle: Option<Instant>,
    /// Since when and how the session is gone.
    down: Option<(Instant, Cut)>,
    recovery_window: Duration,
    job_heartbeat: Duration,
    last_job_heartbeat: Instant,
    last_expiry: Instant,
    last_ask: Instant,
    degraded: Vec<String>,
    resets: Resets,
    scaler: Scaler,
    health: watch::Sender<Health>,
}

impl Agent {
    /// Runs an agent until it is told to stop or cannot go on. `metrics` are served where the settings name a port.
    ///
    /// # Errors
    /// [`StartError`] when its directories cannot be used.
    pub async fn run(
        mut config: Config,
        clock: Arc<dyn Clock>,
        mut signals: mpsc::Receiver<Signal>,
        services: Arc<dyn JobServices>,
        metrics: Option<Metrics>,
    ) -> Result<Ended, StartError> {
        // Before the state is opened: the code says who this agent is.
        tokio::select! {
            exchanged = claim::exchange(&mut config) => {
                if let Err(NoToken { message, exit }) = exchanged {
                    tracing::error!(message, "there is no token for this agent");
                    return Ok(Ended { exit, message: Some(message) });
                }
            }
            Some(_) = signals.recv() => return Ok(Ended { exit: 0, message: None }),
        }
        let config = Arc::new(config);
        let (open_config, open_clock) = (Arc::clone(&config), Arc::clone(&clock));
        let opened = tokio::task::spawn_blocking(move || {
            let host = Host::find(&open_config);
            State::open(&open_config, &host, &*open_clock).map(|(state, left)| (state, left, host))
        });
        let (state, left, host) = match opened.await {
            Ok(opened) => opened?,
            Err(error) => return Ok(Ended { exit: 1, message: Some(error.to_string()) }),
        };
        kici_telemetry::name_instance(state.agent_id.as_str());
        tracing::info!(agent = %state.agent_id, url = config.orchestrator_url, "the agent starts");
        for problem in &config.ignored {
            tracing::warn!(variable = problem.place, "{}; it is left aside", problem.message);
        }
        host.containers.name(state.agent_id.as_str());
        // Before any job is taken: what an earlier process left may hold ports, disks and memory.
        host.containers.sweep().await;
        let missing = doctor::missing(&config, &host);
        if !missing.is_empty() {
            tracing::warn!(missing = missing.join("; "), "jobs are not fully isolated; see kici-agent doctor");
        }
        let (job_events, mut from_jobs) = mpsc::channel(EVENTS);
        let (postings, to_write) = mpsc::channel(POSTINGS);
        let (kept, mut from_writer) = mpsc::channel(EVENTS);
        let (link_events, mut from_link) = mpsc::channel(EVENTS);
        let (resets, mut from_reset) = Resets::new();
        let listener = http::bind(config.listen).await.map_err(StartError::Listen)?;
        let to_agent = (job_events, postings);
        let mut agent = Self::new(config, clock, state, Arc::new(host), to_agent, services, resets);
        agent.take_over(left);
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(writer::run(to_write, Arc::clone(&agent.outbox), kept));
        tasks.spawn(session::keep(Arc::clone(&agent.config), Arc::clone(&agent.holding), link_events, stop.clone()));
        if let Some(listener) = listener {
            tasks.spawn(http::serve(listener, agent.health.subscribe(), metrics.clone()));
        }
        let mut tick = tokio::time::interval(TICK);
        let ended = loop {
            let ended = tokio::select! {
                Some(event) = from_link.recv() => agent.on_link(event).await,
                Some((job, event)) = from_jobs.recv() => { agent.on_job(job, event); None }
                Some(kept) = from_writer.recv() => { agent.on_kept(kept); None }
                Some(signal) = signals.recv() => { agent.on_signal(signal); None }
                Some(ended) = from_reset.recv() => { agent.on_reset(ended); None }
                _ = tick.tick() => {
                    if let Some(metrics) = &metrics {
                        metrics.upkeep();
                    }
                    agent.on_tick()
                }
            };
            agent.tell_health();
            if let Some(ended) = ended.or_else(|| agent.finished()) {
                break ended;
            }
        };
        stop.cancel();
        agent.link = None;
        tracing::info!(exit = ended.exit, message = ended.message, "the agent ends");
        Ok(ended)
    }

    fn new(
        config: Arc<Config>,
        clock: Arc<dyn Clock>,
        state: State,
        host: Arc<Host>,
        (job_events, postings): (mpsc::Sender<(JobKey, JobEvent)>, mpsc::Sender<Posting>),
        services: Arc<dyn JobServices>,
        resets: Resets,
    ) -> Self {
        let now = Instant::now();
        Self {
            cluster: None,
            jobs: BTreeMap::new(),
            deferred: Vec::new(),
            post: Post::default(),
            log_ends: BTreeMap::new(),
            outbox: Arc::default(),
            link: None,
            sessions: watch::Sender::new(None),
            job_events,
            postings,
            services,
            tasks: TaskTracker::new(),
            holding: Arc::default(),
            labels: Vec::new(),
            draining: false,
            leave: Leave::default(),
            stopping: None,
            idle: None,
            down: None,
            recovery_window: Duration::from_secs(120),
            job_heartbeat: config.job_heartbeat_interval,
            last_job_heartbeat: now,
            last_expiry: now,
            last_ask: now,
            degraded: Vec::new(),
            resets,
            scaler: Scaler::default(),
            health: watch::Sender::default(),
            config,
            clock,
            state,
            host,
        }
    }

    async fn on_link(&mut self, event: LinkEvent) -> Option<Ended> {
        match event {
            // The connection may be gone again by now.
            LinkEvent::NeedRegister(answer) => {
                self.leave.registers();
                drop(answer.send(self.register()));
            }
            LinkEvent::Up { ack, out, session } => self.on_up(&ack, out, session),
            LinkEvent::Frame(frame) => self.on_frame(*frame).await,
            LinkEvent::Down(cut) => {
                tracing::warn!(?cut, jobs = self.jobs.len(), "the session is gone; jobs go on");
                self.link = None;
                self.leave.new_session();
                self.sessions.send_replace(None);
                self.down.get_or_insert((Instant::now(), cut));
            }
            LinkEvent::Refused { message, exit } => {
                tracing::error!(message, "the orchestrator does not want this agent");
                let gone = Stop::Abandon { grace: FENCE_GRACE };
                self.jobs.values().for_each(|held| strengthen(&held.stop, gone.clone()));
                let limit = FENCE_GRACE * 2;
                if tokio::time::timeout(limit, self.wait_for_jobs()).await.is_err() {
                    tracing::error!("jobs are still running");
                }
                return Some(Ended { exit, message: Some(message) });
            }
        }
        None
    }

    async fn wait_for_jobs(&self) {
        self.tasks.close();
        self.sessions.send_replace(None);
        while self.jobs.values().any(|held| !held.task.is_finished()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn on_kept(&mut self, kept: Kept) {
        let file = kept.job.file_name();
        if let Some(why) = kept.unsafe_because {
            tracing::error!(job = %kept.job, why, "a result cannot be kept on disk; it is only sent");
            self.degrade(format!("outbox: {why}"));
        }
        if kept.last {
            if let Some(held) = self.jobs.get_mut(&kept.job) {
                held.reported = true;
            }
            let result = kept.frames.iter().find_map(|frame| match &frame.frame {
                Some(agent_frame::Frame::JobUpdate(update)) => Some(update.clone()),
                _ => None,
            });
            if let Some(result) = result {
                metrics::counter!("kici_agent_jobs_total", "status" => result.state.clone()).increment(1);
                self.note_end(kept.job, &result);
                if self.is_resetting() {
                    // Before the result, which makes the slot free.
                    self.say_status();
                }
            }
        }
        self.post.add(&file, kept.job.to_ref(), kept.frames, kept.last);
        self.flush();
    }

    fn on_signal(&mut self, signal: Signal) {
        self.draining = true;
        match signal {
            Signal::Drain => tracing::info!("draining"),
            Signal::Stop => {
                let times = self.stopping.map_or(0, |(_, times)| times) + 1;
                let at = self.stopping.map_or(Instant::now() + self.config.shutdown_grace, |(at, _)| at);
                self.stopping = Some((at, times));
                if times > 1 {
                    let message = "the agent was told twice to stop".to_owned();
                    let force = Stop::Force { reason: FailureReason::AgentShutdown, message };
                    self.jobs.values().for_each(|held| strengthen(&held.stop, force.clone()));
                }
            }
        }
        self.say_status();
    }

    fn on_tick(&mut self) -> Option<Ended> {
        let now = Instant::now();
        self.heartbeats(now);
        self.fence(now);
        self.flush();
        if now.duration_since(self.last_ask) >= ASK_AGAIN {
            self.ask_again();
        }
        self.idle = self.jobs.is_empty().then(|| self.idle.unwrap_or(now));
        if self.stopping.is_some() && self.idle.is_some_and(|since| now >= since + FLUSH_LIMIT) {
            tracing::warn!(waiting = self.post.len(), "what waits is sent after the next start");
            return Some(Ended { exit: 0, message: None });
        }
        if self.stopping.is_some_and(|(at, _)| now >= at) {
            let stop = Stop::Graceful {
                reason: FailureReason::AgentShutdown,
                message: "the agent is shut down".to_owned(),
                grace: self.config.max_grace_period.min(Duration::from_secs(10)),
                more_steps: true,
            };
            self.jobs.values().for_each(|held| strengthen(&held.stop, stop.clone()));
        }
        if now.duration_since(self.last_expiry) >= EXPIRY_EVERY {
            self.last_expiry = now;
            self.expire();
        }
        self.check_disk();
        if self.jobs.is_empty() && kici_sys::process::may_have_strays() {
            self.tasks.spawn_blocking(kici_sys::process::kill_strays);
        }
        self.reset_when_idle();
        None
    }

    /// An agent that drains is done when nothing is held, nothing waits, and the orchestrator knows that it leaves: else it would
    /// be offered jobs meanwhile, and its leave would be taken for a loss.
    fn finished(&mut self) -> Option<Ended> {
        if !self.draining && self.is_idle_for_good() {
            tracing::info!("there is no work for this agent; it ends");
            self.draining = true;
            self.say_status();
        }
        let held = !self.jobs.is_empty() || !self.deferred.is_empty() || self.resets.running;
        let done = self.draining && !held && self.post.len() == 0;
        let logs = self.tasks.is_empty() || self.link.is_none();
        let over = self.leave.is_over(done && logs, self.link.is_some(), Instant::now());
        over.then_some(Ended { exit: 0, message: None })
    }

    fn heartbeats(&mut self, now: Instant) {
        let at_us = self.clock.now().as_micros();
        if let Some(link) = &mut self.link
            && now.duration_since(link.last_heartbeat) >= link.heartbeat
        {
            link.last_heartbeat = now;
            self.send(agent_frame::Frame::Heartbeat(Heartbeat { at_us }));
        }
        if now.duration_since(self.last_job_heartbeat) >= self.job_heartbeat {
            self.last_job_heartbeat = now;
            let jobs: Vec<JobKey> = self.jobs.iter().filter(|(_, held)| !held.reported).map(|(key, _)| *key).collect();
            for job in jobs {
                self.send(agent_frame::Frame::JobHeartbeat(JobHeartbeat { job: Some(job.to_ref()), at_us }));
            }
        }
    }

    /// Before the orchestrator may give a job to somebody else, it is ended here.
    fn fence(&mut self, now: Instant) {
        let Some((since, cut)) = self.down else { return };
        let part = if cut == Cut::Silent { self.recovery_window * 3 / 4 } else { self.recovery_window * 7 / 8 };
        if now.duration_since(since) < part || self.config.keep_running_when_fenced {
            return;
        }
        for (job, held) in &self.jobs {
            let stop = if held.started {
                Stop::Graceful {
                    reason: FailureReason::AgentLost,
                    message: format!(
                        "no contact with the orchestrator for {} s; the agent ended the job",
                        part.as_secs()
                    ),
                    grace: FENCE_GRACE,
                    more_steps: false,
                }
            } else {
                Stop::Abandon { grace: FENCE_GRACE }
            };
            if *held.stop.borrow() == Stop::Run {
                tracing::error!(%job, "the lease is lost: the job is ended");
            }
            strengthen(&held.stop, stop);
        }
    }

    /// Numbers and sends a frame; `None` when there is no session or no room.
    fn send(&mut self, frame: agent_frame::Frame) -> Option<u64> {
        let link = self.link.as_mut()?;
        let seq = link.seq + 1;
        match link.out.try_send(AgentFrame { seq, frame: Some(frame) }) {
            Ok(()) => {
                link.seq = seq;
                Some(seq)
            }
            Err(error) => {
                tracing::warn!(%error, "a frame cannot be sent now");
                None
            }
        }
    }

    /// Sends what waits in the outbox.
    fn flush(&mut self) {
        let Some(link) = self.link.as_mut() else { return };
        self.post.flush(Instant::now(), |frame| {
            let seq = link.seq + 1;
            let frame = AgentFrame { seq, frame: frame.frame.clone() };
            link.out.try_send(frame).ok()?;
            link.seq = seq;
            Some(seq)
        });
    }

    fn settle(&mut self, settled: Vec<Settled>) {
        let outbox = self.outbox.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for settled in settled {
            let (Settled::Delete(file) | Settled::Bury(file, _)) = &settled;
            self.over(file);
            match (&outbox, &settled) {
                (Some(outbox), Settled::Delete(file)) => outbox.remove(file),
                (Some(outbox), Settled::Bury(file, why)) => outbox.bury(file, why),
                (None, _) => {}
            }
        }
    }

    fn expire(&mut self) {
        let outbox = self.outbox.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(outbox) = outbox else { return };
        for file in outbox.expired() {
            if self.post.drop_parcel(&file) {
                outbox.bury(&file, "nobody took it for 7 days");
            }
        }
    }

    /// Jobs that count against `max_concurrency`.
    fn active(&self) -> usize {
        self.jobs.values().filter(|held| !held.reported).count()
    }

    fn note_holding(&self) {
        self.holding.store(!self.jobs.is_empty() || self.post.len() > 0, Ordering::Relaxed);
    }
}
