//! Step files.

use super::*;

const NOTIFY: &str = "\
inputs:
  channel: { type: enum, values: [dev, ops], default: dev }
  count: { type: integer }
outputs: { id: \"${{ steps.send.outputs.id }}\" }
steps:
  - { id: send, run: ./send.sh, env: { TO: \"${{ inputs.channel }}\" } }
  - parallel: { steps: [a, b] }
";

fn set(workflow: &str, parts: &[(&str, &str)]) -> CompiledSet {
    let parts = parts.iter().map(|(name, text)| (format!(".kici/steps/{name}"), (*text).to_owned()));
    let files: Vec<(String, String)> = [(FILE.to_owned(), workflow.to_owned())].into_iter().chain(parts).collect();
    compile_set(&files)
}

fn job(steps: &str) -> String {
    format!("on: push\njobs:\n  a:\n    runs_on: l\n    steps:\n{steps}")
}

fn found(set: &CompiledSet) -> Vec<String> {
    set.diagnostics().map(render_short).map(|line| line.replace(".kici/", "")).collect()
}

#[test]
fn the_steps_of_a_file_stand_in_the_job_with_what_they_belong_to() {
    let outer = "inputs: { n: { default: \"1\" } }\nsteps: [{ use: ./.kici/steps/notify.yaml, with: { count: \"${{ inputs.n }}\" } }, last]\n";
    let source = job(
        "      - first\n      - { id: tell, name: Tell, use: ./.kici/steps/notify.yaml, with: { count: 3 }, if: \"branch == 'main'\", env: { A: b } }\n      - { run: x, env: { ID: \"${{ steps.tell.outputs.id }}\" } }\n      - use: ./.kici/steps/outer.yaml\n",
    );
    let set = set(&source, &[("notify.yaml", NOTIFY), ("outer.yaml", outer)]);
    assert_eq!(found(&set), Vec::<String>::new());
    let workflow = set.workflows().next().unwrap();
    let job = &workflow.jobs[0];
    let places: Vec<(Option<u32>, Option<u32>)> = job.steps.iter().map(|step| (step.composite, step.group)).collect();
    let (notify, nested) = (Some(0), Some(2));
    assert_eq!(
        places,
        [
            (None, None),
            (notify, None),
            (notify, Some(0)),
            (notify, Some(0)),
            (None, None),
            (nested, None),
            (nested, Some(1)),
            (nested, Some(1)),
            (Some(1), None)
        ]
    );
    let parents: Vec<Option<u32>> = job.composites.iter().map(|used| used.parent).collect();
    assert_eq!(parents, [None, None, Some(1)]);
    assert_eq!(job.steps[1].source, crate::lock::SourceRef { file: ".kici/steps/notify.yaml".into(), line: 6 });
    assert_eq!(crate::lockfile::check_workflow(workflow), Ok(()));
    let json = serde_json::to_string(workflow).unwrap();
    assert_eq!(&serde_json::from_str::<Workflow>(&json).unwrap(), workflow);
}

#[test]
fn a_change_of_a_step_file_changes_the_workflows_that_use_it() {
    let hash = |workflow: &str, part: &str| {
        let set = set(workflow, &[("n.yaml", part)]);
        assert_eq!(found(&set), Vec::<String>::new());
        set.workflows().next().unwrap().content_hash.clone()
    };
    let user = job("      - use: ./.kici/steps/n.yaml\n");
    assert_ne!(hash(&user, "steps: [a]\n"), hash(&user, "steps: [b]\n"));
    assert_eq!(hash(&user, "steps:\n  - a\n"), hash(&user, "steps:\r\n  - a\r\n"));
    let other = job("      - x\n");
    assert_eq!(hash(&other, "steps: [a]\n"), hash(&other, "steps: [b]\n"));
}

#[test]
fn faults_stand_where_they_are_made() {
    let steps = "      - use: actions/checkout@v4\n      - use: ./.kici/steps/notfy.yaml\n      - { use: ./.kici/steps/notify.yaml, with: { chanel: dev, count: x } }\n      - { use: ./.kici/steps/notify.yaml, run: y, retry: 2 }\n      - { run: z, with: { a: b } }\n      - parallel: { steps: [{ use: ./.kici/steps/notify.yaml, with: { count: 1 } }] }\n      - use: ./.kici/steps/broken.yaml\n";
    let set = set(&job(steps), &[("notify.yaml", NOTIFY), ("broken.yaml", "steps:\n  - { rum: x }\nneeds: [a]\n")]);
    insta::assert_snapshot!(found(&set).join("\n"));
}

#[test]
fn nesting_has_a_limit_and_no_cycle() {
    let use_of = |name: &str| format!("steps: [{{ use: ./.kici/steps/{name}.yaml }}]\n");
    let (one, two, three) = (use_of("two"), use_of("three"), use_of("four"));
    let parts = [("one.yaml", one.as_str()), ("two.yaml", &two), ("three.yaml", &three), ("four.yaml", "steps: [x]\n")];
    let ok = set(&job("      - use: ./.kici/steps/two.yaml\n"), &parts[1..]);
    assert_eq!(found(&ok), Vec::<String>::new());
    let deep = found(&set(&job("      - use: ./.kici/steps/one.yaml\n"), &parts));
    assert!(deep.iter().any(|line| line.contains("steps/one.yaml:1:") && line.contains("[K0704]")), "{deep:?}");
    let own = use_of("self");
    let cycle = found(&set(&job("      - use: ./.kici/steps/self.yaml\n"), &[("self.yaml", own.as_str())]));
    assert!(cycle.iter().any(|line| line.contains("[K0302]") && line.contains("uses itself")), "{cycle:?}");
}
