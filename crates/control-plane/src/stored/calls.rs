//! What agents ask about caches and artifacts. Organisation, repository, scope and run come from the rows of the job; whatever a
//! request says of them has no effect, as it cannot say it.

use std::time::Duration;

use kici_api::problem::Problem;
use kici_dispatch::{Ownership, Speaker};
use kici_engine::cache::{CacheScope, MAX_RESTORE_KEYS, check_artifact_name, check_key};
use kici_engine::ids::UploadId;
use kici_engine::time::Ts;
use kici_protocol::NOT_ASSIGNED;
use kici_protocol::agent::{
    ArtifactBeginRequest, ArtifactBeginResponse, ArtifactCommitRequest, ArtifactCommitResponse,
    ArtifactDownloadRequest, ArtifactDownloadResponse, CacheBeginSaveRequest, CacheBeginSaveResponse,
    CacheCommitSaveRequest, CacheCommitSaveResponse, CacheHit, CacheRestoreRequest, CacheRestoreResponse,
    StoredArchive, UploadTarget,
};
use kici_store::StoreError;
use kici_store::model::{
    Artifact, CacheSpace, CommitUpload, Committed, NewUpload, UploadBegun, UploadKind, UploadLimits,
};
use tonic::Status;

use super::urls::{GET_LIFE, PUT_LIFE, Verb};
use super::{Stored, names};

/// A reading is noted at most this often: the time that counts is in days.
const READ_NOTED: Duration = Duration::from_secs(60);
/// Longest that an artifact can be kept.
const MAX_EXPIRE: Duration = Duration::from_secs(400 * 86_400);

const NOT_NOW: &str = "caches and artifacts cannot be reached now; try again";

fn later(error: StoreError) -> Status {
    tracing::warn!(%error, "a call about caches or artifacts cannot be answered");
    Status::unavailable(NOT_NOW)
}

fn blob_later(error: kici_blobs::BlobError) -> Status {
    tracing::warn!(%error, "an object cannot be looked at");
    Status::unavailable(NOT_NOW)
}

fn not_held() -> Status {
    Status::permission_denied(NOT_ASSIGNED)
}

fn invalid(field: &str, problem: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{field}: {problem}"))
}

impl Stored {
    /// Where the job reads and writes, if the agent holds it. The row decides, not the session: another instance may have given
    /// the job away meanwhile.
    async fn space(&self, speaker: &Speaker) -> Result<CacheSpace, Status> {
        if speaker.standing != Ownership::Owned {
            return Err(not_held());
        }
        let job = self.store.job_get(speaker.job.job_id).await.map_err(later)?.ok_or_else(not_held)?;
        let same = job.run_id == speaker.job.run_id
            && job.dispatch_epoch == speaker.job.epoch
            && job.agent_id.as_ref() == Some(&speaker.agent)
            && job.finished_at.is_none();
        if !same {
            return Err(not_held());
        }
        let run = self.store.run_get(job.run_id).await.map_err(later)?.ok_or_else(not_held)?;
        Ok(CacheSpace {
            scope: CacheScope::written_by(run.event.is_fork_pr),
            org: run.org,
            source_id: run.source_id,
            repo: run.repo,
            run_id: run.id,
        })
    }

    fn archive(&self, blob_key: &str, size: u64, sha256: String) -> StoredArchive {
        let expires = self.clock.now().plus(GET_LIFE);
        let url = self.signer.url(Verb::Get, blob_key, expires);
        StoredArchive { url, expires_at_us: expires.as_micros(), size, sha256 }
    }

    /// What is found under a key, or one of the prefixes.
    pub(crate) async fn cache_restore(
        &self,
        speaker: &Speaker,
        request: CacheRestoreRequest,
    ) -> Result<CacheRestoreResponse, Status> {
        check_key(&request.key).map_err(|error| invalid("key", error))?;
        if request.restore_keys.len() > MAX_RESTORE_KEYS {
            return Err(invalid("restore_keys", format!("at most {MAX_RESTORE_KEYS} are allowed")));
        }
        for prefix in &request.restore_keys {
            check_key(prefix).map_err(|error| invalid("restore_keys", error))?;
        }
        let space = self.space(speaker).await?;
        let found = self.store.cache_find(space, request.key, request.restore_keys).await.map_err(later)?;
        let Some(entry) = found else {
            self.counts.restore(false);
            return Ok(CacheRestoreResponse { hit: None });
        };
        if self.blobs.size(&entry.blob_key).await.map_err(blob_later)? != Some(entry.size) {
            // A row without its object is a miss, and would be one for ever.
            tracing::warn!(key = entry.blob_key, "the object of a cache entry is gone; the entry is removed");
            self.store.cache_forget(entry.id).await.map_err(later)?;
            self.counts.restore(false);
            return Ok(CacheRestoreResponse { hit: None });
        }
        if self.clock.now().since(entry.last_read_at) >= READ_NOTED {
            self.store.cache_read(entry.id).await.map_err(later)?;
        }
        self.counts.restore(true);
        let archive = self.archive(&entry.blob_key, entry.size, entry.sha256);
        Ok(CacheRestoreResponse { hit: Some(CacheHit { matched_key: entry.key, archive: Some(archive) }) })
    }

    /// Where an archive of a cache is to be sent.
    pub(crate) async fn cache_begin(
        &self,
        speaker: &Speaker,
        request: CacheBeginSaveRequest,
    ) -> Result<CacheBeginSaveResponse, Status> {
        check_key(&request.key).map_err(|error| invalid("key", error))?;
        let space = self.space(speaker).await?;
        let id = UploadId::mint(&*self.ids);
        let blob_prefix = names::of_cache(&space, &request.key, id);
        let limits = self.cache_limits();
        let new = self.new_upload(id, UploadKind::Cache, speaker, space, request.key, None, blob_prefix, limits);
        match self.store.upload_begin(new).await.map_err(later)? {
            UploadBegun::Open => Ok(CacheBeginSaveResponse { upload: Some(self.target(id, limits)) }),
            UploadBegun::Exists => {
                saved("exists");
                Ok(CacheBeginSaveResponse { upload: None })
            }
            UploadBegun::NotHeld => Err(not_held()),
            UploadBegun::Full => Err(Status::resource_exhausted("too many uploads of this job are under way")),
        }
    }

    /// An archive of a cache was sent.
    pub(crate) async fn cache_commit(
        &self,
        speaker: &Speaker,
        request: CacheCommitSaveRequest,
    ) -> Result<CacheCommitSaveResponse, Status> {
        check_key(&request.key).map_err(|error| invalid("key", error))?;
        let limits = self.cache_limits();
        let (id, sha) = (request.upload_id.as_str(), request.sha256);
        match self.commit(speaker, UploadKind::Cache, id, request.key, sha, limits).await? {
            Committed::Stored { size } => {
                saved("stored");
                Ok(CacheCommitSaveResponse { already_exists: false, size })
            }
            Committed::Exists => {
                saved("exists");
                Ok(CacheCommitSaveResponse { already_exists: true, size: 0 })
            }
            other => Err(refused(other)),
        }
    }

    /// Where an artifact is to be sent.
    pub(crate) async fn artifact_begin(
        &self,
        speaker: &Speaker,
        request: ArtifactBeginRequest,
    ) -> Result<ArtifactBeginResponse, Status> {
        check_artifact_name(&request.name).map_err(|error| invalid("name", error))?;
        let space = self.space(speaker).await?;
        let life = match request.expire_in_ms {
            0 => self.config.artifact_ttl,
            ms => Some(Duration::from_millis(ms).min(MAX_EXPIRE)),
        };
        let keep_until = life.map(|life| self.clock.now().plus(life));
        let id = UploadId::mint(&*self.ids);
        let blob_prefix = names::of_artifact(space.run_id, &request.name, id);
        let limits = self.artifact_limits();
        let new =
            self.new_upload(id, UploadKind::Artifact, speaker, space, request.name, keep_until, blob_prefix, limits);
        match self.store.upload_begin(new).await.map_err(later)? {
            UploadBegun::Open => Ok(ArtifactBeginResponse { upload: Some(self.target(id, limits)) }),
            UploadBegun::Exists => Err(Status::already_exists("the run has an artifact of this name")),
            UploadBegun::NotHeld => Err(not_held()),
            UploadBegun::Full => Err(Status::resource_exhausted("there is no room for more artifacts")),
        }
    }

    /// An artifact was sent.
    pub(crate) async fn artifact_commit(
        &self,
        speaker: &Speaker,
        request: ArtifactCommitRequest,
    ) -> Result<ArtifactCommitResponse, Status> {
        check_artifact_name(&request.name).map_err(|error| invalid("name", error))?;
        let limits = self.artifact_limits();
        let (id, sha) = (request.upload_id.as_str(), request.sha256);
        match self.commit(speaker, UploadKind::Artifact, id, request.name, sha, limits).await? {
            Committed::Stored { size } => Ok(ArtifactCommitResponse { size }),
            Committed::Exists => Err(Status::already_exists("the run has an artifact of this name")),
            other => Err(refused(other)),
        }
    }

    /// Where an artifact of the job's run is.
    pub(crate) async fn artifact_download(
        &self,
        speaker: &Speaker,
        request: ArtifactDownloadRequest,
    ) -> Result<ArtifactDownloadResponse, Status> {
        check_artifact_name(&request.name).map_err(|error| invalid("name", error))?;
        let space = self.space(speaker).await?;
        let from = Some(request.from).filter(|from| !from.is_empty());
        let found = self.store.artifact_find(space.run_id, request.name).await.map_err(later)?;
        let found = found.filter(|artifact| made_by(artifact, from.as_deref()));
        let artifact = found.ok_or_else(|| Status::not_found("the run has no such artifact"))?;
        if self.blobs.size(&artifact.blob_key).await.map_err(blob_later)? != Some(artifact.size) {
            tracing::error!(key = artifact.blob_key, "the object of an artifact is gone");
            return Err(Status::not_found("the run has no such artifact"));
        }
        Ok(ArtifactDownloadResponse { archive: Some(self.archive(&artifact.blob_key, artifact.size, artifact.sha256)) })
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one row")]
    fn new_upload(
        &self,
        id: UploadId,
        kind: UploadKind,
        speaker: &Speaker,
        space: CacheSpace,
        name: String,
        keep_until: Option<Ts>,
        blob_prefix: String,
        limits: UploadLimits,
    ) -> NewUpload {
        let (job, agent_id) = (speaker.job, speaker.agent.clone());
        NewUpload { id, kind, job, agent_id, space, name, keep_until, blob_prefix, limits }
    }

    fn target(&self, id: UploadId, limits: UploadLimits) -> UploadTarget {
        let (expires, id) = (self.clock.now().plus(PUT_LIFE), id.uuid().to_string());
        let url = self.signer.url(Verb::Put, &id, expires);
        UploadTarget { upload_id: id, url, expires_at_us: expires.as_micros(), max_bytes: limits.max_bytes }
    }

    async fn commit(
        &self,
        speaker: &Speaker,
        kind: UploadKind,
        id: &str,
        name: String,
        sha256: String,
        limits: UploadLimits,
    ) -> Result<Committed, Status> {
        let id: UploadId = id.parse().map_err(|error| invalid("upload_id", error))?;
        if sha256.len() != 64 || !sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(invalid("sha256", "expected 64 lower-case hex digits"));
        }
        let space = self.space(speaker).await?;
        let (job, agent_id) = (speaker.job, speaker.agent.clone());
        let commit = CommitUpload { id, kind, job, agent_id, space, name, sha256, limits };
        self.store.upload_commit(commit).await.map_err(later)
    }

    /// The artifacts of a run, for people.
    ///
    /// # Errors
    /// A problem.
    pub(crate) async fn of_run(&self, run: kici_engine::ids::RunId) -> Result<Vec<Artifact>, Problem> {
        self.store.artifact_list(run).await.map_err(|error| {
            tracing::warn!(%error, "artifacts cannot be listed");
            Problem::unavailable(NOT_NOW, 5)
        })
    }
}

fn made_by(artifact: &Artifact, from: Option<&str>) -> bool {
    from.is_none_or(|from| artifact.job_name == from)
}

fn saved(result: &'static str) {
    metrics::counter!("kici_orch_user_cache_ops_total", "op" => "save", "result" => result).increment(1);
}

/// In fixed words.
fn refused(verdict: Committed) -> Status {
    match verdict {
        Committed::NotHeld => not_held(),
        Committed::Mismatch => Status::data_loss("what arrived is not what was sent; send it again"),
        Committed::Full => Status::resource_exhausted("there is no room for more artifacts"),
        Committed::NotReceived | Committed::Stored { .. } | Committed::Exists => {
            Status::failed_precondition("nothing was received under this upload; send it first")
        }
    }
}
