//! From the text of a workflow file to what an agent gets, through the public functions.

use std::collections::BTreeMap;

use kici_engine::compile::compile_file;
use kici_engine::event::{Event, EventKind, ForkState, Sender};
use kici_engine::ids::RunId;
use kici_engine::lock::{Generator, Workflow};
use kici_engine::lockfile;
use kici_engine::needs::{Node, propagate};
use kici_engine::plan::{
    Activation, Fleet, JobPlan, JobRef, NeedResult, Needs, Planned, RunInfo, Scope, Start, activate, job_spec, plan_run,
};
use kici_engine::state::JobStatus;
use kici_engine::trigger::{Outcome, match_workflow};
use serde_json::json;
use uuid::Uuid;

const CI: &str = r#"
name: ci
run_name: "CI of ${{ branch }}"
on:
  push: { branches: [main, "release/**"] }
env: { REPO: "${{ repo }}" }
jobs:
  build:
    runs_on: [linux, "/x64|amd64/"]
    outputs: { version: "${{ steps.v.outputs.version }}" }
    steps:
      - id: v
        run: echo "version=1" >> "$KICI_OUTPUT"
  test:
    needs: build
    runs_on: "${{ matrix.os }}"
    matrix: { os: [linux, mac], rust: [stable, "1.95"], exclude: [{ os: mac, rust: "1.95" }] }
    env: { VERSION: "${{ needs.build.outputs.version }}" }
    run: cargo test
  shards:
    runs_on: linux
    matrix: "${{ from_json('[1, 2]') }}"
    run: ./shard "$MATRIX_VALUE"
  report:
    needs: [{ job: test, when: always }, build]
    if: needs.test.status == 'failed'
    runs_on: linux
    run: ./report
"#;

fn event() -> Event {
    Event {
        kind: EventKind::Push,
        raw_name: "push".into(),
        action: None,
        org: "default".into(),
        routing_key: "local:1".into(),
        provider: "local".into(),
        source: "app".into(),
        repo: Some("acme/app".into()),
        git_ref: Some("refs/heads/main".into()),
        sha: Some("a".repeat(40)),
        target_branch: Some("main".into()),
        source_branch: None,
        base_sha: None,
        tag: None,
        default_branch: None,
        is_fork_pr: ForkState::No,
        pr_number: None,
        sender: Sender::default(),
        commit_message: None,
        inputs: BTreeMap::new(),
        requested_workflow: None,
        payload: json!({}),
        check_mode: Default::default(),
        chain_depth: 0,
    }
}

fn workflow() -> Workflow {
    let compiled = compile_file(".kici/workflows/ci.yaml", CI);
    assert_eq!(compiled.diagnostics, []);
    compiled.workflows.into_iter().next().unwrap()
}

fn scope<'a>(workflow: &'a Workflow, event: &'a Event) -> Scope<'a> {
    let repo = event.repo.as_deref().unwrap_or_default();
    Scope {
        workflow,
        event,
        run: RunInfo {
            id: RunId::from_uuid(Uuid::from_u128(1)),
            repo,
            git_ref: event.git_ref.as_deref(),
            sha: event.sha.as_deref().unwrap_or_default(),
            attempt: 1,
        },
    }
}

fn status(job: &JobPlan) -> JobStatus {
    match job.start {
        Start::AfterNeeds => JobStatus::Pending,
        Start::Now(Activation::Enqueue { .. }) => JobStatus::Queued,
        Start::Now(Activation::Invoke { .. }) => JobStatus::Running,
        Start::Now(Activation::Hold { .. }) => JobStatus::Held,
        Start::Now(Activation::Skip { .. }) => JobStatus::Skipped,
        Start::Now(Activation::Fail { .. }) => JobStatus::Failed,
    }
}

#[test]
fn a_push_becomes_jobs_and_jobs_become_specifications() {
    let (workflow, event) = (workflow(), event());
    let decision = match_workflow(&workflow, &event, None);
    assert!(matches!(decision.outcome, Outcome::Matched { trigger: 0, .. }));
    let Ok(Planned::Run(plan)) = plan_run(scope(&workflow, &event), &Fleet::default()) else { panic!("it must run") };
    assert_eq!((plan.run_name.as_str(), plan.notes.len()), ("CI of main", 0));

    let names: Vec<_> = plan.jobs.iter().map(|job| (job.name.as_str(), status(job))).collect();
    let want = [
        ("build", JobStatus::Queued),
        ("test (linux, stable)", JobStatus::Pending),
        ("test (linux, 1.95)", JobStatus::Pending),
        ("test (mac, stable)", JobStatus::Pending),
        ("shards (1)", JobStatus::Queued),
        ("shards (2)", JobStatus::Queued),
        ("report", JobStatus::Pending),
    ];
    assert_eq!(names, want);

    let mut nodes: Vec<Node> = plan
        .jobs
        .iter()
        .map(|job| Node {
            base_name: job.base_name.clone(),
            status: status(job),
            needs_satisfied: job.needs.is_empty(),
            needs: job.needs.clone(),
        })
        .collect();
    nodes[0].status = JobStatus::Success;
    assert_eq!(propagate(&nodes).ready, [1, 2, 3]);

    let outputs = BTreeMap::from([("version".to_owned(), "1".to_owned())]);
    let needs = Needs::from([("build".to_owned(), NeedResult { status: JobStatus::Success, outputs, hosts: None })]);
    let mac = &plan.jobs[3];
    let job = JobRef { name: &mac.name, job_index: mac.job_index, matrix: &mac.matrix, fanout: None, needs: &needs };
    let Activation::Enqueue { selector, .. } = activate(scope(&workflow, &event), job, None) else {
        panic!("it must run")
    };
    assert_eq!(serde_json::to_value(&selector).unwrap(), json!({"labels": [{"kind": "exact", "value": "mac"}]}));
    let spec = job_spec(scope(&workflow, &event), job).unwrap();
    assert_eq!(serde_json::to_value(&spec.env["VERSION"]).unwrap(), json!({"static": "1"}));
    assert_eq!(serde_json::to_value(&spec.env["REPO"]).unwrap(), json!({"static": "acme/app"}));
    assert_eq!(spec.variables["MATRIX_RUST"], "stable");

    (1..4).for_each(|at| nodes[at].status = JobStatus::Failed);
    assert_eq!(propagate(&nodes).ready, [6]);
    let failed = NeedResult { status: JobStatus::Failed, outputs: BTreeMap::new(), hosts: None };
    let needs = needs.into_iter().chain([("test".to_owned(), failed)]).collect();
    let report = JobRef { name: "report", job_index: 3, matrix: &BTreeMap::new(), fanout: None, needs: &needs };
    assert!(matches!(activate(scope(&workflow, &event), report, None), Activation::Enqueue { .. }));
}

#[test]
fn what_the_compiler_makes_is_a_legal_lock() {
    let document = lockfile::document(vec![workflow()], Generator { name: "kici".into(), version: "0".into() });
    assert_eq!(lockfile::read(&serde_json::to_vec(&document).unwrap()), Ok(document));
}
