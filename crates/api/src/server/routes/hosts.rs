//! Hosts.

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use kici_engine::ids::AgentId;

use crate::dto::hosts::{DeclareHost, HostFilter, HostView, HostsPreview, MAX_HOSTS, PreviewHosts, RebootHost};
use crate::page::Page;
use crate::ports::{Answer, Caller, Ports};
use crate::problem::Problem;
use crate::server::request::{Body, PathOf, QueryOf};

/// Known hosts, by id.
#[utoipa::path(get, path = "/api/v1/admin/hosts", tag = "hosts", params(HostFilter),
    responses((status = 200, body = Page<HostView>)))]
pub async fn list(
    State(ports): State<Ports>,
    caller: Caller,
    QueryOf(filter): QueryOf<HostFilter>,
) -> Answer<Json<Page<HostView>>> {
    if filter.limit.is_some_and(|limit| !(1..=MAX_HOSTS).contains(&limit)) {
        return Err(Problem::rejected("?limit", format!("must be 1 to {MAX_HOSTS}")));
    }
    ports.hosts.list(&caller, &filter).await.map(Json)
}

/// One host.
#[utoipa::path(get, path = "/api/v1/admin/hosts/{id}", tag = "hosts", params(("id" = String, Path)),
    responses((status = 200, body = HostView)))]
pub async fn get(State(ports): State<Ports>, caller: Caller, PathOf(id): PathOf<AgentId>) -> Answer<Json<HostView>> {
    ports.hosts.get(&caller, &id).await.map(Json)
}

/// Declares a host; 201 when it was not known before.
#[utoipa::path(put, path = "/api/v1/admin/hosts/{id}", tag = "hosts", params(("id" = String, Path)),
    request_body = DeclareHost,
    responses((status = 200, body = HostView), (status = 201, body = HostView)))]
pub async fn declare(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<AgentId>,
    Body(request): Body<DeclareHost>,
) -> Answer<(StatusCode, Json<HostView>)> {
    let (view, created) = ports.hosts.declare(&caller, &id, &request).await?;
    Ok((if created { StatusCode::CREATED } else { StatusCode::OK }, Json(view)))
}

/// Removes a host that is not connected.
#[utoipa::path(delete, path = "/api/v1/admin/hosts/{id}", tag = "hosts", params(("id" = String, Path)),
    responses((status = 204)))]
pub async fn remove(State(ports): State<Ports>, caller: Caller, PathOf(id): PathOf<AgentId>) -> Answer<StatusCode> {
    ports.hosts.remove(&caller, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Which hosts a `runs_on_all` job would go to now, and what would become of it on each.
#[utoipa::path(post, path = "/api/v1/admin/hosts/preview", tag = "hosts", request_body = PreviewHosts,
    responses((status = 200, body = HostsPreview)))]
pub async fn preview(
    State(ports): State<Ports>,
    caller: Caller,
    Body(request): Body<PreviewHosts>,
) -> Answer<Json<HostsPreview>> {
    ports.hosts.preview(&caller, &request).await.map(Json)
}

/// Announces that a host is about to restart: it gets no jobs until it is back. Does not restart it.
#[utoipa::path(post, path = "/api/v1/admin/hosts/{id}/reboot", tag = "hosts", params(("id" = String, Path)),
    request_body = RebootHost, responses((status = 200, body = HostView)))]
pub async fn reboot(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<AgentId>,
    Body(request): Body<RebootHost>,
) -> Answer<Json<HostView>> {
    ports.hosts.reboot(&caller, &id, &request).await.map(Json)
}

/// Calls the restart of a host off.
#[utoipa::path(delete, path = "/api/v1/admin/hosts/{id}/reboot", tag = "hosts", params(("id" = String, Path)),
    responses((status = 200, body = HostView)))]
pub async fn cancel_reboot(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<AgentId>,
) -> Answer<Json<HostView>> {
    ports.hosts.cancel_reboot(&caller, &id).await.map(Json)
}
