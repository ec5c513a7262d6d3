//! What an agent does between its jobs, and how it ends.

mod fake;
mod running;

use std::sync::atomic::Ordering;
use std::time::Duration;

use fake::{Fake, Frame, LIMIT, job, offer, script};
use kici_protocol::agent::{AgentStatus, RejectReason, orchestrator_frame::Frame as Down};
use kici_runner::agent::Signal;
use running::agent;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn status(fake: &Fake, what: &str, wanted: impl Fn(&AgentStatus) -> bool) -> AgentStatus {
    fake.next(what, |frame| match frame {
        Frame::AgentStatus(status) if wanted(status) => Some(status.clone()),
        _ => None,
    })
    .await
}

async fn rejected(fake: &Fake) -> RejectReason {
    fake.next("a rejection", |frame| match frame {
        Frame::JobReject(reject) => Some(reject.reason()),
        _ => None,
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offers_are_rejected_while_the_host_is_reset_and_taken_afterwards() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (go, said) = (dir.path().join("go"), dir.path().join("said"));
    let command = format!(
        "echo $KICI_RESET_JOB_ID $KICI_RESET_JOB_STATUS ${{KICI_AGENT_TOKEN-none}} > {said}; mkfifo {go}; cat {go}",
        said = said.display(),
        go = go.display(),
    );
    let _agent = agent(&fake, &[("KICI_AGENT_BETWEEN_JOBS_RESET_COMMAND", &command)]).await;
    let first = job(2, 1);
    fake.send(Down::JobOffer(offer(&first, vec![script("exit 1")]))).await;
    assert_eq!(fake.result(&first).await.state, "failed");
    status(&fake, "the reset", |status| status.resetting).await;
    fake.send(Down::JobOffer(offer(&job(3, 1), vec![script("true")]))).await;
    assert_eq!(rejected(&fake).await, RejectReason::Resetting);
    tokio::task::spawn_blocking(move || std::fs::write(go, "")).await.expect("joined").expect("the reset goes on");
    status(&fake, "the end of the reset", |status| !status.resetting).await;
    let line = std::fs::read_to_string(said).expect("it ran");
    assert!(line.contains(&first.job_id) && line.trim().ends_with(" failed none"), "{line}");
    let next = job(4, 1);
    fake.send(Down::JobOffer(offer(&next, vec![script("true")]))).await;
    assert_eq!(fake.result(&next).await.state, "success");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_a_steady_load_the_host_is_reset_before_the_next_job() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().expect("a directory");
    let said = dir.path().join("said");
    let command = format!("echo reset >> {}", said.display());
    let _agent = agent(&fake, &[("KICI_AGENT_BETWEEN_JOBS_RESET_COMMAND", &command)]).await;
    let first = job(2, 1);
    // What it leaves takes a while to delete.
    let many = "mkdir d && cd d && seq 20000 | xargs touch";
    fake.send(Down::JobOffer(offer(&first, vec![script(many)]))).await;
    status(&fake, "no more work", |status| status.resetting).await;
    assert_eq!(fake.result(&first).await.state, "success", "said only after that");
    fake.send(Down::JobOffer(offer(&job(3, 1), vec![script("true")]))).await;
    assert_eq!(rejected(&fake).await, RejectReason::Resetting);
    status(&fake, "the end of the reset", |status| !status.resetting).await;
    assert_eq!(std::fs::read_to_string(said).expect("it ran"), "reset\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_18_failing_resets_drain_the_agent_only_where_that_is_asked_for() {
    for drain in [true, false] {
        let fake = Fake::start();
        let settings = [
            ("KICI_AGENT_BETWEEN_JOBS_RESET_COMMAND", "echo broken; exit 3"),
            ("KICI_AGENT_DRAIN_ON_RESET_FAILURE", if drain { "true" } else { "false" }),
        ];
        let running = agent(&fake, &settings).await;
        for number in 2..5 {
            let job = job(number, 1);
            fake.send(Down::JobOffer(offer(&job, vec![script("true")]))).await;
            assert_eq!(fake.result(&job).await.state, "success");
            status(&fake, "the reset", |status| status.resetting).await;
            let after = status(&fake, "its end", |status| !status.resetting).await;
            assert_eq!(after.draining, drain && number == 4, "{after:?}");
            let told = after.degraded.iter().any(|why| why.contains("failed 3 times in a row: exit code 3: broken"));
            assert_eq!(told, drain && number == 4, "{after:?}");
        }
        let job = job(9, 1);
        fake.send(Down::JobOffer(offer(&job, vec![script("true")]))).await;
        if drain {
            assert_eq!(rejected(&fake).await, RejectReason::Draining);
            assert!(!running.task.is_finished(), "it stays, for people to see why");
        } else {
            assert_eq!(fake.result(&job).await.state, "success");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_that_hangs_is_ended_with_its_children_and_runs_after_failures_only() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().expect("a directory");
    let pid = dir.path().join("pid");
    let command = format!("setsid sleep 600 & echo $! > {}; sleep 600", pid.display());
    let settings = [
        ("KICI_AGENT_BETWEEN_JOBS_RESET_COMMAND", command.as_str()),
        ("KICI_AGENT_BETWEEN_JOBS_RESET_TIMEOUT_MS", "300"),
        ("KICI_AGENT_BETWEEN_JOBS_RESET_RUN_ON", "on-failure"),
    ];
    let _agent = agent(&fake, &settings).await;
    for (number, script_text, state) in [(2, "true", "success"), (3, "false", "failed")] {
        let job = job(number, 1);
        fake.send(Down::JobOffer(offer(&job, vec![script(script_text)]))).await;
        assert_eq!(fake.result(&job).await.state, state);
    }
    status(&fake, "the reset", |status| status.resetting).await;
    status(&fake, "its end", |status| !status.resetting).await;
    let pid = std::fs::read_to_string(pid).expect("it ran").trim().parse().expect("a number");
    assert!(kici_sys::process::ProcessId::of(pid).is_none_or(|id| !id.is_alive()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_24_an_agent_that_drains_ends_its_job_and_takes_no_other() {
    let fake = Fake::start();
    let running = agent(&fake, &[]).await;
    let job = job(2, 1);
    let fifo = running.dir.path().join("go");
    let wait = format!("mkfifo {0}; echo up; cat {0}", fifo.display());
    fake.send(Down::JobOffer(offer(&job, vec![script(&wait)]))).await;
    fake.logged(&job, "step-0-0", " o up").await;
    running.signals.send(Signal::Drain).await.expect("told");
    status(&fake, "draining", |status| status.draining).await;
    fake.send(Down::JobOffer(offer(&fake::job(3, 1), vec![script("true")]))).await;
    assert_eq!(rejected(&fake).await, RejectReason::Draining);
    tokio::task::spawn_blocking(move || std::fs::write(fifo, "")).await.expect("joined").expect("the step goes on");
    assert_eq!(fake.result(&job).await.state, "success");
    let ended = tokio::time::timeout(LIMIT, running.task).await.expect("in time").expect("ended");
    assert_eq!((ended.exit, ended.message), (0, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_2_an_agent_that_leaves_answers_offers_until_its_leave_is_heard() {
    let fake = Fake::start();
    let running = agent(&fake, &[]).await;
    fake.shared.acks.store(false, Ordering::SeqCst);
    running.signals.send(Signal::Stop).await.expect("told");
    status(&fake, "draining", |status| status.draining).await;
    // Sent before the orchestrator had read that.
    fake.shared.acks.store(true, Ordering::SeqCst);
    fake.send(Down::JobOffer(offer(&job(2, 1), vec![script("true")]))).await;
    assert_eq!(rejected(&fake).await, RejectReason::Draining);
    let ended = tokio::time::timeout(LIMIT, running.task).await.expect("in time").expect("ended");
    assert_eq!((ended.exit, ended.message), (0, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_19_an_agent_of_a_scaler_ends_without_work_but_waits_for_its_first_job() {
    let fake = Fake::start();
    fake.shared.pending_dispatch.store(true, Ordering::SeqCst);
    let settings = [
        ("KICI_SCALER_MANAGED", "1"),
        ("KICI_SCALER_IDLE_TIMEOUT", "0"),
        ("KICI_SCALER_PENDING_DISPATCH_TIMEOUT", "60000"),
        ("KICI_AGENT_BETWEEN_JOBS_RESET_COMMAND", "false"),
    ];
    let running = agent(&fake, &settings).await;
    // Two ticks of the agent.
    tokio::time::sleep(Duration::from_millis(2_200)).await;
    assert!(!running.task.is_finished(), "its job may still come");
    let job = job(2, 1);
    fake.send(Down::JobOffer(offer(&job, vec![script("true")]))).await;
    assert_eq!(fake.result(&job).await.state, "success");
    let ended = tokio::time::timeout(LIMIT, running.task).await.expect("in time").expect("ended");
    assert_eq!((ended.exit, ended.message), (0, None));
    assert!(fake.log(&job, "step-0-0").seal.is_some(), "it waited for its log to be taken");
    // Without a job on its way it does not wait that long.
    fake.shared.pending_dispatch.store(false, Ordering::SeqCst);
    let running = agent(&fake, &settings).await;
    let ended = tokio::time::timeout(LIMIT, running.task).await.expect("in time").expect("ended");
    assert_eq!(ended.exit, 0);
}

async fn page(port: u16, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("asked");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("answered");
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_readiness_are_served_where_a_port_is_named() {
    let fake = Fake::start();
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let running = agent(&fake, &[("KICI_PORT", &port.to_string())]).await;
    let ready = async {
        while !page(port, "/ready").await.starts_with("HTTP/1.1 200") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, ready).await.expect("ready once it is registered");
    let health = page(port, "/health").await;
    assert!(health.contains("\"agent_id\":\"agent-1\",\"connected\":true,\"active_jobs\":0"), "{health}");
    let job = job(2, 1);
    let fifo = running.dir.path().join("go");
    let wait = format!("mkfifo {0}; echo up; cat {0}", fifo.display());
    fake.send(Down::JobOffer(offer(&job, vec![script(&wait)]))).await;
    fake.logged(&job, "step-0-0", " o up").await;
    running.signals.send(Signal::Drain).await.expect("told");
    status(&fake, "draining", |status| status.draining).await;
    let ready = page(port, "/ready").await;
    assert!(
        ready.starts_with("HTTP/1.1 503") && ready.contains("draining") && ready.contains("\"active_jobs\":1"),
        "{ready}"
    );
    tokio::task::spawn_blocking(move || std::fs::write(fifo, "")).await.expect("joined").expect("the step goes on");
    fake.result(&job).await;
}
