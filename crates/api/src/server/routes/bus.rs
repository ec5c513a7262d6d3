//! The internal bus: events, schedules, registrations, and trust between repositories.

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use kici_engine::ids::{EventId, RegistrationId, TrustId};

use crate::dto::bus::{
    AddEventTrust, ChangeRegistration, EmitEvent, EventDetail, EventEmitted, EventFilter, EventTrustVerdict,
    EventTrustView, EventView, RegistrationView, ScheduleView, TestEventTrust, TriggerSchedule,
};
use crate::page::{Page, PageQuery};
use crate::ports::{Answer, Caller, Ports};
use crate::server::request::{Body, IdempotencyKey, Listing, PathOf};

fn whole<T>(items: Vec<T>) -> Answer<Json<Page<T>>> {
    Ok(Json(Page { items, next_cursor: None }))
}

/// Events of the bus, newest first.
#[utoipa::path(get, path = "/api/v1/admin/events", tag = "bus", params(EventFilter, PageQuery),
    responses((status = 200, body = Page<EventView>)))]
pub async fn list(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<EventFilter>,
) -> Answer<Json<Page<EventView>>> {
    let slice = ports.bus.list(&caller, &listing.filter, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}

/// One event, with the runs that it started and why.
#[utoipa::path(get, path = "/api/v1/admin/events/{id}", tag = "bus", params(("id" = String, Path)),
    responses((status = 200, body = EventDetail)))]
pub async fn get(State(ports): State<Ports>, caller: Caller, PathOf(id): PathOf<EventId>) -> Answer<Json<EventDetail>> {
    ports.bus.get(&caller, id).await.map(Json)
}

/// The document of an event.
#[utoipa::path(get, path = "/api/v1/admin/events/{id}/payload", tag = "bus", params(("id" = String, Path)),
    responses((status = 200, body = Object)))]
pub async fn payload(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<EventId>,
) -> Answer<Json<serde_json::Value>> {
    ports.bus.payload(&caller, id).await.map(Json)
}

/// Emits an event.
#[utoipa::path(post, path = "/api/v1/admin/events/emit", tag = "bus", request_body = EmitEvent,
    params(("idempotency-key" = Option<String>, Header)),
    responses((status = 202, body = EventEmitted)))]
pub async fn emit(
    State(ports): State<Ports>,
    caller: Caller,
    key: IdempotencyKey,
    Body(request): Body<EmitEvent>,
) -> Answer<(StatusCode, Json<EventEmitted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.bus.emit(&caller, &request, key.0.as_deref()).await?)))
}

/// Delivers an event again, as a new one.
#[utoipa::path(post, path = "/api/v1/admin/events/{id}/redeliver", tag = "bus", params(("id" = String, Path)),
    responses((status = 202, body = EventEmitted)))]
pub async fn redeliver(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<EventId>,
) -> Answer<(StatusCode, Json<EventEmitted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.bus.redeliver(&caller, id).await?)))
}

/// The schedules of registered workflows.
#[utoipa::path(get, path = "/api/v1/admin/schedules", tag = "bus",
    responses((status = 200, body = Page<ScheduleView>)))]
pub async fn schedules(State(ports): State<Ports>, caller: Caller) -> Answer<Json<Page<ScheduleView>>> {
    whole(ports.bus.schedules(&caller).await?)
}

/// Fires a schedule now.
#[utoipa::path(post, path = "/api/v1/admin/schedules/{registration}/trigger", tag = "bus",
    params(("registration" = String, Path), ("idempotency-key" = Option<String>, Header)),
    request_body = TriggerSchedule, responses((status = 202, body = EventEmitted)))]
pub async fn trigger_schedule(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<RegistrationId>,
    key: IdempotencyKey,
    Body(request): Body<TriggerSchedule>,
) -> Answer<(StatusCode, Json<EventEmitted>)> {
    Ok((StatusCode::ACCEPTED, Json(ports.bus.trigger_schedule(&caller, id, &request, key.0.as_deref()).await?)))
}

/// The registered workflows.
#[utoipa::path(get, path = "/api/v1/admin/registrations", tag = "bus",
    responses((status = 200, body = Page<RegistrationView>)))]
pub async fn registrations(State(ports): State<Ports>, caller: Caller) -> Answer<Json<Page<RegistrationView>>> {
    whole(ports.bus.registrations(&caller).await?)
}

/// Enables or disables a registered workflow.
#[utoipa::path(patch, path = "/api/v1/admin/registrations/{id}", tag = "bus", params(("id" = String, Path)),
    request_body = ChangeRegistration, responses((status = 200, body = RegistrationView)))]
pub async fn change_registration(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<RegistrationId>,
    Body(request): Body<ChangeRegistration>,
) -> Answer<Json<RegistrationView>> {
    ports.bus.change_registration(&caller, id, request).await.map(Json)
}

/// Which repositories may start workflows of others.
#[utoipa::path(get, path = "/api/v1/admin/event-trust", tag = "bus",
    responses((status = 200, body = Page<EventTrustView>)))]
pub async fn trust(State(ports): State<Ports>, caller: Caller) -> Answer<Json<Page<EventTrustView>>> {
    whole(ports.bus.trust(&caller).await?)
}

/// Lets events of one repository start workflows of another one.
#[utoipa::path(post, path = "/api/v1/admin/event-trust", tag = "bus", request_body = AddEventTrust,
    responses((status = 201, body = EventTrustView)))]
pub async fn add_trust(
    State(ports): State<Ports>,
    caller: Caller,
    Body(request): Body<AddEventTrust>,
) -> Answer<(StatusCode, Json<EventTrustView>)> {
    Ok((StatusCode::CREATED, Json(ports.bus.add_trust(&caller, &request).await?)))
}

/// Takes that back.
#[utoipa::path(delete, path = "/api/v1/admin/event-trust/{id}", tag = "bus", params(("id" = String, Path)),
    responses((status = 204)))]
pub async fn remove_trust(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(id): PathOf<TrustId>,
) -> Answer<StatusCode> {
    ports.bus.remove_trust(&caller, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Says whether an event of one repository may start workflows of another one.
#[utoipa::path(post, path = "/api/v1/admin/event-trust/test", tag = "bus", request_body = TestEventTrust,
    responses((status = 200, body = EventTrustVerdict)))]
pub async fn test_trust(
    State(ports): State<Ports>,
    caller: Caller,
    Body(request): Body<TestEventTrust>,
) -> Answer<Json<EventTrustVerdict>> {
    ports.bus.test_trust(&caller, &request).await.map(Json)
}
