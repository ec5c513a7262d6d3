//! Typed identifiers: one newtype per kind of thing, so that a run id can never be passed where a job id is meant.
//!
//! All are UUID version 7 (RFC 9562), minted by an [`IdSource`]. People see them with a prefix (`run_0190…`); databases
//! and file paths carry the bare UUID. Parsing accepts both forms. Id order is only *approximately* creation order:
//! never use it for fencing.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// Where fresh ids come from. The program passes the system's source; tests pass a counting one.
pub trait IdSource: Send + Sync {
    /// A fresh UUID, version 7.
    fn uuid(&self) -> Uuid;
}

/// Text that is not an id of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {kind} id; expected `{prefix}` followed by a UUID, or a UUID")]
pub struct ParseIdError {
    text: String,
    kind: &'static str,
    prefix: &'static str,
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident, $kind:literal, $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Uuid);

        impl $name {
            /// What stands before the UUID when a person sees this id.
            pub const PREFIX: &'static str = $prefix;

            /// A fresh id from `source`.
            pub fn mint(source: &dyn IdSource) -> Self {
                Self(source.uuid())
            }

            /// Wraps a UUID read back from storage.
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The bare UUID, as stored.
            pub const fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let bare = text.strip_prefix($prefix).unwrap_or(text);
                Uuid::try_parse(bare).map(Self).map_err(|_| ParseIdError {
                    text: text.chars().take(80).collect(),
                    kind: $kind,
                    prefix: $prefix,
                })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

ids! {
    /// One workflow run.
    RunId, "run", "run_";
    /// One job of a run; also the id of its queue row.
    JobId, "job", "job_";
    /// One source: a forge application, a repository on disk, a generic webhook.
    SourceId, "source", "src_";
    /// One stored delivery (the row in the durable inbox), not the forge's own delivery id.
    DeliveryRowId, "delivery", "dlv_";
    /// One event on the internal bus.
    EventId, "event", "evt_";
    /// One registered workflow of a default branch.
    RegistrationId, "registration", "reg_";
    /// One token of an agent or of an operator.
    TokenId, "token", "tok_";
    /// One statement that a repository may start workflows of another one.
    TrustId, "event trust", "trs_";
    /// One artifact of a run.
    ArtifactId, "artifact", "art_";
    /// One entry of a cache.
    CacheEntryId, "cache entry", "cac_";
    /// One upload of a job.
    UploadId, "upload", "upl_";
    /// One control session of an agent.
    SessionId, "session", "ses_";
}

/// An agent's name: chosen by its operator or made from its host name, unique in the installation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct AgentId(String);

/// An agent id that breaks the rule `[A-Za-z0-9._-]{1,128}`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an agent id; use 1 to 128 of letters, digits, `.`, `_` and `-`")]
pub struct InvalidAgentId(String);

impl AgentId {
    /// Checks and wraps a name.
    ///
    /// # Errors
    /// [`InvalidAgentId`] when it is empty, longer than 128 bytes or holds other characters than `[A-Za-z0-9._-]`.
    pub fn new(text: impl Into<String>) -> Result<Self, InvalidAgentId> {
        let text = text.into();
        let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if (1..=128).contains(&text.len()) && text.bytes().all(legal) {
            Ok(Self(text))
        } else {
            Err(InvalidAgentId(text.chars().take(128).collect()))
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for AgentId {
    type Err = InvalidAgentId;

    fn from_str(text: &str) -> Result<Self, InvalidAgentId> {
        Self::new(text)
    }
}

impl<'de> Deserialize<'de> for AgentId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// One start of one orchestrator process' data directory; stable across restarts.
pub type InstanceId = AgentId;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_parse_with_and_without_their_prefix() {
        let uuid = Uuid::from_u128(7);
        let id = RunId::from_uuid(uuid);
        assert_eq!(id.to_string().parse::<RunId>(), Ok(id));
        assert_eq!(uuid.to_string().parse::<RunId>(), Ok(id));
        let error = "job_x".parse::<RunId>().unwrap_err().to_string();
        assert_eq!(error, "`job_x` is not a run id; expected `run_` followed by a UUID, or a UUID");
    }

    #[test]
    fn agent_ids_hold_no_path_characters() {
        assert!(AgentId::new("build-1.example").is_ok());
        for bad in ["", "../x", "a b", "ä", &"x".repeat(129)] {
            assert!(AgentId::new(bad).is_err(), "{bad}");
        }
    }
}
