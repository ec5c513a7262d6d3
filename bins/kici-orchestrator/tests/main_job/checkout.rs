//! What a job says of its checkout, over the real wire: how much history, submodules, LFS, tags, where to, and which commit.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use kici_engine::state::{FailureReason, JobStatus};
use kici_store::testing::TestStore;

use crate::stack::Stack;
use crate::surroundings::Repository;

const WORKFLOW: &str = r#"
name: ci
on: push
defaults: { runs_on: default }
jobs:
  usual:
    run: |
      echo "commits $(git rev-list --count HEAD), tags '$(git tag)', lib '$(ls lib)', version $(cat version)"
      cat big.bin
  whole:
    checkout: { depth: 0, submodules: true, tags: true }
    run: echo "commits $(git rev-list --count HEAD), tags '$(git tag | tr '\n' ' ')', lib '$(cat lib/lib.txt)'"
  deeper:
    checkout: { depth: 2 }
    run: echo "commits $(git rev-list --count HEAD)"
  elsewhere:
    checkout: { path: "src/${{ branch }}", ref: v1 }
    run: |
      ls -A
      cat src/main/version
      git -C src/main describe --exact-match --tags HEAD 2>/dev/null || git -C src/main rev-parse HEAD
  by_commit:
    checkout: { ref: "@FIRST@" }
    run: cat version
  large:
    checkout: { lfs: true }
    run: cat big.bin
  nowhere:
    checkout: { ref: no-such-branch }
    run: "true"
"#;

/// A stand-in for git-lfs(1), which is not everywhere: it says how it was called, and gives the file its content.
const GIT_LFS: &str = r#"#!/bin/sh
echo "lfs $*"
case "$1" in
install) git config --local lfs.seen "$*" ;;
pull) test "$(git config lfs.seen)" = "install --local --skip-smudge" && echo "the large content" > big.bin ;;
esac
"#;

async fn what_a_job_checks_out(database: Option<String>) {
    let stack = Stack::start(database).await;
    let tools = stack.dir.path().join("tools");
    fs::create_dir(&tools).unwrap();
    fs::write(tools.join("git-lfs"), GIT_LFS).unwrap();
    fs::set_permissions(tools.join("git-lfs"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/local/bin:/usr/bin:/bin", tools.display());
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[("PATH", path.as_str())]).await;

    let lib = Repository::create(&stack.dir.path().join("repos/lib"), &[("lib.txt", "from lib")]);
    let app = Repository::create(&stack.dir.path().join("repos/app"), &[("version", "1\n"), ("big.bin", "pointer\n")]);
    let first = app.head();
    app.git(&["tag", "v1"]);
    app.commit(&[("version", "2\n")]);
    app.git(&["tag", "v2"]);
    let entry = format!("[submodule \"lib\"]\n\tpath = lib\n\turl = file://{}\n", lib.path.display());
    app.git(&["update-index", "--add", "--cacheinfo", &format!("160000,{},lib", lib.head())]);
    fs::create_dir(app.path.join("lib")).unwrap();
    let workflow = WORKFLOW.replace("@FIRST@", &first);
    app.commit(&[(".gitmodules", entry.as_str()), (".kici/workflows/ci.yaml", workflow.as_str())]);

    let app = stack.known_repository("app").await;
    let run = stack.push_one(&app, "app").await;
    let ended = stack.ended(run).await;
    for job in &ended.jobs {
        let expected = if job.name == "nowhere" { JobStatus::Failed } else { JobStatus::Success };
        let log = stack.log(run, &job.name).await;
        assert_eq!(job.status, expected, "{}: {:?} {log:#?}\n{}", job.name, job.failure, stack.logs());
    }
    assert_eq!(
        stack.log(run, "usual").await,
        ["commits 1, tags '', lib '', version 2", "pointer"],
        "nothing but the commit unless a job asks for more"
    );
    assert_eq!(stack.log(run, "whole").await, ["commits 3, tags 'v1 v2 ', lib 'from lib'"]);
    assert_eq!(stack.log(run, "deeper").await, ["commits 2"]);
    let elsewhere = stack.log(run, "elsewhere").await;
    assert_eq!(elsewhere[..2], ["src", "1"]);
    assert!(elsewhere[2] == "v1" || elsewhere[2] == first, "{elsewhere:?}");
    assert_eq!(stack.log(run, "by_commit").await, ["1"]);
    assert_eq!(stack.log(run, "large").await, ["the large content"]);
    let nowhere = ended.jobs.iter().find(|job| job.name == "nowhere").unwrap().failure.clone().unwrap();
    assert_eq!(nowhere.reason, FailureReason::CheckoutFailed);
    assert!(nowhere.message.unwrap_or_default().contains("no-such-branch"), "the reference is named");
}

#[tokio::test]
async fn a_job_checks_out_what_it_asks_for_on_sqlite() {
    what_a_job_checks_out(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_checks_out_what_it_asks_for_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    what_a_job_checks_out(Some(database.url().to_owned())).await;
}
