//! Places jobs of new runs at agents in the transaction that creates the runs, as long as nobody waits before them: on an
//! idle system a job then costs one commit less.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kici_engine::ids::{AgentId, JobId, SessionId};
use kici_store::model::{
    Activate, Activation, Again, ClaimedJob, Expansion, Generated, PendingSelector, QueueEntry, ReadyJob,
};

use crate::dispatcher::Dispatcher;
use crate::meters;

/// Whether the pump has seen everything that it was woken for.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    made: AtomicU64,
    served: AtomicU64,
}

impl Calls {
    /// There may be work.
    pub fn make(&self) {
        self.made.fetch_add(1, Ordering::SeqCst);
    }

    /// What a pass that begins now will have served.
    pub fn made(&self) -> u64 {
        self.made.load(Ordering::SeqCst)
    }

    /// A pass has found nothing more to give out.
    pub fn served(&self, made: u64) {
        self.served.store(made, Ordering::SeqCst);
    }

    /// Nothing happened since the last pass: no job that waits could have an agent that is free.
    fn quiet(&self) -> bool {
        self.made() == self.served.load(Ordering::SeqCst)
    }
}

/// Judges the jobs of one transaction and places them. Slots that were set aside and not used come free on drop.
pub(crate) struct Placing {
    dispatcher: Arc<Dispatcher>,
    held: Mutex<BTreeMap<JobId, (AgentId, SessionId)>>,
}

impl Placing {
    pub fn new(dispatcher: Arc<Dispatcher>) -> Self {
        Self { dispatcher, held: Mutex::default() }
    }
}

impl Activate for Placing {
    fn activate(&self, job: &ReadyJob) -> Activation {
        self.dispatcher.activator.activate(job)
    }

    fn again(&self, job: &ReadyJob) -> Option<Again> {
        self.dispatcher.activator.again(job)
    }

    fn expand(&self, made: &Generated) -> Result<Expansion, String> {
        self.dispatcher.activator.expand(made)
    }

    fn place(&self, job: JobId, entry: &QueueEntry, digest: &str) -> Option<AgentId> {
        match self.held.lock().unwrap_or_else(PoisonError::into_inner).entry(job) {
            Entry::Occupied(held) => Some(held.get().0.clone()),
            Entry::Vacant(free) => {
                let (agent, session) = self.dispatcher.set_aside(entry, digest)?;
                free.insert((agent.clone(), session));
                Some(agent)
            }
        }
    }

    fn placed(&self, jobs: Vec<ClaimedJob>) {
        meters::dispatched(jobs.len());
        for job in jobs {
            let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&job.job_ref.job_id);
            match held {
                Some((_, session)) => self.dispatcher.hand_over(session, job),
                None => tracing::error!(agent = %job.agent_id, "a job was placed at an agent that was not asked for"),
            }
        }
    }
}

impl Drop for Placing {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, session) in held.values() {
            self.dispatcher.registry.release(*session, 1);
        }
        if !held.is_empty() {
            self.dispatcher.wake();
        }
    }
}

impl Dispatcher {
    /// Judges and places jobs of new runs; for one transaction.
    pub fn place(self: &Arc<Self>) -> Arc<dyn Activate> {
        Arc::new(Placing::new(Arc::clone(self)))
    }

    /// Sets a slot of a free agent aside. None when others may wait for one, or nobody is free.
    fn set_aside(&self, entry: &QueueEntry, digest: &str) -> Option<(AgentId, SessionId)> {
        if !self.calls.quiet() || self.not_claiming().is_some() {
            return None;
        }
        let wanted = self.wanted(vec![PendingSelector {
            digest: digest.to_owned(),
            selector: entry.selector.clone(),
            requires_machine_id: entry.requires_machine_id.clone(),
            pinned_agent_id: entry.pinned_agent_id.clone(),
            waiting: 1,
        }]);
        let reserved = self.registry.reserve(&wanted, 1, &Default::default()).pop()?;
        Some((reserved.agent_id, reserved.session_id))
    }
}
