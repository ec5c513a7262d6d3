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
fn jobs_in_containers_keep_caches_and_artifacts_as_others_do() {
    let text = "on: push\ndefaults: { runs_on: default, container: debian:12 }\njobs:\n  a:\n    cache: { key: \"k-${{ hash_files('lock') }}\", paths: [a, ~/b] }\n    artifacts: { upload: [{ name: n, paths: a }] }\n    steps: [{ run: x, cache: { key: s, paths: c } }]\n";
    let workflow = only(text);
    assert!(workflow.jobs[0].container.is_some());
    assert_eq!((workflow.jobs[0].cache.len(), workflow.jobs[0].artifacts.upload.len()), (1, 1));
}

#[test]
fn the_container_of_the_defaults_is_that_of_jobs_without_one() {
    let text = "on: push\ndefaults: { runs_on: default, container: debian:12 }\njobs:\n  a: { run: x }\n  b: { run: x, container: alpine }\n  c: { invoke: { event: e } }\n";
    let workflow = only(text);
    let image = |n: usize| serde_json::to_value(&workflow.jobs[n].container).expect("JSON")["image"]["static"].clone();
    assert_eq!([image(0), image(1), image(2)], ["debian:12".into(), "alpine".into(), serde_json::Value::Null]);
}
