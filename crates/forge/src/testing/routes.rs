//! The routes of the fake.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{FakeRepo, FakeState, PUBLIC_KEY, Shared};

type Fake = State<Arc<Shared>>;
type Answer = Result<Response, Refusal>;

/// A status with GitHub's form of a message.
struct Refusal(u16, &'static str);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(json!({"message": self.1}))).into_response()
    }
}

const NOT_FOUND: Refusal = Refusal(404, "Not Found");

pub(super) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/repos/{owner}/{name}/installation", get(installation))
        .route("/app/installations/{id}", get(installed))
        .route("/app/installations/{id}/access_tokens", post(mint))
        .route("/installation/token", delete(end_token))
        .route("/repos/{owner}/{name}", get(repository))
        .route("/repos/{owner}/{name}/git/trees/{sha}", get(tree))
        .route("/repos/{owner}/{name}/git/blobs/{sha}", get(blob))
        .route("/repos/{owner}/{name}/contents/{*path}", get(contents))
        .route("/repos/{owner}/{name}/git/ref/heads/{*branch}", get(branch))
        .route("/repos/{owner}/{name}/git/ref/tags/{*tag}", get(tag))
        .route("/repos/{owner}/{name}/git/tags/{sha}", get(tag_object))
        .route("/repos/{owner}/{name}/pulls/{number}/files", get(pull_files))
        .route("/repos/{owner}/{name}/compare/{range}", get(compare))
        .route("/app/hook/deliveries", get(deliveries))
        .route("/app/hook/deliveries/{id}/attempts", post(redeliver))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), count))
        .with_state(shared)
}

async fn count(State(shared): Fake, request: Request, next: Next) -> Response {
    let target = request.uri().path_and_query().map_or("", |p| p.as_str());
    let call = format!("{} {target}", request.method());
    let hangs = {
        let mut state = shared.state();
        state.calls.push(call.clone());
        state.hangs.iter().any(|part| call.contains(part))
    };
    if hangs {
        std::future::pending::<()>().await;
    }
    let fault = {
        let mut state = shared.state();
        let at = state.faults.iter().position(|f| call.contains(&f.call));
        at.and_then(|at| state.faults.remove(at))
    };
    let Some(fault) = fault else { return next.run(request).await };
    let mut response = Refusal(fault.status, "ordered").into_response();
    for (name, value) in fault.headers {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

fn bearer(headers: &HeaderMap) -> Result<&str, Refusal> {
    let value = headers.get("authorization").and_then(|v| v.to_str().ok());
    value.and_then(|v| v.strip_prefix("Bearer ")).ok_or(Refusal(401, "Requires authentication"))
}

/// The App's own statement, checked like the real one would.
fn as_app(shared: &Shared, headers: &HeaderMap) -> Result<(), Refusal> {
    let bad = Refusal(401, "A JSON web token could not be decoded");
    let Ok(key) = DecodingKey::from_rsa_pem(PUBLIC_KEY.as_bytes()) else { return Err(bad) };
    let mut rules = Validation::new(Algorithm::RS256);
    rules.validate_exp = false;
    let Ok(decoded) = jsonwebtoken::decode::<Value>(bearer(headers)?, &key, &rules) else { return Err(bad) };
    let now = shared.clock.now().as_micros() / 1_000_000;
    let number = |name: &str| decoded.claims.get(name).and_then(Value::as_i64).unwrap_or(0);
    let fresh = number("iat") <= now && number("exp") > now && number("exp") - number("iat") <= 600;
    if fresh { Ok(()) } else { Err(Refusal(401, "'Expiration time' claim is too far in the future")) }
}

/// A token that may read this repository.
fn as_installation<'a>(
    state: &'a FakeState,
    headers: &HeaderMap,
    repo: &str,
    permission: &str,
) -> Result<&'a FakeRepo, Refusal> {
    let token = bearer(headers)?;
    let grant = state.minted.iter().find(|(t, ..)| t == token).ok_or(Refusal(401, "Bad credentials"))?;
    if repo != grant.1 {
        return Err(NOT_FOUND);
    }
    if !grant.2.contains(permission) {
        return Err(Refusal(403, "Resource not accessible by integration"));
    }
    state.repos.get(repo).ok_or(NOT_FOUND)
}

async fn installation(State(shared): Fake, Path((owner, name)): Path<(String, String)>, headers: HeaderMap) -> Answer {
    as_app(&shared, &headers)?;
    let state = shared.state();
    let repo = state.repos.get(&format!("{owner}/{name}")).ok_or(NOT_FOUND)?;
    Ok(Json(json!({"id": repo.installation.ok_or(NOT_FOUND)?})).into_response())
}

async fn mint(State(shared): Fake, Path(id): Path<u64>, headers: HeaderMap, Json(body): Json<Value>) -> Answer {
    as_app(&shared, &headers)?;
    let name = body.pointer("/repositories/0").and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut state = shared.state();
    let known = |(full, repo): (&String, &FakeRepo)| {
        repo.installation == Some(id) && full.split_once('/').is_some_and(|(_, n)| n == name)
    };
    let Some((full, repo)) = state.repos.iter().find(|entry| known(*entry)) else { return Err(NOT_FOUND) };
    let full = full.clone();
    let wanted = body.get("permissions").and_then(Value::as_object).cloned().unwrap_or_default();
    let holds = |(name, level): (&String, &Value)| {
        let held = repo.permissions.get(name).map_or("none", String::as_str);
        held == "write" || Some(held) == level.as_str()
    };
    if !repo.permissions.is_empty() && !wanted.iter().all(holds) {
        return Err(Refusal(422, "The permissions requested are not granted to this installation."));
    }
    // As long as the real ones, and nothing that anything else could be taken for.
    let number = state.minted.len();
    let token = format!("ghs_{number}_{}", &hex::encode(Sha256::digest(format!("{}{number}", shared.base_url)))[..32]);
    let life = if state.token_life.is_zero() { Duration::from_secs(3600) } else { state.token_life };
    let expires_at = shared.clock.now().plus(state.tokens_ahead).plus(life);
    state.minted.push((token.clone(), full.clone(), Value::Object(wanted.clone()).to_string()));
    state.ends.insert(token.clone(), expires_at);
    let repositories = json!([{"full_name": full}]);
    let answer = json!({"token": token, "expires_at": expires_at, "permissions": wanted, "repositories": repositories});
    Ok((StatusCode::CREATED, Json(answer)).into_response())
}

async fn installed(State(shared): Fake, Path(id): Path<u64>, headers: HeaderMap) -> Answer {
    as_app(&shared, &headers)?;
    let state = shared.state();
    let repo = state.repos.values().find(|repo| repo.installation == Some(id)).ok_or(NOT_FOUND)?;
    Ok(Json(json!({"id": id, "permissions": repo.permissions})).into_response())
}

async fn end_token(State(shared): Fake, headers: HeaderMap) -> Answer {
    let token = bearer(&headers)?;
    let ended = shared.state().ends.remove(token);
    ended.map(|_| StatusCode::NO_CONTENT.into_response()).ok_or(Refusal(401, "Bad credentials"))
}

async fn repository(State(shared): Fake, Path((owner, name)): Path<(String, String)>, headers: HeaderMap) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    Ok(Json(json!({"default_branch": repo.default_branch})).into_response())
}

fn oid(bytes: &[u8]) -> String {
    hex::encode(&Sha256::digest(bytes)[..20])
}

fn folder_oid(sha: &str) -> String {
    oid(format!("{sha}:.kici").as_bytes())
}

async fn tree(
    State(shared): Fake,
    Path((owner, name, sha)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    if let Some(files) = repo.commits.get(&sha) {
        let names: BTreeSet<&str> = files.keys().filter_map(|p| p.split('/').next()).collect();
        let entries: Vec<Value> = names.iter().map(|n| root_entry(n, &sha, files)).collect();
        return Ok(Json(json!({"sha": sha, "tree": entries, "truncated": false})).into_response());
    }
    let folder = repo.commits.iter().find(|(commit, _)| folder_oid(commit) == sha);
    let (_, files) = folder.ok_or(Refusal(404, "Not Found"))?;
    let below = files.iter().filter_map(|(p, c)| p.strip_prefix(".kici/").map(|p| (p, c)));
    let entries: Vec<Value> = below
        .map(|(path, content)| {
            let mode = if path.ends_with(".link.yaml") { "120000" } else { "100644" };
            json!({"path": path, "mode": mode, "type": "blob", "sha": oid(content), "size": content.len()})
        })
        .collect();
    Ok(Json(json!({"sha": sha, "tree": entries, "truncated": false})).into_response())
}

fn root_entry(name: &str, sha: &str, files: &BTreeMap<String, Vec<u8>>) -> Value {
    match files.get(name) {
        Some(content) => json!({"path": name, "mode": "100644", "type": "blob", "sha": oid(content)}),
        None if name == ".kici" => json!({"path": name, "mode": "040000", "type": "tree", "sha": folder_oid(sha)}),
        None => json!({"path": name, "mode": "040000", "type": "tree", "sha": oid(name.as_bytes())}),
    }
}

async fn blob(
    State(shared): Fake,
    Path((owner, name, sha)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    let mut contents = repo.commits.values().flat_map(BTreeMap::values);
    let content = contents.find(|c| oid(c) == sha).ok_or(NOT_FOUND)?;
    Ok(content.clone().into_response())
}

async fn contents(
    State(shared): Fake,
    Path((owner, name, path)): Path<(String, String, String)>,
    Query(query): Query<HashMap<String, String>>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    let files = query.get("ref").and_then(|sha| repo.commits.get(sha)).ok_or(NOT_FOUND)?;
    Ok(files.get(&path).ok_or(NOT_FOUND)?.clone().into_response())
}

async fn branch(
    State(shared): Fake,
    Path((owner, name, branch)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    let sha = repo.branches.get(&branch).ok_or(NOT_FOUND)?;
    Ok(Json(json!({"ref": format!("refs/heads/{branch}"), "object": {"sha": sha, "type": "commit"}})).into_response())
}

async fn tag(
    State(shared): Fake,
    Path((owner, name, tag)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    let sha = repo.tags.get(&tag).ok_or(NOT_FOUND)?;
    let kind = if repo.tag_objects.contains_key(sha) { "tag" } else { "commit" };
    Ok(Json(json!({"ref": format!("refs/tags/{tag}"), "object": {"sha": sha, "type": kind}})).into_response())
}

async fn tag_object(
    State(shared): Fake,
    Path((owner, name, sha)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    let commit = repo.tag_objects.get(&sha).ok_or(NOT_FOUND)?;
    Ok(Json(json!({"sha": sha, "object": {"sha": commit, "type": "commit"}})).into_response())
}

fn page_of(query: &HashMap<String, String>) -> (usize, usize) {
    let number = |name: &str, default| query.get(name).and_then(|v| v.parse().ok()).unwrap_or(default);
    (number("page", 1).max(1), number("per_page", 30).clamp(1, 100))
}

fn paged(base: &str, path: &str, items: &[Value], query: &HashMap<String, String>) -> Response {
    let (page, size) = page_of(query);
    let from = ((page - 1) * size).min(items.len());
    let to = (from + size).min(items.len());
    let mut response = Json(Value::from(items[from..to].to_vec())).into_response();
    let link = format!(r#"<{base}{path}?per_page={size}&page={}>; rel="next""#, page + 1);
    if to < items.len()
        && let Ok(link) = link.parse()
    {
        response.headers_mut().insert("link", link);
    }
    response
}

fn file_entries(files: &[String]) -> Vec<Value> {
    files
        .iter()
        .map(|f| match f.split_once(" -> ") {
            Some((old, new)) => json!({"filename": new, "previous_filename": old, "status": "renamed"}),
            None => json!({"filename": f, "status": "modified"}),
        })
        .collect()
}

async fn pull_files(
    State(shared): Fake,
    Path((owner, name, number)): Path<(String, String, u64)>,
    Query(query): Query<HashMap<String, String>>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "pull_requests")?;
    let files = file_entries(repo.pulls.get(&number).ok_or(NOT_FOUND)?);
    let path = format!("/repos/{owner}/{name}/pulls/{number}/files");
    Ok(paged(&shared.base_url, &path, &files[..files.len().min(3000)], &query))
}

async fn compare(
    State(shared): Fake,
    Path((owner, name, range)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Answer {
    let state = shared.state();
    let repo = as_installation(&state, &headers, &format!("{owner}/{name}"), "contents")?;
    let files = file_entries(repo.compares.get(&range).ok_or(NOT_FOUND)?);
    Ok(Json(json!({"status": "ahead", "files": files[..files.len().min(300)]})).into_response())
}

async fn deliveries(State(shared): Fake, Query(query): Query<HashMap<String, String>>, headers: HeaderMap) -> Answer {
    as_app(&shared, &headers)?;
    let list: Vec<Value> = shared
        .state()
        .deliveries
        .iter()
        .map(|d| json!({"id": d.id, "guid": d.guid, "delivered_at": d.at, "status_code": d.status, "event": "push"}))
        .collect();
    Ok(paged(&shared.base_url, "/app/hook/deliveries", &list, &query))
}

async fn redeliver(State(shared): Fake, Path(id): Path<u64>, headers: HeaderMap) -> Answer {
    as_app(&shared, &headers)?;
    let known = shared.state().deliveries.iter().any(|d| d.id == id);
    if known { Ok(StatusCode::ACCEPTED.into_response()) } else { Err(NOT_FOUND) }
}
