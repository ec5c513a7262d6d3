//! Where an agent fetches a job's commit, with a credential that can only read it.

use std::sync::Arc;

use async_trait::async_trait;
use kici_dispatch::ports::{CloneError, CloneRequest, CloneSource, Clones, GitHost};
use kici_engine::ids::SourceId;
use kici_engine::state::FailureReason;
use kici_events::SourceBook;
use kici_events::ports::Repositories;
use kici_forge::{Forge, ForgeError, Forges, Source, SourceSecrets};
use kici_store::Store;

/// Clone sources from the forges of stored sources.
pub(crate) struct SourceClones {
    pub(crate) store: Store,
    pub(crate) sources: SourceBook,
}

#[async_trait]
impl Clones for SourceClones {
    async fn git_host(&self, source: SourceId) -> Result<Option<GitHost>, CloneError> {
        Ok(host_of(&*self.forge(source).await?))
    }

    async fn source(&self, request: &CloneRequest) -> Result<CloneSource, CloneError> {
        let forge = self.forge(request.source_id).await?;
        let found = forge.clone_source(&request.repo, &request.sha, request.git_ref.as_deref()).await;
        let found = found.map_err(|error| judged(&error))?;
        let basic = found.auth.map(|auth| (auth.username, auth.password));
        Ok(CloneSource { url: found.url, basic, git_host: host_of(&*forge) })
    }
}

fn host_of(forge: &dyn Forge) -> Option<GitHost> {
    let host = forge.git_host()?;
    Some(GitHost { protocol: host.protocol, host: host.host, ignore_case: host.ignore_case })
}

impl SourceClones {
    async fn forge(&self, source: SourceId) -> Result<Arc<dyn Forge>, CloneError> {
        let stored = self.store.source_by_id(source).await;
        let stored = stored.map_err(|error| CloneError::Transient(error.to_string()))?;
        let stored = stored.ok_or_else(|| refused("the source of this run is gone"))?;
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
