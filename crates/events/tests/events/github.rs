//! Pushes and pull requests of a GitHub App.

use kici_store::model::DeliveryStatus;
use kici_store::testing::TestStore;
use serde_json::json;

use crate::world::{SHA, World, call, private_key, push};

const GOOD: &str = "on: push\njobs: { a: { runs_on: default, run: 'true' } }\n";

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_file_does_not_keep_the_others_from_running() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[
            (".kici/workflows/a.yaml", GOOD),
            (".kici/workflows/b.yaml", "on: push\njobs: { a: { runs-on: default, run: 'true' } }\n"),
            (".kici/workflows/c.yaml", GOOD),
        ]);
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::Processed, 2));
        let note = delivery.note.unwrap();
        assert!(note.contains(".kici/workflows/b.yaml is invalid"), "{note}");
        let trace = world.test.store.trace_get(delivery.id).await.unwrap().unwrap();
        let diagnostic = &trace["files"][0]["diagnostics"][0];
        assert_eq!((diagnostic["code"].as_str(), diagnostic["line"].as_u64()), (Some("K0102"), Some(2)), "{trace}");
        assert_eq!(trace["workflows"].as_array().unwrap().len(), 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_invalid_files_give_workflow_invalid_and_none_gives_lockfile_missing() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", "on: [")]);
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        assert_eq!(world.settle().await.0.status, DeliveryStatus::WorkflowInvalid);
        let other = "3".repeat(40);
        world.github.state().repos.get_mut("acme/app").unwrap().commits.insert(other.clone(), Default::default());
        let mut body = push();
        body["after"] = json!(other);
        world.inbox.accept(call("push", "d2", &body)).await.unwrap();
        assert_eq!(world.settle().await.0.status, DeliveryStatus::LockfileMissing);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_without_a_private_key_fails_the_delivery_and_names_the_key() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(None).await;
        world.repository(&[(".kici/workflows/a.yaml", GOOD)]);
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let (delivery, _) = world.settle().await;
        assert_eq!(delivery.status, DeliveryStatus::Failed);
        assert!(delivery.error.as_deref().unwrap().contains("private key"), "{delivery:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_pull_request_is_ignored_with_a_note() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", "on: pull_request\njobs: { a: { runs_on: default, run: x } }\n")]);
        let pull = |head: &str| {
            json!({
                "action": "opened",
                "number": 5,
                "pull_request": {
                    "number": 5,
                    "head": {"ref": "topic", "sha": SHA, "repo": {"full_name": head, "id": if head == "acme/app" { 1 } else { 2 }}},
                    "base": {"ref": "main", "sha": "2".repeat(40), "repo": {"full_name": "acme/app", "id": 1}},
                },
                "repository": {"full_name": "acme/app", "default_branch": "main", "id": 1},
                "sender": {"login": "bob", "id": 2},
            })
        };
        world.inbox.accept(call("pull_request", "d1", &pull("eve/app"))).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::Skipped, 0));
        assert!(delivery.note.as_deref().unwrap().contains("fork"), "{delivery:?}");
        world.inbox.accept(call("pull_request", "d2", &pull("acme/app"))).await.unwrap();
        assert_eq!(world.settle().await.1.runs.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_filter_that_cannot_be_evaluated_runs_and_says_so() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let filtered = "on: { push: { paths: [\"docs/**\"] } }\njobs: { a: { runs_on: default, run: x } }\n";
        world.repository(&[(".kici/workflows/a.yaml", filtered)]);
        let many: Vec<String> = (0..300).map(|n| format!("src/{n}.rs")).collect();
        let range = format!("{}...{SHA}", "2".repeat(40));
        world.github.state().repos.get_mut("acme/app").unwrap().compares.insert(range.clone(), many);
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!(processed.runs.len(), 1, "{delivery:?}");
        assert!(delivery.note.as_deref().unwrap().contains("path filter not evaluated"), "{delivery:?}");
        // A list that is complete and does not hit is an answer.
        let few = vec!["src/a.rs".to_owned()];
        let mut body = push();
        body["before"] = json!("4".repeat(40));
        let range = format!("{}...{SHA}", "4".repeat(40));
        world.github.state().repos.get_mut("acme/app").unwrap().compares.insert(range, few);
        world.inbox.accept(call("push", "d2", &body)).await.unwrap();
        assert_eq!(world.settle().await.1.runs.len(), 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_of_the_same_commit_are_read_with_the_workflows_that_use_them() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let user = "on: push\njobs: { a: { runs_on: default, steps: [{ use: ./.kici/steps/tell.yaml }] } }\n";
        world.repository(&[
            (".kici/workflows/a.yaml", user),
            (".kici/workflows/b.yaml", &user.replace("tell", "broken")),
            (".kici/steps/tell.yaml", "steps: [echo told]\n"),
            (".kici/steps/broken.yaml", "steps: []\n"),
        ]);
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!(processed.runs.len(), 1, "{delivery:?}");
        let run = world.test.store.run_get(processed.runs[0].run_id).await.unwrap().unwrap();
        let lock = world.test.store.lock_document(run.lock_digest).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&lock).contains("echo told"));
        let note = delivery.note.unwrap();
        assert!(note.contains(".kici/steps/broken.yaml is invalid") && note.contains("b.yaml is invalid"), "{note}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requirement_that_does_not_hold_or_cannot_be_told_drops_the_workflow_visibly() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let wants = |name: &str, requires: &str| format!("name: {name}\nrequires: [{requires}]\n{GOOD}");
        let files = [
            wants("yes", "{ file: package.json, match: { \"$.scripts.test\": /./ } }, { file: none, exists: false }"),
            wants("no", "{ file: package.json, match: { \"$.scripts.lint\": /./ } }"),
            wants("untold", "{ file: text.md, match: { \"$.a\": 1 } }"),
        ];
        world.repository(&[
            (".kici/workflows/a.yaml", &files[0]),
            (".kici/workflows/b.yaml", &files[1]),
            (".kici/workflows/c.yaml", &files[2]),
            ("package.json", r#"{"scripts":{"test":"jest"}}"#),
            ("text.md", "# no JSON"),
        ]);
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!((delivery.matched_count, processed.runs.len()), (3, 1));
        let note = delivery.note.unwrap();
        assert!(note.contains("no: `requires` does not hold: package.json: `$.scripts.lint` is absent"), "{note}");
        assert!(note.contains("untold: `requires` cannot be told, so there is no run: text.md is not JSON"), "{note}");
    })
    .await;
}
