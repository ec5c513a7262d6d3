//! The event log and the dead letters.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use kici_api::dto::events::{DeliveryFilter, DeliveryView, Explanation, Payload, RunRef};
use kici_api::dto::sources::DeliveryAccepted;
use kici_api::dto::stream::Change;
use kici_api::live::Hub;
use kici_api::page::{PageRequest, Slice};
use kici_api::ports::{Answer, Caller, Events};
use kici_api::problem::{Code, Problem};
use kici_engine::ids::{DeliveryRowId, SourceId};
use kici_store::Store;
use kici_store::model::{self, DeliveryInserted, DeliveryOutcome, DeliveryStatus, NewDelivery};

use super::{DEFAULT_ORG, fault, views};
use crate::payloads::Payloads;

/// The event log over the store.
pub(crate) struct EventBook {
    pub(crate) store: Store,
    pub(crate) payloads: Payloads,
    pub(crate) live: Arc<Hub>,
}

impl EventBook {
    /// Sources by id, removed ones included where rows name them.
    async fn source_names(&self, rows: &[model::Delivery]) -> Answer<HashMap<SourceId, model::Source>> {
        let mut names = HashMap::new();
        for row in rows {
            if names.contains_key(&row.source_id) {
                continue;
            }
            if let Some(source) = self.store.source_by_id(row.source_id).await.map_err(fault::store)? {
                names.insert(row.source_id, source);
            }
        }
        Ok(names)
    }

    async fn visible(&self, caller: &Caller, id: DeliveryRowId) -> Answer<(model::Delivery, model::Source)> {
        let missing = || Problem::not_found(format!("delivery {id}"));
        let row = self.store.delivery_get(id).await.map_err(fault::store)?.ok_or_else(missing)?;
        let source = self.store.source_by_id(row.source_id).await.map_err(fault::store)?.ok_or_else(missing)?;
        if caller.sees(&source.routing_key) { Ok((row, source)) } else { Err(missing()) }
    }

    async fn dead(&self, caller: &Caller, id: DeliveryRowId) -> Answer<model::Delivery> {
        let (row, _) = self.visible(caller, id).await?;
        if row.status == DeliveryStatus::Dead {
            return Ok(row);
        }
        let detail = format!("delivery {id} is {}, not a dead letter", row.status);
        Err(Problem::new(Code::NotDeadLetter, detail))
    }

    async fn page(
        &self,
        caller: &Caller,
        mut wanted: model::DeliveryFilter,
        page: PageRequest,
    ) -> Answer<Slice<DeliveryView>> {
        if let Some(scope) = &caller.routing_key {
            let own = self.store.source_by_routing_key(scope.clone()).await.map_err(fault::store)?;
            match own {
                Some(own) if wanted.source_id.is_none_or(|id| id == own.id) => wanted.source_id = Some(own.id),
                _ => return Ok(Slice { items: Vec::new(), next: None }),
            }
        }
        let listed = self.store.delivery_list(wanted, views::page(page)).await.map_err(fault::store)?;
        let names = self.source_names(&listed.items).await?;
        Ok(views::slice(listed, |row| {
            let name = names.get(&row.source_id).map(|source| source.name.clone()).unwrap_or_default();
            views::delivery(row, name)
        }))
    }
}

fn statuses(filter: &DeliveryFilter) -> Answer<Vec<DeliveryStatus>> {
    let words = filter.status.as_deref().unwrap_or_default().split(',').map(str::trim).filter(|w| !w.is_empty());
    words
        .map(str::parse)
        .collect::<Result<_, kici_engine::state::UnknownWord>>()
        .map_err(|error| Problem::rejected("status", error.to_string()))
}

#[async_trait]
impl Events for EventBook {
    async fn list(&self, caller: &Caller, filter: &DeliveryFilter, page: PageRequest) -> Answer<Slice<DeliveryView>> {
        let mut wanted = model::DeliveryFilter {
            source_id: None,
            statuses: statuses(filter)?,
            event: filter.event.clone(),
            repo: filter.repo.clone(),
            delivery_id: filter.delivery_id.clone(),
            from: filter.from,
            to: filter.to,
        };
        if let Some(name) = &filter.source {
            let found = self.store.source_get(DEFAULT_ORG.to_owned(), name.clone()).await.map_err(fault::store)?;
            let source = found.ok_or_else(|| Problem::rejected("source", format!("there is no source `{name}`")))?;
            wanted.source_id = Some(source.id);
        }
        self.page(caller, wanted, page).await
    }

    async fn get(&self, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryView> {
        let (row, source) = self.visible(caller, id).await?;
        Ok(views::delivery(row, source.name))
    }

    async fn payload(&self, caller: &Caller, id: DeliveryRowId) -> Answer<Payload> {
        let (row, _) = self.visible(caller, id).await?;
        let body = self.payloads.body(&row).await?;
        let kind = body.headers.get("content-type").and_then(|kind| kind.as_str()).unwrap_or("application/json");
        Ok(Payload { content_type: kind.to_owned(), body: body.body })
    }

    async fn explain(&self, caller: &Caller, id: DeliveryRowId) -> Answer<Explanation> {
        let (row, source) = self.visible(caller, id).await?;
        let trace = self.store.trace_get(id).await.map_err(fault::store)?;
        let filter = model::RunFilter { delivery_id: Some(id), ..model::RunFilter::default() };
        let page = model::Page { limit: 200, after: None };
        let runs = self.store.run_list(filter, page).await.map_err(fault::store)?;
        let runs = runs
            .items
            .into_iter()
            .map(|run| RunRef { run_id: run.id, workflow: run.workflow_name, status: run.status })
            .collect();
        Ok(Explanation { delivery: views::delivery(row, source.name), trace, runs })
    }

    async fn redeliver(&self, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryAccepted> {
        let (row, _) = self.visible(caller, id).await?;
        let body = self.payloads.body(&row).await?;
        for attempt in 1..=1000 {
            let new = NewDelivery {
                org: row.org.clone(),
                source_id: row.source_id,
                delivery_id: format!("replay:{}:{attempt}", id.uuid()),
                event: row.event.clone(),
                action: row.action.clone(),
                provider: row.provider.clone(),
                channel: "manual".to_owned(),
                repo: row.repo.clone(),
                git_ref: row.git_ref.clone(),
                sha: row.sha.clone(),
                request_id: caller.request_id.clone(),
                headers: body.headers.clone(),
                body: body.body.clone(),
                claimed_by: None,
            };
            match self.store.delivery_insert(new).await.map_err(fault::store)? {
                DeliveryInserted::Inserted(delivery_id) => return Ok(DeliveryAccepted { delivery_id }),
                DeliveryInserted::Duplicate { .. } | DeliveryInserted::Reopened(_) => {}
            }
        }
        Err(Problem::new(Code::Conflict, format!("delivery {id} was replayed 1000 times")))
    }

    async fn dlq_list(&self, caller: &Caller, page: PageRequest) -> Answer<Slice<DeliveryView>> {
        let wanted = model::DeliveryFilter { statuses: vec![DeliveryStatus::Dead], ..model::DeliveryFilter::default() };
        self.page(caller, wanted, page).await
    }

    async fn dlq_count(&self, _caller: &Caller) -> Answer<u64> {
        let counts = self.store.delivery_counts().await.map_err(fault::store)?;
        Ok(counts.get(&DeliveryStatus::Dead).copied().unwrap_or(0))
    }

    async fn dlq_retry(&self, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryAccepted> {
        self.dead(caller, id).await?;
        if !self.store.delivery_reopen(id).await.map_err(fault::store)? {
            return Err(Problem::new(Code::Conflict, format!("delivery {id} is being processed")));
        }
        self.live.publish(Change::Dlq {});
        Ok(DeliveryAccepted { delivery_id: id })
    }

    async fn dlq_discard(&self, caller: &Caller, id: DeliveryRowId, reason: &str) -> Answer<()> {
        let row = self.dead(caller, id).await?;
        let note = format!("discarded by {}: {}", caller.actor, reason.chars().take(500).collect::<String>());
        let outcome = DeliveryOutcome { status: DeliveryStatus::Failed, error: row.error, note: Some(note) };
        // A dead row is finished; it is opened and closed again in the new state.
        if self.store.delivery_reopen(id).await.map_err(fault::store)? {
            self.store.delivery_finish(id, outcome).await.map_err(fault::store)?;
        }
        self.live.publish(Change::Dlq {});
        Ok(())
    }
}
