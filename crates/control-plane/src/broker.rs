//! Git credentials for jobs: decided by `kici_credential_helper::broker` from stored rows, made by the forge, and written into
//! the audit log before anybody gets them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kici_credential_helper::broker::{Choice, JobFacts, REFUSED, SourceHost, Trust, Wish, With, authorize};
use kici_credential_helper::permission::Permissions;
use kici_credential_helper::repository::{Case, Repository};
use kici_engine::ids::AgentId;
use kici_engine::lock::{CredentialMaterial, GitCredentials, NamedCredential};
use kici_engine::time::Clock;
use kici_events::SourceBook;
use kici_forge::github::Github;
use kici_forge::{Forge, GithubConfig, Limits, Minted, SourceConfig, WorkflowCache};
use kici_protocol::agent::git_credential_response::Grant;
use kici_protocol::agent::{
    GitCredentialRequest, GitCredentialResponse, RevokeGitTokenRequest, ScopedGrant, UnscopedGrant,
};
use kici_store::Store;
use kici_store::model::{Job, JobRef, NewSecretAudit, Run};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value as Json, json};
use tonic::Status;

/// One try at the forge.
const MINT_LIMIT: Duration = Duration::from_secs(10);
/// Tries.
const MINT_TRIES: usize = 2;
/// How long after its end a job may still get a credential: frames that crossed.
const GRACE: Duration = Duration::from_secs(30);

/// Makes and ends git credentials.
pub(crate) struct GitBroker {
    pub(crate) store: Store,
    pub(crate) sources: SourceBook,
    pub(crate) http: reqwest::Client,
    pub(crate) clock: Arc<dyn Clock>,
}

/// What is known of the job that asks.
struct Known {
    run: Run,
    job: Job,
    declared: GitCredentials,
    source: kici_events::OpenSource,
    forge: Arc<dyn Forge>,
    host: Option<SourceHost>,
}

/// Why there is no credential: the word for the agent, and the reason for the audit log.
struct No {
    status: Status,
    outcome: &'static str,
    reason: String,
}

fn denied(reason: impl ToString) -> No {
    No { status: Status::permission_denied(REFUSED), outcome: "denied", reason: reason.to_string() }
}

fn later(reason: impl ToString) -> No {
    let status = Status::unavailable("no credential can be had now; try again");
    No { status, outcome: "error", reason: reason.to_string() }
}

impl GitBroker {
    /// A credential for a job that the agent holds.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` in one wording, or `UNAVAILABLE`.
    pub(crate) async fn credential(
        &self,
        agent: &AgentId,
        job: JobRef,
        request: &GitCredentialRequest,
    ) -> Result<GitCredentialResponse, Status> {
        let wanted = read_permissions(&request.permissions)?;
        let known = match self.known(job).await {
            Ok(known) => known,
            Err(no) => {
                tracing::warn!(job = %job.job_id, reason = no.reason, "a job gets no git credential");
                return Err(no.status);
            }
        };
        let wish = Wish {
            host: &request.host,
            repo: &request.repo,
            permissions: &wanted,
            credential: (!request.credential.is_empty()).then_some(&request.credential),
        };
        let mut audit = Audit::new(&known, agent, &wish);
        let made = match authorize(known.facts(), &wish) {
            Ok(choice) => {
                audit.chosen(&choice);
                self.make(&known, &choice, &wanted).await
            }
            Err(refusal) => Err(denied(refusal)),
        };
        let outcome = made.as_ref().map_or_else(|no| no.outcome, |_| "allowed");
        metrics::counter!("kici_orch_credential_requests_total", "kind" => audit.kind, "result" => outcome)
            .increment(1);
        let answer = match &made {
            Ok(answer) => audit.granted(answer),
            Err(no) => audit.refused(no),
        };
        // Before anybody has it: a credential that nobody can account for is none.
        if let Err(error) = self.store.secret_audit_insert(audit.entry(answer, outcome)).await {
            tracing::error!(%error, "a git credential cannot be written into the audit log and is not given out");
            if let Ok(Some(secret)) = made.as_ref().map(|made| made.revocable()) {
                self.end(&known, &wish, secret).await;
            }
            return Err(Status::unavailable("no credential can be had now; try again"));
        }
        made.map(Made::into_answer).map_err(|no| {
            tracing::info!(job = %job.job_id, reason = no.reason, "a job gets no git credential");
            no.status
        })
    }

    /// Ends a token that this broker made for a job. Best effort: a token that cannot be ended expires by itself.
    ///
    /// # Errors
    /// `UNAVAILABLE`.
    pub(crate) async fn revoke(
        &self,
        agent: &AgentId,
        job: JobRef,
        request: RevokeGitTokenRequest,
    ) -> Result<(), Status> {
        let known = self.known(job).await.map_err(|no| no.status)?;
        let permissions = Permissions::fetch();
        let wish = Wish {
            host: &request.host,
            repo: &request.repo,
            permissions: &permissions,
            credential: (!request.credential.is_empty()).then_some(&request.credential),
        };
        let ended = self.end(&known, &wish, &SecretString::from(request.secret.clone())).await;
        let audit = Audit { action: "git_credential.revoke", ..Audit::new(&known, agent, &wish) };
        let outcome = if ended { "allowed" } else { "error" };
        if let Err(error) = self.store.secret_audit_insert(audit.entry(json!({}), outcome)).await {
            tracing::warn!(%error, "the end of a git token is not in the audit log");
        }
        if ended { Ok(()) } else { Err(Status::unavailable("the token cannot be ended now")) }
    }

    async fn end(&self, known: &Known, wish: &Wish<'_>, secret: &SecretString) -> bool {
        let Ok(choice) = authorize(known.facts(), wish) else { return false };
        let forge = match self.forge_of(known, &choice) {
            Ok(Some(forge)) => forge,
            // A static credential outlives its uses.
            Ok(None) => return true,
            Err(_) => return false,
        };
        matches!(tokio::time::timeout(MINT_LIMIT, forge.revoke(secret)).await, Ok(Ok(())))
    }

    /// Everything from rows, nothing from the request.
    async fn known(&self, job: JobRef) -> Result<Known, No> {
        let row = self.store.job_get(job.job_id).await.map_err(later)?;
        let row = row.ok_or_else(|| denied("there is no such job"))?;
        let over = row.finished_at.is_some_and(|at| at.plus(GRACE) < self.clock.now());
        if over {
            return Err(denied("the job is over"));
        }
        let run = self.store.run_get(row.run_id).await.map_err(later)?.ok_or_else(|| denied("there is no such run"))?;
        let declared = self.store.job_git_credentials(job.job_id).await.map_err(later)?.unwrap_or_default();
        let stored = self.store.source_by_id(run.source_id).await.map_err(later)?;
        let stored = stored.ok_or_else(|| denied("the source of the run is gone"))?;
        let source = self.sources.open(&stored).map_err(denied)?;
        if !source.enabled {
            return Err(denied("the source is disabled or removed"));
        }
        let forge = self.sources.forge(&source).map_err(denied)?;
        let host = forge.git_host().map(|host| SourceHost {
            protocol: host.protocol,
            host: host.host,
            case: if host.ignore_case { Case::Ignored } else { Case::Significant },
        });
        Ok(Known { run, job: row, declared, source, forge, host })
    }

    async fn make(&self, known: &Known, choice: &Choice<'_>, wanted: &Permissions) -> Result<Made, No> {
        if let With::Named(_, NamedCredential { material: CredentialMaterial::Basic { user, token }, .. }) = choice.with
        {
            return Ok(Made::Static { user: user.value().to_owned(), secret: token.value().to_owned().into() });
        }
        let Some(forge) = self.forge_of(known, choice)? else { return Err(denied("the credential has no forge")) };
        let permissions: BTreeMap<String, String> =
            wanted.iter().map(|(name, level)| (name.to_owned(), level.to_string())).collect();
        let mut last = later("the forge did not answer in time");
        for _ in 0..MINT_TRIES {
            let mint = forge.mint(repo_of(known, &choice.repository), &permissions);
            match tokio::time::timeout(MINT_LIMIT, mint).await {
                Ok(Ok(minted)) => return Ok(Made::Minted(minted)),
                Ok(Err(error)) if error.is_retryable() => last = later(error),
                Ok(Err(error)) => return Err(denied(error)),
                Err(_) => {}
            }
        }
        Err(last)
    }

    /// Who makes and ends the tokens of a choice; none for static credentials.
    fn forge_of(&self, known: &Known, choice: &Choice<'_>) -> Result<Option<Arc<dyn Forge>>, No> {
        let With::Named(name, credential) = choice.with else { return Ok(Some(known.forge.clone())) };
        let CredentialMaterial::GithubApp { app_id, private_key, installation_id } = &credential.material else {
            return Ok(None);
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| denied("a number of the App is none"));
        let mut config = GithubConfig::new(number(app_id.value())?);
        config.base_url = api_of(known, credential.host.as_deref());
        let key = SecretString::from(private_key.value().to_owned());
        let mut source = known.source.source.clone();
        source.name = format!("git_credentials.named.{name}");
        let shared = (self.http.clone(), self.clock.clone(), Arc::new(WorkflowCache::default()));
        let github = Github::new(&source, &config, Some(&key), shared, Limits::default()).map_err(denied)?;
        Ok(Some(Arc::new(github.with_installation(number(installation_id.value())?))))
    }
}

/// The repository as the run writes it where that is its own, since a forge may compare what it is asked for byte by byte.
fn repo_of<'a>(known: &'a Known, repository: &'a Repository) -> &'a str {
    let own = &known.run.repo;
    if own.eq_ignore_ascii_case(repository.path())
        && known.host.as_ref().is_some_and(|host| host.host == repository.host())
    {
        own
    } else {
        repository.path()
    }
}

/// The REST address of a GitHub at `host`; the source's where it is the same.
fn api_of(known: &Known, host: Option<&str>) -> String {
    let of_source = match &known.source.source.config {
        SourceConfig::Github(github) => Some(&github.base_url),
        SourceConfig::Generic(_) | SourceConfig::Local(_) => None,
    };
    let same = host.is_none_or(|host| known.host.as_ref().is_some_and(|source| source.host == host));
    match (of_source, host) {
        (Some(base), _) if same => base.clone(),
        (_, Some(host)) if host != "github.com" => format!("https://{host}/api/v3"),
        _ => GithubConfig::new(1).base_url,
    }
}

impl Known {
    fn facts(&self) -> JobFacts<'_> {
        JobFacts {
            source: self.host.as_ref(),
            repo: &self.run.repo,
            declared: &self.declared,
            trust: Trust::of(&self.run.event),
        }
    }
}

/// A credential that was made.
enum Made {
    Minted(Minted),
    Static { user: String, secret: SecretString },
}

impl Made {
    /// The secret of one that can be ended.
    fn revocable(&self) -> Option<&SecretString> {
        match self {
            Self::Minted(minted) => Some(&minted.auth.password),
            Self::Static { .. } => None,
        }
    }

    fn into_answer(self) -> GitCredentialResponse {
        match self {
            Self::Minted(minted) => GitCredentialResponse {
                user: minted.auth.username,
                secret: minted.auth.password.expose_secret().to_owned(),
                grant: Some(Grant::Scoped(ScopedGrant { permissions: minted.permissions.into_iter().collect() })),
                expires_at_us: minted.expires_at.as_micros(),
            },
            Self::Static { user, secret } => GitCredentialResponse {
                user,
                secret: secret.expose_secret().to_owned(),
                grant: Some(Grant::Unscoped(UnscopedGrant {})),
                expires_at_us: 0,
            },
        }
    }
}

fn read_permissions(given: &std::collections::HashMap<String, String>) -> Result<Permissions, Status> {
    Permissions::parse(given.iter().map(|(name, level)| format!("{name}={level}")))
        .map_err(|error| Status::invalid_argument(error.to_string()))
}

/// One entry of the audit log under construction.
struct Audit {
    action: &'static str,
    kind: &'static str,
    agent: String,
    run: Run,
    job: Job,
    repository: String,
    requested: Json,
    key: String,
}

impl Audit {
    fn new(known: &Known, agent: &AgentId, wish: &Wish<'_>) -> Self {
        let shown = |text: &str| text.chars().filter(|c| !c.is_control()).take(300).collect::<String>();
        Self {
            action: "git_credential.mint",
            kind: "none",
            agent: agent.as_str().to_owned(),
            run: known.run.clone(),
            job: known.job.clone(),
            repository: shown(&format!("{}/{}", wish.host, wish.repo)),
            requested: json!(wish.permissions),
            key: shown(wish.credential.unwrap_or_default()),
        }
    }

    fn chosen(&mut self, choice: &Choice<'_>) {
        self.kind = choice.with.kind();
        self.repository = choice.repository.to_string();
        self.key = match choice.with {
            With::Source => "source".to_owned(),
            With::Named(name, _) => name.to_owned(),
        };
    }

    fn granted(&self, made: &Made) -> Json {
        match made {
            Made::Minted(minted) => json!({
                "kind": self.kind, "requested": self.requested, "scoped": true,
                "granted": minted.permissions, "expires_at": minted.expires_at,
            }),
            // What was asked for is not written as if it had been given.
            Made::Static { .. } => json!({"kind": self.kind, "requested": self.requested, "scoped": false}),
        }
    }

    fn refused(&self, no: &No) -> Json {
        json!({"kind": self.kind, "requested": self.requested, "reason": no.reason})
    }

    fn entry(&self, metadata: Json, outcome: &str) -> NewSecretAudit {
        NewSecretAudit {
            org: self.run.org.clone(),
            actor_type: "agent".to_owned(),
            actor_id: self.agent.clone(),
            role: None,
            action: self.action.to_owned(),
            scope: Some(self.repository.clone()),
            key: (!self.key.is_empty()).then(|| self.key.clone()),
            context_name: None,
            run_id: Some(self.run.id),
            job_id: Some(self.job.id),
            outcome: outcome.to_owned(),
            metadata: Some(metadata),
        }
    }
}
