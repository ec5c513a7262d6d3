//! What is old enough to go. Ids hold the time at which they were made (RFC 9562, version 7), so that old rows are found at the
//! head of a primary key; the exact time is a column. Each operation is bounded, and deletes nothing that is still open.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{DeliveryRowId, RunId};
use kici_engine::state::{QueueStatus, RunStatus};
use kici_engine::time::Ts;
use uuid::Uuid;

use super::backend::Conn;
use super::schema::{decision_traces, deliveries, dispatch_queue, request_keys, runs};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::DeliveryStatus;
use crate::types::{DbId, DbTs};

/// The first id that could have been made at `at`.
fn id_at(at: Ts) -> DbId {
    let millis = u128::try_from(at.as_micros() / 1000).unwrap_or(0);
    DbId(Uuid::from_u128(millis << 80))
}

fn ended_rows() -> [&'static str; 4] {
    [QueueStatus::Completed, QueueStatus::Failed, QueueStatus::Expired, QueueStatus::Cancelled].map(QueueStatus::as_str)
}

fn ended_runs() -> [&'static str; 3] {
    [RunStatus::Success, RunStatus::Failed, RunStatus::Cancelled].map(RunStatus::as_str)
}

pub(crate) async fn queue_prune(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<u64, StoreError> {
    let old: Vec<DbId> = dispatch_queue::table
        .filter(dispatch_queue::id.lt(id_at(*before)))
        .filter(dispatch_queue::status.eq_any(ended_rows()))
        .filter(dispatch_queue::finished_at.lt(DbTs::from(*before)))
        .order(dispatch_queue::id)
        .limit(i64::from(*limit))
        .select(dispatch_queue::id)
        .load(conn)
        .await?;
    let gone = diesel::delete(dispatch_queue::table)
        .filter(dispatch_queue::id.eq_any(&old))
        .filter(dispatch_queue::status.eq_any(ended_rows()))
        .execute(conn)
        .await?;
    Ok(gone as u64)
}

pub(crate) async fn payloads_older(
    conn: &mut Conn,
    _: &Ctx,
    before: &Ts,
    limit: &u32,
) -> Result<Vec<(DeliveryRowId, String)>, StoreError> {
    let rows: Vec<(DbId, Option<String>)> = deliveries::table
        .filter(deliveries::received_at.lt(DbTs::from(*before)))
        .filter(deliveries::payload_key.is_not_null())
        .filter(deliveries::status.ne(DeliveryStatus::Received.as_str()))
        .order((deliveries::received_at, deliveries::id))
        .limit(i64::from(*limit))
        .select((deliveries::id, deliveries::payload_key))
        .load(conn)
        .await?;
    Ok(rows.into_iter().filter_map(|(id, key)| Some((id.into(), key?))).collect())
}

pub(crate) async fn traces_prune(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<u64, StoreError> {
    let old: Vec<DbId> = decision_traces::table
        .filter(decision_traces::delivery_id.lt(id_at(*before)))
        .filter(decision_traces::created_at.lt(DbTs::from(*before)))
        .order(decision_traces::delivery_id)
        .limit(i64::from(*limit))
        .select(decision_traces::delivery_id)
        .load(conn)
        .await?;
    let gone = diesel::delete(decision_traces::table.filter(decision_traces::delivery_id.eq_any(&old)));
    Ok(gone.execute(conn).await? as u64)
}

pub(crate) async fn deliveries_prune(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<u64, StoreError> {
    let open = DeliveryStatus::Received.as_str();
    // A body in the object store goes first: without its row nobody would find it.
    let old: Vec<DbId> = deliveries::table
        .filter(deliveries::received_at.lt(DbTs::from(*before)))
        .filter(deliveries::status.ne(open))
        .filter(deliveries::payload_key.is_null())
        .order((deliveries::received_at, deliveries::id))
        .limit(i64::from(*limit))
        .select(deliveries::id)
        .load(conn)
        .await?;
    let gone = diesel::delete(deliveries::table)
        .filter(deliveries::id.eq_any(&old))
        .filter(deliveries::status.ne(open))
        .execute(conn)
        .await?;
    Ok(gone as u64)
}

pub(crate) async fn runs_with_old_logs(
    conn: &mut Conn,
    _: &Ctx,
    before: &Ts,
    limit: &u32,
) -> Result<Vec<RunId>, StoreError> {
    let ids: Vec<DbId> = runs::table
        .filter(runs::logs_expired_at.is_null())
        .filter(runs::finished_at.lt(DbTs::from(*before)))
        .order(runs::finished_at)
        .limit(i64::from(*limit))
        .select(runs::id)
        .load(conn)
        .await?;
    Ok(ids.into_iter().map(Into::into).collect())
}

pub(crate) async fn run_logs_gone(conn: &mut Conn, ctx: &Ctx, ids: &[RunId]) -> Result<(), StoreError> {
    let ids: Vec<DbId> = ids.iter().map(|id| DbId::from(*id)).collect();
    diesel::update(runs::table.filter(runs::id.eq_any(&ids)).filter(runs::logs_expired_at.is_null()))
        .set(runs::logs_expired_at.eq(DbTs::from(ctx.now)))
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn runs_older(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<Vec<RunId>, StoreError> {
    let ids: Vec<DbId> = runs::table
        .filter(runs::id.lt(id_at(*before)))
        .filter(runs::status.eq_any(ended_runs()))
        .filter(runs::finished_at.lt(DbTs::from(*before)))
        .order(runs::id)
        .limit(i64::from(*limit))
        .select(runs::id)
        .load(conn)
        .await?;
    Ok(ids.into_iter().map(Into::into).collect())
}

pub(crate) async fn runs_prune(conn: &mut Conn, _: &Ctx, ids: &[RunId]) -> Result<u64, StoreError> {
    let ids: Vec<DbId> = ids.iter().map(|id| DbId::from(*id)).collect();
    diesel::delete(request_keys::table.filter(request_keys::result_id.eq_any(&ids))).execute(conn).await?;
    let gone = diesel::delete(runs::table)
        .filter(runs::id.eq_any(&ids))
        .filter(runs::status.eq_any(ended_runs()))
        .execute(conn)
        .await?;
    Ok(gone as u64)
}
