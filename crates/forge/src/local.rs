//! A repository on this machine: work tree, linked work tree, bare, shallow, detached HEAD.
//!
//! Files are read through one long-lived `git cat-file` per repository, so that a warm read starts no process and
//! touches only the objects of `.kici`. Other questions (HEAD, changed files) are rare and start git once each.

mod git;
mod tree;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kici_engine::event::{ChangedFiles, Event, EventKind};
use kici_engine::ids::SourceId;
use kici_engine::time::Ts;

use crate::cache::{Key, WorkflowCache};
use crate::forge::{CloneSource, FailedDelivery, Forge, ForgeError, Head};
use crate::local::git::Git;
use crate::normalise::is_zero_sha;
use crate::source::{LocalConfig, Source};
use crate::workflows::{Limits, WorkflowFiles};

/// Most changed files that are listed.
const MAX_CHANGED: usize = 3000;

/// A local repository.
#[derive(Debug)]
pub struct Local {
    source: SourceId,
    name: String,
    repo: String,
    path: PathBuf,
    default_branch: Option<String>,
    git: Git,
    cache: Arc<WorkflowCache>,
    limits: Limits,
}

impl Local {
    /// The repository of a local source. Nothing is started or read yet.
    pub fn new(source: &Source, config: &LocalConfig, cache: Arc<WorkflowCache>, limits: Limits) -> Self {
        Self {
            source: source.id,
            name: source.name.clone(),
            repo: source.local_repo().unwrap_or_default(),
            path: config.path.clone(),
            default_branch: config.default_branch.clone(),
            git: Git::new(config.path.clone(), Duration::from_secs(20)),
            cache,
            limits,
        }
    }

    fn own(&self, repo: &str) -> Result<(), ForgeError> {
        if repo == self.repo {
            return Ok(());
        }
        let hint = format!("source `{}` has only `{}`", self.name, self.repo);
        Err(ForgeError::NotFound { what: format!("repository `{repo}`"), hint })
    }

    /// The branch that registrations follow: as configured, else the remote's default branch where it exists here,
    /// else the branch of HEAD. `None` for a detached HEAD without any of these.
    ///
    /// # Errors
    /// [`ForgeError`] when git cannot answer.
    pub async fn default_branch(&self) -> Result<Option<String>, ForgeError> {
        if self.default_branch.is_some() {
            return Ok(self.default_branch.clone());
        }
        let remote = self.git.symbolic_ref("refs/remotes/origin/HEAD").await?;
        if let Some(branch) = remote.as_deref().and_then(|r| r.strip_prefix("refs/remotes/origin/"))
            && self.git.commit_of(&format!("refs/heads/{branch}")).await?.is_some()
        {
            return Ok(Some(branch.to_owned()));
        }
        let head = self.git.symbolic_ref("HEAD").await?;
        Ok(head.and_then(|r| r.strip_prefix("refs/heads/").map(str::to_owned)))
    }

    /// The commit to compare with; `Err` is the reason why there is none.
    async fn base_of(&self, event: &Event, head: &str) -> Result<String, String> {
        if let Some(base) = event.base_sha.as_deref().filter(|b| !is_zero_sha(b)) {
            return check_sha(base).map(|()| base.to_owned()).map_err(|e| e.to_string());
        }
        let default = match &event.default_branch {
            Some(branch) => Some(branch.clone()),
            None => self.default_branch().await.map_err(|e| e.to_string())?,
        };
        match default {
            Some(branch) if event.target_branch.as_ref() != Some(&branch) => {
                let base = self.git.merge_base(&format!("refs/heads/{branch}"), head).await;
                base.map_err(|e| format!("no commit before, and no common one with `{branch}`: {e}"))
            }
            _ => Err("the push does not say which commit was before".to_owned()),
        }
    }
}

#[async_trait]
impl Forge for Local {
    async fn workflows_at(&self, repo: &str, sha: &str) -> Result<Arc<WorkflowFiles>, ForgeError> {
        self.own(repo)?;
        check_sha(sha)?;
        let key = Key { source: self.source, repo: repo.to_owned(), sha: sha.to_owned() };
        self.cache.get(key, || self.git.workflows_at(sha, self.limits)).await
    }

    async fn file_at(&self, repo: &str, sha: &str, path: &str, max: usize) -> Result<Option<Vec<u8>>, ForgeError> {
        self.own(repo)?;
        check_sha(sha)?;
        self.git.file_at(sha, path, max).await
    }

    async fn changed_files(&self, event: &Event) -> ChangedFiles {
        let Some(head) = event.sha.as_deref().filter(|s| check_sha(s).is_ok()) else {
            return ChangedFiles::Unavailable("the event has no commit".to_owned());
        };
        if !matches!(event.kind, EventKind::Push | EventKind::Pr) {
            return ChangedFiles::Unavailable(format!("a `{}` event changes no files", event.kind));
        }
        let base = match self.base_of(event, head).await {
            Ok(base) => base,
            Err(reason) => return ChangedFiles::Unavailable(reason),
        };
        match self.git.changed(&base, head, MAX_CHANGED).await {
            Ok((files, false)) => ChangedFiles::Known(files),
            Ok((files, true)) => ChangedFiles::Truncated(files),
            Err(error) => ChangedFiles::Unavailable(error.to_string()),
        }
    }

    async fn clone_source(&self, repo: &str, sha: &str, git_ref: Option<&str>) -> Result<CloneSource, ForgeError> {
        self.own(repo)?;
        check_sha(sha)?;
        let url = url::Url::from_file_path(&self.path).map_err(|()| ForgeError::Misconfigured {
            source_name: self.name.clone(),
            problem: "`path` must be absolute".to_owned(),
        })?;
        Ok(CloneSource {
            url: url.into(),
            git_ref: git_ref.map(str::to_owned),
            sha: sha.to_owned(),
            auth: None,
            expires_at: None,
        })
    }

    async fn head(&self, repo: &str, branch: Option<&str>) -> Result<Head, ForgeError> {
        self.own(repo)?;
        let branch = match branch {
            Some(branch) if is_branch_name(branch) => Some(branch.to_owned()),
            Some(branch) => return Err(ForgeError::not_found(format!("branch `{branch}`"))),
            None => self.default_branch().await?,
        };
        let git_ref = branch.as_ref().map_or_else(|| "HEAD".to_owned(), |b| format!("refs/heads/{b}"));
        match self.git.commit_of(&git_ref).await? {
            Some(sha) => Ok(Head { branch, sha }),
            None => Err(ForgeError::NotFound {
                what: format!("`{git_ref}` in {}", self.path.display()),
                hint: "commit something first, or name an existing branch".to_owned(),
            }),
        }
    }

    async fn commit_of(&self, repo: &str, git_ref: &str) -> Result<String, ForgeError> {
        self.own(repo)?;
        let missing = || ForgeError::not_found(format!("`{git_ref}` in {}", self.path.display()));
        ref_name(git_ref).ok_or_else(missing)?;
        self.git.commit_of(git_ref).await?.ok_or_else(missing)
    }

    async fn failed_deliveries(&self, _since: Ts) -> Result<Vec<FailedDelivery>, ForgeError> {
        Ok(Vec::new())
    }

    async fn redeliver(&self, id: &str) -> Result<(), ForgeError> {
        Err(ForgeError::not_found(format!("delivery `{id}` of a local source")))
    }
}

/// Whether `text` is a full commit id, so that it cannot be an option or a revision expression of git.
pub(crate) fn check_sha(text: &str) -> Result<(), ForgeError> {
    let hex = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if matches!(text.len(), 40 | 64) && hex {
        return Ok(());
    }
    Err(ForgeError::NotFound {
        what: format!("commit `{}`", text.chars().take(80).collect::<String>()),
        hint: "a commit is named by its full id in lower-case hex".to_owned(),
    })
}

/// What stands behind `refs/` of a branch or tag; none for all else.
pub(crate) fn ref_name(git_ref: &str) -> Option<&str> {
    let name = git_ref.strip_prefix("refs/")?;
    let short = name.strip_prefix("heads/").or_else(|| name.strip_prefix("tags/"))?;
    is_branch_name(short).then_some(name)
}

/// Whether `text` can be a branch (git-check-ref-format(1), the rules that matter when it stands behind `refs/heads/`).
pub(crate) fn is_branch_name(text: &str) -> bool {
    let bad = |c: char| c.is_control() || matches!(c, ' ' | '~' | '^' | ':' | '?' | '*' | '[' | '\\');
    !text.is_empty()
        && text.len() <= 250
        && !text.starts_with(['-', '/', '.'])
        && !text.ends_with(['/', '.'])
        && !text.contains("..")
        && !text.contains("//")
        && !text.contains("/.")
        && !text.contains("@{")
        && !text.ends_with(".lock")
        && !text.contains(bad)
}
