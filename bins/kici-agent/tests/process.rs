//! The agent as a process: killed, started again, configured wrongly.

#[path = "../../../crates/runner/tests/fake/mod.rs"]
mod fake;
mod harness;

use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;

use fake::{Fake, job, offer, refusal, script, token};
use harness::{Killed, command, start};
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::{
    AgentCredentials, ClaimCredentialsResponse, GitAccess, GitHost, claim_credentials_response,
};
use kici_sys::process::ProcessId;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_outlives_the_agent_that_reached_it() {
    let fake = Fake::start();
    let state = tempfile::tempdir().expect("a directory");
    let mut agent = start(&fake, state.path());
    let first = fake.registered().await;
    fake.shared.acks.store(false, Ordering::SeqCst);
    let job = job(2, 1);
    fake.send(Down::JobOffer(offer(&job, vec![script("echo hi")]))).await;
    assert_eq!(fake.result(&job).await.state, "success");
    agent.kill();
    fake.shared.acks.store(true, Ordering::SeqCst);
    let _agent = start(&fake, state.path());
    let register = fake.registered().await;
    assert_eq!((register.agent_id, register.outbox_pending), (first.agent_id, vec![job.clone()]));
    let step = fake.step(&job, "success").await;
    assert_eq!(step.log_lines, 1);
    assert_eq!(fake.result(&job).await.state, "success");
    assert_eq!(fake.sealed(&job, "step-0-0").await, ["hi"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_18_a_killed_agent_leaves_nothing_behind_and_says_so() {
    let fake = Fake::start();
    let state = tempfile::tempdir().expect("a directory");
    let mut agent = start(&fake, state.path());
    fake.registered().await;
    let job = job(2, 1);
    let run = script("setsid sleep 600 & echo pid $!; echo pid $$; exec sleep 600");
    fake.send(Down::JobOffer(offer(&job, vec![run]))).await;
    fake.logged(&job, "step-0-0", "pid").await;
    let pids = loop {
        let text = String::from_utf8_lossy(&fake.log(&job, "step-0-0").bytes).into_owned();
        let pids: Vec<i32> = text.lines().filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
        if pids.len() == 2 {
            break pids;
        }
        tokio::task::yield_now().await;
    };
    let left: Vec<ProcessId> = pids.into_iter().filter_map(ProcessId::of).collect();
    assert_eq!(left.len(), 2);
    agent.kill();
    assert!(left.iter().all(|id| id.is_alive()), "the job goes on without its agent");
    let mut agent = start(&fake, state.path());
    let register = fake.registered().await;
    assert_eq!((register.in_flight_jobs.len(), register.outbox_pending), (0, vec![job.clone()]));
    let result = fake.result(&job).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "agent_restarted"));
    assert!(left.iter().all(|id| !id.is_alive()));
    let lines = fake.sealed(&job, "step-0-0").await;
    assert_eq!(lines.len(), 2);
    // It takes work again.
    let next = fake::job(3, 1);
    fake.send(Down::JobOffer(offer(&next, vec![script("true")]))).await;
    assert_eq!(fake.result(&next).await.state, "success");
    // SIGTERM ends an idle agent with 0.
    Command::new("kill").arg(agent.0.id().to_string()).status().expect("sent");
    let status = tokio::task::spawn_blocking(move || agent.0.wait()).await.expect("joined").expect("waited");
    assert_eq!(status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_agent_says_nothing_of_a_job_that_had_not_started_so_that_it_is_handed_out_again() {
    let fake = Fake::start();
    fake.shared.grants.store(false, Ordering::SeqCst);
    let state = tempfile::tempdir().expect("a directory");
    let mut agent = start(&fake, state.path());
    fake.registered().await;
    let job = job(2, 1);
    fake.send(Down::JobOffer(offer(&job, vec![script("echo hi")]))).await;
    let asks = |frame: &fake::Frame| match frame {
        fake::Frame::JobUpdate(update) if update.state == "running" => Some(()),
        _ => None,
    };
    fake.next("the question whether it may start", asks).await;
    agent.kill();
    let _agent = start(&fake, state.path());
    let register = fake.registered().await;
    assert_eq!((register.in_flight_jobs.len(), register.outbox_pending.len()), (0, 0));
    // It takes the job again, under the next epoch.
    fake.shared.grants.store(true, Ordering::SeqCst);
    let again = kici_protocol::common::JobRef { dispatch_epoch: 2, ..job };
    fake.send(Down::JobOffer(offer(&again, vec![script("echo hi")]))).await;
    assert_eq!(fake.result(&again).await.state, "success");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_agents_do_not_share_a_state_directory() {
    let fake = Fake::start();
    let state = tempfile::tempdir().expect("a directory");
    let _agent = start(&fake, state.path());
    fake.registered().await;
    let mut second = command(state.path());
    let output =
        second.env("KICI_ORCHESTRATOR_URL", fake.url()).env("KICI_AGENT_TOKEN", token()).output().expect("runs");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("in use by another agent"), "{error}");
}

#[test]
fn mistakes_in_the_configuration_are_told_and_exit_78() {
    let state = tempfile::tempdir().expect("a directory");
    let output = command(state.path()).env("KICI_LABLES", "x").output().expect("runs");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(78));
    assert!(error.contains("did you mean KICI_LABELS?") && error.contains("orchestrator_url"), "{error}");
    let check = ["config", "check", "--orchestrator-url", "http://127.0.0.1:1"];
    let output = command(state.path()).args(check).stdout(Stdio::piped()).output().expect("runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("orchestrator_url = http://127.0.0.1:1"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_socket_of_a_job_is_private_and_gone_when_the_agent_comes_back_after_a_kill() {
    let fake = Fake::start();
    let state = tempfile::tempdir().expect("a directory");
    let start = || {
        let mut command = command(state.path());
        command.env("KICI_ORCHESTRATOR_URL", fake.url()).env("KICI_AGENT_TOKEN", token());
        command.env("KICI_RUNTIME_DIR", state.path().join("r"));
        Killed(command.spawn().expect("the agent starts"))
    };
    let mut agent = start();
    fake.registered().await;
    let job = job(2, 1);
    let run = "stat -c '%a %F' \"$KICI_SOCK\" \"$(dirname \"$KICI_SOCK\")\"; kici git token; echo code $?; sleep 600";
    let mut offer = offer(&job, vec![script(&format!("set +e; {run}"))]);
    let host = GitHost { protocol: "https".into(), host: "git.example".into(), ignore_case: true };
    offer.git = Some(GitAccess { hosts: vec![host], repo: "acme/app".into() });
    fake.send(Down::JobOffer(offer)).await;
    fake.logged(&job, "step-0-0", "code").await;
    let said = String::from_utf8_lossy(&fake.log(&job, "step-0-0").bytes).into_owned();
    for part in ["600 socket", "700 directory", "no credential is available for git.example/acme/app", "code 3"] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
    let sockets = || std::fs::read_dir(state.path().join("r/j")).expect("there").count();
    assert_eq!(sockets(), 1);
    agent.kill();
    assert_eq!(sockets(), 1);
    let _agent = start();
    fake.registered().await;
    assert_eq!(sockets(), 0);
}

/// How a program ended: exit code, stdout, stderr.
fn ran(
    arg0: Option<&str>,
    arguments: &[&str],
    variables: &[(&str, &str)],
    input: &[u8],
) -> (Option<i32>, String, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let program = match arg0 {
        Some(name) => {
            let link = dir.path().join(name);
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kici-agent"), &link).expect("linked");
            link
        }
        None => env!("CARGO_BIN_EXE_kici-agent").into(),
    };
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    // It may have ended before it read anything.
    let _ = std::io::Write::write_all(&mut child.stdin.take().expect("a pipe"), input);
    let output = child.wait_with_output().expect("ended");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_helper_of_git_is_silent_whatever_is_wrong() {
    let query: &[u8] = b"protocol=https\nhost=h\npath=a/b\n\n";
    let calls: [&[&str]; 6] = [
        &["credential-helper", "--socket", "/nowhere/job.sock", "get"],
        &["credential-helper", "--socket", "/nowhere/job.sock", "store"],
        &["credential-helper", "--socket", "/nowhere/job.sock", "capability"],
        &["credential-helper", "--socket", "/nowhere/job.sock"],
        &["credential-helper", "get"],
        &["credential-helper", "--sokcet", "x", "get", "more"],
    ];
    for call in calls {
        for input in [query, b"", b"\xff\0"] {
            // Also with a configuration that would stop an agent.
            let ended = ran(None, call, &[("KICI_NONSENSE", "1")], input);
            assert_eq!(ended, (Some(0), String::new(), String::new()), "{call:?}");
        }
    }
}

#[test]
fn the_command_of_steps_says_what_is_wrong() {
    let (code, out, said) = ran(Some("kici"), &["git", "token"], &[], b"");
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(said.contains("KICI_SOCK"), "{said}");
    let (code, _, said) = ran(Some("kici"), &["git", "with-write"], &[("KICI_SOCK", "/nowhere")], b"");
    assert_eq!(code, Some(2), "{said}");
    let (code, _, said) = ran(None, &["step", "git", "token"], &[("KICI_SOCK", "/nowhere")], b"");
    assert!(code == Some(1) && said.contains("does not answer"), "{said}");
    let wrong = ["git", "token", "--permission", "contents=everything"];
    assert_eq!(ran(Some("kici"), &wrong, &[("KICI_SOCK", "/nowhere")], b"").0, Some(2));
    assert_eq!(ran(Some("kici"), &["--help"], &[("KICI_SOCK", "/nowhere")], b"").0, Some(0));
}

/// An agent with a claim code in place of a token.
fn claiming(fake: &Fake, state: &std::path::Path, code: &str) -> Command {
    let mut command = command(state);
    command
        .env("KICI_ORCHESTRATOR_URL", fake.url())
        .env("KICI_SCALER_MANAGED", "1")
        .env("KICI_SCALER_IDLE_TIMEOUT", "60000")
        .env("KICI_SCALER_CLAIM_CODE", code);
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_20_an_agent_buys_its_token_once_and_its_steps_see_neither_token_nor_code() {
    let fake = Fake::start();
    let state = tempfile::tempdir().expect("a directory");
    let code = format!("kici_claim_{}", "cd".repeat(35));
    let bought = AgentCredentials {
        agent_token: token(),
        agent_id: "scaler-event-1".into(),
        orchestrator_url: fake.url(),
        labels: vec!["linux".into(), "kici:agent:event".into()],
    };
    let bought = claim_credentials_response::Result::Credentials(bought);
    let answers = [
        // It is not told from a network that fails: the same code again.
        Err(tonic::Status::unavailable("the database does not answer")),
        Ok(ClaimCredentialsResponse { result: Some(bought) }),
        Ok(refusal("consumed")),
    ];
    fake.shared.claims.lock().expect("lock").extend(answers);
    let _agent = Killed(claiming(&fake, state.path(), &code).spawn().expect("the agent starts"));
    let register = fake.registered().await;
    assert_eq!(
        (register.agent_id.as_str(), register.labels),
        ("scaler-event-1", vec!["linux".into(), "kici:agent:event".into()])
    );
    assert_eq!(*fake.shared.codes.lock().expect("lock"), [code.clone(), code.clone()]);
    let job = job(2, 1);
    // Counted there: what is printed is masked.
    let look = "echo found $(tr '\\0' '\\n' < /proc/self/environ | grep -c -i -e kici_claim -e kici_agent_ -e scaler) in $(env | grep -c -i -e kici_claim -e kici_agent_ -e scaler)";
    fake.send(Down::JobOffer(offer(&job, vec![script(look)]))).await;
    assert_eq!(fake.result(&job).await.state, "success");
    assert_eq!(fake.sealed(&job, "step-0-0").await, ["found 0 in 0"]);

    // Whoever comes second with the code ends for good.
    let other = tempfile::tempdir().expect("a directory");
    let mut second = claiming(&fake, other.path(), &code);
    let output = tokio::task::spawn_blocking(move || second.stderr(Stdio::piped()).output());
    let output = output.await.expect("joined").expect("runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(78), "{text}");
    assert!(text.contains("it is consumed") && !text.contains(&code), "{text}");
    assert_eq!(fake.shared.codes.lock().expect("lock").len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_code_is_not_used_where_there_is_a_token() {
    let fake = Fake::start();
    let state = tempfile::tempdir().expect("a directory");
    let mut command = claiming(&fake, state.path(), &format!("kici_claim_{}", "cd".repeat(35)));
    let _agent = Killed(command.env("KICI_AGENT_TOKEN", token()).spawn().expect("the agent starts"));
    fake.registered().await;
    assert!(fake.shared.codes.lock().expect("lock").is_empty());
}
