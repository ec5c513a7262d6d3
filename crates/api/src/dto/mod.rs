//! The documents of the API. Field names are snake_case; ids carry their prefix (`run_…`); instants are RFC 3339 in UTC.
//! Requests refuse unknown fields.

pub mod access_log;
pub mod agents;
pub mod audit;
pub mod bus;
pub mod events;
pub mod hosts;
pub mod logs;
pub mod queue;
pub mod runs;
pub mod sources;
pub mod stored;
pub mod stream;
pub mod system;
pub mod tokens;
pub mod workflows;

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A secret that has to travel in a document: a token at its creation, a webhook secret on its way in. It is never shown
/// by `Debug`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = String, format = Password)]
pub struct SecretText(String);

impl SecretText {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret itself. Named so that its uses can be searched for.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}
