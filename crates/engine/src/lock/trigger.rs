//! What starts a workflow, and the inputs that it then has.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// Include and exclude patterns as written (`!x` excludes); see `crate::pattern` for their meaning.
pub type Patterns = Vec<String>;

/// Conditions on a JSON document: JSONPath (RFC 9535) to an expected scalar, a list of them (any), or `/regex/`.
pub type Conditions = BTreeMap<String, Json>;

/// What starts a workflow. An empty list or map does not filter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs, reason = "the fields are the keys of the table of trigger filters in docs/workflows.md")]
pub enum Trigger {
    /// A branch was pushed to.
    Push {
        #[serde(default)]
        branches: Patterns,
        #[serde(default)]
        paths: Patterns,
        #[serde(default)]
        repos: Patterns,
    },
    /// A pull or merge request.
    Pr {
        #[serde(default)]
        actions: Vec<String>,
        #[serde(default)]
        branches: Patterns,
        #[serde(default)]
        source_branches: Patterns,
        #[serde(default)]
        paths: Patterns,
        #[serde(default)]
        repos: Patterns,
    },
    /// A tag was pushed.
    Tag {
        #[serde(default)]
        tags: Patterns,
        #[serde(default)]
        repos: Patterns,
    },
    /// A comment on an issue or a pull request.
    Comment {
        #[serde(default)]
        actions: Vec<String>,
        #[serde(default)]
        target: Option<String>,
        #[serde(default)]
        body: Patterns,
    },
    /// A review of a pull request.
    Review {
        #[serde(default)]
        actions: Vec<String>,
        #[serde(default)]
        states: Vec<String>,
    },
    /// A comment in a review.
    ReviewComment {
        #[serde(default)]
        actions: Vec<String>,
    },
    /// A release.
    Release {
        #[serde(default)]
        actions: Vec<String>,
    },
    /// `repository_dispatch`, or by hand when `manual`.
    Dispatch {
        #[serde(default)]
        types: Vec<String>,
        #[serde(default)]
        manual: bool,
        #[serde(default)]
        inputs: BTreeMap<String, Input>,
    },
    /// A branch or tag was created.
    Create {
        #[serde(default)]
        ref_type: Option<String>,
        #[serde(default)]
        refs: Patterns,
    },
    /// A branch or tag was deleted.
    Delete {
        #[serde(default)]
        ref_type: Option<String>,
        #[serde(default)]
        refs: Patterns,
    },
    /// A commit status.
    Status {
        #[serde(default)]
        contexts: Patterns,
        #[serde(default)]
        states: Vec<String>,
    },
    /// A run of a foreign CI.
    WorkflowRun {
        #[serde(default)]
        actions: Vec<String>,
        #[serde(default)]
        workflows: Patterns,
        #[serde(default)]
        conclusions: Vec<String>,
    },
    /// The repository was forked.
    Fork {},
    /// The repository was starred.
    Star {
        #[serde(default)]
        actions: Vec<String>,
    },
    /// The repository was watched.
    Watch {
        #[serde(default)]
        actions: Vec<String>,
    },
    /// A raw event of a forge, by its name.
    Webhook {
        events: Vec<String>,
        #[serde(default)]
        actions: Vec<String>,
    },
    /// An event on the internal bus.
    KiciEvent {
        name: String,
        #[serde(default)]
        r#match: Conditions,
        #[serde(default)]
        not: Conditions,
        #[serde(default)]
        source: Patterns,
    },
    /// A run ended.
    WorkflowComplete {
        #[serde(default)]
        workflow: Patterns,
        #[serde(default)]
        status: Vec<String>,
        #[serde(default)]
        source: Patterns,
    },
    /// A job ended.
    JobComplete {
        #[serde(default)]
        workflow: Patterns,
        #[serde(default)]
        job: Patterns,
        #[serde(default)]
        status: Vec<String>,
        #[serde(default)]
        source: Patterns,
    },
    /// Several runs failed in a window.
    WorkflowsFailedBatch {
        accumulate_ms: u64,
        #[serde(default)]
        workflows: Patterns,
    },
    /// A call to a generic source.
    GenericWebhook {
        source: String,
        #[serde(default)]
        events: Vec<String>,
        #[serde(default)]
        r#match: Conditions,
        #[serde(default)]
        not: Conditions,
    },
    /// A time.
    Schedule {
        cron: String,
        timezone: String,
        #[serde(default)]
        inputs: BTreeMap<String, String>,
        jitter_ms: u64,
        catchup_ms: u64,
    },
    /// An event of the system's own life.
    Lifecycle {
        events: Vec<String>,
        #[serde(default)]
        sources: Patterns,
    },
}

/// Type of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum InputType {
    String,
    Number,
    Integer,
    Boolean,
    Enum,
    Literal,
}

/// One input of a manual or dispatched run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Input {
    /// Its type.
    pub r#type: InputType,
    /// Must be given.
    pub required: bool,
    /// Used when it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<Json>,
    /// Allowed values of an `enum` or `literal`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<Json>,
    /// Smallest number, or shortest string in characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// Largest number, or longest string in characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// Regular expression that a string must match as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}
