//! The samples of the specification, verbatim.

use super::*;

/// A file with a line of text at a line number; the lines between are comments.
fn at(head: &str, line: usize, rest: &str) -> String {
    let mut source = head.to_owned();
    while source.lines().count() + 1 < line {
        source.push_str("#\n");
    }
    source + rest
}

#[test]
fn unknown_key() {
    let source = at("on: push\njobs:\n  build:\n", 9, "    runs-on: linux\n    run: make\n");
    assert_eq!(
        short(&source),
        [".kici/workflows/ci.yaml:9:5: error[K0102]: unknown key 'runs-on' in job 'build'; did you mean 'runs_on'?"]
    );
    let diagnostic = compile_file(FILE, &source).diagnostics.remove(0);
    insta::assert_snapshot!(render_long(&diagnostic, &source, false));
    insta::assert_json_snapshot!(crate::diagnostic::to_json(&diagnostic));
}

#[test]
fn duration() {
    let source = "on: push\n\n#\ntimeout:   30\njobs: {a: {runs_on: default, run: x}}\n";
    assert_eq!(
        short(source),
        [
            ".kici/workflows/ci.yaml:4:12: error[K0203]: expected a duration such as \"30m\", found integer 30; did you mean \"30m\"?"
        ]
    );
}

#[test]
fn unknown_need() {
    let source = at(
        "on: push\ndefaults: {runs_on: default}\njobs:\n  test: {run: x}\n  deploy:\n    run: y\n",
        21,
        "    needs: [ tset ]\n",
    );
    assert_eq!(
        short(&source),
        [".kici/workflows/ci.yaml:21:14: error[K0301]: job 'deploy' needs unknown job 'tset'; did you mean 'test'?"]
    );
}

#[test]
fn turns_are_compiled_with_every_value_written_out() {
    let source = "on: push\nconcurrency: deploy\ndefaults: {runs_on: default}\njobs:\n  a: {run: x, retry: 2}\n  b: {run: x, concurrency: {group: \"x-${{ branch }}\", cancel_in_progress: true}, retry: {attempts: 1, on: [infra, user]}}\n  c: {run: x, retry: 0}\n";
    let workflow = only(source);
    let json = |value: Option<&crate::lock::Concurrency>| serde_json::to_value(value).unwrap();
    assert_eq!(
        json(workflow.concurrency.as_ref()),
        serde_json::json!({"group": {"static": "deploy"}, "max": 1, "cancel_in_progress": false})
    );
    assert_eq!(
        json(workflow.jobs[1].concurrency.as_ref()),
        serde_json::json!({
            "group": {"template": "x-${{ branch }}", "stage": "dispatch"}, "max": 1, "cancel_in_progress": true
        })
    );
    let retry: Vec<_> = workflow.jobs.iter().map(|job| serde_json::to_value(&job.retry).unwrap()).collect();
    assert_eq!(
        serde_json::Value::from(retry),
        serde_json::json!([{"attempts": 2, "on": ["lost"]}, {"attempts": 1, "on": ["infra", "user"]}, null])
    );
}

#[test]
fn cycle() {
    let source = at(
        "on: push\ndefaults: {runs_on: default}\njobs:\n  test: {run: x, needs: build}\n  build:\n    run: y\n",
        12,
        "    needs: test\n",
    );
    assert_eq!(
        short(&source),
        [".kici/workflows/ci.yaml:12:5: error[K0302]: dependency cycle: build -> test -> build"]
    );
}

#[test]
fn injection() {
    let source = at(
        "on: push\ndefaults: {runs_on: default}\njobs:\n  a:\n    steps:\n",
        30,
        "      - run: ${{ event.payload.title }}\n",
    );
    assert_eq!(
        short(&source),
        [
            ".kici/workflows/ci.yaml:30:14: error[K0601]: '${{ event.payload.title }}' is not allowed inside 'run' (script injection); set env: TITLE: and use \"$TITLE\""
        ]
    );
}

#[test]
fn stage() {
    let source = at("on: push\njobs:\n a:\n  run: x\n", 17, "  runs_on:\n  - ${{ steps.a.outputs.x }}\n");
    assert_eq!(
        short(&source),
        [
            ".kici/workflows/ci.yaml:18:9: error[K0402]: expression: 'steps' is only available on the agent, but 'runs_on' is evaluated at dispatch"
        ]
    );
}
