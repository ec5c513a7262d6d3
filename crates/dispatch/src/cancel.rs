//! Cancelling runs: one implementation for people, time limits and newer runs.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::{AgentId, RunId};
use kici_engine::state::{FailureReason, JobStatus};
use kici_protocol::agent::JobCancel;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_store::model::{CancelOutcome, CancelRequest, HeldJob, JobRef};
use tokio::time::Instant;

use crate::dispatcher::{DispatchError, Dispatcher};
use crate::offer::{millis, wire_ref};
use crate::ports::Change;
use crate::timers::Timer;

/// What a cancel reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CancelReport {
    /// Agents that were told.
    pub agents_notified: usize,
    /// Agents that are connected to another orchestrator; it tells them as soon as it hears of the cancel.
    pub unreachable: Vec<AgentId>,
    /// Jobs that ended at once because no agent had them.
    pub pending_cancelled: usize,
}

impl Dispatcher {
    /// Cancels a run. `force` ends its jobs at once: agents kill, no hooks run.
    ///
    /// # Errors
    /// [`DispatchError::NoSuchRun`], [`DispatchError::AlreadyTerminal`], or the database's.
    pub async fn cancel_run(
        self: &Arc<Self>,
        run_id: RunId,
        by: &str,
        reason: FailureReason,
        force: bool,
    ) -> Result<CancelReport, DispatchError> {
        let request = CancelRequest { run_id, by: by.to_owned(), reason, force };
        let mut effects = match self.store.run_cancel(request, self.activate()).await? {
            CancelOutcome::NotFound => return Err(DispatchError::NoSuchRun),
            CancelOutcome::AlreadyTerminal(status) => return Err(DispatchError::AlreadyTerminal(status)),
            CancelOutcome::Cancelling { effects } => effects,
        };
        self.disown(&mut effects.to_stop).await;
        let mut report = self.stop_at_agents(&effects.to_stop, force);
        let stopping: Vec<_> = effects.to_stop.drain(..).map(|held| held.job).collect();
        let stopped = |job: &JobRef| stopping.contains(job);
        // Slots of agents that were told come free when they answer.
        let ended: Vec<_> = effects.finished_jobs.iter().map(|done| done.job).filter(|job| !stopped(job)).collect();
        report.pending_cancelled = ended.len();
        for job in ended {
            self.let_go(job);
        }
        for finished in &effects.finished_jobs {
            self.settled(finished.job.job_id, finished.reason);
        }
        self.tell(&effects);
        self.wake();
        tracing::info!(%run_id, by, force, ?report, "a run is being cancelled");
        Ok(report)
    }

    /// Jobs whose orchestrator is dead are nobody's: there is no session that could be told, and no instance that hears of it.
    async fn disown(&self, jobs: &mut [HeldJob]) {
        let elsewhere = |held: &HeldJob| held.owner.as_ref().is_some_and(|owner| *owner != self.config.instance);
        if !jobs.iter().any(elsewhere) {
            return;
        }
        let dead = match self.own_and_dead_instances().await {
            Ok(dead) => dead,
            Err(error) => {
                tracing::warn!(%error, "whose orchestrators are dead cannot be told; stuck cancels are looked at again");
                return;
            }
        };
        for held in jobs {
            held.owner = held.owner.take().filter(|owner| !dead.contains(owner));
        }
    }

    /// Stops jobs that agents hold here and that another instance cancelled or ended.
    pub(crate) async fn stop_cancelled(self: &Arc<Self>) {
        if let Err(error) = self.sweep_cancelled().await {
            tracing::warn!(%error, "jobs that another instance cancelled could not be looked for");
        }
    }

    pub(crate) async fn sweep_cancelled(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let held = self.registry.held_jobs();
        if held.is_empty() {
            return Ok(0);
        }
        let standings = self.store.job_standings(held.iter().map(|(_, tracked)| tracked.job.job_id).collect()).await?;
        let mut stopped = 0;
        for (agent_id, tracked) in held {
            let Some((_, epoch, status)) = standings.iter().find(|(id, ..)| *id == tracked.job.job_id) else {
                continue;
            };
            let over = status.is_terminal() || *epoch != tracked.job.epoch;
            if !over && (*status != JobStatus::Cancelling || tracked.cancelling) {
                continue;
            }
            // One whose result has just come in is let go at this moment; telling its agent does no harm.
            let job = HeldJob { job: tracked.job, agent_id, owner: None, started: tracked.started };
            self.stop_at_agents(&[job], over);
            stopped += 1;
        }
        Ok(stopped)
    }

    /// Tells agents to stop jobs. A job whose agent is not connected anywhere is over: nobody will unwind it. One agent
    /// that cannot be told never keeps the others from being told.
    pub(crate) fn stop_at_agents(self: &Arc<Self>, jobs: &[HeldJob], force: bool) -> CancelReport {
        let mut report = CancelReport::default();
        for held in jobs {
            match self.registry.holder(held.job) {
                Some((_, link, tracked)) => {
                    report.agents_notified += 1;
                    self.registry.with_job(link.session_id(), held.job, |tracked| tracked.cancelling = true);
                    let grace = if force { Duration::ZERO } else { tracked.grace };
                    self.deadlines.set(Timer::Cancel(held.job), Instant::now() + grace + self.config.cancel_slack);
                    let (run_id, job_id) = (held.job.run_id, held.job.job_id);
                    self.changes.publish(Change::Job { run_id, job_id, status: JobStatus::Cancelling });
                    let cancel = JobCancel {
                        job: Some(wire_ref(held.job)),
                        reason: "the run was cancelled".to_owned(),
                        force,
                        grace_ms: millis(grace),
                    };
                    self.tasks.spawn(async move {
                        // An agent that is gone by now is triaged by its session's end: cancelled.
                        let _ = link.send(Frame::JobCancel(cancel)).await;
                    });
                }
                None if held.owner.as_ref().is_some_and(|owner| *owner != self.config.instance) => {
                    report.unreachable.push(held.agent_id.clone());
                }
                None => {
                    let this = self.clone();
                    let job = held.job;
                    self.tasks.spawn(async move { this.finish_cancelled(job).await });
                }
            }
        }
        report
    }
}
