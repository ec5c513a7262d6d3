//! Runs: creation, the end of their jobs, cancel.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::state::{FailureReason, JobEvent, JobStatus, QueueStatus, RunStatus};

use super::backend::Conn;
use super::ends;
use super::queue::record_handed;
use super::rows::{JobRow, NeedRow, RunRow, clean, clean_opt, db_ts, millis_of, word};
use super::schema::{dispatch_queue, job_needs, jobs, lock_documents, request_keys, runs};
use super::settle::{self, enqueue, finish_advance};
use super::slots;
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{
    Activate, CancelOutcome, CancelRequest, ClaimedJob, CreatedRun, Effects, FailRequest, Guarded, Job, JobFinished,
    JobRef, JobResult, JobStart, NeedEdge, NewJob, NewRun, QueueEntry, Run, StepWrite, StepWritten,
};
use crate::notify::Topic;
use crate::types::{DbId, DbTs, Doc};

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
    insert_all!(conn, jobs::table, &rows);
    let needs: Vec<NeedRow> = new
        .needs
        .iter()
        .map(|need| NeedRow {
            run_id: key,
            job_name: need.job_name.clone(),
            upstream_name: need.upstream.clone(),
            run_on: Doc(need.run_on.clone()),
        })
        .collect();
    insert_all!(conn, job_needs::table, &needs);
    enqueue(conn, ctx, &state).await?;
    record_handed(conn, ctx, &placed).await?;
    if state.run.status != RunStatus::Pending {
        diesel::update(runs::table.find(key))
            .set((
                runs::status.eq(state.run.status.as_str()),
                runs::failure_reason.eq(state.run.failure_reason.map(|reason| reason.as_str())),
                runs::failure_message.eq(clean_opt(state.run.failure_message.as_deref())),
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

fn new_run(ctx: &Ctx, new: &NewRun) -> Run {
    Run {
        id: new.id,
        org: new.org.clone(),
        source_id: new.source_id,
        delivery_id: new.delivery_id,
        dedup_key: new.dedup_key.clone(),
        repo: new.repo.clone(),
        git_ref: new.git_ref.clone(),
        sha: new.sha.clone(),
        workflow_name: new.workflow_name.clone(),
        run_name: clean(&new.run_name),
        lock_digest: new.lock_digest.clone(),
        event: new.event.clone(),
        trigger_kind: new.trigger_kind.clone(),
        status: RunStatus::Pending,
        failure_reason: None,
        failure_message: None,
        cancel_requested_at: None,
        cancelled_by: None,
        attempt: new.attempt,
        parent_run_id: new.parent_run_id,
        inputs: new.inputs.clone(),
        request_id: new.request_id.clone(),
        chain_depth: new.chain_depth,
        created_at: ctx.now,
        started_at: None,
        finished_at: None,
        timeout: new.timeout,
        deadline: None,
        concurrency: new.concurrency.clone(),
        logs_expired_at: None,
    }
}

fn run_row(run: &Run) -> RunRow {
    RunRow {
        id: run.id.into(),
        org: run.org.clone(),
        source_id: run.source_id.into(),
        delivery_row_id: run.delivery_id.map(Into::into),
        dedup_key: run.dedup_key.clone(),
        repo: run.repo.clone(),
        git_ref: run.git_ref.clone(),
        sha: run.sha.clone(),
        workflow_name: run.workflow_name.clone(),
        run_name: run.run_name.clone(),
        lock_digest: run.lock_digest.clone(),
        event: Doc(run.event.clone()),
        trigger_kind: run.trigger_kind.clone(),
        status: run.status.as_str().to_owned(),
        failure_reason: None,
        failure_message: None,
        cancel_requested_at: None,
        cancelled_by: None,
        attempt: run.attempt.into(),
        parent_run_id: run.parent_run_id.map(Into::into),
        inputs: Doc(run.inputs.clone()),
        request_id: run.request_id.clone(),
        chain_depth: run.chain_depth.into(),
        created_at: run.created_at.into(),
        started_at: None,
        finished_at: None,
        timeout_ms: millis_of(run.timeout),
        deadline: None,
        concurrency: run.concurrency.clone().map(Doc),
        logs_expired_at: None,
    }
}

/// A new run in memory, before anything follows.
fn new_state(ctx: &Ctx, new: &NewRun, run: Run) -> Result<RunState, StoreError> {
    let needing: BTreeSet<&str> = new.needs.iter().map(|need| need.job_name.as_str()).collect();
    let jobs = new.jobs.iter().map(|job| new_job(ctx, new, job, needing.contains(job.name.as_str()))).collect();
    let needs = new
        .needs
        .iter()
        .map(|need| NeedEdge {
            job_name: need.job_name.clone(),
            upstream: need.upstream.clone(),
            run_on: need.run_on.clone(),
        })
        .collect();
    let mut state = RunState::new(run, jobs, needs, BTreeMap::new());
    for job in &new.jobs {
        if let JobStart::Queued(entry) = &job.start
            && !takes_turns(new, entry)
        {
            state.enqueued.insert(job.id, entry.clone());
        }
    }
    state.hold_back();
    state.shed(ctx.now, &|| ctx.take_room())?;
    Ok(state)
}

/// Whether a job that could go to an agent must ask for a slot first. It then starts as one that is to be judged again.
fn takes_turns(run: &NewRun, entry: &QueueEntry) -> bool {
    run.concurrency.is_some() || entry.slot.is_some()
}

fn new_job(ctx: &Ctx, run: &NewRun, new: &NewJob, needs: bool) -> Job {
    let mut job = Job {
        id: new.id,
        run_id: run.id,
        name: new.name.clone(),
        base_name: new.base_name.clone(),
        job_index: new.job_index,
        variant_label: new.variant_label.clone(),
        matrix: new.matrix.clone(),
        display_name: clean(&new.display_name),
        status: JobStatus::Pending,
        needs_satisfied: !needs,
        ready_at: None,
        max_parallel: new.max_parallel,
        fail_fast: new.fail_fast,
        group_name: None,
        failure_reason: None,
        failure_class: None,
        failure_message: None,
        evidence: None,
        agent_id: None,
        dispatch_epoch: 0,
        attempt: 1,
        outputs: BTreeMap::new(),
        routing_reason: None,
        log_bytes: 0,
        created_at: ctx.now,
        started_at: None,
        finished_at: None,
        last_heartbeat_at: None,
        timeout: new.timeout,
        cancel_deadline: None,
        fanout: new.fanout.clone(),
    };
    match &new.start {
        JobStart::Pending => {}
        JobStart::Queued(entry) if takes_turns(run, entry) => {}
        JobStart::Queued(_) => {
            job.status = JobStatus::Queued;
            job.ready_at = Some(ctx.now);
        }
        JobStart::Skipped { reason } => {
            job.status = JobStatus::Skipped;
            job.failure_message = Some(clean(reason));
        }
        JobStart::Failed { reason, message } => {
            job.status = reason.status();
            job.failure_reason = Some(*reason);
            job.failure_class = Some(reason.class());
            job.failure_message = Some(clean(message));
        }
        JobStart::Succeeded { outputs } => {
            job.status = JobStatus::Success;
            job.outputs = outputs.clone();
        }
    }
    if job.status.is_terminal() {
        job.finished_at = Some(ctx.now);
    }
    job
}

fn job_row(position: i64, job: &Job) -> JobRow {
    JobRow {
        id: job.id.into(),
        run_id: job.run_id.into(),
        name: job.name.clone(),
        base_name: job.base_name.clone(),
        job_index: job.job_index.into(),
        position,
        variant_label: job.variant_label.clone(),
        matrix: job.matrix.clone().map(Doc),
        display_name: job.display_name.clone(),
        status: job.status.as_str().to_owned(),
        needs_satisfied: job.needs_satisfied,
        ready_at: db_ts(job.ready_at),
        max_parallel: job.max_parallel.map(Into::into),
        fail_fast: job.fail_fast,
        group_name: job.group_name.clone(),
        failure_reason: job.failure_reason.map(|reason| reason.as_str().to_owned()),
        failure_class: job.failure_class.map(|class| class.as_str().to_owned()),
        failure_message: clean_opt(job.failure_message.as_deref()),
        evidence: None,
        agent_id: job.agent_id.as_ref().map(|agent| agent.as_str().to_owned()),
        dispatch_epoch: job.dispatch_epoch.into(),
        attempt: job.attempt.into(),
        outputs: Doc(job.outputs.clone()),
        routing_reason: None,
        log_bytes: 0,
        created_at: job.created_at.into(),
        started_at: None,
        finished_at: db_ts(job.finished_at),
        last_heartbeat_at: None,
        timeout_ms: millis_of(job.timeout),
        cancel_deadline: None,
        fanout: job.fanout.clone().map(Doc),
    }
}

pub(crate) async fn job_report(
    conn: &mut Conn,
    ctx: &Ctx,
    steps: &[StepWrite],
    result: &JobResult,
    activate: &Arc<dyn Activate>,
) -> Result<(Vec<StepWritten>, JobFinished), StoreError> {
    let written = super::steps::step_upsert(conn, ctx, steps).await?;
    Ok((written, job_finish(conn, ctx, result, activate).await?))
}

pub(crate) async fn job_finish(
    conn: &mut Conn,
    ctx: &Ctx,
    result: &JobResult,
    activate: &Arc<dyn Activate>,
) -> Result<JobFinished, StoreError> {
    let Some(mut state) = settle::load(conn, result.job.run_id).await? else { return Ok(JobFinished::NotOwned) };
    let Some(at) = state.position(result.job.job_id) else { return Ok(JobFinished::NotOwned) };
    if let Some(verdict) = refuse(&state, at, result) {
        return Ok(verdict);
    }
    let now = result.at.unwrap_or(ctx.now);
    let (reason, message) = (result.reason, result.message.clone());
    if state.jobs[at].status == JobStatus::Recovering && result.status != JobStatus::Cancelled {
        // The agent is back with a result before it was resumed.
        state.apply(at, JobEvent::Start, None, None, now)?;
    }
    let event = match (result.status, state.jobs[at].status) {
        (JobStatus::Success, JobStatus::Running | JobStatus::Cancelling) => JobEvent::Succeed,
        (JobStatus::Failed, _) => JobEvent::Fail,
        (JobStatus::Cancelled, JobStatus::Cancelling) => JobEvent::Complete,
        (JobStatus::Cancelled, _) => JobEvent::Cancel,
        // Success without a granted start, or a status that no agent may assert.
        _ => return Ok(JobFinished::Stale),
    };
    if event == JobEvent::Fail
        && let Some(reason) = reason
        && settle::try_again(conn, ctx, &mut state, at, (reason, message.as_deref()), &**activate).await?
    {
        state.jobs[at].log_bytes = result.log_bytes;
        let effects = settle::settle(conn, ctx, state, Some(&**activate)).await?;
        return Ok(JobFinished::Applied(Box::new(effects)));
    }
    let keep = event == JobEvent::Complete && state.jobs[at].failure_reason.is_some();
    state.apply(at, event, if keep { None } else { reason }, message, now)?;
    let job = &mut state.jobs[at];
    job.outputs = result.outputs.clone();
    job.evidence = result.evidence.clone();
    job.log_bytes = result.log_bytes;
    let effects = settle::settle(conn, ctx, state, Some(&**activate)).await?;
    Ok(JobFinished::Applied(Box::new(effects)))
}

/// Why a result is not taken; none when it is.
fn refuse(state: &RunState, at: usize, result: &JobResult) -> Option<JobFinished> {
    let job = &state.jobs[at];
    if job.dispatch_epoch != result.job.epoch {
        return Some(JobFinished::Stale);
    }
    let owner = match state.open.get(&job.id) {
        Some(row) if row.status == QueueStatus::Pending => return Some(JobFinished::Stale),
        Some(row) => row.agent_id.as_ref(),
        None => job.agent_id.as_ref(),
    };
    if result.agent_id.is_some() && owner != result.agent_id.as_ref() {
        return Some(JobFinished::NotOwned);
    }
    job.status.is_terminal().then_some(JobFinished::Duplicate(job.status))
}

pub(crate) async fn job_fail(
    conn: &mut Conn,
    ctx: &Ctx,
    request: &FailRequest,
    activate: &Arc<dyn Activate>,
) -> Result<JobFinished, StoreError> {
    let Some(mut state) = settle::load(conn, request.job.run_id).await? else { return Ok(JobFinished::NotOwned) };
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
    let Some(state) = settle::load(conn, *id).await? else { return Ok(None) };
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
    let Some(mut state) = settle::load(conn, *id).await? else { return Ok(None) };
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
    let Some(mut state) = settle::load(conn, request.run_id).await? else { return Ok(CancelOutcome::NotFound) };
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
