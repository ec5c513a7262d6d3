//! Schedules: how far their times were looked at, and their firing.

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::cron;
use kici_engine::ids::{EventId, RegistrationId};
use kici_engine::lock::{Trigger, Workflow};
use kici_engine::time::Ts;

use super::backend::{Conn, Db};
use super::bus::{Emitter, put};
use super::schema::schedule_state;
use crate::StoreError;
use crate::ctx::Ctx;
use crate::model::{EventOrigin, ScheduleFire, ScheduleState};
use crate::types::{DbId, DbTs};

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = schedule_state, check_for_backend(Db), treat_none_as_default_value = false)]
struct StateRow {
    registration_id: DbId,
    schedule_key: String,
    cursor_at: DbTs,
    last_fired_at: Option<DbTs>,
    last_event_id: Option<DbId>,
}

pub(crate) async fn schedule_states(conn: &mut Conn, _: &Ctx) -> Result<Vec<ScheduleState>, StoreError> {
    let rows: Vec<StateRow> = schedule_state::table
        .order((schedule_state::registration_id, schedule_state::schedule_key))
        .select(StateRow::as_select())
        .load(conn)
        .await?;
    let read = |row: StateRow| ScheduleState {
        registration_id: row.registration_id.into(),
        schedule_key: row.schedule_key,
        cursor_at: row.cursor_at.into(),
        last_fired_at: row.last_fired_at.map(Into::into),
        last_event_id: row.last_event_id.map(Into::into),
    };
    Ok(rows.into_iter().map(read).collect())
}

pub(crate) async fn schedule_seen(
    conn: &mut Conn,
    ctx: &Ctx,
    registration: &RegistrationId,
    key: &str,
) -> Result<(), StoreError> {
    let row = StateRow {
        registration_id: (*registration).into(),
        schedule_key: key.to_owned(),
        cursor_at: ctx.now.into(),
        last_fired_at: None,
        last_event_id: None,
    };
    diesel::insert_into(schedule_state::table).values(&row).on_conflict_do_nothing().execute(conn).await?;
    Ok(())
}

pub(crate) async fn schedule_pass(
    conn: &mut Conn,
    _: &Ctx,
    registration: &RegistrationId,
    key: &str,
    until: &Ts,
) -> Result<bool, StoreError> {
    let changed = diesel::update(schedule_state::table.find((DbId::from(*registration), key)))
        .filter(schedule_state::cursor_at.lt(DbTs::from(*until)))
        .set(schedule_state::cursor_at.eq(DbTs::from(*until)))
        .execute(conn)
        .await?;
    Ok(changed == 1)
}

/// Forgets schedules that a registered workflow does not have any more: one that comes back counts from then on.
pub(crate) async fn keep_schedules(conn: &mut Conn, registration: DbId, lock_json: &[u8]) -> Result<(), StoreError> {
    // What cannot be read fires nothing, and so has no times to remember.
    let triggers = serde_json::from_slice::<Workflow>(lock_json).map(|workflow| workflow.triggers).unwrap_or_default();
    let keys: Vec<String> = triggers
        .iter()
        .filter_map(|trigger| match trigger {
            Trigger::Schedule { cron, timezone, .. } => Some(cron::schedule_key(cron, timezone)),
            _ => None,
        })
        .collect();
    diesel::delete(schedule_state::table)
        .filter(schedule_state::registration_id.eq(registration))
        .filter(schedule_state::schedule_key.ne_all(keys))
        .execute(conn)
        .await?;
    Ok(())
}

pub(crate) async fn schedule_fire(
    conn: &mut Conn,
    ctx: &Ctx,
    fire: &ScheduleFire,
) -> Result<Option<EventId>, StoreError> {
    let key = (DbId::from(fire.registration_id), fire.schedule_key.as_str());
    let due = DbTs::from(fire.due);
    // Whoever moves the cursor fires; everybody else comes too late.
    let moved = diesel::update(schedule_state::table.find(key))
        .filter(schedule_state::cursor_at.lt(due))
        .set((schedule_state::cursor_at.eq(due), schedule_state::last_fired_at.eq(due)))
        .execute(conn)
        .await?;
    if moved == 0 {
        return Ok(None);
    }
    let EventOrigin::Outside { org, routing_key, repo, by } = &fire.event.origin else {
        return Err(StoreError::Db("a schedule is fired by the system".to_owned()));
    };
    let emitter = Emitter::outside(org, routing_key.as_deref(), repo.as_deref(), by);
    let id = put(conn, ctx, &fire.event, emitter).await?;
    if let Some(id) = id {
        diesel::update(schedule_state::table.find(key))
            .set(schedule_state::last_event_id.eq(DbId::from(id)))
            .execute(conn)
            .await?;
    }
    Ok(id)
}
