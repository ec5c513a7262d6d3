//! The dispatch queue: claims, answers, starts. Every change is a conditional update that names the state it leaves.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_engine::time::Ts;
use tokio_util::sync::CancellationToken;

use super::backend::{Conn, Db};
use super::kept::{Condition, kept, kept_if};
use super::rows::{JobRow, NeedRow, RunRow, agent_opt, count, db_ts, small};
use super::runs::fail_at;
use super::schema::{cluster_instances, dispatch_history, dispatch_queue, job_needs, jobs, runs};
use super::settle::{self, end_history};
use crate::StoreError;
use crate::advance;
use crate::ctx::Ctx;
use crate::model::{
    Activate, ClaimRequest, ClaimedJob, Guarded, Job, JobRef, NeedEdge, NeedResult, RecoverRequest, RequeueFrom,
    RequeueRequest, Requeued, Resumed, Run, StartVerdict,
};
use crate::notify::Topic;
use crate::types::{DbId, DbTs};

/// An instance without a sign of life for longer is dead.
pub(crate) const INSTANCE_DEAD_AFTER: Duration = Duration::from_secs(120);

// Statuses are literals here: a partial index is only used when the planner sees its condition.

pub(crate) fn is_pending() -> Condition {
    Condition("dispatch_queue.status = 'pending'")
}

pub(crate) fn is_held() -> Condition {
    Condition("dispatch_queue.status IN ('dispatched', 'recovering')")
}

pub(crate) fn is_open() -> Condition {
    Condition("dispatch_queue.status IN ('pending', 'dispatched', 'recovering')")
}

pub(crate) async fn queue_claim(
    conn: &mut Conn,
    ctx: &Ctx,
    requests: &[ClaimRequest],
) -> Result<Vec<ClaimedJob>, StoreError> {
    let mut taken = Vec::new();
    for request in requests {
        let ids = candidates(conn, ctx, request).await?;
        if !ids.is_empty() {
            taken.extend(take(conn, ctx, &ids, &request.agent_id).await?);
        }
    }
    claimed(conn, ctx, taken).await
}

/// The oldest rows over all selectors of the request.
async fn candidates(conn: &mut Conn, ctx: &Ctx, request: &ClaimRequest) -> Result<Vec<DbId>, StoreError> {
    let limit = request.limit.min(500);
    let mut found: Vec<(i64, DbTs, DbId)> = Vec::new();
    let now = DbTs::from(ctx.now);
    let agent = request.agent_id.as_str();
    let except: Vec<DbId> = request.except.iter().map(|id| DbId::from(*id)).collect();
    for digest in &request.digests {
        let query = skip_locked!(
            dispatch_queue::table
                .filter(is_pending())
                .filter(dispatch_queue::selector_digest.eq(digest))
                .filter(dispatch_queue::expires_at.is_null().or(dispatch_queue::expires_at.gt(now)))
                .filter(dispatch_queue::pinned_agent_id.is_null().or(dispatch_queue::pinned_agent_id.eq(agent)))
                .filter(dispatch_queue::id.ne_all(&except))
                .order((dispatch_queue::priority.desc(), dispatch_queue::created_at, dispatch_queue::id))
                .limit(i64::from(limit))
                .select((dispatch_queue::priority, dispatch_queue::created_at, dispatch_queue::id))
        );
        let rows: Vec<(i64, DbTs, DbId)> = kept_if(except.is_empty(), query).load(conn).await?;
        found.extend(rows);
    }
    found.sort_unstable_by_key(|(priority, created_at, id)| (std::cmp::Reverse(*priority), *created_at, *id));
    found.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    Ok(found.into_iter().map(|(_, _, id)| id).collect())
}

pub(crate) async fn queue_claim_by_id(
    conn: &mut Conn,
    ctx: &Ctx,
    job: &JobId,
    agent_id: &AgentId,
) -> Result<Option<ClaimedJob>, StoreError> {
    let now = DbTs::from(ctx.now);
    let fits: Option<DbId> = skip_locked!(
        dispatch_queue::table
            .find(DbId::from(*job))
            .filter(is_pending())
            .filter(dispatch_queue::expires_at.is_null().or(dispatch_queue::expires_at.gt(now)))
            .filter(dispatch_queue::pinned_agent_id.is_null().or(dispatch_queue::pinned_agent_id.eq(agent_id.as_str())))
            .select(dispatch_queue::id)
    )
    .first(conn)
    .await
    .optional()?;
    let Some(id) = fits else { return Ok(None) };
    let taken = take(conn, ctx, &[id], agent_id).await?;
    Ok(claimed(conn, ctx, taken).await?.pop())
}

/// Hands these rows to the agent, in their order.
async fn take(conn: &mut Conn, ctx: &Ctx, ids: &[DbId], agent_id: &AgentId) -> Result<Vec<(AgentId, Job)>, StoreError> {
    let now = DbTs::from(ctx.now);
    let none: Option<DbTs> = None;
    let taken: Vec<DbId> = kept_if(
        ids.len() == 1,
        diesel::update(dispatch_queue::table)
            .filter(dispatch_queue::id.eq_any(ids))
            .filter(is_pending())
            .set((
                dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()),
                dispatch_queue::agent_id.eq(agent_id.as_str()),
                dispatch_queue::owner_instance_id.eq(ctx.node().as_str()),
                dispatch_queue::dispatched_at.eq(now),
                dispatch_queue::dispatch_epoch.eq(dispatch_queue::dispatch_epoch + 1),
                dispatch_queue::acked_at.eq(none),
                dispatch_queue::unroutable_since.eq(none),
                dispatch_queue::last_provisioning_error.eq(None::<String>),
            ))
            .returning(dispatch_queue::id),
    )
    .get_results(conn)
    .await?;
    let rows: Vec<JobRow> = kept_if(
        ids.len() == 1,
        diesel::update(jobs::table)
            .filter(jobs::id.eq_any(&taken))
            .set((
                jobs::agent_id.eq(agent_id.as_str()),
                jobs::dispatch_epoch.eq(jobs::dispatch_epoch + 1),
                jobs::routing_reason.eq(None::<String>),
            ))
            .returning(JobRow::as_returning()),
    )
    .get_results(conn)
    .await?;
    let mut jobs = rows.into_iter().map(JobRow::read).collect::<Result<Vec<_>, _>>()?;
    jobs.sort_by_key(|job| ids.iter().position(|id| *id == DbId::from(job.id)));
    Ok(jobs.into_iter().map(|job| (agent_id.clone(), job)).collect())
}

/// Records which agent was handed which job.
pub(crate) async fn record_handed(conn: &mut Conn, ctx: &Ctx, taken: &[(AgentId, Job)]) -> Result<(), StoreError> {
    let history: Vec<_> = taken
        .iter()
        .map(|(agent_id, job)| {
            (
                dispatch_history::job_id.eq(DbId::from(job.id)),
                dispatch_history::dispatch_epoch.eq(i64::from(job.dispatch_epoch)),
                dispatch_history::agent_id.eq(agent_id.as_str()),
                dispatch_history::instance_id.eq(ctx.node().as_str()),
                dispatch_history::dispatched_at.eq(DbTs::from(ctx.now)),
            )
        })
        .collect();
    insert_all!(conn, dispatch_history::table, &history);
    Ok(())
}

/// Records who was handed what, and adds everything an offer needs.
async fn claimed(conn: &mut Conn, ctx: &Ctx, taken: Vec<(AgentId, Job)>) -> Result<Vec<ClaimedJob>, StoreError> {
    record_handed(conn, ctx, &taken).await?;
    let mut known: BTreeMap<RunId, Run> = BTreeMap::new();
    let mut claimed = Vec::with_capacity(taken.len());
    for (agent_id, job) in taken {
        let run = match known.entry(job.run_id) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(unknown) => {
                let query = runs::table.find(DbId::from(job.run_id)).select(RunRow::as_select());
                let row: RunRow = query.first(conn).await?;
                unknown.insert(row.read()?).clone()
            }
        };
        let needs = need_results(conn, &job).await?;
        let job_ref = JobRef { run_id: job.run_id, job_id: job.id, epoch: job.dispatch_epoch };
        ctx.wake(Topic::Run(job.run_id));
        claimed.push(ClaimedJob { job_ref, agent_id, job, run, needs });
    }
    Ok(claimed)
}

/// Statuses and outputs of what the job needs.
async fn need_results(conn: &mut Conn, job: &Job) -> Result<BTreeMap<String, NeedResult>, StoreError> {
    let run = DbId::from(job.run_id);
    let edges: Vec<NeedRow> = job_needs::table
        .filter(job_needs::run_id.eq(run))
        .filter(job_needs::job_name.eq(&job.name))
        .select(NeedRow::as_select())
        .load(conn)
        .await?;
    if edges.is_empty() {
        return Ok(BTreeMap::new());
    }
    let edges: Vec<NeedEdge> = edges.into_iter().map(NeedRow::read).collect();
    let upstream: Vec<&str> =
        edges.iter().map(|edge| edge.generator.as_ref().unwrap_or(&edge.need.job).as_str()).collect();
    let rows: Vec<JobRow> = jobs::table
        .filter(jobs::run_id.eq(run))
        .filter(jobs::base_name.eq_any(&upstream))
        .order(jobs::position)
        .select(JobRow::as_select())
        .load(conn)
        .await?;
    let rows = rows.into_iter().map(JobRow::read).collect::<Result<Vec<_>, _>>()?;
    Ok(advance::need_results(&edges, |base| rows.iter().filter(|row| row.base_name == base).collect()))
}

pub(crate) async fn queue_requeue(
    conn: &mut Conn,
    ctx: &Ctx,
    request: &RequeueRequest,
    activate: &Arc<dyn Activate>,
) -> Result<Requeued, StoreError> {
    let job = request.job;
    let Some(state) = settle::load(conn, ctx, job.run_id).await? else { return Ok(Requeued::Lost) };
    let Some(at) = state.position(job.job_id) else { return Ok(Requeued::Lost) };
    let Some((undone, expires_at)) = undone(conn, ctx, request).await? else { return Ok(Requeued::Lost) };
    let attempts = undone + u32::from(request.counts);
    // What the workflow does about a cancel is queued because of it.
    let cancelled = state.run.cancel_requested_at.is_some() && !state.runs_hooks_after_cancel(at);
    if (request.counts && attempts >= request.budget) || cancelled {
        let message = format!("gave up after {attempts} deliveries: {}", request.reason);
        let end = Some((QueueStatus::Failed, FailureReason::GaveUp, message));
        let effects = fail_at(conn, ctx, state, at, end, &**activate).await?;
        return Ok(Requeued::GaveUp(Box::new(effects)));
    }
    let (time, text): (Option<DbTs>, Option<String>) = (None, None);
    diesel::update(dispatch_queue::table.find(DbId::from(job.job_id)))
        .set((
            dispatch_queue::status.eq(QueueStatus::Pending.as_str()),
            dispatch_queue::dispatch_attempts.eq(i64::from(attempts)),
            dispatch_queue::expires_at.eq(if request.counts { db_ts(request.expires_at) } else { expires_at }),
            dispatch_queue::agent_id.eq(&text),
            dispatch_queue::owner_instance_id.eq(&text),
            dispatch_queue::dispatched_at.eq(time),
            dispatch_queue::ack_deadline.eq(time),
            dispatch_queue::ack_agent_id.eq(&text),
            dispatch_queue::acked_at.eq(time),
            dispatch_queue::recovery_deadline.eq(time),
            dispatch_queue::recovery_agent_id.eq(&text),
        ))
        .execute(conn)
        .await?;
    diesel::update(jobs::table.find(DbId::from(job.job_id))).set(jobs::agent_id.eq(&text)).execute(conn).await?;
    end_history(conn, ctx, job.job_id, job.epoch, "requeued", Some(&request.reason)).await?;
    ctx.wake(Topic::Queue);
    ctx.wake(Topic::Run(job.run_id));
    Ok(Requeued::Requeued { attempts })
}

/// How often deliveries of the row were undone, and until when it may wait, if it is in the state that the request names.
async fn undone(
    conn: &mut Conn,
    ctx: &Ctx,
    request: &RequeueRequest,
) -> Result<Option<(u32, Option<DbTs>)>, StoreError> {
    let mut query = dispatch_queue::table
        .find(DbId::from(request.job.job_id))
        .filter(dispatch_queue::dispatch_epoch.eq(i64::from(request.job.epoch)))
        .filter(dispatch_queue::started_at.is_null())
        .select((dispatch_queue::dispatch_attempts, dispatch_queue::expires_at))
        .into_boxed::<Db>();
    let dispatched = QueueStatus::Dispatched.as_str();
    query = match &request.from {
        RequeueFrom::AwaitingAck(agent) => query
            .filter(dispatch_queue::status.eq(dispatched))
            .filter(dispatch_queue::ack_agent_id.eq(agent.as_str()))
            .filter(dispatch_queue::ack_deadline.is_not_null()),
        RequeueFrom::NotStarted(agent) => query.filter(is_held()).filter(dispatch_queue::agent_id.eq(agent.as_str())),
        RequeueFrom::RecoveryExpired => {
            let past = dispatch_queue::recovery_deadline.le(DbTs::from(ctx.now));
            query
                .filter(dispatch_queue::status.eq(QueueStatus::Recovering.as_str()))
                .filter(past.or(dispatch_queue::recovery_deadline.is_null()))
        }
    };
    let found: Option<(i64, Option<DbTs>)> = query.first(conn).await.optional()?;
    Ok(found.map(|(attempts, expires_at)| (small(attempts), expires_at)))
}

pub(crate) async fn queue_ack_arm(
    conn: &mut Conn,
    _: &Ctx,
    job: &JobRef,
    agent_id: &AgentId,
    deadline: &Ts,
) -> Result<Guarded, StoreError> {
    let changed = diesel::update(dispatch_queue::table.find(DbId::from(job.job_id)))
        .filter(dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()))
        .filter(dispatch_queue::dispatch_epoch.eq(i64::from(job.epoch)))
        .filter(dispatch_queue::agent_id.eq(agent_id.as_str()))
        .filter(dispatch_queue::acked_at.is_null())
        .set((
            dispatch_queue::ack_deadline.eq(DbTs::from(*deadline)),
            dispatch_queue::ack_agent_id.eq(agent_id.as_str()),
        ))
        .execute(conn)
        .await?;
    Ok(guarded(changed))
}

fn guarded(changed: usize) -> Guarded {
    if changed == 0 { Guarded::Lost } else { Guarded::Applied }
}

pub(crate) async fn queue_ack(
    conn: &mut Conn,
    ctx: &Ctx,
    job: &JobRef,
    agent_id: &AgentId,
) -> Result<Guarded, StoreError> {
    let changed = diesel::update(dispatch_queue::table.find(DbId::from(job.job_id)))
        .filter(dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()))
        .filter(dispatch_queue::dispatch_epoch.eq(i64::from(job.epoch)))
        .filter(dispatch_queue::agent_id.eq(agent_id.as_str()))
        .set((
            dispatch_queue::acked_at.eq(DbTs::from(ctx.now)),
            dispatch_queue::ack_deadline.eq(None::<DbTs>),
            dispatch_queue::ack_agent_id.eq(None::<String>),
        ))
        .execute(conn)
        .await?;
    Ok(guarded(changed))
}

pub(crate) async fn job_start(
    conn: &mut Conn,
    ctx: &Ctx,
    job: &JobRef,
    agent_id: &AgentId,
    withdrawn: &CancellationToken,
) -> Result<StartVerdict, StoreError> {
    if withdrawn.is_cancelled() {
        return Ok(StartVerdict::Denied);
    }
    type RunColumns = (String, Option<DbTs>, Option<i64>);
    type RowColumns = (String, i64, Option<String>, Option<DbTs>, Option<DbTs>);
    let (run, id, now) = (DbId::from(job.run_id), DbId::from(job.job_id), DbTs::from(ctx.now));
    // The run first: whatever settles jobs takes the locks in this order, and a join locks its tables in theirs.
    let found: Option<(RunColumns, RowColumns)> = lock_row!(
        runs::table
            .inner_join(dispatch_queue::table.on(dispatch_queue::run_id.eq(runs::id)))
            .filter(runs::id.eq(run))
            .filter(dispatch_queue::id.eq(id))
            .select((
                (runs::status, runs::started_at, runs::timeout_ms),
                (
                    dispatch_queue::status,
                    dispatch_queue::dispatch_epoch,
                    dispatch_queue::agent_id,
                    dispatch_queue::acked_at,
                    dispatch_queue::started_at,
                ),
            ))
    )
    .first(conn)
    .await
    .optional()?;
    let Some(((run_status, run_started, timeout_ms), (status, epoch, owner, acked_at, started_at))) = found else {
        return Ok(StartVerdict::Denied);
    };
    let mine = epoch == i64::from(job.epoch) && owner.as_deref() == Some(agent_id.as_str());
    if !mine || ![QueueStatus::Dispatched, QueueStatus::Recovering].iter().any(|held| held.as_str() == status) {
        return Ok(StartVerdict::Denied);
    }
    if status == QueueStatus::Recovering.as_str() {
        // The agent that is waited for is the one that asks. A denial would make it drop a job that may have been granted.
        queue_resume(conn, ctx, job, agent_id).await?;
    }
    if started_at.is_some() {
        return Ok(StartVerdict::AlreadyGranted);
    }
    let started = kept(
        diesel::update(jobs::table.find(id).filter(jobs::run_id.eq(run)))
            .filter(jobs::status.eq(JobStatus::Queued.as_str()))
            .set((
                jobs::status.eq(JobStatus::Running.as_str()),
                jobs::started_at.eq(now),
                jobs::last_heartbeat_at.eq(now),
            )),
    )
    .execute(conn)
    .await?;
    if started == 0 {
        return Ok(StartVerdict::Denied);
    }
    kept(diesel::update(dispatch_queue::table.find(id)).set((
        dispatch_queue::started_at.eq(now),
        dispatch_queue::acked_at.eq(acked_at.unwrap_or(now)),
        dispatch_queue::ack_deadline.eq(None::<DbTs>),
        dispatch_queue::ack_agent_id.eq(None::<String>),
    )))
    .execute(conn)
    .await?;
    let run_started_now = run_started.is_none();
    if run_started_now || run_status == RunStatus::Pending.as_str() {
        start_run(conn, ctx, run, run_started, timeout_ms).await?;
    }
    ctx.wake(Topic::Run(job.run_id));
    Ok(StartVerdict::Granted { run_started: run_started_now })
}

async fn start_run(
    conn: &mut Conn,
    ctx: &Ctx,
    run: DbId,
    started_at: Option<DbTs>,
    timeout_ms: Option<i64>,
) -> Result<(), StoreError> {
    let at = started_at.map_or(ctx.now, Ts::from);
    let deadline = timeout_ms.map(|ms| DbTs::from(at.plus(Duration::from_millis(count(ms)))));
    let before = [RunStatus::Pending, RunStatus::Held].map(RunStatus::as_str);
    let running = RunStatus::Running.as_str().into_sql::<diesel::sql_types::Text>();
    kept(diesel::update(runs::table.find(run)).set((
        runs::started_at.eq(DbTs::from(at)),
        runs::deadline.eq(deadline),
        runs::status.eq(diesel::dsl::case_when(runs::status.eq_any(before), running).otherwise(runs::status)),
    )))
    .execute(conn)
    .await?;
    Ok(())
}

pub(crate) async fn queue_recover(conn: &mut Conn, ctx: &Ctx, request: &RecoverRequest) -> Result<Guarded, StoreError> {
    let me = ctx.node().as_str();
    let alive = DbTs::from(ctx.now.minus(INSTANCE_DEAD_AFTER));
    // An agent that came back to another live instance is that one's business.
    let siblings = cluster_instances::table
        .filter(cluster_instances::instance_id.ne(me))
        .filter(cluster_instances::last_seen_at.ge(alive))
        .select(cluster_instances::instance_id.nullable());
    let ours = dispatch_queue::owner_instance_id.eq(me).or(dispatch_queue::owner_instance_id.ne_all(siblings));
    let changed: Option<Option<DbTs>> = diesel::update(dispatch_queue::table.find(DbId::from(request.job.job_id)))
        .filter(dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()))
        .filter(dispatch_queue::dispatch_epoch.eq(i64::from(request.job.epoch)))
        .filter(dispatch_queue::agent_id.eq(request.agent_id.as_str()))
        .filter(ours)
        .set((
            dispatch_queue::status.eq(QueueStatus::Recovering.as_str()),
            dispatch_queue::recovery_deadline.eq(DbTs::from(request.deadline)),
            dispatch_queue::recovery_agent_id.eq(request.agent_id.as_str()),
            dispatch_queue::ack_deadline.eq(None::<DbTs>),
            dispatch_queue::ack_agent_id.eq(None::<String>),
        ))
        .returning(dispatch_queue::started_at)
        .get_result(conn)
        .await
        .optional()?;
    let Some(started_at) = changed else { return Ok(Guarded::Lost) };
    if started_at.is_some() {
        move_job(conn, request.job.job_id, JobStatus::Running, JobStatus::Recovering).await?;
    }
    ctx.wake(Topic::Run(request.job.run_id));
    Ok(Guarded::Applied)
}

async fn move_job(conn: &mut Conn, job: JobId, from: JobStatus, to: JobStatus) -> Result<(), StoreError> {
    diesel::update(jobs::table.find(DbId::from(job)).filter(jobs::status.eq(from.as_str())))
        .set(jobs::status.eq(to.as_str()))
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn queue_resume(
    conn: &mut Conn,
    ctx: &Ctx,
    job: &JobRef,
    agent_id: &AgentId,
) -> Result<Resumed, StoreError> {
    let id = DbId::from(job.job_id);
    let changed: Option<Option<DbTs>> = diesel::update(dispatch_queue::table.find(id))
        .filter(is_held())
        .filter(dispatch_queue::dispatch_epoch.eq(i64::from(job.epoch)))
        .filter(dispatch_queue::agent_id.eq(agent_id.as_str()))
        .set((
            dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()),
            dispatch_queue::owner_instance_id.eq(ctx.node().as_str()),
            dispatch_queue::recovery_deadline.eq(None::<DbTs>),
            dispatch_queue::recovery_agent_id.eq(None::<String>),
            dispatch_queue::ack_deadline.eq(None::<DbTs>),
            dispatch_queue::ack_agent_id.eq(None::<String>),
            dispatch_queue::acked_at.eq(DbTs::from(ctx.now)),
        ))
        .returning(dispatch_queue::started_at)
        .get_result(conn)
        .await
        .optional()?;
    let Some(started_at) = changed else { return Ok(Resumed::Abandon) };
    if started_at.is_some() {
        move_job(conn, job.job_id, JobStatus::Recovering, JobStatus::Running).await?;
    }
    let status: String = jobs::table.find(id).select(jobs::status).first(conn).await?;
    diesel::update(jobs::table.find(id)).set(jobs::last_heartbeat_at.eq(DbTs::from(ctx.now))).execute(conn).await?;
    ctx.wake(Topic::Run(job.run_id));
    let cancelling = status == JobStatus::Cancelling.as_str();
    Ok(Resumed::Resumed { started: started_at.is_some(), cancelling })
}

/// The agent that a row names, for checks that need no more.
pub(crate) async fn owner_of(conn: &mut Conn, job: JobId) -> Result<Option<(i64, Option<AgentId>)>, StoreError> {
    let row: Option<(i64, Option<String>)> = dispatch_queue::table
        .find(DbId::from(job))
        .select((dispatch_queue::dispatch_epoch, dispatch_queue::agent_id))
        .first(conn)
        .await
        .optional()?;
    row.map(|(epoch, agent)| Ok((epoch, agent_opt(agent)?))).transpose()
}

/// The distinct selectors of rows that wait, with their number.
pub(crate) async fn pending_digests(conn: &mut Conn) -> Result<Vec<(String, i64)>, StoreError> {
    Ok(dispatch_queue::table
        .filter(is_pending())
        .group_by(dispatch_queue::selector_digest)
        .select((dispatch_queue::selector_digest, diesel::dsl::count_star()))
        .load(conn)
        .await?)
}
