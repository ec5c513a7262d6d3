//! Where an agent fetches a job's commit, with a credential that can only read it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kici_dispatch::ports::{CloneError, CloneRequest, CloneSource, Clones, GitHost};
use kici_engine::ids::SourceId;
use kici_engine::state::FailureReason;
use kici_events::SourceBook;
use kici_events::ports::Repositories;
use kici_forge::{Forge, ForgeError, Forges, Source, SourceConfig, SourceSecrets};
use kici_store::{Store, model};
use tokio::time::Instant;

/// How long the host of a source is used without reading the source again.
const HOST_FRESH: Duration = Duration::from_secs(60);
/// Most hosts that are remembered.
const MAX_HOSTS: usize = 256;

/// Clone sources from the forges of stored sources.
pub(crate) struct SourceClones {
    store: Store,
    sources: SourceBook,
    hosts: Mutex<HashMap<SourceId, (Instant, Option<GitHost>)>>,
}

#[async_trait]
impl Clones for SourceClones {
    async fn git_host(&self, source: SourceId) -> Result<Option<GitHost>, CloneError> {
        if let Some((read_at, host)) = self.hosts().get(&source)
            && read_at.elapsed() < HOST_FRESH
        {
            return Ok(host.clone());
        }
        let stored = self.stored(source).await?;
        let typed = kici_events::typed(&stored).map_err(|error| refused(&error.to_string()))?;
        let host = match typed.config {
            SourceConfig::Github(github) => github.git_host().map(on_wire),
            SourceConfig::Generic(_) | SourceConfig::Local(_) => None,
        };
        let mut hosts = self.hosts();
        if hosts.len() >= MAX_HOSTS {
            hosts.clear();
        }
        hosts.insert(source, (Instant::now(), host.clone()));
        Ok(host)
    }

    async fn source(&self, request: &CloneRequest) -> Result<CloneSource, CloneError> {
        let forge = self.forge(request.source_id).await?;
        let found = forge.clone_source(&request.repo, &request.sha, request.git_ref.as_deref()).await;
        let found = found.map_err(|error| judged(&error))?;
        let basic = found.auth.map(|auth| (auth.username, auth.password));
        Ok(CloneSource { url: found.url, basic, git_host: forge.git_host().map(on_wire) })
    }
}

fn on_wire(host: kici_forge::GitHost) -> GitHost {
    GitHost { protocol: host.protocol, host: host.host, ignore_case: host.ignore_case }
}

impl SourceClones {
    pub(crate) fn new(store: Store, sources: SourceBook) -> Self {
        Self { store, sources, hosts: Mutex::default() }
    }

    fn hosts(&self) -> MutexGuard<'_, HashMap<SourceId, (Instant, Option<GitHost>)>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn stored(&self, source: SourceId) -> Result<model::Source, CloneError> {
        let stored = self.store.source_by_id(source).await;
        let stored = stored.map_err(|error| CloneError::Transient(error.to_string()))?;
        stored.ok_or_else(|| refused("the source of this run is gone"))
    }

    async fn forge(&self, source: SourceId) -> Result<Arc<dyn Forge>, CloneError> {
        let stored = self.stored(source).await?;
        let open = self.sources.open(&stored).map_err(|error| refused(&error.to_string()))?;
        self.sources.forge(&open).map_err(|error| judged(&error))
    }
}

fn refused(message: &str) -> CloneError {
    CloneError::Permanent { reason: FailureReason::LostCredential, message: message.to_owned() }
}

fn judged(error: &ForgeError) -> CloneError {
    if error.is_retryable() { CloneError::Transient(error.to_string()) } else { refused(&error.to_string()) }
}

/// The forges, as the event crate asks for them.
pub(crate) struct AllForges(pub(crate) Arc<Forges>);

impl Repositories for AllForges {
    fn of(&self, source: &Source, secrets: &SourceSecrets) -> Result<Arc<dyn Forge>, ForgeError> {
        self.0.get(source, || Ok(secrets.clone()))
    }
}
