//! Runs: creation, the end of their jobs, cancel.

use std::collections::BTreeMap;
use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::state::{FailureReason, JobEvent, JobStatus, QueueStatus, RunStatus};

use super::backend::Conn;
use super::ends;
use super::gates;
use super::new_runs::{job_row, new_run, new_state, run_row};
use super::rows::{JobRow, NeedRow, clean_opt, db_ts, word};
use super::schema::{dispatch_queue, job_needs, jobs, lock_documents, request_keys, runs};
use super::settle::{self, enqueue, finish_advance};
use super::slots;
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{
    Activate, CancelOutcome, CancelRequest, ClaimedJob, CreatedRun, Effects, FailRequest, Guarded, Job, JobFinished,
    JobRef, JobStart, NewJob, NewRun, Run,
};
use crate::notify::Topic;
use crate::types::{DbId, DbTs};

/// A lock document: from memory, else read and decompressed.
pub(crate) async fn lock_body(conn: &mut Conn, ctx: &Ctx, digest: &str) -> Result<Option<Arc<Vec<u8>>>, StoreError> {
    if let Some(body) = ctx.lock_kept(digest) {
        return Ok(Some(body));
    }
    let packed: Option<Vec<u8>> =
        lock_documents::table.find(digest).select(lock_documents::body).first(conn).await.optional()?;
    let Some(packed) = packed else { return Ok(None) };
    let body = zstd::decode_all(&packed[..])
        .map_err(|error| StoreError::Corrupt { what: "lock document", detail: error.to_string() })?;
    let body = Arc::new(body);
    ctx.keep_lock(digest, &body);
    Ok(Some(body))
}

pub(crate) async fn lock_document(conn: &mut Conn, ctx: &Ctx, digest: &str) -> Result<Option<Vec<u8>>, StoreError> {
    Ok(lock_body(conn, ctx, digest).await?.map(|body| body.to_vec()))
}

/// Stores a lock document unless it is there. Empty JSON stands for "known to be stored".
pub(crate) async fn lock_put(conn: &mut Conn, ctx: &Ctx, digest: &str, json: &[u8]) -> Result<(), StoreError> {
    if json.is_empty() || ctx.lock_kept(digest).is_some() {
        return Ok(());
    }
    let packed = zstd::encode_all(json, 3).map_err(|error| StoreError::Full(error.to_string()))?;
    diesel::insert_into(lock_documents::table)
        .values((
            lock_documents::digest.eq(digest),
            lock_documents::body.eq(packed),
            lock_documents::created_at.eq(DbTs::from(ctx.now)),
        ))
        .on_conflict_do_nothing()
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn run_create(
    conn: &mut Conn,
    ctx: &Ctx,
    run: &NewRun,
    request_key: &Option<(String, String)>,
    activate: &Arc<dyn Activate>,
) -> Result<CreatedRun, StoreError> {
    if let Some((scope, key)) = request_key {
        let taken = diesel::insert_into(request_keys::table)
            .values((
                request_keys::scope.eq(scope),
                request_keys::key.eq(key),
                request_keys::result_id.eq(DbId::from(run.id)),
                request_keys::created_at.eq(DbTs::from(ctx.now)),
            ))
            .on_conflict_do_nothing()
            .execute(conn)
            .await?
            == 0;
        if taken {
            let id: DbId = request_keys::table.find((scope, key)).select(request_keys::result_id).first(conn).await?;
            return adopted(conn, id.into()).await;
        }
    }
    create(conn, ctx, run, &**activate).await
}

async fn adopted(conn: &mut Conn, run_id: RunId) -> Result<CreatedRun, StoreError> {
    let status: String = runs::table.find(DbId::from(run_id)).select(runs::status).first(conn).await?;
    Ok(CreatedRun {
        run_id,
        created: false,
        ready: Vec::new(),
        placed: Vec::new(),
        status: word("run status", &status)?,
    })
}

/// Inserts a run with all its jobs, settled as far as it can be without an agent.
pub(crate) async fn create(
    conn: &mut Conn,
    ctx: &Ctx,
    new: &NewRun,
    activate: &dyn Activate,
) -> Result<CreatedRun, StoreError> {
    lock_put(conn, ctx, &new.lock_digest, &new.lock_json).await?;
    let run = new_run(ctx, new);
    let key = DbId::from(new.id);
    let inserted =
        diesel::insert_into(runs::table).values(run_row(&run)).on_conflict_do_nothing().execute(conn).await?;
    if inserted == 0 {
        let id: DbId = runs::table.filter(runs::dedup_key.eq(&new.dedup_key)).select(runs::id).first(conn).await?;
        return adopted(conn, id.into()).await;
    }
    let mut state = new_state(ctx, new, run)?;
    slots::enter(conn, ctx, &mut state).await?;
    finish_advance(conn, ctx, &mut state, Some(activate)).await?;
    let placed = place(&mut state, activate)?;
    let rows: Vec<JobRow> = (0..).zip(&state.jobs).map(|(position, job)| job_row(position, job)).collect();
    let needs: Vec<NeedRow> = new.needs.iter().map(|need| NeedRow::of(key, need)).collect();
    at_once!(conn as c;
        async {
            insert_all!(c, jobs::table, &rows);
            QueryResult::Ok(())
        },
        async {
            insert_all!(c, job_needs::table, &needs);
            QueryResult::Ok(())
        },
    )?;
    enqueue(conn, ctx, &state, &placed).await?;
    gates::open(conn, ctx, &state).await?;
    if state.run.status != RunStatus::Pending {
        diesel::update(runs::table.find(key))
            .set((
                runs::status.eq(state.run.status.as_str()),
                runs::failure_reason.eq(state.run.failure_reason.map(|reason| reason.as_str())),
                runs::failure_message.eq(clean_opt(state.run.failure_message.as_deref())),
                runs::started_at.eq(db_ts(state.run.started_at)),
                runs::deadline.eq(db_ts(state.run.deadline)),
                runs::finished_at.eq(db_ts(state.run.finished_at)),
            ))
            .execute(conn)
            .await?;
    }
    slots::leave(conn, ctx, &state).await?;
    let taken_over = |job: &&NewJob| matches!(job.start, JobStart::Succeeded { .. });
    let taken_over = new.jobs.iter().filter(taken_over).map(|job| job.id).collect();
    ends::announce_new(conn, ctx, &state, &taken_over).await?;
    ctx.wake(Topic::Run(new.id));
    let waits = |id: &&JobId| !placed.iter().any(|(_, job)| job.id == **id);
    let ready = state.enqueued.keys().filter(waits).copied().collect();
    let placed = placed.into_iter().map(|(agent_id, job)| claimed(&state.run, agent_id, job)).collect();
    Ok(CreatedRun { run_id: new.id, created: true, ready, placed, status: state.run.status })
}

/// Places jobs that enter the queue at agents, as far as `activate` has some for them. Jobs that need others are left to
/// the queue: what they need is not loaded here.
fn place(state: &mut RunState, activate: &dyn Activate) -> Result<Vec<(AgentId, Job)>, StoreError> {
    let mut placed = Vec::new();
    for at in 0..state.jobs.len() {
        let job = &state.jobs[at];
        let Some(entry) = state.enqueued.get(&job.id).filter(|_| state.needs_nothing(at)) else { continue };
        let Some(agent) = activate.place(job.id, entry, &settle::selector_digest(entry)?) else { continue };
        let job = &mut state.jobs[at];
        job.agent_id = Some(agent.clone());
        job.dispatch_epoch = 1;
        placed.push((agent, job.clone()));
    }
    Ok(placed)
}

fn claimed(run: &Run, agent_id: AgentId, job: Job) -> ClaimedJob {
    let job_ref = JobRef { run_id: run.id, job_id: job.id, epoch: job.dispatch_epoch };
    ClaimedJob { job_ref, agent_id, job, run: run.clone(), needs: BTreeMap::new() }
}

pub(crate) async fn job_fail(
    conn: &mut Conn,
    ctx: &Ctx,
    request: &FailRequest,
    activate: &Arc<dyn Activate>,
) -> Result<JobFinished, StoreError> {
    let Some(mut state) = settle::load(conn, ctx, request.job.run_id).await? else { return Ok(JobFinished::NotOwned) };
    let Some(at) = state.position(request.job.job_id) else { return Ok(JobFinished::NotOwned) };
    if state.jobs[at].status.is_terminal() {
        return Ok(JobFinished::Duplicate(state.jobs[at].status));
    }
    let expected = state.open.get(&request.job.job_id).is_some_and(|row| {
        row.epoch == request.job.epoch && (request.only_from.is_empty() || request.only_from.contains(&row.status))
    });
    if !expected {
        return Ok(JobFinished::Stale);
    }
    let why = (request.reason, Some(request.message.as_str()));
    if request.retry && settle::try_again(conn, ctx, &mut state, at, why, &**activate).await? {
        let effects = settle::settle(conn, ctx, state, Some(&**activate)).await?;
        return Ok(JobFinished::Applied(Box::new(effects)));
    }
    let end = Some((request.queue_status, request.reason, request.message.clone()));
    let effects = fail_at(conn, ctx, state, at, end, &**activate).await?;
    Ok(JobFinished::Applied(Box::new(effects)))
}

/// Fails a job, or completes its cancel when that is what it was in.
pub(crate) async fn fail_at(
    conn: &mut Conn,
    ctx: &Ctx,
    mut state: RunState,
    at: usize,
    end: Option<(QueueStatus, FailureReason, String)>,
    activate: &dyn Activate,
) -> Result<Effects, StoreError> {
    let id = state.jobs[at].id;
    if let Some((queue_status, reason, message)) = end {
        let cancelling = state.jobs[at].status == JobStatus::Cancelling || state.run.cancel_requested_at.is_some();
        let class = reason.class() == kici_engine::state::FailureClass::Cancelled;
        if cancelling || class {
            let event = match state.jobs[at].status {
                JobStatus::Cancelling => JobEvent::Complete,
                _ => JobEvent::Cancel,
            };
            let kept = state.jobs[at].failure_reason.or(state.run.failure_reason);
            let reason = if class { reason } else { kept.unwrap_or(FailureReason::CancelledByUser) };
            state.apply(at, event, Some(reason), Some(message), ctx.now)?;
            state.row_ends.insert(id, QueueStatus::Cancelled);
        } else {
            state.apply(at, JobEvent::Fail, Some(reason), Some(message), ctx.now)?;
            state.row_ends.insert(id, queue_status);
        }
    }
    settle::settle(conn, ctx, state, Some(activate)).await
}

pub(crate) async fn run_advance(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &RunId,
    activate: &Arc<dyn Activate>,
) -> Result<Option<Effects>, StoreError> {
    let Some(state) = settle::load(conn, ctx, *id).await? else { return Ok(None) };
    if state.run.status.is_terminal() {
        return Ok(None);
    }
    settle::settle(conn, ctx, state, Some(&**activate)).await.map(Some)
}

/// Lets a run go on that nothing moves any more. None when it moves by itself, or has ended.
pub(crate) async fn run_unstick(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &RunId,
    activate: &Arc<dyn Activate>,
) -> Result<Option<Effects>, StoreError> {
    let Some(mut state) = settle::load(conn, ctx, *id).await? else { return Ok(None) };
    if state.run.status.is_terminal() || !state.open.is_empty() {
        return Ok(None);
    }
    settle::advance_fully(conn, ctx, &mut state, Some(&**activate)).await?;
    state.fail_unreachable(ctx.now)?;
    let effects = settle::settle(conn, ctx, state, Some(&**activate)).await?;
    Ok((effects.run_finished || !effects.newly_queued.is_empty() || !effects.finished_jobs.is_empty())
        .then_some(effects))
}

pub(crate) async fn run_cancel(
    conn: &mut Conn,
    ctx: &Ctx,
    request: &CancelRequest,
    activate: &Arc<dyn Activate>,
) -> Result<CancelOutcome, StoreError> {
    let Some(mut state) = settle::load(conn, ctx, request.run_id).await? else { return Ok(CancelOutcome::NotFound) };
    if state.run.status.is_terminal() {
        return Ok(CancelOutcome::AlreadyTerminal(state.run.status));
    }
    let run = &mut state.run;
    let repeated = run.cancel_requested_at.is_some();
    run.cancel_requested_at.get_or_insert(ctx.now);
    run.cancelled_by.get_or_insert_with(|| request.by.clone());
    run.failure_reason.get_or_insert(request.reason);
    let mut again = Vec::new();
    for at in 0..state.jobs.len() {
        let job = &state.jobs[at];
        if job.status.is_terminal() {
            continue;
        }
        // The hooks of the workflow answer the first cancel; another one does not take them back, force does.
        let waits = job.status == JobStatus::Pending || (repeated && job.status != JobStatus::Cancelling);
        if !request.force && waits && state.runs_hooks_after_cancel(at) {
            continue;
        }
        if job.status == JobStatus::Cancelling && !request.force {
            // Its agent may have missed the first request.
            again.extend(state.held(job.id));
        }
        state.stop(at, request.reason, request.force, ctx.now)?;
    }
    state.stop_again(again);
    let effects = settle::settle(conn, ctx, state, Some(&**activate)).await?;
    Ok(CancelOutcome::Cancelling { effects: Box::new(effects) })
}

pub(crate) async fn job_cancelling(
    conn: &mut Conn,
    ctx: &Ctx,
    job: &JobRef,
    agent_id: &AgentId,
    deadline: &Option<kici_engine::time::Ts>,
) -> Result<Guarded, StoreError> {
    let owned = dispatch_queue::table
        .filter(dispatch_queue::id.eq(DbId::from(job.job_id)))
        .filter(dispatch_queue::dispatch_epoch.eq(i64::from(job.epoch)))
        .filter(dispatch_queue::agent_id.eq(agent_id.as_str()))
        .filter(super::queue::is_held());
    if !diesel::select(diesel::dsl::exists(owned)).get_result::<bool>(conn).await? {
        return Ok(Guarded::Lost);
    }
    let open = [JobStatus::Running, JobStatus::Cancelling].map(JobStatus::as_str);
    let changed = diesel::update(jobs::table.find(DbId::from(job.job_id)))
        .filter(jobs::status.eq_any(open))
        .set((jobs::status.eq(JobStatus::Cancelling.as_str()), jobs::cancel_deadline.eq(db_ts(*deadline))))
        .execute(conn)
        .await?;
    ctx.wake(Topic::Run(job.run_id));
    Ok(if changed == 0 { Guarded::Lost } else { Guarded::Applied })
}
