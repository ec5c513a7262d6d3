//! Changes of a job that the dispatcher makes by itself: back to the queue, failed, cancelled, waiting for its agent. A
//! change that the database did not take is tried again later, never dropped.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::AgentId;
use kici_engine::state::{FailureReason, JobStatus};
use kici_store::StoreError;
use kici_store::model::{
    FailRequest, Guarded, JobFinished, JobRef, JobResult, RecoverRequest, RequeueFrom, RequeueRequest, Requeued,
};
use tokio::time::Instant;

use crate::dispatcher::Dispatcher;
use crate::meters;
use crate::ports::Change;
use crate::timers::Timer;
use crate::triage::LateTriage;

/// A delivery that is to be undone.
#[derive(Clone, Debug)]
pub(crate) struct Undone {
    pub job: JobRef,
    /// What it must be in.
    pub from: RequeueFrom,
    /// For people.
    pub why: String,
    /// The label of the metric.
    pub meter: &'static str,
    /// It counts against the budget of the job.
    pub counts: bool,
}

impl Undone {
    /// One that counts.
    pub fn new(job: JobRef, from: RequeueFrom, why: impl Into<String>, meter: &'static str) -> Self {
        Self { job, from, why: why.into(), meter, counts: true }
    }
}

impl Dispatcher {
    /// Puts a delivery back into the queue and looks for another agent. True when it took effect.
    pub(crate) async fn requeue(self: &Arc<Self>, undone: Undone) -> bool {
        let job = undone.job.job_id;
        let done = self.requeue_quietly(undone).await;
        if done {
            self.jobs_queued(&[job]);
        }
        done
    }

    /// Like [`requeue`](Self::requeue) without the look for another agent.
    pub(crate) async fn requeue_quietly(self: &Arc<Self>, undone: Undone) -> bool {
        let Undone { job, meter, counts, .. } = undone;
        self.forget_timers(job);
        let request = RequeueRequest {
            job,
            from: undone.from.clone(),
            reason: undone.why.clone(),
            budget: self.config.max_attempts,
            counts,
            expires_at: self.queue_expires_at(),
        };
        let why = &undone.why;
        match self.store.queue_requeue(request, self.activate()).await {
            Ok(Requeued::Requeued { attempts }) => {
                tracing::info!(job = %job.job_id, epoch = job.epoch, attempts, why, "a job went back into the queue");
                meters::requeued(meter);
                let status = JobStatus::Queued;
                self.changes.publish(Change::Job { run_id: job.run_id, job_id: job.job_id, status });
                true
            }
            Ok(Requeued::GaveUp(effects)) => {
                tracing::warn!(job = %job.job_id, why, "a job was handed out in vain too often and failed");
                self.apply_effects(&effects);
                true
            }
            Ok(Requeued::Lost) => false,
            Err(error) => {
                self.later(LateTriage::Requeue(undone), &error);
                false
            }
        }
    }

    /// Ends a job without a result of its agent.
    pub(crate) async fn fail(self: &Arc<Self>, request: FailRequest) {
        self.forget_timers(request.job);
        let job = request.job;
        tracing::info!(job = %job.job_id, epoch = job.epoch, reason = %request.reason, message = request.message, "a job failed without a result");
        match self.store.job_fail(request.clone(), self.activate()).await {
            Ok(finished) => self.finished(finished),
            Err(error) => self.later(LateTriage::Fail(request), &error),
        }
    }

    /// Ends a job of a cancelled run whose agent will not tell.
    pub(crate) async fn finish_cancelled(self: &Arc<Self>, job: JobRef) {
        self.forget_timers(job);
        let result = JobResult {
            job,
            agent_id: None,
            status: JobStatus::Cancelled,
            reason: Some(FailureReason::CancelledByUser),
            message: None,
            outputs: Default::default(),
            evidence: None,
            log_bytes: 0,
            at: None,
        };
        match self.store.job_finish(result, self.activate()).await {
            Ok(finished) => self.finished(finished),
            Err(error) => self.later(LateTriage::Cancel(job), &error),
        }
    }

    /// Ends a job that asked for the restart which took its agent away: that is what it was for.
    pub(crate) async fn finish_rebooted(self: &Arc<Self>, job: JobRef) {
        self.forget_timers(job);
        tracing::info!(job = %job.job_id, "the host restarts, as its job asked; the job succeeded");
        let result = JobResult {
            job,
            agent_id: None,
            status: JobStatus::Success,
            reason: None,
            message: None,
            outputs: Default::default(),
            evidence: Some(serde_json::json!({ "host_restarted": true })),
            log_bytes: 0,
            at: None,
        };
        match self.store.job_finish(result, self.activate()).await {
            Ok(finished) => self.finished(finished),
            Err(error) => self.later(LateTriage::Rebooted(job), &error),
        }
    }

    /// Gives the agent of a job time to come back.
    pub(crate) async fn recover(self: &Arc<Self>, job: JobRef, agent_id: AgentId, window: Duration) {
        self.forget_timers(job);
        let request = RecoverRequest { job, agent_id: agent_id.clone(), deadline: self.clock.now().plus(window) };
        match self.store.queue_recover(request).await {
            Ok(Guarded::Applied) => {
                self.deadlines.set(Timer::Recovery(job), Instant::now() + window);
                let status = JobStatus::Recovering;
                self.changes.publish(Change::Job { run_id: job.run_id, job_id: job.job_id, status });
            }
            Ok(Guarded::Lost) => {}
            Err(error) => self.later(LateTriage::Recover { job, agent_id, window }, &error),
        }
    }

    fn finished(self: &Arc<Self>, finished: JobFinished) {
        if let JobFinished::Applied(effects) = finished {
            self.apply_effects(&effects);
        }
    }

    fn later(&self, triage: LateTriage, error: &StoreError) {
        if matches!(error, StoreError::Fenced) {
            tracing::info!(?triage, "another instance leads now and makes this change of a job");
            return;
        }
        tracing::warn!(?triage, %error, "the database did not take a change of a job; it is tried again");
        self.late_triage.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(triage);
    }
}
