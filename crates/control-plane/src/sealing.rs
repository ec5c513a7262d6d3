//! Secrets of sources, sealed at rest.

use kici_engine::ids::SourceId;
use kici_events::ports::Unseal;
use kici_forge::SourceSecrets;
use kici_secrets::{SealError, Sealer};
use secrecy::ExposeSecret as _;

/// Seals and opens with the installation's key.
pub(crate) struct Sealing(pub(crate) Sealer);

/// The place a sealed value is bound to: it cannot be moved to another source.
fn scope(id: SourceId) -> String {
    format!("__source__/{}", id.uuid())
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
        let text = secrets.to_sealable();
        self.0.seal(&scope(id), "secrets", text.expose_secret().as_bytes()).map(|sealed| Some(sealed.to_string()))
    }
}

impl Unseal for Sealing {
    fn source_secrets(&self, source: &kici_store::model::Source) -> Result<SourceSecrets, String> {
        let Some(sealed) = &source.sealed_secrets else { return Ok(SourceSecrets::default()) };
        let text = self.0.open_text(&scope(source.id), "secrets", sealed).map_err(|error| error.to_string())?;
        SourceSecrets::from_unsealed(&text).map_err(|error| error.to_string())
    }
}
