//! Sealing keys and the file of the single node's key.

use std::fmt;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The text is not a key. The text itself is not shown.
    #[error("not a key; give 32 random bytes as 64 hex digits or in base64, e.g. from `openssl rand -hex 32`")]
    Malformed,
    /// All bytes are equal, so this is a placeholder.
    #[error("the key is a placeholder (all bytes are equal); generate one, e.g. with `openssl rand -hex 32`")]
    Placeholder,
    /// The key file cannot be read or written.
    #[error("key file {path}: {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Others may read the key file.
    #[error("key file {path} has mode {mode:03o}; other users could read it, run `chmod 600 {path}`")]
    Exposed {
        /// Its path.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// No randomness.
    #[error("no randomness for a new key: {0}")]
    Random(getrandom::Error),
}

/// A key of 256 bits. Wiped on drop; `Debug` shows only its id.
#[derive(Clone)]
pub struct SealingKey(Zeroizing<[u8; 32]>);

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealingKey({})", self.id())
    }
}

impl SealingKey {
    /// Wraps 32 bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Reads 64 hex digits, or 32 bytes in base64 (either alphabet, with or without padding).
    ///
    /// # Errors
    /// [`KeyError::Malformed`] or [`KeyError::Placeholder`].
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let text = text.trim();
        let mut bytes = Zeroizing::new([0u8; 32]);
        if hex::decode_to_slice(text, bytes.as_mut_slice()).is_err() {
            let bare = text.trim_end_matches('=');
            let decoded = STANDARD_NO_PAD.decode(bare).or_else(|_| URL_SAFE_NO_PAD.decode(bare));
            let decoded = Zeroizing::new(decoded.map_err(|_| KeyError::Malformed)?);
            if decoded.len() != 32 {
                return Err(KeyError::Malformed);
            }
            bytes.copy_from_slice(&decoded);
        }
        if bytes.iter().all(|b| *b == bytes[0]) {
            return Err(KeyError::Placeholder);
        }
        Ok(Self(bytes))
    }

    /// A fresh key. `random` fills the bytes, normally `getrandom::fill`.
    ///
    /// # Errors
    /// [`KeyError::Random`].
    pub fn generate(random: impl FnOnce(&mut [u8]) -> Result<(), getrandom::Error>) -> Result<Self, KeyError> {
        let mut bytes = Zeroizing::new([0u8; 32]);
        random(bytes.as_mut_slice()).map_err(KeyError::Random)?;
        Ok(Self(bytes))
    }

    /// Reads the key file; where there is none, writes one with a fresh key, readable by its owner only and synced to
    /// disk before the key is used. Of two processes that start together both get the same key.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn load_or_generate(
        path: &Path,
        random: impl FnOnce(&mut [u8]) -> Result<(), getrandom::Error>,
    ) -> Result<Self, KeyError> {
        match Self::load(path) {
            Err(KeyError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let key = Self::generate(random)?;
        match key.write_new(path) {
            Ok(()) => Ok(key),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Self::load(path),
            Err(source) => Err(KeyError::File { path: path.to_owned(), source }),
        }
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// [`KeyError`]; also when other users could read the file.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let fail = |source| KeyError::File { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(fail)?;
        let mode = file.metadata().map_err(fail)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(KeyError::Exposed { path: path.to_owned(), mode });
        }
        let mut text = Zeroizing::new(String::new());
        (&mut file).take(1024).read_to_string(&mut text).map_err(fail)?;
        Self::parse(&text)
    }

    /// Writes beside the place and links into it: the name never shows a half-written key.
    fn write_new(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        let draft = folder.join(name);
        let written = (|| {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
            // An old draft keeps its mode when opened again.
            file.set_permissions(Permissions::from_mode(0o600))?;
            let text = Zeroizing::new(format!("{}\n", &*Zeroizing::new(hex::encode(self.0.as_slice()))));
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::hard_link(&draft, path)?;
            File::open(folder)?.sync_all()
        })();
        let removed = std::fs::remove_file(&draft);
        written.and(removed)
    }

    /// Names the key without telling it: the first four bytes of SHA-256 over it, in hex.
    pub fn id(&self) -> String {
        hex::encode(&Sha256::digest(self.0.as_slice())[..4])
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// The key that seals, and during a rotation the one before it, which only opens.
#[derive(Clone, Debug)]
pub struct Keyring {
    /// Seals and opens.
    pub current: SealingKey,
    /// Only opens.
    pub previous: Option<SealingKey>,
}

impl From<SealingKey> for Keyring {
    fn from(current: SealingKey) -> Self {
        Self { current, previous: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting(bytes: &mut [u8]) -> Result<(), getrandom::Error> {
        bytes.iter_mut().zip(0..).for_each(|(b, n)| *b = n);
        Ok(())
    }

    #[test]
    fn hex_and_base64_name_the_same_key() {
        let hex_text = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
        let id = SealingKey::parse(hex_text).unwrap().id();
        for text in ["AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8\n"] {
            assert_eq!(SealingKey::parse(text).unwrap().id(), id);
        }
        assert!(!format!("{:?}", SealingKey::parse(hex_text).unwrap()).contains("0001"));
        for bad in ["", "00", &hex_text[..62], "change-me", "AAEC"] {
            assert!(matches!(SealingKey::parse(bad), Err(KeyError::Malformed)), "{bad}");
        }
        assert!(matches!(SealingKey::parse(&"0".repeat(64)), Err(KeyError::Placeholder)));
    }

    #[test]
    fn the_file_is_private_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret.key");
        let first = SealingKey::load_or_generate(&path, counting).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let again = SealingKey::load_or_generate(&path, |_| unreachable!()).unwrap();
        assert_eq!(first.id(), again.id());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no draft is left");
        assert_eq!(first.write_new(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);

        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let error = SealingKey::load(&path).unwrap_err().to_string();
        assert!(error.contains("mode 640") && error.contains("chmod 600"), "{error}");
    }
}
