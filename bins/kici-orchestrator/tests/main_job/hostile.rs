//! Input that is wrong, at every door of HTTP.

use kici_api::dto::events::DeliveryFilter;
use kici_api::dto::runs::RunFilter;
use kici_api::dto::sources::{AddSource, SourceKind};
use kici_api::dto::workflows::{ValidateWorkflows, WorkflowFile};
use kici_api::page::PageQuery;
use kici_engine::state::RunStatus;
use kici_forge::verify::sign;
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::stack::{Stack, answered, until};

/// One fault per level of a workflow file, and a word that its diagnostic must have.
const INVALID: &[(&str, &str, &str)] = &[
    ("not-yaml", "on: push\njobs: [a, {b: }\n", "YAML"),
    ("tab", "on: push\njobs:\n\ta: 1\n", "tab"),
    ("scalar", "just a text\n", "map"),
    ("list", "- on: push\n", "map"),
    ("empty", "", "empty"),
    ("top", "on: push\nbogus_top: 1\njobs: { a: { runs_on: default, run: 'true' } }\n", "bogus_top"),
    ("no-jobs", "on: push\n", "jobs"),
    ("event", "on: pish\njobs: { a: { runs_on: default, run: 'true' } }\n", "pish"),
    ("filter", "on: { push: { brunches: [a] } }\njobs: { a: { runs_on: default, run: 'true' } }\n", "brunches"),
    ("job", "on: push\njobs: { a: { runs_on: default, run: 'true', tmieout: 5m } }\n", "tmieout"),
    ("type", "on: push\njobs: { a: { runs_on: default, run: 'true', timeout: soon } }\n", "soon"),
    ("step", "on: push\njobs: { a: { runs_on: default, steps: [{ run: 'true', shel: sh }] } }\n", "shel"),
    ("no-run", "on: push\njobs: { a: { runs_on: default, steps: [{ name: x }] } }\n", "run"),
    ("need", "on: push\njobs: { a: { runs_on: default, run: 'true', needs: [nobody] } }\n", "nobody"),
    (
        "cycle",
        "on: push\ndefaults: { runs_on: default }\njobs: { a: { needs: b, run: 'true' }, b: { needs: a, run: 'true' } }\n",
        "cycle",
    ),
    ("self", "on: push\njobs: { a: { runs_on: default, needs: a, run: 'true' } }\n", "itself"),
    ("expression", "on: push\njobs: { a: { runs_on: default, if: 'event.(', run: 'true' } }\n", "if"),
    ("label", "on: push\njobs: { a: { runs_on: 'kici:host:x y', run: 'true' } }\n", "label"),
    ("twice", "on: push\njobs: { a: { runs_on: default, run: 'true' }, a: { runs_on: default, run: x } }\n", "twice"),
    ("later", "on: push\nregistries: [x]\njobs: { a: { runs_on: default, run: 'true' } }\n", "not supported yet"),
];

const GOOD: &str = "on: push\njobs: { good: { runs_on: default, checkout: false, run: echo good } }\n";

#[tokio::test]
async fn invalid_workflow_files_are_named_in_the_note_and_the_others_run() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let names: Vec<String> = INVALID.iter().map(|(name, ..)| format!(".kici/workflows/{name}.yaml")).collect();
    let mut files: Vec<(&str, &str)> = names.iter().map(String::as_str).zip(INVALID.iter().map(|f| f.1)).collect();
    let repository = stack.repository("bad", &files).await;
    let delivery = stack.deliver(&repository, "bad").await;
    assert_eq!((delivery.status.as_str(), delivery.matched_count), ("workflow_invalid", 0), "{delivery:?}");
    let note = delivery.note.unwrap();
    for name in &names {
        assert!(note.contains(&format!("{name} is invalid: ")), "{name} is not in: {note}");
    }

    files.push((".kici/workflows/good.yaml", GOOD));
    let repository = stack.repository("mixed", &files).await;
    let delivery = stack.deliver(&repository, "mixed").await;
    assert_eq!((delivery.status.as_str(), delivery.matched_count), ("processed", 1), "{delivery:?}");
    assert!(delivery.note.unwrap().contains("cycle.yaml is invalid"));
    assert_eq!(stack.ended(delivery.first_run_id.unwrap()).await.run.status, RunStatus::Success);
}

#[tokio::test]
async fn validation_over_rest_finds_the_fault_of_every_file_and_where_it_stands() {
    let stack = Stack::start(None).await;
    let mut wrong = Vec::new();
    for (name, content, word) in INVALID {
        let path = format!(".kici/workflows/{name}.yaml");
        let file = WorkflowFile { path: path.clone(), content: (*content).to_owned() };
        let report = stack.client.validate_workflows(&ValidateWorkflows { files: vec![file] }).await.unwrap();
        let text = serde_json::to_string(&report.diagnostics).unwrap();
        let placed = report.diagnostics.iter().all(|one| one["file"] == path.as_str());
        if report.valid || !placed || !text.contains(word) {
            wrong.push(format!("{name}: {word} is not in {text}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Calls with a good token; the answer must be a problem document.
async fn refused(stack: &Stack, method: &str, path: &str, body: Option<&str>) -> (u16, Value) {
    let token = std::fs::read_to_string(stack.data().join("bootstrap-token")).unwrap();
    let url = format!("http://{}{path}", stack.address);
    let mut request = stack.http.request(method.parse().unwrap(), url).bearer_auth(token.trim());
    if let Some(body) = body {
        request = request.header("content-type", "application/json").body(body.to_owned());
    }
    let answer = answered(request).await;
    let status = answer.status().as_u16();
    assert_eq!(answer.headers()["content-type"], "application/problem+json", "{method} {path} {body:?}: {status}");
    (status, answer.json().await.unwrap())
}

#[tokio::test]
async fn bad_requests_get_a_client_error_that_names_the_field() {
    let stack = Stack::start(None).await;
    let unknown = "run_0fffffff-0000-7000-8000-000000000001";
    let source = "/api/v1/admin/sources";
    let long = "x".repeat(300);
    let long_name = format!(r#"{{"name": "{long}", "kind": "local", "config": {{"path": "/x"}}}}"#);
    let cases: &[(&str, &str, Option<&str>, u16, &str)] = &[
        ("GET", "/api/v1/runs/run_xyz", None, 404, "run_xyz"),
        ("GET", "/api/v1/runs/job_01900000000070008000000000000001", None, 404, "job_"),
        ("GET", &format!("/api/v1/runs/{unknown}"), None, 404, unknown),
        ("POST", &format!("/api/v1/runs/{unknown}/cancel"), Some("{}"), 404, unknown),
        ("GET", "/api/v1/runs?cursor=bm9uc2Vuc2U", None, 400, "cursor"),
        ("GET", "/api/v1/runs?cursor=%00%ff", None, 400, ""),
        ("GET", "/api/v1/runs?limit=0", None, 400, "limit"),
        ("GET", "/api/v1/runs?limit=many", None, 400, "limit"),
        ("GET", "/api/v1/runs?limit=-1", None, 400, "limit"),
        ("GET", "/api/v1/runs?status=happy", None, 400, "happy"),
        ("GET", "/api/v1/runs?colour=red", None, 400, "colour"),
        ("GET", "/api/v1/runs?delivery=1", None, 400, "delivery"),
        ("GET", "/api/v1/admin/event-log?from=yesterday", None, 400, "from"),
        ("GET", "/api/v1/admin/queue?status=bogus", None, 400, "status"),
        ("POST", "/api/v1/runs", Some(r#"{"source": "a", "workflow": "b", "sauce": 1}"#), 400, "sauce"),
        ("POST", "/api/v1/runs", Some(r#"{"source": 1, "workflow": "b"}"#), 400, "source"),
        ("POST", "/api/v1/runs", Some(r#"{"source": "a"}"#), 400, "workflow"),
        ("POST", "/api/v1/runs", Some("[]"), 400, ""),
        ("POST", "/api/v1/runs", Some("{"), 400, "JSON"),
        ("POST", "/api/v1/runs", Some(r#"{"source": "a", "workflow": "b"} {}"#), 400, "one JSON document"),
        ("POST", "/api/v1/runs", Some(r#"{"source": "nobody", "workflow": "b"}"#), 422, "nobody"),
        ("POST", source, Some(r#"{"name": "a b", "kind": "local", "config": {"path": "/x"}}"#), 422, "name"),
        ("POST", source, Some(r#"{"name": "github", "kind": "svn", "config": {}}"#), 400, "kind"),
        ("POST", source, Some(r#"{"name": "a", "kind": "local", "config": {}}"#), 422, "path"),
        ("POST", source, Some(r#"{"name": "a", "kind": "local", "config": {"path": "/etc"}}"#), 422, "local_paths"),
        ("POST", source, Some(r#"{"name": "a", "kind": "local", "config": {"path": 7}}"#), 422, "path"),
        ("POST", source, Some(r#"{"name": "a", "kind": "github", "config": {"app_id": "x"}}"#), 422, "expected u64"),
        ("POST", source, Some(&long_name), 422, "name"),
        ("GET", "/api/v1/admin/sources/nobody", None, 404, "nobody"),
        ("POST", "/api/v1/admin/tokens", Some(r#"{"label": "", "role": "owner"}"#), 422, "label"),
        ("POST", "/api/v1/admin/tokens", Some(r#"{"label": "x", "role": "king"}"#), 400, "role"),
        (
            "POST",
            "/api/v1/admin/tokens",
            Some(r#"{"label": "x", "role": "auditor", "routing_key": "local:nobody"}"#),
            422,
            "routing_key",
        ),
        ("POST", "/api/v1/admin/agent-tokens", Some(r#"{"labels": ["kici:host:x"]}"#), 422, "labels[0]"),
        ("POST", "/api/v1/admin/agent-tokens", Some(r#"{"labels": ["a b"]}"#), 422, "labels[0]"),
        ("POST", "/api/v1/admin/agent-tokens", Some(r#"{"expires_in_s": -1}"#), 400, "expires_in_s"),
        ("DELETE", "/api/v1/admin/tokens/tok_1", None, 404, "tok_1"),
        ("POST", "/api/v1/admin/agents/nobody/drain", Some(r#"{"drain": true}"#), 404, "nobody"),
        ("PUT", "/api/v1/runs", Some("{}"), 405, ""),
        ("GET", "/api/v2/runs", None, 404, ""),
    ];
    let mut wrong = Vec::new();
    for (method, path, body, status, word) in cases {
        let (got, problem) = refused(&stack, method, path, *body).await;
        if got != *status || !problem.to_string().contains(word) {
            wrong.push(format!("{method} {path} {body:?}: not {status} with {word}: {problem}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let body = format!(r#"{{"source": "{}", "workflow": "x"}}"#, "x".repeat(12 << 20));
    assert_eq!(refused(&stack, "POST", "/api/v1/runs", Some(&body)).await.0, 413);
}

#[tokio::test]
async fn a_job_that_nobody_can_take_says_so_within_seconds() {
    const NOWHERE: &str = "on: push\njobs: { gpu: { runs_on: [gpu, huge], run: 'true' } }\n";
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let repository = stack.repository("app", &[(".kici/workflows/w.yaml", NOWHERE)]).await;
    let run = stack.push_one(&repository, "app").await;
    let said = until("the reason", async || stack.client.run(run).await.ok()?.jobs[0].routing_reason.clone());
    let reason = tokio::time::timeout(std::time::Duration::from_secs(5), said).await.expect("within 5 s");
    assert!(reason.contains("gpu") || reason.contains("huge"), "{reason}");
}

#[tokio::test]
async fn a_pull_request_from_a_fork_is_ignored_with_a_note() {
    const SECRET: &str = "a secret for tests";
    let stack = Stack::start(None).await;
    let secrets = [("webhook_secret".to_owned(), kici_api::dto::SecretText::new(SECRET))].into();
    let config = json!({"app_id": 7});
    let request = AddSource { name: "gh".into(), kind: SourceKind::Github, config, secrets };
    stack.client.add_source(&request).await.unwrap();
    let real = include_str!("../../../../crates/forge/tests/data/github/pull_request.opened.0.json");
    let mut fork: Value = serde_json::from_str(real).unwrap();
    fork["pull_request"]["head"]["repo"]["id"] = json!(1);
    let mut gone = fork.clone();
    gone["pull_request"]["head"]["repo"] = Value::Null;
    for (id, payload, word) in [("fork", fork, "comes from a fork"), ("gone", gone, "does not say")] {
        let body = payload.to_string();
        let sent = stack
            .http
            .post(format!("http://{}/webhooks/github/7", stack.address))
            .header("x-github-event", "pull_request")
            .header("x-github-delivery", id)
            .header("x-hub-signature-256", sign(&SecretString::from(SECRET), body.as_bytes()))
            .header("content-type", "application/json")
            .body(body)
            .send()
            .await
            .unwrap();
        assert_eq!(sent.status(), 202);
        let filter = DeliveryFilter { delivery_id: Some(id.to_owned()), ..DeliveryFilter::default() };
        let delivery = until("the delivery to be settled", async || {
            let listed = stack.client.deliveries(&filter, &PageQuery::default()).await.ok()?;
            listed.items.into_iter().find(|delivery| delivery.status != "received")
        })
        .await;
        assert_eq!(delivery.status, "skipped", "{delivery:?}");
        assert!(delivery.note.as_ref().unwrap().contains(word), "{delivery:?}");
    }
    assert!(stack.client.runs(&RunFilter::default(), &PageQuery::default()).await.unwrap().items.is_empty());
}
