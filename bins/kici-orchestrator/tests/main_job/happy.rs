//! The path without faults.

use kici_api::dto::runs::TriggerRun;
use kici_engine::state::{JobStatus, RunStatus};
use kici_store::testing::TestStore;

use crate::stack::Stack;

const WORKFLOW: &str = r#"
name: ci
on:
  push: { branches: [main] }
  manual: { inputs: { who: { type: string, default: world } } }
env: { LEVEL: workflow }
defaults: { runs_on: default, timeout: 5m }
jobs:
  build:
    outputs: { version: "${{ steps.v.outputs.version }}" }
    steps:
      - test -f .kici/workflows/ci.yaml
      - id: v
        run: |
          echo "version=1.2.3" >> "$KICI_OUTPUT"
          echo "level $LEVEL token ${KICI_AGENT_TOKEN:-none}"
  test:
    needs: build
    matrix: { db: [a, b] }
    env: { VERSION: "${{ needs.build.outputs.version }}" }
    run: echo "db $MATRIX_DB version $VERSION"
  never:
    needs: [test, build]
    if: needs.build.outputs.version == '9'
    run: exit 1
  report:
    needs: [{ job: test, when: always }]
    checkout: false
    run: echo "report $(ls | wc -l)"
"#;

async fn end_to_end(database: Option<String>) {
    let stack = Stack::start(database).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[("KICI_AGENT_MAX_CONCURRENCY", "2")]).await;
    let repository = stack.repository("app", &[(".kici/workflows/ci.yaml", WORKFLOW)]).await;

    let run = stack.push_one(&repository, "app").await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let status = |name: &str| ended.jobs.iter().find(|job| job.name == name).unwrap().status;
    assert_eq!(status("never"), JobStatus::Skipped);
    assert_eq!(ended.jobs.len(), 5);

    assert_eq!(stack.log(run, "build").await, ["level workflow token none"]);
    assert_eq!(stack.log(run, "test (a)").await, ["db a version 1.2.3"]);
    assert_eq!(stack.log(run, "report").await, ["report 0"]);
    for step in stack.client.steps(run, None).await.unwrap() {
        assert!(step.log.complete, "{step:?}");
    }

    let request = TriggerRun { source: "app".into(), workflow: "ci".into(), ..TriggerRun::default() };
    let first = stack.client.trigger_run(&request, Some("k1")).await.unwrap();
    let second = stack.client.trigger_run(&request, Some("k1")).await.unwrap();
    assert_eq!(first.run_id, second.run_id);
    assert_eq!(stack.ended(first.run_id).await.run.status, RunStatus::Success);

    let again = stack.client.rerun(run, Default::default(), None).await.unwrap();
    let again = stack.ended(again.run_id).await;
    assert_eq!((again.run.status, again.run.attempt), (RunStatus::Success, 2));
    assert_eq!(again.run.parent_run_id, Some(run));
}

#[tokio::test]
async fn a_push_runs_the_workflow_and_its_logs_and_outputs_are_kept_on_sqlite() {
    end_to_end(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_runs_the_workflow_and_its_logs_and_outputs_are_kept_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    end_to_end(Some(database.url().to_owned())).await;
}

#[tokio::test]
async fn a_cancel_ends_the_whole_tree_of_a_running_job() {
    const LONG: &str = r#"
on: push
jobs:
  long:
    runs_on: default
    grace_period: 1s
    steps:
      - run: |
          setsid sleep 3137 &
          (sleep 3138 &)
          echo started
          sleep 3139
"#;
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let repository = stack.repository("app", &[(".kici/workflows/long.yaml", LONG)]).await;
    let run = stack.push_one(&repository, "app").await;
    crate::stack::until("the step to start", async || {
        let steps = stack.client.steps(run, None).await.ok()?;
        steps.iter().any(|step| step.log.bytes > 0 || step.key == "step-0-0").then_some(())
    })
    .await;
    stack.client.cancel_run(run, Default::default()).await.unwrap();
    assert_eq!(stack.ended(run).await.run.status, RunStatus::Cancelled, "{}", stack.logs());
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).into_owned();
        assert!(!command.starts_with("sleep\x00313"), "{command} is left over");
    }
}
