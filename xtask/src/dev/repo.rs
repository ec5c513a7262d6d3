//! The repository whose workflows run: what git says about it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};

/// No commit: what a push says of a side that does not exist.
pub(crate) const ZERO: &str = "0000000000000000000000000000000000000000";

/// Where workflows live.
const WORKFLOWS: &str = ".kici/workflows";
/// Where the steps live that they use.
const STEPS: &str = ".kici/steps";

/// A repository on this machine, with or without a work tree.
pub(crate) struct Repo {
    /// The top of the work tree, or the bare repository itself.
    pub(crate) path: PathBuf,
    /// No work tree.
    pub(crate) bare: bool,
}

/// What a push event says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Push {
    /// Full ref.
    pub(crate) git_ref: String,
    /// The commit before, [`ZERO`] if there was none or it does not matter.
    pub(crate) before: String,
    /// The commit to run.
    pub(crate) after: String,
}

impl Push {
    /// The ref as people write it.
    pub(crate) fn branch(&self) -> &str {
        self.git_ref.strip_prefix("refs/heads/").unwrap_or(&self.git_ref)
    }

    /// The first characters of the commit.
    pub(crate) fn short_sha(&self) -> &str {
        self.after.get(..10).unwrap_or(&self.after)
    }
}

impl Repo {
    /// Finds the repository that holds `path`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let path = path.canonicalize().with_context(|| format!("--repo {}", path.display()))?;
        let bare = git(&path, ["rev-parse", "--is-bare-repository"])
            .with_context(|| format!("--repo {} is not a git repository", path.display()))?;
        let bare = bare == "true";
        let top = git(&path, ["rev-parse", if bare { "--absolute-git-dir" } else { "--show-toplevel" }]);
        let top =
            top.with_context(|| format!("--repo {} has no work tree; name the folder above it", path.display()))?;
        if top.contains(':') {
            bail!("{top}: a colon would end the path in `sources.local_paths`; use a checkout at a path without one");
        }
        let repo = Self { path: PathBuf::from(top), bare };
        if git(&repo.path, ["rev-parse", "--verify", "--quiet", "HEAD^{commit}"]).is_err() {
            bail!("{} has no commit yet; commit something first", repo.path.display());
        }
        Ok(repo)
    }

    /// Makes a repository from a folder: one commit that holds its content.
    pub(crate) fn create(template: &Path, path: &Path) -> Result<Self> {
        copy(template, path)?;
        git(path, ["init", "--quiet", "--initial-branch=main"])?;
        git(path, ["add", "--all"])?;
        let identity = ["-c", "user.name=KiCI", "-c", "user.email=kici@localhost", "-c", "commit.gpgSign=false"];
        git(path, identity.into_iter().chain(["commit", "--quiet", "--message=Say hello"]))?;
        Self::open(path)
    }

    /// A name for a source, of `a-z0-9-`.
    pub(crate) fn source_name(&self) -> String {
        let folder = self.path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let folder = folder.strip_suffix(".git").unwrap_or(&folder);
        let plain: String = folder.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let name: String = plain.trim_matches('-').chars().take(50).collect();
        if name.is_empty() { "repository".into() } else { name }
    }

    /// The branch that counts as the default: what the origin says, else what is configured, else `main`.
    pub(crate) fn default_branch(&self) -> String {
        let origin = self.git(["symbolic-ref", "--quiet", "--short", "refs/remotes/origin/HEAD"]).ok();
        let origin = origin.and_then(|name| Some(name.strip_prefix("origin/")?.to_owned()));
        let exists =
            |name: &String| self.git(["show-ref", "--verify", "--quiet", &format!("refs/heads/{name}")]).is_ok();
        let configured = self.git(["config", "--get", "init.defaultBranch"]).ok().filter(exists);
        let master = || Some("master".to_owned()).filter(exists).filter(|_| !exists(&"main".to_owned()));
        origin.or(configured).or_else(master).unwrap_or_else(|| "main".into())
    }

    /// The push that runs what is checked out now. A detached HEAD counts as the default branch at that commit, which
    /// the second value says.
    pub(crate) fn head(&self) -> Result<(Push, bool)> {
        let after = self.git(["rev-parse", "HEAD^{commit}"])?;
        let attached = self.git(["symbolic-ref", "--quiet", "HEAD"]).ok();
        let detached = attached.is_none();
        let git_ref = attached.unwrap_or_else(|| format!("refs/heads/{}", self.default_branch()));
        Ok((Push { git_ref, before: ZERO.into(), after }, detached))
    }

    /// What a hook may have changed: the head of a work tree, every branch of a bare repository.
    pub(crate) fn tips(&self) -> Result<BTreeMap<String, String>> {
        if !self.bare {
            let (push, _) = self.head()?;
            return Ok(BTreeMap::from([(push.git_ref, push.after)]));
        }
        let text = self.git(["for-each-ref", "--format=%(refname) %(objectname)", "refs/heads"])?;
        Ok(text.lines().filter_map(|line| line.split_once(' ')).map(|(name, sha)| (name.into(), sha.into())).collect())
    }

    /// Files with changes that are not committed; they do not run.
    pub(crate) fn uncommitted(&self) -> Result<usize> {
        if self.bare {
            return Ok(0);
        }
        Ok(self.git(["status", "--porcelain"])?.lines().count())
    }

    /// Path and content of the workflow files at a commit. Symbolic links are none.
    pub(crate) fn workflows(&self, sha: &str) -> Result<Vec<(String, String)>> {
        let entries = self.git(["ls-tree", "-r", "-z", "--full-tree", sha, "--", WORKFLOWS, STEPS])?;
        let files = entries.split('\0').filter(|entry| entry.starts_with("100"));
        let names = files.filter_map(|entry| Some(entry.split_once('\t')?.1));
        let names = names.filter(|name| name.ends_with(".yaml") || name.ends_with(".yml"));
        names.map(|name| Ok((name.to_owned(), exactly(&self.path, ["show", &format!("{sha}:{name}")])?))).collect()
    }

    /// Where git looks for hooks, which is elsewhere in linked work trees and with `core.hooksPath`.
    pub(crate) fn hooks(&self) -> Result<PathBuf> {
        Ok(self.path.join(self.git(["rev-parse", "--git-path", "hooks"])?))
    }

    fn git<const N: usize>(&self, arguments: [&str; N]) -> Result<String> {
        git(&self.path, arguments)
    }
}

/// Runs git and answers what it prints, without the last line end.
fn git(directory: &Path, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
    let text = exactly(directory, arguments)?;
    Ok(text.strip_suffix('\n').map(str::to_owned).unwrap_or(text))
}

/// Runs git and answers what it prints, lossy where that is not UTF-8: the compiler of workflows says so better than we
/// could. Variables that git sets for hooks are dropped: this program may be started by one.
fn exactly(directory: &Path, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
    let mut command = Command::new("git");
    command.arg("-C").arg(directory).args(arguments).env("GIT_OPTIONAL_LOCKS", "0");
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_COMMON_DIR"] {
        command.env_remove(name);
    }
    let Output { status, stdout, stderr } = command.output().context("git is not installed or not in the path")?;
    if !status.success() {
        bail!("git: {}", String::from_utf8_lossy(&stderr).trim());
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in std::fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target).with_context(|| target.display().to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(directory: &Path) -> Repo {
        let template = directory.join("template");
        std::fs::create_dir_all(template.join(WORKFLOWS)).unwrap();
        std::fs::write(template.join(WORKFLOWS).join("ci.yaml"), "name: ci\n").unwrap();
        std::fs::write(template.join(WORKFLOWS).join("notes.txt"), "no workflow\n").unwrap();
        Repo::create(&template, &directory.join("My Repo.git")).unwrap()
    }

    #[test]
    fn a_work_tree_is_read_at_its_head() {
        let directory = tempfile::tempdir().unwrap();
        let repo = sample(directory.path());
        let (push, detached) = repo.head().unwrap();
        assert_eq!((push.branch(), push.before.as_str(), detached), ("main", ZERO, false));
        assert_eq!(repo.source_name(), "my-repo");
        assert_eq!(repo.tips().unwrap(), BTreeMap::from([("refs/heads/main".into(), push.after.clone())]));
        assert_eq!(repo.workflows(&push.after).unwrap(), [(".kici/workflows/ci.yaml".into(), "name: ci\n".into())]);
        assert_eq!(repo.uncommitted().unwrap(), 0);
        std::fs::write(repo.path.join("new"), "x").unwrap();
        assert_eq!(repo.uncommitted().unwrap(), 1);
        let below = Repo::open(&repo.path.join(WORKFLOWS)).unwrap();
        assert_eq!(below.path, repo.path);
    }

    #[test]
    fn a_detached_head_counts_as_the_default_branch() {
        let directory = tempfile::tempdir().unwrap();
        let repo = sample(directory.path());
        repo.git(["branch", "-m", "master"]).unwrap();
        repo.git(["checkout", "--quiet", "--detach"]).unwrap();
        let (push, detached) = repo.head().unwrap();
        assert_eq!((push.branch(), detached), ("master", true));
    }

    #[test]
    fn bare_and_shallow_clones_and_linked_work_trees_open() {
        let directory = tempfile::tempdir().unwrap();
        let repo = sample(directory.path());
        let (push, _) = repo.head().unwrap();
        let url = format!("file://{}", repo.path.display());
        git(directory.path(), ["clone", "--quiet", "--bare", &url, "bare.git"]).unwrap();
        git(directory.path(), ["clone", "--quiet", "--depth=1", &url, "shallow"]).unwrap();
        repo.git(["worktree", "add", "--quiet", "-b", "topic", "../linked"]).unwrap();

        let bare = Repo::open(&directory.path().join("bare.git")).unwrap();
        assert!(bare.bare && bare.path.ends_with("bare.git"));
        assert_eq!(bare.tips().unwrap().get("refs/heads/topic"), None);
        assert_eq!(bare.tips().unwrap().get("refs/heads/main"), Some(&push.after));
        let shallow = Repo::open(&directory.path().join("shallow")).unwrap();
        assert_eq!((shallow.head().unwrap().0, shallow.default_branch().as_str()), (push, "main"));
        let linked = Repo::open(&directory.path().join("linked")).unwrap();
        assert_eq!(linked.head().unwrap().0.branch(), "topic");
        assert!(linked.hooks().unwrap().starts_with(&repo.path), "{:?}", linked.hooks());
    }

    #[test]
    fn what_is_no_repository_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let error = Repo::open(directory.path()).err().unwrap();
        assert!(error.to_string().ends_with("is not a git repository"), "{error}");
        git(directory.path(), ["init", "--quiet"]).unwrap();
        let error = Repo::open(directory.path()).err().unwrap();
        assert!(error.to_string().contains("has no commit yet"), "{error}");
        let error = Repo::open(&directory.path().join(".git")).err().unwrap();
        assert!(error.to_string().contains("has no work tree; name the folder above it"), "{error}");
        let odd = directory.path().join("a:b");
        std::fs::create_dir(&odd).unwrap();
        git(&odd, ["init", "--quiet"]).unwrap();
        let error = Repo::open(&odd).err().unwrap();
        assert!(error.to_string().contains("a colon"), "{error}");
    }

    #[test]
    fn links_are_no_workflows() {
        let directory = tempfile::tempdir().unwrap();
        let repo = sample(directory.path());
        std::os::unix::fs::symlink("ci.yaml", repo.path.join(WORKFLOWS).join("link.yaml")).unwrap();
        repo.git(["add", "--all"]).unwrap();
        repo.git(["-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "link"]).unwrap();
        let (push, _) = repo.head().unwrap();
        assert_eq!(repo.workflows(&push.after).unwrap().len(), 1);
    }
}
