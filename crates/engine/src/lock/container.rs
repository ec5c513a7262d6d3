//! The container of a job, the services beside it, and what it may use of its host.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Material, Value};

/// Most services of a job.
pub const MAX_SERVICES: usize = 16;
/// Most ports of a service.
pub const MAX_PORTS: usize = 16;
/// Longest reference of an image.
const MAX_IMAGE_BYTES: usize = 512;

/// Capabilities that a workflow may ask for without a word of the agent's operator: those that programs need to install
/// packages or to step down from root inside of a container. None of them reaches out of it (capabilities(7)).
pub const HARMLESS_CAPABILITIES: [&str; 10] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID"];

/// The container that the steps of a job run in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Container {
    /// The image; rendered when the job is dispatched.
    pub image: Value,
    /// Environment of every step in it, below that of the workflow.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
    /// The user of the steps, `name`, `uid`, `name:group` or `uid:gid`; the image's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// When the image is fetched.
    #[serde(default)]
    pub pull: Pull,
    /// For the registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<RegistryCredentials>,
    /// What differs from the hardened default.
    #[serde(default, skip_serializing_if = "ContainerOptions::is_default")]
    pub options: ContainerOptions,
}

/// When an image is fetched from its registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pull {
    /// Every time.
    Always,
    /// When the host does not have it.
    #[default]
    Missing,
    /// Not at all: the host must have it.
    Never,
}

/// User and password of a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegistryCredentials {
    /// User name.
    pub user: Material,
    /// Password or token.
    pub token: Material,
}

/// What a job's container may have beyond, or must do without, of the default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ContainerOptions {
    /// All rights of the host's root; only where the agent allows it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub privileged: bool,
    /// Capabilities besides none, in capitals without `CAP_`; beyond [`HARMLESS_CAPABILITIES`] only where the agent allows it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cap_add: Vec<String>,
    /// The root file system cannot be written; workspace and `/tmp` can.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Size of `/dev/shm`, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_bytes: Option<u64>,
}

impl ContainerOptions {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A container beside a job, for as long as the job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Service {
    /// The image; rendered when the job is dispatched.
    pub image: Value,
    /// Its environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
    /// Ports that a job without a container reaches on its host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<Port>,
    /// How it is seen that it is ready; it only has to run when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
    /// For the registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<RegistryCredentials>,
}

/// A port of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Port {
    /// In its container.
    pub container: u16,
    /// On the loopback address of the host; any free one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<u16>,
}

/// The question whether a service is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Health {
    /// A script for `sh` in its container; exit code 0 is yes.
    pub run: String,
    /// Between two questions, in milliseconds.
    pub interval_ms: u64,
    /// How often it is asked before the job fails.
    pub retries: u32,
}

/// What a job needs and what it may use at most.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Resources {
    /// What an agent made for it must have.
    pub requests: Amounts,
    /// What it gets at most.
    pub limits: Amounts,
}

/// Amounts of what a host has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Amounts {
    /// Thousandths of a processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_millis: Option<u64>,
    /// Memory, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// Whether a text is a reference of an image: `[registry[:port]/]path[:tag][@sha256:digest]`, in the grammar of the distribution
/// project (github.com/distribution/reference), of which this checks what could lead astray.
pub fn is_image(text: &str) -> bool {
    let (name, digest) = text.split_once('@').map_or((text, None), |(name, digest)| (name, Some(digest)));
    let (path, tag) = match name.rsplit_once(':') {
        // A colon before the last slash belongs to the port of a registry.
        Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
        _ => (name, None),
    };
    let is_tag = |tag: &str| {
        (1..=128).contains(&tag.len())
            && !tag.starts_with(['.', '-'])
            && tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
    };
    let is_digest = |digest: &str| {
        digest.strip_prefix("sha256:").is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
    };
    let mut parts = path.split('/').peekable();
    let (first, several) = (parts.peek().copied().unwrap_or_default(), path.contains('/'));
    if several && (first.contains(['.', ':']) || first == "localhost") {
        parts.next();
        let (host, port) = first.split_once(':').map_or((first, None), |(host, port)| (host, Some(port)));
        let edge = |c: char| c.is_ascii_alphanumeric();
        let is_host = host.starts_with(edge)
            && host.ends_with(edge)
            && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-'));
        if !is_host || port.is_some_and(|port| port.parse::<u16>().is_err()) {
            return false;
        }
    }
    let is_part = |part: &str| {
        let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        part.starts_with(edge)
            && part.ends_with(edge)
            && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'.' | b'-'))
    };
    text.len() <= MAX_IMAGE_BYTES && parts.all(is_part) && tag.is_none_or(is_tag) && digest.is_none_or(is_digest)
}

/// The name of a service in environment variables: `db-1` is `DB_1`.
pub fn service_variable(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_of_images() {
        let digest = format!("rust@sha256:{}", "a".repeat(64));
        for good in [
            "rust",
            "rust:1.86",
            "library/rust:1.86-slim",
            "registry.example.com/acme/scanner:3",
            "localhost/x",
            "localhost:5000/acme/x_y.z:latest",
            &digest,
        ] {
            assert!(is_image(good), "{good}");
        }
        let long = "a".repeat(600);
        for bad in [
            "",
            "Rust",
            "rust:",
            "rust:-1",
            "rust latest",
            "../x",
            "/x",
            "x/",
            "a//b",
            "host:x/a",
            "rust@sha256:12",
            "-v/x",
            "rust?tag=1",
            "rust:1&a=b",
            &long,
        ] {
            assert!(!is_image(bad), "{bad}");
        }
    }

    #[test]
    fn names_of_services_as_variables() {
        assert_eq!(service_variable("db-1"), "DB_1");
    }
}
