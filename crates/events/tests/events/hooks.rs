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
