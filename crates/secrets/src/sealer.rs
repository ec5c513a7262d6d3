//! Sealing and opening.

use std::fmt;
use std::str::FromStr;

use aes_gcm::aead::{Aead, Payload};
use aes_gcm::{Aes256Gcm, KeyInit, Nonce};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::key::{Keyring, SealingKey};

/// What a value is for. It opens only for the same purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Purpose<'a> {
    /// Owner of the value, e.g. `__source__/<id>`.
    pub scope: &'a str,
    /// Its name in the scope.
    pub name: &'a str,
    /// Version of the row that holds it.
    pub version: u64,
}

impl Purpose<'_> {
    /// Length before each part, so that no two purposes have the same bytes.
    fn associated_data(self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24 + self.scope.len() + self.name.len());
        for part in [self.scope, self.name] {
            out.extend_from_slice(&(part.len() as u64).to_be_bytes());
            out.extend_from_slice(part.as_bytes());
        }
        out.extend_from_slice(&self.version.to_be_bytes());
        out
    }
}

/// Why a value was not sealed or opened. Never holds a part of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Not the text of a sealed value.
    #[error("stored value is not a sealed secret (`v1.<key>.<nonce>.<text>`); set the secret again")]
    Malformed,
    /// Sealed with a key that is not here.
    #[error(
        "the secret was sealed with key {0}, which is not configured; set secrets.key or secrets.previous_key to it"
    )]
    UnknownKey(String),
    /// The value was changed, or belongs to another place.
    #[error("the sealed secret was changed or belongs to another place; set the secret again")]
    Tampered,
    /// What was sealed is not text.
    #[error("the sealed secret is not text; set the secret again")]
    NotText,
    /// No randomness, or the cipher refused (a value beyond 64 GiB).
    #[error("the secret could not be sealed: {0}")]
    Sealing(String),
}

/// A sealed value. Its text form is `v1.<key id>.<nonce>.<ciphertext and tag>`, the last two in unpadded URL-safe
/// base64.
#[derive(Clone, PartialEq, Eq)]
pub struct SealedBox {
    key_id: String,
    nonce: [u8; 12],
    sealed: Vec<u8>,
}

impl SealedBox {
    /// Which key opens it, for rotation.
    pub fn key_id(&self) -> &str {
        &self.key_id
    }
}

impl fmt::Display for SealedBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nonce, sealed) = (URL_SAFE_NO_PAD.encode(self.nonce), URL_SAFE_NO_PAD.encode(&self.sealed));
        write!(f, "v1.{}.{nonce}.{sealed}", self.key_id)
    }
}

impl fmt::Debug for SealedBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealedBox(key {}, {} bytes)", self.key_id, self.sealed.len())
    }
}

impl FromStr for SealedBox {
    type Err = SealError;

    fn from_str(text: &str) -> Result<Self, SealError> {
        let mut parts = text.split('.');
        let (Some("v1"), Some(key_id), Some(nonce), Some(sealed), None) =
            (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(SealError::Malformed);
        };
        let decode = |part| URL_SAFE_NO_PAD.decode(part).map_err(|_| SealError::Malformed);
        let nonce = decode(nonce)?.try_into().map_err(|_| SealError::Malformed)?;
        Ok(Self { key_id: key_id.to_owned(), nonce, sealed: decode(sealed)? })
    }
}

type Random = Box<dyn Fn(&mut [u8]) -> Result<(), getrandom::Error> + Send + Sync>;

/// Seals and opens values with a keyring.
pub struct Sealer {
    keys: Keyring,
    random: Random,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl Sealer {
    /// A sealer with the system's randomness.
    pub fn new(keys: impl Into<Keyring>) -> Self {
        Self::with_random(keys, getrandom::fill)
    }

    /// A sealer with its own source of nonces. A nonce must never come twice with one key.
    pub fn with_random(
        keys: impl Into<Keyring>,
        random: impl Fn(&mut [u8]) -> Result<(), getrandom::Error> + Send + Sync + 'static,
    ) -> Self {
        Self { keys: keys.into(), random: Box::new(random) }
    }

    /// Seals a value for one purpose, with the current key.
    ///
    /// # Errors
    /// [`SealError::Sealing`].
    pub fn seal(&self, purpose: Purpose<'_>, value: &SecretString) -> Result<SealedBox, SealError> {
        let mut nonce = [0u8; 12];
        (self.random)(&mut nonce).map_err(|e| SealError::Sealing(e.to_string()))?;
        let aad = purpose.associated_data();
        let payload = Payload { msg: value.expose_secret().as_bytes(), aad: &aad };
        let sealed = cipher(&self.keys.current)
            .encrypt(&Nonce::from(nonce), payload)
            .map_err(|_| SealError::Sealing("value too long".to_owned()))?;
        Ok(SealedBox { key_id: self.keys.current.id(), nonce, sealed })
    }

    /// Opens a value that was sealed for the same purpose, with the current or the previous key.
    ///
    /// # Errors
    /// [`SealError`].
    pub fn open(&self, purpose: Purpose<'_>, sealed: &SealedBox) -> Result<SecretString, SealError> {
        let keys = [Some(&self.keys.current), self.keys.previous.as_ref()];
        let key = keys.into_iter().flatten().find(|k| k.id() == sealed.key_id);
        let key = key.ok_or_else(|| SealError::UnknownKey(sealed.key_id.chars().take(16).collect()))?;
        let aad = purpose.associated_data();
        let payload = Payload { msg: &sealed.sealed, aad: &aad };
        let opened = cipher(key).decrypt(&Nonce::from(sealed.nonce), payload).map_err(|_| SealError::Tampered)?;
        let opened = Zeroizing::new(opened);
        let text = std::str::from_utf8(&opened).map_err(|_| SealError::NotText)?;
        Ok(SecretString::from(text))
    }

    /// A key for one purpose, made from the current key: every process that has that key makes the same one, and it tells nothing of
    /// it.
    pub fn derived(&self, purpose: &str) -> Zeroizing<[u8; 32]> {
        // Of a fixed length and first, so that no two inputs are alike; SHA-256 of a secret and a constant.
        let mut digest = Sha256::new();
        digest.update(b"kici/derived/1\0");
        digest.update(self.keys.current.bytes());
        digest.update(purpose.as_bytes());
        Zeroizing::new(digest.finalize().into())
    }

    /// Whether a value is sealed with another key than the current one and should be sealed again.
    pub fn is_outdated(&self, sealed: &SealedBox) -> bool {
        sealed.key_id != self.keys.current.id()
    }
}

fn cipher(key: &SealingKey) -> Aes256Gcm {
    Aes256Gcm::new(key.bytes().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> SealingKey {
        SealingKey::from_bytes([byte; 32])
    }

    const PURPOSE: Purpose<'static> = Purpose { scope: "__source__/1", name: "webhook", version: 3 };

    #[test]
    fn values_round_trip_through_text() {
        let sealer = Sealer::new(key(1));
        for value in ["", "hush", &"ä".repeat(10_000)] {
            let text = sealer.seal(PURPOSE, &value.into()).unwrap().to_string();
            assert!(text.starts_with("v1."), "{text}");
            assert_eq!(sealer.open(PURPOSE, &text.parse().unwrap()).unwrap().expose_secret(), value);
        }
        let twice = || sealer.seal(PURPOSE, &"x".into()).unwrap().to_string();
        assert_ne!(twice(), twice(), "nonces differ");
    }

    #[test]
    fn a_value_opens_only_where_it_belongs() {
        let sealer = Sealer::new(key(1));
        let sealed = sealer.seal(PURPOSE, &"hush".into()).unwrap();
        let others = [
            Purpose { scope: "__source__/2", ..PURPOSE },
            Purpose { name: "key", ..PURPOSE },
            Purpose { version: 4, ..PURPOSE },
            Purpose { scope: "__source__/1w", name: "ebhook", ..PURPOSE },
        ];
        for other in others {
            assert_eq!(sealer.open(other, &sealed).unwrap_err(), SealError::Tampered, "{other:?}");
        }
        let mut flipped = sealed.clone();
        flipped.sealed[0] ^= 1;
        assert_eq!(sealer.open(PURPOSE, &flipped).unwrap_err(), SealError::Tampered);
        let text = sealed.to_string();
        for bad in ["", "v1", "v2.a.b.c", "plain", &text[..text.len() / 3], &format!("{text}.x")] {
            assert_eq!(bad.parse::<SealedBox>(), Err(SealError::Malformed), "{bad}");
        }
    }

    #[test]
    fn keys_rotate() {
        let old = Sealer::new(key(1));
        let sealed = old.seal(PURPOSE, &"hush".into()).unwrap();
        let rotating = Sealer::new(Keyring { current: key(2), previous: Some(key(1)) });
        assert_eq!(rotating.open(PURPOSE, &sealed).unwrap().expose_secret(), "hush");
        assert!(rotating.is_outdated(&sealed) && !old.is_outdated(&sealed));
        let done = Sealer::new(key(2));
        assert_eq!(done.open(PURPOSE, &sealed).unwrap_err(), SealError::UnknownKey(key(1).id()));
    }

    #[test]
    fn without_randomness_nothing_is_sealed() {
        let sealer = Sealer::with_random(key(1), |_| Err(getrandom::Error::UNSUPPORTED));
        assert!(matches!(sealer.seal(PURPOSE, &"x".into()), Err(SealError::Sealing(_))));
    }
}
