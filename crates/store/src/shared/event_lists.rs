//! Lists of events, and how far their chains have come.

use std::collections::BTreeMap;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::RunId;
use serde_json::Value as Json;
use uuid::Uuid;

use super::backend::{Conn, Db};
use super::rows::{agent_opt, count, next, small, ts_opt, word};
use super::schema::{deliveries, events};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{BusEvent, Cursor, DeliveryStatus, EventFilter, EventStatus, Listed, Page};
use crate::types::{DbId, DbTs, Doc};

/// A row of a list: without the documents, which can be large.
#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = events, check_for_backend(Db), treat_none_as_default_value = false)]
pub(super) struct ListedRow {
    pub(super) id: DbId,
    pub(super) org: String,
    pub(super) name: String,
    pub(super) routing_key: Option<String>,
    pub(super) source_repo: Option<String>,
    pub(super) run_id: Option<DbId>,
    pub(super) job_id: Option<DbId>,
    pub(super) emitted_by: String,
    pub(super) registration_id: Option<DbId>,
    pub(super) target_repos: Doc<Vec<String>>,
    pub(super) chain_depth: i64,
    pub(super) status: String,
    pub(super) matched_count: i64,
    pub(super) attempts: i64,
    pub(super) claimed_by: Option<String>,
    pub(super) next_attempt_at: Option<DbTs>,
    pub(super) last_error: Option<String>,
    pub(super) note: Option<String>,
    pub(super) run_ids: Doc<Vec<RunId>>,
    pub(super) dlq_reason: Option<String>,
    pub(super) request_id: String,
    pub(super) created_at: DbTs,
    pub(super) finished_at: Option<DbTs>,
}

impl ListedRow {
    /// The event without its payload and trace.
    pub(super) fn read(self) -> Result<BusEvent, StoreError> {
        Ok(BusEvent {
            id: self.id.into(),
            org: self.org,
            name: self.name,
            payload: Json::Null,
            routing_key: self.routing_key,
            source_repo: self.source_repo,
            run_id: self.run_id.map(Into::into),
            job_id: self.job_id.map(Into::into),
            emitted_by: self.emitted_by,
            registration_id: self.registration_id.map(Into::into),
            target_repos: self.target_repos.0,
            chain_depth: small(self.chain_depth),
            status: word("event status", &self.status)?,
            matched_count: small(self.matched_count),
            attempts: small(self.attempts),
            claimed_by: agent_opt(self.claimed_by)?,
            next_attempt_at: ts_opt(self.next_attempt_at),
            last_error: self.last_error,
            note: self.note,
            trace: None,
            run_ids: self.run_ids.0,
            dlq_reason: self.dlq_reason,
            request_id: self.request_id,
            created_at: self.created_at.into(),
            finished_at: ts_opt(self.finished_at),
            claims: 0,
        })
    }
}

pub(crate) async fn event_list(
    conn: &mut Conn,
    _: &Ctx,
    filter: &EventFilter,
    page: &Page,
) -> Result<Listed<BusEvent>, StoreError> {
    let mut query = events::table.into_boxed::<Db>();
    if let Some(name) = &filter.name {
        query = query.filter(events::name.eq(name));
    }
    if let Some(status) = filter.status {
        query = query.filter(events::status.eq(status.as_str()));
    }
    if let Some(key) = &filter.routing_key {
        query = query.filter(events::routing_key.eq(key));
    }
    if let Some(repo) = &filter.repo {
        query = query.filter(events::source_repo.eq(repo));
    }
    if let Some(run) = filter.run_id {
        query = query.filter(events::run_id.eq(DbId::from(run)));
    }
    if let Some(Cursor { at, id }) = page.after {
        let (at, id) = (DbTs::from(at), DbId::from(id));
        query = query.filter(events::created_at.lt(at).or(events::created_at.eq(at).and(events::id.lt(id))));
    }
    let limit = page.limit.clamp(1, 500);
    let rows: Vec<ListedRow> = query
        .order((events::created_at.desc(), events::id.desc()))
        .limit(i64::from(limit))
        .select(ListedRow::as_select())
        .load(conn)
        .await?;
    let items = rows.into_iter().map(ListedRow::read).collect::<Result<Vec<_>, _>>()?;
    let next = next(&items, limit, |row| Cursor { at: row.created_at, id: row.id.uuid() });
    Ok(Listed { items, next })
}

pub(crate) async fn dead_letters(conn: &mut Conn, _: &Ctx) -> Result<u64, StoreError> {
    let deliveries = deliveries::table.filter(deliveries::status.eq(DeliveryStatus::Dead.as_str()));
    let events = events::table.filter(events::status.eq(EventStatus::Dead.as_str()));
    let deliveries: i64 = deliveries.count().get_result(conn).await?;
    let events: i64 = events.count().get_result(conn).await?;
    Ok(count(deliveries) + count(events))
}

pub(crate) async fn event_counts(conn: &mut Conn, _: &Ctx) -> Result<BTreeMap<EventStatus, u64>, StoreError> {
    let rows: Vec<(String, i64)> =
        events::table.group_by(events::status).select((events::status, diesel::dsl::count_star())).load(conn).await?;
    rows.into_iter().map(|(status, rows)| Ok((word("event status", &status)?, count(rows)))).collect()
}

/// What the chain of a run began with: the run itself, unless an event started it.
pub(crate) async fn chain_root(conn: &mut Conn, run: RunId, dedup_key: &str, depth: u32) -> Result<Uuid, StoreError> {
    let event = dedup_key.strip_prefix("ev:").and_then(|rest| rest.split(':').next()).filter(|_| depth > 0);
    let Some(event) = event.and_then(|text| Uuid::parse_str(text).ok()) else { return Ok(run.uuid()) };
    let root: Option<Option<DbId>> =
        events::table.find(DbId::from(event)).select(events::chain_root).first(conn).await.optional()?;
    Ok(root.flatten().map_or(run.uuid(), Uuid::from))
}

/// How many events of a chain there are behind its first link, up to `most`.
pub(crate) async fn chain_length(conn: &mut Conn, root: Uuid, most: u32) -> Result<u32, StoreError> {
    let links: Vec<DbId> = events::table
        .filter(events::chain_root.eq(DbId::from(root)))
        .filter(events::chain_depth.gt(1_i64))
        .limit(i64::from(most))
        .select(events::id)
        .load(conn)
        .await?;
    Ok(u32::try_from(links.len()).unwrap_or(u32::MAX))
}
