//! Put, get, list, delete.

use std::fmt;
use std::ops::Range;
use std::path::Path as FsPath;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, TryStreamExt};
use kici_engine::time::Ts;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart};

use crate::error::BlobError;

/// An object's bytes, piece by piece.
pub type ByteStream = BoxStream<'static, Result<Bytes, BlobError>>;

/// Piece of a streamed put that is written at once.
const PIECE: usize = 1024 * 1024;
/// Pieces of a streamed put that may wait to be written.
const IN_FLIGHT: usize = 4;

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Key.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// When it was put.
    pub modified: Ts,
}

/// Where objects are. Cheap to clone.
#[derive(Clone)]
pub struct Blobs {
    store: Arc<dyn ObjectStore>,
    root: Arc<FsPath>,
}

impl fmt::Debug for Blobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blobs({})", self.store)
    }
}

impl Blobs {
    /// Objects in a folder, which is created if it is not there.
    ///
    /// # Errors
    /// [`BlobError`] when the folder cannot be made.
    pub fn local(root: &FsPath) -> Result<Self, BlobError> {
        let name = root.to_string_lossy();
        std::fs::create_dir_all(root).map_err(|e| BlobError::storage(&name, e))?;
        let store = LocalFileSystem::new_with_prefix(root).map_err(|e| BlobError::store(&name, e))?;
        Ok(Self { store: Arc::new(store.with_fsync(true).with_automatic_cleanup(true)), root: root.into() })
    }

    /// Stores an object, replacing one of the same key. Durable when it returns.
    ///
    /// # Errors
    /// [`BlobError`]; then the old object, if there was one, is untouched.
    pub async fn put(&self, key: &str, bytes: Bytes) -> Result<(), BlobError> {
        let path = path(key)?;
        let put = self.store.put(&path, PutPayload::from_bytes(bytes)).await;
        put.map(drop).map_err(|e| BlobError::store(key, e))
    }

    /// Stores an object of at most `limit` bytes from a stream and returns its size. Only some MiB are in memory.
    ///
    /// # Errors
    /// [`BlobError`], [`BlobError::TooLarge`] among them; then nothing is stored.
    pub async fn put_stream<E>(
        &self,
        key: &str,
        bytes: impl Stream<Item = Result<Bytes, E>> + Send,
        limit: u64,
    ) -> Result<u64, BlobError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let upload = self.store.put_multipart(&path(key)?).await.map_err(|e| BlobError::store(key, e))?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, PIECE);
        let mut size = 0u64;
        let mut bytes = std::pin::pin!(bytes);
        let fault = loop {
            let piece = match bytes.next().await {
                None => break None,
                Some(Ok(piece)) => piece,
                Some(Err(error)) => break Some(BlobError::storage(key, error)),
            };
            size += piece.len() as u64;
            if size > limit {
                break Some(BlobError::TooLarge { key: key.to_owned(), limit });
            }
            if let Err(error) = upload.wait_for_capacity(IN_FLIGHT).await {
                break Some(BlobError::store(key, error));
            }
            upload.write(&piece);
        };
        match fault {
            None => upload.finish().await.map(|_| size).map_err(|e| BlobError::store(key, e)),
            Some(fault) => {
                // What failed first is the news; the rest of the upload is invisible and swept with its folder.
                drop(upload.abort().await);
                Err(fault)
            }
        }
    }

    /// A whole object of at most `limit` bytes.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn get(&self, key: &str, limit: u64) -> Result<Bytes, BlobError> {
        let found = self.store.get(&path(key)?).await.map_err(|e| BlobError::store(key, e))?;
        if found.meta.size > limit {
            return Err(BlobError::TooLarge { key: key.to_owned(), limit });
        }
        found.bytes().await.map_err(|e| BlobError::store(key, e))
    }

    /// Bytes `range` of an object; shorter when the object ends before.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, BlobError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        self.store.get_range(&path(key)?, range).await.map_err(|e| BlobError::store(key, e))
    }

    /// An object piece by piece.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn get_stream(&self, key: &str) -> Result<ByteStream, BlobError> {
        let found = self.store.get(&path(key)?).await.map_err(|e| BlobError::store(key, e))?;
        let key = key.to_owned();
        Ok(found.into_stream().map_err(move |e| BlobError::store(&key, e)).boxed())
    }

    /// Bytes `range` of an object piece by piece; the range must lie in the object.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn get_range_stream(&self, key: &str, range: Range<u64>) -> Result<ByteStream, BlobError> {
        let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
        let found = self.store.get_opts(&path(key)?, options).await.map_err(|e| BlobError::store(key, e))?;
        let key = key.to_owned();
        Ok(found.into_stream().map_err(move |e| BlobError::store(&key, e)).boxed())
    }

    /// Deletes what puts below `prefix` have left half done, when their process died before `before`; returns how many. Nobody
    /// ever saw them. Blocks.
    ///
    /// # Errors
    /// [`BlobError`] when the folder cannot be read.
    pub fn remove_partial(&self, prefix: &str, before: Ts) -> Result<u64, BlobError> {
        path(prefix)?;
        let mut open = vec![self.root.join(prefix)];
        let mut removed = 0;
        while let Some(dir) = open.pop() {
            let entries = match std::fs::read_dir(&dir) {
                Ok(entries) => entries,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(BlobError::storage(prefix, error)),
            };
            for entry in entries.flatten() {
                let Ok(meta) = entry.metadata() else { continue };
                if meta.is_dir() {
                    open.push(entry.path());
                } else if is_partial(&entry.file_name()) && written(&meta).is_some_and(|at| at < before) {
                    // Finished or removed meanwhile: as good.
                    removed += u64::from(std::fs::remove_file(entry.path()).is_ok());
                }
            }
        }
        Ok(removed)
    }

    /// The size of an object in bytes; `None` when there is none.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn size(&self, key: &str) -> Result<Option<u64>, BlobError> {
        match self.store.head(&path(key)?).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(BlobError::store(key, error)),
        }
    }

    /// Whether there is such an object.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn exists(&self, key: &str) -> Result<bool, BlobError> {
        self.size(key).await.map(|size| size.is_some())
    }

    /// Deletes an object. One that is not there is no error.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn delete(&self, key: &str) -> Result<(), BlobError> {
        match self.store.delete(&path(key)?).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(BlobError::store(key, error)),
        }
    }

    /// Up to `limit` objects whose keys start with the parts of `prefix`, in no order.
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Blob>, BlobError> {
        let path = if prefix.is_empty() { None } else { Some(path(prefix)?) };
        let found = self.store.list(path.as_ref()).take(limit).map_ok(|meta| Blob {
            key: meta.location.to_string(),
            size: meta.size,
            modified: Ts::from_datetime(meta.last_modified),
        });
        found.try_collect().await.map_err(|e| BlobError::store(prefix, e))
    }
}

/// The name that `object_store` writes under until an object is whole: the object's with `#` and a number behind it. No key of
/// ours has a `#`.
fn is_partial(name: &std::ffi::OsStr) -> bool {
    let number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    name.to_str().and_then(|name| name.rsplit_once('#')).is_some_and(|(_, n)| number(n))
}

/// When a file was last written.
fn written(meta: &std::fs::Metadata) -> Option<Ts> {
    let since = meta.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
    i64::try_from(since.as_micros()).ok().map(Ts::from_micros)
}

/// Only plain keys: they become file names.
fn path(key: &str) -> Result<Path, BlobError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'@' | b'+' | b'-' | b'=');
    let part = |p: &str| (1..=200).contains(&p.len()) && p != "." && p != ".." && p.bytes().all(plain);
    let bad = || BlobError::BadKey(key.chars().take(200).collect());
    if key.len() > 1000 || !key.split('/').all(part) {
        return Err(bad());
    }
    Path::parse(key).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;

    use super::*;

    fn pieces(count: usize, size: usize) -> impl Stream<Item = Result<Bytes, Infallible>> {
        stream::iter((0..count).map(move |n| Ok(Bytes::from(vec![n as u8; size]))))
    }

    #[tokio::test]
    async fn objects_are_put_read_listed_and_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(&dir.path().join("deep/blobs")).unwrap();
        blobs.put("a/b/c.log", Bytes::from_static(b"hello")).await.unwrap();
        blobs.put("a/b/c.log", Bytes::from_static(b"hello world")).await.unwrap();
        blobs.put("a/bc", Bytes::new()).await.unwrap();
        assert_eq!(blobs.get("a/b/c.log", 100).await.unwrap(), "hello world");
        assert_eq!(blobs.get_range("a/b/c.log", 6..100).await.unwrap(), "world");
        assert_eq!(blobs.size("a/bc").await.unwrap(), Some(0));
        assert!(!blobs.exists("a/x").await.unwrap());
        assert!(matches!(blobs.get("a/x", 1).await, Err(BlobError::NotFound(k)) if k == "a/x"));
        assert!(matches!(blobs.get("a/b/c.log", 10).await, Err(BlobError::TooLarge { .. })));
        let listed = blobs.list("a/b", 10).await.unwrap();
        assert_eq!(listed.iter().map(|b| (b.key.as_str(), b.size)).collect::<Vec<_>>(), [("a/b/c.log", 11)]);
        assert_eq!(blobs.list("", 1).await.unwrap().len(), 1);
        for _ in 0..2 {
            blobs.delete("a/b/c.log").await.unwrap();
        }
        assert!(blobs.list("a/b", 10).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn streams_are_stored_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(dir.path()).unwrap();
        assert_eq!(blobs.put_stream("s", pieces(50, 100_000), u64::MAX).await.unwrap(), 5_000_000);
        let whole: Vec<Bytes> = blobs.get_stream("s").await.unwrap().try_collect().await.unwrap();
        assert_eq!(whole.iter().map(Bytes::len).sum::<usize>(), 5_000_000);
        let large = blobs.put_stream("t", pieces(50, 100_000), 4_999_999).await;
        assert!(matches!(large, Err(BlobError::TooLarge { .. })), "{large:?}");
        let broken = stream::iter([Ok(Bytes::from_static(b"x")), Err("sender gone")]);
        assert!(blobs.put_stream("t", broken, 10).await.is_err());
        assert!(!blobs.exists("t").await.unwrap());
        assert_eq!(blobs.list("", 10).await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn what_a_dead_process_left_half_done_is_removed_once_it_is_old_and_was_never_seen() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(dir.path()).unwrap();
        blobs.put("cache/a/x", Bytes::from_static(b"whole")).await.unwrap();
        let mut upload = blobs.store.put_multipart(&path("cache/a/y").unwrap()).await.unwrap();
        upload.put_part(PutPayload::from_static(b"half")).await.unwrap();
        // As after a kill: its destructor would tidy up.
        std::mem::forget(upload);
        let names = || std::fs::read_dir(dir.path().join("cache/a")).unwrap().count();
        assert_eq!((names(), blobs.list("cache", 10).await.unwrap().len()), (2, 1));
        assert_eq!(blobs.remove_partial("cache", Ts::from_micros(0)).unwrap(), 0);
        let later = Ts::from_micros(i64::MAX / 4);
        assert_eq!((blobs.remove_partial("cache", later).unwrap(), names()), (1, 1));
        assert_eq!(blobs.remove_partial("nothing", later).unwrap(), 0);
        let pieces: Vec<Bytes> = blobs.get_range_stream("cache/a/x", 1..4).await.unwrap().try_collect().await.unwrap();
        assert_eq!(pieces.concat(), b"hol");
    }

    #[tokio::test]
    async fn keys_cannot_leave_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(dir.path()).unwrap();
        for key in ["", "/", "/etc/x", "a//b", "a/../b", "..", ".", "a/", "a b", "ä", "a\0", "a#1", "a\\b"] {
            assert!(matches!(blobs.put(key, Bytes::new()).await, Err(BlobError::BadKey(_))), "{key:?}");
        }
    }
}
