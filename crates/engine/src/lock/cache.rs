//! What jobs and steps keep for others: caches and artifacts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{SourceRef, Value};

/// After which end of a job something is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeepWhen {
    /// After a success.
    #[default]
    Success,
    /// After a failure; a cancelled job keeps nothing.
    Failure,
    /// After both.
    Always,
}

impl KeepWhen {
    /// Whether something is kept after this end.
    pub const fn holds(self, success: bool) -> bool {
        match self {
            Self::Success => success,
            Self::Failure => !success,
            Self::Always => true,
        }
    }

    fn is_default(&self) -> bool {
        *self == Self::Success
    }
}

/// Files that later jobs with the same key find again. Everything but `when` and `required` is rendered on the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cache {
    /// What it is found by; the first one that is saved under a key stays.
    pub key: Value,
    /// What is kept: paths below the workspace, or below the home directory of the steps with `~/`.
    pub paths: Vec<Value>,
    /// Beginnings of keys that will do when there is no entry of this very key; the first that fits counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restore_keys: Vec<Value>,
    /// After which end it is saved. `failure` does not exist for caches.
    #[serde(default, skip_serializing_if = "KeepWhen::is_default")]
    pub when: KeepWhen,
    /// A fault of the cache is one of the job.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub required: bool,
    /// Where it is written.
    pub source: SourceRef,
}

impl Cache {
    /// Every text of it that may hold an expression.
    pub fn values(&self) -> impl Iterator<Item = &Value> {
        std::iter::once(&self.key).chain(&self.paths).chain(&self.restore_keys)
    }
}

/// Files that jobs of a run hand to others and to people.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Artifacts {
    /// What the job hands over, after its steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub upload: Vec<Upload>,
    /// What it takes, before its steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub download: Vec<Download>,
}

impl Artifacts {
    /// True when there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.upload.is_empty() && self.download.is_empty()
    }

    /// Every text of them that may hold an expression.
    pub fn values(&self) -> impl Iterator<Item = &Value> {
        let upload = self.upload.iter().flat_map(|upload| std::iter::once(&upload.name).chain(&upload.paths));
        upload.chain(self.download.iter().flat_map(|download| std::iter::once(&download.name).chain(&download.path)))
    }
}

/// What is done when nothing is there to be uploaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum IfEmpty {
    /// It is said.
    #[default]
    Warn,
    /// The job fails.
    Fail,
    /// Nothing.
    Ignore,
}

/// An artifact that a job makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Upload {
    /// Its name, unique in the run.
    pub name: Value,
    /// Paths and globs below the workspace.
    pub paths: Vec<Value>,
    /// How long it is kept, in milliseconds; as long as the orchestrator keeps artifacts otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_in_ms: Option<u64>,
    /// When no file matches.
    #[serde(default)]
    pub if_empty: IfEmpty,
    /// After which end of the steps.
    #[serde(default, skip_serializing_if = "KeepWhen::is_default")]
    pub when: KeepWhen,
    /// Where it is written.
    pub source: SourceRef,
}

/// An artifact that a job takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Download {
    /// Its name.
    pub name: Value,
    /// The job that made it, one of those that this one needs; any job of the run otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Directory below the workspace that its files go to; the workspace itself otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<Value>,
    /// Where it is written.
    pub source: SourceRef,
}
