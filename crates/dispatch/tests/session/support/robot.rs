//! An agent that keeps its word by itself: it comes back with what it holds and what it has to say, and writes down each
//! start of user code.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kici_protocol::agent::agent_frame::Frame as Up;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;
use kici_protocol::common;

use super::{Agent, World, register};

/// What a job does, by the beginning of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// It is refused once.
    Picky,
    /// Its offer is answered late, but in time.
    Slow,
    /// The connection breaks right after its start.
    Wobbly,
    /// Its agent forgets it after its start.
    Fatal,
    /// It does not end by itself.
    Endless,
    Plain,
}

impl Manner {
    fn of(name: &str) -> Self {
        match name {
            name if name.starts_with("picky") => Self::Picky,
            name if name.starts_with("slow") => Self::Slow,
            name if name.starts_with("wobbly") => Self::Wobbly,
            name if name.starts_with("fatal") => Self::Fatal,
            name if name.starts_with("endless") => Self::Endless,
            _ => Self::Plain,
        }
    }
}

/// Each start of user code, as job and epoch.
pub type Ledger = Arc<Mutex<Vec<(String, u32)>>>;

type Key = (String, u32);

fn key(job: &common::JobRef) -> Key {
    (job.job_id.clone(), job.dispatch_epoch)
}

struct Held {
    job: common::JobRef,
    manner: Manner,
    started: bool,
}

/// Its disk: what outlives its process and its sessions.
pub struct Robot {
    id: String,
    ledger: Ledger,
    held: BTreeMap<Key, Held>,
    outbox: BTreeMap<Key, JobUpdate>,
    refused: BTreeSet<String>,
    wobbled: BTreeSet<Key>,
}

/// Why a session of a robot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    On,
    Reconnect,
}

impl Robot {
    pub fn new(id: &str, ledger: Ledger) -> Self {
        Self {
            id: id.into(),
            ledger,
            held: BTreeMap::new(),
            outbox: BTreeMap::new(),
            refused: BTreeSet::new(),
            wobbled: BTreeSet::new(),
        }
    }

    /// Serves an orchestrator for ever; the caller drops it.
    pub async fn serve(&mut self, world: &World) {
        loop {
            self.session(world).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn session(&mut self, world: &World) {
        let mut register = Register { max_concurrency: 8, ..register(&self.id, &["default"]) };
        register.in_flight_jobs =
            self.held.values().map(|held| InFlightJob { job: Some(held.job.clone()), started: held.started }).collect();
        register.outbox_pending = self.outbox.values().filter_map(|update| update.job.clone()).collect();
        let Ok(mut agent) = Agent::with(world, register, "").await else { return };
        for verdict in std::mem::take(&mut agent.ack.job_verdicts) {
            if verdict.verdict() == Verdict::Abandon {
                self.held.remove(&key(verdict.job.as_ref().unwrap()));
            }
        }
        let mut said = BTreeMap::new();
        for (key, update) in &self.outbox {
            said.insert(agent.send(Up::JobUpdate(update.clone())).await, key.clone());
        }
        for held in self.held.values().filter(|held| !held.started) {
            agent.update(&held.job, "running", "").await;
        }
        let going: Vec<Key> = self.held.iter().filter(|(_, held)| held.started).map(|(key, _)| key.clone()).collect();
        for key in going {
            self.go_on(&mut agent, &key, &mut said).await;
        }
        while let Some(frame) = agent.maybe_next_or_ack().await {
            said.retain(|seq, key| {
                let open = *seq > agent.acked;
                if !open {
                    self.outbox.remove(key);
                }
                open
            });
            if let Some(frame) = frame
                && self.take(&mut agent, frame, &mut said).await == Next::Reconnect
            {
                return;
            }
        }
    }

    async fn take(&mut self, agent: &mut Agent, frame: Down, said: &mut BTreeMap<u64, Key>) -> Next {
        match frame {
            Down::JobOffer(offer) => self.offered(agent, offer).await,
            Down::StartGranted(granted) => {
                let key = key(granted.job.as_ref().unwrap());
                let Some(held) = self.held.get_mut(&key) else { return Next::On };
                if !held.started {
                    held.started = true;
                    self.ledger.lock().unwrap().push(key.clone());
                }
                return self.go_on(agent, &key, said).await;
            }
            Down::StartDenied(denied) => {
                self.held.remove(&key(denied.job.as_ref().unwrap()));
            }
            Down::JobCancel(cancel) => {
                let job = cancel.job.unwrap();
                match self.held.contains_key(&key(&job)) {
                    true => self.end(agent, &key(&job), "cancelled", "cancelled_by_user", said).await,
                    false => {
                        let answer = CancelAnswer { job: Some(job), answer: "unknown_job".into() };
                        agent.send(Up::CancelAnswer(answer)).await;
                    }
                }
            }
            Down::FrameNack(nack) => match nack.code() {
                NackCode::StaleEpoch | NackCode::Invalid => {
                    if let Some(key) = said.remove(&nack.seq) {
                        self.outbox.remove(&key);
                    }
                }
                // A real agent waits a little and says it again; so does the next session.
                _ => return Next::Reconnect,
            },
            _ => {}
        }
        Next::On
    }

    async fn offered(&mut self, agent: &mut Agent, offer: JobOffer) {
        let job = offer.job.unwrap();
        let manner = Manner::of(&offer.job_name);
        // What every agent has refused rests for longer than a test waits: the other one takes it.
        if manner == Manner::Picky && self.id == "a1" && self.refused.insert(job.job_id.clone()) {
            agent.reject(&job, RejectReason::Unsupported).await;
            return;
        }
        if manner == Manner::Slow {
            // Long enough for the deadline of the answer to be written down.
            tokio::time::sleep(Duration::from_millis(260)).await;
        }
        self.held.insert(key(&job), Held { job: job.clone(), manner, started: false });
        agent.accept(&job).await;
        if manner == Manner::Slow {
            // And long enough for the answer itself to be.
            tokio::time::sleep(Duration::from_millis(120)).await;
        }
        agent.update(&job, "running", "").await;
    }

    /// User code runs.
    async fn go_on(&mut self, agent: &mut Agent, key: &Key, said: &mut BTreeMap<u64, Key>) -> Next {
        let Some(held) = self.held.get(key) else { return Next::On };
        let (job, manner) = (held.job.clone(), held.manner);
        match manner {
            Manner::Endless => {}
            Manner::Wobbly if self.wobbled.insert(key.clone()) => return Next::Reconnect,
            Manner::Fatal => {
                self.held.remove(key);
                return Next::Reconnect;
            }
            _ => {
                agent.step(&job, 0, "running").await;
                agent.step(&job, 0, "success").await;
                self.end(agent, key, "success", "", said).await;
            }
        }
        Next::On
    }

    async fn end(&mut self, agent: &mut Agent, key: &Key, state: &str, reason: &str, said: &mut BTreeMap<u64, Key>) {
        let Some(held) = self.held.remove(key) else { return };
        let update = JobUpdate {
            job: Some(held.job),
            state: state.into(),
            reason: reason.into(),
            at_us: 1_700_000_000_500_000,
            ..Default::default()
        };
        self.outbox.insert(key.clone(), update.clone());
        said.insert(agent.send(Up::JobUpdate(update)).await, key.clone());
    }
}
