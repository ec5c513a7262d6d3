//! The durable inbox.

use std::collections::BTreeMap;
use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{DeliveryRowId, SourceId};
use kici_engine::time::Ts;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::backend::{Conn, Db};
use super::kept::{Condition, kept};
use super::rows::{agent_opt, big, clean_opt, count, next, small, ts_opt, word};
use super::runs::create;
use super::schema::{decision_traces, deliveries, delivery_bodies};
use super::sources::registrations_replace;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{
    Activate, Cursor, Delivery, DeliveryBody, DeliveryFilter, DeliveryInserted, DeliveryOutcome, DeliveryStatus,
    Listed, NewDelivery, Page, Processed, ProcessedDelivery,
};
use crate::notify::Topic;
use crate::types::{DbId, DbTs, Doc};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = deliveries, check_for_backend(Db), treat_none_as_default_value = false)]
pub(super) struct DeliveryRow {
    id: DbId,
    org: String,
    source_id: DbId,
    delivery_id: String,
    event: String,
    action: Option<String>,
    provider: String,
    channel: String,
    pub(super) status: String,
    matched_count: i64,
    repo: Option<String>,
    git_ref: Option<String>,
    sha: Option<String>,
    first_run_id: Option<DbId>,
    error: Option<String>,
    note: Option<String>,
    payload_key: Option<String>,
    payload_sha256: String,
    payload_bytes: i64,
    payload_omitted: Option<String>,
    attempts: i64,
    claimed_by: Option<String>,
    claimed_at: Option<DbTs>,
    next_attempt_at: Option<DbTs>,
    received_at: DbTs,
    finished_at: Option<DbTs>,
    request_id: String,
    claims: i64,
}

impl DeliveryRow {
    pub(super) fn read(self) -> Result<Delivery, StoreError> {
        Ok(Delivery {
            id: self.id.into(),
            org: self.org,
            source_id: self.source_id.into(),
            delivery_id: self.delivery_id,
            event: self.event,
            action: self.action,
            provider: self.provider,
            channel: self.channel,
            status: word("delivery status", &self.status)?,
            matched_count: small(self.matched_count),
            repo: self.repo,
            git_ref: self.git_ref,
            sha: self.sha,
            first_run_id: self.first_run_id.map(Into::into),
            error: self.error,
            note: self.note,
            payload_key: self.payload_key,
            payload_sha256: self.payload_sha256,
            payload_bytes: count(self.payload_bytes),
            payload_omitted: self.payload_omitted,
            attempts: small(self.attempts),
            claimed_by: agent_opt(self.claimed_by)?,
            claimed_at: ts_opt(self.claimed_at),
            next_attempt_at: ts_opt(self.next_attempt_at),
            received_at: self.received_at.into(),
            finished_at: ts_opt(self.finished_at),
            request_id: self.request_id,
            claims: small(self.claims),
        })
    }
}

/// The delivery is to be processed. A literal, so that both planners use the partial index.
pub(super) fn is_received() -> Condition {
    Condition("deliveries.status = 'received'")
}

pub(crate) async fn delivery_insert(
    conn: &mut Conn,
    ctx: &Ctx,
    new: &NewDelivery,
) -> Result<DeliveryInserted, StoreError> {
    let id = DeliveryRowId::mint(ctx.ids());
    let row = new_row(ctx, id, new);
    let inserted = diesel::insert_into(deliveries::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if inserted == 1 {
        put_body(conn, id, new).await?;
        wake_unless_claimed(ctx, new);
        return Ok(DeliveryInserted::Inserted(id));
    }
    let (id, status): (DbId, String) = lock_row!(
        deliveries::table
            .filter(deliveries::source_id.eq(DbId::from(new.source_id)))
            .filter(deliveries::delivery_id.eq(&new.delivery_id))
            .select((deliveries::id, deliveries::status))
    )
    .first(conn)
    .await?;
    let id = DeliveryRowId::from(id);
    let status: DeliveryStatus = word("delivery status", &status)?;
    if !matches!(status, DeliveryStatus::Failed | DeliveryStatus::Dead | DeliveryStatus::Shed) {
        return Ok(DeliveryInserted::Duplicate { id, status });
    }
    diesel::delete(delivery_bodies::table.find(DbId::from(id))).execute(conn).await?;
    put_body(conn, id, new).await?;
    let claimed_at = new.claimed_by.is_some().then_some(DbTs::from(ctx.now));
    diesel::update(deliveries::table.find(DbId::from(id)))
        .set((
            deliveries::status.eq(DeliveryStatus::Received.as_str()),
            deliveries::attempts.eq(0_i64),
            deliveries::payload_sha256.eq(&row.payload_sha256),
            deliveries::payload_bytes.eq(row.payload_bytes),
            deliveries::payload_key.eq(None::<String>),
            deliveries::payload_omitted.eq(None::<String>),
            deliveries::error.eq(None::<String>),
            deliveries::claimed_by.eq(&row.claimed_by),
            deliveries::claimed_at.eq(claimed_at),
            deliveries::claims.eq(row.claims),
            deliveries::next_attempt_at.eq(None::<DbTs>),
            deliveries::finished_at.eq(None::<DbTs>),
        ))
        .execute(conn)
        .await?;
    wake_unless_claimed(ctx, new);
    Ok(DeliveryInserted::Reopened(id))
}

/// A row that its writer has claimed already is no work for anybody else.
fn wake_unless_claimed(ctx: &Ctx, new: &NewDelivery) {
    if new.claimed_by.is_none() {
        ctx.wake(Topic::Deliveries);
    }
}

pub(super) fn new_row(ctx: &Ctx, id: DeliveryRowId, new: &NewDelivery) -> DeliveryRow {
    DeliveryRow {
        id: id.into(),
        org: new.org.clone(),
        source_id: new.source_id.into(),
        delivery_id: new.delivery_id.clone(),
        event: new.event.clone(),
        action: new.action.clone(),
        provider: new.provider.clone(),
        channel: new.channel.clone(),
        status: DeliveryStatus::Received.as_str().to_owned(),
        matched_count: 0,
        repo: new.repo.clone(),
        git_ref: new.git_ref.clone(),
        sha: new.sha.clone(),
        first_run_id: None,
        error: None,
        note: None,
        payload_key: None,
        payload_sha256: hex::encode(Sha256::digest(&new.body)),
        payload_bytes: big(u64::try_from(new.body.len()).unwrap_or(u64::MAX)),
        payload_omitted: None,
        attempts: 0,
        claimed_by: new.claimed_by.as_ref().map(|id| id.as_str().to_owned()),
        claimed_at: new.claimed_by.is_some().then_some(ctx.now.into()),
        next_attempt_at: None,
        received_at: ctx.now.into(),
        finished_at: None,
        request_id: new.request_id.clone(),
        claims: new.claimed_by.is_some().into(),
    }
}

pub(super) async fn put_body(conn: &mut Conn, id: DeliveryRowId, new: &NewDelivery) -> Result<(), StoreError> {
    let packed = zstd::encode_all(&new.body[..], 3).map_err(|error| StoreError::Full(error.to_string()))?;
    diesel::insert_into(delivery_bodies::table)
        .values((
            delivery_bodies::delivery_id.eq(DbId::from(id)),
            delivery_bodies::headers.eq(Doc(new.headers.clone())),
            delivery_bodies::body.eq(packed),
        ))
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn delivery_finish(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &DeliveryRowId,
    outcome: &DeliveryOutcome,
) -> Result<bool, StoreError> {
    finish(conn, ctx, *id, outcome, DeliveryFacts::default()).await
}

async fn finish(
    conn: &mut Conn,
    ctx: &Ctx,
    id: DeliveryRowId,
    outcome: &DeliveryOutcome,
    facts: DeliveryFacts<'_>,
) -> Result<bool, StoreError> {
    let end = (
        deliveries::status.eq(outcome.status.as_str()),
        deliveries::error.eq(clean_opt(outcome.error.as_deref())),
        deliveries::note.eq(clean_opt(outcome.note.as_deref())),
        deliveries::claimed_by.eq(None::<String>),
        deliveries::claimed_at.eq(None::<DbTs>),
        deliveries::next_attempt_at.eq(None::<DbTs>),
        deliveries::finished_at.eq(DbTs::from(ctx.now)),
    );
    let delivery = deliveries::table.find(DbId::from(id));
    let changed = kept(diesel::update(delivery).filter(is_received()).set((end, facts))).execute(conn).await?;
    Ok(changed == 1)
}

pub(crate) async fn delivery_retry(
    conn: &mut Conn,
    _: &Ctx,
    id: &DeliveryRowId,
    error: &str,
    next_at: &Ts,
) -> Result<bool, StoreError> {
    let changed = diesel::update(deliveries::table.find(DbId::from(*id)))
        .filter(is_received())
        .set((
            deliveries::attempts.eq(deliveries::attempts + 1),
            // It ended, so it is not what ended a process before.
            deliveries::claims.eq(0_i64),
            deliveries::error.eq(clean_opt(Some(error))),
            deliveries::claimed_by.eq(None::<String>),
            deliveries::claimed_at.eq(None::<DbTs>),
            deliveries::next_attempt_at.eq(DbTs::from(*next_at)),
        ))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn delivery_reopen(conn: &mut Conn, ctx: &Ctx, id: &DeliveryRowId) -> Result<bool, StoreError> {
    let changed = diesel::update(deliveries::table.find(DbId::from(*id)))
        .filter(deliveries::status.eq(DeliveryStatus::Dead.as_str()))
        .set((
            deliveries::status.eq(DeliveryStatus::Received.as_str()),
            deliveries::attempts.eq(0_i64),
            deliveries::claims.eq(0_i64),
            deliveries::error.eq(None::<String>),
            deliveries::note.eq(None::<String>),
            deliveries::next_attempt_at.eq(None::<DbTs>),
            deliveries::finished_at.eq(None::<DbTs>),
        ))
        .execute(conn)
        .await?;
    ctx.wake(Topic::Deliveries);
    Ok(changed == 1)
}

pub(crate) async fn delivery_discard(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &DeliveryRowId,
    note: &str,
) -> Result<bool, StoreError> {
    let changed = diesel::update(deliveries::table.find(DbId::from(*id)))
        .filter(deliveries::status.eq(DeliveryStatus::Dead.as_str()))
        .set((
            deliveries::status.eq(DeliveryStatus::Failed.as_str()),
            deliveries::note.eq(clean_opt(Some(note))),
            deliveries::finished_at.eq(DbTs::from(ctx.now)),
        ))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn delivery_body(
    conn: &mut Conn,
    _: &Ctx,
    id: &DeliveryRowId,
) -> Result<Option<DeliveryBody>, StoreError> {
    let row: Option<(Doc<Json>, Vec<u8>)> = delivery_bodies::table
        .find(DbId::from(*id))
        .select((delivery_bodies::headers, delivery_bodies::body))
        .first(conn)
        .await
        .optional()?;
    let Some((headers, packed)) = row else { return Ok(None) };
    let body = zstd::decode_all(&packed[..])
        .map_err(|error| StoreError::Corrupt { what: "delivery body", detail: error.to_string() })?;
    Ok(Some(DeliveryBody { headers: headers.0, body }))
}

pub(crate) async fn delivery_get(conn: &mut Conn, _: &Ctx, id: &DeliveryRowId) -> Result<Option<Delivery>, StoreError> {
    let row: Option<DeliveryRow> =
        deliveries::table.find(DbId::from(*id)).select(DeliveryRow::as_select()).first(conn).await.optional()?;
    row.map(DeliveryRow::read).transpose()
}

pub(crate) async fn delivery_list(
    conn: &mut Conn,
    _: &Ctx,
    filter: &DeliveryFilter,
    page: &Page,
) -> Result<Listed<Delivery>, StoreError> {
    let mut query = deliveries::table.into_boxed::<Db>();
    if let Some(id) = filter.source_id {
        query = query.filter(deliveries::source_id.eq(DbId::from(id)));
    }
    if !filter.statuses.is_empty() {
        query = query.filter(deliveries::status.eq_any(filter.statuses.iter().map(|status| status.as_str())));
    }
    if let Some(event) = &filter.event {
        query = query.filter(deliveries::event.eq(event));
    }
    if let Some(repo) = &filter.repo {
        query = query.filter(deliveries::repo.eq(repo));
    }
    if let Some(part) = &filter.delivery_id {
        let part = part.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
        query = query.filter(deliveries::delivery_id.like(format!("%{part}%")).escape('\\'));
    }
    if let Some(from) = filter.from {
        query = query.filter(deliveries::received_at.ge(DbTs::from(from)));
    }
    if let Some(to) = filter.to {
        query = query.filter(deliveries::received_at.lt(DbTs::from(to)));
    }
    if let Some(Cursor { at, id }) = page.after {
        let (at, id) = (DbTs::from(at), DbId::from(id));
        query =
            query.filter(deliveries::received_at.lt(at).or(deliveries::received_at.eq(at).and(deliveries::id.lt(id))));
    }
    let limit = page.limit.clamp(1, 500);
    let rows: Vec<DeliveryRow> = query
        .order((deliveries::received_at.desc(), deliveries::id.desc()))
        .limit(i64::from(limit))
        .select(DeliveryRow::as_select())
        .load(conn)
        .await?;
    let items = rows.into_iter().map(DeliveryRow::read).collect::<Result<Vec<_>, _>>()?;
    let next = next(&items, limit, |row| Cursor { at: row.received_at, id: row.id.uuid() });
    Ok(Listed { items, next })
}

pub(crate) async fn deliveries_known(
    conn: &mut Conn,
    _: &Ctx,
    source_id: &SourceId,
    ids: &[String],
) -> Result<Vec<String>, StoreError> {
    let query = deliveries::table
        .filter(deliveries::source_id.eq(DbId::from(*source_id)))
        .filter(deliveries::delivery_id.eq_any(ids))
        .select(deliveries::delivery_id);
    Ok(query.load(conn).await?)
}

pub(crate) async fn delivery_counts(conn: &mut Conn, _: &Ctx) -> Result<BTreeMap<DeliveryStatus, u64>, StoreError> {
    let rows: Vec<(String, i64)> = deliveries::table
        .group_by(deliveries::status)
        .select((deliveries::status, diesel::dsl::count_star()))
        .load(conn)
        .await?;
    rows.into_iter().map(|(status, rows)| Ok((word("delivery status", &status)?, count(rows)))).collect()
}

pub(crate) async fn delivery_bodies_finished(
    conn: &mut Conn,
    _: &Ctx,
    limit: &u32,
) -> Result<Vec<Delivery>, StoreError> {
    let rows: Vec<DeliveryRow> = deliveries::table
        .filter(deliveries::id.eq_any(delivery_bodies::table.select(delivery_bodies::delivery_id)))
        .filter(deliveries::finished_at.is_not_null())
        // A retry needs the body.
        .filter(deliveries::status.ne(DeliveryStatus::Dead.as_str()))
        .order((deliveries::received_at, deliveries::id))
        .limit(i64::from(*limit))
        .select(DeliveryRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(DeliveryRow::read).collect()
}

pub(crate) async fn delivery_body_moved(
    conn: &mut Conn,
    _: &Ctx,
    id: &DeliveryRowId,
    finished_at: &Ts,
    key: &Option<String>,
    omitted: &Option<String>,
) -> Result<bool, StoreError> {
    // A delivery that was sent again meanwhile has a new body, which is still needed.
    let changed = diesel::update(deliveries::table.find(DbId::from(*id)))
        .filter(deliveries::finished_at.eq(DbTs::from(*finished_at)))
        .filter(deliveries::status.ne(DeliveryStatus::Dead.as_str()))
        .set((deliveries::payload_key.eq(key), deliveries::payload_omitted.eq(omitted)))
        .execute(conn)
        .await?;
    if changed == 1 {
        diesel::delete(delivery_bodies::table.find(DbId::from(*id))).execute(conn).await?;
    }
    Ok(changed == 1)
}

pub(crate) async fn delivery_body_expired(
    conn: &mut Conn,
    _: &Ctx,
    id: &DeliveryRowId,
    key: &str,
) -> Result<bool, StoreError> {
    let changed = diesel::update(deliveries::table.find(DbId::from(*id)))
        .filter(deliveries::payload_key.eq(key))
        .set((deliveries::payload_key.eq(None::<String>), deliveries::payload_omitted.eq("expired")))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn trace_put(conn: &mut Conn, ctx: &Ctx, id: &DeliveryRowId, trace: &Json) -> Result<(), StoreError> {
    let (body, created_at) = (Doc(trace.clone()), DbTs::from(ctx.now));
    let insert = diesel::insert_into(decision_traces::table)
        .values((
            decision_traces::delivery_id.eq(DbId::from(*id)),
            decision_traces::body.eq(&body),
            decision_traces::created_at.eq(created_at),
        ))
        .on_conflict(decision_traces::delivery_id)
        .do_update()
        .set((decision_traces::body.eq(&body), decision_traces::created_at.eq(created_at)));
    kept(insert).execute(conn).await?;
    Ok(())
}

pub(crate) async fn trace_get(conn: &mut Conn, _: &Ctx, id: &DeliveryRowId) -> Result<Option<Json>, StoreError> {
    let body: Option<Doc<Json>> =
        decision_traces::table.find(DbId::from(*id)).select(decision_traces::body).first(conn).await.optional()?;
    Ok(body.map(|body| body.0))
}

pub(crate) async fn delivery_process(
    conn: &mut Conn,
    ctx: &Ctx,
    done: &ProcessedDelivery,
    activate: &Arc<dyn Activate>,
) -> Result<Processed, StoreError> {
    let planned = done.runs.iter().map(|run| run.id).next();
    let facts = DeliveryFacts {
        matched_count: Some(done.matched_count.into()),
        repo: done.repo.as_deref(),
        git_ref: done.git_ref.as_deref(),
        sha: done.sha.as_deref(),
        first_run_id: planned.map(Into::into),
    };
    if !finish(conn, ctx, done.id, &done.outcome, facts).await? {
        return Ok(Processed { applied: false, runs: Vec::new() });
    }
    let mut runs = Vec::with_capacity(done.runs.len());
    for run in &done.runs {
        runs.push(create(conn, ctx, run, &**activate).await?);
    }
    // An earlier attempt may have made it under another id.
    let first = runs.iter().map(|run| run.run_id).next();
    if first != planned {
        let facts = DeliveryFacts { first_run_id: first.map(Into::into), ..DeliveryFacts::default() };
        kept(diesel::update(deliveries::table.find(DbId::from(done.id))).set(facts)).execute(conn).await?;
    }
    if let Some(trace) = &done.trace {
        trace_put(conn, ctx, &done.id, trace).await?;
    }
    if let Some(set) = &done.registrations {
        registrations_replace(conn, ctx, set).await?;
    }
    Ok(Processed { applied: true, runs })
}

/// What processing found out; `None` keeps.
#[derive(AsChangeset, Default)]
#[diesel(table_name = deliveries)]
struct DeliveryFacts<'a> {
    matched_count: Option<i64>,
    repo: Option<&'a str>,
    git_ref: Option<&'a str>,
    sha: Option<&'a str>,
    first_run_id: Option<DbId>,
}
