//! Artifacts and caches of the fake: there are the artifacts that it was told, and no caches.

use async_trait::async_trait;
use futures::StreamExt as _;
use kici_engine::ids::RunId;

use super::Fake;
use crate::dto::stored::{ArtifactView, CacheFilter, CacheView, CachesDeleted, StoredTotals};
use crate::page::{PageRequest, Slice};
use crate::ports::{Answer, ArtifactBytes, Caller, Stored};
use crate::problem::Problem;

#[async_trait]
impl Stored for Fake {
    async fn artifacts(&self, _: &Caller, run: RunId) -> Answer<Vec<ArtifactView>> {
        let world = self.reach()?;
        if !world.runs.iter().any(|known| known.id == run) {
            return Err(Problem::not_found(format_args!("run {run}")));
        }
        Ok(world.artifacts.iter().map(|(view, _)| view.clone()).collect())
    }

    async fn artifact(&self, caller: &Caller, run: RunId, name: &str) -> Answer<ArtifactBytes> {
        self.artifacts(caller, run).await?;
        let world = self.reach()?;
        let found = world.artifacts.iter().find(|(view, _)| view.name == name).cloned();
        let (view, bytes) = found.ok_or_else(|| Problem::not_found(format_args!("artifact {name}")))?;
        Ok(ArtifactBytes { view, bytes: futures::stream::iter([Ok(bytes.into())]).boxed() })
    }

    async fn totals(&self, _: &Caller) -> Answer<StoredTotals> {
        drop(self.reach()?);
        Ok(StoredTotals { kinds: Vec::new(), missing: Vec::new() })
    }

    async fn entries(&self, _: &Caller, _: &CacheFilter, _: PageRequest) -> Answer<Slice<CacheView>> {
        drop(self.reach()?);
        Ok(Slice { items: Vec::new(), next: None })
    }

    async fn delete(&self, _: &Caller, _: &CacheFilter, apply: bool) -> Answer<CachesDeleted> {
        drop(self.reach()?);
        Ok(CachesDeleted { applied: apply, entries: 0, bytes: 0 })
    }
}
