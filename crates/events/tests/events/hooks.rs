//! Calls to generic sources, which start registered workflows.

use kici_engine::ids::SourceId;
use kici_events::{Call, Route};
use kici_forge::Headers;
use kici_forge::verify::sign;
use kici_store::model::DeliveryStatus;
use kici_store::testing::{TestIds, TestStore};
use secrecy::SecretString;
use serde_json::json;

use crate::world::{SECRET, SHA, World, call, private_key, push};

const HOOKED: &str = "
on:
  hook: { source: deploys, events: [done], match: { \"$.env\": prod } }
jobs: { a: { runs_on: default, run: 'true' } }
";

fn hook(id: &str, event: &str, env: &str) -> Call {
    let body = serde_json::to_vec(&json!({ "env": env })).unwrap();
    Call {
        route: Route::Named { org: "default".to_owned(), source: "deploys".to_owned() },
        headers: Headers::from_iter([
            ("x-event-type", event.to_owned()),
            ("x-delivery-id", id.to_owned()),
            ("x-hub-signature-256", sign(&SecretString::from(SECRET), &body)),
        ]),
        remote: None,
        body: body.into(),
        request_id: "r".to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_starts_the_registered_workflow_at_the_head_of_the_default_branch() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.generic_source("deploys", SourceId::mint(&TestIds)).await;
        world.repository(&[(".kici/workflows/a.yaml", HOOKED)]);

        world.inbox.accept(hook("h0", "done", "prod")).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!(
            (delivery.status, processed.runs.len()),
            (DeliveryStatus::Processed, 0),
            "nothing is registered yet"
        );

        // The push registers it and starts nothing.
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        assert_eq!(world.settle().await.1.runs.len(), 0);

        world.inbox.accept(hook("h1", "done", "prod")).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!(processed.runs.len(), 1, "{delivery:?}");
        let run = world.test.store.run_get(processed.runs[0].run_id).await.unwrap().unwrap();
        assert_eq!(
            (run.repo.as_str(), run.sha.as_str(), run.trigger_kind.as_str()),
            ("acme/app", SHA, "generic_webhook")
        );

        for (id, event, env) in [("h2", "done", "test"), ("h3", "begun", "prod")] {
            world.inbox.accept(hook(id, event, env)).await.unwrap();
            assert_eq!(world.settle().await.1.runs.len(), 0, "{id}");
        }
    })
    .await;
}

/// A push of a new head of `main` with these files and this message; what is registered then, with the delivery's note.
async fn pushed(
    world: &mut World,
    files: &[(&str, &str)],
    message: &str,
    status: DeliveryStatus,
) -> (Vec<String>, String) {
    let sha = world.repository(files);
    pushed_commit(world, &sha, message, status).await
}

async fn pushed_commit(world: &mut World, sha: &str, message: &str, status: DeliveryStatus) -> (Vec<String>, String) {
    let mut body = push();
    body["after"] = json!(sha);
    body["head_commit"]["message"] = json!(message);
    world.inbox.accept(call("push", sha, &body)).await.unwrap();
    let (delivery, _) = world.settle().await;
    assert_eq!(delivery.status, status, "{delivery:?}");
    let known = world.test.store.registration_list("default".to_owned(), None, None).await.unwrap();
    let names = known.into_iter().map(|one| format!("{}@{}", one.workflow_name, &one.sha[39..])).collect();
    (names, delivery.note.unwrap_or_default())
}

const OTHER: &str = "name: other\non: { hook: { source: x } }\njobs: { a: { runs_on: default, run: 'true' } }\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_runs_nothing_still_says_what_is_registered() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let a = (".kici/workflows/a.yaml", HOOKED);
        let b = (".kici/workflows/b.yaml", OTHER);
        let done = DeliveryStatus::Processed;
        assert_eq!(pushed(&mut world, &[a, b], "both", done).await.0, ["a@1", "other@1"]);
        let (names, note) = pushed(&mut world, &[a], "less [skip ci]", DeliveryStatus::Skipped).await;
        assert_eq!(names, ["a@1"], "{note}");
        assert!(note.contains("[skip ci]"), "{note}");
        let (names, _) = pushed(&mut world, &[("README.md", "x")], "none", DeliveryStatus::LockfileMissing).await;
        assert!(names.is_empty(), "{names:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_not_sound_as_a_whole_adds_registrations_and_removes_none() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let (a, b) = ((".kici/workflows/a.yaml", HOOKED), (".kici/workflows/b.yaml", OTHER));
        let (done, invalid) = (DeliveryStatus::Processed, DeliveryStatus::WorkflowInvalid);
        assert_eq!(pushed(&mut world, &[a], "first", done).await.0, ["a@1"]);
        let broken = (".kici/workflows/a.yaml", "on: nothing\n");
        let (names, note) = pushed(&mut world, &[broken, b], "broken", invalid).await;
        assert_eq!(names, ["a@1", "other@1"], "{note}");
        assert!(note.contains("stay registered"), "{note}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_be_read_are_invalid_and_keep_what_is_registered() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let a = (".kici/workflows/a.yaml", HOOKED);
        assert_eq!(pushed(&mut world, &[a], "first", DeliveryStatus::Processed).await.0, ["a@1"]);
        let lock = DeliveryStatus::LockfileCorrupt;
        let invalid = DeliveryStatus::WorkflowInvalid;
        for (path, files, status) in [
            (".kici/workflows/a.yaml", &[][..], invalid),
            (".kici/config.yaml", &[a][..], invalid),
            (".kici/kici.lock.json", &[(".kici/workflows/b.yaml", OTHER)][..], lock),
        ] {
            let sha = world.repository(files);
            {
                let mut state = world.github.state();
                let commit = state.repos.get_mut("acme/app").unwrap().commits.get_mut(&sha).unwrap();
                // Each content is one of its own: the fake finds it by what it is.
                commit.insert(path.to_owned(), [path.as_bytes(), &[0xff]].concat());
            }
            let (names, note) = pushed_commit(&mut world, &sha, "unreadable", status).await;
            assert!(names.iter().any(|name| name.starts_with("a@")), "{path}: {names:?}");
            assert!(note.contains("not UTF-8"), "{path}: {note}");
        }
    })
    .await;
}
