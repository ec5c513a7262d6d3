//! Jobs that a job makes, over the real wire: made, allowed or not, kept when the orchestrator dies, and not made again.

use kici_api::dto::runs::{JobView, RerunRun, RunDetail};
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_store::testing::TestStore;

use crate::stack::{Stack, until};

const WORKFLOW: &str = r#"
name: ci
on: push
defaults: { runs_on: default, env: { SHARED: "by default" } }
jobs:
  build: { outputs: { version: "${{ steps.v.outputs.version }}" }, steps: [{ id: v, run: 'echo version=7 >> "$KICI_OUTPUT"' }] }
  plan:
    needs: build
    outputs: { planned: "yes" }
    hooks: { cleanup: 'until [ -e "@GO@" ]; do sleep 0.05; done' }
    generate:
      group: shards
      allow: { environments: [staging] }
      run: |
        echo made >> @LEDGER@
        cat ./jobs.json > "$KICI_JOBS"
  join:
    needs: [{ group: shards, when: always }, plan]
    env: { TOTAL: "${{ needs.shards.outputs.one }} of ${{ needs.shards.status }} and ${{ needs.plan.outputs.planned }}" }
    run: echo "$TOTAL"
"#;

const JOBS: &str = r#"{"jobs": [
  {"name": "one", "needs": "build", "matrix": {"n": [1, 2]}, "env": {"V": "${{ needs.build.outputs.version }}"},
   "outputs": {"one": "${{ steps.s.outputs.one }}"},
   "steps": [{"id": "s", "run": "echo \"shard $MATRIX_N of $V\"; echo one=$V >> \"$KICI_OUTPUT\""}]},
  {"name": "two", "needs": [{"job": "one", "when": "always"}], "run": "echo two"},
  {"name": "three", "needs": "build", "steps": [{"id": "say", "use": "./.kici/steps/say.yaml", "with": {"word": "${{ needs.build.outputs.version }}"}},
    {"run": "echo \"heard $HEARD\"", "env": {"HEARD": "${{ steps.say.outputs.word }}"}}]}
]}"#;

const STEP_FILE: &str = r#"
inputs: { word: {} }
outputs: { word: "${{ steps.it.outputs.word }}" }
steps: [{ id: it, run: 'echo "$SHARED: $INPUT_WORD"; echo "word=$INPUT_WORD!" >> "$KICI_OUTPUT"' }]
"#;

struct Scene {
    stack: Stack,
    _agent: crate::stack::Process,
}

impl Scene {
    async fn set(database: Option<String>) -> Self {
        let stack = Stack::start(database).await;
        let token = stack.agent_token().await;
        let agent = stack.start_agent("a1", token.token.expose(), &[]).await;
        Self { stack, _agent: agent }
    }

    fn path(&self, name: &str) -> String {
        self.stack.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// A run of the workflow whose generator writes `jobs`.
    async fn run(&self, source: &str, workflow: &str, jobs: &str) -> kici_engine::ids::RunId {
        let workflow = workflow.replace("@GO@", &self.path("go")).replace("@LEDGER@", &self.path("ledger"));
        let files =
            [(".kici/workflows/ci.yaml", workflow.as_str()), (".kici/steps/say.yaml", STEP_FILE), ("jobs.json", jobs)];
        let repository = self.stack.repository(source, &files).await;
        self.stack.push_one(&repository, source).await
    }

    fn go(&self) {
        std::fs::write(self.path("go"), "").unwrap();
    }

    fn made(&self) -> usize {
        std::fs::read_to_string(self.path("ledger")).map_or(0, |text| text.lines().count())
    }
}

fn job<'a>(detail: &'a RunDetail, name: &str) -> &'a JobView {
    detail.jobs.iter().find(|job| job.name == name).unwrap_or_else(|| panic!("{name} in {:#?}", detail.jobs))
}

async fn jobs_that_a_job_makes(database: Option<String>) {
    let mut scene = Scene::set(database).await;
    let run = scene.run("app", WORKFLOW, JOBS).await;
    // The jobs are reported and kept, and the generator has not ended.
    until("the jobs to be reported", async || {
        let steps = scene.stack.client.steps(run, Some("plan")).await.ok()?;
        steps.iter().any(|step| step.key == "step-0-0" && step.status.is_terminal()).then_some(())
    })
    .await;
    let before = scene.stack.client.run(run).await.unwrap();
    assert_eq!(before.jobs.len(), 3, "no job joins before its generator has ended well");
    let need = &job(&before, "join").needs;
    assert!(need.iter().any(|need| need.group.as_deref() == Some("shards") && need.job == "plan"), "{need:?}");

    scene.stack.orchestrator.take().unwrap().kill();
    scene.go();
    let address = scene.stack.address.clone();
    scene.stack.start_orchestrator(&address).await;

    let ended = scene.stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, scene.stack.logs());
    let names: Vec<&str> = ended.jobs.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["build", "plan", "join", "one (1)", "one (2)", "two", "three"]);
    assert_eq!(job(&ended, "plan").kind.as_deref(), Some("generate"));
    assert_eq!(scene.stack.log(run, "one (2)").await, ["shard 2 of 7"]);
    assert_eq!(scene.stack.log(run, "join").await, ["7 of success and yes"]);
    assert_eq!(scene.stack.log(run, "three").await, ["by default: 7", "heard 7!"], "defaults and step files");
    assert_eq!(scene.made(), 1);

    // What was made is part of the run: a repetition has the same jobs and asks nobody.
    let again = scene.stack.client.rerun(run, RerunRun { failed_only: false }, None).await.unwrap().run_id;
    let ended = scene.stack.ended(again).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, scene.stack.logs());
    assert_eq!(ended.jobs.len(), 7);
    assert_eq!(scene.stack.log(again, "join").await, ["7 of success and yes"]);
    assert_eq!(scene.made(), 1, "the generator ran again");
}

#[tokio::test]
async fn a_kill_between_report_and_insertion_loses_no_generated_job_on_sqlite() {
    jobs_that_a_job_makes(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_between_report_and_insertion_loses_no_generated_job_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    jobs_that_a_job_makes(Some(database.url().to_owned())).await;
}

async fn what_is_not_allowed(database: Option<String>) {
    let scene = Scene::set(database).await;
    scene.go();
    let refused = [
        (r#"{"jobs": [{"name": "a", "environment": "production", "run": "true"}]}"#, "`production` is not allowed"),
        (r#"{"jobs": [{"name": "a", "runs_on": "gpu", "run": "true"}]}"#, "`gpu` is not allowed"),
        (r#"{"jobs": [{"name": "a", "needs": "join", "run": "true"}]}"#, "dependency cycle"),
        (r#"{"jobs": [{"name": "build", "run": "true"}]}"#, "name of another job"),
        (r#"{"jobs": [{"name": "a", "run": "echo ${{ sha }}"}]}"#, "K0601"),
        ("[1]", "has no `jobs`"),
        ("", "wrote nothing to $KICI_JOBS"),
    ];
    for (at, (jobs, want)) in refused.iter().enumerate() {
        let run = scene.run(&format!("app{at}"), WORKFLOW, jobs).await;
        let ended = scene.stack.ended(run).await;
        assert_eq!(ended.run.status, RunStatus::Failed);
        let plan = job(&ended, "plan");
        assert_eq!(plan.status, JobStatus::Failed, "{jobs}");
        let failure = plan.failure.clone().unwrap();
        assert_eq!(failure.reason, FailureReason::DynamicEval, "{failure:?}");
        let text = failure.message.unwrap_or_default();
        assert!(text.replace('`', "'").contains(&want.replace('`', "'")), "{jobs}: {text}");
        assert_eq!(ended.jobs.len(), 3, "{jobs}: something was inserted: {:#?}", ended.jobs);
        // It needs the group whatever its jobs come to, and the generator itself with success.
        assert_eq!(job(&ended, "join").status, JobStatus::Skipped);
    }
}

#[tokio::test]
async fn acceptance_18_a_generated_job_beyond_its_allow_list_fails_the_generator_on_sqlite() {
    what_is_not_allowed(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_18_a_generated_job_beyond_its_allow_list_fails_the_generator_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    what_is_not_allowed(Some(database.url().to_owned())).await;
}

const TWO: &str = r#"
name: ci
on: push
defaults: { runs_on: default }
jobs:
  none: { generate: { run: 'echo "{\"jobs\": []}" > "$KICI_JOBS"' } }
  bad: { generate: { run: 'exit 1' } }
  after_none: { needs: { group: none }, if: "needs.none.status == 'success'", run: 'echo empty' }
  after_bad: { needs: { group: bad }, run: 'true' }
  always: { needs: [{ group: bad, when: always }], env: { S: "${{ needs.bad.status }}" }, run: 'echo "$S"' }
  held: { environment: production, secrets: [TOKEN], steps: [{ run: 'true', approval: true }] }
  behind: { needs: held, run: 'true' }
"#;

/// Also: what this version cannot give holds a job back, says so, and can be cancelled.
#[tokio::test]
async fn an_empty_group_is_met_at_once_and_a_failed_generator_speaks_for_its_group() {
    let scene = Scene::set(None).await;
    let run = scene.run("app", TWO, "").await;
    let detail = until("everything but the held job to end", async || {
        let detail = scene.stack.client.run(run).await.ok()?;
        let open: Vec<&str> =
            detail.jobs.iter().filter(|job| !job.status.is_terminal()).map(|job| job.name.as_str()).collect();
        (open == ["held", "behind"]).then_some(detail)
    })
    .await;
    assert_eq!(job(&detail, "after_none").status, JobStatus::Success);
    assert_eq!(job(&detail, "after_bad").status, JobStatus::Skipped);
    assert_eq!(job(&detail, "after_bad").routing_reason.as_deref(), Some("upstream_unmet: group:bad (failed)"));
    assert_eq!(job(&detail, "always").status, JobStatus::Success);
    let held = job(&detail, "held");
    assert_eq!(held.status, JobStatus::Held);
    let reason = held.routing_reason.clone().unwrap();
    assert!(reason.contains("`approval`, `environment` and `secrets`"), "{reason}");
    scene.stack.client.cancel_run(run, Default::default()).await.unwrap();
    let ended = scene.stack.ended(run).await;
    assert_eq!(job(&ended, "held").status, JobStatus::Cancelled);
    assert_eq!(scene.stack.log(run, "always").await, ["failed"]);
}
