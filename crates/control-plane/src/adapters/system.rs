//! The node itself: health, readiness, drain, diagnosis.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use kici_api::dto::system::{
    BuildInfo, Capabilities, Check, CheckStatus, Diagnosis, Drain, DrainState, Health, OrchestratorStatus, Ready,
};
use kici_api::ports::{Answer, Caller, System};
use kici_dispatch::Dispatcher;
use kici_engine::ids::InstanceId;
use kici_store::Store;
use kici_telemetry::metrics::Metrics;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::background::Statuses;
use crate::logs::LogAppender;

/// Limit of the database's answer in `ready`.
const PING: Duration = Duration::from_secs(2);
/// Below this much free space the node is not well; below the first it fails.
const DISK_FAIL: u64 = 100 * 1024 * 1024;
const DISK_WARN: u64 = 1024 * 1024 * 1024;

/// What a node knows of itself.
pub(crate) struct Node {
    pub(crate) store: Store,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) logs: LogAppender,
    pub(crate) metrics: Metrics,
    pub(crate) instance: InstanceId,
    pub(crate) data_dir: PathBuf,
    pub(crate) started: Instant,
    /// Set once everything has started.
    pub(crate) warm: AtomicBool,
    pub(crate) stopping: AtomicBool,
    pub(crate) drain_reason: std::sync::Mutex<Option<String>>,
    pub(crate) statuses: Arc<Statuses>,
    /// The term in which this instance holds the lease; none while it does not.
    pub(crate) leads: Arc<watch::Sender<Option<i64>>>,
}

impl Node {
    /// Why jobs cannot be given out and deliveries cannot be stored for want of space; none when they can.
    pub(crate) fn disk_problem(&self) -> Option<String> {
        let free = kici_sys::host::disk_free_bytes(&self.data_dir).ok()?;
        if free >= DISK_FAIL {
            self.logs.health().space_found();
        }
        (free < DISK_FAIL / 10 || self.logs.health().is_full())
            .then(|| format!("{} MiB free in {}", free / (1024 * 1024), self.data_dir.display()))
    }

    async fn database(&self) -> Result<Duration, String> {
        let asked = Instant::now();
        match tokio::time::timeout(PING, self.store.ping()).await {
            Ok(Ok(())) => Ok(asked.elapsed()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer within 2 s".to_owned()),
        }
    }

    fn state(&self) -> DrainState {
        let status = self.dispatcher.drain_status();
        let reason = self.drain_reason.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        DrainState {
            draining: status.draining,
            reason: reason.filter(|_| status.draining),
            jobs_running: u32::try_from(status.jobs_running).unwrap_or(u32::MAX),
        }
    }

    fn disk_check(&self) -> (CheckStatus, String) {
        match kici_sys::host::disk_free_bytes(&self.data_dir) {
            Ok(free) => {
                let status = match free {
                    free if free < DISK_FAIL => CheckStatus::Fail,
                    free if free < DISK_WARN => CheckStatus::Warn,
                    _ => CheckStatus::Pass,
                };
                (status, format!("{} MiB free in the data directory", free / (1024 * 1024)))
            }
            Err(error) => (CheckStatus::Warn, format!("free space is not known: {error}")),
        }
    }

    fn agents_check(&self) -> (CheckStatus, String) {
        match self.dispatcher.agents().len() {
            0 => (CheckStatus::Warn, "no agent is connected here".to_owned()),
            count => (CheckStatus::Pass, format!("{count} connected here")),
        }
    }

    async fn dlq_check(&self) -> (CheckStatus, String) {
        match self.store.dead_letters().await {
            Ok(0) => (CheckStatus::Pass, "no dead letters".to_owned()),
            Ok(count) => (CheckStatus::Warn, format!("{count} dead letters; see `event dlq list`")),
            Err(error) => (CheckStatus::Fail, error.to_string()),
        }
    }
}

fn check(name: &str, asked: Instant, (status, message): (CheckStatus, String)) -> Check {
    let duration_ms = u64::try_from(asked.elapsed().as_millis()).unwrap_or(u64::MAX);
    Check { name: name.to_owned(), status, message: message.chars().take(200).collect(), duration_ms }
}

#[async_trait]
impl System for Node {
    fn health(&self) -> Health {
        Health {
            status: "ok".to_owned(),
            instance_id: self.instance.to_string(),
            role: "coordinator".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            build: BuildInfo {
                commit: option_env!("KICI_BUILD_COMMIT").unwrap_or("unknown").to_owned(),
                target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            },
            uptime_s: self.started.elapsed().as_secs(),
        }
    }

    async fn ready(&self) -> Ready {
        let mut checks = BTreeMap::new();
        let mut ready = true;
        let mut note = |name: &str, fault: Option<String>| {
            ready &= fault.is_none();
            checks.insert(name.to_owned(), fault.unwrap_or_else(|| "ok".to_owned()));
        };
        note("warm", (!self.warm.load(Ordering::SeqCst)).then(|| "starting".to_owned()));
        note("stopping", self.stopping.load(Ordering::SeqCst).then(|| "stopping".to_owned()));
        note("db", self.database().await.err());
        note("disk", self.disk_problem());
        Ready { ready, draining: self.dispatcher.drain_status().draining, checks }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api: "v1".to_owned(),
            features: vec!["runs".to_owned(), "sources".to_owned(), "logs.follow".to_owned(), "stream".to_owned()],
        }
    }

    fn metrics(&self) -> String {
        self.metrics.render()
    }

    async fn drain_state(&self, _caller: &Caller) -> Answer<DrainState> {
        Ok(self.state())
    }

    async fn drain(&self, caller: &Caller, request: &Drain) -> Answer<DrainState> {
        tracing::info!(drain = request.drain, by = %caller.actor, reason = request.reason, "orchestrator drain");
        (*self.drain_reason.lock().unwrap_or_else(std::sync::PoisonError::into_inner)).clone_from(&request.reason);
        self.dispatcher.drain(request.drain);
        Ok(self.state())
    }

    async fn status(&self, _caller: &Caller) -> Answer<OrchestratorStatus> {
        Ok(OrchestratorStatus {
            instance_id: self.instance.to_string(),
            leader: self.leads.borrow().is_some(),
            drain: self.state(),
            reconcilers: self.statuses.all(),
        })
    }

    async fn diagnose(&self, _caller: &Caller) -> Answer<Diagnosis> {
        let asked = Instant::now();
        let database = match self.database().await {
            Ok(took) => (CheckStatus::Pass, format!("{} answers in {} µs", self.store.backend(), took.as_micros())),
            Err(problem) => (CheckStatus::Fail, problem),
        };
        let checks = vec![
            check("database", asked, database),
            check("disk", Instant::now(), self.disk_check()),
            check("agents", Instant::now(), self.agents_check()),
            check("dlq", Instant::now(), self.dlq_check().await),
        ];
        let status = checks.iter().map(|check| check.status).max().unwrap_or(CheckStatus::Pass);
        Ok(Diagnosis { status, checks })
    }
}
