//! Who is registered, in memory as of a version of the registry, and the parsed workflows of those who are. Both are rebuilt from
//! the database whenever they are missing or old.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kici_engine::lock::Workflow;
use kici_store::model::Registration;
use kici_store::{Store, StoreError};

/// Parsed workflows that are kept.
const MAX_PARSED: usize = 1000;

/// Registered workflows, of one organisation after the other.
pub(crate) struct Registry {
    store: Store,
    indexes: Mutex<HashMap<String, Arc<Index>>>,
    /// By digest: they never change.
    parsed: Mutex<HashMap<String, Arc<Workflow>>>,
}

/// The registrations of an organisation at one version; never changed, only replaced.
struct Index {
    version: i64,
    /// By trigger type.
    by_kind: HashMap<String, Vec<Arc<Registration>>>,
    /// By trigger type, source and repository.
    by_repo: HashMap<(String, String, String), Vec<Arc<Registration>>>,
}

impl Index {
    fn new(version: i64, registrations: Vec<Registration>) -> Self {
        let mut index = Self { version, by_kind: HashMap::new(), by_repo: HashMap::new() };
        for registration in registrations.into_iter().map(Arc::new) {
            for kind in &registration.trigger_types {
                index.by_kind.entry(kind.clone()).or_default().push(Arc::clone(&registration));
                let key = (kind.clone(), registration.routing_key.clone(), registration.repo.clone());
                index.by_repo.entry(key).or_default().push(Arc::clone(&registration));
            }
        }
        index
    }
}

impl Registry {
    pub(crate) fn new(store: Store) -> Self {
        Self { store, indexes: Mutex::default(), parsed: Mutex::default() }
    }

    /// The registrations that have one of these trigger types, each once; with `of` only those of a source and its repository.
    /// Reads one row unless a registration has changed since the last time.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn listening(
        &self,
        org: &str,
        of: Option<(&str, &str)>,
        kinds: &[&str],
    ) -> Result<Vec<Arc<Registration>>, StoreError> {
        let index = self.index(org).await?;
        let mut found: Vec<Arc<Registration>> = kinds
            .iter()
            .filter_map(|kind| match of {
                None => index.by_kind.get(*kind),
                Some((source, repo)) => index.by_repo.get(&((*kind).to_owned(), source.to_owned(), repo.to_owned())),
            })
            .flatten()
            .cloned()
            .collect();
        found.sort_by_key(|registration| registration.id);
        found.dedup_by_key(|registration| registration.id);
        Ok(found)
    }

    async fn index(&self, org: &str) -> Result<Arc<Index>, StoreError> {
        // Before the list: one that is newer than its version is read once more, one that is older never is used.
        let version = self.store.registry_version().await?;
        let known = self.indexes.lock().unwrap_or_else(PoisonError::into_inner).get(org).cloned();
        if let Some(known) = known.filter(|known| known.version == version) {
            return Ok(known);
        }
        let fresh = Arc::new(Index::new(version, self.store.registration_list(org.to_owned(), None, None).await?));
        self.indexes.lock().unwrap_or_else(PoisonError::into_inner).insert(org.to_owned(), Arc::clone(&fresh));
        Ok(fresh)
    }

    /// The workflow with this digest; none where its document is missing or cannot be read.
    ///
    /// # Errors
    /// The database's.
    pub(crate) async fn workflow(&self, digest: &str) -> Result<Option<Arc<Workflow>>, StoreError> {
        if let Some(known) = self.parsed.lock().unwrap_or_else(PoisonError::into_inner).get(digest) {
            return Ok(Some(Arc::clone(known)));
        }
        let document = self.store.lock_document(digest.to_owned()).await?;
        let Some(parsed) = document.and_then(|bytes| serde_json::from_slice::<Workflow>(&bytes).ok()) else {
            return Ok(None);
        };
        let parsed = Arc::new(parsed);
        let mut all = self.parsed.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_PARSED
            && let Some(any) = all.keys().next().cloned()
        {
            all.remove(&any);
        }
        all.insert(digest.to_owned(), Arc::clone(&parsed));
        Ok(Some(parsed))
    }
}
