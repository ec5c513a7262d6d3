use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::event::{EventKind, ForkState, Sender};
use crate::hosts::{HostStatus, Lifecycle};
use crate::labels::{CanonicalLabel, CompiledSelector};
use crate::lock::Matcher;

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
        commit_message: Some("Fix the thing\n\nbody".into()),
        check_mode: Default::default(),
        inputs: BTreeMap::from([("env".to_owned(), json!("prod")), ("count".to_owned(), json!(3))]),
        requested_workflow: None,
        payload: json!({"head": {"title": "hello"}}),
        chain_depth: 0,
    }
}

fn job(name: &str, extra: serde_json::Value) -> serde_json::Value {
    let mut job = json!({
        "name": name,
        "source": {"file": "ci.yaml", "line": 1},
        "runs_on": {"labels": [{"kind": "exact", "value": "linux"}]},
        "steps": [{"source": {"file": "ci.yaml", "line": 2}, "run": "true"}],
    });
    for (key, value) in extra.as_object().unwrap() {
        job[key] = value.clone();
    }
    job
}

fn workflow(extra: serde_json::Value, jobs: &[serde_json::Value]) -> Workflow {
    let mut workflow = json!({
        "name": "ci",
        "source": {"file": "ci.yaml", "line": 1},
        "content_hash": "",
        "triggers": [{"type": "push"}],
        "jobs": jobs,
    });
    for (key, value) in extra.as_object().unwrap() {
        workflow[key] = value.clone();
    }
    serde_json::from_value(workflow).unwrap()
}

fn run() -> RunInfo<'static> {
    RunInfo {
        id: RunId::from_uuid(Uuid::from_u128(7)),
        repo: "acme/app",
        git_ref: Some("refs/heads/main"),
        sha: "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        attempt: 2,
    }
}

fn plan(workflow: &Workflow) -> RunPlan {
    match plan_run(Scope { workflow, event: &event(), run: run() }, &Fleet::default()).unwrap() {
        Planned::Run(plan) => plan,
        Planned::Declined { reason } => panic!("{reason}"),
    }
}

fn template(text: &str) -> serde_json::Value {
    json!({"template": text, "stage": "dispatch"})
}

fn labels(activation: &Activation) -> Vec<String> {
    let Activation::Enqueue { selector, .. } = activation else { panic!("{activation:?}") };
    CompiledSelector::compile(selector).unwrap().exact_labels().map(ToString::to_string).collect()
}

#[test]
fn a_plan_has_variants_edges_and_roots() {
    let ci = workflow(
        json!({"timeout_ms": 60_000}),
        &[
            job("build", json!({})),
            job(
                "test",
                json!({
                    "needs": [{"job": "build", "run_on": ["success"]}],
                    "matrix": {"table": {"dimensions": {"os": ["linux", "mac"]}}},
                    "runs_on": {"labels": [{"kind": "exact", "value": "${{ matrix.os }}"}]},
                    "display_name": {"static": "Tests"},
                    "max_parallel": 1,
                }),
            ),
        ],
    );
    let plan = plan(&ci);
    assert_eq!((plan.run_name.as_str(), plan.timeout_ms), ("Fix the thing", Some(60_000)));
    let names: Vec<_> = plan.jobs.iter().map(|job| (job.name.as_str(), job.display_name.as_str())).collect();
    assert_eq!(names, [("build", "build"), ("test (linux)", "Tests (linux)"), ("test (mac)", "Tests (mac)")]);
    assert!(matches!(&plan.jobs[0].start, Start::Now(activation) if labels(activation) == ["linux"]));
    assert_eq!((plan.jobs[2].base_name.as_str(), &plan.jobs[2].start), ("test", &Start::AfterNeeds));
    assert_eq!((plan.jobs[2].job_index, plan.jobs[2].max_parallel), (1, Some(1)));
    assert_eq!(plan.jobs[2].needs, [Need::on("build", [JobStatus::Success])]);
}

#[test]
fn a_false_condition_declines_the_run_and_a_broken_one_is_an_error() {
    let decide = |condition: &str| {
        let ci = workflow(json!({"if": condition}), &[job("a", json!({}))]);
        plan_run(Scope { workflow: &ci, event: &event(), run: run() }, &Fleet::default())
    };
    assert!(matches!(decide("branch == 'main'"), Ok(Planned::Run(_))));
    let reason = "`if` is false: branch == 'dev'".to_owned();
    assert_eq!(decide("branch == 'dev'"), Ok(Planned::Declined { reason }));
    let error = decide("event.payload.missing == 1").unwrap_err().to_string();
    assert!(error.starts_with("`if` of workflow `ci`: "), "never silently false: {error}");
}

#[test]
fn titles_never_fail_a_run() {
    let named = |value: serde_json::Value| plan(&workflow(json!({"run_name": value}), &[job("a", json!({}))]));
    let good = named(template("Deploy ${{ inputs.env }}\n#${{ run.attempt }}"));
    assert_eq!((good.run_name.as_str(), good.notes.len()), ("Deploy prod #2", 0));
    let bad = named(template("${{ event.gone }}"));
    assert_eq!((bad.run_name.as_str(), bad.notes.len()), ("Fix the thing", 1));
    let broken_job = job("a", json!({"display_name": template("${{ needs.x.status }}")}));
    assert_eq!(plan(&workflow(json!({}), &[broken_job])).jobs[0].display_name, "a");
}

#[test]
fn a_fault_of_one_job_fails_that_job_only() {
    let ci = workflow(
        json!({}),
        &[
            job("empty", json!({"matrix": {"table": {"dimensions": {"a": []}}}})),
            job("early", json!({"matrix": {"expr": "from_json(needs.plan.outputs.m)"}})),
            job("label", json!({"runs_on": {"labels": [{"kind": "exact", "value": "${{ branch }} x"}]}})),
            job("cond", json!({"if": "event.nothing"})),
            job("env", json!({"env": {"A": template("${{ event.nothing }}")}})),
            job("skip", json!({"if": "branch == 'dev'"})),
            job("good", json!({"matrix": {"expr": "${{ ['x', 'y'] }}"}})),
        ],
    );
    let plan = plan(&ci);
    let message = |at: usize| match &plan.jobs[at].start {
        Start::Now(Activation::Fail { reason: FailureReason::ExprError, message }) => message.as_str(),
        other => panic!("{at}: {other:?}"),
    };
    assert_eq!(message(0), "matrix produced no combinations");
    assert!(message(1).contains("before `needs` has results"));
    assert!(message(2).starts_with("runs_on: `main x` is not a label"));
    assert!(message(3).starts_with("if: "));
    assert!(message(4).starts_with("env A: "));
    assert!(
        matches!(&plan.jobs[5].start, Start::Now(Activation::Skip { reason }) if reason.contains("branch == 'dev'"))
    );
    assert_eq!((plan.jobs[6].name.as_str(), plan.jobs[7].name.as_str()), ("good (x)", "good (y)"));
    assert!(
        labels(match &plan.jobs[7].start {
            Start::Now(activation) => activation,
            other => panic!("{other:?}"),
        }) == ["linux"]
    );
}

#[test]
fn a_run_has_at_most_a_thousand_jobs() {
    let values: Vec<u32> = (0..256).collect();
    let wide = |name: &str| {
        job(
            name,
            json!({"matrix": {"table": {"dimensions": {"n": values.iter().map(u32::to_string).collect::<Vec<_>>()}}}}),
        )
    };
    let ci = workflow(json!({}), &[wide("a"), wide("b"), wide("c"), wide("d")]);
    let error = plan_run(Scope { workflow: &ci, event: &event(), run: run() }, &Fleet::default()).unwrap_err();
    assert!(matches!(error, PlanError::TooManyJobs { count: 1024, .. }));
}

#[test]
fn results_of_needed_jobs_decide_and_travel() {
    let ci = workflow(
        json!({"env": {"A": {"static": "workflow"}, "B": template("${{ repo }}")}}),
        &[job(
            "deploy",
            json!({
                "needs": [{"job": "build", "run_on": ["success", "failed"]}],
                "if": "needs.build.status == 'success'",
                "runs_on": {"labels": [
                    {"kind": "exact", "value": "Pool-${{ needs.build.outputs.pool }}"},
                    {"kind": "regex", "source": "big.*"},
                    {"kind": "exact", "value": "linux"},
                ]},
                "env": {"A": {"static": "job"}, "C": {"template": "${{ steps.x.outputs.y }}", "stage": "agent"}},
            }),
        )],
    );
    let event = event();
    let scope = Scope { workflow: &ci, event: &event, run: run() };
    let matrix = BTreeMap::from([("rust-version".to_owned(), "1.95".to_owned())]);
    let outputs = BTreeMap::from([("pool".to_owned(), "A".to_owned())]);
    let needs = Needs::from([("build".to_owned(), NeedResult { status: JobStatus::Success, outputs, hosts: None })]);
    let deploy = |needs| JobRef { name: "deploy", job_index: 0, matrix: &matrix, fanout: None, needs };

    let Activation::Enqueue { selector, .. } = activate(scope, deploy(&needs), None) else { panic!("it must run") };
    let exact = |value: &str| Matcher::Exact { value: value.into() };
    assert_eq!(selector.labels, [exact("linux"), exact("pool-a"), Matcher::Regex { source: "big.*".into() }]);

    let spec = job_spec(scope, deploy(&needs)).unwrap();
    assert_eq!(spec.env["A"], Value::fixed("job"));
    assert_eq!(spec.env["B"], Value::fixed("acme/app"));
    assert!(matches!(&spec.env["C"], Value::Template { .. }), "left for the agent");
    let variables: Vec<_> = spec.variables.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(variables, ["INPUT_COUNT=3", "INPUT_ENV=prod", "MATRIX_RUST_VERSION=1.95"]);
    assert_eq!(spec.context["needs"]["build"], json!({"status": "success", "outputs": {"pool": "A"}}));
    assert_eq!(spec.context["run"], json!({"id": run().id.to_string(), "attempt": 2, "check_mode": "apply"}));
    assert_eq!((&spec.context["branch"], spec.context["event"].get("payload")), (&json!("main"), None));

    let mut failed = needs.clone();
    failed.get_mut("build").unwrap().status = JobStatus::Failed;
    assert!(matches!(activate(scope, deploy(&failed), None), Activation::Skip { .. }));
    let stray = JobRef { job_index: 9, ..deploy(&needs) };
    assert!(matches!(activate(scope, stray, None), Activation::Fail { .. }) && job_spec(scope, stray).is_err());
}

#[test]
fn the_payload_travels_only_where_it_is_read() {
    let title = "${{ event.payload.head.title }}";
    let on_agent = json!({"template": title, "stage": "agent"});
    for (workflow_keys, job_keys, wanted, shipped) in [
        (json!({}), json!({}), false, false),
        (json!({}), json!({"if": "event.kind == 'push' && 'payload' != ''"}), false, false),
        (json!({"if": "has(event.payload.head)"}), json!({}), true, false),
        (json!({}), json!({"env": {"T": template(title)}}), true, false),
        (json!({}), json!({"env": {"T": on_agent}}), true, true),
        (json!({"env": {"T": on_agent}}), json!({}), true, true),
        (json!({}), json!({"outputs": {"o": on_agent}}), true, true),
        (
            json!({}),
            json!({"steps": [{"source": {"file": "x", "line": 1}, "run": "x", "if": "event['payload'] != null"}]}),
            true,
            true,
        ),
        (
            json!({}),
            json!({"steps": [{"source": {"file": "x", "line": 1}, "run": "x", "if": "to_json(event) != ''"}]}),
            true,
            true,
        ),
        (json!({}), json!({"matrix": {"expr": "[event.payload.head.title]"}}), true, false),
    ] {
        let ci = workflow(workflow_keys, &[job("a", job_keys.clone())]);
        assert_eq!(wants_payload(&ci), wanted, "{job_keys}");
        let event = event();
        let (matrix, needs) = (BTreeMap::new(), Needs::new());
        let this = JobRef { name: "a", job_index: 0, matrix: &matrix, fanout: None, needs: &needs };
        let spec = job_spec(Scope { workflow: &ci, event: &event, run: run() }, this).unwrap();
        assert_eq!(spec.context["event"].get("payload").is_some(), shipped, "{job_keys}");
    }
}

fn host(id: &str, labels: &[&str], status: HostStatus) -> Host {
    Host {
        agent_id: AgentId::new(id).unwrap(),
        labels: labels.iter().map(|text| CanonicalLabel::parse(text).unwrap()).collect(),
        lifecycle: Lifecycle::Static,
        status,
        scaler_managed: false,
        initialized: true,
        properties: BTreeMap::new(),
    }
}

fn rollout(extra: serde_json::Value) -> Workflow {
    let mut keys = json!({
        "runs_on": {"labels": []},
        "runs_on_all": {"include": [[{"kind": "exact", "value": "web"}]]},
        "display_name": {"static": "Roll out"},
    });
    for (key, value) in extra.as_object().unwrap() {
        keys[key] = value.clone();
    }
    workflow(json!({}), &[job("deploy", keys)])
}

#[test]
fn a_job_on_all_hosts_becomes_one_pinned_job_per_host_in_the_order_of_their_names() {
    let ci = rollout(json!({}));
    let hosts = ["web-2", "db-1", "web-1"].map(|id| host(id, &[id.split('-').next().unwrap()], HostStatus::Ready));
    let fleet = Fleet { hosts: hosts.to_vec(), ..Fleet::default() };
    let scope = Scope { workflow: &ci, event: &event(), run: run() };
    let Ok(Planned::Run(plan)) = plan_run(scope, &fleet) else { panic!("it must run") };
    let names: Vec<_> = plan.jobs.iter().map(|job| (job.name.as_str(), job.display_name.as_str())).collect();
    assert_eq!(names, [("deploy (web-1)", "Roll out (web-1)"), ("deploy (web-2)", "Roll out (web-2)")]);
    let fanout = plan.jobs[1].fanout.clone().unwrap();
    assert_eq!((fanout.host.as_str(), fanout.index, fanout.total), ("web-2", 1, 2));
    assert!(plan.jobs.iter().all(|job| job.start == Start::AfterNeeds), "judged when their turn comes");

    let (matrix, needs) = (BTreeMap::new(), Needs::new());
    let this = JobRef { name: "x", job_index: 0, matrix: &matrix, fanout: Some(&fanout), needs: &needs };
    let Activation::Enqueue { selector, pinned, .. } = activate(scope, this, Some(&hosts[0])) else {
        panic!("it must run")
    };
    assert_eq!((selector.labels.len(), pinned), (1, Some(fanout.host.clone())));
    let spec = job_spec(scope, this).unwrap();
    assert_eq!(spec.fanout, Some(fanout));
    let expected = json!({"host": "web-2", "index": 1, "total": 2, "first": false, "last": true});
    assert_eq!(spec.context["fanout"], expected);
}

#[test]
fn a_job_for_no_host_or_too_many_fails_with_what_to_do() {
    let ci = rollout(json!({}));
    let scope = Scope { workflow: &ci, event: &event(), run: run() };
    let fault = |fleet: &Fleet| {
        let Ok(Planned::Run(plan)) = plan_run(scope, fleet) else { panic!("the run goes on") };
        assert_eq!((plan.jobs.len(), plan.jobs[0].name.as_str()), (1, "deploy"));
        match plan.jobs[0].start.clone() {
            Start::Now(Activation::Fail { reason: FailureReason::NoHosts, message }) => message,
            other => panic!("{other:?}"),
        }
    };
    assert!(fault(&Fleet::default()).contains("none of the 0 known hosts"));
    let hosts = vec![host("web-1", &["web"], HostStatus::Ready), host("web-2", &["web"], HostStatus::Ready)];
    assert!(fault(&Fleet { hosts, max_hosts: 1 }).contains("roster.max_fanout_hosts"));
}

#[test]
fn a_job_whose_host_is_away_waits_is_skipped_or_fails() {
    let fanout = Fanout { host: AgentId::new("web-1").unwrap(), index: 0, total: 1 };
    let (matrix, needs) = (BTreeMap::new(), Needs::new());
    let away = host("web-1", &["other"], HostStatus::Unreachable);
    let verdict = |policy: &str, host: Option<&Host>| {
        let ci = rollout(json!({"on_unreachable": policy, "if": "fanout.first && fanout.total == 1"}));
        let this = JobRef { name: "x", job_index: 0, matrix: &matrix, fanout: Some(&fanout), needs: &needs };
        activate(Scope { workflow: &ci, event: &event(), run: run() }, this, host)
    };
    for host in [Some(&away), None] {
        // Its labels drifted: it waits with those that it was chosen by.
        assert_eq!(labels(&verdict("hold", host)), ["web"]);
        assert!(matches!(verdict("skip", host), Activation::Skip { reason } if reason.contains("web-1")));
        let failed = verdict("fail", host);
        assert!(matches!(failed, Activation::Fail { reason: FailureReason::HostUnreachable, .. }), "{failed:?}");
    }
}

#[test]
fn results_by_host_reach_the_jobs_behind() {
    let ids = ["a", "b", "c", "d"].map(|id| AgentId::new(id).unwrap());
    let outputs = BTreeMap::from([("v".to_owned(), "1".to_owned())]);
    let statuses = [JobStatus::Success, JobStatus::Unroutable, JobStatus::Skipped, JobStatus::Cancelled];
    let hosts = HostResults::collect(ids.iter().zip(statuses).map(|(id, status)| (id, status, &outputs)));
    let result = NeedResult { status: JobStatus::Failed, outputs: outputs.clone(), hosts };
    let shown = serde_json::to_value(&result).unwrap();
    assert_eq!(shown["by_host"]["a"]["v"], "1");
    let expected = json!({"total": 4, "succeeded_hosts": ["a"], "failed_hosts": ["b"], "skipped_hosts": ["c"], "cancelled_hosts": ["d"]});
    assert_eq!(shown["summary"], expected);
    assert_eq!(serde_json::from_value::<NeedResult>(shown).unwrap(), result);
    let plain = NeedResult { status: JobStatus::Success, outputs, hosts: None };
    assert_eq!(serde_json::to_value(&plain).unwrap(), json!({"status": "success", "outputs": {"v": "1"}}));
}

#[test]
fn rules_that_do_not_hold_are_named_by_their_labels() {
    let rules = json!([
        {"if": "branch == 'main'", "label": "on main"},
        {"if": "inputs.count > 5", "label": "enough"},
        {"if": "false", "label": "never"},
    ]);
    let reason = "rule does not hold: enough; never".to_owned();
    let of_workflow = workflow(json!({"rules": rules}), &[job("a", json!({}))]);
    let planned = plan_run(Scope { workflow: &of_workflow, event: &event(), run: run() }, &Fleet::default());
    assert_eq!(planned, Ok(Planned::Declined { reason: reason.clone() }));
    let of_job = workflow(json!({}), &[job("a", json!({"rules": rules}))]);
    assert_eq!(plan(&of_job).jobs[0].start, Start::Now(Activation::Skip { reason }));
    let broken = json!([{"if": "event.payload.missing", "label": "x"}]);
    let broken = workflow(json!({"rules": broken}), &[job("a", json!({}))]);
    let error =
        plan_run(Scope { workflow: &broken, event: &event(), run: run() }, &Fleet::default()).unwrap_err().to_string();
    assert!(error.starts_with("`rules` of workflow `ci`: x: "), "{error}");
}

#[test]
fn the_hooks_of_a_workflow_are_steps_that_fit_the_end_of_its_jobs() {
    let hook = |run: &str| json!({"source": {"file": "ci.yaml", "line": 9}, "run": run});
    let hooks = json!({"on_success": [hook("good")], "on_failure": [hook("bad")], "cleanup": [hook("sweep")]});
    let all: Vec<JobStatus> = JobStatus::terminal().collect();
    let extra = json!({"steps": [], "hooks": hooks, "needs": [{"job": "a", "run_on": all}]});
    let ci = workflow(json!({}), &[job("a", json!({})), job(crate::lock::RUN_HOOKS_JOB, extra)]);
    assert_eq!(crate::lockfile::check_workflow(&ci), Ok(()));
    let (event, matrix) = (event(), BTreeMap::new());
    let scope = Scope { workflow: &ci, event: &event, run: run() };
    for (status, outcome, scripts, allowed) in [
        (JobStatus::Success, "success", vec!["good", "sweep"], false),
        (JobStatus::Skipped, "success", vec!["good", "sweep"], false),
        (JobStatus::TimedOutStale, "failed", vec!["bad", "sweep"], true),
        (JobStatus::Cancelled, "cancelled", vec!["sweep"], true),
    ] {
        let needs = Needs::from([("a".to_owned(), NeedResult { status, outputs: BTreeMap::new(), hosts: None })]);
        let job =
            JobRef { name: crate::lock::RUN_HOOKS_JOB, job_index: 1, matrix: &matrix, fanout: None, needs: &needs };
        assert!(matches!(activate(scope, job, None), Activation::Enqueue { .. }));
        let spec = job_spec(scope, job).unwrap();
        assert_eq!((spec.outcome.as_deref(), spec.hooks.is_empty()), (Some(outcome), true));
        let found: Vec<&str> = spec
            .steps
            .iter()
            .map(|step| match &step.action {
                crate::lock::Action::Run(script) => script.as_str(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(found, scripts);
        assert!(spec.steps.iter().all(|step| step.continue_on_error == allowed && step.timeout_ms.is_some()));
    }
    let lone = workflow(
        json!({}),
        &[
            job("a", json!({})),
            job(crate::lock::RUN_HOOKS_JOB, json!({"steps": [], "hooks": {"on_failure": [hook("bad")]}})),
        ],
    );
    let needs = Needs::from([(
        "a".to_owned(),
        NeedResult { status: JobStatus::Success, outputs: BTreeMap::new(), hosts: None },
    )]);
    let job = JobRef { name: crate::lock::RUN_HOOKS_JOB, job_index: 1, matrix: &matrix, fanout: None, needs: &needs };
    let nothing = activate(Scope { workflow: &lone, ..scope }, job, None);
    assert!(matches!(nothing, Activation::Skip { reason } if reason.contains("ended as success")));
}

#[test]
fn the_check_mode_of_a_run_reaches_expressions_and_the_agent() {
    let ci = workflow(json!({}), &[job("a", json!({"if": "run.check_mode == 'check'"}))]);
    let (matrix, needs) = (BTreeMap::new(), Needs::new());
    let job = JobRef { name: "a", job_index: 0, matrix: &matrix, fanout: None, needs: &needs };
    for mode in crate::check::CheckMode::ALL {
        let event = Event { check_mode: *mode, ..event() };
        let scope = Scope { workflow: &ci, event: &event, run: run() };
        let runs = matches!(activate(scope, job, None), Activation::Enqueue { .. });
        assert_eq!(runs, *mode == crate::check::CheckMode::Check);
        assert_eq!(job_spec(scope, job).unwrap().check_mode, *mode);
        let stored = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&stored).unwrap().check_mode, *mode, "it is kept with the run");
        assert_eq!(stored.contains("check_mode"), *mode != crate::check::CheckMode::Apply);
    }
}

#[test]
fn a_job_that_the_stored_workflow_lacks_is_dropped() {
    let ci = workflow(json!({}), &[job("a", json!({}))]);
    let (event, matrix, needs) = (event(), BTreeMap::new(), Needs::new());
    let scope = Scope { workflow: &ci, event: &event, run: run() };
    let job = JobRef { name: "b", job_index: 1, matrix: &matrix, fanout: None, needs: &needs };
    assert!(matches!(activate(scope, job, None), Activation::Fail { reason: FailureReason::DriftDropped, .. }));
}

#[test]
fn containers_are_rendered_before_an_agent_gets_them_and_a_bad_image_fails_the_job() {
    let template = |text: &str| json!({"template": text, "stage": "dispatch"});
    let extra = json!({
        "container": {"image": template("rust:${{ inputs.env }}"), "env": {"WHO": template("${{ event.payload.head.title }}")}},
        "services": {"db": {"image": {"static": "postgres:16"}, "env": {"A": template("${{ inputs.count }}")}}},
    });
    let ci = workflow(json!({}), &[job("a", extra)]);
    assert!(wants_payload(&ci), "the payload is there for what is rendered");
    let (matrix, needs, event) = (BTreeMap::new(), Needs::new(), event());
    let scope = Scope { workflow: &ci, event: &event, run: run() };
    let this = JobRef { name: "a", job_index: 0, matrix: &matrix, fanout: None, needs: &needs };
    let spec = job_spec(scope, this).unwrap();
    let container = spec.container.unwrap();
    let fixed = crate::lock::Value::fixed;
    assert_eq!((container.image, &container.env["WHO"]), (fixed("rust:prod"), &fixed("hello")));
    assert_eq!((&spec.services["db"].image, &spec.services["db"].env["A"]), (&fixed("postgres:16"), &fixed("3")));
    let bad = workflow(json!({}), &[job("a", json!({"container": {"image": template("rust ${{ inputs.env }}")}}))]);
    let scope = Scope { workflow: &bad, ..scope };
    let Activation::Fail { message, .. } = activate(scope, this, None) else { panic!("it must fail") };
    assert_eq!(message, "container.image: `rust prod` is not the name of an image, such as `rust:1.86`");
}
