//! The event log and the dead letters.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use kici_engine::ids::DeliveryRowId;
use serde::{Deserialize, Serialize};

use crate::dto::bus::{DeadLetter, LetterId, LetterRetried};
use crate::dto::events::{DeliveryFilter, DeliveryView, Discard, DlqCount, Explanation};
use crate::dto::sources::DeliveryAccepted;
use crate::page::{Page, PageQuery};
use crate::ports::{Answer, Caller, Ports};
use crate::problem::Problem;
use crate::server::request::{Body, Listing, PathOf};

/// Deliveries, newest first.
#[utoipa::path(get, path = "/api/v1/admin/event-log", tag = "events", params(DeliveryFilter, PageQuery),
    responses((status = 200, body = Page<DeliveryView>)))]
pub async fn list(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<DeliveryFilter>,
) -> Answer<Json<Page<DeliveryView>>> {
    let slice = ports.events.list(&caller, &listing.filter, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}

/// One delivery.
#[utoipa::path(get, path = "/api/v1/admin/event-log/{id}", tag = "events", params(("id" = String, Path)),
    responses((status = 200, body = DeliveryView)))]
pub async fn get(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<DeliveryRowId>,
) -> Answer<Json<DeliveryView>> {
    ports.events.get(&caller, id).await.map(Json)
}

/// The body of a delivery as it was received.
#[utoipa::path(get, path = "/api/v1/admin/event-log/{id}/payload", tag = "events", params(("id" = String, Path)),
    responses((status = 200, description = "The sender's bytes", content_type = "application/octet-stream")))]
pub async fn payload(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<DeliveryRowId>,
) -> Answer<Response> {
    let payload = ports.events.payload(&caller, id).await?;
    let content_type = HeaderValue::from_str(&payload.content_type)
        .unwrap_or_else(|_| HeaderValue::from_static("application/octet-stream"));
    // The sender chose the type: no browser may run what it sent.
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment")),
        (HeaderName::from_static("content-security-policy"), HeaderValue::from_static("sandbox")),
    ];
    Ok((headers, payload.body).into_response())
}

/// Why a delivery started what it started.
#[utoipa::path(get, path = "/api/v1/admin/event-log/{id}/explain", tag = "events", params(("id" = String, Path)),
    responses((status = 200, body = Explanation)))]
pub async fn explain(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<DeliveryRowId>,
) -> Answer<Json<Explanation>> {
    ports.events.explain(&caller, id).await.map(Json)
}

/// Works on the body of a delivery again, as a new delivery.
#[utoipa::path(post, path = "/api/v1/admin/event-log/{id}/redeliver", tag = "events", params(("id" = String, Path)),
    responses((status = 202, body = DeliveryAccepted)))]
pub async fn redeliver(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<DeliveryRowId>,
) -> Answer<(StatusCode, Json<DeliveryAccepted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.events.redeliver(&caller, id).await?)))
}

/// The list of dead letters has no filters.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoFilter {}

/// Dead letters, newest first.
#[utoipa::path(get, path = "/api/v1/admin/event-dlq", tag = "events", params(PageQuery),
    responses((status = 200, body = Page<DeadLetter>)))]
pub async fn dlq_list(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<NoFilter>,
) -> Answer<Json<Page<DeadLetter>>> {
    let slice = ports.events.dlq_list(&caller, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}

/// How many dead letters there are.
#[utoipa::path(get, path = "/api/v1/admin/event-dlq/count", tag = "events",
    responses((status = 200, body = DlqCount)))]
pub async fn dlq_count(State(ports): State<Ports>, caller: Caller) -> Answer<Json<DlqCount>> {
    Ok(Json(DlqCount { count: ports.events.dlq_count(&caller).await? }))
}

/// Tries a dead letter again.
#[utoipa::path(post, path = "/api/v1/admin/event-dlq/{id}/retry", tag = "events", params(("id" = String, Path)),
    responses((status = 202, body = LetterRetried)))]
pub async fn dlq_retry(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<LetterId>,
) -> Answer<(StatusCode, Json<LetterRetried>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.events.dlq_retry(&caller, id).await?)))
}

/// Gives a dead letter up.
#[utoipa::path(delete, path = "/api/v1/admin/event-dlq/{id}", tag = "events", params(("id" = String, Path)),
    request_body = Discard, responses((status = 204)))]
pub async fn dlq_discard(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<LetterId>,
    Body(request): Body<Discard>,
) -> Answer<StatusCode> {
    if request.reason.trim().is_empty() {
        return Err(Problem::rejected("reason", "must not be empty; say why nobody needs it"));
    }
    ports.events.dlq_discard(&caller, id, request.reason.trim()).await?;
    Ok(StatusCode::NO_CONTENT)
}
