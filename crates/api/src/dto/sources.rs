//! Sources: where events and commits come from.

use std::collections::BTreeMap;

use kici_engine::ids::{DeliveryRowId, SourceId};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use utoipa::ToSchema;

use super::SecretText;

/// The kind of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// A GitHub App.
    Github,
    /// Anything that can send a webhook.
    Generic,
    /// A repository on the orchestrator's disk.
    Local,
}

impl SourceKind {
    /// The word in JSON and in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Github => "github",
            Self::Generic => "generic",
            Self::Local => "local",
        }
    }
}

/// One source. Secrets are named, never shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SourceView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: SourceId,
    /// Unique in the organisation.
    pub name: String,
    /// Its kind.
    pub kind: SourceKind,
    /// `github:<app>`, `generic:<org>:<source id>` or `local:<source id>`.
    pub routing_key: String,
    /// Its settings, by kind.
    #[schema(value_type = Object)]
    pub config: Json,
    /// Names of the secrets that are set.
    pub secrets: Vec<String>,
    /// Where to send webhooks, as a path on this server.
    pub webhook_path: String,
    /// False: its webhooks answer 404.
    pub enabled: bool,
    /// Grows with each change.
    pub version: i64,
    /// When it was added.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
}

/// Adds a source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddSource {
    /// 1 to 63 of `a-z0-9-`, starting with a letter or digit.
    pub name: String,
    /// Its kind.
    pub kind: SourceKind,
    /// Settings of the kind: `{app_id, api_url?}`, `{verification, …}` or `{path}`.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub config: Json,
    /// Secrets of the kind: `webhook_secret`, `private_key`, ….
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, SecretText>,
}

/// Gives a source new secrets. Those that are not named stay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetSecrets {
    /// Secrets of the kind: `webhook_secret`, `private_key`; at least one.
    pub secrets: BTreeMap<String, SecretText>,
    /// Webhooks signed with an earlier secret stay valid too, until the secret is set again without this: for the time in
    /// which the sender changes over.
    #[serde(default)]
    pub keep_old: bool,
}

/// Sends a push event for a ref of the source, as if the forge had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TriggerSource {
    /// Branch, tag or full ref; the checked-out or default branch when left out.
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    pub git_ref: Option<String>,
    /// `owner/name`, for sources with several repositories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
}

/// A delivery that was accepted and will be worked on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeliveryAccepted {
    /// The row in the event log.
    #[schema(value_type = String)]
    pub delivery_id: DeliveryRowId,
}
