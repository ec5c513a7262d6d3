//! Workflow files by (source, repository, commit). A commit never changes, so an entry is never wrong; it only ages.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kici_engine::ids::SourceId;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::forge::ForgeError;
use crate::workflows::WorkflowFiles;

/// What an entry stands for. Never a branch name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub source: SourceId,
    pub repo: String,
    pub sha: String,
}

/// A bounded cache with single flight: any number of callers for one key cause one fetch.
#[derive(Debug)]
pub struct WorkflowCache {
    max_entries: usize,
    max_bytes: u64,
    ttl: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Key, Entry>,
    bytes: u64,
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    cell: Arc<OnceCell<Arc<WorkflowFiles>>>,
    /// Zero until the fetch is done.
    bytes: u64,
    last_use: u64,
    since: Instant,
}

impl Default for WorkflowCache {
    /// 500 entries, 64 MiB, one hour.
    fn default() -> Self {
        Self::new(500, 64 * 1024 * 1024, Duration::from_secs(3600))
    }
}

impl WorkflowCache {
    /// A cache of at most `max_entries` and `max_bytes`, whose entries live for `ttl`.
    pub fn new(max_entries: usize, max_bytes: u64, ttl: Duration) -> Self {
        Self { max_entries: max_entries.clamp(1, 100_000), max_bytes, ttl, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry for `key`, fetched if it is not there. Errors are not kept: the next caller tries again.
    pub(crate) async fn get<F>(
        &self,
        key: Key,
        fetch: impl FnOnce() -> F + Send,
    ) -> Result<Arc<WorkflowFiles>, ForgeError>
    where
        F: Future<Output = Result<WorkflowFiles, ForgeError>> + Send,
    {
        let cell = self.slot(&key);
        let files = cell.get_or_try_init(|| async { fetch().await.map(Arc::new) }).await.cloned();
        match &files {
            Ok(files) => self.settle(&key, &cell, files.weight()),
            Err(_) => self.forget_if_empty(&key, &cell),
        }
        files
    }

    fn slot(&self, key: &Key) -> Arc<OnceCell<Arc<WorkflowFiles>>> {
        let mut state = self.state();
        state.uses += 1;
        let (uses, now) = (state.uses, Instant::now());
        if state.entries.get(key).is_some_and(|e| e.bytes > 0 && now - e.since >= self.ttl) {
            state.remove(key);
        }
        let entry = state.entries.entry(key.clone()).or_insert_with(|| Entry {
            cell: Arc::default(),
            bytes: 0,
            last_use: uses,
            since: now,
        });
        entry.last_use = uses;
        Arc::clone(&entry.cell)
    }

    /// Counts a finished entry and makes room.
    fn settle(&self, key: &Key, cell: &Arc<OnceCell<Arc<WorkflowFiles>>>, weight: u64) {
        let mut state = self.state();
        let Some(entry) = state.entries.get_mut(key) else { return };
        if !Arc::ptr_eq(&entry.cell, cell) || entry.bytes > 0 {
            return;
        }
        entry.bytes = weight.max(1);
        state.bytes += weight.max(1);
        while state.entries.len() > self.max_entries || state.bytes > self.max_bytes {
            let done = state.entries.iter().filter(|(_, e)| e.bytes > 0);
            let Some(oldest) = done.min_by_key(|(_, e)| e.last_use).map(|(k, _)| k.clone()) else { break };
            state.remove(&oldest);
        }
    }

    fn forget_if_empty(&self, key: &Key, cell: &Arc<OnceCell<Arc<WorkflowFiles>>>) {
        let mut state = self.state();
        let same = state.entries.get(key).is_some_and(|e| Arc::ptr_eq(&e.cell, cell) && e.bytes == 0);
        // Two owners are the table and this caller: nobody else waits for the cell.
        if same && cell.get().is_none() && Arc::strong_count(cell) <= 2 {
            state.remove(key);
        }
    }
}

impl State {
    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= entry.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use uuid::Uuid;

    use super::*;
    use crate::workflows::WorkflowFile;

    fn key(sha: &str) -> Key {
        Key { source: SourceId::from_uuid(Uuid::nil()), repo: "o/r".into(), sha: sha.into() }
    }

    fn files(bytes: usize) -> WorkflowFiles {
        let file = WorkflowFile { path: String::new(), content: "x".repeat(bytes) };
        WorkflowFiles { files: vec![file], ..WorkflowFiles::default() }
    }

    async fn load(cache: &WorkflowCache, sha: &str, fetches: &AtomicU32) -> Result<Arc<WorkflowFiles>, ForgeError> {
        let fetch = || async {
            fetches.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            Ok(files(1000))
        };
        cache.get(key(sha), fetch).await
    }

    #[tokio::test]
    async fn many_callers_cause_one_fetch() {
        let (cache, fetches) = (WorkflowCache::default(), AtomicU32::new(0));
        let calls = (0..20).map(|_| load(&cache, "a", &fetches));
        assert!(futures::future::join_all(calls).await.iter().all(Result::is_ok));
        assert_eq!(fetches.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn errors_are_not_kept() {
        let cache = WorkflowCache::default();
        let failing = || async { Err(ForgeError::not_found("x")) };
        assert!(cache.get(key("a"), failing).await.is_err());
        assert!(cache.state().entries.is_empty());
        assert!(load(&cache, "a", &AtomicU32::new(0)).await.is_ok());
    }

    #[tokio::test]
    async fn the_least_recently_used_goes_first() {
        let fetches = AtomicU32::new(0);
        for cache in [
            WorkflowCache::new(2, u64::MAX, Duration::from_secs(60)),
            WorkflowCache::new(100, 2600, Duration::from_secs(60)),
        ] {
            for sha in ["a", "b", "a", "c"] {
                load(&cache, sha, &fetches).await.unwrap();
            }
            let state = cache.state();
            let mut kept: Vec<_> = state.entries.keys().map(|k| k.sha.as_str()).collect();
            kept.sort_unstable();
            assert_eq!(kept, ["a", "c"]);
            assert_eq!(state.bytes, state.entries.values().map(|e| e.bytes).sum::<u64>());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn entries_age() {
        let (cache, fetches) = (WorkflowCache::new(10, u64::MAX, Duration::from_secs(60)), AtomicU32::new(0));
        load(&cache, "a", &fetches).await.unwrap();
        tokio::time::advance(Duration::from_secs(61)).await;
        load(&cache, "a", &fetches).await.unwrap();
        assert_eq!(fetches.load(Ordering::SeqCst), 2);
    }
}
