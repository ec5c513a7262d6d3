//! Secrets of sources, sealed at rest.

use kici_engine::ids::SourceId;
use kici_events::ports::Unseal;
use kici_forge::SourceSecrets;
use kici_secrets::{Purpose, SealError, SealedBox, Sealer};

/// Seals and opens with the installation's key.
pub(crate) struct Sealing(pub(crate) Sealer);

/// The place a sealed value is bound to: it cannot be moved to another source.
fn scope(id: SourceId) -> String {
    format!("__source__/{}", id.uuid())
}

fn purpose(scope: &str) -> Purpose<'_> {
    // The version of the form; the row's own version changes without its secrets.
    Purpose { scope, name: "secrets", version: 1 }
}

impl Sealing {
    /// The stored form of a source's secrets; none when it has none.
    ///
    /// # Errors
    /// [`SealError`].
    pub(crate) fn seal_source(&self, id: SourceId, secrets: &SourceSecrets) -> Result<Option<String>, SealError> {
        if secrets.webhook.is_empty() && secrets.private_key.is_none() {
            return Ok(None);
        }
        let scope = scope(id);
        self.0.seal(purpose(&scope), &secrets.to_sealable()).map(|sealed| Some(sealed.to_string()))
    }
}

impl Unseal for Sealing {
    fn source_secrets(&self, source: &kici_store::model::Source) -> Result<SourceSecrets, String> {
        let Some(sealed) = &source.sealed_secrets else { return Ok(SourceSecrets::default()) };
        let sealed: SealedBox = sealed.parse().map_err(|error: SealError| error.to_string())?;
        let scope = scope(source.id);
        let text = self.0.open(purpose(&scope), &sealed).map_err(|error| error.to_string())?;
        SourceSecrets::from_unsealed(&text).map_err(|error| error.to_string())
    }
}
