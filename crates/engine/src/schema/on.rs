//! `on` and the inputs of triggers.

use serde_json::{Value as Json, json};

use super::{object, reference};
use crate::compile::keys::{self, KeySet};

/// Triggers by key: their filters, those that must be given, and what they listen to.
const TRIGGERS: [(&str, &KeySet, &[&str], &str); 24] = [
    ("comment", &keys::COMMENT, &[], "A comment on an issue or a pull request"),
    ("create", &keys::REFS, &[], "A branch or tag was created"),
    ("delete", &keys::REFS, &[], "A branch or tag was deleted"),
    ("dispatch", &keys::DISPATCH, &[], "A repository_dispatch of the forge"),
    ("event", &keys::EVENT, &["name"], "A step or a person emitted an event"),
    ("fork", &keys::FORK, &[], "The repository was forked"),
    ("hook", &keys::HOOK, &["source"], "A call to a generic source"),
    ("job_complete", &keys::JOB_COMPLETE, &[], "A job of a run ended"),
    ("lifecycle", &keys::LIFECYCLE, &["events"], "An event of KiCI's own life"),
    ("manual", &keys::MANUAL, &[], "A person starts it"),
    ("pull_request", &keys::PULL_REQUEST, &[], "A pull or merge request"),
    ("push", &keys::PUSH, &[], "A branch was pushed to"),
    ("release", &keys::TYPES, &[], "A release"),
    ("review", &keys::REVIEW, &[], "A review of a pull request"),
    ("review_comment", &keys::TYPES, &[], "A comment in a review"),
    ("schedule", &keys::SCHEDULE, &["cron"], "A time"),
    ("star", &keys::TYPES, &[], "The repository was starred"),
    ("status", &keys::STATUS, &[], "A commit has a new status"),
    ("tag", &keys::TAG, &[], "A tag was pushed"),
    ("watch", &keys::TYPES, &[], "The repository was watched"),
    ("webhook", &keys::WEBHOOK, &["events"], "Any event of the forge, by its own name"),
    ("workflow_complete", &keys::WORKFLOW_COMPLETE, &[], "A run ended"),
    ("workflow_run", &keys::WORKFLOW_RUN, &[], "A run of the forge's own CI"),
    ("workflows_failed_batch", &keys::FAILED_BATCH, &[], "Runs failed; told once in a while"),
];

pub(super) fn on() -> Json {
    let properties: serde_json::Map<String, Json> = TRIGGERS
        .iter()
        .map(|(name, set, required, description)| {
            let map = object(set, required, |key| filter(name, key));
            let list = json!({"type": "array", "items": map, "minItems": 1});
            let mut kinds = vec![map, list];
            if required.is_empty() {
                kinds.insert(0, json!({"type": "null"}));
            }
            ((*name).to_owned(), json!({"anyOf": kinds, "description": description}))
        })
        .collect();
    let words: Vec<&str> =
        TRIGGERS.iter().filter(|(_, _, required, _)| required.is_empty()).map(|(name, ..)| *name).collect();
    let word = json!({"enum": words});
    let map = json!({"type": "object", "properties": properties, "additionalProperties": false});
    json!({"anyOf": [word, {"type": "array", "items": word, "minItems": 1}, map]})
}

fn filter(trigger: &str, key: &str) -> Json {
    match (trigger, key) {
        ("schedule", "inputs") => json!({
            "type": "object",
            "description": "Values for the inputs of the workflow",
            "additionalProperties": {"$ref": "#/$defs/scalar"},
        }),
        ("schedule", "cron") => json!({
            "type": "string",
            "description": "Minute, hour, day of month, month, day of week; seconds may stand first",
            "examples": ["0 3 * * 1-5"],
        }),
        ("schedule", "timezone") => {
            json!({"type": "string", "default": "UTC", "description": "Name in the IANA database", "examples": ["Europe/Berlin"]})
        }
        ("workflows_failed_batch", "accumulate") => {
            reference("duration", "How long failures are collected; 5m if absent")
        }
        ("workflows_failed_batch", _) => reference("strings", "Patterns for the workflows that failed"),
        ("schedule", "jitter") => reference("duration", "It fires up to this much later, always by the same amount"),
        ("schedule", _) => {
            reference("duration", "A firing missed longer ago than this is not made up for; 24h if absent")
        }
        (_, "inputs") => reference("inputs", "Values that whoever starts a run may give"),
        ("event", "match" | "not") => reference("conditions", "On the payload of the event"),
        (_, "match" | "not") => reference("conditions", "On the body of the call"),
        ("event", "name") => json!({"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,127}$"}),
        ("hook", "source") => json!({"type": "string", "description": "Name of a generic source"}),
        (_, "source" | "sources") => reference("strings", "Patterns for the repository it comes from"),
        ("comment", "target") => json!({"enum": ["issue", "pr"]}),
        (_, "ref_type") => json!({"enum": ["branch", "tag"]}),
        ("webhook", "events") => reference("strings", "The forge's names of events"),
        ("hook" | "lifecycle", "events") => reference("strings", "Names of events"),
        (_, "types") => reference("strings", "What was done"),
        (_, "states" | "status" | "conclusions") => reference("strings", "How it stands"),
        _ => reference("strings", "Patterns; ! excludes, /…/ is a regular expression"),
    }
}

pub(super) fn input_key(key: &str) -> Json {
    match key {
        "type" => json!({"enum": ["string", "number", "integer", "boolean", "enum", "literal"], "default": "string"}),
        "required" => json!({"type": "boolean", "description": "True if there is no default"}),
        "values" => json!({"type": "array", "description": "What an enum allows"}),
        "min" | "max" => json!({"type": "number", "description": "Of a number, or of the length of a string"}),
        "pattern" => json!({"type": "string", "description": "Regular expression for the whole string"}),
        "description" => json!({"type": "string"}),
        _ => json!({"description": "Used when no value is given"}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn triggers_are_those_of_the_compiler() {
        let names: Vec<&str> = TRIGGERS.iter().map(|(name, ..)| *name).collect();
        assert_eq!(names, keys::ON.accepted);
    }
}
