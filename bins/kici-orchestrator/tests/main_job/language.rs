//! Retries, checks, groups, step files and hooks over the real wire.

use kici_api::dto::runs::{StepView, TriggerRun};
use kici_engine::check::{CheckMode, CheckResult};
use kici_engine::state::{JobStatus, RunStatus, StepStatus};
use kici_store::testing::TestStore;

use crate::stack::Stack;

const WORKFLOW: &str = r#"
name: ci
on: { push: {}, manual: {} }
defaults: { runs_on: default }
hooks:
  on_success: echo "run $KICI_OUTCOME_STATUS"
  cleanup: { run: 'echo "work $WORK"', env: { WORK: "${{ needs.work.status }}" } }
jobs:
  work:
    init: { run: echo TOOL=7 >> "$KICI_ENV" }
    hooks: { cleanup: echo cleaned }
    steps:
      - { id: flaky, run: "echo x >> tries; [ $(wc -l < tries) -ge 2 ]", retry: { attempts: 3, delay: 1s } }
      - { name: converge, check: 'test -f made || echo missing > "$KICI_DRIFT"', apply: touch made }
      - parallel: { name: both, steps: [echo one, echo two] }
      - { id: up, use: ./.kici/steps/up.yaml, with: { word: "${{ env.TOOL }}" } }
      - { run: 'echo "got $GOT"', env: { GOT: "${{ steps.up.outputs.word }}" } }
  denied:
    rules: [{ if: "branch == 'other'", label: only on other }]
    run: exit 1
"#;

const STEP_FILE: &str = r#"
inputs: { word: {} }
outputs: { word: "${{ steps.say.outputs.word }}" }
steps:
  - { id: say, run: 'echo "word=$INPUT_WORD!" >> "$KICI_OUTPUT"' }
"#;

fn find<'a>(steps: &'a [StepView], key: &str) -> &'a StepView {
    steps.iter().find(|step| step.key == key).unwrap_or_else(|| panic!("{key} in {steps:#?}"))
}

async fn the_language(database: Option<String>) {
    let stack = Stack::start(database).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let files = [(".kici/workflows/ci.yaml", WORKFLOW), (".kici/steps/up.yaml", STEP_FILE)];
    let repository = stack.repository("app", &files).await;
    let run = stack.push_one(&repository, "app").await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let denied = ended.jobs.iter().find(|job| job.name == "denied").unwrap();
    assert_eq!(denied.status, JobStatus::Skipped);
    assert_eq!(denied.routing_reason.as_deref(), Some("rule does not hold: only on other"));
    assert_eq!(stack.log(run, "_hooks").await, ["run success", "work success"]);

    let steps = stack.client.steps(run, Some("work")).await.unwrap();
    assert_eq!(find(&steps, "step-0-0").attempt, 2);
    let converge = find(&steps, "step-1-0");
    assert_eq!((converge.check, converge.drift.as_deref()), (Some(CheckResult::Applied), Some("missing\n")));
    assert_eq!(find(&steps, "step-2-0").group.as_deref(), Some("both"));
    assert_eq!(find(&steps, "step-4-0").group.as_deref(), Some("up"));
    assert_eq!(find(&steps, "hook_cleanup--1-0").status, StepStatus::Success);
    assert_eq!(find(&steps, "init--1-10").status, StepStatus::Success);
    assert!(stack.log(run, "work").await.contains(&"got 7!".to_owned()));

    let request = TriggerRun {
        source: "app".into(),
        workflow: "ci".into(),
        check_mode: CheckMode::CheckFailOnDrift,
        ..TriggerRun::default()
    };
    let checked = stack.client.trigger_run(&request, None).await.unwrap().run_id;
    let ended = stack.ended(checked).await;
    assert_eq!((ended.run.status, ended.run.check_mode), (RunStatus::Failed, CheckMode::CheckFailOnDrift));
    let reason = ended.run.failure.unwrap().reason;
    assert_eq!(reason, kici_engine::state::FailureReason::DriftDetected);
    let steps = stack.client.steps(checked, Some("work")).await.unwrap();
    assert_eq!(find(&steps, "step-0-0").check, Some(CheckResult::NoCheck));
    assert_eq!(find(&steps, "step-1-0").check, Some(CheckResult::WouldChange));
}

#[tokio::test]
async fn the_step_language_works_over_the_wire_on_sqlite() {
    the_language(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_step_language_works_over_the_wire_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    the_language(Some(database.url().to_owned())).await;
}
