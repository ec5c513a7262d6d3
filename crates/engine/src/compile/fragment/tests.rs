use super::*;
use crate::compile::compile_file;
use crate::lock::Need;
use crate::plan::merge;
use crate::state::JobStatus;

const FILE: &str = ".kici/workflows/ci.yaml";
const BASE: &str = r#"on: { push: {}, manual: { inputs: { level: {} } } }
jobs:
  build: { runs_on: linux, outputs: { v: "1" }, run: make }
  plan:
    needs: build
    runs_on: [linux, x64]
    generate: { group: shards, run: ./plan, allow: { runs_on: [linux, "shard-*"], environments: [staging], secrets: [TOKEN] } }
  join: { needs: [{ group: shards, when: always }], runs_on: linux, run: ./join }
  last: { needs: join, runs_on: linux, run: ./last }
"#;

fn workflow(source: &str) -> Workflow {
    let compiled = compile_file(FILE, source);
    assert!(!compiled.has_errors(), "{:?}", compiled.diagnostics);
    compiled.workflows.into_iter().next().expect("a workflow")
}

fn position(workflow: &Workflow, name: &str) -> usize {
    workflow.jobs.iter().position(|job| job.name == name).expect("a job")
}

fn made(source: &str, document: &str) -> Result<Vec<Job>, String> {
    let workflow = workflow(source);
    let at = position(&workflow, "plan");
    compile_fragment(&workflow, at, document.as_bytes()).map_err(|error| error.to_string())
}

#[test]
fn jobs_are_those_of_a_file_and_lie_at_their_generator() {
    let document = r#"{"jobs": [
        {"name": "one", "needs": "build", "env": {"V": "${{ needs.build.outputs.v }}", "L": "${{ inputs.level }}"}, "run": "./one"},
        {"name": "two", "needs": [{"job": "one", "when": "always"}], "runs_on": ["shard-7", "linux"], "matrix": {"n": [1, 2]},
         "steps": ["./two", {"run": "./three", "cleanup": null}]}
    ]}"#;
    let fault = made(BASE, document).unwrap_err();
    assert!(fault.contains("jobs.two.steps.1.cleanup") && fault.contains("[K0102]"), "{fault}");
    let jobs = made(BASE, &document.replace(r#", "cleanup": null"#, "")).expect("sound");
    assert_eq!(jobs.iter().map(|job| job.name.as_str()).collect::<Vec<_>>(), ["one", "two"]);
    // It runs where its generator runs.
    assert_eq!(jobs[0].runs_on.labels.len(), 2);
    assert!(jobs.iter().flat_map(|job| &job.steps).all(|step| step.source.line == 4 && step.source.file == FILE));
    assert_eq!(jobs[1].needs, [Need::on("one", JobStatus::terminal().collect::<Vec<_>>())]);
}

/// Acceptance 18 of workflows-and-events, as far as it is a decision.
#[test]
fn what_is_not_allowed_is_refused_and_named() {
    for (job, want) in [
        (r#""environment": "production", "run": "x""#, "environment: [K0605]: 'production' is not allowed"),
        (r#""environment": "${{ inputs.level }}", "run": "x""#, "must be written out"),
        (r#""secrets": ["OTHER"], "run": "x""#, "secrets: [K0605]: 'OTHER' is not allowed"),
        (r#""steps": [{"run": "x", "secrets": {"A": "production:KEY"}}]"#, "'production:KEY' is not allowed"),
        (r#""runs_on": "gpu", "run": "x""#, "runs_on: [K0605]: 'gpu' is not allowed"),
        (r#""runs_on": ["linux", "gpu"], "run": "x""#, "'gpu' is not allowed"),
        (r#""runs_on": "*", "run": "x""#, "is not allowed to generated jobs"),
        (r#""runs_on": "${{ inputs.level }}", "run": "x""#, "must be written out"),
        (r#""runs_on_all": "role:web", "run": "x""#, "runs_on_all: [K0605]: 'role:web'"),
        (r#""generate": {"run": "x"}"#, "was generated and may not generate others"),
        (r#""steps": [{"use": "./.kici/steps/a.yaml"}]"#, "there is no step file"),
        (r#""needs": {"group": "shards"}, "run": "x""#, "dependency cycle"),
        (r#""needs": "join", "run": "x""#, "dependency cycle"),
        (r#""needs": "last", "run": "x""#, "dependency cycle"),
    ] {
        let document = format!(r#"{{"jobs": [{{"name": "a", {job}}}]}}"#);
        let found = made(BASE, &document).and_then(|jobs| {
            let workflow = workflow(BASE);
            merge(&workflow, position(&workflow, "plan"), jobs).map(drop)
        });
        let text = found.expect_err(job);
        assert!(text.contains(want), "{job}: {text}");
    }
    for good in [
        r#""environment": "staging", "secrets": ["TOKEN"], "run": "x""#,
        r#""runs_on": "shard-12", "run": "x""#,
        r#""runs_on": "shard-*", "run": "x""#,
        r#""invoke": {"event": "go"}"#,
    ] {
        assert!(made(BASE, &format!(r#"{{"jobs": [{{"name": "a", {good}}}]}}"#)).is_ok(), "{good}");
    }
}

#[test]
fn without_a_list_of_labels_those_of_the_generator_are_allowed() {
    let source = BASE.replace(r#"runs_on: [linux, "shard-*"], "#, "");
    assert!(made(&source, r#"{"jobs": [{"name": "a", "runs_on": ["x64", "linux"], "run": "x"}]}"#).is_ok());
    assert!(made(&source, r#"{"jobs": [{"name": "a", "runs_on": "shard-1", "run": "x"}]}"#).is_err());
}

#[test]
fn documents_that_are_none_are_refused() {
    let deep = format!(r#"{{"jobs": [{{"name": "a", "run": {}1{}}}]}}"#, "[".repeat(40), "]".repeat(40));
    let many: Vec<String> = (0..257).map(|n| format!(r#"{{"name": "j{n}", "run": "x"}}"#)).collect();
    let many = format!(r#"{{"jobs": [{}]}}"#, many.join(","));
    for (document, want) in [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("jobs: []", "is not JSON"),
        ("[]", "expected a map, found a list"),
        ("{}", "has no `jobs`"),
        (r#"{"jobs": {}}"#, "expected a list of jobs"),
        (r#"{"jobs": [], "extra": 1}"#, "unknown key 'extra'"),
        (r#"{"jobs": [], "jobs": []}"#, "stands twice"),
        (r#"{"jobs": ["make"]}"#, "expected a map"),
        (r#"{"jobs": [{"run": "x"}]}"#, "the job has no 'name'"),
        (r#"{"jobs": [{"name": "A b", "run": "x"}]}"#, "is not a name for a job"),
        (r#"{"jobs": [{"name": "a", "run": "x"}, {"name": "a", "run": "x"}]}"#, "two jobs have the name 'a'"),
        (r#"{"jobs": [{"name": "build", "run": "x"}]}"#, "the name of another job of the run"),
        (r#"{"jobs": [{"name": "a", "needs": "b", "run": "x"}]}"#, "needs unknown job 'b'"),
        (r#"{"jobs": [{"name": "a", "run": "echo ${{ sha }}"}]}"#, "[K0601]"),
        (r#"{"jobs": [{"name": "a"}]}"#, "has no 'steps'"),
        (&deep, "nested deeper"),
        (&many, "257 generated jobs, at most 256"),
    ] {
        let text = made(BASE, document).expect_err(document);
        assert!(text.replace('`', "'").contains(&want.replace('`', "'")), "{document:.60}: {text}");
    }
    let large = vec![b' '; MAX_GENERATED_BYTES + 1];
    let base = workflow(BASE);
    assert!(matches!(compile_fragment(&base, 1, &large), Err(FragmentError::TooLarge(_))));
    assert!(matches!(compile_fragment(&base, 0, b"{}"), Err(FragmentError::NoGenerator(_))));
    assert!(matches!(compile_fragment(&base, 99, b"{}"), Err(FragmentError::NoGenerator(_))));
    assert_eq!(made(BASE, r#"{"jobs": []}"#), Ok(Vec::new()));
    // As other programs write JSON: a letter outside the first plane as two escapes.
    let jobs = made(BASE, r#"{"jobs": [{"name": "a", "env": {"E": "\ud83d\ude00"}, "run": "x"}]}"#).expect("sound");
    assert_eq!(jobs[0].env["E"], Value::fixed("😀"));
}

#[test]
fn needs_on_the_group_become_needs_on_its_jobs() {
    let base = workflow(BASE);
    let at = position(&base, "plan");
    let jobs =
        made(BASE, r#"{"jobs": [{"name": "a", "run": "x"}, {"name": "b", "needs": "a", "run": "x"}]}"#).expect("sound");
    let merged = merge(&base, at, jobs).expect("joined");
    let join = &merged.jobs[position(&merged, "join")];
    assert!(join.needs_groups.is_empty());
    let found: Vec<(&str, Option<&str>)> = join.needs.iter().map(|n| (n.job.as_str(), n.group.as_deref())).collect();
    assert_eq!(found, [("a", Some("shards")), ("b", Some("shards"))]);
    assert_eq!(merged.jobs[at].generate.as_ref().and_then(|g| g.members.clone()), Some(vec!["a".into(), "b".into()]));
    assert_eq!(
        &merged.jobs[..base.jobs.len()].iter().map(|job| &job.name).collect::<Vec<_>>(),
        &base.jobs.iter().map(|job| &job.name).collect::<Vec<_>>()
    );
    // Twice is a fault, since the names are taken then.
    let again = made(BASE, r#"{"jobs": [{"name": "a", "run": "x"}]}"#).expect("sound");
    assert!(merge(&merged, at, again).is_err());
    let none = merge(&base, at, Vec::new()).expect("joined");
    let join = &none.jobs[position(&none, "join")];
    assert!(join.needs.is_empty() && join.needs_groups.is_empty());
}

#[test]
fn the_hooks_of_a_workflow_wait_for_generated_jobs_too() {
    let source = format!("{BASE}defaults: {{ runs_on: linux }}\nhooks: {{ cleanup: ./sweep }}\n");
    let base = workflow(&source);
    let jobs = made(&source, r#"{"jobs": [{"name": "a", "run": "x"}]}"#).expect("sound");
    let merged = merge(&base, position(&base, "plan"), jobs).expect("joined");
    let hooks = merged.jobs.iter().find(|job| job.is_run_hooks()).expect("hooks");
    assert!(hooks.needs.iter().any(|need| need.job == "a"));
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_document_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let base = workflow(BASE);
            let _ = compile_fragment(&base, 1, &bytes);
        }

        /// Whatever jobs are made, the graph of the run is sound or they are refused.
        #[test]
        fn no_cycle_ever_joins(edges in proptest::collection::vec((0..5_usize, 0..8_usize), 0..12)) {
            let names = ["a", "b", "c", "d", "e", "build", "join", "last"];
            let jobs: Vec<String> = (0..5).map(|at| {
                let needs: std::collections::BTreeSet<&str> =
                    edges.iter().filter(|(from, _)| *from == at).map(|(_, to)| names[*to]).filter(|to| *to != names[at]).collect();
                let needs: Vec<String> = needs.iter().map(|name| format!("\"{name}\"")).collect();
                format!(r#"{{"name": "{}", "needs": [{}], "run": "x"}}"#, names[at], needs.join(","))
            }).collect();
            let document = format!(r#"{{"jobs": [{}]}}"#, jobs.join(","));
            let base = workflow(BASE);
            if let Ok(merged) = made(BASE, &document).and_then(|jobs| merge(&base, 1, jobs)) {
                let edges = merged.jobs.iter().map(|job| (job.name.as_str(), job.needs.iter().map(|n| n.job.as_str()).collect())).collect();
                prop_assert_eq!(crate::needs::find_cycle(&edges), None);
                prop_assert!(merged.jobs.iter().all(|job| job.needs_groups.is_empty()));
            }
        }
    }
}
