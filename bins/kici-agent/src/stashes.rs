//! The verbs of `cache` and `artifact` over the socket of a job. What a step asks for is done by the agent, with the rights and
//! limits that what the workflow declares has.

use std::sync::Arc;

use async_trait::async_trait;
use kici_credential_helper::server::{Conversation, Service};
use kici_credential_helper::wire::stash::{ArtifactDownload, ArtifactUpload, CacheRestore, CacheSave, Done, Hit};
use kici_credential_helper::wire::{self, Code, Refusal};
use kici_runner::stash::{DepotError, Saved, Stash, StashError};
use serde::Serialize;
use serde_json::Value as Json;

/// Answers `cache.restore`, `cache.save`.
pub struct CacheService(pub Arc<Stash>);
/// Answers `artifact.upload`, `artifact.download`.
pub struct ArtifactService(pub Arc<Stash>);

struct OfCaches(Arc<Stash>);
struct OfArtifacts(Arc<Stash>);

impl Service for CacheService {
    fn meet(&self) -> Box<dyn Conversation> {
        Box::new(OfCaches(Arc::clone(&self.0)))
    }
}

impl Service for ArtifactService {
    fn meet(&self) -> Box<dyn Conversation> {
        Box::new(OfArtifacts(Arc::clone(&self.0)))
    }
}

fn answer(value: impl Serialize) -> Result<Json, Refusal> {
    serde_json::to_value(value).map_err(|_| Refusal::new(Code::Failed, "the answer cannot be written"))
}

fn refusal(error: &StashError) -> Refusal {
    let code = match error {
        StashError::Bad(_) => Code::Usage,
        StashError::Depot(DepotError::Unavailable(_)) => Code::Unavailable,
        StashError::Depot(DepotError::Refused(_) | DepotError::Nowhere(_)) => Code::Refused,
        StashError::Archive(_) => Code::Failed,
    };
    Refusal::new(code, error.to_string())
}

fn done(saved: Saved) -> Done {
    match saved {
        Saved::Stored { files, packed, notes } => Done { stored: true, empty: false, files, bytes: packed, notes },
        Saved::Exists => Done { notes: vec!["it is there already and stays".to_owned()], ..Done::default() },
        Saved::Empty => Done { empty: true, ..Done::default() },
    }
}

#[async_trait]
impl Conversation for OfCaches {
    async fn call(&mut self, verb: &str, body: Json) -> Result<Json, Refusal> {
        match verb {
            "restore" => {
                let CacheRestore { key, paths, restore_keys } = wire::arguments(body)?;
                let found = self.0.restore(&key, &restore_keys, &paths).await.map_err(|error| refusal(&error))?;
                answer(Hit {
                    hit: found.matched_key.is_some(),
                    exact: found.exact,
                    matched_key: found.matched_key,
                    files: found.files,
                    bytes: found.bytes,
                    notes: found.notes,
                })
            }
            "save" => {
                let CacheSave { key, paths } = wire::arguments(body)?;
                answer(done(self.0.save(&key, &paths).await.map_err(|error| refusal(&error))?))
            }
            _ => Err(Refusal::new(Code::Usage, "this agent does not know this verb of cache")),
        }
    }

    async fn end(&mut self) {}
}

#[async_trait]
impl Conversation for OfArtifacts {
    async fn call(&mut self, verb: &str, body: Json) -> Result<Json, Refusal> {
        match verb {
            "upload" => {
                let ArtifactUpload { name, paths, expire_in_ms } = wire::arguments(body)?;
                let saved = self.0.upload(&name, &paths, expire_in_ms).await.map_err(|error| refusal(&error))?;
                answer(done(saved))
            }
            "download" => {
                let ArtifactDownload { name, from, path } = wire::arguments(body)?;
                let path = path.unwrap_or_default();
                let found = self.0.download(&name, from.as_deref(), &path).await.map_err(|error| refusal(&error))?;
                answer(Done { stored: true, empty: false, files: found.files, bytes: found.bytes, notes: found.notes })
            }
            _ => Err(Refusal::new(Code::Usage, "this agent does not know this verb of artifact")),
        }
    }

    async fn end(&mut self) {}
}
