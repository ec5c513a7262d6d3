//! Reading the dispatch queue: for the matcher, the sweeps and people.

use std::collections::BTreeMap;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{AgentId, InstanceId, JobId};
use kici_engine::state::{JobStatus, QueueStatus};
use kici_engine::time::Ts;

use super::backend::{Conn, Db};
use super::queue::{is_held, is_open, is_pending, owner_of, pending_digests};
use super::rows::{DispatchRow, SelectorRow, agent, agent_opt, clean_opt, count, small, ts_opt, word};
use super::schema::{dispatch_history, dispatch_queue, jobs, queue_selectors};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{DispatchRecord, JobRef, Ownership, PendingSelector, QueueCounts, QueueFilter, QueueRow, Routing};
use crate::notify::Topic;
use crate::types::{DbId, DbTs};

pub(crate) async fn queue_selectors_pending(conn: &mut Conn, _: &Ctx) -> Result<Vec<PendingSelector>, StoreError> {
    let waiting: BTreeMap<String, i64> = pending_digests(conn).await?.into_iter().collect();
    if waiting.is_empty() {
        return Ok(Vec::new());
    }
    let rows: Vec<SelectorRow> = queue_selectors::table
        .filter(queue_selectors::digest.eq_any(waiting.keys()))
        .select(SelectorRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter()
        .map(|row| {
            Ok(PendingSelector {
                waiting: waiting.get(&row.digest).copied().map_or(0, count),
                digest: row.digest,
                selector: row.selector.0,
                requires_machine_id: row.requires_machine_id,
                pinned_agent_id: agent_opt(row.pinned_agent_id)?,
            })
        })
        .collect()
}

fn read(rows: Vec<(DispatchRow, SelectorRow)>) -> Result<Vec<QueueRow>, StoreError> {
    rows.into_iter().map(|(row, selector)| row.read(&selector)).collect()
}

/// Rows with their selectors, oldest first, at most `limit`.
macro_rules! rows {
    ($conn:expr, $limit:expr $(, $filter:expr)+) => {{
        let rows: Vec<(DispatchRow, SelectorRow)> = dispatch_queue::table
            .inner_join(queue_selectors::table)
            $(.filter($filter))+
            .order((dispatch_queue::created_at, dispatch_queue::id))
            .limit(i64::from($limit))
            .select((DispatchRow::as_select(), SelectorRow::as_select()))
            .load($conn)
            .await?;
        read(rows)
    }};
}

/// More rows than one agent or a set of instances ever holds.
const HELD_MAX: u32 = 100_000;

pub(crate) async fn queue_owned_by(conn: &mut Conn, _: &Ctx, agent_id: &AgentId) -> Result<Vec<QueueRow>, StoreError> {
    rows!(conn, HELD_MAX, is_held(), dispatch_queue::agent_id.eq(agent_id.as_str()))
}

pub(crate) async fn queue_owned_by_instances(
    conn: &mut Conn,
    _: &Ctx,
    instances: &[InstanceId],
) -> Result<Vec<QueueRow>, StoreError> {
    let names: Vec<&str> = instances.iter().map(InstanceId::as_str).collect();
    rows!(conn, HELD_MAX, is_held(), dispatch_queue::owner_instance_id.eq_any(names))
}

pub(crate) async fn queue_expired_acks(conn: &mut Conn, ctx: &Ctx, limit: &u32) -> Result<Vec<QueueRow>, StoreError> {
    rows!(
        conn,
        *limit,
        is_held(),
        dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()),
        dispatch_queue::acked_at.is_null(),
        dispatch_queue::ack_deadline.le(DbTs::from(ctx.now))
    )
}

pub(crate) async fn queue_expired_recoveries(
    conn: &mut Conn,
    ctx: &Ctx,
    limit: &u32,
) -> Result<Vec<QueueRow>, StoreError> {
    let past = dispatch_queue::recovery_deadline.le(DbTs::from(ctx.now));
    rows!(
        conn,
        *limit,
        is_held(),
        dispatch_queue::status.eq(QueueStatus::Recovering.as_str()),
        past.or(dispatch_queue::recovery_deadline.is_null())
    )
}

pub(crate) async fn queue_expired_pending(
    conn: &mut Conn,
    ctx: &Ctx,
    limit: &u32,
) -> Result<Vec<QueueRow>, StoreError> {
    rows!(conn, *limit, is_pending(), dispatch_queue::expires_at.le(DbTs::from(ctx.now)))
}

pub(crate) async fn queue_unstarted_since(
    conn: &mut Conn,
    _: &Ctx,
    before: &Ts,
    limit: &u32,
) -> Result<Vec<QueueRow>, StoreError> {
    let before = DbTs::from(*before);
    let rows: Vec<(DispatchRow, SelectorRow)> = dispatch_queue::table
        .inner_join(queue_selectors::table)
        .inner_join(jobs::table)
        .filter(is_held())
        .filter(dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()))
        .filter(dispatch_queue::started_at.is_null())
        .filter(
            // A row of an older version may lack the time.
            dispatch_queue::dispatched_at
                .lt(before)
                .or(dispatch_queue::dispatched_at.is_null().and(dispatch_queue::created_at.lt(before))),
        )
        .filter(jobs::last_heartbeat_at.is_null().or(jobs::last_heartbeat_at.lt(before)))
        .order((dispatch_queue::created_at, dispatch_queue::id))
        .limit(i64::from(*limit))
        .select((DispatchRow::as_select(), SelectorRow::as_select()))
        .load(conn)
        .await?;
    read(rows)
}

/// Rows that wait, in the order in which they are taken.
macro_rules! waiting {
    ($conn:expr, $limit:expr $(, $filter:expr)*) => {{
        let rows: Vec<(DispatchRow, SelectorRow)> = dispatch_queue::table
            .inner_join(queue_selectors::table)
            .filter(is_pending())
            $(.filter($filter))*
            .order((dispatch_queue::priority.desc(), dispatch_queue::created_at, dispatch_queue::id))
            .limit(i64::from($limit))
            .select((DispatchRow::as_select(), SelectorRow::as_select()))
            .load($conn)
            .await?;
        read(rows)
    }};
}

pub(crate) async fn queue_oldest_pending(conn: &mut Conn, _: &Ctx, limit: &u32) -> Result<Vec<QueueRow>, StoreError> {
    waiting!(conn, *limit)
}

pub(crate) async fn queue_pending_of(conn: &mut Conn, _: &Ctx, jobs: &[JobId]) -> Result<Vec<QueueRow>, StoreError> {
    let ids: Vec<DbId> = jobs.iter().map(|job| DbId::from(*job)).collect();
    let limit = u32::try_from(ids.len()).unwrap_or(u32::MAX);
    waiting!(conn, limit, dispatch_queue::id.eq_any(ids))
}

pub(crate) async fn queue_provisioning_set(
    conn: &mut Conn,
    _: &Ctx,
    errors: &[(JobId, Option<String>)],
) -> Result<(), StoreError> {
    for (job, error) in errors {
        diesel::update(dispatch_queue::table.find(DbId::from(*job)).filter(is_pending()))
            .set(dispatch_queue::last_provisioning_error.eq(clean_opt(error.as_deref())))
            .execute(conn)
            .await?;
    }
    Ok(())
}

pub(crate) async fn queue_get(conn: &mut Conn, _: &Ctx, job: &JobId) -> Result<Option<QueueRow>, StoreError> {
    rows!(conn, 1_u32, dispatch_queue::id.eq(DbId::from(*job))).map(|mut rows| rows.pop())
}

pub(crate) async fn queue_list(conn: &mut Conn, _: &Ctx, filter: &QueueFilter) -> Result<Vec<QueueRow>, StoreError> {
    let mut query = dispatch_queue::table.inner_join(queue_selectors::table).into_boxed::<Db>();
    if filter.statuses.is_empty() {
        query = query.filter(is_open());
    } else {
        query = query.filter(dispatch_queue::status.eq_any(filter.statuses.iter().map(|status| status.as_str())));
    }
    if let Some(agent_id) = &filter.agent_id {
        query = query.filter(dispatch_queue::agent_id.eq(agent_id.as_str()));
    }
    if let Some(run_id) = filter.run_id {
        query = query.filter(dispatch_queue::run_id.eq(DbId::from(run_id)));
    }
    let rows: Vec<(DispatchRow, SelectorRow)> = query
        .order((dispatch_queue::created_at, dispatch_queue::id))
        .limit(i64::from(filter.limit.clamp(1, 500)))
        .select((DispatchRow::as_select(), SelectorRow::as_select()))
        .load(conn)
        .await?;
    read(rows)
}

pub(crate) async fn queue_counts(conn: &mut Conn, _: &Ctx) -> Result<QueueCounts, StoreError> {
    // Two questions, since an index answers each; one for both would read all ended rows.
    let pending: i64 = dispatch_queue::table.filter(is_pending()).count().get_result(conn).await?;
    let rows: Vec<(String, i64)> = dispatch_queue::table
        .filter(is_held())
        .group_by(dispatch_queue::status)
        .select((dispatch_queue::status, diesel::dsl::count_star()))
        .load(conn)
        .await?;
    let mut counts = QueueCounts { pending: count(pending), ..QueueCounts::default() };
    for (status, rows) in rows {
        match word("queue status", &status)? {
            QueueStatus::Dispatched => counts.dispatched = count(rows),
            QueueStatus::Recovering => counts.recovering = count(rows),
            _ => {}
        }
    }
    Ok(counts)
}

#[derive(QueryableByName)]
struct Waiting {
    #[diesel(sql_type = diesel::sql_types::BigInt)]
    waiting: i64,
}

pub(crate) async fn queue_waiting(conn: &mut Conn, _: &Ctx, most: &u64) -> Result<u64, StoreError> {
    let rows = "SELECT 1 AS one FROM dispatch_queue WHERE dispatch_queue.status = 'pending'";
    let sql = format!("SELECT count(*) AS waiting FROM ({rows} LIMIT {most}) AS counted");
    let found: Waiting = diesel::sql_query(sql).get_result(conn).await?;
    Ok(count(found.waiting))
}

pub(crate) async fn queue_ownership(
    conn: &mut Conn,
    _: &Ctx,
    job: &JobRef,
    agent_id: &AgentId,
) -> Result<Ownership, StoreError> {
    let row = owner_of(conn, job.job_id).await?;
    if row.is_some_and(|(epoch, owner)| epoch == i64::from(job.epoch) && owner.as_ref() == Some(agent_id)) {
        return Ok(Ownership::Owned);
    }
    let held: Option<String> = dispatch_history::table
        .find((DbId::from(job.job_id), i64::from(job.epoch)))
        .select(dispatch_history::agent_id)
        .first(conn)
        .await
        .optional()?;
    Ok(if held.as_deref() == Some(agent_id.as_str()) { Ownership::FormerlyOwned } else { Ownership::NotOwned })
}

pub(crate) async fn dispatch_history(conn: &mut Conn, _: &Ctx, job: &JobId) -> Result<Vec<DispatchRecord>, StoreError> {
    type Columns = (i64, String, String, DbTs, Option<DbTs>, Option<String>, Option<String>);
    let rows: Vec<Columns> = dispatch_history::table
        .filter(dispatch_history::job_id.eq(DbId::from(*job)))
        .order(dispatch_history::dispatch_epoch)
        .select((
            dispatch_history::dispatch_epoch,
            dispatch_history::agent_id,
            dispatch_history::instance_id,
            dispatch_history::dispatched_at,
            dispatch_history::ended_at,
            dispatch_history::outcome,
            dispatch_history::reason,
        ))
        .load(conn)
        .await?;
    rows.into_iter()
        .map(|(epoch, agent_id, instance_id, dispatched_at, ended_at, outcome, reason)| {
            Ok(DispatchRecord {
                job_id: *job,
                epoch: small(epoch),
                agent_id: agent(agent_id)?,
                instance_id: agent(instance_id)?,
                dispatched_at: dispatched_at.into(),
                ended_at: ts_opt(ended_at),
                outcome,
                reason,
            })
        })
        .collect()
}

pub(crate) async fn queue_routing_set(conn: &mut Conn, ctx: &Ctx, routings: &[Routing]) -> Result<(), StoreError> {
    // In the order in which the end of a job locks the rows of its run.
    let mut ordered: Vec<&Routing> = routings.iter().collect();
    ordered.sort_by_key(|routing| DbId::from(routing.job_id));
    for routing in ordered {
        let id = DbId::from(routing.job_id);
        // The row of the queue first, as claims lock them. One that does not wait any more has nothing to explain.
        let row: Option<Option<DbTs>> =
            lock_row!(dispatch_queue::table.find(id).filter(is_pending()).select(dispatch_queue::unroutable_since))
                .first(conn)
                .await
                .optional()?;
        let Some(since) = row else { continue };
        if since.is_some() != routing.unroutable_since.is_some() {
            diesel::update(dispatch_queue::table.find(id))
                .set(dispatch_queue::unroutable_since.eq(routing.unroutable_since.map(DbTs::from)))
                .execute(conn)
                .await?;
        }
        let run: Option<DbId> = diesel::update(jobs::table.find(id))
            .filter(jobs::status.eq(JobStatus::Queued.as_str()))
            .set(jobs::routing_reason.eq(clean_opt(routing.reason.as_deref())))
            .returning(jobs::run_id)
            .get_result(conn)
            .await
            .optional()?;
        if let Some(run) = run {
            ctx.wake(Topic::Run(run.into()));
        }
    }
    Ok(())
}
