//! The roster of hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::hosts::is_reserved_property;
use kici_engine::ids::AgentId;
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::backend::{Conn, Db};
use super::queue::INSTANCE_DEAD_AFTER;
use super::rows::{agent, agent_opt, clean_opt, ts_opt, word};
use super::schema::{cluster_instances, host_roster};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{AgentType, DeclaredHost, HostRemoved, KEEPS_RUNNING, PendingReboot, RosterEntry, RosterHost};
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
    declared_at: Option<DbTs>,
    declared_by: Option<String>,
    declared_hostname: Option<String>,
    declared_labels: Option<Doc<Vec<String>>>,
    boot_id: Option<String>,
    reboot_pending_until: Option<DbTs>,
    reboot_job_id: Option<DbId>,
    reboot_boot_id: Option<String>,
    reboot_by: Option<String>,
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
            declared_at: ts_opt(self.declared_at),
            declared_by: self.declared_by,
            declared_hostname: self.declared_hostname,
            declared_labels: self.declared_labels.map(|labels| labels.0),
            boot_id: self.boot_id,
            reboot: self.reboot_pending_until.map(|until| PendingReboot {
                until: until.into(),
                job: self.reboot_job_id.map(Into::into),
                boot_id: self.reboot_boot_id,
                by: self.reboot_by.unwrap_or_default(),
            }),
        })
    }

    fn unknown(ctx: &Ctx, agent_id: &AgentId) -> Self {
        Self {
            agent_id: agent_id.as_str().to_owned(),
            token_id: None,
            lifecycle_class: AgentType::Static.as_str().to_owned(),
            scaler_managed: false,
            labels: Doc(Vec::new()),
            hostname: None,
            platform: None,
            arch: None,
            version: None,
            machine_id: None,
            connected_instance_id: None,
            last_seen: None,
            host_properties: Doc(BTreeMap::new()),
            created_at: ctx.now.into(),
            updated_at: ctx.now.into(),
            declared_at: None,
            declared_by: None,
            declared_hostname: None,
            declared_labels: None,
            boot_id: None,
            reboot_pending_until: None,
            reboot_job_id: None,
            reboot_boot_id: None,
            reboot_by: None,
        }
    }
}

/// A row for a change; its second half says whether it was there.
async fn row_of(conn: &mut Conn, ctx: &Ctx, agent_id: &AgentId) -> Result<(RosterRow, bool), StoreError> {
    let found: Option<RosterRow> = lock_row!(host_roster::table.find(agent_id.as_str()).select(RosterRow::as_select()))
        .first(conn)
        .await
        .optional()?;
    let known = found.is_some();
    Ok((found.unwrap_or_else(|| RosterRow::unknown(ctx, agent_id)), known))
}

async fn put(conn: &mut Conn, row: &RosterRow) -> Result<(), StoreError> {
    diesel::insert_into(host_roster::table)
        .values(row)
        .on_conflict(host_roster::agent_id)
        .do_update()
        .set(row)
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn roster_upsert(conn: &mut Conn, ctx: &Ctx, entry: &RosterEntry) -> Result<RosterHost, StoreError> {
    let (mut row, _) = row_of(conn, ctx, &entry.agent_id).await?;
    // The last line of defence: whatever wrote the entry, an agent never sets the system's properties.
    let own = entry.properties.iter().filter(|(key, _)| !is_reserved_property(key));
    row.host_properties.0.extend(own.map(|(key, value)| (key.clone(), value.clone())));
    match entry.keeps_running {
        true => drop(row.host_properties.0.insert(KEEPS_RUNNING.to_owned(), true.into())),
        false => drop(row.host_properties.0.remove(KEEPS_RUNNING)),
    }
    row.token_id = entry.token_id.map(Into::into);
    if row.declared_at.is_none() {
        entry.lifecycle.as_str().clone_into(&mut row.lifecycle_class);
    }
    row.scaler_managed = entry.scaler_managed;
    row.labels = Doc(entry.labels.clone());
    row.hostname = row.declared_hostname.clone().or_else(|| clean_opt(entry.hostname.as_deref()));
    row.platform = clean_opt(entry.platform.as_deref());
    row.arch = clean_opt(entry.arch.as_deref());
    row.version = clean_opt(entry.version.as_deref());
    row.machine_id = clean_opt(entry.machine_id.as_deref());
    row.boot_id = clean_opt(entry.boot_id.as_deref());
    row.connected_instance_id = Some(ctx.node().as_str().to_owned());
    row.last_seen = Some(ctx.now.into());
    row.updated_at = ctx.now.into();
    put(conn, &row).await?;
    row.read()
}

pub(crate) async fn roster_declare(
    conn: &mut Conn,
    ctx: &Ctx,
    declared: &DeclaredHost,
) -> Result<(RosterHost, bool), StoreError> {
    let (mut row, known) = row_of(conn, ctx, &declared.agent_id).await?;
    AgentType::Static.as_str().clone_into(&mut row.lifecycle_class);
    if let Some(hostname) = clean_opt(declared.hostname.as_deref()) {
        row.hostname = Some(hostname.clone());
        row.declared_hostname = Some(hostname);
    }
    if let Some(labels) = &declared.labels {
        row.declared_labels = Some(Doc(labels.clone()));
    }
    for (key, value) in &declared.properties {
        if value.is_null() {
            row.host_properties.0.remove(key);
        } else {
            row.host_properties.0.insert(key.clone(), value.clone());
        }
    }
    row.declared_at.get_or_insert(ctx.now.into());
    row.declared_by = clean_opt(Some(&declared.by));
    row.updated_at = ctx.now.into();
    put(conn, &row).await?;
    Ok((row.read()?, !known))
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

/// Hosts by name.
pub(crate) async fn hosts_named(
    conn: &mut Conn,
    names: &BTreeSet<AgentId>,
) -> Result<BTreeMap<AgentId, RosterHost>, StoreError> {
    let rows: Vec<RosterRow> = host_roster::table
        .filter(host_roster::agent_id.eq_any(names.iter().map(AgentId::as_str)))
        .select(RosterRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(|row| row.read().map(|host| (host.agent_id.clone(), host))).collect()
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

/// A row that says "connected" without a sign of life for so long is wrong: agents are noted every minute.
const SILENT: Duration = Duration::from_secs(600);

/// Rows of hosts that no live instance is connected to.
macro_rules! apart {
    ($ctx:expr) => {{
        let alive = cluster_instances::table
            .filter(cluster_instances::last_seen_at.ge(DbTs::from($ctx.now.minus(INSTANCE_DEAD_AFTER))))
            .select(cluster_instances::instance_id.nullable());
        let elsewhere = host_roster::connected_instance_id.ne($ctx.node().as_str());
        host_roster::connected_instance_id
            .is_null()
            .or(elsewhere.and(host_roster::connected_instance_id.ne_all(alive)))
            .or(host_roster::last_seen.lt(DbTs::from($ctx.now.minus(SILENT))))
    }};
}

pub(crate) async fn roster_remove(conn: &mut Conn, ctx: &Ctx, agent_id: &AgentId) -> Result<HostRemoved, StoreError> {
    let gone = diesel::delete(host_roster::table.filter(host_roster::agent_id.eq(agent_id.as_str())))
        .filter(apart!(ctx))
        .execute(conn)
        .await?;
    if gone > 0 {
        return Ok(HostRemoved::Removed);
    }
    let left = roster_get(conn, ctx, agent_id).await?;
    Ok(if left.is_some() { HostRemoved::Connected } else { HostRemoved::NotFound })
}

pub(crate) async fn roster_reap(conn: &mut Conn, ctx: &Ctx, before: &Ts) -> Result<Vec<AgentId>, StoreError> {
    let gone: Vec<String> = diesel::delete(host_roster::table)
        .filter(host_roster::lifecycle_class.eq(AgentType::Ephemeral.as_str()))
        .filter(host_roster::last_seen.lt(DbTs::from(*before)))
        .filter(apart!(ctx))
        .returning(host_roster::agent_id)
        .get_results(conn)
        .await?;
    gone.into_iter().map(agent).collect()
}

pub(crate) async fn roster_property_set(
    conn: &mut Conn,
    ctx: &Ctx,
    agent_id: &AgentId,
    key: &str,
    value: &Json,
) -> Result<bool, StoreError> {
    let (mut row, known) = row_of(conn, ctx, agent_id).await?;
    if known {
        row.host_properties.0.insert(key.to_owned(), value.clone());
        row.updated_at = ctx.now.into();
        put(conn, &row).await?;
    }
    Ok(known)
}

pub(crate) async fn roster_reboot_request(
    conn: &mut Conn,
    _: &Ctx,
    agent_id: &AgentId,
    reboot: &PendingReboot,
) -> Result<bool, StoreError> {
    let changed = diesel::update(host_roster::table.find(agent_id.as_str()))
        .set((
            host_roster::reboot_pending_until.eq(DbTs::from(reboot.until)),
            host_roster::reboot_job_id.eq(reboot.job.map(DbId::from)),
            host_roster::reboot_boot_id.eq(clean_opt(reboot.boot_id.as_deref())),
            host_roster::reboot_by.eq(clean_opt(Some(&reboot.by))),
        ))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn roster_reboot_clear(
    conn: &mut Conn,
    _: &Ctx,
    agent_id: &AgentId,
    until: &Ts,
) -> Result<bool, StoreError> {
    // Named by its deadline: a request that came meanwhile stays.
    let changed = diesel::update(host_roster::table.find(agent_id.as_str()))
        .filter(host_roster::reboot_pending_until.eq(DbTs::from(*until)))
        .set((
            host_roster::reboot_pending_until.eq(None::<DbTs>),
            host_roster::reboot_job_id.eq(None::<DbId>),
            host_roster::reboot_boot_id.eq(None::<String>),
            host_roster::reboot_by.eq(None::<String>),
        ))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn roster_rebooting(conn: &mut Conn, _: &Ctx) -> Result<Vec<RosterHost>, StoreError> {
    let rows: Vec<RosterRow> = host_roster::table
        .filter(host_roster::reboot_pending_until.is_not_null())
        .order(host_roster::agent_id)
        .select(RosterRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(RosterRow::read).collect()
}
