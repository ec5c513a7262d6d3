//! What an agent is given to run: a job with everything that the orchestrator decides already decided.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::check::CheckMode;
use crate::hosts::Fanout;
use crate::lock::{Artifacts, Cache, Composite, Container, Group, Hooks, Resources, Service, Step, Value};

/// The `spec_json` of a `JobOffer`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Name of the workflow.
    pub workflow: String,
    /// Key of the job with its matrix values, unique in the run.
    pub job: String,
    /// The environment of the workflow and of the job, rendered at dispatch; templates of the agent's stage are left.
    pub env: BTreeMap<String, Value>,
    /// `MATRIX_*` and `INPUT_*` variables.
    pub variables: BTreeMap<String, String>,
    /// Commands that prepare the job before its first step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub init: Vec<Step>,
    /// Files that are restored before the first step and saved after the last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<Cache>,
    /// Files that it takes from other jobs and hands over.
    #[serde(default, skip_serializing_if = "Artifacts::is_empty")]
    pub artifacts: Artifacts,
    /// The steps, as in the lock.
    pub steps: Vec<Step>,
    /// The groups that steps form.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
    /// The uses of step files that steps stand in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub composites: Vec<Composite>,
    /// What runs around the steps.
    #[serde(default, skip_serializing_if = "Hooks::is_empty")]
    pub hooks: Hooks,
    /// What the steps may change.
    #[serde(default, skip_serializing_if = "CheckMode::is_apply")]
    pub check_mode: CheckMode,
    /// How the run ended, for the job of a workflow's hooks: `success`, `failed` or `cancelled`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// The container of its steps, rendered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
    /// Containers beside it, rendered, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub services: BTreeMap<String, Service>,
    /// What it may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Templates of the job's outputs.
    pub outputs: BTreeMap<String, Value>,
    /// Its place in a fan-out over hosts; `KICI_FANOUT_*` in its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fanout: Option<Fanout>,
    /// Its only step makes other jobs: it writes them to `$KICI_JOBS`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub generate: bool,
    /// What expressions see: `event`, `repo`, `ref`, `sha`, `branch`, `inputs`, `vars`, `matrix`, `needs`, `run`, `fanout`. The
    /// agent adds `agent`, `env`, `steps` and `job`.
    pub context: BTreeMap<String, Json>,
}
