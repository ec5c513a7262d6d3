//! The schema of `generate` and `invoke`.

use serde_json::{Value as Json, json};

use super::{object, reference};
use crate::compile::keys;

pub(super) fn generate() -> Json {
    let allow = object(&keys::ALLOW, &[], |key| match key {
        "environments" => reference("strings", "Environments that generated jobs may name"),
        "secrets" => reference("strings", "Secrets that generated jobs may name"),
        _ => reference("labels", "Labels that generated jobs may ask for; those of this job if absent"),
    });
    let mut map = object(&keys::GENERATE, &["run"], |key| match key {
        "run" => reference("script", "Writes {\"jobs\": [...]} to $KICI_JOBS"),
        "group" => json!({
            "type": "string",
            "pattern": "^[a-z0-9][a-z0-9_-]{0,63}$",
            "description": "Name of the group that its jobs form; the key of this job if absent",
        }),
        "shell" => reference("shell", "Runs the script"),
        _ => allow.clone(),
    });
    map["description"] = json!("Makes jobs of this run");
    map
}

pub(super) fn invoke() -> Json {
    let mut map = object(&keys::INVOKE, &["event"], |key| match key {
        "event" => reference("template", "Name of the event that other workflows of the repository listen to"),
        "payload" => json!({"type": "object", "description": "Its document; texts in it may hold ${{ expression }}"}),
        _ => json!({"type": "boolean", "default": false, "description": "A success when no workflow listens"}),
    });
    map["description"] = json!("Starts other workflows of the repository and waits for them; no agent runs it");
    map
}
