//! Ends of runs and jobs, and changes of registrations, as events of the bus: written with what they tell of, and only if
//! a registered workflow listens.

use std::collections::BTreeSet;
use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::event_name;
use kici_engine::ids::JobId;
use kici_engine::lock::{RUN_HOOKS_JOB, Trigger, Workflow};
use kici_engine::state::RunStatus;
use serde_json::{Value as Json, json};
use uuid::Uuid;

use super::backend::Conn;
use super::batches;
use super::bus::{Emitter, put};
use super::event_lists::{chain_length, chain_root};
use super::runs::lock_body;
use super::schema::{registrations, registry_version, sources};
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{EventOrigin, Job, JobRef, NewEvent, RegistrationSet, Run};
use crate::types::{DbId, Doc};

const LIFECYCLE: &str = "lifecycle";

/// Events that a chain may grow by behind its first link. A chain that branches out gets there long before its depth ends it.
pub(crate) const MAX_CHAIN_EVENTS: u32 = 1000;

/// What some registered workflow listens to: trigger types, and for `lifecycle` also each event as `lifecycle:NAME`. One small
/// read unless a registration has changed since.
pub(crate) async fn listened(conn: &mut Conn, ctx: &Ctx) -> Result<Arc<BTreeSet<String>>, StoreError> {
    let version: i64 = registry_version::table.find(1).select(registry_version::version).first(conn).await?;
    listened_at(conn, ctx, version).await
}

/// As [`listened`], at the version of the registry that this transaction has read.
async fn listened_at(conn: &mut Conn, ctx: &Ctx, version: i64) -> Result<Arc<BTreeSet<String>>, StoreError> {
    if let Some(known) = ctx.listened_at(version) {
        return Ok(known);
    }
    let all: Vec<(Doc<Vec<String>>, String)> = registrations::table
        .filter(registrations::enabled.eq(true))
        .select((registrations::trigger_types, registrations::lock_digest))
        .load(conn)
        .await?;
    let mut types = BTreeSet::new();
    for (own, digest) in all {
        if own.0.iter().any(|kind| kind == LIFECYCLE) {
            let body = lock_body(conn, ctx, &digest).await?;
            types.extend(body.iter().flat_map(|body| lifecycle_events(body)));
        }
        types.extend(own.0);
    }
    let types = Arc::new(types);
    ctx.keep_listened(version, &types);
    Ok(types)
}

fn lifecycle_events(lock_json: &[u8]) -> Vec<String> {
    let Ok(workflow) = serde_json::from_slice::<Workflow>(lock_json) else { return Vec::new() };
    let events = workflow.triggers.iter().filter_map(|trigger| match trigger {
        Trigger::Lifecycle { events, .. } => Some(events),
        _ => None,
    });
    events.flatten().map(|name| format!("{LIFECYCLE}:{name}")).collect()
}

/// Tells of the jobs that ended, and of the run if it did.
pub(crate) async fn announce(conn: &mut Conn, ctx: &Ctx, state: &RunState, was: RunStatus) -> Result<(), StoreError> {
    let ended = state.ended().collect();
    announce_these(conn, ctx, state, ended, was).await
}

/// Tells of the jobs of a new run that have ended as it was made, but for those that it took over from another one.
pub(crate) async fn announce_new(
    conn: &mut Conn,
    ctx: &Ctx,
    state: &RunState,
    taken_over: &BTreeSet<JobId>,
) -> Result<(), StoreError> {
    let ended = state.jobs.iter().filter(|job| job.status.is_terminal() && !taken_over.contains(&job.id)).collect();
    announce_these(conn, ctx, state, ended, RunStatus::Pending).await
}

async fn announce_these(
    conn: &mut Conn,
    ctx: &Ctx,
    state: &RunState,
    mut ended: Vec<&Job>,
    was: RunStatus,
) -> Result<(), StoreError> {
    let run = &state.run;
    let run_ended = run.status.is_terminal() && !was.is_terminal();
    ended.retain(|job| job.base_name != RUN_HOOKS_JOB);
    if ended.is_empty() && !run_ended {
        return Ok(());
    }
    let types = match state.registry_version {
        Some(version) => listened_at(conn, ctx, version).await?,
        None => listened(conn, ctx).await?,
    };
    let lifecycle = |name: &str| types.contains(&format!("{LIFECYCLE}:{name}"));
    let all_jobs = types.contains("job_complete") || lifecycle("job_complete");
    let failed_jobs = lifecycle("job_failed");
    ended.retain(|job| all_jobs || (failed_jobs && event_name::is_failure(job.status.as_str())));
    let batched = run_ended && run.status == RunStatus::Failed && types.contains(batches::KIND);
    let run_too = run_ended && (types.contains("workflow_complete") || lifecycle("workflow_complete"));
    if ended.is_empty() && !run_too && !batched {
        return Ok(());
    }
    let routing_key: Option<String> =
        sources::table.find(DbId::from(run.source_id)).select(sources::routing_key).first(conn).await.optional()?;
    if batched {
        batches::count(conn, ctx, run, routing_key.as_deref()).await?;
    }
    if ended.is_empty() && !run_too {
        return Ok(());
    }
    let refused = |reason: &'static str| {
        tracing::warn!(run = %run.id, depth = run.chain_depth, reason, "no event tells of the end: the chain of events is too long");
        metrics::counter!("kici_orch_events_refused_total", "reason" => reason).increment(1);
    };
    if run.chain_depth >= ctx.max_chain_depth() {
        refused("depth");
        return Ok(());
    }
    let root = chain_root(conn, run.id, &run.dedup_key, run.chain_depth).await?;
    if run.chain_depth > 0 && chain_length(conn, root, MAX_CHAIN_EVENTS).await? >= MAX_CHAIN_EVENTS {
        refused("chain");
        return Ok(());
    }
    for job in &ended {
        let key = format!("end:{}:{}", job.id.uuid(), job.attempt);
        let new = told(run, event_name::JOB_COMPLETE, job_payload(run, job), key);
        put(conn, ctx, &new, emitter(run, root, routing_key.clone(), Some(job))).await?;
    }
    if run_too {
        let key = format!("end:{}", run.id.uuid());
        let new = told(run, event_name::WORKFLOW_COMPLETE, run_payload(run), key);
        put(conn, ctx, &new, emitter(run, root, routing_key, None)).await?;
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

pub(crate) fn emitter(run: &Run, root: Uuid, routing_key: Option<String>, job: Option<&Job>) -> Emitter {
    Emitter {
        org: run.org.clone(),
        routing_key,
        repo: Some(run.repo.clone()),
        run_id: Some(run.id),
        job: job.map(|job| JobRef { run_id: run.id, job_id: job.id, epoch: job.dispatch_epoch }),
        by: "system".to_owned(),
        depth: run.chain_depth,
        root: Some(root),
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
    if !listened(conn, ctx).await?.contains("lifecycle:registration_updated") {
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
    let emitter = Emitter::outside(&set.org, Some(&set.routing_key), Some(&set.repo), "system");
    put(conn, ctx, &new, emitter).await.map(drop)
}
