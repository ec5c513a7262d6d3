//! The access log: what is worth an entry is written in batches, behind the requests.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kici_access::{AccessSource, Outcome, Recorder};
use kici_api::dto::access_log::{AccessFilter, AccessView};
use kici_api::page::{PageRequest, Slice};
use kici_api::ports::{AccessLog, AccessOutcome, AccessRecord, Answer, Caller};
use kici_engine::time::Clock;
use kici_store::{Store, model};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{DEFAULT_ORG, fault, views};

/// Entries that wait to be written; more are dropped and counted.
const QUEUE: usize = 10_000;
const BATCH: usize = 200;
const PAUSE: Duration = Duration::from_millis(200);

/// The access log over the store.
pub(crate) struct AccessBook {
    store: Store,
    clock: Arc<dyn Clock>,
    recorder: Mutex<Recorder>,
    queue: mpsc::Sender<model::NewAccess>,
}

impl AccessBook {
    /// A log, and the task that writes it until `stop`.
    pub(crate) fn new(
        store: Store,
        clock: Arc<dyn Clock>,
        stop: CancellationToken,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let (queue, entries) = mpsc::channel(QUEUE);
        let writer = write(store.clone(), entries, stop);
        (Arc::new(Self { store, clock, recorder: Mutex::default(), queue }), writer)
    }
}

async fn write(store: Store, mut entries: mpsc::Receiver<model::NewAccess>, stop: CancellationToken) {
    let mut batch = Vec::new();
    loop {
        let received = tokio::select! {
            received = entries.recv_many(&mut batch, BATCH) => received,
            () = stop.cancelled() => {
                entries.close();
                entries.recv_many(&mut batch, QUEUE).await
            }
        };
        if received == 0 {
            return;
        }
        let count = batch.len() as u64;
        if let Err(error) = store.access_log_insert(std::mem::take(&mut batch)).await {
            tracing::warn!(%error, count, "entries of the access log are lost");
            metrics::counter!("kici_orch_access_log_dropped_total").increment(count);
        }
        if !stop.is_cancelled() {
            // Entries come in bursts; a short wait writes a burst in one transaction.
            tokio::time::sleep(PAUSE).await;
        }
    }
}

#[async_trait]
impl AccessLog for AccessBook {
    fn record(&self, record: AccessRecord) {
        let outcome = match record.outcome {
            AccessOutcome::Allowed => Outcome::Allowed,
            AccessOutcome::Denied => Outcome::Denied,
            AccessOutcome::Error => Outcome::Error,
        };
        let keep = {
            let mut recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
            recorder.keeps(record.action, &record.actor, outcome, &record.request_id, self.clock.now())
        };
        if !keep {
            return;
        }
        let source = if record.from_cli { AccessSource::AdminCli } else { AccessSource::AdminHttp };
        let entry = model::NewAccess {
            org: Some(DEFAULT_ORG.to_owned()),
            actor_type: record.actor.kind.as_str().to_owned(),
            actor_id: record.actor.id.clone(),
            actor_meta: None,
            action: record.action.to_owned(),
            source: source.as_str().to_owned(),
            outcome: outcome.as_str().to_owned(),
            target_type: record.target_type.map(str::to_owned),
            target_id: record.target_id,
            request_id: Some(record.request_id),
            routing_key: record.routing_key,
            error_message: record.error,
        };
        if self.queue.try_send(entry).is_err() {
            metrics::counter!("kici_orch_access_log_dropped_total").increment(1);
        }
    }

    async fn list(&self, _caller: &Caller, filter: &AccessFilter, page: PageRequest) -> Answer<Slice<AccessView>> {
        let wanted = model::AccessFilter {
            actor_id: filter.actor.clone(),
            action: filter.action.clone(),
            target_type: filter.target_type.clone(),
            target_id: filter.target_id.clone(),
            outcome: filter.outcome.clone(),
            from: filter.from,
            to: filter.to,
        };
        let listed = self.store.access_log_list(wanted, views::page(page)).await.map_err(fault::store)?;
        Ok(views::slice(listed, |row| AccessView {
            id: row.id,
            actor: format!("{}:{}", row.entry.actor_type, row.entry.actor_id),
            action: row.entry.action,
            source: row.entry.source,
            outcome: row.entry.outcome,
            target_type: row.entry.target_type,
            target_id: row.entry.target_id,
            request_id: row.entry.request_id,
            error_message: row.entry.error_message,
            created_at: row.created_at,
        }))
    }
}
