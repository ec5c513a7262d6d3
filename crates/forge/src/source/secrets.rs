//! The secrets of a source, as one text to seal.

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};

use super::ConfigError;

/// The secrets of a source. `Debug` shows none of them.
#[derive(Clone, Debug, Default)]
pub struct SourceSecrets {
    /// Secrets that verify deliveries, the current one and those being rotated out.
    pub webhook: Vec<SecretString>,
    /// PEM private key of a GitHub App.
    pub private_key: Option<SecretString>,
}

#[derive(Serialize, Deserialize)]
struct SecretsForm {
    #[serde(default)]
    webhook: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    private_key: Option<String>,
}

impl SourceSecrets {
    /// The text to seal.
    pub fn to_sealable(&self) -> SecretString {
        let form = SecretsForm {
            webhook: self.webhook.iter().map(|s| s.expose_secret().to_owned()).collect(),
            private_key: self.private_key.as_ref().map(|s| s.expose_secret().to_owned()),
        };
        // Strings and lists of strings always serialise.
        SecretString::from(serde_json::to_string(&form).unwrap_or_default())
    }

    /// Reads what [`SourceSecrets::to_sealable`] wrote.
    ///
    /// # Errors
    /// [`ConfigError`] without any of the text.
    pub fn from_unsealed(text: &SecretString) -> Result<Self, ConfigError> {
        let form: SecretsForm = serde_json::from_str(text.expose_secret())
            .map_err(|_| ConfigError::new("secrets", "stored secrets are not readable", "set them again"))?;
        Ok(Self {
            webhook: form.webhook.into_iter().map(SecretString::from).collect(),
            private_key: form.private_key.map(SecretString::from),
        })
    }
}
