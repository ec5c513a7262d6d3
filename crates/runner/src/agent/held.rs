//! The jobs that an agent holds, and what they tell it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kici_engine::jobspec::JobSpec;
use kici_protocol::agent::{JobAck, JobOffer, JobReject, JobUpdate, RejectReason, StepUpdate, agent_frame};
use kici_protocol::common::JobRef;
use secrecy::ExposeSecret;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::state::{Leftovers, is_result, mark_spool};
use super::{Agent, MAX_WAITING};
use crate::container::Wanted;
use crate::credentials::Remote;
use crate::job::{self, Ctx, Grant, JobEvent};
use crate::key::JobKey;
use crate::mask::Masker;
use crate::spool::{Limits, Spool};
use crate::stop::{Stop, strengthen};
use crate::upload;

/// One job on this agent.
pub(super) struct Held {
    /// Tells it to stop.
    pub stop: watch::Sender<Stop>,
    /// Tells it the grant.
    pub grant: watch::Sender<Grant>,
    /// The orchestrator has the acknowledgement, as far as we know.
    pub accepted: bool,
    /// It is prepared and waits for the grant.
    pub asking: bool,
    /// The start was granted.
    pub started: bool,
    /// Its result is in the outbox: it takes no slot any more.
    pub reported: bool,
    /// The step that runs, to be told again in a new session.
    pub step: Option<StepUpdate>,
    /// How long its steps may take that run after a cancel.
    pub after_cancel: Duration,
    /// Its logs.
    pub spool: Arc<Spool>,
    /// Its task.
    pub task: JoinHandle<()>,
}

impl Agent {
    /// Takes up what an earlier process left: results and logs that wait.
    pub(super) fn take_over(&mut self, left: Leftovers) {
        if let Some((cluster, outbox)) = left.outbox {
            self.cluster = Some(cluster);
            *self.outbox.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(Arc::new(outbox));
        }
        for (key, frames) in left.parcels {
            let complete = frames.iter().any(is_result);
            self.post.add(&key.file_name(), key.to_ref(), frames, complete);
        }
        for (key, spool) in left.spools {
            self.send_logs(key, spool);
            // Its result may be settled already.
            if !self.post.has(&key.file_name()) {
                self.over(&key.file_name());
            }
        }
        self.note_holding();
    }

    fn send_logs(&mut self, key: JobKey, spool: Arc<Spool>) {
        let (settled, over) = watch::channel(false);
        self.log_ends.insert(key.file_name(), settled);
        let (token, sessions) = (self.config.agent_token.clone(), self.sessions.subscribe());
        self.tasks.spawn(upload::run(spool, key, token, sessions, over));
    }

    pub(super) fn on_offer(&mut self, offer: JobOffer) {
        let Some(job) = offer.job.clone() else { return };
        self.note_offer();
        let key = match JobKey::try_from(&job) {
            Ok(key) => key,
            Err(error) => return self.reject(job, RejectReason::Unsupported, &error.to_string()),
        };
        if let Some(held) = self.jobs.get(&key) {
            // A repeated delivery of what is held already.
            if held.accepted {
                self.send(agent_frame::Frame::JobAck(JobAck { job: Some(job) }));
            }
            return;
        }
        if let Some((other, held)) = self.jobs.iter().find(|(other, _)| other.job == key.job) {
            if other.epoch > key.epoch {
                tracing::warn!(job = %key, held = other.epoch, "an offer of an older epoch is ignored");
                return;
            }
            if !held.reported || !held.task.is_finished() {
                strengthen(&held.stop, Stop::Abandon { grace: super::FENCE_GRACE });
                self.deferred.push(offer);
                return;
            }
        }
        if let Some((reason, detail)) = self.full() {
            // The orchestrator shall know before the refusal that offers are of no use now.
            self.check_disk();
            return self.reject(job, reason, &detail);
        }
        let spec: JobSpec = match serde_json::from_slice(&offer.spec_json) {
            Ok(spec) => spec,
            Err(error) => {
                let detail = format!("the job cannot be read: {error}; is this agent older than the orchestrator?");
                return self.reject(job, RejectReason::Unsupported, &detail);
            }
        };
        let wanted = match Wanted::of(&spec, &self.config) {
            Ok(wanted) => wanted,
            Err(detail) => return self.reject(job, RejectReason::Unsupported, &detail),
        };
        if wanted.is_some()
            && let Err(error) = self.host.containers.look()
        {
            let detail = format!(
                "no container runtime on {}: {error}; label pools with kici:runtime:docker and add it to runs_on",
                kici_sys::host::hostname()
            );
            return self.reject(job, RejectReason::Unsupported, &detail);
        }
        if let Err(error) = self.start(key, offer, spec, wanted) {
            self.reject(job, RejectReason::Busy, &format!("the logs of the job cannot be kept: {error}"));
        }
    }

    /// Why no work is taken now.
    fn full(&self) -> Option<(RejectReason, String)> {
        let max = self.config.max_concurrency as usize;
        if self.draining || self.resets.gave_up {
            Some((RejectReason::Draining, String::new()))
        } else if self.is_resetting() {
            Some((RejectReason::Resetting, String::new()))
        } else if self.active() >= max {
            Some((RejectReason::Busy, format!("{max} of {max} jobs are held")))
        } else if self.post.len() > MAX_WAITING {
            Some((RejectReason::Busy, format!("{} results wait in the outbox", self.post.len())))
        } else {
            self.disk_full().map(|why| (RejectReason::Busy, why))
        }
    }

    fn reject(&mut self, job: JobRef, reason: RejectReason, detail: &str) {
        tracing::info!(job = job.job_id, ?reason, detail, "an offer is rejected");
        let reject = JobReject { job: Some(job), reason: reason.into(), detail: detail.to_owned() };
        self.send(agent_frame::Frame::JobReject(reject));
    }

    fn start(&mut self, key: JobKey, offer: JobOffer, spec: JobSpec, wanted: Option<Wanted>) -> std::io::Result<()> {
        let max_step_bytes = match offer.max_log_bytes {
            0 => self.config.max_log_size_bytes,
            bytes => bytes,
        };
        let limits = Limits {
            max_step_bytes,
            max_unacked_bytes: self.config.log_spool_max_bytes,
            pressure: self.config.pressure,
        };
        let dir = self.state.spool_dir(key);
        let spool = Spool::create(&dir, limits)?;
        mark_spool(&dir, key)?;
        let masker = Masker::new(offer.mask.iter().map(String::as_str));
        if let Some(token) = &self.config.agent_token {
            masker.add([token.expose_secret()]);
        }
        let (stop, grant) = (watch::Sender::new(Stop::Run), watch::Sender::new(Grant::Waiting));
        self.send_logs(key, Arc::clone(&spool));
        let ctx = Ctx {
            key,
            config: Arc::clone(&self.config),
            clock: Arc::clone(&self.clock),
            journal: Arc::clone(&self.state.journal),
            spool: Arc::clone(&spool),
            masker: Arc::new(masker),
            events: self.job_events.clone(),
            outbox: self.postings.clone(),
            stop: stop.subscribe(),
            grant: grant.subscribe(),
            sessions: self.sessions.subscribe(),
            agent: json!({
                "os": std::env::consts::OS,
                "arch": std::env::consts::ARCH,
                "host": kici_sys::host::hostname(),
                "labels": self.labels,
            }),
            host: Arc::clone(&self.host),
            running: Mutex::default(),
            trees: Mutex::default(),
            wanted,
            inside: Arc::default(),
            services: Arc::clone(&self.services),
            remote: Arc::new(Remote::new(key, self.config.agent_token.clone(), self.sessions.subscribe())),
        };
        tracing::info!(job = %key, workflow = offer.workflow, name = offer.job_name, request = offer.request_id, "a job is taken");
        let after_cancel = super::after_cancel::after_cancel(&spec);
        let task = self.tasks.spawn(job::run(ctx, offer, spec));
        let held = Held {
            stop,
            grant,
            accepted: false,
            asking: false,
            started: false,
            reported: false,
            step: None,
            after_cancel,
            spool,
            task,
        };
        self.jobs.insert(key, held);
        self.note_holding();
        Ok(())
    }

    pub(super) fn on_job(&mut self, key: JobKey, event: JobEvent) {
        let job = Some(key.to_ref());
        match event {
            JobEvent::Accepted => {
                if let Some(held) = self.jobs.get_mut(&key) {
                    held.accepted = true;
                }
                self.send(agent_frame::Frame::JobAck(JobAck { job }));
            }
            JobEvent::NotAccepted(detail) => {
                self.forget(key);
                self.reject(key.to_ref(), RejectReason::Busy, &detail);
            }
            JobEvent::AskStart => {
                if let Some(held) = self.jobs.get_mut(&key) {
                    held.asking = true;
                }
                self.ask(key);
            }
            JobEvent::Say(frame) => {
                if let (agent_frame::Frame::StepUpdate(update), Some(held)) = (&*frame, self.jobs.get_mut(&key)) {
                    held.step = Some(update.clone());
                }
                self.send(*frame);
            }
            JobEvent::Dropped => {
                let file = key.file_name();
                self.post.drop_parcel(&file);
                if let Some(outbox) = &*self.outbox.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
                    outbox.remove(&file);
                }
                self.over(&file);
            }
            JobEvent::Cleaned => {
                self.forget(key);
                self.reset_when_idle();
                for offer in std::mem::take(&mut self.deferred) {
                    self.on_offer(offer);
                }
            }
        }
    }

    fn forget(&mut self, key: JobKey) {
        if let Some(held) = self.jobs.remove(&key)
            && !held.reported
        {
            held.spool.close();
            self.over(&key.file_name());
        }
        self.note_holding();
    }

    /// The result of a delivery is settled: a refusal of its logs counts from now on.
    pub(super) fn over(&mut self, file: &str) {
        if let Some(settled) = self.log_ends.remove(file) {
            settled.send_replace(true);
        }
        self.note_holding();
    }

    /// Asks for the start of a job.
    pub(super) fn ask(&mut self, key: JobKey) {
        let update = JobUpdate {
            job: Some(key.to_ref()),
            state: "running".to_owned(),
            at_us: self.clock.now().as_micros(),
            ..JobUpdate::default()
        };
        self.send(agent_frame::Frame::JobUpdate(update));
    }

    /// Says that a job is being cancelled, and when it will be done at the latest.
    pub(super) fn say_cancelling(&mut self, key: JobKey, limit: Duration) {
        let at = self.clock.now();
        let update = JobUpdate {
            job: Some(key.to_ref()),
            state: "cancelling".to_owned(),
            at_us: at.as_micros(),
            cancel_deadline_us: at.plus(limit).as_micros(),
            ..JobUpdate::default()
        };
        self.send(agent_frame::Frame::JobUpdate(update));
    }

    /// Jobs that wait for the grant without an answer are asked for again.
    pub(super) fn ask_again(&mut self) {
        let waiting: Vec<JobKey> =
            self.jobs.iter().filter(|(_, held)| held.asking && !held.started).map(|(key, _)| *key).collect();
        waiting.into_iter().for_each(|key| self.ask(key));
        self.last_ask = Instant::now();
    }
}
