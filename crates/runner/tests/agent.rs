//! The agent against an orchestrator that speaks the real protocol.

mod fake;
mod running;

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fake::{Fake, Frame, job, offer, script};
use kici_engine::time::{Clock, Ts};
use kici_protocol::agent::*;
use kici_runner::agent::{Agent, Ended, Signal};
use kici_runner::credentials::NoServices;
use kici_sys::clock::SystemClock;
use running::{agent, agent_in, config};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

type Down = orchestrator_frame::Frame;

fn running(update: &JobUpdate) -> bool {
    update.state == "running"
}

/// The process whose id the first step says first.
async fn said_pid(fake: &Fake, job: &kici_protocol::common::JobRef) -> kici_sys::process::ProcessId {
    loop {
        let log = fake.log(job, "step-0-0");
        let text = String::from_utf8_lossy(&log.bytes).into_owned();
        if let Some(pid) = text.lines().next().and_then(|line| line.rsplit(' ').next()?.parse::<i32>().ok()) {
            return kici_sys::process::ProcessId::of(pid).expect("alive");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn gone(pid: kici_sys::process::ProcessId) {
    while pid.is_alive() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_acknowledged_then_asked_for_then_run() {
    let fake = Fake::start();
    fake.shared.grants.store(false, Ordering::SeqCst);
    let running_agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let proof = running_agent.dir.path().join("proof");
    fake.send(Down::JobOffer(offer(&job, vec![script(&format!("touch {}; echo hi", proof.display()))]))).await;
    let order = fake
        .next("the acknowledgement", |frame| match frame {
            Frame::JobAck(_) => Some("ack"),
            Frame::JobUpdate(_) | Frame::StepUpdate(_) => Some("work"),
            _ => None,
        })
        .await;
    assert_eq!(order, "ack");
    fake.next("the question", |f| matches!(f, Frame::JobUpdate(u) if running(u)).then_some(())).await;
    let journal = std::fs::read_to_string(running_agent.dir.path().join("jobs.journal")).expect("there");
    assert!(journal.contains("accepted") && !proof.exists(), "no user code before the grant");
    fake.send(Down::StartGranted(StartGranted { job: Some(job.clone()) })).await;
    let step = fake.step(&job, "success").await;
    assert_eq!((step.exit_code, step.log_lines), (Some(0), 1));
    let result = fake.result(&job).await;
    assert_eq!((result.state.as_str(), result.log_bytes), ("success", step.log_bytes));
    assert!(proof.exists());
    assert_eq!(fake.sealed(&job, "step-0-0").await, ["hi"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_start_discards_the_job() {
    let fake = Fake::start();
    fake.shared.grants.store(false, Ordering::SeqCst);
    let running_agent = agent(&fake, &[]).await;
    let (first, second) = (job(2, 1), job(3, 1));
    fake.send(Down::JobOffer(offer(&first, vec![script("touch $HOME/ran")]))).await;
    fake.next("the question", |f| matches!(f, Frame::JobUpdate(u) if running(u)).then_some(())).await;
    fake.send(Down::StartDenied(StartDenied { job: Some(first.clone()), detail: "gone".into() })).await;
    fake.shared.grants.store(true, Ordering::SeqCst);
    // The slot comes free without any word on the first job.
    let mut accepted = false;
    while !accepted {
        fake.send(Down::JobOffer(offer(&second, vec![script("true")]))).await;
        accepted = fake
            .next("an answer", |f| match f {
                Frame::JobAck(_) => Some(true),
                Frame::JobReject(_) => Some(false),
                Frame::JobUpdate(u) => panic!("a word on a discarded job: {u:?}"),
                _ => None,
            })
            .await;
    }
    assert_eq!(fake.result(&second).await.state, "success");
    assert!(!running_agent.dir.path().join("ran").exists());
}

/// Panics once, in the task of a job, when a file is there.
struct Faulty {
    file: PathBuf,
    agent: OnceLock<tokio::task::Id>,
}

impl Clock for Faulty {
    fn now(&self) -> Ts {
        // The first to ask is the agent itself.
        let of_agent = tokio::task::try_id().is_none_or(|id| id == *self.agent.get_or_init(|| id));
        assert!(of_agent || std::fs::remove_file(&self.file).is_err(), "a faulty clock");
        SystemClock.now()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_task_panics_is_reported_and_gives_its_slot_back() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().expect("a directory");
    let clock = Faulty { file: dir.path().join("trip"), agent: OnceLock::new() };
    let running_agent = agent_in(&fake, dir, &[], Arc::new(clock)).await;
    let (first, second) = (job(1, 1), job(2, 1));
    let trip = script("setsid sleep 600 > /dev/null 2>&1 & echo $! > $HOME/pid; touch $HOME/trip; echo up; sleep 600");
    fake.send(Down::JobOffer(offer(&first, vec![trip]))).await;
    let result = fake.result(&first).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "sandbox_failed"));
    assert!(result.message.contains("a faulty clock"), "{}", result.message);
    assert!(fake.sealed(&first, "step-0-0").await.is_empty());
    let pid = std::fs::read_to_string(running_agent.dir.path().join("pid")).expect("a pid");
    let left = kici_sys::process::ProcessId::of(pid.trim().parse().expect("a number"));
    assert!(left.is_none_or(|id| !id.is_alive()), "{pid} lives");
    fake.send(Down::JobOffer(offer(&second, vec![script("true")]))).await;
    assert_eq!(fake.result(&second).await.state, "success");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_13_a_cancel_ends_daemons_too() {
    let fake = Fake::start();
    let _agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let script = script("(setsid sh -c 'sleep 600 & echo $! ; exec sleep 600' &); trap '' TERM; echo up; sleep 600");
    fake.send(Down::JobOffer(offer(&job, vec![script]))).await;
    fake.logged(&job, "step-0-0", " o up").await;
    let cancel = |force| JobCancel { job: Some(job.clone()), reason: "cancelled_by_user".into(), force, grace_ms: 100 };
    fake.send(Down::JobCancel(cancel(false))).await;
    let answer = fake.next("an answer", |f| match f {
        Frame::CancelAnswer(answer) => Some(answer.answer.clone()),
        _ => None,
    });
    assert_eq!(answer.await, "cancelling");
    let result = fake.result(&job).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("cancelled", "cancelled_by_user"));
    for line in fake.sealed(&job, "step-0-0").await {
        if let Ok(pid) = line.parse::<i32>() {
            let alive = kici_sys::process::ProcessId::of(pid).is_some_and(|id| id.is_alive());
            assert!(!alive, "{pid} lives");
        }
    }
    let unknown = fake::job(99, 1);
    fake.send(Down::JobCancel(JobCancel { job: Some(unknown), ..cancel(true) })).await;
    let answer = fake.next("an answer", |f| match f {
        Frame::CancelAnswer(answer) => Some(answer.answer.clone()),
        _ => None,
    });
    assert_eq!(answer.await, "unknown_job");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_orchestrator_loses_no_line() {
    let mut fake = Fake::start();
    let _agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let gate = tempfile::tempdir().expect("a directory");
    let fifo = gate.path().join("go");
    let make = format!("mkfifo {0}; seq 1 20000; echo half; cat {0}; seq 20001 40000", fifo.display());
    fake.send(Down::JobOffer(offer(&job, vec![script(&make)]))).await;
    fake.logged(&job, "step-0-0", " o half").await;
    fake.kill();
    fake.lose_tails(5_000);
    std::fs::write(&fifo, "").expect("the step goes on");
    fake.verdict(&job, Verdict::Resume, true);
    fake.serve();
    let register = fake.registered().await;
    assert_eq!(register.in_flight_jobs.len() + register.outbox_pending.len(), 1);
    assert_eq!(fake.result(&job).await.state, "success");
    let lines = fake.sealed(&job, "step-0-0").await;
    let numbers: Vec<u32> = lines.iter().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(numbers, (1..=40_000).collect::<Vec<u32>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_job_ends_without_a_word() {
    let mut fake = Fake::start();
    let running_agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    fake.send(Down::JobOffer(offer(&job, vec![script("echo up; exec sleep 600")]))).await;
    fake.logged(&job, "step-0-0", " o up").await;
    fake.kill();
    fake.verdict(&job, Verdict::Abandon, false);
    fake.serve();
    fake.registered().await;
    // Drained means: the job is gone, and with it everything that waits.
    running_agent.signals.send(Signal::Drain).await.expect("told");
    let ended = tokio::time::timeout(fake::LIMIT, running_agent.task).await.expect("in time").expect("ended");
    assert_eq!(ended.exit, 0);
    assert!(std::fs::read_dir(running_agent.dir.path().join("work")).expect("there").next().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_or_draining_agent_says_so() {
    let fake = Fake::start();
    let running_agent = agent(&fake, &[]).await;
    let (first, second) = (job(2, 1), job(3, 1));
    let fifo = running_agent.dir.path().join("go");
    let wait = format!("mkfifo {0}; echo up; cat {0}", fifo.display());
    fake.send(Down::JobOffer(offer(&first, vec![script(&wait)]))).await;
    fake.logged(&first, "step-0-0", " o up").await;
    let reason = |frame: &Frame| match frame {
        Frame::JobReject(reject) => Some(reject.reason()),
        _ => None,
    };
    fake.send(Down::JobOffer(offer(&second, vec![script("true")]))).await;
    assert_eq!(fake.next("a reject", reason).await, RejectReason::Busy);
    fake.send(Down::JobOffer(offer(&first, vec![script("true")]))).await;
    fake.next("a second ack of what is held", |f| matches!(f, Frame::JobAck(_)).then_some(())).await;
    running_agent.signals.send(Signal::Drain).await.expect("told");
    let draining = |f: &Frame| matches!(f, Frame::AgentStatus(status) if status.draining).then_some(());
    fake.next("the status", draining).await;
    fake.send(Down::JobOffer(offer(&second, vec![script("true")]))).await;
    assert_eq!(fake.next("a reject", reason).await, RejectReason::Draining);
    std::fs::write(&fifo, "").expect("the step goes on");
    assert_eq!(fake.result(&first).await.state, "success");
    let ended = tokio::time::timeout(fake::LIMIT, running_agent.task).await.expect("in time").expect("ended");
    assert_eq!(ended, Ended { exit: 0, message: None });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_see_no_variable_of_the_agent_and_the_token_is_masked() {
    let fake = Fake::start();
    let _agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let echo = format!("env; printf 'kici_agent_'; printf '{}\\n'", "ab".repeat(35));
    let mut with_mask = offer(&job, vec![script(&echo), script("echo clone-s3cr3t")]);
    with_mask.mask = vec!["clone-s3cr3t".into()];
    fake.send(Down::JobOffer(with_mask)).await;
    assert_eq!(fake.result(&job).await.state, "success");
    let lines = fake.sealed(&job, "step-0-0").await;
    for name in ["KICI_AGENT_TOKEN", "KICI_ORCHESTRATOR_URL", "KICI_STATE_DIR", "SECRET_OF_THE_HOST"] {
        assert!(!lines.iter().any(|line| line.starts_with(&format!("{name}="))), "{name}");
    }
    assert!(lines.iter().any(|line| line == "KICI_JOB_NAME=build"));
    assert_eq!(lines.last().map(String::as_str), Some("***"));
    assert_eq!(fake.sealed(&job, "step-1-0").await, ["***"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_53_a_secret_of_many_lines_leaks_nowhere_however_it_is_printed() {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    let lines: Vec<String> = (0..40).map(|n| format!("Zq{n:02}/key+of\"the\"forge={}", n * 7919)).collect();
    let secret = lines.join("\n");
    let url = |text: &str| -> String {
        let encode = |b: u8| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") };
        text.bytes().map(encode).collect()
    };
    let (encoded, json) = (url(&secret), serde_json::json!({ "key": secret }).to_string());
    let print = format!(
        "S=$(cat <<'END'\n{secret}\nEND\n)\nU='{encoded}'\nJ='{json}'\n\
         printf '%s\\n' \"$S\" \"$U\" \"$J\" >&2\n\
         for ((i = 0; i < ${{#S}}; i++)); do printf '%s' \"${{S:i:1}}\"; done; echo\n\
         head -c 65520 /dev/zero | tr '\\0' x; printf '%s\\n' \"$S\"\n\
         for n in 1 2 3; do head -c 6553$n /dev/zero | tr '\\0' x; printf '%s\\n' \"$S\" | tail -n 1; done\n\
         printf '%s' \"$S\" | base64; printf '%s\\n' \"$S\" | base64 -w 64; printf 'a%s' \"$S\" | base64 -w 0; echo\n\
         while IFS= read -r L; do printf '%s\\n' \"$L\" | base64; printf 'xy%s' \"$L\" | base64; done <<< \"$S\"\n\
         printf '%s' \"$S\" >> \"$KICI_SUMMARY\"; printf 'of<<END\\n%s\\nEND\\n' \"$S\" >> \"$KICI_OUTPUT\"\n\
         echo all of it; exit 3"
    );
    let fake = Fake::start();
    let _agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let mut with_mask = offer(&job, vec![script(&print)]);
    with_mask.mask = vec![secret.clone()];
    fake.send(Down::JobOffer(with_mask)).await;
    let step = fake.step(&job, "failed").await;
    let result = fake.result(&job).await;
    assert_eq!(result.evidence.as_ref().and_then(|evidence| evidence.exit_code), Some(3), "{}", result.message);
    let log = fake.sealed(&job, "step-0-0").await.join("\n");
    assert!(log.contains("all of it"), "{log}");
    let seen = format!("{log}\n{step:?}\n{result:?}");
    assert!(seen.contains("***") && !step.summary.is_empty() && step.outputs.contains_key("of"), "{step:?}");
    for line in &lines {
        // What stays when both ends depend on their neighbours.
        let inner = STANDARD.encode(line);
        let forms = [line.clone(), url(line), inner[..inner.len() - 8].to_owned(), line[2..line.len() - 2].to_owned()];
        for form in forms {
            assert!(!seen.contains(&form), "{form} in {seen}");
        }
    }
    // Whichever way base64 was cut into lines, no long run of it is left.
    let whole = STANDARD.encode(&secret);
    for at in 0..whole.len() - 24 {
        assert!(!seen.contains(&whole[at..at + 24]), "{}", &whole[at..at + 24]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_token_ends_the_agent() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().expect("a directory");
    let wrong = format!("kici_agent_{}", "cd".repeat(35));
    let config = config(&fake.url(), dir.path(), &[("KICI_AGENT_TOKEN", &wrong)]);
    let (_signals, from_test) = mpsc::channel(1);
    let run = Agent::run(config, Arc::new(SystemClock), from_test, Arc::new(NoServices), None);
    let ended = tokio::time::timeout(fake::LIMIT, run).await.expect("in time").expect("started");
    assert_eq!(ended.exit, 78);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_without_contact_fences_itself() {
    let mut fake = Fake::start();
    fake.shared.recovery_window_ms.store(2_000, Ordering::SeqCst);
    let _agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    fake.send(Down::JobOffer(offer(&job, vec![script("echo $$; exec sleep 600")]))).await;
    let pid = said_pid(&fake, &job).await;
    fake.kill();
    tokio::time::timeout(fake::LIMIT, gone(pid)).await.expect("the agent ended the job by itself");
    fake.serve();
    let result = fake.result(&job).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "agent_lost"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_epoch_replaces_the_older_delivery() {
    let fake = Fake::start();
    let _agent = agent(&fake, &[]).await;
    let (old, new) = (job(2, 1), job(2, 2));
    fake.send(Down::JobOffer(offer(&old, vec![script("echo up; exec sleep 600")]))).await;
    fake.logged(&old, "step-0-0", " o up").await;
    fake.send(Down::JobOffer(offer(&new, vec![script("echo second")]))).await;
    let result = fake
        .next("a result", |frame| match frame {
            Frame::JobUpdate(update) if update.state != "running" => Some(update.clone()),
            _ => None,
        })
        .await;
    assert_eq!((result.job, result.state.as_str()), (Some(new), "success"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_9_a_cut_within_the_window_costs_neither_the_job_nor_the_agent() {
    let mut fake = Fake::start();
    let running_agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let fifo = running_agent.dir.path().join("go");
    let wait = format!("mkfifo {0}; echo up; cat {0}; echo on", fifo.display());
    fake.send(Down::JobOffer(offer(&job, vec![script(&wait)]))).await;
    fake.logged(&job, "step-0-0", " o up").await;
    fake.kill();
    fake.verdict(&job, Verdict::Resume, true);
    fake.serve();
    fake.registered().await;
    std::fs::write(&fifo, "").expect("the step goes on");
    assert_eq!(fake.result(&job).await.state, "success");
    assert_eq!(fake.sealed(&job, "step-0-0").await, ["up", "on"]);
    assert!(!running_agent.task.is_finished());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_16_a_cancelled_step_gets_term_and_its_grace_to_clean_up() {
    let fake = Fake::start();
    let running_agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let cleaned = running_agent.dir.path().join("cleaned");
    let text = format!(
        "trap 'sleep 0.3; echo done > {}; exit 1' TERM; echo up; while :; do sleep 0.05; done",
        cleaned.display()
    );
    fake.send(Down::JobOffer(offer(&job, vec![script(&text)]))).await;
    fake.logged(&job, "step-0-0", " o up").await;
    let reason = "cancelled_by_user".to_owned();
    fake.send(Down::JobCancel(JobCancel { job: Some(job.clone()), reason, force: false, grace_ms: 20_000 })).await;
    // It comes before the grace is over, for the step ends by itself.
    assert_eq!(fake.result(&job).await.state, "cancelled");
    assert_eq!(std::fs::read_to_string(cleaned).expect("it had the time"), "done\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_20_a_time_limit_is_kept_though_the_step_ignores_term_and_nobody_listens() {
    let mut fake = Fake::start();
    let _agent = agent(&fake, &[]).await;
    let job = job(2, 1);
    let stubborn = kici_engine::lock::Step { timeout_ms: Some(1_500), ..script("trap '' TERM; echo $$; sleep 1d") };
    let offered = JobOffer { grace_period_ms: 300, ..offer(&job, vec![stubborn]) };
    fake.send(Down::JobOffer(offered)).await;
    let pid = said_pid(&fake, &job).await;
    fake.kill();
    tokio::time::timeout(fake::LIMIT, gone(pid)).await.expect("the agent ended the step by itself");
    fake.verdict(&job, Verdict::Resume, true);
    fake.serve();
    let result = fake.result(&job).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "step_timeout"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_23_an_agent_that_is_told_to_stop_ends_though_nothing_is_ever_acknowledged() {
    let fake = Fake::start();
    let running_agent = agent(&fake, &[]).await;
    fake.shared.acks.store(false, Ordering::SeqCst);
    let job = job(2, 1);
    fake.send(Down::JobOffer(offer(&job, vec![script("echo kept")]))).await;
    assert_eq!(fake.result(&job).await.state, "success");
    running_agent.signals.send(Signal::Stop).await.expect("told");
    let ended = tokio::time::timeout(fake::LIMIT, running_agent.task).await.expect("in time").expect("ended");
    assert_eq!(ended.exit, 0);
    // Lines and result wait on its disk for the next start.
    fake.shared.acks.store(true, Ordering::SeqCst);
    let config = config(&fake.url(), running_agent.dir.path(), &[]);
    let (_signals, from_test) = mpsc::channel(1);
    let _next = TaskTracker::new()
        .spawn(async move { Agent::run(config, Arc::new(SystemClock), from_test, Arc::new(NoServices), None).await });
    assert_eq!(fake.registered().await.outbox_pending.len(), 1);
    assert_eq!(fake.result(&job).await.state, "success");
    assert_eq!(fake.sealed(&job, "step-0-0").await, ["kept"]);
}
