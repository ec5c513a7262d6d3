//! Every accepted key, and what it compiles to.

use super::*;

#[test]
fn smallest() {
    let workflow = only("on: push\njobs:\n  build:\n    runs_on: default\n    run: cargo build\n");
    insta::assert_json_snapshot!(workflow);
}

#[test]
fn everything() {
    insta::assert_json_snapshot!(only(include_str!("everything.yaml")));
}

#[test]
fn the_container_of_the_defaults_is_that_of_jobs_without_one() {
    let text = "on: push\ndefaults: { runs_on: default, container: debian:12 }\njobs:\n  a: { run: x }\n  b: { run: x, container: alpine }\n  c: { invoke: { event: e } }\n";
    let workflow = only(text);
    let image = |n: usize| serde_json::to_value(&workflow.jobs[n].container).expect("JSON")["image"]["static"].clone();
    assert_eq!([image(0), image(1), image(2)], ["debian:12".into(), "alpine".into(), serde_json::Value::Null]);
}
