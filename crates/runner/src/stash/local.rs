//! Artifacts of a run without an orchestrator: they lie in a directory as long as the run goes on.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use futures::StreamExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio_util::io::ReaderStream;

use super::depot::{Archive, Depot, DepotError, Pieces, Place, Target};

const NO_CACHES: DepotError = DepotError::Nowhere("this run is local, caches are kept by an orchestrator");

/// Artifacts of the run by name: who made them, what they are.
#[derive(Debug, Default)]
pub struct Shelf {
    dir: PathBuf,
    kept: Mutex<BTreeMap<String, (String, Archive)>>,
}

impl Shelf {
    /// In a private directory, which is made when something is kept.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, kept: Mutex::default() }
    }
}

/// The shelf as one job uses it.
#[derive(Debug)]
pub struct OfJob {
    /// What the run keeps.
    pub shelf: std::sync::Arc<Shelf>,
    /// The job's key in its workflow.
    pub job: String,
}

fn unavailable(error: std::io::Error) -> DepotError {
    DepotError::Unavailable(error.to_string())
}

#[async_trait]
impl Depot for OfJob {
    async fn find_cache(&self, _: &str, _: &[String]) -> Result<Option<(String, Archive)>, DepotError> {
        Err(NO_CACHES)
    }

    async fn begin_cache(&self, _: &str) -> Result<Option<Target>, DepotError> {
        Err(NO_CACHES)
    }

    async fn commit_cache(&self, _: &Target, _: &str, _: &str) -> Result<bool, DepotError> {
        Err(NO_CACHES)
    }

    async fn begin_artifact(&self, name: &str, _: Option<u64>) -> Result<Target, DepotError> {
        if self.shelf.kept.lock().unwrap_or_else(PoisonError::into_inner).contains_key(name) {
            return Err(DepotError::Refused("the run has an artifact of this name".to_owned()));
        }
        let path = self.shelf.dir.join(format!("{name}.tar.zst"));
        Ok(Target { id: name.to_owned(), place: Place(path.display().to_string()), max_bytes: u64::MAX })
    }

    async fn commit_artifact(&self, target: &Target, name: &str, sha256: &str) -> Result<(), DepotError> {
        let size = tokio::fs::metadata(&target.place.0).await.map_err(unavailable)?.len();
        let archive = Archive { place: target.place.clone(), size, sha256: sha256.to_owned() };
        let mut kept = self.shelf.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(name.to_owned(), (self.job.clone(), archive));
        Ok(())
    }

    async fn find_artifact(&self, name: &str, from: Option<&str>) -> Result<Option<Archive>, DepotError> {
        let kept = self.shelf.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.get(name).filter(|(job, _)| from.is_none_or(|from| from == job));
        Ok(found.map(|(_, archive)| archive.clone()))
    }

    async fn fetch(&self, archive: &Archive) -> Result<Pieces, DepotError> {
        let file = tokio::fs::File::open(&archive.place.0).await.map_err(unavailable)?;
        Ok(ReaderStream::new(file).boxed())
    }

    async fn send(&self, target: &Target, mut pieces: Pieces) -> Result<(), DepotError> {
        tokio::fs::create_dir_all(&self.shelf.dir).await.map_err(unavailable)?;
        let mut file = tokio::fs::File::create(&target.place.0).await.map_err(unavailable)?;
        while let Some(piece) = pieces.next().await {
            file.write_all(&piece.map_err(unavailable)?).await.map_err(unavailable)?;
        }
        file.flush().await.map_err(unavailable)
    }
}
