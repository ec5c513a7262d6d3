//! Why a job waits: reasons on waiting rows, jobs that nobody could ever run, and the explanation per agent.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kici_engine::ids::{AgentId, JobId};
use kici_engine::labels::{AgentFacts, CompiledSelector, eligible, explain_unroutable};
use kici_engine::scaling::MAX_SCANNED;
use kici_engine::state::{FailureReason, QueueStatus};
use kici_store::model::{AgentType, FailRequest, JobRef, QueueRow, RosterHost, Routing};

use crate::dispatcher::{DispatchError, Dispatcher};
use crate::meters;
use crate::ports::Scaler;

/// Why a job waits.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The row.
    pub row: QueueRow,
    /// Why this orchestrator gives out no job at all; none when it does.
    pub orchestrator: Option<String>,
    /// Why no agent could ever run it; none when one could.
    pub unroutable: Option<String>,
    /// What the scaler last said of it; none when it said nothing.
    pub scaler: Option<String>,
    /// The first thing in the way, per agent.
    pub agents: Vec<AgentVerdict>,
}

/// One agent and a waiting job.
#[derive(Clone, Debug)]
pub struct AgentVerdict {
    /// The agent.
    pub agent_id: AgentId,
    /// It is connected here.
    pub connected: bool,
    /// What keeps it from taking the job, for people; none when nothing does.
    pub obstacle: Option<String>,
}

/// What a row's selector means for the agents known now.
enum Route {
    /// A connected agent could run it.
    Open,
    /// A known agent could, but it is not connected here.
    Absent(String),
    /// One that can be started could.
    Startable,
    /// Nobody could.
    Nowhere(String),
}

/// Where an agent is that is not connected here.
fn whereabouts(host: &RosterHost) -> String {
    match &host.connected_instance_id {
        Some(instance) => format!("connected to {instance}"),
        None => "not connected".to_owned(),
    }
}

/// The reasons that stand with waiting rows, as far as this process wrote them. A claim clears the reason of its row, hence the
/// epoch: of a row that came back nothing is known.
#[derive(Debug, Default)]
pub(crate) struct Shown(HashMap<JobId, (u32, String)>);

impl Shown {
    fn get(&self, row: JobRef) -> Option<&String> {
        self.0.get(&row.job_id).filter(|(epoch, _)| *epoch == row.epoch).map(|(_, reason)| reason)
    }

    fn set(&mut self, row: JobRef, reason: Option<String>) {
        match reason {
            Some(reason) => drop(self.0.insert(row.job_id, (row.epoch, reason))),
            None => drop(self.0.remove(&row.job_id)),
        }
    }

    fn keep(&mut self, waiting: &HashSet<JobId>) {
        self.0.retain(|job, _| waiting.contains(job));
    }
}

fn facts_of(host: &RosterHost) -> AgentFacts {
    AgentFacts { labels: host.effective_labels(), mandatory: Default::default(), machine_id: host.machine_id.clone() }
}

impl Dispatcher {
    /// Looks at waiting rows when the pump met a selector that no agent satisfies, or agents changed.
    pub(crate) async fn watch_routing(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.stopping.cancelled() => return,
                () = self.routing.notified() => {}
            }
            if let Err(error) = self.probe_routing().await {
                tracing::warn!(%error, "why jobs wait could not be found out");
            }
        }
    }

    /// Writes or clears the reasons of waiting rows and fails those that nobody could run for longer than the grace.
    /// Returns how many rows changed.
    pub(crate) async fn probe_routing(self: &Arc<Self>) -> Result<u64, DispatchError> {
        // One look at a time, or the words of an older one could be written last.
        let mut shown = self.routing_shown.lock().await;
        let noted = self.scaling.noted();
        let rows = self.store.queue_oldest_pending(MAX_SCANNED).await?;
        let waiting: HashSet<JobId> = rows.iter().map(|row| row.job_id).collect();
        self.scaling.keep_notes(&noted, &waiting);
        shown.keep(&waiting);
        if rows.is_empty() {
            return Ok(0);
        }
        let facts = self.connected();
        let absent = self.absent_hosts().await?;
        let mut routes: HashMap<&str, Route> = HashMap::new();
        let mut changes = Vec::new();
        let mut dead = Vec::new();
        let now = self.clock.now();
        for row in &rows {
            let route = routes.entry(&row.selector_digest).or_insert_with(|| self.route(row, &facts, &absent));
            let grace = self.config.unroutable_grace;
            let (reason, unroutable) = match route {
                // What the scaler said of this very job is nearer.
                Route::Open => (self.scaling.note(row.job_id), false),
                Route::Absent(reason) => (self.scaling.note(row.job_id).or_else(|| Some(reason.clone())), false),
                Route::Startable => match self.scaling.note(row.job_id) {
                    // Another instance may have asked for it and written what it heard.
                    None if row.unroutable_since.is_none() => continue,
                    note => (note, false),
                },
                Route::Nowhere(reason) => (Some(reason.clone()), true),
            };
            if let (Some(reason), Some(since), true) = (&reason, row.unroutable_since, unroutable)
                && !grace.is_zero()
                && now.since(since) >= grace
            {
                dead.push((row.job_ref(), format!("for {} s: {reason}", grace.as_secs())));
                continue;
            }
            if shown.get(row.job_ref()) != reason.as_ref() || unroutable != row.unroutable_since.is_some() {
                let unroutable_since = unroutable.then_some(now);
                changes.push((row.job_ref(), Routing { job_id: row.job_id, reason, unroutable_since }));
            }
        }
        let count = (changes.len() + dead.len()) as u64;
        if !changes.is_empty() {
            self.store.queue_routing_set(changes.iter().map(|(_, change)| change.clone()).collect()).await?;
            // Only now: what was not written is tried again at the next look.
            for (job, change) in changes {
                shown.set(job, change.reason);
            }
        }
        for (job, message) in dead {
            meters::unroutable_failed();
            let (only_from, queue_status) = (vec![QueueStatus::Pending], QueueStatus::Failed);
            let reason = FailureReason::Unroutable;
            self.fail(FailRequest { job, only_from, queue_status, reason, message, retry: false }).await;
        }
        Ok(count)
    }

    fn connected(&self) -> Connected {
        let all = self.registry.all_facts();
        Connected { facts: all.iter().map(|(_, facts)| (**facts).clone()).collect(), by_id: all.into_iter().collect() }
    }

    /// Known hosts that are not connected here: static ones, and all that are connected to another instance.
    async fn absent_hosts(&self) -> Result<Vec<RosterHost>, DispatchError> {
        let mut hosts = self.store.roster_list().await?;
        hosts.retain(|host| {
            let elsewhere = host.connected_instance_id.as_ref().is_some_and(|at| *at != self.config.instance);
            (elsewhere || host.lifecycle == AgentType::Static) && self.registry.agent(&host.agent_id).is_none()
        });
        Ok(hosts)
    }

    /// Why a job waits, agent by agent.
    ///
    /// # Errors
    /// [`DispatchError::NoSuchJob`] when it is not in the queue, or the database's.
    pub async fn explain(&self, job: JobId) -> Result<Explanation, DispatchError> {
        let row = self.store.queue_get(job).await?.ok_or(DispatchError::NoSuchJob)?;
        let absent = self.absent_hosts().await?;
        let facts = self.connected();
        let unroutable = match self.route(&row, &facts, &absent) {
            Route::Nowhere(reason) => Some(reason),
            Route::Open | Route::Absent(_) | Route::Startable => None,
        };
        let machine = row.requires_machine_id.as_deref();
        let compiled = CompiledSelector::compile(&row.selector);
        let pinned = row.pinned_agent_id.clone();
        let mismatch = |id: &AgentId, facts: &AgentFacts| match &compiled {
            _ if pinned.as_ref().is_some_and(|pinned| pinned != id) => Some("the job is for another host".to_owned()),
            Ok(compiled) => eligible(compiled, machine, facts).err().map(|mismatch| mismatch.to_string()),
            Err(error) => Some(format!("its selector cannot be used: {error}")),
        };
        let connected = self.registry.views().into_iter().map(|agent| AgentVerdict {
            obstacle: mismatch(&agent.agent_id, &agent.facts).or(agent.unready),
            agent_id: agent.agent_id,
            connected: true,
        });
        let absent = absent.into_iter().map(|host| AgentVerdict {
            obstacle: Some(
                mismatch(&host.agent_id, &facts_of(&host)).unwrap_or_else(|| format!("it is {}", whereabouts(&host))),
            ),
            agent_id: host.agent_id,
            connected: false,
        });
        let agents = connected.chain(absent).collect();
        let scaler = self.scaling.note(job);
        Ok(Explanation { row, orchestrator: self.not_claiming(), unroutable, scaler, agents })
    }

    /// What a row's selector means for the agents known now, and for those that can be started.
    fn route(&self, row: &QueueRow, connected: &Connected, absent: &[RosterHost]) -> Route {
        let found = route(row, connected, absent);
        let pool = |scaler: &Arc<dyn Scaler>| scaler.could_serve(&row.selector, row.requires_machine_id.as_deref());
        match found {
            // A pool that is scaled to zero is somebody.
            Route::Nowhere(_) if row.pinned_agent_id.is_none() && self.scaler.as_ref().is_some_and(pool) => {
                Route::Startable
            }
            found => found,
        }
    }

    /// Whether a known agent that is not connected here could run a job.
    pub(crate) async fn is_awaited(&self, row: &QueueRow) -> Result<bool, DispatchError> {
        let absent = self.absent_hosts().await?;
        Ok(!matches!(route(row, &self.connected(), &absent), Route::Nowhere(_)))
    }
}

/// The agents that are connected here.
struct Connected {
    facts: Vec<AgentFacts>,
    by_id: HashMap<AgentId, Arc<AgentFacts>>,
}

fn route(row: &QueueRow, connected: &Connected, absent: &[RosterHost]) -> Route {
    let machine = row.requires_machine_id.as_deref();
    let compiled = match CompiledSelector::compile(&row.selector) {
        Ok(compiled) => compiled,
        Err(error) => return Route::Nowhere(format!("its selector cannot be used: {error}")),
    };
    if let Some(pinned) = &row.pinned_agent_id {
        let known = absent.iter().find(|host| host.agent_id == *pinned);
        return match (connected.by_id.get(pinned), known) {
            (Some(facts), _) => match eligible(&compiled, machine, facts) {
                Ok(()) => Route::Open,
                // Labels can come back; the limit of waiting ends it if they do not.
                Err(mismatch) => {
                    Route::Absent(format!("it is for host {pinned}, which does not fit any more: {mismatch}"))
                }
            },
            (None, Some(_)) => Route::Absent(format!("it is for host {pinned}, which is not connected")),
            (None, None) => Route::Nowhere(format!("it is for host {pinned}, which is not known any more")),
        };
    }
    let Some(reason) = explain_unroutable(&compiled, machine, &connected.facts) else { return Route::Open };
    match absent.iter().find(|host| eligible(&compiled, machine, &facts_of(host)).is_ok()) {
        Some(host) => Route::Absent(format!("agent {} could run it and is {}", host.agent_id, whereabouts(host))),
        None => Route::Nowhere(reason),
    }
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::RunId;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn of_a_row_that_came_back_no_reason_stands() {
        let run_id = RunId::from_uuid(Uuid::from_u128(1));
        let at = |epoch| JobRef { run_id, job_id: JobId::from_uuid(Uuid::from_u128(2)), epoch };
        let mut shown = Shown::default();
        shown.set(at(0), Some("no room".into()));
        assert_eq!(shown.get(at(0)).map(String::as_str), Some("no room"));
        assert_eq!(shown.get(at(1)), None, "the claim cleared it");
        shown.set(at(1), Some("no room".into()));
        assert!(shown.get(at(1)).is_some());
        shown.keep(&HashSet::new());
        assert_eq!(shown.get(at(1)), None);
    }
}
