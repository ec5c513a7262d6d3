//! The event log: deliveries, how they were decided, and dead letters.

use kici_engine::ids::{DeliveryRowId, RunId};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use utoipa::{IntoParams, ToSchema};

/// One delivery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeliveryView {
    /// The row.
    #[schema(value_type = String)]
    pub id: DeliveryRowId,
    /// The sender's own id of the delivery.
    pub delivery_id: String,
    /// Name of the source.
    pub source: String,
    /// `github`, `generic` or `local`.
    pub provider: String,
    /// `direct`, `relay`, `poll`, `manual` or `internal`.
    pub channel: String,
    /// The forge's name of the event.
    pub event: String,
    /// The forge's action.
    pub action: Option<String>,
    /// `received`, `processed`, `skipped`, `failed`, `dead`, ….
    pub status: String,
    /// Workflows that matched.
    pub matched_count: u32,
    /// `owner/name`.
    pub repo: Option<String>,
    /// Full ref.
    #[serde(rename = "ref")]
    pub git_ref: Option<String>,
    /// The commit.
    pub sha: Option<String>,
    /// The first run it started.
    #[schema(value_type = Option<String>)]
    pub first_run_id: Option<RunId>,
    /// What went wrong.
    pub error: Option<String>,
    /// What else is worth knowing, for instance which workflow matched or why none did.
    pub note: Option<String>,
    /// Attempts to work on it.
    pub attempts: u32,
    /// Size of the body in bytes.
    pub payload_bytes: u64,
    /// SHA-256 of the body, hex.
    pub payload_sha256: String,
    /// Why the body is not kept: `size_exceeded`, `storage_failed`, `expired`.
    pub payload_omitted: Option<String>,
    /// When the next attempt is due.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub next_attempt_at: Option<Ts>,
    /// When it came in.
    #[schema(value_type = String, format = DateTime)]
    pub received_at: Ts,
    /// When it was done with.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Ts>,
    /// The request that brought it.
    pub request_id: Option<String>,
}

/// Filters of the event log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct DeliveryFilter {
    /// Only this status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Only this source, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Only this event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<String>,
    /// Only this repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Only deliveries whose sender's id holds this text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delivery_id: Option<String>,
    /// Received at this instant or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, format = DateTime)]
    pub from: Option<Ts>,
    /// Received before this instant.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>, format = DateTime)]
    pub to: Option<Ts>,
}

/// The body of a delivery as it was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// The sender's content type.
    pub content_type: String,
    /// The bytes.
    pub body: Vec<u8>,
}

/// Why a delivery started what it started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// The delivery.
    pub delivery: DeliveryView,
    /// The decision trace: per workflow and trigger each check with what was expected and found. Null when it is no
    /// longer kept or matching was not reached.
    #[schema(value_type = Option<Object>)]
    pub trace: Option<Json>,
    /// The runs it started.
    pub runs: Vec<RunRef>,
}

/// A run that a delivery started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunRef {
    /// The run.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// Its workflow.
    pub workflow: String,
    /// Its status.
    #[schema(value_type = String)]
    pub status: kici_engine::state::RunStatus,
}

/// How many dead letters there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DlqCount {
    /// Their number.
    pub count: u64,
}

/// Gives a dead letter up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Discard {
    /// Why; kept with the row.
    pub reason: String,
}
