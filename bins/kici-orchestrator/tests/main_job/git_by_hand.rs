//! Git credentials, asked for by hand over the real wire: with whose token, for whose job, for how much.

use kici_api::dto::audit::{AuditFilter, AuditView};
use kici_api::page::PageQuery;
use kici_engine::ids::RunId;
use kici_protocol::agent::agent_gateway_client::AgentGatewayClient;
use kici_protocol::agent::git_credential_response::Grant;
use kici_protocol::agent::{
    AgentFrame, GitCredentialRequest, GitCredentialResponse, JobAck, JobOffer, LogChunk, LogOpen, OrchestratorFrame,
    Register, RevokeGitTokenRequest, agent_frame, log_chunk, orchestrator_frame,
};
use kici_protocol::{PROTOCOL_VERSION, SESSION_ID_HEADER, common};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Streaming};

use crate::git_host::GitHost;
use crate::stack::Stack;

const WORKFLOW: &str = "name: ci\non: push\njobs:\n  build:\n    runs_on: default\n    git_credentials: { access: write }\n    steps:\n      - run: 'true'\n";

/// An agent that does what the test says.
struct ByHand {
    client: AgentGatewayClient<Channel>,
    up: mpsc::Sender<AgentFrame>,
    down: Streaming<OrchestratorFrame>,
    token: String,
    session: String,
}

fn bearing<T>(message: T, token: Option<&str>, session: &str) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    if !session.is_empty() {
        request.metadata_mut().insert(SESSION_ID_HEADER, session.parse().unwrap());
    }
    request
}

impl ByHand {
    async fn connect(stack: &Stack, name: &str) -> Self {
        let token = stack.agent_token().await.token.expose().to_owned();
        let mut client = AgentGatewayClient::connect(format!("http://{}", stack.address)).await.unwrap();
        let (up, frames) = mpsc::channel(16);
        let register = Register {
            agent_id: name.into(),
            labels: vec!["default".into()],
            platform: "linux".into(),
            arch: "x86_64".into(),
            version: "0.1.0".into(),
            max_concurrency: 1,
            protocol_version: PROTOCOL_VERSION,
            hostname: name.into(),
            ..Register::default()
        };
        up.send(AgentFrame { seq: 1, frame: Some(agent_frame::Frame::Register(register)) }).await.unwrap();
        let request = bearing(ReceiverStream::new(frames), Some(&token), "");
        let down = client.session(request).await.unwrap().into_inner();
        let mut agent = Self { client, up, down, token, session: String::new() };
        let orchestrator_frame::Frame::RegisterAck(ack) = agent.next().await else { panic!("not registered") };
        agent.session = ack.session_id;
        agent
    }

    async fn next(&mut self) -> orchestrator_frame::Frame {
        loop {
            match self.down.message().await.unwrap().unwrap().frame.unwrap() {
                orchestrator_frame::Frame::FrameAck(_) => {}
                frame => return frame,
            }
        }
    }

    async fn offer(&mut self) -> JobOffer {
        let orchestrator_frame::Frame::JobOffer(offer) = self.next().await else { panic!("no offer") };
        let ack = JobAck { job: offer.job.clone() };
        self.up.send(AgentFrame { seq: 2, frame: Some(agent_frame::Frame::JobAck(ack)) }).await.unwrap();
        offer
    }

    async fn credential(
        &self,
        token: Option<&str>,
        request: GitCredentialRequest,
    ) -> Result<GitCredentialResponse, Code> {
        let request = bearing(request, token, &self.session);
        self.client.clone().git_credential(request).await.map(tonic::Response::into_inner).map_err(|e| e.code())
    }
}

fn ask(host: &GitHost, job: &common::JobRef, permission: (&str, &str)) -> GitCredentialRequest {
    GitCredentialRequest {
        job: Some(job.clone()),
        host: host.url.trim_start_matches("http://").to_owned(),
        repo: "acme/app".into(),
        permissions: [(permission.0.to_owned(), permission.1.to_owned())].into(),
        credential: String::new(),
    }
}

async fn audit(stack: &Stack, run: RunId) -> Vec<AuditView> {
    let filter = AuditFilter { run: Some(run), ..AuditFilter::default() };
    stack.client.audit(&filter, &PageQuery { limit: Some(200), cursor: None }).await.unwrap().items
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_go_to_the_agent_with_its_token_for_its_job_and_each_refusal_is_in_the_audit_log() {
    let stack = Stack::start(None).await;
    let host = GitHost::start().await;
    host.add_to(&stack).await;
    let mut agent = ByHand::connect(&stack, "a1").await;
    let sha = host.repository("acme/app", &[(".kici/workflows/ci.yaml", WORKFLOW)], &[]);
    let run = host.push(&stack, "acme/app", &sha).await;
    let job = agent.offer().await.job.unwrap();
    let other = ByHand::connect(&stack, "a2").await;
    let (write, own) = (("contents", "write"), Some(agent.token.as_str()));
    let denied = async |reason: &str| {
        let rows = audit(&stack, run).await;
        let of = |row: &&AuditView| row.outcome == "denied" && row.action == "git_credential.mint";
        let reasons: Vec<_> = rows.iter().filter(of).map(|row| row.metadata.as_ref().unwrap().to_string()).collect();
        assert!(reasons.iter().any(|found| found.contains(reason)), "{reason} is not in {reasons:?}");
    };

    // The id of the session without the token is nothing, for any call.
    let before = host.minted().len();
    for token in [None, Some(other.token.as_str())] {
        assert_eq!(agent.credential(token, ask(&host, &job, write)).await.unwrap_err(), Code::Unauthenticated);
        let open = LogChunk { chunk: Some(log_chunk::Chunk::Open(LogOpen { job: Some(job.clone()) })) };
        let logs = bearing(tokio_stream::iter([open]), token, &agent.session);
        assert_eq!(agent.client.clone().stream_logs(logs).await.unwrap_err().code(), Code::Unauthenticated);
        let revoke = RevokeGitTokenRequest { job: Some(job.clone()), ..RevokeGitTokenRequest::default() };
        let revoke = bearing(revoke, token, &agent.session);
        assert_eq!(agent.client.clone().revoke_git_token(revoke).await.unwrap_err().code(), Code::Unauthenticated);
    }
    // Another agent's job.
    let stolen = other.credential(Some(&other.token), ask(&host, &job, write)).await;
    assert_eq!(stolen.unwrap_err(), Code::PermissionDenied);
    denied("the agent does not hold the job").await;
    // More than a job can have, and what nobody can read.
    let admin = agent.credential(own, ask(&host, &job, ("administration", "write"))).await;
    assert_eq!(admin.unwrap_err(), Code::PermissionDenied);
    denied("`administration` is not among").await;
    let odd = agent.credential(own, ask(&host, &job, ("contents", "all"))).await;
    assert_eq!(odd.unwrap_err(), Code::InvalidArgument);
    denied("permission `all`").await;
    assert_eq!(host.minted().len(), before, "nothing was made");

    let made = agent.credential(own, ask(&host, &job, write)).await.unwrap();
    assert!(matches!(made.grant, Some(Grant::Scoped(_))));
    // The source is disabled while the job runs: nothing new, but what there is can be ended.
    stack.client.enable_source("gh", false).await.unwrap();
    assert_eq!(agent.credential(own, ask(&host, &job, write)).await.unwrap_err(), Code::PermissionDenied);
    denied("the source is disabled").await;
    let GitCredentialRequest { job, host: at, repo, credential, .. } = ask(&host, &job, write);
    let revoke = RevokeGitTokenRequest { job, host: at, repo, credential, secret: made.secret.clone() };
    agent.client.clone().revoke_git_token(bearing(revoke, own, &agent.session)).await.unwrap();
    assert!(!host.fake.state().ends.contains_key(&made.secret));
}
