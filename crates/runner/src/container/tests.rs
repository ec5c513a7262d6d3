//! Against an engine that does not do at once what it is told.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{delete, get};
use serde_json::{Value as Json, json};

use super::*;

/// What the engine has, and how often it still refuses to remove something.
#[derive(Default)]
struct Fake {
    has: BTreeMap<String, Vec<&'static str>>,
    refusals: u32,
    /// Of everything that it has.
    labels: Labels,
}

type Shared = Arc<Mutex<Fake>>;

async fn removed(State(fake): State<Shared>, Path((kind, name)): Path<(String, String)>) -> (StatusCode, String) {
    let mut fake = fake.lock().expect("lock");
    if fake.refusals > 0 {
        fake.refusals -= 1;
        return (StatusCode::CONFLICT, json!({"message": format!("{name} is in use")}).to_string());
    }
    // As engines do, not before what uses it.
    if kind != "containers" && !fake.has["containers"].is_empty() {
        return (StatusCode::CONFLICT, json!({"message": "has active endpoints"}).to_string());
    }
    fake.has.get_mut(&kind).expect("a kind").retain(|known| *known != name);
    (StatusCode::NO_CONTENT, String::new())
}

async fn listed(State(fake): State<Shared>, Path(kind): Path<String>) -> String {
    let fake = fake.lock().expect("lock");
    let things = |names: &[&str], key: &str| -> Vec<Json> {
        names.iter().map(|name| json!({key: name, "Labels": fake.labels})).collect()
    };
    match fake.has.get(&kind) {
        Some(names) if kind == "volumes" => json!({"Volumes": things(names, "Name")}).to_string(),
        Some(names) => json!(things(names, "Id")).to_string(),
        None => match kind.as_str() {
            "version" => json!({"Version": "20.10", "ApiVersion": "1.41", "Components": []}).to_string(),
            _ => json!({"SecurityOptions": []}).to_string(),
        },
    }
}

async fn start(dir: &std::path::Path, fake: Shared) -> Containers {
    let socket = dir.join("docker.sock");
    let listener = tokio::net::UnixListener::bind(&socket).expect("bound");
    let list = get(listed);
    let app = Router::new()
        .route("/{kind}", list.clone())
        .route("/v1.41/{kind}", list.clone())
        .route("/v1.41/containers/json", get(|state: State<Shared>| listed(state, Path("containers".to_owned()))))
        .route("/v1.41/{kind}/{name}", delete(removed))
        .with_state(fake);
    let tasks = tokio_util::task::TaskTracker::new();
    tasks.spawn(async move { axum::serve(listener, app).await });
    let env = [
        ("KICI_ORCHESTRATOR_URL", "http://a".to_owned()),
        ("KICI_STATE_DIR", dir.display().to_string()),
        ("KICI_CONTAINER_SOCKET", socket.display().to_string()),
    ];
    let env = env.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let sources = crate::config::Sources { env, ..crate::config::Sources::default() };
    Containers::new(&Config::load(&sources).expect("right"))
}

fn fake(refusals: u32) -> Shared {
    let has = [("containers", vec!["c1", "c2"]), ("networks", vec!["n"]), ("volumes", vec!["v"])];
    let has = has.into_iter().map(|(kind, names)| (kind.to_owned(), names)).collect();
    Arc::new(Mutex::new(Fake { has, refusals, labels: Labels::new() }))
}

fn left(fake: &Shared) -> Json {
    json!(fake.lock().expect("lock").has)
}

#[tokio::test]
async fn complaint_17_what_an_engine_refuses_to_remove_is_tried_until_nothing_is_left() {
    let nothing = json!({"containers": [], "networks": [], "volumes": []});
    let dir = tempfile::tempdir().expect("a directory");
    let fake = fake(2);
    let containers = start(dir.path(), Arc::clone(&fake)).await;
    fake.lock().expect("lock").labels = containers.of_job(JobKey::for_test(1, 1));
    containers.clean(JobKey::for_test(1, 1)).await;
    assert_eq!(left(&fake), nothing);
}

#[tokio::test]
async fn complaint_17_an_agent_that_starts_removes_what_an_earlier_one_left() {
    let dir = tempfile::tempdir().expect("a directory");
    let fake = fake(0);
    let containers = start(dir.path(), Arc::clone(&fake)).await;
    // Of another agent on the same engine: not ours to remove.
    let of_other = containers.of_agent().into_iter().map(|(name, value)| (name, value + "x")).collect();
    fake.lock().expect("lock").labels = of_other;
    containers.sweep().await;
    assert_eq!(left(&fake)["containers"], json!(["c1", "c2"]));
    fake.lock().expect("lock").labels = containers.of_job(JobKey::for_test(1, 1));
    containers.sweep().await;
    assert_eq!(left(&fake), json!({"containers": [], "networks": [], "volumes": []}));
    // Nothing to do, and nothing to wait for, where there is no engine.
    std::fs::remove_file(dir.path().join("docker.sock")).expect("removed");
    containers.sweep().await;
}
