//! Runs that take turns, with real processes.

use kici_api::dto::runs::TriggerRun;
use kici_engine::state::{JobStatus, RunStatus};
use kici_store::testing::TestStore;

use crate::stack::{Stack, until};

/// Each run writes when it begins and ends; the first waits for a file in between.
const DEPLOY: &str = r#"
on: [push, manual]
concurrency: "deploy-${{ branch }}"
jobs:
  deploy:
    runs_on: default
    env: { DIR: "@DIR@", RUN: "${{ run.id }}" }
    run: |
      echo "begin $RUN" >> "$DIR/journal"
      until [ -e "$DIR/go" ]; do sleep 0.02; done
      echo "end $RUN" >> "$DIR/journal"
"#;

async fn turns(database: Option<String>) {
    let mut stack = Stack::start(database).await;
    let dir = stack.dir.path().to_owned();
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[("KICI_AGENT_MAX_CONCURRENCY", "3")]).await;
    let workflow = DEPLOY.replace("@DIR@", dir.to_str().unwrap());
    let repository = stack.repository("app", &[(".kici/workflows/deploy.yaml", &workflow)]).await;
    let first = stack.push_one(&repository, "app").await;
    stack.job_is(first, JobStatus::Running).await;
    let request = TriggerRun { source: "app".into(), workflow: "deploy".into(), ..TriggerRun::default() };
    let second = stack.client.trigger_run(&request, None).await.unwrap().run_id;
    let third = stack.client.trigger_run(&request, None).await.unwrap().run_id;
    stack.job_is(third, JobStatus::Waiting).await;
    let shown = stack.client.run(third).await.unwrap();
    assert_eq!(shown.run.status, RunStatus::Held);
    let why = shown.jobs[0].routing_reason.clone().unwrap();
    assert_eq!(
        why,
        format!("waits for a slot of concurrency group `deploy-main`: place 2 of 2, held by {first}"),
        "the place and the holder are on screen"
    );
    assert_eq!((shown.slots[0].place, shown.slots[0].held_by.as_slice()), (Some(2), [first].as_slice()));

    let refused = stack.client.explain_queue(shown.jobs[0].id).await.unwrap_err();
    assert!(refused.to_string().contains(&why), "{refused}");

    // Who waits is forgotten by nobody, also when the orchestrator is killed while the holder ends.
    stack.orchestrator.take().unwrap().kill();
    std::fs::write(dir.join("go"), "").unwrap();
    let address = stack.address.clone();
    stack.start_orchestrator(&address).await;
    for run in [first, second, third] {
        let ended = stack.ended(run).await;
        assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    }
    let journal = std::fs::read_to_string(dir.join("journal")).unwrap();
    let expected: String = [first, second, third].iter().map(|run| format!("begin {run}\nend {run}\n")).collect();
    assert_eq!(journal, expected, "one at a time, the oldest first");
}

#[tokio::test]
async fn runs_of_a_group_take_turns_and_a_killed_orchestrator_forgets_nobody_on_sqlite() {
    turns(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_a_group_take_turns_and_a_killed_orchestrator_forgets_nobody_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    turns(Some(database.url().to_owned())).await;
}

#[tokio::test]
async fn a_job_that_fails_is_tried_again_and_both_attempts_can_be_read() {
    const FLAKY: &str = r#"
on: push
jobs:
  flaky:
    runs_on: default
    retry: { attempts: 2, on: user }
    run: |
      echo "attempt"; touch "@DIR@/tried-$(ls @DIR@ | grep -c tried)"
      [ "$(ls @DIR@ | grep -c tried)" -ge 2 ]
"#;
    let stack = Stack::start(None).await;
    let dir = stack.dir.path().to_owned();
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let workflow = FLAKY.replace("@DIR@", dir.to_str().unwrap());
    let repository = stack.repository("app", &[(".kici/workflows/flaky.yaml", &workflow)]).await;
    let run = stack.push_one(&repository, "app").await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let job = &ended.jobs[0];
    assert_eq!((job.attempt, job.epoch, job.earlier.len()), (2, 2, 1));
    assert_eq!(job.earlier[0].outcome.as_deref(), Some("retried"));
    let steps = stack.client.steps_at(run, "flaky", 1).await.unwrap();
    let step = steps.iter().find(|step| step.key.starts_with("step-")).unwrap();
    assert_eq!(step.exit_code, Some(1), "{steps:?}");
    let query = kici_api::dto::logs::LogQuery { epoch: Some(1), ..Default::default() };
    let log = until("the log of the first attempt", async || {
        let range = stack.client.step_logs(run, "flaky", &step.key, &query).await.ok()?;
        range.complete.then_some(range)
    })
    .await;
    assert_eq!(log.lines[0].text, "attempt");
}
