//! Who processes a delivery, and what becomes of one whose processing does not end.
//!
//! A claim counts until it comes to an end: success, failure, or an orderly stop. Of those that a process took with it the
//! delivery keeps the number. One may be chance, and such a delivery is taken like any other; after the second it is taken
//! only while no other of this kind is in work here, those with the fewest first. So one that ends its process soon does
//! that alone, its neighbours are processed before it, and only its own number grows until it is dead.

use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::InstanceId;

use super::backend::Conn;
use super::deliveries::{DeliveryRow, is_received};
use super::kept::Condition;
use super::schema::deliveries;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{Delivery, DeliveryStatus};
use crate::notify::Topic;
use crate::types::{DbId, DbTs};

/// The delivery is to be processed and two or more claims of it came to no end. A literal, so that both planners use the
/// partial index.
fn is_suspect() -> Condition {
    Condition("deliveries.status = 'received' AND deliveries.claims >= 2")
}

pub(crate) async fn delivery_claim(
    conn: &mut Conn,
    ctx: &Ctx,
    limit: &u32,
    claim_timeout: &Duration,
    max_claims: &u32,
) -> Result<Vec<Delivery>, StoreError> {
    let lapsed = DbTs::from(ctx.now.minus(*claim_timeout));
    let due = deliveries::next_attempt_at.is_null().or(deliveries::next_attempt_at.le(DbTs::from(ctx.now)));
    let free = deliveries::claimed_by.is_null().or(deliveries::claimed_at.lt(lapsed));
    let mut ids: Vec<DbId> = suspect(conn, ctx, lapsed).await?.into_iter().collect();
    let others = usize::try_from(*limit).unwrap_or(usize::MAX).saturating_sub(ids.len());
    let others: Vec<DbId> = skip_locked!(
        deliveries::table
            .filter(is_received())
            .filter(due)
            .filter(free)
            .filter(deliveries::claims.lt(Delivery::SUSPECT))
            .order((deliveries::received_at, deliveries::id))
            .limit(i64::try_from(others).unwrap_or(i64::MAX))
            .select(deliveries::id)
    )
    .load(conn)
    .await?;
    ids.extend(others);
    let claimed = claim(conn, ctx, &ids).await?;
    if claimed.iter().all(|delivery| delivery.claims <= *max_claims) {
        return Ok(claimed);
    }
    let (dead, alive): (Vec<_>, Vec<_>) = claimed.into_iter().partition(|delivery| delivery.claims > *max_claims);
    for delivery in dead {
        bury(conn, ctx, &delivery, *max_claims).await?;
    }
    Ok(alive)
}

/// One delivery that may be what ends processes, unless this instance works on one already.
async fn suspect(conn: &mut Conn, ctx: &Ctx, lapsed: DbTs) -> Result<Option<DbId>, StoreError> {
    let due = deliveries::next_attempt_at.is_null().or(deliveries::next_attempt_at.le(DbTs::from(ctx.now)));
    let free = deliveries::claimed_by.is_null().or(deliveries::claimed_at.lt(lapsed));
    let next: Option<DbId> = skip_locked!(
        deliveries::table
            .filter(is_suspect())
            .filter(due)
            .filter(free)
            .order((deliveries::claims, deliveries::received_at, deliveries::id))
            .select(deliveries::id)
    )
    .first(conn)
    .await
    .optional()?;
    if next.is_none() {
        return Ok(None);
    }
    let in_work: i64 = deliveries::table
        .filter(is_suspect())
        .filter(deliveries::claims.gt(Delivery::SUSPECT))
        .filter(deliveries::claimed_by.eq(ctx.node().as_str()))
        .filter(deliveries::claimed_at.ge(lapsed))
        .count()
        .get_result(conn)
        .await?;
    Ok(next.filter(|_| in_work == 0))
}

/// Claims these rows for this instance, as ones to be processed; oldest first.
pub(super) async fn claim(conn: &mut Conn, ctx: &Ctx, ids: &[DbId]) -> Result<Vec<Delivery>, StoreError> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    diesel::update(deliveries::table.filter(deliveries::id.eq_any(ids)))
        .set((
            deliveries::status.eq(DeliveryStatus::Received.as_str()),
            deliveries::claimed_by.eq(ctx.node().as_str()),
            deliveries::claimed_at.eq(DbTs::from(ctx.now)),
            deliveries::claims.eq(deliveries::claims + 1),
        ))
        .execute(conn)
        .await?;
    let rows: Vec<DeliveryRow> = deliveries::table
        .filter(deliveries::id.eq_any(ids))
        .order((deliveries::received_at, deliveries::id))
        .select(DeliveryRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(DeliveryRow::read).collect()
}

/// Gives up a delivery whose processing began again and again and came to no end.
async fn bury(conn: &mut Conn, ctx: &Ctx, delivery: &Delivery, max_claims: u32) -> Result<(), StoreError> {
    let note = format!(
        "gave up: {max_claims} times in a row the process ended while it was processed; it may be what ends it. See the \
         log of the orchestrator, then retry or discard it"
    );
    diesel::update(deliveries::table.find(DbId::from(delivery.id)))
        .set((
            deliveries::status.eq(DeliveryStatus::Dead.as_str()),
            deliveries::error.eq("the process ended while it was processed"),
            deliveries::note.eq(note),
            deliveries::claimed_by.eq(None::<String>),
            deliveries::claimed_at.eq(None::<DbTs>),
            deliveries::next_attempt_at.eq(None::<DbTs>),
            deliveries::finished_at.eq(DbTs::from(ctx.now)),
        ))
        .execute(conn)
        .await?;
    // The next one of its kind may be taken.
    ctx.wake(Topic::Deliveries);
    tracing::error!(
        delivery = %delivery.id,
        "delivery is dead: the process ended whenever it was processed; see `kici-admin event dlq list`"
    );
    Ok(())
}

pub(crate) async fn delivery_claims_release(
    conn: &mut Conn,
    ctx: &Ctx,
    instances: &[InstanceId],
) -> Result<u64, StoreError> {
    let names: Vec<&str> = instances.iter().map(InstanceId::as_str).collect();
    let freed = diesel::update(deliveries::table)
        .filter(is_received())
        .filter(deliveries::claimed_by.eq_any(names))
        .set((deliveries::claimed_by.eq(None::<String>), deliveries::claimed_at.eq(None::<DbTs>)))
        .execute(conn)
        .await?;
    if freed > 0 {
        ctx.wake(Topic::Deliveries);
    }
    Ok(u64::try_from(freed).unwrap_or(u64::MAX))
}

pub(crate) async fn delivery_claims_return(conn: &mut Conn, ctx: &Ctx) -> Result<u64, StoreError> {
    let freed = diesel::update(deliveries::table)
        .filter(is_received())
        .filter(deliveries::claimed_by.eq(ctx.node().as_str()))
        .filter(deliveries::claims.gt(0))
        .set((
            deliveries::claimed_by.eq(None::<String>),
            deliveries::claimed_at.eq(None::<DbTs>),
            deliveries::claims.eq(deliveries::claims - 1),
        ))
        .execute(conn)
        .await?;
    if freed > 0 {
        ctx.wake(Topic::Deliveries);
    }
    Ok(u64::try_from(freed).unwrap_or(u64::MAX))
}
