//! Runs a command inside a write window: the window is open from before the command starts until after it ended, however it
//! ends. If this program is killed, the agent sees its connection close and closes the window.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value as Json;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::client::{CallError, Connection};
use crate::wire::git::{Close, Want, Window};

/// How long the agent may take to open a window: it asks the forge first.
const OPEN_LIMIT: Duration = Duration::from_secs(40);
/// How long it may take to close one.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Why a command did not run.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// There is no window.
    #[error(transparent)]
    Call(#[from] CallError),
    /// There is a window, but the command cannot be started.
    #[error("`{program}` cannot be started: {error}")]
    Start {
        /// Which.
        program: String,
        /// Why not.
        error: io::Error,
    },
}

impl WindowError {
    /// What the program exits with.
    pub fn exit(&self) -> u8 {
        match self {
            Self::Call(error) => error.exit(),
            Self::Start { error, .. } if error.kind() == io::ErrorKind::NotFound => 127,
            Self::Start { .. } => 126,
        }
    }
}

/// Opens a window, runs `command` in it and closes it. Returns what the command exited with; `say` gets words for people.
///
/// # Errors
/// [`WindowError`] when the command did not run.
pub async fn with_write(socket: &Path, want: &Want, command: &[String], say: impl Fn(&str)) -> Result<u8, WindowError> {
    let mut connection = Connection::open(socket).map_err(CallError::from)?;
    let window: Window = connection.call("git.open", want, OPEN_LIMIT)?;
    if let Some(note) = &window.note {
        say(note);
    }
    let ran = run(command).await;
    let closed: Result<Json, CallError> = connection.call("git.close", &Close { window: window.window }, CLOSE_LIMIT);
    if let Err(error) = closed {
        // It closes with the connection, at the latest with the agent's own limit.
        say(&format!("the write window could not be closed in order: {error}"));
    }
    let status = ran.map_err(|error| {
        let program = command.first().cloned().unwrap_or_default();
        WindowError::Start { program, error }
    })?;
    Ok(exit_code(status))
}

/// As a shell says it: 128 and the number of the signal.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

async fn run(command: &[String]) -> io::Result<ExitStatus> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no command is given"));
    };
    // Caught before the command starts: from then on this program ends after the command does.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut child = Command::new(program).args(arguments).spawn()?;
    loop {
        let told = tokio::select! {
            status = child.wait() => return status,
            _ = interrupt.recv() => Signal::SIGINT,
            _ = terminate.recv() => Signal::SIGTERM,
            _ = hangup.recv() => Signal::SIGHUP,
        };
        pass_on(&child, told);
    }
}

fn pass_on(child: &Child, told: Signal) {
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()) {
        // It was not waited for yet, so the number is still its own; it may have ended already.
        let _ = kill(Pid::from_raw(pid), told);
    }
}
