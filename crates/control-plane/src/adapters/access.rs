//! The access log: what is worth an entry is written in batches, behind the requests.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kici_access::AccessEntry;
use kici_api::dto::access_log::{AccessFilter, AccessView};
use kici_api::page::{PageRequest, Slice};
use kici_api::ports::{AccessLog, Answer, Caller};
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
    queue: mpsc::Sender<model::NewAccess>,
}

impl AccessBook {
    /// A log, and the task that writes it until `stop`.
    pub(crate) fn new(store: Store, stop: CancellationToken) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let (queue, entries) = mpsc::channel(QUEUE);
        let writer = write(store.clone(), entries, stop);
        (Arc::new(Self { store, queue }), writer)
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
    fn record(&self, entry: AccessEntry) {
        let (target_type, target_id) = entry.target.map(|(kind, id)| (kind.as_str().to_owned(), id)).unzip();
        let row = model::NewAccess {
            org: Some(entry.org.unwrap_or_else(|| DEFAULT_ORG.to_owned())),
            actor_type: entry.actor.kind.as_str().to_owned(),
            actor_id: entry.actor.id,
            actor_meta: entry.actor.via.map(|label| serde_json::json!({"via_agent": label})),
            action: entry.action.to_string(),
            source: entry.source.as_str().to_owned(),
            outcome: entry.outcome.as_str().to_owned(),
            target_type,
            target_id,
            request_id: entry.request_id,
            routing_key: entry.routing_key,
            error_message: entry.error_message,
        };
        if self.queue.try_send(row).is_err() {
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
