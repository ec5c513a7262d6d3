//! Jobs in containers, and services beside jobs: what is made for a job on the engine of the host, and how it is gone afterwards.
//!
//! Everything that is made carries the labels of its job and of this agent. What a job leaves is found by them, not by memory: at
//! its end, and when the agent starts after it died.

mod calls;
mod files;
mod job;
mod link;
mod services;
mod spec;

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kici_containers::{Engine, EngineError, Labels, NoEngine, find};
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::key::JobKey;

pub use calls::Answering;
pub use files::{Move, Packing};
pub use job::{Entered, Inside, JobContainers, Notes, Wanted};
pub use link::{Process, Stream};
pub use spec::{Names, PROGRAM, RUNTIME, SCRATCH, SOCKET, WORKSPACE, limits};

/// How often removing is tried before it is left to a later start.
const TRIES: u32 = 6;
/// Before the second try; then twice as long each time.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a start may be held up by what an earlier process left.
const SWEEP: Duration = Duration::from_secs(60);

/// Labels (agent.md 3.6).
const SANDBOX: &str = "kici-sandbox";
const SCOPE: &str = "kici-agent-scope";
const AGENT: &str = "kici-agent-id";
const JOB: &str = "kici-job-id";
const RUN: &str = "kici-run-id";
const EPOCH: &str = "kici-epoch";
const PROGRAM_LABEL: &str = "kici-runtime";

/// The containers of this agent.
#[derive(Debug)]
pub struct Containers {
    socket: Option<PathBuf>,
    env: std::collections::BTreeMap<String, String>,
    /// Tells what is this agent's from what others on the same engine made: agents may share a name, not a state directory.
    scope: String,
    agent: Mutex<String>,
    engine: tokio::sync::Mutex<Option<Engine>>,
    /// One at a time puts our program onto the engine.
    runtime: tokio::sync::Mutex<bool>,
}

impl Containers {
    /// Of an agent with these settings. Asks nobody yet.
    pub fn new(config: &Config) -> Self {
        Self {
            socket: config.containers.socket.clone(),
            env: config.engine_env.clone(),
            scope: hex::encode(&Sha256::digest(config.state_dir.as_os_str().as_encoded_bytes())[..4]),
            agent: Mutex::default(),
            engine: tokio::sync::Mutex::default(),
            runtime: tokio::sync::Mutex::default(),
        }
    }

    /// The agent has this name.
    pub fn name(&self, agent: &str) {
        agent.clone_into(&mut self.agent.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Whether somebody listens on the socket of an engine. Blocks for as long as connecting takes.
    ///
    /// # Errors
    /// [`NoEngine`].
    pub fn look(&self) -> Result<PathBuf, NoEngine> {
        find(self.socket.as_deref(), &self.env)
    }

    /// The engine.
    ///
    /// # Errors
    /// In words.
    pub async fn engine(&self) -> Result<Engine, String> {
        let mut known = self.engine.lock().await;
        if let Some(engine) = known.as_ref().filter(|engine| kici_containers::is_there(engine.socket())) {
            return Ok(engine.clone());
        }
        *known = None;
        let socket = self.look().map_err(|error| error.to_string())?;
        let engine = Engine::connect(&socket).await.map_err(|error| error.to_string())?;
        *known = Some(engine.clone());
        Ok(engine)
    }

    fn of_agent(&self) -> Labels {
        [(SANDBOX, "true"), (SCOPE, &*self.scope)].map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    /// The labels of what belongs to a job.
    fn of_job(&self, job: JobKey) -> Labels {
        let mut labels = self.of_agent();
        let agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner).clone();
        labels.extend(
            [
                (AGENT, agent),
                (JOB, job.job.uuid().to_string()),
                (RUN, job.run.uuid().to_string()),
                (EPOCH, job.epoch.to_string()),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        labels
    }

    fn names(&self, job: JobKey) -> Names {
        Names {
            job: format!("kici-{}-{}", self.scope, job.file_name()),
            runtime: format!("{PROGRAM_LABEL}-{}", hex::encode(&Sha256::digest(kici_sys::init::PROGRAM)[..8])),
            labels: self.of_job(job),
        }
    }

    /// Ends and removes everything that an earlier process of this agent left. Nothing happens where there is no engine: then
    /// nothing can be left running that an engine started.
    pub async fn sweep(&self) {
        if self.look().is_err() {
            return;
        }
        let swept = async {
            let engine = self.engine().await?;
            remove(&engine, &self.of_agent()).await
        };
        match tokio::time::timeout(SWEEP, swept).await {
            Ok(Ok(0)) => {}
            Ok(Ok(count)) => {
                tracing::warn!(count, "containers, networks and volumes of an earlier process were removed")
            }
            Ok(Err(error)) => {
                tracing::error!(error, "what an earlier process left on the container engine is not gone")
            }
            Err(_) => tracing::error!("the container engine takes too long to remove what an earlier process left"),
        }
    }
}

/// Removes everything with these labels and looks again until nothing is found. An engine refuses what is in use for a moment
/// longer, and forgets what it was told while it restarts.
async fn remove(engine: &Engine, labels: &Labels) -> Result<usize, String> {
    let (mut count, mut pause) = (0, AGAIN);
    let mut last = String::new();
    for tried in 0..TRIES {
        if tried > 0 {
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        match engine.labelled(labels).await {
            Ok(left) if left.is_empty() => return Ok(count),
            Ok(left) => {
                let removed = engine.remove(&left).await;
                count += removed.count;
                match removed.failed {
                    None => return Ok(count),
                    Some(error) => last = error.to_string(),
                }
            }
            Err(error) => last = error.to_string(),
        }
    }
    Err(last)
}

/// In words for a job.
fn said(error: EngineError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests;
