//! Results of jobs.

use std::sync::Arc;

use kici_engine::state::{FailureReason, JobEvent, JobStatus, QueueStatus};

use super::backend::Conn;
use super::generated;
use super::settle;
use super::steps::write_steps;
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{Activate, JobFinished, JobResult, StepWrite, StepWritten};

pub(crate) async fn job_report(
    conn: &mut Conn,
    ctx: &Ctx,
    steps: &[StepWrite],
    result: &JobResult,
    activate: &Arc<dyn Activate>,
) -> Result<(Vec<StepWritten>, JobFinished), StoreError> {
    let state = settle::load_end(conn, ctx, result.job, result.status).await?;
    let job = state.as_ref().and_then(|state| state.position(result.job.job_id).map(|at| &state.jobs[at]));
    let known = job.map(|job| (job.id, Some((job.run_id, job.dispatch_epoch))));
    let written = write_steps(conn, ctx, steps, known.into_iter().collect()).await?;
    Ok((written, finish(conn, ctx, state, result, activate).await?))
}

pub(crate) async fn job_finish(
    conn: &mut Conn,
    ctx: &Ctx,
    result: &JobResult,
    activate: &Arc<dyn Activate>,
) -> Result<JobFinished, StoreError> {
    let state = settle::load_end(conn, ctx, result.job, result.status).await?;
    finish(conn, ctx, state, result, activate).await
}

async fn finish(
    conn: &mut Conn,
    ctx: &Ctx,
    state: Option<RunState>,
    result: &JobResult,
    activate: &Arc<dyn Activate>,
) -> Result<JobFinished, StoreError> {
    let Some(mut state) = state else { return Ok(JobFinished::NotOwned) };
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
    let refused = match event {
        JobEvent::Succeed => generated::expand(conn, ctx, &mut state, at, &**activate).await?,
        _ => None,
    };
    match refused {
        Some(why) => state.apply(at, JobEvent::Fail, Some(FailureReason::DynamicEval), Some(why), now)?,
        None => state.apply(at, event, if keep { None } else { reason }, message, now)?,
    }
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
