//! Calls over the socket of a job, from its steps. Blocking: the callers are short-lived programs.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use crate::wire::{self, Code, Refusal, Reply};

/// A connection to the agent.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
}

/// A call that was not done.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The agent does not answer.
    #[error("the agent does not answer on the socket of this job: {0}")]
    Io(#[from] io::Error),
    /// The agent refuses.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl CallError {
    /// What a command that met this error exits with.
    pub fn exit(&self) -> u8 {
        match self {
            Self::Io(_) => Code::Failed.exit(),
            Self::Refused(refusal) => refusal.code.exit(),
        }
    }
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens at `socket`.
    pub fn open(socket: &Path) -> io::Result<Self> {
        Ok(Self { stream: UnixStream::connect(socket)? })
    }

    /// Calls a verb and waits for its answer at most `limit` for each part of it.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn call<T: DeserializeOwned>(
        &mut self,
        verb: &str,
        body: &impl Serialize,
        limit: Duration,
    ) -> Result<T, CallError> {
        #[derive(Serialize)]
        struct Ask<'a, B> {
            verb: &'a str,
            body: &'a B,
        }
        self.stream.set_read_timeout(Some(limit))?;
        self.stream.set_write_timeout(Some(limit))?;
        wire::send(&mut self.stream, &Ask { verb, body })?;
        match wire::receive::<Reply>(&mut self.stream)? {
            Reply::Ok(answer) => Ok(read(answer)?),
            Reply::Error(refusal) => Err(refusal.into()),
        }
    }
}

fn read<T: DeserializeOwned>(answer: Json) -> io::Result<T> {
    serde_json::from_value(answer)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it answers in a form that this program does not know"))
}
