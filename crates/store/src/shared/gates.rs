//! Jobs with `invoke`: they emit an event in the transaction that finds their needs met, and wait for the runs that it starts.

use std::collections::BTreeMap;
use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{EventId, JobId, RunId};
use kici_engine::state::{JobEvent, JobStatus};

use super::backend::Conn;
use super::bus::put;
use super::ends::{MAX_CHAIN_EVENTS, emitter};
use super::event_lists::{chain_length, chain_root};
use super::rows::{clean, word};
use super::schema::{events, job_gates, jobs, runs, sources};
use super::settle;
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{Activate, Effects, EventOrigin, EventStatus, GateRun, GateVerdict, NewEvent, OpenGate, Run};
use crate::notify::Topic;
use crate::types::{DbId, DbTs, Doc};

#[derive(Insertable)]
#[diesel(table_name = job_gates, check_for_backend(super::backend::Db), treat_none_as_default_value = false)]
struct GateRow {
    job_id: DbId,
    run_id: DbId,
    event_id: Option<DbId>,
    event_name: String,
    optional: bool,
    refused: Option<String>,
    created_at: DbTs,
    settled_at: Option<DbTs>,
}

/// Emits what the jobs of a run want to start, and notes that they wait.
pub(crate) async fn open(conn: &mut Conn, ctx: &Ctx, state: &RunState) -> Result<(), StoreError> {
    if state.invoked.is_empty() {
        return Ok(());
    }
    let run = &state.run;
    let root = chain_root(conn, run.id, &run.dedup_key, run.chain_depth).await?;
    let routing_key: Option<String> =
        sources::table.find(DbId::from(run.source_id)).select(sources::routing_key).first(conn).await.optional()?;
    for invoked in &state.invoked {
        let Some(job) = state.jobs.iter().find(|job| job.id == invoked.job) else { continue };
        let long = run.chain_depth > 0 && chain_length(conn, root, MAX_CHAIN_EVENTS).await? >= MAX_CHAIN_EVENTS;
        let refused = long.then(|| format!("the chain of events has {MAX_CHAIN_EVENTS} of them already"));
        let event_id = match refused {
            Some(_) => None,
            None => {
                let new = event(run, invoked.job, &invoked.event, invoked.payload.clone());
                put(conn, ctx, &new, emitter(run, root, routing_key.clone(), Some(job))).await?
            }
        };
        let row = GateRow {
            job_id: invoked.job.into(),
            run_id: run.id.into(),
            event_id: event_id.map(Into::into),
            event_name: invoked.event.clone(),
            optional: invoked.optional,
            refused,
            created_at: ctx.now.into(),
            settled_at: None,
        };
        diesel::insert_into(job_gates::table).values(row).on_conflict_do_nothing().execute(conn).await?;
    }
    ctx.wake(Topic::Gates);
    Ok(())
}

fn event(run: &Run, job: JobId, name: &str, payload: serde_json::Value) -> NewEvent {
    NewEvent {
        origin: EventOrigin::Outside { org: String::new(), routing_key: None, repo: None, by: String::new() },
        name: name.to_owned(),
        payload,
        // Whom it is for is told by the job that waits for it, see `events::bus`: names of repositories are no patterns.
        target_repos: Vec::new(),
        registration_id: None,
        emit_key: Some(format!("gate:{}", job.uuid())),
        request_id: run.request_id.clone(),
    }
}

/// Whether an event was emitted by a job that waits for what it starts.
pub(crate) async fn gate_of_event(conn: &mut Conn, _: &Ctx, id: &EventId) -> Result<bool, StoreError> {
    let of = job_gates::table.filter(job_gates::event_id.eq(DbId::from(*id)));
    Ok(diesel::select(diesel::dsl::exists(of)).get_result(conn).await?)
}

/// Notes for the job that waits, if one does, that the delivery of its event has ended, and what of it was refused.
pub(crate) async fn delivered(
    conn: &mut Conn,
    ctx: &Ctx,
    event: EventId,
    refused: Option<&str>,
) -> Result<(), StoreError> {
    let open =
        job_gates::table.filter(job_gates::event_id.eq(DbId::from(event))).filter(job_gates::settled_at.is_null());
    let waits = match refused {
        Some(why) => diesel::update(open).set(job_gates::refused.eq(clean(why))).execute(conn).await? > 0,
        None => diesel::select(diesel::dsl::exists(open)).get_result(conn).await?,
    };
    if waits {
        ctx.wake(Topic::Gates);
    }
    Ok(())
}

/// Jobs that wait for what they started, oldest first.
pub(crate) async fn gates_open(conn: &mut Conn, _: &Ctx, limit: &u32) -> Result<Vec<OpenGate>, StoreError> {
    type Columns = (DbId, DbId, Option<DbId>, String, bool, Option<String>, String, Option<DbTs>, Option<i64>);
    let rows: Vec<Columns> = job_gates::table
        .inner_join(jobs::table)
        .filter(job_gates::settled_at.is_null())
        .order((job_gates::created_at, job_gates::job_id))
        .limit(i64::from(*limit))
        .select((
            job_gates::job_id,
            job_gates::run_id,
            job_gates::event_id,
            job_gates::event_name,
            job_gates::optional,
            job_gates::refused,
            jobs::status,
            jobs::started_at,
            jobs::timeout_ms,
        ))
        .load(conn)
        .await?;
    let ids: Vec<DbId> = rows.iter().filter_map(|row| row.2).collect();
    let told: Vec<(DbId, String, Doc<Vec<RunId>>)> = events::table
        .filter(events::id.eq_any(&ids))
        .select((events::id, events::status, events::run_ids))
        .load(conn)
        .await?;
    let mut by_event: BTreeMap<EventId, (EventStatus, Vec<RunId>)> = BTreeMap::new();
    for (id, status, run_ids) in told {
        by_event.insert(id.into(), (word("event status", &status)?, run_ids.0));
    }
    let all: Vec<DbId> = by_event.values().flat_map(|(_, ids)| ids).map(|id| DbId::from(*id)).collect();
    let started: Vec<(DbId, String, String)> = runs::table
        .filter(runs::id.eq_any(&all))
        .select((runs::id, runs::workflow_name, runs::status))
        .load(conn)
        .await?;
    let mut known: BTreeMap<RunId, GateRun> = BTreeMap::new();
    for (id, workflow_name, status) in started {
        known.insert(id.into(), GateRun { id: id.into(), workflow_name, status: word("run status", &status)? });
    }
    rows.into_iter()
        .map(|(job, run, event, event_name, optional, refused, status, started_at, timeout)| {
            let of = event.and_then(|id| by_event.get(&EventId::from(id)));
            // What cannot be told counts as refused: nothing may look as if nobody had listened.
            let lost = match of.map(|(status, _)| *status) {
                Some(EventStatus::Pending | EventStatus::Processed) => None,
                Some(EventStatus::Dead | EventStatus::Discarded) => {
                    Some("its event is dead, see `kici-admin event dlq list`".to_owned())
                }
                None => Some("its event is gone, and nobody can tell what it started".to_owned()),
            };
            let refused = refused.or(lost);
            let delivered = of.is_none_or(|(status, _)| *status != EventStatus::Pending);
            let ids = of.map_or(&[][..], |(_, ids)| ids.as_slice());
            Ok(OpenGate {
                run_id: run.into(),
                job_id: job.into(),
                status: word("job status", &status)?,
                started_at: started_at.map(Into::into),
                timeout: timeout.and_then(|ms| u64::try_from(ms).ok()).map(std::time::Duration::from_millis),
                event_name,
                delivered,
                optional,
                refused,
                runs: ids.iter().filter_map(|id| known.get(id).cloned()).collect(),
            })
        })
        .collect()
}

/// Says on the job what it waits for.
pub(crate) async fn gate_note(
    conn: &mut Conn,
    ctx: &Ctx,
    run: &RunId,
    job: &JobId,
    note: &str,
) -> Result<(), StoreError> {
    let running = jobs::table
        .find(DbId::from(*job))
        .filter(jobs::status.eq(JobStatus::Running.as_str()))
        .filter(jobs::routing_reason.is_null().or(jobs::routing_reason.ne(note)));
    let changed = diesel::update(running).set(jobs::routing_reason.eq(clean(note))).execute(conn).await?;
    if changed > 0 {
        ctx.wake(Topic::Run(*run));
    }
    Ok(())
}

/// Ends a job that waited for what it started, or, where it has ended by itself, its waiting.
pub(crate) async fn gate_settle(
    conn: &mut Conn,
    ctx: &Ctx,
    run: &RunId,
    job: &JobId,
    verdict: &GateVerdict,
    activate: &Arc<dyn Activate>,
) -> Result<Option<Effects>, StoreError> {
    let Some(mut state) = settle::load(conn, ctx, *run).await? else { return Ok(None) };
    let gone = diesel::update(job_gates::table.find(DbId::from(*job)).filter(job_gates::settled_at.is_null()))
        .set(job_gates::settled_at.eq(DbTs::from(ctx.now)))
        .execute(conn)
        .await?;
    let at = state.position(*job).filter(|at| gone > 0 && !state.jobs[*at].status.is_terminal());
    let Some(at) = at else { return Ok(None) };
    match verdict {
        GateVerdict::Success { outputs } => {
            state.apply(at, JobEvent::Succeed, None, None, ctx.now)?;
            state.jobs[at].outputs = outputs.clone();
        }
        GateVerdict::Failed { reason, message } => {
            state.apply(at, JobEvent::Fail, Some(*reason), Some(message.clone()), ctx.now)?;
        }
        GateVerdict::Ended => {
            // It was open a moment ago: the next look tells.
            return Err(StoreError::Conflict("a job that waits was taken for one that has ended".to_owned()));
        }
    }
    settle::settle(conn, ctx, state, Some(&**activate)).await.map(Some)
}
