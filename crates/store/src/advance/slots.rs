//! Turns: what a run knows of its slots in concurrency groups, and what its jobs do without one.

use std::collections::BTreeMap;

use kici_engine::concurrency::SlotAsk;
use kici_engine::ids::JobId;
use kici_engine::state::{FailureReason, InvalidTransition, JobEvent, JobStatus};
use kici_engine::time::Ts;
use uuid::Uuid;

use super::RunState;

/// How a holder stands in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It waits.
    Queued,
    /// It has a slot.
    Active,
}

/// The slots of a run and its jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotBook {
    /// Of the run as a whole.
    pub(crate) run: Option<Turn>,
    /// Of single jobs.
    pub(crate) jobs: BTreeMap<JobId, Turn>,
    /// What jobs ask for and is not written yet.
    pub(crate) wanted: BTreeMap<JobId, SlotAsk>,
    /// Holders of which there is news, and whether it is that a newer run wants this one to end.
    pub(crate) news: Vec<(Uuid, bool)>,
}

impl SlotBook {
    /// Whether a job has asked for a slot.
    pub(crate) fn concerns(&self, job: JobId) -> bool {
        self.jobs.contains_key(&job) || self.wanted.contains_key(&job)
    }
}

impl RunState {
    /// Whether a job that is `waiting` need not wait for a slot any more. Others who wait are not ours to judge.
    pub(super) fn turn_has_come(&self, at: usize) -> bool {
        let job = &self.jobs[at];
        let ours = self.run.concurrency.is_some() || job.group_name.is_some();
        ours && self.slots.run != Some(Turn::Queued) && self.slots.jobs.get(&job.id) != Some(&Turn::Queued)
    }

    /// The event that takes a job that is ready to the queue.
    pub(super) fn event_of_ready(&self, at: usize) -> JobEvent {
        if self.jobs[at].status == JobStatus::Waiting { JobEvent::TimerDone } else { JobEvent::Enqueue }
    }

    /// Whether a job that is ready may go to the queue now; else it waits, or what it asks for is noted.
    pub(super) fn admit(&mut self, at: usize, ask: Option<&SlotAsk>, now: Ts) -> Result<bool, InvalidTransition> {
        if self.slots.run == Some(Turn::Queued) {
            self.wait(at, now)?;
            return Ok(false);
        }
        // The run's own slot covers its jobs of the same group.
        let covered = |ask: &&SlotAsk| self.run.concurrency.as_ref().is_some_and(|run| run.group == ask.group);
        let Some(ask) = ask.filter(|ask| !covered(ask)) else { return Ok(true) };
        let id = self.jobs[at].id;
        match self.slots.jobs.get(&id) {
            Some(Turn::Active) => Ok(true),
            Some(Turn::Queued) => {
                self.wait(at, now)?;
                Ok(false)
            }
            None => {
                self.jobs[at].group_name = Some(ask.group.clone());
                self.slots.wanted.insert(id, ask.clone());
                Ok(false)
            }
        }
    }

    fn wait(&mut self, at: usize, now: Ts) -> Result<(), InvalidTransition> {
        match self.jobs[at].status {
            JobStatus::Pending => self.apply(at, JobEvent::Wait, None, None, now),
            _ => Ok(()),
        }
    }

    /// Nobody gave up a slot in time: the job fails, or all that waits of the run, whose rest is then cancelled.
    pub(crate) fn give_up_waiting(
        &mut self,
        job: Option<JobId>,
        message: &str,
        now: Ts,
    ) -> Result<(), InvalidTransition> {
        let reason = FailureReason::ConcurrencyWait;
        if job.is_none() {
            self.run.cancel_requested_at.get_or_insert(now);
            self.run.failure_reason.get_or_insert(reason);
            self.run.failure_message.get_or_insert_with(|| message.to_owned());
        }
        for at in 0..self.jobs.len() {
            if self.jobs[at].status == JobStatus::Waiting && job.is_none_or(|id| id == self.jobs[at].id) {
                self.apply(at, JobEvent::TimerDone, None, None, now)?;
                self.apply(at, JobEvent::Fail, Some(reason), Some(message.to_owned()), now)?;
            }
        }
        Ok(())
    }
}
