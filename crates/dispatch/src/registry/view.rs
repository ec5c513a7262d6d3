//! What operators see of the agents.

use kici_engine::ids::{AgentId, SessionId, TokenId};
use kici_engine::labels::AgentFacts;
use kici_engine::time::Ts;
use kici_store::model::{AgentType, JobRef};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

use super::Registry;

/// A connected agent.
#[derive(Clone, Debug)]
pub struct AgentView {
    /// Its name.
    pub agent_id: AgentId,
    /// Its session.
    pub session_id: SessionId,
    /// Labels, taints and machine.
    pub facts: Arc<AgentFacts>,
    /// The token it used; none with authentication off.
    pub token_id: Option<TokenId>,
    /// How long it lives.
    pub lifecycle: AgentType,
    /// Started by a scaler.
    pub scaler_managed: bool,
    /// Its slots.
    pub max_concurrency: u32,
    /// Operating system, as Rust names it.
    pub platform: String,
    /// Processor, as Rust names it.
    pub arch: String,
    /// Version of the agent.
    pub version: String,
    /// Its host.
    pub hostname: Option<String>,
    /// What it can do.
    pub capabilities: Vec<String>,
    /// When the session began.
    pub registered_at: Ts,
    /// Time since its last frame.
    pub silent_for: Duration,
    /// Why it takes no job now; none when it does.
    pub unready: Option<String>,
    /// True while it drains.
    pub draining: bool,
    /// The jobs it holds.
    pub jobs: Vec<HeldView>,
}

/// A job that a connected agent holds.
#[derive(Clone, Debug)]
pub struct HeldView {
    /// The delivery.
    pub job: JobRef,
    /// The agent said that it took it.
    pub acked: bool,
    /// Its start was granted.
    pub started: bool,
    /// It is being cancelled.
    pub cancelling: bool,
    /// Last sign of life of the job.
    pub last_heartbeat: Ts,
}

impl Registry {
    /// All agents, by name.
    pub fn views(&self) -> Vec<AgentView> {
        let now = Instant::now();
        let inner = self.lock();
        inner
            .agents
            .values()
            .map(|entry| {
                let identity = entry.identity.clone();
                AgentView {
                    agent_id: identity.agent_id,
                    session_id: identity.session_id,
                    facts: identity.facts,
                    token_id: identity.token_id,
                    lifecycle: identity.lifecycle,
                    scaler_managed: identity.scaler_managed,
                    max_concurrency: identity.max_concurrency,
                    platform: identity.platform,
                    arch: identity.arch,
                    version: identity.version,
                    hostname: identity.hostname,
                    capabilities: identity.capabilities,
                    registered_at: identity.registered_at,
                    silent_for: now.duration_since(entry.last_frame),
                    unready: entry.unready(now),
                    draining: entry.draining.is_some(),
                    jobs: entry
                        .jobs
                        .values()
                        .map(|job| HeldView {
                            job: job.job,
                            acked: job.acked,
                            started: job.started,
                            cancelling: job.cancelling,
                            last_heartbeat: job.last_heartbeat,
                        })
                        .collect(),
                }
            })
            .collect()
    }
}
