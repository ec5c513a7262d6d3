//! A GitHub App. <https://docs.github.com/en/rest>

mod api;
mod auth;
mod deliveries;
mod files;
mod grants;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use kici_engine::event::{ChangedFiles, Event, EventKind};
use kici_engine::ids::SourceId;
use kici_engine::time::{Clock, Ts};
use secrecy::SecretString;
use serde::Deserialize;

pub use api::Retry;
pub use auth::check_private_key;

use crate::cache::{Key, WorkflowCache};
use crate::forge::{BasicAuth, CloneSource, FailedDelivery, Forge, ForgeError, GitHost, Head, Minted};
use crate::github::api::Api;
use crate::github::auth::{Access, App};
use crate::local::{check_sha, is_branch_name, ref_name};
use crate::normalise::is_zero_sha;
use crate::source::{GithubConfig, Source, is_repo_name};
use crate::workflows::{Limits, WorkflowFiles};

/// What the forges of one program share: the HTTP client, the clock and the cache.
pub type Shared = (reqwest::Client, Arc<dyn Clock>, Arc<WorkflowCache>);

/// A GitHub App and the repositories that it is installed on.
#[derive(Debug)]
pub struct Github {
    source: SourceId,
    web: String,
    host: Option<GitHost>,
    api: Api,
    app: App,
    cache: Arc<WorkflowCache>,
    limits: Limits,
}

impl Github {
    /// The App of a source. Nothing is asked yet.
    ///
    /// # Errors
    /// [`ForgeError::Misconfigured`] when the private key is missing or not an RSA key in PEM.
    pub fn new(
        source: &Source,
        config: &GithubConfig,
        private_key: Option<&SecretString>,
        (http, clock, cache): Shared,
        limits: Limits,
    ) -> Result<Self, ForgeError> {
        Ok(Self {
            source: source.id,
            web: config.web_base(),
            host: config.git_host(),
            api: Api::new(http, &config.base_url, Arc::clone(&clock)),
            app: App::new(&source.name, config.app_id, private_key, clock)?,
            cache,
            limits,
        })
    }

    /// Reaches repositories of this installation of the App only. Tokens are made for a repository's bare name, which another
    /// owner's installation may have too: GitHub is asked first whose the repository is.
    #[must_use]
    pub fn with_installation(mut self, installation: u64) -> Self {
        self.app.fixed_installation = Some(installation);
        self
    }

    /// Another waiting time between tries; for tests.
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.api.retry = retry;
        self
    }

    /// What a push is compared with; `Err` is the reason why there is nothing.
    async fn base_of(&self, repo: &str, event: &Event) -> Result<String, String> {
        if let Some(base) = event.base_sha.as_deref().filter(|b| !is_zero_sha(b)) {
            return check_sha(base).map(|()| base.to_owned()).map_err(|e| e.to_string());
        }
        let default = match &event.default_branch {
            Some(branch) => branch.clone(),
            None => self.default_branch(repo).await.map_err(|e| e.to_string())?,
        };
        if event.target_branch.as_ref() == Some(&default) {
            return Err("the push does not say which commit was before".to_owned());
        }
        // A comparison starts at the merge base, which is what a new branch is compared with.
        Ok(default)
    }

    /// What a ref or an annotated tag points at. <https://docs.github.com/en/rest/git/refs>
    async fn git_object(&self, repo: &str, what: &str, path: &[&str]) -> Result<GitObject, ForgeError> {
        #[derive(Deserialize)]
        struct Pointer {
            object: GitObject,
        }
        let token = self.app.token(&self.api, repo, Access::Contents).await?;
        let url = self.api.url(&[&["repos", repo], path].concat())?;
        let found: Result<Pointer, _> = self.api.get(what, url, &token).await;
        Ok(self.app.watch(repo, Access::Contents, found)?.object)
    }

    async fn default_branch(&self, repo: &str) -> Result<String, ForgeError> {
        #[derive(Deserialize)]
        struct Repository {
            default_branch: String,
        }
        let token = self.app.token(&self.api, repo, Access::Contents).await?;
        let url = self.api.url(&["repos", repo])?;
        let found: Repository = self.api.get(&format!("repository `{repo}`"), url, &token).await?;
        Ok(found.default_branch)
    }
}

/// Tags that point at tags, until the commit comes.
const MAX_TAGS_OF_TAGS: usize = 5;

/// A git object by type and id.
#[derive(Debug, Deserialize)]
struct GitObject {
    sha: String,
    #[serde(rename = "type")]
    kind: String,
}

fn check_repo(repo: &str) -> Result<(), ForgeError> {
    if is_repo_name(repo) { Ok(()) } else { Err(ForgeError::not_found(format!("repository `{repo}`"))) }
}

#[async_trait]
impl Forge for Github {
    async fn workflows_at(&self, repo: &str, sha: &str) -> Result<Arc<WorkflowFiles>, ForgeError> {
        check_repo(repo)?;
        check_sha(sha)?;
        let key = Key { source: self.source, repo: repo.to_owned(), sha: sha.to_owned() };
        let fetch = || async {
            let token = self.app.token(&self.api, repo, Access::Contents).await?;
            let files = files::workflows_at(&self.api, &token, repo, sha, self.limits).await;
            self.app.watch(repo, Access::Contents, files)
        };
        self.cache.get(key, fetch).await
    }

    async fn file_at(&self, repo: &str, sha: &str, path: &str, max: usize) -> Result<Option<Vec<u8>>, ForgeError> {
        check_repo(repo)?;
        check_sha(sha)?;
        let token = self.app.token(&self.api, repo, Access::Contents).await?;
        let mut url = self.api.url(&["repos", repo, "contents", path])?;
        url.query_pairs_mut().append_pair("ref", sha);
        let what = format!("{path} at commit {sha} of `{repo}`");
        let found = self.api.raw(&what, url, &token, max).await;
        match self.app.watch(repo, Access::Contents, found) {
            Ok(bytes) if bytes.len() > max => Err(ForgeError::unavailable(what, format!("more than {max} bytes"))),
            Ok(bytes) => Ok(Some(bytes)),
            Err(ForgeError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn changed_files(&self, event: &Event) -> ChangedFiles {
        let (Some(repo), Some(head)) = (event.repo.as_deref(), event.sha.as_deref()) else {
            return ChangedFiles::Unavailable("the event has no repository or no commit".to_owned());
        };
        let fetched = async {
            check_repo(repo)?;
            check_sha(head)?;
            match (event.kind, event.pr_number) {
                (EventKind::Pr, Some(number)) => {
                    let token = self.app.token(&self.api, repo, Access::PullRequests).await?;
                    let files = files::of_pull_request(&self.api, &token, repo, number).await;
                    self.app.watch(repo, Access::PullRequests, files)
                }
                (EventKind::Push, _) => {
                    let base = match self.base_of(repo, event).await {
                        Ok(base) => base,
                        Err(reason) => return Ok(ChangedFiles::Unavailable(reason)),
                    };
                    let token = self.app.token(&self.api, repo, Access::Contents).await?;
                    let files = files::between(&self.api, &token, repo, &base, head).await;
                    self.app.watch(repo, Access::Contents, files)
                }
                (kind, _) => Ok(ChangedFiles::Unavailable(format!("a `{kind}` event changes no files"))),
            }
        };
        fetched.await.unwrap_or_else(|e: ForgeError| ChangedFiles::Unavailable(e.to_string()))
    }

    async fn clone_source(&self, repo: &str, sha: &str, git_ref: Option<&str>) -> Result<CloneSource, ForgeError> {
        check_repo(repo)?;
        check_sha(sha)?;
        let (token, expires_at) = self.app.job_token(&self.api, repo).await?;
        Ok(CloneSource {
            url: format!("{}/{repo}.git", self.web),
            git_ref: git_ref.map(str::to_owned),
            sha: sha.to_owned(),
            auth: Some(BasicAuth { username: grants::TOKEN_USER.to_owned(), password: token }),
            expires_at: Some(expires_at),
        })
    }

    fn git_host(&self) -> Option<GitHost> {
        self.host.clone()
    }

    async fn mint(&self, repo: &str, permissions: &BTreeMap<String, String>) -> Result<Minted, ForgeError> {
        check_repo(repo)?;
        self.app.grant(&self.api, repo, permissions).await
    }

    async fn revoke(&self, token: &SecretString) -> Result<(), ForgeError> {
        self.app.revoke(&self.api, token).await
    }

    async fn head(&self, repo: &str, branch: Option<&str>) -> Result<Head, ForgeError> {
        check_repo(repo)?;
        let branch = match branch {
            Some(branch) => branch.to_owned(),
            None => self.default_branch(repo).await?,
        };
        let what = format!("branch `{branch}` of `{repo}`");
        if !is_branch_name(&branch) {
            return Err(ForgeError::not_found(what));
        }
        let sha = self.git_object(repo, &what, &["git/ref/heads", &branch]).await?.sha;
        Ok(Head { branch: Some(branch), sha })
    }

    async fn commit_of(&self, repo: &str, git_ref: &str) -> Result<String, ForgeError> {
        check_repo(repo)?;
        let what = format!("`{git_ref}` of `{repo}`");
        let Some(name) = ref_name(git_ref) else { return Err(ForgeError::not_found(what)) };
        let mut object = self.git_object(repo, &what, &["git/ref", name]).await?;
        for _ in 0..MAX_TAGS_OF_TAGS {
            if object.kind == "commit" {
                return Ok(object.sha);
            }
            check_sha(&object.sha)?;
            object = self.git_object(repo, &what, &["git/tags", &object.sha]).await?;
        }
        Err(ForgeError::not_found(format!("a commit behind {what}")))
    }

    async fn failed_deliveries(&self, since: Ts) -> Result<Vec<FailedDelivery>, ForgeError> {
        deliveries::failed(&self.api, &self.app, since).await
    }

    async fn redeliver(&self, id: &str) -> Result<(), ForgeError> {
        deliveries::again(&self.api, &self.app, id).await
    }
}
