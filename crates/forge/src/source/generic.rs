//! Configuration of generic webhooks.

use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Where a generic source takes a value from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extract {
    /// A request header.
    Header(String),
    /// An RFC 9535 JSONPath into the body; the first node counts.
    Path(String),
}

/// A generic webhook (R61).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenericConfig {
    /// How a call proves where it comes from.
    pub verification: Verification,
    /// Event name; absent value = `webhook`.
    #[serde(default = "event_header")]
    pub event_from: Extract,
    /// Action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action_from: Option<Extract>,
    /// Repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo_from: Option<Extract>,
    /// Ref; a bare name is a branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ref_from: Option<Extract>,
    /// Commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha_from: Option<Extract>,
    /// Delivery id; comes before the usual headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key_from: Option<Extract>,
    /// Events that are let in; empty = all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed_events: Vec<String>,
    /// Calls per minute.
    #[serde(default = "rate_limit")]
    pub rate_limit_rpm: u32,
    /// Headers that are not stored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strip_headers: Vec<String>,
    /// Largest body in bytes.
    #[serde(default = "max_payload")]
    pub max_payload_bytes: u64,
    /// For calls without a delivery id: how long an equal body counts as the same event, in milliseconds.
    #[serde(default = "dedup_window")]
    pub dedup_window_ms: u64,
}

fn event_header() -> Extract {
    Extract::Header("x-event-type".to_owned())
}

const fn rate_limit() -> u32 {
    600
}

const fn max_payload() -> u64 {
    1024 * 1024
}

const fn dedup_window() -> u64 {
    300_000
}

impl GenericConfig {
    /// A source with this verification and every other field at its default.
    pub fn new(verification: Verification) -> Self {
        Self {
            verification,
            event_from: event_header(),
            action_from: None,
            repo_from: None,
            ref_from: None,
            sha_from: None,
            idempotency_key_from: None,
            allowed_events: Vec::new(),
            rate_limit_rpm: rate_limit(),
            strip_headers: Vec::new(),
            max_payload_bytes: max_payload(),
            dedup_window_ms: dedup_window(),
        }
    }

    /// [`GenericConfig::dedup_window_ms`] as a duration.
    pub const fn dedup_window(&self) -> Duration {
        Duration::from_millis(self.dedup_window_ms)
    }

    pub(super) fn extracts(&self) -> impl Iterator<Item = (&'static str, &Extract)> {
        [
            ("event_from", Some(&self.event_from)),
            ("action_from", self.action_from.as_ref()),
            ("repo_from", self.repo_from.as_ref()),
            ("ref_from", self.ref_from.as_ref()),
            ("sha_from", self.sha_from.as_ref()),
            ("idempotency_key_from", self.idempotency_key_from.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, extract)| extract.map(|e| (name, e)))
    }
}

/// How a call proves where it comes from (R3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Verification {
    /// HMAC-SHA256 of the body in hex, with or without `sha256=` before it.
    Hmac {
        /// Header that carries it.
        #[serde(default = "signature_header")]
        header: String,
    },
    /// The secret itself in a header, as GitLab sends it.
    Token {
        /// Header that carries it.
        #[serde(default = "token_header")]
        header: String,
    },
    /// `Authorization: Bearer <secret>`.
    Bearer {},
    /// The caller's address lies in one of these networks.
    Cidr {
        /// Networks such as `10.0.0.0/8`.
        #[serde(with = "networks")]
        allow: Vec<IpNet>,
    },
    /// No proof. Anyone who reaches the address can start workflows.
    None {
        /// Must be `true`, so that nobody gets here by accident.
        #[serde(default)]
        allow_unsigned: bool,
    },
}

/// Networks as text.
mod networks {
    use ipnet::IpNet;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(networks: &[IpNet], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(networks.iter().map(ToString::to_string))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let bad = |text: &str| serde::de::Error::custom(format!("`{text}` is not a network such as 10.0.0.0/8"));
        texts.iter().map(|text| text.parse().map_err(|_| bad(text))).collect()
    }
}

fn signature_header() -> String {
    "x-hub-signature-256".to_owned()
}

fn token_header() -> String {
    "x-gitlab-token".to_owned()
}

impl Verification {
    /// Whether it needs a secret.
    pub const fn needs_secret(&self) -> bool {
        matches!(self, Self::Hmac { .. } | Self::Token { .. } | Self::Bearer {})
    }
}
