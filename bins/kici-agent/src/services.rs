//! Joins the two libraries: jobs of the runner get the sockets of the credential helper.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use kici_credential_helper::permission::Permissions;
use kici_credential_helper::repository::{Case, Repository, canonical_host};
use kici_credential_helper::server::{Conversation, Door, Service, Services};
use kici_credential_helper::service::{
    Ask, GitCredentials, GitService, Granted, Host, MintError, Minted, Scope, Upstream, Watch,
};
use kici_credential_helper::wire::{Code, Refusal, arguments};
use kici_protocol::agent::GitAccess;
use kici_runner::credentials::{Grant, JobDoor, JobServices, Opening, Remote, RemoteError, Wanted};
use kici_runner::emit::EventDesk;
use kici_runner::mask::Masker;
use kici_runner::ports::Emitted;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use crate::masks::MaskService;
use crate::stashes::{ArtifactService, CacheService};

/// Sockets for jobs, answered by this program.
pub struct Sockets {
    program: Option<PathBuf>,
}

impl Sockets {
    /// With this program as the helper of git and the command line of steps.
    pub fn of_this_program() -> Self {
        Self { program: std::env::current_exe().ok() }
    }
}

struct Open {
    door: Door,
    git: Arc<GitCredentials>,
}

#[async_trait]
impl JobServices for Sockets {
    fn program(&self) -> Option<&Path> {
        self.program.as_deref()
    }

    async fn open(&self, job: Opening) -> Result<Box<dyn JobDoor>, String> {
        let upstream = Arc::new(Orchestrator(job.remote));
        let masks = MaskService::new(Arc::clone(&job.masker));
        let git = GitCredentials::new(scope(&job.git), upstream, Arc::new(Masks(job.masker)), job.clock);
        let services: Services = [
            ("events", Arc::new(EventService(job.events)) as Arc<dyn Service>),
            ("artifact", Arc::new(ArtifactService(Arc::clone(&job.stash)))),
            ("cache", Arc::new(CacheService(job.stash))),
            ("git", Arc::new(GitService(Arc::clone(&git)))),
            ("mask", Arc::new(masks)),
        ]
        .into();
        let door = Door::open(&job.dir, job.uid, services).map_err(|error| error.to_string())?;
        Ok(Box::new(Open { door, git }))
    }
}

#[async_trait]
impl JobDoor for Open {
    fn socket(&self) -> &Path {
        self.door.socket()
    }

    async fn close(self: Box<Self>) {
        self.door.close().await;
        self.git.shut().await;
    }
}

fn scope(git: &GitAccess) -> Scope {
    let case = |ignored| if ignored { Case::Ignored } else { Case::Significant };
    let host = |host: &kici_protocol::agent::GitHost| {
        let name = canonical_host(&host.protocol, &host.host)?;
        Some(Host { protocol: host.protocol.clone(), host: name, case: case(host.ignore_case) })
    };
    // With a repository the first host is its own.
    let source = git.hosts.first().filter(|_| !git.repo.is_empty()).and_then(host);
    let own = source.and_then(|host| Repository::parse(&host.protocol, &host.host, &git.repo, host.case).ok());
    Scope { hosts: git.hosts.iter().filter_map(host).collect(), own }
}

struct Orchestrator(Arc<Remote>);

fn wanted(ask: &Ask) -> Wanted {
    Wanted {
        host: ask.repository.host().to_owned(),
        repo: ask.repository.path().to_owned(),
        credential: ask.credential.clone(),
    }
}

#[async_trait]
impl Upstream for Orchestrator {
    async fn mint(&self, ask: &Ask) -> Result<Minted, MintError> {
        let permissions = ask.permissions.iter().map(|(name, level)| (name.to_owned(), level.to_string())).collect();
        let found = self.0.mint(&wanted(ask), permissions).await.map_err(|error| match error {
            RemoteError::Refused => MintError::Refused,
            RemoteError::Unavailable => MintError::Unavailable,
        })?;
        let granted = match found.grant {
            Grant::Unscoped => Granted::Unscoped,
            Grant::Scoped(permissions) => {
                // A permission of a kind that this build does not know counts as not granted.
                let known =
                    permissions.iter().filter_map(|(name, level)| Permissions::parse([format!("{name}={level}")]).ok());
                Granted::Scoped(known.fold(Permissions::default(), |all, one| all.union(&one)))
            }
        };
        Ok(Minted { user: found.user, secret: found.secret, granted, expires_at: found.expires_at })
    }

    async fn revoke(&self, ask: &Ask, secret: &SecretString) {
        self.0.revoke(&wanted(ask), secret).await;
    }
}

/// `kici emit`.
struct EventService(Arc<EventDesk>);

struct Emitting(Arc<EventDesk>);

/// Arguments of `events.emit`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EmitArguments {
    event: String,
    payload: Json,
    #[serde(default)]
    target: Vec<String>,
}

impl Service for EventService {
    fn meet(&self) -> Box<dyn Conversation> {
        Box::new(Emitting(Arc::clone(&self.0)))
    }
}

#[async_trait]
impl Conversation for Emitting {
    async fn call(&mut self, verb: &str, body: Json) -> Result<Json, Refusal> {
        if verb != "emit" {
            return Err(Refusal::new(Code::Usage, format!("this agent does not know `events.{verb}`")));
        }
        let EmitArguments { event, payload, target } = arguments(body)?;
        match self.0.emit(event, payload, target).await {
            Emitted::Stored(id) => Ok(json!({"event_id": id})),
            Emitted::Refused(why) => Err(Refusal::new(Code::Refused, why)),
            Emitted::Nowhere(why) => Err(Refusal::new(Code::Failed, why)),
        }
    }

    async fn end(&mut self) {}
}

struct Masks(Arc<Masker>);

impl Watch for Masks {
    fn mask(&self, values: &[&str]) {
        self.0.add(values.iter().copied());
    }

    fn count(&self, outcome: &'static str) {
        metrics::counter!("kici_agent_credential_requests_total", "outcome" => outcome).increment(1);
    }
}
