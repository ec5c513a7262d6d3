//! Settings, instances, leases.

use std::collections::BTreeSet;
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::InstanceId;
use kici_engine::time::Ts;
use uuid::Uuid;

use super::backend::{self, Conn, Db};
use super::queue::is_held;
use super::rows::{agent, corrupt};
use super::schema::{cluster_instances, dispatch_queue, leases, meta};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{Instance, LeaseAnswer};
use crate::types::{DbId, DbTs};

const CLUSTER_ID: &str = "cluster_id";

pub(crate) async fn cluster_id(conn: &mut Conn, ctx: &Ctx) -> Result<Uuid, StoreError> {
    diesel::insert_into(meta::table)
        .values((meta::key.eq(CLUSTER_ID), meta::value.eq(ctx.uuid().to_string())))
        .on_conflict_do_nothing()
        .execute(conn)
        .await?;
    let text: String = meta::table.find(CLUSTER_ID).select(meta::value).first(conn).await?;
    text.parse().map_err(|error| corrupt("cluster id", &error))
}

pub(crate) async fn meta_get(conn: &mut Conn, _: &Ctx, key: &str) -> Result<Option<String>, StoreError> {
    Ok(meta::table.find(key).select(meta::value).first(conn).await.optional()?)
}

pub(crate) async fn meta_set(conn: &mut Conn, _: &Ctx, key: &str, value: &str) -> Result<(), StoreError> {
    diesel::insert_into(meta::table)
        .values((meta::key.eq(key), meta::value.eq(value)))
        .on_conflict(meta::key)
        .do_update()
        .set(meta::value.eq(value))
        .execute(conn)
        .await?;
    Ok(())
}

#[derive(Queryable, Selectable, Insertable, AsChangeset)]
#[diesel(table_name = cluster_instances, check_for_backend(Db), treat_none_as_null = true)]
#[diesel(primary_key(instance_id))]
struct InstanceRow {
    instance_id: String,
    incarnation: DbId,
    role: String,
    address: Option<String>,
    version: String,
    started_at: DbTs,
    last_seen_at: DbTs,
    draining: bool,
}

pub(crate) async fn instance_heartbeat(conn: &mut Conn, ctx: &Ctx, instance: &Instance) -> Result<(), StoreError> {
    let row = InstanceRow {
        instance_id: instance.instance_id.as_str().to_owned(),
        incarnation: instance.incarnation.into(),
        role: instance.role.clone(),
        address: instance.address.clone(),
        version: instance.version.clone(),
        started_at: instance.started_at.into(),
        last_seen_at: ctx.now.into(),
        draining: instance.draining,
    };
    diesel::insert_into(cluster_instances::table)
        .values(&row)
        .on_conflict(cluster_instances::instance_id)
        .do_update()
        .set(&row)
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn instance_list(conn: &mut Conn, _: &Ctx) -> Result<Vec<Instance>, StoreError> {
    let rows = cluster_instances::table
        .order(cluster_instances::instance_id)
        .select(InstanceRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Instance {
                instance_id: agent(row.instance_id)?,
                incarnation: row.incarnation.into(),
                role: row.role,
                address: row.address,
                version: row.version,
                started_at: row.started_at.into(),
                last_seen_at: row.last_seen_at.into(),
                draining: row.draining,
            })
        })
        .collect()
}

pub(crate) async fn instance_dead(conn: &mut Conn, _: &Ctx, before: &Ts) -> Result<Vec<InstanceId>, StoreError> {
    let silent: Vec<String> = cluster_instances::table
        .filter(cluster_instances::last_seen_at.lt(DbTs::from(*before)))
        .select(cluster_instances::instance_id)
        .load(conn)
        .await?;
    // An instance that stopped in order has taken its row with it, and left the jobs of its agents.
    let known = cluster_instances::table.select(cluster_instances::instance_id.nullable());
    let stopped: Vec<Option<String>> = dispatch_queue::table
        .filter(is_held())
        .filter(dispatch_queue::owner_instance_id.is_not_null())
        .filter(dispatch_queue::owner_instance_id.ne_all(known))
        .select(dispatch_queue::owner_instance_id)
        .distinct()
        .load(conn)
        .await?;
    let ids: BTreeSet<String> = silent.into_iter().chain(stopped.into_iter().flatten()).collect();
    ids.into_iter().map(agent).collect()
}

pub(crate) async fn instance_remove(conn: &mut Conn, _: &Ctx, id: &InstanceId) -> Result<(), StoreError> {
    diesel::delete(cluster_instances::table.find(id.as_str())).execute(conn).await?;
    Ok(())
}

pub(crate) async fn lease_acquire(
    conn: &mut Conn,
    ctx: &Ctx,
    name: &str,
    ttl: &Duration,
) -> Result<LeaseAnswer, StoreError> {
    type Columns = (String, Option<DbId>, i64, DbTs);
    let me = ctx.node().as_str();
    let start = DbId::from(ctx.incarnation());
    let unheld = DbTs::from(Ts::from_micros(0));
    // The row must exist before it can be locked.
    diesel::insert_into(leases::table)
        .values((
            leases::name.eq(name),
            leases::holder.eq(me),
            leases::incarnation.eq(None::<DbId>),
            leases::term.eq(0_i64),
            leases::expires_at.eq(unheld),
            leases::renewed_at.eq(unheld),
        ))
        .on_conflict_do_nothing()
        .execute(conn)
        .await?;
    let columns = (leases::holder, leases::incarnation, leases::term, leases::expires_at);
    let (holder, incarnation, term, expires_at): Columns =
        lock_row!(leases::table.find(name).select(columns)).first(conn).await?;
    // Once the row is locked: whoever held it meanwhile is done.
    let now = backend::lease_now(conn, ctx).await?;
    let mine = holder == me && incarnation == Some(start);
    let held = expires_at > now;
    if !backend::SINGLE_NODE && !mine && held {
        return Ok(LeaseAnswer::Other { holder: agent(holder)?, expires_at: expires_at.into() });
    }
    // One that ran out is taken anew even by its last holder: another one may have had it in between.
    let term = if mine && (held || backend::SINGLE_NODE) { term } else { term + 1 };
    diesel::update(leases::table.find(name))
        .set((
            leases::holder.eq(me),
            leases::incarnation.eq(start),
            leases::term.eq(term),
            leases::expires_at.eq(DbTs::from(Ts::from(now).plus(*ttl))),
            leases::renewed_at.eq(now),
        ))
        .execute(conn)
        .await?;
    Ok(LeaseAnswer::Held { term })
}

pub(crate) async fn lease_release(conn: &mut Conn, ctx: &Ctx, name: &str) -> Result<(), StoreError> {
    let now = backend::lease_now(conn, ctx).await?;
    // The row stays, expired: the next holder's term must be higher.
    diesel::update(leases::table.find(name))
        .filter(leases::holder.eq(ctx.node().as_str()))
        .filter(leases::incarnation.eq(DbId::from(ctx.incarnation())))
        .set(leases::expires_at.eq(now))
        .execute(conn)
        .await?;
    Ok(())
}
