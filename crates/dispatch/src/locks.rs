//! Parsed lock documents by digest. They never change, so any entry may be dropped and read again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kici_engine::lock::Workflow;
use kici_store::{Store, StoreError};

/// Documents kept; a run uses one.
const MAX_DOCUMENTS: usize = 500;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    parsed: Mutex<HashMap<String, Arc<Workflow>>>,
}

/// A lock document that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    /// Not JSON of a workflow.
    #[error("the stored workflow {digest} cannot be read: {problem}; run it again from a new event")]
    Unreadable { digest: String, problem: String },
    /// Not in the database.
    #[error("the stored workflow {0} is missing; run it again from a new event")]
    Missing(String),
    /// The database did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Locks {
    fn cached(&self, digest: &str) -> Option<Arc<Workflow>> {
        self.parsed.lock().unwrap_or_else(PoisonError::into_inner).get(digest).cloned()
    }

    /// The workflow in `json`, which has this digest.
    pub fn read(&self, digest: &str, json: &[u8]) -> Result<Arc<Workflow>, LockError> {
        if let Some(found) = self.cached(digest) {
            return Ok(found);
        }
        let parsed: Workflow = serde_json::from_slice(json)
            .map_err(|error| LockError::Unreadable { digest: digest.to_owned(), problem: error.to_string() })?;
        let parsed = Arc::new(parsed);
        let mut cache = self.parsed.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= MAX_DOCUMENTS
            && let Some(any) = cache.keys().next().cloned()
        {
            cache.remove(&any);
        }
        cache.insert(digest.to_owned(), parsed.clone());
        Ok(parsed)
    }

    /// The workflow with this digest.
    pub async fn load(&self, store: &Store, digest: &str) -> Result<Arc<Workflow>, LockError> {
        if let Some(found) = self.cached(digest) {
            return Ok(found);
        }
        let json = store.lock_document(digest.to_owned()).await?;
        let json = json.ok_or_else(|| LockError::Missing(digest.to_owned()))?;
        self.read(digest, &json)
    }
}
