//! The door for webhooks, with real payloads.

use std::fs;
use std::path::PathBuf;

use kici_api::dto::events::DeliveryFilter;
use kici_api::dto::sources::{AddSource, SetSecrets, SourceKind};
use kici_api::page::PageQuery;
use kici_forge::verify::sign;
use secrecy::SecretString;
use serde_json::json;

use crate::stack::{Stack, answered, until};

const SECRET: &str = "a secret for tests";

fn payloads() -> Vec<(String, Vec<u8>)> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../crates/forge/tests/data/github");
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).unwrap()))
        .collect();
    found.sort();
    assert!(found.len() >= 28);
    found
}

async fn github(stack: &Stack) {
    let secrets = [("webhook_secret".to_owned(), kici_api::dto::SecretText::new(SECRET))].into();
    let config = json!({"app_id": 7});
    let request = AddSource { name: "gh".into(), kind: SourceKind::Github, config, secrets };
    stack.client.add_source(&request).await.unwrap();
}

async fn post(stack: &Stack, event: &str, id: &str, body: Vec<u8>, signature: &str) -> u16 {
    let request = stack
        .http
        .post(format!("http://{}/webhooks/github/7", stack.address))
        .header("x-github-event", event)
        .header("x-github-delivery", id)
        .header("x-hub-signature-256", signature)
        .header("content-type", "application/json")
        .body(body);
    answered(request).await.status().as_u16()
}

#[tokio::test]
async fn every_real_payload_is_accepted_and_settled_with_a_reason_and_none_gives_a_5xx() {
    let stack = Stack::start(None).await;
    github(&stack).await;
    let secret = SecretString::from(SECRET);
    let mut expected = 0;
    for (name, body) in payloads() {
        let event = name.split('.').next().unwrap().to_owned();
        let signature = sign(&secret, &body);
        assert_eq!(post(&stack, &event, &name, body.clone(), &signature).await, 202, "{name}");
        // Cut off, and with a flipped byte, but signed: stored, and refused with a reason when they are read.
        let mut damaged = body.clone();
        damaged.truncate(body.len() / 2);
        let signature = sign(&secret, &damaged);
        assert_eq!(post(&stack, &event, &format!("{name}-cut"), damaged, &signature).await, 202, "{name}");
        let mut damaged = body.clone();
        damaged[0] ^= 0x20;
        let signature = sign(&secret, &damaged);
        assert_eq!(post(&stack, &event, &format!("{name}-bit"), damaged, &signature).await, 202, "{name}");
        // In the middle it may still be a document, with another text in it.
        let mut damaged = body.clone();
        damaged[body.len() / 2] ^= 0x20;
        let signature = sign(&secret, &damaged);
        assert_eq!(post(&stack, &event, &format!("{name}-mid"), damaged, &signature).await, 202, "{name}");
        expected += 4;
    }
    let page = PageQuery { limit: Some(200), ..PageQuery::default() };
    let settled = until("all deliveries to be settled", async || {
        let listed = stack.client.deliveries(&DeliveryFilter::default(), &page).await.ok()?;
        let open = listed.items.iter().any(|delivery| delivery.status == "received" && delivery.attempts == 0);
        (!open && listed.items.len() == expected).then_some(listed.items)
    })
    .await;
    for delivery in settled {
        assert!(delivery.note.is_some() || delivery.error.is_some(), "{delivery:?}");
        if delivery.delivery_id.ends_with("-cut") || delivery.delivery_id.ends_with("-bit") {
            assert_eq!(delivery.status, "failed", "{delivery:?}");
            assert_eq!(delivery.attempts, 0, "{delivery:?}");
        }
    }
    let page = stack.http.get(format!("http://{}/metrics", stack.address)).send().await.unwrap().text().await.unwrap();
    assert_eq!(kici_engine::metrics::undeclared(&page), Default::default());
    assert!(page.contains("kici_orch_webhooks_received_total{source=\"gh\"} 112"), "{page}");
}

#[tokio::test]
async fn a_call_that_finds_no_turn_is_told_when_to_come_back_and_that_it_was_kept() {
    let mut stack = Stack::unstarted(None);
    stack.variables = vec![("KICI_INGEST_MAX_IN_FLIGHT", "1"), ("KICI_INGEST_QUEUE_DEPTH", "0")];
    stack.start_orchestrator("127.0.0.1:0").await;
    github(&stack).await;
    let (_, body) = payloads().remove(0);
    let signature = sign(&SecretString::from(SECRET), &body);
    let call = |n: usize| {
        let request = stack.http.post(format!("http://{}/webhooks/github/7", stack.address));
        let request = request.header("x-github-event", "push").header("x-github-delivery", n.to_string());
        request.header("x-hub-signature-256", &signature).body(body.clone()).send()
    };
    let mut busy = 0;
    for answer in futures::future::join_all((0..60).map(call)).await {
        let answer = answer.unwrap();
        if answer.status() == 202 {
            continue;
        }
        busy += 1;
        assert_eq!((answer.status().as_u16(), answer.headers()["retry-after"].to_str().unwrap()), (429, "5"));
        let problem: serde_json::Value = answer.json().await.unwrap();
        assert_eq!(problem["code"], "ingest.busy", "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("it is kept and will be processed"), "{problem}");
    }
    assert!(busy > 0);
}

#[tokio::test]
async fn a_wrong_signature_leaves_no_row() {
    let stack = Stack::start(None).await;
    github(&stack).await;
    let (_, body) = payloads().remove(0);
    let right = sign(&SecretString::from(SECRET), &body);
    let other = sign(&SecretString::from("another secret"), &body);
    for (signature, status) in [(other.as_str(), 401), (&right[..right.len() - 2], 401), ("sha256=xyz", 401), ("", 401)]
    {
        assert_eq!(post(&stack, "push", "x", body.clone(), signature).await, status, "{signature}");
    }
    let mut flipped = body.clone();
    flipped[10] ^= 1;
    assert_eq!(post(&stack, "push", "x", flipped, &right).await, 401);
    let listed = stack.client.deliveries(&DeliveryFilter::default(), &PageQuery::default()).await.unwrap();
    assert!(listed.items.is_empty());
    // The id was not used up.
    assert_eq!(post(&stack, "push", "x", body, &right).await, 202);
}

#[tokio::test]
async fn while_a_secret_is_rotated_both_count_and_afterwards_only_the_new_one() {
    const NEW: &str = "the secret that follows";
    let stack = Stack::start(None).await;
    github(&stack).await;
    let (_, body) = payloads().remove(0);
    let (old, new) = (sign(&SecretString::from(SECRET), &body), sign(&SecretString::from(NEW), &body));
    assert_eq!(post(&stack, "push", "1", body.clone(), &new).await, 401);
    for (keep_old, of_old) in [(true, 202), (false, 401)] {
        let secrets = [("webhook_secret".to_owned(), kici_api::dto::SecretText::new(NEW))].into();
        let view = stack.client.set_source_secrets("gh", &SetSecrets { secrets, keep_old }).await.unwrap();
        assert_eq!(view.secrets, ["webhook_secret"]);
        assert_eq!(post(&stack, "push", &format!("old-{keep_old}"), body.clone(), &old).await, of_old);
        assert_eq!(post(&stack, "push", &format!("new-{keep_old}"), body.clone(), &new).await, 202);
    }
    let nothing = SetSecrets { secrets: Default::default(), keep_old: false };
    let refused = stack.client.set_source_secrets("gh", &nothing).await.unwrap_err().to_string();
    assert!(refused.contains("webhook_secret"), "{refused}");
}

#[tokio::test]
async fn a_body_over_25_mib_is_refused_before_it_is_stored() {
    let stack = Stack::start(None).await;
    github(&stack).await;
    let body = vec![b'x'; 25 * 1024 * 1024 + 1];
    let signature = sign(&SecretString::from(SECRET), &body);
    assert_eq!(post(&stack, "push", "big", body, &signature).await, 413);
    let listed = stack.client.deliveries(&DeliveryFilter::default(), &PageQuery::default()).await.unwrap();
    assert!(listed.items.is_empty());
}

#[tokio::test]
async fn unknown_sources_and_paths_get_a_problem_document() {
    let stack = Stack::start(None).await;
    for path in ["/webhooks/github/9", "/webhooks/default/nobody", "/nothing"] {
        let sent = stack.http.post(format!("http://{}{path}", stack.address)).body("{}").send().await.unwrap();
        assert_eq!(sent.status(), 404, "{path}");
        assert_eq!(sent.headers()["content-type"], "application/problem+json", "{path}");
        let problem: serde_json::Value = sent.json().await.unwrap();
        assert!(problem["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{problem}");
    }
}
