//! The commit of a job, exactly: fetched by its full object name, as shallow as asked, verified, without the credential
//! ever standing in a URL, an argument or a file.

use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kici_engine::time::Clock;
use kici_sys::process::Spawn;
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::watch;

use crate::credentials::HelperConfig;
use crate::mask::Masker;
use crate::spool::StepLog;
use crate::steps::environment::{Variables, to_os};
use crate::steps::exec::{Bounds, Ended, Output, follow};
use crate::steps::tree::{Pipes, Tree};
use crate::stop::{Stop, stopped};
use ssh::{KeyFiles, SshKey};

/// Waits before the second and third try after an error of the network.
const RETRY_AFTER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
/// Limit of a command that asks nobody.
const LOCAL_LIMIT: Duration = Duration::from_secs(10);
/// How much history is fetched when the server does not give a commit by its name and the branch has moved on.
const DEEPEN: u32 = 50;

/// What to check out.
#[derive(Clone, Debug)]
pub struct Source {
    /// Where from: `https`, `http`, `ssh` or `file`.
    pub url: String,
    /// The branch, tag or other reference; empty for the default branch.
    pub git_ref: String,
    /// Full object name; empty takes the tip of the reference.
    pub sha: String,
    /// Commits of history; 0 is all.
    pub depth: u32,
    /// User and password.
    pub basic: Option<(String, SecretString)>,
    /// With its submodules, and theirs.
    pub submodules: bool,
    /// With the files that lie in git LFS.
    pub lfs: bool,
    /// With all tags.
    pub tags: bool,
    /// Key for `ssh`; none leaves it to the host's own. It is gone when the checkout is done.
    pub ssh: Option<SshKey>,
}

impl Source {
    /// The same repository at another branch, tag or commit; nothing changes for an empty one.
    #[must_use]
    pub fn at(self, other: &str) -> Self {
        let hex =
            matches!(other.len(), 40 | 64) && other.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        match other {
            "" => self,
            commit if hex => Self { sha: commit.to_owned(), git_ref: String::new(), ..self },
            other => Self { sha: String::new(), git_ref: other.to_owned(), ..self },
        }
    }
}

/// The directory of a checkout in its workspace, made if need be; an empty path is the workspace.
///
/// # Errors
/// In words, when the path leaves the workspace or cannot be made.
pub fn below(workspace: &Path, path: &str) -> Result<PathBuf, String> {
    let plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if !plain || path.contains('\0') {
        return Err(format!("checkout.path `{path}` leaves the workspace"));
    }
    let place = workspace.join(path);
    std::fs::create_dir_all(&place).map_err(|error| format!("checkout.path `{path}` cannot be made: {error}"))?;
    Ok(place)
}

/// Why there is no checkout.
#[derive(Debug, thiserror::Error)]
pub enum CheckoutError {
    /// The source is not one that is ever fetched.
    #[error("the source is refused: {0}")]
    Refused(String),
    /// git failed.
    #[error("git {command} failed: {message}")]
    Git {
        /// Which.
        command: String,
        /// What it said last.
        message: String,
    },
    /// The reference does not contain the commit.
    #[error("commit {wanted} is not in `{git_ref}` of the repository, which is at {found}")]
    NoSuchCommit {
        /// The commit that was asked for.
        wanted: String,
        /// The reference that was looked through.
        git_ref: String,
        /// Its tip.
        found: String,
    },
    /// git took too long.
    #[error("git {command} took longer than {limit:?}; raise git.timeout_ms or use a smaller depth")]
    TimedOut {
        /// Which.
        command: String,
        /// The limit.
        limit: Duration,
    },
    /// A key of SSH.
    #[error(transparent)]
    Ssh(#[from] ssh::SshError),
    /// The job was told to stop.
    #[error("stopped")]
    Stopped(Stop),
    /// The disk or git itself.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        error: io::Error,
    },
}

/// Everything a checkout needs besides its source.
pub struct Checkout<'a> {
    /// An empty directory.
    pub workspace: &'a Path,
    /// A private directory.
    pub scratch: &'a Path,
    /// Variables of the agent that git may see. What steps can write is not among what it reads: neither a home nor a
    /// configuration of a user.
    pub host: &'a Variables,
    /// Starts git.
    pub start: &'a Start<'a>,
    /// Limit of one git command.
    pub timeout: Duration,
    /// Limit of the job.
    pub deadline: Option<tokio::time::Instant>,
    /// Where git's output goes.
    pub log: &'a mut StepLog,
    /// Gets the credential before git does.
    pub masker: &'a Arc<Masker>,
    /// What git is told in the clone, for the steps.
    pub helper: Option<&'a HelperConfig>,
    /// Now.
    pub clock: &'a dyn Clock,
    /// Told to stop.
    pub stop: &'a mut watch::Receiver<Stop>,
}

/// Starts a command, and sees to it that it is ended with its job.
pub type Start<'a> = dyn Fn(Spawn) -> io::Result<(Tree, Pipes)> + Send + Sync + 'a;

/// How one git command went.
enum Git {
    Ok,
    Failed(Vec<String>),
}

impl Checkout<'_> {
    /// Checks out one repository.
    ///
    /// # Errors
    /// [`CheckoutError`]; the workspace is then of no use.
    pub async fn run(&mut self, source: &Source) -> Result<(), CheckoutError> {
        self.fetch(source).await?;
        // Only now: the fetch has a credential of its own.
        self.tell_helper()
    }

    async fn fetch(&mut self, source: &Source) -> Result<(), CheckoutError> {
        let scheme = check(source)?;
        let keys = match scheme {
            "ssh" => Some(KeyFiles::write(&self.scratch.join("ssh"), source.ssh.as_ref())?),
            _ => None,
        };
        let env = self.environment(source, scheme, keys.as_ref())?;
        self.init(source)?;
        if source.sha.is_empty() {
            self.must(&env, "fetch", &fetch_args(source.depth, reference(source))).await?;
            self.must(&env, "checkout", &["--detach", "--force", "-q", "FETCH_HEAD"].map(str::to_owned)).await?;
            return self.extras(source, &env).await;
        }
        match self.retried(&env, "fetch", &fetch_args(source.depth, &source.sha)).await? {
            Git::Ok => {}
            Git::Failed(said) if is_unnamed(&said) => self.by_reference(source, &env).await?,
            Git::Failed(said) => return Err(git_error("fetch", &said)),
        }
        self.must(&env, "checkout", &["--detach", "--force", "-q", &source.sha].map(str::to_owned)).await?;
        let head = std::fs::read_to_string(self.workspace.join(".git/HEAD"))
            .map_err(|error| CheckoutError::Io { what: "reading HEAD".to_owned(), error })?;
        if head.trim() == source.sha {
            return self.extras(source, &env).await;
        }
        Err(CheckoutError::NoSuchCommit {
            wanted: source.sha.clone(),
            git_ref: source.git_ref.clone(),
            found: head.trim().to_owned(),
        })
    }

    /// What a job asks for besides the files of its commit.
    async fn extras(&mut self, source: &Source, env: &Variables) -> Result<(), CheckoutError> {
        let owned = |args: &[&str]| args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>();
        let depth = (source.depth > 0).then(|| format!("--depth={}", source.depth));
        if source.tags {
            let mut args = owned(&["--no-recurse-submodules", "--no-progress"]);
            args.extend(depth.clone());
            args.extend(owned(&["origin", "+refs/tags/*:refs/tags/*"]));
            self.must(env, "fetch", &args).await?;
        }
        if source.submodules {
            let mut args = owned(&["update", "--init", "--recursive", "--force"]);
            args.extend(depth);
            self.must(env, "submodule", &args).await?;
        }
        if source.lfs {
            self.must(env, "lfs", &owned(&["install", "--local", "--skip-smudge"])).await.map_err(no_lfs)?;
            self.must(env, "lfs", &owned(&["pull"])).await?;
        }
        Ok(())
    }

    /// For servers that give commits by reference only: the tip, then more history, then all of it.
    async fn by_reference(&mut self, source: &Source, env: &Variables) -> Result<(), CheckoutError> {
        let git_ref = reference(source);
        let mut depths = vec![source.depth.max(1), DEEPEN.max(source.depth), 0];
        depths.dedup();
        for depth in depths {
            let mut args = fetch_args(depth, git_ref);
            if depth == 0 && self.workspace.join(".git/shallow").exists() {
                args.insert(0, "--unshallow".to_owned());
            }
            self.must(env, "fetch", &args).await?;
            let probe = ["-e".to_owned(), format!("{}^{{commit}}", source.sha)];
            if matches!(self.git(env, "cat-file", &probe).await?, Git::Ok) {
                return Ok(());
            }
        }
        let found = std::fs::read_to_string(self.workspace.join(".git/FETCH_HEAD")).unwrap_or_default();
        let found = found.split_whitespace().next().unwrap_or("an unknown commit").to_owned();
        Err(CheckoutError::NoSuchCommit { wanted: source.sha.clone(), git_ref: git_ref.to_owned(), found })
    }

    /// An empty repository with the remote `origin`; written by hand, since `git init` would run templates and cost a process.
    fn init(&self, source: &Source) -> Result<(), CheckoutError> {
        let git = self.workspace.join(".git");
        let (version, format) =
            if source.sha.len() == 64 { (1, "[extensions]\n\tobjectformat = sha256\n") } else { (0, "") };
        let config = format!(
            "[core]\n\trepositoryformatversion = {version}\n\tfilemode = true\n\tbare = false\n{format}\
             [remote \"origin\"]\n\turl = {}\n\tfetch = +refs/heads/*:refs/remotes/origin/*\n",
            quoted(&source.url)
        );
        let make = || {
            for dir in ["objects/info", "objects/pack", "refs/heads", "refs/tags", "info"] {
                std::fs::create_dir_all(git.join(dir))?;
            }
            std::fs::write(git.join("HEAD"), "ref: refs/heads/main\n")?;
            std::fs::write(git.join("config"), config)
        };
        make().map_err(|error| CheckoutError::Io { what: format!("making {}", git.display()), error })
    }

    fn tell_helper(&self) -> Result<(), CheckoutError> {
        let Some(helper) = self.helper else { return Ok(()) };
        let path = self.workspace.join(".git/config");
        let append = || {
            let mut file = std::fs::File::options().append(true).open(&path)?;
            io::Write::write_all(&mut file, helper.file().as_bytes())
        };
        append().map_err(|error| CheckoutError::Io { what: format!("writing {}", path.display()), error })
    }

    fn environment(&self, source: &Source, scheme: &str, keys: Option<&KeyFiles>) -> Result<Variables, CheckoutError> {
        let mut env = self.host.clone();
        // Steps of earlier jobs may have written the home of the agent's user: git would run filters and helpers that it names.
        let home = self.scratch.join("git");
        let global = home.join(".gitconfig");
        // Owned by somebody else, most likely. Flags do not reach upload-pack, a file does.
        let config = if scheme == "file" { "[safe]\n\tdirectory = *\n" } else { "" };
        fresh_home(&home, &global, config)
            .map_err(|error| CheckoutError::Io { what: format!("making {}", home.display()), error })?;
        env.remove("XDG_CONFIG_HOME");
        env.insert("HOME".to_owned(), home.display().to_string());
        env.insert("GIT_CONFIG_GLOBAL".to_owned(), global.display().to_string());
        let protocols = match scheme {
            "http" | "file" => format!("https:ssh:{scheme}"),
            _ => "https:ssh".to_owned(),
        };
        let fixed = [("GIT_TERMINAL_PROMPT", "0"), ("GIT_ASKPASS", "/bin/false"), ("LC_ALL", "C")];
        env.extend(fixed.map(|(name, value)| (name.to_owned(), value.to_owned())));
        env.insert("GIT_ALLOW_PROTOCOL".to_owned(), protocols);
        env.extend(keys.map(|keys| ("GIT_SSH_COMMAND".to_owned(), keys.command())));
        let mut config: Vec<(String, String)> = [
            ("credential.helper", ""),
            ("core.hooksPath", "/dev/null"),
            ("core.fsync", "none"),
            ("gc.auto", "0"),
            ("maintenance.auto", "false"),
            ("fetch.unpackLimit", "1"),
            ("protocol.version", "2"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        if let Some((user, secret)) = &source.basic {
            let encoded = STANDARD.encode(format!("{user}:{}", secret.expose_secret()));
            self.masker.add([secret.expose_secret(), encoded.as_str()]);
            config
                .push((format!("http.{}.extraHeader", origin(&source.url)), format!("Authorization: Basic {encoded}")));
        }
        env.insert("GIT_CONFIG_COUNT".to_owned(), config.len().to_string());
        for (n, (key, value)) in config.into_iter().enumerate() {
            env.insert(format!("GIT_CONFIG_KEY_{n}"), key);
            env.insert(format!("GIT_CONFIG_VALUE_{n}"), value);
        }
        Ok(env)
    }

    async fn must(&mut self, env: &Variables, command: &str, args: &[String]) -> Result<(), CheckoutError> {
        match self.retried(env, command, args).await? {
            Git::Ok => Ok(()),
            Git::Failed(said) => Err(git_error(command, &said)),
        }
    }

    /// Tries again after errors of the network, never after a refusal.
    async fn retried(&mut self, env: &Variables, command: &str, args: &[String]) -> Result<Git, CheckoutError> {
        for wait in RETRY_AFTER {
            match self.git(env, command, args).await? {
                Git::Failed(said) if is_network(&said) => tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    stop = stopped(self.stop) => return Err(CheckoutError::Stopped(stop)),
                },
                done => return Ok(done),
            }
        }
        self.git(env, command, args).await
    }

    async fn git(&mut self, env: &Variables, command: &str, args: &[String]) -> Result<Git, CheckoutError> {
        let io = |error| CheckoutError::Io { what: format!("running git {command}"), error };
        let args = std::iter::once(command.into()).chain(args.iter().map(Into::into)).collect();
        let spawn = Spawn {
            program: "git".into(),
            args,
            env: to_os(env),
            cwd: PathBuf::from(self.workspace),
            ..Spawn::default()
        };
        let (mut tree, pipes) = (self.start)(spawn).map_err(io)?;
        let mut output = Output::new(self.log, self.masker, self.clock).with_tail();
        let timeout = if command == "cat-file" { self.timeout.min(LOCAL_LIMIT) } else { self.timeout };
        let bounds = Bounds { timeout, deadline: self.deadline, after_stop: false };
        let ended = follow(&mut tree, pipes, &mut output, bounds, self.stop).await;
        let said = output.tail();
        tree.kill().await;
        match ended.map_err(io)? {
            Ended::Exit(status) if status.success() => Ok(Git::Ok),
            Ended::Exit(_) => Ok(Git::Failed(said)),
            Ended::TimedOut | Ended::DeadlineReached => {
                Err(CheckoutError::TimedOut { command: command.to_owned(), limit: timeout })
            }
            Ended::Stopped(stop) => Err(CheckoutError::Stopped(stop)),
        }
    }
}

/// A home with nothing in it but the configuration.
fn fresh_home(home: &Path, global: &Path, config: &str) -> io::Result<()> {
    match std::fs::remove_dir_all(home) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => std::fs::create_dir(home)?,
    }
    std::fs::write(global, config)
}

fn fetch_args(depth: u32, what: &str) -> Vec<String> {
    let mut args = vec!["--no-tags".to_owned(), "--no-recurse-submodules".to_owned(), "--no-progress".to_owned()];
    if depth > 0 {
        args.push(format!("--depth={depth}"));
    }
    args.extend(["origin".to_owned(), what.to_owned()]);
    args
}

fn reference(source: &Source) -> &str {
    if source.git_ref.is_empty() { "HEAD" } else { &source.git_ref }
}

fn git_error(command: &str, said: &[String]) -> CheckoutError {
    let important = said.iter().find(|line| line.starts_with("fatal:") || line.starts_with("error:"));
    let message = important.or(said.last()).cloned().unwrap_or_else(|| "it said nothing".to_owned());
    CheckoutError::Git { command: command.to_owned(), message: redact::redacted(&message) }
}

/// git does not know the command where git-lfs is not installed.
fn no_lfs(error: CheckoutError) -> CheckoutError {
    match error {
        CheckoutError::Git { command, message } if message.contains("is not a git command") => {
            let message = "`checkout.lfs` needs git-lfs on the agent, and it is not installed".to_owned();
            CheckoutError::Git { command, message }
        }
        other => other,
    }
}

/// The server has the repository but does not give this commit by name.
fn is_unnamed(said: &[String]) -> bool {
    let signs = ["not our ref", "unadvertised object", "does not allow request"];
    said.iter().any(|line| signs.iter().any(|sign| line.contains(sign)))
}

fn is_network(said: &[String]) -> bool {
    let signs = [
        "Could not resolve host",
        "Connection refused",
        "Connection reset",
        "timed out",
        "returned error: 5",
        "RPC failed",
        "early EOF",
        "unexpected disconnect",
    ];
    said.iter().any(|line| signs.iter().any(|sign| line.contains(sign)))
}

/// Scheme of a source that may be fetched.
fn check(source: &Source) -> Result<&str, CheckoutError> {
    let refuse = |why: String| Err(CheckoutError::Refused(why));
    let odd = |text: &str| text.starts_with('-') || text.chars().any(|c| c.is_control() || c == ' ');
    if odd(&source.url) || odd(&source.git_ref) {
        return refuse("its URL or reference begins with `-` or holds blanks".to_owned());
    }
    if source.git_ref.chars().any(|c| matches!(c, ':' | '+' | '*' | '?' | '[' | '\\' | '^' | '~'))
        || source.git_ref.contains("..")
    {
        return refuse(format!("`{}` is not a reference", source.git_ref));
    }
    let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !(source.sha.is_empty() || matches!(source.sha.len(), 40 | 64) && hex(&source.sha)) {
        return refuse(format!("`{}` is not a full commit name of 40 or 64 hex digits", source.sha));
    }
    match source.url.split_once("://") {
        Some((scheme @ ("https" | "http" | "ssh" | "file"), rest)) => {
            let host = rest.split('/').next().unwrap_or_default();
            if scheme != "ssh" && host.contains('@') {
                return refuse("its URL holds a user; credentials travel apart from it".to_owned());
            }
            Ok(scheme)
        }
        _ => refuse("its URL is not https, http, ssh or file".to_owned()),
    }
}

/// `scheme://host/`: what a header is bound to, so that it follows neither redirects nor submodules elsewhere.
fn origin(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    format!("{scheme}://{}/", rest.split('/').next().unwrap_or_default())
}

/// As a value in a git configuration file (git-config(1), "Syntax").
fn quoted(value: &str) -> String {
    format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\""))
}

mod redact;
pub mod ssh;
#[cfg(test)]
mod tests;
