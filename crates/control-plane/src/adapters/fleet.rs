//! Agents and the dispatch queue.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use kici_api::dto::agents::{AgentFilter, AgentStatus, AgentView, DrainAgent, JobIdText};
use kici_api::dto::queue::{AgentVerdict, QueueEntry, QueueExplanation, QueueFilter};
use kici_api::page::{PageRequest, Position, Slice};
use kici_api::ports::{Agents, Answer, Caller, Queue};
use kici_api::problem::{Code, Problem};
use kici_dispatch::Dispatcher;
use kici_engine::hosts::HostStatus;
use kici_engine::ids::{AgentId, InstanceId, JobId};
use kici_engine::lock::Matcher;
use kici_engine::state::QueueStatus;
use kici_store::{Store, model};

use super::{fault, views};

/// Most rows of the queue that one request looks at.
const MAX_ROWS: u32 = 10_000;

/// Agents and the queue over the store and the dispatcher.
pub(crate) struct Fleet {
    pub(crate) store: Store,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) instance: InstanceId,
}

fn connected(view: &kici_dispatch::AgentView, instance: &InstanceId) -> AgentView {
    let status = if view.draining { AgentStatus::Draining } else { AgentStatus::Ready };
    AgentView {
        id: view.agent_id.clone(),
        status,
        drain_reason: view.unready.clone(),
        labels: view.facts.labels.iter().map(ToString::to_string).collect(),
        mandatory_labels: view.facts.mandatory.iter().map(ToString::to_string).collect(),
        platform: Some(view.platform.clone()),
        arch: Some(view.arch.clone()),
        hostname: view.hostname.clone(),
        version: Some(view.version.clone()),
        jobs: view.jobs.iter().map(|held| JobIdText(held.job.job_id)).collect(),
        max_concurrency: view.max_concurrency,
        scaler_managed: view.scaler_managed,
        instance: Some(instance.to_string()),
        token_id: view.token_id,
        last_seen_at: None,
        connected_at: Some(view.registered_at),
    }
}

fn known(host: model::RosterHost, status: HostStatus) -> AgentView {
    let status = match status {
        HostStatus::Ready => AgentStatus::Ready,
        HostStatus::Unreachable => AgentStatus::Unreachable,
        HostStatus::Stale => AgentStatus::Stale,
    };
    AgentView {
        id: host.agent_id,
        status,
        drain_reason: None,
        labels: host.labels,
        mandatory_labels: Vec::new(),
        platform: host.platform,
        arch: host.arch,
        hostname: host.hostname,
        version: host.version,
        jobs: Vec::new(),
        max_concurrency: 0,
        scaler_managed: host.scaler_managed,
        instance: host.connected_instance_id.map(|id| id.to_string()),
        token_id: host.token_id,
        last_seen_at: host.last_seen,
        connected_at: None,
    }
}

#[async_trait]
impl Agents for Fleet {
    async fn list(&self, _caller: &Caller, filter: &AgentFilter) -> Answer<Vec<AgentView>> {
        let mut agents: BTreeMap<AgentId, AgentView> = BTreeMap::new();
        for host in self.store.roster_list().await.map_err(fault::store)? {
            let status = self.dispatcher.host_status(&host);
            agents.insert(host.agent_id.clone(), known(host, status));
        }
        for view in self.dispatcher.agents() {
            let last_seen_at = agents.get(&view.agent_id).and_then(|known| known.last_seen_at);
            let shown = AgentView { last_seen_at, ..connected(&view, &self.instance) };
            agents.insert(view.agent_id, shown);
        }
        let wanted = |agent: &AgentView| {
            filter.status.is_none_or(|status| agent.status == status)
                && filter.label.as_ref().is_none_or(|label| agent.labels.contains(label))
        };
        Ok(agents.into_values().filter(wanted).collect())
    }

    async fn drain(&self, caller: &Caller, id: &AgentId, request: &DrainAgent) -> Answer<AgentView> {
        if self.dispatcher.drain_agent(id, request.drain).await.is_err() {
            return Err(Problem::not_found(format!("a connected agent `{id}`")));
        }
        tracing::info!(agent = %id, drain = request.drain, by = %caller.actor, reason = request.reason, "agent drain");
        let view = self.dispatcher.agents().into_iter().find(|view| view.agent_id == *id);
        view.map(|view| connected(&view, &self.instance))
            .ok_or_else(|| Problem::not_found(format!("a connected agent `{id}`")))
    }
}

fn text(matcher: &Matcher) -> String {
    match matcher {
        Matcher::Exact { value } => value.clone(),
        Matcher::Regex { source } => format!("/{source}/"),
    }
}

fn entry(row: &model::QueueRow, job: Option<&model::Job>) -> QueueEntry {
    QueueEntry {
        job_id: row.job_id,
        run_id: row.run_id,
        workflow: row.workflow_name.clone(),
        job: row.job_name.clone(),
        status: row.status,
        labels: row.selector.labels.iter().map(text).collect(),
        exclude: row.selector.exclude.iter().map(text).collect(),
        attempts: row.dispatch_attempts,
        epoch: row.dispatch_epoch,
        agent_id: row.agent_id.as_ref().map(ToString::to_string),
        routing_reason: job.and_then(|job| job.routing_reason.clone()),
        last_provisioning_error: row.last_provisioning_error.clone(),
        created_at: row.created_at,
        expires_at: row.expires_at,
        dispatched_at: row.dispatched_at,
        ack_deadline: row.ack_deadline,
        recovery_deadline: row.recovery_deadline,
        unroutable_since: row.unroutable_since,
    }
}

impl Fleet {
    /// A row of the caller's scope and its job.
    async fn row(&self, caller: &Caller, id: JobId) -> Answer<(model::QueueRow, Option<model::Job>)> {
        let missing = || Problem::not_found(format!("job {id} in the queue"));
        let Some(row) = self.store.queue_get(id).await.map_err(fault::store)? else {
            return Err(self.not_queued(caller, id).await?.unwrap_or_else(missing));
        };
        if caller.routing_key.is_some() {
            let run = self.store.run_get(row.run_id).await.map_err(fault::store)?.ok_or_else(missing)?;
            if !caller.sees(&run.event.routing_key) {
                return Err(missing());
            }
        }
        let job = self.store.job_get(id).await.map_err(fault::store)?;
        Ok((row, job))
    }

    /// Why a job is not in the queue, where there is more to say than that: it waits for a slot.
    async fn not_queued(&self, caller: &Caller, id: JobId) -> Answer<Option<Problem>> {
        let Some(job) = self.store.job_get(id).await.map_err(fault::store)? else { return Ok(None) };
        let run = self.store.run_get(job.run_id).await.map_err(fault::store)?;
        if !run.is_some_and(|run| caller.sees(&run.event.routing_key)) {
            return Ok(None);
        }
        let slots = self.store.slots_of_run(job.run_id).await.map_err(fault::store)?;
        let why = views::wait_reason(&job, &slots);
        Ok(why.map(|why| Problem::new(Code::Conflict, format!("job {id} is not in the queue: it {why}"))))
    }
}

/// Why a job is where it is, in one sentence.
fn verdict(found: &kici_dispatch::Explanation) -> String {
    if found.row.status != QueueStatus::Pending {
        return match &found.row.agent_id {
            Some(agent) => format!("it is {} at agent `{agent}`", found.row.status),
            None => format!("it is {}", found.row.status),
        };
    }
    if let Some(why) = &found.orchestrator {
        return format!("this orchestrator gives out no jobs: {why}");
    }
    if let Some(why) = &found.unroutable {
        return why.clone();
    }
    let can = found.agents.iter().filter(|agent| agent.obstacle.is_none()).count();
    if let (0, Some(said)) = (can, &found.scaler) {
        return said.clone();
    }
    match can {
        0 => "every agent that could run it is busy, draining or away".to_owned(),
        count => format!("{count} agents can take it; it goes to the next free slot"),
    }
}

#[async_trait]
impl Queue for Fleet {
    async fn list(&self, caller: &Caller, filter: &QueueFilter, page: PageRequest) -> Answer<Slice<QueueEntry>> {
        let wanted = model::QueueFilter {
            statuses: filter.status.into_iter().collect(),
            agent_id: None,
            run_id: filter.run,
            limit: MAX_ROWS,
        };
        let mut rows = self.store.queue_list(wanted).await.map_err(fault::store)?;
        rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.job_id.uuid())));
        let after = page.after.map(|at| (at.at, at.id));
        let mut items = Vec::new();
        for row in rows {
            let before = after.is_none_or(|after| (row.created_at, row.job_id.uuid()) < after);
            let shown = entry(&row, None);
            let labelled = filter.label.as_ref().is_none_or(|label| shown.labels.contains(label));
            if !before || !labelled {
                continue;
            }
            if let Ok((_, job)) = self.row(caller, row.job_id).await {
                items.push(entry(&row, job.as_ref()));
            }
            if items.len() > page.limit as usize {
                break;
            }
        }
        let position = |item: &QueueEntry| Position { at: item.created_at, id: item.job_id.uuid() };
        Ok(Slice::from_overfetch(items, page.limit, position))
    }

    async fn get(&self, caller: &Caller, id: JobId) -> Answer<QueueEntry> {
        let (row, job) = self.row(caller, id).await?;
        Ok(entry(&row, job.as_ref()))
    }

    async fn explain(&self, caller: &Caller, id: JobId) -> Answer<QueueExplanation> {
        let (row, job) = self.row(caller, id).await?;
        let found = self.dispatcher.explain(id).await.map_err(fault::dispatch)?;
        let verdict = verdict(&found);
        let agents = found
            .agents
            .into_iter()
            .map(|agent| AgentVerdict {
                agent_id: agent.agent_id,
                eligible: agent.obstacle.is_none(),
                reason: agent.obstacle.unwrap_or_else(|| "it can take the job".to_owned()),
            })
            .collect();
        Ok(QueueExplanation { entry: entry(&row, job.as_ref()), verdict, agents })
    }
}
