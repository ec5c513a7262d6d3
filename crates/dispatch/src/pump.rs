//! Gives waiting jobs to free agents: one pass at a time, woken by new jobs, freed slots and registrations, with a slow
//! repetition as the safety net.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kici_engine::ids::{AgentId, SessionId};
use kici_engine::labels::CompiledSelector;
use kici_engine::state::QueueStatus;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_store::model::{ClaimRequest, ClaimedJob, FailRequest, PendingSelector, RequeueFrom};
use tokio::time::Instant;

use crate::dispatcher::{DispatchError, Dispatcher};
use crate::link::Link;
use crate::meters;
use crate::offer::{OfferError, OfferMaker};
use crate::outcome::Undone;
use crate::registry::slots::{Reservation, Wanted};
use crate::timers::{ARM_AFTER, Timer};

/// Rows claimed in one statement.
const CLAIM_BATCH: u64 = 256;
/// Compiled selectors kept.
const MAX_SELECTORS: usize = 4096;

/// First pause after a pass that missed something.
const MISSED_PAUSE: Duration = Duration::from_millis(20);

/// What a pass came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// No waiting job has a free agent.
    Served,
    /// Rows wait, agents for them are free, and no row could be claimed: other transactions have them (claims pass over what is
    /// locked), or they waited too long and are about to end. The end of such a transaction wakes nobody.
    Missed,
}

/// How long to wait for a signal after a pass: a short while after one that missed something, longer each time that nothing but
/// the time led to it.
fn next_pause(last: Duration, woken: bool, missed: bool, longest: Duration) -> Duration {
    match (missed, woken) {
        (false, _) => longest,
        (true, true) => MISSED_PAUSE.min(longest),
        (true, false) if last >= longest => MISSED_PAUSE.min(longest),
        (true, false) => (last * 2).min(longest),
    }
}

impl Dispatcher {
    pub(crate) async fn pump(self: Arc<Self>) {
        let mut pause = self.config.redrive_interval;
        loop {
            let woken = tokio::select! {
                () = self.stopping.cancelled() => return,
                () = self.work.notified() => true,
                () = tokio::time::sleep(pause) => false,
            };
            let made = self.calls.made();
            let passed = self.pass().await;
            pause = next_pause(pause, woken, matches!(passed, Ok(Passed::Missed)), self.config.redrive_interval);
            match passed {
                Ok(passed) => {
                    if passed == Passed::Served {
                        self.calls.served(made);
                    }
                    self.scaling.served();
                }
                // The next signal or the safety net tries again.
                Err(error) => tracing::warn!(%error, "waiting jobs could not be given out"),
            }
        }
    }

    /// Claims until no waiting job has a free agent.
    pub(crate) async fn pass(self: &Arc<Self>) -> Result<Passed, DispatchError> {
        // Agents that refused what waits for them: others are asked instead.
        let mut passed_over = HashSet::new();
        loop {
            if self.not_claiming().is_some() {
                return Ok(Passed::Served);
            }
            let pending = self.store.queue_selectors_pending().await?;
            if pending.is_empty() {
                return Ok(Passed::Served);
            }
            let wanted = self.wanted(pending);
            let reservations = self.registry.reserve(&wanted, CLAIM_BATCH, &passed_over);
            if wanted.iter().any(|want| !self.registry.routable(want)) {
                self.routing.notify_one();
            }
            if reservations.is_empty() {
                return Ok(Passed::Served);
            }
            let refusers: Vec<AgentId> =
                reservations.iter().filter(|r| !r.except.is_empty()).map(|r| r.agent_id.clone()).collect();
            let all_refused = refusers.len() == reservations.len();
            let count = self.claim(reservations).await?;
            if count == 0 {
                let known = passed_over.len();
                passed_over.extend(refusers);
                if passed_over.len() == known {
                    return Ok(if all_refused { Passed::Served } else { Passed::Missed });
                }
            }
        }
    }

    pub(crate) fn wanted(&self, pending: Vec<PendingSelector>) -> Vec<Wanted> {
        let wanted = pending.into_iter().filter_map(|pending| {
            let selector = self.compiled(&pending)?;
            Some(Wanted {
                digest: pending.digest,
                selector,
                requires_machine_id: pending.requires_machine_id,
                pinned: pending.pinned_agent_id,
                pick: pending.selector.pick,
                waiting: pending.waiting,
            })
        });
        wanted.collect()
    }

    /// The selector, compiled once. None: it cannot be compiled and nobody ever takes its rows; the routing watch fails
    /// them.
    fn compiled(&self, pending: &PendingSelector) -> Option<Arc<CompiledSelector>> {
        let mut selectors = self.selectors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = selectors.get(&pending.digest) {
            return found.clone();
        }
        if selectors.len() >= MAX_SELECTORS {
            selectors.clear();
        }
        let compiled = match CompiledSelector::compile(&pending.selector) {
            Ok(compiled) => Some(Arc::new(compiled)),
            Err(error) => {
                tracing::warn!(digest = pending.digest, %error, "a stored selector cannot be used");
                None
            }
        };
        selectors.insert(pending.digest.clone(), compiled.clone());
        compiled
    }

    async fn claim(self: &Arc<Self>, reservations: Vec<Reservation>) -> Result<usize, DispatchError> {
        let requests = reservations
            .iter()
            .map(|reserved| ClaimRequest {
                agent_id: reserved.agent_id.clone(),
                digests: reserved.digests.clone(),
                limit: reserved.slots,
                except: reserved.except.clone(),
            })
            .collect();
        let mut slots: HashMap<AgentId, (SessionId, u32)> =
            reservations.into_iter().map(|r| (r.agent_id, (r.session_id, r.slots))).collect();
        let claimed = self.store.queue_claim(requests).await;
        let count = claimed.as_ref().map_or(0, Vec::len);
        for job in claimed.as_ref().map_or(&[][..], Vec::as_slice) {
            match slots.get_mut(&job.agent_id) {
                Some((session, left)) => {
                    *left = left.saturating_sub(1);
                    self.hand_over(*session, job.clone());
                }
                None => tracing::error!(agent = %job.agent_id, "a claim was answered for an agent that did not ask"),
            }
        }
        for (session, left) in slots.into_values() {
            self.registry.release(session, left);
        }
        meters::dispatched(count);
        Ok(claimed.map(|jobs| jobs.len())?)
    }

    /// Turns a claim into an offer, apart from the pump: a slow forge must not keep other jobs waiting.
    pub(crate) fn hand_over(self: &Arc<Self>, session: SessionId, claimed: ClaimedJob) {
        self.taken(claimed.job_ref.job_id, &claimed.agent_id);
        let link = self.registry.fill(session, claimed.job_ref, self.clock.now());
        let this = self.clone();
        self.tasks.spawn(async move {
            match link {
                Some(link) => this.offer(&link, claimed).await,
                None => this.undo(&claimed, "the agent went away", "agent_lost").await,
            }
        });
    }

    async fn offer(self: &Arc<Self>, link: &Link, claimed: ClaimedJob) {
        let job = claimed.job_ref;
        if let Some(ready_at) = claimed.job.ready_at {
            meters::queue_wait(self.clock.now().since(ready_at));
        }
        let maker = OfferMaker {
            config: &self.config,
            store: &self.store,
            locks: &self.locks,
            clones: self.clones.as_ref(),
            now: self.clock.now(),
        };
        let offer = match maker.make(&claimed).await {
            Ok(offer) => offer,
            Err(OfferError::Undo(why)) => {
                self.registry.untrack_of(&claimed.agent_id, job, false);
                return self.undo(&claimed, &format!("dispatch preparation failed: {why}"), "preparation").await;
            }
            Err(OfferError::Fail(reason, message)) => {
                let request = FailRequest {
                    job,
                    only_from: Vec::new(),
                    queue_status: QueueStatus::Failed,
                    reason,
                    message,
                    retry: false,
                };
                return self.fail(request).await;
            }
        };
        let now = Instant::now();
        let cancelled = self.registry.with_job(link.session_id(), job, |tracked| {
            tracked.offered_at = Some(now);
            tracked.grace = Duration::from_millis(offer.grace_period_ms);
            tracked.cancelling
        });
        match cancelled {
            // The session is over; its triage has the job.
            None => return,
            Some(true) => {
                self.finish_cancelled(job).await;
                if self.let_go(job) {
                    self.wake();
                }
                return;
            }
            Some(false) => {}
        }
        // Armed before the frame can be answered, counted from when the stream took it: an answer always finds the timer.
        self.deadlines.set(Timer::Ack(job), now + self.config.ack_timeout);
        self.deadlines.set(Timer::ArmAck(job), now + ARM_AFTER);
        if link.send(Frame::JobOffer(offer)).await.is_err() {
            self.forget_timers(job);
        }
    }

    /// A claim that no agent will ever see.
    async fn undo(self: &Arc<Self>, claimed: &ClaimedJob, why: &str, meter: &'static str) {
        let from = RequeueFrom::NotStarted(claimed.agent_id.clone());
        self.requeue(Undone::new(claimed.job_ref, from, why, meter)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_missed_is_looked_at_again_soon_and_then_less_and_less_often() {
        let (long, first) = (Duration::from_secs(10), MISSED_PAUSE);
        assert_eq!(next_pause(long, true, true, long), first);
        assert_eq!(next_pause(first, false, true, long), first * 2);
        assert_eq!(next_pause(first * 2, true, true, long), first, "a signal begins anew");
        assert_eq!(next_pause(first * 2, false, false, long), long);
        let mut pause = first;
        for _ in 0..9 {
            pause = next_pause(pause, false, true, long);
        }
        assert_eq!(pause, long);
        assert_eq!(next_pause(first, true, true, Duration::from_millis(5)), Duration::from_millis(5));
    }
}
