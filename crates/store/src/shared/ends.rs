//! Ends of runs and jobs, and changes of registrations, as events of the bus: written with what they tell of, and only if
//! a registered workflow listens.

use std::collections::BTreeSet;
use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::event_name;
use kici_engine::lock::RUN_HOOKS_JOB;
use kici_engine::state::RunStatus;
use serde_json::{Value as Json, json};

use super::backend::Conn;
use super::bus::{Emitter, put};
use super::schema::{registrations, registry_version, sources};
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{EventOrigin, Job, JobRef, NewEvent, RegistrationSet, Run};
use crate::types::{DbId, Doc};

/// The trigger types that some registered workflow has. One small read unless a registration has changed since.
pub(crate) async fn listened(conn: &mut Conn, ctx: &Ctx) -> Result<Arc<BTreeSet<String>>, StoreError> {
    let version: i64 = registry_version::table.find(1).select(registry_version::version).first(conn).await?;
    if let Some(known) = ctx.listened_at(version) {
        return Ok(known);
    }
    let lists: Vec<Doc<Vec<String>>> = registrations::table
        .filter(registrations::enabled.eq(true))
        .select(registrations::trigger_types)
        .load(conn)
        .await?;
    let types: Arc<BTreeSet<String>> = Arc::new(lists.into_iter().flat_map(|list| list.0).collect());
    ctx.keep_listened(version, &types);
    Ok(types)
}

/// Tells of the jobs that ended, and of the run if it did.
pub(crate) async fn announce(conn: &mut Conn, ctx: &Ctx, state: &RunState, was: RunStatus) -> Result<(), StoreError> {
    let run = &state.run;
    let run_ended = run.status.is_terminal() && !was.is_terminal();
    let ended: Vec<&Job> = state.ended().filter(|job| job.base_name != RUN_HOOKS_JOB).collect();
    if ended.is_empty() && !run_ended {
        return Ok(());
    }
    let types = listened(conn, ctx).await?;
    let wants = |kind: &str| types.contains(kind) || types.contains("lifecycle");
    let (jobs, run_too) = (wants("job_complete"), run_ended && wants("workflow_complete"));
    if (!jobs || ended.is_empty()) && !run_too {
        return Ok(());
    }
    if run.chain_depth >= ctx.max_chain_depth() {
        tracing::warn!(run = %run.id, depth = run.chain_depth, "no event tells of the end: the chain of events is too long");
        metrics::counter!("kici_orch_events_refused_total", "reason" => "depth").increment(1);
        return Ok(());
    }
    let routing_key: Option<String> =
        sources::table.find(DbId::from(run.source_id)).select(sources::routing_key).first(conn).await.optional()?;
    for job in ended.iter().filter(|_| jobs) {
        let key = format!("end:{}:{}", job.id.uuid(), job.attempt);
        let new = told(run, event_name::JOB_COMPLETE, job_payload(run, job), key);
        put(conn, ctx, &new, emitter(run, routing_key.clone(), Some(job))).await?;
    }
    if run_too {
        let key = format!("end:{}", run.id.uuid());
        let new = told(run, event_name::WORKFLOW_COMPLETE, run_payload(run), key);
        put(conn, ctx, &new, emitter(run, routing_key, None)).await?;
    }
    Ok(())
}

fn told(run: &Run, name: &str, payload: Json, key: String) -> NewEvent {
    NewEvent {
        // What the row says of it comes from the emitter.
        origin: EventOrigin::Outside { org: String::new(), routing_key: None, repo: None, by: String::new() },
        name: name.to_owned(),
        payload,
        target_repos: Vec::new(),
        registration_id: None,
        emit_key: Some(key),
        request_id: run.request_id.clone(),
    }
}

fn emitter(run: &Run, routing_key: Option<String>, job: Option<&Job>) -> Emitter {
    Emitter {
        org: run.org.clone(),
        routing_key,
        repo: Some(run.repo.clone()),
        run_id: Some(run.id),
        job: job.map(|job| JobRef { run_id: run.id, job_id: job.id, epoch: job.dispatch_epoch }),
        by: "system".to_owned(),
        depth: run.chain_depth,
    }
}

fn run_payload(run: &Run) -> Json {
    json!({
        "workflow": run.workflow_name,
        "status": run.status,
        "run_id": run.id,
        "run_name": run.run_name,
        "repo": run.repo,
        "ref": run.git_ref,
        "sha": run.sha,
        "trigger": run.trigger_kind,
        "attempt": run.attempt,
        "failure_reason": run.failure_reason,
        "failure_message": run.failure_message,
        "started_at": run.started_at,
        "finished_at": run.finished_at,
    })
}

fn job_payload(run: &Run, job: &Job) -> Json {
    json!({
        "workflow": run.workflow_name,
        "job": job.base_name,
        "name": job.name,
        "status": job.status,
        "run_id": run.id,
        "job_id": job.id,
        "repo": run.repo,
        "ref": run.git_ref,
        "sha": run.sha,
        "attempt": job.attempt,
        "failure_reason": job.failure_reason,
        "failure_class": job.failure_class,
        "failure_message": job.failure_message,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
    })
}

/// Tells that the registered workflows of a repository changed.
pub(crate) async fn announce_registrations(
    conn: &mut Conn,
    ctx: &Ctx,
    set: &RegistrationSet,
    payload: Json,
) -> Result<(), StoreError> {
    if !listened(conn, ctx).await?.contains("lifecycle") {
        return Ok(());
    }
    let new = NewEvent {
        origin: EventOrigin::Outside { org: String::new(), routing_key: None, repo: None, by: String::new() },
        name: event_name::REGISTRATION_UPDATED.to_owned(),
        payload,
        target_repos: Vec::new(),
        registration_id: None,
        emit_key: None,
        request_id: "registrations".to_owned(),
    };
    let emitter = Emitter {
        org: set.org.clone(),
        routing_key: Some(set.routing_key.clone()),
        repo: Some(set.repo.clone()),
        run_id: None,
        job: None,
        by: "system".to_owned(),
        depth: 0,
    };
    put(conn, ctx, &new, emitter).await.map(drop)
}
