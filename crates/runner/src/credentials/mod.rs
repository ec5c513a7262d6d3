//! Git credentials of a job: its socket, which a port opens, and what git is told so that it asks there.

mod git;
mod remote;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use kici_engine::time::Clock;
use kici_protocol::agent::{GitAccess, GitHost};
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::confine::JobConfinement;
use crate::container;
use crate::emit::EventDesk;
use crate::key::JobKey;
use crate::mask::Masker;
use crate::stash::Stash;

pub use git::HelperConfig;
pub use remote::{Grant, Remote, RemoteCredential, RemoteError, Wanted};

/// What opens the sockets of jobs: whoever puts the agent together joins it with the library that answers git.
#[async_trait]
pub trait JobServices: Send + Sync {
    /// The program that git and steps start to talk to the socket; it takes `credential-helper --socket PATH OPERATION`, and is
    /// the command line of steps where it is called `kici`. None: jobs have no socket.
    fn program(&self) -> Option<&Path>;

    /// Opens the socket of a job, in a directory that is not there yet.
    ///
    /// # Errors
    /// A message for the job.
    async fn open(&self, job: Opening) -> Result<Box<dyn JobDoor>, String>;
}

/// The socket of a job while it is open.
#[async_trait]
pub trait JobDoor: Send + Sync {
    /// Its path.
    fn socket(&self) -> &Path;

    /// Closes it, and ends whatever the job still holds.
    async fn close(self: Box<Self>);
}

/// What a job's socket is opened with.
pub struct Opening {
    /// The directory to make for it.
    pub dir: PathBuf,
    /// The user of its steps, who may talk to it.
    pub uid: u32,
    /// What git may ask about; nothing where it names no host.
    pub git: GitAccess,
    /// Takes events of scripts.
    pub events: Arc<EventDesk>,
    /// Where credentials come from.
    pub remote: Arc<Remote>,
    /// Its caches and artifacts.
    pub stash: Arc<Stash>,
    /// Learns secrets before anybody gets them.
    pub masker: Arc<Masker>,
    /// Now.
    pub clock: Arc<dyn Clock>,
}

/// No sockets.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoServices;

#[async_trait]
impl JobServices for NoServices {
    fn program(&self) -> Option<&Path> {
        None
    }

    async fn open(&self, _: Opening) -> Result<Box<dyn JobDoor>, String> {
        Err("this agent opens no sockets for jobs".to_owned())
    }
}

/// The open socket of a job with what its steps see of it.
pub struct Access {
    door: Box<dyn JobDoor>,
    program: PathBuf,
    /// What git is told.
    pub helper: HelperConfig,
    /// Directory with the command `kici`.
    pub bin: PathBuf,
    /// Hosts that get no credentials because the connection is not encrypted.
    pub insecure: Vec<String>,
}

impl Access {
    /// Opens the socket of a job whose [`places`] are made. None when this agent opens no sockets. Without `git` the job gets no
    /// credentials. `inside`: git runs in a container, where our program is elsewhere.
    ///
    /// # Errors
    /// A message for the job.
    pub async fn open(
        services: &dyn JobServices,
        config: &Config,
        job: JobKey,
        git: Option<GitAccess>,
        dir: &Path,
        inside: bool,
        opening: impl FnOnce(PathBuf, GitAccess) -> Opening,
    ) -> Result<Option<Self>, String> {
        let Some(program) = services.program() else { return Ok(None) };
        let mut git = git.unwrap_or_default();
        let insecure = without_insecure(&mut git, config.git_allow_insecure_http);
        let urls = git.hosts.iter().map(|host| format!("{}://{}", host.protocol, host.host)).collect();
        let door = services.open(opening(socket_dir(config, job), git)).await?;
        let (helper, socket) = match inside {
            true => (Path::new(container::PROGRAM), Path::new(container::SOCKET)),
            false => (program, door.socket()),
        };
        let helper = HelperConfig::new(helper, socket, urls, config.git_inherit_host_helpers);
        Ok(Some(Self { program: program.to_owned(), door, helper, bin: bin(dir), insecure }))
    }

    /// Lets the user of the steps reach the socket and the command.
    ///
    /// # Errors
    /// When one of them cannot be changed.
    pub fn give(&self, confine: &JobConfinement) -> io::Result<()> {
        let own = self.socket().parent();
        for dir in [own.and_then(Path::parent), own.and_then(|own| own.parent()?.parent())].into_iter().flatten() {
            confine.open_way(dir)?;
        }
        own.map_or(Ok(()), |own| confine.give_all(own))?;
        confine.give_all(&self.bin)
    }

    /// What answers calls from a container.
    pub fn answering(&self) -> container::Answering {
        container::Answering { program: self.program.clone(), socket: self.socket().to_owned() }
    }

    /// Path of the socket.
    pub fn socket(&self) -> &Path {
        self.door.socket()
    }

    /// Closes the socket.
    pub async fn close(self) {
        self.door.close().await;
    }
}

/// Makes what the socket of a job needs: puts the command `kici` where steps can read it, below `dir`, and makes way for the
/// directory `socket`, which an earlier process may have left. Blocks.
///
/// # Errors
/// A message for the job.
pub fn places(program: &Path, dir: &Path, socket: &Path) -> Result<(), String> {
    let bin = bin(dir);
    std::fs::create_dir_all(&bin)
        .and_then(|()| std::os::unix::fs::symlink(program, bin.join("kici")))
        .map_err(|error| format!("the command `kici` cannot be put into {}: {error}", bin.display()))?;
    let parent = socket.parent().unwrap_or(socket);
    std::fs::create_dir_all(parent)
        .map_err(|error| format!("{}: {error}; set runtime_dir to a directory of the agent's", parent.display()))?;
    match std::fs::remove_dir_all(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(format!("{}: {error}", socket.display())),
        _ => Ok(()),
    }
}

fn bin(dir: &Path) -> PathBuf {
    dir.join("scratch/bin")
}

/// Takes out the hosts whose connection is not encrypted, unless that is allowed, and returns them. Without the source's host,
/// which is the first one beside a repository, the job has no repository of its own: the next host is another one.
fn without_insecure(git: &mut GitAccess, allowed: bool) -> Vec<String> {
    let stays = |host: &GitHost| host.protocol == "https" || allowed;
    if git.hosts.first().is_some_and(|source| !stays(source)) {
        git.repo.clear();
    }
    git.hosts.extract_if(.., |host| !stays(host)).map(|host| host.host).collect()
}

/// Where the socket of a job lies. Short, because the path of a socket may have 107 bytes; found again after a restart.
pub fn socket_dir(config: &Config, job: JobKey) -> PathBuf {
    let name = format!("{}|{}", config.state_dir.display(), job.file_name());
    config.runtime_dir.join("j").join(&hex::encode(Sha256::digest(name))[..DIR_NAME])
}

/// Characters of the name of a socket's directory.
const DIR_NAME: usize = 8;
/// Longest path of a socket on Linux (unix(7), `sun_path`).
const MAX_SOCKET_PATH: usize = 107;

/// Whether the sockets of jobs can lie below this directory.
///
/// # Errors
/// A message for the operator.
pub(crate) fn check_runtime_dir(dir: &Path) -> Result<(), String> {
    let length = dir.as_os_str().len() + "/j/".len() + DIR_NAME + "/job.sock".len();
    if length <= MAX_SOCKET_PATH {
        return Ok(());
    }
    let most = MAX_SOCKET_PATH - (length - dir.as_os_str().len());
    Err(format!("{} is too long for sockets of jobs: use a directory of at most {most} bytes", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_whose_source_is_not_encrypted_has_no_repository_at_the_host_of_a_named_credential() {
        let host = |protocol: &str, host: &str| GitHost {
            protocol: protocol.to_owned(),
            host: host.to_owned(),
            ignore_case: false,
        };
        let access = |source| GitAccess { hosts: vec![source, host("https", "mirror")], repo: "acme/app".to_owned() };
        let mut plain = access(host("http", "forge"));
        assert_eq!(without_insecure(&mut plain, false), ["forge"]);
        assert_eq!((plain.hosts.len(), plain.repo.as_str()), (1, ""));
        for (mut git, allowed) in [(access(host("http", "forge")), true), (access(host("https", "forge")), false)] {
            assert!(without_insecure(&mut git, allowed).is_empty());
            assert_eq!((git.hosts.len(), git.repo.as_str()), (2, "acme/app"));
        }
    }
}
