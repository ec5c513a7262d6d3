//! Failed runs on their way to workflows with `on: workflows_failed_batch`: counted as they end, told once the time of the window
//! is over. A window is a row, so that nothing is lost whoever stops in between.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::event_name;
use kici_engine::ids::RegistrationId;
use kici_engine::lock::{Trigger, Workflow};
use kici_engine::pattern::Patterns;
use kici_engine::state::RunStatus;
use serde_json::{Value as Json, json};
use std::time::Duration;

use super::backend::{Conn, Db};
use super::bus::{Emitter, put};
use super::runs::lock_body;
use super::schema::{batch_windows, registrations};
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{EventOrigin, NewEvent, Run};
use crate::types::{DbId, DbTs, Doc};

/// The trigger type that listens.
pub(crate) const KIND: &str = "workflows_failed_batch";
/// Runs that the event lists; the others are counted.
const LISTED: usize = 50;
/// Runs that other ends started are not counted: a workflow that tells of failures and fails would tell of itself.
const NOTIFIERS: [&str; 4] = ["job_complete", "lifecycle", "workflow_complete", KIND];

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = batch_windows, check_for_backend(Db))]
struct WindowRow {
    registration_id: DbId,
    opened_at: DbTs,
    closes_at: DbTs,
    total: i64,
    runs: Doc<Vec<Json>>,
}

/// Counts a run that has ended for everybody of its source who collects failures of its workflow.
pub(crate) async fn count(conn: &mut Conn, ctx: &Ctx, run: &Run, routing_key: Option<&str>) -> Result<(), StoreError> {
    let counts = run.status == RunStatus::Failed && !NOTIFIERS.contains(&run.trigger_kind.as_str());
    let Some(routing_key) = routing_key.filter(|_| counts) else { return Ok(()) };
    type Columns = (DbId, String, String, Doc<Vec<String>>, String);
    let rows: Vec<Columns> = registrations::table
        .filter(registrations::org.eq(&run.org))
        .filter(registrations::routing_key.eq(routing_key))
        .filter(registrations::enabled.eq(true))
        .order(registrations::id)
        .select((
            registrations::id,
            registrations::repo,
            registrations::workflow_name,
            registrations::trigger_types,
            registrations::lock_digest,
        ))
        .load(conn)
        .await?;
    for (id, repo, name, kinds, digest) in rows {
        let own = repo == run.repo && name == run.workflow_name;
        if own || !kinds.0.iter().any(|kind| kind == KIND) {
            continue;
        }
        let Some(body) = lock_body(conn, ctx, &digest).await? else { continue };
        if let Some(window) = window_of(&body, &run.workflow_name) {
            add(conn, ctx, id, window, run).await?;
        }
    }
    Ok(())
}

/// How long a workflow collects failures of another one; none where it does not.
fn window_of(lock_json: &[u8], failed: &str) -> Option<Duration> {
    let workflow: Workflow = serde_json::from_slice(lock_json).ok()?;
    workflow.triggers.iter().find_map(|trigger| match trigger {
        Trigger::WorkflowsFailedBatch { accumulate_ms, workflows } => {
            // They were checked when the workflow was registered.
            let hit = workflows.is_empty() || Patterns::compile(workflows).is_ok_and(|list| list.matches(failed));
            hit.then(|| Duration::from_millis(*accumulate_ms))
        }
        _ => None,
    })
}

async fn add(conn: &mut Conn, ctx: &Ctx, id: DbId, window: Duration, run: &Run) -> Result<(), StoreError> {
    let opened = WindowRow {
        registration_id: id,
        opened_at: ctx.now.into(),
        closes_at: ctx.now.plus(window).into(),
        total: 0,
        runs: Doc(Vec::new()),
    };
    diesel::insert_into(batch_windows::table).values(&opened).on_conflict_do_nothing().execute(conn).await?;
    let open = batch_windows::table.find(id);
    let mut row: WindowRow = lock_row!(open.select(WindowRow::as_select())).first(conn).await?;
    if row.runs.0.len() < LISTED {
        row.runs.0.push(json!({
            "run_id": run.id,
            "workflow": run.workflow_name,
            "repo": run.repo,
            "ref": run.git_ref,
            "sha": run.sha,
            "failure_reason": run.failure_reason,
            "failure_message": run.failure_message,
            "finished_at": run.finished_at,
        }));
    }
    diesel::update(open)
        .set((batch_windows::total.eq(row.total + 1), batch_windows::runs.eq(row.runs)))
        .execute(conn)
        .await?;
    Ok(())
}

/// Tells of the windows whose time is over, each once. Returns how many.
pub(crate) async fn batches_close(conn: &mut Conn, ctx: &Ctx, limit: &u32) -> Result<u64, StoreError> {
    let due: Vec<WindowRow> = skip_locked!(
        batch_windows::table
            .filter(batch_windows::closes_at.le(DbTs::from(ctx.now)))
            .order((batch_windows::closes_at, batch_windows::registration_id))
            .limit(i64::from(*limit))
            .select(WindowRow::as_select())
    )
    .load(conn)
    .await?;
    let mut told = 0;
    for window in due {
        let of: Option<(String, String, String)> = registrations::table
            .find(window.registration_id)
            .select((registrations::org, registrations::routing_key, registrations::repo))
            .first(conn)
            .await
            .optional()?;
        if let Some((org, routing_key, repo)) = of {
            let emitter = Emitter::outside(&org, Some(&routing_key), Some(&repo), "system");
            put(conn, ctx, &event(&window), emitter).await?;
            told += 1;
        }
        diesel::delete(batch_windows::table.find(window.registration_id)).execute(conn).await?;
    }
    Ok(told)
}

fn event(window: &WindowRow) -> NewEvent {
    let mut workflows: Vec<&str> = window.runs.0.iter().filter_map(|run| run["workflow"].as_str()).collect();
    workflows.sort_unstable();
    workflows.dedup();
    let id = RegistrationId::from(window.registration_id);
    NewEvent {
        origin: EventOrigin::Outside { org: String::new(), routing_key: None, repo: None, by: String::new() },
        name: event_name::WORKFLOWS_FAILED_BATCH.to_owned(),
        payload: json!({
            "workflows": workflows,
            "runs": window.runs.0,
            "total": window.total,
            "opened_at": kici_engine::time::Ts::from(window.opened_at),
            "closes_at": kici_engine::time::Ts::from(window.closes_at),
        }),
        target_repos: Vec::new(),
        registration_id: Some(id),
        emit_key: Some(format!("batch:{}:{}", id.uuid(), kici_engine::time::Ts::from(window.opened_at).as_micros())),
        request_id: "workflows_failed_batch".to_owned(),
    }
}
