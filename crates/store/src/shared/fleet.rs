//! The roster of hosts, the access log and the outbox.

use std::collections::BTreeMap;
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::AgentId;
use kici_engine::time::Ts;
use serde_json::Value as Json;
use uuid::Uuid;

use super::backend::{Conn, Db};
use super::rows::{agent, agent_opt, clean_opt, next, small, ts_opt, word};
use super::schema::{access_log, host_roster, outbox};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{
    Access, AccessFilter, AgentType, Cursor, Listed, NewAccess, OutboxItem, Page, RosterEntry, RosterHost,
};
use crate::types::{DbId, DbTs, Doc};

#[derive(Queryable, Selectable, Insertable, AsChangeset)]
#[diesel(table_name = host_roster, check_for_backend(Db), treat_none_as_null = true)]
#[diesel(primary_key(agent_id))]
struct RosterRow {
    agent_id: String,
    token_id: Option<DbId>,
    lifecycle_class: String,
    scaler_managed: bool,
    labels: Doc<Vec<String>>,
    hostname: Option<String>,
    platform: Option<String>,
    arch: Option<String>,
    version: Option<String>,
    machine_id: Option<String>,
    connected_instance_id: Option<String>,
    last_seen: Option<DbTs>,
    host_properties: Doc<BTreeMap<String, Json>>,
    created_at: DbTs,
    updated_at: DbTs,
}

impl RosterRow {
    fn read(self) -> Result<RosterHost, StoreError> {
        Ok(RosterHost {
            agent_id: agent(self.agent_id)?,
            token_id: self.token_id.map(Into::into),
            lifecycle: word("agent type", &self.lifecycle_class)?,
            scaler_managed: self.scaler_managed,
            labels: self.labels.0,
            hostname: self.hostname,
            platform: self.platform,
            arch: self.arch,
            version: self.version,
            machine_id: self.machine_id,
            connected_instance_id: agent_opt(self.connected_instance_id)?,
            last_seen: ts_opt(self.last_seen),
            properties: self.host_properties.0,
            created_at: self.created_at.into(),
            updated_at: self.updated_at.into(),
        })
    }
}

pub(crate) async fn roster_upsert(conn: &mut Conn, ctx: &Ctx, entry: &RosterEntry) -> Result<RosterHost, StoreError> {
    let old = roster_get(conn, ctx, &entry.agent_id).await?;
    let (mut properties, created_at) =
        old.map_or_else(|| (BTreeMap::new(), ctx.now), |host| (host.properties, host.created_at));
    properties.extend(entry.properties.clone());
    let row = RosterRow {
        agent_id: entry.agent_id.as_str().to_owned(),
        token_id: entry.token_id.map(Into::into),
        lifecycle_class: entry.lifecycle.as_str().to_owned(),
        scaler_managed: entry.scaler_managed,
        labels: Doc(entry.labels.clone()),
        hostname: clean_opt(entry.hostname.as_deref()),
        platform: clean_opt(entry.platform.as_deref()),
        arch: clean_opt(entry.arch.as_deref()),
        version: clean_opt(entry.version.as_deref()),
        machine_id: clean_opt(entry.machine_id.as_deref()),
        connected_instance_id: Some(ctx.node().as_str().to_owned()),
        last_seen: Some(ctx.now.into()),
        host_properties: Doc(properties),
        created_at: created_at.into(),
        updated_at: ctx.now.into(),
    };
    diesel::insert_into(host_roster::table)
        .values(&row)
        .on_conflict(host_roster::agent_id)
        .do_update()
        .set(&row)
        .execute(conn)
        .await?;
    row.read()
}

pub(crate) async fn roster_list(conn: &mut Conn, _: &Ctx) -> Result<Vec<RosterHost>, StoreError> {
    let rows: Vec<RosterRow> =
        host_roster::table.order(host_roster::agent_id).select(RosterRow::as_select()).load(conn).await?;
    rows.into_iter().map(RosterRow::read).collect()
}

pub(crate) async fn roster_get(conn: &mut Conn, _: &Ctx, agent_id: &AgentId) -> Result<Option<RosterHost>, StoreError> {
    let row: Option<RosterRow> =
        host_roster::table.find(agent_id.as_str()).select(RosterRow::as_select()).first(conn).await.optional()?;
    row.map(RosterRow::read).transpose()
}

pub(crate) async fn roster_seen(conn: &mut Conn, ctx: &Ctx, seen: &[(AgentId, Ts)]) -> Result<(), StoreError> {
    for (agent_id, at) in seen {
        diesel::update(host_roster::table.find(agent_id.as_str()))
            .filter(host_roster::connected_instance_id.eq(ctx.node().as_str()))
            .set(host_roster::last_seen.eq(DbTs::from(*at)))
            .execute(conn)
            .await?;
    }
    Ok(())
}

pub(crate) async fn roster_disconnected(conn: &mut Conn, ctx: &Ctx, agent_id: &AgentId) -> Result<(), StoreError> {
    // Only while it still counts as connected here: it may have come back to another instance.
    diesel::update(host_roster::table.find(agent_id.as_str()))
        .filter(host_roster::connected_instance_id.eq(ctx.node().as_str()))
        .set((
            host_roster::connected_instance_id.eq(None::<String>),
            host_roster::last_seen.eq(DbTs::from(ctx.now)),
            host_roster::updated_at.eq(DbTs::from(ctx.now)),
        ))
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn roster_reap(conn: &mut Conn, _: &Ctx, before: &Ts) -> Result<Vec<AgentId>, StoreError> {
    let gone: Vec<String> = diesel::delete(host_roster::table)
        .filter(host_roster::lifecycle_class.eq(AgentType::Ephemeral.as_str()))
        .filter(host_roster::connected_instance_id.is_null())
        .filter(host_roster::last_seen.lt(DbTs::from(*before)))
        .returning(host_roster::agent_id)
        .get_results(conn)
        .await?;
    gone.into_iter().map(agent).collect()
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = access_log, check_for_backend(Db))]
struct AccessRow {
    id: DbId,
    org: Option<String>,
    actor_type: String,
    actor_id: String,
    actor_meta: Option<Doc<Json>>,
    action: String,
    source: String,
    outcome: String,
    target_type: Option<String>,
    target_id: Option<String>,
    request_id: Option<String>,
    routing_key: Option<String>,
    error_message: Option<String>,
    created_at: DbTs,
}

impl AccessRow {
    fn read(self) -> Access {
        Access {
            id: self.id.into(),
            created_at: self.created_at.into(),
            entry: NewAccess {
                org: self.org,
                actor_type: self.actor_type,
                actor_id: self.actor_id,
                actor_meta: self.actor_meta.map(|meta| meta.0),
                action: self.action,
                source: self.source,
                outcome: self.outcome,
                target_type: self.target_type,
                target_id: self.target_id,
                request_id: self.request_id,
                routing_key: self.routing_key,
                error_message: self.error_message,
            },
        }
    }
}

pub(crate) async fn access_log_insert(conn: &mut Conn, ctx: &Ctx, entries: &[NewAccess]) -> Result<(), StoreError> {
    let rows: Vec<AccessRow> = entries
        .iter()
        .map(|entry| AccessRow {
            id: ctx.uuid().into(),
            org: entry.org.clone(),
            actor_type: entry.actor_type.clone(),
            actor_id: super::rows::clean(&entry.actor_id),
            actor_meta: entry.actor_meta.clone().map(Doc),
            action: entry.action.clone(),
            source: entry.source.clone(),
            outcome: entry.outcome.clone(),
            target_type: entry.target_type.clone(),
            target_id: clean_opt(entry.target_id.as_deref()),
            request_id: entry.request_id.clone(),
            routing_key: entry.routing_key.clone(),
            error_message: clean_opt(entry.error_message.as_deref()),
            created_at: ctx.now.into(),
        })
        .collect();
    insert_all!(conn, access_log::table, &rows);
    Ok(())
}

pub(crate) async fn access_log_list(
    conn: &mut Conn,
    _: &Ctx,
    filter: &AccessFilter,
    page: &Page,
) -> Result<Listed<Access>, StoreError> {
    let mut query = access_log::table.into_boxed::<Db>();
    if let Some(actor_id) = &filter.actor_id {
        query = query.filter(access_log::actor_id.eq(actor_id));
    }
    if let Some(action) = &filter.action {
        query = query.filter(access_log::action.eq(action));
    }
    if let Some(target_type) = &filter.target_type {
        query = query.filter(access_log::target_type.eq(target_type));
    }
    if let Some(target_id) = &filter.target_id {
        query = query.filter(access_log::target_id.eq(target_id));
    }
    if let Some(outcome) = &filter.outcome {
        query = query.filter(access_log::outcome.eq(outcome));
    }
    if let Some(from) = filter.from {
        query = query.filter(access_log::created_at.ge(DbTs::from(from)));
    }
    if let Some(to) = filter.to {
        query = query.filter(access_log::created_at.lt(DbTs::from(to)));
    }
    if let Some(Cursor { at, id }) = page.after {
        let (at, id) = (DbTs::from(at), DbId::from(id));
        query =
            query.filter(access_log::created_at.lt(at).or(access_log::created_at.eq(at).and(access_log::id.lt(id))));
    }
    let limit = page.limit.clamp(1, 500);
    let rows: Vec<AccessRow> = query
        .order((access_log::created_at.desc(), access_log::id.desc()))
        .limit(i64::from(limit))
        .select(AccessRow::as_select())
        .load(conn)
        .await?;
    let items: Vec<Access> = rows.into_iter().map(AccessRow::read).collect();
    let next = next(&items, limit, |row| Cursor { at: row.created_at, id: row.id });
    Ok(Listed { items, next })
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = outbox, check_for_backend(Db))]
struct OutboxRow {
    id: DbId,
    kind: String,
    payload: Doc<Json>,
    created_at: DbTs,
    attempts: i64,
    next_attempt_at: DbTs,
}

pub(crate) async fn outbox_put(conn: &mut Conn, ctx: &Ctx, kind: &str, payload: &Json) -> Result<Uuid, StoreError> {
    let id = ctx.uuid();
    let row = OutboxRow {
        id: id.into(),
        kind: kind.to_owned(),
        payload: Doc(payload.clone()),
        created_at: ctx.now.into(),
        attempts: 0,
        next_attempt_at: ctx.now.into(),
    };
    diesel::insert_into(outbox::table).values(&row).execute(conn).await?;
    Ok(id)
}

pub(crate) async fn outbox_take(
    conn: &mut Conn,
    ctx: &Ctx,
    kinds: &[String],
    limit: &u32,
    hide: &Duration,
) -> Result<Vec<OutboxItem>, StoreError> {
    let mut rows: Vec<OutboxRow> = skip_locked!(
        outbox::table
            .filter(outbox::next_attempt_at.le(DbTs::from(ctx.now)))
            .filter(outbox::kind.eq_any(kinds))
            .order((outbox::next_attempt_at, outbox::id))
            .limit(i64::from(*limit))
            .select(OutboxRow::as_select())
    )
    .load(conn)
    .await?;
    let again = DbTs::from(ctx.now.plus(*hide));
    let ids: Vec<DbId> = rows.iter().map(|row| row.id).collect();
    diesel::update(outbox::table.filter(outbox::id.eq_any(ids)))
        .set((outbox::attempts.eq(outbox::attempts + 1), outbox::next_attempt_at.eq(again)))
        .execute(conn)
        .await?;
    rows.sort_by_key(|row| row.id);
    Ok(rows
        .into_iter()
        .map(|row| OutboxItem {
            id: row.id.into(),
            kind: row.kind,
            payload: row.payload.0,
            created_at: row.created_at.into(),
            attempts: small(row.attempts) + 1,
            next_attempt_at: again.into(),
        })
        .collect())
}

pub(crate) async fn outbox_done(conn: &mut Conn, _: &Ctx, id: &Uuid) -> Result<(), StoreError> {
    diesel::delete(outbox::table.find(DbId::from(*id))).execute(conn).await?;
    Ok(())
}
