//! An orchestrator in memory: every port, with a small world that tests can change. Not a simulation: it keeps what it is
//! told and answers with it.

mod admin;
mod bus;
mod hosts;
mod runs;
mod stored;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use axum::Router;
use kici_access::{AccessEntry, Actor, ActorType, Role, Token, TokenKind};
use kici_engine::ids::{AgentId, IdSource, JobId, RunId};
use kici_engine::time::{ManualClock, Ts};
use secrecy::ExposeSecret;
use uuid::Uuid;

use crate::dto::agents::AgentView;
use crate::dto::bus::{EventTrustView, EventView, RegistrationView};
use crate::dto::events::DeliveryView;
use crate::dto::hosts::HostView;
use crate::dto::logs::LogLine;
use crate::dto::runs::{JobView, RunView, StepView};
use crate::dto::sources::SourceView;
use crate::dto::stored::ArtifactView;
use crate::live::Hub;
use crate::ports::{Answer, Authenticator, Ports, Principal};
use crate::problem::{Code, Problem};
use crate::server::{ApiState, finish, routes};

/// What the fake knows. Tests read and change it.
#[derive(Default)]
pub struct World {
    /// Tokens by hash.
    pub tokens: BTreeMap<String, Principal>,
    /// Runs, newest first.
    pub runs: Vec<RunView>,
    /// Jobs of all runs.
    pub jobs: Vec<JobView>,
    /// Steps of all jobs.
    pub steps: Vec<StepView>,
    /// Lines by job, epoch and step key.
    pub lines: BTreeMap<(JobId, u32, String), Vec<LogLine>>,
    /// Sources.
    pub sources: Vec<SourceView>,
    /// Deliveries, newest first.
    pub deliveries: Vec<DeliveryView>,
    /// Events of the bus, newest first.
    pub events: Vec<EventView>,
    /// Registered workflows.
    pub registrations: Vec<RegistrationView>,
    /// Which repositories may start workflows of others.
    pub trust: Vec<EventTrustView>,
    /// Agents.
    pub agents: Vec<AgentView>,
    /// Hosts.
    pub hosts: BTreeMap<AgentId, HostView>,
    /// Artifacts of every run, with their archives.
    pub artifacts: Vec<(ArtifactView, Vec<u8>)>,
    /// What the access log was given.
    pub access: Vec<AccessEntry>,
    /// When set, every look at the "database" fails like this.
    pub outage: Option<Problem>,
    /// When true, the run list panics.
    pub panic: bool,
    /// When true, the node drains.
    pub draining: bool,
    /// Runs by idempotency key.
    pub keys: BTreeMap<String, RunId>,
}

/// Every port over a [`World`].
pub struct Fake {
    world: Mutex<World>,
    /// Live changes.
    pub live: Arc<Hub>,
    ids: AtomicU64,
}

impl IdSource for Fake {
    fn uuid(&self) -> Uuid {
        Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 + u128::from(self.ids.fetch_add(1, Ordering::SeqCst)))
    }
}

/// The instant at which the fake's clock stands.
pub const NOW: Ts = Ts::from_micros(1_790_000_000_000_000);

impl Fake {
    /// An empty world.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { world: Mutex::default(), live: Hub::new(), ids: AtomicU64::new(1) })
    }

    /// The world, for reading and changing.
    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The world as a port sees it: not during an outage.
    fn reach(&self) -> Answer<MutexGuard<'_, World>> {
        let world = self.world();
        match &world.outage {
            Some(problem) => Err(problem.clone()),
            None => Ok(world),
        }
    }

    /// A fresh token of `role`, bound to `routing_key` when given.
    pub fn token(&self, role: Role, routing_key: Option<&str>) -> String {
        let number = self.ids.fetch_add(1, Ordering::SeqCst);
        let fill = |bytes: &mut [u8]| {
            bytes.fill(0);
            bytes[..8].copy_from_slice(&number.to_be_bytes());
            Ok::<_, Infallible>(())
        };
        let Ok(token) = Token::generate(TokenKind::Admin, fill);
        let actor = Actor::new(ActorType::ApiKey, format!("{role}-{number}"));
        let principal = Principal { actor, role, routing_key: routing_key.map(str::to_owned) };
        self.world().tokens.insert(token.hash(), principal);
        token.secret().expose_secret().to_owned()
    }

    /// All ports, each answered by this fake.
    pub fn ports(self: &Arc<Self>) -> Ports {
        Ports {
            auth: self.clone(),
            runs: self.clone(),
            sources: self.clone(),
            agent_tokens: self.clone(),
            admin_tokens: self.clone(),
            agents: self.clone(),
            hosts: self.clone(),
            events: self.clone(),
            bus: self.clone(),
            queue: self.clone(),
            system: self.clone(),
            access_log: self.clone(),
            audit: self.clone(),
            stored: self.clone(),
            live: self.live.clone(),
        }
    }

    /// The whole router.
    pub fn router(self: &Arc<Self>) -> Router {
        finish(routes(ApiState::new(self.ports(), Arc::new(ManualClock::new(NOW)))), self.clone())
    }
}

#[async_trait]
impl Authenticator for Fake {
    async fn authenticate(&self, token: &Token) -> Answer<Option<Principal>> {
        let world = self.reach().map_err(|problem| Problem::new(Code::AuthUnavailable, problem.detail))?;
        Ok(world.tokens.get(&token.hash()).cloned())
    }
}
