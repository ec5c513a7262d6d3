//! Deliveries that were kept although there was no room for them, and how they come back.

use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::DeliveryRowId;

use super::backend::Conn;
use super::deliveries::{new_row, put_body};
use super::delivery_claims::claim;
use super::kept::Condition;
use super::rows::word;
use super::schema::deliveries;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{DeliveryShed, DeliveryStatus, Drained, NewDelivery};
use crate::types::{DbId, DbTs};

/// The delivery waits as overflow. A literal, so that both planners use the partial index.
fn is_shed() -> Condition {
    Condition("deliveries.status = 'shed'")
}

pub(crate) async fn delivery_shed(
    conn: &mut Conn,
    ctx: &Ctx,
    new: &NewDelivery,
    limit: &u32,
) -> Result<DeliveryShed, StoreError> {
    let known: Option<(DbId, String)> = deliveries::table
        .filter(deliveries::source_id.eq(DbId::from(new.source_id)))
        .filter(deliveries::delivery_id.eq(&new.delivery_id))
        .select((deliveries::id, deliveries::status))
        .first(conn)
        .await
        .optional()?;
    if let Some((id, status)) = known {
        return Ok(match word("delivery status", &status)? {
            DeliveryStatus::Shed => DeliveryShed::Kept,
            // Only a delivery that is let in is tried again.
            DeliveryStatus::Failed | DeliveryStatus::Dead => DeliveryShed::NoRoom,
            _ => DeliveryShed::Known { id: id.into() },
        });
    }
    let waiting: i64 = deliveries::table.filter(is_shed()).count().get_result(conn).await?;
    if waiting >= i64::from(*limit) {
        return Ok(DeliveryShed::NoRoom);
    }
    let id = DeliveryRowId::mint(ctx.ids());
    let mut row = new_row(ctx, id, new);
    row.status = DeliveryStatus::Shed.as_str().to_owned();
    let inserted = diesel::insert_into(deliveries::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if inserted == 0 {
        // The same delivery came twice at the same moment and the other call keeps it.
        return Ok(DeliveryShed::Kept);
    }
    put_body(conn, id, new).await?;
    Ok(DeliveryShed::Kept)
}

pub(crate) async fn delivery_drain(
    conn: &mut Conn,
    ctx: &Ctx,
    limit: &u32,
    max_age: &Duration,
) -> Result<Drained, StoreError> {
    let dropped = diesel::update(deliveries::table)
        .filter(is_shed())
        .filter(deliveries::received_at.lt(DbTs::from(ctx.now.minus(*max_age))))
        .set((
            deliveries::status.eq(DeliveryStatus::Dead.as_str()),
            deliveries::error.eq("there was no room for it for longer than ingest.overflow_age_ms"),
            deliveries::finished_at.eq(DbTs::from(ctx.now)),
        ))
        .execute(conn)
        .await?;
    let ids: Vec<DbId> = skip_locked!(
        deliveries::table
            .filter(is_shed())
            .order((deliveries::received_at, deliveries::id))
            .limit(i64::from(*limit))
            .select(deliveries::id)
    )
    .load(conn)
    .await?;
    let claimed = claim(conn, ctx, &ids).await?;
    Ok(Drained { claimed, dropped: u64::try_from(dropped).unwrap_or(u64::MAX) })
}
