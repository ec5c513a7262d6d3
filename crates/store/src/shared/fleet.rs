//! The access log and the outbox.

use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use serde_json::Value as Json;
use uuid::Uuid;

use super::backend::{Conn, Db};
use super::rows::{clean_opt, next, small};
use super::schema::{access_log, outbox};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{Access, AccessFilter, Cursor, Listed, NewAccess, OutboxItem, Page};
use crate::types::{DbId, DbTs, Doc};

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
