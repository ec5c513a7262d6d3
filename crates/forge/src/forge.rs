//! The port to a forge.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use kici_engine::event::{ChangedFiles, Event};
use kici_engine::time::Ts;
use secrecy::SecretString;

use crate::workflows::WorkflowFiles;

/// What a source's repository can be asked. All answers are bounded; none executes repository code.
#[async_trait]
pub trait Forge: Send + Sync {
    /// The workflow files at an exact commit. `repo` is `owner/name` as in the event.
    ///
    /// # Errors
    /// [`ForgeError`]; a commit without `.kici` is an empty answer, not an error.
    async fn workflows_at(&self, repo: &str, sha: &str) -> Result<Arc<WorkflowFiles>, ForgeError>;

    /// A file at an exact commit, up to `max` bytes; none when there is no such file.
    ///
    /// # Errors
    /// [`ForgeError`], also for a larger file.
    async fn file_at(&self, repo: &str, sha: &str, path: &str, max: usize) -> Result<Option<Vec<u8>>, ForgeError>;

    /// The files that `event` changed (R14). A failure is [`ChangedFiles::Unavailable`] with the reason.
    async fn changed_files(&self, event: &Event) -> ChangedFiles;

    /// Where and how an agent fetches the commit. Credentials are read-only and short-lived.
    ///
    /// # Errors
    /// [`ForgeError`] when no credential can be had.
    async fn clone_source(&self, repo: &str, sha: &str, git_ref: Option<&str>) -> Result<CloneSource, ForgeError>;

    /// Where git reaches the repositories of this source with credentials from [`Forge::mint`]; none where it needs none.
    fn git_host(&self) -> Option<GitHost> {
        None
    }

    /// A fresh credential for one repository. `permissions` are names of the forge with `read` or `write`; what comes back says
    /// what the forge granted, which may be less.
    ///
    /// # Errors
    /// [`ForgeError`]; `Unsupported` where a source has no credentials.
    async fn mint(&self, repo: &str, permissions: &BTreeMap<String, String>) -> Result<Minted, ForgeError> {
        let _ = permissions;
        Err(ForgeError::Unsupported { what: format!("a credential for `{repo}`") })
    }

    /// Ends a token of [`Forge::mint`]. A token that is over already is no error.
    ///
    /// # Errors
    /// [`ForgeError`].
    async fn revoke(&self, token: &SecretString) -> Result<(), ForgeError> {
        let _ = token;
        Err(ForgeError::Unsupported { what: "ending a token".to_owned() })
    }

    /// The head of `branch`, or of the default branch when `None`.
    ///
    /// # Errors
    /// [`ForgeError::NotFound`] when there is no such branch.
    async fn head(&self, repo: &str, branch: Option<&str>) -> Result<Head, ForgeError>;

    /// The commit of a full ref, `refs/heads/...` or `refs/tags/...`; that of an annotated tag is the commit behind it.
    ///
    /// # Errors
    /// [`ForgeError::NotFound`] when there is no such ref.
    async fn commit_of(&self, repo: &str, git_ref: &str) -> Result<String, ForgeError>;

    /// Deliveries since `since` that the forge could not bring to us and has not brought since (R8), oldest first.
    ///
    /// # Errors
    /// [`ForgeError`].
    async fn failed_deliveries(&self, since: Ts) -> Result<Vec<FailedDelivery>, ForgeError>;

    /// Asks the forge to send a delivery again.
    ///
    /// # Errors
    /// [`ForgeError`].
    async fn redeliver(&self, id: &str) -> Result<(), ForgeError>;
}

/// How an agent gets a commit.
#[derive(Clone, Debug)]
pub struct CloneSource {
    /// URL without credentials; `file://` for a repository on this machine.
    pub url: String,
    /// The ref to ask for when the server refuses bare commit ids.
    pub git_ref: Option<String>,
    /// The commit.
    pub sha: String,
    /// User and password, if the repository needs them.
    pub auth: Option<BasicAuth>,
    /// When the password ends.
    pub expires_at: Option<Ts>,
}

/// User name and password of HTTP basic authentication. The password is not shown by `Debug`.
#[derive(Clone, Debug)]
pub struct BasicAuth {
    /// User name.
    pub username: String,
    /// Password or token.
    pub password: SecretString,
}

/// Where git reaches repositories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GitHost {
    /// `https` or `http`.
    pub protocol: String,
    /// In lower case, with its port unless that is the usual one.
    pub host: String,
    /// Owners and names that differ in case are the same.
    pub ignore_case: bool,
}

impl GitHost {
    /// The host of an `https` or `http` address.
    pub(crate) fn of_url(url: &str, ignore_case: bool) -> Option<Self> {
        let url = url::Url::parse(url).ok()?;
        // `port` leaves the usual one out.
        let host = match (url.host_str()?, url.port()) {
            (host, Some(port)) => format!("{host}:{port}"),
            (host, None) => host.to_owned(),
        };
        Some(Self { protocol: url.scheme().to_owned(), host, ignore_case })
    }
}

/// A credential that was made for one use.
#[derive(Clone, Debug)]
pub struct Minted {
    /// User and secret.
    pub auth: BasicAuth,
    /// What the forge granted, by name.
    pub permissions: BTreeMap<String, String>,
    /// When it ends.
    pub expires_at: Ts,
}

/// Where a branch stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Name of the branch; `None` for a detached HEAD.
    pub branch: Option<String>,
    /// Its commit.
    pub sha: String,
}

/// A delivery that did not reach us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedDelivery {
    /// The forge's number of the attempt, for [`Forge::redeliver`].
    pub id: String,
    /// The delivery id that the event carries (`x-github-delivery`).
    pub guid: String,
    /// Event name.
    pub event: String,
    /// When it was attempted last.
    pub at: Ts,
    /// HTTP status of the attempt; 0 when there was no answer.
    pub status: u16,
}

/// Why a forge did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForgeError {
    /// The source cannot work as it is configured.
    #[error("source `{source_name}` is not usable: {problem}")]
    Misconfigured {
        /// Name of the source.
        source_name: String,
        /// What is missing and how to set it.
        problem: String,
    },
    /// There is no such repository, commit or branch, or the source may not see it.
    #[error("{what} not found{}", remedy(.hint))]
    NotFound {
        /// What was asked for.
        what: String,
        /// Remedy, or empty.
        hint: String,
    },
    /// The forge refused the credential.
    #[error("{what} refused ({status}): {message}")]
    Refused {
        /// What was asked for.
        what: String,
        /// HTTP status.
        status: u16,
        /// The forge's words.
        message: String,
    },
    /// Too many requests, and waiting did not help.
    #[error("rate limit of the forge reached, free again in {retry_after_s} s")]
    RateLimited {
        /// Seconds until the next try makes sense.
        retry_after_s: u64,
    },
    /// No usable answer: network, time-out, 5xx, a process that did not start.
    #[error("{what} failed: {problem}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// What went wrong.
        problem: String,
    },
    /// This kind of source cannot do that.
    #[error("{what} is not something that this kind of source has")]
    Unsupported {
        /// What was asked for.
        what: String,
    },
    /// The source has no repository to ask.
    #[error("source `{0}` has no repository")]
    NoRepository(String),
}

fn remedy(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("; {text}") }
}

impl ForgeError {
    /// Whether asking again later can help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::RateLimited { .. } | Self::Unavailable { .. })
    }

    pub(crate) fn unavailable(what: impl Into<String>, problem: impl ToString) -> Self {
        Self::Unavailable { what: what.into(), problem: problem.to_string() }
    }

    pub(crate) fn not_found(what: impl Into<String>) -> Self {
        Self::NotFound { what: what.into(), hint: String::new() }
    }
}
