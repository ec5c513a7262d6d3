//! The orchestrator itself: health, readiness, capabilities, drain, diagnosis.

use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /health`: the process answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Always `ok`.
    pub status: String,
    /// The node.
    pub instance_id: String,
    /// `coordinator` or `worker`.
    pub role: String,
    /// Program version.
    pub version: String,
    /// What was built.
    pub build: BuildInfo,
    /// Seconds since the start.
    pub uptime_s: u64,
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BuildInfo {
    /// The commit, or `unknown`.
    pub commit: String,
    /// The target triple.
    pub target: String,
}

/// `GET /ready`: 200 when it can work, else 503.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ready {
    /// True when every check is `ok`.
    pub ready: bool,
    /// A draining node is ready: its API and its logs are still needed.
    pub draining: bool,
    /// The checks by name: `ok`, or what is wrong.
    pub checks: std::collections::BTreeMap<String, String>,
}

/// What this server can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Capabilities {
    /// Program version.
    pub version: String,
    /// Version of the REST interface.
    pub api: String,
    /// Optional parts that are there, sorted.
    pub features: Vec<String>,
}

/// Starts or ends the drain of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// True: claim no more jobs; false: go on.
    pub drain: bool,
    /// Shown in health and diagnosis.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Whether a node drains, and how much is left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainState {
    /// It claims no more jobs.
    pub draining: bool,
    /// Why.
    pub reason: Option<String>,
    /// Jobs of this node that still run.
    pub jobs_running: u32,
}

/// How an orchestrator and its background work are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OrchestratorStatus {
    /// The node.
    pub instance_id: String,
    /// It holds the lease: what one node is enough for is done here.
    pub leader: bool,
    /// Whether it drains.
    pub drain: DrainState,
    /// The background work, by name.
    pub reconcilers: Vec<ReconcilerView>,
}

/// One part of the background work on this node, since its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReconcilerView {
    /// Its name, as in the label `job` of the metrics.
    pub name: String,
    /// How often it runs, in milliseconds.
    pub interval_ms: u64,
    /// It runs on the node that holds the lease only.
    pub leader_only: bool,
    /// It runs right now.
    pub running: bool,
    /// Activations that ended.
    pub runs: u64,
    /// Those of them that failed; the next activation tries again.
    pub failures: u64,
    /// When the last activation began.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_started_at: Option<Ts>,
    /// How long the last one took, in milliseconds.
    pub last_duration_ms: Option<u64>,
    /// How many things the last one changed; none when it failed.
    pub last_changed: Option<u64>,
    /// Why the last one failed.
    pub last_error: Option<String>,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckStatus {
    /// Good.
    Pass,
    /// Worth a look.
    Warn,
    /// Bad.
    Fail,
}

/// One check of the diagnosis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Check {
    /// `database`, `disk`, `agents`, ….
    pub name: String,
    /// How it ended.
    pub status: CheckStatus,
    /// One sentence, at most 80 characters that matter.
    pub message: String,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
}

/// All checks and the worst of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Diagnosis {
    /// The worst status.
    pub status: CheckStatus,
    /// The checks.
    pub checks: Vec<Check>,
}
