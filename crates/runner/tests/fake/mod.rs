//! An orchestrator for tests: speaks the real protocol, keeps what it hears in memory, and can be killed and started again.

#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kici_engine::check::CheckMode;
use kici_engine::jobspec::JobSpec;
use kici_engine::lock::{Artifacts, Hooks, SourceRef, Step};
use kici_protocol::agent::agent_bootstrap_server::{AgentBootstrap, AgentBootstrapServer};
use kici_protocol::agent::agent_gateway_server::{AgentGateway, AgentGatewayServer};
use kici_protocol::agent::*;
use kici_protocol::common::JobRef;
use tokio::runtime::Runtime;
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

pub type Frame = agent_frame::Frame;
type Down = orchestrator_frame::Frame;
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Longest wait of a test for something that must come.
pub const LIMIT: Duration = Duration::from_secs(30);

pub fn token() -> String {
    format!("kici_agent_{}", "ab".repeat(35))
}

/// One log as it is stored.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub bytes: Vec<u8>,
    pub seal: Option<LogSeal>,
}

#[derive(Default)]
pub struct Shared {
    to_agent: Mutex<Option<mpsc::Sender<Result<OrchestratorFrame, Status>>>>,
    logs: Mutex<BTreeMap<String, Log>>,
    verdicts: Mutex<Vec<JobVerdict>>,
    /// Frames are acknowledged.
    pub acks: AtomicBool,
    /// Starts are granted by themselves.
    pub grants: AtomicBool,
    pub recovery_window_ms: AtomicU64,
    /// The token that git gets; none: all credentials are refused.
    pub credential: Mutex<Option<String>>,
    /// Agents are told that a job is on its way to them.
    pub pending_dispatch: AtomicBool,
    /// What the next claim codes get, in order; then they are unknown.
    pub claims: Mutex<VecDeque<Result<ClaimCredentialsResponse, Status>>>,
    /// The claim codes that were brought.
    pub codes: Mutex<Vec<String>>,
}

#[derive(Clone)]
struct Service {
    shared: Arc<Shared>,
    seen: mpsc::UnboundedSender<Frame>,
}

/// The orchestrator.
pub struct Fake {
    pub shared: Arc<Shared>,
    pub address: SocketAddr,
    seen_tx: mpsc::UnboundedSender<Frame>,
    seen: AsyncMutex<mpsc::UnboundedReceiver<Frame>>,
    runtime: Option<Runtime>,
}

impl Fake {
    pub fn start() -> Self {
        let (seen_tx, seen) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::default());
        shared.acks.store(true, Ordering::SeqCst);
        shared.grants.store(true, Ordering::SeqCst);
        shared.recovery_window_ms.store(120_000, Ordering::SeqCst);
        let mut fake =
            Self { shared, address: ([127, 0, 0, 1], 0).into(), seen_tx, seen: AsyncMutex::new(seen), runtime: None };
        fake.serve();
        fake
    }

    /// Listens, on the same port as before.
    pub fn serve(&mut self) {
        let listener = TcpListener::bind(self.address).expect("the port is free");
        listener.set_nonblocking(true).expect("set");
        self.address = listener.local_addr().expect("bound");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("built");
        let service = Service { shared: Arc::clone(&self.shared), seen: self.seen_tx.clone() };
        let _guard = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = tonic::transport::Server::builder()
            .add_service(AgentBootstrapServer::new(service.clone()))
            .add_service(AgentGatewayServer::new(service).max_decoding_message_size(16 << 20))
            .serve_with_incoming(incoming);
        runtime.spawn(server);
        self.runtime = Some(runtime);
    }

    /// Dies at once, with all its connections.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits until listener and connections are gone; not allowed on a thread of a runtime.
            let thread = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            thread.join().expect("shut down");
        }
        *self.shared.to_agent.lock().expect("lock") = None;
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub async fn send(&self, frame: Down) {
        let to_agent = self.shared.to_agent.lock().expect("lock").clone().expect("an agent is connected");
        to_agent.send(Ok(OrchestratorFrame { seq: 0, frame: Some(frame) })).await.expect("sent");
    }

    /// The next frame that `wanted` makes something of; others are passed over.
    pub async fn next<T>(&self, what: &str, mut wanted: impl FnMut(&Frame) -> Option<T>) -> T {
        let mut seen = self.seen.lock().await;
        let mut others = VecDeque::new();
        let found = async {
            loop {
                let frame = seen.recv().await.expect("the fake lives");
                if let Some(found) = wanted(&frame) {
                    return found;
                }
                if !matches!(frame, Frame::Heartbeat(_)) {
                    others.push_back(frame);
                    if others.len() > 50 {
                        others.pop_front();
                    }
                }
            }
        };
        let found = tokio::time::timeout(LIMIT, found).await;
        found.unwrap_or_else(|_| panic!("{what} did not come, but {others:#?}\n{}", self.logs()))
    }

    /// The ends of all logs, for a test that failed.
    fn logs(&self) -> String {
        let logs = self.shared.logs.lock().expect("lock");
        let end = |log: &Log| String::from_utf8_lossy(&log.bytes[log.bytes.len().saturating_sub(2_000)..]).into_owned();
        logs.iter().map(|(name, log)| format!("--- {name}, sealed: {}\n{}", log.seal.is_some(), end(log))).collect()
    }

    pub async fn registered(&self) -> Register {
        self.next("Register", |frame| match frame {
            Frame::Register(register) => Some(register.clone()),
            _ => None,
        })
        .await
    }

    /// The result of a job.
    pub async fn result(&self, job: &JobRef) -> JobUpdate {
        self.next("the result", |frame| match frame {
            Frame::JobUpdate(update)
                if update.job.as_ref() == Some(job) && !["running", "cancelling"].contains(&update.state.as_str()) =>
            {
                Some(update.clone())
            }
            Frame::JobReject(reject) if reject.job.as_ref() == Some(job) => panic!("the job was rejected: {reject:?}"),
            _ => None,
        })
        .await
    }

    pub async fn step(&self, job: &JobRef, state: &str) -> StepUpdate {
        self.next(state, |frame| match frame {
            Frame::StepUpdate(update) if update.job.as_ref() == Some(job) && update.state == state => {
                Some(update.clone())
            }
            _ => None,
        })
        .await
    }

    pub fn log(&self, job: &JobRef, step: &str) -> Log {
        self.shared.logs.lock().expect("lock").get(&format!("{}/{step}", job.job_id)).cloned().unwrap_or_default()
    }

    /// The texts of a log, once it is sealed.
    pub async fn sealed(&self, job: &JobRef, step: &str) -> Vec<String> {
        let started = tokio::time::Instant::now();
        loop {
            let log = self.log(job, step);
            if log.seal.is_some() {
                let text = String::from_utf8(log.bytes).expect("UTF-8");
                return text.lines().map(|line| line.splitn(3, ' ').nth(2).expect("a line").to_owned()).collect();
            }
            assert!(started.elapsed() < LIMIT, "the log was not sealed: {} bytes", log.bytes.len());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for a text in a log that is still written.
    pub async fn logged(&self, job: &JobRef, step: &str, text: &str) {
        let started = tokio::time::Instant::now();
        while !String::from_utf8_lossy(&self.log(job, step).bytes).contains(text) {
            assert!(started.elapsed() < LIMIT, "`{text}` was not logged");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Loses what was stored after `keep` bytes of every log, as a crash does with what was not synced.
    pub fn lose_tails(&self, keep: usize) {
        self.shared.logs.lock().expect("lock").values_mut().for_each(|log| log.bytes.truncate(keep));
    }

    pub fn verdict(&self, job: &JobRef, verdict: Verdict, started: bool) {
        let verdict = JobVerdict { job: Some(job.clone()), verdict: verdict.into(), started };
        self.shared.verdicts.lock().expect("lock").push(verdict);
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn job(n: u128, epoch: u32) -> JobRef {
    let id = |n| uuid::Uuid::from_u128(n).to_string();
    JobRef { run_id: id(1), job_id: id(n), dispatch_epoch: epoch }
}

pub fn script(run: &str) -> Step {
    Step::script(SourceRef::default(), run)
}

pub fn offer(job: &JobRef, steps: Vec<Step>) -> JobOffer {
    let spec = JobSpec {
        workflow: "ci".into(),
        job: "build".into(),
        env: BTreeMap::new(),
        variables: BTreeMap::new(),
        fanout: None,
        generate: false,
        init: Vec::new(),
        cache: Vec::new(),
        artifacts: Artifacts::default(),
        steps,
        groups: Vec::new(),
        composites: Vec::new(),
        hooks: Hooks::default(),
        check_mode: CheckMode::Apply,
        outcome: None,
        container: None,
        services: BTreeMap::new(),
        resources: None,
        outputs: BTreeMap::new(),
        context: BTreeMap::new(),
    };
    JobOffer {
        job: Some(job.clone()),
        workflow: "ci".into(),
        job_name: "build".into(),
        display_name: "build".into(),
        spec_json: serde_json::to_vec(&spec).expect("JSON").into(),
        ..JobOffer::default()
    }
}

#[tonic::async_trait]
impl AgentGateway for Service {
    type SessionStream = Answers<OrchestratorFrame>;
    type StreamLogsStream = Answers<LogAck>;

    async fn session(&self, request: Request<Streaming<AgentFrame>>) -> Result<Response<Self::SessionStream>, Status> {
        let wanted = format!("Bearer {}", token());
        if request.metadata().get("authorization").and_then(|v| v.to_str().ok()) != Some(wanted.as_str()) {
            return Err(Status::unauthenticated("bad token"));
        }
        let mut inbound = request.into_inner();
        let (out, answers) = mpsc::channel(64);
        let service = self.clone();
        tokio::runtime::Handle::current().spawn(async move {
            while let Some(Ok(frame)) = inbound.next().await {
                service.answer(frame, &out).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }

    async fn stream_logs(
        &self,
        request: Request<Streaming<LogChunk>>,
    ) -> Result<Response<Self::StreamLogsStream>, Status> {
        assert!(request.metadata().get(kici_protocol::SESSION_ID_HEADER).is_some());
        let mut inbound = request.into_inner();
        let (out, acks) = mpsc::channel(64);
        let shared = Arc::clone(&self.shared);
        tokio::runtime::Handle::current().spawn(async move {
            let mut job = String::new();
            while let Some(Ok(chunk)) = inbound.next().await {
                let ack = match chunk.chunk.expect("a chunk") {
                    log_chunk::Chunk::Open(open) => {
                        job = open.job.expect("a job").job_id;
                        continue;
                    }
                    log_chunk::Chunk::Data(data) => shared.data(&job, data),
                    log_chunk::Chunk::Seal(seal) => shared.seal(&job, seal),
                };
                if shared.acks.load(Ordering::SeqCst) && out.send(Ok(ack)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(acks))))
    }

    async fn git_credential(
        &self,
        _: Request<GitCredentialRequest>,
    ) -> Result<Response<GitCredentialResponse>, Status> {
        match self.shared.credential.lock().expect("lock").clone() {
            Some(secret) => Ok(Response::new(GitCredentialResponse {
                user: "x-access-token".into(),
                secret,
                grant: Some(git_credential_response::Grant::Unscoped(UnscopedGrant {})),
                ..GitCredentialResponse::default()
            })),
            None => Err(Status::permission_denied("credential not available")),
        }
    }

    async fn revoke_git_token(
        &self,
        _: Request<RevokeGitTokenRequest>,
    ) -> Result<Response<RevokeGitTokenResponse>, Status> {
        Ok(Response::new(RevokeGitTokenResponse {}))
    }

    async fn query_inventory(
        &self,
        _: Request<QueryInventoryRequest>,
    ) -> Result<Response<QueryInventoryResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn get_host(&self, _: Request<GetHostRequest>) -> Result<Response<InventoryHost>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn request_reboot(
        &self,
        _: Request<RequestRebootRequest>,
    ) -> Result<Response<RequestRebootResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn cancel_reboot(&self, _: Request<CancelRebootRequest>) -> Result<Response<CancelRebootResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn cache_restore(&self, _: Request<CacheRestoreRequest>) -> Result<Response<CacheRestoreResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn cache_begin_save(
        &self,
        _: Request<CacheBeginSaveRequest>,
    ) -> Result<Response<CacheBeginSaveResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn cache_commit_save(
        &self,
        _: Request<CacheCommitSaveRequest>,
    ) -> Result<Response<CacheCommitSaveResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn artifact_begin(
        &self,
        _: Request<ArtifactBeginRequest>,
    ) -> Result<Response<ArtifactBeginResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn artifact_commit(
        &self,
        _: Request<ArtifactCommitRequest>,
    ) -> Result<Response<ArtifactCommitResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn artifact_download(
        &self,
        _: Request<ArtifactDownloadRequest>,
    ) -> Result<Response<ArtifactDownloadResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn report_generated(
        &self,
        _: Request<ReportGeneratedRequest>,
    ) -> Result<Response<ReportGeneratedResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn emit_event(&self, _: Request<EmitEventRequest>) -> Result<Response<EmitEventResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }
}

#[tonic::async_trait]
impl AgentBootstrap for Service {
    async fn claim_credentials(
        &self,
        request: Request<ClaimCredentialsRequest>,
    ) -> Result<Response<ClaimCredentialsResponse>, Status> {
        assert!(request.metadata().get("authorization").is_none(), "there is no token yet");
        self.shared.codes.lock().expect("lock").push(request.into_inner().claim_code);
        let answer = self.shared.claims.lock().expect("lock").pop_front();
        answer.unwrap_or_else(|| Ok(refusal("invalid"))).map(Response::new)
    }
}

/// A claim code gets nothing.
pub fn refusal(reason: &str) -> ClaimCredentialsResponse {
    ClaimCredentialsResponse { result: Some(claim_credentials_response::Result::ErrorReason(reason.into())) }
}

impl Shared {
    fn with<T>(&self, job: &str, step: &StepKey, change: impl FnOnce(&mut Log) -> T) -> T {
        let name = kici_runner::key::step_file_name(step);
        change(self.logs.lock().expect("lock").entry(format!("{job}/{name}")).or_default())
    }

    /// Overlaps are cut, gaps refused.
    fn data(&self, job: &str, data: LogData) -> LogAck {
        let step = data.step.expect("a step");
        let durable_offset = self.with(job, &step, |log| {
            let have = log.bytes.len() as u64;
            if data.offset <= have {
                let skip = usize::try_from(have - data.offset).expect("small").min(data.data.len());
                log.bytes.extend_from_slice(&data.data[skip..]);
            }
            log.bytes.len() as u64
        });
        LogAck { step: Some(step), durable_offset, sealed: false }
    }

    fn seal(&self, job: &str, seal: LogSeal) -> LogAck {
        let step = seal.step.clone().expect("a step");
        let (durable_offset, sealed) = self.with(job, &step, |log| {
            let whole = log.bytes.len() as u64 == seal.offset;
            if whole {
                log.seal = Some(seal);
            }
            (log.bytes.len() as u64, whole)
        });
        LogAck { step: Some(step), durable_offset, sealed }
    }
}

impl Service {
    async fn answer(&self, frame: AgentFrame, out: &mpsc::Sender<Result<OrchestratorFrame, Status>>) {
        let seq = frame.seq;
        let Some(frame) = frame.frame else { return };
        let mut answers = Vec::new();
        match &frame {
            Frame::Register(register) => {
                assert_eq!(seq, 1);
                answers.push(Down::RegisterAck(RegisterAck {
                    agent_id: register.agent_id.clone(),
                    session_id: format!("session-{seq}-{}", uuid::Uuid::from_u128(u128::from(seq))),
                    cluster_id: "cluster".into(),
                    pending_dispatch: self.shared.pending_dispatch.load(Ordering::SeqCst),
                    recovery_window_ms: self.shared.recovery_window_ms.load(Ordering::SeqCst),
                    job_verdicts: std::mem::take(&mut *self.shared.verdicts.lock().expect("lock")),
                    ..RegisterAck::default()
                }));
            }
            Frame::JobUpdate(update) if update.state == "running" && self.shared.grants.load(Ordering::SeqCst) => {
                answers.push(Down::StartGranted(StartGranted { job: update.job.clone() }));
            }
            _ => {}
        }
        if self.shared.acks.load(Ordering::SeqCst) {
            answers.push(Down::FrameAck(FrameAck { up_to_seq: seq }));
        }
        for answer in answers {
            let _ = out.send(Ok(OrchestratorFrame { seq: 0, frame: Some(answer) })).await;
        }
        if matches!(frame, Frame::Register(_)) {
            *self.shared.to_agent.lock().expect("lock") = Some(out.clone());
        }
        let _ = self.seen.send(frame);
    }
}
