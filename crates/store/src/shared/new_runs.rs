//! Runs, jobs and edges as they are made: in memory, and as rows.

use std::collections::{BTreeMap, BTreeSet};

use kici_engine::ids::RunId;
use kici_engine::lock::Need;
use kici_engine::state::{JobStatus, RunStatus};

use super::rows::{JobRow, Manner, RunRow, clean, clean_opt, db_ts, millis_of};
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{Job, JobStart, NeedEdge, NewJob, NewNeed, NewRun, QueueEntry, Run};
use crate::types::Doc;

pub(super) fn new_run(ctx: &Ctx, new: &NewRun) -> Run {
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

pub(super) fn run_row(run: &Run) -> RunRow {
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
pub(super) fn new_state(ctx: &Ctx, new: &NewRun, run: Run) -> Result<RunState, StoreError> {
    let needing: BTreeSet<&str> = new.needs.iter().map(|need| need.job_name.as_str()).collect();
    let jobs = {
        let turns = new.concurrency.is_some();
        let job = |job: &NewJob| new_job(ctx, new.id, turns, job, needing.contains(job.name.as_str()));
        new.jobs.iter().map(job).collect()
    };
    let needs = new.needs.iter().map(edge).collect();
    let mut state = RunState::new(run, jobs, needs, BTreeMap::new());
    state.max_chain_depth = ctx.max_chain_depth();
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

/// An edge as a run in memory has it.
pub(crate) fn edge(need: &NewNeed) -> NeedEdge {
    NeedEdge {
        job_name: need.job_name.clone(),
        need: Need { job: need.upstream.clone(), run_on: need.run_on.clone(), group: need.group.clone() },
        generator: need.generator.clone(),
        resolved: need.resolved,
    }
}

/// Whether a job that could go to an agent must ask for a slot first. It then starts as one that is to be judged again.
pub(super) fn takes_turns(run: &NewRun, entry: &QueueEntry) -> bool {
    run.concurrency.is_some() || entry.slot.is_some()
}

pub(crate) fn new_job(ctx: &Ctx, run: RunId, takes_turns: bool, new: &NewJob, needs: bool) -> Job {
    let mut job = Job {
        id: new.id,
        run_id: run,
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
        kind: new.kind,
    };
    match &new.start {
        JobStart::Pending => {}
        JobStart::Queued(entry) if takes_turns || entry.slot.is_some() => {}
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

pub(crate) fn job_row(position: i64, job: &Job) -> JobRow {
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
        routing_reason: job.routing_reason.clone(),
        log_bytes: 0,
        created_at: job.created_at.into(),
        started_at: db_ts(job.started_at),
        finished_at: db_ts(job.finished_at),
        last_heartbeat_at: None,
        timeout_ms: millis_of(job.timeout),
        cancel_deadline: None,
        fanout: Manner::of(job).map(Doc),
    }
}
