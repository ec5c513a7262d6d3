//! Hosts: declared by operators, or known because their agent registered.

use std::collections::BTreeMap;

use kici_engine::hosts::{HostStatus, Lifecycle, OnUnreachable, Reach};
use kici_engine::ids::AgentId;
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use utoipa::ToSchema;

/// Hosts per page when the caller names none.
pub const DEFAULT_HOSTS: u32 = 200;
/// Most hosts per page.
pub const MAX_HOSTS: u32 = 1000;

/// One host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    /// Its agent.
    #[schema(value_type = String)]
    pub id: AgentId,
    /// `ready`, `unreachable` (static and out of contact) or `stale` (ephemeral and out of contact).
    #[schema(value_type = String)]
    pub status: HostStatus,
    /// Its name.
    pub hostname: Option<String>,
    /// Labels that people gave it: those of its agent, or the declared ones while no agent has registered.
    pub labels: Vec<String>,
    /// Labels that the system set.
    pub automatic_labels: Vec<String>,
    /// `linux`, `macos`, ….
    pub platform: Option<String>,
    /// `x86_64`, `aarch64`, ….
    pub arch: Option<String>,
    /// Version of its agent.
    pub version: Option<String>,
    /// `static` hosts stay known until they are removed, `ephemeral` ones are forgotten.
    #[schema(value_type = String)]
    pub lifecycle: Lifecycle,
    /// A scaler made it.
    pub scaler_managed: bool,
    /// An operator declared it.
    pub declared: bool,
    /// The labels it was declared with, when those of its agent differ.
    pub declared_labels: Option<Vec<String>>,
    /// Text, numbers and booleans; those of the system are left out.
    #[schema(value_type = Object)]
    pub properties: BTreeMap<String, Json>,
    /// The orchestrator that its agent is connected to.
    pub instance: Option<String>,
    /// When it was heard of last; none when its agent never registered.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_seen_at: Option<Ts>,
    /// It is about to restart and gets no jobs until then, or until it is back.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub reboot_pending_until: Option<Ts>,
    /// When it became known.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
}

/// Filters of the list of hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct HostFilter {
    /// Terms that must all hold, separated by commas or blanks: labels, globs, `/regex/`, `status=`, `lifecycle=`,
    /// `property:KEY=VALUE`; `|` separates alternatives, `!` excludes. Every host when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Hosts per page, 1 to 1000; 200 when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// Declares a host. What is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DeclareHost {
    /// Its name; stands above what its agent says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Labels that its agent will have; they count until the agent registers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<Vec<String>>,
    /// Properties to set: text, numbers, booleans; null removes one.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    pub properties: BTreeMap<String, Json>,
}

/// Announces the restart of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RebootHost {
    /// The host gets jobs again after this many seconds even if it is not back; the server's default when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_s: Option<u64>,
}

/// Asks which hosts a `runs_on_all` job would go to now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PreviewHosts {
    /// As in the list of hosts, but only labels, globs, `/regex/`, `|` and `!`.
    pub selector: String,
    /// `hold`, `skip` or `fail`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub on_unreachable: OnUnreachable,
    /// Also hosts whose agent never registered.
    #[serde(default)]
    pub include_uninitialized: bool,
}

/// What a `runs_on_all` job would do now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostsPreview {
    /// The hosts in the order of the jobs.
    pub hosts: Vec<HostEffect>,
    /// What is to be known besides, for people: no host, or too many.
    pub note: Option<String>,
}

/// One host of a preview.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostEffect {
    /// The host.
    #[schema(value_type = String)]
    pub id: AgentId,
    /// How it stands.
    #[schema(value_type = String)]
    pub status: HostStatus,
    /// `run`, `hold` (the job waits for the host), `skip` or `fail`.
    #[schema(value_type = String)]
    pub effect: Reach,
}
