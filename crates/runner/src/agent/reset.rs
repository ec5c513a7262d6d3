//! The command between two jobs, which brings the host back into the state that the next one expects.

use std::time::Duration;

use kici_engine::state::JobStatus;
use kici_protocol::agent::JobUpdate;
use kici_sys::process::{Spawn, Tree};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;

use super::Agent;
use crate::config::{Config, ResetOn};
use crate::key::JobKey;
use crate::steps::environment::to_os;

/// Bytes of its output that a failure shows.
const SHOWN_BYTES: usize = 2_048;

/// How one reset went; the error in words.
pub(super) type Ended = Result<(), String>;

/// What the agent knows of its resets.
#[derive(Debug)]
pub(super) struct Resets {
    /// The job that asks for the next one.
    due: Option<(JobKey, String)>,
    /// One runs.
    pub running: bool,
    /// Failures in a row.
    failures: u32,
    /// There were too many: no more work.
    pub gave_up: bool,
    tell: mpsc::Sender<Ended>,
}

impl Resets {
    pub fn new() -> (Self, mpsc::Receiver<Ended>) {
        let (tell, ended) = mpsc::channel(1);
        (Self { due: None, running: false, failures: 0, gave_up: false, tell }, ended)
    }
}

impl Agent {
    /// A job has ended: it may ask for a reset once the agent is idle. A failure is not forgotten for a later success.
    pub(super) fn note_end(&mut self, key: JobKey, result: &JobUpdate) {
        let reset = &self.config.reset;
        let failed = result.state != JobStatus::Success.as_str();
        let wanted = reset.command.is_some() && (reset.on == ResetOn::Always || failed);
        let success = |due: &(JobKey, String)| due.1 == JobStatus::Success.as_str();
        if wanted && !self.is_single_use() && self.resets.due.as_ref().is_none_or(success) {
            self.resets.due = Some((key, result.state.clone()));
        }
    }

    /// No work is taken now: a reset runs, or the only job has ended that it waits for. Were the agent to take the next one while
    /// it deletes the workspace, under a steady load no reset would ever run.
    pub(super) fn is_resetting(&self) -> bool {
        self.resets.running || (self.resets.due.is_some() && self.config.max_concurrency == 1)
    }

    /// Starts the reset that is due, if no job is held.
    pub(super) fn reset_when_idle(&mut self) {
        if self.resets.running || !self.jobs.is_empty() {
            return;
        }
        let (Some((job, status)), Some(command)) = (self.resets.due.take(), self.config.reset.command.clone()) else {
            return;
        };
        self.resets.running = true;
        self.say_status();
        let (config, tell) = (std::sync::Arc::clone(&self.config), self.resets.tell.clone());
        self.tasks.spawn(async move {
            let ended = run(&config, &command, job, &status).await;
            // The agent is gone only when the program ends.
            let _ = tell.send(ended).await;
        });
    }

    /// A reset has ended: the agent takes work again, unless too many failed.
    pub(super) fn on_reset(&mut self, ended: Ended) {
        self.resets.running = false;
        match ended {
            Ok(()) => {
                self.resets.failures = 0;
                self.degraded.retain(|why| !why.starts_with("reset: "));
            }
            Err(why) => {
                self.resets.failures += 1;
                metrics::counter!("kici_agent_reset_failures_total").increment(1);
                let failures = self.resets.failures;
                tracing::warn!(why, failures, "the reset between two jobs failed");
                let reset = &self.config.reset;
                if reset.drain_on_failure && failures >= reset.threshold {
                    self.resets.gave_up = true;
                    self.degrade(format!(
                        "reset: failed {failures} times in a row: {why}; mend it and restart the agent"
                    ));
                }
            }
        }
        self.say_status();
        self.reset_when_idle();
    }
}

/// Runs the command to its end; nothing of it is left then.
async fn run(config: &Config, command: &str, job: JobKey, status: &str) -> Ended {
    // That of the agent, whose user it runs as: what steps can write, it must not read.
    let mut env = config.agent_env.clone();
    env.insert("KICI_RESET_JOB_ID".to_owned(), job.job.to_string());
    env.insert("KICI_RESET_JOB_STATUS".to_owned(), status.to_owned());
    let spawn =
        Spawn { args: vec!["-c".into(), command.into()], env: to_os(&env), ..Spawn::new("/bin/sh", &config.work_dir) };
    let (mut tree, mut pipes) = Tree::spawn(&spawn).map_err(|error| format!("cannot start `/bin/sh`: {error}"))?;
    let mut shown = Vec::new();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let work = async {
        let status = async {
            let status = tree.command_exit().await;
            // What it left running must not hold the pipes.
            tree.kill().await;
            status
        };
        let (status, ..) = tokio::join!(status, tail(&mut pipes.stdout, &mut out), tail(&mut pipes.stderr, &mut err));
        status
    };
    let ended = tokio::time::timeout(config.reset.timeout, work).await;
    shown.extend_from_slice(&out);
    shown.extend_from_slice(&err);
    let said = String::from_utf8_lossy(&shown).trim().replace('\n', " | ");
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{}: {said}", crate::steps::describe(status))),
        Err(_) => {
            tree.kill().await;
            Err(format!("ran longer than its limit of {} s: {said}", seconds(config.reset.timeout)))
        }
    }
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

/// Reads to the end and keeps the last bytes.
async fn tail(from: &mut (impl AsyncRead + Unpin), into: &mut Vec<u8>) {
    let mut buffer = [0; 4_096];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        into.extend_from_slice(&buffer[..n]);
        into.drain(..into.len().saturating_sub(SHOWN_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::{JobId, RunId};

    use super::*;
    use crate::config::Sources;

    #[tokio::test]
    async fn a_reset_has_the_home_of_the_agent_and_not_that_of_the_steps() {
        let dir = tempfile::tempdir().expect("a directory");
        let env = [
            ("KICI_ORCHESTRATOR_URL", "http://127.0.0.1:1".to_owned()),
            ("KICI_STATE_DIR", dir.path().display().to_string()),
            ("KICI_WORK_DIR", dir.path().display().to_string()),
            ("PATH", "/usr/bin:/bin".to_owned()),
            ("HOME", "/of/the/agent".to_owned()),
        ];
        let env = env.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let mut config = Config::load(&Sources { env, ..Sources::default() }).expect("right");
        config.host_env.insert("HOME".to_owned(), "/of/the/steps".to_owned());
        let nil = uuid::Uuid::nil();
        let job = JobKey { run: RunId::from_uuid(nil), job: JobId::from_uuid(nil), epoch: 1 };
        assert_eq!(run(&config, "test $HOME = /of/the/agent", job, "success").await, Ok(()));
    }
}
