//! A dispatcher over a real store, runs to give out, and an agent that does exactly what a test tells it.

#![allow(dead_code, reason = "each test program uses a part")]

mod plan;
pub mod robot;
pub mod scaler;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use kici_dispatch::ports::{Change, Changes, CloneError, CloneRequest, CloneSource, Clones, GitHost, Scaler};
use kici_dispatch::{AgentAuth, DispatchConfig, Dispatcher, Ports, SessionStream};
use kici_engine::hosts::{Fanout, HostSelector};
use kici_engine::ids::{AgentId, IdSource, JobId, RunId, SessionId, SourceId};
use kici_engine::lock::{Job, Selector, Workflow};
use kici_engine::state::{JobStatus, QueueStatus, RunStatus};
use kici_engine::time::{Clock, ManualClock};
use kici_protocol::agent::agent_frame::Frame as Up;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;
use kici_protocol::common;
use kici_store::Store;
use kici_store::model::{self, JobRef, JobStart, NewJob, NewNeed, NewRun, QueueEntry};
use kici_store::testing::{TestIds, TestStore};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tonic::Status;
use tonic::metadata::MetadataMap;

use plan::event;
pub use plan::{JobDef, job, selector, workflow};
pub use scaler::FakeScaler;

/// Nothing in these tests takes longer; a test that waits for this hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
pub struct Recorder(pub Mutex<Vec<Change>>);

impl Changes for Recorder {
    fn publish(&self, change: Change) {
        self.0.lock().unwrap().push(change);
    }
}

/// Answers clone requests, or fails them as told.
#[derive(Default)]
pub struct TestClones(pub Mutex<Option<CloneError>>);

fn forge_example() -> GitHost {
    GitHost { protocol: "https".into(), host: "forge.example".into(), ignore_case: true }
}

#[async_trait::async_trait]
impl Clones for TestClones {
    async fn git_host(&self, _: SourceId) -> Result<Option<GitHost>, CloneError> {
        match self.0.lock().unwrap().clone() {
            Some(error) => Err(error),
            None => Ok(Some(forge_example())),
        }
    }

    async fn source(&self, request: &CloneRequest) -> Result<CloneSource, CloneError> {
        if let Some(error) = self.0.lock().unwrap().clone() {
            return Err(error);
        }
        Ok(CloneSource {
            url: format!("https://forge.example/{}.git", request.repo),
            basic: Some(("x-access-token".into(), "clone-secret".to_owned().into())),
            git_host: Some(forge_example()),
        })
    }
}

pub struct World {
    pub dispatcher: Arc<Dispatcher>,
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    pub ids: Arc<dyn IdSource>,
    pub changes: Arc<Recorder>,
    pub clones: Arc<TestClones>,
    pub config: DispatchConfig,
}

/// Runs a test on each database, with a clock that follows the real one.
pub async fn each(test: impl AsyncFn(World)) {
    each_with(|_| {}, test).await;
}

pub async fn each_with(change: impl Fn(&mut DispatchConfig), test: impl AsyncFn(World)) {
    each_on(change, || None, async |world| test(world).await).await;
}

/// The same, with a scaler that does what the test tells it.
pub async fn each_scaled(change: impl Fn(&mut DispatchConfig), test: impl AsyncFn(World, Arc<FakeScaler>)) {
    let last = Mutex::new(None);
    let fresh = || last.lock().unwrap().insert(Arc::new(FakeScaler::default())).clone();
    let test = async |world| {
        let scaler = last.lock().unwrap().clone();
        test(world, scaler.unwrap()).await;
    };
    each_on(change, || Some(fresh() as Arc<dyn Scaler>), test).await;
}

async fn each_on(
    change: impl Fn(&mut DispatchConfig),
    scaler: impl Fn() -> Option<Arc<dyn Scaler>>,
    test: impl AsyncFn(World),
) {
    TestStore::each(async |stored: TestStore| {
        let mut settings = config("node-1");
        change(&mut settings);
        let _clock = keep_time(stored.clock.clone());
        let world = World::new(stored.store.clone(), settings, stored.clock.clone(), scaler());
        world.dispatcher.start().await.unwrap();
        let dispatcher = world.dispatcher.clone();
        test(world).await;
        dispatcher.stop().await;
    })
    .await;
}

/// Lets a clock follow the real one.
pub fn keep_time(clock: Arc<ManualClock>) -> AbortOnDropHandle<()> {
    let pace = Duration::from_millis(5);
    AbortOnDropHandle::new(TaskTracker::new().spawn(async move {
        let mut ticks = tokio::time::interval(pace);
        loop {
            ticks.tick().await;
            clock.advance(pace);
        }
    }))
}

pub fn instance(name: &str) -> AgentId {
    AgentId::new(name).unwrap()
}

/// Short limits: tests wait for what happens at them.
pub fn config(name: &str) -> DispatchConfig {
    let mut config = DispatchConfig::new(instance(name), "cluster-1".into());
    config.auth = AgentAuth::None;
    config.ack_timeout = Duration::from_millis(600);
    config.recovery_window = Duration::from_millis(600);
    config.rate.frames_burst = 100_000;
    config.rate.frames_per_s = 100_000;
    config
}

impl World {
    /// A dispatcher on `store` that has been started.
    pub async fn on(store: Store, config: DispatchConfig, clock: Arc<dyn Clock>, ids: Arc<dyn IdSource>) -> Self {
        let world = Self { ids, ..Self::new(store, config, clock, None) };
        world.dispatcher.start().await.unwrap();
        world
    }

    /// A dispatcher on `store` that does nothing yet.
    pub fn new(store: Store, config: DispatchConfig, clock: Arc<dyn Clock>, scaler: Option<Arc<dyn Scaler>>) -> Self {
        let ids: Arc<dyn IdSource> = Arc::new(TestIds);
        let changes = Arc::new(Recorder::default());
        let clones = Arc::new(TestClones::default());
        let (clones_port, changes_port) = (clones.clone(), changes.clone());
        let ports =
            Ports { clones: clones_port, changes: changes_port, scaler, clock: clock.clone(), ids: ids.clone() };
        let dispatcher = Dispatcher::new(config.clone(), store.clone(), ports);
        Self { dispatcher, store, clock, ids, changes, clones, config }
    }

    /// The same database and a dispatcher that was not started: it serves sessions and sweeps, and follows no wake-ups.
    pub async fn unstarted(&self) -> Self {
        let (changes, clones) = (self.changes.clone(), self.clones.clone());
        let (clock, ids) = (self.clock.clone(), self.ids.clone());
        let (clones_port, changes_port) = (clones.clone(), changes.clone());
        let ports =
            Ports { clones: clones_port, changes: changes_port, scaler: None, clock: clock.clone(), ids: ids.clone() };
        let dispatcher = Dispatcher::new(self.config.clone(), self.store.clone(), ports);
        Self { dispatcher, store: self.store.clone(), clock, ids, changes, clones, config: self.config.clone() }
    }

    /// The same database after a crash of the process: a new dispatcher, the old one left as it is.
    pub async fn restarted(&self) -> Self {
        Self::on(self.store.clone(), self.config.clone(), self.clock.clone(), self.ids.clone()).await
    }

    /// Creates a run of these jobs; returns their ids in order.
    pub async fn create(&self, defs: &[JobDef]) -> (RunId, Vec<JobId>) {
        self.create_with(defs, None).await
    }

    pub async fn create_with(&self, defs: &[JobDef], timeout: Option<Duration>) -> (RunId, Vec<JobId>) {
        let (run, ids) = self.new_run(defs, timeout, &workflow(defs));
        self.create_run(run).await;
        (ids.0, ids.1)
    }

    /// Creates a run as a delivery does.
    pub async fn create_run(&self, run: NewRun) -> RunId {
        self.create_placed(run).await.0
    }

    /// Creates a run and tells how many of its jobs were placed at once.
    pub async fn create_placed(&self, run: NewRun) -> (RunId, usize) {
        let activate = self.dispatcher.place();
        let created = self.store.run_create(run, None, activate.clone()).await.unwrap();
        let placed = created.placed.len();
        activate.placed(created.placed);
        if !created.ready.is_empty() {
            self.dispatcher.jobs_queued(&created.ready);
        }
        (created.run_id, placed)
    }

    pub fn new_run(
        &self,
        defs: &[JobDef],
        timeout: Option<Duration>,
        workflow: &Workflow,
    ) -> (NewRun, (RunId, Vec<JobId>)) {
        let id = RunId::mint(self.ids.as_ref());
        let jobs: Vec<NewJob> = defs
            .iter()
            .zip(0..)
            .map(|(def, job_index)| NewJob {
                id: JobId::mint(self.ids.as_ref()),
                name: def.name.into(),
                base_name: def.name.into(),
                job_index,
                variant_label: None,
                matrix: None,
                fanout: None,
                display_name: def.name.into(),
                max_parallel: None,
                fail_fast: false,
                timeout: None,
                kind: None,
                start: match def.needs {
                    [] => JobStart::Queued(QueueEntry {
                        selector: selector(def.label),
                        requires_machine_id: None,
                        expires_at: self.dispatcher.queue_expires_at(),
                        priority: 0,
                        pinned_agent_id: None,
                        slot: None,
                        git_credentials: None,
                    }),
                    _ => JobStart::Pending,
                },
            })
            .collect();
        let needs = defs.iter().flat_map(|def| {
            def.needs.iter().map(|up| NewNeed {
                job_name: def.name.into(),
                upstream: (*up).into(),
                run_on: vec![JobStatus::Success],
                group: None,
                generator: None,
                resolved: false,
            })
        });
        self.run_of(id, workflow, jobs, needs.collect(), timeout)
    }

    /// Creates a run of one job on these hosts.
    pub async fn fan_out(&self, hosts: &[&str], change: impl FnOnce(&mut Job)) -> (RunId, Vec<JobId>) {
        let id = RunId::mint(self.ids.as_ref());
        let mut workflow = workflow(&[job("roll")]);
        let job = &mut workflow.jobs[0];
        job.runs_on = Selector::default();
        job.runs_on_all = Some(HostSelector { include: vec![selector("default").labels], exclude: vec![] });
        change(job);
        let total = u32::try_from(hosts.len()).unwrap();
        let jobs = hosts.iter().zip(0..).map(|(host, index)| NewJob {
            id: JobId::mint(self.ids.as_ref()),
            name: format!("roll ({host})"),
            base_name: "roll".into(),
            job_index: 0,
            variant_label: Some((*host).into()),
            matrix: None,
            fanout: Some(Fanout { host: instance(host), index, total }),
            display_name: format!("roll ({host})"),
            max_parallel: job.max_parallel,
            fail_fast: job.fail_fast,
            timeout: None,
            kind: None,
            start: JobStart::Pending,
        });
        let jobs = jobs.collect();
        let (run, ids) = self.run_of(id, &workflow, jobs, Vec::new(), None);
        self.create_run(run).await;
        ids
    }

    fn run_of(
        &self,
        id: RunId,
        workflow: &Workflow,
        jobs: Vec<NewJob>,
        needs: Vec<NewNeed>,
        timeout: Option<Duration>,
    ) -> (NewRun, (RunId, Vec<JobId>)) {
        let lock_json = serde_json::to_vec(workflow).unwrap();
        let ids = jobs.iter().map(|job| job.id).collect();
        let run = NewRun {
            id,
            org: "default".into(),
            source_id: SourceId::mint(self.ids.as_ref()),
            delivery_id: None,
            dedup_key: id.to_string(),
            repo: "o/r".into(),
            git_ref: Some("refs/heads/main".into()),
            sha: "0123456789012345678901234567890123456789".into(),
            workflow_name: "t".into(),
            run_name: "t".into(),
            lock_digest: format!("digest-{id}"),
            lock_json,
            event: event(),
            trigger_kind: "push".into(),
            inputs: BTreeMap::new(),
            request_id: "req-1".into(),
            chain_depth: 0,
            timeout,
            concurrency: None,
            attempt: 1,
            parent_run_id: None,
            needs,
            jobs,
        };
        (run, (id, ids))
    }

    pub async fn job(&self, id: JobId) -> model::Job {
        self.store.job_get(id).await.unwrap().unwrap()
    }

    pub async fn row(&self, id: JobId) -> model::QueueRow {
        self.store.queue_get(id).await.unwrap().unwrap()
    }

    /// Waits until a job has one of these statuses.
    pub async fn until(&self, id: JobId, wanted: &[JobStatus]) -> model::Job {
        self.wait(async || {
            let job = self.job(id).await;
            wanted.contains(&job.status).then_some(job)
        })
        .await
    }

    pub async fn until_row(&self, id: JobId, wanted: QueueStatus) -> model::QueueRow {
        self.wait(async || {
            let row = self.row(id).await;
            (row.status == wanted).then_some(row)
        })
        .await
    }

    pub async fn until_run(&self, id: RunId, wanted: RunStatus) -> model::Run {
        self.wait(async || {
            let run = self.store.run_get(id).await.unwrap().unwrap();
            (run.status == wanted).then_some(run)
        })
        .await
    }

    /// Asks until there is an answer. The database is the only witness of most changes; it is asked at a steady pace.
    pub async fn wait<T>(&self, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
        let mut pace = tokio::time::interval(Duration::from_millis(5));
        tokio::time::timeout(PATIENCE, async {
            loop {
                pace.tick().await;
                if let Some(answer) = ask().await {
                    return answer;
                }
            }
        })
        .await
        .expect("what the test waits for did not happen")
    }

    pub async fn sweep(&self, name: &str) -> u64 {
        let all = self.dispatcher.reconcilers();
        all.iter().find(|sweep| sweep.name() == name).expect("a sweep of this name").run().await.unwrap()
    }
}

/// An agent that does what it is told.
pub struct Agent {
    pub id: String,
    up: mpsc::Sender<Result<AgentFrame, Status>>,
    down: SessionStream,
    /// Frames that came while the test waited for an acknowledgement.
    early: VecDeque<Down>,
    pub seq: u64,
    pub acked: u64,
    pub ack: RegisterAck,
}

pub fn register(id: &str, labels: &[&str]) -> Register {
    Register {
        agent_id: id.into(),
        labels: labels.iter().map(|l| (*l).to_owned()).collect(),
        platform: "linux".into(),
        arch: "x86_64".into(),
        hostname: format!("host-{id}"),
        max_concurrency: 1,
        protocol_version: 1,
        version: "0.1.0".into(),
        ..Default::default()
    }
}

pub fn held(job: &common::JobRef, started: bool) -> InFlightJob {
    InFlightJob { job: Some(job.clone()), started }
}

impl Agent {
    pub async fn connect(world: &World, id: &str) -> Self {
        Self::with(world, register(id, &["default"]), "").await.expect("the registration is accepted")
    }

    /// Registers; the error is the code of the goodbye.
    pub async fn with(world: &World, register: Register, token: &str) -> Result<Self, String> {
        let (up, inbound) = mpsc::channel(1024);
        let mut metadata = MetadataMap::new();
        if !token.is_empty() {
            metadata.insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        let down = world
            .dispatcher
            .session(&metadata, ReceiverStream::new(inbound))
            .await
            .map_err(|status| format!("{:?}", status.code()))?;
        let id = register.agent_id.clone();
        let mut agent = Self { id, up, down, early: VecDeque::new(), seq: 0, acked: 0, ack: RegisterAck::default() };
        agent.send(Up::Register(register)).await;
        match agent.next().await {
            Down::RegisterAck(ack) => agent.ack = ack,
            Down::Goodbye(goodbye) => return Err(goodbye.code),
            other => panic!("no answer to the registration: {other:?}"),
        }
        Ok(agent)
    }

    pub fn session_id(&self) -> SessionId {
        self.ack.session_id.parse().unwrap()
    }

    pub fn agent_id(&self) -> AgentId {
        AgentId::new(self.id.clone()).unwrap()
    }

    /// Sends a frame; returns its number. The session may have ended.
    pub async fn send(&mut self, frame: Up) -> u64 {
        self.seq += 1;
        let _ = self.up.send(Ok(AgentFrame { seq: self.seq, frame: Some(frame) })).await;
        self.seq
    }

    /// The next frame that is not an acknowledgement.
    pub async fn next(&mut self) -> Down {
        self.maybe_next().await.expect("the session goes on")
    }

    pub async fn maybe_next(&mut self) -> Option<Down> {
        loop {
            if let Some(frame) = self.early.pop_front() {
                return Some(frame);
            }
            self.read().await?;
        }
    }

    /// The next frame, or nothing in its place after an acknowledgement; none when the session has ended.
    pub async fn maybe_next_or_ack(&mut self) -> Option<Option<Down>> {
        if self.early.is_empty() {
            // Unlike others, a robot may have nothing to do for as long as it likes.
            self.take_in().await?;
        }
        Some(self.early.pop_front())
    }

    /// Takes in one frame; none when the session has ended.
    async fn read(&mut self) -> Option<()> {
        tokio::time::timeout(PATIENCE, self.take_in()).await.expect("a frame comes")
    }

    async fn take_in(&mut self) -> Option<()> {
        let frame = self.down.next().await?.ok()?;
        match frame.frame.expect("the frame is known") {
            Down::FrameAck(ack) => {
                assert!(ack.up_to_seq > self.acked, "acknowledgements rise");
                self.acked = ack.up_to_seq;
            }
            other => self.early.push_back(other),
        }
        Some(())
    }

    /// Nothing but acknowledgements is waiting for the agent.
    pub async fn quiet(&mut self) -> bool {
        tokio::time::timeout(Duration::from_millis(100), self.maybe_next()).await.is_err()
    }

    /// Waits until a frame is acknowledged.
    pub async fn settled(&mut self, seq: u64) {
        while self.acked < seq {
            self.read().await.expect("the session goes on");
        }
    }

    pub async fn offer(&mut self) -> JobOffer {
        match self.next().await {
            Down::JobOffer(offer) => offer,
            other => panic!("an offer was due, not {other:?}"),
        }
    }

    pub async fn goodbye(&mut self) -> String {
        loop {
            match self.maybe_next().await {
                Some(Down::Goodbye(goodbye)) => return goodbye.code,
                Some(_) => {}
                None => panic!("the session ended without a goodbye"),
            }
        }
    }

    pub async fn accept(&mut self, job: &common::JobRef) -> u64 {
        self.send(Up::JobAck(JobAck { job: Some(job.clone()) })).await
    }

    pub async fn reject(&mut self, job: &common::JobRef, reason: RejectReason) -> u64 {
        let frame = JobReject { job: Some(job.clone()), reason: reason.into(), detail: String::new() };
        self.send(Up::JobReject(frame)).await
    }

    pub async fn update(&mut self, job: &common::JobRef, state: &str, reason: &str) -> u64 {
        let update = JobUpdate {
            job: Some(job.clone()),
            state: state.into(),
            reason: reason.into(),
            at_us: 1_700_000_000_500_000,
            ..Default::default()
        };
        self.send(Up::JobUpdate(update)).await
    }

    pub async fn step(&mut self, job: &common::JobRef, owner_index: i32, state: &str) -> u64 {
        let update = StepUpdate {
            job: Some(job.clone()),
            step: Some(StepKey { kind: "step".into(), owner_index, ordinal: 0 }),
            name: "true".into(),
            state: state.into(),
            at_us: 1_700_000_000_400_000,
            ..Default::default()
        };
        self.send(Up::StepUpdate(update)).await
    }

    /// Acknowledges and starts; true when the start was granted.
    pub async fn begin(&mut self, job: &common::JobRef) -> bool {
        self.accept(job).await;
        self.ask(job).await
    }

    pub async fn ask(&mut self, job: &common::JobRef) -> bool {
        self.update(job, "running", "").await;
        match self.next().await {
            Down::StartGranted(granted) => granted.job.as_ref() == Some(job),
            Down::StartDenied(_) => false,
            other => panic!("an answer to the start was due, not {other:?}"),
        }
    }

    /// As [`work`](Self::work), past answers to further registrations.
    pub async fn work_after_register(&mut self) -> common::JobRef {
        self.early.retain(|frame| !matches!(frame, Down::RegisterAck(_)));
        self.work().await
    }

    /// Takes one job from offer to success.
    pub async fn work(&mut self) -> common::JobRef {
        let job = self.offer().await.job.unwrap();
        assert!(self.begin(&job).await);
        self.step(&job, 0, "running").await;
        self.step(&job, 0, "success").await;
        let seq = self.update(&job, "success", "").await;
        self.settled(seq).await;
        job
    }

    /// The connection breaks.
    pub fn drop_connection(self) {}
}

pub fn job_ref(job: &common::JobRef) -> JobRef {
    JobRef { run_id: job.run_id.parse().unwrap(), job_id: job.job_id.parse().unwrap(), epoch: job.dispatch_epoch }
}
