//! Who we are to GitHub: the App by a signed statement, an installation by a token for one repository.
//! <https://docs.github.com/en/apps/creating-github-apps/authenticating-with-a-github-app>

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use kici_engine::time::{Clock, Ts};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::api::Api;
use crate::forge::ForgeError;

/// GitHub takes statements of up to 10 minutes; its clock may be behind ours.
const JWT_LIFE: Duration = Duration::from_secs(9 * 60);
const JWT_SKEW: Duration = Duration::from_secs(60);
/// A token that we use ourselves is renewed this long before its end.
const OWN_MARGIN: Duration = Duration::from_secs(10 * 60);
/// Jobs that start together may share a token; after this a new one is made.
const JOB_MEMO: Duration = Duration::from_secs(60);
/// Most tokens that are remembered.
const MAX_TOKENS: usize = 1000;

/// What a token may do. Always for one repository, always read-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Access {
    Contents,
    PullRequests,
    /// Contents, handed to a job.
    Job,
}

impl Access {
    fn permissions(self) -> Json {
        match self {
            Self::Contents | Self::Job => json!({"contents": "read", "metadata": "read"}),
            Self::PullRequests => json!({"contents": "read", "metadata": "read", "pull_requests": "read"}),
        }
    }
}

#[derive(Clone)]
struct Token {
    secret: SecretString,
    minted_at: Ts,
    expires_at: Ts,
}

type Slot = Arc<tokio::sync::Mutex<Option<Token>>>;

pub(super) struct App {
    name: String,
    id: u64,
    key: EncodingKey,
    clock: Arc<dyn Clock>,
    statement: Mutex<Option<(SecretString, Ts)>>,
    tokens: Mutex<HashMap<(String, Access), Slot>>,
    installations: Mutex<HashMap<String, u64>>,
    /// The only one whose repositories are reached.
    pub(super) fixed_installation: Option<u64>,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("id", &self.id).finish_non_exhaustive()
    }
}

fn signing_key(pem: &SecretString) -> Result<EncodingKey, &'static str> {
    EncodingKey::from_rsa_pem(pem.expose_secret().as_bytes())
        .map_err(|_| "is not an RSA key in PEM; use the file that GitHub gave you")
}

/// Whether an App can sign with this key.
///
/// # Errors
/// What is wrong with it, with the remedy. Never the text itself.
pub fn check_private_key(pem: &SecretString) -> Result<(), &'static str> {
    signing_key(pem).map(drop)
}

impl App {
    pub fn new(
        name: &str,
        id: u64,
        private_key: Option<&SecretString>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, ForgeError> {
        let unusable =
            |problem: &str| ForgeError::Misconfigured { source_name: name.to_owned(), problem: problem.to_owned() };
        let pem = private_key.ok_or_else(|| {
            unusable("it has no private key; make one on the App's settings page and set `private_key`")
        })?;
        let key = signing_key(pem).map_err(|problem| unusable(&format!("`private_key` {problem}")))?;
        Ok(Self {
            name: name.to_owned(),
            id,
            key,
            clock,
            statement: Mutex::default(),
            tokens: Mutex::default(),
            installations: Mutex::default(),
            fixed_installation: None,
        })
    }

    /// The App's own statement (RFC 7519, RS256), kept for half its life.
    pub fn statement(&self) -> Result<SecretString, ForgeError> {
        #[derive(Serialize)]
        struct Claims {
            iat: i64,
            exp: i64,
            iss: String,
        }
        let now = self.clock.now();
        let mut kept = self.statement.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((jwt, at)) = kept.as_ref()
            && *at <= now
            && now.since(*at) < JWT_LIFE / 2
        {
            return Ok(jwt.clone());
        }
        let seconds = |at: Ts| at.as_micros() / 1_000_000;
        let claims =
            Claims { iat: seconds(now.minus(JWT_SKEW)), exp: seconds(now.plus(JWT_LIFE)), iss: self.id.to_string() };
        let jwt = jsonwebtoken::encode(&Header::new(Algorithm::RS256), &claims, &self.key).map_err(|e| {
            ForgeError::Misconfigured {
                source_name: self.name.clone(),
                problem: format!("`private_key` cannot sign: {e}"),
            }
        })?;
        let jwt = SecretString::from(jwt);
        *kept = Some((jwt.clone(), now));
        Ok(jwt)
    }

    /// A token that we use ourselves.
    pub async fn token(&self, api: &Api, repo: &str, access: Access) -> Result<SecretString, ForgeError> {
        let good = |t: &Token, now: Ts| t.expires_at > now.plus(OWN_MARGIN);
        self.get(api, repo, access, good).await.map(|t| t.secret)
    }

    /// A token for a job, and when it ends.
    pub async fn job_token(&self, api: &Api, repo: &str) -> Result<(SecretString, Ts), ForgeError> {
        let good = |t: &Token, now: Ts| now.since(t.minted_at) < JOB_MEMO && t.expires_at > now.plus(OWN_MARGIN);
        self.get(api, repo, Access::Job, good).await.map(|t| (t.secret, t.expires_at))
    }

    /// Forgets the token when the forge does not take it any more, and passes the result on.
    pub fn watch<T>(&self, repo: &str, access: Access, result: Result<T, ForgeError>) -> Result<T, ForgeError> {
        if matches!(result, Err(ForgeError::Refused { status: 401, .. })) {
            let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            tokens.remove(&(repo.to_owned(), access));
        }
        result
    }

    async fn get(
        &self,
        api: &Api,
        repo: &str,
        access: Access,
        good: impl Fn(&Token, Ts) -> bool + Send,
    ) -> Result<Token, ForgeError> {
        let slot = self.slot(repo, access);
        // Held while minting: callers for one repository wait for one token.
        let mut token = slot.lock().await;
        if let Some(token) = token.as_ref().filter(|t| good(t, self.clock.now())) {
            return Ok(token.clone());
        }
        let fresh = self.mint(api, repo, access).await?;
        *token = Some(fresh.clone());
        Ok(fresh)
    }

    fn slot(&self, repo: &str, access: Access) -> Slot {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() >= MAX_TOKENS {
            // Those in use are held by their users.
            tokens.retain(|_, slot| Arc::strong_count(slot) > 1);
        }
        Arc::clone(tokens.entry((repo.to_owned(), access)).or_default())
    }

    async fn mint(&self, api: &Api, repo: &str, access: Access) -> Result<Token, ForgeError> {
        #[derive(Deserialize)]
        struct Minted {
            token: String,
            expires_at: Ts,
        }
        let known = self.known_installation(repo);
        let jwt = self.statement()?;
        let (_, name) = repo.split_once('/').unwrap_or_default();
        let body = json!({"repositories": [name], "permissions": access.permissions()});
        let minted_at = self.clock.now();
        let what = format!("access to `{repo}`");
        let post = async |installation: u64| {
            let id = installation.to_string();
            let url = api.url(&["app/installations", &id, "access_tokens"])?;
            api.post::<Minted>(&what, url, &jwt, &body).await
        };
        let minted = match known {
            Some(id) => match post(id).await {
                // The App was removed and installed again under another number.
                Err(ForgeError::NotFound { .. }) => post(self.installation(api, repo, &jwt).await?).await?,
                other => other?,
            },
            None => post(self.installation(api, repo, &jwt).await?).await?,
        };
        Ok(Token { secret: minted.token.into(), minted_at, expires_at: minted.expires_at })
    }

    pub(super) fn known_installation(&self, repo: &str) -> Option<u64> {
        self.installations.lock().unwrap_or_else(PoisonError::into_inner).get(repo).copied()
    }

    pub(super) async fn installation(&self, api: &Api, repo: &str, jwt: &SecretString) -> Result<u64, ForgeError> {
        #[derive(Deserialize)]
        struct Installation {
            id: u64,
        }
        let what = format!("installation of the App on `{repo}`");
        let found: Result<Installation, _> = api.get(&what, api.url(&["repos", repo, "installation"])?, jwt).await;
        let id = match found {
            Ok(found) => found.id,
            Err(ForgeError::NotFound { what, .. }) => {
                let hint = "install the App on the repository, or add the repository to its installation";
                return Err(ForgeError::NotFound { what, hint: hint.to_owned() });
            }
            Err(error) => return Err(error),
        };
        if self.fixed_installation.is_some_and(|fixed| fixed != id) {
            let hint = "the repository is not one of the installation that the credential names".to_owned();
            return Err(ForgeError::NotFound { what, hint });
        }
        let mut known = self.installations.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_TOKENS {
            known.clear();
        }
        known.insert(repo.to_owned(), id);
        Ok(id)
    }
}
