//! Agents.

use axum::Json;
use axum::extract::State;
use kici_engine::ids::AgentId;

use crate::dto::agents::{AgentFilter, AgentView, DrainAgent};
use crate::page::Page;
use crate::ports::{Answer, Caller, Ports};
use crate::server::request::{Body, PathOf, QueryOf};

/// Connected and known agents, by id.
#[utoipa::path(get, path = "/api/v1/admin/agents", tag = "agents", params(AgentFilter),
    responses((status = 200, body = Page<AgentView>)))]
pub async fn list(
    State(ports): State<Ports>,
    caller: Caller,
    QueryOf(filter): QueryOf<AgentFilter>,
) -> Answer<Json<Page<AgentView>>> {
    Ok(Json(Page { items: ports.agents.list(&caller, &filter).await?, next_cursor: None }))
}

/// Starts or ends the drain of an agent.
#[utoipa::path(post, path = "/api/v1/admin/agents/{id}/drain", tag = "agents", params(("id" = String, Path)),
    request_body = DrainAgent, responses((status = 200, body = AgentView)))]
pub async fn drain(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<AgentId>,
    Body(request): Body<DrainAgent>,
) -> Answer<Json<AgentView>> {
    ports.agents.drain(&caller, &id, &request).await.map(Json)
}
