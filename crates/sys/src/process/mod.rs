//! Process trees that can be ended for certain.
//!
//! Every tree has a *keeper*: a fork of this process that is the child subreaper (prctl(2)) of the command it starts.
//! Whatever the command leaves behind, also after `setsid` and a double fork, becomes a child of the keeper and never
//! leaves its subtree; so "all processes of this tree" is a question with an answer. The keeper tells how the command
//! ended, reaps what it inherits, and exits when nothing is left.

mod keeper;
mod proc_fs;
mod strays;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, pipe2};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, ChildStderr, ChildStdout};

use crate::cgroup::StepGroup;
use crate::confine::Confinement;
pub use proc_fs::{ProcessId, descendants};
pub use strays::{adopt_strays, kill_strays, may_have_strays};

/// How often a tree is searched while it is being ended.
const SWEEP: Duration = Duration::from_millis(2);
/// Sweeps that [`Tree::kill`] makes at most: what survives them cannot be killed (uninterruptible sleep).
const MAX_SWEEPS: u32 = 2_500;

/// A command to start. Its standard input is empty; of the descriptors of this process it gets those of its confinement.
#[derive(Clone, Debug, Default)]
pub struct Spawn {
    /// The program, looked up in the `PATH` of `env`.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Its whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// Where it starts.
    pub cwd: PathBuf,
    /// What it may not do.
    pub confine: Confinement,
    /// The group of processes that it is put into.
    pub group: Option<Arc<StepGroup>>,
    /// The program only starts the command, two processes further down, and must outlive it: SIGTERM passes it by.
    pub is_wrapper: bool,
}

impl Spawn {
    /// A command without arguments and environment.
    pub fn new(program: impl AsRef<OsStr>, cwd: impl Into<PathBuf>) -> Self {
        Self { program: program.as_ref().to_owned(), cwd: cwd.into(), ..Self::default() }
    }
}

/// The output pipes of a tree.
#[derive(Debug)]
pub struct Pipes {
    /// Standard output.
    pub stdout: ChildStdout,
    /// Standard error.
    pub stderr: ChildStderr,
}

/// A running command and all it starts. Dropping it ends nothing: call [`Tree::kill`].
#[derive(Debug)]
pub struct Tree {
    keeper: Child,
    keeper_id: ProcessId,
    command: Pid,
    status: pipe::Receiver,
    partial: Vec<u8>,
    exit: Option<ExitStatus>,
    group: Option<Arc<StepGroup>>,
    is_wrapper: bool,
}

impl Tree {
    /// Starts `spawn` below a keeper, in a session and process group of its own, with `no_new_privs` set and umask 022.
    /// Needs a tokio runtime with I/O.
    ///
    /// # Errors
    /// When the program cannot be executed (not found, not executable, no such directory) or no process can be made.
    pub fn spawn(spawn: &Spawn) -> io::Result<(Self, Pipes)> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        let mut image = keeper::Image::new(spawn)?;
        // The program is executed by the keeper's side, not by std.
        let mut command = std::process::Command::new(&spawn.program);
        command.env_clear().current_dir(&spawn.cwd).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let report = write.as_raw_fd();
        // SAFETY: `split` runs in the forked child before exec and makes only async-signal-safe calls; `report` is open
        // there, because `write` lives until after the spawn.
        unsafe { command.pre_exec(move || keeper::split(report, &mut image)) };
        let (mut keeper, keeper_id) = {
            let mut known = strays::lock();
            let keeper = tokio::process::Command::from(command).spawn()?;
            let pid = keeper.id().and_then(|id| i32::try_from(id).ok()).ok_or_else(already_gone)?;
            let id = ProcessId::of(pid).unwrap_or(ProcessId { pid, start: 0 });
            known.insert(id);
            (keeper, id)
        };
        drop(write);
        let command = read_pid(&read)?;
        let pipes = Pipes {
            stdout: keeper.stdout.take().ok_or_else(already_gone)?,
            stderr: keeper.stderr.take().ok_or_else(already_gone)?,
        };
        let tree = Self {
            keeper,
            keeper_id,
            command,
            status: pipe::Receiver::from_owned_fd(read)?,
            partial: Vec::with_capacity(4),
            exit: None,
            group: spawn.group.clone(),
            is_wrapper: spawn.is_wrapper,
        };
        Ok((tree, pipes))
    }

    /// The keeper: what to write down so that the tree can be ended after a restart of this process.
    pub fn id(&self) -> ProcessId {
        self.keeper_id
    }

    /// Waits until the command itself has ended; what it left behind may go on. May be dropped and called again.
    /// A command whose keeper was killed counts as ended by SIGKILL.
    pub async fn command_exit(&mut self) -> ExitStatus {
        while self.exit.is_none() {
            let mut byte = [0_u8; 4];
            match self.status.read(&mut byte[..4 - self.partial.len()]).await {
                Ok(0) | Err(_) => {
                    strays::suspect();
                    self.exit = Some(ExitStatus::from_raw(Signal::SIGKILL as i32));
                }
                Ok(n) => self.partial.extend_from_slice(&byte[..n]),
            }
            if let Ok(raw) = <[u8; 4]>::try_from(self.partial.as_slice()) {
                self.exit = Some(ExitStatus::from_raw(i32::from_ne_bytes(raw)));
            }
        }
        self.exit.unwrap_or_default()
    }

    /// SIGTERM to the process group of the command; below a wrapper, to all processes.
    pub fn terminate(&self) {
        if self.is_wrapper {
            return proc_fs::terminate_below(self.command.as_raw());
        }
        // It may be gone already, which is what was wanted.
        let _ = killpg(self.command, Signal::SIGTERM);
    }

    /// Ends every process of the tree with SIGKILL and waits until none is left. Returns how many it ended.
    pub async fn kill(&mut self) -> u32 {
        // A keeper that has nothing left is about to end by itself: no search is needed then.
        if self.exit.is_some() && self.keeper_ended().await {
            return self.group.as_ref().map_or(0, |group| group.kill());
        }
        // All at once where the kernel does that; a search finds them once more while they are dying.
        let at_once = self.group.as_ref().map_or(0, |group| group.kill());
        let mut killed = 0;
        for sweep in 0..MAX_SWEEPS {
            if let Ok(Some(_)) = self.keeper.try_wait() {
                break;
            }
            killed += proc_fs::kill_below(self.keeper_id);
            if self.keeper_ended().await {
                break;
            }
            if sweep == MAX_SWEEPS - 1 {
                // Nothing that can be killed is left; the keeper would wait for the rest for ever.
                let _ = self.keeper.start_kill();
            }
        }
        killed.max(at_once)
    }

    /// Waits a moment for the end of the keeper.
    async fn keeper_ended(&mut self) -> bool {
        match tokio::time::timeout(SWEEP, self.keeper.wait()).await {
            Ok(status) => {
                if !status.is_ok_and(|status| status.success()) {
                    strays::suspect();
                }
                true
            }
            Err(_) => false,
        }
    }

    /// True while any process of the tree lives, the command included.
    pub fn is_alive(&mut self) -> bool {
        !matches!(self.keeper.try_wait(), Ok(Some(_)))
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if !self.is_alive() {
            strays::forget(self.keeper_id);
        }
    }
}

fn already_gone() -> io::Error {
    io::Error::other("the process ended before it could be looked at")
}

/// The first report of the keeper, already written when exec has succeeded or about to be.
fn read_pid(read: &OwnedFd) -> io::Result<Pid> {
    let mut bytes = [0_u8; 4];
    let mut have = 0;
    while have < bytes.len() {
        match nix::unistd::read(read, &mut bytes[have..]) {
            Ok(0) => return Err(already_gone()),
            Ok(n) => have += n,
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(Pid::from_raw(i32::from_ne_bytes(bytes)))
}

/// Ends the tree of a keeper that an earlier process of this program started, then the keeper. A pid that now belongs to
/// another process is left alone. Returns how many processes were ended.
pub fn kill_leftovers(keeper: ProcessId) -> u32 {
    if !keeper.is_alive() {
        return 0;
    }
    let mut killed = 0;
    for _ in 0..MAX_SWEEPS {
        killed += proc_fs::kill_below(keeper);
        if !keeper.is_alive() {
            return killed;
        }
        if descendants(keeper).is_empty() {
            // It is not our child, so nobody may have reaped it yet; ending it is enough.
            return killed + u32::from(keeper.signal(Signal::SIGKILL));
        }
        std::thread::sleep(SWEEP);
    }
    killed
}

#[cfg(test)]
mod tests;
