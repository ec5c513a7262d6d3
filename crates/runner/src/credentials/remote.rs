//! Asks the orchestrator for credentials on behalf of one job.

use std::collections::BTreeMap;
use std::time::Duration;

use kici_engine::time::Ts;
use kici_protocol::SESSION_ID_HEADER;
use kici_protocol::agent::git_credential_response::Grant as WireGrant;
use kici_protocol::agent::{GitCredentialRequest, RevokeGitTokenRequest};
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::watch;
use tonic::{Code, Request};

use crate::key::JobKey;
use crate::session::{Session, authorize};

/// How long a lost session is waited for: git's helper gives up soon after.
const SESSION_LIMIT: Duration = Duration::from_secs(8);
/// One call: the orchestrator asks the forge up to twice.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// What a credential is wanted for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Host with its port unless that is the usual one.
    pub host: String,
    /// `owner/name`.
    pub repo: String,
    /// A named credential; none is the one that applies by itself.
    pub credential: Option<String>,
}

/// A credential that the orchestrator gave.
#[derive(Clone, Debug)]
pub struct RemoteCredential {
    /// User name.
    pub user: String,
    /// Password or token.
    pub secret: SecretString,
    /// How far it goes.
    pub grant: Grant,
    /// When it ends.
    pub expires_at: Option<Ts>,
}

/// How far a credential goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// By name of the permission.
    Scoped(BTreeMap<String, String>),
    /// Nobody knows.
    Unscoped,
}

/// Why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteError {
    /// The job may not have it.
    Refused,
    /// It may work later.
    Unavailable,
}

/// The orchestrator, for one job.
pub struct Remote {
    job: JobKey,
    token: Option<SecretString>,
    sessions: watch::Receiver<Option<Session>>,
}

impl Remote {
    /// The orchestrator of these sessions.
    pub fn new(job: JobKey, token: Option<SecretString>, sessions: watch::Receiver<Option<Session>>) -> Self {
        Self { job, token, sessions }
    }

    /// A fresh credential.
    ///
    /// # Errors
    /// [`RemoteError`]; the reason stays with the orchestrator.
    pub async fn mint(
        &self,
        wanted: &Wanted,
        permissions: BTreeMap<String, String>,
    ) -> Result<RemoteCredential, RemoteError> {
        let body = GitCredentialRequest {
            job: Some(self.job.to_ref()),
            host: wanted.host.clone(),
            repo: wanted.repo.clone(),
            permissions: permissions.into_iter().collect(),
            credential: wanted.credential.clone().unwrap_or_default(),
        };
        let (mut session, request) = self.request(body).await?;
        let answer = match tokio::time::timeout(CALL_LIMIT, session.client.git_credential(request)).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return Err(judge(status.code())),
            Err(_) => return Err(RemoteError::Unavailable),
        };
        let grant = match answer.grant {
            Some(WireGrant::Scoped(scoped)) => Grant::Scoped(scoped.permissions.into_iter().collect()),
            Some(WireGrant::Unscoped(_)) => Grant::Unscoped,
            // A newer orchestrator's: what it allows cannot be told.
            None => return Err(RemoteError::Refused),
        };
        Ok(RemoteCredential {
            user: answer.user,
            secret: answer.secret.into(),
            grant,
            expires_at: (answer.expires_at_us > 0).then(|| Ts::from_micros(answer.expires_at_us)),
        })
    }

    /// Ends a token at the forge; best effort.
    pub async fn revoke(&self, wanted: &Wanted, secret: &SecretString) {
        let body = RevokeGitTokenRequest {
            job: Some(self.job.to_ref()),
            host: wanted.host.clone(),
            repo: wanted.repo.clone(),
            credential: wanted.credential.clone().unwrap_or_default(),
            secret: secret.expose_secret().to_owned(),
        };
        let Ok((mut session, request)) = self.request(body).await else { return };
        if let Err(status) = session.client.revoke_git_token(request).await {
            tracing::debug!(job = %self.job, code = ?status.code(), "a git token was not ended; it expires by itself");
        }
    }

    async fn request<T>(&self, body: T) -> Result<(Session, Request<T>), RemoteError> {
        let mut sessions = self.sessions.clone();
        let session = match tokio::time::timeout(SESSION_LIMIT, sessions.wait_for(Option::is_some)).await {
            Ok(Ok(session)) => session.clone().ok_or(RemoteError::Unavailable)?,
            _ => return Err(RemoteError::Unavailable),
        };
        let mut request = Request::new(body);
        authorize(&mut request, self.token.as_ref());
        let id = session.id.parse().map_err(|_| RemoteError::Unavailable)?;
        request.metadata_mut().insert(SESSION_ID_HEADER, id);
        Ok((session, request))
    }
}

fn judge(code: Code) -> RemoteError {
    match code {
        Code::PermissionDenied | Code::InvalidArgument | Code::Unimplemented => RemoteError::Refused,
        _ => RemoteError::Unavailable,
    }
}
