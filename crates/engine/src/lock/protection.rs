//! What a workflow asks to be protected by or given: environments, approvals, secrets.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Value;

/// Secrets by the name of the variable that they are put into: `NAME`, or `CONTEXT:NAME`.
pub type Secrets = BTreeMap<String, String>;

/// Who must agree before something goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Approval {
    /// All of them must agree; empty is any member who may approve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approvers: Vec<Approver>,
    /// For those who decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long they have, in milliseconds; the organisation's default otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Of a step: whether also when there is no drift.
    #[serde(default, skip_serializing_if = "ApprovalWhen::is_always")]
    pub when: ApprovalWhen,
}

/// One clause of an [`Approval`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Approver {
    /// Any member of this team.
    Team(String),
    /// This person.
    User(String),
}

/// When a step asks for its approval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalWhen {
    /// Before it runs.
    #[default]
    Always,
    /// Before `apply`, when its check found drift.
    Drift,
}

impl ApprovalWhen {
    fn is_always(&self) -> bool {
        *self == Self::Always
    }
}

/// The environments that a job runs in, in the order in which they are merged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Environments {
    /// Their names, which may be templates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<Value>,
    /// Where to look at what was deployed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<Value>,
}

impl Environments {
    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}
