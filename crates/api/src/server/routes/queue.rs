//! The dispatch queue.

use axum::Json;
use axum::extract::State;
use kici_engine::ids::JobId;

use crate::dto::queue::{QueueEntry, QueueExplanation, QueueFilter};
use crate::page::{Page, PageQuery};
use crate::ports::{Answer, Caller, Ports};
use crate::server::request::{Listing, PathOf};

/// Rows of the queue, newest first.
#[utoipa::path(get, path = "/api/v1/admin/queue", tag = "queue", params(QueueFilter, PageQuery),
    responses((status = 200, body = Page<QueueEntry>)))]
pub async fn list(
    State(ports): State<Ports>,
    caller: Caller,
    listing: Listing<QueueFilter>,
) -> Answer<Json<Page<QueueEntry>>> {
    let slice = ports.queue.list(&caller, &listing.filter, listing.page).await?;
    Ok(Json(listing.finish(slice)))
}

/// One row of the queue, by its job.
#[utoipa::path(get, path = "/api/v1/admin/queue/{id}", tag = "queue", params(("id" = String, Path)),
    responses((status = 200, body = QueueEntry)))]
pub async fn get(State(ports): State<Ports>, caller: Caller, PathOf(job): PathOf<JobId>) -> Answer<Json<QueueEntry>> {
    ports.queue.get(&caller, job).await.map(Json)
}

/// Why a job waits, agent by agent.
#[utoipa::path(get, path = "/api/v1/admin/queue/{id}/explain", tag = "queue", params(("id" = String, Path)),
    responses((status = 200, body = QueueExplanation)))]
pub async fn explain(
    State(ports): State<Ports>,
    caller: Caller,
    PathOf(job): PathOf<JobId>,
) -> Answer<Json<QueueExplanation>> {
    ports.queue.explain(&caller, job).await.map(Json)
}
