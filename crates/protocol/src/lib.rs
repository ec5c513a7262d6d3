#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

/// Generated from `proto/`, nested as the packages are.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated")]
mod kici {
    pub mod common {
        pub mod v1 {
            tonic::include_proto!("kici.common.v1");
        }
    }
    pub mod agent {
        pub mod v1 {
            tonic::include_proto!("kici.agent.v1");
        }
    }
}

pub mod close;
pub mod redact;
mod step;

pub use kici::agent::v1 as agent;
pub use kici::common::v1 as common;

/// The version this build speaks. An orchestrator refuses agents below [`MIN_PROTOCOL_VERSION`] and accepts newer ones.
pub const PROTOCOL_VERSION: u32 = 1;
/// The oldest agent protocol that is still served.
pub const MIN_PROTOCOL_VERSION: u32 = 1;
/// Largest gRPC message in bytes, both ways.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// The one wording of a refused job-scoped frame, whether the job is not the agent's or that cannot be told.
pub const NOT_ASSIGNED: &str = "job is not assigned to this agent";
/// Metadata key that ties a `StreamLogs` call to its session.
pub const SESSION_ID_HEADER: &str = "kici-session-id";

/// What an agent and an orchestrator can do beyond the first protocol version, by name. A build lists those it has in
/// `Register.capabilities` and `RegisterAck.capabilities`; an empty list means a build that has none.
pub const CAPABILITIES: &[&str] = &["cancel.answer", "frame.nack", "logs.resume"];

/// True when `list` holds `name`.
pub fn has_capability(list: &[String], name: &str) -> bool {
    list.iter().any(|have| have == name)
}
