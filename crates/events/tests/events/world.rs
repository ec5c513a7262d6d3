//! An inbox and a planner over a store and a fake GitHub.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::SourceId;
use kici_engine::time::Clock;
use kici_events::ports::{Repositories, Unseal};
use kici_events::{
    Admission, AdmissionConfig, Call, EventWorker, EventWorkerConfig, Inbox, OpenSource, Planner, PlannerConfig, Route,
    RunsCreated, SourceBook, Work, Worker, WorkerConfig,
};
use kici_forge::testing::{FakeGithub, FakeRepo, PRIVATE_KEY};
use kici_forge::verify::sign;
use kici_forge::{Forge, ForgeError, Forges, Headers, Source, SourceSecrets};
use kici_store::Store;
use kici_store::model::{
    Activate, Activation, Delivery, NewSource, Page, Processed, QueueEntry, ReadyJob, Registration, Run, SourceKind,
};
use kici_store::testing::{TestIds, TestStore, instance};
use secrecy::SecretString;
use serde_json::{Value as Json, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub const SECRET: &str = "a secret for tests";
pub const SHA: &str = "1111111111111111111111111111111111111111";

/// Room for overflow.
pub const OVERFLOW_ROWS: u32 = 30;

/// Secrets lie in clear: sealing is another crate's.
struct Clear;

impl Unseal for Clear {
    fn source_secrets(&self, source: &kici_store::model::Source) -> Result<SourceSecrets, String> {
        let Some(text) = &source.sealed_secrets else { return Ok(SourceSecrets::default()) };
        SourceSecrets::from_unsealed(&SecretString::from(text.clone())).map_err(|error| error.to_string())
    }
}

struct AllForges(Forges);

impl Repositories for AllForges {
    fn of(&self, source: &Source, secrets: &SourceSecrets) -> Result<Arc<dyn Forge>, ForgeError> {
        self.0.get(source, || Ok(secrets.clone()))
    }
}

/// Every job whose needs are met goes to the queue.
struct Queue;

impl Activate for Queue {
    fn activate(&self, _: &ReadyJob) -> Activation {
        let selector = serde_json::from_value(json!({"labels": [{"kind": "exact", "value": "default"}]})).unwrap();
        Activation::Enqueue(QueueEntry {
            selector,
            requires_machine_id: None,
            expires_at: None,
            priority: 0,
            pinned_agent_id: None,
            slot: None,
            git_credentials: None,
        })
    }
}

pub fn activate() -> Arc<dyn Activate> {
    Arc::new(Queue)
}

/// Hears of runs and does nothing.
pub struct Created(pub Arc<dyn Activate>);

impl RunsCreated for Created {
    fn activate(&self) -> Arc<dyn Activate> {
        self.0.clone()
    }

    fn created(&self, _: &Processed, _: &str) {}
}

fn inbox(
    store: Store,
    sources: SourceBook,
    node: &str,
    clock: Arc<dyn Clock>,
    turns: usize,
) -> (Arc<Inbox>, mpsc::Receiver<(Work, Arc<OpenSource>)>) {
    let (sender, work) = mpsc::channel(100);
    let admission = Arc::new(Admission::new(AdmissionConfig {
        max_in_flight: turns,
        per_org: turns,
        queue_depth: 0,
        queue_wait: Duration::ZERO,
        max_lag: Duration::MAX,
    }));
    let inbox = Inbox::new(store, sources, instance(node), clock, admission, OVERFLOW_ROWS, sender);
    (Arc::new(inbox), work)
}

pub struct World {
    pub test: TestStore,
    pub github: FakeGithub,
    pub sources: SourceBook,
    pub planner: Arc<Planner>,
    pub inbox: Arc<Inbox>,
    pub work: mpsc::Receiver<(Work, Arc<OpenSource>)>,
}

impl World {
    pub async fn new(test: TestStore) -> Self {
        Self::with_turns(test, 100).await
    }

    /// A world whose inbox stores this many calls at the same time and lets nobody wait for it.
    pub async fn with_turns(test: TestStore, turns: usize) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let clock: Arc<dyn Clock> = test.clock.clone();
        let github = FakeGithub::start(clock.clone()).await.unwrap();
        let forges = Forges::new(reqwest::Client::new(), clock.clone(), Vec::new());
        let sources = SourceBook::new(Arc::new(Clear), Arc::new(AllForges(forges)));
        let config = PlannerConfig {
            queue_timeout: None,
            cache_entries: 10,
            machine_id: "m".to_owned(),
            max_fanout_hosts: 1024,
        };
        let planner = Planner::new(test.store.clone(), sources.clone(), clock.clone(), Arc::new(TestIds), config);
        let planner = Arc::new(planner);
        let (inbox, work) = inbox(test.store.clone(), sources.clone(), "node-1", clock, turns);
        Self { test, github, sources, planner, inbox, work }
    }

    /// The inbox of a second node, and what it hands to its worker. SQLite has one node only.
    pub async fn second_inbox(&self) -> (Arc<Inbox>, mpsc::Receiver<(Work, Arc<OpenSource>)>) {
        let store = match self.test.store.backend() {
            "postgres" => self.test.sibling("node-2").await,
            _ => self.test.store.clone(),
        };
        inbox(store, self.sources.clone(), "node-2", self.test.clock.clone(), 100)
    }

    /// A source named `gh` for the App 7.
    pub async fn github_source(&self, key: Option<&str>) {
        self.app_source("gh", 7, key).await;
    }

    /// A source for an App.
    pub async fn app_source(&self, name: &str, app: u64, key: Option<&str>) {
        let secrets = SourceSecrets {
            webhook: vec![SecretString::from(SECRET)],
            private_key: key.map(|key| SecretString::from(key.to_owned())),
        };
        let config = json!({"app_id": app, "base_url": self.github.base_url()});
        self.source(name, SourceKind::Github, format!("github:{app}"), config, Some(secrets)).await;
    }

    pub async fn generic_source(&self, name: &str, id: SourceId) {
        let config = json!({"verification": {"type": "hmac", "header": "x-hub-signature-256"}});
        let secrets = SourceSecrets { webhook: vec![SecretString::from(SECRET)], private_key: None };
        let key = format!("generic:default:{}", id.uuid());
        self.source(name, SourceKind::Generic, key, config, Some(secrets)).await;
    }

    async fn source(
        &self,
        name: &str,
        kind: SourceKind,
        routing_key: String,
        config: Json,
        secrets: Option<SourceSecrets>,
    ) {
        use secrecy::ExposeSecret as _;
        let id = SourceId::mint(&TestIds);
        let new = NewSource {
            id,
            org: "default".to_owned(),
            name: name.to_owned(),
            kind,
            routing_key,
            config,
            sealed_secrets: secrets.map(|secrets| secrets.to_sealable().expose_secret().to_owned()),
            enabled: true,
        };
        self.test.store.source_create(new).await.unwrap();
    }

    /// A repository `acme/app` of the fake with these files at [`SHA`], the head of `main`. Called again it is a new commit;
    /// returns which.
    pub fn repository(&self, files: &[(&str, &str)]) -> String {
        self.repository_of("acme/app", files)
    }

    /// Likewise another repository.
    pub fn repository_of(&self, name: &str, files: &[(&str, &str)]) -> String {
        let files: BTreeMap<String, Vec<u8>> =
            files.iter().map(|(path, text)| ((*path).to_owned(), text.as_bytes().to_vec())).collect();
        let mut state = self.github.state();
        let repo = state.repos.entry(name.to_owned()).or_insert_with(|| FakeRepo {
            installation: Some(1),
            default_branch: "main".to_owned(),
            ..FakeRepo::default()
        });
        let sha = match repo.commits.len() {
            0 => SHA.to_owned(),
            earlier => format!("{earlier:040x}"),
        };
        repo.branches.insert("main".to_owned(), sha.clone());
        repo.commits.insert(sha.clone(), files);
        sha
    }

    /// Registers the workflows of a repository's default branch.
    pub async fn register(&self, source: &str, repo: &str) -> Vec<Registration> {
        let stored = self.test.store.source_get("default".to_owned(), source.to_owned()).await.unwrap().unwrap();
        let open = self.sources.open(&stored).unwrap();
        self.planner.register_default_branch(&open, repo).await.unwrap();
        let scope = Some(stored.routing_key);
        let mut all = self.test.store.registration_list("default".to_owned(), scope, None).await.unwrap();
        all.retain(|one| one.repo == repo);
        all
    }

    /// Delivers events of the bus, as long as some are due. Returns how many attempts that were.
    pub async fn deliver(&self, worker: &EventWorker) -> usize {
        let mut attempts = 0;
        loop {
            let mut claimed = self.test.store.event_claim(1, Duration::from_secs(60)).await.unwrap();
            let Some(event) = claimed.pop() else { return attempts };
            worker.attempt(event).await;
            attempts += 1;
        }
    }

    /// A worker of the bus that lives as long as it is asked to do something.
    pub fn event_worker(&self) -> Arc<EventWorker> {
        self.event_worker_with(Arc::new(Created(activate())))
    }

    pub fn event_worker_with(&self, created: Arc<dyn RunsCreated>) -> Arc<EventWorker> {
        self.event_worker_from(created, Duration::from_secs(60))
    }

    /// A worker whose claims are void after this time.
    pub fn event_worker_of(&self, lease: Duration) -> Arc<EventWorker> {
        self.event_worker_from(Arc::new(Created(activate())), lease)
    }

    fn event_worker_from(&self, created: Arc<dyn RunsCreated>, lease: Duration) -> Arc<EventWorker> {
        let config = EventWorkerConfig {
            lease,
            max_attempts: 5,
            retry_base: Duration::from_secs(5),
            retry_max: Duration::from_secs(300),
            scan: Duration::from_secs(5),
        };
        EventWorker::new(self.test.store.clone(), self.planner.clone(), self.test.clock.clone(), created, config)
    }

    /// A worker of deliveries that tells of each it has processed.
    pub fn worker(&self, told: mpsc::UnboundedSender<()>) -> Arc<Worker> {
        self.worker_with(Arc::new(Told(told)))
    }

    /// A worker of deliveries that tells these of runs.
    pub fn worker_with(&self, created: Arc<dyn RunsCreated>) -> Arc<Worker> {
        let config = WorkerConfig {
            workers: 4,
            claim_timeout: Duration::from_secs(900),
            max_attempts: 5,
            overflow_age: Duration::from_secs(900),
        };
        let clock: Arc<dyn Clock> = self.test.clock.clone();
        Worker::new(self.test.store.clone(), self.sources.clone(), self.planner.clone(), clock, created, config)
    }

    /// All runs, oldest first.
    pub async fn runs(&self) -> Vec<Run> {
        let page = Page { limit: 200, after: None };
        let mut runs = self.test.store.run_list(Default::default(), page).await.unwrap().items;
        runs.reverse();
        runs
    }

    /// Takes the next accepted delivery, decides and writes it.
    pub async fn settle(&mut self) -> (Delivery, Processed) {
        let (work, source) = self.work.recv().await.unwrap();
        let done = self.planner.process(&work, &source).await.unwrap();
        let processed = self.test.store.delivery_process(done, activate()).await.unwrap();
        (self.test.store.delivery_get(work.id).await.unwrap().unwrap(), processed)
    }
}

/// Tells of each processed delivery.
struct Told(mpsc::UnboundedSender<()>);

impl RunsCreated for Told {
    fn activate(&self) -> Arc<dyn Activate> {
        activate()
    }

    fn created(&self, _: &Processed, _: &str) {
        let _ = self.0.send(());
    }
}

/// Lets a worker process what the world took in; the channel tells of each delivery that is done.
pub fn work(world: World, stop: &CancellationToken, tasks: &TaskTracker) -> mpsc::UnboundedReceiver<()> {
    let (told, done) = mpsc::unbounded_channel();
    let worker = world.worker(told);
    let World { test, github, inbox, work, .. } = world;
    let (running, stop) = (tasks.clone(), stop.clone());
    tasks.spawn(async move {
        worker.run(work, stop, running).await;
        drop((test, github, inbox));
    });
    done
}

/// A signed call of the App 7.
pub fn call(event: &str, id: &str, body: &Json) -> Call {
    let body = serde_json::to_vec(body).unwrap();
    Call {
        route: Route::Github { app: 7 },
        headers: Headers::from_iter([
            ("x-github-event", event.to_owned()),
            ("x-github-delivery", id.to_owned()),
            ("content-type", "application/json".to_owned()),
            ("x-hub-signature-256", sign(&SecretString::from(SECRET), &body)),
        ]),
        remote: None,
        body: body.into(),
        request_id: "r".to_owned(),
    }
}

/// A push of `main` in `acme/app`.
pub fn push() -> Json {
    json!({
        "ref": "refs/heads/main",
        "before": "2".repeat(40),
        "after": SHA,
        "repository": {"full_name": "acme/app", "default_branch": "main"},
        "sender": {"login": "alice", "id": 1},
        "head_commit": {"message": "change"},
    })
}

pub fn private_key() -> Option<&'static str> {
    Some(PRIVATE_KEY)
}
