//! What an agent is given to run: a job with everything that the orchestrator decides already decided.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::hosts::Fanout;
use crate::lock::{Step, Value};

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
    /// The steps, as in the lock.
    pub steps: Vec<Step>,
    /// Templates of the job's outputs.
    pub outputs: BTreeMap<String, Value>,
    /// Its place in a fan-out over hosts; `KICI_FANOUT_*` in its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fanout: Option<Fanout>,
    /// What expressions see: `event`, `repo`, `ref`, `sha`, `branch`, `inputs`, `vars`, `matrix`, `needs`, `run`, `fanout`. The
    /// agent adds `agent`, `env`, `steps` and `job`.
    pub context: BTreeMap<String, Json>,
}
