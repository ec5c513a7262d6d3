//! Events of the internal bus: stored once, delivered until everybody who listens has them.

use std::sync::Arc;
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::{EventId, RegistrationId, RunId};
use kici_engine::state::JobStatus;
use kici_engine::time::Ts;
use serde_json::Value as Json;
use uuid::Uuid;

use super::backend::{Conn, Db};
use super::event_lists::{ListedRow, chain_root};
use super::gates;
use super::kept::{Condition, kept};
use super::rows::{clean, clean_opt, small};
use super::runs::create;
use super::schema::{events, jobs, runs, sources};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{
    Activate, BusEvent, CreatedRun, Emitted, EventLimits, EventOrigin, EventOutcome, EventStatus, JobRef, NewEvent,
    NewRun, Processed, ProcessedEvent,
};
use crate::notify::Topic;
use crate::types::{DbId, DbTs, Doc};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = events, check_for_backend(Db), treat_none_as_default_value = false)]
pub(super) struct EventRow {
    #[diesel(embed)]
    listed: ListedRow,
    payload: Doc<Json>,
    emit_key: Option<String>,
    claimed_at: Option<DbTs>,
    trace: Option<Doc<Json>>,
    chain_root: Option<DbId>,
    claims: i64,
}

impl EventRow {
    pub(super) fn read(self) -> Result<BusEvent, StoreError> {
        let trace = self.trace.map(|trace| trace.0);
        Ok(BusEvent { payload: self.payload.0, trace, claims: small(self.claims), ..self.listed.read()? })
    }
}

/// A literal, so that both planners use the partial index.
pub(super) fn is_pending() -> Condition {
    Condition("events.status = 'pending'")
}

/// Who emits, as the row of an event says it.
pub(crate) struct Emitter {
    pub(crate) org: String,
    pub(crate) routing_key: Option<String>,
    pub(crate) repo: Option<String>,
    pub(crate) run_id: Option<RunId>,
    pub(crate) job: Option<JobRef>,
    pub(crate) by: String,
    /// Depth of the run that emits.
    pub(crate) depth: u32,
    /// What the chain that the event continues began with; none begins one.
    pub(crate) root: Option<Uuid>,
}

impl Emitter {
    /// A person or the system: no job, and so the begin of a chain.
    pub(crate) fn outside(org: &str, routing_key: Option<&str>, repo: Option<&str>, by: &str) -> Self {
        Self {
            org: org.to_owned(),
            routing_key: routing_key.map(str::to_owned),
            repo: repo.map(str::to_owned),
            run_id: None,
            job: None,
            by: by.to_owned(),
            depth: 0,
            root: None,
        }
    }
}

pub(crate) async fn event_emit(
    conn: &mut Conn,
    ctx: &Ctx,
    new: &NewEvent,
    limits: &EventLimits,
) -> Result<Emitted, StoreError> {
    // First: what is stored was accepted, also if the job has ended meanwhile.
    if let Some(key) = &new.emit_key
        && let Some(id) = by_key(conn, key).await?
    {
        return Ok(Emitted::Known(id));
    }
    let emitter = match &new.origin {
        EventOrigin::Outside { org, routing_key, repo, by } => {
            Emitter::outside(org, routing_key.as_deref(), repo.as_deref(), by)
        }
        EventOrigin::Job { job, agent_id } => match of_job(conn, *job, agent_id.as_str()).await? {
            Some(emitter) => emitter,
            None => return Ok(Emitted::NotRunning),
        },
    };
    let depth = emitter.depth.saturating_add(1);
    if depth > limits.max_depth {
        return Ok(Emitted::TooDeep(depth));
    }
    if let Some(most) = limits.per_minute
        && let Some(wait) = too_many(conn, ctx, &emitter, &new.name, most).await?
    {
        return Ok(Emitted::TooMany(wait));
    }
    match put(conn, ctx, new, emitter).await? {
        Some(id) => Ok(Emitted::Stored(id)),
        None => match &new.emit_key {
            Some(key) => Ok(by_key(conn, key).await?.map_or(Emitted::NotRunning, Emitted::Known)),
            None => Err(StoreError::Conflict("an id was drawn twice".to_owned())),
        },
    }
}

async fn by_key(conn: &mut Conn, key: &str) -> Result<Option<EventId>, StoreError> {
    let id: Option<DbId> =
        events::table.filter(events::emit_key.eq(key)).select(events::id).first(conn).await.optional()?;
    Ok(id.map(Into::into))
}

/// The job that emits, while it runs at this epoch. Its row is locked: it cannot end or be given away meanwhile.
async fn of_job(conn: &mut Conn, job: JobRef, agent: &str) -> Result<Option<Emitter>, StoreError> {
    let key = DbId::from(job.run_id);
    let run: Option<(String, DbId, String, i64, String, String)> = lock_row!(runs::table.find(key).select((
        runs::org,
        runs::source_id,
        runs::repo,
        runs::chain_depth,
        runs::workflow_name,
        runs::dedup_key
    )))
    .first(conn)
    .await
    .optional()?;
    let Some((org, source, repo, depth, workflow, dedup_key)) = run else { return Ok(None) };
    let running = [JobStatus::Running, JobStatus::Cancelling].map(JobStatus::as_str);
    let name: Option<String> = jobs::table
        .find(DbId::from(job.job_id))
        .filter(jobs::run_id.eq(key))
        .filter(jobs::dispatch_epoch.eq(i64::from(job.epoch)))
        .filter(jobs::agent_id.eq(agent))
        .filter(jobs::status.eq_any(running))
        .select(jobs::name)
        .first(conn)
        .await
        .optional()?;
    let Some(name) = name else { return Ok(None) };
    let routing_key = sources::table.find(source).select(sources::routing_key).first(conn).await.optional()?;
    let root = chain_root(conn, job.run_id, &dedup_key, small(depth)).await?;
    Ok(Some(Emitter {
        org,
        routing_key,
        repo: Some(repo),
        run_id: Some(job.run_id),
        job: Some(job),
        by: format!("job {name} of {workflow}"),
        depth: small(depth),
        root: Some(root),
    }))
}

/// How long until there is room for another event of this name from this source; none when there is.
async fn too_many(
    conn: &mut Conn,
    ctx: &Ctx,
    emitter: &Emitter,
    name: &str,
    most: u32,
) -> Result<Option<Duration>, StoreError> {
    let since = ctx.now.minus(EventLimits::WINDOW);
    let mut query =
        events::table.filter(events::name.eq(name)).filter(events::created_at.gt(DbTs::from(since))).into_boxed::<Db>();
    query = match &emitter.routing_key {
        Some(key) => query.filter(events::routing_key.eq(key)),
        None => query.filter(events::routing_key.is_null()),
    };
    // The oldest of the last `most`: once it leaves the window there is room.
    let oldest: Option<DbTs> = query
        .order(events::created_at.desc())
        .offset(i64::from(most.max(1)) - 1)
        .limit(1)
        .select(events::created_at)
        .first(conn)
        .await
        .optional()?;
    Ok(oldest.map(|at| Ts::from(at).plus(EventLimits::WINDOW).since(ctx.now)))
}

/// Stores an event; none when its key is taken.
pub(crate) async fn put(
    conn: &mut Conn,
    ctx: &Ctx,
    new: &NewEvent,
    emitter: Emitter,
) -> Result<Option<EventId>, StoreError> {
    let id = EventId::mint(ctx.ids());
    let row = EventRow {
        listed: ListedRow {
            id: id.into(),
            org: emitter.org,
            name: new.name.clone(),
            routing_key: emitter.routing_key,
            source_repo: emitter.repo,
            run_id: emitter.run_id.map(Into::into),
            job_id: emitter.job.map(|job| job.job_id.into()),
            emitted_by: clean(&emitter.by),
            registration_id: new.registration_id.map(Into::into),
            target_repos: Doc(new.target_repos.clone()),
            chain_depth: emitter.depth.saturating_add(1).into(),
            status: EventStatus::Pending.as_str().to_owned(),
            matched_count: 0,
            attempts: 0,
            claimed_by: None,
            next_attempt_at: None,
            last_error: None,
            note: None,
            run_ids: Doc(Vec::new()),
            dlq_reason: None,
            request_id: clean(&new.request_id),
            created_at: ctx.now.into(),
            finished_at: None,
        },
        payload: Doc(new.payload.clone()),
        emit_key: new.emit_key.clone(),
        claimed_at: None,
        trace: None,
        chain_root: Some(emitter.root.unwrap_or(id.uuid()).into()),
        claims: 0,
    };
    let stored = diesel::insert_into(events::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    if stored == 1 {
        ctx.wake(Topic::Events);
    }
    Ok((stored == 1).then_some(id))
}

/// Keeps the claim on an event that this instance delivers, and creates the runs that came of it so far.
pub(crate) async fn event_progress(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &EventId,
    runs: &[NewRun],
    activate: &Arc<dyn Activate>,
) -> Result<Processed, StoreError> {
    let changed = kept(
        diesel::update(events::table.find(DbId::from(*id)))
            .filter(is_pending())
            .filter(events::claimed_by.eq(ctx.node().as_str()))
            .set(events::claimed_at.eq(DbTs::from(ctx.now))),
    )
    .execute(conn)
    .await?;
    if changed == 0 {
        return Ok(Processed { applied: false, runs: Vec::new() });
    }
    Ok(Processed { applied: true, runs: add_runs(conn, ctx, *id, runs, activate).await? })
}

/// The registrations for which an event has started runs, of those that are named by `runs`.
pub(crate) async fn event_served(conn: &mut Conn, _: &Ctx, runs: &[RunId]) -> Result<Vec<RegistrationId>, StoreError> {
    let ids: Vec<DbId> = runs.iter().map(|run| DbId::from(*run)).collect();
    let keys: Vec<String> = runs::table.filter(runs::id.eq_any(&ids)).select(runs::dedup_key).load(conn).await?;
    let of = |key: &String| Uuid::parse_str(key.strip_prefix("ev:")?.split(':').nth(1)?).ok();
    Ok(keys.iter().filter_map(of).map(RegistrationId::from_uuid).collect())
}

async fn add_runs(
    conn: &mut Conn,
    ctx: &Ctx,
    event: EventId,
    runs: &[NewRun],
    activate: &Arc<dyn Activate>,
) -> Result<Vec<CreatedRun>, StoreError> {
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    let key = DbId::from(event);
    let known: Doc<Vec<RunId>> = events::table.find(key).select(events::run_ids).first(conn).await?;
    let mut run_ids = known.0;
    let mut created = Vec::with_capacity(runs.len());
    for run in runs {
        let one = create(conn, ctx, run, &**activate).await?;
        if !run_ids.contains(&one.run_id) {
            run_ids.push(one.run_id);
        }
        created.push(one);
    }
    diesel::update(events::table.find(key)).set(events::run_ids.eq(Doc(run_ids))).execute(conn).await?;
    Ok(created)
}

pub(crate) async fn event_process(
    conn: &mut Conn,
    ctx: &Ctx,
    done: &ProcessedEvent,
    activate: &Arc<dyn Activate>,
) -> Result<Processed, StoreError> {
    let time: Option<DbTs> = None;
    let (status, error, next, reason, failed) = match &done.outcome {
        EventOutcome::Done => (EventStatus::Processed, None, None, None, 0_i64),
        EventOutcome::Retry(error, at) => (EventStatus::Pending, Some(error), Some(DbTs::from(*at)), None, 1),
        EventOutcome::Dead(error, reason) => (EventStatus::Dead, Some(error), None, Some(*reason), 1),
    };
    let finished = (status != EventStatus::Pending).then_some(DbTs::from(ctx.now));
    let changed = kept(
        diesel::update(events::table.find(DbId::from(done.id)))
            .filter(is_pending())
            .filter(events::claimed_by.eq(ctx.node().as_str()))
            .set((
                events::status.eq(status.as_str()),
                events::matched_count.eq(i64::from(done.matched_count)),
                events::attempts.eq(events::attempts + failed),
                events::last_error.eq(clean_opt(error.map(String::as_str))),
                events::next_attempt_at.eq(next),
                events::dlq_reason.eq(reason),
                events::note.eq(clean_opt(done.note.as_deref())),
                events::trace.eq(done.trace.clone().map(Doc)),
                events::claimed_by.eq(None::<String>),
                events::claimed_at.eq(time),
                events::finished_at.eq(finished),
                events::claims.eq(0_i64),
            )),
    )
    .execute(conn)
    .await?;
    if changed == 0 {
        return Ok(Processed { applied: false, runs: Vec::new() });
    }
    let runs = add_runs(conn, ctx, done.id, &done.runs, activate).await?;
    if finished.is_some() {
        let dead = error.filter(|_| status == EventStatus::Dead).map(String::as_str);
        gates::delivered(conn, ctx, done.id, dead.or(done.refused.as_deref())).await?;
    }
    Ok(Processed { applied: true, runs })
}

pub(crate) async fn event_reopen(conn: &mut Conn, ctx: &Ctx, id: &EventId) -> Result<bool, StoreError> {
    let time: Option<DbTs> = None;
    let changed = diesel::update(events::table.find(DbId::from(*id)))
        .filter(events::status.eq(EventStatus::Dead.as_str()))
        .set((
            events::status.eq(EventStatus::Pending.as_str()),
            events::attempts.eq(0_i64),
            events::claims.eq(0_i64),
            events::dlq_reason.eq(None::<String>),
            events::next_attempt_at.eq(time),
            events::finished_at.eq(time),
        ))
        .execute(conn)
        .await?;
    ctx.wake(Topic::Events);
    Ok(changed == 1)
}

pub(crate) async fn event_discard(conn: &mut Conn, ctx: &Ctx, id: &EventId, note: &str) -> Result<bool, StoreError> {
    let changed = diesel::update(events::table.find(DbId::from(*id)))
        .filter(events::status.eq(EventStatus::Dead.as_str()))
        .set((
            events::status.eq(EventStatus::Discarded.as_str()),
            events::note.eq(clean_opt(Some(note))),
            events::finished_at.eq(DbTs::from(ctx.now)),
        ))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

pub(crate) async fn event_replay(
    conn: &mut Conn,
    ctx: &Ctx,
    id: &EventId,
    by: &str,
    request_id: &str,
) -> Result<Option<EventId>, StoreError> {
    let row: Option<EventRow> =
        events::table.find(DbId::from(*id)).select(EventRow::as_select()).first(conn).await.optional()?;
    let Some(row) = row else { return Ok(None) };
    let copy = EventId::mint(ctx.ids());
    let row = EventRow {
        listed: ListedRow {
            id: copy.into(),
            emitted_by: clean(&format!("{by}, again: {}", row.listed.emitted_by)).chars().take(500).collect(),
            status: EventStatus::Pending.as_str().to_owned(),
            matched_count: 0,
            attempts: 0,
            claimed_by: None,
            next_attempt_at: None,
            last_error: None,
            note: None,
            run_ids: Doc(Vec::new()),
            dlq_reason: None,
            request_id: clean(request_id),
            created_at: ctx.now.into(),
            finished_at: None,
            ..row.listed
        },
        emit_key: Some(format!("replay:{}:{}", id.uuid(), copy.uuid())),
        claimed_at: None,
        trace: None,
        claims: 0,
        ..row
    };
    diesel::insert_into(events::table).values(&row).execute(conn).await?;
    ctx.wake(Topic::Events);
    Ok(Some(copy))
}

pub(crate) async fn event_get(conn: &mut Conn, _: &Ctx, id: &EventId) -> Result<Option<BusEvent>, StoreError> {
    let row: Option<EventRow> =
        events::table.find(DbId::from(*id)).select(EventRow::as_select()).first(conn).await.optional()?;
    row.map(EventRow::read).transpose()
}

pub(crate) async fn events_prune(conn: &mut Conn, _: &Ctx, before: &Ts, limit: &u32) -> Result<u64, StoreError> {
    let done = [EventStatus::Processed, EventStatus::Discarded].map(EventStatus::as_str);
    let old: Vec<DbId> = events::table
        .filter(events::created_at.lt(DbTs::from(*before)))
        .filter(events::status.eq_any(done))
        .order((events::created_at, events::id))
        .limit(i64::from(*limit))
        .select(events::id)
        .load(conn)
        .await?;
    let gone = diesel::delete(events::table.filter(events::id.eq_any(&old)).filter(events::status.eq_any(done)));
    Ok(gone.execute(conn).await? as u64)
}
