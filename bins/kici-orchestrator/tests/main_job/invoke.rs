//! Jobs that start other workflows and wait for them, over the real wire.

use kici_api::dto::runs::{JobView, RunDetail, RunFilter, TriggerRun};
use kici_api::page::PageQuery;
use kici_engine::ids::RunId;
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_store::testing::TestStore;

use crate::stack::{Stack, until};

const CALLER: &str = r#"
name: caller
on: { manual: { inputs: { event: {}, optional: { type: boolean, default: false } } } }
defaults: { runs_on: default }
jobs:
  build: { outputs: { v: "${{ steps.v.outputs.v }}" }, steps: [{ id: v, run: 'echo v=7 >> "$KICI_OUTPUT"' }] }
  strict:
    needs: build
    if: inputs.optional == false
    invoke: { event: "${{ inputs.event }}", payload: { version: "${{ needs.build.outputs.v }}", list: [1, "${{ branch }}"] } }
  lax:
    needs: build
    if: inputs.optional == true
    invoke: { event: "${{ inputs.event }}", optional: true }
  after: { needs: [{ job: strict, when: on-skip }, { job: lax, when: on-skip }], run: 'true' }
"#;

const GOOD: &str = r#"
name: good
on: { event: [{ name: go }, { name: mixed }] }
jobs:
  work:
    runs_on: default
    env: { V: "${{ has(event.payload.version) ? event.payload.version : 'none' }}" }
    run: echo "version $V"
"#;

const BAD: &str = "name: bad\non: { event: [{ name: mixed }] }\njobs: { work: { runs_on: default, run: exit 1 } }\n";
const LOOP: &str =
    "name: circle\non: { event: { name: round } }\njobs: { again: { invoke: { event: round, optional: true } } }\n";
const SLOW: &str =
    "name: slow\non: { event: { name: slow } }\njobs: { work: { runs_on: default, run: 'touch @HERE@; sleep 60' } }\n";

struct Scene {
    stack: Stack,
    _agents: [crate::stack::Process; 2],
}

impl Scene {
    async fn set(database: Option<String>) -> Self {
        let stack = Stack::start(database).await;
        let token = stack.agent_token().await;
        let agents = [
            stack.start_agent("a1", token.token.expose(), &[]).await,
            stack.start_agent("a2", token.token.expose(), &[]).await,
        ];
        let slow = SLOW.replace("@HERE@", stack.dir.path().join("here").to_str().unwrap());
        let files = [
            (".kici/workflows/caller.yaml", CALLER),
            (".kici/workflows/good.yaml", GOOD),
            (".kici/workflows/bad.yaml", BAD),
            (".kici/workflows/circle.yaml", LOOP),
            (".kici/workflows/slow.yaml", &slow),
        ];
        let repository = stack.repository("app", &files).await;
        // Registers them.
        stack.push(&repository, "app").await;
        Self { stack, _agents: agents }
    }

    async fn call(&self, event: &str, optional: bool) -> RunId {
        let inputs = [("event".to_owned(), event.into()), ("optional".to_owned(), optional.into())].into();
        let request = TriggerRun { source: "app".into(), workflow: "caller".into(), inputs, ..TriggerRun::default() };
        self.stack.client.trigger_run(&request, None).await.unwrap().run_id
    }

    async fn runs_of(&self, workflow: &str) -> Vec<RunId> {
        let filter = RunFilter { workflow: Some(workflow.to_owned()), ..RunFilter::default() };
        let runs = self.stack.client.runs(&filter, &PageQuery::default()).await.unwrap();
        runs.items.iter().map(|run| run.id).collect()
    }
}

fn job<'a>(detail: &'a RunDetail, name: &str) -> &'a JobView {
    detail.jobs.iter().find(|job| job.name == name).unwrap_or_else(|| panic!("{name} in {:#?}", detail.jobs))
}

async fn workflows_that_a_job_starts(database: Option<String>) {
    let mut scene = Scene::set(database).await;
    let ended = scene.stack.ended(scene.call("go", false).await).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, scene.stack.logs());
    let gate = job(&ended, "strict");
    assert_eq!((gate.kind.as_deref(), gate.epoch), (Some("invoke"), 0));
    let started = scene.runs_of("good").await;
    assert_eq!(gate.outputs["runs"], started[0].to_string());
    assert_eq!(scene.stack.log(started[0], "work").await, ["version 7"]);

    let ended = scene.stack.ended(scene.call("mixed", false).await).await;
    assert_eq!(ended.run.status, RunStatus::Failed);
    let failure = job(&ended, "strict").failure.clone().unwrap();
    assert_eq!(failure.reason, FailureReason::InvokeFailed);
    assert!(failure.message.unwrap().contains("of `bad` ended as failed"));
    assert_eq!(job(&ended, "after").status, JobStatus::Skipped);

    // Nobody listens: a failure, unless that is said to be all right.
    let ended = scene.stack.ended(scene.call("nobody", false).await).await;
    let failure = job(&ended, "strict").failure.clone().unwrap();
    assert_eq!(failure.reason, FailureReason::InvokeFailed);
    assert!(failure.message.unwrap().contains("listens to event `nobody`"));
    let ended = scene.stack.ended(scene.call("nobody", true).await).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}", ended.jobs);

    // T16: a chain that is refused is never green, though everything in it says `optional`.
    let ended = scene.stack.ended(scene.call("round", true).await).await;
    assert_eq!(ended.run.status, RunStatus::Failed, "{:#?}", ended.jobs);
    let deepest = scene.runs_of("circle").await;
    let refused = scene.stack.client.run(deepest[0]).await.unwrap();
    assert_eq!(job(&refused, "again").failure.clone().unwrap().reason, FailureReason::InvokeRefused);

    // A kill while it waits, and a cancel of what waits.
    let run = scene.call("slow", false).await;
    let here = scene.stack.dir.path().join("here");
    until("the slow workflow to work", async || here.exists().then_some(())).await;
    scene.stack.orchestrator.take().unwrap().kill();
    let address = scene.stack.address.clone();
    scene.stack.start_orchestrator(&address).await;
    let waiting = until("the job to say what it waits for", async || {
        let detail = scene.stack.client.run(run).await.ok()?;
        let gate = job(&detail, "strict").clone();
        gate.routing_reason.as_ref().is_some_and(|reason| reason.contains("(slow)")).then_some(gate)
    })
    .await;
    assert_eq!(waiting.status, JobStatus::Running);
    scene.stack.client.cancel_run(run, Default::default()).await.unwrap();
    let ended = scene.stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Cancelled);
    let slow = scene.runs_of("slow").await;
    assert_eq!(slow.len(), 1);
    assert_eq!(scene.stack.ended(slow[0]).await.run.status, RunStatus::Cancelled);
}

#[tokio::test]
async fn trap_16_a_job_waits_for_what_it_starts_and_a_refusal_is_never_green_on_sqlite() {
    workflows_that_a_job_starts(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trap_16_a_job_waits_for_what_it_starts_and_a_refusal_is_never_green_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    workflows_that_a_job_starts(Some(database.url().to_owned())).await;
}
