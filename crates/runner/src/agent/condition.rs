//! How the agent is: told to the orchestrator, and to whoever asks on this host.

use kici_protocol::agent::{AgentStatus, agent_frame};

use super::http::Health;
use super::{Agent, MIN_FREE_BYTES};

impl Agent {
    /// Looks at the disk, and tells the orchestrator when that changes anything.
    pub(super) fn check_disk(&mut self) {
        let mut degraded: Vec<String> =
            self.degraded.iter().filter(|why| !why.starts_with("disk: ")).cloned().collect();
        degraded.extend(self.disk_full());
        if degraded != self.degraded {
            self.degraded = degraded;
            self.say_status();
        }
    }

    /// Why the disk is too full for work.
    pub(super) fn disk_full(&self) -> Option<String> {
        let paused = self.jobs.values().any(|held| held.spool.is_disk_full());
        let free = |dir| kici_sys::host::disk_free_bytes(dir).ok();
        let low = [self.config.state_dir.as_path(), &self.config.work_dir]
            .into_iter()
            .find_map(|dir| free(dir).filter(|free| *free < MIN_FREE_BYTES).map(|free| (dir, free)));
        match low {
            Some((dir, free)) => Some(format!("disk: {} MiB free in {}", free >> 20, dir.display())),
            None => paused.then(|| "disk: full".to_owned()),
        }
    }

    /// Notes why the agent is not well, and tells the orchestrator.
    pub(super) fn degrade(&mut self, why: String) {
        if !self.degraded.contains(&why) {
            self.degraded.push(why);
            self.say_status();
        }
    }

    /// Tells the orchestrator.
    pub(super) fn say_status(&mut self) {
        let status = AgentStatus {
            active_jobs: u32::try_from(self.active()).unwrap_or(u32::MAX),
            draining: self.draining || self.resets.gave_up,
            resetting: self.is_resetting(),
            degraded: self.degraded.clone(),
        };
        let leaves = status.draining;
        let seq = self.send(agent_frame::Frame::AgentStatus(status));
        self.leave.said(seq.filter(|_| leaves));
    }

    /// Tells the pages of health and metrics how the agent is.
    pub(super) fn tell_health(&self) {
        let mut not_ready = self.degraded.clone();
        let words = [
            (self.link.is_none(), "no session with the orchestrator"),
            (self.draining, "draining"),
            (self.is_resetting(), "resetting"),
        ];
        not_ready.extend(words.iter().filter(|(so, _)| *so).map(|(_, word)| (*word).to_owned()));
        let health = Health {
            agent_id: self.state.agent_id.to_string(),
            connected: self.link.is_some(),
            active_jobs: self.active(),
            not_ready,
        };
        self.health.send_if_modified(|now| {
            let changed = *now != health;
            if changed {
                metrics::gauge!("kici_agent_connected").set(f64::from(u8::from(health.connected)));
                metrics::gauge!("kici_agent_jobs_active").set(as_f64(health.active_jobs));
                *now = health;
            }
            changed
        });
        metrics::gauge!("kici_agent_outbox_pending").set(as_f64(self.post.len()));
    }
}

/// Counts here are far below 2^32.
fn as_f64(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
