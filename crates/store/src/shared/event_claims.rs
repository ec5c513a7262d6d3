//! Who delivers an event, and what becomes of one whose delivery does not end: as with deliveries of webhooks
//! ([`super::delivery_claims`]).

use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::InstanceId;

use super::backend::Conn;
use super::bus::{EventRow, is_pending};
use super::gates;
use super::kept::Condition;
use super::schema::events;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{BusEvent, EventStatus};
use crate::notify::Topic;
use crate::types::{DbId, DbTs};

/// Claims of an event in a row, none of which came to an end, before it is given up.
const MAX_CLAIMS: i64 = 5;

/// The event is to be delivered and two or more claims of it came to no end. A literal, so that both planners use the
/// partial index.
fn is_suspect() -> Condition {
    Condition("events.status = 'pending' AND events.claims >= 2")
}

pub(crate) async fn event_claim(
    conn: &mut Conn,
    ctx: &Ctx,
    limit: &u32,
    lease: &Duration,
) -> Result<Vec<BusEvent>, StoreError> {
    let now = DbTs::from(ctx.now);
    let lapsed = DbTs::from(ctx.now.minus(*lease));
    let due = events::next_attempt_at.is_null().or(events::next_attempt_at.le(now));
    let free = events::claimed_by.is_null().or(events::claimed_at.lt(lapsed));
    let mut ids: Vec<DbId> = suspect(conn, ctx, lapsed).await?.into_iter().collect();
    let others = usize::try_from(*limit).unwrap_or(usize::MAX).saturating_sub(ids.len());
    let others: Vec<DbId> = skip_locked!(
        events::table
            .filter(is_pending())
            .filter(due)
            .filter(free)
            .filter(events::claims.lt(BusEvent::SUSPECT))
            .order((events::created_at, events::id))
            .limit(i64::try_from(others).unwrap_or(i64::MAX))
            .select(events::id)
    )
    .load(conn)
    .await?;
    ids.extend(others);
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    diesel::update(events::table.filter(events::id.eq_any(&ids)))
        .set((
            events::claimed_by.eq(ctx.node().as_str()),
            events::claimed_at.eq(now),
            events::claims.eq(events::claims + 1),
        ))
        .execute(conn)
        .await?;
    bury(conn, ctx, &ids).await?;
    let rows: Vec<EventRow> = events::table
        .filter(events::id.eq_any(&ids))
        .filter(is_pending())
        .order((events::created_at, events::id))
        .select(EventRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(EventRow::read).collect()
}

/// One event that may be what ends processes, unless this instance delivers one already.
async fn suspect(conn: &mut Conn, ctx: &Ctx, lapsed: DbTs) -> Result<Option<DbId>, StoreError> {
    let due = events::next_attempt_at.is_null().or(events::next_attempt_at.le(DbTs::from(ctx.now)));
    let free = events::claimed_by.is_null().or(events::claimed_at.lt(lapsed));
    let next: Option<DbId> = skip_locked!(
        events::table
            .filter(is_suspect())
            .filter(due)
            .filter(free)
            .order((events::claims, events::created_at, events::id))
            .select(events::id)
    )
    .first(conn)
    .await
    .optional()?;
    if next.is_none() {
        return Ok(None);
    }
    let in_work: i64 = events::table
        .filter(is_suspect())
        .filter(events::claims.gt(BusEvent::SUSPECT))
        .filter(events::claimed_by.eq(ctx.node().as_str()))
        .filter(events::claimed_at.ge(lapsed))
        .count()
        .get_result(conn)
        .await?;
    Ok(next.filter(|_| in_work == 0))
}

/// Gives up events that were claimed again and again without an end of their delivery.
async fn bury(conn: &mut Conn, ctx: &Ctx, ids: &[DbId]) -> Result<(), StoreError> {
    let dead: Vec<DbId> = events::table
        .filter(events::id.eq_any(ids))
        .filter(events::claims.gt(MAX_CLAIMS))
        .select(events::id)
        .load(conn)
        .await?;
    if dead.is_empty() {
        return Ok(());
    }
    let problem = format!(
        "{MAX_CLAIMS} deliveries of it began and did not end; it may be what ends the process. See the log of the \
         orchestrator, then retry or discard it"
    );
    diesel::update(events::table.filter(events::id.eq_any(&dead)))
        .set((
            events::status.eq(EventStatus::Dead.as_str()),
            events::last_error.eq(&problem),
            events::dlq_reason.eq("exhausted_retries"),
            events::claimed_by.eq(None::<String>),
            events::claimed_at.eq(None::<DbTs>),
            events::finished_at.eq(DbTs::from(ctx.now)),
        ))
        .execute(conn)
        .await?;
    for id in dead {
        gates::delivered(conn, ctx, id.into(), Some(&problem)).await?;
        tracing::error!(event = %uuid::Uuid::from(id), "event is dead: its delivery began again and again and did not end");
    }
    // The next one of its kind may be taken.
    ctx.wake(Topic::Events);
    Ok(())
}

pub(crate) async fn event_claims_release(
    conn: &mut Conn,
    ctx: &Ctx,
    instances: &[InstanceId],
) -> Result<u64, StoreError> {
    let names: Vec<&str> = instances.iter().map(InstanceId::as_str).collect();
    let freed = diesel::update(events::table)
        .filter(is_pending())
        .filter(events::claimed_by.eq_any(names))
        .set((events::claimed_by.eq(None::<String>), events::claimed_at.eq(None::<DbTs>)))
        .execute(conn)
        .await?;
    if freed > 0 {
        ctx.wake(Topic::Events);
    }
    Ok(u64::try_from(freed).unwrap_or(u64::MAX))
}

pub(crate) async fn event_claims_return(conn: &mut Conn, ctx: &Ctx) -> Result<u64, StoreError> {
    let freed = diesel::update(events::table)
        .filter(is_pending())
        .filter(events::claimed_by.eq(ctx.node().as_str()))
        .filter(events::claims.gt(0))
        .set((
            events::claimed_by.eq(None::<String>),
            events::claimed_at.eq(None::<DbTs>),
            events::claims.eq(events::claims - 1),
        ))
        .execute(conn)
        .await?;
    if freed > 0 {
        ctx.wake(Topic::Events);
    }
    Ok(u64::try_from(freed).unwrap_or(u64::MAX))
}
