//! The examples of this repository, as they are, at a real orchestrator and a real agent.

use std::fs;
use std::path::Path;

use kici_api::dto::runs::TriggerRun;
use kici_engine::ids::RunId;
use kici_engine::state::RunStatus;
use kici_store::testing::TestStore;

use crate::stack::Stack;
use crate::surroundings::Repository;

/// Every label that one of them asks for.
const LABELS: &str = "default,linux,x64,deploy-eu,role:web";

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            // With the right to be executed.
            fs::copy(entry.path(), &target).unwrap();
        }
    }
}

/// The example as a source of its name.
async fn example(stack: &Stack, name: &str, more: &[(&str, &str)]) -> Repository {
    let path = stack.dir.path().join("repos").join(name);
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name), &path);
    Repository::create(&path, more);
    stack.known_repository(name).await
}

async fn by_hand(stack: &Stack, source: &str, workflow: &str) -> RunId {
    let request = TriggerRun { source: source.into(), workflow: workflow.into(), ..TriggerRun::default() };
    stack.client.trigger_run(&request, None).await.unwrap().run_id
}

async fn succeeds(stack: &Stack, run: RunId, jobs: &[&str]) {
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let found: Vec<String> = ended.jobs.iter().map(|job| format!("{} {}", job.name, job.status)).collect();
    assert_eq!(found, jobs);
}

async fn the_examples(database: Option<String>) {
    let stack = Stack::start(database).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("web-1", token.token.expose(), &[("KICI_LABELS", LABELS)]).await;

    let ci = example(&stack, "ci", &[]).await;
    let run = stack.push_one(&ci, "ci").await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let names: Vec<&str> = ended.jobs.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["build", "test (pg15, default)", "test (pg16, default)", "test (pg16, full)", "report"]);
    assert!(stack.log(run, "test (pg16, full)").await.contains(&"1.2.3".to_owned()), "the artifact was handed over");
    assert!(stack.log(run, "build").await.iter().any(|line| line.contains("cargo build")));

    example(&stack, "deploy", &[]).await;
    let run = by_hand(&stack, "deploy", "deploy").await;
    succeeds(&stack, run, &["deploy success"]).await;
    assert!(stack.log(run, "deploy").await.contains(&"terraform apply tf.plan".to_owned()));

    example(&stack, "fleet", &[]).await;
    let run = by_hand(&stack, "fleet", "fleet").await;
    succeeds(
        &stack,
        run,
        &["plan success", "patch (web-1) success", "report success", "check-1 success", "check-2 success"],
    )
    .await;
    assert!(stack.log(run, "patch (web-1)").await.contains(&"patch web-1".to_owned()));

    example(&stack, "org-policy", &[("Cargo.toml", "[workspace]\n")]).await;
    let run = by_hand(&stack, "org-policy", "license-scan").await;
    succeeds(&stack, run, &["scan success"]).await;

    let hello = example(&stack, "hello", &[]).await;
    let run = stack.push_one(&hello, "hello").await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
}

#[tokio::test]
async fn the_examples_run_on_sqlite() {
    the_examples(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_examples_run_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    the_examples(Some(database.url().to_owned())).await;
}
