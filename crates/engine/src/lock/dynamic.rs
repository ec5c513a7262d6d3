//! Jobs that other jobs make, and jobs that start other workflows.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::{Container, Matcher, Retry, Shell, Value, step};
use crate::state::JobStatus;

/// Most jobs that one generator may make.
pub const MAX_GENERATED_JOBS: usize = 256;
/// Largest document of a generator, in bytes.
pub const MAX_GENERATED_BYTES: usize = 4 * 1024 * 1024;
/// Most bytes of step files that a workflow keeps for generated jobs.
pub const MAX_STEP_FILE_BYTES: usize = 1024 * 1024;

/// A job whose step makes other jobs: the document that it writes to `$KICI_JOBS`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Generate {
    /// The group that its jobs form.
    pub group: String,
    /// What its jobs may ask for.
    #[serde(default)]
    pub allow: Allow,
    /// The jobs that it made, by name; none until it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<Vec<String>>,
}

/// What generated jobs may ask for besides what every job may.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Allow {
    /// Names of environments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub environments: Vec<String>,
    /// References of secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// Labels of agents; none means those that the generator itself asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs_on: Option<Vec<Matcher>>,
}

/// What the jobs that generators make have from their workflow's file, which is not there any more when they are made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ForGenerated {
    /// Shell of steps that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<Shell>,
    /// Where steps start that do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<Value>,
    /// Limit of jobs and steps that name none, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Environment below that of each job.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
    /// Container of jobs that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
    /// When jobs that do not say it are tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// The step files of the commit, by path, with LF line ends.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub step_files: BTreeMap<String, String>,
}

/// An edge to all jobs of a group, which may not exist yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupNeed {
    /// The group.
    pub group: String,
    /// Terminal statuses of its jobs that satisfy the edge; judged on the generator itself where that made none.
    pub run_on: Vec<JobStatus>,
}

/// A job that has no steps: it emits an event for the workflows of its own repository and waits for the runs that it starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Invoke {
    /// Name of the event.
    pub event: Value,
    /// Its document. Texts in it are templates; one that is a single expression stands for its value.
    pub payload: Json,
    /// It is a success when nobody listens. A refusal never is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

impl Invoke {
    /// The texts of the document that hold expressions.
    pub fn templates(&self) -> Vec<&str> {
        let mut found = Vec::new();
        step::templates(&self.payload, &mut found);
        found
    }
}
