//! The dispatcher: its parts, its public operations, and how it starts and stops.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use kici_engine::ids::{AgentId, IdSource, JobId, SessionId, TokenId};
use kici_engine::labels::CompiledSelector;
use kici_engine::state::JobStatus;
use kici_engine::time::{Clock, Ts};
use kici_protocol::agent::AgentDrain;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_protocol::close::CloseReason;
use kici_store::model::{Activate, Effects, JobRef};
use kici_store::{Store, StoreError, Topic, Wakeup};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::activate::Activator;
use crate::comings::Comings;
use crate::config::DispatchConfig;
use crate::deadlines::Deadlines;
use crate::decide::attempts::Attempts;
use crate::decide::gates::Holder;
use crate::decide::pressure::Pressure;
use crate::decide::violations::Ownership;
use crate::locks::Locks;
use crate::meters;
use crate::placing::Calls;
use crate::ports::{Change, Changes, Clones, Scaler};
use crate::registry::{AgentView, Registry};
use crate::routing::Shown;
use crate::scaling::Scaling;
use crate::timers::Timer;
use crate::triage::LateTriage;

/// How long after the end of a delivery whose job is tried again its agent may begin to bring logs.
const LOGS_OF_RETRIED: std::time::Duration = std::time::Duration::from_secs(600);

/// What the dispatcher is built on.
#[derive(Clone)]
pub struct Ports {
    /// Clone sources with credentials.
    pub clones: Arc<dyn Clones>,
    /// Who is told of changes.
    pub changes: Arc<dyn Changes>,
    /// Starts agents on demand; none leaves jobs to the agents that connect by themselves.
    pub scaler: Option<Arc<dyn Scaler>>,
    /// Now.
    pub clock: Arc<dyn Clock>,
    /// Fresh ids.
    pub ids: Arc<dyn IdSource>,
}

/// A fault of the dispatcher.
#[derive(Debug, thiserror::Error)]
pub enum DispatchError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No such run.
    #[error("no such run")]
    NoSuchRun,
    /// The run had ended.
    #[error("the run has ended already ({0})")]
    AlreadyTerminal(kici_engine::state::RunStatus),
    /// The job is not in the queue.
    #[error("no such job in the queue")]
    NoSuchJob,
    /// The agent is not connected here.
    #[error("no such agent is connected")]
    NoSuchAgent,
}

/// Whether this instance gives out jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainStatus {
    /// It gives out none.
    pub draining: bool,
    /// Jobs that agents connected here hold.
    pub jobs_running: usize,
}

/// Host names of the roster's static hosts.
#[derive(Debug)]
pub(crate) struct KnownHosts {
    pub read_at: tokio::time::Instant,
    /// Who has a name, in lower case.
    pub by_name: HashMap<String, Vec<Holder>>,
    /// The names that operators declared.
    pub declared: HashMap<AgentId, String>,
}

/// Gives jobs to agents and follows them to their end. One per orchestrator process.
pub struct Dispatcher {
    pub(crate) config: DispatchConfig,
    pub(crate) store: Store,
    pub(crate) clones: Arc<dyn Clones>,
    pub(crate) changes: Arc<dyn Changes>,
    pub(crate) scaler: Option<Arc<dyn Scaler>>,
    pub(crate) scaling: Scaling,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) ids: Arc<dyn IdSource>,
    pub(crate) registry: Registry,
    pub(crate) comings: Comings,
    pub(crate) locks: Arc<Locks>,
    pub(crate) activator: Arc<Activator>,
    pub(crate) deadlines: Deadlines<Timer>,
    pub(crate) work: Notify,
    pub(crate) calls: Calls,
    pub(crate) routing: Notify,
    pub(crate) turns: Notify,
    pub(crate) gates: Notify,
    pub(crate) backpressure: Pressure,
    pub(crate) draining: AtomicBool,
    pub(crate) claims_stopped: Mutex<Option<String>>,
    pub(crate) selectors: Mutex<HashMap<String, Option<Arc<CompiledSelector>>>>,
    /// Held during a look at what waits.
    pub(crate) routing_shown: tokio::sync::Mutex<Shown>,
    /// Not more than there are jobs under way.
    pub(crate) late_triage: Mutex<Vec<LateTriage>>,
    pub(crate) known_hosts: tokio::sync::Mutex<Option<Arc<KnownHosts>>>,
    pub(crate) claim_attempts: Mutex<Attempts>,
    pub(crate) started: tokio::time::Instant,
    pub(crate) stopping: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatcher").field("instance", &self.config.instance).finish_non_exhaustive()
    }
}

impl Dispatcher {
    /// A dispatcher that does nothing yet, see [`start`](Self::start).
    pub fn new(config: DispatchConfig, store: Store, ports: Ports) -> Arc<Self> {
        let locks = Arc::new(Locks::default());
        let activator = Activator {
            locks: locks.clone(),
            clock: ports.clock.clone(),
            queue_timeout: config.queue_timeout,
            machine_id: config.machine_id.clone(),
            roster_grace: config.roster_grace,
            ids: ports.ids.clone(),
            max_fanout_hosts: config.max_fanout_hosts,
        };
        Arc::new(Self {
            config,
            store,
            clones: ports.clones,
            changes: ports.changes,
            scaler: ports.scaler,
            scaling: Scaling::default(),
            clock: ports.clock,
            ids: ports.ids,
            registry: Registry::default(),
            comings: Comings::default(),
            locks,
            activator: Arc::new(activator),
            deadlines: Deadlines::default(),
            work: Notify::new(),
            calls: Calls::default(),
            routing: Notify::new(),
            turns: Notify::new(),
            gates: Notify::new(),
            backpressure: Pressure::default(),
            draining: AtomicBool::new(false),
            claims_stopped: Mutex::default(),
            selectors: Mutex::default(),
            routing_shown: tokio::sync::Mutex::default(),
            late_triage: Mutex::default(),
            known_hosts: tokio::sync::Mutex::default(),
            claim_attempts: Mutex::default(),
            started: tokio::time::Instant::now(),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
        })
    }

    /// Takes the jobs that this instance, or a dead one, handed out before it stopped into recovery, then starts to give
    /// out jobs. Call once, before sessions are served.
    ///
    /// # Errors
    /// [`DispatchError::Store`] when the rows cannot be read.
    pub async fn start(self: &Arc<Self>) -> Result<(), DispatchError> {
        self.recover_after_start().await?;
        self.measure_room().await?;
        let this = self.clone();
        self.tasks.spawn(async move { this.pump().await });
        let this = self.clone();
        self.tasks.spawn(async move { this.run_timers().await });
        let this = self.clone();
        self.tasks.spawn(async move { this.watch_routing().await });
        let this = self.clone();
        self.tasks.spawn(async move { this.watch_turns().await });
        if self.scaler.is_some() {
            let this = self.clone();
            self.tasks.spawn(async move { this.watch_demand().await });
        }
        let this = self.clone();
        self.tasks.spawn(async move { this.watch_gates().await });
        let this = self.clone();
        self.tasks.spawn(async move { this.follow_store().await });
        self.wake();
        self.turns.notify_one();
        self.gates.notify_one();
        Ok(())
    }

    /// Ends all sessions and waits for what is under way. Jobs go on at their agents, which come back later.
    pub async fn stop(&self) {
        self.stopping.cancel();
        for link in self.registry.links() {
            link.close(CloseReason::GoingAway, "the orchestrator stops; come back");
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn follow_store(self: Arc<Self>) {
        let mut wakeups = self.store.subscribe(|topic| {
            matches!(topic, Topic::Queue | Topic::Slots | Topic::Gates | Topic::Revocations | Topic::Cancels)
        });
        loop {
            let wakeup = tokio::select! {
                () = self.stopping.cancelled() => return,
                wakeup = wakeups.next() => wakeup,
            };
            match wakeup {
                None => return,
                Some(Wakeup::Changed(Topic::Revocations)) => self.close_invalid_tokens().await,
                Some(Wakeup::Changed(Topic::Cancels)) => self.stop_cancelled().await,
                Some(Wakeup::Changed(Topic::Slots)) => self.turns.notify_one(),
                Some(Wakeup::Changed(Topic::Gates)) => self.gates.notify_one(),
                Some(Wakeup::Changed(_)) => self.wake(),
                Some(Wakeup::Missed) => {
                    self.wake();
                    self.turns.notify_one();
                    self.gates.notify_one();
                    self.close_invalid_tokens().await;
                    self.stop_cancelled().await;
                }
            }
        }
    }

    /// New jobs wait, or something came free: look for work now. Never blocks; calls during a pass lead to one more pass.
    pub fn wake(&self) {
        self.calls.make();
        self.work.notify_one();
    }

    /// The decisions on jobs whose needs are met, for operations of the store that want them. Places no jobs, see
    /// [`place`](Self::place).
    pub fn activate(&self) -> Arc<dyn Activate> {
        self.activator.clone()
    }

    /// When a job that is queued now has waited too long; none is never. For the roots of new runs.
    pub fn queue_expires_at(&self) -> Option<Ts> {
        self.activator.expires_at()
    }

    /// Carries out what follows from a committed change of jobs: tells readers and agents, frees slots, looks for work.
    /// Everybody who gets [`Effects`] from the store calls this.
    pub fn apply_effects(self: &Arc<Self>, effects: &Effects) {
        self.stop_at_agents(&effects.to_stop, false);
        // An agent that was told to stop keeps its slot until it says that the job is gone.
        let stopping = |job: JobRef| effects.to_stop.iter().any(|held| held.job == job);
        let mut came_free = false;
        for finished in effects.finished_jobs.iter().filter(|finished| !stopping(finished.job)) {
            came_free |= self.let_go(finished.job);
        }
        for job in &effects.retried {
            tracing::info!(job = %job.job_id, epoch = job.epoch, "a job that failed is tried again");
            meters::requeued("retry");
            self.let_go(*job);
            let (run_id, job_id, status) = (job.run_id, job.job_id, JobStatus::Queued);
            self.changes.publish(Change::Job { run_id, job_id, status });
        }
        for finished in &effects.finished_jobs {
            self.settled(finished.job.job_id, finished.reason);
        }
        self.tell(effects);
        let queued: Vec<JobId> =
            effects.newly_queued.iter().copied().chain(effects.retried.iter().map(|job| job.job_id)).collect();
        if !queued.is_empty() {
            self.jobs_queued(&queued);
        } else if came_free {
            self.wake();
        }
    }

    /// Tells readers what changed.
    pub(crate) fn tell(&self, effects: &Effects) {
        let run_id = effects.run.id;
        for finished in &effects.finished_jobs {
            self.changes.publish(Change::Job { run_id, job_id: finished.job.job_id, status: finished.status });
        }
        self.changes.publish(Change::Run {
            run_id,
            routing_key: Some(effects.run.event.routing_key.clone()),
            status: effects.run.status,
        });
        if effects.run_finished {
            meters::run_finished(&effects.run);
            // Only a run that an event started can have somebody who waits for it.
            if effects.run.chain_depth > 0 {
                self.gates.notify_one();
            }
        }
    }

    /// Takes an ended job from the agent that holds it here. True when the agent became free.
    pub(crate) fn let_go(&self, job: JobRef) -> bool {
        self.forget_timers(job);
        match self.registry.holder(job) {
            Some((identity, _, _)) => self.registry.untrack_of(&identity.agent_id, job, true),
            None => false,
        }
    }

    /// The agents that are connected here, by name.
    pub fn agents(&self) -> Vec<AgentView> {
        self.registry.views()
    }

    /// Whether the agent of a session may speak for a job: for services next to the session, such as logs. `NotOwned` when
    /// the session is not current.
    pub async fn owns(&self, session: SessionId, job: JobRef) -> Ownership {
        if self.registry.holds(session, job) {
            return Ownership::Owned;
        }
        match self.registry.identity(session) {
            Some(identity) => self.ownership_in_store(job, &identity.agent_id).await,
            None => Ownership::NotOwned,
        }
    }

    /// Whether a delivery ended a short while ago and the job is tried again: its agent may still bring the rest of its logs.
    pub async fn ended_lately(&self, job: JobRef) -> bool {
        let now = self.clock.now();
        let lately = |at: Ts| now.since(at) < LOGS_OF_RETRIED;
        match self.store.dispatch_history(job.job_id).await {
            Ok(history) => history.iter().any(|record| {
                record.epoch == job.epoch
                    && record.outcome.as_deref() == Some("retried")
                    && record.ended_at.is_some_and(lately)
            }),
            // The agent asks again.
            Err(_) => false,
        }
    }

    /// The agent of a session and its token, while the session is current.
    pub fn session_agent(&self, session: SessionId) -> Option<(AgentId, Option<TokenId>)> {
        self.registry.identity(session).map(|identity| (identity.agent_id, identity.token_id))
    }

    /// Lets an agent finish its jobs and take no more, or work again.
    ///
    /// # Errors
    /// [`DispatchError::NoSuchAgent`] when it is not connected here.
    pub async fn drain_agent(&self, agent: &AgentId, drain: bool) -> Result<(), DispatchError> {
        let why = drain.then(|| "asked to by an operator".to_owned());
        let link = self.registry.set_draining(agent, why).ok_or(DispatchError::NoSuchAgent)?;
        // The mark here is what counts; an agent whose session just ended says so itself when it is back.
        let _ = link.send(Frame::AgentDrain(AgentDrain { drain })).await;
        if !drain {
            self.wake();
        }
        Ok(())
    }

    /// Ends the sessions that were opened with a token; returns how many.
    pub fn close_token(&self, token: TokenId) -> usize {
        let links = self.registry.of_token(token);
        for link in &links {
            link.close(CloseReason::AuthRevoked, "the token was revoked; give the agent a new one");
        }
        links.len()
    }

    /// Gives out no jobs any more, or gives them out again. Running jobs go on. A restart forgets it.
    pub fn drain(&self, drain: bool) -> DrainStatus {
        self.draining.store(drain, Ordering::SeqCst);
        meters::draining(drain);
        if !drain {
            self.wake();
        }
        self.drain_status()
    }

    /// Whether this instance gives out jobs, and how many run.
    pub fn drain_status(&self) -> DrainStatus {
        let (_, jobs_running) = self.registry.counts();
        DrainStatus { draining: self.draining.load(Ordering::SeqCst), jobs_running }
    }

    /// Stops to give out jobs for a reason that operators see (a full disk), or goes on.
    pub fn stop_claims(&self, why: Option<String>) {
        let go_on = why.is_none();
        let before =
            std::mem::replace(&mut *self.claims_stopped.lock().unwrap_or_else(std::sync::PoisonError::into_inner), why);
        // Said every second; only a change is worth a look at the queue.
        if go_on && before.is_some() {
            self.wake();
        }
    }

    /// Why this instance gives out no jobs; none when it does.
    pub(crate) fn not_claiming(&self) -> Option<String> {
        if self.stopping.is_cancelled() {
            return Some("this orchestrator stops".to_owned());
        }
        if self.draining.load(Ordering::SeqCst) {
            return Some("this orchestrator drains".to_owned());
        }
        self.claims_stopped.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}
