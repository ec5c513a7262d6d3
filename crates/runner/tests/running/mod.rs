//! Agents in the process of a test.

#![allow(dead_code, reason = "each test program uses a part")]

use std::path::Path;
use std::sync::Arc;

use kici_engine::time::Clock;
use kici_runner::agent::{Agent, Ended, Signal};
use kici_runner::config::{Config, Sources};
use kici_runner::credentials::NoServices;
use kici_sys::clock::SystemClock;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use crate::fake::{Fake, token};

/// An agent in this process.
pub struct Running {
    pub signals: mpsc::Sender<Signal>,
    pub task: JoinHandle<Ended>,
    pub dir: TempDir,
}

/// Settings with these variables besides.
pub fn config(url: &str, dir: &Path, more: &[(&str, &str)]) -> Config {
    let mut env = vec![
        ("KICI_ORCHESTRATOR_URL".to_owned(), url.to_owned()),
        ("KICI_AGENT_TOKEN".to_owned(), token()),
        ("KICI_AGENT_ID".to_owned(), "agent-1".to_owned()),
        ("KICI_STATE_DIR".to_owned(), dir.display().to_string()),
        ("KICI_PORT".to_owned(), "0".to_owned()),
        ("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned()),
        ("HOME".to_owned(), dir.display().to_string()),
        ("SECRET_OF_THE_HOST".to_owned(), "x".to_owned()),
    ];
    env.extend(more.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
    Config::load(&Sources { file: None, env: env.into_iter().collect(), flags: Default::default() }).expect("right")
}

/// Starts an agent and waits until it has registered.
pub async fn agent(fake: &Fake, more: &[(&str, &str)]) -> Running {
    let dir = tempfile::tempdir().expect("a directory");
    agent_in(fake, dir, more, Arc::new(SystemClock)).await
}

/// The same, in a directory and by a clock.
pub async fn agent_in(fake: &Fake, dir: TempDir, more: &[(&str, &str)], clock: Arc<dyn Clock>) -> Running {
    let (signals, from_test) = mpsc::channel(4);
    let config = config(&fake.url(), dir.path(), more);
    let task = TaskTracker::new()
        .spawn(async move { Agent::run(config, clock, from_test, Arc::new(NoServices), None).await.expect("started") });
    fake.registered().await;
    Running { signals, task, dir }
}
