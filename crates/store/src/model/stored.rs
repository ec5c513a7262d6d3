//! Caches, artifacts, and the uploads that bring them.

use kici_engine::cache::CacheScope;
use kici_engine::ids::{AgentId, ArtifactId, CacheEntryId, JobId, RunId, SourceId, UploadId};
use kici_engine::time::Ts;

use super::JobRef;

super::words! {
    /// What an upload brings.
    UploadKind("upload kind") {
        /// An entry of a cache.
        Cache = "cache",
        /// An artifact of a run.
        Artifact = "artifact",
    }
}

/// Where a job reads and writes caches. Made from the rows of its run, never from what an agent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSpace {
    /// Organisation.
    pub org: String,
    /// Source of the repository: two forges may have repositories of one name.
    pub source_id: SourceId,
    /// Repository.
    pub repo: String,
    /// Where the run writes.
    pub scope: CacheScope,
    /// The run.
    pub run_id: RunId,
}

/// An upload to be begun.
#[derive(Clone, Debug)]
pub struct NewUpload {
    /// Fresh.
    pub id: UploadId,
    /// What it brings.
    pub kind: UploadKind,
    /// The job that brings it.
    pub job: JobRef,
    /// The agent that must hold the job.
    pub agent_id: AgentId,
    /// Where it goes.
    pub space: CacheSpace,
    /// Key of the cache, name of the artifact.
    pub name: String,
    /// Until when an artifact is kept; none is for ever.
    pub keep_until: Option<Ts>,
    /// What its objects are called, without the number of the attempt.
    pub blob_prefix: String,
    /// Limits.
    pub limits: UploadLimits,
}

/// How much there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadLimits {
    /// Bytes of one object.
    pub max_bytes: u64,
    /// Bytes of all caches, or of all artifacts, of an organisation. Caches are evicted, artifacts refused.
    pub quota_bytes: u64,
    /// Artifacts of one run.
    pub per_run: u32,
    /// Uploads of one job under way.
    pub open: u32,
}

/// What became of a wish to upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UploadBegun {
    /// It may come.
    Open,
    /// There is one already: of a cache this key, of an artifact this name by another job.
    Exists,
    /// The job is not the agent's any more, or is over.
    NotHeld,
    /// Too many artifacts in the run, bytes in the organisation, or uploads of the job under way.
    Full,
}

/// An upload under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Its id.
    pub id: UploadId,
    /// What it brings.
    pub kind: UploadKind,
    /// Most bytes.
    pub max_bytes: u64,
    /// Attempts begun; each has an object of its own.
    pub attempts: u32,
    /// What the object of this attempt is called.
    pub blob_key: String,
}

/// The agent says that an upload is complete.
#[derive(Clone, Debug)]
pub struct CommitUpload {
    /// Which.
    pub id: UploadId,
    /// What it brings.
    pub kind: UploadKind,
    /// The job that brings it.
    pub job: JobRef,
    /// The agent that must hold the job.
    pub agent_id: AgentId,
    /// Where it goes, for a commit that is said again.
    pub space: CacheSpace,
    /// Key of the cache, name of the artifact.
    pub name: String,
    /// SHA-256 (hex) of what was sent, as the agent says.
    pub sha256: String,
    /// Limits.
    pub limits: UploadLimits,
}

/// What became of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    /// It is there now, or was already by an earlier call.
    Stored {
        /// Bytes.
        size: u64,
    },
    /// Another one was there first, and stays.
    Exists,
    /// The job is not the agent's any more, or is over.
    NotHeld,
    /// Nothing was received under this id, or too long ago.
    NotReceived,
    /// What was received is not what the agent sent.
    Mismatch,
    /// There is no room in the run or the organisation.
    Full,
}

/// What is found under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFound {
    /// The entry.
    pub id: CacheEntryId,
    /// Its key.
    pub key: String,
    /// What its object is called.
    pub blob_key: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 (hex).
    pub sha256: String,
    /// When it was last read.
    pub last_read_at: Ts,
}

/// An entry of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheEntry {
    /// Its id.
    pub id: CacheEntryId,
    /// Organisation.
    pub org: String,
    /// Source of the repository.
    pub source_id: SourceId,
    /// Repository.
    pub repo: String,
    /// Whose it is.
    pub scope: CacheScope,
    /// The run that wrote an isolated one.
    pub run_id: Option<RunId>,
    /// Its key.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// When it was saved.
    pub created_at: Ts,
    /// When it was last read.
    pub last_read_at: Ts,
}

/// Which entries of caches are meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheFilter {
    /// Only of this source.
    pub source_id: Option<SourceId>,
    /// Only of this repository.
    pub repo: Option<String>,
    /// Only with this key.
    pub key: Option<String>,
    /// Only keys that begin so.
    pub key_prefix: Option<String>,
    /// Only in this scope.
    pub scope: Option<CacheScope>,
}

/// How much there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredTotals {
    /// Entries.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The oldest last reading; of artifacts the oldest one.
    pub oldest: Option<Ts>,
}

/// An artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Its id.
    pub id: ArtifactId,
    /// Its run.
    pub run_id: RunId,
    /// The job that made it.
    pub job_id: JobId,
    /// That job's key in the workflow.
    pub job_name: String,
    /// Its name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 (hex).
    pub sha256: String,
    /// What its object is called.
    pub blob_key: String,
    /// When it was stored.
    pub created_at: Ts,
    /// Until when it is kept; none is for ever.
    pub expires_at: Option<Ts>,
}
