//! Slots and jobs of the agents.

use kici_engine::ids::{AgentId, JobId, SessionId};
use kici_engine::labels::{CompiledSelector, eligible};
use kici_engine::lock::Pick;
use kici_engine::time::Ts;
use kici_store::model::JobRef;
use std::collections::{BTreeSet, HashSet};
use std::time::Duration;
use tokio::time::Instant;

use super::{Entry, GRACE, Inner, MAX_GRACE, MAX_REMEMBERED, Registry, Tracked};
use crate::link::Link;

/// How long a job that an agent refused is not offered to it again.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// How long an agent that said "busy" gets nothing: long enough for the count to settle.
pub(crate) const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// A selector with rows that wait, ready for matching.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub digest: String,
    pub selector: std::sync::Arc<CompiledSelector>,
    pub requires_machine_id: Option<String>,
    /// Only this agent.
    pub pinned: Option<AgentId>,
    /// Which of several free agents.
    pub pick: Pick,
    pub waiting: u64,
}

/// Slots of one agent that are set aside for a claim. They must be given back or turned into jobs.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub agent_id: AgentId,
    pub session_id: SessionId,
    pub slots: u32,
    pub digests: Vec<String>,
    pub except: Vec<JobId>,
}

/// What the caller of [`Registry::acked`] must know.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Acked {
    pub waited: Option<Duration>,
}

/// Why an agent refuses a job, as far as its slots go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Busy,
    Draining,
    Resetting,
    Unsupported,
}

impl Inner {
    /// Agents that have every label a selector asks for by name, from the smallest index. None: it names none.
    fn candidates(&self, wanted: &Wanted) -> Option<&BTreeSet<AgentId>> {
        static NOBODY: BTreeSet<AgentId> = BTreeSet::new();
        let sets = wanted.selector.exact_labels().map(|label| self.by_label.get(label).unwrap_or(&NOBODY));
        sets.min_by_key(|set| set.len())
    }

    /// The one check whether an agent may have a job: every way to give one out goes through it.
    fn fits(entry: &Entry, wanted: &Wanted) -> bool {
        wanted.pinned.as_ref().is_none_or(|pinned| *pinned == entry.identity.agent_id)
            && eligible(&wanted.selector, wanted.requires_machine_id.as_deref(), &entry.identity.facts).is_ok()
    }

    fn remember_grace(&mut self, job: JobRef, agent: AgentId, now: Instant) {
        while let Some((at, oldest)) = self.grace_order.front().copied() {
            if now.duration_since(at) < GRACE && self.grace_order.len() < MAX_GRACE {
                break;
            }
            self.grace_order.pop_front();
            if self.grace.get(&oldest).is_some_and(|(_, since)| *since == at) {
                self.grace.remove(&oldest);
            }
        }
        self.grace.insert(job, (agent, now));
        self.grace_order.push_back((now, job));
    }
}

impl Registry {
    /// Sets slots aside for the waiting rows: for each selector the free agents with the lowest ids, or the least
    /// busy ones where it says so, as many slots as rows
    /// wait. The slots count as taken from here on, so that no other trigger fills them.
    pub fn reserve(&self, wanted: &[Wanted], batch: u64, passed_over: &HashSet<AgentId>) -> Vec<Reservation> {
        let now = Instant::now();
        let mut inner = self.lock();
        let mut picked: std::collections::BTreeMap<AgentId, (u32, Vec<String>)> = std::collections::BTreeMap::new();
        for want in wanted {
            let mut open = want.waiting.min(batch);
            let free: Vec<AgentId> = match inner.candidates(want) {
                _ if want.pinned.is_some() => {
                    want.pinned.iter().filter(|id| inner.free.contains(*id)).cloned().collect()
                }
                Some(set) if set.len() < inner.free.len() => set.intersection(&inner.free).cloned().collect(),
                Some(set) => inner.free.iter().filter(|id| set.contains(*id)).cloned().collect(),
                None => inner.free.iter().cloned().collect(),
            };
            let mut free = free;
            if want.pick == Pick::Any {
                // The least busy first; of equals the first by name.
                free.sort_by_key(|id| inner.agents.get(id).map_or(0, Entry::busy));
            }
            for id in free.into_iter().filter(|id| !passed_over.contains(id)) {
                if open == 0 {
                    break;
                }
                let Some(entry) = inner.agents.get(&id).filter(|entry| Inner::fits(entry, want)) else { continue };
                let taken = picked.entry(id).or_default();
                let more = u32::try_from(open).unwrap_or(u32::MAX).min(entry.slots_free().saturating_sub(taken.0));
                taken.1.push(want.digest.clone());
                taken.0 += more;
                open -= u64::from(more);
            }
        }
        let mut reservations = Vec::with_capacity(picked.len());
        for (agent_id, (slots, digests)) in picked {
            let Some(entry) = inner.agents.get_mut(&agent_id).filter(|_| slots > 0) else { continue };
            entry.reserved += slots;
            entry.refused.retain(|_, until| *until > now);
            let except = entry.refused.keys().copied().collect();
            let session_id = entry.identity.session_id;
            inner.refresh(&agent_id, now);
            reservations.push(Reservation { agent_id, session_id, slots, digests, except });
        }
        reservations
    }

    /// Turns one reserved slot into a job. None: the session is gone, and the job must go back into the queue.
    pub fn fill(&self, session: SessionId, job: JobRef, now: Ts) -> Option<Link> {
        let mut inner = self.lock();
        let entry = inner.of_session(session)?;
        entry.reserved = entry.reserved.saturating_sub(1);
        entry.jobs.insert(job.job_id, Tracked::new(job, now));
        let (id, link) = (entry.identity.agent_id.clone(), entry.link.clone());
        inner.by_job.insert(job.job_id, id);
        Some(link)
    }

    /// Gives reserved slots back.
    pub fn release(&self, session: SessionId, slots: u32) {
        let mut inner = self.lock();
        let Some(entry) = inner.of_session(session) else { return };
        entry.reserved = entry.reserved.saturating_sub(slots);
        let id = entry.identity.agent_id.clone();
        inner.refresh(&id, Instant::now());
    }

    /// True when an agent with a free slot could run it.
    pub fn has_free(&self, wanted: &Wanted) -> bool {
        let inner = self.lock();
        let fits = |id: &AgentId| inner.agents.get(id).is_some_and(|entry| Inner::fits(entry, wanted));
        match inner.candidates(wanted) {
            Some(set) => set.iter().any(|id| inner.free.contains(id) && fits(id)),
            None => inner.free.iter().any(fits),
        }
    }

    /// Whether the agent of a session may have a job, its slots aside.
    pub fn fits(&self, session: SessionId, wanted: &Wanted) -> bool {
        let mut inner = self.lock();
        inner.of_session(session).is_some_and(|entry| Inner::fits(entry, wanted))
    }

    /// True when some connected agent could run it if it had a slot.
    pub fn routable(&self, wanted: &Wanted) -> bool {
        let inner = self.lock();
        if let Some(pinned) = &wanted.pinned {
            return inner.agents.get(pinned).is_some_and(|entry| Inner::fits(entry, wanted));
        }
        match inner.candidates(wanted) {
            Some(set) => set.iter().filter_map(|id| inner.agents.get(id)).any(|entry| Inner::fits(entry, wanted)),
            None => inner.agents.values().any(|entry| Inner::fits(entry, wanted)),
        }
    }

    /// Changes a tracked job of a session, if it is held at this epoch.
    pub fn with_job<T>(&self, session: SessionId, job: JobRef, change: impl FnOnce(&mut Tracked) -> T) -> Option<T> {
        let mut inner = self.lock();
        let tracked = inner.of_session(session)?.jobs.get_mut(&job.job_id)?;
        (tracked.job == job).then(|| change(tracked))
    }

    /// A sign of life of a job.
    pub fn beat(&self, session: SessionId, job: JobRef, now: Ts) -> bool {
        let beat = |tracked: &mut Tracked| {
            tracked.last_heartbeat = now;
            tracked.beat_unsaved = true;
        };
        self.with_job(session, job, beat).is_some()
    }

    /// True while the session holds the job at this epoch, or held it until a moment ago.
    pub fn holds(&self, session: SessionId, job: JobRef) -> bool {
        let now = Instant::now();
        let mut inner = self.lock();
        let Some(entry) = inner.of_session(session) else { return false };
        if entry.jobs.get(&job.job_id).is_some_and(|tracked| tracked.job == job) {
            return true;
        }
        let id = entry.identity.agent_id.clone();
        inner.grace.get(&job).is_some_and(|(agent, at)| *agent == id && now.duration_since(*at) < GRACE)
    }

    /// The session took the job.
    pub fn acked(&self, session: SessionId, job: JobRef) -> Option<Acked> {
        let now = Instant::now();
        let acked = self.with_job(session, job, |tracked| {
            let waited = (!tracked.acked).then_some(tracked.offered_at).flatten();
            tracked.acked = true;
            Acked { waited: waited.map(|at| now.duration_since(at)) }
        })?;
        let mut inner = self.lock();
        if let Some(id) = inner.by_session.get(&session).cloned() {
            inner.ack_timeouts.remove(&id);
        }
        Some(acked)
    }

    /// The agent left an offer unanswered. Returns how often in a row.
    pub fn ack_timed_out(&self, id: &AgentId) -> u32 {
        let mut inner = self.lock();
        if inner.ack_timeouts.len() >= MAX_REMEMBERED && !inner.ack_timeouts.contains_key(id) {
            inner.ack_timeouts.clear();
        }
        let count = inner.ack_timeouts.entry(id.clone()).or_default();
        *count += 1;
        *count
    }

    /// Takes a job from an agent. `late_frames`: accept frames of it for a moment longer. True when the agent became free.
    pub fn untrack_of(&self, id: &AgentId, job: JobRef, late_frames: bool) -> bool {
        let now = Instant::now();
        let mut inner = self.lock();
        self.untrack_in(&mut inner, id, job, late_frames, now)
    }

    fn untrack_in(&self, inner: &mut Inner, id: &AgentId, job: JobRef, late_frames: bool, now: Instant) -> bool {
        let Some(entry) = inner.agents.get_mut(id) else { return false };
        if entry.jobs.get(&job.job_id).is_none_or(|tracked| tracked.job.epoch != job.epoch) {
            return false;
        }
        entry.jobs.remove(&job.job_id);
        inner.forget_jobs(id, std::iter::once(&job.job_id));
        if late_frames {
            inner.remember_grace(job, id.clone(), now);
        }
        inner.refresh(id, now)
    }

    /// The session refused a job it holds: takes it away and notes why. False when it does not hold it.
    pub fn refuse(&self, session: SessionId, job: JobRef, refusal: Refusal, detail: &str) -> bool {
        let now = Instant::now();
        let mut inner = self.lock();
        let Some(entry) = inner.of_session(session) else { return false };
        if entry.jobs.get(&job.job_id).is_none_or(|tracked| tracked.job != job) {
            return false;
        }
        entry.jobs.remove(&job.job_id);
        entry.refused.insert(job.job_id, now + REFUSED_FOR);
        match refusal {
            Refusal::Busy => entry.paused_until = Some(now + BUSY_PAUSE),
            Refusal::Draining => {
                entry.draining = Some(said(detail));
                entry.leaving = true;
            }
            Refusal::Resetting => entry.resetting = true,
            Refusal::Unsupported => {}
        }
        let id = entry.identity.agent_id.clone();
        inner.forget_jobs(&id, std::iter::once(&job.job_id));
        inner.refresh(&id, now);
        true
    }

    /// What an agent says of itself. Returns the number of jobs held here when it differs from the reported one twice in
    /// a row; the count here stays.
    pub fn status(&self, session: SessionId, report: Report) -> Option<usize> {
        let mut inner = self.lock();
        let entry = inner.of_session(session)?;
        entry.leaving = report.draining;
        if report.draining {
            entry.draining.get_or_insert_with(|| said(""));
        } else if entry.draining.as_deref() == Some(said("").as_str()) {
            entry.draining = None;
        }
        let was_unwell = entry.resetting || !entry.degraded.is_empty();
        entry.resetting = report.resetting;
        entry.degraded = report.degraded;
        if was_unwell && !entry.resetting && entry.degraded.is_empty() {
            // What it refused meanwhile it may take now.
            entry.refused.clear();
        }
        let held = entry.jobs.len();
        let differs = held != report.active_jobs as usize && entry.reported_jobs == Some(report.active_jobs);
        entry.reported_jobs = Some(report.active_jobs);
        let id = entry.identity.agent_id.clone();
        inner.refresh(&id, Instant::now());
        differs.then_some(held)
    }

    /// Marks an agent as draining, or lets it work again. None: not connected here.
    pub fn set_draining(&self, id: &AgentId, why: Option<String>) -> Option<Link> {
        let mut inner = self.lock();
        let entry = inner.agents.get_mut(id)?;
        entry.draining = why;
        let link = entry.link.clone();
        if entry.draining.is_none() {
            inner.ack_timeouts.remove(id);
        }
        inner.refresh(id, Instant::now());
        Some(link)
    }

    /// Agents whose pause ended become free again. True when there was one.
    pub fn end_pauses(&self) -> bool {
        let now = Instant::now();
        let mut inner = self.lock();
        let over: Vec<AgentId> = inner
            .agents
            .iter()
            .filter(|(_, entry)| {
                entry.paused_until.is_some_and(|until| until <= now)
                    || entry.reboot.is_some_and(|reboot| reboot.until <= now)
            })
            .map(|(id, _)| id.clone())
            .collect();
        for id in &over {
            if let Some(entry) = inner.agents.get_mut(id) {
                entry.paused_until = entry.paused_until.filter(|until| *until > now);
                entry.reboot = entry.reboot.filter(|reboot| reboot.until > now);
            }
            inner.refresh(id, now);
        }
        !over.is_empty()
    }
}

/// What an `AgentStatus` says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub active_jobs: u32,
    pub draining: bool,
    pub resetting: bool,
    pub degraded: Vec<String>,
}

fn said(detail: &str) -> String {
    if detail.is_empty() { "the agent says so".to_owned() } else { detail.chars().take(200).collect() }
}
