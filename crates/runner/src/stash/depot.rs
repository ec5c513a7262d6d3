//! Where archives are kept, as the agent sees it.

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;

/// The bytes of an archive, piece by piece.
pub type Pieces = BoxStream<'static, Result<Bytes, std::io::Error>>;

/// An archive that can be fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archive {
    /// Where, as the depot understands it. Not to be shown: it may let its bearer in.
    pub place: Place,
    /// Bytes.
    pub size: u64,
    /// SHA-256 (hex).
    pub sha256: String,
}

/// A place for an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// What the depot calls it.
    pub id: String,
    /// Where. Not to be shown.
    pub place: Place,
    /// Most bytes.
    pub max_bytes: u64,
}

/// An address. `Debug` does not show its query.
#[derive(Clone, PartialEq, Eq)]
pub struct Place(pub String);

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(kici_protocol::redact::without_query(&self.0))
    }
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DepotError {
    /// It may work later.
    #[error("{0}")]
    Unavailable(String),
    /// It will not work.
    #[error("{0}")]
    Refused(String),
    /// There is no such thing here.
    #[error("{0}")]
    Nowhere(&'static str),
}

/// Keeps archives of one job's run and of its repository. Where a job reads and writes is the depot's to decide.
#[async_trait]
pub trait Depot: Send + Sync {
    /// The entry of a key, or the newest of the first of `restore_keys` that fits; with its key.
    ///
    /// # Errors
    /// [`DepotError`].
    async fn find_cache(&self, key: &str, restore_keys: &[String]) -> Result<Option<(String, Archive)>, DepotError>;

    /// A place for an entry; none when there is one of this key.
    ///
    /// # Errors
    /// [`DepotError`].
    async fn begin_cache(&self, key: &str) -> Result<Option<Target>, DepotError>;

    /// The entry was sent; false when another one was there first.
    ///
    /// # Errors
    /// [`DepotError`].
    async fn commit_cache(&self, target: &Target, key: &str, sha256: &str) -> Result<bool, DepotError>;

    /// A place for an artifact of the run. Kept as long as the depot keeps artifacts when no time is given.
    ///
    /// # Errors
    /// [`DepotError`].
    async fn begin_artifact(&self, name: &str, expire_in_ms: Option<u64>) -> Result<Target, DepotError>;

    /// The artifact was sent.
    ///
    /// # Errors
    /// [`DepotError`].
    async fn commit_artifact(&self, target: &Target, name: &str, sha256: &str) -> Result<(), DepotError>;

    /// An artifact of the run; made by `from` if that is given.
    ///
    /// # Errors
    /// [`DepotError`].
    async fn find_artifact(&self, name: &str, from: Option<&str>) -> Result<Option<Archive>, DepotError>;

    /// Fetches an archive.
    ///
    /// # Errors
    /// [`DepotError`], and later in the stream.
    async fn fetch(&self, archive: &Archive) -> Result<Pieces, DepotError>;

    /// Sends an archive whole.
    ///
    /// # Errors
    /// [`DepotError`]; then nothing was sent.
    async fn send(&self, target: &Target, pieces: Pieces) -> Result<(), DepotError>;
}
