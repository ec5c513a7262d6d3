//! Steps, groups of them that run side by side, and hooks.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::{Approval, Cache, Conditions, Input, Secrets, Shell, SourceRef, Value};

/// Longest that one hook may take, in milliseconds; also its limit where it names none.
pub const MAX_HOOK_MS: u64 = 5 * 60 * 1000;
/// Longest that the job of a workflow's hooks may take, in milliseconds.
pub const MAX_RUN_HOOKS_MS: u64 = 10 * 60 * 1000;
/// Name of the job that runs a workflow's hooks. No workflow can give a job this name.
pub const RUN_HOOKS_JOB: &str = "_hooks";

/// One step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Step {
    /// Unique in its job; names its outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// For people; the first line of the script otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Value>,
    /// Where it is written.
    pub source: SourceRef,
    /// What it does.
    #[serde(flatten)]
    pub action: Action,
    /// None: bash, or `sh -e` where there is no bash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<Shell>,
    /// Below the workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<Value>,
    /// Environment of this step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
    /// Secrets in the environment of this step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: Secrets,
    /// Who must agree before it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<Approval>,
    /// A CEL condition, evaluated on the agent; false means `skipped`.
    #[serde(default, rename = "if", skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// Its failure does not fail the job.
    #[serde(default)]
    pub continue_on_error: bool,
    /// Limit of one attempt in milliseconds; the agent's default otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// When it is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<StepRetry>,
    /// The group it belongs to, as an index into the job's `groups`; the steps of a group follow each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// The use of a step file that it stands in, as an index into the job's `composites`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub composite: Option<u32>,
    /// Files that are restored before it and saved after it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<Cache>,
    /// Run when the step was cancelled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_cancel: Vec<Step>,
    /// Run after the step, however it ended, if it had started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cleanup: Vec<Step>,
}

impl Step {
    /// A step that runs a script and has nothing else.
    pub fn script(source: SourceRef, run: impl Into<String>) -> Self {
        Self {
            id: None,
            name: None,
            source,
            action: Action::Run(run.into()),
            shell: None,
            working_directory: None,
            env: BTreeMap::new(),
            secrets: Secrets::new(),
            approval: None,
            condition: None,
            continue_on_error: false,
            timeout_ms: None,
            retry: None,
            group: None,
            composite: None,
            cache: Vec::new(),
            on_cancel: Vec::new(),
            cleanup: Vec::new(),
        }
    }

    /// Every text of it that may hold an expression, its hooks' included.
    pub fn values(&self) -> impl Iterator<Item = &Value> {
        self.own_values().chain(self.on_cancel.iter().chain(&self.cleanup).flat_map(Self::own_values))
    }

    fn own_values(&self) -> impl Iterator<Item = &Value> {
        let own = match &self.action {
            Action::WaitFor(WaitFor { probe: Probe::Url(url), .. }) => Some(url),
            Action::Emit(emit) => Some(&emit.event),
            _ => None,
        };
        let caches = self.cache.iter().flat_map(Cache::values);
        self.name.iter().chain(&self.working_directory).chain(self.env.values()).chain(own).chain(caches)
    }
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Runs this script. Never a template.
    Run(String),
    /// Looks whether something is as it should be, and makes it so if not.
    Check(Check),
    /// Waits until something is there.
    WaitFor(WaitFor),
    /// Emits an event on the internal bus.
    Emit(Emit),
}

/// `check` and `apply`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// The script that looks; what it writes to `$KICI_DRIFT` is what differs.
    pub script: String,
    /// The script that repairs; it reads `$KICI_DRIFT`.
    pub apply: String,
    /// A script for the outputs where nothing differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when_in_sync: Option<String>,
    /// Exit code of `script` that alone means drift; then 0 is in sync and any other an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift_exit_code: Option<i32>,
}

/// `wait_for`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WaitFor {
    /// What is asked.
    #[serde(flatten)]
    pub probe: Probe,
    /// From the end of one question to the next, in milliseconds.
    pub interval_ms: u64,
    /// How long it is waited in all, in milliseconds.
    pub timeout_ms: u64,
}

/// `emit`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Emit {
    /// Name of the event.
    pub event: Value,
    /// Its document. Texts in it are templates; one that is a single expression stands for its value.
    pub payload: Json,
    /// Patterns of the repositories it is for; empty is all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub target_repos: Vec<String>,
}

impl Emit {
    /// The texts of the document that hold expressions.
    pub fn templates(&self) -> Vec<&str> {
        let mut found = Vec::new();
        templates(&self.payload, &mut found);
        found
    }
}

pub(super) fn templates<'a>(json: &'a Json, found: &mut Vec<&'a str>) {
    match json {
        Json::String(text) if text.contains("${{") => found.push(text),
        Json::Array(items) => items.iter().for_each(|item| templates(item, found)),
        Json::Object(fields) => fields.values().for_each(|field| templates(field, found)),
        _ => {}
    }
}

/// What `wait_for` asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// A script that exits with 0.
    Run(String),
    /// A GET that is answered with 2xx.
    Url(Value),
}

/// How the pause between attempts grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Backoff {
    /// It doubles.
    #[default]
    Exponential,
    /// It stays.
    Fixed,
}

/// When a step that failed is tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StepRetry {
    /// How often it is tried at most, the first time included.
    pub attempts: u32,
    /// Pause after the first attempt, in milliseconds.
    pub delay_ms: u64,
    /// How the pause grows.
    #[serde(default)]
    pub backoff: Backoff,
    /// Longest pause, in milliseconds.
    pub max_delay_ms: u64,
    /// Only these exit codes; any failure where empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_exit: Vec<i32>,
}

impl StepRetry {
    /// The pause in milliseconds before the next attempt, after attempt number `attempt` (from 1) failed with `exit_code`; none
    /// when there is no next one.
    pub fn pause(&self, attempt: u32, exit_code: Option<i32>) -> Option<u64> {
        let wanted = self.on_exit.is_empty() || exit_code.is_some_and(|code| self.on_exit.contains(&code));
        if attempt >= self.attempts || !wanted {
            return None;
        }
        let factor = match self.backoff {
            Backoff::Fixed => 1,
            Backoff::Exponential => 1_u64 << (attempt.max(1) - 1).min(40),
        };
        Some(self.delay_ms.saturating_mul(factor).min(self.max_delay_ms.max(self.delay_ms)))
    }
}

/// Steps that run side by side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Group {
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where it is written.
    pub source: SourceRef,
    /// The first step that fails cancels the others.
    pub fail_fast: bool,
    /// How many run at once; all where none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_parallel: Option<u32>,
}

/// One use of a step file: its steps stand in the job's list, see `Step::composite`, and have ids and inputs of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Composite {
    /// The use that this one stands in; none in the job itself. Always an earlier one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u32>,
    /// Names its outputs where it is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where it is used.
    pub source: SourceRef,
    /// Path of the step file from the root of the repository.
    pub path: String,
    /// A CEL condition where it is used; false means that all its steps are `skipped`.
    #[serde(default, rename = "if", skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// The inputs it declares.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub inputs: BTreeMap<String, Input>,
    /// What it is given, rendered where it is used.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub with: BTreeMap<String, Value>,
    /// Environment of its steps, rendered where it is used.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
    /// Its results, rendered where its steps are.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, Value>,
}

/// What runs around the steps of a job. Each entry is a step with `run` and no condition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Hooks {
    /// After all steps, when they succeeded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_success: Vec<Step>,
    /// After the steps, when one failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_failure: Vec<Step>,
    /// After a graceful cancel or the limit of the job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_cancel: Vec<Step>,
    /// Last, always, but for a forced cancel.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cleanup: Vec<Step>,
    /// Before each step that runs; may change nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before_step: Vec<Step>,
    /// After each step that ran; may change nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after_step: Vec<Step>,
}

impl Hooks {
    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Step> {
        let ends = self.on_success.iter().chain(&self.on_failure).chain(&self.on_cancel).chain(&self.cleanup);
        ends.chain(&self.before_step).chain(&self.after_step)
    }
}

/// A test on a file of the commit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Requirement {
    /// Path from the root of the repository.
    pub file: String,
    /// Whether it must be there.
    pub exists: bool,
    /// All must hold on its content, which is JSON.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub r#match: Conditions,
    /// None may hold.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not: Conditions,
}

/// A condition with a word for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Rule {
    /// CEL.
    #[serde(rename = "if")]
    pub condition: String,
    /// What it asks for.
    pub label: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry(attempts: u32, backoff: Backoff, on_exit: &[i32]) -> StepRetry {
        StepRetry { attempts, delay_ms: 1000, backoff, max_delay_ms: 5000, on_exit: on_exit.to_vec() }
    }

    #[test]
    fn pauses_grow_up_to_their_limit_and_end_with_the_attempts() {
        let growing = retry(5, Backoff::Exponential, &[]);
        let pauses: Vec<Option<u64>> = (1..=5).map(|attempt| growing.pause(attempt, Some(1))).collect();
        assert_eq!(pauses, [Some(1000), Some(2000), Some(4000), Some(5000), None]);
        let fixed = retry(3, Backoff::Fixed, &[]);
        assert_eq!(
            (1..=3).map(|attempt| fixed.pause(attempt, None)).collect::<Vec<_>>(),
            [Some(1000), Some(1000), None]
        );
        assert_eq!(retry(u32::MAX, Backoff::Exponential, &[]).pause(u32::MAX - 1, None), Some(5000));
    }

    #[test]
    fn exit_codes_that_are_not_named_are_final() {
        let some = retry(3, Backoff::Fixed, &[75, 69]);
        assert_eq!(some.pause(1, Some(75)), Some(1000));
        assert_eq!(some.pause(1, Some(1)), None);
        assert_eq!(some.pause(1, None), None, "a signal has no exit code");
    }

    #[test]
    fn a_step_reads_as_it_was_written_before_there_were_other_actions() {
        let old = r#"{"source":{"file":"a","line":1},"run":"make","continue_on_error":false}"#;
        let step: Step = serde_json::from_str(old).unwrap();
        assert_eq!(step, Step::script(SourceRef { file: "a".into(), line: 1 }, "make"));
        assert_eq!(serde_json::to_string(&step).unwrap(), old);
    }
}
