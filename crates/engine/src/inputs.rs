//! Inputs of manual and dispatched runs (workflows-and-events R26): checked against their declaration before the run exists.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::lock::Input;

/// One fault of one input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("input `{field}`: {message}")]
pub struct InputError {
    /// Name of the input.
    pub field: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

/// Checks what was given, converts texts to the declared type (a command line has only texts) and adds the defaults.
///
/// # Errors
/// One [`InputError`] per faulty or unknown input, sorted by name.
pub fn validate(
    declared: &BTreeMap<String, Input>,
    given: &BTreeMap<String, Json>,
) -> Result<BTreeMap<String, Json>, Vec<InputError>> {
    let _ = (declared, given);
    unimplemented!()
}
