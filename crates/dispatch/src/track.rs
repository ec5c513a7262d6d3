//! Applies the frames of a job in order: answers, the start permit, steps, results.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use kici_engine::state::{FailureReason, JobStatus, RunStatus, StepStatus};
use kici_protocol::NOT_ASSIGNED;
use kici_protocol::agent::orchestrator_frame::Frame;
use kici_protocol::agent::{NackCode, StartDenied, StartGranted};
use kici_store::StoreError;
use kici_store::model::{JobFinished, JobRef, JobResult, RequeueFrom, StartVerdict, StepWrite, StepWritten};
use tokio::time::{Instant, timeout};

use crate::decide::violations::Ownership;
use crate::dispatcher::Dispatcher;
use crate::frames::{Answer, Finished, JobFrame};
use crate::meters;
use crate::offer::wire_ref;
use crate::outcome::Undone;
use crate::ports::Change;
use crate::registry::slots::Refusal;
use crate::session::{MAX_ACCEPTED, Queued, Session, lock};
use crate::timers::{SAVE_ACK_AFTER, Timer};

/// When the agent shall try again after the database did not answer.
const UNAVAILABLE_RETRY_MS: u64 = 1000;

/// What the store answered, or that it did not in time.
enum Written<T> {
    Done(T),
    NotNow,
}

impl Dispatcher {
    /// The task of one job of one session: takes its frames until none waits.
    pub(crate) async fn apply_frames(self: &Arc<Self>, session: &Arc<Session>, job: JobRef) {
        while let Some(frames) = session.take(job) {
            let verdict = self.ownership(session, job).await;
            if verdict != Ownership::Owned {
                self.refuse_frames(session, job, frames, verdict).await;
                continue;
            }
            self.registry.beat(session.id(), job, self.clock.now());
            let mut steps: Vec<(u64, StepWrite)> = Vec::new();
            for Queued { seq, frame, .. } in frames {
                match frame {
                    JobFrame::Step(step) => steps.push((seq, *step)),
                    JobFrame::Finished(done) => {
                        let before = std::mem::take(&mut steps);
                        self.job_finished(session, job, before, seq, *done).await;
                    }
                    other => {
                        self.write_steps(session, job, std::mem::take(&mut steps)).await;
                        self.apply_frame(session, job, seq, other).await;
                    }
                }
            }
            self.write_steps(session, job, steps).await;
        }
    }

    async fn apply_frame(self: &Arc<Self>, session: &Arc<Session>, job: JobRef, seq: u64, frame: JobFrame) {
        match frame {
            JobFrame::Ack => self.job_acked(session, job),
            JobFrame::Heartbeat => {}
            JobFrame::Reject { refusal, detail } => self.job_rejected(session, job, refusal, &detail).await,
            JobFrame::CancelAnswer(answer) => self.cancel_answered(session, job, answer).await,
            JobFrame::Start => return self.start_asked(session, job, seq).await,
            JobFrame::Cancelling { deadline } => return self.job_cancelling(session, job, seq, deadline).await,
            // Taken by the caller.
            JobFrame::Finished(_) | JobFrame::Step(_) => {}
        }
        session.link.settle(seq);
    }

    /// Whether the agent may speak for a job: memory, what the database said before, the database.
    async fn ownership(&self, session: &Session, job: JobRef) -> Ownership {
        if self.registry.holds(session.id(), job) || lock(&session.accepted).contains(&job) {
            return Ownership::Owned;
        }
        let verdict = self.ownership_in_store(job, &session.agent_id).await;
        if verdict == Ownership::Owned {
            let mut accepted = lock(&session.accepted);
            if accepted.len() >= MAX_ACCEPTED {
                accepted.clear();
            }
            accepted.insert(job);
        }
        verdict
    }

    pub(crate) async fn ownership_in_store(&self, job: JobRef, agent: &kici_engine::ids::AgentId) -> Ownership {
        use kici_store::model::Ownership as Stored;
        match timeout(self.config.ownership_timeout, self.store.queue_ownership(job, agent.clone())).await {
            Ok(Ok(Stored::Owned)) => Ownership::Owned,
            Ok(Ok(Stored::FormerlyOwned)) => Ownership::StaleEpoch,
            Ok(Ok(Stored::NotOwned)) => Ownership::NotOwned,
            Ok(Err(error)) => {
                tracing::warn!(job = %job.job_id, %error, "who owns a job cannot be told now");
                Ownership::Unknown
            }
            Err(_) => Ownership::Unknown,
        }
    }

    async fn refuse_frames(
        &self,
        session: &Session,
        job: JobRef,
        frames: impl IntoIterator<Item = Queued>,
        verdict: Ownership,
    ) {
        let (code, retry) = match verdict {
            Ownership::StaleEpoch => (NackCode::StaleEpoch, 0),
            Ownership::Unknown => (NackCode::Refused, UNAVAILABLE_RETRY_MS),
            Ownership::NotOwned | Ownership::Owned => (NackCode::Refused, 0),
        };
        for Queued { seq, frame, .. } in frames {
            tracing::warn!(agent = %session.agent_id, ?verdict, frame = frame.kind(), "a frame for a job of somebody else was refused");
            if verdict == Ownership::NotOwned {
                meters::ownership_violation(frame.kind());
            }
            if matches!((&frame, verdict), (JobFrame::Start, Ownership::StaleEpoch)) {
                // It holds a delivery that was undone, perhaps without having heard of it: it would ask for ever.
                let detail = "the job was given to another agent, or to this one again".to_owned();
                let denied = StartDenied { job: Some(wire_ref(job)), detail };
                let _ = session.link.send(Frame::StartDenied(denied)).await;
            }
            session.nack(seq, code, NOT_ASSIGNED, retry).await;
            if session.link.violates(verdict) {
                return;
            }
        }
    }

    fn job_acked(&self, session: &Session, job: JobRef) {
        let Some(acked) = self.registry.acked(session.id(), job) else { return };
        self.deadlines.cancel(&Timer::Ack(job));
        self.deadlines.cancel(&Timer::ArmAck(job));
        if let Some(waited) = acked.waited {
            meters::ack_latency(waited);
            self.deadlines.set(Timer::SaveAck(job), Instant::now() + SAVE_ACK_AFTER);
        }
    }

    async fn job_rejected(self: &Arc<Self>, session: &Session, job: JobRef, refusal: Refusal, detail: &str) {
        if !self.registry.refuse(session.id(), job, refusal, detail) {
            return;
        }
        tracing::info!(agent = %session.agent_id, job = %job.job_id, ?refusal, detail, "an agent refused a job");
        let why = match detail {
            "" => format!("agent {} refused it", session.agent_id),
            detail => format!("agent {} refused it: {detail}", session.agent_id),
        };
        // Who says in order that it takes no more work has lost no delivery.
        let counts = refusal != Refusal::Draining;
        let from = RequeueFrom::NotStarted(session.agent_id.clone());
        self.requeue(Undone { counts, ..Undone::new(job, from, why, "reject") }).await;
        if refusal == Refusal::Busy {
            self.deadlines.set(Timer::Pauses, Instant::now() + crate::registry::slots::BUSY_PAUSE);
        }
    }

    async fn cancel_answered(self: &Arc<Self>, session: &Session, job: JobRef, answer: Answer) {
        let cancelling = self.registry.with_job(session.id(), job, |tracked| tracked.cancelling);
        if answer == Answer::UnknownJob && cancelling == Some(true) {
            self.finish_cancelled(job).await;
            if self.let_go(job) {
                self.wake();
            }
        }
    }

    async fn start_asked(self: &Arc<Self>, session: &Session, job: JobRef, seq: u64) {
        self.registry.acked(session.id(), job);
        for timer in [Timer::Ack(job), Timer::ArmAck(job), Timer::SaveAck(job)] {
            self.deadlines.cancel(&timer);
        }
        let verdict = self.write(|| self.store.job_start(job, session.agent_id.clone(), session.link.closing())).await;
        let verdict = match verdict {
            Written::Done(verdict) => verdict,
            Written::NotNow => {
                return session
                    .nack(seq, NackCode::Unavailable, "the database does not answer", UNAVAILABLE_RETRY_MS)
                    .await;
            }
        };
        let (run_id, job_id) = (job.run_id, job.job_id);
        let answer = match verdict {
            // Whatever closed the session decides about its jobs, and another session may have this one by now.
            StartVerdict::Denied if session.link.closing().is_cancelled() => return,
            StartVerdict::Denied => {
                if self.let_go(job) {
                    self.wake();
                }
                let detail = "the job was cancelled, has ended or was given to another agent".to_owned();
                Frame::StartDenied(StartDenied { job: Some(wire_ref(job)), detail })
            }
            StartVerdict::Granted { .. } | StartVerdict::AlreadyGranted => {
                self.registry.with_job(session.id(), job, |tracked| tracked.started = true);
                Frame::StartGranted(StartGranted { job: Some(wire_ref(job)) })
            }
        };
        // A lost answer is asked for again.
        let _ = session.link.send(answer).await;
        session.link.settle(seq);
        if let StartVerdict::Granted { run_started } = verdict {
            self.changes.publish(Change::Job { run_id, job_id, status: JobStatus::Running });
            if run_started {
                self.changes.publish(Change::Run { run_id, routing_key: None, status: RunStatus::Running });
            }
        }
    }

    async fn job_cancelling(
        self: &Arc<Self>,
        session: &Session,
        job: JobRef,
        seq: u64,
        deadline: Option<kici_engine::time::Ts>,
    ) {
        let written = self.write(|| self.store.job_cancelling(job, session.agent_id.clone(), deadline)).await;
        if let Written::NotNow = written {
            return session
                .nack(seq, NackCode::Unavailable, "the database does not answer", UNAVAILABLE_RETRY_MS)
                .await;
        }
        self.registry.with_job(session.id(), job, |tracked| tracked.cancelling = true);
        let left = deadline.map_or(self.config.max_grace, |deadline| deadline.since(self.clock.now()));
        self.deadlines.set(Timer::Cancel(job), Instant::now() + left + self.config.cancel_slack);
        let (run_id, job_id) = (job.run_id, job.job_id);
        self.changes.publish(Change::Job { run_id, job_id, status: JobStatus::Cancelling });
        session.link.settle(seq);
    }

    async fn write_steps(self: &Arc<Self>, session: &Session, job: JobRef, steps: Vec<(u64, StepWrite)>) {
        if steps.is_empty() {
            return;
        }
        let (seqs, steps): (Vec<u64>, Vec<StepWrite>) = steps.into_iter().unzip();
        let told: Vec<_> = steps.iter().map(|step| (step.step_key.clone(), step.status)).collect();
        let written = match self.write(|| self.store.step_upsert(steps.clone())).await {
            Written::Done(written) => written,
            Written::NotNow => {
                for seq in seqs {
                    session
                        .nack(seq, NackCode::Unavailable, "the database does not answer", UNAVAILABLE_RETRY_MS)
                        .await;
                }
                return;
            }
        };
        self.steps_written(session, job, seqs, written, told).await;
    }

    async fn steps_written(
        &self,
        session: &Session,
        job: JobRef,
        seqs: Vec<u64>,
        written: Vec<StepWritten>,
        told: Vec<(String, StepStatus)>,
    ) {
        for ((seq, written), (step_key, status)) in seqs.into_iter().zip(written).zip(told) {
            match written {
                StepWritten::Stale => session.nack(seq, NackCode::StaleEpoch, NOT_ASSIGNED, 0).await,
                StepWritten::Unchanged => session.link.settle(seq),
                StepWritten::Applied => {
                    session.link.settle(seq);
                    if status.is_terminal() {
                        meters::step_finished(status.as_str());
                    }
                    let (run_id, job_id, epoch) = (job.run_id, job.job_id, job.epoch);
                    self.changes.publish(Change::Step { run_id, job_id, epoch, step_key, status });
                }
            }
        }
    }

    /// The result of a job, with the words on its steps that came before it: one commit, or none of them.
    async fn job_finished(
        self: &Arc<Self>,
        session: &Session,
        job: JobRef,
        before: Vec<(u64, StepWrite)>,
        seq: u64,
        mut done: Finished,
    ) {
        let shut_down = done.reason == Some(FailureReason::AgentShutdown);
        if shut_down && self.registry.asked_reboot(session.id(), job.job_id) {
            // The agent was stopped by the restart that this job asked for.
            (done.status, done.reason, done.message) = (JobStatus::Success, None, None);
            done.evidence = Some(serde_json::json!({ "host_restarted": true }));
        }
        let (seqs, steps): (Vec<u64>, Vec<StepWrite>) = before.into_iter().unzip();
        let told: Vec<_> = steps.iter().map(|step| (step.step_key.clone(), step.status)).collect();
        let result = JobResult {
            job,
            agent_id: Some(session.agent_id.clone()),
            status: done.status,
            reason: done.reason,
            message: done.message,
            outputs: done.outputs,
            evidence: done.evidence,
            log_bytes: done.log_bytes,
            at: Some(done.at),
        };
        let written = self.write(|| self.store.job_report(steps.clone(), result.clone(), self.activate())).await;
        let finished = match written {
            Written::Done((written, finished)) => {
                self.steps_written(session, job, seqs, written, told).await;
                finished
            }
            Written::NotNow => {
                for seq in seqs.into_iter().chain([seq]) {
                    let detail = "the database does not answer";
                    session.nack(seq, NackCode::Unavailable, detail, UNAVAILABLE_RETRY_MS).await;
                }
                return;
            }
        };
        match finished {
            JobFinished::Applied(effects) => {
                session.link.settle(seq);
                self.apply_effects(&effects);
            }
            JobFinished::Duplicate(stored) => {
                if stored != result.status {
                    meters::nonmonotonic(result.status.as_str());
                    tracing::info!(job = %job.job_id, %stored, reported = %result.status, "a job had ended otherwise before");
                }
                if self.let_go(job) {
                    self.wake();
                }
                session.link.settle(seq);
            }
            JobFinished::Stale => session.nack(seq, NackCode::StaleEpoch, NOT_ASSIGNED, 0).await,
            JobFinished::NotOwned => session.nack(seq, NackCode::Refused, NOT_ASSIGNED, 0).await,
        }
    }

    /// Runs a write, again after short pauses when the database is busy or gone for a moment, within the limit that an
    /// agent may be kept waiting. A write that was under way when the limit came may still commit; all of them are
    /// idempotent.
    async fn write<T, F, O>(&self, operation: O) -> Written<T>
    where
        F: Future<Output = Result<T, StoreError>>,
        O: FnMut() -> F,
    {
        let pauses = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(50))
            .with_max_delay(Duration::from_secs(1))
            .with_max_times(6)
            .with_jitter();
        let passing = |error: &StoreError| {
            matches!(error, StoreError::Unavailable(_) | StoreError::Conflict(_) | StoreError::Full(_))
        };
        match timeout(self.config.ownership_timeout, operation.retry(pauses).when(passing)).await {
            Ok(Ok(done)) => Written::Done(done),
            Ok(Err(error)) => {
                tracing::warn!(%error, "a frame could not be written");
                Written::NotNow
            }
            Err(_) => Written::NotNow,
        }
    }
}

impl JobFrame {
    /// A word for logs and metrics.
    fn kind(&self) -> &'static str {
        match self {
            Self::Ack => "job_ack",
            Self::Reject { .. } => "job_reject",
            Self::Start | Self::Cancelling { .. } | Self::Finished(_) => "job_update",
            Self::Step(_) => "step_update",
            Self::Heartbeat => "job_heartbeat",
            Self::CancelAnswer(_) => "cancel_answer",
        }
    }
}
