//! Steps, and the signs of life of jobs.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::StepStatus;
use kici_engine::time::Ts;

use super::backend::Conn;
use super::kept::{Condition, kept};
use super::rows::{StepRow, big, clean, clean_opt, db_ts, small, ts_opt, word};
use super::schema::{jobs, steps};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{JobRef, LogState, Step, StepWrite, StepWritten};
use crate::notify::Topic;
use crate::types::{DbId, DbTs, Doc};

pub(crate) async fn step_upsert(
    conn: &mut Conn,
    ctx: &Ctx,
    writes: &[StepWrite],
) -> Result<Vec<StepWritten>, StoreError> {
    write_steps(conn, ctx, writes, BTreeMap::new()).await
}

/// Writes steps of jobs; `epochs` are the runs and epochs of those that were read already.
pub(crate) async fn write_steps(
    conn: &mut Conn,
    ctx: &Ctx,
    writes: &[StepWrite],
    mut epochs: BTreeMap<JobId, Option<(RunId, u32)>>,
) -> Result<Vec<StepWritten>, StoreError> {
    let mut answers = Vec::with_capacity(writes.len());
    for write in writes {
        let job = write.job;
        let current = match epochs.entry(job.job_id) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => {
                let query = jobs::table.find(DbId::from(job.job_id)).select((jobs::run_id, jobs::dispatch_epoch));
                let found: Option<(DbId, i64)> = query.first(conn).await.optional()?;
                *unknown.insert(found.map(|(run, epoch)| (run.into(), small(epoch))))
            }
        };
        if current != Some((job.run_id, job.epoch)) {
            answers.push(StepWritten::Stale);
            continue;
        }
        let answer = write_step(conn, write).await?;
        if answer == StepWritten::Applied {
            ctx.wake(Topic::Run(job.run_id));
        }
        answers.push(answer);
    }
    Ok(answers)
}

async fn write_step(conn: &mut Conn, write: &StepWrite) -> Result<StepWritten, StoreError> {
    type Columns = (String, Option<DbTs>, Option<String>);
    let key = (DbId::from(write.job.job_id), i64::from(write.job.epoch), write.step_key.as_str());
    if expected(conn, write, key).await? {
        return Ok(StepWritten::Applied);
    }
    let found: Option<Columns> =
        lock_row!(steps::table.find(key).select((steps::status, steps::started_at, steps::log_state)))
            .first(conn)
            .await
            .optional()?;
    let (old, started_at, log_state) = match found {
        Some((status, started_at, log_state)) => (Some(word("step status", &status)?), ts_opt(started_at), log_state),
        None => (None, None, None),
    };
    if !moves(old, write.status) {
        return Ok(StepWritten::Unchanged);
    }
    let row = step_row(write, started_at, log_state);
    if old.is_some() {
        kept(diesel::update(steps::table.find(key)).set(&row)).execute(conn).await?;
    } else {
        diesel::insert_into(steps::table).values(&row).execute(conn).await?;
    }
    Ok(StepWritten::Applied)
}

/// Writes what mostly comes, without a look at what is there: a step that begins and is new, or ends and was running. False
/// when it is another one, and nothing was written.
async fn expected(conn: &mut Conn, write: &StepWrite, key: (DbId, i64, &str)) -> Result<bool, StoreError> {
    let row = step_row(write, None, None);
    if !matches!(write.status, StepStatus::Success | StepStatus::Failed | StepStatus::Cancelled) {
        let inserted = diesel::insert_into(steps::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
        return Ok(inserted == 1);
    }
    let running = steps::table.find(key).filter(steps::status.eq(StepStatus::Running.as_str()));
    // When it started and how its log stands stay as they are.
    let end = (
        steps::ordinal.eq(row.ordinal),
        steps::name.eq(row.name),
        steps::status.eq(row.status),
        steps::exit_code.eq(row.exit_code),
        steps::message.eq(row.message),
        steps::outputs.eq(row.outputs),
        steps::finished_at.eq(row.finished_at),
        steps::log_bytes.eq(row.log_bytes),
        steps::log_lines.eq(row.log_lines),
        steps::missing_bytes.eq(row.missing_bytes),
        steps::missing_lines.eq(row.missing_lines),
        steps::failure_allowed.eq(row.failure_allowed),
        steps::summary.eq(row.summary),
        steps::attempt.eq(row.attempt),
        steps::check_result.eq(row.check_result),
        steps::drift.eq(row.drift),
        steps::group_name.eq(row.group_name),
    );
    Ok(kept(diesel::update(running).set(end)).execute(conn).await? == 1)
}

/// A step moves from pending to running to its end, and never back.
fn moves(old: Option<StepStatus>, new: StepStatus) -> bool {
    match old {
        None | Some(StepStatus::Pending) => true,
        Some(StepStatus::Running) => new != StepStatus::Pending,
        Some(_) => false,
    }
}

fn step_row(write: &StepWrite, started_at: Option<Ts>, log_state: Option<String>) -> StepRow {
    let runs = !matches!(write.status, StepStatus::Pending | StepStatus::Skipped);
    let started_at = started_at.or(runs.then_some(write.at));
    StepRow {
        job_id: write.job.job_id.into(),
        epoch: write.job.epoch.into(),
        step_key: write.step_key.clone(),
        ordinal: write.ordinal.into(),
        name: clean(&write.name),
        status: write.status.as_str().to_owned(),
        exit_code: write.exit_code.map(Into::into),
        message: clean_opt(write.message.as_deref()),
        outputs: Doc(write.outputs.clone()),
        started_at: db_ts(started_at),
        finished_at: db_ts(write.status.is_terminal().then_some(write.at)),
        log_bytes: big(write.log_bytes),
        log_lines: big(write.log_lines),
        missing_bytes: big(write.missing_bytes),
        missing_lines: big(write.missing_lines),
        failure_allowed: write.failure_allowed,
        summary: clean_opt(write.summary.as_deref()),
        log_state: log_state.or_else(|| runs.then(|| LogState::Open.as_str().to_owned())),
        attempt: write.attempt.into(),
        check_result: write.check.map(|result| result.as_str().to_owned()),
        drift: clean_opt(write.drift.as_deref()),
        group_name: clean_opt(write.group.as_deref()),
    }
}

pub(crate) async fn steps_sealed(
    conn: &mut Conn,
    _: &Ctx,
    job: &JobRef,
    sizes: &[(String, u64, u64)],
) -> Result<(), StoreError> {
    for (step_key, bytes, lines) in sizes {
        diesel::update(steps::table.find((DbId::from(job.job_id), i64::from(job.epoch), step_key)))
            .set((
                steps::log_state.eq(LogState::Sealed.as_str()),
                steps::log_bytes.eq(big(*bytes)),
                steps::log_lines.eq(big(*lines)),
            ))
            .execute(conn)
            .await?;
    }
    // Steps that wrote nothing have no log to seal.
    diesel::update(steps::table)
        .filter(steps::job_id.eq(DbId::from(job.job_id)))
        .filter(steps::epoch.eq(i64::from(job.epoch)))
        .filter(is_log_open())
        .set(steps::log_state.eq(None::<String>))
        .execute(conn)
        .await?;
    Ok(())
}

/// The log is being written. A literal, so that both planners use the partial index.
fn is_log_open() -> Condition {
    Condition("steps.log_state = 'open'")
}

pub(crate) async fn logs_unsealed(conn: &mut Conn, _: &Ctx, limit: &u32) -> Result<Vec<JobRef>, StoreError> {
    let rows: Vec<(DbId, DbId, i64)> = steps::table
        .inner_join(jobs::table)
        .filter(is_log_open())
        .filter(jobs::finished_at.is_not_null().or(jobs::dispatch_epoch.gt(steps::epoch)))
        .select((jobs::run_id, steps::job_id, steps::epoch))
        .distinct()
        .limit(i64::from(*limit))
        .load(conn)
        .await?;
    Ok(rows
        .into_iter()
        .map(|(run_id, job_id, epoch)| JobRef { run_id: run_id.into(), job_id: job_id.into(), epoch: small(epoch) })
        .collect())
}

pub(crate) async fn steps_of_run(conn: &mut Conn, _: &Ctx, id: &RunId) -> Result<Vec<Step>, StoreError> {
    let rows: Vec<StepRow> = steps::table
        .inner_join(jobs::table)
        .filter(jobs::run_id.eq(DbId::from(*id)))
        .filter(steps::epoch.eq(jobs::dispatch_epoch))
        .order((jobs::position, steps::ordinal, steps::step_key))
        .select(StepRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(StepRow::read).collect()
}

pub(crate) async fn steps_of_job(conn: &mut Conn, _: &Ctx, job: &JobId, epoch: &u32) -> Result<Vec<Step>, StoreError> {
    let rows: Vec<StepRow> = steps::table
        .filter(steps::job_id.eq(DbId::from(*job)))
        .filter(steps::epoch.eq(i64::from(*epoch)))
        .order((steps::ordinal, steps::step_key))
        .select(StepRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(StepRow::read).collect()
}

pub(crate) async fn job_heartbeats(conn: &mut Conn, _: &Ctx, beats: &[(JobRef, Ts)]) -> Result<(), StoreError> {
    for (job, at) in beats {
        diesel::update(jobs::table.find(DbId::from(job.job_id)))
            .filter(jobs::dispatch_epoch.eq(i64::from(job.epoch)))
            .filter(jobs::finished_at.is_null())
            .set(jobs::last_heartbeat_at.eq(DbTs::from(*at)))
            .execute(conn)
            .await?;
    }
    Ok(())
}
