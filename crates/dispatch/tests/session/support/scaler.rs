//! A scaler that writes down what it is asked and starts nothing: the test connects the agents itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use kici_dispatch::ports::{Scaler, ScalerUnavailable, SpawnRequest, Spawned};
use kici_engine::ids::{AgentId, JobId};
use kici_engine::labels::{AgentType, CanonicalLabel};
use kici_engine::lock::{Matcher, Selector};
use kici_engine::scaling::{Cap, ScaleVerdict};
use tokio::sync::Semaphore;

/// What it knows.
#[derive(Default)]
pub struct Book {
    /// The label of each pool, and how many agents it has room for.
    pub pools: BTreeMap<String, u32>,
    /// Answers in place of its own, by the label that is asked for.
    pub instead: BTreeMap<String, ScaleVerdict>,
    pub asked: Vec<SpawnRequest>,
    pub started: BTreeMap<JobId, AgentId>,
    pub records: BTreeMap<AgentId, Spawned>,
    pub disconnected: Vec<(AgentId, bool)>,
    pub settled: BTreeSet<(JobId, Option<AgentId>)>,
    /// Its records cannot be read.
    pub blind: bool,
    /// Requests wait for a permit of this.
    pub gate: Option<Arc<Semaphore>>,
    /// The next question whether a pool fits takes this and waits for a word.
    pub hold_up: Option<std::sync::mpsc::Receiver<()>>,
}

#[derive(Default)]
pub struct FakeScaler(Mutex<Book>);

fn label(selector: &Selector) -> String {
    match selector.labels.first() {
        Some(Matcher::Exact { value }) => value.clone(),
        _ => String::new(),
    }
}

impl FakeScaler {
    pub fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap()
    }

    /// A pool with room for so many agents.
    pub fn pool(&self, label: &str, room: u32) {
        self.book().pools.insert(label.to_owned(), room);
    }

    pub fn asked_for(&self, job: JobId) -> usize {
        self.book().asked.iter().filter(|request| request.job_id == job).count()
    }

    /// The agent that was started for a job.
    pub fn agent_of(&self, job: JobId) -> Option<AgentId> {
        self.book().started.get(&job).cloned()
    }

    /// Of a job: its agent ended without ever registering.
    pub fn lost(&self, job: JobId) {
        let mut book = self.book();
        if let Some(agent) = book.started.remove(&job) {
            book.records.remove(&agent);
        }
    }

    fn decide(&self, request: SpawnRequest) -> ScaleVerdict {
        let mut book = self.book();
        let label = label(&request.selector);
        let (job, name) = (request.job_id, request.job_name.clone());
        book.asked.push(request);
        if let Some(verdict) = book.instead.get(&label) {
            return verdict.clone();
        }
        if let Some(agent_id) = book.started.get(&job).cloned() {
            return ScaleVerdict::AlreadySpawning { agent_id };
        }
        match book.pools.get_mut(&label) {
            None => ScaleVerdict::NoBackend { labels: vec![label] },
            Some(0) => ScaleVerdict::AtCapacity { cap: Cap::MaxAgents },
            Some(room) => {
                *room -= 1;
                let agent_id = AgentId::new(format!("scaler-container-{name}")).unwrap();
                let mandatory = [CanonicalLabel::parse(&label).unwrap()].into();
                let record = Spawned { bound_job: Some(job), mandatory, warm: false };
                book.started.insert(job, agent_id.clone());
                book.records.insert(agent_id.clone(), record);
                ScaleVerdict::Spawning { backend_type: AgentType::Container, agent_id }
            }
        }
    }
}

#[async_trait::async_trait]
impl Scaler for FakeScaler {
    async fn request(&self, request: SpawnRequest) -> ScaleVerdict {
        let verdict = self.decide(request);
        let gate = self.book().gate.clone();
        if let Some(gate) = gate {
            gate.acquire().await.unwrap().forget();
        }
        verdict
    }

    fn could_serve(&self, selector: &Selector, _: Option<&str>) -> bool {
        let held_up = self.book().hold_up.take();
        if let Some(held_up) = held_up {
            // The word comes, or the test has failed. The other tasks of this thread, and its timers, must not wait for it.
            let _ = tokio::task::block_in_place(|| held_up.recv());
        }
        self.book().pools.contains_key(&label(selector))
    }

    async fn registering(&self, agent: &AgentId) -> Result<Option<Spawned>, ScalerUnavailable> {
        let book = self.book();
        if book.blind { Err(ScalerUnavailable("no database".into())) } else { Ok(book.records.get(agent).cloned()) }
    }

    fn disconnected(&self, agent: &AgentId, holds_job: bool) {
        self.book().disconnected.push((agent.clone(), holds_job));
    }

    fn settled(&self, job: JobId, taken_by: Option<&AgentId>) {
        let mut book = self.book();
        book.settled.insert((job, taken_by.cloned()));
        book.started.remove(&job);
    }
}
