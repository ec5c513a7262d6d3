//! What happens at the deadlines in memory.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::scaling::Trigger;
use kici_protocol::agent::JobCancel;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_protocol::close::CloseReason;
use kici_store::model::{Guarded, JobRef, RequeueFrom};
use tokio::time::Instant;

use crate::dispatcher::Dispatcher;
use crate::offer::{millis, wire_ref};
use crate::outcome::Undone;

/// Most offers are answered within this time; only the others cost a write that says by when an answer is due.
pub(crate) const ARM_AFTER: Duration = Duration::from_millis(200);
/// Most jobs start within this time after their acknowledgement, and the start writes it too.
pub(crate) const SAVE_ACK_AFTER: Duration = Duration::from_millis(50);
/// When a write at a deadline failed.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// How long a result may stay in an agent's outbox after it registered.
pub(crate) const OUTBOX_GRACE: Duration = Duration::from_secs(30);

/// One deadline, nearly always of one delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Timer {
    /// The offer must be answered.
    Ack(JobRef),
    /// Write down by when it must be answered.
    ArmAck(JobRef),
    /// Write down that it was answered.
    SaveAck(JobRef),
    /// The result must have come out of the agent's outbox.
    Outbox(JobRef),
    /// The agent must be back.
    Recovery(JobRef),
    /// The cancelled job must be gone.
    Cancel(JobRef),
    /// Agents that said "busy" may be asked again.
    Pauses,
    /// Room for agents on demand came free.
    Room,
}

impl Dispatcher {
    pub(crate) async fn run_timers(self: Arc<Self>) {
        loop {
            let due = tokio::select! {
                () = self.stopping.cancelled() => return,
                due = self.deadlines.due() => due,
            };
            for timer in due {
                let this = self.clone();
                self.tasks.spawn(async move { this.at_deadline(timer).await });
            }
        }
    }

    pub(crate) fn forget_timers(&self, job: JobRef) {
        for timer in [Timer::Ack(job), Timer::ArmAck(job), Timer::SaveAck(job), Timer::Outbox(job), Timer::Cancel(job)]
        {
            self.deadlines.cancel(&timer);
        }
    }

    async fn at_deadline(self: &Arc<Self>, timer: Timer) {
        match timer {
            Timer::Ack(job) => self.ack_overdue(job).await,
            Timer::ArmAck(job) => self.arm_ack(job).await,
            Timer::SaveAck(job) => self.save_ack(job).await,
            Timer::Outbox(job) => self.outbox_overdue(job).await,
            Timer::Recovery(job) => self.recovery_due(job).await,
            Timer::Cancel(job) => self.cancel_overdue(job).await,
            Timer::Room => {
                if let Err(error) = self.redrive(Trigger::Hook).await {
                    tracing::warn!(%error, "waiting jobs could not be offered to the scaler");
                }
            }
            Timer::Pauses => {
                if self.registry.end_pauses() {
                    self.wake();
                }
            }
        }
    }

    async fn arm_ack(&self, job: JobRef) {
        let Some((identity, link, tracked)) = self.registry.holder(job) else { return };
        if tracked.acked {
            return;
        }
        let elapsed = tracked.offered_at.map_or(ARM_AFTER, |at| at.elapsed());
        let deadline = self.clock.now().plus(self.config.ack_timeout.saturating_sub(elapsed));
        match self.store.queue_ack_arm(job, identity.agent_id, deadline).await {
            Ok(Guarded::Applied) => {
                self.registry.with_job(link.session_id(), job, |tracked| tracked.armed = true);
            }
            Ok(Guarded::Lost) => {}
            Err(error) => {
                tracing::warn!(job = %job.job_id, %error, "the deadline of an offer could not be written");
                self.deadlines.set(Timer::ArmAck(job), Instant::now() + TRY_AGAIN);
            }
        }
    }

    async fn save_ack(&self, job: JobRef) {
        let Some((identity, _, tracked)) = self.registry.holder(job) else { return };
        if !tracked.acked || tracked.started {
            return;
        }
        if let Err(error) = self.store.queue_ack(job, identity.agent_id).await {
            tracing::warn!(job = %job.job_id, %error, "an acknowledgement could not be written");
            self.deadlines.set(Timer::SaveAck(job), Instant::now() + TRY_AGAIN);
        }
    }

    /// The offer was not answered: the job goes back first and in one guarded statement, and only if that took effect is
    /// the agent closed. It leaves the registry before other agents are looked for, or the job would come back to it.
    async fn ack_overdue(self: &Arc<Self>, job: JobRef) {
        let Some((identity, link, tracked)) = self.registry.holder(job) else { return };
        if tracked.acked {
            return;
        }
        if !tracked.armed {
            self.arm_ack(job).await;
            self.deadlines.set(Timer::Ack(job), Instant::now() + TRY_AGAIN);
            return;
        }
        let from = RequeueFrom::AwaitingAck(identity.agent_id.clone());
        let why = format!("agent {} did not answer the offer", identity.agent_id);
        if !self.requeue_quietly(Undone::new(job, from, why, "ack_timeout")).await {
            return;
        }
        let in_a_row = self.registry.ack_timed_out(&identity.agent_id);
        tracing::warn!(agent = %identity.agent_id, job = %job.job_id, in_a_row, "an offer was not answered in time");
        // Its slot stays taken until it has left: freed before, it would be filled at once.
        link.close(CloseReason::DispatchAckTimeout, format!("the offer of {} was not answered", job.job_id));
        self.session_over(link.session_id(), Some(job)).await;
        self.jobs_queued(&[job.job_id]);
    }

    async fn outbox_overdue(self: &Arc<Self>, job: JobRef) {
        let Some((identity, _, tracked)) = self.registry.holder(job) else { return };
        if tracked.awaiting_outbox {
            self.registry.untrack_of(&identity.agent_id, job, true);
            self.forgotten(job, &identity, tracked.started, tracked.cancelling).await;
            self.wake();
        }
    }

    async fn cancel_overdue(self: &Arc<Self>, job: JobRef) {
        let Some((identity, link, _)) = self.registry.holder(job) else { return };
        tracing::warn!(agent = %identity.agent_id, job = %job.job_id, "a cancelled job did not end in time; killing it");
        let reason = "it did not end in time".to_owned();
        let kill = JobCancel { job: Some(wire_ref(job)), reason, force: true, grace_ms: millis(Duration::ZERO) };
        // Whether or not the frame arrives, the job ends here; the agent learns of it when it asks.
        let _ = link.send(Frame::JobCancel(kill)).await;
        self.finish_cancelled(job).await;
        if self.let_go(job) {
            self.wake();
        }
    }
}
