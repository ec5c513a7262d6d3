//! The user's reference must be true.

use super::*;

const REFERENCE: &str = include_str!("../../../../../docs/workflows.md");

fn examples() -> impl Iterator<Item = &'static str> {
    REFERENCE.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next())
}

#[test]
fn examples_compile() {
    let mut whole = 0;
    for example in examples() {
        let source = match (example.contains("jobs:"), example.starts_with("on:")) {
            // A part of a file, without what starts it.
            (true, false) if example.starts_with("jobs:") => format!("on: push\n{example}"),
            (true, _) => example.to_owned(),
            (false, true) => format!("{example}jobs: {{a: {{runs_on: l, run: x}}}}\n"),
            (false, false) => {
                let indented: String = example.lines().map(|line| format!("    {line}\n")).collect();
                format!("on: push\njobs:\n  a:\n    runs_on: l\n{indented}")
            }
        };
        only(&source);
        whole += 1;
    }
    assert_eq!(whole, 11);
}

#[test]
fn every_key_is_documented() {
    let sets = [&keys::WORKFLOW, &keys::ON, &keys::PUSH, &keys::PULL_REQUEST, &keys::TAG, &keys::MANUAL, &keys::HOOK];
    let more =
        [&keys::INPUT, &keys::JOB, &keys::STEP, &keys::PARALLEL, &keys::STEP_RETRY, &keys::WAIT_FOR, &keys::JOB_HOOKS];
    let events = [&keys::COMMENT, &keys::REVIEW, &keys::REFS, &keys::STATUS, &keys::WORKFLOW_RUN, &keys::WEBHOOK];
    let own = [&keys::EVENT, &keys::JOB_COMPLETE, &keys::LIFECYCLE, &keys::SCHEDULE];
    let more = more
        .into_iter()
        .chain([&keys::INIT, &keys::RULE, &keys::GENERATE, &keys::INVOKE, &keys::FAILED_BATCH])
        .chain(events)
        .chain(own);
    for key in sets.into_iter().chain(more).flat_map(|set| set.accepted) {
        assert!(REFERENCE.contains(&format!("`{key}`")), "{key}");
    }
}
