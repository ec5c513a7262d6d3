//! Registrations that are refused, spoken by hand over the real wire.

use kici_protocol::PROTOCOL_VERSION;
use kici_protocol::agent::agent_gateway_client::AgentGatewayClient;
use kici_protocol::agent::{AgentFrame, Heartbeat, JobUpdate, LogChunk, Register, agent_frame, orchestrator_frame};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};

use crate::stack::Stack;

/// How the orchestrator ended a session: what its farewell says, or the status of the call.
#[derive(Debug)]
enum End {
    Goodbye(String),
    Status(Status),
}

impl End {
    fn message(&self) -> &str {
        match self {
            Self::Goodbye(message) => message,
            Self::Status(status) => status.message(),
        }
    }
}

async fn session(stack: &Stack, token: Option<&str>, frames: Vec<AgentFrame>) -> End {
    let mut client = AgentGatewayClient::connect(format!("http://{}", stack.address)).await.unwrap();
    // The stream stays open: it is the orchestrator that must end it.
    let (out, stream) = tokio::sync::mpsc::channel(16);
    for frame in frames {
        out.send(frame).await.unwrap();
    }
    let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(stream));
    if let Some(token) = token {
        let value = MetadataValue::try_from(format!("Bearer {token}")).unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    let mut answers = match client.session(request).await {
        Ok(answers) => answers.into_inner(),
        Err(status) => return End::Status(status),
    };
    loop {
        match answers.message().await {
            Ok(Some(frame)) => {
                if let Some(orchestrator_frame::Frame::Goodbye(bye)) = frame.frame {
                    return End::Goodbye(format!("{}: {}", bye.code, bye.message));
                }
            }
            Ok(None) => panic!("the session ended without a word"),
            Err(status) => return End::Status(status),
        }
    }
}

fn register() -> Register {
    Register {
        agent_id: "by-hand".into(),
        labels: vec!["default".into()],
        platform: "linux".into(),
        arch: "x86_64".into(),
        version: "0.1.0".into(),
        max_concurrency: 1,
        protocol_version: PROTOCOL_VERSION,
        hostname: "by-hand".into(),
        ..Register::default()
    }
}

fn first(register: Register) -> Vec<AgentFrame> {
    vec![AgentFrame { seq: 1, frame: Some(agent_frame::Frame::Register(register)) }]
}

#[tokio::test]
async fn a_bad_register_ends_the_session_with_a_word_and_a_reason() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let token = token.token.expose();
    let with = |change: &dyn Fn(&mut Register)| {
        let mut register = register();
        change(&mut register);
        first(register)
    };
    let heartbeat = agent_frame::Frame::Heartbeat(Heartbeat { at_us: 1 });
    let cases = [
        ("a reserved label", with(&|r| r.labels = vec!["kici:privileged:root".into()]), "privileged"),
        ("another reserved label", with(&|r| r.labels = vec!["kici:bogus".into()]), "kici:bogus"),
        ("no label", with(&|r| r.labels = vec!["a b".into()]), "a b"),
        ("a long label", with(&|r| r.labels = vec!["x".repeat(129)]), "128"),
        ("too many labels", with(&|r| r.labels = (0..1000).map(|n| format!("l{n}")).collect()), "labels"),
        ("an old protocol", with(&|r| r.protocol_version = 0), "protocol version 0"),
        ("no name", with(&|r| r.agent_id = String::new()), "agent_id"),
        ("a bad name", with(&|r| r.agent_id = "../../etc".into()), "agent_id"),
        ("no register", vec![AgentFrame { seq: 1, frame: Some(heartbeat) }], "Register"),
        ("a wrong number", vec![AgentFrame { seq: 7, ..first(register()).remove(0) }], "7"),
        ("a gap after it", [first(register()), vec![AgentFrame { seq: 5, frame: None }]].concat(), "5"),
        ("an empty frame", vec![AgentFrame { seq: 1, frame: None }], "Register"),
    ];
    let mut wrong = Vec::new();
    for (what, frames, word) in cases {
        let limit = std::time::Duration::from_secs(5);
        match tokio::time::timeout(limit, session(&stack, Some(token), frames)).await {
            Ok(end @ End::Goodbye(_)) if end.message().contains(word) => {}
            other => wrong.push(format!("{what}: {word} is not in {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let agents = stack.client.agents(&Default::default()).await.unwrap();
    assert!(agents.items.iter().all(|agent| agent.connected_at.is_none()), "{agents:?}");
}

#[tokio::test]
async fn tokens_that_are_missing_unknown_revoked_or_of_another_kind_are_unauthenticated() {
    let stack = Stack::start(None).await;
    let revoked = stack.agent_token().await;
    stack.client.revoke_agent_token(revoked.id).await.unwrap();
    let admin = std::fs::read_to_string(stack.data().join("bootstrap-token")).unwrap();
    let unknown = format!("kici_agent_{}", "ab".repeat(35));
    for token in [None, Some(""), Some("x"), Some(unknown.as_str()), Some(admin.trim()), Some(revoked.token.expose())] {
        let end = session(&stack, token, first(register())).await;
        let End::Status(status) = &end else { panic!("{end:?}") };
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    }
}

#[tokio::test]
async fn frames_and_logs_for_jobs_of_nobody_are_refused_and_the_session_stays() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let mut client = AgentGatewayClient::connect(format!("http://{}", stack.address)).await.unwrap();
    let (out, stream) = tokio::sync::mpsc::channel(16);
    let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(stream));
    let value = MetadataValue::try_from(format!("Bearer {}", token.token.expose())).unwrap();
    request.metadata_mut().insert("authorization", value);
    out.send(first(register()).remove(0)).await.unwrap();
    let mut answers = client.session(request).await.unwrap().into_inner();
    let mut say = async |seq: u64, update: JobUpdate| {
        let frame = Some(agent_frame::Frame::JobUpdate(update));
        out.send(AgentFrame { seq, frame }).await.unwrap();
        loop {
            match answers.message().await.unwrap().unwrap().frame {
                Some(orchestrator_frame::Frame::FrameNack(nack)) => {
                    assert_eq!(nack.seq, seq);
                    return nack.detail;
                }
                Some(orchestrator_frame::Frame::Goodbye(bye)) => panic!("{bye:?}"),
                _ => {}
            }
        }
    };
    let job = kici_protocol::common::JobRef {
        run_id: "01900000-0000-7000-8000-000000000001".into(),
        job_id: "01900000-0000-7000-8000-000000000002".into(),
        dispatch_epoch: 1,
    };
    let update = |state: &str| JobUpdate { job: Some(job.clone()), state: state.into(), ..JobUpdate::default() };
    assert!(say(2, update("success")).await.contains("not assigned"));
    assert!(!say(3, update("happy")).await.is_empty());
    assert!(!say(4, JobUpdate { state: "success".into(), ..JobUpdate::default() }).await.is_empty());
    let bad = kici_protocol::common::JobRef { run_id: "x".into(), ..job.clone() };
    assert!(!say(5, JobUpdate { job: Some(bad), state: "success".into(), ..JobUpdate::default() }).await.is_empty());

    let chunks = tokio_stream::iter([LogChunk { chunk: None }]);
    let status = client.stream_logs(Request::new(chunks)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    let mut request = Request::new(tokio_stream::iter([LogChunk { chunk: None }]));
    request.metadata_mut().insert("kici-session-id", "nonsense".parse().unwrap());
    assert_eq!(client.stream_logs(request).await.unwrap_err().code(), Code::Unauthenticated);
}
