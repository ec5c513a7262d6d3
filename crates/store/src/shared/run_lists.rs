//! Reading runs and jobs, the sweeps' lists, and the plan of a re-run.

use std::collections::BTreeSet;
use std::time::Duration;

use diesel::dsl::{exists, not};
use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{JobId, RunId};
use kici_engine::lock::RUN_HOOKS_JOB;
use kici_engine::plan::JobKind;
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_engine::time::Ts;

use super::backend::{Conn, Db};
use super::kept::Condition;
use super::queue::is_held;
use super::rows::{JobRow, NeedRow, RunRow, agent, agent_opt, small, word};
use super::schema::{dispatch_queue, job_needs, jobs, runs};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{
    Cursor, HeldJob, Job, JobRef, JobStart, Listed, NeedEdge, NewJob, NewNeed, NewRun, Page, Rerun, Run, RunFilter,
};
use crate::types::{DbId, DbTs};

pub(crate) async fn run_get(conn: &mut Conn, _: &Ctx, id: &RunId) -> Result<Option<Run>, StoreError> {
    let row: Option<RunRow> =
        runs::table.find(DbId::from(*id)).select(RunRow::as_select()).first(conn).await.optional()?;
    row.map(RunRow::read).transpose()
}

pub(crate) async fn run_list(
    conn: &mut Conn,
    _: &Ctx,
    filter: &RunFilter,
    page: &Page,
) -> Result<Listed<Run>, StoreError> {
    let mut query = runs::table.into_boxed::<Db>();
    if let Some(id) = filter.source_id {
        query = query.filter(runs::source_id.eq(DbId::from(id)));
    }
    if let Some(id) = filter.delivery_id {
        query = query.filter(runs::delivery_row_id.eq(DbId::from(id)));
    }
    if let Some(repo) = &filter.repo {
        query = query.filter(runs::repo.eq(repo));
    }
    if let Some(git_ref) = &filter.git_ref {
        query = query.filter(runs::git_ref.eq(git_ref));
    }
    if let Some(sha) = &filter.sha {
        query = query.filter(runs::sha.eq(sha));
    }
    if let Some(name) = &filter.workflow_name {
        query = query.filter(runs::workflow_name.eq(name));
    }
    if !filter.statuses.is_empty() {
        query = query.filter(runs::status.eq_any(filter.statuses.iter().map(|status| status.as_str())));
    }
    if let Some(Cursor { at, id }) = page.after {
        let (at, id) = (DbTs::from(at), DbId::from(id));
        query = query.filter(runs::created_at.lt(at).or(runs::created_at.eq(at).and(runs::id.lt(id))));
    }
    let limit = page.limit.clamp(1, 500);
    let rows: Vec<RunRow> = query
        .order((runs::created_at.desc(), runs::id.desc()))
        .limit(i64::from(limit))
        .select(RunRow::as_select())
        .load(conn)
        .await?;
    let items = rows.into_iter().map(RunRow::read).collect::<Result<Vec<_>, _>>()?;
    let next = super::rows::next(&items, limit, |run| Cursor { at: run.created_at, id: run.id.uuid() });
    Ok(Listed { items, next })
}

pub(crate) async fn job_get(conn: &mut Conn, _: &Ctx, id: &JobId) -> Result<Option<Job>, StoreError> {
    let row: Option<JobRow> =
        jobs::table.find(DbId::from(*id)).select(JobRow::as_select()).first(conn).await.optional()?;
    row.map(JobRow::read).transpose()
}

pub(crate) async fn jobs_of_run(conn: &mut Conn, _: &Ctx, id: &RunId) -> Result<Vec<Job>, StoreError> {
    let rows: Vec<JobRow> = jobs::table
        .filter(jobs::run_id.eq(DbId::from(*id)))
        .order(jobs::position)
        .select(JobRow::as_select())
        .load(conn)
        .await?;
    rows.into_iter().map(JobRow::read).collect()
}

pub(crate) async fn needs_of_run(conn: &mut Conn, _: &Ctx, id: &RunId) -> Result<Vec<NeedEdge>, StoreError> {
    let rows: Vec<NeedRow> = job_needs::table
        .filter(job_needs::run_id.eq(DbId::from(*id)))
        .order((job_needs::job_name, job_needs::upstream_name))
        .select(NeedRow::as_select())
        .load(conn)
        .await?;
    Ok(rows.into_iter().map(NeedRow::read).collect())
}

/// The run is not terminal. Literals, so that both planners use the partial index.
fn is_open() -> Condition {
    Condition("runs.status IN ('pending', 'running', 'held', 'cancelling')")
}

pub(crate) async fn runs_open(conn: &mut Conn, _: &Ctx, limit: &u32) -> Result<Vec<RunId>, StoreError> {
    let ids: Vec<DbId> = runs::table
        .filter(is_open())
        .order((runs::created_at, runs::id))
        .limit(i64::from(*limit))
        .select(runs::id)
        .load(conn)
        .await?;
    Ok(ids.into_iter().map(Into::into).collect())
}

pub(crate) async fn job_standings(
    conn: &mut Conn,
    _: &Ctx,
    ids: &[JobId],
) -> Result<Vec<(JobId, u32, JobStatus)>, StoreError> {
    let ids: Vec<DbId> = ids.iter().map(|id| DbId::from(*id)).collect();
    let rows: Vec<(DbId, i64, String)> = jobs::table
        .filter(jobs::id.eq_any(ids))
        .select((jobs::id, jobs::dispatch_epoch, jobs::status))
        .load(conn)
        .await?;
    rows.into_iter().map(|(id, epoch, status)| Ok((id.into(), small(epoch), word("job status", &status)?))).collect()
}

pub(crate) async fn runs_idle(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<Vec<RunId>, StoreError> {
    let rows = dispatch_queue::table.filter(dispatch_queue::run_id.eq(runs::id)).filter(super::queue::is_open());
    let waiting = jobs::table.filter(jobs::run_id.eq(runs::id)).filter(jobs::status.eq(JobStatus::Waiting.as_str()));
    let ids: Vec<DbId> = runs::table
        .filter(is_open())
        .filter(runs::created_at.lt(DbTs::from(*before)))
        .filter(diesel::dsl::not(diesel::dsl::exists(rows)))
        .filter(diesel::dsl::not(diesel::dsl::exists(waiting)))
        .order((runs::created_at, runs::id))
        .limit(i64::from(*limit))
        .select(runs::id)
        .load(conn)
        .await?;
    Ok(ids.into_iter().map(Into::into).collect())
}

pub(crate) async fn runs_past_deadline(conn: &mut Conn, ctx: &Ctx, limit: &u32) -> Result<Vec<RunId>, StoreError> {
    let ids: Vec<DbId> = runs::table
        .filter(is_open())
        .filter(runs::deadline.lt(DbTs::from(ctx.now)))
        .filter(runs::cancel_requested_at.is_null())
        .order(runs::created_at)
        .limit(i64::from(*limit))
        .select(runs::id)
        .load(conn)
        .await?;
    Ok(ids.into_iter().map(Into::into).collect())
}

/// How much longer a cancel may last when the hooks of the workflow are still to run.
const RUN_HOOKS_PATIENCE: Duration = Duration::from_secs(30 * 60);

pub(crate) async fn runs_cancelling_since(
    conn: &mut Conn,
    ctx: &Ctx,
    before: &Ts,
    limit: &u32,
) -> Result<Vec<RunId>, StoreError> {
    // Hooks may take longer than a cancel otherwise does: their agent has said until when.
    let open = || jobs::table.filter(jobs::run_id.eq(runs::id)).filter(jobs::finished_at.is_null());
    let unwinding = open().filter(jobs::cancel_deadline.gt(DbTs::from(ctx.now)));
    // Those of the workflow wait for an agent first.
    let hooks = open().filter(jobs::base_name.eq(RUN_HOOKS_JOB));
    let long_ago = DbTs::from(before.minus(RUN_HOOKS_PATIENCE));
    let ids: Vec<DbId> = runs::table
        .filter(is_open())
        .filter(runs::cancel_requested_at.lt(DbTs::from(*before)))
        .filter(not(exists(unwinding)))
        .filter(runs::cancel_requested_at.lt(long_ago).or(not(exists(hooks)).nullable()))
        .order(runs::created_at)
        .limit(i64::from(*limit))
        .select(runs::id)
        .load(conn)
        .await?;
    Ok(ids.into_iter().map(Into::into).collect())
}

type HeldColumns = (DbId, DbId, i64, Option<String>, Option<String>, Option<DbTs>);

fn held(columns: HeldColumns) -> Result<HeldJob, StoreError> {
    let (run_id, job_id, epoch, agent_id, owner, started_at) = columns;
    Ok(HeldJob {
        job: JobRef { run_id: run_id.into(), job_id: job_id.into(), epoch: small(epoch) },
        agent_id: agent(agent_id.unwrap_or_default())?,
        owner: agent_opt(owner)?,
        started: started_at.is_some(),
    })
}

pub(crate) async fn jobs_stale(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<Vec<HeldJob>, StoreError> {
    let before = DbTs::from(*before);
    let running = [JobStatus::Running, JobStatus::Cancelling].map(JobStatus::as_str);
    let rows: Vec<HeldColumns> = dispatch_queue::table
        .inner_join(jobs::table)
        .filter(is_held())
        .filter(jobs::status.eq_any(running))
        .filter(jobs::started_at.lt(before).or(jobs::started_at.is_null().and(jobs::created_at.lt(before))))
        .filter(jobs::last_heartbeat_at.lt(before).or(jobs::last_heartbeat_at.is_null()))
        .limit(i64::from(*limit))
        .select((
            dispatch_queue::run_id,
            dispatch_queue::id,
            dispatch_queue::dispatch_epoch,
            dispatch_queue::agent_id,
            dispatch_queue::owner_instance_id,
            dispatch_queue::started_at,
        ))
        .load(conn)
        .await?;
    rows.into_iter().map(held).collect()
}

pub(crate) async fn jobs_past_timeout(
    conn: &mut Conn,
    ctx: &Ctx,
    slack: &Duration,
    limit: &u32,
) -> Result<Vec<HeldJob>, StoreError> {
    // The two databases add milliseconds to an instant differently: it is done here, on the few jobs that run.
    let rows: Vec<(HeldColumns, Option<i64>)> = dispatch_queue::table
        .inner_join(jobs::table)
        .filter(is_held())
        .filter(jobs::timeout_ms.is_not_null())
        .filter(dispatch_queue::started_at.is_not_null())
        .select((
            (
                dispatch_queue::run_id,
                dispatch_queue::id,
                dispatch_queue::dispatch_epoch,
                dispatch_queue::agent_id,
                dispatch_queue::owner_instance_id,
                dispatch_queue::started_at,
            ),
            jobs::timeout_ms,
        ))
        .load(conn)
        .await?;
    let over = |columns: &HeldColumns, timeout_ms: Option<i64>| {
        let limit = Duration::from_millis(timeout_ms.and_then(|ms| u64::try_from(ms).ok()).unwrap_or(0)) + *slack;
        columns.5.is_some_and(|at| Ts::from(at).plus(limit) < ctx.now)
    };
    rows.into_iter()
        .filter(|(columns, timeout_ms)| over(columns, *timeout_ms))
        .take(usize::try_from(*limit).unwrap_or(usize::MAX))
        .map(|(columns, _)| held(columns))
        .collect()
}

pub(crate) async fn run_rerun_plan(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &RunId,
    failed_only: &bool,
) -> Result<Rerun, StoreError> {
    let Some(run) = run_get(conn, ctx, id).await? else { return Ok(Rerun::NotFound) };
    if !run.status.is_terminal() {
        return Ok(Rerun::StillOpen(run.status));
    }
    if *failed_only && run.status == RunStatus::Success {
        return Ok(Rerun::NothingFailed);
    }
    let jobs = jobs_of_run(conn, ctx, id).await?;
    let needs = needs_of_run(conn, ctx, id).await?;
    let again = repeated(&jobs, &needs);
    let new_id = RunId::mint(ctx.ids());
    let new_jobs = jobs
        .iter()
        .map(|job| {
            let after =
                needs.iter().any(|n| n.job_name == job.name && upstream(n).is_some_and(|name| again.contains(name)));
            // What a generator made is part of the run: it is not asked again, and the same jobs run.
            let made = job.kind == Some(JobKind::Generate) && job.status == JobStatus::Success;
            let keep = made || (*failed_only && job.status == JobStatus::Success && !after);
            let start = match refused_by_plan(job) {
                Some(start) => start,
                None if keep => JobStart::Succeeded { outputs: job.outputs.clone() },
                None => JobStart::Pending,
            };
            NewJob {
                id: JobId::mint(ctx.ids()),
                name: job.name.clone(),
                base_name: job.base_name.clone(),
                job_index: job.job_index,
                variant_label: job.variant_label.clone(),
                matrix: job.matrix.clone(),
                fanout: job.fanout.clone(),
                display_name: job.display_name.clone(),
                max_parallel: job.max_parallel,
                fail_fast: job.fail_fast,
                timeout: job.timeout,
                kind: job.kind,
                start,
            }
        })
        .collect();
    let needs = needs.into_iter().map(new_need).collect();
    Ok(Rerun::Planned(Box::new(repetition(run, new_id, new_jobs, needs))))
}

fn new_need(edge: NeedEdge) -> NewNeed {
    let NeedEdge { job_name, need, generator, resolved } = edge;
    NewNeed { job_name, upstream: need.job, run_on: need.run_on, group: need.group, generator, resolved }
}

/// The job that an edge is about; that of a group that is not known is its generator.
fn upstream(edge: &NeedEdge) -> Option<&str> {
    match (&edge.generator, edge.resolved) {
        (Some(_), true) => None,
        (Some(generator), false) => Some(generator),
        (None, _) => Some(&edge.need.job),
    }
}

/// What the plan of a run refused is refused again: a repetition has the same workflow.
fn refused_by_plan(job: &Job) -> Option<JobStart> {
    let reason = job.failure_reason.filter(|reason| *reason == FailureReason::LockDrift)?;
    Some(JobStart::Failed { reason, message: job.failure_message.clone().unwrap_or_default() })
}

fn repetition(run: Run, id: RunId, jobs: Vec<NewJob>, needs: Vec<NewNeed>) -> NewRun {
    NewRun {
        id,
        org: run.org,
        source_id: run.source_id,
        delivery_id: run.delivery_id,
        dedup_key: format!("rerun:{}:{}", run.id.uuid(), id.uuid()),
        repo: run.repo,
        git_ref: run.git_ref,
        sha: run.sha,
        workflow_name: run.workflow_name,
        run_name: run.run_name,
        lock_digest: run.lock_digest,
        lock_json: Vec::new(),
        event: run.event,
        trigger_kind: run.trigger_kind,
        inputs: run.inputs,
        request_id: run.request_id,
        chain_depth: run.chain_depth,
        timeout: run.timeout,
        concurrency: run.concurrency,
        attempt: run.attempt + 1,
        parent_run_id: Some(run.id),
        jobs,
        needs,
    }
}

/// Base names of which something is repeated: a variant that did not end well, or all that need one of those.
fn repeated<'a>(jobs: &'a [Job], needs: &'a [NeedEdge]) -> BTreeSet<&'a str> {
    let well = |job: &&Job| !matches!(job.status, JobStatus::Success | JobStatus::Skipped);
    let mut names: BTreeSet<&str> = jobs.iter().filter(well).map(|job| job.base_name.as_str()).collect();
    loop {
        let more: Vec<&str> = jobs
            .iter()
            .filter(|job| !names.contains(job.base_name.as_str()))
            .filter(|job| {
                needs.iter().any(|n| n.job_name == job.name && upstream(n).is_some_and(|name| names.contains(name)))
            })
            .map(|job| job.base_name.as_str())
            .collect();
        if more.is_empty() {
            return names;
        }
        names.extend(more);
    }
}
