//! What goes by itself: entries that nobody reads, artifacts that are old, uploads that were given up, and the objects of all of
//! them. One instance does it; a pass is bounded, and the next one goes on.

use std::time::Duration;

use super::Stored;

/// Rows of one statement.
const BATCH: u32 = 200;
/// Statements of one kind in one pass.
const ROUNDS: usize = 10;
/// Uploads older than this were given up: their addresses are long void.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// Half an object that was last written this long ago has no writer any more.
const PARTIAL: Duration = Duration::from_secs(2 * 3600);
/// Objects of one pass that are deleted.
const OBJECTS: u32 = 500;
/// An object whose deletion failed is tried again after this long.
const AGAIN: Duration = Duration::from_secs(300);
/// Kind of the consequence that the store writes.
const DELETE: &str = "blob.delete";

impl Stored {
    /// One pass. Returns how much went.
    ///
    /// # Errors
    /// A text for the log; what went is gone.
    pub(crate) async fn sweep(&self) -> Result<u64, String> {
        let now = self.clock.now();
        let told = |error: kici_store::StoreError| error.to_string();
        let mut gone = 0;
        for _ in 0..ROUNDS {
            let some = self.store.cache_expire(now.minus(self.config.cache_ttl), BATCH).await.map_err(told)?;
            metrics::counter!("kici_orch_user_cache_evicted_total", "reason" => "age").increment(some);
            gone += some;
            if some < u64::from(BATCH) {
                break;
            }
        }
        for _ in 0..ROUNDS {
            let some = self.store.artifact_expire(BATCH).await.map_err(told)?;
            gone += some;
            if some < u64::from(BATCH) {
                break;
            }
        }
        gone += self.store.uploads_abandon(now.minus(ABANDONED), BATCH).await.map_err(told)?;
        let (blobs, before) = (self.blobs.clone(), now.minus(PARTIAL));
        let partial = tokio::task::spawn_blocking(move || {
            ["cache", "artifacts"]
                .into_iter()
                .try_fold(0, |sum, prefix| blobs.remove_partial(prefix, before).map(|removed| sum + removed))
        });
        gone += partial.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        self.measure().await.map_err(told)?;
        Ok(gone)
    }

    /// Deletes objects that nobody points to any more. Every instance may: each takes others.
    ///
    /// # Errors
    /// A text for the log; what failed is tried again.
    pub(crate) async fn delete_objects(&self) -> Result<u64, String> {
        let told = |error: kici_store::StoreError| error.to_string();
        let due = self.store.outbox_take(vec![DELETE.to_owned()], OBJECTS, AGAIN).await.map_err(told)?;
        let (mut gone, mut failed) = (0, None);
        for item in due {
            let key = item.payload.get("key").and_then(serde_json::Value::as_str).unwrap_or_default();
            match self.blobs.delete(key).await {
                Ok(()) => {
                    self.store.outbox_done(item.id).await.map_err(told)?;
                    gone += 1;
                }
                Err(error) => failed = Some(error.to_string()),
            }
        }
        failed.map_or(Ok(gone), Err)
    }

    async fn measure(&self) -> Result<(), kici_store::StoreError> {
        let (caches, artifacts) =
            (self.store.cache_totals(Default::default()).await?, self.store.artifact_totals().await?);
        for (kind, totals) in [("cache", caches), ("artifact", artifacts)] {
            metrics::gauge!("kici_orch_stored_objects", "kind" => kind).set(totals.entries as f64);
            metrics::gauge!("kici_orch_stored_bytes", "kind" => kind).set(totals.bytes as f64);
        }
        Ok(())
    }
}
