//! Sources.

use axum::Json;
use axum::extract::State;
use http::StatusCode;

use crate::dto::sources::{AddSource, DeliveryAccepted, SetSecrets, SourceView, TriggerSource};
use crate::page::Page;
use crate::ports::{Answer, Caller, Ports};
use crate::server::request::{Body, PathOf};

/// All sources, by name.
#[utoipa::path(get, path = "/api/v1/admin/sources", tag = "sources",
    responses((status = 200, body = Page<SourceView>)))]
pub async fn list(State(ports): State<Ports>, caller: Caller) -> Answer<Json<Page<SourceView>>> {
    Ok(Json(Page { items: ports.sources.list(&caller).await?, next_cursor: None }))
}

/// One source by name or id.
#[utoipa::path(get, path = "/api/v1/admin/sources/{name}", tag = "sources", params(("name" = String, Path)),
    responses((status = 200, body = SourceView)))]
pub async fn get(State(ports): State<Ports>, caller: Caller, PathOf(name): PathOf<String>) -> Answer<Json<SourceView>> {
    ports.sources.get(&caller, &name).await.map(Json)
}

/// Adds a source.
#[utoipa::path(post, path = "/api/v1/admin/sources", tag = "sources", request_body = AddSource,
    responses((status = 201, body = SourceView)))]
pub async fn add(
    State(ports): State<Ports>,
    caller: Caller,
    Body(request): Body<AddSource>,
) -> Answer<(StatusCode, Json<SourceView>)> {
    Ok((StatusCode::CREATED, Json(ports.sources.add(&caller, &request).await?)))
}

/// Removes a source; its runs and events stay.
#[utoipa::path(delete, path = "/api/v1/admin/sources/{name}", tag = "sources", params(("name" = String, Path)),
    responses((status = 204)))]
pub async fn remove(State(ports): State<Ports>, caller: Caller, PathOf(name): PathOf<String>) -> Answer<StatusCode> {
    ports.sources.remove(&caller, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes webhooks of the source again.
#[utoipa::path(post, path = "/api/v1/admin/sources/{name}/enable", tag = "sources", params(("name" = String, Path)),
    responses((status = 200, body = SourceView)))]
pub async fn enable(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(name): PathOf<String>,
) -> Answer<Json<SourceView>> {
    ports.sources.set_enabled(&caller, &name, true).await.map(Json)
}

/// Answers webhooks of the source with 404.
#[utoipa::path(post, path = "/api/v1/admin/sources/{name}/disable", tag = "sources", params(("name" = String, Path)),
    responses((status = 200, body = SourceView)))]
pub async fn disable(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(name): PathOf<String>,
) -> Answer<Json<SourceView>> {
    ports.sources.set_enabled(&caller, &name, false).await.map(Json)
}

/// Gives the source new secrets.
#[utoipa::path(put, path = "/api/v1/admin/sources/{name}/secrets", tag = "sources", params(("name" = String, Path)),
    request_body = SetSecrets, responses((status = 200, body = SourceView)))]
pub async fn set_secrets(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    Body(request): Body<SetSecrets>,
) -> Answer<Json<SourceView>> {
    ports.sources.set_secrets(&caller, &name, &request).await.map(Json)
}

/// Stores a push event for a ref of the source, as if the forge had sent it.
#[utoipa::path(post, path = "/api/v1/admin/sources/{name}/trigger", tag = "sources", params(("name" = String, Path)),
    request_body = TriggerSource, responses((status = 202, body = DeliveryAccepted)))]
pub async fn trigger(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    Body(request): Body<TriggerSource>,
) -> Answer<(StatusCode, Json<DeliveryAccepted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.sources.trigger(&caller, &name, &request).await?)))
}
