//! What can go wrong.

use std::error::Error;
use std::io;

/// Why an object could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// There is no such object.
    #[error("object `{0}` does not exist")]
    NotFound(String),
    /// The disk or its quota is full. Nothing was stored; the same call works once there is room.
    #[error("no space left for object `{0}`; free disk space or raise the quota")]
    Full(String),
    /// The object is larger than the caller takes.
    #[error("object `{key}` is larger than the limit of {limit} bytes")]
    TooLarge {
        /// Its key.
        key: String,
        /// The limit.
        limit: u64,
    },
    /// Not a key.
    #[error("`{0}` is not an object key; use parts of letters, digits and `._:@+-=` between slashes")]
    BadKey(String),
    /// The object's content is not what it should be.
    #[error("object `{key}` is damaged: {problem}")]
    Damaged {
        /// Its key.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// Anything else the storage says.
    #[error("storage failed for `{key}`: {source}")]
    Storage {
        /// Its key.
        key: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl BlobError {
    pub(crate) fn storage(key: &str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let source = source.into();
        if is_full(source.as_ref()) {
            return Self::Full(key.to_owned());
        }
        Self::Storage { key: key.to_owned(), source }
    }

    pub(crate) fn store(key: &str, error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::NotFound(key.to_owned()),
            other => Self::storage(key, other),
        }
    }

    pub(crate) fn damaged(key: &str, problem: impl ToString) -> Self {
        Self::Damaged { key: key.to_owned(), problem: problem.to_string() }
    }

    /// Whether waiting for room helps.
    pub const fn is_full(&self) -> bool {
        matches!(self, Self::Full(_))
    }
}

/// Looks through the whole chain: the store wraps the system's error several times.
fn is_full(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            if matches!(io.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
                return true;
            }
            // An io::Error that wraps another shows only the inner one's own source.
            if io.get_ref().is_some_and(|inner| is_full(inner)) {
                return true;
            }
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_found_in_the_chain() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let wrapped = io::Error::other(io::Error::other(full()));
        let generic = object_store::Error::Generic { store: "x", source: Box::new(wrapped) };
        assert!(BlobError::store("k", generic).is_full());
        assert!(BlobError::storage("k", full()).is_full());
        assert!(!BlobError::storage("k", io::Error::from(io::ErrorKind::PermissionDenied)).is_full());
    }
}
