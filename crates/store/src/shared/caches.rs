//! Entries of caches.

use diesel::prelude::*;
use diesel::sql_types::{Integer, Text};
use diesel_async::RunQueryDsl;
use kici_engine::cache::{CacheScope, Stored, evict};
use kici_engine::ids::{CacheEntryId, RunId};
use kici_engine::time::Ts;
use uuid::Uuid;

use super::backend::{Conn, Db};
use super::objects;
use super::rows::{big, count, next, word};
use super::schema::{cache_entries, stored_objects};
use super::uploads::UploadRow;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{
    CacheEntry, CacheFilter, CacheFound, CacheSpace, CommitUpload, Committed, Cursor, Listed, Page, StoredTotals,
    UploadLimits,
};
use crate::types::{DbId, DbTs};

/// Entries that one commit may evict: more stay for the next one.
const MAX_EVICTED: i64 = 2000;

diesel::define_sql_function! {
    /// Characters of a text from one to a length; the same on both databases, whatever their collation.
    fn substr(text: Text, from: Integer, length: Integer) -> Text;
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = cache_entries, check_for_backend(Db))]
struct EntryRow {
    id: DbId,
    org: String,
    source_id: DbId,
    repo: String,
    scope: String,
    run_id: DbId,
    key: String,
    object_id: DbId,
    size: i64,
    created_at: DbTs,
    last_read_at: DbTs,
}

impl EntryRow {
    fn read(self) -> Result<CacheEntry, StoreError> {
        let scope = word("cache scope", &self.scope)?;
        Ok(CacheEntry {
            id: self.id.into(),
            org: self.org,
            source_id: self.source_id.into(),
            repo: self.repo,
            scope,
            run_id: (scope == CacheScope::Isolated).then(|| self.run_id.into()),
            key: self.key,
            size: count(self.size),
            created_at: self.created_at.into(),
            last_read_at: self.last_read_at.into(),
        })
    }
}

/// The run that owns what is written in a scope; what is shared belongs to none.
fn owner(scope: CacheScope, run: RunId) -> DbId {
    match scope {
        CacheScope::Shared => DbId(Uuid::nil()),
        CacheScope::Isolated => run.into(),
    }
}

/// What shares objects: one repository's trusted runs, or one untrusted run.
fn space_name(row: &EntryRow) -> String {
    format!("cache/{}/{}/{}/{}/{}", row.org, row.source_id.0, row.repo, row.scope, row.run_id.0)
}

fn characters(text: &str) -> i32 {
    i32::try_from(text.chars().count()).unwrap_or(i32::MAX)
}

async fn found(
    conn: &mut Conn,
    space: &CacheSpace,
    scope: CacheScope,
    key: &str,
    prefix: bool,
) -> Result<Option<CacheFound>, StoreError> {
    type Columns = (DbId, String, DbTs, String, i64, String);
    let mut query = cache_entries::table
        .inner_join(stored_objects::table)
        .filter(cache_entries::org.eq(&space.org))
        .filter(cache_entries::source_id.eq(DbId::from(space.source_id)))
        .filter(cache_entries::repo.eq(&space.repo))
        .filter(cache_entries::scope.eq(scope.as_str()))
        .filter(cache_entries::run_id.eq(owner(scope, space.run_id)))
        .into_boxed::<Db>();
    query = if prefix {
        query.filter(substr(cache_entries::key, 1, characters(key)).eq(key))
    } else {
        query.filter(cache_entries::key.eq(key))
    };
    let row: Option<Columns> = query
        .order((cache_entries::created_at.desc(), cache_entries::id.desc()))
        .select((
            cache_entries::id,
            cache_entries::key,
            cache_entries::last_read_at,
            stored_objects::blob_key,
            stored_objects::size,
            stored_objects::sha256,
        ))
        .first(conn)
        .await
        .optional()?;
    Ok(row.map(|(id, key, last_read_at, blob_key, size, sha256)| CacheFound {
        id: id.into(),
        key,
        blob_key,
        size: count(size),
        sha256,
        last_read_at: last_read_at.into(),
    }))
}

pub(crate) async fn cache_find(
    conn: &mut Conn,
    _: &Ctx,
    space: &CacheSpace,
    key: &str,
    restore_keys: &[String],
) -> Result<Option<CacheFound>, StoreError> {
    for scope in space.scope.readable() {
        if let Some(entry) = found(conn, space, *scope, key, false).await? {
            return Ok(Some(entry));
        }
    }
    for prefix in restore_keys {
        for scope in space.scope.readable() {
            if let Some(entry) = found(conn, space, *scope, prefix, true).await? {
                return Ok(Some(entry));
            }
        }
    }
    Ok(None)
}

pub(crate) async fn cache_read(conn: &mut Conn, ctx: &Ctx, id: &CacheEntryId) -> Result<(), StoreError> {
    let entry = cache_entries::table.find(DbId::from(*id));
    diesel::update(entry).set(cache_entries::last_read_at.eq(DbTs::from(ctx.now))).execute(conn).await?;
    Ok(())
}

/// Whether the space writes under this key already.
pub(super) async fn exists(conn: &mut Conn, space: &CacheSpace, key: &str) -> Result<bool, StoreError> {
    Ok(found(conn, space, space.scope, key, false).await?.is_some())
}

/// The answer to a commit whose upload is gone: an entry that has this very content was made by an earlier call, or by another
/// run; both are as good.
pub(super) async fn committed(conn: &mut Conn, commit: &CommitUpload) -> Result<Committed, StoreError> {
    Ok(match found(conn, &commit.space, commit.space.scope, &commit.name, false).await? {
        Some(entry) if entry.sha256 == commit.sha256 => Committed::Stored { size: entry.size },
        Some(_) => Committed::Exists,
        None => Committed::NotReceived,
    })
}

pub(super) async fn commit(
    conn: &mut Conn,
    ctx: &Ctx,
    upload: &UploadRow,
    scope: CacheScope,
    (sha256, size): (&str, u64),
    blob_key: &str,
    limits: UploadLimits,
) -> Result<Committed, StoreError> {
    let mut row = EntryRow {
        id: ctx.uuid().into(),
        org: upload.org.clone(),
        source_id: upload.source_id,
        repo: upload.repo.clone(),
        scope: scope.as_str().to_owned(),
        run_id: owner(scope, upload.run_id.into()),
        key: upload.name.clone(),
        object_id: DbId(Uuid::nil()),
        size: big(size),
        created_at: ctx.now.into(),
        last_read_at: ctx.now.into(),
    };
    let space = CacheSpace {
        org: row.org.clone(),
        source_id: row.source_id.into(),
        repo: row.repo.clone(),
        scope,
        run_id: upload.run_id.into(),
    };
    if exists(conn, &space, &row.key).await? {
        return Ok(Committed::Exists);
    }
    row.object_id = objects::keep(conn, ctx, &space_name(&row), (sha256, size), blob_key).await?;
    diesel::insert_into(cache_entries::table).values(&row).execute(conn).await?;
    make_room(conn, ctx, &row.org, limits.quota_bytes, row.id).await?;
    Ok(Committed::Stored { size })
}

/// Evicts until the organisation is within its quota. The entry `fresh` goes last.
async fn make_room(conn: &mut Conn, ctx: &Ctx, org: &str, quota: u64, fresh: DbId) -> Result<(), StoreError> {
    let total: i64 =
        cache_entries::table.filter(cache_entries::org.eq(org)).select(objects::total()).first(conn).await?;
    let total = count(total);
    if total <= quota {
        return Ok(());
    }
    let rows: Vec<EntryRow> = cache_entries::table
        .filter(cache_entries::org.eq(org))
        .filter(cache_entries::id.ne(fresh))
        .order((cache_entries::scope, cache_entries::last_read_at, cache_entries::id))
        .limit(MAX_EVICTED)
        .select(EntryRow::as_select())
        .load(conn)
        .await?;
    let mut stored = Vec::with_capacity(rows.len());
    for row in &rows {
        let scope = word("cache scope", &row.scope)?;
        stored.push(Stored { size: count(row.size), scope, last_read: row.last_read_at.into() });
    }
    // What is not listed stays, and counts.
    let listed: u64 = stored.iter().map(|entry| entry.size).sum();
    let gone = evict(&stored, quota.saturating_sub(total - listed.min(total)));
    let gone: Vec<(DbId, DbId)> = gone.into_iter().map(|at| (rows[at].id, rows[at].object_id)).collect();
    metrics::counter!("kici_orch_user_cache_evicted_total", "reason" => "quota").increment(gone.len() as u64);
    remove(conn, ctx, &gone).await
}

async fn remove(conn: &mut Conn, ctx: &Ctx, gone: &[(DbId, DbId)]) -> Result<(), StoreError> {
    let ids: Vec<DbId> = gone.iter().map(|(id, _)| *id).collect();
    diesel::delete(cache_entries::table.filter(cache_entries::id.eq_any(&ids))).execute(conn).await?;
    let mut of: Vec<DbId> = gone.iter().map(|(_, object)| *object).collect();
    of.sort();
    of.dedup();
    objects::release(conn, ctx, &of).await
}

/// Takes the turns of the organisations in one order, so that two that remove never wait for each other.
async fn turns(conn: &mut Conn, rows: &[(DbId, DbId, String)]) -> Result<(), StoreError> {
    let mut orgs: Vec<&String> = rows.iter().map(|(_, _, org)| org).collect();
    orgs.sort();
    orgs.dedup();
    for org in orgs {
        objects::turn(conn, org).await?;
    }
    Ok(())
}

pub(crate) async fn cache_expire(conn: &mut Conn, ctx: &Ctx, before: &Ts, limit: &u32) -> Result<u64, StoreError> {
    let old = || cache_entries::table.filter(cache_entries::last_read_at.lt(DbTs::from(*before)));
    let rows: Vec<(DbId, DbId, String)> = old()
        .order((cache_entries::last_read_at, cache_entries::id))
        .limit(i64::from(*limit))
        .select((cache_entries::id, cache_entries::object_id, cache_entries::org))
        .load(conn)
        .await?;
    turns(conn, &rows).await?;
    // One that was read in between stays.
    let ids: Vec<DbId> = rows.into_iter().map(|(id, ..)| id).collect();
    let still: Vec<(DbId, DbId)> = old()
        .filter(cache_entries::id.eq_any(&ids))
        .select((cache_entries::id, cache_entries::object_id))
        .load(conn)
        .await?;
    remove(conn, ctx, &still).await?;
    Ok(still.len() as u64)
}

pub(crate) async fn cache_list(
    conn: &mut Conn,
    _: &Ctx,
    filter: &CacheFilter,
    page: &Page,
) -> Result<Listed<CacheEntry>, StoreError> {
    let mut query = filtered(filter);
    if let Some(Cursor { at, id }) = page.after {
        let (at, id) = (DbTs::from(at), DbId::from(id));
        let before = cache_entries::created_at.eq(at).and(cache_entries::id.lt(id));
        query = query.filter(cache_entries::created_at.lt(at).or(before));
    }
    let limit = page.limit.clamp(1, 500);
    let rows: Vec<EntryRow> = query
        .order((cache_entries::created_at.desc(), cache_entries::id.desc()))
        .limit(i64::from(limit))
        .select(EntryRow::as_select())
        .load(conn)
        .await?;
    let items = rows.into_iter().map(EntryRow::read).collect::<Result<Vec<_>, _>>()?;
    let next = next(&items, limit, |entry| Cursor { at: entry.created_at, id: entry.id.uuid() });
    Ok(Listed { items, next })
}

fn filtered(filter: &CacheFilter) -> cache_entries::BoxedQuery<'_, Db> {
    let mut query = cache_entries::table.into_boxed::<Db>();
    if let Some(source) = filter.source_id {
        query = query.filter(cache_entries::source_id.eq(DbId::from(source)));
    }
    if let Some(repo) = &filter.repo {
        query = query.filter(cache_entries::repo.eq(repo));
    }
    if let Some(key) = &filter.key {
        query = query.filter(cache_entries::key.eq(key));
    }
    if let Some(prefix) = &filter.key_prefix {
        query = query.filter(substr(cache_entries::key, 1, characters(prefix)).eq(prefix));
    }
    if let Some(scope) = filter.scope {
        query = query.filter(cache_entries::scope.eq(scope.as_str()));
    }
    query
}

pub(crate) async fn cache_totals(conn: &mut Conn, _: &Ctx, filter: &CacheFilter) -> Result<StoredTotals, StoreError> {
    let entries: i64 = filtered(filter).count().get_result(conn).await?;
    let bytes: i64 = filtered(filter).select(objects::total()).first(conn).await?;
    let oldest: Option<DbTs> = filtered(filter)
        .order(cache_entries::last_read_at)
        .select(cache_entries::last_read_at)
        .first(conn)
        .await
        .optional()?;
    Ok(StoredTotals { entries: count(entries), bytes: count(bytes), oldest: oldest.map(Into::into) })
}

pub(crate) async fn cache_delete(
    conn: &mut Conn,
    ctx: &Ctx,
    filter: &CacheFilter,
    limit: &u32,
) -> Result<Vec<CacheEntry>, StoreError> {
    let rows: Vec<(DbId, DbId, String)> = filtered(filter)
        .order((cache_entries::created_at, cache_entries::id))
        .limit(i64::from(*limit))
        .select((cache_entries::id, cache_entries::object_id, cache_entries::org))
        .load(conn)
        .await?;
    turns(conn, &rows).await?;
    let ids: Vec<DbId> = rows.into_iter().map(|(id, ..)| id).collect();
    let rows: Vec<EntryRow> =
        cache_entries::table.filter(cache_entries::id.eq_any(&ids)).select(EntryRow::as_select()).load(conn).await?;
    let gone: Vec<(DbId, DbId)> = rows.iter().map(|row| (row.id, row.object_id)).collect();
    remove(conn, ctx, &gone).await?;
    rows.into_iter().map(EntryRow::read).collect()
}

pub(crate) async fn cache_forget(conn: &mut Conn, ctx: &Ctx, id: &CacheEntryId) -> Result<(), StoreError> {
    let found: Option<(DbId, DbId, String)> = cache_entries::table
        .find(DbId::from(*id))
        .select((cache_entries::id, cache_entries::object_id, cache_entries::org))
        .first(conn)
        .await
        .optional()?;
    let Some(row) = found else { return Ok(()) };
    turns(conn, std::slice::from_ref(&row)).await?;
    remove(conn, ctx, &[(row.0, row.1)]).await
}
