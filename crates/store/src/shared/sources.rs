//! Sources and registrations.

use std::collections::{BTreeMap, BTreeSet};

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{RegistrationId, SourceId};
use serde_json::{Value as Json, json};

use super::backend::{Conn, Db};
use super::ends;
use super::rows::{clean, ts_opt, word};
use super::runs::lock_put;
use super::schedules::keep_schedules;
use super::schema::{registrations, registry_version, sources};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{NewSource, Registration, RegistrationSet, Source, SourceChange};
use crate::types::{DbId, DbTs, Doc};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = sources, check_for_backend(Db))]
struct SourceRow {
    id: DbId,
    org: String,
    name: String,
    kind: String,
    routing_key: String,
    config: Doc<Json>,
    sealed_secrets: Option<String>,
    enabled: bool,
    deleted_at: Option<DbTs>,
    version: i64,
    created_at: DbTs,
}

impl SourceRow {
    fn read(self) -> Result<Source, StoreError> {
        Ok(Source {
            id: self.id.into(),
            org: self.org,
            name: self.name,
            kind: word("source kind", &self.kind)?,
            routing_key: self.routing_key,
            config: self.config.0,
            sealed_secrets: self.sealed_secrets,
            enabled: self.enabled,
            deleted_at: ts_opt(self.deleted_at),
            version: self.version,
            created_at: self.created_at.into(),
        })
    }
}

pub(crate) async fn source_create(conn: &mut Conn, ctx: &Ctx, new: &NewSource) -> Result<Source, StoreError> {
    let row = SourceRow {
        id: new.id.into(),
        org: new.org.clone(),
        name: new.name.clone(),
        kind: new.kind.as_str().to_owned(),
        routing_key: new.routing_key.clone(),
        config: Doc(new.config.clone()),
        sealed_secrets: new.sealed_secrets.clone(),
        enabled: new.enabled,
        deleted_at: None,
        version: 1,
        created_at: ctx.now.into(),
    };
    // Not left to the unique index alone: SQLite does not say which of them was violated.
    if source_get(conn, ctx, &new.org, &new.name).await?.is_some() {
        return Err(StoreError::Exists { what: "source", field: "name" });
    }
    let inserted = diesel::insert_into(sources::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if inserted == 0 {
        return Err(StoreError::Exists { what: "source", field: "routing key" });
    }
    row.read()
}

pub(crate) async fn source_list(conn: &mut Conn, _: &Ctx, org: &str) -> Result<Vec<Source>, StoreError> {
    let rows = sources::table
        .filter(sources::org.eq(org))
        .filter(sources::deleted_at.is_null())
        .order(sources::name)
        .select(SourceRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(SourceRow::read).collect()
}

pub(crate) async fn source_get(conn: &mut Conn, _: &Ctx, org: &str, name: &str) -> Result<Option<Source>, StoreError> {
    let row: Option<SourceRow> = sources::table
        .filter(sources::org.eq(org))
        .filter(sources::name.eq(name))
        .filter(sources::deleted_at.is_null())
        .select(SourceRow::as_select())
        .first(conn)
        .await
        .optional()?;
    row.map(SourceRow::read).transpose()
}

pub(crate) async fn source_by_id(conn: &mut Conn, _: &Ctx, id: &SourceId) -> Result<Option<Source>, StoreError> {
    let row: Option<SourceRow> =
        sources::table.find(DbId::from(*id)).select(SourceRow::as_select()).first(conn).await.optional()?;
    row.map(SourceRow::read).transpose()
}

pub(crate) async fn source_by_routing_key(
    conn: &mut Conn,
    _: &Ctx,
    routing_key: &str,
) -> Result<Option<Source>, StoreError> {
    let row: Option<SourceRow> = sources::table
        .filter(sources::routing_key.eq(routing_key))
        .filter(sources::deleted_at.is_null())
        .select(SourceRow::as_select())
        .first(conn)
        .await
        .optional()?;
    row.map(SourceRow::read).transpose()
}

/// What an update writes; `None` keeps.
#[derive(AsChangeset)]
#[diesel(table_name = sources)]
struct SourceUpdate {
    config: Option<Doc<Json>>,
    sealed_secrets: Option<String>,
    enabled: Option<bool>,
    version: i64,
}

pub(crate) async fn source_update(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &SourceId,
    version: &i64,
    change: &SourceChange,
) -> Result<Source, StoreError> {
    // Whether its workflows listen depends on it.
    if change.enabled.is_some() {
        raise_version(conn).await?;
    }
    let update = SourceUpdate {
        config: change.config.clone().map(Doc),
        sealed_secrets: change.sealed_secrets.clone(),
        enabled: change.enabled,
        version: version + 1,
    };
    let changed = diesel::update(sources::table.find(DbId::from(*id)))
        .filter(sources::version.eq(version))
        .filter(sources::deleted_at.is_null())
        .set(update)
        .execute(conn)
        .await?;
    match source_by_id(conn, ctx, id).await? {
        Some(source) if changed == 1 => Ok(source),
        Some(source) if source.deleted_at.is_none() => Err(StoreError::Changed { what: "source" }),
        _ => Err(StoreError::NotFound { what: "source" }),
    }
}

pub(crate) async fn source_remove(conn: &mut Conn, ctx: &Ctx, id: &SourceId) -> Result<bool, StoreError> {
    raise_version(conn).await?;
    let changed = diesel::update(sources::table.find(DbId::from(*id)))
        .filter(sources::deleted_at.is_null())
        .set((
            sources::deleted_at.eq(DbTs::from(ctx.now)),
            sources::enabled.eq(false),
            sources::version.eq(sources::version + 1),
        ))
        .execute(conn)
        .await?;
    diesel::delete(registrations::table.filter(registrations::source_id.eq(DbId::from(*id)))).execute(conn).await?;
    Ok(changed == 1)
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = registrations, check_for_backend(Db))]
struct RegistrationRow {
    id: DbId,
    org: String,
    routing_key: String,
    source_id: DbId,
    repo: String,
    workflow_name: String,
    lock_digest: String,
    sha: String,
    default_branch: Option<String>,
    trigger_types: Doc<Vec<String>>,
    enabled: bool,
    disabled_by: Option<String>,
    updated_at: DbTs,
}

impl RegistrationRow {
    fn read(self) -> Registration {
        Registration {
            id: self.id.into(),
            org: self.org,
            routing_key: self.routing_key,
            source_id: self.source_id.into(),
            repo: self.repo,
            workflow_name: self.workflow_name,
            lock_digest: self.lock_digest,
            sha: self.sha,
            default_branch: self.default_branch,
            trigger_types: self.trigger_types.0,
            enabled: self.enabled,
            disabled_by: self.disabled_by,
            updated_at: self.updated_at.into(),
        }
    }
}

pub(crate) async fn registration_list(
    conn: &mut Conn,
    _: &Ctx,
    org: &str,
    routing_key: &Option<String>,
    trigger_type: &Option<String>,
) -> Result<Vec<Registration>, StoreError> {
    let live =
        sources::table.filter(sources::enabled.eq(true)).filter(sources::deleted_at.is_null()).select(sources::id);
    let mut query = registrations::table
        .filter(registrations::org.eq(org))
        .filter(registrations::source_id.eq_any(live))
        .into_boxed::<Db>();
    if let Some(routing_key) = routing_key {
        query = query.filter(registrations::routing_key.eq(routing_key));
    }
    let rows: Vec<RegistrationRow> = query
        .order((registrations::routing_key, registrations::repo, registrations::workflow_name))
        .select(RegistrationRow::as_select())
        .load(conn)
        .await?;
    let wanted =
        |row: &Registration| trigger_type.as_ref().is_none_or(|wanted| row.trigger_types.iter().any(|t| t == wanted));
    Ok(rows.into_iter().map(RegistrationRow::read).filter(wanted).collect())
}

pub(crate) async fn registration_enable(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &RegistrationId,
    enabled: &bool,
    by: &str,
) -> Result<bool, StoreError> {
    raise_version(conn).await?;
    let changed = diesel::update(registrations::table.find(DbId::from(*id)))
        .set((
            registrations::enabled.eq(*enabled),
            registrations::disabled_by.eq((!enabled).then(|| clean(by))),
            registrations::updated_at.eq(DbTs::from(ctx.now)),
        ))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn registrations_replace(conn: &mut Conn, ctx: &Ctx, set: &RegistrationSet) -> Result<(), StoreError> {
    // First: whoever writes registrations waits here for the others, and then sees what they wrote.
    raise_version(conn).await?;
    let before: Vec<(String, String, String)> = registrations::table
        .filter(registrations::org.eq(&set.org))
        .filter(registrations::routing_key.eq(&set.routing_key))
        .filter(registrations::repo.eq(&set.repo))
        .select((registrations::workflow_name, registrations::lock_digest, registrations::sha))
        .load(conn)
        .await?;
    let commits: BTreeSet<&str> = before.iter().map(|(.., sha)| sha.as_str()).collect();
    if set.seen.as_ref().is_some_and(|seen| !seen.iter().map(String::as_str).eq(commits.iter().copied())) {
        return Err(StoreError::Changed { what: "repository's set of registrations" });
    }
    if !set.keeps_others {
        let names: Vec<&str> = set.workflows.iter().map(|workflow| workflow.name.as_str()).collect();
        diesel::delete(registrations::table)
            .filter(registrations::org.eq(&set.org))
            .filter(registrations::routing_key.eq(&set.routing_key))
            .filter(registrations::repo.eq(&set.repo))
            .filter(registrations::workflow_name.ne_all(names))
            .execute(conn)
            .await?;
    }
    for workflow in &set.workflows {
        lock_put(conn, ctx, &workflow.lock_digest, &workflow.lock_json).await?;
        let row = RegistrationRow {
            id: ctx.uuid().into(),
            org: set.org.clone(),
            routing_key: set.routing_key.clone(),
            source_id: set.source_id.into(),
            repo: set.repo.clone(),
            workflow_name: workflow.name.clone(),
            lock_digest: workflow.lock_digest.clone(),
            sha: set.sha.clone(),
            default_branch: set.default_branch.clone(),
            trigger_types: Doc(workflow.trigger_types.clone()),
            enabled: true,
            disabled_by: None,
            updated_at: ctx.now.into(),
        };
        // Whether it is enabled is a person's decision and outlives a push.
        diesel::insert_into(registrations::table)
            .values(&row)
            .on_conflict((
                registrations::org,
                registrations::routing_key,
                registrations::repo,
                registrations::workflow_name,
            ))
            .do_update()
            .set((
                registrations::lock_digest.eq(&row.lock_digest),
                registrations::sha.eq(&row.sha),
                registrations::default_branch.eq(&row.default_branch),
                registrations::trigger_types.eq(&row.trigger_types),
                registrations::updated_at.eq(row.updated_at),
            ))
            .execute(conn)
            .await?;
        let id: DbId = registrations::table
            .filter(registrations::org.eq(&set.org))
            .filter(registrations::routing_key.eq(&set.routing_key))
            .filter(registrations::repo.eq(&set.repo))
            .filter(registrations::workflow_name.eq(&workflow.name))
            .select(registrations::id)
            .first(conn)
            .await?;
        keep_schedules(conn, id, &workflow.lock_json).await?;
    }
    match difference(set, before.into_iter().map(|(name, digest, _)| (name, digest)).collect()) {
        Some(payload) => ends::announce_registrations(conn, ctx, set, payload).await,
        None => Ok(()),
    }
}

/// What a new set changes, as the document of an event; none when it is what was there.
fn difference(set: &RegistrationSet, mut before: BTreeMap<String, String>) -> Option<Json> {
    let (mut added, mut changed) = (Vec::new(), Vec::new());
    for workflow in &set.workflows {
        match before.remove(&workflow.name) {
            None => added.push(workflow.name.as_str()),
            Some(digest) if digest != workflow.lock_digest => changed.push(workflow.name.as_str()),
            Some(_) => {}
        }
    }
    let removed: Vec<&String> = before.keys().filter(|_| !set.keeps_others).collect();
    if added.is_empty() && changed.is_empty() && removed.is_empty() {
        return None;
    }
    Some(json!({"repo": set.repo, "sha": set.sha, "added": added, "changed": changed, "removed": removed}))
}

async fn raise_version(conn: &mut Conn) -> Result<(), StoreError> {
    diesel::update(registry_version::table.find(1))
        .set(registry_version::version.eq(registry_version::version + 1))
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn registry_version(conn: &mut Conn, _: &Ctx) -> Result<i64, StoreError> {
    Ok(registry_version::table.find(1).select(registry_version::version).first(conn).await?)
}
