//! Agents, connected or known.

use kici_engine::ids::{AgentId, JobId, TokenId};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What an agent is up to. Derived, never stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AgentStatus {
    /// Connected, takes work.
    Ready,
    /// Connected, takes no new work.
    Draining,
    /// A static agent that is out of contact.
    Unreachable,
    /// An ephemeral agent that is out of contact.
    Stale,
}

/// One agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentView {
    /// Its name.
    #[schema(value_type = String)]
    pub id: AgentId,
    /// What it is up to.
    pub status: AgentStatus,
    /// Why it drains.
    pub drain_reason: Option<String>,
    /// All labels it offers, automatic ones included.
    pub labels: Vec<String>,
    /// Labels that a job must ask for.
    pub mandatory_labels: Vec<String>,
    /// `linux`, `darwin`, ….
    pub platform: Option<String>,
    /// `x64`, `arm64`, ….
    pub arch: Option<String>,
    /// Its host's name.
    pub hostname: Option<String>,
    /// Its program's version.
    pub version: Option<String>,
    /// Jobs it has now.
    pub jobs: Vec<JobIdText>,
    /// How many jobs it takes at once.
    pub max_concurrency: u32,
    /// True when a scaler made it.
    pub scaler_managed: bool,
    /// The orchestrator that it is connected to.
    pub instance: Option<String>,
    /// The token it came with.
    #[schema(value_type = Option<String>)]
    pub token_id: Option<TokenId>,
    /// When it was heard of last.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_seen_at: Option<Ts>,
    /// When its present session began.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub connected_at: Option<Ts>,
}

/// A job id inside a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = String)]
pub struct JobIdText(pub JobId);

/// Filters of the list of agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct AgentFilter {
    /// Only agents that offer this label.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Only agents in this state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<AgentStatus>,
}

/// Starts or ends the drain of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainAgent {
    /// True: no new work; false: take work again.
    pub drain: bool,
    /// Shown in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
