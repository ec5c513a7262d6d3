//! What the router needs from the program that mounts it: one trait per resource.
//!
//! Every method returns the answer's document or the [`Problem`] that the caller sees. Implementations apply the caller's
//! scope ([`Caller::routing_key`]): rows of other sources do not exist for a scoped token (404, never 403). Permissions
//! have been checked by the router. Faults that are not the caller's are logged by the implementation and answered with
//! [`Problem::internal`] or [`Problem::unavailable`].

use async_trait::async_trait;
use kici_access::{AccessEntry, Actor, Role, Token};
use kici_engine::ids::{AgentId, DeliveryRowId, EventId, JobId, RegistrationId, RunId, TokenId, TrustId};

use crate::dto::access_log::{AccessFilter, AccessView};
use crate::dto::agents::{AgentFilter, AgentView, DrainAgent};
use crate::dto::audit::{AuditFilter, AuditView};
use crate::dto::bus::{
    AddEventTrust, ChangeRegistration, DeadLetter, EmitEvent, EventDetail, EventEmitted, EventFilter,
    EventTrustVerdict, EventTrustView, EventView, LetterId, LetterRetried, RegistrationView, ScheduleView,
    TestEventTrust, TriggerSchedule,
};
use crate::dto::events::{DeliveryFilter, DeliveryView, Explanation, Payload};
use crate::dto::hosts::{DeclareHost, HostFilter, HostView, HostsPreview, PreviewHosts, RebootHost};
use crate::dto::logs::LogRange;
use crate::dto::queue::{QueueEntry, QueueExplanation, QueueFilter};
use crate::dto::runs::{
    CancelAccepted, CancelRun, JobView, RerunRun, RunAccepted, RunDetail, RunFilter, RunView, StepView, TriggerRun,
};
use crate::dto::sources::{AddSource, DeliveryAccepted, SetSecrets, SourceView, TriggerSource};
use crate::dto::stored::{ArtifactView, CacheFilter, CacheView, CachesDeleted, StoredTotals};
use crate::dto::system::{Capabilities, Diagnosis, Drain, DrainState, Health, OrchestratorStatus, Ready};
use crate::dto::tokens::{
    AdminTokenView, AgentTokenView, CreateAdminToken, CreateAgentToken, TokenCreated, TokenRevoked,
};
use crate::live::Hub;
use crate::page::{Page, PageRequest, Slice};
use crate::problem::Problem;

/// What a port returns.
pub type Answer<T> = Result<T, Problem>;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The subject, for audit columns.
    pub actor: Actor,
    /// What it may do.
    pub role: Role,
    /// When set, only this source's runs, events and registrations exist for the caller.
    pub routing_key: Option<String>,
    /// The request's id.
    pub request_id: String,
}

impl Caller {
    /// True when a row with `routing_key` lies in the caller's scope.
    pub fn sees(&self, routing_key: &str) -> bool {
        self.routing_key.as_deref().is_none_or(|scope| scope == routing_key)
    }
}

/// The subject behind a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// The subject.
    pub actor: Actor,
    /// What it may do.
    pub role: Role,
    /// See [`Caller::routing_key`].
    pub routing_key: Option<String>,
}

/// Looks tokens up.
#[async_trait]
pub trait Authenticator: Send + Sync {
    /// The subject of a well-formed admin token; `None` when it is unknown, expired or revoked.
    ///
    /// # Errors
    /// `auth.unavailable` when it cannot be decided now. Never "not found" in that case: callers would take an outage for
    /// a bad token.
    async fn authenticate(&self, token: &Token) -> Answer<Option<Principal>>;
}

/// A job of a run, as a caller names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobRef {
    /// By id.
    Id(JobId),
    /// By its name in the run, matrix values included.
    Name(String),
}

/// A step of a job, as a caller names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepRef {
    /// By its place in the job, from 0.
    Ordinal(u32),
    /// By its key.
    Key(String),
}

/// A range of one step's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRequest {
    /// The run.
    pub run: RunId,
    /// The job.
    pub job: JobRef,
    /// The hand-over; the latest when none.
    pub epoch: Option<u32>,
    /// The step.
    pub step: StepRef,
    /// First line, from 0.
    pub from_seq: u64,
    /// Most lines, at least 1.
    pub limit: u32,
}

/// Runs, jobs, steps and logs.
#[async_trait]
pub trait Runs: Send + Sync {
    /// Runs, newest first.
    async fn list(&self, caller: &Caller, filter: &RunFilter, page: PageRequest) -> Answer<Slice<RunView>>;

    /// One run with its jobs.
    async fn get(&self, caller: &Caller, run: RunId) -> Answer<RunDetail>;

    /// The jobs of a run in the order of the workflow.
    async fn jobs(&self, caller: &Caller, run: RunId) -> Answer<Vec<JobView>>;

    /// The steps of a run's jobs by job and ordinal; of one job when named. At their latest epoch, or at this one.
    async fn steps(
        &self,
        caller: &Caller,
        run: RunId,
        job: Option<&JobRef>,
        epoch: Option<u32>,
    ) -> Answer<Vec<StepView>>;

    /// A range of lines. A `from_seq` beyond the end is an empty range. `complete` is true when the range reaches the end
    /// of a log to which nothing will be added: its step or job is terminal and what the agent holds has arrived or is
    /// given up.
    async fn logs(&self, caller: &Caller, request: &LogRequest) -> Answer<LogRange>;

    /// Cancels. 409 `run.terminal` when it has ended.
    async fn cancel(&self, caller: &Caller, run: RunId, request: CancelRun) -> Answer<CancelAccepted>;

    /// Repeats an ended run with the same commit, lock document and inputs. 409 `run.active` when it has not ended.
    async fn rerun(&self, caller: &Caller, run: RunId, request: RerunRun, key: Option<&str>) -> Answer<RunAccepted>;

    /// Starts a workflow by hand. The same `key` within 24 h gives the same run.
    async fn trigger(&self, caller: &Caller, request: &TriggerRun, key: Option<&str>) -> Answer<RunAccepted>;
}

/// Sources.
#[async_trait]
pub trait Sources: Send + Sync {
    /// All sources, by name.
    async fn list(&self, caller: &Caller) -> Answer<Vec<SourceView>>;

    /// One source by name or id.
    async fn get(&self, caller: &Caller, name: &str) -> Answer<SourceView>;

    /// Adds one; 409 `exists` when the name is taken.
    async fn add(&self, caller: &Caller, request: &AddSource) -> Answer<SourceView>;

    /// Removes one; its runs and events stay.
    async fn remove(&self, caller: &Caller, name: &str) -> Answer<()>;

    /// Enables or disables one; doing so twice is no error.
    async fn set_enabled(&self, caller: &Caller, name: &str, enabled: bool) -> Answer<SourceView>;

    /// Gives one new secrets.
    async fn set_secrets(&self, caller: &Caller, name: &str, request: &SetSecrets) -> Answer<SourceView>;

    /// Stores a push event for a ref, as if the forge had sent it.
    async fn trigger(&self, caller: &Caller, name: &str, request: &TriggerSource) -> Answer<DeliveryAccepted>;
}

/// Tokens of agents.
#[async_trait]
pub trait AgentTokens: Send + Sync {
    /// Makes one.
    async fn create(&self, caller: &Caller, request: &CreateAgentToken) -> Answer<TokenCreated>;

    /// All of them, newest first, of one `agent_type` (`static`, `ephemeral`) when named.
    async fn list(&self, caller: &Caller, agent_type: Option<&str>) -> Answer<Vec<AgentTokenView>>;

    /// Revokes one and closes its sessions; 404 when unknown or revoked already.
    async fn revoke(&self, caller: &Caller, id: TokenId) -> Answer<TokenRevoked>;
}

/// Tokens of operators.
#[async_trait]
pub trait AdminTokens: Send + Sync {
    /// Makes one.
    async fn create(&self, caller: &Caller, request: &CreateAdminToken) -> Answer<TokenCreated>;

    /// All of them, newest first.
    async fn list(&self, caller: &Caller) -> Answer<Vec<AdminTokenView>>;

    /// Revokes one; 404 when unknown or revoked already.
    async fn revoke(&self, caller: &Caller, id: TokenId) -> Answer<TokenRevoked>;
}

/// Agents.
#[async_trait]
pub trait Agents: Send + Sync {
    /// Connected and known agents, by id.
    async fn list(&self, caller: &Caller, filter: &AgentFilter) -> Answer<Vec<AgentView>>;

    /// Starts or ends the drain of one.
    async fn drain(&self, caller: &Caller, id: &AgentId, request: &DrainAgent) -> Answer<AgentView>;
}

/// Hosts.
#[async_trait]
pub trait Hosts: Send + Sync {
    /// Known hosts, by id. The cursor is the id of the last one.
    async fn list(&self, caller: &Caller, filter: &HostFilter) -> Answer<Page<HostView>>;

    /// One host.
    async fn get(&self, caller: &Caller, id: &AgentId) -> Answer<HostView>;

    /// Declares one; true when it was not known before.
    async fn declare(&self, caller: &Caller, id: &AgentId, request: &DeclareHost) -> Answer<(HostView, bool)>;

    /// Removes one; 409 `conflict` while its agent is connected.
    async fn remove(&self, caller: &Caller, id: &AgentId) -> Answer<()>;

    /// Announces the restart of one.
    async fn reboot(&self, caller: &Caller, id: &AgentId, request: &RebootHost) -> Answer<HostView>;

    /// Calls the restart of one off; 409 `conflict` when none is pending.
    async fn cancel_reboot(&self, caller: &Caller, id: &AgentId) -> Answer<HostView>;

    /// Which hosts a fan-out would go to now.
    async fn preview(&self, caller: &Caller, request: &PreviewHosts) -> Answer<HostsPreview>;
}

/// The event log and the dead letters.
#[async_trait]
pub trait Events: Send + Sync {
    /// Deliveries, newest first.
    async fn list(&self, caller: &Caller, filter: &DeliveryFilter, page: PageRequest) -> Answer<Slice<DeliveryView>>;

    /// One delivery.
    async fn get(&self, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryView>;

    /// Its body; 410 `gone` when it is not kept any more.
    async fn payload(&self, caller: &Caller, id: DeliveryRowId) -> Answer<Payload>;

    /// How it was decided.
    async fn explain(&self, caller: &Caller, id: DeliveryRowId) -> Answer<Explanation>;

    /// Works on its body again under a new row `replay:{id}:{n}`; 410 `gone` without a body.
    async fn redeliver(&self, caller: &Caller, id: DeliveryRowId) -> Answer<DeliveryAccepted>;

    /// Dead letters, deliveries and events of the bus, newest first.
    async fn dlq_list(&self, caller: &Caller, page: PageRequest) -> Answer<Slice<DeadLetter>>;

    /// How many there are.
    async fn dlq_count(&self, caller: &Caller) -> Answer<u64>;

    /// Tries one again from attempt 0; 409 `event_dlq.not_dead` when it is none.
    async fn dlq_retry(&self, caller: &Caller, id: LetterId) -> Answer<LetterRetried>;

    /// Gives one up; 409 `event_dlq.not_dead` when it is none.
    async fn dlq_discard(&self, caller: &Caller, id: LetterId, reason: &str) -> Answer<()>;
}

/// The internal bus: events, schedules, registrations, and trust between repositories.
#[async_trait]
pub trait Bus: Send + Sync {
    /// Events, newest first.
    async fn list(&self, caller: &Caller, filter: &EventFilter, page: PageRequest) -> Answer<Slice<EventView>>;

    /// One event and what it led to.
    async fn get(&self, caller: &Caller, id: EventId) -> Answer<EventDetail>;

    /// Its document.
    async fn payload(&self, caller: &Caller, id: EventId) -> Answer<serde_json::Value>;

    /// Emits one; 400 for a reserved name, 429 beyond the rate. The same `key` gives the same event.
    async fn emit(&self, caller: &Caller, request: &EmitEvent, key: Option<&str>) -> Answer<EventEmitted>;

    /// Delivers one again, as a new event.
    async fn redeliver(&self, caller: &Caller, id: EventId) -> Answer<EventEmitted>;

    /// All schedules, by repository and workflow.
    async fn schedules(&self, caller: &Caller) -> Answer<Vec<ScheduleView>>;

    /// Fires one now. The same `key` gives the same event.
    async fn trigger_schedule(
        &self,
        caller: &Caller,
        id: RegistrationId,
        request: &TriggerSchedule,
        key: Option<&str>,
    ) -> Answer<EventEmitted>;

    /// All registered workflows, by repository and name.
    async fn registrations(&self, caller: &Caller) -> Answer<Vec<RegistrationView>>;

    /// Enables or disables one.
    async fn change_registration(
        &self,
        caller: &Caller,
        id: RegistrationId,
        request: ChangeRegistration,
    ) -> Answer<RegistrationView>;

    /// Which repositories may start workflows of others.
    async fn trust(&self, caller: &Caller) -> Answer<Vec<EventTrustView>>;

    /// Adds to that; 400 when a source or repository is not known, a pattern does not compile, or both are the same.
    async fn add_trust(&self, caller: &Caller, request: &AddEventTrust) -> Answer<EventTrustView>;

    /// Takes it back.
    async fn remove_trust(&self, caller: &Caller, id: TrustId) -> Answer<()>;

    /// Whether an event of one repository may start workflows of another one, and why.
    async fn test_trust(&self, caller: &Caller, request: &TestEventTrust) -> Answer<EventTrustVerdict>;
}

/// The dispatch queue.
#[async_trait]
pub trait Queue: Send + Sync {
    /// Rows, newest first.
    async fn list(&self, caller: &Caller, filter: &QueueFilter, page: PageRequest) -> Answer<Slice<QueueEntry>>;

    /// One row.
    async fn get(&self, caller: &Caller, job: JobId) -> Answer<QueueEntry>;

    /// Why a job waits, agent by agent.
    async fn explain(&self, caller: &Caller, job: JobId) -> Answer<QueueExplanation>;
}

/// The node itself.
#[async_trait]
pub trait System: Send + Sync {
    /// The process answers. No I/O.
    fn health(&self) -> Health;

    /// Whether it can work; waits at most 2 s for the database.
    async fn ready(&self) -> Ready;

    /// What this server can do. No I/O.
    fn capabilities(&self) -> Capabilities;

    /// The metrics in Prometheus text format.
    fn metrics(&self) -> String;

    /// Whether it drains.
    async fn drain_state(&self, caller: &Caller) -> Answer<DrainState>;

    /// Starts or ends the drain; doing so twice is no error.
    async fn drain(&self, caller: &Caller, request: &Drain) -> Answer<DrainState>;

    /// How it and its background work are. No I/O.
    async fn status(&self, caller: &Caller) -> Answer<OrchestratorStatus>;

    /// Runs the checks, each for at most 5 s.
    async fn diagnose(&self, caller: &Caller) -> Answer<Diagnosis>;
}

/// The access log.
#[async_trait]
pub trait AccessLog: Send + Sync {
    /// Takes an entry that is worth keeping (the router has asked [`kici_access::Recorder`]). Never blocks and never fails
    /// the request: the implementation queues it, writes in batches and counts what it drops.
    fn record(&self, entry: AccessEntry);

    /// Entries, newest first.
    async fn list(&self, caller: &Caller, filter: &AccessFilter, page: PageRequest) -> Answer<Slice<AccessView>>;
}

/// The audit log of secrets.
#[async_trait]
pub trait Audit: Send + Sync {
    /// Entries, newest first.
    async fn list(&self, caller: &Caller, filter: &AuditFilter, page: PageRequest) -> Answer<Slice<AuditView>>;
}

/// An artifact with its bytes.
pub struct ArtifactBytes {
    /// What it is.
    pub view: ArtifactView,
    /// The archive.
    pub bytes: futures::stream::BoxStream<'static, Result<bytes::Bytes, std::io::Error>>,
}

/// Artifacts of runs, and caches.
#[async_trait]
pub trait Stored: Send + Sync {
    /// The artifacts of a run, by name.
    async fn artifacts(&self, caller: &Caller, run: RunId) -> Answer<Vec<ArtifactView>>;

    /// One of them.
    async fn artifact(&self, caller: &Caller, run: RunId, name: &str) -> Answer<ArtifactBytes>;

    /// How much is kept.
    async fn totals(&self, caller: &Caller) -> Answer<StoredTotals>;

    /// Entries of caches, newest first.
    async fn entries(&self, caller: &Caller, filter: &CacheFilter, page: PageRequest) -> Answer<Slice<CacheView>>;

    /// Removes entries of caches, or only counts them.
    async fn delete(&self, caller: &Caller, filter: &CacheFilter, apply: bool) -> Answer<CachesDeleted>;
}

/// All ports, as the router holds them.
#[derive(Clone)]
pub struct Ports {
    /// Looks tokens up.
    pub auth: std::sync::Arc<dyn Authenticator>,
    /// Runs, jobs, steps and logs.
    pub runs: std::sync::Arc<dyn Runs>,
    /// Sources.
    pub sources: std::sync::Arc<dyn Sources>,
    /// Tokens of agents.
    pub agent_tokens: std::sync::Arc<dyn AgentTokens>,
    /// Tokens of operators.
    pub admin_tokens: std::sync::Arc<dyn AdminTokens>,
    /// Agents.
    pub agents: std::sync::Arc<dyn Agents>,
    /// Hosts.
    pub hosts: std::sync::Arc<dyn Hosts>,
    /// The event log and the dead letters.
    pub events: std::sync::Arc<dyn Events>,
    /// The internal bus.
    pub bus: std::sync::Arc<dyn Bus>,
    /// The dispatch queue.
    pub queue: std::sync::Arc<dyn Queue>,
    /// The node itself.
    pub system: std::sync::Arc<dyn System>,
    /// The access log.
    pub access_log: std::sync::Arc<dyn AccessLog>,
    /// The audit log of secrets.
    pub audit: std::sync::Arc<dyn Audit>,
    /// Artifacts and caches.
    pub stored: std::sync::Arc<dyn Stored>,
    /// Live changes: the program publishes, the router subscribes.
    pub live: std::sync::Arc<Hub>,
}
