//! Agents, their tokens, operators' tokens, instances, leases, the access log and the outbox.

use kici_engine::ids::{AgentId, InstanceId, TokenId};
use kici_engine::time::Ts;
use serde_json::Value as Json;
use uuid::Uuid;

use super::words;

words! {
    /// How long the agents of a token live.
    AgentType("agent type") {
        /// Operated by people.
        Static = "static",
        /// Made for one or a few jobs.
        Ephemeral = "ephemeral",
    }

    /// What an agent token is for.
    TokenKind("token kind") {
        /// Agents that people set up.
        Static = "static",
        /// One agent that a scaler started.
        Scaler = "scaler",
        /// Used once to enrol.
        Bootstrap = "bootstrap",
    }

    /// Role of an operator's token.
    Role("role") {
        /// Everything.
        Owner = "owner",
        /// Administers, but not tokens and keys.
        Admin = "admin",
        /// Reads.
        Auditor = "auditor",
    }
}

/// An agent token to be stored; only its hash is.
#[derive(Clone, Debug)]
pub struct NewAgentToken {
    /// SHA-256 (hex) of the whole token.
    pub token_hash: String,
    /// First 8 characters after the prefix, for display.
    pub token_prefix: String,
    /// For people.
    pub label: Option<String>,
    /// Labels that its agents may claim; none is any.
    pub labels: Option<Vec<String>>,
    /// Labels that a job must name to run there.
    pub mandatory_labels: Option<Vec<String>>,
    /// How long its agents live.
    pub agent_type: AgentType,
    /// What it is for.
    pub kind: TokenKind,
    /// Only this agent may use it.
    pub bound_agent_id: Option<AgentId>,
    /// Who created it.
    pub created_by: String,
    /// Not valid from then on.
    pub expires_at: Option<Ts>,
}

/// A stored agent token.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentToken {
    /// Its id.
    pub id: TokenId,
    /// For display.
    pub token_prefix: String,
    /// For people.
    pub label: Option<String>,
    /// Labels that its agents may claim; none is any.
    pub labels: Option<Vec<String>>,
    /// Labels that a job must name to run there.
    pub mandatory_labels: Option<Vec<String>>,
    /// How long its agents live.
    pub agent_type: AgentType,
    /// What it is for.
    pub kind: TokenKind,
    /// Only this agent may use it.
    pub bound_agent_id: Option<AgentId>,
    /// Who created it.
    pub created_by: String,
    /// When.
    pub created_at: Ts,
    /// When it was last used.
    pub last_seen_at: Option<Ts>,
    /// Not valid from then on.
    pub expires_at: Option<Ts>,
    /// Revoked.
    pub revoked_at: Option<Ts>,
    /// Used up.
    pub consumed_at: Option<Ts>,
}

/// An operator's token to be stored; only its hash is.
#[derive(Clone, Debug)]
pub struct NewAdminToken {
    /// SHA-256 (hex) of the whole token.
    pub token_hash: String,
    /// First 8 characters after the prefix, for display.
    pub token_prefix: String,
    /// For people.
    pub label: String,
    /// What it may do.
    pub role: Role,
    /// Only what belongs to this source.
    pub routing_key: Option<String>,
    /// Who created it.
    pub created_by: String,
    /// Not valid from then on.
    pub expires_at: Option<Ts>,
}

/// A stored operator's token.
#[derive(Clone, Debug, PartialEq)]
pub struct AdminToken {
    /// Its id.
    pub id: TokenId,
    /// For display.
    pub token_prefix: String,
    /// For people.
    pub label: String,
    /// What it may do.
    pub role: Role,
    /// Only what belongs to this source.
    pub routing_key: Option<String>,
    /// Who created it.
    pub created_by: String,
    /// When.
    pub created_at: Ts,
    /// When it was last used.
    pub last_used_at: Option<Ts>,
    /// Not valid from then on.
    pub expires_at: Option<Ts>,
    /// Revoked.
    pub revoked_at: Option<Ts>,
}

/// An orchestrator process.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    /// Its name.
    pub instance_id: InstanceId,
    /// One start of it.
    pub incarnation: Uuid,
    /// Its role.
    pub role: String,
    /// Where others reach it.
    pub address: Option<String>,
    /// Its version.
    pub version: String,
    /// When it started.
    pub started_at: Ts,
    /// Last sign of life.
    pub last_seen_at: Ts,
    /// Takes no new work.
    pub draining: bool,
}

/// A lease that was asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaseAnswer {
    /// Held by the asker, in this term.
    Held {
        /// Raised whenever the holder changes.
        term: i64,
    },
    /// Held by another one.
    Other {
        /// The holder.
        holder: InstanceId,
        /// Until then.
        expires_at: Ts,
    },
}

/// An entry of the access log to be written.
#[derive(Clone, Debug)]
pub struct NewAccess {
    /// Organisation.
    pub org: Option<String>,
    /// `user`, `api_key`, `service_account`, `platform_operator`, `agent`, `system`.
    pub actor_type: String,
    /// Who.
    pub actor_id: String,
    /// More of the actor.
    pub actor_meta: Option<Json>,
    /// What was done, `resource.verb`.
    pub action: String,
    /// `web_ui`, `admin_http`, `admin_cli`, `agent`, `pr_comment`, `platform_proxy`.
    pub source: String,
    /// `allowed`, `denied`, `error`.
    pub outcome: String,
    /// On what kind of thing.
    pub target_type: Option<String>,
    /// On which.
    pub target_id: Option<String>,
    /// The request.
    pub request_id: Option<String>,
    /// Of this source.
    pub routing_key: Option<String>,
    /// What went wrong.
    pub error_message: Option<String>,
}

/// A stored entry of the access log.
#[derive(Clone, Debug)]
pub struct Access {
    /// Its id.
    pub id: Uuid,
    /// When it was written.
    pub created_at: Ts,
    /// What it says.
    pub entry: NewAccess,
}

/// Which entries of the access log to list.
#[derive(Clone, Debug, Default)]
pub struct AccessFilter {
    /// By this actor.
    pub actor_id: Option<String>,
    /// Of this action.
    pub action: Option<String>,
    /// On this kind of thing.
    pub target_type: Option<String>,
    /// On this thing.
    pub target_id: Option<String>,
    /// With this outcome.
    pub outcome: Option<String>,
    /// Not older than this.
    pub from: Option<Ts>,
    /// Older than this.
    pub to: Option<Ts>,
}

/// A consequence outside the database that is still to be carried out.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxItem {
    /// Its id.
    pub id: Uuid,
    /// What is to be done.
    pub kind: String,
    /// With what.
    pub payload: Json,
    /// When it was written.
    pub created_at: Ts,
    /// Times it was tried.
    pub attempts: u32,
    /// Not before this.
    pub next_attempt_at: Ts,
}
