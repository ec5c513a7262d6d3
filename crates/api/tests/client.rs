//! The client against the router over a real connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kici_access::Role;
use kici_api::client::{Client, ClientConfig, ClientError};
use kici_api::dto::logs::{FollowEvent, FollowRequest, LogQuery};
use kici_api::dto::runs::{CancelRun, RunFilter, TriggerRun};
use kici_api::dto::sources::{AddSource, SetSecrets, SourceKind};
use kici_api::page::PageQuery;
use kici_api::testing::Fake;
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::RunStatus;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

struct Server {
    address: SocketAddr,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// Serves the fake. `cuts` drops each connection after so many bytes of answers.
async fn serve(fake: &Arc<Fake>, cut_after: Option<usize>) -> Server {
    _ = rustls::crypto::ring::default_provider().install_default();
    let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
    let backend = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut address = backend.local_addr().unwrap();
    let app = axum::serve(backend, fake.router()).with_graceful_shutdown(stop.clone().cancelled_owned());
    tasks.spawn(async move { app.await.unwrap() });
    if let Some(limit) = cut_after {
        let front = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let back = std::mem::replace(&mut address, front.local_addr().unwrap());
        let relays = tasks.clone();
        let stopped = stop.clone();
        tasks.spawn(async move {
            while let Some(Ok((client, _))) = stopped.run_until_cancelled(front.accept()).await {
                relays.spawn(relay(client, back, limit, stopped.clone()));
            }
        });
    }
    Server { address, stop, tasks }
}

/// Passes bytes on, and breaks the connection after `limit` bytes of answers.
async fn relay(mut client: tokio::net::TcpStream, back: SocketAddr, limit: usize, stop: CancellationToken) {
    use tokio::io::AsyncReadExt;
    let mut server = tokio::net::TcpStream::connect(back).await.unwrap();
    let (mut from_server, mut to_server) = server.split();
    let (mut from_client, mut to_client) = client.split();
    let mut limited = (&mut from_server).take(limit as u64);
    tokio::select! {
        _ = tokio::io::copy(&mut limited, &mut to_client) => {}
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        () = stop.cancelled() => {}
    }
}

impl Server {
    fn client(&self, token: Option<String>) -> Client {
        let config = ClientConfig {
            url: format!("http://{}", self.address).parse().unwrap(),
            token: token.map(Into::into),
            timeout: Duration::from_secs(10),
            ca_pem: None,
            user_agent: "kici-admin/test".to_owned(),
        };
        Client::new(config).unwrap()
    }

    async fn stop(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[tokio::test]
async fn documents_come_back_as_they_were_sent() {
    let fake = Fake::new();
    let (run, job) = {
        fake.add_source("demo");
        fake.add_run("demo")
    };
    fake.add_step(job, "step-main-0");
    fake.add_lines(job, "step-main-0", &["a b"]);
    let server = serve(&fake, None).await;
    let client = server.client(Some(fake.token(Role::Owner, None)));

    let open = RunFilter { status: Some("running,failed".into()), ..RunFilter::default() };
    assert_eq!(client.runs(&open, &PageQuery::default()).await.unwrap().items, fake.world().runs);
    assert_eq!(client.run(run).await.unwrap().jobs, fake.world().jobs);
    assert_eq!(client.steps(run, None).await.unwrap().len(), 1);
    assert_eq!(client.steps(run, Some("none")).await.unwrap().len(), 0);
    let range = client.step_logs(run, "build", "step-main-0", &LogQuery::default()).await.unwrap();
    assert_eq!((range.lines[0].text.as_str(), range.next_seq), ("a b", 1));
    let add = AddSource {
        name: "new".into(),
        kind: SourceKind::Local,
        config: serde_json::json!({ "path": "/x" }),
        secrets: [("webhook_secret".to_owned(), kici_api::dto::SecretText::new("s3"))].into(),
    };
    assert_eq!(client.add_source(&add).await.unwrap().secrets, ["webhook_secret"]);
    assert!(!client.enable_source("new", false).await.unwrap().enabled);
    let secrets = [("private_key".to_owned(), kici_api::dto::SecretText::new("k"))].into();
    let set = SetSecrets { secrets, keep_old: false };
    assert_eq!(client.set_source_secrets("new", &set).await.unwrap().secrets, ["private_key"]);
    client.remove_source("new").await.unwrap();
    assert_eq!(client.sources().await.unwrap().items.len(), 1);
    assert!(client.ready().await.unwrap().ready);
    let trigger = TriggerRun { source: "demo".into(), workflow: "ci".into(), ..TriggerRun::default() };
    let accepted = client.trigger_run(&trigger, Some("k")).await.unwrap();
    assert!(!accepted.existing && client.trigger_run(&trigger, Some("k")).await.unwrap().existing);
    assert!(fake.world().access.iter().all(|entry| entry.source.as_str() == "admin_cli"));
    server.stop().await;
}

#[tokio::test]
async fn refusals_keep_the_servers_words() {
    let fake = Fake::new();
    let (run, _) = fake.add_run("demo");
    let server = serve(&fake, None).await;
    let client = server.client(Some(fake.token(Role::Auditor, None)));
    let error = client.cancel_run(run, CancelRun::default()).await.unwrap_err();
    let problem = error.problem().unwrap();
    assert_eq!(problem.code, "auth.forbidden");
    let text = error.to_string();
    assert!(text.starts_with("`run.cancel` is needed") && text.contains(&problem.request_id), "{text}");
    assert!(!error.is_transient());

    let gone = server.client(None);
    server.stop().await;
    let error = gone.capabilities().await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }) && error.is_transient(), "{error}");
}

/// Follows to the end and gives the lines by step, with the final status.
async fn follow_all(
    client: &Client,
    run: RunId,
    request: FollowRequest,
) -> (Vec<(JobId, String, u64)>, Option<RunStatus>) {
    let mut follow = client.follow(run, request);
    let (mut lines, mut status) = (Vec::new(), None);
    while let Some(event) = follow.next().await {
        match event.unwrap() {
            FollowEvent::Lines { job_id, step, lines: more, .. } => {
                lines.extend(more.iter().map(|line| (job_id, step.clone(), line.seq)));
            }
            FollowEvent::End { status: end, .. } => status = Some(end),
            _ => {}
        }
    }
    (lines, status)
}

#[tokio::test]
async fn complaint_42_following_survives_lost_connections_without_losing_or_repeating_a_line() {
    let fake = Fake::new();
    let (run, job) = fake.add_run("demo");
    for key in ["step-main-0", "step-main-1"] {
        fake.add_step(job, key);
    }
    let server = serve(&fake, Some(150_000)).await;
    let client = server.client(Some(fake.token(Role::Auditor, None)));
    let writer = {
        let fake = fake.clone();
        async move {
            for batch in 0..40 {
                for key in ["step-main-0", "step-main-1"] {
                    let texts: Vec<String> =
                        (0..100).map(|n| format!("{key} {batch} {n} {}", "x".repeat(40))).collect();
                    fake.add_lines(job, key, &texts.iter().map(String::as_str).collect::<Vec<_>>());
                }
                tokio::task::yield_now().await;
            }
            fake.end_run(run, true);
        }
    };
    let request = FollowRequest { follow: true, ..FollowRequest::default() };
    let ((lines, status), ()) = tokio::join!(follow_all(&client, run, request), writer);
    assert_eq!(status, Some(RunStatus::Success));
    for key in ["step-main-0", "step-main-1"] {
        let seqs: Vec<u64> = lines.iter().filter(|(_, step, _)| step == key).map(|(_, _, seq)| *seq).collect();
        assert_eq!(seqs, (0..4_000).collect::<Vec<u64>>(), "{key}");
    }
    server.stop().await;
}

#[tokio::test]
async fn without_follow_the_answer_ends_at_once_and_filters_hold() {
    let fake = Fake::new();
    let (run, job) = fake.add_run("demo");
    for key in ["step-main-0", "step-main-1"] {
        fake.add_step(job, key);
        fake.add_lines(job, key, &["x"]);
    }
    let server = serve(&fake, None).await;
    let client = server.client(Some(fake.token(Role::Auditor, None)));
    let (lines, status) = follow_all(&client, run, FollowRequest::default()).await;
    assert_eq!((lines.len(), status), (2, Some(RunStatus::Running)));
    let one = FollowRequest { step: Some("1".into()), job: Some("build".into()), ..FollowRequest::default() };
    assert_eq!(follow_all(&client, run, one).await.0, [(job, "step-main-1".to_owned(), 0)]);
    // The row of a step may know of the end before it knows of the lines.
    fake.world().steps[0].log.complete = true;
    assert_eq!(follow_all(&client, run, FollowRequest::default()).await.0.len(), 2);
    let quiet = FollowRequest { statuses_only: true, ..FollowRequest::default() };
    assert_eq!(follow_all(&client, run, quiet).await.0, []);
    let unknown = FollowRequest { job: Some("deploy".into()), ..FollowRequest::default() };
    let error = client.follow(run, unknown).next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("job `deploy`"), "{error}");
    let later = FollowRequest { step: Some("nope".into()), ..FollowRequest::default() };
    assert_eq!(follow_all(&client, run, later.clone()).await.0, [], "a run that goes on may still come to it");
    fake.end_run(run, true);
    let error = client.follow(run, later).next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("step `nope`"), "{error}");
    server.stop().await;
}
