//! The agents that are connected here: their sessions, slots and the jobs they hold. Rebuilt from registrations after a
//! restart; the queue rows are the truth about who has a job.

pub(crate) mod slots;
mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kici_engine::ids::{AgentId, JobId, SessionId, TokenId};
use kici_engine::labels::{AgentFacts, CanonicalLabel};
use kici_engine::time::Ts;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_protocol::close::CloseReason;
use kici_store::model::{AgentType, JobRef};
use tokio::time::Instant;

use crate::decide::gates::Holder;
use crate::link::Link;

pub use view::{AgentView, HeldView};

/// How long frames for a job are still accepted after it ended: late log and step frames.
const GRACE: Duration = Duration::from_secs(30);
/// Jobs in their grace; the oldest go first.
const MAX_GRACE: usize = 10_000;
/// Ack time-outs in a row that mark an agent as draining.
const MAX_ACK_TIMEOUTS: u32 = 3;
/// Agents whose ack time-outs are remembered.
const MAX_REMEMBERED: usize = 10_000;

/// What does not change while a session lasts, except by another `Register` of it.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub agent_id: AgentId,
    pub session_id: SessionId,
    pub facts: Arc<AgentFacts>,
    pub token_id: Option<TokenId>,
    /// SHA-256 of the token that the session began with, in hex; none with authentication off.
    pub token_hash: Option<String>,
    pub lifecycle: AgentType,
    pub scaler_managed: bool,
    pub max_concurrency: u32,
    pub platform: String,
    pub arch: String,
    pub version: String,
    pub hostname: Option<String>,
    pub capabilities: Vec<String>,
    pub registered_at: Ts,
}

/// A job that an agent holds.
#[derive(Clone, Debug)]
pub(crate) struct Tracked {
    pub job: JobRef,
    pub offered_at: Option<Instant>,
    /// The database knows by when an answer is due.
    pub armed: bool,
    pub acked: bool,
    pub started: bool,
    pub cancelling: bool,
    /// The agent does not run it any more, but its result waits in the agent's outbox.
    pub awaiting_outbox: bool,
    pub last_heartbeat: Ts,
    /// The last heartbeat is not in the database yet.
    pub beat_unsaved: bool,
    /// From TERM to KILL.
    pub grace: Duration,
}

impl Tracked {
    pub fn new(job: JobRef, now: Ts) -> Self {
        Self {
            job,
            offered_at: None,
            armed: false,
            acked: false,
            started: false,
            cancelling: false,
            awaiting_outbox: false,
            last_heartbeat: now,
            beat_unsaved: false,
            grace: Duration::ZERO,
        }
    }
}

#[derive(Debug)]
struct Entry {
    identity: Identity,
    link: Link,
    jobs: BTreeMap<JobId, Tracked>,
    /// Slots of claims that are under way.
    reserved: u32,
    /// Why it takes no work until it says otherwise.
    draining: Option<String>,
    /// It said by itself that it takes no more work: it may leave at any time, in order.
    leaving: bool,
    resetting: bool,
    degraded: Vec<String>,
    /// Takes no work until then: it said "busy" although the count here says otherwise.
    paused_until: Option<Instant>,
    /// Its host is about to restart.
    reboot: Option<Reboot>,
    /// Jobs that it refused, until when they are not offered to it again.
    refused: BTreeMap<JobId, Instant>,
    reported_jobs: Option<u32>,
    last_frame: Instant,
    seen_unsaved: bool,
}

#[derive(Debug, Default)]
struct Inner {
    agents: BTreeMap<AgentId, Entry>,
    by_session: HashMap<SessionId, AgentId>,
    by_job: HashMap<JobId, AgentId>,
    by_label: HashMap<CanonicalLabel, BTreeSet<AgentId>>,
    /// Agents with a free slot, ready for work.
    free: BTreeSet<AgentId>,
    grace: HashMap<JobRef, (AgentId, Instant)>,
    grace_order: VecDeque<(Instant, JobRef)>,
    /// Survives the session: an agent that swallows offers is closed each time.
    ack_timeouts: HashMap<AgentId, u32>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
}

/// A session that a newer one replaced.
#[derive(Debug)]
pub(crate) struct Replaced {
    pub link: Link,
    /// Its jobs that did not move to the new session: claimed while the agent was registering.
    pub left: Vec<Tracked>,
}

/// A restart of an agent's host that is pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reboot {
    pub until: Instant,
    /// The job that asked for it.
    pub job: Option<JobId>,
}

/// What an agent that is gone left behind.
#[derive(Debug)]
pub(crate) struct Departed {
    pub identity: Identity,
    /// The job that asked for the restart of the host.
    pub reboot_job: Option<JobId>,
    /// It had said before that it takes no more work.
    pub leaving: bool,
    pub jobs: Vec<Tracked>,
}

impl Entry {
    /// Slots that are taken or set aside.
    fn busy(&self) -> u32 {
        u32::try_from(self.jobs.len()).unwrap_or(u32::MAX).saturating_add(self.reserved)
    }

    fn slots_free(&self) -> u32 {
        self.identity.max_concurrency.saturating_sub(self.busy())
    }

    /// Why it takes no job now; none when it does.
    fn unready(&self, now: Instant) -> Option<String> {
        if let Some(why) = &self.draining {
            return Some(format!("it drains: {why}"));
        }
        if self.reboot.is_some_and(|reboot| reboot.until > now) {
            return Some("its host is about to restart".to_owned());
        }
        if self.resetting {
            return Some("it cleans up after its last job".to_owned());
        }
        if !self.degraded.is_empty() {
            return Some(format!("it takes no work: {}", self.degraded.join("; ")));
        }
        if self.paused_until.is_some_and(|until| until > now) {
            return Some("it refused a job a moment ago".to_owned());
        }
        (self.slots_free() == 0).then(|| format!("all {} slots are taken", self.identity.max_concurrency))
    }
}

impl Inner {
    fn index(&mut self, id: &AgentId, facts: &AgentFacts) {
        for label in &facts.labels {
            self.by_label.entry(label.clone()).or_default().insert(id.clone());
        }
    }

    fn unindex(&mut self, id: &AgentId, facts: &AgentFacts) {
        for label in &facts.labels {
            if let Some(agents) = self.by_label.get_mut(label) {
                agents.remove(id);
                if agents.is_empty() {
                    self.by_label.remove(label);
                }
            }
        }
    }

    /// Brings the set of free agents up to date with one entry. True when the agent is free now and was not before.
    fn refresh(&mut self, id: &AgentId, now: Instant) -> bool {
        let free = self.agents.get(id).is_some_and(|entry| entry.unready(now).is_none());
        if !free {
            self.free.remove(id);
            return false;
        }
        self.free.insert(id.clone())
    }

    fn forget_jobs<'a>(&mut self, id: &AgentId, jobs: impl Iterator<Item = &'a JobId>) {
        for job in jobs {
            if self.by_job.get(job) == Some(id) {
                self.by_job.remove(job);
            }
        }
    }

    fn of_session(&mut self, session: SessionId) -> Option<&mut Entry> {
        let id = self.by_session.get(&session)?;
        self.agents.get_mut(id)
    }
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an agent in with the jobs that it goes on with, and queues `answer` for it in the same step: the agent is found by
    /// the time that it hears of it, and hears of it before anything else. A session that it had before is replaced in that step
    /// too, so that no moment exists in which two sessions count. `reserved` slots are set aside for jobs that are meant for it.
    #[allow(clippy::too_many_arguments, reason = "all of it must be in place in one step")]
    pub fn insert(
        &self,
        identity: Identity,
        link: Link,
        jobs: Vec<Tracked>,
        draining: bool,
        reboot: Option<Reboot>,
        reserved: u32,
        answer: Frame,
    ) -> Option<Replaced> {
        let now = Instant::now();
        let mut inner = self.lock();
        let id = identity.agent_id.clone();
        let old = inner.agents.remove(&id);
        if let Some(old) = &old {
            inner.unindex(&id, &old.identity.facts.clone());
            inner.by_session.remove(&old.identity.session_id);
            inner.forget_jobs(&id, old.jobs.keys());
        }
        inner.index(&id, &identity.facts);
        inner.by_session.insert(identity.session_id, id.clone());
        let leaving = draining;
        let too_silent = inner.ack_timeouts.get(&id).is_some_and(|n| *n >= MAX_ACK_TIMEOUTS);
        let draining = match (draining, too_silent) {
            (true, _) => Some("asked to by its operator".to_owned()),
            (_, true) => Some(format!("it left {MAX_ACK_TIMEOUTS} offers in a row unanswered")),
            _ => None,
        };
        let jobs: BTreeMap<JobId, Tracked> = jobs.into_iter().map(|job| (job.job.job_id, job)).collect();
        inner.by_job.extend(jobs.keys().map(|job| (*job, id.clone())));
        let replaced = old.map(|old| Replaced {
            link: old.link,
            left: old.jobs.into_values().filter(|job| !jobs.contains_key(&job.job.job_id)).collect(),
        });
        if link.try_send(answer).is_err() {
            link.close(CloseReason::GoingAway, "the answer to the registration could not be sent; come back");
        }
        inner.agents.insert(
            id.clone(),
            Entry {
                identity,
                link,
                jobs,
                reserved,
                draining,
                leaving,
                resetting: false,
                degraded: Vec::new(),
                paused_until: None,
                reboot,
                refused: BTreeMap::new(),
                reported_jobs: None,
                last_frame: now,
                seen_unsaved: true,
            },
        );
        inner.refresh(&id, now);
        replaced
    }

    /// Another `Register` of the same session. False when the session is not current any more.
    pub fn update(&self, session: SessionId, identity: Identity, draining: bool) -> bool {
        let mut inner = self.lock();
        let Some(entry) = inner.of_session(session) else { return false };
        let old = entry.identity.facts.clone();
        let new = identity.facts.clone();
        let id = identity.agent_id.clone();
        entry.identity = identity;
        entry.leaving = draining;
        if draining {
            entry.draining.get_or_insert_with(|| "asked to by its operator".to_owned());
        }
        inner.unindex(&id, &old);
        inner.index(&id, &new);
        inner.refresh(&id, Instant::now());
        true
    }

    /// Takes an agent out, if `session` is still its current one. Only the first caller gets the jobs.
    pub fn remove(&self, session: SessionId) -> Option<Departed> {
        let mut inner = self.lock();
        let id = inner.by_session.remove(&session)?;
        let entry = inner.agents.remove(&id)?;
        inner.unindex(&id, &entry.identity.facts);
        inner.forget_jobs(&id, entry.jobs.keys());
        inner.free.remove(&id);
        let reboot_job = entry.reboot.and_then(|reboot| reboot.job);
        let (leaving, jobs) = (entry.leaving, entry.jobs.into_values().collect());
        Some(Departed { identity: entry.identity, reboot_job, leaving, jobs })
    }

    /// The current identity of a session.
    pub fn identity(&self, session: SessionId) -> Option<Identity> {
        self.lock().of_session(session).map(|entry| entry.identity.clone())
    }

    /// The identity of a connected agent.
    pub fn agent(&self, id: &AgentId) -> Option<Identity> {
        self.lock().agents.get(id).map(|entry| entry.identity.clone())
    }

    /// The host of an agent is about to restart, or not any more. False when it is not connected here.
    pub fn set_reboot(&self, id: &AgentId, reboot: Option<Reboot>) -> bool {
        let mut inner = self.lock();
        let Some(entry) = inner.agents.get_mut(id) else { return false };
        entry.reboot = reboot;
        inner.refresh(id, Instant::now());
        true
    }

    /// The agents here whose hosts are about to restart.
    pub fn rebooting(&self) -> Vec<(AgentId, Reboot)> {
        self.lock().agents.iter().filter_map(|(id, entry)| Some((id.clone(), entry.reboot?))).collect()
    }

    /// True when a job of this session asked for the restart that is pending.
    pub fn asked_reboot(&self, session: SessionId, job: JobId) -> bool {
        let asked = |entry: &mut Entry| entry.reboot.is_some_and(|reboot| reboot.job == Some(job));
        self.lock().of_session(session).is_some_and(asked)
    }

    /// Who holds a job at this epoch here, how to reach it, and the job.
    pub fn holder(&self, job: JobRef) -> Option<(Identity, Link, Tracked)> {
        let inner = self.lock();
        let entry = inner.agents.get(inner.by_job.get(&job.job_id)?)?;
        let tracked = entry.jobs.get(&job.job_id).filter(|tracked| tracked.job == job)?;
        Some((entry.identity.clone(), entry.link.clone(), tracked.clone()))
    }

    /// How to reach a session, while it is current.
    pub fn link(&self, session: SessionId) -> Option<Link> {
        self.lock().of_session(session).map(|entry| entry.link.clone())
    }

    /// Notes a frame of a session.
    pub fn seen(&self, session: SessionId) {
        if let Some(entry) = self.lock().of_session(session) {
            entry.last_frame = Instant::now();
            entry.seen_unsaved = true;
        }
    }

    /// Sessions without a frame for `limit`.
    pub fn silent(&self, limit: Duration) -> Vec<Link> {
        let now = Instant::now();
        let inner = self.lock();
        let silent = inner.agents.values().filter(|entry| now.duration_since(entry.last_frame) >= limit);
        silent.map(|entry| entry.link.clone()).collect()
    }

    /// Sessions opened with this token.
    pub fn of_token(&self, token: TokenId) -> Vec<Link> {
        let inner = self.lock();
        let of_token = inner.agents.values().filter(|entry| entry.identity.token_id == Some(token));
        of_token.map(|entry| entry.link.clone()).collect()
    }

    /// The tokens in use, and whether each session holds jobs.
    pub fn tokens(&self) -> Vec<(TokenId, Link, bool)> {
        let inner = self.lock();
        let with_token = inner.agents.values().filter_map(|entry| Some((entry.identity.token_id?, entry)));
        with_token.map(|(token, entry)| (token, entry.link.clone(), !entry.jobs.is_empty())).collect()
    }

    /// Every session.
    pub fn links(&self) -> Vec<Link> {
        self.lock().agents.values().map(|entry| entry.link.clone()).collect()
    }

    /// Agents that gave a sign of life since the last call.
    pub fn take_seen(&self) -> Vec<AgentId> {
        let mut inner = self.lock();
        let seen = inner
            .agents
            .values_mut()
            .filter_map(|entry| std::mem::take(&mut entry.seen_unsaved).then(|| entry.identity.agent_id.clone()));
        seen.collect()
    }

    /// Job heartbeats since the last call.
    pub fn take_beats(&self) -> Vec<(JobRef, Ts)> {
        let mut inner = self.lock();
        let jobs = inner.agents.values_mut().flat_map(|entry| entry.jobs.values_mut());
        jobs.filter_map(|job| std::mem::take(&mut job.beat_unsaved).then_some((job.job, job.last_heartbeat))).collect()
    }

    /// An agent that holds this host name with another token than `token`.
    pub fn host_holder(&self, hostname: &str, me: &AgentId, token: Option<TokenId>) -> Option<Holder> {
        let inner = self.lock();
        let other = inner.agents.values().map(|entry| &entry.identity).find(|identity| {
            identity.agent_id != *me
                && identity.token_id != token
                && identity.hostname.as_deref().is_some_and(|host| host.eq_ignore_ascii_case(hostname))
        });
        other.map(|identity| Holder { agent_id: identity.agent_id.clone(), token_id: identity.token_id })
    }

    /// Facts of all agents that are not leaving, free or not.
    pub fn all_facts(&self) -> Vec<(AgentId, Arc<AgentFacts>)> {
        self.lock().agents.iter().map(|(id, entry)| (id.clone(), entry.identity.facts.clone())).collect()
    }

    /// The jobs that agents hold here; without those that only their outbox knows.
    pub fn held_jobs(&self) -> Vec<(AgentId, Tracked)> {
        let inner = self.lock();
        let jobs = inner.agents.iter().flat_map(|(id, entry)| entry.jobs.values().map(|job| (id.clone(), job.clone())));
        jobs.filter(|(_, job)| !job.awaiting_outbox).collect()
    }

    /// Number of connected agents, and of jobs they hold.
    pub fn counts(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.agents.len(), inner.agents.values().map(|entry| entry.jobs.len()).sum())
    }
}
