//! The schema of `environment`, `approval` and `secrets`.

use serde_json::{Value as Json, json};

use super::{object, reference};
use crate::compile::keys::{self, KeySet};

const NAME: &str = "^[A-Za-z_][A-Za-z0-9_]*$";

pub(super) fn secrets() -> Json {
    json!({"anyOf": [
        {"type": "array", "items": {"type": "string", "pattern": NAME}, "maxItems": 256},
        {
            "type": "object",
            "propertyNames": {"pattern": "^(?!KICI_)[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9._-]{0,63}:)?[A-Za-z_][A-Za-z0-9_]*$"},
            "maxProperties": 256,
        },
    ]})
}

pub(super) fn environment() -> Json {
    let map = object(&keys::ENVIRONMENT, &["name"], |key| match key {
        "name" => reference("strings", "Name, or names in the order in which they are merged"),
        _ => reference("template", "Where to look at what was deployed"),
    });
    json!({"description": "Brings rules, variables and secrets", "anyOf": [{"$ref": "#/$defs/strings"}, map]})
}

pub(super) fn approval(set: &KeySet) -> Json {
    let clause = json!({"type": "string"});
    let mut approver = object(&keys::APPROVER, &[], |_| clause.clone());
    approver["oneOf"] = json!([{"required": ["team"]}, {"required": ["user"]}]);
    let map = object(set, &[], |key| match key {
        "approvers" => json!({
            "type": "array",
            "description": "Clauses that must all be met; any member who may approve if absent",
            "items": approver,
            "minItems": 1,
            "maxItems": 16,
        }),
        "reason" => json!({"type": "string", "maxLength": 500, "description": "For those who decide"}),
        "timeout" => reference("duration", "How long they have"),
        _ => json!({"enum": ["always", "drift"], "default": "always", "description": "Also when nothing differs"}),
    });
    json!({"anyOf": [{"type": "boolean"}, map]})
}
