//! A running command and all it starts, on the host or in the container of the job.

use std::pin::Pin;
use std::process::ExitStatus;
use std::sync::Arc;

use kici_sys::process::{self, ProcessId, Spawn};
use tokio::io::AsyncRead;

use crate::container::{Inside, Process};

/// The output of a command.
pub struct Pipes {
    /// Standard output.
    pub stdout: Pin<Box<dyn AsyncRead + Send>>,
    /// Standard error.
    pub stderr: Pin<Box<dyn AsyncRead + Send>>,
}

/// A running command and all it starts. Dropping it ends nothing: call [`Tree::kill`].
#[allow(clippy::large_enum_variant, reason = "most are of the host, and there are few")]
pub enum Tree {
    /// Below a keeper of this host.
    Host(process::Tree),
    /// Below a keeper in a container.
    Inside(Arc<Inside>, Process),
}

impl Tree {
    /// Starts a command on the host.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(spawn: &Spawn) -> std::io::Result<(Self, Pipes)> {
        let (tree, pipes) = process::Tree::spawn(spawn)?;
        Ok((Self::Host(tree), Pipes { stdout: Box::pin(pipes.stdout), stderr: Box::pin(pipes.stderr) }))
    }

    /// Its keeper on the host: what to write down so that the tree can be ended after a restart.
    pub fn keeper(&self) -> Option<ProcessId> {
        match self {
            Self::Host(tree) => Some(tree.id()),
            Self::Inside(..) => None,
        }
    }

    /// Waits until the command itself has ended; what it left behind may go on.
    pub async fn command_exit(&mut self) -> ExitStatus {
        match self {
            Self::Host(tree) => tree.command_exit().await,
            Self::Inside(_, process) => process.exit().await,
        }
    }

    /// SIGTERM to the process group of the command.
    pub fn terminate(&self) {
        match self {
            Self::Host(tree) => tree.terminate(),
            Self::Inside(_, process) => process.terminate(),
        }
    }

    /// Ends every process of the tree with SIGKILL and waits until none is left. Returns how many it ended.
    pub async fn kill(&mut self) -> u32 {
        match self {
            Self::Host(tree) => tree.kill().await,
            Self::Inside(inside, process) => inside.kill(process).await,
        }
    }
}
