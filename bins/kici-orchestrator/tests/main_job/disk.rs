//! Disks without space: everything waits, nothing is lost, and it goes on by itself.

use std::fs;
use std::path::Path;

use kici_engine::ids::RunId;
use kici_engine::state::{JobStatus, RunStatus};

use crate::stack::{Stack, until};

/// Speaks until it is told to go on, then says what must arrive whole. `@DIR@` lies on another disk.
const TALKATIVE: &str = r#"
on: push
jobs:
  talk:
    runs_on: default
    checkout: false
    steps:
      - run: |
          n=0
          until [ -e "$DIR/go" ]; do n=$((n + 1)); printf 'line %s %01000d\n' "$n" 0; sleep 0.01; done
          echo "$n" > "$DIR/count"
        env: { DIR: "@DIR@" }
      - echo "second step"
"#;

const OTHER: &str = "on: push\njobs: { other: { runs_on: later, checkout: false, run: echo other } }\n";

fn talkative(dir: &Path) -> String {
    TALKATIVE.replace("@DIR@", dir.to_str().unwrap())
}

async fn assert_whole(stack: &Stack, run: RunId) {
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let count: u64 = fs::read_to_string(stack.dir.path().join("count")).unwrap().trim().parse().unwrap();
    let lines = stack.log(run, "talk").await;
    let numbers: Vec<u64> =
        lines.iter().filter_map(|line| line.strip_prefix("line ")?.split(' ').next()?.parse().ok()).collect();
    assert_eq!(numbers, (1..=count).collect::<Vec<_>>());
    let steps = stack.client.steps(run, None).await.unwrap();
    // The logs of two steps may come in any order when they come late.
    let second = lines.iter().filter(|line| *line == "second step").count();
    assert_eq!(second, 1, "{steps:#?}\n{}", stack.logs());
}

#[tokio::test]
async fn a_full_disk_of_the_orchestrator_stops_intake_logs_and_claims_until_there_is_space_again() {
    let mut stack = Stack::unstarted(None);
    if !stack.mount("data", 64) {
        return;
    }
    stack.start_orchestrator("127.0.0.1:0").await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let talking = stack.repository("talking", &[(".kici/workflows/w.yaml", &talkative(stack.dir.path()))]).await;
    let other = stack.repository("other", &[(".kici/workflows/w.yaml", OTHER)]).await;
    let run = stack.push_one(&talking, "talking").await;
    let waiting = stack.push_one(&other, "other").await;
    stack.speaks(run).await;

    stack.mounts[0].fill();
    let ready = until("readiness to end", async || stack.client.ready().await.ok().filter(|ready| !ready.ready)).await;
    assert!(ready.checks["disk"].contains("MiB free in"), "{ready:?}");
    let refused = stack.post_push(&other, "other").await;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"), "{refused:?}");
    assert!(refused.text().await.unwrap().contains("space"));
    let health = stack.http.get(format!("http://{}/health", stack.address)).send().await.unwrap();
    assert_eq!(health.status(), 200);
    // An agent that could take the waiting job does not get it.
    let _later = stack.start_agent("a2", token.token.expose(), &[("KICI_LABELS", "later")]).await;
    // The step ends while nothing can be stored.
    fs::write(stack.dir.path().join("go"), "").unwrap();
    until("the step to end", async || fs::metadata(stack.dir.path().join("count")).ok()).await;
    let detail = stack.client.run(waiting).await.unwrap();
    assert_eq!(detail.jobs[0].status, JobStatus::Queued, "{:#?}", detail.jobs);
    assert_eq!(detail.jobs[0].epoch, 0, "it was claimed: {:#?}", detail.jobs);

    stack.mounts[0].free();
    until("readiness", async || stack.client.ready().await.ok().filter(|ready| ready.ready)).await;
    assert_whole(&stack, run).await;
    assert_eq!(stack.ended(waiting).await.run.status, RunStatus::Success, "{}", stack.logs());
    assert_eq!(stack.post_push(&other, "other").await.status(), 202);
}

#[tokio::test]
async fn a_full_disk_of_an_agent_pauses_its_step_and_takes_no_work_until_there_is_space_again() {
    let mut stack = Stack::start(None).await;
    if !stack.mount("a1", 48) {
        return;
    }
    let token = stack.agent_token().await;
    let settings = [("KICI_LABELS", "default,later"), ("KICI_AGENT_MAX_CONCURRENCY", "2")];
    let _agent = stack.start_agent("a1", token.token.expose(), &settings).await;
    let talking = stack.repository("talking", &[(".kici/workflows/w.yaml", &talkative(stack.dir.path()))]).await;
    let other = stack.repository("other", &[(".kici/workflows/w.yaml", OTHER)]).await;
    let run = stack.push_one(&talking, "talking").await;
    stack.speaks(run).await;

    stack.mounts[0].fill();
    until("the step to be paused", async || stack.logs().contains("commands are paused").then_some(())).await;
    let waiting = stack.push_one(&other, "other").await;
    let job = stack.client.run(waiting).await.unwrap().jobs[0].id;
    until("the agent to say why it takes nothing", async || {
        let explained = stack.client.explain_queue(job).await.ok()?;
        explained.agents.iter().any(|agent| agent.reason.contains("disk")).then_some(())
    })
    .await;
    fs::write(stack.dir.path().join("go"), "").unwrap();
    assert_eq!(stack.client.run(run).await.unwrap().run.status, RunStatus::Running);

    stack.mounts[0].free();
    assert_whole(&stack, run).await;
    assert_eq!(stack.ended(waiting).await.run.status, RunStatus::Success, "{}", stack.logs());
}
