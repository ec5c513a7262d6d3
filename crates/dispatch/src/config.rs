//! The settings of the dispatcher. Defaults are those of the configuration reference.

use std::time::Duration;

use kici_engine::ids::InstanceId;

use crate::decide::rate::RateLimits;

/// Whether agents must show a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentAuth {
    /// A valid agent token is needed.
    Token,
    /// Anybody who reaches the port is an agent. A token that is shown is ignored.
    None,
}

/// The settings of one dispatcher.
#[derive(Clone, Debug)]
pub struct DispatchConfig {
    /// This orchestrator.
    pub instance: InstanceId,
    /// The installation, told to agents so that they keep results of different installations apart.
    pub cluster_id: String,
    /// Hash of this machine's id, as agents report theirs: jobs of `file://` sources run only on the same machine.
    pub machine_id: Option<String>,
    /// Whether agents must show a token.
    pub auth: AgentAuth,
    /// Oldest agent version that is told to agents as current enough.
    pub min_agent_version: String,
    /// How long an offer may stay unanswered.
    pub ack_timeout: Duration,
    /// Deliveries of one job that may be undone before it fails.
    pub max_attempts: u32,
    /// How long a job waits for an agent; zero is for ever.
    pub queue_timeout: Duration,
    /// How long a job may be without any agent that could run it before it fails as unroutable; zero switches it off.
    pub unroutable_grace: Duration,
    /// How many jobs may wait for an agent.
    pub max_depth: u64,
    /// More waiting jobs than this for two measurements are warned about; zero switches it off.
    pub backpressure_threshold: u64,
    /// How long a run or job waits for a slot of a concurrency group.
    pub concurrency_wait: Duration,
    /// How long the job of a lost agent waits for it.
    pub recovery_window: Duration,
    /// How often agents send a heartbeat.
    pub heartbeat_interval: Duration,
    /// A session without any frame for this long is closed.
    pub heartbeat_timeout: Duration,
    /// How often agents send a heartbeat for each job.
    pub job_heartbeat_interval: Duration,
    /// A started job without a heartbeat for this long is stale.
    pub stale_after: Duration,
    /// How long a question to the database about who owns a job may take.
    pub ownership_timeout: Duration,
    /// `Register` must come within this time.
    pub register_timeout: Duration,
    /// Largest log of one step in bytes, told to agents; zero leaves it to the settings of each.
    pub max_log_bytes: u64,
    /// Time from TERM to KILL for jobs that name none.
    pub default_grace: Duration,
    /// Longest time from TERM to KILL.
    pub max_grace: Duration,
    /// What a cancelled job may take beyond its grace before it is ended here.
    pub cancel_slack: Duration,
    /// Limits of one session.
    pub rate: RateLimits,
    /// How often waiting jobs are looked for without a signal.
    pub redrive_interval: Duration,
    /// A connected host that was silent for longer counts as out of contact.
    pub roster_grace: Duration,
    /// How long ephemeral hosts that are gone stay known.
    pub roster_ttl: Duration,
    /// Most hosts that one generated `runs_on_all` job goes to.
    pub max_fanout_hosts: usize,
    /// How long a host may take to restart.
    pub reboot_deadline: Duration,
    /// How often waiting jobs are offered to the scaler without a signal.
    pub pending_sweep_interval: Duration,
    /// How long an agent that a scaler started may be away from a job that it started.
    pub scaler_reconnect_grace: Duration,
}

impl DispatchConfig {
    /// The defaults, for this instance of this installation.
    pub fn new(instance: InstanceId, cluster_id: String) -> Self {
        Self {
            instance,
            cluster_id,
            machine_id: None,
            auth: AgentAuth::Token,
            min_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            ack_timeout: Duration::from_secs(10),
            max_attempts: 5,
            queue_timeout: Duration::from_secs(3600),
            unroutable_grace: Duration::from_secs(120),
            max_depth: 1000,
            backpressure_threshold: 100,
            concurrency_wait: Duration::from_secs(3600),
            recovery_window: Duration::from_secs(120),
            heartbeat_interval: Duration::from_secs(30),
            heartbeat_timeout: Duration::from_secs(180),
            job_heartbeat_interval: Duration::from_secs(60),
            stale_after: Duration::from_secs(120),
            ownership_timeout: Duration::from_secs(5),
            register_timeout: Duration::from_secs(10),
            max_log_bytes: 0,
            default_grace: Duration::from_secs(10),
            max_grace: Duration::from_secs(30),
            cancel_slack: Duration::from_secs(30),
            rate: RateLimits::default(),
            redrive_interval: Duration::from_secs(10),
            roster_grace: Duration::from_secs(300),
            roster_ttl: Duration::from_secs(1800),
            max_fanout_hosts: kici_engine::hosts::DEFAULT_MAX_HOSTS,
            reboot_deadline: Duration::from_secs(900),
            pending_sweep_interval: Duration::from_secs(10),
            scaler_reconnect_grace: Duration::from_secs(90),
        }
    }
}
