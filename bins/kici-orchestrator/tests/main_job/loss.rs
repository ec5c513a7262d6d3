//! Agents that die, stop answering or are cut off.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kici_engine::ids::RunId;
use kici_engine::state::{FailureClass, FailureReason, JobStatus, RunStatus};
use nix::sys::signal::Signal;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;

use crate::stack::{Stack, until};

const COUNTING: &str = r#"
on: push
jobs:
  count:
    runs_on: default
    checkout: false
    steps:
      - run: |
          echo once >> "$DIR/judge"
          n=0
          until [ -e "$DIR/go" ]; do n=$((n + 1)); echo "line $n"; sleep 0.01; done
          echo "$n" > "$DIR/count"
        env: { DIR: "@DIR@" }
"#;

async fn counting(stack: &Stack) -> RunId {
    let workflow = COUNTING.replace("@DIR@", stack.dir.path().to_str().unwrap());
    let repository = stack.repository("app", &[(".kici/workflows/w.yaml", &workflow)]).await;
    let run = stack.push_one(&repository, "app").await;
    stack.speaks(run).await;
    run
}

/// Lets the job end, and checks that it ran once and that each of its lines came once.
async fn finish(stack: &Stack, run: RunId) {
    fs::write(stack.dir.path().join("go"), "").unwrap();
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let count: u64 = fs::read_to_string(stack.dir.path().join("count")).unwrap().trim().parse().unwrap();
    let expected: Vec<String> = (1..=count).map(|n| format!("line {n}")).collect();
    assert_eq!(stack.log(run, "count").await, expected);
    assert_eq!(fs::read_to_string(stack.dir.path().join("judge")).unwrap(), "once\n");
    assert_eq!(ended.jobs[0].epoch, 1);
}

#[tokio::test]
async fn complaint_4_a_job_whose_agent_was_killed_is_out_of_contact_at_once_and_then_lost() {
    const LONG: &str = r#"
on: push
jobs:
  long:
    runs_on: default
    checkout: false
    steps:
      - run: |
          setsid sleep 4137 &
          (sleep 4138 &)
          echo started
          sleep 4139
"#;
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let repository = stack.repository("app", &[(".kici/workflows/w.yaml", LONG)]).await;
    let run = stack.push_one(&repository, "app").await;
    stack.speaks(run).await;
    agent.kill();
    stack.job_is(run, JobStatus::Recovering).await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Failed, "{:#?}\n{}", ended.jobs, stack.logs());
    let failure = ended.jobs[0].failure.as_ref().unwrap();
    assert_eq!((failure.reason, failure.class), (FailureReason::AgentRestarted, FailureClass::Lost));
    assert_eq!(stack.log(run, "long").await, ["started"]);
    until("the job's processes to be gone", async || {
        let left = fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            command.starts_with(b"sleep\x00413")
        });
        (!left).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_agent_that_stood_still_beyond_the_keep_alive_goes_on_with_its_job() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let run = counting(&stack).await;
    agent.signal(Signal::SIGSTOP);
    stack.job_is(run, JobStatus::Recovering).await;
    agent.signal(Signal::SIGCONT);
    stack.job_is(run, JobStatus::Running).await;
    finish(&stack, run).await;
}

/// Between an agent and its orchestrator; can be cut.
struct Wire {
    address: String,
    open: Arc<AtomicBool>,
    cut: broadcast::Sender<()>,
}

impl Wire {
    async fn to(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let open = Arc::new(AtomicBool::new(true));
        let cut = broadcast::Sender::new(1);
        let (is_open, cuts) = (open.clone(), cut.clone());
        #[allow(clippy::disallowed_methods, reason = "ends with the runtime of the test")]
        tokio::spawn(async move {
            while let Ok((mut from, _)) = listener.accept().await {
                if !is_open.load(Ordering::SeqCst) {
                    continue;
                }
                let mut cut = cuts.subscribe();
                let target = target.clone();
                tokio::spawn(async move {
                    let mut to = TcpStream::connect(target).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
                        _ = cut.recv() => {}
                    }
                });
            }
        });
        Self { address, open, cut }
    }

    fn cut(&self) {
        self.open.store(false, Ordering::SeqCst);
        let _ = self.cut.send(());
    }

    fn mend(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_connection_that_is_cut_for_five_seconds_costs_no_line() {
    let stack = Stack::start(None).await;
    let wire = Wire::to(stack.address.clone()).await;
    let token = stack.agent_token().await;
    let url = format!("http://{}", wire.address);
    let _agent = stack.start_agent("a1", token.token.expose(), &[("KICI_ORCHESTRATOR_URL", &url)]).await;
    let run = counting(&stack).await;
    wire.cut();
    stack.job_is(run, JobStatus::Recovering).await;
    // The length of the cut is what is tested.
    tokio::time::sleep(Duration::from_secs(5)).await;
    wire.mend();
    stack.job_is(run, JobStatus::Running).await;
    finish(&stack, run).await;
}
