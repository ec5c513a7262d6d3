//! Artifacts of runs, and caches.

use kici_engine::cache::CacheScope;
use kici_engine::ids::{ArtifactId, CacheEntryId, JobId, RunId, SourceId};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// An artifact of a run: an archive (tar, zstd).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ArtifactView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: ArtifactId,
    /// Its name, unique in the run.
    pub name: String,
    /// The job that made it.
    #[schema(value_type = String)]
    pub job_id: JobId,
    /// That job's key in the workflow.
    pub job: String,
    /// Bytes of the archive.
    pub size: u64,
    /// SHA-256 (hex) of the archive.
    pub sha256: String,
    /// When it was stored.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// Until when it is kept; null is for ever.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Ts>,
}

/// An entry of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: CacheEntryId,
    /// Its key.
    pub key: String,
    /// Source of the repository.
    #[schema(value_type = String)]
    pub source_id: SourceId,
    /// Repository.
    pub repo: String,
    /// `shared` by all trusted runs of the repository, or `isolated` to one run whose code is not trusted.
    #[schema(value_type = String)]
    pub scope: CacheScope,
    /// The run of an isolated one.
    #[schema(value_type = Option<String>)]
    pub run_id: Option<RunId>,
    /// Bytes of the archive.
    pub size: u64,
    /// When it was saved.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When it was last read.
    #[schema(value_type = String, format = DateTime)]
    pub last_read_at: Ts,
}

/// How much is kept of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredKind {
    /// `user`: caches of workflows; `artifact`.
    pub kind: String,
    /// Entries.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Most bytes of one organisation.
    pub quota_bytes: u64,
    /// The oldest last reading; of artifacts the oldest one.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub oldest_at: Option<Ts>,
    /// Restores that found something, since the start of the orchestrator.
    pub hits: u64,
    /// Restores that found nothing.
    pub misses: u64,
}

/// How much is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredTotals {
    /// By kind.
    pub kinds: Vec<StoredKind>,
    /// Instances whose hits and misses are not counted in.
    pub missing: Vec<String>,
}

/// Which entries of caches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct CacheFilter {
    /// Only of this repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Only with this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Only keys that begin so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_prefix: Option<String>,
    /// Only in this scope: `shared` or `isolated`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

/// Which entries of caches are to be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct DeleteCaches {
    /// Only of this repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Only with this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Only keys that begin so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_prefix: Option<String>,
    /// Only in this scope: `shared` or `isolated`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// Remove them; without it they are only counted.
    pub apply: bool,
    /// With no filter at all: that really all are meant.
    pub all: bool,
}

impl DeleteCaches {
    /// What it is about.
    pub fn filter(&self) -> CacheFilter {
        CacheFilter {
            repo: self.repo.clone(),
            key: self.key.clone(),
            key_prefix: self.key_prefix.clone(),
            scope: self.scope.clone(),
        }
    }
}

/// What was removed, or would be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CachesDeleted {
    /// False: nothing was removed, this is what would be.
    pub applied: bool,
    /// Entries.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
}
