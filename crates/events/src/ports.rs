//! What this crate needs from the program that mounts it.

use std::sync::Arc;

use kici_forge::{Forge, ForgeError, Source, SourceSecrets};

/// Opens the sealed secrets of sources.
pub trait Unseal: Send + Sync {
    /// The secrets of a stored source; empty when it has none.
    ///
    /// # Errors
    /// A text for operators, without any part of a secret.
    fn source_secrets(&self, source: &kici_store::model::Source) -> Result<SourceSecrets, String>;
}

/// Gives out the forge that a source reads from.
pub trait Repositories: Send + Sync {
    /// The forge of `source`.
    ///
    /// # Errors
    /// [`ForgeError::Misconfigured`] when the source cannot be used, [`ForgeError::NoRepository`] when it has none.
    fn of(&self, source: &Source, secrets: &SourceSecrets) -> Result<Arc<dyn Forge>, ForgeError>;
}
