//! Jobs that generators made: kept as they were reported, and joined to their run in the transaction that ends the generator.

use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::ids::JobId;
use kici_engine::plan::JobKind;
use kici_engine::state::JobStatus;

use super::backend::{Conn, Db};
use super::new_runs::{edge, job_row, new_job};
use super::roster;
use super::rows::{JobRow, NeedRow};
use super::runs::{lock_body, lock_put};
use super::schema::{generated_jobs, job_needs, jobs, runs};
use crate::StoreError;
use crate::advance::RunState;
use crate::ctx::Ctx;
use crate::model::{Activate, Expansion, Generated, Guarded, Job, NeedEdge, NewGenerated, NewNeed, whole_group};
use crate::types::{DbId, DbTs};

#[derive(Queryable, Selectable, Insertable, AsChangeset)]
#[diesel(table_name = generated_jobs, check_for_backend(Db))]
struct GeneratedRow {
    job_id: DbId,
    run_id: DbId,
    epoch: i64,
    digest: String,
    job_count: i64,
    wants_hosts: bool,
    reported_at: DbTs,
}

/// Keeps what the agent that runs a generator reports; the last word of its delivery counts.
pub(crate) async fn generated_put(conn: &mut Conn, ctx: &Ctx, new: &NewGenerated) -> Result<Guarded, StoreError> {
    let running = [JobStatus::Running, JobStatus::Cancelling].map(JobStatus::as_str);
    let own = jobs::table
        .find(DbId::from(new.job.job_id))
        .filter(jobs::run_id.eq(DbId::from(new.job.run_id)))
        .filter(jobs::dispatch_epoch.eq(i64::from(new.job.epoch)))
        .filter(jobs::agent_id.eq(new.agent_id.as_str()))
        .filter(jobs::status.eq_any(running));
    let held: Option<DbId> = lock_row!(own.select(jobs::id)).first(conn).await.optional()?;
    if held.is_none() {
        return Ok(Guarded::Lost);
    }
    lock_put(conn, ctx, &new.digest, &new.members_json).await?;
    let row = GeneratedRow {
        job_id: new.job.job_id.into(),
        run_id: new.job.run_id.into(),
        epoch: new.job.epoch.into(),
        digest: new.digest.clone(),
        job_count: new.count.into(),
        wants_hosts: new.wants_hosts,
        reported_at: ctx.now.into(),
    };
    diesel::insert_into(generated_jobs::table)
        .values(&row)
        .on_conflict(generated_jobs::job_id)
        .do_update()
        .set(&row)
        .execute(conn)
        .await?;
    Ok(Guarded::Applied)
}

pub(crate) async fn generated_get(conn: &mut Conn, _: &Ctx, job: &JobId) -> Result<Option<(String, u32)>, StoreError> {
    let row: Option<GeneratedRow> =
        generated_jobs::table.find(DbId::from(*job)).select(GeneratedRow::as_select()).first(conn).await.optional()?;
    Ok(row.map(|row| (row.digest, u32::try_from(row.job_count).unwrap_or(u32::MAX))))
}

/// Joins the jobs of a generator that has ended well to its run. Some is why it has not ended well after all; none of a job that
/// is no generator.
pub(crate) async fn expand(
    conn: &mut Conn,
    ctx: &Ctx,
    state: &mut RunState,
    at: usize,
    activate: &dyn Activate,
) -> Result<Option<String>, StoreError> {
    let job = state.jobs[at].clone();
    if job.kind != Some(JobKind::Generate) {
        return Ok(None);
    }
    let row: Option<GeneratedRow> = generated_jobs::table
        .find(DbId::from(job.id))
        .filter(generated_jobs::epoch.eq(i64::from(job.dispatch_epoch)))
        .select(GeneratedRow::as_select())
        .first(conn)
        .await
        .optional()?;
    let Some(row) = row else {
        let why = "its agent reported no jobs; an agent of an older version cannot run a job with `generate`";
        return Ok(Some(why.to_owned()));
    };
    let (members, lock) =
        (lock_body(conn, ctx, &row.digest).await?, lock_body(conn, ctx, &state.run.lock_digest).await?);
    let missing = || StoreError::NotFound { what: "lock document" };
    let made = Generated {
        run: state.run.clone(),
        lock_json: lock.ok_or_else(missing)?,
        members_json: members.ok_or_else(missing)?,
        planned: state.jobs.len(),
        on_hosts: state.jobs.iter().filter(|job| job.fanout.is_some()).count(),
        hosts: if row.wants_hosts { roster::roster_list(conn, ctx).await? } else { Vec::new() },
        job,
    };
    match activate.expand(&made) {
        Ok(expansion) => {
            join(conn, ctx, state, expansion).await?;
            Ok(None)
        }
        Err(why) => Ok(Some(why)),
    }
}

async fn join(conn: &mut Conn, ctx: &Ctx, state: &mut RunState, expansion: Expansion) -> Result<(), StoreError> {
    let Expansion { lock_digest, lock_json, jobs: new, needs, gained, group } = expansion;
    lock_put(conn, ctx, &lock_digest, &lock_json).await?;
    // Read again in this transaction before anybody else could have it.
    ctx.keep_lock(&lock_digest, &Arc::new(lock_json));
    state.run.lock_digest = lock_digest;
    let run = state.run.id;
    let key = DbId::from(run);
    // What is settled afterwards compares the run with how it is from here on.
    diesel::update(runs::table.find(key)).set(runs::lock_digest.eq(&state.run.lock_digest)).execute(conn).await?;
    let needing = |name: &str| needs.iter().any(|need| need.job_name == name);
    let turns = state.run.concurrency.is_some();
    let members: Vec<Job> = new.iter().map(|job| new_job(ctx, run, turns, job, needing(&job.name))).collect();
    let first = i64::try_from(state.jobs.len()).unwrap_or(i64::MAX);
    let rows: Vec<JobRow> = (first..)
        .zip(&members)
        .map(|(position, job)| job_row(position, &Job { status: JobStatus::Pending, ..job.clone() }))
        .collect();
    insert_all!(conn, jobs::table, &rows);
    let gained: Vec<NewNeed> = gained
        .into_iter()
        .flat_map(|(base, need)| {
            let instances = state.jobs.iter().filter(move |job| job.base_name == base);
            let of = |job: &Job| NewNeed {
                job_name: job.name.clone(),
                upstream: need.job.clone(),
                run_on: need.run_on.clone(),
                group: need.group.clone(),
                generator: None,
                resolved: false,
            };
            instances.map(of).collect::<Vec<_>>()
        })
        .collect();
    let edges: Vec<NeedRow> = needs.iter().chain(&gained).map(|need| NeedRow::of(key, need)).collect();
    insert_all!(conn, job_needs::table, &edges);
    diesel::update(job_needs::table)
        .filter(job_needs::run_id.eq(key))
        .filter(job_needs::upstream_name.eq(whole_group(&group)))
        .set(job_needs::resolved.eq(true))
        .execute(conn)
        .await?;
    let in_memory = |needs: &[NewNeed]| -> Vec<NeedEdge> { needs.iter().map(edge).collect() };
    state.join(members, in_memory(&needs), &group, in_memory(&gained));
    Ok(())
}
