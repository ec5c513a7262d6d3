//! Slots of concurrency groups. Whoever changes a group holds its lock until the end of the transaction, and a transaction that
//! holds one locks no other run: what a change means for other runs is noted in their rows and carried out by transactions of
//! their own (`slot_news`), so that two runs never wait for each other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use kici_engine::concurrency::{Claim, Newcomer, SlotAsk, arbitrate};
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::{JobStatus, RunStatus};
use kici_engine::time::Ts;
use sha2::{Digest, Sha256};

use super::backend::{Conn, take_turn};
use super::kept::Condition;
use super::rows::{small, ts_opt, word};
use super::schema::{concurrency_slots as slots, jobs, runs};
use super::settle;
use crate::StoreError;
use crate::advance::RunState;
use crate::advance::slots::Turn;
use crate::ctx::Ctx;
use crate::model::{Activate, Effects, Run, Slot, SlotNews, SlotStatus, SlotWait};
use crate::notify::Topic;
use crate::types::{DbId, DbTs};

/// Waiting claims looked at when a slot came free. More would matter only if that many at the head had ended unseen.
const HEAD: i64 = 32;
/// The same when a newcomer wants all older ones to end.
const ALL: i64 = 10_000;

fn is_open() -> Condition {
    Condition("concurrency_slots.status IN ('queued', 'active')")
}

fn is_queued() -> Condition {
    Condition("concurrency_slots.status = 'queued'")
}

/// A group of a repository.
#[derive(Clone, Copy, Debug)]
struct Group<'a> {
    org: &'a str,
    repo: &'a str,
    name: &'a str,
}

impl<'a> Group<'a> {
    fn of(run: &'a Run, name: &'a str) -> Self {
        Self { org: &run.org, repo: &run.repo, name }
    }

    /// Keeps everybody else out of the group until the end of the transaction.
    async fn lock(self, conn: &mut Conn) -> Result<(), StoreError> {
        let digest = Sha256::digest(format!("{}\0{}\0{}", self.org, self.repo, self.name));
        let mut key = [0; 8];
        key.copy_from_slice(&digest[..8]);
        Ok(take_turn(conn, i64::from_be_bytes(key)).await?)
    }
}

/// What is read of a claim to settle its group; ordered by age.
#[derive(Clone, Debug, Queryable)]
struct Row {
    id: DbId,
    run_id: DbId,
    holder_id: DbId,
    status: String,
    max_active: i64,
    superseded_by: Option<DbId>,
    run_created_at: DbTs,
    position: i64,
    run_status: String,
}

impl Row {
    fn age(&self) -> (DbTs, DbId, i64, DbId) {
        (self.run_created_at, self.run_id, self.position, self.id)
    }
}

/// A new run asks for its slot, before anything of it is judged.
pub(crate) async fn enter(conn: &mut Conn, ctx: &Ctx, state: &mut RunState) -> Result<(), StoreError> {
    let Some(ask) = state.run.concurrency.clone() else { return Ok(()) };
    if state.jobs.iter().all(|job| job.status.is_terminal()) {
        return Ok(());
    }
    state.slots.run = Some(join(conn, ctx, &state.run, None, &ask).await?);
    Ok(())
}

/// Asks for the slots that jobs want.
pub(crate) async fn acquire(conn: &mut Conn, ctx: &Ctx, state: &mut RunState) -> Result<(), StoreError> {
    let wanted = std::mem::take(&mut state.slots.wanted);
    // In one order, so that two transactions do not wait for each other.
    let mut wanted: Vec<_> = wanted.into_iter().filter_map(|(id, ask)| Some((state.position(id)?, id, ask))).collect();
    wanted.sort_by(|(a, _, left), (b, _, right)| (&left.group, a).cmp(&(&right.group, b)));
    for (at, id, ask) in wanted {
        if !state.jobs[at].status.is_terminal() {
            let turn = join(conn, ctx, &state.run, Some((at, id)), &ask).await?;
            state.slots.jobs.insert(id, turn);
        }
    }
    Ok(())
}

async fn join(
    conn: &mut Conn,
    ctx: &Ctx,
    run: &Run,
    job: Option<(usize, JobId)>,
    ask: &SlotAsk,
) -> Result<Turn, StoreError> {
    let group = Group::of(run, &ask.group);
    group.lock(conn).await?;
    let id = DbId(ctx.uuid());
    let position = job.map_or(0, |(at, _)| i64::try_from(at).unwrap_or(i64::MAX));
    diesel::insert_into(slots::table)
        .values((
            slots::id.eq(id),
            slots::org.eq(group.org),
            slots::repo.eq(group.repo),
            slots::group_key.eq(group.name),
            slots::run_id.eq(DbId::from(run.id)),
            slots::holder_id.eq(job.map_or(DbId::from(run.id), |(_, job)| DbId::from(job))),
            slots::max_active.eq(i64::from(ask.max)),
            slots::status.eq(SlotStatus::Queued.as_str()),
            slots::applied.eq(true),
            slots::run_created_at.eq(DbTs::from(run.created_at)),
            slots::position.eq(position),
            slots::created_at.eq(DbTs::from(ctx.later())),
        ))
        .execute(conn)
        .await?;
    let active = settle_group(conn, ctx, group, Some((id, ask.cancel_in_progress))).await?;
    Ok(if active { Turn::Active } else { Turn::Queued })
}

/// Reads what a run knows of its slots; nothing when it takes no turns.
pub(crate) async fn load(conn: &mut Conn, state: &mut RunState) -> Result<(), StoreError> {
    if state.run.concurrency.is_none() && state.jobs.iter().all(|job| job.group_name.is_none()) {
        return Ok(());
    }
    let rows: Vec<(DbId, String, bool, Option<DbId>)> = slots::table
        .filter(slots::run_id.eq(DbId::from(state.run.id)))
        .filter(is_open())
        .select((slots::holder_id, slots::status, slots::applied, slots::superseded_by))
        .load(conn)
        .await?;
    for (holder, status, applied, superseded_by) in rows {
        let turn = if status == SlotStatus::Active.as_str() { Turn::Active } else { Turn::Queued };
        if holder == DbId::from(state.run.id) {
            state.slots.run = Some(turn);
        } else {
            state.slots.jobs.insert(holder.into(), turn);
        }
        if !applied {
            state.slots.news.push((holder.0, superseded_by.is_some()));
        }
    }
    Ok(())
}

/// Gives back the slots of what has ended, and lets those move up that wait for them.
pub(crate) async fn leave(conn: &mut Conn, ctx: &Ctx, state: &RunState) -> Result<(), StoreError> {
    let mut over: BTreeMap<&str, Vec<DbId>> = BTreeMap::new();
    for job in state.jobs.iter().filter(|job| job.status.is_terminal()) {
        if let (Some(group), Some(_)) = (&job.group_name, state.slots.jobs.get(&job.id)) {
            over.entry(group).or_default().push(job.id.into());
        }
    }
    if let (Some(ask), Some(_), true) = (&state.run.concurrency, state.slots.run, state.run.status.is_terminal()) {
        over.entry(&ask.group).or_default().push(state.run.id.into());
    }
    for (name, holders) in over {
        let group = Group::of(&state.run, name);
        group.lock(conn).await?;
        for (from, to) in [(SlotStatus::Active, SlotStatus::Completed), (SlotStatus::Queued, SlotStatus::Cancelled)] {
            diesel::update(slots::table)
                .filter(slots::holder_id.eq_any(&holders))
                .filter(slots::status.eq(from.as_str()))
                .set((slots::status.eq(to.as_str()), slots::applied.eq(true), ended(ctx)))
                .execute(conn)
                .await?;
        }
        settle_group(conn, ctx, group, None).await?;
    }
    let cancelled = state.run.cancel_requested_at.is_some();
    let known = state.slots.news.iter().filter(|(_, superseded)| cancelled || !superseded);
    let known: Vec<DbId> = known.map(|(holder, _)| DbId(*holder)).collect();
    if !known.is_empty() {
        // A newer run may have asked meanwhile that this one ends: that is news again.
        let heard = diesel::update(slots::table)
            .filter(slots::holder_id.eq_any(&known))
            .filter(is_open())
            .set(slots::applied.eq(true));
        match cancelled {
            true => heard.execute(conn).await?,
            false => heard.filter(slots::superseded_by.is_null()).execute(conn).await?,
        };
    }
    Ok(())
}

fn ended(ctx: &Ctx) -> diesel::dsl::Eq<slots::ended_at, DbTs> {
    slots::ended_at.eq(DbTs::from(ctx.later()))
}

/// Settles a group that is locked. True when the newcomer got a slot.
async fn settle_group(
    conn: &mut Conn,
    ctx: &Ctx,
    group: Group<'_>,
    newcomer: Option<(DbId, bool)>,
) -> Result<bool, StoreError> {
    let depth = if newcomer.is_some_and(|(_, cancel)| cancel) { ALL } else { HEAD };
    let rows = rows(conn, group, depth).await?;
    let over = over(conn, &rows).await?;
    let claims: Vec<Claim> = rows.iter().map(|row| claim(row, &over)).collect();
    let place = newcomer.and_then(|(id, cancel_in_progress)| {
        Some(Newcomer { at: rows.iter().position(|row| row.id == id)?, cancel_in_progress })
    });
    let decision = arbitrate(&claims, place);
    let ids = |places: &[usize]| places.iter().map(|at| rows[*at].id).collect::<Vec<DbId>>();
    if !decision.ended.is_empty() {
        diesel::update(slots::table)
            .filter(slots::id.eq_any(ids(&decision.ended)))
            .filter(is_open())
            .set((slots::status.eq(SlotStatus::Completed.as_str()), slots::applied.eq(true), ended(ctx)))
            .execute(conn)
            .await?;
    }
    if let (Some(new), false) = (place, decision.superseded.is_empty()) {
        diesel::update(slots::table)
            .filter(slots::id.eq_any(ids(&decision.superseded)))
            .filter(is_open())
            .set((slots::superseded_by.eq(rows[new.at].run_id), slots::applied.eq(false)))
            .execute(conn)
            .await?;
        ctx.wake(Topic::Slots);
    }
    let mut active = false;
    for at in decision.promoted {
        let own = newcomer.is_some_and(|(id, _)| id == rows[at].id);
        diesel::update(slots::table.find(rows[at].id))
            .filter(is_queued())
            .set((
                slots::status.eq(SlotStatus::Active.as_str()),
                slots::acquired_at.eq(DbTs::from(ctx.later())),
                slots::applied.eq(own),
            ))
            .execute(conn)
            .await?;
        active |= own;
        if !own {
            ctx.wake(Topic::Slots);
        }
    }
    Ok(active)
}

/// All claims that have a slot and the first that wait, oldest first.
async fn rows(conn: &mut Conn, group: Group<'_>, depth: i64) -> Result<Vec<Row>, StoreError> {
    let mut found = Vec::new();
    for (status, limit) in [(SlotStatus::Active, ALL), (SlotStatus::Queued, depth)] {
        let some: Vec<Row> = slots::table
            .inner_join(runs::table)
            .filter(is_open())
            .filter(slots::org.eq(group.org))
            .filter(slots::repo.eq(group.repo))
            .filter(slots::group_key.eq(group.name))
            .filter(slots::status.eq(status.as_str()))
            .order((slots::run_created_at, slots::run_id, slots::position, slots::id))
            .limit(limit)
            .select((
                slots::id,
                slots::run_id,
                slots::holder_id,
                slots::status,
                slots::max_active,
                slots::superseded_by,
                slots::run_created_at,
                slots::position,
                runs::status,
            ))
            .load(conn)
            .await?;
        found.extend(some);
    }
    found.sort_by_key(Row::age);
    Ok(found)
}

/// Holders that have ended.
async fn over(conn: &mut Conn, rows: &[Row]) -> Result<BTreeSet<DbId>, StoreError> {
    let mut over: BTreeSet<DbId> = BTreeSet::new();
    for row in rows {
        if word::<RunStatus>("run status", &row.run_status)?.is_terminal() {
            over.insert(row.holder_id);
        }
    }
    let jobs: Vec<DbId> = rows.iter().filter(|row| row.holder_id != row.run_id).map(|row| row.holder_id).collect();
    if !jobs.is_empty() {
        let terminal: Vec<&str> = JobStatus::terminal().map(JobStatus::as_str).collect();
        let ended: Vec<DbId> = jobs::table
            .filter(jobs::id.eq_any(&jobs))
            .filter(jobs::status.eq_any(terminal))
            .select(jobs::id)
            .load(conn)
            .await?;
        over.extend(ended);
    }
    Ok(over)
}

fn claim(row: &Row, over: &BTreeSet<DbId>) -> Claim {
    Claim {
        run: row.run_id.into(),
        active: row.status == SlotStatus::Active.as_str(),
        max: small(row.max_active),
        dead: over.contains(&row.holder_id),
        superseded: row.superseded_by.is_some(),
    }
}

pub(crate) async fn slot_news(conn: &mut Conn, _: &Ctx, limit: &u32) -> Result<Vec<SlotNews>, StoreError> {
    let rows: Vec<(DbId, Option<DbId>)> = slots::table
        .filter(Condition("NOT concurrency_slots.applied"))
        .filter(is_open())
        .order((slots::run_created_at, slots::run_id))
        .limit(i64::from(*limit))
        .select((slots::run_id, slots::superseded_by))
        .load(conn)
        .await?;
    let mut news: Vec<SlotNews> = Vec::new();
    for (run_id, superseded_by) in rows {
        let one = SlotNews { run_id: run_id.into(), superseded_by: superseded_by.map(Into::into) };
        if !news.contains(&one) {
            news.push(one);
        }
    }
    Ok(news)
}

pub(crate) async fn slots_waiting_since(
    conn: &mut Conn,
    _: &Ctx,
    before: &Ts,
    limit: &u32,
) -> Result<Vec<SlotWait>, StoreError> {
    let rows: Vec<(DbId, DbId, String)> = slots::table
        .filter(is_queued())
        .filter(slots::created_at.le(DbTs::from(*before)))
        .order(slots::created_at)
        .limit(i64::from(*limit))
        .select((slots::run_id, slots::holder_id, slots::group_key))
        .load(conn)
        .await?;
    let wait = |(run, holder, group): (DbId, DbId, String)| SlotWait {
        run_id: run.into(),
        job_id: (holder != run).then(|| holder.into()),
        group,
    };
    Ok(rows.into_iter().map(wait).collect())
}

pub(crate) async fn slot_expire(
    conn: &mut Conn,
    ctx: &Ctx,
    wait: &SlotWait,
    message: &str,
    activate: &Arc<dyn Activate>,
) -> Result<Option<Effects>, StoreError> {
    let Some(mut state) = settle::load(conn, ctx, wait.run_id).await? else { return Ok(None) };
    Group::of(&state.run, &wait.group).lock(conn).await?;
    let holder = wait.job_id.map_or(DbId::from(wait.run_id), DbId::from);
    let waits = slots::table.filter(slots::holder_id.eq(holder)).filter(is_queued());
    if !diesel::select(diesel::dsl::exists(waits)).get_result::<bool>(conn).await? {
        return Ok(None);
    }
    state.give_up_waiting(wait.job_id, message, ctx.now)?;
    settle::settle(conn, ctx, state, Some(&**activate)).await.map(Some)
}

pub(crate) async fn slots_reclaim(conn: &mut Conn, ctx: &Ctx, limit: &u32) -> Result<u64, StoreError> {
    let terminal = [RunStatus::Success, RunStatus::Failed, RunStatus::Cancelled].map(RunStatus::as_str);
    let groups: Vec<(String, String, String)> = slots::table
        .inner_join(runs::table)
        .filter(is_open())
        .filter(runs::status.eq_any(terminal))
        .order((slots::org, slots::repo, slots::group_key))
        .select((slots::org, slots::repo, slots::group_key))
        .distinct()
        .limit(i64::from(*limit))
        .load(conn)
        .await?;
    for (org, repo, name) in &groups {
        let group = Group { org, repo, name };
        group.lock(conn).await?;
        settle_group(conn, ctx, group, None).await?;
    }
    Ok(groups.len() as u64)
}

#[derive(Queryable)]
struct ShownRow {
    holder_id: DbId,
    org: String,
    repo: String,
    group: String,
    max_active: i64,
    status: String,
    superseded_by: Option<DbId>,
    created_at: DbTs,
    acquired_at: Option<DbTs>,
    ended_at: Option<DbTs>,
}

pub(crate) async fn slots_of_run(conn: &mut Conn, _: &Ctx, run: &RunId) -> Result<Vec<Slot>, StoreError> {
    let shown: Vec<ShownRow> = slots::table
        .filter(slots::run_id.eq(DbId::from(*run)))
        .order((slots::created_at, slots::position, slots::id))
        .select((
            slots::holder_id,
            slots::org,
            slots::repo,
            slots::group_key,
            slots::max_active,
            slots::status,
            slots::superseded_by,
            slots::created_at,
            slots::acquired_at,
            slots::ended_at,
        ))
        .load(conn)
        .await?;
    let mut groups: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    let mut found = Vec::with_capacity(shown.len());
    for row in shown {
        let status: SlotStatus = word("slot status", &row.status)?;
        let holder = row.holder_id;
        let mut slot = Slot {
            run_id: *run,
            job_id: (holder != DbId::from(*run)).then(|| holder.into()),
            max: small(row.max_active),
            status,
            superseded_by: row.superseded_by.map(Into::into),
            place: None,
            waiting: 0,
            held_by: Vec::new(),
            created_at: row.created_at.into(),
            acquired_at: ts_opt(row.acquired_at),
            ended_at: ts_opt(row.ended_at),
            group: row.group,
        };
        if status == SlotStatus::Queued {
            if !groups.contains_key(&slot.group) {
                let group = Group { org: &row.org, repo: &row.repo, name: &slot.group };
                groups.insert(slot.group.clone(), rows(conn, group, ALL).await?);
            }
            let group = groups.get(&slot.group).map_or(&[][..], Vec::as_slice);
            place(&mut slot, holder, group);
        }
        found.push(slot);
    }
    Ok(found)
}

/// Where a claim stands among those of its group. Superseded ones will not get a slot and do not count.
fn place(slot: &mut Slot, holder: DbId, group: &[Row]) {
    let (active, queued): (Vec<&Row>, Vec<&Row>) =
        group.iter().partition(|row| row.status == SlotStatus::Active.as_str());
    let queued: Vec<&Row> = queued.into_iter().filter(|row| row.superseded_by.is_none()).collect();
    let at = queued.iter().position(|row| row.holder_id == holder);
    slot.place = at.and_then(|at| u32::try_from(at + 1).ok());
    slot.waiting = u32::try_from(queued.len()).unwrap_or(u32::MAX);
    for row in active {
        let run = row.run_id.into();
        if !slot.held_by.contains(&run) {
            slot.held_by.push(run);
        }
    }
}
