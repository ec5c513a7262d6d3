//! Checking workflow files without running anything.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use utoipa::ToSchema;

/// Files to check together: names are unique across all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ValidateWorkflows {
    /// The files, at most 100.
    pub files: Vec<WorkflowFile>,
}

/// One workflow file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkflowFile {
    /// Its path in the repository.
    pub path: String,
    /// Its text.
    pub content: String,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ValidationReport {
    /// True when no diagnostic is an error.
    pub valid: bool,
    /// Names of the workflows that compiled.
    pub workflows: Vec<String>,
    /// What was found, by file and position.
    #[schema(value_type = Vec<Object>)]
    pub diagnostics: Vec<Json>,
}
