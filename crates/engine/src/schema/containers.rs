//! `container`, `services` and `resources`.

use serde_json::{Value as Json, json};

use super::{object, reference};
use crate::compile::keys;
use crate::lock::{MAX_PORTS, MAX_SERVICES};

fn credentials() -> Json {
    let mut map = object(&keys::REGISTRY_CREDENTIALS, &["user_value", "token_value"], |key| match key {
        "user_value" => json!({"type": "string", "description": "User name"}),
        _ => json!({"type": "string", "description": "Password or token"}),
    });
    map["description"] = json!("For the registry");
    map
}

pub(super) fn container() -> Json {
    let options = object(&keys::CONTAINER_OPTIONS, &[], |key| match key {
        "cap_add" => reference("strings", "Capabilities besides none, such as SETUID"),
        "privileged" => {
            json!({"type": "boolean", "description": "All rights of the host; agents refuse it by default"})
        }
        "read_only" => json!({"type": "boolean", "description": "The root file system cannot be written"}),
        _ => reference("size", "Size of /dev/shm"),
    });
    let map = object(&keys::CONTAINER, &["image"], |key| match key {
        "image" => reference("template", "The image"),
        "env" => reference("env", "Environment of every step, below that of the workflow"),
        "user" => json!({"type": ["string", "integer"], "description": "User of the steps; the image's own if absent"}),
        "pull" => json!({
            "enum": ["missing", "always", "never"], "default": "missing", "description": "When the image is fetched",
        }),
        "credentials" => credentials(),
        _ => {
            let mut options = options.clone();
            options["description"] = json!("What differs from the hardened default");
            options
        }
    });
    json!({"anyOf": [{"type": "string"}, map]})
}

pub(super) fn services() -> Json {
    let health = object(&keys::HEALTH, &["run"], |key| match key {
        "run" => reference("script", "A script for sh in its container; exit code 0: ready"),
        "interval" => reference("duration", "Between two questions; 2s if absent"),
        _ => json!({"type": "integer", "minimum": 1, "maximum": 1000, "description": "How often; 30 if absent"}),
    });
    let service = object(&keys::SERVICE, &["image"], |key| match key {
        "image" => reference("template", "The image"),
        "env" => reference("env", "Its environment"),
        "ports" => json!({
            "type": "array",
            "description": "Ports for a job without a container: 5432, or 15432:5432 for a certain port of the host",
            "items": {"type": ["integer", "string"]},
            "maxItems": MAX_PORTS,
        }),
        "health" => json!({"description": "How it is seen that it is ready", "anyOf": [{"type": "string"}, health]}),
        _ => credentials(),
    });
    json!({
        "type": "object",
        "description": "Containers beside the job, reachable by these names",
        "propertyNames": {"pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"},
        "additionalProperties": {"anyOf": [{"type": "string"}, service]},
        "maxProperties": MAX_SERVICES,
    })
}

pub(super) fn resources() -> Json {
    let amount = |key: &str| match key {
        "cpus" => json!({"type": "number", "minimum": 0.01, "maximum": 4096, "description": "Processors"}),
        _ => reference("size", "Memory"),
    };
    let side = |what: &str| {
        let mut side = object(&keys::AMOUNTS, &[], amount);
        side["description"] = json!(what);
        side
    };
    let mut map = object(&keys::RESOURCES, &[], |key| match key {
        "requests" => side("What an agent made for it must have; as limits if absent"),
        "limits" => side("What it gets at most; as requests if absent"),
        other => amount(other),
    });
    map["description"] = json!("What it needs and may use");
    map
}
