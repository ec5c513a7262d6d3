//! Retention: what is kept for how long. One instance does it; every pass is bounded, and objects go before the rows that name
//! them, so that nothing is left that nobody can find.

use std::sync::Arc;
use std::time::Duration;

use kici_blobs::{BlobError, Blobs};
use kici_engine::ids::RunId;
use kici_engine::time::{Clock, Ts};
use kici_store::{Store, StoreError};

use crate::config::RetentionConfig;

/// Rows of one statement.
const BATCH: u32 = 200;
/// Statements of one kind in one pass; the next pass goes on.
const ROUNDS: usize = 10;
/// Objects listed at once.
const OBJECTS: usize = 1000;

/// A pass that did not come to its end; the next one goes on where it stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetentionError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The object store.
    #[error(transparent)]
    Blob(#[from] BlobError),
}

/// Removes what is old.
pub(crate) struct Retention {
    pub(crate) store: Store,
    pub(crate) blobs: Blobs,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: RetentionConfig,
    /// Events of the bus that are done with are kept for this long; none keeps them.
    pub(crate) events_ttl: Option<Duration>,
}

/// Rows that no object belongs to.
#[derive(Clone, Copy, Debug)]
enum Rows {
    Queue,
    Traces,
    Deliveries,
    Events,
    Audit,
}

/// The instant before which things are too old; none keeps them for ever.
fn before(now: Ts, days: u32) -> Option<Ts> {
    (days > 0).then(|| now.minus(Duration::from_secs(u64::from(days) * 86_400)))
}

impl Retention {
    /// One pass. Returns how much went.
    pub(crate) async fn run(&self) -> Result<u64, RetentionError> {
        let now = self.clock.now();
        let keep = self.config;
        let mut gone = 0;
        if let Some(old) = before(now, keep.logs_days) {
            gone += self.logs(old).await?;
        }
        if let Some(old) = before(now, keep.queue_days) {
            let rows = self.prune(Rows::Queue, old).await?;
            metrics::counter!("kici_orch_dispatch_rows_pruned_total").increment(rows);
            gone += rows;
        }
        if let Some(old) = before(now, keep.payload_days) {
            gone += self.payloads(old).await?;
            gone += deleted("decision_traces", self.prune(Rows::Traces, old).await?);
        }
        if let Some(old) = before(now, keep.delivery_days) {
            // A body that outlives its row's time goes with the row.
            gone += self.payloads(old).await?;
            gone += deleted("deliveries", self.prune(Rows::Deliveries, old).await?);
        }
        if let Some(ttl) = self.events_ttl {
            gone += deleted("events", self.prune(Rows::Events, now.minus(ttl)).await?);
        }
        if let Some(old) = before(now, keep.audit_days) {
            gone += deleted("secret_audit_log", self.prune(Rows::Audit, old).await?);
        }
        if let Some(old) = before(now, keep.runs_days) {
            gone += self.runs(old).await?;
        }
        Ok(gone)
    }

    async fn prune(&self, rows: Rows, old: Ts) -> Result<u64, StoreError> {
        let mut gone = 0;
        for _ in 0..ROUNDS {
            let some = match rows {
                Rows::Queue => self.store.queue_prune(old, BATCH).await?,
                Rows::Traces => self.store.traces_prune(old, BATCH).await?,
                Rows::Deliveries => self.store.deliveries_prune(old, BATCH).await?,
                Rows::Events => self.store.events_prune(old, BATCH).await?,
                Rows::Audit => self.store.secret_audit_prune(old, BATCH).await?,
            };
            gone += some;
            if some < u64::from(BATCH) {
                break;
            }
        }
        Ok(gone)
    }

    async fn logs(&self, old: Ts) -> Result<u64, RetentionError> {
        let mut gone = 0;
        for _ in 0..ROUNDS {
            let runs = self.store.runs_with_old_logs(old, BATCH).await?;
            for run in runs.iter().copied() {
                self.delete_logs(run).await?;
            }
            gone += runs.len() as u64;
            let last = runs.len() < BATCH as usize;
            if !runs.is_empty() {
                self.store.run_logs_gone(runs).await?;
            }
            if last {
                break;
            }
        }
        Ok(gone)
    }

    async fn delete_logs(&self, run: RunId) -> Result<(), RetentionError> {
        let prefix = format!("logs/{}", run.uuid());
        loop {
            let objects = self.blobs.list(&prefix, OBJECTS).await?;
            if objects.is_empty() {
                return Ok(());
            }
            for object in &objects {
                self.blobs.delete(&object.key).await?;
            }
            metrics::counter!("kici_orch_step_logs_pruned_total").increment(objects.len() as u64);
        }
    }

    async fn payloads(&self, old: Ts) -> Result<u64, RetentionError> {
        let mut gone = 0;
        for _ in 0..ROUNDS {
            let bodies = self.store.payloads_older(old, BATCH).await?;
            for (id, key) in bodies.iter().cloned() {
                self.blobs.delete(&key).await?;
                self.store.delivery_body_expired(id, key).await?;
            }
            gone += bodies.len() as u64;
            if bodies.len() < BATCH as usize {
                break;
            }
        }
        Ok(gone)
    }

    async fn runs(&self, old: Ts) -> Result<u64, RetentionError> {
        let mut gone = 0;
        for _ in 0..ROUNDS {
            let runs = self.store.runs_older(old, BATCH).await?;
            for run in runs.iter().copied() {
                self.delete_logs(run).await?;
            }
            let last = runs.len() < BATCH as usize;
            if !runs.is_empty() {
                gone += deleted("runs", self.store.runs_prune(runs).await?);
            }
            if last {
                break;
            }
        }
        Ok(gone)
    }
}

fn deleted(table: &'static str, rows: u64) -> u64 {
    metrics::counter!("kici_orch_retention_rows_deleted_total", "table" => table).increment(rows);
    rows
}

#[cfg(test)]
mod tests {
    use kici_engine::time::ManualClock;
    use kici_store::testing::TestStore;

    use super::*;

    #[test]
    fn zero_days_are_for_ever() {
        let now = Ts::from_micros(1_800_000_000_000_000);
        assert_eq!(before(now, 0), None);
        assert_eq!(before(now, 2), Some(now.minus(Duration::from_secs(2 * 86_400))));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_objects_of_a_run_go_with_its_logs_and_those_of_its_siblings_stay() {
        let stored = TestStore::sqlite().await;
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(dir.path()).unwrap();
        let (old, young) = (RunId::from_uuid(uuid::Uuid::from_u128(1)), RunId::from_uuid(uuid::Uuid::from_u128(2)));
        let key = |run: RunId| format!("logs/{}/job/1/step.log.zst", run.uuid());
        for run in [old, young] {
            blobs.put(&key(run), vec![1].into()).await.unwrap();
        }
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::new(Ts::from_micros(1)));
        let config = RetentionConfig {
            payload_days: 1,
            delivery_days: 1,
            queue_days: 1,
            logs_days: 1,
            runs_days: 1,
            audit_days: 1,
        };
        let events_ttl = Some(Duration::from_secs(7 * 86_400));
        let retention = Retention { store: stored.store.clone(), blobs: blobs.clone(), clock, config, events_ttl };
        retention.delete_logs(old).await.unwrap();
        assert_eq!((blobs.exists(&key(old)).await.unwrap(), blobs.exists(&key(young)).await.unwrap()), (false, true));
        assert_eq!(retention.run().await.unwrap(), 0, "nothing is old");
    }
}
