//! The end of an agent that a scaler started, once there is nothing to do for it.

use std::time::Duration;

use kici_protocol::agent::RegisterAck;
use tokio::time::Instant;

use super::Agent;

/// What an agent knows of whoever started it.
#[derive(Debug, Default)]
pub(super) struct Scaler {
    /// A scaler started it.
    managed: bool,
    /// It belongs to a pool, which ends it.
    pooled: bool,
    /// The job that it was started for has not come yet.
    expects_job: bool,
    /// Since when it has had nothing to do.
    quiet: Option<Instant>,
}

impl Agent {
    /// One job and then never another: nothing is prepared for a next one.
    pub(super) fn is_single_use(&self) -> bool {
        self.scaler.managed
    }

    pub(super) fn note_scaler(&mut self, ack: &RegisterAck) {
        self.scaler.managed = self.config.scaled.managed || ack.scaler_managed;
        self.scaler.pooled = ack.warm_pool;
        self.scaler.expects_job = ack.pending_dispatch;
        self.scaler.quiet = None;
    }

    /// A job was offered: the wait for it is over.
    pub(super) fn note_offer(&mut self) {
        self.scaler.expects_job = false;
        self.scaler.quiet = None;
    }

    /// Whether an agent of a scaler has waited long enough. It never ends while it is cut off or while the orchestrator lacks
    /// a result or a log.
    pub(super) fn is_idle_for_good(&mut self) -> bool {
        let busy = self.link.is_none()
            || !self.jobs.is_empty()
            || !self.deferred.is_empty()
            || self.post.len() > 0
            // A log is on its way, or a reset runs.
            || !self.tasks.is_empty();
        if !self.scaler.managed || self.scaler.pooled || busy {
            self.scaler.quiet = None;
            return false;
        }
        let limit: Duration =
            if self.scaler.expects_job { self.config.scaled.pending_dispatch } else { self.config.scaled.idle };
        let since = *self.scaler.quiet.get_or_insert_with(Instant::now);
        since.elapsed() >= limit
    }
}
