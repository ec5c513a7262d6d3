//! Artifacts and caches.

use futures::StreamExt as _;
use futures::stream::BoxStream;
use kici_engine::ids::RunId;
use reqwest::Method;

use super::resources::{ADMIN, Answer};
use super::{Client, ClientError, NOTHING};
use crate::dto::stored::{ArtifactView, CacheFilter, CacheView, CachesDeleted, DeleteCaches, StoredTotals};
use crate::page::{Page, PageQuery};

/// An archive on its way.
pub struct Download {
    /// SHA-256 (hex) of the whole, as the server says.
    pub sha256: String,
    /// Bytes of the whole.
    pub size: u64,
    /// The bytes.
    pub bytes: BoxStream<'static, Result<bytes::Bytes, std::io::Error>>,
}

/// Every method fails with [`ClientError`].
impl Client {
    /// The artifacts of a run.
    pub async fn artifacts(&self, run: RunId) -> Answer<Page<ArtifactView>> {
        self.get(&["api", "v1", "runs", &run.to_string(), "artifacts"], &NOTHING).await
    }

    /// An artifact of a run. The answer has no time limit.
    pub async fn artifact(&self, run: RunId, name: &str) -> Answer<Download> {
        let request = self.request(Method::GET, &["api", "v1", "runs", &run.to_string(), "artifacts", name]);
        let response = self.send(request).await?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let size = header("content-length").and_then(|text| text.parse().ok());
        let (Some(sha256), Some(size)) = (header("x-kici-sha256").map(str::to_owned), size) else {
            return Err(ClientError::Undecodable { cause: "the archive comes without its digest or size".to_owned() });
        };
        let bytes = response.bytes_stream().map(|piece| piece.map_err(std::io::Error::other)).boxed();
        Ok(Download { sha256, size, bytes })
    }

    /// How much is kept of caches and artifacts.
    pub async fn stored_totals(&self) -> Answer<StoredTotals> {
        self.get(path!(ADMIN, "caches"), &NOTHING).await
    }

    /// Entries of caches, newest first.
    pub async fn caches(&self, filter: &CacheFilter, page: &PageQuery) -> Answer<Page<CacheView>> {
        self.list(path!(ADMIN, "caches", "entries"), filter, page).await
    }

    /// Removes entries of caches, or only counts them.
    pub async fn delete_caches(&self, wanted: &DeleteCaches) -> Answer<CachesDeleted> {
        let request = self.request(Method::DELETE, path!(ADMIN, "caches")).query(wanted).timeout(self.timeout);
        self.decode(self.send(request).await?).await
    }
}
