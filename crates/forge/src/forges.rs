//! One [`Forge`] per source, kept while the source stays as it is.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use kici_engine::event::{ChangedFiles, Event};
use kici_engine::ids::SourceId;
use kici_engine::time::{Clock, Ts};

use crate::cache::WorkflowCache;
use crate::forge::{CloneSource, FailedDelivery, Forge, ForgeError, Head};
use crate::github::Github;
use crate::local::Local;
use crate::source::{Source, SourceConfig, SourceSecrets};
use crate::workflows::{Limits, WorkflowFiles};

/// Most sources whose connection is kept.
const MAX_OPEN: usize = 256;

/// The open forges, with the version of the source that each was made from.
type Open = HashMap<SourceId, (i64, Arc<dyn Forge>)>;

/// Gives out forges. Cheap to share behind an `Arc`.
pub struct Forges {
    http: reqwest::Client,
    clock: Arc<dyn Clock>,
    cache: Arc<WorkflowCache>,
    limits: Limits,
    local_paths: Vec<PathBuf>,
    open: Mutex<Open>,
}

impl std::fmt::Debug for Forges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forges").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Forges {
    /// `http` is the program's client (its TLS provider is installed in `main`); `local_paths` are the folders that
    /// local repositories may lie in (`sources.local_paths`).
    pub fn new(http: reqwest::Client, clock: Arc<dyn Clock>, local_paths: Vec<PathBuf>) -> Self {
        Self { http, clock, cache: Arc::default(), limits: Limits::default(), local_paths, open: Mutex::default() }
    }

    /// Other limits and another cache than the defaults.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits, cache: WorkflowCache) -> Self {
        self.limits = limits;
        self.cache = Arc::new(cache);
        self
    }

    /// The forge of `source`. `secrets` is asked only when the source is new here or has changed.
    ///
    /// # Errors
    /// [`ForgeError::Misconfigured`] when the source cannot work as it is.
    pub fn get(
        &self,
        source: &Source,
        secrets: impl FnOnce() -> Result<SourceSecrets, ForgeError>,
    ) -> Result<Arc<dyn Forge>, ForgeError> {
        let kept = |open: &Open| {
            let (version, forge) = open.get(&source.id)?;
            (*version == source.version).then(|| Arc::clone(forge))
        };
        if let Some(forge) = kept(&self.open.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(forge);
        }
        let forge = self.build(source, secrets)?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() >= MAX_OPEN && !open.contains_key(&source.id) {
            // Rare and harmless: what is in use stays alive through its Arc, the rest is built again.
            open.clear();
        }
        open.insert(source.id, (source.version, Arc::clone(&forge)));
        Ok(forge)
    }

    fn build(
        &self,
        source: &Source,
        secrets: impl FnOnce() -> Result<SourceSecrets, ForgeError>,
    ) -> Result<Arc<dyn Forge>, ForgeError> {
        Ok(match &source.config {
            SourceConfig::Local(config) => {
                config.check_allowed(&self.local_paths).map_err(|e| ForgeError::Misconfigured {
                    source_name: source.name.clone(),
                    problem: e.to_string(),
                })?;
                Arc::new(Local::new(source, config, Arc::clone(&self.cache), self.limits))
            }
            SourceConfig::Github(config) => {
                let key = secrets()?.private_key;
                let shared = (self.http.clone(), Arc::clone(&self.clock), Arc::clone(&self.cache));
                Arc::new(Github::new(source, config, key.as_ref(), shared, self.limits)?)
            }
            SourceConfig::Generic(_) => Arc::new(NoRepository(source.name.clone())),
        })
    }
}

/// The forge of a source that has no repository: its events start workflows of other sources.
struct NoRepository(String);

impl NoRepository {
    fn error(&self) -> ForgeError {
        ForgeError::NoRepository(self.0.clone())
    }
}

#[async_trait]
impl Forge for NoRepository {
    async fn workflows_at(&self, _repo: &str, _sha: &str) -> Result<Arc<WorkflowFiles>, ForgeError> {
        Err(self.error())
    }

    async fn file_at(&self, _repo: &str, _sha: &str, _path: &str, _max: usize) -> Result<Option<Vec<u8>>, ForgeError> {
        Err(self.error())
    }

    async fn changed_files(&self, _event: &Event) -> ChangedFiles {
        ChangedFiles::Unavailable(self.error().to_string())
    }

    async fn clone_source(&self, _repo: &str, _sha: &str, _ref: Option<&str>) -> Result<CloneSource, ForgeError> {
        Err(self.error())
    }

    async fn head(&self, _repo: &str, _branch: Option<&str>) -> Result<Head, ForgeError> {
        Err(self.error())
    }

    async fn commit_of(&self, _repo: &str, _git_ref: &str) -> Result<String, ForgeError> {
        Err(self.error())
    }

    async fn failed_deliveries(&self, _since: Ts) -> Result<Vec<FailedDelivery>, ForgeError> {
        Ok(Vec::new())
    }

    async fn redeliver(&self, _id: &str) -> Result<(), ForgeError> {
        Err(self.error())
    }
}
