//! Lock documents and settings of a repository.

use kici_engine::compile::compile_set;
use kici_engine::lock::{Generator, Workflow};
use kici_engine::lockfile;
use kici_engine::state::JobStatus;
use kici_store::model::{Delivery, DeliveryStatus, Processed};
use kici_store::testing::TestStore;
use serde_json::{Value as Json, json};

use crate::world::{World, call, private_key, push};

const FILE: &str = ".kici/workflows/ci.yaml";
const CI: &str =
    "name: ci\non: push\njobs: { a: { runs_on: default, run: x }, b: { needs: a, runs_on: default, run: y } }\n";

fn compiled(text: &str) -> Vec<Workflow> {
    compile_set(&[(FILE.to_owned(), text.to_owned())]).workflows().cloned().collect()
}

fn lock(workflows: Vec<Workflow>) -> String {
    serde_json::to_string(&lockfile::document(workflows, Generator { name: "t".into(), version: "1".into() })).unwrap()
}

/// A workflow that another program made.
fn generated() -> Workflow {
    let mut workflow = compiled(CI).remove(0);
    workflow.name = "generated".to_owned();
    workflow.source.file = "build.py".to_owned();
    workflow
}

async fn pushed(test: TestStore, files: &[(&str, &str)], body: &Json) -> (World, Delivery, Processed) {
    let mut world = World::new(test).await;
    world.github_source(private_key()).await;
    world.repository(files);
    world.inbox.accept(call("push", "d1", body)).await.unwrap();
    let (delivery, processed) = world.settle().await;
    (world, delivery, processed)
}

async fn jobs(world: &World, processed: &Processed) -> Vec<(String, JobStatus, Option<String>)> {
    let mut out = Vec::new();
    for run in &processed.runs {
        let name = world.test.store.run_get(run.run_id).await.unwrap().unwrap().workflow_name;
        for job in world.test.store.jobs_of_run(run.run_id).await.unwrap() {
            out.push((format!("{name}/{}", job.name), job.status, job.failure_reason.map(|reason| reason.to_string())));
        }
    }
    out.sort();
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_document_adds_the_workflows_of_other_programs() {
    TestStore::each(|test| async move {
        let text = lock(vec![generated(), compiled(&CI.replace("run: x", "run: stale")).remove(0)]);
        let files = [(FILE, CI), (".kici/kici.lock.json", &*text)];
        let (world, delivery, processed) = pushed(test, &files, &push()).await;
        assert_eq!(delivery.status, DeliveryStatus::Processed);
        let names: Vec<String> = jobs(&world, &processed).await.into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["ci/a", "ci/b", "generated/a", "generated/b"]);
        let registered = world.test.store.registration_list("default".to_owned(), None, None).await.unwrap();
        assert_eq!(registered.len(), 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_document_alone_is_enough() {
    TestStore::each(|test| async move {
        let text = lock(vec![generated()]);
        let (_, delivery, processed) = pushed(test, &[(".kici/kici.lock.json", &*text)], &push()).await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::Processed, 1));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_corrupt_lock_document_runs_and_the_files_still_do() {
    TestStore::each(|test| async move {
        let text = lock(vec![generated()]).replace("\"run\":\"x\"", "\"run\":\"evil\"");
        let files = [(FILE, CI), (".kici/kici.lock.json", &*text)];
        let (_, delivery, processed) = pushed(test, &files, &push()).await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::Processed, 1));
        assert!(delivery.note.unwrap().contains("was changed after it was compiled"));
    })
    .await;
    TestStore::each(|test| async move {
        let files = [(FILE, CI), (".kici/config.yaml", "lock: required\n"), (".kici/kici.lock.json", "{}")];
        let (_, delivery, processed) = pushed(test, &files, &push()).await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::LockfileCorrupt, 0));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_lock_that_differs_from_its_file_fails_the_run_as_lock_drift() {
    TestStore::each(|test| async move {
        let text = lock(compiled(&CI.replace("run: x", "run: old")));
        let files = [(FILE, CI), (".kici/config.yaml", "lock: required\n"), (".kici/kici.lock.json", &*text)];
        let (world, delivery, processed) = pushed(test, &files, &push()).await;
        assert!(delivery.note.unwrap().contains("does not compile to what the lock document says"));
        let failed = Some("lock_drift".to_owned());
        let expected = ["ci/a", "ci/b"].map(|name| (name.to_owned(), JobStatus::Failed, failed.clone()));
        assert_eq!(jobs(&world, &processed).await, expected);
        let registered = world.test.store.registration_list("default".to_owned(), None, None).await.unwrap();
        assert!(registered.is_empty());
    })
    .await;
    TestStore::each(|test| async move {
        let text = lock(compiled(CI));
        let files = [(FILE, CI), (".kici/config.yaml", "lock: required\n"), (".kici/kici.lock.json", &*text)];
        let (world, _, processed) = pushed(test, &files, &push()).await;
        assert_eq!(jobs(&world, &processed).await[0].1, JobStatus::Queued);
    })
    .await;
    TestStore::each(|test| async move {
        let files = [(FILE, CI), (".kici/config.yaml", "lock: required\n")];
        let (_, delivery, processed) = pushed(test, &files, &push()).await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::LockfileMissing, 0));
        assert!(delivery.note.unwrap().contains("workflow compile"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_cannot_be_read_run_nothing() {
    TestStore::each(|test| async move {
        let files = [(FILE, CI), (".kici/config.yaml", "lok: required\n")];
        let (_, delivery, processed) = pushed(test, &files, &push()).await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::WorkflowInvalid, 0));
        assert!(delivery.note.unwrap().contains(".kici/config.yaml:1:1: unknown key `lok`"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_may_switch_the_skip_marker_off() {
    for (config, status, runs) in [("", DeliveryStatus::Skipped, 0), ("skip_ci: false\n", DeliveryStatus::Processed, 1)]
    {
        TestStore::each(move |test| async move {
            let mut body = push();
            body["head_commit"] = json!({"message": "typo [skip ci]"});
            let files = [(FILE, CI), (".kici/config.yaml", config)];
            let (_, delivery, processed) = pushed(test, &files, &body).await;
            assert_eq!((delivery.status, processed.runs.len()), (status, runs), "{config}");
        })
        .await;
    }
}
