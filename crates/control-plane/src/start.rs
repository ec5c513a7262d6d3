//! The life of an orchestrator: data directory, database, recovery, listeners, background work; and the way back.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kici_api::live::Hub;
use kici_api::ports::Ports;
use kici_api::server::ApiState;
use kici_blobs::Blobs;
use kici_dispatch::Dispatcher;
use kici_dispatch::config::DispatchConfig;
use kici_engine::ids::{IdSource, InstanceId};
use kici_engine::time::Clock;
use kici_events::{
    Admission, Bus, EventWorker, EventWorkerConfig, GapRepair, Inbox, Planner, PlannerConfig, Schedules, SourceBook,
    Worker, WorkerConfig,
};
use kici_forge::Forges;
use kici_secrets::Sealer;
use kici_store::model::{EventLimits, Instance, NewAdminToken, Role};
use kici_store::{Durability, Store, StoreConfig};
use kici_telemetry::metrics::Metrics;
use reqwest::redirect::Policy;
use secrecy::ExposeSecret as _;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::adapters::{
    AccessBook, AgentTokenBook, Announcer, AuditBook, BusBook, EventBook, Fleet, HostBook, LiveChanges, Node, RunBook,
    SourceShelf, StoredBook, Tokens, announce_logs,
};
use crate::broker::GitBroker;
use crate::clones::{AllForges, SourceClones};
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::grpc::{Bootstrap, Gateway};
use crate::intake::Intake;
use crate::logs::{LogAppender, LogReader, LogSealer};
use crate::payloads::Payloads;
use crate::reconcilers::{Background, LEADER, free_claims};
use crate::retention::Retention;
use crate::sealing::Sealing;
use crate::server::{Halves, serve};
use crate::stored::{Counts, Signer, Stored, Transfers};

/// An orchestrator that cannot start. The text names the part and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data directory.
    #[error(transparent)]
    DataDir(#[from] crate::data_dir::DataDirError),
    /// The database.
    #[error("the database cannot be used")]
    Store(#[from] kici_store::StoreError),
    /// The address.
    #[error("cannot listen on {address}: {cause}; set server.listen (KICI_SERVER_LISTEN) to a free one")]
    Listen {
        /// Which.
        address: std::net::SocketAddr,
        /// Why.
        cause: std::io::Error,
    },
    /// The sealing key.
    #[error("secrets.key")]
    Key(#[from] kici_secrets::KeyError),
    /// The object store.
    #[error("the object store cannot be used")]
    Blobs(#[from] kici_blobs::BlobError),
    /// Anything else that the system refuses.
    #[error("{what}: {problem}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What came of it.
        problem: String,
    },
}

/// What an orchestrator takes from the program that runs it.
pub struct Surroundings {
    /// The wall clock.
    pub clock: Arc<dyn Clock>,
    /// Fresh ids.
    pub ids: Arc<dyn IdSource>,
    /// Metrics of this process.
    pub metrics: Metrics,
    /// Where to look for a data directory when none is configured.
    pub data_dirs: Vec<PathBuf>,
    /// Identity of this machine, hashed as agents hash theirs.
    pub machine_id: String,
}

/// A running orchestrator.
pub struct Orchestrator {
    address: std::net::SocketAddr,
    node: Arc<Node>,
    store: Store,
    dispatcher: Arc<Dispatcher>,
    instance: InstanceId,
    stop: CancellationToken,
    listening: CancellationToken,
    tasks: TaskTracker,
    server: tokio::task::JoinHandle<()>,
    log_thread: std::thread::JoinHandle<()>,
    grace: std::time::Duration,
    /// Keeps the lock until the very end.
    _data: DataDir,
}

/// What is built between opening the database and serving.
struct Parts {
    inbox: Arc<Inbox>,
    worker: Arc<Worker>,
    event_worker: Arc<EventWorker>,
    work: mpsc::Receiver<(kici_events::Work, Arc<kici_events::OpenSource>)>,
    ports: Ports,
    background: Arc<Background>,
    node: Arc<Node>,
}

impl Orchestrator {
    /// Starts everything and returns once it serves.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(config: Config, around: Surroundings) -> Result<Self, StartError> {
        let started = Instant::now();
        let candidates = config.data_dir.clone().map_or_else(|| around.data_dirs.clone(), |dir| vec![dir]);
        let data = DataDir::open(&candidates)?;
        let fresh = format!("node-{}", &around.ids.uuid().simple().to_string()[20..]);
        let instance = data.instance_id(config.instance_id.as_deref(), &fresh)?;
        kici_telemetry::name_instance(instance.as_str());
        // The port is bound before anything is changed: a second start on a taken address changes nothing.
        let address = config.listen;
        let listener = TcpListener::bind(address).await.map_err(|cause| StartError::Listen { address, cause })?;
        let address = listener.local_addr().map_err(|cause| StartError::Listen { address, cause })?;
        let store = open_store(&config, &data, &instance, &around).await?;
        let cluster_id = store.cluster_id().await?.to_string();
        bootstrap_token(&store, &data).await?;
        let identity = announce_instance(&store, &instance, address, &around).await?;

        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let (logs, log_thread) = LogAppender::start(data.sub("logs")?)
            .map_err(|error| StartError::System { what: "the log thread", problem: error.to_string() })?;
        let live = Hub::new();
        let sealing = Arc::new(Sealing(sealer(&config, &data)?));
        let http = http_client(Policy::default())?;
        let forges = Arc::new(Forges::new(http, around.clock.clone(), config.local_paths.clone()));
        let sources = SourceBook::new(sealing.clone(), Arc::new(AllForges(forges)));
        let broker = Arc::new(GitBroker {
            store: store.clone(),
            sources: sources.clone(),
            http: http_client(Policy::none())?,
            clock: around.clock.clone(),
            tasks: tasks.clone(),
        });
        let dispatcher = dispatcher(&config, &instance, cluster_id, &store, &sources, &live, &around);
        let build = Build { config: &config, data: &data, around: &around, store: &store, stop: &stop, tasks: &tasks };
        let events = &config.events;
        let limits = EventLimits { max_depth: events.max_chain_depth, per_minute: Some(events.per_minute) };
        let bus = Bus::new(store.clone(), limits);
        let objects = config.objects_dir.clone().map_or_else(|| data.sub("objects"), Ok)?;
        let blobs = Blobs::local(&objects)?;
        let signer = Arc::new(Signer::new(sealing.0.derived("objects")));
        let stored = Arc::new(Stored {
            store: store.clone(),
            blobs: blobs.clone(),
            clock: around.clock.clone(),
            ids: around.ids.clone(),
            signer: signer.clone(),
            config: config.stored,
            counts: Counts::default(),
        });
        let transfers = Transfers::new(store.clone(), blobs, around.clock.clone(), signer);
        let shared = Shared { bus: &bus, dispatcher: &dispatcher, logs: &logs, stored: &stored };
        let parts = build.parts(&shared, &instance, identity, sources, sealing, live, started)?;

        dispatcher
            .start()
            .await
            .map_err(|error| StartError::System { what: "the dispatcher", problem: error.to_string() })?;
        let listening = CancellationToken::new();
        let gateway = Gateway { dispatcher: dispatcher.clone(), bus, logs, broker, stored, tasks: tasks.clone() };
        let intake = Intake::new(parts.inbox, parts.node.clone(), config.ingest.max_body_bytes);
        let halves = halves(parts.ports, intake, transfers, &around, gateway);
        let server = tasks.spawn(serve(listener, halves, listening.clone(), config.shutdown_grace));
        tasks.spawn(parts.worker.run(parts.work, stop.clone(), tasks.clone()));
        tasks.spawn(parts.event_worker.run(stop.clone(), tasks.clone()));
        parts.background.start(&tasks, &stop);
        parts.node.warm.store(true, Ordering::SeqCst);
        // Where to find this process, for whoever may read the directory.
        data.write_private("address", address.to_string().as_bytes())?;
        tracing::info!(%address, instance = %instance, database = store.backend(), ms = started.elapsed().as_millis(), "ready");
        Ok(Self {
            address,
            node: parts.node,
            store,
            dispatcher,
            instance,
            stop,
            listening,
            tasks,
            server,
            log_thread,
            grace: config.shutdown_grace,
            _data: data,
        })
    }

    /// The address that is served.
    pub fn address(&self) -> std::net::SocketAddr {
        self.address
    }

    /// Stops in order: no new work, sessions told to come back, what is under way finished, everything written.
    pub async fn stop(self) {
        self.node.stopping.store(true, Ordering::SeqCst);
        self.stop.cancel();
        self.dispatcher.stop().await;
        self.listening.cancel();
        self.tasks.close();
        // The server has its own limit; a panic in it was logged.
        let _ = self.server.await;
        if tokio::time::timeout(self.grace, self.tasks.wait()).await.is_err() {
            tracing::warn!("background work did not end within the grace period");
        }
        // Another instance need not wait for the lease to run out.
        if let Err(error) = self.store.lease_release(LEADER.to_owned()).await {
            tracing::warn!(%error, "the lease is not given back; it runs out by itself");
        }
        // What was not finished is nobody's fault: it is taken again as if it had not been begun.
        let given_back = async {
            Ok::<_, kici_store::StoreError>(
                self.store.delivery_claims_return().await? + self.store.event_claims_return().await?,
            )
        };
        match given_back.await {
            Ok(0) => {}
            Ok(count) => {
                tracing::info!(count, "deliveries and events that are not finished are left to the next start")
            }
            Err(error) => tracing::warn!(%error, "claims are not given back; the next start frees them"),
        }
        if let Err(error) = self.store.instance_remove(self.instance.clone()).await {
            tracing::warn!(%error, "this instance stays listed until it is found dead");
        }
        self.store.close().await;
        drop(self.node);
        drop(self.dispatcher);
        // Its queue is empty once the last handle is gone; it flushes and ends.
        let _ = tokio::task::spawn_blocking(move || self.log_thread.join()).await;
        tracing::info!("stopped");
    }
}

async fn open_store(
    config: &Config,
    data: &DataDir,
    instance: &InstanceId,
    around: &Surroundings,
) -> Result<Store, StartError> {
    let url = match &config.database.url {
        Some(url) => url.expose_secret().to_owned(),
        None => format!("sqlite:{}", data.sub("db")?.join("kici.sqlite3").display()),
    };
    let store = Store::open(StoreConfig {
        url,
        durability: if config.database.durable { Durability::Full } else { Durability::Normal },
        pool_max: config.database.pool_max,
        node: instance.clone(),
        clock: around.clock.clone(),
        ids: around.ids.clone(),
    })
    .await?;
    for migration in store.migrate().await? {
        tracing::info!(migration, "schema migrated");
    }
    Ok(store)
}

/// The first owner's token, once, to a file that only the owner of the process can read.
async fn bootstrap_token(store: &Store, data: &DataDir) -> Result<(), StartError> {
    let known = store.admin_token_list().await?;
    if !known.is_empty() {
        return Ok(());
    }
    let token = kici_access::Token::generate(kici_access::TokenKind::Admin, getrandom::fill)
        .map_err(|error| StartError::System { what: "randomness", problem: error.to_string() })?;
    // The file first: a token that is stored but not readable by anybody would lock everybody out.
    data.write_private("bootstrap-token", token.secret().expose_secret().as_bytes())?;
    store
        .admin_token_create(NewAdminToken {
            token_hash: token.hash(),
            token_prefix: token.display_prefix().to_owned(),
            label: "bootstrap".to_owned(),
            role: Role::Owner,
            routing_key: None,
            created_by: "system:boot".to_owned(),
            expires_at: None,
        })
        .await?;
    tracing::info!(file = %data.path().join("bootstrap-token").display(), "the first owner's token was written");
    Ok(())
}

/// Says that this instance lives, and frees what an earlier start of it, or a dead one, had claimed.
async fn announce_instance(
    store: &Store,
    instance: &InstanceId,
    address: std::net::SocketAddr,
    around: &Surroundings,
) -> Result<Instance, StartError> {
    let now = around.clock.now();
    let identity = Instance {
        instance_id: instance.clone(),
        incarnation: around.ids.uuid(),
        role: "coordinator".to_owned(),
        address: Some(address.to_string()),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_at: now,
        last_seen_at: now,
        draining: false,
    };
    store.instance_heartbeat(identity.clone()).await?;
    let freed = free_claims(store, now, vec![instance.clone()]).await?;
    if freed > 0 {
        tracing::info!(freed, "deliveries and events that an earlier process had begun are taken again");
    }
    Ok(identity)
}

/// The client that forges are asked through.
fn http_client(redirects: Policy) -> Result<reqwest::Client, StartError> {
    reqwest::Client::builder()
        .user_agent(concat!("kici/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(std::time::Duration::from_secs(10))
        .timeout(std::time::Duration::from_secs(60))
        .redirect(redirects)
        .build()
        .map_err(|error| StartError::System { what: "the HTTP client", problem: error.to_string() })
}

fn sealer(config: &Config, data: &DataDir) -> Result<Sealer, StartError> {
    let key = match &config.secrets_key {
        Some(key) => kici_secrets::SealingKey::parse(key.expose_secret())?,
        None => kici_secrets::SealingKey::load_or_generate(&data.path().join("secret.key"), getrandom::fill)?,
    };
    Ok(Sealer::new(key))
}

fn dispatcher(
    config: &Config,
    instance: &InstanceId,
    cluster_id: String,
    store: &Store,
    sources: &SourceBook,
    live: &Arc<Hub>,
    around: &Surroundings,
) -> Arc<Dispatcher> {
    let keys = &config.dispatch;
    let mut dispatch = DispatchConfig::new(instance.clone(), cluster_id);
    dispatch.machine_id = Some(around.machine_id.clone());
    dispatch.ack_timeout = keys.ack_timeout;
    dispatch.max_attempts = keys.max_attempts;
    dispatch.queue_timeout = keys.queue_timeout.unwrap_or_default();
    dispatch.unroutable_grace = keys.unroutable_grace.unwrap_or_default();
    dispatch.max_depth = keys.max_depth;
    dispatch.backpressure_threshold = keys.backpressure_threshold;
    dispatch.pending_sweep_interval = keys.pending_sweep;
    dispatch.scaler_reconnect_grace = keys.scaler_grace;
    dispatch.concurrency_wait = keys.concurrency_wait;
    dispatch.recovery_window = keys.recovery_window;
    dispatch.job_heartbeat_interval = keys.job_heartbeat;
    dispatch.stale_after = keys.job_heartbeat * keys.stale_multiplier;
    dispatch.ownership_timeout = keys.ownership_check_timeout;
    dispatch.roster_grace = config.roster.grace;
    dispatch.roster_ttl = config.roster.ttl;
    dispatch.reboot_deadline = config.roster.reboot_deadline;
    let ports = kici_dispatch::Ports {
        clones: Arc::new(SourceClones::new(store.clone(), sources.clone())),
        changes: Arc::new(LiveChanges(live.clone())),
        // Jobs wait for the agents that connect by themselves.
        scaler: None,
        clock: around.clock.clone(),
        ids: around.ids.clone(),
    };
    Dispatcher::new(dispatch, store.clone(), ports)
}

/// What the parts and the doors both use.
struct Shared<'a> {
    bus: &'a Bus,
    dispatcher: &'a Arc<Dispatcher>,
    logs: &'a LogAppender,
    stored: &'a Arc<Stored>,
}

struct Build<'a> {
    config: &'a Config,
    data: &'a DataDir,
    around: &'a Surroundings,
    store: &'a Store,
    stop: &'a CancellationToken,
    tasks: &'a TaskTracker,
}

impl Build<'_> {
    #[allow(clippy::too_many_arguments, reason = "each was made by another part of the start")]
    fn parts(
        &self,
        shared: &Shared<'_>,
        instance: &InstanceId,
        identity: Instance,
        sources: SourceBook,
        sealing: Arc<Sealing>,
        live: Arc<Hub>,
        started: Instant,
    ) -> Result<Parts, StartError> {
        let Self { config, data, around, store, .. } = self;
        let Shared { bus, dispatcher, logs, stored } = *shared;
        let store = Store::clone(store);
        let clock = around.clock.clone();
        let blobs = stored.blobs.clone();
        let planner = Arc::new(Planner::new(
            store.clone(),
            sources.clone(),
            clock.clone(),
            around.ids.clone(),
            PlannerConfig {
                queue_timeout: config.dispatch.queue_timeout,
                cache_entries: config.workflow_cache_entries,
                machine_id: around.machine_id.clone(),
                max_fanout_hosts: config.roster.max_fanout_hosts,
            },
        ));
        let announcer = Arc::new(Announcer { dispatcher: dispatcher.clone(), live: live.clone() });
        let (sender, work) = mpsc::channel(kici_events::QUEUE);
        let admission = Arc::new(Admission::new(config.ingest.admission.clone()));
        let (watched, stop) = (admission.clone(), self.stop.clone());
        self.tasks.spawn(async move { watched.watch_lag(stop).await });
        let inbox = Arc::new(Inbox::new(
            store.clone(),
            sources.clone(),
            instance.clone(),
            clock.clone(),
            admission,
            config.ingest.overflow_rows,
            sender,
        ));
        let worker = Worker::new(
            store.clone(),
            sources.clone(),
            planner.clone(),
            clock.clone(),
            announcer.clone(),
            WorkerConfig {
                workers: config.ingest.workers,
                claim_timeout: config.ingest.claim_timeout,
                max_attempts: config.ingest.max_attempts,
                overflow_age: config.ingest.overflow_age,
            },
        );
        let keys = &config.events;
        let event_worker = EventWorker::new(
            store.clone(),
            planner.clone(),
            clock.clone(),
            announcer.clone(),
            EventWorkerConfig {
                lease: keys.lease,
                max_attempts: keys.max_attempts,
                retry_base: keys.retry_base,
                retry_max: keys.retry_max,
                scan: keys.scan,
            },
        );
        let schedules = Arc::new(Schedules::new(store.clone(), clock.clone(), keys.cron_tick));
        let gaps = GapRepair::new(store.clone(), sources.clone(), clock.clone());
        let payloads = Payloads { store: store.clone(), blobs: blobs.clone() };
        let root = data.sub("logs")?;
        let reader = LogReader::new(root.clone(), blobs.clone());
        let node = Arc::new(Node {
            store: store.clone(),
            dispatcher: dispatcher.clone(),
            logs: logs.clone(),
            metrics: around.metrics.clone(),
            instance: instance.clone(),
            data_dir: data.path().to_owned(),
            started,
            warm: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            drain_reason: std::sync::Mutex::default(),
            statuses: Arc::default(),
            leads: Arc::new(watch::Sender::new(None)),
        });
        self.tasks.spawn(announce_logs(logs.grown(), live.clone(), self.stop.clone()));
        let (access_log, writer) = AccessBook::new(store.clone(), self.stop.clone());
        self.tasks.spawn(writer);
        let tokens = || Tokens { store: store.clone(), clock: clock.clone() };
        let fleet =
            Arc::new(Fleet { store: store.clone(), dispatcher: dispatcher.clone(), instance: instance.clone() });
        let ports = Ports {
            auth: Arc::new(tokens()),
            runs: Arc::new(RunBook {
                store: store.clone(),
                sources: sources.clone(),
                planner: planner.clone(),
                dispatcher: dispatcher.clone(),
                logs: reader,
                announcer,
                clock: clock.clone(),
                runs_days: config.retention.runs_days,
            }),
            sources: Arc::new(SourceShelf {
                store: store.clone(),
                sources: sources.clone(),
                sealing,
                ids: around.ids.clone(),
                inbox: inbox.clone(),
                planner,
                local_paths: config.local_paths.clone(),
            }),
            agent_tokens: Arc::new(AgentTokenBook { tokens: tokens(), dispatcher: dispatcher.clone() }),
            admin_tokens: Arc::new(tokens()),
            agents: fleet.clone(),
            hosts: Arc::new(HostBook {
                store: store.clone(),
                dispatcher: dispatcher.clone(),
                max_fanout_hosts: config.roster.max_fanout_hosts,
            }),
            events: Arc::new(EventBook { store: store.clone(), payloads: payloads.clone(), live: live.clone() }),
            bus: Arc::new(BusBook { store: store.clone(), bus: bus.clone(), schedules: schedules.clone(), sources }),
            queue: fleet,
            system: node.clone(),
            access_log,
            audit: Arc::new(AuditBook { store: store.clone() }),
            stored: Arc::new(StoredBook { stored: stored.clone(), instance: instance.clone() }),
            live,
        };
        let background = Arc::new(Background {
            store: store.clone(),
            clock: clock.clone(),
            node: node.clone(),
            payloads,
            retention: Retention {
                store: store.clone(),
                blobs: blobs.clone(),
                clock: clock.clone(),
                config: config.retention,
                events_ttl: keys.ttl,
            },
            stored: stored.clone(),
            schedules,
            cron_tick: keys.cron_tick,
            sealer: LogSealer::new(root, logs.clone(), store, blobs, clock),
            instance: identity,
            event_log: config.event_log.clone(),
            gaps,
            metrics: around.metrics.clone(),
            statuses: node.statuses.clone(),
            leads: node.leads.clone(),
        });
        Ok(Parts { inbox, worker, event_worker, work, ports, background, node })
    }
}

fn halves(ports: Ports, intake: Intake, transfers: Transfers, around: &Surroundings, gateway: Gateway) -> Halves {
    let api = kici_api::server::routes(ApiState::new(ports, around.clock.clone()));
    let http = kici_api::server::finish(
        crate::intake::router(intake).merge(crate::stored::router(transfers)).merge(api),
        around.ids.clone(),
    );
    let bootstrap = Bootstrap { dispatcher: gateway.dispatcher.clone() }.into_service();
    let grpc = tonic::service::Routes::new(gateway.into_service()).add_service(bootstrap).prepare().into_axum_router();
    Halves { http, grpc }
}
