//! Agents on demand: asks the scaler for jobs that no connected agent takes, keeps what it said where people see it, and gives
//! the agents that it started their jobs.
//!
//! Without a scaler nothing here happens. A job keeps nothing of earlier tries: each pass asks anew, and the scaler starts at
//! most one agent at a time for a job.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kici_engine::ids::{AgentId, JobId, SessionId};
use kici_engine::scaling::{MAX_SCANNED, Pass, ScaleVerdict, Trigger};
use kici_engine::state::{FailureReason, QueueStatus};
use kici_protocol::close::CloseReason;
use kici_store::model::{FailRequest, JobRef, PendingSelector, QueueRow, RequeueFrom};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::dispatcher::{DispatchError, Dispatcher};
use crate::meters;
use crate::outcome::Undone;
use crate::ports::{Scaler, SpawnRequest};
use crate::pump::Passed;
use crate::registry::slots::Wanted;
use crate::timers::Timer;

/// New jobs that the scaler has not been asked for yet; the sweep finds what goes beyond.
const MAX_ASKS: usize = 10_000;
/// Milliseconds after each try to hand out a job while another transaction has its row: the time of a write, up to a slow one.
const LOCKED_PAUSES: [u64; 8] = [5, 20, 50, 100, 200, 400, 800, 1600];
/// Room that comes free in bits is looked at once.
const ROOM_SETTLES: Duration = Duration::from_millis(250);

/// What became of a job that was to be given out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DispatchOutcome {
    /// It was handed to an agent.
    Dispatched {
        /// The agent.
        agent_id: AgentId,
        /// The job.
        job_id: JobId,
    },
    /// It waits for an agent that is busy, or being started.
    Queued {
        /// The job.
        job_id: JobId,
    },
    /// It waits, and neither an agent nor a pool is known that could run it.
    QueuedNoBackend {
        /// The job.
        job_id: JobId,
    },
    /// It was given out before; nothing was sent.
    Duplicate {
        /// The job.
        job_id: JobId,
    },
    /// It does not wait: it has ended.
    Rejected {
        /// Why.
        reason: String,
    },
}

impl DispatchOutcome {
    /// Its word, also the label of the metric.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Dispatched { .. } => "dispatched",
            Self::Queued { .. } => "queued",
            Self::QueuedNoBackend { .. } => "queued_no_backend",
            Self::Duplicate { .. } => "duplicate",
            Self::Rejected { .. } => "rejected",
        }
    }
}

/// Whether an agent got the job that it was started for.
enum Bound {
    Claimed,
    /// It does not wait any more, or not for this agent.
    Gone,
    /// It waits, and another transaction has its row.
    Locked,
}

/// Whether a pass runs, and whether somebody called for one meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flight {
    #[default]
    Idle,
    Running,
    Called,
}

/// What is remembered between passes; all of it can be lost.
#[derive(Debug, Default)]
pub(crate) struct Scaling {
    flight: Mutex<Flight>,
    asks: Mutex<VecDeque<JobId>>,
    /// New jobs wait and the pump has seen them.
    pub demand: Notify,
    /// The scaler's last word on a job that waits.
    notes: Mutex<HashMap<JobId, String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The one pass that runs; ends its flight however it ends.
struct Turn<'a> {
    scaling: &'a Scaling,
    over: bool,
}

impl Turn<'_> {
    /// True when somebody called during the pass: there is to be one more. If not, the flight ends in the same step, so that no
    /// call falls between the last look and the end.
    fn again(&mut self) -> bool {
        let mut flight = lock(&self.scaling.flight);
        self.over = *flight != Flight::Called;
        *flight = if self.over { Flight::Idle } else { Flight::Running };
        !self.over
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.over {
            *lock(&self.scaling.flight) = Flight::Idle;
        }
    }
}

impl Scaling {
    /// None: a pass runs, and will be followed by another one.
    fn enter(&self) -> Option<Turn<'_>> {
        let mut flight = lock(&self.flight);
        if *flight != Flight::Idle {
            *flight = Flight::Called;
            return None;
        }
        *flight = Flight::Running;
        Some(Turn { scaling: self, over: false })
    }

    /// The scaler is to be asked for these jobs once the connected agents had their turn.
    fn ask(&self, jobs: &[JobId]) {
        let mut asks = lock(&self.asks);
        let room = MAX_ASKS.saturating_sub(asks.len());
        asks.extend(jobs.iter().take(room));
    }

    /// Jobs that the scaler could not be asked for go before those that came meanwhile.
    fn ask_again(&self, mut jobs: VecDeque<JobId>) {
        let mut asks = lock(&self.asks);
        jobs.append(&mut asks);
        jobs.truncate(MAX_ASKS);
        *asks = jobs;
    }

    /// The pump has given out what it could.
    pub fn served(&self) {
        if !lock(&self.asks).is_empty() {
            self.demand.notify_one();
        }
    }

    /// What the scaler last said of a waiting job.
    pub fn note(&self, job: JobId) -> Option<String> {
        lock(&self.notes).get(&job).cloned()
    }

    fn set_note(&self, job: JobId, note: Option<String>) {
        let mut notes = lock(&self.notes);
        match note {
            Some(note) => drop(notes.insert(job, note)),
            None => drop(notes.remove(&job)),
        }
    }

    /// The jobs with notes.
    pub fn noted(&self) -> HashSet<JobId> {
        lock(&self.notes).keys().copied().collect()
    }

    /// Forgets those of `noted` that do not wait any more. What was noted since is of jobs that whoever looked has not seen.
    pub fn keep_notes(&self, noted: &HashSet<JobId>, waiting: &HashSet<JobId>) {
        lock(&self.notes).retain(|job, _| waiting.contains(job) || !noted.contains(job));
    }
}

impl Dispatcher {
    /// New jobs wait for an agent: they are offered to the connected ones, then to the scaler. Never blocks.
    pub fn jobs_queued(&self, jobs: &[JobId]) {
        if self.scaler.is_some() {
            self.scaling.ask(jobs);
        }
        self.wake();
    }

    /// Gives out one job that is in the queue, after those that wait before it.
    ///
    /// # Errors
    /// [`DispatchError::NoSuchJob`] when there is no such job, or the database's.
    pub async fn dispatch(self: &Arc<Self>, job_id: JobId) -> Result<DispatchOutcome, DispatchError> {
        let outcome = self.give_out(job_id).await?;
        // Those that are handed over are counted where that happens.
        if !matches!(outcome, DispatchOutcome::Dispatched { .. }) {
            meters::outcome(outcome.as_str());
        }
        Ok(outcome)
    }

    async fn give_out(self: &Arc<Self>, job_id: JobId) -> Result<DispatchOutcome, DispatchError> {
        let given = |row: &QueueRow| match (row.status, &row.agent_id) {
            (QueueStatus::Dispatched | QueueStatus::Recovering, Some(agent_id)) => Some(agent_id.clone()),
            _ => None,
        };
        match self.store.queue_get(job_id).await? {
            Some(row) if row.status == QueueStatus::Pending => {}
            Some(row) if given(&row).is_some() => return Ok(DispatchOutcome::Duplicate { job_id }),
            _ => return self.rejected(job_id).await,
        }
        let mut pauses = LOCKED_PAUSES.iter().take(5);
        while self.pass().await? == Passed::Missed
            && let Some(pause) = pauses.next()
        {
            tokio::time::sleep(Duration::from_millis(*pause)).await;
        }
        let row = self.store.queue_get(job_id).await?.ok_or(DispatchError::NoSuchJob)?;
        if row.status == QueueStatus::Pending {
            let mut pass = Pass::default();
            return Ok(self.ask_for(&row, &mut pass).await?.0);
        }
        match given(&row) {
            Some(agent_id) => Ok(DispatchOutcome::Dispatched { agent_id, job_id }),
            None => self.rejected(job_id).await,
        }
    }

    async fn rejected(&self, job: JobId) -> Result<DispatchOutcome, DispatchError> {
        let job = self.store.job_get(job).await?.ok_or(DispatchError::NoSuchJob)?;
        if !job.status.is_terminal() {
            return Err(DispatchError::NoSuchJob);
        }
        let reason = job.failure_message.unwrap_or_else(|| format!("it has ended as {}", job.status));
        Ok(DispatchOutcome::Rejected { reason })
    }

    /// Asks the scaler for new jobs as soon as the pump left them waiting.
    pub(crate) async fn watch_demand(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.stopping.cancelled() => return,
                () = self.scaling.demand.notified() => {}
            }
            if let Err(error) = self.ask_for_new().await {
                tracing::warn!(%error, "the scaler could not be asked for new jobs; the next sweep does");
            }
        }
    }

    /// What cannot be asked for now is asked for after a later pass of the pump.
    async fn ask_for_new(self: &Arc<Self>) -> Result<(), DispatchError> {
        if self.not_claiming().is_some() {
            return Ok(());
        }
        let mut asked = std::mem::take(&mut *lock(&self.scaling.asks));
        if asked.is_empty() {
            return Ok(());
        }
        while !asked.is_empty() {
            let some: Vec<JobId> = asked.iter().take(MAX_SCANNED as usize).copied().collect();
            let count = some.len();
            if let Err(error) = self.ask_for_these(some).await {
                self.scaling.ask_again(asked);
                return Err(error);
            }
            asked.drain(..count);
        }
        self.routing.notify_one();
        Ok(())
    }

    async fn ask_for_these(self: &Arc<Self>, jobs: Vec<JobId>) -> Result<(), DispatchError> {
        for row in self.store.queue_pending_of(jobs).await? {
            // Each new job is asked for once: the share of a pass is for those that were turned down before.
            let mut pass = Pass::default();
            let (outcome, _) = self.ask_for(&row, &mut pass).await?;
            meters::outcome(outcome.as_str());
        }
        Ok(())
    }

    /// Room came free for agents on demand: jobs that wait are offered again, a moment later. For the scaler.
    pub fn capacity_freed(&self) {
        if self.scaler.is_some() {
            self.deadlines.set(Timer::Room, Instant::now() + ROOM_SETTLES);
        }
    }

    /// Offers waiting jobs to the scaler again, oldest first, 500 at most; it starts at most ten agents. One pass at a time: a
    /// call during one returns 0 and leads to one more. Returns how many agents are being started.
    ///
    /// # Errors
    /// The database's. What single jobs are answered is no error.
    pub async fn redrive(self: &Arc<Self>, trigger: Trigger) -> Result<u64, DispatchError> {
        let Some(mut turn) = self.scaling.enter() else { return Ok(0) };
        let mut started = 0;
        loop {
            let offered = self.offer_waiting().await;
            if let Ok(count) = offered {
                meters::redispatched(trigger.as_str(), count);
                started += u64::from(count);
            }
            // Whoever called during a pass that failed was promised another one.
            match (turn.again(), offered) {
                (true, Err(error)) => tracing::warn!(%error, "waiting jobs could not be offered to the scaler"),
                (true, Ok(_)) => {}
                (false, offered) => return offered.map(|_| started),
            }
        }
    }

    async fn offer_waiting(self: &Arc<Self>) -> Result<u32, DispatchError> {
        if self.scaler.is_none() || self.not_claiming().is_some() {
            return Ok(0);
        }
        let mut pass = Pass::default();
        for row in self.store.queue_oldest_pending(MAX_SCANNED).await? {
            if pass.is_over() {
                break;
            }
            if pass.asks(&row.selector_digest) {
                self.ask_for(&row, &mut pass).await?;
            }
        }
        self.routing.notify_one();
        Ok(pass.spawned())
    }

    /// Asks for one job that waits, unless an agent here is about to take it, and notes the answer.
    async fn ask_for(
        self: &Arc<Self>,
        row: &QueueRow,
        pass: &mut Pass,
    ) -> Result<(DispatchOutcome, Option<ScaleVerdict>), DispatchError> {
        let job_id = row.job_id;
        let wanted = self.wanted(vec![PendingSelector {
            digest: row.selector_digest.clone(),
            selector: row.selector.clone(),
            requires_machine_id: row.requires_machine_id.clone(),
            pinned_agent_id: row.pinned_agent_id.clone(),
            waiting: 1,
        }]);
        let known = wanted.first().is_some_and(|wanted| self.registry.routable(wanted));
        let draining = self.not_claiming().is_some();
        let verdict = match &self.scaler {
            // A host that was named is waited for; no other agent would do. A free agent takes it at the next pass.
            Some(scaler) if row.pinned_agent_id.is_none() && !draining && !self.is_placeable(&wanted) => {
                self.verdict(scaler, row, pass).await
            }
            _ => None,
        };
        if let Some(verdict) = &verdict {
            self.note_verdict(row, verdict, known).await?;
        }
        let pool = !matches!(verdict, None | Some(ScaleVerdict::NoBackend { .. }));
        if known || pool || draining || row.pinned_agent_id.is_some() {
            return Ok((DispatchOutcome::Queued { job_id }, verdict));
        }
        let agents: Vec<String> =
            self.registry.views().iter().take(20).map(|agent| agent.agent_id.to_string()).collect();
        tracing::warn!(job = %job_id, asks = ?row.selector.labels, connected = agents.join(", "), "no agent and no pool could run a job; it waits");
        Ok((DispatchOutcome::QueuedNoBackend { job_id }, verdict))
    }

    fn is_placeable(&self, wanted: &[Wanted]) -> bool {
        wanted.iter().any(|wanted| self.registry.has_free(wanted))
    }

    async fn verdict(&self, scaler: &Arc<dyn Scaler>, row: &QueueRow, pass: &mut Pass) -> Option<ScaleVerdict> {
        if !pass.asks(&row.selector_digest) {
            return None;
        }
        let request = SpawnRequest {
            job_id: row.job_id,
            run_id: row.run_id,
            job_name: row.job_name.clone(),
            selector: row.selector.clone(),
            requires_machine_id: row.requires_machine_id.clone(),
        };
        let verdict = scaler.request(request).await;
        tracing::debug!(job = %row.job_id, verdict = verdict.as_str(), "the scaler was asked for an agent");
        pass.note(&row.selector_digest, &verdict);
        Some(verdict)
    }

    /// Keeps a verdict: a failure with the row, its words for whoever looks at the job. A job that no pool is large enough for
    /// fails, unless an agent that is known could run it.
    async fn note_verdict(
        self: &Arc<Self>,
        row: &QueueRow,
        verdict: &ScaleVerdict,
        known: bool,
    ) -> Result<(), DispatchError> {
        let reason = verdict.reason();
        if let (ScaleVerdict::Unsatisfiable { .. }, false, Some(message)) = (verdict, known, &reason)
            && !self.is_awaited(row).await?
        {
            let (only_from, queue_status) = (vec![QueueStatus::Pending], QueueStatus::Failed);
            let (job, reason, message) = (row.job_ref(), FailureReason::Unroutable, message.clone());
            self.fail(FailRequest { job, only_from, queue_status, reason, message, retry: false }).await;
            return Ok(());
        }
        if let ScaleVerdict::Failed { error } = verdict {
            self.store.queue_provisioning_set(vec![(row.job_id, Some(error.clone()))]).await?;
        }
        self.scaling.set_note(row.job_id, reason);
        Ok(())
    }

    /// An agent could not be started after all, or ended before it registered. For the scaler.
    ///
    /// # Errors
    /// The database's.
    pub async fn provisioning_failed(self: &Arc<Self>, job: JobId, error: &str) -> Result<(), DispatchError> {
        self.store.queue_provisioning_set(vec![(job, Some(error.to_owned()))]).await?;
        self.scaling.set_note(job, ScaleVerdict::Failed { error: error.to_owned() }.reason());
        self.routing.notify_one();
        self.capacity_freed();
        Ok(())
    }

    /// A job needs no agent on demand any more.
    pub(crate) fn settled(&self, job: JobId, ended: Option<FailureReason>) {
        if ended == Some(FailureReason::QueueFull) {
            meters::outcome("rejected");
        }
        if let Some(scaler) = &self.scaler {
            self.scaling.set_note(job, None);
            scaler.settled(job, None);
        }
    }

    /// A job was handed to an agent.
    pub(crate) fn taken(&self, job: JobId, agent: &AgentId) {
        if let Some(scaler) = &self.scaler {
            self.scaling.set_note(job, None);
            scaler.settled(job, Some(agent));
        }
    }

    /// Gives an agent the job that it was started for: its slot is set aside since it registered. If the job is gone, the agent
    /// takes what waits.
    pub(crate) async fn give_bound(self: &Arc<Self>, session: SessionId, agent: &AgentId, job: JobId) {
        match self.claim_bound(session, agent, job).await {
            Ok(true) => return,
            Ok(false) => tracing::info!(%agent, %job, "the job that an agent was started for is gone"),
            Err(error) => {
                tracing::warn!(%agent, %job, %error, "an agent could not be given the job it was started for")
            }
        }
        self.registry.release(session, 1);
        self.wake();
    }

    async fn claim_bound(
        self: &Arc<Self>,
        session: SessionId,
        agent: &AgentId,
        job: JobId,
    ) -> Result<bool, DispatchError> {
        for pause in LOCKED_PAUSES {
            match self.try_bound(session, agent, job).await? {
                Bound::Claimed => return Ok(true),
                Bound::Gone => return Ok(false),
                Bound::Locked => tokio::time::sleep(Duration::from_millis(pause)).await,
            }
        }
        Ok(false)
    }

    async fn try_bound(
        self: &Arc<Self>,
        session: SessionId,
        agent: &AgentId,
        job: JobId,
    ) -> Result<Bound, DispatchError> {
        let Some(row) = self.store.queue_get(job).await?.filter(|row| row.status == QueueStatus::Pending) else {
            return Ok(Bound::Gone);
        };
        let wanted = self.wanted(vec![PendingSelector {
            digest: row.selector_digest.clone(),
            selector: row.selector.clone(),
            requires_machine_id: row.requires_machine_id.clone(),
            pinned_agent_id: row.pinned_agent_id.clone(),
            waiting: 1,
        }]);
        let fits = wanted.first().is_some_and(|wanted| self.registry.fits(session, wanted));
        if !fits || self.not_claiming().is_some() {
            return Ok(Bound::Gone);
        }
        let Some(claimed) = self.store.queue_claim_by_id(job, agent.clone()).await? else { return Ok(Bound::Locked) };
        meters::dispatched(1);
        self.hand_over(session, claimed);
        Ok(Bound::Claimed)
    }

    /// The backend of an agent that the scaler started says that it is gone: it does not come back to what it holds. For the
    /// scaler.
    ///
    /// # Errors
    /// The database's.
    pub async fn agent_gone(self: &Arc<Self>, agent: &AgentId, why: &str) -> Result<(), DispatchError> {
        if let Some(live) = self.registry.agent(agent) {
            if let Some(link) = self.registry.link(live.session_id) {
                link.close(CloseReason::GoingAway, "the scaler says that this agent is gone");
            }
            self.session_over(live.session_id, None).await;
        }
        for row in self.store.queue_owned_by(agent.clone()).await? {
            self.gone_with(agent, row.job_ref(), row.started_at.is_some(), why).await?;
        }
        Ok(())
    }

    async fn gone_with(
        self: &Arc<Self>,
        agent: &AgentId,
        job: JobRef,
        started: bool,
        why: &str,
    ) -> Result<(), DispatchError> {
        self.deadlines.cancel(&Timer::Recovery(job));
        let run = self.store.run_get(job.run_id).await?;
        if run.is_some_and(|run| run.cancel_requested_at.is_some()) {
            self.finish_cancelled(job).await;
        } else if started {
            let message = format!("agent {agent} was lost while the job ran: {why}");
            let only_from = vec![QueueStatus::Dispatched, QueueStatus::Recovering];
            let (queue_status, reason) = (QueueStatus::Failed, FailureReason::AgentLost);
            // Its process is gone for certain: where the job's retry allows it, it may run elsewhere.
            self.fail(FailRequest { job, only_from, queue_status, reason, message, retry: true }).await;
        } else {
            let why = format!("agent {agent} was lost before the job started: {why}");
            self.requeue(Undone::new(job, RequeueFrom::NotStarted(agent.clone()), why, "agent_lost")).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_either_during_a_pass_or_begins_one() {
        let scaling = Scaling::default();
        let mut turn = scaling.enter().expect("nothing runs");
        assert!(scaling.enter().is_none());
        assert!(turn.again(), "somebody called");
        assert!(!turn.again(), "nobody did since");
        // The pass has had its last look; its caller has not returned yet.
        let mut next = scaling.enter().expect("this call would reach nobody");
        drop(turn);
        assert!(scaling.enter().is_none(), "the end of the first ends nobody else's");
        assert!(next.again());
        // A pass that is dropped midway does not keep others out.
        drop(next);
        assert!(scaling.enter().is_some());
    }

    #[test]
    fn what_was_noted_since_the_look_is_kept() {
        let scaling = Scaling::default();
        let [left, waits, new] = [1, 2, 3].map(|n| JobId::from_uuid(uuid::Uuid::from_u128(n)));
        scaling.set_note(left, Some("left".into()));
        scaling.set_note(waits, Some("waits".into()));
        let noted = scaling.noted();
        scaling.set_note(new, Some("new".into()));
        scaling.keep_notes(&noted, &[waits].into());
        assert_eq!([left, waits, new].map(|job| scaling.note(job).is_some()), [false, true, true]);
    }

    #[test]
    fn what_could_not_be_asked_for_goes_first_and_never_beyond_the_limit() {
        let scaling = Scaling::default();
        let job = |n| JobId::from_uuid(uuid::Uuid::from_u128(n));
        scaling.ask(&[job(0)]);
        scaling.ask_again((1..=MAX_ASKS as u128).map(job).collect());
        let asks = lock(&scaling.asks);
        assert_eq!((asks.len(), asks[0], asks.contains(&job(0))), (MAX_ASKS, job(1), false));
    }
}
