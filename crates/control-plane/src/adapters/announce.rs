//! Tells those who wait: the dispatcher of new work, live readers of changes.

use std::sync::Arc;

use kici_api::dto::agents::AgentStatus;
use kici_api::dto::stream;
use kici_api::live::Hub;
use kici_dispatch::Dispatcher;
use kici_dispatch::ports::{Change, Changes};
use kici_engine::ids::AgentId;
use kici_events::RunsCreated;
use kici_store::model::{Activate, CreatedRun, Processed};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use crate::logs::Grown;

/// Passes news on.
pub(crate) struct Announcer {
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) live: Arc<Hub>,
}

impl Announcer {
    /// A run was created, or found to exist.
    pub(crate) fn run_created(&self, created: &CreatedRun, routing_key: &str) {
        if !created.created {
            return;
        }
        if !created.ready.is_empty() {
            self.dispatcher.jobs_queued(&created.ready);
        }
        self.live.publish(stream::Change::Run {
            run_id: created.run_id,
            routing_key: Some(routing_key.to_owned()),
            status: created.status,
            created: true,
        });
    }
}

impl RunsCreated for Announcer {
    fn activate(&self) -> Arc<dyn Activate> {
        self.dispatcher.place()
    }

    fn created(&self, processed: &Processed, routing_key: &str) {
        for run in &processed.runs {
            self.run_created(run, routing_key);
        }
    }
}

/// Passes the growth of logs on to live readers, until the log store is gone.
pub(crate) async fn announce_logs(mut grown: broadcast::Receiver<Grown>, live: Arc<Hub>, stop: CancellationToken) {
    loop {
        let news = tokio::select! {
            () = stop.cancelled() => return,
            news = grown.recv() => news,
        };
        match news {
            Ok(Grown { run, key, step }) => live.publish(stream::Change::Log {
                run_id: run,
                job_id: key.job,
                epoch: key.epoch,
                step: step.as_str().to_owned(),
            }),
            // Readers look again by themselves, a little later.
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

/// The dispatcher's changes as live readers see them.
pub(crate) struct LiveChanges(pub(crate) Arc<Hub>);

impl Changes for LiveChanges {
    fn publish(&self, change: Change) {
        let shown = match change {
            Change::Run { run_id, routing_key, status } => {
                stream::Change::Run { run_id, routing_key, status, created: false }
            }
            Change::Job { run_id, job_id, status } => stream::Change::Job { run_id, job_id, status },
            Change::Step { run_id, job_id, epoch, step_key, status } => {
                stream::Change::Step { run_id, job_id, epoch, step: step_key, status }
            }
            Change::Agent { agent_id, connected } => {
                let Ok(agent_id) = AgentId::new(agent_id) else { return };
                let status = if connected { AgentStatus::Ready } else { AgentStatus::Unreachable };
                stream::Change::Agent { agent_id, status }
            }
        };
        self.0.publish(shown);
    }
}
