//! What the orchestrator says.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kici_engine::state::FailureReason;
use kici_protocol::PROTOCOL_VERSION;
use kici_protocol::agent::{
    AgentFrame, CancelAnswer, InFlightJob, JobCancel, JobVerdict, OrchestratorFrame, Register, RegisterAck, Verdict,
    agent_frame, orchestrator_frame,
};
use kici_protocol::common::JobRef;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::state::is_result;
use super::{Agent, FENCE_GRACE, Link};
use crate::job::Grant;
use crate::key::JobKey;
use crate::session::Session;
use crate::stop::{Stop, strengthen};

/// Grace of a job that names none.
const DEFAULT_GRACE: Duration = Duration::from_secs(10);
/// What a cancel may take beyond grace and the steps that run after it.
const CANCEL_SLACK: Duration = Duration::from_secs(30);

impl Agent {
    pub(super) fn register(&self) -> Register {
        let in_flight = self.jobs.iter().filter(|(_, held)| !held.reported && held.accepted);
        Register {
            agent_id: self.state.agent_id.to_string(),
            labels: self.config.labels.clone(),
            platform: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            max_concurrency: self.config.max_concurrency,
            protocol_version: PROTOCOL_VERSION,
            hostname: kici_sys::host::hostname(),
            machine_id: kici_sys::host::machine_id().unwrap_or_default(),
            total_memory_mb: kici_sys::host::total_memory_mib().unwrap_or(0),
            cpu_count: kici_sys::host::cpu_count(),
            running_as_uid: Some(kici_sys::host::uid()),
            running_as_user: kici_sys::host::user_name(),
            properties: self.config.properties.clone().into_iter().collect(),
            in_flight_jobs: in_flight
                .map(|(key, held)| InFlightJob { job: Some(key.to_ref()), started: held.started })
                .collect(),
            outbox_pending: self.post.pending(),
            capabilities: Vec::new(),
            draining: self.draining || self.resets.gave_up,
            keep_running_when_fenced: self.config.keep_running_when_fenced,
            os_release: kici_sys::host::os_release(),
            boot_id: kici_sys::host::boot_id().unwrap_or_default(),
        }
    }

    pub(super) fn on_up(&mut self, ack: &RegisterAck, out: mpsc::Sender<AgentFrame>, session: Session) {
        tracing::info!(session = ack.session_id, labels = ack.labels.join(" "), "registered");
        self.switch_cluster(&ack.cluster_id);
        let heartbeat =
            Duration::from_millis(if ack.heartbeat_interval_ms == 0 { 30_000 } else { ack.heartbeat_interval_ms });
        // Register itself was number 1.
        self.link = Some(Link { out, seq: 1, heartbeat, last_heartbeat: Instant::now() });
        self.down = None;
        self.leave.new_session();
        self.note_scaler(ack);
        self.labels.clone_from(&ack.labels);
        if ack.recovery_window_ms > 0 {
            self.recovery_window = Duration::from_millis(ack.recovery_window_ms);
        }
        if ack.job_heartbeat_interval_ms > 0 {
            self.job_heartbeat = Duration::from_millis(ack.job_heartbeat_interval_ms);
        }
        ack.job_verdicts.iter().for_each(|verdict| self.on_verdict(verdict));
        let steps: Vec<_> =
            self.jobs.values().filter(|held| !held.reported).filter_map(|held| held.step.clone()).collect();
        for step in steps {
            self.send(agent_frame::Frame::StepUpdate(step));
        }
        self.ask_again();
        self.post.new_session();
        self.flush();
        self.sessions.send_replace(Some(session));
        if self.draining || self.is_resetting() || !self.degraded.is_empty() {
            self.say_status();
        }
    }

    /// Results belong to the cluster that gave the job: with another one, what is held is void here.
    fn switch_cluster(&mut self, cluster: &str) {
        if self.cluster.as_deref() == Some(cluster) {
            return;
        }
        if self.cluster.is_some() {
            tracing::warn!(cluster, "this is another cluster than before; jobs of the other one are dropped");
            self.jobs.values().for_each(|held| strengthen(&held.stop, Stop::Abandon { grace: FENCE_GRACE }));
        }
        self.post.clear();
        let opened = self.state.outbox(cluster).and_then(|opened| {
            self.state.remember_cluster(cluster)?;
            Ok(opened)
        });
        match opened {
            Ok((outbox, parcels)) => {
                *self.outbox.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(outbox));
                for (key, frames) in parcels {
                    let complete = frames.iter().any(is_result);
                    self.post.add(&key.file_name(), key.to_ref(), frames, complete);
                }
                self.cluster = Some(cluster.to_owned());
            }
            Err(error) => {
                tracing::error!(%error, "the outbox cannot be opened");
                self.degrade(format!("outbox: {error}"));
            }
        }
    }

    fn on_verdict(&mut self, verdict: &JobVerdict) {
        let Some(key) = self.known(verdict.job.as_ref()) else { return };
        match (verdict.verdict(), self.jobs.get_mut(&key)) {
            (Verdict::Abandon, Some(held)) => {
                tracing::warn!(job = %key, "the job is somebody else's now; it is ended");
                strengthen(&held.stop, Stop::Abandon { grace: FENCE_GRACE });
            }
            (Verdict::Abandon, None) => {
                let file = key.file_name();
                self.post.drop_parcel(&file);
                if let Some(outbox) = &*self.outbox.lock().unwrap_or_else(PoisonError::into_inner) {
                    outbox.remove(&file);
                }
            }
            (Verdict::Resume, Some(held)) if verdict.started && !held.started => {
                held.started = true;
                held.grant.send_replace(Grant::Granted);
            }
            _ => {}
        }
    }

    pub(super) async fn on_frame(&mut self, frame: OrchestratorFrame) {
        use orchestrator_frame::Frame as F;
        match frame.frame {
            Some(F::JobOffer(offer)) => self.on_offer(offer),
            Some(F::StartGranted(granted)) => self.on_grant(granted.job.as_ref(), Grant::Granted),
            Some(F::StartDenied(denied)) => self.on_grant(denied.job.as_ref(), Grant::Denied(denied.detail)),
            Some(F::JobCancel(cancel)) => self.on_cancel(&cancel),
            Some(F::AgentDrain(drain)) => {
                tracing::info!(drain = drain.drain, "the orchestrator changes draining");
                self.draining = drain.drain || self.stopping.is_some();
                self.say_status();
            }
            Some(F::FrameAck(ack)) => {
                self.leave.heard(ack.up_to_seq);
                let settled = self.post.acked(ack.up_to_seq);
                self.settle(settled);
            }
            Some(F::FrameNack(nack)) => {
                tracing::warn!(seq = nack.seq, code = ?nack.code(), detail = nack.detail, "a frame was refused");
                let retry = Duration::from_millis(nack.retry_after_ms);
                let settled = self.post.refused(nack.seq, nack.code(), &nack.detail, retry, Instant::now());
                self.settle(settled);
            }
            Some(F::RegisterAck(_) | F::Goodbye(_)) | None => {}
        }
    }

    fn known(&self, job: Option<&JobRef>) -> Option<JobKey> {
        job.and_then(|job| JobKey::try_from(job).ok())
    }

    fn on_grant(&mut self, job: Option<&JobRef>, grant: Grant) {
        let Some(key) = self.known(job) else { return };
        if let Some(held) = self.jobs.get_mut(&key) {
            held.started |= grant == Grant::Granted;
            held.grant.send_if_modified(|now| {
                let first = *now == Grant::Waiting;
                if first {
                    *now = grant;
                }
                first
            });
        }
    }

    fn on_cancel(&mut self, cancel: &JobCancel) {
        let Some(key) = self.known(cancel.job.as_ref()) else { return };
        let held = self.jobs.get(&key);
        let answer = match held {
            None if self.post.has(&key.file_name()) => "already_terminal",
            None => "unknown_job",
            Some(held) if held.reported => "already_terminal",
            Some(_) => "cancelling",
        };
        if let Some(held) = held.filter(|held| !held.reported) {
            let reason = cancel.reason.parse().unwrap_or(FailureReason::CancelledByUser);
            let message = match cancel.reason.as_str() {
                "" | "cancelled_by_user" => "cancelled".to_owned(),
                other => format!("cancelled: {other}"),
            };
            let grace = match cancel.grace_ms {
                0 => DEFAULT_GRACE,
                ms => Duration::from_millis(ms),
            };
            let grace = grace.min(self.config.max_grace_period);
            let again = *held.stop.borrow() != Stop::Run;
            let limit = if cancel.force || again { CANCEL_SLACK } else { grace + held.after_cancel + CANCEL_SLACK };
            strengthen(
                &held.stop,
                if cancel.force || again {
                    Stop::Force { reason, message }
                } else {
                    Stop::Graceful { reason, message, grace, more_steps: true }
                },
            );
            self.say_cancelling(key, limit);
        }
        let job = Some(key.to_ref());
        self.send(agent_frame::Frame::CancelAnswer(CancelAnswer { job, answer: answer.to_owned() }));
    }
}
