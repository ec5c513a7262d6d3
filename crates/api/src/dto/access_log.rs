//! The access log: who did, or tried, what.

use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AccessView {
    /// Its id.
    pub id: Uuid,
    /// Who, as `type:id`.
    pub actor: String,
    /// What, for instance `run.cancel`.
    pub action: String,
    /// Through what: `admin_http`, `admin_cli`, `web_ui`, ….
    pub source: String,
    /// `allowed`, `denied` or `error`.
    pub outcome: String,
    /// Kind of the thing it was done to.
    pub target_type: Option<String>,
    /// That thing.
    pub target_id: Option<String>,
    /// The request.
    pub request_id: Option<String>,
    /// What went wrong.
    pub error_message: Option<String>,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
}

/// Filters of the access log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct AccessFilter {
    /// Only this actor, as `type:id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
    /// Only this action.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// Only this outcome.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Only things of this kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_type: Option<String>,
    /// Only this thing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_id: Option<String>,
    /// At this instant or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, format = DateTime)]
    pub from: Option<Ts>,
    /// Before this instant.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, format = DateTime)]
    pub to: Option<Ts>,
}
