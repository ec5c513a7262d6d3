//! Reads a run under its lock, lets `crate::advance` do what follows from a change, and writes it.

use std::collections::BTreeMap;
use std::sync::Arc;

use diesel::dsl::case_when;
use diesel::prelude::*;
use diesel::query_builder::{QueryFragment, QueryId};
use diesel::sql_types::Text;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::state::{FailureReason, JobStatus, JobView, QueueStatus, StepStatus};
use sha2::{Digest, Sha256};

use super::backend::{Conn, Db};
use super::credentials;
use super::ends;
use super::gates;
use super::kept::kept;
use super::queue::{HandedRow, is_open};
use super::roster;
use super::rows::{
    DispatchRow, JobChange, JobRow, NeedRow, RunRow, SelectorRow, agent_opt, clean_opt, db_ts, small, word,
};
use super::runs::lock_body;
use super::schema::{
    dispatch_history, dispatch_queue, job_needs, jobs, queue_selectors, registry_version, runs, steps,
};
use super::slots;
use crate::StoreError;
use crate::advance::again::Retried;
use crate::advance::quiet::{Other, is_quiet};
use crate::advance::{Advanced, OpenRow, RunState};
use crate::ctx::Ctx;
use crate::model::{Activate, Effects, Job, JobRef, QueueEntry, Run};
use crate::notify::Topic;
use crate::types::{DbId, DbTs, Doc};

type OpenColumns = (DbId, String, i64, Option<String>, Option<String>, Option<DbTs>);

/// Open rows of the queue. Locked, so that no claim takes one that is about to end.
macro_rules! open_rows {
    ($filter:expr) => {
        lock_row!(dispatch_queue::table.filter($filter).filter(is_open()).order(dispatch_queue::id).select((
            dispatch_queue::id,
            dispatch_queue::status,
            dispatch_queue::dispatch_epoch,
            dispatch_queue::agent_id,
            dispatch_queue::owner_instance_id,
            dispatch_queue::started_at,
        )))
    };
}

/// Jobs of a run that are all read whenever something changes. Of more, the end of one nearly always concerns itself only.
const FEW: usize = 64;

/// Reads a run with its jobs and locks it: whoever else changes one of its jobs waits.
pub(crate) async fn load(conn: &mut Conn, ctx: &Ctx, id: RunId) -> Result<Option<RunState>, StoreError> {
    let Some(run) = lock_run(conn, id).await? else { return Ok(None) };
    let jobs: Vec<JobRow> = jobs::table
        .filter(jobs::run_id.eq(DbId::from(id)))
        .order(jobs::position)
        .select(JobRow::as_select())
        .load(conn)
        .await?;
    whole(conn, ctx, run, jobs).await.map(Some)
}

/// As [`load`], for the end of a job with this status. Of a large run in which nothing else follows from that, only the job is
/// read, and which ways the others stand: what the end of each of a thousand jobs costs does not grow with their number.
pub(crate) async fn load_end(
    conn: &mut Conn,
    ctx: &Ctx,
    job: JobRef,
    end: JobStatus,
) -> Result<Option<RunState>, StoreError> {
    let Some(run) = lock_run(conn, job.run_id).await? else { return Ok(None) };
    let some: Vec<JobRow> = jobs::table
        .filter(jobs::run_id.eq(DbId::from(job.run_id)))
        .order(jobs::position)
        .limit(FEW as i64 + 1)
        .select(JobRow::as_select())
        .load(conn)
        .await?;
    if some.len() <= FEW {
        return whole(conn, ctx, run, some).await.map(Some);
    }
    let own: Option<JobRow> = jobs::table
        .find(DbId::from(job.job_id))
        .filter(jobs::run_id.eq(DbId::from(job.run_id)))
        .select(JobRow::as_select())
        .first(conn)
        .await
        .optional()?;
    if let Some(own) = own {
        let own = own.read()?;
        let others = others(conn, job).await?;
        if is_quiet(&run, &own, &others, end) {
            let open: Vec<OpenColumns> = open_rows!(dispatch_queue::id.eq(DbId::from(job.job_id))).load(conn).await?;
            let open = open.into_iter().map(read_open).collect::<Result<_, _>>()?;
            let mut state = RunState::new(run, vec![own], Vec::new(), open);
            state.others = others.into_iter().map(|other| other.view).collect();
            state.max_chain_depth = ctx.max_chain_depth();
            return Ok(Some(state));
        }
    }
    let jobs: Vec<JobRow> = jobs::table
        .filter(jobs::run_id.eq(DbId::from(job.run_id)))
        .order(jobs::position)
        .select(JobRow::as_select())
        .load(conn)
        .await?;
    whole(conn, ctx, run, jobs).await.map(Some)
}

async fn lock_run(conn: &mut Conn, id: RunId) -> Result<Option<Run>, StoreError> {
    let query = lock_row!(runs::table.find(DbId::from(id)).select(RunRow::as_select()));
    let row: Option<RunRow> = query.first(conn).await.optional()?;
    row.map(RunRow::read).transpose()
}

async fn whole(conn: &mut Conn, ctx: &Ctx, run: Run, jobs: Vec<JobRow>) -> Result<RunState, StoreError> {
    let key = DbId::from(run.id);
    type Rows = (Vec<NeedRow>, Vec<OpenColumns>, i64);
    let (needs, open, registry_version): Rows = at_once!(conn as c;
        job_needs::table.filter(job_needs::run_id.eq(key)).select(NeedRow::as_select()).load(c),
        open_rows!(dispatch_queue::run_id.eq(key)).load(c),
        registry_version::table.find(1).select(registry_version::version).first(c),
    )?;
    let open = open.into_iter().map(read_open).collect::<Result<_, _>>()?;
    let jobs = jobs.into_iter().map(JobRow::read).collect::<Result<_, _>>()?;
    let needs = needs.into_iter().map(NeedRow::read).collect();
    let mut state = RunState::new(run, jobs, needs, open);
    state.max_chain_depth = ctx.max_chain_depth();
    state.registry_version = Some(registry_version);
    slots::load(conn, &mut state).await?;
    Ok(state)
}

/// The ways in which the other jobs of a run stand, each once.
async fn others(conn: &mut Conn, job: JobRef) -> Result<Vec<Other>, StoreError> {
    type Columns = (String, String, Option<String>, bool, bool);
    let rows: Vec<Columns> = jobs::table
        .filter(jobs::run_id.eq(DbId::from(job.run_id)))
        .filter(jobs::id.ne(DbId::from(job.job_id)))
        .select((
            jobs::base_name,
            jobs::status,
            jobs::failure_reason,
            jobs::started_at.is_not_null().or(jobs::attempt.gt(1_i64)),
            jobs::group_name.is_not_null(),
        ))
        .distinct()
        .load(conn)
        .await?;
    rows.into_iter()
        .map(|(base_name, status, reason, started, takes_turns)| {
            let status = word("job status", &status)?;
            let reason = reason.map(|reason| word("failure reason", &reason)).transpose()?;
            Ok(Other { base_name, view: JobView { status, reason, started }, takes_turns })
        })
        .collect()
}

fn read_open((id, status, epoch, agent_id, owner, started_at): OpenColumns) -> Result<(JobId, OpenRow), StoreError> {
    let row = OpenRow {
        status: word("queue status", &status)?,
        epoch: small(epoch),
        agent_id: agent_opt(agent_id)?,
        owner: agent_opt(owner)?,
        started: started_at.is_some(),
    };
    Ok((id.into(), row))
}

/// Does what follows from the changes made to `state` and writes all of it.
pub(crate) async fn settle(
    conn: &mut Conn,
    ctx: &Ctx,
    mut state: RunState,
    activate: Option<&dyn Activate>,
) -> Result<Effects, StoreError> {
    let was = state.run.clone();
    finish_advance(conn, ctx, &mut state, activate).await?;
    write(conn, ctx, &state, &was).await?;
    for retried in state.again.values() {
        put_back(conn, ctx, &state, retried).await?;
    }
    enqueue(conn, ctx, &state, &[]).await?;
    gates::open(conn, ctx, &state).await?;
    slots::leave(conn, ctx, &state).await?;
    ends::announce(conn, ctx, &state, was.status).await?;
    ctx.wake(Topic::Run(state.run.id));
    if state.stops_elsewhere(ctx.node()) {
        ctx.wake(Topic::Cancels);
    }
    Ok(state.into_effects(was.status))
}

/// Writes what changed of rows that are there.
async fn write(conn: &mut Conn, ctx: &Ctx, state: &RunState, was: &Run) -> Result<(), StoreError> {
    let rows = || state.ended().filter_map(|job| Some((job, state.open.get(&job.id)?)));
    at_once!(conn as c;
        async {
            for job in state.changed() {
                kept(diesel::update(jobs::table.find(DbId::from(job.id))).set(JobChange::of(job))).execute(c).await?;
            }
            QueryResult::Ok(())
        },
        async {
            // One that was never handed out has none.
            for job in state.ended().filter(|job| job.dispatch_epoch > 0) {
                steps_end(ctx, job).execute(c).await?;
            }
            QueryResult::Ok(())
        },
        async {
            for (job, _) in rows() {
                row_end(ctx, job, state.row_end(job)).execute(c).await?;
            }
            QueryResult::Ok(())
        },
        async {
            for (job, row) in rows().filter(|(_, row)| row.status != QueueStatus::Pending) {
                let why = job.failure_message.as_deref();
                history_end(ctx, job.id, row.epoch, state.row_end(job).as_str(), why).execute(c).await?;
            }
            QueryResult::Ok(())
        },
        async {
            match state.run == *was {
                true => Ok(0),
                false => run_change(&state.run).execute(c).await,
            }
        },
    )?;
    Ok(())
}

/// Sends a job that failed for this reason back to the queue, if the workflow wants that. False when it does not.
pub(crate) async fn try_again(
    conn: &mut Conn,
    ctx: &Ctx,
    state: &mut RunState,
    at: usize,
    (reason, message): (FailureReason, Option<&str>),
    activate: &dyn Activate,
) -> Result<bool, StoreError> {
    if !state.may_try_again(at) {
        return Ok(false);
    }
    let Some(lock) = lock_body(conn, ctx, &state.run.lock_digest).await? else { return Ok(false) };
    let Some(again) = state.judge_failure(at, reason, activate, &lock) else { return Ok(false) };
    let why = format!("{}: {}", reason.as_str(), message.unwrap_or("no further word"));
    state.try_again(at, why, again.expires_at, ctx.now)?;
    Ok(true)
}

/// The open row of a job that is tried again, as if it had not been handed out; its epoch goes on. Its steps stay with the
/// delivery that failed.
async fn put_back(conn: &mut Conn, ctx: &Ctx, state: &RunState, retried: &Retried) -> Result<(), StoreError> {
    let job = retried.job;
    if let Some(at) = state.position(job.job_id) {
        steps_end(ctx, &state.jobs[at]).execute(conn).await?;
    }
    let (time, text): (Option<DbTs>, Option<String>) = (None, None);
    diesel::update(dispatch_queue::table.find(DbId::from(job.job_id)))
        .filter(is_open())
        .filter(dispatch_queue::dispatch_epoch.eq(i64::from(job.epoch)))
        .set((
            dispatch_queue::status.eq(QueueStatus::Pending.as_str()),
            dispatch_queue::dispatch_attempts.eq(0_i64),
            dispatch_queue::expires_at.eq(db_ts(retried.expires_at)),
            dispatch_queue::agent_id.eq(&text),
            dispatch_queue::owner_instance_id.eq(&text),
            dispatch_queue::dispatched_at.eq(time),
            dispatch_queue::ack_deadline.eq(time),
            dispatch_queue::ack_agent_id.eq(&text),
            dispatch_queue::acked_at.eq(time),
            dispatch_queue::started_at.eq(time),
            dispatch_queue::recovery_deadline.eq(time),
            dispatch_queue::recovery_agent_id.eq(&text),
        ))
        .execute(conn)
        .await?;
    diesel::update(jobs::table.find(DbId::from(job.job_id)))
        .set((jobs::agent_id.eq(&text), jobs::last_heartbeat_at.eq(time)))
        .execute(conn)
        .await?;
    history_end(ctx, job.job_id, job.epoch, "retried", Some(&retried.why)).execute(conn).await?;
    ctx.wake(Topic::Queue);
    Ok(())
}

/// Lets a run advance until it is stable, reading the lock document when a job is ready.
pub(crate) async fn finish_advance(
    conn: &mut Conn,
    ctx: &Ctx,
    state: &mut RunState,
    activate: Option<&dyn Activate>,
) -> Result<(), StoreError> {
    advance_fully(conn, ctx, state, activate).await?;
    state.conclude(ctx.now);
    Ok(())
}

/// As [`finish_advance`], without bringing the run's own columns up to date.
pub(crate) async fn advance_fully(
    conn: &mut Conn,
    ctx: &Ctx,
    state: &mut RunState,
    activate: Option<&dyn Activate>,
) -> Result<(), StoreError> {
    let mut lock: Option<Arc<Vec<u8>>> = None;
    loop {
        let advanced = state.advance(ctx.now, activate, lock.as_ref(), &|| ctx.take_room())?;
        match advanced {
            Advanced::Stable => break,
            Advanced::WantsLock => {
                // Only for jobs whose turn may come: how their hosts stand now decides on them.
                let pinned = state.pending_hosts();
                if !pinned.is_empty() {
                    state.hosts = roster::hosts_named(conn, &pinned).await?;
                }
                let digest = state.run.lock_digest.clone();
                let body = lock_body(conn, ctx, &digest).await?;
                lock = Some(body.ok_or(StoreError::NotFound { what: "lock document" })?);
            }
            Advanced::WantsSlots => slots::acquire(conn, ctx, state).await?,
        }
    }
    Ok(())
}

/// The columns of a run that change after its creation.
fn run_change(run: &Run) -> impl QueryFragment<Db> + QueryId + Send + use<'_> {
    kept(diesel::update(runs::table.find(DbId::from(run.id))).set((
        runs::status.eq(run.status.as_str()),
        runs::lock_digest.eq(&run.lock_digest),
        runs::failure_reason.eq(run.failure_reason.map(|reason| reason.as_str())),
        runs::failure_message.eq(clean_opt(run.failure_message.as_deref())),
        runs::cancel_requested_at.eq(db_ts(run.cancel_requested_at)),
        runs::cancelled_by.eq(run.cancelled_by.as_deref()),
        runs::started_at.eq(db_ts(run.started_at)),
        runs::finished_at.eq(db_ts(run.finished_at)),
        runs::deadline.eq(db_ts(run.deadline)),
    )))
}

/// The end of steps that a job leaves open.
fn steps_end(ctx: &Ctx, job: &Job) -> impl QueryFragment<Db> + QueryId + Send + use<> {
    let running = match job.status {
        JobStatus::Success => StepStatus::Success,
        JobStatus::Cancelled => StepStatus::Cancelled,
        _ => StepStatus::Failed,
    };
    let was_running = steps::status.eq(StepStatus::Running.as_str());
    let end = case_when(was_running, running.as_str().into_sql::<Text>())
        .otherwise(StepStatus::Skipped.as_str().into_sql::<Text>());
    kept(
        diesel::update(steps::table)
            .filter(steps::job_id.eq(DbId::from(job.id)))
            .filter(steps::epoch.eq(i64::from(job.dispatch_epoch)))
            .filter(steps::status.eq_any([StepStatus::Running.as_str(), StepStatus::Pending.as_str()]))
            .set((steps::status.eq(end), steps::finished_at.eq(DbTs::from(ctx.now)))),
    )
}

/// The end of a row of the queue.
fn row_end(ctx: &Ctx, job: &Job, end: QueueStatus) -> impl QueryFragment<Db> + QueryId + Send + use<> {
    let none: Option<DbTs> = None;
    kept(diesel::update(dispatch_queue::table.find(DbId::from(job.id))).set((
        dispatch_queue::status.eq(end.as_str()),
        dispatch_queue::finished_at.eq(DbTs::from(ctx.now)),
        dispatch_queue::ack_deadline.eq(none),
        dispatch_queue::recovery_deadline.eq(none),
        dispatch_queue::unroutable_since.eq(none),
    )))
}

/// The end of the history entry of a delivery.
pub(crate) fn history_end<'a>(
    ctx: &Ctx,
    job: JobId,
    epoch: u32,
    outcome: &'a str,
    reason: Option<&str>,
) -> impl QueryFragment<Db> + QueryId + Send + use<'a> {
    kept(
        diesel::update(dispatch_history::table.find((DbId::from(job), i64::from(epoch))))
            .filter(dispatch_history::ended_at.is_null())
            .set((
                dispatch_history::ended_at.eq(DbTs::from(ctx.now)),
                dispatch_history::outcome.eq(outcome),
                dispatch_history::reason.eq(clean_opt(reason)),
            )),
    )
}

/// Adds the rows of newly queued jobs, and of those that agents got with them the entries of the history.
pub(crate) async fn enqueue(
    conn: &mut Conn,
    ctx: &Ctx,
    state: &RunState,
    placed: &[(AgentId, Job)],
) -> Result<(), StoreError> {
    if state.enqueued.is_empty() {
        return Ok(());
    }
    let mut waiting = false;
    let mut rows = Vec::with_capacity(state.enqueued.len());
    let mut selectors: BTreeMap<String, SelectorRow> = BTreeMap::new();
    for job in &state.jobs {
        let Some(entry) = state.enqueued.get(&job.id) else { continue };
        let selector = selector_row(ctx, entry)?;
        rows.push(queue_row(&state.run, job, entry, selector.digest.clone(), ctx));
        waiting |= job.agent_id.is_none();
        if !ctx.selector_kept(&selector.digest) {
            selectors.insert(selector.digest.clone(), selector);
        }
    }
    let history: Vec<HandedRow> = placed.iter().map(|(agent, job)| HandedRow::of(ctx, agent, job)).collect();
    at_once!(conn as c;
        async {
            for selector in selectors.values() {
                let insert = diesel::insert_into(queue_selectors::table).values(selector).on_conflict_do_nothing();
                insert.execute(c).await?;
            }
            QueryResult::Ok(())
        },
        async {
            insert_all!(c, dispatch_queue::table, &rows);
            QueryResult::Ok(())
        },
        async {
            insert_all!(c, dispatch_history::table, &history);
            QueryResult::Ok(())
        },
    )?;
    selectors.into_keys().for_each(|digest| ctx.keep_selector(digest));
    credentials::declare(conn, state).await?;
    if waiting {
        ctx.wake(Topic::Queue);
    }
    Ok(())
}

/// Names a selector, with the machine and the agent that it is tied to.
pub(crate) fn selector_digest(entry: &QueueEntry) -> Result<String, StoreError> {
    let pinned = entry.pinned_agent_id.as_ref().map(|agent| agent.as_str());
    let text = match pinned {
        // As it was before there were pins.
        None => serde_json::to_vec(&(&entry.selector, &entry.requires_machine_id)),
        Some(agent) => serde_json::to_vec(&(&entry.selector, &entry.requires_machine_id, agent)),
    };
    let text = text.map_err(|error| StoreError::Corrupt { what: "selector", detail: error.to_string() })?;
    Ok(hex::encode(Sha256::digest(&text)))
}

fn selector_row(ctx: &Ctx, entry: &QueueEntry) -> Result<SelectorRow, StoreError> {
    Ok(SelectorRow {
        digest: selector_digest(entry)?,
        selector: Doc(entry.selector.clone()),
        requires_machine_id: entry.requires_machine_id.clone(),
        created_at: ctx.now.into(),
        pinned_agent_id: entry.pinned_agent_id.as_ref().map(|agent| agent.as_str().to_owned()),
    })
}

/// The row of a job that enters the queue: one that waits, or one that was placed at an agent already.
fn queue_row(run: &Run, job: &Job, entry: &QueueEntry, selector_digest: String, ctx: &Ctx) -> DispatchRow {
    let placed = job.agent_id.as_ref();
    let status = if placed.is_some() { QueueStatus::Dispatched } else { QueueStatus::Pending };
    DispatchRow {
        id: job.id.into(),
        run_id: run.id.into(),
        workflow_name: run.workflow_name.clone(),
        job_name: job.name.clone(),
        status: status.as_str().to_owned(),
        priority: entry.priority.into(),
        selector_digest,
        created_at: ctx.now.into(),
        expires_at: db_ts(entry.expires_at),
        dispatched_at: placed.map(|_| ctx.now.into()),
        dispatch_attempts: 0,
        dispatch_epoch: if placed.is_some() { job.dispatch_epoch.into() } else { 0 },
        agent_id: placed.map(|agent| agent.as_str().to_owned()),
        owner_instance_id: placed.map(|_| ctx.node().as_str().to_owned()),
        ack_deadline: None,
        ack_agent_id: None,
        acked_at: None,
        started_at: None,
        recovery_deadline: None,
        recovery_agent_id: None,
        unroutable_since: None,
        pinned_agent_id: entry.pinned_agent_id.as_ref().map(|agent| agent.as_str().to_owned()),
        finished_at: None,
        last_provisioning_error: None,
    }
}
