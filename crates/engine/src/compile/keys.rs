//! The keys of the language, and what people write instead of them.

use strsim::damerau_levenshtein;

/// The keys of one map.
#[derive(Debug)]
pub(crate) struct KeySet {
    /// Accepted, sorted.
    pub(crate) accepted: &'static [&'static str],
    /// Part of the language, but refused by this version.
    pub(crate) planned: &'static [&'static str],
}

pub(crate) const WORKFLOW: KeySet = KeySet {
    accepted: &[
        "approval",
        "concurrency",
        "defaults",
        "description",
        "env",
        "hooks",
        "if",
        "jobs",
        "name",
        "on",
        "requires",
        "rules",
        "run_name",
        "secrets",
        "timeout",
    ],
    planned: &["hash_files", "install_env", "registries"],
};
pub(crate) const DEFAULTS: KeySet = KeySet {
    accepted: &["container", "env", "retry", "runs_on", "shell", "timeout", "working_directory"],
    planned: &[],
};
pub(crate) const ON: KeySet = KeySet {
    accepted: &[
        "comment",
        "create",
        "delete",
        "dispatch",
        "event",
        "fork",
        "hook",
        "job_complete",
        "lifecycle",
        "manual",
        "pull_request",
        "push",
        "release",
        "review",
        "review_comment",
        "schedule",
        "star",
        "status",
        "tag",
        "watch",
        "webhook",
        "workflow_complete",
        "workflow_run",
        "workflows_failed_batch",
    ],
    planned: &[],
};
pub(crate) const PUSH: KeySet = KeySet { accepted: &["branches", "paths"], planned: &["repos"] };
pub(crate) const PULL_REQUEST: KeySet =
    KeySet { accepted: &["branches", "paths", "source_branches", "types"], planned: &["repos"] };
pub(crate) const TAG: KeySet = KeySet { accepted: &["tags"], planned: &["repos"] };
pub(crate) const MANUAL: KeySet = KeySet { accepted: &["inputs"], planned: &[] };
pub(crate) const HOOK: KeySet = KeySet { accepted: &["events", "match", "not", "source"], planned: &[] };
pub(crate) const COMMENT: KeySet = KeySet { accepted: &["body", "target", "types"], planned: &[] };
pub(crate) const REVIEW: KeySet = KeySet { accepted: &["states", "types"], planned: &[] };
/// Events that only differ in what was done.
pub(crate) const TYPES: KeySet = KeySet { accepted: &["types"], planned: &[] };
/// Created and deleted branches and tags.
pub(crate) const REFS: KeySet = KeySet { accepted: &["ref_type", "refs"], planned: &[] };
pub(crate) const FORK: KeySet = KeySet { accepted: &[], planned: &[] };
pub(crate) const STATUS: KeySet = KeySet { accepted: &["contexts", "states"], planned: &[] };
pub(crate) const WORKFLOW_RUN: KeySet = KeySet { accepted: &["conclusions", "types", "workflows"], planned: &[] };
pub(crate) const WEBHOOK: KeySet = KeySet { accepted: &["events", "types"], planned: &[] };
pub(crate) const DISPATCH: KeySet = KeySet { accepted: &["inputs", "types"], planned: &[] };
pub(crate) const EVENT: KeySet = KeySet { accepted: &["match", "name", "not", "source"], planned: &[] };
pub(crate) const WORKFLOW_COMPLETE: KeySet = KeySet { accepted: &["source", "status", "workflow"], planned: &[] };
pub(crate) const JOB_COMPLETE: KeySet = KeySet { accepted: &["job", "source", "status", "workflow"], planned: &[] };
pub(crate) const LIFECYCLE: KeySet = KeySet { accepted: &["events", "sources"], planned: &[] };
pub(crate) const SCHEDULE: KeySet =
    KeySet { accepted: &["catchup", "cron", "inputs", "jitter", "timezone"], planned: &[] };
pub(crate) const INPUT: KeySet = KeySet {
    accepted: &["default", "description", "max", "min", "pattern", "required", "type", "values"],
    planned: &[],
};
pub(crate) const JOB: KeySet = KeySet {
    accepted: &[
        "approval",
        "artifacts",
        "cache",
        "checkout",
        "concurrency",
        "container",
        "description",
        "env",
        "environment",
        "fail_fast",
        "generate",
        "git_credentials",
        "grace_period",
        "hooks",
        "if",
        "include_uninitialized",
        "init",
        "invoke",
        "matrix",
        "max_parallel",
        "name",
        "needs",
        "on_unreachable",
        "outputs",
        "resources",
        "retry",
        "rules",
        "run",
        "runs_on",
        "runs_on_all",
        "secrets",
        "services",
        "steps",
        "timeout",
    ],
    planned: &["full_repo", "id_token", "provenance"],
};
pub(crate) const CONTAINER: KeySet =
    KeySet { accepted: &["credentials", "env", "image", "options", "pull", "user"], planned: &[] };
pub(crate) const CONTAINER_OPTIONS: KeySet =
    KeySet { accepted: &["cap_add", "privileged", "read_only", "shm_size"], planned: &[] };
pub(crate) const SERVICE: KeySet =
    KeySet { accepted: &["credentials", "env", "health", "image", "ports"], planned: &[] };
pub(crate) const HEALTH: KeySet = KeySet { accepted: &["interval", "retries", "run"], planned: &[] };
pub(crate) const REGISTRY_CREDENTIALS: KeySet =
    KeySet { accepted: &["token_value", "user_value"], planned: &["token_secret", "user_secret"] };
pub(crate) const RESOURCES: KeySet =
    KeySet { accepted: &["cpus", "limits", "memory", "requests"], planned: &["disk", "gpus"] };
pub(crate) const AMOUNTS: KeySet = KeySet { accepted: &["cpus", "memory"], planned: &["disk", "gpus"] };
pub(crate) const NEED: KeySet = KeySet { accepted: &["group", "job", "when"], planned: &[] };
pub(crate) const RUNS_ON: KeySet = KeySet { accepted: &["exclude", "labels", "pick"], planned: &[] };
pub(crate) const RUNS_ON_ALL: KeySet = KeySet { accepted: &["exclude", "include"], planned: &[] };
pub(crate) const HOST_GROUP: KeySet = KeySet { accepted: &["all"], planned: &[] };
pub(crate) const CHECKOUT: KeySet =
    KeySet { accepted: &["depth", "lfs", "path", "ref", "submodules", "tags"], planned: &[] };
pub(crate) const GIT_CREDENTIALS: KeySet = KeySet { accepted: &["access", "default", "named", "repos"], planned: &[] };
pub(crate) const BASIC_CREDENTIAL: KeySet = KeySet {
    accepted: &["host", "kind", "repos", "token_value", "user_value"],
    planned: &["token_secret", "user_secret"],
};
pub(crate) const GITHUB_APP_CREDENTIAL: KeySet = KeySet {
    accepted: &["app_id_value", "host", "installation_id_value", "kind", "private_key_value", "repos"],
    planned: &["app_id_secret", "installation_id_secret", "private_key_secret"],
};
pub(crate) const GENERATE: KeySet = KeySet { accepted: &["allow", "group", "run", "shell"], planned: &[] };
pub(crate) const ALLOW: KeySet = KeySet { accepted: &["environments", "runs_on", "secrets"], planned: &[] };
pub(crate) const INVOKE: KeySet = KeySet { accepted: &["event", "optional", "payload"], planned: &[] };
pub(crate) const ENVIRONMENT: KeySet = KeySet { accepted: &["name", "url"], planned: &[] };
pub(crate) const APPROVAL: KeySet = KeySet { accepted: &["approvers", "reason", "timeout"], planned: &[] };
pub(crate) const STEP_APPROVAL: KeySet = KeySet { accepted: &["approvers", "reason", "timeout", "when"], planned: &[] };
pub(crate) const APPROVER: KeySet = KeySet { accepted: &["team", "user"], planned: &[] };
pub(crate) const FAILED_BATCH: KeySet = KeySet { accepted: &["accumulate", "workflows"], planned: &[] };
/// What a generator writes.
pub(crate) const FRAGMENT: KeySet = KeySet { accepted: &["jobs"], planned: &[] };
pub(crate) const CONCURRENCY: KeySet = KeySet { accepted: &["cancel_in_progress", "group", "max"], planned: &[] };
pub(crate) const RETRY: KeySet = KeySet { accepted: &["attempts", "on"], planned: &[] };
pub(crate) const SHELL: KeySet = KeySet { accepted: &["command"], planned: &[] };
pub(crate) const STEP: KeySet = KeySet {
    accepted: &[
        "apply",
        "approval",
        "cache",
        "check",
        "continue_on_error",
        "drift_exit_code",
        "emit",
        "env",
        "hooks",
        "id",
        "if",
        "name",
        "parallel",
        "retry",
        "run",
        "secrets",
        "shell",
        "timeout",
        "use",
        "wait_for",
        "when_in_sync",
        "with",
        "working_directory",
    ],
    planned: &[],
};
/// What may stand beside `use`.
pub(crate) const OF_USE: [&str; 6] = ["env", "id", "if", "name", "use", "with"];
/// A step file.
pub(crate) const PART: KeySet = KeySet { accepted: &["description", "inputs", "outputs", "steps"], planned: &[] };
pub(crate) const PARALLEL: KeySet = KeySet { accepted: &["fail_fast", "max_parallel", "name", "steps"], planned: &[] };
pub(crate) const STEP_RETRY: KeySet =
    KeySet { accepted: &["attempts", "backoff", "delay", "max_delay", "on_exit"], planned: &[] };
pub(crate) const WAIT_FOR: KeySet = KeySet { accepted: &["interval", "run", "timeout", "url"], planned: &[] };
pub(crate) const EMIT: KeySet = KeySet { accepted: &["event", "payload", "target"], planned: &[] };
pub(crate) const EMIT_TARGET: KeySet = KeySet { accepted: &["repos"], planned: &[] };
pub(crate) const STEP_HOOKS: KeySet = KeySet { accepted: &["cleanup", "on_cancel"], planned: &[] };
pub(crate) const JOB_HOOKS: KeySet = KeySet {
    accepted: &["after_step", "before_step", "cleanup", "on_cancel", "on_failure", "on_success"],
    planned: &[],
};
pub(crate) const RUN_HOOKS: KeySet =
    KeySet { accepted: &["cleanup", "on_cancel", "on_failure", "on_success"], planned: &[] };
pub(crate) const HOOK_STEP: KeySet =
    KeySet { accepted: &["env", "name", "run", "shell", "timeout", "working_directory"], planned: &[] };
pub(crate) const INIT: KeySet = KeySet { accepted: &["cache", "env", "run", "shell", "timeout"], planned: &[] };
pub(crate) const CACHE: KeySet =
    KeySet { accepted: &["key", "paths", "required", "restore_keys", "when"], planned: &[] };
pub(crate) const ARTIFACTS: KeySet = KeySet { accepted: &["download", "upload"], planned: &[] };
pub(crate) const UPLOAD: KeySet =
    KeySet { accepted: &["expire_in", "if_empty", "name", "paths", "when"], planned: &[] };
pub(crate) const DOWNLOAD: KeySet = KeySet { accepted: &["from", "name", "path"], planned: &[] };
pub(crate) const REQUIREMENT: KeySet = KeySet { accepted: &["exists", "file", "match", "not"], planned: &[] };
pub(crate) const RULE: KeySet = KeySet { accepted: &["if", "label"], planned: &[] };

/// What to do until a key that belongs to the language is supported.
pub(crate) fn way_out(key: &str) -> Option<&'static str> {
    Some(match key {
        "repos" => {
            "put the workflow into each repository, or let one `emit` an event that a workflow of another one listens to with \
             `on: { event: … }`, see `kici-admin event-trust add`"
        }
        "hash_files" => "the hash covers the file itself and the step files that it uses; leave the key out",
        "install_env" | "registries" => {
            "let the agent give the variables (`pass_env`), or install from registries that ask for no token"
        }
        "full_repo" => "the whole history is `checkout: { depth: 0 }`",
        "id_token" => "let the agent give the credentials (`pass_env`)",
        "provenance" => "sign in a step, with a key that the agent has",
        "disk" | "gpus" => "ask for agents that have it by a label, for example `runs_on: [linux, gpu]`",
        secret if secret.ends_with("_secret") => {
            "secrets come with a later version; the value itself goes into `…_value`"
        }
        _ => return None,
    })
}

/// Words of other systems and what they are here; the first target that the place knows is meant.
const FOREIGN: [(&str, &[&str]); 40] = [
    ("agent", &["runs_on"]),
    ("before_script", &["steps"]),
    ("branch", &["branches"]),
    ("branches_ignore", &["branches"]),
    ("clone", &["checkout"]),
    ("commands", &["run"]),
    ("cron", &["schedule"]),
    ("cwd", &["working_directory"]),
    ("depends_on", &["needs"]),
    ("dependencies", &["needs"]),
    ("directory", &["working_directory"]),
    ("environment_variables", &["env"]),
    ("except", &["if"]),
    ("file", &["use"]),
    ("image", &["container"]),
    ("allow_failure", &["continue_on_error"]),
    ("labels", &["runs_on"]),
    ("merge_request", &["pull_request"]),
    ("mr", &["pull_request"]),
    ("needs_all", &["needs"]),
    ("only", &["if", "branches"]),
    ("paths_ignore", &["paths"]),
    ("path", &["paths"]),
    ("pr", &["pull_request"]),
    ("pull_request_target", &["pull_request"]),
    ("pipeline", &["jobs", "steps"]),
    ("repository_dispatch", &["dispatch"]),
    ("script", &["run"]),
    ("stage", &["needs"]),
    ("stages", &["jobs", "needs"]),
    ("strategy", &["matrix"]),
    ("tags_ignore", &["tags"]),
    ("tasks", &["steps"]),
    ("timeout_minutes", &["timeout"]),
    ("title", &["name", "run_name"]),
    ("uses", &["use"]),
    ("variables", &["env", "inputs"]),
    ("when", &["if", "on"]),
    ("workflow_dispatch", &["manual"]),
    ("workdir", &["working_directory"]),
];

impl KeySet {
    /// Whether the language has the key here.
    pub(crate) fn knows(&self, key: &str) -> bool {
        self.accepted.contains(&key) || self.planned.contains(&key)
    }

    /// The key that was probably meant.
    pub(crate) fn suggest(&self, key: &str) -> Option<&'static str> {
        let all = || self.accepted.iter().chain(self.planned).copied();
        let folded = fold(key);
        if let Some(same) = all().find(|known| fold(known) == folded) {
            return Some(same);
        }
        let foreign = FOREIGN.iter().find(|(word, _)| fold(word) == folded);
        if let Some(meant) = foreign.and_then(|(_, targets)| targets.iter().find(|t| all().any(|k| k == **t))) {
            return Some(meant);
        }
        nearest(key, all())
    }
}

/// The candidate within a distance of 2, or of 1 for words of up to 4 characters; the nearest, then the first.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Distance costs the product of the lengths; a key of kilobytes is no typing error.
    if word.len() > 64 {
        return None;
    }
    let folded = fold(word);
    let limit = if word.chars().count() <= 4 { 1 } else { 2 };
    let scored = candidates.into_iter().map(|candidate| {
        let distance = if fold(candidate) == folded { 0 } else { damerau_levenshtein(word, candidate) };
        (distance, candidate)
    });
    scored.filter(|(distance, _)| *distance <= limit).min_by_key(|(distance, _)| *distance).map(|(_, c)| c)
}

fn fold(word: &str) -> String {
    word.chars().filter(|c| !matches!(c, '-' | '_')).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_is_refused_has_a_way_out() {
        let sets = [
            WORKFLOW,
            PUSH,
            PULL_REQUEST,
            TAG,
            JOB,
            REGISTRY_CREDENTIALS,
            RESOURCES,
            AMOUNTS,
            BASIC_CREDENTIAL,
            GITHUB_APP_CREDENTIAL,
        ];
        for key in sets.iter().flat_map(|set| set.planned) {
            assert!(way_out(key).is_some(), "{key}");
        }
    }

    fn all() -> Vec<KeySet> {
        vec![
            WORKFLOW,
            DEFAULTS,
            ON,
            PUSH,
            PULL_REQUEST,
            TAG,
            MANUAL,
            HOOK,
            COMMENT,
            REVIEW,
            TYPES,
            REFS,
            FORK,
            STATUS,
            WORKFLOW_RUN,
            WEBHOOK,
            DISPATCH,
            EVENT,
            WORKFLOW_COMPLETE,
            JOB_COMPLETE,
            LIFECYCLE,
            SCHEDULE,
            INPUT,
            JOB,
            CONTAINER,
            CONTAINER_OPTIONS,
            SERVICE,
            HEALTH,
            REGISTRY_CREDENTIALS,
            RESOURCES,
            AMOUNTS,
            NEED,
            RUNS_ON,
            RUNS_ON_ALL,
            HOST_GROUP,
            CHECKOUT,
            GIT_CREDENTIALS,
            BASIC_CREDENTIAL,
            GITHUB_APP_CREDENTIAL,
            CONCURRENCY,
            RETRY,
            SHELL,
            STEP,
            PARALLEL,
            EMIT,
            EMIT_TARGET,
            STEP_RETRY,
            WAIT_FOR,
            STEP_HOOKS,
            JOB_HOOKS,
            RUN_HOOKS,
            HOOK_STEP,
            INIT,
            CACHE,
            ARTIFACTS,
            UPLOAD,
            DOWNLOAD,
            PART,
            REQUIREMENT,
            RULE,
            GENERATE,
            ALLOW,
            INVOKE,
            ENVIRONMENT,
            APPROVAL,
            STEP_APPROVAL,
            APPROVER,
            FAILED_BATCH,
            FRAGMENT,
        ]
    }

    /// Each key stands in a file that compiles to what it says, and in one that is refused with a diagnostic at its place.
    #[test]
    fn every_key_has_a_golden_test_of_its_form_and_of_a_wrong_one() {
        let accepted = include_str!("tests/everything.yaml");
        let refused = [
            include_str!("tests/refused/workflow.txt"),
            include_str!("tests/refused/triggers.txt"),
            include_str!("tests/refused/jobs.txt"),
            include_str!("tests/refused/steps.txt"),
            include_str!("tests/refused/containers.txt"),
            include_str!("tests/refused/kept.txt"),
            include_str!("tests/refused/dynamic.txt"),
            include_str!("tests/refused/protection.txt"),
            include_str!("tests/refused/git_credentials.txt"),
            // Step files have tests of their own.
            include_str!("tests/parts.rs"),
        ];
        let word = |text: &str, key: &str| {
            let at = |(at, _): (usize, &str)| {
                let edge = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
                edge(text[..at].chars().next_back()) && text[at + key.len()..].trim_start_matches('"').starts_with(':')
            };
            text.match_indices(key).any(at)
        };
        for set in all() {
            for key in set.accepted {
                let of_step_files = matches!(*key, "use" | "with");
                assert!(of_step_files || word(accepted, key), "{key} is not in everything.yaml");
                assert!(refused.iter().any(|text| word(text, key)), "{key} has no wrong form");
            }
        }
    }

    #[test]
    fn key_sets_are_sorted_and_disjoint() {
        for set in all() {
            assert!(set.accepted.is_sorted() && set.planned.is_sorted(), "{set:?}");
            assert!(set.planned.iter().all(|key| !set.accepted.contains(key)), "{set:?}");
        }
    }

    #[test]
    fn suggestions() {
        let cases = [
            (&JOB, "runs-on", Some("runs_on")),
            (&JOB, "RunsOn", Some("runs_on")),
            (&JOB, "strategy", Some("matrix")),
            (&JOB, "stage", Some("needs")),
            (&JOB, "script", Some("run")),
            (&JOB, "timeout-minutes", Some("timeout")),
            (&JOB, "stepz", Some("steps")),
            (&JOB, "nonsense", None),
            (&STEP, "uses", Some("use")),
            (&STEP, "rum", Some("run")),
            (&ON, "workflow_dispatch", Some("manual")),
            (&ON, "pull-request", Some("pull_request")),
            (&PUSH, "branches-ignore", Some("branches")),
        ];
        for (set, key, expected) in cases {
            assert_eq!(set.suggest(key), expected, "{key}");
        }
    }
}
