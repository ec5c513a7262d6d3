//! The agent as a process, for tests.

#![allow(dead_code, reason = "each test program uses a part")]

use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::fake::{Fake, token};

/// A program that does not outlive its test.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Killed {
    /// As an operator's kill -9.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The agent with only these settings.
pub fn command(state: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kici-agent"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("KICI_STATE_DIR", state)
        .env("KICI_PORT", "0")
        .stdout(Stdio::null());
    command
}

/// An agent of `fake`.
pub fn start(fake: &Fake, state: &Path) -> Killed {
    let mut command = command(state);
    command.env("KICI_ORCHESTRATOR_URL", fake.url()).env("KICI_AGENT_TOKEN", token());
    Killed(command.spawn().expect("the agent starts"))
}
