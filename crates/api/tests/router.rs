//! The router over ports in memory: statuses, problem documents, permissions, limits.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kici_access::{Outcome, Permission, Role, Token, TokenKind};
use kici_api::dto::bus::EventTrustView;
use kici_api::problem::Problem;
use kici_api::server::table;
use kici_api::testing::{Fake, NOW};
use secrecy::ExposeSecret;
use serde_json::{Value as Json, json};
use tower::ServiceExt;

struct Answer {
    status: StatusCode,
    headers: http::HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn problem(&self) -> Problem {
        assert_eq!(self.headers["content-type"], "application/problem+json");
        let problem: Problem = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(problem.status, self.status.as_u16());
        assert_eq!(self.headers["x-request-id"], problem.request_id.as_str());
        problem
    }
}

async fn send(fake: &Arc<Fake>, request: Request<Body>) -> Answer {
    let response: Response<Body> = fake.router().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    Answer { status: parts.status, headers: parts.headers, body }
}

async fn call(fake: &Arc<Fake>, token: Option<&str>, method: Method, path: &str, body: Option<Json>) -> Answer {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let body = match body {
        Some(json) => {
            request = request.header("content-type", "application/json");
            Body::from(json.to_string())
        }
        None => Body::empty(),
    };
    send(fake, request.body(body).unwrap()).await
}

fn url(path: &str, run: &str, job: &str, delivery: &str) -> String {
    let path = match path {
        p if p.contains("/runs/") => p.replace("{id}", run),
        p if p.contains("/queue/") => p.replace("{id}", job),
        p if p.contains("/event-trust/") || p.contains("/events/") || p.contains("/registrations/") => {
            p.replace("{id}", BUS_ID)
        }
        p if p.contains("/schedules/") => p.replace("{registration}", BUS_ID),
        p if p.contains("/event-") => p.replace("{id}", delivery),
        p if p.contains("/hosts/") => p.replace("{id}", "host-1"),
        p if p.contains("/agents/") => p.replace("{id}", "agent-1"),
        p => p.replace("{id}", "tok_01900000-0000-7000-8000-000000000001"),
    };
    let path = path.replace("{job}", job).replace("{step}", "0").replace("{name}", "demo");
    match path {
        p if p.ends_with("/stream") => format!("{p}?topics=runs"),
        p if p.ends_with("/admin/caches") => format!("{p}?all=true"),
        p => p,
    }
}

/// What stands on the bus of [`world`]: an event, a registration and a statement of trust with one id.
const BUS_ID: &str = "01900000-0000-7000-8000-0000000000ff";

fn place(source: &str) -> Json {
    json!({ "source": source, "repo": "acme/app" })
}

fn body_for(method: &Method, path: &str) -> Option<Json> {
    Some(match (method.as_str(), path) {
        ("POST", "/api/v1/runs") => json!({ "source": "demo", "workflow": "ci" }),
        ("POST", "/api/v1/workflows/validate") => json!({ "files": [] }),
        ("POST", "/api/v1/admin/sources") => json!({ "name": "new", "kind": "local", "config": { "path": "/x" } }),
        ("PUT", "/api/v1/admin/sources/{name}/secrets") => json!({ "secrets": { "webhook_secret": "new-secret" } }),
        ("POST", "/api/v1/admin/tokens") => json!({ "label": "x", "role": "auditor" }),
        ("POST", "/api/v1/admin/agents/{id}/drain" | "/api/v1/admin/drain") => json!({ "drain": true }),
        ("PUT", "/api/v1/admin/hosts/{id}") => json!({ "labels": ["role:web"] }),
        ("POST", "/api/v1/admin/hosts/preview") => json!({ "selector": "role:web" }),
        ("POST", "/api/v1/admin/events/emit") => json!({ "name": "ping" }),
        ("POST", "/api/v1/admin/schedules/{registration}/trigger") => json!({}),
        ("PATCH", "/api/v1/admin/registrations/{id}") => json!({ "enabled": false }),
        ("POST", "/api/v1/admin/event-trust") => json!({ "source": place("a"), "target": place("b") }),
        ("POST", "/api/v1/admin/event-trust/test") => {
            json!({ "source": place("a"), "target": place("b"), "event": "ping" })
        }
        ("DELETE", "/api/v1/admin/event-dlq/{id}") => json!({ "reason": "x" }),
        _ => return None,
    })
}

fn world() -> (Arc<Fake>, String, String, String) {
    let fake = Fake::new();
    fake.add_source("demo");
    fake.add_agent("agent-1");
    fake.add_host("host-1");
    let (run, job) = fake.add_run("demo");
    fake.add_step(job, "step-main-0");
    let delivery = fake.add_delivery("demo", "dead");
    fake.add_event("ping", "processed");
    fake.add_registration("nightly");
    let mut world = fake.world();
    world.events[0].id = BUS_ID.parse().unwrap();
    world.registrations[0].id = BUS_ID.parse().unwrap();
    let (source, target) = (serde_json::from_value(place("a")).unwrap(), serde_json::from_value(place("b")).unwrap());
    world.trust.push(EventTrustView {
        id: BUS_ID.parse().unwrap(),
        source,
        target,
        events: None,
        created_by: "user:alice".to_owned(),
        created_at: NOW,
    });
    let artifact = json!({
        "id": format!("art_{BUS_ID}"), "name": "demo", "job_id": job, "job": "build", "size": 4,
        "sha256": "0".repeat(64), "created_at": NOW, "expires_at": null,
    });
    world.artifacts.push((serde_json::from_value(artifact).unwrap(), b"made".to_vec()));
    drop(world);
    (fake, run.to_string(), job.to_string(), delivery.to_string())
}

#[tokio::test]
async fn every_route_asks_for_its_token_and_its_permission() {
    for role in [Role::Owner, Role::Admin, Role::Auditor] {
        for route in table() {
            let Some((permission, _)) = route.access else { continue };
            let (fake, run, job, delivery) = world();
            let path = url(route.path, &run, &job, &delivery);
            let body = body_for(&route.method, route.path);

            let anonymous = call(&fake, None, route.method.clone(), &path, body.clone()).await;
            assert_eq!(anonymous.status, 401, "{path}");
            assert_eq!(anonymous.headers["www-authenticate"], "Bearer");
            assert!(anonymous.problem().code == "auth.missing");

            let token = fake.token(role, None);
            let request = Request::builder().method(route.method.clone()).uri(&path);
            let request =
                request.header("authorization", format!("Bearer {token}")).header("content-type", "application/json");
            let body = Body::from(body.map(|json| json.to_string()).unwrap_or_default());
            // Streams do not end by themselves: only the head of the answer counts here.
            let status = fake.router().oneshot(request.body(body).unwrap()).await.unwrap().status();
            if role.has(permission) {
                // A rerun of a run that is going is a conflict, which is past the permission.
                assert!(status.is_success() || status == 409, "{role} {} {path}: {status}", route.method);
            } else {
                assert_eq!(status, 403, "{role} {} {path}", route.method);
                let refused = &fake.world().access[0];
                assert_eq!(refused.outcome, Outcome::Denied);
                assert!(refused.error_message.as_ref().unwrap().contains(permission.as_str()));
            }
        }
    }
}

#[tokio::test]
async fn a_refusal_names_the_permission() {
    let (fake, run, ..) = world();
    let token = fake.token(Role::Auditor, None);
    let answer = call(&fake, Some(&token), Method::POST, &format!("/api/v1/runs/{run}/cancel"), None).await;
    let problem = answer.problem();
    assert_eq!(problem.detail, "`run.cancel` is needed and the role `auditor` does not have it");
    assert_eq!(problem.code, "auth.forbidden");
}

#[tokio::test]
async fn open_paths_need_no_token_even_when_the_database_is_away() {
    let (fake, ..) = world();
    fake.world().outage = Some(Problem::unavailable("the database does not answer", 1));
    for (path, status) in [
        ("/", 200),
        ("/health", 200),
        ("/ready", 503),
        ("/metrics", 200),
        ("/api/v1/capabilities", 200),
        ("/api/v1/openapi.json", 200),
    ] {
        let answer = call(&fake, None, Method::GET, path, None).await;
        assert_eq!(answer.status, status, "{path}");
        assert!(answer.headers.contains_key("x-request-id"));
    }
}

#[tokio::test]
async fn a_token_that_cannot_be_looked_up_is_503_and_never_401() {
    let (fake, ..) = world();
    let token = fake.token(Role::Owner, None);
    fake.world().outage = Some(Problem::unavailable("the database does not answer", 1));
    let answer = call(&fake, Some(&token), Method::GET, "/api/v1/runs", None).await;
    assert_eq!((answer.status.as_u16(), answer.problem().code.as_ref()), (503, "auth.unavailable"));
    fake.world().outage = None;
    assert_eq!(call(&fake, Some(&token), Method::GET, "/api/v1/runs", None).await.status, 200);
}

#[tokio::test]
async fn mistyped_foreign_and_unknown_tokens_are_told_apart() {
    let (fake, ..) = world();
    let mut mistyped = fake.token(Role::Owner, None);
    mistyped.pop();
    let fill = |bytes: &mut [u8]| {
        bytes.fill(7);
        Ok::<_, std::convert::Infallible>(())
    };
    let made = |kind| Token::generate(kind, fill).unwrap().secret().expose_secret().to_owned();
    for (token, part) in [
        (mistyped, "mistyped"),
        ("hunter2".to_owned(), "not a token"),
        (made(TokenKind::Agent), "an agent's token"),
        (made(TokenKind::Admin), "unknown"),
    ] {
        let answer = call(&fake, Some(&token), Method::GET, "/api/v1/runs", None).await;
        let problem = answer.problem();
        assert_eq!((answer.status.as_u16(), problem.code.as_ref()), (401, "auth.invalid"));
        assert!(problem.detail.contains(part) && !problem.detail.contains(&token), "{}", problem.detail);
    }
}

#[tokio::test]
async fn five_bad_tokens_from_one_address_are_enough() {
    let (fake, ..) = world();
    let good = fake.token(Role::Owner, None);
    let router = fake.router();
    let ask = |token: String, address: [u8; 4]| {
        let mut request = Request::builder().uri("/api/v1/runs").header("authorization", format!("Bearer {token}"));
        request.extensions_mut().unwrap().insert(ConnectInfo(SocketAddr::from((address, 9))));
        router.clone().oneshot(request.body(Body::empty()).unwrap())
    };
    for _ in 0..5 {
        assert_eq!(ask("bad".into(), [192, 0, 2, 1]).await.unwrap().status(), 401);
    }
    let refused = ask("bad".into(), [192, 0, 2, 1]).await.unwrap();
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(ask("bad".into(), [192, 0, 2, 2]).await.unwrap().status(), 401);
    assert_eq!(ask(good, [192, 0, 2, 1]).await.unwrap().status(), 200, "a good token is never held up");
}

#[tokio::test]
async fn bad_bodies_name_the_field() {
    let (fake, run, ..) = world();
    let token = fake.token(Role::Owner, None);
    let post = |path: &str, body: &str| {
        let request = Request::post(path).header("authorization", format!("Bearer {token}"));
        let request = request.header("content-type", "application/json").body(Body::from(body.to_owned())).unwrap();
        let fake = fake.clone();
        async move { send(&fake, request).await.problem() }
    };
    let cancel = format!("/api/v1/runs/{run}/cancel");
    for (path, body, code, field) in [
        (cancel.as_str(), r#"{"forse": true}"#, "request.invalid", Some("forse")),
        (cancel.as_str(), r#"{"force": "yes"}"#, "request.invalid", Some("force")),
        ("/api/v1/runs", r#"{"source": "demo"}"#, "request.invalid", Some("workflow")),
        (
            "/api/v1/workflows/validate",
            r#"{"files": [{"path": "x", "text": ""}]}"#,
            "request.invalid",
            Some("files[0].text"),
        ),
        ("/api/v1/admin/tokens", r#"{"label": "x", "role": "root"}"#, "request.invalid", Some("role")),
        ("/api/v1/admin/tokens", r#"{"label": "", "role": "admin"}"#, "input.rejected", Some("label")),
        (cancel.as_str(), "{", "request.invalid", None),
        (cancel.as_str(), "{} {}", "request.invalid", None),
    ] {
        let problem = post(path, body).await;
        assert_eq!(problem.code, code, "{body}: {problem:?}");
        assert_eq!(problem.errors.first().map(|e| e.field.as_str()), field, "{body}: {problem:?}");
    }
    let unknown = post(&cancel, r#"{"forse": true}"#).await;
    assert_eq!(unknown.detail, "forse: unknown field `forse`, expected `force` at line 1 column 8");
}

#[tokio::test]
async fn bodies_have_a_limit_and_a_type() {
    let (fake, run, ..) = world();
    let token = fake.token(Role::Owner, None);
    let path = format!("/api/v1/runs/{run}/cancel");
    let request = |content_type: &str, body: Body| {
        let request = Request::post(&path).header("authorization", format!("Bearer {token}"));
        request.header("content-type", content_type).body(body).unwrap()
    };
    let large = || vec![b' '; 1024 * 1024 + 1];
    let streamed = Body::from_stream(futures::stream::iter([Ok::<_, std::io::Error>(large())]));
    for body in [Body::from(large()), streamed] {
        let answer = send(&fake, request("application/json", body)).await;
        assert_eq!((answer.status.as_u16(), answer.problem().code.as_ref()), (413, "request.too_large"));
    }
    let answer = send(&fake, request("text/plain", Body::from("{}"))).await;
    assert_eq!((answer.status.as_u16(), answer.problem().code.as_ref()), (415, "request.media_type"));
}

#[tokio::test]
async fn unknown_paths_methods_and_ids_are_problems() {
    let (fake, ..) = world();
    let token = fake.token(Role::Owner, None);
    for (method, path, status) in [
        (Method::GET, "/nothing", 404),
        (Method::GET, "/api/v1/nothing", 404),
        (Method::PUT, "/api/v1/runs", 405),
        (Method::GET, "/api/v1/runs/job_x", 404),
        (Method::GET, "/api/v1/runs/run_01900000-0000-7000-8000-00000000ffff", 404),
        (Method::GET, "/api/v1/admin/sources/none", 404),
        (Method::GET, "/api/v1/runs?limit=0", 400),
        (Method::GET, "/api/v1/runs?statis=failed", 400),
        (Method::GET, "/api/v1/runs?status=broken", 400),
        (Method::GET, "/api/v1/runs?since=yesterday", 400),
        (Method::GET, "/api/v1/runs?cursor=x", 400),
        (Method::GET, "/api/v1/stream", 400),
        (Method::GET, "/api/v1/stream?topics=holds", 400),
    ] {
        let answer = call(&fake, Some(&token), method.clone(), path, None).await;
        assert_eq!(answer.problem().status, status, "{method} {path}");
    }
    let problem = call(&fake, Some(&token), Method::GET, "/api/v1/runs?statis=failed", None).await.problem();
    assert_eq!(problem.errors[0].field, "statis", "{problem:?}");
}

#[tokio::test]
async fn pages_follow_each_other_under_the_same_filters() {
    let (fake, ..) = world();
    let token = fake.token(Role::Auditor, None);
    (0..4).for_each(|_| _ = fake.add_run("demo"));
    let mut seen = Vec::new();
    let mut next = Some(String::new());
    while let Some(cursor) = next {
        let path = format!("/api/v1/runs?status=running&limit=2{cursor}");
        let page = call(&fake, Some(&token), Method::GET, &path, None).await.json();
        seen.extend(page["items"].as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap().to_owned()));
        next = page["next_cursor"].as_str().map(|cursor| format!("&cursor={cursor}"));
        if let Some(cursor) = &next {
            let other = format!("/api/v1/runs?status=failed{cursor}");
            assert_eq!(call(&fake, Some(&token), Method::GET, &other, None).await.problem().code, "cursor.invalid");
        }
    }
    let mut unique = seen.clone();
    unique.dedup();
    assert_eq!((seen.len(), unique.len()), (5, 5));
}

#[tokio::test]
async fn a_token_of_one_source_sees_nothing_else() {
    let (fake, run, ..) = world();
    fake.add_source("other");
    let (foreign, _) = fake.add_run("other");
    let token = fake.token(Role::Owner, Some("local:demo"));
    let get = |path: String| call_owned(fake.clone(), token.clone(), path);
    let runs = get("/api/v1/runs".into()).await.json();
    assert_eq!(runs["items"].as_array().unwrap().len(), 1);
    assert_eq!(get(format!("/api/v1/runs/{run}")).await.status, 200);
    assert_eq!(get(format!("/api/v1/runs/{foreign}")).await.status, 404, "no hint that it exists");
    assert_eq!(get(format!("/api/v1/stream?topics=run:{foreign}")).await.status, 404);
    assert_eq!(get("/api/v1/admin/tokens".into()).await.status, 403);
    assert_eq!(get("/api/v1/stream?topics=agents".into()).await.status, 403);
}

async fn call_owned(fake: Arc<Fake>, token: String, path: String) -> Answer {
    call(&fake, Some(&token), Method::GET, &path, None).await
}

#[tokio::test]
async fn a_panic_is_answered_and_the_process_lives() {
    let (fake, ..) = world();
    let token = fake.token(Role::Owner, None);
    fake.world().panic = true;
    let answer = call(&fake, Some(&token), Method::GET, "/api/v1/runs", None).await;
    let problem = answer.problem();
    assert_eq!((problem.status, problem.code.as_ref()), (500, "internal"));
    assert!(!problem.detail.contains("panics"), "the cause is for the log");
    fake.world().panic = false;
    assert_eq!(call(&fake, Some(&token), Method::GET, "/api/v1/runs", None).await.status, 200);
}

#[tokio::test]
async fn a_request_keeps_its_id() {
    let (fake, ..) = world();
    let request = |id: &str| Request::get("/health").header("x-request-id", id).body(Body::empty()).unwrap();
    assert_eq!(send(&fake, request("trace-7.a")).await.headers["x-request-id"], "trace-7.a");
    let made = send(&fake, request("not an id")).await.headers["x-request-id"].to_str().unwrap().to_owned();
    assert!(made.starts_with("req_"), "{made}");
}

#[tokio::test]
async fn a_trigger_with_the_same_key_gives_the_same_run() {
    let (fake, ..) = world();
    let token = fake.token(Role::Admin, None);
    let trigger = |key: &str| {
        let request = Request::post("/api/v1/runs").header("authorization", format!("Bearer {token}"));
        let request = request.header("content-type", "application/json").header("idempotency-key", key);
        let body = json!({ "source": "demo", "workflow": "ci", "inputs": { "level": 3 } }).to_string();
        request.body(Body::from(body)).unwrap()
    };
    let first = send(&fake, trigger("k1")).await;
    assert_eq!(first.status, 202);
    let second = send(&fake, trigger("k1")).await.json();
    assert_eq!((&second["run_id"], &second["existing"]), (&first.json()["run_id"], &json!(true)));
    assert_ne!(send(&fake, trigger("k2")).await.json()["run_id"], second["run_id"]);
    assert_eq!(send(&fake, trigger("a b")).await.status, 400);
}

#[tokio::test]
async fn log_ranges_come_as_json_and_as_text() {
    let (fake, run, job, _) = world();
    let id = job.parse().unwrap();
    fake.add_lines(id, "step-main-0", &["one", "two", "three"]);
    let token = fake.token(Role::Auditor, None);
    let path = format!("/api/v1/runs/{run}/jobs/build/steps/0/logs?from_seq=1&limit=1");
    let answer = call(&fake, Some(&token), Method::GET, &path, None).await;
    assert_eq!(answer.headers["x-next-seq"], "2");
    assert_eq!(answer.headers["x-log-complete"], "false");
    assert_eq!(answer.json()["lines"][0]["text"], "two");
    let path = format!("/api/v1/runs/{run}/jobs/{job}/steps/step-main-0/logs?format=text");
    assert_eq!(call(&fake, Some(&token), Method::GET, &path, None).await.body, b"one\ntwo\nthree\n");
}

#[tokio::test]
async fn payloads_are_never_run_by_a_browser() {
    let (fake, _, _, delivery) = world();
    let token = fake.token(Role::Admin, None);
    let answer =
        call(&fake, Some(&token), Method::GET, &format!("/api/v1/admin/event-log/{delivery}/payload"), None).await;
    assert_eq!(answer.body, b"{}");
    assert_eq!(answer.headers["x-content-type-options"], "nosniff");
    assert_eq!(answer.headers["content-disposition"], "attachment");
}

#[tokio::test]
async fn changes_are_in_the_access_log_with_their_target() {
    let (fake, run, ..) = world();
    let token = fake.token(Role::Admin, None);
    call(&fake, Some(&token), Method::POST, &format!("/api/v1/runs/{run}/cancel"), None).await;
    call(&fake, Some(&token), Method::POST, &format!("/api/v1/runs/{run}/cancel"), None).await;
    let world = fake.world();
    let outcomes: Vec<_> = world.access.iter().map(|e| (e.action.as_str(), e.outcome)).collect();
    assert_eq!(outcomes, [("run.cancel", Outcome::Allowed), ("run.cancel", Outcome::Error)]);
    assert_eq!(world.access[0].target.as_ref().unwrap().1, run);
    assert_eq!(world.access[1].error_message.as_deref(), Some(format!("{run} has ended").as_str()));
}

#[test]
fn the_table_covers_the_permissions_of_its_resources() {
    let mut seen: Vec<&str> = table().iter().filter_map(|route| Some(route.access?.0.as_str())).collect();
    seen.sort_unstable();
    seen.dedup();
    for permission in [Permission::RunRead, Permission::TokenManage, Permission::OrchestratorDrain] {
        assert!(seen.contains(&permission.as_str()));
    }
}
