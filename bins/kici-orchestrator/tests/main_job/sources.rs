//! Generic sources over real HTTP, and what each refusal tells the sender and the operator; on both databases.

use kici_api::dto::SecretText;
use kici_api::dto::events::{DeliveryFilter, DeliveryView};
use kici_api::dto::sources::{AddSource, SetSecrets, SourceKind};
use kici_api::page::PageQuery;
use kici_forge::verify::sign;
use reqwest::RequestBuilder;
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::postgres::Server;
use crate::stack::{Stack, answered, until};

const SECRET: &str = "a secret for tests";
const MIB: usize = 1024 * 1024;

/// A test on an orchestrator with SQLite, and on one with PostgreSQL where that is installed.
async fn each(test: impl AsyncFn(Stack)) {
    test(Stack::start(None).await).await;
    if let Some(server) = Server::new() {
        test(Stack::start(Some(server.url())).await).await;
    }
}

async fn add(stack: &Stack, name: &str, config: Value, secret: Option<&str>) {
    let secrets = secret.map(|secret| ("webhook_secret".to_owned(), SecretText::new(secret))).into_iter().collect();
    let request = AddSource { name: name.to_owned(), kind: SourceKind::Generic, config, secrets };
    stack.client.add_source(&request).await.unwrap_or_else(|error| panic!("{error}\n{}", stack.logs()));
}

fn hmac() -> Value {
    json!({"verification": {"type": "hmac"}})
}

fn request(stack: &Stack, source: &str, body: impl Into<Vec<u8>>) -> RequestBuilder {
    let body = body.into();
    stack
        .http
        .post(format!("http://{}/webhooks/default/{source}", stack.address))
        .header("x-hub-signature-256", sign(&SecretString::from(SECRET), &body))
        .header("content-type", "application/json")
        .body(body)
}

/// Status and document of an answer.
async fn answer(request: RequestBuilder) -> (u16, Value) {
    let answer = answered(request).await;
    (answer.status().as_u16(), answer.json().await.unwrap())
}

async fn stored(stack: &Stack) -> Vec<DeliveryView> {
    let page = PageQuery { limit: Some(200), ..PageQuery::default() };
    stack.client.deliveries(&DeliveryFilter::default(), &page).await.unwrap().items
}

/// The delivery that an answer names, once it is settled.
async fn settled(stack: &Stack, (status, document): (u16, Value)) -> DeliveryView {
    assert_eq!(status, 202, "{document}");
    let id = document["delivery_id"].as_str().unwrap().parse().unwrap();
    until("the delivery to be settled", async || {
        stack.client.delivery(id).await.ok().filter(|delivery| delivery.status != "received")
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_of_its_source_is_413_and_not_stored() {
    each(async |stack| {
        add(&stack, "usual", hmac(), Some(SECRET)).await;
        add(&stack, "small", json!({"verification": {"type": "hmac"}, "max_payload_bytes": 100}), Some(SECRET)).await;
        let body = |size: usize| format!("\"{}\"", "x".repeat(size - 2));
        for (source, limit) in [("usual", MIB), ("small", 100)] {
            let (status, problem) = answer(request(&stack, source, body(limit + 1))).await;
            assert_eq!((status, problem["code"].as_str()), (413, Some("request.too_large")), "{problem}");
            assert!(problem["detail"].as_str().unwrap().contains(&format!("{limit} bytes")), "{problem}");
            // A sender that does not say how much will come.
            let pieces = (0..=limit / 64).map(|_| Ok::<_, std::io::Error>(vec![b'x'; 64]));
            let url = format!("http://{}/webhooks/default/{source}", stack.address);
            let streamed = reqwest::Body::wrap_stream(futures::stream::iter(pieces));
            // A server that has read enough may end the connection under a sender that still writes.
            if let Ok(sent) = stack.http.post(url).body(streamed).send().await {
                assert_eq!(sent.status(), 413);
            }
        }
        assert!(stored(&stack).await.is_empty());
        for (source, limit) in [("usual", MIB), ("small", 100)] {
            assert_eq!(answer(request(&stack, source, body(limit))).await.0, 202);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_disabled_and_removed_sources_are_404_and_store_nothing() {
    each(async |stack| {
        add(&stack, "s", hmac(), Some(SECRET)).await;
        let url = |path: &str| format!("http://{}/webhooks/{path}", stack.address);
        for path in ["default/nobody", "other/s", "github/12", "github/s", "default/s/more", "default"] {
            let sent = stack.http.post(url(path)).body("{}").send().await.unwrap();
            assert_eq!(sent.status(), 404, "{path}");
        }
        let nothing = answer(request(&stack, "nobody", "{}")).await;
        assert_eq!((nothing.0, nothing.1["code"].as_str()), (404, Some("not_found")), "{}", nothing.1);
        stack.client.enable_source("s", false).await.unwrap();
        let off = answer(request(&stack, "s", "{}")).await;
        assert_eq!((off.0, off.1["code"].as_str()), (404, Some("not_found")));
        assert_eq!(off.1["detail"], nothing.1["detail"], "whether it exists is nobody's business");
        assert!(stored(&stack).await.is_empty());
        stack.client.enable_source("s", true).await.unwrap();
        assert_eq!(answer(request(&stack, "s", "{}")).await.0, 202);
        stack.client.remove_source("s").await.unwrap();
        assert_eq!(answer(request(&stack, "s", "{\"a\": 1}")).await.0, 404);
        assert_eq!(stored(&stack).await.len(), 1);
    })
    .await;
}

async fn metric(stack: &Stack, line: &str) -> bool {
    let page = stack.http.get(format!("http://{}/metrics", stack.address)).send().await.unwrap().text().await.unwrap();
    page.lines().any(|found| found == line)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_not_set_up_is_500_with_a_reason_that_is_logged_and_counted() {
    each(async |mut stack| {
        add(&stack, "s", hmac(), None).await;
        let refused = async |stack: &Stack, reason: &str| {
            let (status, problem) = answer(request(stack, "s", "{}")).await;
            assert_eq!((status, problem["code"].as_str()), (500, Some("source.misconfigured")), "{problem}");
            assert!(problem["detail"].as_str().unwrap().contains(reason), "{problem}");
            assert!(stack.logs().contains(reason), "{}", stack.logs());
            assert!(stored(stack).await.is_empty());
        };
        refused(&stack, "the source has no webhook secret; set one with `kici-admin source set-secret`").await;
        assert!(metric(&stack, "kici_orch_webhook_pipeline_failures_total{phase=\"source\"} 1").await);
        let secrets =
            || SetSecrets { secrets: [("webhook_secret".to_owned(), SecretText::new(SECRET))].into(), keep_old: false };
        stack.client.set_source_secrets("s", &secrets()).await.unwrap();

        // A sealing key that is not the one the secrets were sealed with.
        stack.orchestrator.take().unwrap().kill();
        let key = stack.data().join("secret.key");
        let right = std::fs::read(&key).unwrap();
        std::fs::remove_file(&key).unwrap();
        let address = stack.address.clone();
        stack.start_orchestrator(&address).await;
        refused(&stack, "the secrets of source `s` cannot be read").await;
        stack.orchestrator.take().unwrap().kill();
        std::fs::write(&key, right).unwrap();
        stack.start_orchestrator(&address).await;
        assert_eq!(answer(request(&stack, "s", "{}")).await.0, 202, "{}", stack.logs());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_to_prove_where_a_call_comes_from() {
    each(async |stack| {
        for (name, verification, secret) in [
            ("hmac", json!({"type": "hmac", "header": "x-signature"}), Some(SECRET)),
            ("token", json!({"type": "token"}), Some(SECRET)),
            ("bearer", json!({"type": "bearer"}), Some(SECRET)),
            ("near", json!({"type": "cidr", "allow": ["127.0.0.0/8"]}), None),
            ("far", json!({"type": "cidr", "allow": ["10.0.0.0/8"]}), None),
            ("open", json!({"type": "none", "allow_unsigned": true}), None),
        ] {
            add(&stack, name, json!({"verification": verification}), secret).await;
        }
        let signature = sign(&SecretString::from(SECRET), b"{}");
        let right = format!("Bearer {SECRET}");
        let table = [
            ("hmac", Some(("x-signature", signature.as_str())), 202),
            ("hmac", Some(("x-hub-signature-256", signature.as_str())), 401),
            ("token", Some(("x-gitlab-token", SECRET)), 202),
            ("token", Some(("x-gitlab-token", "another secret")), 401),
            ("bearer", Some(("authorization", right.as_str())), 202),
            ("bearer", Some(("authorization", SECRET)), 401),
            ("bearer", None, 401),
            ("near", None, 202),
            ("near", Some(("x-forwarded-for", "127.0.0.1")), 401),
            ("far", None, 401),
            ("open", None, 202),
        ];
        for (source, header, expected) in table {
            let mut request = stack.http.post(format!("http://{}/webhooks/default/{source}", stack.address)).body("{}");
            if let Some((name, value)) = header {
                request = request.header(name, value);
            }
            let (status, document) = answer(request).await;
            assert_eq!(status, expected, "{source} {header:?}: {document}");
            assert!(!document.to_string().contains(&signature[7..]), "the right signature is told to nobody");
        }
        assert_eq!(stored(&stack).await.len(), 5);
        let unsigned = AddSource {
            name: "accident".to_owned(),
            kind: SourceKind::Generic,
            config: json!({"verification": {"type": "none"}}),
            secrets: Default::default(),
        };
        let refused = stack.client.add_source(&unsigned).await.unwrap_err().to_string();
        assert!(refused.contains("allow_unsigned"), "{refused}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generic_source_takes_its_values_from_where_it_says() {
    each(async |stack| {
        let config = json!({
            "verification": {"type": "hmac"},
            "action_from": {"path": "$.what"},
            "repo_from": {"path": "$.project.name"},
            "ref_from": {"path": "$.branch"},
            "sha_from": {"header": "x-commit"},
            "idempotency_key_from": {"path": "$.nr"},
            "allowed_events": ["built", "webhook"],
        });
        add(&stack, "s", config, Some(SECRET)).await;
        add(&stack, "plain", hmac(), Some(SECRET)).await;

        let body = json!({"nr": 7, "what": "done", "project": {"name": "o/r"}, "branch": "main"}).to_string();
        let call =
            || request(&stack, "s", body.as_str()).header("x-event-type", "built").header("x-commit", "a".repeat(40));
        let first = settled(&stack, answer(call()).await).await;
        assert_eq!(
            (first.event.as_str(), first.action.as_deref(), first.delivery_id.as_str()),
            ("built", Some("done"), "7")
        );
        assert_eq!((first.repo.as_deref(), first.git_ref.as_deref()), (Some("o/r"), Some("refs/heads/main")));
        assert_eq!(first.sha, Some("a".repeat(40)));
        let (status, again) = answer(call()).await;
        assert_eq!((status, &again["duplicate"]), (202, &json!(true)), "{again}");

        // What is not there is no such field, and the event has a name all the same.
        let bare = settled(&stack, answer(request(&stack, "s", "{\"nr\": 8}")).await).await;
        assert_eq!((bare.event.as_str(), bare.action, bare.repo, bare.git_ref), ("webhook", None, None, None));
        assert_ne!(bare.status, "failed");

        let other = request(&stack, "s", "{\"nr\": 9}").header("x-event-type", "deleted");
        let other = settled(&stack, answer(other).await).await;
        assert_eq!(other.status, "skipped");
        assert!(other.note.as_ref().unwrap().contains("allowed_events"), "{other:?}");

        // A signed body that does not read is stored, failed and not tried again.
        let broken = settled(&stack, answer(request(&stack, "plain", "{\"nr\"")).await).await;
        assert_eq!((broken.status.as_str(), broken.attempts), ("failed", 0));
        assert!(broken.error.is_some());

        // Without any id an equal call is the same delivery for a while.
        for expected in [false, true] {
            let (status, document) = answer(request(&stack, "plain", "{\"same\": 1}")).await;
            assert_eq!((status, &document["duplicate"]), (202, &json!(expected)));
        }
        let form = "nr=11&what=done";
        let form = stack
            .http
            .post(format!("http://{}/webhooks/default/s", stack.address))
            .header("x-hub-signature-256", sign(&SecretString::from(SECRET), form.as_bytes()))
            .header("content-type", "application/x-www-form-urlencoded")
            .body(form);
        let form = settled(&stack, answer(form).await).await;
        assert_eq!((form.delivery_id.as_str(), form.action.as_deref()), ("11", Some("done")));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_calls_more_often_than_it_may_is_told_when_to_come_back() {
    each(async |stack| {
        add(&stack, "s", json!({"verification": {"type": "hmac"}, "rate_limit_rpm": 3}), Some(SECRET)).await;
        add(&stack, "other", hmac(), Some(SECRET)).await;
        // Whoever cannot prove that he may call uses nothing up.
        for _ in 0..10 {
            let forged = stack.http.post(format!("http://{}/webhooks/default/s", stack.address)).body("{}");
            assert_eq!(answer(forged).await.0, 401);
        }
        for n in 0..3 {
            assert_eq!(answer(request(&stack, "s", format!("{{\"n\": {n}}}"))).await.0, 202, "{n}");
        }
        let refused = request(&stack, "s", "{\"n\": 3}").send().await.unwrap();
        assert_eq!(refused.status(), 429);
        let wait: u32 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=20).contains(&wait), "{wait}");
        let problem: Value = refused.json().await.unwrap();
        assert_eq!(problem["code"], "ingest.rate_limited", "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("rate_limit_rpm"), "{problem}");
        assert_eq!(answer(request(&stack, "other", "{}")).await.0, 202);
        assert_eq!(stored(&stack).await.len(), 4);
    })
    .await;
}

/// R7: what is kept of a body, over the API.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_outlive_their_processing_in_the_object_store_and_large_ones_do_not() {
    each(async |mut stack| {
        stack.orchestrator.take().unwrap().kill();
        stack.variables = vec![("KICI_EVENT_LOG_MAX_PAYLOAD_BYTES", "1000")];
        let address = stack.address.clone();
        stack.start_orchestrator(&address).await;
        add(&stack, "s", hmac(), Some(SECRET)).await;
        let (small, large) = ("{\"a\":  1}", format!("{{\"a\": \"{}\"}}", "x".repeat(1000)));
        let small = settled(&stack, answer(request(&stack, "s", small)).await).await;
        let large = settled(&stack, answer(request(&stack, "s", large)).await).await;
        // Background work begins with the process.
        stack.orchestrator.take().unwrap().kill();
        stack.start_orchestrator(&address).await;
        let left_out = until("the large body to go", async || {
            stack.client.delivery(large.id).await.ok().filter(|delivery| delivery.payload_omitted.is_some())
        })
        .await;
        assert_eq!(left_out.payload_omitted.as_deref(), Some("size_exceeded"));
        let gone = stack.client.delivery_payload(large.id).await.unwrap_err();
        assert_eq!(gone.problem().expect("a problem").status, 410, "{gone}");
        assert!(gone.to_string().contains("event_log.max_payload_bytes"), "{gone}");
        let objects = stack.data().join("objects/event-log/default");
        until("the small body to be moved", async || std::fs::read_dir(&objects).ok()?.next().map(drop)).await;
        until("the row to name it", async || {
            (stack.client.delivery_payload(small.id).await.unwrap() == "{\"a\":  1}").then_some(())
        })
        .await;
        // It is read from there when it is processed again.
        let again = stack.client.redeliver(small.id).await.unwrap();
        let again = until("the replay to be settled", async || {
            stack.client.delivery(again.delivery_id).await.ok().filter(|delivery| delivery.status != "received")
        })
        .await;
        assert_eq!((again.status, again.payload_sha256), (small.status, small.payload_sha256));
    })
    .await;
}
