//! The audit log of secrets: who got, or was refused, which secret. Never a part of one.

use kici_engine::ids::{JobId, RunId};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

/// One entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AuditView {
    /// Its id.
    pub id: Uuid,
    /// Who, as `type:id`.
    pub actor: String,
    /// What, for instance `git_credential.mint`.
    pub action: String,
    /// `allowed`, `denied` or `error`.
    pub outcome: String,
    /// Where: of a git credential its repository, `host/owner/name`.
    pub scope: Option<String>,
    /// Which: of a git credential its name in the workflow, or `source`.
    pub key: Option<String>,
    /// For this run.
    #[schema(value_type = Option<String>)]
    pub run_id: Option<RunId>,
    /// For this job.
    #[schema(value_type = Option<String>)]
    pub job_id: Option<JobId>,
    /// More: of a git credential `kind`, `requested`, `granted`, `scoped`, `expires_at`, or the `reason` of a refusal.
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<serde_json::Value>,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
}

/// Filters of the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct AuditFilter {
    /// Only for this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub run: Option<RunId>,
    /// Only for this job.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub job: Option<JobId>,
    /// Only this action.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// Only this outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Only by this actor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
    /// At this instant or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, format = DateTime)]
    pub from: Option<Ts>,
    /// Before this instant.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, format = DateTime)]
    pub to: Option<Ts>,
}
