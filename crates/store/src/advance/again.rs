//! Trying a job again that failed: back to the queue before anything terminal is written.

use std::sync::Arc;

use kici_engine::state::{FailureReason, InvalidTransition, JobEvent, JobStatus};
use kici_engine::time::Ts;

use super::RunState;
use crate::model::{Activate, Again, JobRef, ReadyJob};

/// A delivery that failed and whose job is tried again.
#[derive(Clone, Debug)]
pub(crate) struct Retried {
    /// The delivery.
    pub(crate) job: JobRef,
    /// Why it failed, for the history of deliveries.
    pub(crate) why: String,
    /// When the next wait for an agent is over.
    pub(crate) expires_at: Option<Ts>,
}

impl RunState {
    /// Whether it is worth asking what the workflow says about trying this job again.
    pub(crate) fn may_try_again(&self, at: usize) -> bool {
        let under_way = matches!(self.jobs[at].status, JobStatus::Queued | JobStatus::Running | JobStatus::Recovering);
        let job = &self.jobs[at];
        // Its variants are being skipped: another attempt would be too.
        let over = job.fail_fast && self.variants(&job.base_name).any(|other| other.status.is_failure());
        under_way && !over && self.run.cancel_requested_at.is_none() && self.open.contains_key(&job.id)
    }

    /// What the workflow says about trying a job again after a failure for this reason; none when not, or not any more.
    pub(crate) fn judge_failure(
        &self,
        at: usize,
        reason: FailureReason,
        activate: &dyn Activate,
        lock: &Arc<Vec<u8>>,
    ) -> Option<Again> {
        let job = self.jobs[at].clone();
        let attempt = job.attempt;
        let failed =
            ReadyJob { run: self.run.clone(), job, lock_json: Arc::clone(lock), needs: Default::default(), host: None };
        let again = activate.again(&failed)?;
        (again.policy.on.contains(&reason.class()) && attempt <= again.policy.attempts).then_some(again)
    }

    /// Sends a job back to the queue as a new attempt.
    pub(crate) fn try_again(
        &mut self,
        at: usize,
        why: String,
        expires_at: Option<Ts>,
        now: Ts,
    ) -> Result<(), InvalidTransition> {
        // A job that failed before its start was granted never left the queue.
        if self.jobs[at].status != JobStatus::Queued {
            self.apply(at, JobEvent::Requeue, None, None, now)?;
        }
        let job = &mut self.jobs[at];
        job.attempt += 1;
        job.ready_at = Some(now);
        job.started_at = None;
        job.agent_id = None;
        job.routing_reason = None;
        let delivery = JobRef { run_id: job.run_id, job_id: job.id, epoch: job.dispatch_epoch };
        self.again.insert(job.id, Retried { job: delivery, why, expires_at });
        Ok(())
    }
}
