//! The facade: every operation of the store, declared once.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::{
    AgentId, DeliveryRowId, EventId, IdSource, InstanceId, JobId, RegistrationId, RunId, SourceId, TokenId,
};
use kici_engine::lock::GitCredentials;
use kici_engine::state::JobStatus;
use kici_engine::time::{Clock, Ts};
use serde_json::Value as Json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::ctx::Shared;
use crate::model::*;
use crate::notify::{Notifier, Topic, Wakeups};
use crate::pg::Postgres;
use crate::sqlite::Sqlite;
use crate::{StoreError, pg, sqlite};

/// When a commit counts as durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// It survives a power failure.
    #[default]
    Full,
    /// It survives a crash of the process; a power failure may lose the last commits, never tear one.
    Normal,
}

/// How to open a store.
#[derive(Clone)]
pub struct StoreConfig {
    /// `sqlite:PATH` or `postgres://…`.
    pub url: String,
    /// When a commit counts as durable.
    pub durability: Durability,
    /// Connections for reading.
    pub pool_max: usize,
    /// This instance.
    pub node: InstanceId,
    /// Now.
    pub clock: Arc<dyn Clock>,
    /// Fresh ids.
    pub ids: Arc<dyn IdSource>,
}

/// Which writer a write goes to. On SQLite there is only one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane(usize);

impl Lane {
    /// Lanes that writes of runs and deliveries are spread over.
    const SPREAD: usize = 4;
    /// All lanes.
    pub(crate) const COUNT: usize = 2 + Self::SPREAD;
    /// What belongs to no run.
    const META: Self = Self(0);
    /// Claims: they skip rows that others hold and so never wait for another lane.
    const CLAIMS: Self = Self(1);

    pub(crate) const fn index(self) -> usize {
        self.0
    }

    fn of(id: Uuid) -> Self {
        // The last byte of a version 7 UUID is random.
        Self(2 + usize::from(id.as_bytes()[15]) % Self::SPREAD)
    }

    fn text(text: &str) -> Self {
        let sum = text.bytes().fold(0_u8, u8::wrapping_add);
        Self(2 + usize::from(sum) % Self::SPREAD)
    }

    fn first(steps: &[StepWrite]) -> Self {
        steps.first().map_or(Self::META, |step| Self::of(step.job.run_id.uuid()))
    }
}

/// The store; cheap to clone.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Backend,
    notifier: Notifier,
    shared: Arc<Shared>,
    #[cfg(feature = "testing")]
    death: crate::testing::Death,
}

impl Inner {
    /// Before each operation; fails once the process is dead to the database, which only tests bring about.
    #[inline]
    fn alive(&self) -> Result<(), StoreError> {
        #[cfg(feature = "testing")]
        self.death.check()?;
        Ok(())
    }

    /// After each write; a process that dies right behind its commit does not get to know of it.
    #[inline]
    fn written<T>(&self, name: &'static str, done: Result<T, StoreError>) -> Result<T, StoreError> {
        #[cfg(feature = "testing")]
        self.death.after(name, done.is_ok())?;
        let _ = name;
        if let Err(error) = &done
            && let Some(kind) = fault(error)
        {
            metrics::counter!("kici_orch_db_errors_total", "kind" => kind).increment(1);
        }
        done
    }
}

/// The kind of an error that is the database's own fault, as a metric's label; none for an answer.
fn fault(error: &StoreError) -> Option<&'static str> {
    match error {
        StoreError::Conflict(_) => Some("conflict"),
        StoreError::Unavailable(_) => Some("unavailable"),
        StoreError::Full(_) => Some("full"),
        StoreError::Corrupt { .. } => Some("corrupt"),
        _ => None,
    }
}

enum Backend {
    Sqlite(Sqlite),
    Pg(Postgres),
}

impl Store {
    /// Opens the database and its pools. Does not migrate.
    ///
    /// # Errors
    /// `Config` when the address is wrong or another program has the SQLite file open, `Unavailable` when the database
    /// does not answer.
    pub async fn open(config: StoreConfig) -> Result<Self, StoreError> {
        let notifier = Notifier::new();
        let shared = Arc::new(Shared::new(config.node, config.clock, config.ids));
        let backend = if let Some(path) = config.url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path == ":memory:" {
                return Err(StoreError::Config("the database needs a file: `sqlite:PATH`".to_owned()));
            }
            let (durability, readers) = (config.durability, config.pool_max.min(4));
            Backend::Sqlite(Sqlite::open(path.into(), durability, readers, shared.clone(), notifier.clone()).await?)
        } else if config.url.starts_with("postgres://") || config.url.starts_with("postgresql://") {
            let (durability, max) = (config.durability, config.pool_max);
            Backend::Pg(Postgres::open(config.url, durability, max, shared.clone(), notifier.clone()).await?)
        } else {
            // The address may hold a password: it is not repeated here.
            return Err(StoreError::Config("the database must be `sqlite:PATH` or `postgres://…`".to_owned()));
        };
        let inner = Inner {
            backend,
            notifier,
            shared,
            #[cfg(feature = "testing")]
            death: Default::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Brings the schema up to date under a lock; returns the names of the migrations that were applied. On PostgreSQL the
    /// runtime must have several threads.
    ///
    /// # Errors
    /// `SchemaTooNew` when a newer version was here that does not allow this one beside it.
    pub async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        match &self.inner.backend {
            Backend::Sqlite(sqlite) => sqlite.migrate().await,
            Backend::Pg(pg) => pg.migrate().await,
        }
    }

    /// One round trip to the database.
    ///
    /// # Errors
    /// `Unavailable` when it does not answer.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.registry_version().await.map(drop)
    }

    /// Finishes what is being written, then closes all connections. Later operations are `Unavailable`.
    pub async fn close(&self) {
        match &self.inner.backend {
            Backend::Sqlite(sqlite) => sqlite.close().await,
            Backend::Pg(pg) => pg.close().await,
        }
    }

    /// Sets how many jobs may wait for an agent, `pending` of which do now. Those that become ready beyond that fail with
    /// `queue_full`; what goes back to the queue is always taken. Without a call there is no limit.
    pub fn limit_queue(&self, max: u64, pending: u64) {
        self.inner.shared.set_room(max, pending);
    }

    /// Sets the longest chain of events; the end of a run beyond it is not told to other workflows. 10 without a call.
    pub fn limit_chains(&self, max_depth: u32) {
        self.inner.shared.set_max_chain_depth(max_depth);
    }

    /// Which database: `sqlite` or `postgres`.
    pub fn backend(&self) -> &'static str {
        match &self.inner.backend {
            Backend::Sqlite(_) => "sqlite",
            Backend::Pg(_) => "postgres",
        }
    }

    /// Where this store's process dies, for tests.
    #[cfg(feature = "testing")]
    pub fn death(&self) -> &crate::testing::Death {
        &self.inner.death
    }

    /// Wake-ups of the topics that `wanted` accepts. Subscribe before looking: a wake-up between is then not lost.
    pub fn subscribe(&self, wanted: fn(&Topic) -> bool) -> Wakeups {
        self.inner.notifier.subscribe(wanted)
    }
}

/// Declares operations: mode, module and signature. The functions of the same name in `shared/` take the connection, the
/// context and each argument by reference.
macro_rules! facade {
    ($($(#[$doc:meta])* $mode:ident $(($lane:expr))? $module:ident::$name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ty;)*) => {
        impl Store {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`StoreError`].
            pub async fn $name(&self, $($arg: $ty),*) -> Result<$out, StoreError> {
                facade!(@$mode self $(($lane))? $module $name ($($arg)*))
            }
        )*}
    };
    (@write $self:ident ($lane:expr) $module:ident $name:ident ($($arg:ident)*)) => {{
        let lane: Lane = $lane;
        // Of the task that asks: the writer runs on another one.
        let fence = crate::fence::current();
        let args = Arc::new(($($arg,)*));
        $self.inner.alive()?;
        let done = match &$self.inner.backend {
            Backend::Sqlite(db) => db.write(stringify!($name), move |conn, ctx| {
                let args = Arc::clone(&args);
                Box::pin(async move {
                    let ($($arg,)*) = &*args;
                    sqlite::shared::$module::$name(conn, ctx, $($arg),*).await
                })
            }).await,
            Backend::Pg(db) => db.write(lane, stringify!($name), move |conn, ctx| {
                let args = Arc::clone(&args);
                let fence = fence.clone();
                Box::pin(async move {
                    pg::check_fence(conn, fence.as_ref()).await?;
                    let ($($arg,)*) = &*args;
                    pg::shared::$module::$name(conn, ctx, $($arg),*).await
                })
            }).await,
        };
        $self.inner.written(stringify!($name), done)
    }};
    (@read $self:ident $module:ident $name:ident ($($arg:ident)*)) => {{
        $self.inner.alive()?;
        match &$self.inner.backend {
            Backend::Sqlite(db) => db.read(move |conn, ctx| Box::pin(async move {
                sqlite::shared::$module::$name(conn, ctx, $(&$arg),*).await
            })).await,
            Backend::Pg(db) => db.read(move |conn, ctx| Box::pin(async move {
                pg::shared::$module::$name(conn, ctx, $(&$arg),*).await
            })).await,
        }
    }};
}

mod bus;
mod intake;
mod stored;

facade! {
    // ---- meta, instances, leases
    /// Identity of this installation; made on first use.
    write(Lane::META) meta::cluster_id() -> Uuid;
    /// Reads a setting of the installation.
    read meta::meta_get(key: String) -> Option<String>;
    /// Writes a setting of the installation.
    write(Lane::META) meta::meta_set(key: String, value: String) -> ();
    /// Inserts or renews the row of an instance; `last_seen_at` is taken from the store's clock.
    write(Lane::META) meta::instance_heartbeat(instance: Instance) -> ();
    /// All instances.
    read meta::instance_list() -> Vec<Instance>;
    /// Instances that gave no sign of life since `before`, and those that stopped in order and left jobs at agents, by name.
    read meta::instance_dead(before: Ts) -> Vec<InstanceId>;
    /// Forgets an instance (clean stop, or dead).
    write(Lane::META) meta::instance_remove(id: InstanceId) -> ();
    /// Takes or renews the lease `name` for this start of this instance, by the clock of the database. On SQLite it is always
    /// granted.
    write(Lane::META) meta::lease_acquire(name: String, ttl: Duration) -> LeaseAnswer;
    /// Gives the lease back, if this instance holds it.
    write(Lane::META) meta::lease_release(name: String) -> ();

    // ---- sources
    /// Stores a source. `Exists` names `name` or `routing_key`.
    write(Lane::META) sources::source_create(new: NewSource) -> Source;
    /// The sources that are not removed, by name.
    read sources::source_list(org: String) -> Vec<Source>;
    /// A source by its name, unless removed.
    read sources::source_get(org: String, name: String) -> Option<Source>;
    /// A source by its id, also when removed.
    read sources::source_by_id(id: SourceId) -> Option<Source>;
    /// A source by its routing key, unless removed.
    read sources::source_by_routing_key(routing_key: String) -> Option<Source>;
    /// Changes a source that is still at `version`; else `Changed`.
    write(Lane::META) sources::source_update(id: SourceId, version: i64, change: SourceChange) -> Source;
    /// Removes a source; it stays readable by id. False when it was gone.
    write(Lane::META) sources::source_remove(id: SourceId) -> bool;
    /// Registrations of enabled sources that have `trigger_type`; none is all.
    read sources::registration_list(org: String, routing_key: Option<String>, trigger_type: Option<String>) -> Vec<Registration>;
    /// Switches a registration on, or off on behalf of somebody. False when there is none.
    write(Lane::META) sources::registration_enable(id: RegistrationId, enabled: bool, by: String) -> bool;
    /// Replaces the registrations of a repository.
    write(Lane::META) sources::registrations_replace(set: RegistrationSet) -> ();
    /// Raised by every change of a registration.
    read sources::registry_version() -> i64;

    // ---- retention: what is older than `before`, at most `limit`, and never what is still open
    /// Deletes ended rows of the queue; returns how many.
    write(Lane::META) retention::queue_prune(before: Ts, limit: u32) -> u64;
    /// Bodies in the object store: delete the object, then call `delivery_body_expired`.
    read retention::payloads_older(before: Ts, limit: u32) -> Vec<(DeliveryRowId, String)>;
    /// Deletes decision traces; returns how many.
    write(Lane::META) retention::traces_prune(before: Ts, limit: u32) -> u64;
    /// Deletes finished deliveries that have no body in the object store; returns how many.
    write(Lane::META) retention::deliveries_prune(before: Ts, limit: u32) -> u64;
    /// Runs that ended and whose logs were not removed yet: delete the objects, then call `run_logs_gone`.
    read retention::runs_with_old_logs(before: Ts, limit: u32) -> Vec<RunId>;
    /// The logs of these runs are removed.
    write(Lane::META) retention::run_logs_gone(ids: Vec<RunId>) -> ();
    /// Runs that ended: delete their objects, then call `runs_prune`.
    read retention::runs_older(before: Ts, limit: u32) -> Vec<RunId>;
    /// Deletes runs that have ended, with all their rows; returns how many.
    write(Lane::META) retention::runs_prune(ids: Vec<RunId>) -> u64;

    // ---- runs
    /// Creates a run. With a request key `(scope, key)`, a repetition returns the run of the first call.
    write(Lane::of(run.id.uuid())) runs::run_create(run: NewRun, request_key: Option<(String, String)>, activate: Arc<dyn Activate>) -> CreatedRun;
    /// A lock document: JSON of `kici_engine::lock::Workflow`.
    read runs::lock_document(digest: String) -> Option<Vec<u8>>;
    /// One run.
    read run_lists::run_get(id: RunId) -> Option<Run>;
    /// Runs, newest first.
    read run_lists::run_list(filter: RunFilter, page: Page) -> Listed<Run>;
    /// One job.
    read run_lists::job_get(id: JobId) -> Option<Job>;
    /// The last delivery and the status of each of these jobs.
    read run_lists::job_standings(ids: Vec<JobId>) -> Vec<(JobId, u32, JobStatus)>;
    /// The jobs of a run, in order of creation.
    read run_lists::jobs_of_run(id: RunId) -> Vec<Job>;
    /// The edges of a run.
    read run_lists::needs_of_run(id: RunId) -> Vec<NeedEdge>;
    /// The steps of a run at each job's last epoch, by job and place.
    read steps::steps_of_run(id: RunId) -> Vec<Step>;
    /// The steps of one delivery of a job.
    read steps::steps_of_job(job: JobId, epoch: u32) -> Vec<Step>;
    /// Keeps the jobs that a generator made, for the moment in which it ends well.
    write(Lane::of(new.job.run_id.uuid())) generated::generated_put(new: NewGenerated) -> Guarded;
    /// Digest and number of the jobs that a generator reported last.
    read generated::generated_get(job: JobId) -> Option<(String, u32)>;
    /// Jobs that wait for runs that they started, oldest first.
    read gates::gates_open(limit: u32) -> Vec<OpenGate>;
    /// Whether a job waits for what an event starts.
    read gates::gate_of_event(id: EventId) -> bool;
    /// Says on a job what it waits for.
    write(Lane::of(run.uuid())) gates::gate_note(run: RunId, job: JobId, note: String) -> ();
    /// Ends a job that waited for runs that it started, or its waiting when it has ended by itself.
    write(Lane::of(run.uuid())) gates::gate_settle(run: RunId, job: JobId, verdict: GateVerdict, activate: Arc<dyn Activate>) -> Option<Effects>;
    /// Applies changes of steps in order; one answer each. A terminal step never changes.
    write(Lane::first(&steps)) steps::step_upsert(steps: Vec<StepWrite>) -> Vec<StepWritten>;
    /// Marks the logs of a delivery's steps as sealed, with their final sizes `(step_key, bytes, lines)`.
    write(Lane::of(job.run_id.uuid())) steps::steps_sealed(job: JobRef, sizes: Vec<(String, u64, u64)>) -> ();
    /// Deliveries that ended but whose logs are not sealed, at most `limit`.
    read steps::logs_unsealed(limit: u32) -> Vec<JobRef>;
    /// Notes signs of life; unknown and terminal jobs are passed over.
    write(Lane::META) steps::job_heartbeats(beats: Vec<(JobRef, Ts)>) -> ();
    /// Ends a job and does all that follows, in one transaction.
    write(Lane::of(result.job.run_id.uuid())) results::job_finish(result: JobResult, activate: Arc<dyn Activate>) -> JobFinished;
    /// As [`Store::job_finish`], after the last words on its steps, in one transaction: a reader that sees the job ended
    /// sees its steps.
    write(Lane::of(result.job.run_id.uuid())) results::job_report(steps: Vec<StepWrite>, result: JobResult, activate: Arc<dyn Activate>) -> (Vec<StepWritten>, JobFinished);
    /// Ends a job without a result of its agent (loss, expiry, unroutable), in one transaction. `Stale` when the row is
    /// no longer in the expected state.
    write(Lane::of(request.job.run_id.uuid())) runs::job_fail(request: FailRequest, activate: Arc<dyn Activate>) -> JobFinished;
    /// Cancels a run.
    write(Lane::of(request.run_id.uuid())) runs::run_cancel(request: CancelRequest, activate: Arc<dyn Activate>) -> CancelOutcome;
    /// A job notices its cancel: `running` becomes `cancelling`, with the time by which it is enforced.
    write(Lane::of(job.run_id.uuid())) runs::job_cancelling(job: JobRef, agent_id: AgentId, deadline: Option<Ts>) -> Guarded;
    /// How many jobs wait for an agent, counted up to `most`.
    read queue_lists::queue_waiting(most: u64) -> u64;
    /// What runs have yet to learn of their slots: `run_advance` those that got one, cancel those that a newer run wants to
    /// end. Oldest first.
    read slots::slot_news(limit: u32) -> Vec<SlotNews>;
    /// The claims of a run and its jobs on concurrency groups, also those that are over, in the order in which they came.
    read slots::slots_of_run(id: RunId) -> Vec<Slot>;
    /// Who waits for a slot since `before` or longer.
    read slots::slots_waiting_since(before: Ts, limit: u32) -> Vec<SlotWait>;
    /// Ends the wait for a slot: what waits fails. None when it does not wait any more.
    write(Lane::of(wait.run_id.uuid())) slots::slot_expire(wait: SlotWait, message: String, activate: Arc<dyn Activate>) -> Option<Effects>;
    /// Takes slots back from runs that have ended, if any were left with them; returns in how many groups.
    write(Lane::META) slots::slots_reclaim(limit: u32) -> u64;
    /// Plans a repetition of a run: all jobs, or those that did not end well and what needs them.
    read run_lists::run_rerun_plan(id: RunId, failed_only: bool) -> Rerun;
    /// Runs that are not terminal, oldest first.
    read run_lists::runs_open(limit: u32) -> Vec<RunId>;
    /// Runs past their deadline that nobody has cancelled.
    read run_lists::runs_past_deadline(limit: u32) -> Vec<RunId>;
    /// Open runs without a row in the queue that were created before `before`, oldest first: nothing will move them.
    read run_lists::runs_idle(before: Ts, limit: u32) -> Vec<RunId>;
    /// Lets jobs of a run go on whose turn has come. None when it has ended.
    write(Lane::of(id.uuid())) runs::run_advance(id: RunId, activate: Arc<dyn Activate>) -> Option<Effects>;
    /// Lets an idle run go on: activates what is ready, fails jobs whose needs can never be met, and concludes the run.
    write(Lane::of(id.uuid())) runs::run_unstick(id: RunId, activate: Arc<dyn Activate>) -> Option<Effects>;
    /// Runs that have been cancelling since before `before`.
    read run_lists::runs_cancelling_since(before: Ts, limit: u32) -> Vec<RunId>;
    /// Jobs that started before `started_before` and gave no sign of life since `before`.
    read run_lists::jobs_stale(before: Ts, limit: u32) -> Vec<HeldJob>;
    /// Running jobs past their own limit plus `slack`.
    read run_lists::jobs_past_timeout(slack: Duration, limit: u32) -> Vec<HeldJob>;

    // ---- queue
    /// The distinct selectors of rows that wait.
    read queue_lists::queue_selectors_pending() -> Vec<PendingSelector>;
    /// Claims for several agents at once; each job goes to one of them. Oldest first.
    write(Lane::CLAIMS) queue::queue_claim(requests: Vec<ClaimRequest>) -> Vec<ClaimedJob>;
    /// Claims this job for an agent, if it still waits.
    write(Lane::CLAIMS) queue::queue_claim_by_id(job: JobId, agent_id: AgentId) -> Option<ClaimedJob>;
    /// Undoes a delivery.
    write(Lane::of(request.job.run_id.uuid())) queue::queue_requeue(request: RequeueRequest, activate: Arc<dyn Activate>) -> Requeued;
    /// An offer was sent: an answer is due. `Lost` when it came already.
    write(Lane::of(job.run_id.uuid())) queue::queue_ack_arm(job: JobRef, agent_id: AgentId, deadline: Ts) -> Guarded;
    /// The agent took the job.
    write(Lane::of(job.run_id.uuid())) queue::queue_ack(job: JobRef, agent_id: AgentId) -> Guarded;
    /// The agent asks to start. Denied once `withdrawn` is cancelled, however long the write had to wait: with nobody there to
    /// hear the answer, the job would count as started and end as lost.
    write(Lane::of(job.run_id.uuid())) queue::job_start(job: JobRef, agent_id: AgentId, withdrawn: CancellationToken) -> StartVerdict;
    /// The agent is out of contact: it has until the deadline to come back.
    write(Lane::of(request.job.run_id.uuid())) queue::queue_recover(request: RecoverRequest) -> Guarded;
    /// The agent came back with the job.
    write(Lane::of(job.run_id.uuid())) queue::queue_resume(job: JobRef, agent_id: AgentId) -> Resumed;
    /// Rows that this agent holds.
    read queue_lists::queue_owned_by(agent_id: AgentId) -> Vec<QueueRow>;
    /// Rows held by agents of these instances.
    read queue_lists::queue_owned_by_instances(instances: Vec<InstanceId>) -> Vec<QueueRow>;
    /// Who may speak for a job.
    read queue_lists::queue_ownership(job: JobRef, agent_id: AgentId) -> Ownership;
    /// Rows whose answer is overdue.
    read queue_lists::queue_expired_acks(limit: u32) -> Vec<QueueRow>;
    /// Rows whose agent did not come back in time.
    read queue_lists::queue_expired_recoveries(limit: u32) -> Vec<QueueRow>;
    /// Rows that waited too long.
    read queue_lists::queue_expired_pending(limit: u32) -> Vec<QueueRow>;
    /// Rows handed over before `before` and acknowledged or not, but never started and without a heartbeat since.
    read queue_lists::queue_unstarted_since(before: Ts, limit: u32) -> Vec<QueueRow>;
    /// One row.
    read queue_lists::queue_get(job: JobId) -> Option<QueueRow>;
    /// Rows, oldest first.
    read queue_lists::queue_list(filter: QueueFilter) -> Vec<QueueRow>;
    /// Rows that wait, in the order in which they are taken.
    read queue_lists::queue_oldest_pending(limit: u32) -> Vec<QueueRow>;
    /// Those of these rows that wait.
    read queue_lists::queue_pending_of(jobs: Vec<JobId>) -> Vec<QueueRow>;
    /// Notes why no agent could be started for rows that wait, or that nothing stands in the way.
    write(Lane::META) queue_lists::queue_provisioning_set(errors: Vec<(JobId, Option<String>)>) -> ();
    /// How many rows wait for what.
    read queue_lists::queue_counts() -> QueueCounts;
    /// Deliveries of a job, oldest first.
    read queue_lists::dispatch_history(job: JobId) -> Vec<DispatchRecord>;
    /// Notes why rows are not taken, or that nothing hinders them any more.
    write(Lane::META) queue_lists::queue_routing_set(routings: Vec<Routing>) -> ();

    // ---- fleet
    /// Stores an agent token.
    write(Lane::META) tokens::agent_token_create(new: NewAgentToken) -> AgentToken;
    /// All agent tokens, newest first.
    read tokens::agent_token_list() -> Vec<AgentToken>;
    /// An agent token by the hash of what was presented.
    read tokens::agent_token_by_hash(hash: String) -> Option<AgentToken>;
    /// Revokes an agent token; false when there is none, or it is revoked already. Wakes `Topic::Revocations`.
    write(Lane::META) tokens::agent_token_revoke(id: TokenId) -> bool;
    /// Uses up a bootstrap token; false when somebody was faster.
    write(Lane::META) tokens::agent_token_consume(id: TokenId) -> bool;
    /// Notes when tokens were last used.
    write(Lane::META) tokens::agent_token_touch(seen: Vec<(TokenId, Ts)>) -> ();
    /// Deletes ephemeral and bootstrap tokens that expired before `before`, but those in use; returns their ids.
    write(Lane::META) tokens::agent_token_reap(before: Ts, except: Vec<TokenId>) -> Vec<TokenId>;
    /// Stores a claim code. `Exists` when there is one with this hash.
    write(Lane::META) claims::claim_create(new: NewClaim) -> ();
    /// Uses a claim code up, for whoever brings it. Of several at once one gets it.
    write(Lane::META) claims::claim_redeem(hash: String, by: String) -> Redeemed;
    /// Revokes the open claim codes of an agent; returns how many.
    write(Lane::META) claims::claims_revoke(agent_id: AgentId) -> u64;
    /// Deletes claim codes that expired before `before`; returns how many.
    write(Lane::META) claims::claims_reap(before: Ts) -> u64;
    /// Stores an operator's token.
    write(Lane::META) tokens::admin_token_create(new: NewAdminToken) -> AdminToken;
    /// All operators' tokens, newest first.
    read tokens::admin_token_list() -> Vec<AdminToken>;
    /// An operator's token by the hash of what was presented.
    read tokens::admin_token_by_hash(hash: String) -> Option<AdminToken>;
    /// Revokes an operator's token; false when there is none, or it is revoked already.
    write(Lane::META) tokens::admin_token_revoke(id: TokenId) -> bool;
    /// Notes when tokens were last used.
    write(Lane::META) tokens::admin_token_touch(seen: Vec<(TokenId, Ts)>) -> ();
    /// An agent registered at this instance.
    write(Lane::META) roster::roster_upsert(entry: RosterEntry) -> RosterHost;
    /// All hosts, by agent.
    read roster::roster_list() -> Vec<RosterHost>;
    /// One host.
    read roster::roster_get(agent_id: AgentId) -> Option<RosterHost>;
    /// Notes signs of life of agents that are connected to this instance.
    write(Lane::META) roster::roster_seen(seen: Vec<(AgentId, Ts)>) -> ();
    /// An agent's session at this instance ended.
    write(Lane::META) roster::roster_disconnected(agent_id: AgentId) -> ();
    /// Declares a host: what is given replaces what is there. True when it was not known before.
    write(Lane::META) roster::roster_declare(declared: DeclaredHost) -> (RosterHost, bool);
    /// Removes a host unless it is connected to a live instance.
    write(Lane::META) roster::roster_remove(agent_id: AgentId) -> HostRemoved;
    /// Sets a property of a host beside those it has, the system's own too. False when there is no such host.
    write(Lane::META) roster::roster_property_set(agent_id: AgentId, key: String, value: Json) -> bool;
    /// A host is about to restart; false when there is no such host. A later request replaces an earlier one.
    write(Lane::META) roster::roster_reboot_request(agent_id: AgentId, reboot: PendingReboot) -> bool;
    /// The restart that was due by `until` is over or called off; false when it is not the pending one.
    write(Lane::META) roster::roster_reboot_clear(agent_id: AgentId, until: Ts) -> bool;
    /// Hosts that are about to restart.
    read roster::roster_rebooting() -> Vec<RosterHost>;
    /// Deletes hosts of ephemeral agents not seen since `before` and not connected to a live instance; returns them.
    write(Lane::META) roster::roster_reap(before: Ts) -> Vec<AgentId>;
    /// Writes entries of the access log.
    write(Lane::META) fleet::access_log_insert(entries: Vec<NewAccess>) -> ();
    /// Entries of the access log, newest first.
    read fleet::access_log_list(filter: AccessFilter, page: Page) -> Listed<Access>;
    /// What a job declares for git; none is the default.
    read credentials::job_git_credentials(job: JobId) -> Option<GitCredentials>;
    /// Writes an entry of the audit log of secrets.
    write(Lane::META) credentials::secret_audit_insert(entry: NewSecretAudit) -> ();
    /// Entries of the audit log of secrets, newest first.
    read credentials::secret_audit_list(filter: SecretAuditFilter, page: Page) -> Listed<SecretAudit>;
    /// Deletes entries of the audit log of secrets that are older than `before`, at most `limit`; returns how many.
    write(Lane::META) credentials::secret_audit_prune(before: Ts, limit: u32) -> u64;
    /// Adds a consequence to be carried out.
    write(Lane::META) fleet::outbox_put(kind: String, payload: Json) -> Uuid;
    /// Takes consequences that are due; each is hidden for `hide` and then due again unless done.
    write(Lane::CLAIMS) fleet::outbox_take(kinds: Vec<String>, limit: u32, hide: Duration) -> Vec<OutboxItem>;
    /// A consequence was carried out.
    write(Lane::META) fleet::outbox_done(id: Uuid) -> ();
}
