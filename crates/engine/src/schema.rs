//! JSON Schema of workflow files, for editors: completion, descriptions and a first check while typing. The compiler is the
//! judge; what it refuses and the schema lets pass is refused.

use serde_json::{Value as Json, json};

use crate::compile::keys::{self, KeySet};

mod containers;
mod dynamic;
mod kept;
mod on;
mod protection;

/// Where the published schema says it lives.
const ID: &str = "https://kici.dev/schema/workflow.json";

/// The schema of a file in `.kici/workflows/` (JSON Schema 2020-12).
pub fn workflow_schema() -> Json {
    let mut workflow = object(&keys::WORKFLOW, &["on", "jobs"], workflow_key);
    if let Some(fields) = workflow.as_object_mut() {
        fields.insert("patternProperties".to_owned(), json!({"^x-": true}));
        fields.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
        fields.insert("$id".to_owned(), json!(ID));
        fields.insert("title".to_owned(), json!("KiCI workflow"));
        fields.insert("$defs".to_owned(), definitions());
    }
    workflow
}

fn object(keys: &KeySet, required: &[&str], schema_of: impl Fn(&str) -> Json) -> Json {
    let properties: serde_json::Map<String, Json> =
        keys.accepted.iter().map(|key| ((*key).to_owned(), schema_of(key))).collect();
    let mut schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

fn reference(name: &str, description: &str) -> Json {
    json!({"$ref": format!("#/$defs/{name}"), "description": description})
}

fn definitions() -> Json {
    json!({
        "scalar": {"type": ["string", "number", "boolean"]},
        "template": {"type": ["string", "number", "boolean"], "description": "Text, may hold ${{ expression }}"},
        "condition": {"type": ["string", "boolean"], "description": "A CEL expression without ${{ }}"},
        "duration": {"type": "string", "pattern": "^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$", "examples": ["90s", "30m", "1h30m"]},
        "size": {"type": "string", "pattern": "^[0-9]+([KMGT]i)?B$", "examples": ["512MiB", "4GiB"]},
        "strings": {"anyOf": [{"$ref": "#/$defs/scalar"}, {"type": "array", "items": {"$ref": "#/$defs/scalar"}}]},
        "env": {
            "type": "object",
            "propertyNames": {"pattern": "^(?!KICI_)[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": {"$ref": "#/$defs/template"},
        },
        "concurrency": concurrency(),
        "cache": kept::cache(),
        "artifacts": kept::artifacts(),
        "labels": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
        "runs_on": {"anyOf": [{"$ref": "#/$defs/labels"}, object(&keys::RUNS_ON, &["labels"], |key| match key {
            "labels" => reference("labels", "Labels that an agent must have, all of them"),
            "pick" => json!({
                "enum": ["deterministic", "any"],
                "default": "deterministic",
                "description": "Of several free agents the first by name, or the least busy",
            }),
            _ => reference("labels", "Labels that an agent must not have"),
        })]},
        "runs_on_all": {"anyOf": [{"$ref": "#/$defs/labels"}, object(&keys::RUNS_ON_ALL, &["include"], |key| match key {
            "include" => json!({
                "type": "array",
                "description": "Groups, of which one must hold",
                "items": {"anyOf": [{"$ref": "#/$defs/labels"}, object(&keys::HOST_GROUP, &["all"], |_| {
                    reference("labels", "Labels that a host must have, all of them")
                })]},
                "minItems": 1,
            }),
            _ => reference("labels", "Labels that a host must not have"),
        })]},
        "shell": {"anyOf": [
            {"enum": ["bash", "sh", "pwsh", "python"]},
            object(&keys::SHELL, &["command"], |_| {
                json!({"type": "array", "items": {"type": "string"}, "description": "The words of a command; {0} is the script file"})
            }),
        ]},
        "defaults": object(&keys::DEFAULTS, &[], defaults_key),
        "on": on::on(),
        "inputs": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"},
            "additionalProperties": {"anyOf": [{"type": "null"}, object(&keys::INPUT, &[], on::input_key)]},
        },
        "conditions": {"type": "object", "description": "JSONPath to a value, a list of values or /regex/"},
        "job": object(&keys::JOB, &[], job_key),
        "need": {"anyOf": [{"type": "string"}, need()]},
        "secrets": protection::secrets(),
        "approval": protection::approval(&keys::APPROVAL),
        "step_approval": protection::approval(&keys::STEP_APPROVAL),
        "matrix": {"anyOf": [
            {"type": "string", "pattern": "^\\$\\{\\{"},
            {"type": "array", "items": {"$ref": "#/$defs/scalar"}},
            {
                "type": "object",
                "properties": {
                    "include": {"type": "array", "items": {"type": "object"}},
                    "exclude": {"type": "array", "items": {"type": "object"}},
                },
                "additionalProperties": {"type": "array", "items": {"$ref": "#/$defs/scalar"}, "minItems": 1},
            },
        ]},
        "step": {"anyOf": [{"type": "string"}, step()]},
        "script": {"type": ["string", "boolean", "number"]},
        "container": containers::container(),
        "rules": {"type": "array", "items": object(&keys::RULE, &["if"], |key| match key {
            "if" => reference("condition", "Must hold"),
            _ => json!({"type": "string", "description": "What it asks for; shown when it does not hold"}),
        })},
        "hook": {"anyOf": [{"$ref": "#/$defs/script"}, object(&keys::HOOK_STEP, &["run"], step_key)]},
        "init": {"anyOf": [{"enum": ["auto", "mise"]}, object(&keys::INIT, &["run"], step_key)]},
        "hooks": {"anyOf": [
            {"$ref": "#/$defs/hook"},
            {"type": "array", "items": {"$ref": "#/$defs/hook"}, "maxItems": 16},
        ]},
    })
}

fn workflow_key(key: &str) -> Json {
    match key {
        "name" => json!({
            "type": "string",
            "pattern": "^[A-Za-z0-9][\\w .-]{0,99}$",
            "description": "Unique in the repository; the file's name without extension if absent",
        }),
        "description" => json!({"type": "string", "description": "For people"}),
        "run_name" => reference("template", "Title of a run"),
        "on" => reference("on", "What starts the workflow"),
        "if" => reference("condition", "False: no run"),
        "secrets" => reference("secrets", "Secrets in the environment of every step"),
        "approval" => reference("approval", "Who must agree before any job runs"),
        "requires" => json!({
            "type": "array",
            "description": "Tests on files of the commit; all must hold, else there is no run",
            "items": object(&keys::REQUIREMENT, &["file"], |key| match key {
                "file" => json!({"type": "string", "description": "Path from the root of the repository"}),
                "exists" => json!({"type": "boolean", "default": true, "description": "Whether it must be there"}),
                _ => reference("conditions", "On its content, which is JSON"),
            }),
        }),
        "rules" => reference("rules", "All must hold, else there is no run"),
        "hooks" => hooks(&keys::RUN_HOOKS),
        "env" => reference("env", "Environment of every step"),
        "defaults" => reference("defaults", "For jobs and steps that lack the key"),
        "timeout" => reference("duration", "Limit of the whole run"),
        "concurrency" => reference("concurrency", "The group in which its runs take turns"),
        _ => json!({
            "type": "object",
            "description": "The jobs by name",
            "propertyNames": {"pattern": "^[a-z0-9][a-z0-9_-]{0,63}$"},
            "additionalProperties": {"$ref": "#/$defs/job"},
            "minProperties": 1,
            "maxProperties": 256,
        }),
    }
}

fn defaults_key(key: &str) -> Json {
    match key {
        "runs_on" => reference("runs_on", "Which agents may run the jobs"),
        "shell" => reference("shell", "Runs the scripts"),
        "working_directory" => reference("template", "Below the workspace"),
        "timeout" => reference("duration", "Limit of each job and each step"),
        "container" => reference("container", "The container of each job"),
        "retry" => retry(),
        _ => reference("env", "Environment of every job"),
    }
}

fn need_key(key: &str) -> Json {
    match key {
        "job" => json!({"type": "string", "description": "Name of a job"}),
        "group" => json!({"type": "string", "description": "Group of generated jobs, all of them"}),
        _ => json!({
            "description": "When its end lets this job run",
            "anyOf": [
                {"enum": ["on-success", "always", "on-skip", "on-failure"]},
                {"type": "array", "items": {"enum": statuses()}, "minItems": 1},
            ],
        }),
    }
}

fn statuses() -> Vec<String> {
    crate::state::JobStatus::terminal().map(|status| status.to_string()).collect()
}

fn job_key(key: &str) -> Json {
    match key {
        "name" => reference("template", "What people see instead of the key"),
        "description" => json!({"type": "string", "description": "For people"}),
        "needs" => json!({
            "description": "The jobs that must end first",
            "anyOf": [{"$ref": "#/$defs/need"}, {"type": "array", "items": {"$ref": "#/$defs/need"}}],
        }),
        "if" => reference("condition", "Asked when the needs are met; false: skipped"),
        "cache" => reference("cache", "Restored before the first step, saved after the last"),
        "artifacts" => reference("artifacts", "Taken before the first step, handed over after the last"),
        "init" => json!({
            "description": "Prepares the job before its first step",
            "anyOf": [{"const": false}, {"$ref": "#/$defs/init"}, {"type": "array", "items": {"$ref": "#/$defs/init"}}],
        }),
        "rules" => reference("rules", "All must hold when the needs are met, else it is skipped"),
        "hooks" => hooks(&keys::JOB_HOOKS),
        "runs_on" => reference("runs_on", "Which agents may run the job"),
        "runs_on_all" => reference("runs_on_all", "Runs the job once on each of these hosts"),
        "on_unreachable" => json!({
            "enum": ["hold", "skip", "fail"],
            "default": "hold",
            "description": "What becomes of it on a host that is out of contact",
        }),
        "include_uninitialized" => {
            json!({"type": "boolean", "description": "Also on declared hosts whose agent never registered"})
        }
        "matrix" => reference("matrix", "Runs the job once per combination"),
        "max_parallel" => {
            json!({"type": "integer", "minimum": 1, "maximum": 4096, "description": "Variants or hosts at once"})
        }
        "fail_fast" => {
            json!({"type": "boolean", "description": "After the first failure no other variant or host starts"})
        }
        "env" => reference("env", "Environment of its steps"),
        "environment" => protection::environment(),
        "secrets" => reference("secrets", "Secrets in the environment of its steps"),
        "approval" => reference("approval", "Who must agree before it runs"),
        "generate" => dynamic::generate(),
        "invoke" => dynamic::invoke(),
        "outputs" => json!({
            "type": "object",
            "description": "Results for the jobs that need this one",
            "additionalProperties": {"$ref": "#/$defs/template"},
        }),
        "timeout" => reference("duration", "Limit from the start of the checkout"),
        "concurrency" => reference("concurrency", "The group in which it takes turns with other jobs"),
        "retry" => retry(),
        "grace_period" => reference("duration", "From TERM to KILL on cancel"),
        "checkout" => json!({
            "description": "Whether and how the commit is checked out",
            "anyOf": [{"type": "boolean"}, object(&keys::CHECKOUT, &[], checkout_key)],
        }),
        "git_credentials" => git_credentials(),
        "container" => reference("container", "The container of its steps"),
        "services" => containers::services(),
        "resources" => containers::resources(),
        "run" => json!({"type": "string", "description": "One script, instead of steps"}),
        _ => json!({
            "type": "array",
            "description": "Run in order",
            "items": {"$ref": "#/$defs/step"},
            "minItems": 1,
            "maxItems": 256,
        }),
    }
}

fn checkout_key(key: &str) -> Json {
    let flag = |what: &str| json!({"type": "boolean", "default": false, "description": what});
    match key {
        "depth" => json!({"type": "integer", "minimum": 0, "description": "Commits of history; 0 is all"}),
        "submodules" => flag("With its submodules, and theirs"),
        "lfs" => flag("With the files that lie in git LFS"),
        "tags" => flag("With all tags"),
        "path" => reference("template", "Below the workspace; the workspace itself if absent"),
        _ => reference("template", "Another branch, tag or commit than the run's"),
    }
}

/// A job or a group, and when.
fn need() -> Json {
    let mut need = object(&keys::NEED, &[], need_key);
    need["oneOf"] = json!([{"required": ["job"]}, {"required": ["group"]}]);
    need
}

fn git_credentials() -> Json {
    let patterns = |what: &str| reference("strings", what);
    let part = |kind: &str, set: &KeySet| {
        object(set, &["kind"], |key| match key {
            "kind" => json!({"const": kind}),
            "host" => json!({"type": "string", "description": "The host that it is for; the source's if absent"}),
            "repos" => patterns("Repositories (owner/name) that it is used for without being named"),
            "app_id_value" | "installation_id_value" => json!({"type": ["string", "integer"]}),
            _ => json!({"type": "string"}),
        })
    };
    let map = object(&keys::GIT_CREDENTIALS, &[], |key| match key {
        "repos" => patterns("Repositories (owner/name) besides the job's own that may be reached"),
        "access" => {
            json!({"enum": ["read", "write"], "default": "read", "description": "write: steps may push in windows"})
        }
        "named" => json!({
            "type": "object",
            "description": "Credentials of the workflow's own",
            "maxProperties": crate::lock::MAX_NAMED,
            "additionalProperties": {"anyOf": [
                part("basic", &keys::BASIC_CREDENTIAL),
                part("github_app", &keys::GITHUB_APP_CREDENTIAL),
            ]},
        }),
        _ => json!({"type": "string", "description": "The one under named that applies where none is asked for"}),
    });
    json!({"description": "What git may reach in the steps", "anyOf": [{"type": "boolean"}, map]})
}

fn retry() -> Json {
    let attempts = json!({"type": "integer", "minimum": 0, "maximum": 10, "description": "How many more times"});
    let class = json!({"enum": ["lost", "infra", "timeout", "oom", "user"]});
    let map = object(&keys::RETRY, &["attempts"], |key| match key {
        "attempts" => attempts.clone(),
        _ => json!({
            "description": "After a failure of these classes",
            "anyOf": [class, {"type": "array", "items": class, "minItems": 1}],
        }),
    });
    json!({"description": "When it is tried again; a number: when its agent is lost", "anyOf": [attempts, map]})
}

fn concurrency() -> Json {
    let map = object(&keys::CONCURRENCY, &["group"], |key| match key {
        "group" => reference("template", "Name of the group in this repository"),
        "max" => {
            json!({"type": "integer", "minimum": 1, "maximum": 1000, "description": "How many at once; 1 if absent"})
        }
        _ => json!({"type": "boolean", "description": "Cancel older runs of the group; false if absent"}),
    });
    json!({"anyOf": [{"$ref": "#/$defs/template"}, map]})
}

fn step() -> Json {
    let mut step = object(&keys::STEP, &[], step_key);
    step["anyOf"] = ["run", "check", "emit", "wait_for", "parallel", "use"]
        .into_iter()
        .map(|key| json!({"required": [key]}))
        .collect();
    step
}

/// `hooks` of a workflow, a job or a step.
fn hooks(kinds: &KeySet) -> Json {
    object(kinds, &[], |key| {
        let when = match key {
            "on_success" => "After success",
            "on_failure" => "After a failure",
            "on_cancel" => "After a graceful cancel or the limit of the job",
            "before_step" => "Before each step",
            "after_step" => "After each step",
            _ => "Last, always, but for a forced cancel",
        };
        reference("hooks", when)
    })
}

fn step_retry() -> Json {
    let map = object(&keys::STEP_RETRY, &["attempts"], |key| match key {
        "attempts" => json!({"type": "integer", "minimum": 1, "maximum": 100, "description": "How often in all"}),
        "delay" => reference("duration", "Pause after the first attempt"),
        "max_delay" => reference("duration", "Longest pause"),
        "backoff" => json!({"enum": ["exponential", "fixed"], "description": "How the pause grows"}),
        _ => json!({
            "description": "Only after these exit codes",
            "anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}],
        }),
    });
    json!({"description": "Tries again when it failed", "anyOf": [{"type": "integer", "minimum": 1, "maximum": 100}, map]})
}

fn wait_for() -> Json {
    let mut map = object(&keys::WAIT_FOR, &[], |key| match key {
        "run" => reference("script", "A script that exits with 0"),
        "url" => reference("template", "An address that answers a GET with 2xx"),
        "interval" => reference("duration", "Between two questions"),
        _ => reference("duration", "How long it is waited in all"),
    });
    map["description"] = json!("Waits until something is there");
    map["oneOf"] = json!([{"required": ["run"]}, {"required": ["url"]}]);
    map
}

fn emit() -> Json {
    let target = object(&keys::EMIT_TARGET, &[], |_| reference("strings", "Patterns of repositories; all if absent"));
    let mut map = object(&keys::EMIT, &["event"], |key| match key {
        "event" => reference("template", "Name of the event"),
        "payload" => json!({"description": "Its document; texts in it may hold ${{ expression }}"}),
        _ => target.clone(),
    });
    map["description"] = json!("Emits an event that starts workflows with `on: event`");
    map
}

fn parallel() -> Json {
    let mut map = object(&keys::PARALLEL, &["steps"], |key| match key {
        "steps" => {
            json!({"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 1, "description": "Run side by side"})
        }
        "fail_fast" => {
            json!({"type": "boolean", "default": true, "description": "The first failure cancels the others"})
        }
        "max_parallel" => json!({"type": "integer", "minimum": 1, "maximum": 256, "description": "Steps at once"}),
        _ => json!({"type": "string", "description": "For people"}),
    });
    map["description"] = json!("Steps that run side by side");
    map
}

fn step_key(key: &str) -> Json {
    match key {
        "check" => reference("script", "Looks; what it writes to $KICI_DRIFT is what differs"),
        "apply" => reference("script", "Repairs what check found"),
        "when_in_sync" => reference("script", "For the outputs where nothing differs"),
        "drift_exit_code" => json!({
            "type": "integer", "minimum": 1, "maximum": 255, "description": "Exit code of check that alone means drift",
        }),
        "use" => json!({
            "type": "string",
            "pattern": "^\\./\\.kici/steps/[^/]+$",
            "description": "A step file of the same commit",
        }),
        "with" => reference("env", "Inputs of the step file"),
        "retry" => step_retry(),
        "wait_for" => wait_for(),
        "emit" => emit(),
        "parallel" => parallel(),
        "hooks" => hooks(&keys::STEP_HOOKS),
        "cache" => reference("cache", "Restored before it, saved after it"),
        "id" => {
            json!({"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_-]{0,63}$", "description": "Names its outputs"})
        }
        "name" => reference("template", "For people"),
        "run" => json!({"type": ["string", "boolean", "number"], "description": "The script; no ${{ }} in it"}),
        "shell" => reference("shell", "Runs the script"),
        "env" => reference("env", "Environment of this step"),
        "secrets" => reference("secrets", "Secrets in the environment of this step"),
        "approval" => reference("step_approval", "Who must agree before it runs"),
        "if" => reference("condition", "False: skipped; success() is implied"),
        "working_directory" => reference("template", "Below the workspace"),
        "timeout" => reference("duration", "Limit of this step"),
        _ => json!({"type": "boolean", "description": "Its failure does not fail the job"}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `$ref` has its definition, and every key says what it is.
    fn walk(node: &Json, schema: &Json) {
        match node {
            Json::Object(fields) => {
                if let Some(target) = fields.get("$ref").and_then(Json::as_str) {
                    assert!(schema.pointer(target.trim_start_matches('#')).is_some(), "{target}");
                }
                fields.values().for_each(|field| walk(field, schema));
            }
            Json::Array(items) => items.iter().for_each(|item| walk(item, schema)),
            _ => {}
        }
    }

    #[test]
    fn references_resolve() {
        let schema = workflow_schema();
        walk(&schema, &schema);
    }

    #[test]
    fn keys_are_those_of_the_compiler() {
        let schema = workflow_schema();
        let cases = [
            ("/properties", &keys::WORKFLOW),
            ("/$defs/job/properties", &keys::JOB),
            ("/$defs/step/anyOf/1/properties", &keys::STEP),
            ("/$defs/defaults/properties", &keys::DEFAULTS),
            ("/$defs/on/anyOf/2/properties", &keys::ON),
        ];
        for (pointer, set) in cases {
            let found: Vec<&String> = schema.pointer(pointer).unwrap().as_object().unwrap().keys().collect();
            assert_eq!(found, set.accepted, "{pointer}");
        }
    }

    #[test]
    fn is_stable() {
        insta::assert_json_snapshot!(workflow_schema());
    }
}
