//! Stored sources as the forge crate knows them.

use std::sync::Arc;

use kici_forge::{ConfigError, Forge, ForgeError, Source, SourceConfig, SourceKind, SourceSecrets};
use kici_store::model;

use crate::ports::{Repositories, Unseal};

/// A source that cannot be used as it is stored.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Its configuration does not read.
    #[error("source `{name}`: {error}")]
    Config {
        /// Its name.
        name: String,
        /// What is wrong.
        error: ConfigError,
    },
    /// Its secrets cannot be opened.
    #[error("the secrets of source `{name}` cannot be read: {problem}")]
    Secrets {
        /// Its name.
        name: String,
        /// What is wrong.
        problem: String,
    },
}

/// A source with its secrets opened.
#[derive(Clone, Debug)]
pub struct OpenSource {
    /// The source.
    pub source: Source,
    /// Its secrets.
    pub secrets: SourceSecrets,
    /// Whether it takes events.
    pub enabled: bool,
}

/// Turns stored sources into usable ones.
#[derive(Clone)]
pub struct SourceBook {
    unseal: Arc<dyn Unseal>,
    repositories: Arc<dyn Repositories>,
}

impl SourceBook {
    /// A book over these ports.
    pub fn new(unseal: Arc<dyn Unseal>, repositories: Arc<dyn Repositories>) -> Self {
        Self { unseal, repositories }
    }

    /// Reads the configuration and opens the secrets of a stored source.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn open(&self, stored: &model::Source) -> Result<OpenSource, SourceError> {
        let source = typed(stored)?;
        let secrets = self
            .unseal
            .source_secrets(stored)
            .map_err(|problem| SourceError::Secrets { name: stored.name.clone(), problem })?;
        Ok(OpenSource { source, secrets, enabled: stored.enabled && stored.deleted_at.is_none() })
    }

    /// The forge that a source reads from.
    ///
    /// # Errors
    /// [`ForgeError`].
    pub fn forge(&self, open: &OpenSource) -> Result<Arc<dyn Forge>, ForgeError> {
        self.repositories.of(&open.source, &open.secrets)
    }
}

/// The typed form of a stored source.
///
/// # Errors
/// [`SourceError::Config`].
pub fn typed(stored: &model::Source) -> Result<Source, SourceError> {
    let kind = match stored.kind {
        model::SourceKind::Github => SourceKind::Github,
        model::SourceKind::Generic => SourceKind::Generic,
        model::SourceKind::Local => SourceKind::Local,
    };
    let config = SourceConfig::from_json(kind, stored.config.clone())
        .map_err(|error| SourceError::Config { name: stored.name.clone(), error })?;
    Ok(Source { id: stored.id, org: stored.org.clone(), name: stored.name.clone(), version: stored.version, config })
}
