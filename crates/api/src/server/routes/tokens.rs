//! Tokens of agents and of operators.

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use kici_engine::ids::TokenId;
use serde::Deserialize;

use crate::dto::tokens::{
    AdminTokenView, AgentTokenView, CreateAdminToken, CreateAgentToken, TokenCreated, TokenRevoked,
};
use crate::page::Page;
use crate::ports::{Answer, Caller, Ports};
use crate::problem::Problem;
use crate::server::request::{Body, PathOf, QueryOf};

/// Which agent tokens.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentTokenQuery {
    #[serde(rename = "type")]
    agent_type: Option<String>,
}

/// Tokens of agents, newest first.
#[utoipa::path(get, path = "/api/v1/admin/agent-tokens", tag = "tokens",
    params(("type" = Option<String>, Query, description = "`static` or `ephemeral`.")),
    responses((status = 200, body = Page<AgentTokenView>)))]
pub async fn list_agent(
    State(ports): State<Ports>,
    caller: Caller,
    QueryOf(query): QueryOf<AgentTokenQuery>,
) -> Answer<Json<Page<AgentTokenView>>> {
    if let Some(other) = query.agent_type.as_deref().filter(|t| !matches!(*t, "static" | "ephemeral")) {
        return Err(Problem::rejected("type", format!("`{other}` is not a type; use `static` or `ephemeral`")));
    }
    let items = ports.agent_tokens.list(&caller, query.agent_type.as_deref()).await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Makes a token for agents; the answer is the only place that shows it.
#[utoipa::path(post, path = "/api/v1/admin/agent-tokens", tag = "tokens", request_body = CreateAgentToken,
    responses((status = 201, body = TokenCreated)))]
pub async fn create_agent(
    State(ports): State<Ports>,
    caller: Caller,
    Body(request): Body<CreateAgentToken>,
) -> Answer<(StatusCode, Json<TokenCreated>)> {
    Ok((StatusCode::CREATED, Json(ports.agent_tokens.create(&caller, &request).await?)))
}

/// Revokes a token of agents and closes their sessions.
#[utoipa::path(delete, path = "/api/v1/admin/agent-tokens/{id}", tag = "tokens", params(("id" = String, Path)),
    responses((status = 200, body = TokenRevoked)))]
pub async fn revoke_agent(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<TokenId>,
) -> Answer<Json<TokenRevoked>> {
    ports.agent_tokens.revoke(&caller, id).await.map(Json)
}

/// Tokens of operators, newest first.
#[utoipa::path(get, path = "/api/v1/admin/tokens", tag = "tokens",
    responses((status = 200, body = Page<AdminTokenView>)))]
pub async fn list_admin(State(ports): State<Ports>, caller: Caller) -> Answer<Json<Page<AdminTokenView>>> {
    Ok(Json(Page { items: ports.admin_tokens.list(&caller).await?, next_cursor: None }))
}

/// Makes a token for an operator or a program; the answer is the only place that shows it.
#[utoipa::path(post, path = "/api/v1/admin/tokens", tag = "tokens", request_body = CreateAdminToken,
    responses((status = 201, body = TokenCreated)))]
pub async fn create_admin(
    State(ports): State<Ports>,
    caller: Caller,
    Body(request): Body<CreateAdminToken>,
) -> Answer<(StatusCode, Json<TokenCreated>)> {
    if !(1..=128).contains(&request.label.chars().count()) {
        return Err(Problem::rejected("label", "must have 1 to 128 characters; say what the token is for"));
    }
    Ok((StatusCode::CREATED, Json(ports.admin_tokens.create(&caller, &request).await?)))
}

/// Revokes a token of operators.
#[utoipa::path(delete, path = "/api/v1/admin/tokens/{id}", tag = "tokens", params(("id" = String, Path)),
    responses((status = 200, body = TokenRevoked)))]
pub async fn revoke_admin(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<TokenId>,
) -> Answer<Json<TokenRevoked>> {
    ports.admin_tokens.revoke(&caller, id).await.map(Json)
}
