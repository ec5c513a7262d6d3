//! Artifacts and caches, for people.

use std::sync::Arc;

use async_trait::async_trait;
use futures::{StreamExt as _, TryStreamExt as _};
use kici_api::dto::stored::{ArtifactView, CacheFilter, CacheView, CachesDeleted, StoredKind, StoredTotals};
use kici_api::page::{PageRequest, Slice};
use kici_api::ports::{Answer, ArtifactBytes, Caller};
use kici_api::problem::{Code, Problem};
use kici_blobs::BlobError;
use kici_engine::ids::{InstanceId, RunId};
use kici_store::model;

use super::{fault, views};
use crate::stored::Stored;

/// Entries that one transaction removes.
const BATCH: u32 = 500;

/// Artifacts and caches over the store.
pub(crate) struct StoredBook {
    pub(crate) stored: Arc<Stored>,
    pub(crate) instance: InstanceId,
}

impl StoredBook {
    async fn visible(&self, caller: &Caller, id: RunId) -> Answer<()> {
        match self.stored.store.run_get(id).await.map_err(fault::store)? {
            Some(run) if caller.sees(&run.event.routing_key) => Ok(()),
            _ => Err(Problem::not_found(format!("run {id}"))),
        }
    }
}

fn view(artifact: &model::Artifact) -> ArtifactView {
    ArtifactView {
        id: artifact.id,
        name: artifact.name.clone(),
        job_id: artifact.job_id,
        job: artifact.job_name.clone(),
        size: artifact.size,
        sha256: artifact.sha256.clone(),
        created_at: artifact.created_at,
        expires_at: artifact.expires_at,
    }
}

fn wanted(filter: &CacheFilter) -> Answer<model::CacheFilter> {
    let scope = filter.scope.as_deref().map(str::parse).transpose();
    Ok(model::CacheFilter {
        source_id: None,
        repo: filter.repo.clone(),
        key: filter.key.clone(),
        key_prefix: filter.key_prefix.clone(),
        scope: scope.map_err(|_| Problem::rejected("scope", "expected `shared` or `isolated`"))?,
    })
}

#[async_trait]
impl kici_api::ports::Stored for StoredBook {
    async fn artifacts(&self, caller: &Caller, run: RunId) -> Answer<Vec<ArtifactView>> {
        self.visible(caller, run).await?;
        Ok(self.stored.of_run(run).await?.iter().map(view).collect())
    }

    async fn artifact(&self, caller: &Caller, run: RunId, name: &str) -> Answer<ArtifactBytes> {
        self.visible(caller, run).await?;
        let found = self.stored.store.artifact_find(run, name.to_owned()).await.map_err(fault::store)?;
        let artifact = found.ok_or_else(|| Problem::not_found(format!("artifact {name} of run {run}")))?;
        let bytes = self.stored.blobs.get_stream(&artifact.blob_key).await.map_err(|error| match error {
            BlobError::NotFound(key) => {
                tracing::error!(key, "the object of an artifact is gone");
                Problem::new(Code::Gone, format!("artifact {name} of run {run} is no longer kept"))
            }
            error => {
                tracing::warn!(%error, "an artifact cannot be read");
                Problem::unavailable("the artifact cannot be read now; try again", 5)
            }
        })?;
        let bytes = bytes.map_err(std::io::Error::other).boxed();
        Ok(ArtifactBytes { view: view(&artifact), bytes })
    }

    async fn totals(&self, _caller: &Caller) -> Answer<StoredTotals> {
        let store = &self.stored.store;
        let caches = store.cache_totals(model::CacheFilter::default()).await.map_err(fault::store)?;
        let artifacts = store.artifact_totals().await.map_err(fault::store)?;
        let (hits, misses) = self.stored.counts.both();
        let kind = |kind: &str, totals: model::StoredTotals, quota_bytes, hits, misses| StoredKind {
            kind: kind.to_owned(),
            objects: totals.entries,
            bytes: totals.bytes,
            quota_bytes,
            oldest_at: totals.oldest,
            hits,
            misses,
        };
        let config = self.stored.config;
        let others = store.instance_list().await.map_err(fault::store)?.into_iter().map(|one| one.instance_id);
        Ok(StoredTotals {
            kinds: vec![
                kind("user", caches, config.cache_quota, hits, misses),
                kind("artifact", artifacts, config.artifact_quota, 0, 0),
            ],
            missing: others.filter(|id| *id != self.instance).map(|id| id.to_string()).collect(),
        })
    }

    async fn entries(&self, _: &Caller, filter: &CacheFilter, page: PageRequest) -> Answer<Slice<CacheView>> {
        let listed = self.stored.store.cache_list(wanted(filter)?, views::page(page)).await.map_err(fault::store)?;
        Ok(views::slice(listed, |entry| CacheView {
            id: entry.id,
            key: entry.key,
            source_id: entry.source_id,
            repo: entry.repo,
            scope: entry.scope,
            run_id: entry.run_id,
            size: entry.size,
            created_at: entry.created_at,
            last_read_at: entry.last_read_at,
        }))
    }

    async fn delete(&self, _: &Caller, filter: &CacheFilter, apply: bool) -> Answer<CachesDeleted> {
        let filter = wanted(filter)?;
        let store = &self.stored.store;
        if !apply {
            let totals = store.cache_totals(filter).await.map_err(fault::store)?;
            return Ok(CachesDeleted { applied: false, entries: totals.entries, bytes: totals.bytes });
        }
        let mut deleted = CachesDeleted { applied: true, entries: 0, bytes: 0 };
        loop {
            let gone = store.cache_delete(filter.clone(), BATCH).await.map_err(fault::store)?;
            deleted.entries += gone.len() as u64;
            deleted.bytes += gone.iter().map(|entry| entry.size).sum::<u64>();
            if gone.len() < BATCH as usize {
                return Ok(deleted);
            }
        }
    }
}
