//! Deliveries that are being processed when the process ends, again and again.

use std::sync::Arc;

use kici_api::dto::SecretText;
use kici_api::dto::events::{DeliveryFilter, DeliveryView};
use kici_api::dto::sources::{AddSource, SourceKind};
use kici_api::page::PageQuery;
use kici_forge::testing::{FakeGithub, FakeRepo, PRIVATE_KEY};
use kici_forge::verify::sign;
use kici_sys::clock::SystemClock;
use nix::sys::signal::Signal;
use secrecy::SecretString;
use serde_json::json;

use crate::postgres::Server;
use crate::stack::{Stack, until};

const SECRET: &str = "a secret for tests";
const SHA: &str = "1111111111111111111111111111111111111111";
const WORKFLOW: &str = "on: push\njobs: { a: { runs_on: default, run: 'true' } }\n";

/// A GitHub with a repository `acme/poison`, as the source `gh`: whoever asks for it is held up until he dies.
async fn forge(stack: &Stack) -> FakeGithub {
    let fake = FakeGithub::start(Arc::new(SystemClock)).await.unwrap();
    let repo = FakeRepo {
        installation: Some(1),
        default_branch: "main".to_owned(),
        branches: [("main".to_owned(), SHA.to_owned())].into(),
        commits: [(SHA.to_owned(), [(".kici/workflows/a.yaml".to_owned(), WORKFLOW.into())].into())].into(),
        ..FakeRepo::default()
    };
    fake.state().repos.insert("acme/poison".to_owned(), repo);
    fake.state().hangs.push("/repos/acme/poison".to_owned());
    let secrets = [("webhook_secret", SECRET), ("private_key", PRIVATE_KEY)];
    let secrets = secrets.map(|(name, value)| (name.to_owned(), SecretText::new(value))).into();
    let config = json!({"app_id": 7, "base_url": fake.base_url()});
    let request = AddSource { name: "gh".into(), kind: SourceKind::Github, config, secrets };
    stack.client.add_source(&request).await.unwrap_or_else(|error| panic!("{error}\n{}", stack.logs()));
    fake
}

async fn post(stack: &Stack, id: &str) {
    let push = json!({
        "ref": "refs/heads/main", "before": "2".repeat(40), "after": SHA,
        "repository": {"full_name": "acme/poison", "default_branch": "main"},
        "sender": {"login": "alice", "id": 1}, "head_commit": {"message": "change"},
    });
    let body = serde_json::to_vec(&push).unwrap();
    let request = stack
        .http
        .post(format!("http://{}/webhooks/github/7", stack.address))
        .header("x-github-event", "push")
        .header("x-github-delivery", id)
        .header("x-hub-signature-256", sign(&SecretString::from(SECRET), &body))
        .header("content-type", "application/json")
        .body(body);
    assert_eq!(request.send().await.unwrap().status(), 202);
}

async fn settled(stack: &Stack, id: &str) -> DeliveryView {
    let filter = DeliveryFilter { delivery_id: Some(id.to_owned()), ..DeliveryFilter::default() };
    until(&format!("{id} to be settled"), async || {
        let listed = stack.client.deliveries(&filter, &PageQuery::default()).await.ok()?;
        listed.items.into_iter().find(|delivery| delivery.status != "received")
    })
    .await
}

/// Waits until the forge was asked once more than `before`: the delivery is in the middle of its processing.
async fn begun(stack: &Stack, fake: &FakeGithub, before: usize) -> usize {
    let what = format!("processing to begin, after {before}\n{}", stack.logs());
    until(&what, async || Some(fake.calls("/repos/acme/poison")).filter(|calls| *calls > before)).await
}

async fn restart(stack: &mut Stack) {
    let address = stack.address.clone();
    stack.start_orchestrator(&address).await;
}

async fn kills_the_process(database: Option<String>) {
    let mut stack = Stack::start(database).await;
    let fake = forge(&stack).await;
    let repository = stack.repository("app", &[(".kici/workflows/a.yaml", WORKFLOW)]).await;
    post(&stack, "poison").await;
    let mut asked = begun(&stack, &fake, 0).await;
    for n in 1..5 {
        // Accepted at the last moment: the process may not come to it.
        let body = json!({"ref": "refs/heads/main", "before": "0".repeat(40), "after": repository.head()});
        let url = format!("http://{}/webhooks/default/app", stack.address);
        let sent = stack.http.post(&url).header("x-delivery-id", format!("neighbour-{n}")).json(&body).send().await;
        assert_eq!(sent.unwrap().status(), 202);
        stack.orchestrator.take().unwrap().kill();
        restart(&mut stack).await;
        asked = begun(&stack, &fake, asked).await;
    }
    stack.orchestrator.take().unwrap().kill();
    restart(&mut stack).await;
    let dead = settled(&stack, "poison").await;
    assert_eq!(dead.status, "dead", "{dead:?}\n{}", stack.logs());
    assert!(dead.note.as_ref().unwrap().contains("the process ended while it was processed"), "{dead:?}");
    assert_eq!(fake.calls("/repos/acme/poison"), asked, "it was not begun a sixth time");
    let letters = stack.client.dead_letters(&PageQuery::default()).await.unwrap().items;
    assert_eq!(letters.len(), 1);

    // Its neighbours were processed.
    let page = PageQuery { limit: Some(200), ..PageQuery::default() };
    let filter = DeliveryFilter { source: Some("app".to_owned()), ..DeliveryFilter::default() };
    let neighbours = stack.client.deliveries(&filter, &page).await.unwrap().items;
    assert_eq!(neighbours.len(), 4);
    for neighbour in &neighbours {
        let settled = settled(&stack, &neighbour.delivery_id).await;
        assert_eq!(settled.status, "processed", "{settled:?}");
    }

    // Once the fault is gone a person has it tried again.
    fake.state().hangs.clear();
    stack.client.retry_dead_letter(letters[0].id).await.unwrap();
    let done = settled(&stack, "poison").await;
    assert_eq!((done.status.as_str(), done.matched_count), ("processed", 1), "{done:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_ends_every_process_that_processes_it_is_dead_after_five() {
    kills_the_process(None).await;
    if let Some(server) = Server::new() {
        kills_the_process(Some(server.url())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_orderly_stops_interrupt_is_processed_however_many_there_were() {
    let mut stack = Stack::unstarted(None);
    stack.variables = vec![("KICI_SHUTDOWN_GRACE_MS", "50")];
    stack.start_orchestrator("127.0.0.1:0").await;
    let fake = forge(&stack).await;
    post(&stack, "slow").await;
    let mut asked = begun(&stack, &fake, 0).await;
    for _ in 0..7 {
        let mut orchestrator = stack.orchestrator.take().unwrap();
        orchestrator.signal(Signal::SIGTERM);
        assert_eq!(orchestrator.exit_code().await, Some(0), "{}", stack.logs());
        restart(&mut stack).await;
        asked = begun(&stack, &fake, asked).await;
    }
    stack.orchestrator.take().unwrap().kill();
    fake.state().hangs.clear();
    restart(&mut stack).await;
    let done = settled(&stack, "slow").await;
    assert_eq!((done.status.as_str(), done.matched_count), ("processed", 1), "{done:?}");
}
