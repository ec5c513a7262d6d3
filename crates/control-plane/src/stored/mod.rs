//! Caches and artifacts of jobs: who may read and write what is decided here from stored rows, the bytes travel by short-lived
//! signed addresses.

mod calls;
mod names;
mod sweep;
#[cfg(test)]
mod tests;
mod transfer;
mod urls;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kici_blobs::Blobs;
use kici_engine::ids::IdSource;
use kici_engine::time::Clock;
use kici_store::Store;
use kici_store::model::UploadLimits;

pub(crate) use transfer::{Transfers, router};
pub(crate) use urls::Signer;

use crate::config::StoredConfig;

/// Uploads of one job under way.
const OPEN_UPLOADS: u32 = 32;

/// Caches and artifacts.
pub(crate) struct Stored {
    pub(crate) store: Store,
    pub(crate) blobs: Blobs,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) ids: Arc<dyn IdSource>,
    pub(crate) signer: Arc<Signer>,
    pub(crate) config: StoredConfig,
    /// Since the start of this process.
    pub(crate) counts: Counts,
}

/// How often caches were found.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    hits: AtomicU64,
    misses: AtomicU64,
}

impl Counts {
    fn restore(&self, hit: bool) {
        let (counter, result) = if hit { (&self.hits, "hit") } else { (&self.misses, "miss") };
        counter.fetch_add(1, Ordering::Relaxed);
        metrics::counter!("kici_orch_user_cache_ops_total", "op" => "restore", "result" => result).increment(1);
    }

    /// Hits and misses.
    pub(crate) fn both(&self) -> (u64, u64) {
        (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed))
    }
}

impl Stored {
    fn cache_limits(&self) -> UploadLimits {
        let quota = self.config.cache_quota;
        UploadLimits { max_bytes: quota, quota_bytes: quota, per_run: 0, open: OPEN_UPLOADS }
    }

    fn artifact_limits(&self) -> UploadLimits {
        let config = self.config;
        UploadLimits {
            max_bytes: config.artifact_bytes.min(config.artifact_quota),
            quota_bytes: config.artifact_quota,
            per_run: config.artifacts_per_run,
            open: OPEN_UPLOADS,
        }
    }
}
