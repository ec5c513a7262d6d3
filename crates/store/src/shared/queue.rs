//! The dispatch queue: claims, answers, starts. Every change is a conditional update that names the state it leaves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use diesel::prelude::*;
use diesel::query_builder::{QueryFragment, QueryId};
use diesel_async::RunQueryDsl;
use kici_engine::ids::{AgentId, JobId};
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_engine::time::Ts;
use tokio_util::sync::CancellationToken;

use super::backend::{Conn, Db};
use super::kept::{Condition, kept, kept_if};
use super::rows::{JobRow, NeedRow, RunRow, agent_opt, count, db_ts, small};
use super::runs::fail_at;
use super::schema::{cluster_instances, dispatch_history, dispatch_queue, job_needs, jobs, runs};
use super::settle::{self, history_end};
use crate::StoreError;
use crate::advance;
use crate::ctx::Ctx;
use crate::model::{
    Activate, ClaimRequest, ClaimedJob, Guarded, Job, JobRef, NeedEdge, NeedResult, RecoverRequest, RequeueFrom,
    RequeueRequest, Requeued, Resumed, StartVerdict,
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

/// A row that waits, locked until the end of the transaction: nobody else can take it any more.
#[derive(Clone, Debug, Queryable)]
struct Candidate {
    id: DbId,
    run_id: DbId,
    job_name: String,
    epoch: i64,
    priority: i64,
    created_at: DbTs,
}

type CandidateColumns = (
    dispatch_queue::id,
    dispatch_queue::run_id,
    dispatch_queue::job_name,
    dispatch_queue::dispatch_epoch,
    dispatch_queue::priority,
    dispatch_queue::created_at,
);

const CANDIDATE: CandidateColumns = (
    dispatch_queue::id,
    dispatch_queue::run_id,
    dispatch_queue::job_name,
    dispatch_queue::dispatch_epoch,
    dispatch_queue::priority,
    dispatch_queue::created_at,
);

pub(crate) async fn queue_claim(
    conn: &mut Conn,
    ctx: &Ctx,
    requests: &[ClaimRequest],
) -> Result<Vec<ClaimedJob>, StoreError> {
    let mut claimed = Vec::new();
    for request in requests {
        let rows = candidates(conn, ctx, request).await?;
        claimed.extend(take(conn, ctx, &rows, &request.agent_id).await?);
    }
    Ok(claimed)
}

/// The oldest rows over all selectors of the request.
async fn candidates(conn: &mut Conn, ctx: &Ctx, request: &ClaimRequest) -> Result<Vec<Candidate>, StoreError> {
    let limit = request.limit.min(500);
    let mut found: Vec<Candidate> = Vec::new();
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
                .select(CANDIDATE)
        );
        let rows: Vec<Candidate> = kept_if(except.is_empty(), query).load(conn).await?;
        found.extend(rows);
    }
    found.sort_unstable_by_key(|row| (std::cmp::Reverse(row.priority), row.created_at, row.id));
    found.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    Ok(found)
}

pub(crate) async fn queue_claim_by_id(
    conn: &mut Conn,
    ctx: &Ctx,
    job: &JobId,
    agent_id: &AgentId,
) -> Result<Option<ClaimedJob>, StoreError> {
    let now = DbTs::from(ctx.now);
    let fits: Option<Candidate> = skip_locked!(
        dispatch_queue::table
            .find(DbId::from(*job))
            .filter(is_pending())
            .filter(dispatch_queue::expires_at.is_null().or(dispatch_queue::expires_at.gt(now)))
            .filter(dispatch_queue::pinned_agent_id.is_null().or(dispatch_queue::pinned_agent_id.eq(agent_id.as_str())))
            .select(CANDIDATE)
    )
    .first(conn)
    .await
    .optional()?;
    let Some(row) = fits else { return Ok(None) };
    Ok(take(conn, ctx, &[row], agent_id).await?.pop())
}

/// Hands these rows to the agent, in their order, with everything an offer needs.
async fn take(
    conn: &mut Conn,
    ctx: &Ctx,
    rows: &[Candidate],
    agent_id: &AgentId,
) -> Result<Vec<ClaimedJob>, StoreError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let (now, none) = (DbTs::from(ctx.now), None::<DbTs>);
    let ids: Vec<DbId> = rows.iter().map(|row| row.id).collect();
    let runs_of: BTreeSet<DbId> = rows.iter().map(|row| row.run_id).collect();
    let names: BTreeSet<&str> = rows.iter().map(|row| row.job_name.as_str()).collect();
    let usual = rows.len() == 1;
    let history: Vec<HandedRow> = rows.iter().map(|row| HandedRow::new(ctx, row.id, row.epoch + 1, agent_id)).collect();
    let queue_rows = kept_if(
        usual,
        diesel::update(dispatch_queue::table).filter(dispatch_queue::id.eq_any(&ids)).filter(is_pending()).set((
            dispatch_queue::status.eq(QueueStatus::Dispatched.as_str()),
            dispatch_queue::agent_id.eq(agent_id.as_str()),
            dispatch_queue::owner_instance_id.eq(ctx.node().as_str()),
            dispatch_queue::dispatched_at.eq(now),
            dispatch_queue::dispatch_epoch.eq(dispatch_queue::dispatch_epoch + 1),
            dispatch_queue::acked_at.eq(none),
            dispatch_queue::unroutable_since.eq(none),
            dispatch_queue::last_provisioning_error.eq(None::<String>),
        )),
    );
    let job_rows = kept_if(
        usual,
        diesel::update(jobs::table)
            .filter(jobs::id.eq_any(&ids))
            .set((
                jobs::agent_id.eq(agent_id.as_str()),
                jobs::dispatch_epoch.eq(jobs::dispatch_epoch + 1),
                jobs::routing_reason.eq(None::<String>),
            ))
            .returning(JobRow::as_returning()),
    );
    let run_rows = kept_if(usual, runs::table.filter(runs::id.eq_any(&runs_of)).select(RunRow::as_select()));
    let edges = kept_if(
        usual,
        job_needs::table
            .filter(job_needs::run_id.eq_any(&runs_of))
            .filter(job_needs::job_name.eq_any(&names))
            .select(NeedRow::as_select()),
    );
    let (taken, job_rows, (), run_rows, edges): (usize, Vec<JobRow>, (), Vec<RunRow>, Vec<NeedRow>) = at_once!(conn as c;
        queue_rows.execute(c),
        job_rows.get_results(c),
        async {
            insert_all!(c, dispatch_history::table, &history);
            QueryResult::Ok(())
        },
        run_rows.load(c),
        edges.load(c),
    )?;
    if taken != ids.len() || job_rows.len() != ids.len() {
        let detail = format!("{taken} of {} locked rows could be taken", ids.len());
        return Err(StoreError::Corrupt { what: "dispatch queue", detail });
    }
    let mut jobs = job_rows.into_iter().map(JobRow::read).collect::<Result<Vec<_>, _>>()?;
    jobs.sort_by_key(|job| ids.iter().position(|id| *id == DbId::from(job.id)));
    let runs = run_rows.into_iter().map(RunRow::read).collect::<Result<Vec<_>, _>>()?;
    let mut claimed = Vec::with_capacity(jobs.len());
    for job in jobs {
        let Some(run) = runs.iter().find(|run| run.id == job.run_id).cloned() else {
            return Err(StoreError::NotFound { what: "run" });
        };
        let own = edges.iter().filter(|edge| edge.run_id == DbId::from(run.id) && edge.job_name == job.name);
        let needs = need_results(conn, &job, own.cloned().map(NeedRow::read).collect()).await?;
        let job_ref = JobRef { run_id: job.run_id, job_id: job.id, epoch: job.dispatch_epoch };
        ctx.wake(Topic::Run(job.run_id));
        claimed.push(ClaimedJob { job_ref, agent_id: agent_id.clone(), job, run, needs });
    }
    Ok(claimed)
}

/// An entry of the history of deliveries.
#[derive(Insertable)]
#[diesel(table_name = dispatch_history, check_for_backend(Db))]
pub(crate) struct HandedRow<'a> {
    job_id: DbId,
    dispatch_epoch: i64,
    agent_id: &'a str,
    instance_id: &'a str,
    dispatched_at: DbTs,
}

impl<'a> HandedRow<'a> {
    fn new(ctx: &'a Ctx, job_id: DbId, dispatch_epoch: i64, agent_id: &'a AgentId) -> Self {
        let (agent_id, instance_id) = (agent_id.as_str(), ctx.node().as_str());
        Self { job_id, dispatch_epoch, agent_id, instance_id, dispatched_at: ctx.now.into() }
    }

    /// Of a job that has its epoch already.
    pub(crate) fn of(ctx: &'a Ctx, agent_id: &'a AgentId, job: &Job) -> Self {
        Self::new(ctx, job.id.into(), job.dispatch_epoch.into(), agent_id)
    }
}

/// Statuses and outputs of what the job needs.
async fn need_results(
    conn: &mut Conn,
    job: &Job,
    edges: Vec<NeedEdge>,
) -> Result<BTreeMap<String, NeedResult>, StoreError> {
    if edges.is_empty() {
        return Ok(BTreeMap::new());
    }
    let upstream: Vec<&str> =
        edges.iter().map(|edge| edge.generator.as_ref().unwrap_or(&edge.need.job).as_str()).collect();
    let rows: Vec<JobRow> = jobs::table
        .filter(jobs::run_id.eq(DbId::from(job.run_id)))
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
    history_end(ctx, job.job_id, job.epoch, "requeued", Some(&request.reason)).execute(conn).await?;
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
    let found: Option<(RunColumns, RowColumns, String)> = lock_row!(
        runs::table
            .inner_join(dispatch_queue::table.on(dispatch_queue::run_id.eq(runs::id)))
            .inner_join(jobs::table.on(jobs::id.eq(dispatch_queue::id)))
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
                jobs::status,
            ))
    )
    .first(conn)
    .await
    .optional()?;
    let Some((of_run, of_row, job_status)) = found else { return Ok(StartVerdict::Denied) };
    let (run_status, run_started, timeout_ms) = of_run;
    let (status, epoch, owner, acked_at, started_at) = of_row;
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
    if job_status != JobStatus::Queued.as_str() {
        return Ok(StartVerdict::Denied);
    }
    let job_row = kept(diesel::update(jobs::table.find(id)).set((
        jobs::status.eq(JobStatus::Running.as_str()),
        jobs::started_at.eq(now),
        jobs::last_heartbeat_at.eq(now),
    )));
    let queue_row = kept(diesel::update(dispatch_queue::table.find(id)).set((
        dispatch_queue::started_at.eq(now),
        dispatch_queue::acked_at.eq(acked_at.unwrap_or(now)),
        dispatch_queue::ack_deadline.eq(None::<DbTs>),
        dispatch_queue::ack_agent_id.eq(None::<String>),
    )));
    let run_started_now = run_started.is_none();
    if run_started_now || run_status == RunStatus::Pending.as_str() {
        let run_row = start_run(ctx, run, run_started, timeout_ms);
        at_once!(conn as c; job_row.execute(c), queue_row.execute(c), run_row.execute(c))?;
    } else {
        at_once!(conn as c; job_row.execute(c), queue_row.execute(c))?;
    }
    ctx.wake(Topic::Run(job.run_id));
    Ok(StartVerdict::Granted { run_started: run_started_now })
}

/// The statement by which a run begins.
fn start_run(
    ctx: &Ctx,
    run: DbId,
    started_at: Option<DbTs>,
    timeout_ms: Option<i64>,
) -> impl QueryFragment<Db> + QueryId + Send + use<> {
    let at = started_at.map_or(ctx.now, Ts::from);
    let deadline = timeout_ms.map(|ms| DbTs::from(at.plus(Duration::from_millis(count(ms)))));
    let before = [RunStatus::Pending, RunStatus::Held].map(RunStatus::as_str);
    let running = RunStatus::Running.as_str().into_sql::<diesel::sql_types::Text>();
    kept(diesel::update(runs::table.find(run)).set((
        runs::started_at.eq(DbTs::from(at)),
        runs::deadline.eq(deadline),
        runs::status.eq(diesel::dsl::case_when(runs::status.eq_any(before), running).otherwise(runs::status)),
    )))
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
