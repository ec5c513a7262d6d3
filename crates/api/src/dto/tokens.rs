//! Tokens of agents and of operators.

use kici_access::Role;
use kici_engine::ids::{AgentId, TokenId};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::SecretText;

/// Creates a token for agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateAgentToken {
    /// The only labels that its agents may offer besides the automatic ones; any when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<Vec<String>>,
    /// Labels that a job must ask for to run on its agents.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mandatory_labels: Vec<String>,
    /// Its agents may offer `kici:privileged:root`.
    pub privileged_root: bool,
    /// What its agents are: `static` ones that people operate, one `ephemeral` one, or a `bootstrap` that enrols once.
    #[schema(value_type = String)]
    pub kind: AgentTokenUse,
    /// The one agent that may use it; needed for `ephemeral` and `bootstrap`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub agent_id: Option<AgentId>,
    /// A remark for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Ends after this many seconds. When left out: `static` never, `ephemeral` 1 h, `bootstrap` 10 min, which is also its most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
}

/// What a token of agents is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AgentTokenUse {
    /// Agents that people operate.
    #[default]
    Static,
    /// One agent that does not live long.
    Ephemeral,
    /// One agent, once.
    Bootstrap,
}

/// One token of agents; the token itself is not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentTokenView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: TokenId,
    /// The first characters, to recognise it by.
    pub prefix: String,
    /// The only labels its agents may offer; null = any.
    pub labels: Option<Vec<String>>,
    /// Labels that a job must ask for.
    pub mandatory_labels: Vec<String>,
    /// `static` or `ephemeral`.
    pub agent_type: String,
    /// `static`, `scaler` or `bootstrap`.
    pub kind: String,
    /// The one agent that may use it.
    #[schema(value_type = Option<String>)]
    pub agent_id: Option<AgentId>,
    /// When a bootstrap token was used.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub consumed_at: Option<Ts>,
    /// A remark for people.
    pub note: Option<String>,
    /// Who made it, as `type:id`.
    pub created_by: String,
    /// When it was made.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When an agent used it last.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_seen_at: Option<Ts>,
    /// When it ends.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Ts>,
    /// When it was revoked.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub revoked_at: Option<Ts>,
}

/// Creates a token for an operator or a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateAdminToken {
    /// What it is for.
    pub label: String,
    /// What it may do: `owner`, `admin` or `auditor`.
    #[schema(value_type = String)]
    pub role: Role,
    /// It sees only this source's runs and events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing_key: Option<String>,
    /// Ends after this many seconds; never when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
}

/// One token of operators; the token itself is not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdminTokenView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: TokenId,
    /// What it is for.
    pub label: String,
    /// The first characters, to recognise it by.
    pub prefix: String,
    /// What it may do.
    #[schema(value_type = String)]
    pub role: Role,
    /// It sees only this source's runs and events.
    pub routing_key: Option<String>,
    /// Who made it, as `type:id`.
    pub created_by: String,
    /// When it was made.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When it was used last.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_used_at: Option<Ts>,
    /// When it ends.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Ts>,
    /// When it was revoked.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub revoked_at: Option<Ts>,
}

/// A new token. This is the only time it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenCreated {
    /// Its id.
    #[schema(value_type = String)]
    pub id: TokenId,
    /// The token.
    pub token: SecretText,
    /// The first characters, as lists show them.
    pub prefix: String,
}

/// A token that is no longer accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenRevoked {
    /// Always true.
    pub revoked: bool,
    /// Sessions of agents that were closed.
    pub sessions_closed: u32,
    /// Other orchestrators that were told.
    pub peers_notified: u32,
}
