use super::*;
use crate::compile::{compile_file, compile_set};
use crate::lock::{Need, Shell};
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

#[test]
fn generated_jobs_have_the_defaults_and_the_step_files_of_their_workflow() {
    let defaults = "defaults: { shell: sh, working_directory: sub, timeout: 5m, retry: 2, container: alpine, env: { A: a, B: b } }\n";
    let part =
        "inputs: { word: {} }\r\nsteps:\r\n  - { run: echo, secrets: [OTHER] }\r\n  - parallel: { steps: [x, y] }\r\n";
    let compiled = |part: &str| {
        let files = [(FILE, format!("{BASE}{defaults}")), (".kici/steps/up.yaml", part.to_owned())];
        let set = compile_set(&files.map(|(path, text)| (path.to_owned(), text)));
        assert_eq!(set.diagnostics().count(), 0, "{:?}", set.diagnostics().collect::<Vec<_>>());
        set.workflows().next().expect("a workflow").clone()
    };
    // It went through the database since.
    let base = compiled(part);
    let base: Workflow = serde_json::from_str(&serde_json::to_string(&base).expect("JSON")).expect("a workflow");
    let at = position(&base, "plan");
    let make = |steps: &str| {
        let document = format!(
            r#"{{"jobs": [{{"name": "a", "env": {{"B": "own"}}, "secrets": ["TOKEN"], "steps": [{steps}]}}]}}"#
        );
        compile_fragment(&base, at, document.as_bytes()).map_err(|error| error.to_string())
    };
    let used = r#"{"id": "up", "use": "./.kici/steps/up.yaml", "with": {"word": "w"}}, "last""#;
    // What a step file asks for counts as asked for by the job.
    let refused = make(used).expect_err("a secret");
    assert!(refused.contains("'OTHER' is not allowed to generated jobs"), "{refused}");
    let base = compiled(&part.replace(", secrets: [OTHER]", ""));
    let make = |steps: &str| {
        let document = format!(r#"{{"jobs": [{{"name": "a", "env": {{"B": "own"}}, "steps": [{steps}]}}]}}"#);
        compile_fragment(&base, at, document.as_bytes()).map_err(|error| error.to_string())
    };
    let job = make(used).expect("sound").remove(0);
    assert_eq!((job.env["A"].clone(), job.env["B"].clone()), (Value::fixed("a"), Value::fixed("own")));
    assert_eq!((job.timeout_ms, job.retry.as_ref().map(|retry| retry.attempts)), (Some(300_000), Some(2)));
    assert!(job.container.is_some());
    let last = job.steps.last().expect("a step");
    assert_eq!((last.shell.clone(), last.working_directory.clone()), (Some(Shell::Sh), Some(Value::fixed("sub"))));
    assert_eq!(job.steps.len(), 4);
    assert_eq!((job.steps[0].composite, job.steps[1].group, last.composite), (Some(0), Some(0), None));
    assert_eq!(job.steps[0].source.file, ".kici/steps/up.yaml");
    assert_eq!((job.composites[0].source.line, last.source.line), (4, 4));
    let missing = make(r#"{"use": "./.kici/steps/upp.yaml"}"#).expect_err("a typing error");
    assert!(missing.contains("there is no step file"), "{missing}");
    let merged = merge(&base, at, vec![job]).expect("joined");
    assert!(merged.for_generated.is_some(), "another generator may follow");
    // A step file that only generated jobs may use changes the workflow too; line ends do not.
    let hash = |part: &str| compiled(part).content_hash;
    let plain = part.replace(", secrets: [OTHER]", "");
    assert_ne!(hash(&plain), hash(&plain.replace("echo", "true")));
    assert_eq!(compiled(&plain), compiled(&plain.replace("\r\n", "\n")));
}

#[test]
fn step_files_that_a_run_would_have_to_keep_have_a_limit() {
    let part = format!("steps:\n  - run: |\n{}", format!("      echo {}\n", "x".repeat(100)).repeat(4000));
    let mut files = vec![(FILE.to_owned(), BASE.to_owned())];
    files.extend((0..3).map(|n| (format!(".kici/steps/{n}.yaml"), part.clone())));
    let faults = |files: &[(String, String)]| -> Vec<String> {
        compile_set(files).diagnostics().filter(|d| d.is_error()).map(|d| d.code.clone()).collect()
    };
    assert_eq!(faults(&files), ["K0704"]);
    assert_eq!(faults(&files[..2]), Vec::<String>::new());
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
