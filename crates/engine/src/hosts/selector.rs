//! How `runs_on_all` stands in a lock document.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lock::Matcher;

/// Which hosts a job runs on, once on each: all matchers of one group hit, and no exclusion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostSelector {
    /// Groups, of which one must hit. None: every host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<Vec<Matcher>>,
    /// None may hit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<Matcher>,
}

/// What becomes of a job on a host that is out of contact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnUnreachable {
    /// It waits for the host.
    #[default]
    Hold,
    /// It is skipped.
    Skip,
    /// It fails.
    Fail,
}

impl OnUnreachable {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
