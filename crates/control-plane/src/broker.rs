//! Git credentials for jobs: decided by `kici_credential_helper::broker` from stored rows, made by the forge, and written into
//! the audit log before anybody gets them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kici_credential_helper::broker::{Choice, JobFacts, REFUSED, SourceHost, Trust, Wish, With, authorize};
use kici_credential_helper::permission::Permissions;
use kici_credential_helper::repository::{Case, Repository, canonical_host};
use kici_dispatch::Speaker;
use kici_engine::ids::{AgentId, JobId, RunId};
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
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;
use tonic::Status;

/// One try at the forge.
const MINT_LIMIT: Duration = Duration::from_secs(10);
/// Tries.
const MINT_TRIES: usize = 2;
/// What an agent is told that should ask again.
const NOT_NOW: &str = "no credential can be had now; try again";
/// How long after its end a job may still get a credential: frames that crossed.
const GRACE: Duration = Duration::from_secs(30);

/// Makes and ends git credentials.
pub(crate) struct GitBroker {
    pub(crate) store: Store,
    pub(crate) sources: SourceBook,
    /// Follows no redirects: a forge that a workflow names must not send it elsewhere.
    pub(crate) http: reqwest::Client,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) tasks: TaskTracker,
}

/// What is known of the job that asks.
struct Known {
    run: Run,
    declared: GitCredentials,
    source: kici_events::OpenSource,
    forge: Arc<dyn Forge>,
    host: Option<SourceHost>,
}

/// Why there is no credential: the word for the agent, and the reason for the audit log.
#[derive(Clone)]
struct No {
    status: Status,
    outcome: &'static str,
    reason: String,
}

impl No {
    /// What the agent is told; the reason stays here.
    fn told(self, job: JobId) -> Status {
        tracing::info!(%job, reason = self.reason, "a job gets no git credential");
        self.status
    }
}

fn denied(reason: impl ToString) -> No {
    No { status: Status::permission_denied(REFUSED), outcome: "denied", reason: reason.to_string() }
}

fn later(reason: impl ToString) -> No {
    No { status: Status::unavailable(NOT_NOW), outcome: "error", reason: reason.to_string() }
}

impl GitBroker {
    /// A credential for a job that the agent holds. It is made to its end even if the caller leaves, so that no token is
    /// without its row in the audit log; what nobody waits for any more is ended again.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` in one wording, or `UNAVAILABLE`.
    pub(crate) async fn credential(
        self: &Arc<Self>,
        speaker: Speaker,
        request: GitCredentialRequest,
    ) -> Result<GitCredentialResponse, Status> {
        let (answer, answered) = oneshot::channel();
        let this = Arc::clone(self);
        self.tasks.spawn(async move {
            let made = this.decide(&speaker, &request).await;
            if let Err(Ok(unwanted)) = answer.send(made) {
                this.take_back(&speaker, request, unwanted).await;
            }
        });
        answered.await.unwrap_or_else(|_| Err(Status::unavailable(NOT_NOW)))
    }

    /// Notes that an agent asked for a credential in the name of a job that it does not hold.
    pub(crate) async fn turned_away(&self, speaker: &Speaker, request: &GitCredentialRequest) {
        let Ok((run, row)) = self.rows(speaker.job).await else { return };
        let audit = Audit::new("git_credential.mint", &run, &row, &speaker.agent, Asked::credential(request));
        let no = denied("the agent does not hold the job");
        if let Err(error) = self.store.secret_audit_insert(audit.entry(audit.refused(&no), no.outcome)).await {
            tracing::warn!(%error, "a refusal is not in the audit log");
        }
    }

    async fn decide(&self, speaker: &Speaker, request: &GitCredentialRequest) -> Result<GitCredentialResponse, Status> {
        let job = speaker.job.job_id;
        let (run, row) = self.rows(speaker.job).await.map_err(|no| no.told(job))?;
        let mut audit = Audit::new("git_credential.mint", &run, &row, &speaker.agent, Asked::credential(request));
        let wanted = read_permissions(&request.permissions);
        let empty = Permissions::default();
        let wish = Asked::credential(request).wish(wanted.as_ref().unwrap_or(&empty));
        audit.requested = json!(wish.permissions);
        let held = wanted.as_ref().map_err(No::clone).and_then(|_| self.held(&row, speaker));
        let known = match held {
            Ok(()) => self.known(run, row).await,
            Err(no) => Err(no),
        };
        let made = match &known {
            Err(no) => Err(no.clone()),
            Ok(known) if !known.source.enabled => Err(denied("the source is disabled or removed")),
            Ok(known) => match authorize(known.facts(), &wish) {
                Ok(choice) => {
                    audit.chosen(&choice);
                    self.make(known, &choice, wish.permissions).await
                }
                Err(refusal) => Err(denied(refusal)),
            },
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
            if let (Ok(known), Ok(Some(secret))) = (&known, made.as_ref().map(Made::revocable)) {
                self.end(known, &wish, secret).await;
            }
            return Err(Status::unavailable(NOT_NOW));
        }
        made.map(Made::into_answer).map_err(|no| no.told(job))
    }

    async fn take_back(&self, speaker: &Speaker, request: GitCredentialRequest, unwanted: GitCredentialResponse) {
        if !matches!(unwanted.grant, Some(Grant::Scoped(_))) {
            return;
        }
        let GitCredentialRequest { job, host, repo, credential, .. } = request;
        let revoke = RevokeGitTokenRequest { job, host, repo, credential, secret: unwanted.secret };
        if self.revoke(speaker, &revoke).await.is_err() {
            tracing::warn!(job = %speaker.job.job_id, "a git token that nobody waited for could not be ended");
        }
    }

    /// Ends a token that this broker made for a job, also when the job is over or with another agent by now, and when its source
    /// is disabled: who has a token may end it. Best effort: a token that cannot be ended expires by itself.
    ///
    /// # Errors
    /// `UNAVAILABLE`.
    pub(crate) async fn revoke(&self, speaker: &Speaker, request: &RevokeGitTokenRequest) -> Result<(), Status> {
        let job = speaker.job.job_id;
        let (run, row) = self.rows(speaker.job).await.map_err(|no| no.told(job))?;
        let asked = Asked { host: &request.host, repo: &request.repo, credential: &request.credential };
        let permissions = Permissions::fetch();
        let audit = Audit::new("git_credential.revoke", &run, &row, &speaker.agent, asked);
        let known = self.known(run, row).await.map_err(|no| no.told(job))?;
        let ended = self.end(&known, &asked.wish(&permissions), &SecretString::from(request.secret.clone())).await;
        let outcome = if ended { "allowed" } else { "error" };
        if let Err(error) = self.store.secret_audit_insert(audit.entry(json!({}), outcome)).await {
            tracing::warn!(%error, "the end of a git token is not in the audit log");
        }
        if ended { Ok(()) } else { Err(Status::unavailable("the token cannot be ended now")) }
    }

    /// The choice only tells whose token it is; whether a new one would be given does not matter.
    async fn end(&self, known: &Known, wish: &Wish<'_>, secret: &SecretString) -> bool {
        let forge = match authorize(known.facts(), wish) {
            Ok(choice) => self.forge_of(known, &choice),
            Err(_) if known.is_source(wish.host) => Ok(Some(known.forge.clone())),
            Err(_) => return false,
        };
        match forge {
            Ok(Some(forge)) => matches!(tokio::time::timeout(MINT_LIMIT, forge.revoke(secret)).await, Ok(Ok(()))),
            // A static credential outlives its uses.
            Ok(None) => true,
            Err(_) => false,
        }
    }

    async fn rows(&self, job: JobRef) -> Result<(Run, Job), No> {
        let row = self.store.job_get(job.job_id).await.map_err(later)?;
        let row = row.filter(|row| row.run_id == job.run_id).ok_or_else(|| denied("there is no such job"))?;
        let run = self.store.run_get(row.run_id).await.map_err(later)?.ok_or_else(|| denied("there is no such run"))?;
        Ok((run, row))
    }

    /// The row decides, not the session: another instance may have given the job away meanwhile.
    fn held(&self, row: &Job, speaker: &Speaker) -> Result<(), No> {
        if row.dispatch_epoch != speaker.job.epoch || row.agent_id.as_ref() != Some(&speaker.agent) {
            return Err(denied("the job is not with this agent any more"));
        }
        if row.finished_at.is_some_and(|at| at.plus(GRACE) < self.clock.now()) {
            return Err(denied("the job is over"));
        }
        Ok(())
    }

    /// Everything from rows, nothing from the request.
    async fn known(&self, run: Run, job: Job) -> Result<Known, No> {
        let declared = self.store.job_git_credentials(job.id).await.map_err(later)?.unwrap_or_default();
        let stored = self.store.source_by_id(run.source_id).await.map_err(later)?;
        let stored = stored.ok_or_else(|| denied("the source of the run is gone"))?;
        let source = self.sources.open(&stored).map_err(denied)?;
        let forge = self.sources.forge(&source).map_err(denied)?;
        let host = forge.git_host().map(|host| SourceHost {
            protocol: host.protocol,
            host: host.host,
            case: if host.ignore_case { Case::Ignored } else { Case::Significant },
        });
        Ok(Known { run, declared, source, forge, host })
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
        config.base_url = api_of(
            &known.source.source.config,
            known.host.as_ref().map(|source| &*source.host),
            credential.host.as_deref(),
        )
        .ok_or_else(|| denied("a GitHub App of a workflow is used at github.com and at the source's own host only"))?;
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

/// The REST address of the GitHub at `host`, which is the source's host if none: github.com or the source's own, since the
/// orchestrator would otherwise call whatever host of its network a workflow names.
fn api_of(source: &SourceConfig, of_source: Option<&str>, host: Option<&str>) -> Option<String> {
    let host = host.or(of_source)?;
    match source {
        SourceConfig::Github(github) if of_source == Some(host) => Some(github.base_url.clone()),
        _ => (host == "github.com").then(|| GithubConfig::new(1).base_url),
    }
}

impl Known {
    fn is_source(&self, host: &str) -> bool {
        let same = |source: &SourceHost| canonical_host(&source.protocol, host).as_ref() == Some(&source.host);
        self.host.as_ref().is_some_and(same)
    }

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

fn read_permissions(given: &HashMap<String, String>) -> Result<Permissions, No> {
    Permissions::parse(given.iter().map(|(name, level)| format!("{name}={level}"))).map_err(|error| No {
        status: Status::invalid_argument(error.to_string()),
        outcome: "denied",
        reason: error.to_string(),
    })
}

/// What a call is about, as written.
#[derive(Clone, Copy)]
struct Asked<'a> {
    host: &'a str,
    repo: &'a str,
    credential: &'a str,
}

impl<'a> Asked<'a> {
    fn credential(request: &'a GitCredentialRequest) -> Self {
        Self { host: &request.host, repo: &request.repo, credential: &request.credential }
    }

    fn wish(self, permissions: &'a Permissions) -> Wish<'a> {
        let credential = (!self.credential.is_empty()).then_some(self.credential);
        Wish { host: self.host, repo: self.repo, permissions, credential }
    }
}

/// One entry of the audit log under construction.
struct Audit {
    action: &'static str,
    kind: &'static str,
    agent: String,
    org: String,
    run: RunId,
    job: JobId,
    repository: String,
    requested: Json,
    key: String,
}

impl Audit {
    fn new(action: &'static str, run: &Run, job: &Job, agent: &AgentId, asked: Asked<'_>) -> Self {
        Self {
            action,
            kind: "none",
            agent: agent.as_str().to_owned(),
            org: run.org.clone(),
            run: run.id,
            job: job.id,
            repository: shown(&format!("{}/{}", asked.host, asked.repo)),
            requested: Json::Null,
            key: shown(asked.credential),
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
            org: self.org.clone(),
            actor_type: "agent".to_owned(),
            actor_id: self.agent.clone(),
            role: None,
            action: self.action.to_owned(),
            scope: Some(self.repository.clone()),
            key: (!self.key.is_empty()).then(|| self.key.clone()),
            context_name: None,
            run_id: Some(self.run),
            job_id: Some(self.job),
            outcome: outcome.to_owned(),
            metadata: Some(metadata),
        }
    }
}

/// Cut, and without what could act on a terminal.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apps_of_workflows_are_asked_for_at_github_and_at_the_source_and_nowhere_else() {
        let github = |base: &str| {
            let mut config = GithubConfig::new(1);
            config.base_url = base.to_owned();
            SourceConfig::Github(config)
        };
        let own = github("https://ghe.example/api/v3");
        let public = GithubConfig::new(1).base_url;
        let table = [
            (&own, Some("ghe.example"), None, Some("https://ghe.example/api/v3")),
            (&own, Some("ghe.example"), Some("ghe.example"), Some("https://ghe.example/api/v3")),
            (&own, Some("ghe.example"), Some("github.com"), Some(public.as_str())),
            (&own, Some("ghe.example"), Some("127.0.0.1:8080"), None),
            (&own, Some("ghe.example"), Some("ghe.example:8443"), None),
            (&own, Some("ghe.example"), Some("metadata.internal"), None),
            (&own, None, None, None),
        ];
        for (source, of_source, host, expected) in table {
            assert_eq!(api_of(source, of_source, host).as_deref(), expected, "{host:?}");
        }
    }
}
