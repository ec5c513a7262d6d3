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
