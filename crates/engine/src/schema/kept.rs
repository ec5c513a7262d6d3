//! `cache` and `artifacts`.

use serde_json::{Value as Json, json};

use super::{object, reference};
use crate::cache::{MAX_ARTIFACTS, MAX_CACHES};
use crate::compile::keys;

pub(super) fn cache() -> Json {
    let one = object(&keys::CACHE, &["key", "paths"], |key| match key {
        "key" => reference("template", "What it is found by; the first that is saved under it stays"),
        "paths" => reference("strings", "Below the workspace, or below the home directory with ~/"),
        "restore_keys" => {
            reference("strings", "Beginnings of keys that will do; the newest entry of the first that fits")
        }
        "when" => {
            json!({"enum": ["success", "always"], "default": "success", "description": "After which end it is saved"})
        }
        _ => json!({"type": "boolean", "description": "A fault of the cache fails the job"}),
    });
    json!({
        "description": "Files that later jobs with the same key find again",
        "anyOf": [one, {"type": "array", "items": one, "maxItems": MAX_CACHES}],
    })
}

pub(super) fn artifacts() -> Json {
    let upload = object(&keys::UPLOAD, &["name", "paths"], |key| match key {
        "name" => reference("template", "Unique in the run"),
        "paths" => reference("strings", "Paths and globs below the workspace"),
        "expire_in" => reference("duration", "How long it is kept; 30d unless the orchestrator says otherwise"),
        "if_empty" => json!({
            "enum": ["warn", "fail", "ignore"],
            "default": "warn",
            "description": "When nothing is there to be uploaded",
        }),
        _ => json!({
            "enum": ["success", "failure", "always"],
            "default": "success",
            "description": "After which end of the steps",
        }),
    });
    let download = object(&keys::DOWNLOAD, &["name"], |key| match key {
        "name" => reference("template", "Name of the artifact"),
        "from" => json!({"type": "string", "description": "The job that made it, one of `needs`"}),
        _ => reference("template", "Directory below the workspace; the workspace itself if absent"),
    });
    let list = |of: Json| json!({"type": "array", "items": of, "maxItems": MAX_ARTIFACTS});
    let mut map =
        object(
            &keys::ARTIFACTS,
            &[],
            |key| if key == "upload" { list(upload.clone()) } else { list(download.clone()) },
        );
    map["description"] = json!("Files that jobs of a run hand to others and to people");
    map
}
