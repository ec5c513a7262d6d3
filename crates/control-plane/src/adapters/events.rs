//! The event log and the dead letters.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use kici_api::dto::bus::{DeadLetter, LetterId, LetterRetried};
use kici_api::dto::events::{DeliveryFilter, DeliveryView, Explanation, Payload, RunRef};
use kici_api::dto::sources::DeliveryAccepted;
use kici_api::dto::stream::Change;
use kici_api::live::Hub;
use kici_api::page::{PageRequest, Position, Slice};
use kici_api::ports::{Answer, Caller, Events};
use kici_api::problem::{Code, Problem};
use kici_engine::ids::{DeliveryRowId, EventId, SourceId};
use kici_store::Store;
use kici_store::model::{self, DeliveryInserted, DeliveryStatus, EventStatus, NewDelivery};

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

    async fn dead_event(&self, caller: &Caller, id: EventId) -> Answer<()> {
        let missing = || Problem::not_found(format!("event {id}"));
        let event = self.store.event_get(id).await.map_err(fault::store)?.ok_or_else(missing)?;
        if caller.routing_key.is_some() && caller.routing_key != event.routing_key {
            return Err(missing());
        }
        match event.status {
            EventStatus::Dead => Ok(()),
            status => Err(Problem::new(Code::NotDeadLetter, format!("event {id} is {status}, not a dead letter"))),
        }
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

    async fn dlq_list(&self, caller: &Caller, page: PageRequest) -> Answer<Slice<DeadLetter>> {
        let wanted = model::DeliveryFilter { statuses: vec![DeliveryStatus::Dead], ..model::DeliveryFilter::default() };
        let deliveries = self.page(caller, wanted, page).await?;
        let filter = model::EventFilter {
            status: Some(EventStatus::Dead),
            routing_key: caller.routing_key.clone(),
            ..model::EventFilter::default()
        };
        let events = self.store.event_list(filter, views::page(page)).await.map_err(fault::store)?;
        let more = deliveries.next.is_some() || events.next.is_some();
        let mut items: Vec<DeadLetter> = deliveries.items.into_iter().map(dead_delivery).collect();
        let sources = self.store.source_list(DEFAULT_ORG.to_owned()).await.map_err(fault::store)?;
        let names: HashMap<String, String> =
            sources.into_iter().map(|source| (source.routing_key, source.name)).collect();
        items.extend(events.items.into_iter().map(|event| {
            let source = event.routing_key.as_ref().and_then(|key| names.get(key).cloned());
            dead_event(event, source)
        }));
        let place = |letter: &DeadLetter| Position { at: letter.created_at, id: bare(letter.id) };
        items.sort_by_key(|letter| std::cmp::Reverse((letter.created_at, bare(letter.id))));
        let limit = usize::try_from(page.limit).unwrap_or(usize::MAX);
        let more = more || items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(place);
        Ok(Slice { items, next })
    }

    async fn dlq_count(&self, _caller: &Caller) -> Answer<u64> {
        self.store.dead_letters().await.map_err(fault::store)
    }

    async fn dlq_retry(&self, caller: &Caller, id: LetterId) -> Answer<LetterRetried> {
        let opened = match id {
            LetterId::Delivery(id) => {
                self.dead(caller, id).await?;
                self.store.delivery_reopen(id).await.map_err(fault::store)?
            }
            LetterId::Event(id) => {
                self.dead_event(caller, id).await?;
                self.store.event_reopen(id).await.map_err(fault::store)?
            }
        };
        if !opened {
            return Err(Problem::new(Code::NotDeadLetter, format!("{id} is no dead letter any more")));
        }
        self.live.publish(Change::Dlq {});
        Ok(LetterRetried { id })
    }

    async fn dlq_discard(&self, caller: &Caller, id: LetterId, reason: &str) -> Answer<()> {
        let note = format!("discarded by {}: {}", caller.actor, reason.chars().take(500).collect::<String>());
        match id {
            LetterId::Delivery(id) => {
                self.dead(caller, id).await?;
                if !self.store.delivery_discard(id, note).await.map_err(fault::store)? {
                    return Err(Problem::new(Code::Conflict, format!("delivery {id} is being processed")));
                }
            }
            LetterId::Event(id) => {
                self.dead_event(caller, id).await?;
                if !self.store.event_discard(id, note).await.map_err(fault::store)? {
                    return Err(Problem::new(Code::Conflict, format!("event {id} is being processed")));
                }
            }
        }
        self.live.publish(Change::Dlq {});
        Ok(())
    }
}

fn bare(id: LetterId) -> uuid::Uuid {
    match id {
        LetterId::Delivery(id) => id.uuid(),
        LetterId::Event(id) => id.uuid(),
    }
}

fn dead_delivery(row: DeliveryView) -> DeadLetter {
    DeadLetter {
        kind: "delivery".to_owned(),
        id: LetterId::Delivery(row.id),
        event: row.event,
        source: Some(row.source),
        repo: row.repo,
        attempts: row.attempts,
        error: row.error,
        reason: "exhausted_retries".to_owned(),
        created_at: row.received_at,
        dead_at: row.finished_at,
    }
}

fn dead_event(event: model::BusEvent, source: Option<String>) -> DeadLetter {
    DeadLetter {
        kind: "event".to_owned(),
        id: LetterId::Event(event.id),
        event: event.name,
        source: source.or(event.routing_key),
        repo: event.source_repo,
        attempts: event.attempts,
        error: event.last_error,
        reason: event.dlq_reason.unwrap_or_default(),
        created_at: event.created_at,
        dead_at: event.finished_at,
    }
}
