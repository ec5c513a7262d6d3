//! Secrets that jobs get, and the record of it.

use kici_engine::ids::{JobId, RunId};
use kici_engine::time::Ts;
use serde_json::Value as Json;
use uuid::Uuid;

/// An entry of the audit log of secrets to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct NewSecretAudit {
    /// Organisation.
    pub org: String,
    /// `user`, `api_key`, `service_account`, `platform_operator`, `agent`, `system`.
    pub actor_type: String,
    /// Who.
    pub actor_id: String,
    /// Their role, when they have one.
    pub role: Option<String>,
    /// What was done, `git_credential.mint`.
    pub action: String,
    /// Where: of a git credential its repository.
    pub scope: Option<String>,
    /// Which: of a git credential its name, or `source`.
    pub key: Option<String>,
    /// The context that it came from.
    pub context_name: Option<String>,
    /// For this run.
    pub run_id: Option<RunId>,
    /// For this job.
    pub job_id: Option<JobId>,
    /// `allowed`, `denied`, `error`.
    pub outcome: String,
    /// More, never a part of a secret.
    pub metadata: Option<Json>,
}

/// A stored entry of the audit log of secrets.
#[derive(Clone, Debug, PartialEq)]
pub struct SecretAudit {
    /// Its id.
    pub id: Uuid,
    /// When it was written.
    pub created_at: Ts,
    /// What it says.
    pub entry: NewSecretAudit,
}

/// Which entries to list.
#[derive(Clone, Debug, Default)]
pub struct SecretAuditFilter {
    /// For this run.
    pub run_id: Option<RunId>,
    /// For this job.
    pub job_id: Option<JobId>,
    /// Of this action.
    pub action: Option<String>,
    /// With this outcome.
    pub outcome: Option<String>,
    /// By this actor.
    pub actor_id: Option<String>,
    /// Not older than this.
    pub from: Option<Ts>,
    /// Older than this.
    pub to: Option<Ts>,
}
