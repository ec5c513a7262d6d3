//! The node itself, and the access log.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};

use crate::dto::access_log::{AccessFilter, AccessView};
use crate::dto::audit::{AuditFilter, AuditView};
use crate::dto::system::{Capabilities, Diagnosis, Drain, DrainState, Health, OrchestratorStatus, Ready};
use crate::page::{Page, PageQuery};
use crate::ports::{Answer, Caller, Ports};
use crate::server::openapi;
use crate::server::request::{Body, Listing};

/// Where to find things, until there is a page for people.
pub async fn root() -> &'static str {
    "KiCI orchestrator\n\nAPI     /api/v1 (described by /api/v1/openapi.json)\nHealth  /health, /ready, /metrics\n\
     CLI     kici-admin --help\n"
}

/// The process answers.
#[utoipa::path(get, path = "/health", tag = "system", responses((status = 200, body = Health)))]
pub async fn health(State(ports): State<Ports>) -> Json<Health> {
    Json(ports.system.health())
}

/// It can work.
#[utoipa::path(get, path = "/ready", tag = "system",
    responses((status = 200, body = Ready), (status = 503, body = Ready)))]
pub async fn ready(State(ports): State<Ports>) -> (StatusCode, Json<Ready>) {
    let ready = ports.system.ready().await;
    (if ready.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, Json(ready))
}

/// Metrics in Prometheus text format.
#[utoipa::path(get, path = "/metrics", tag = "system", responses((status = 200, body = String)))]
pub async fn metrics(State(ports): State<Ports>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], ports.system.metrics()).into_response()
}

/// What this server can do.
#[utoipa::path(get, path = "/api/v1/capabilities", tag = "system", responses((status = 200, body = Capabilities)))]
pub async fn capabilities(State(ports): State<Ports>) -> Json<Capabilities> {
    Json(ports.system.capabilities())
}

/// This document.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "system", responses((status = 200, body = Object)))]
pub async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], openapi::document()).into_response()
}

/// Whether this node drains.
#[utoipa::path(get, path = "/api/v1/admin/drain", tag = "system", responses((status = 200, body = DrainState)))]
pub async fn drain_state(State(ports): State<Ports>, caller: Caller) -> Answer<Json<DrainState>> {
    ports.system.drain_state(&caller).await.map(Json)
}

/// Starts or ends the drain of this node.
#[utoipa::path(post, path = "/api/v1/admin/drain", tag = "system", request_body = Drain,
    responses((status = 200, body = DrainState)))]
pub async fn drain(State(ports): State<Ports>, caller: Caller, Body(request): Body<Drain>) -> Answer<Json<DrainState>> {
    ports.system.drain(&caller, &request).await.map(Json)
}

/// How the node and its background work are.
#[utoipa::path(get, path = "/api/v1/admin/status", tag = "system", responses((status = 200, body = OrchestratorStatus)))]
pub async fn status(State(ports): State<Ports>, caller: Caller) -> Answer<Json<OrchestratorStatus>> {
    ports.system.status(&caller).await.map(Json)
}

/// Checks the node and what it depends on.
#[utoipa::path(get, path = "/api/v1/admin/diagnose", tag = "system", responses((status = 200, body = Diagnosis)))]
pub async fn diagnose(State(ports): State<Ports>, caller: Caller) -> Answer<Json<Diagnosis>> {
    ports.system.diagnose(&caller).await.map(Json)
}

/// Who did, or tried, what; newest first.
#[utoipa::path(get, path = "/api/v1/admin/access-log", tag = "system", params(AccessFilter, PageQuery),
    responses((status = 200, body = Page<AccessView>)))]
pub async fn access_log(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<AccessFilter>,
) -> Answer<Json<Page<AccessView>>> {
    let slice = ports.access_log.list(&caller, &listing.filter, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}

/// Who got, or was refused, which secret; newest first.
#[utoipa::path(get, path = "/api/v1/admin/audit", tag = "system", params(AuditFilter, PageQuery),
    responses((status = 200, body = Page<AuditView>)))]
pub async fn audit(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<AuditFilter>,
) -> Answer<Json<Page<AuditView>>> {
    let slice = ports.audit.list(&caller, &listing.filter, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}
