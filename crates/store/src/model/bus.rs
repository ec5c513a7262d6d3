//! Events of the internal bus, schedules, and trust between repositories.

use std::time::Duration;

use kici_engine::ids::{AgentId, EventId, InstanceId, JobId, RegistrationId, RunId, TrustId};
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::{JobRef, NewRun, words};

words! {
    /// Status of an event of the bus.
    EventStatus("event status") {
        /// Waits for or is in delivery.
        Pending = "pending",
        /// Delivered to all that listen.
        Processed = "processed",
        /// Failed too often; in the dead letter queue.
        Dead = "dead",
        /// A dead one that a person gave up.
        Discarded = "discarded",
    }
}

/// Where an event comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum EventOrigin {
    /// A running job. What it is, where its code lies and how deep it is in a chain is read from its row.
    Job {
        /// The job; a stale epoch is refused.
        job: JobRef,
        /// Who runs it.
        agent_id: AgentId,
    },
    /// A person or the system, perhaps on behalf of a repository.
    Outside {
        /// Organisation.
        org: String,
        /// The source of the repository.
        routing_key: Option<String>,
        /// `owner/name`.
        repo: Option<String>,
        /// Who, for people.
        by: String,
    },
}

/// An event to be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    /// Where it comes from.
    pub origin: EventOrigin,
    /// Its name.
    pub name: String,
    /// Its document.
    pub payload: Json,
    /// Patterns of the repositories it is for; empty is all.
    pub target_repos: Vec<String>,
    /// For this registration only.
    pub registration_id: Option<RegistrationId>,
    /// Two events with the same key are one.
    pub emit_key: Option<String>,
    /// The request that brought it.
    pub request_id: String,
}

/// What keeps chains of events from running away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventLimits {
    /// Longest chain of events.
    pub max_depth: u32,
    /// Most events of one name from one source in [`EventLimits::WINDOW`]; none for the system's own.
    pub per_minute: Option<u32>,
}

impl EventLimits {
    /// What the rate is counted over.
    pub const WINDOW: Duration = Duration::from_secs(60);
}

/// What became of a [`NewEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emitted {
    /// Stored.
    Stored(EventId),
    /// Stored before under the same key.
    Known(EventId),
    /// The job does not run, or not at this epoch or agent.
    NotRunning,
    /// The chain of events would get this long.
    TooDeep(u32),
    /// Too many of this name; there is room again after this time.
    TooMany(Duration),
}

/// A stored event.
#[derive(Clone, Debug, PartialEq)]
pub struct BusEvent {
    /// Its id.
    pub id: EventId,
    /// Organisation.
    pub org: String,
    /// Its name.
    pub name: String,
    /// Its document.
    pub payload: Json,
    /// The source of the repository it comes from.
    pub routing_key: Option<String>,
    /// That repository.
    pub source_repo: Option<String>,
    /// The run that emitted it, or whose end it tells.
    pub run_id: Option<RunId>,
    /// The job likewise.
    pub job_id: Option<JobId>,
    /// Who emitted it, for people.
    pub emitted_by: String,
    /// For this registration only.
    pub registration_id: Option<RegistrationId>,
    /// Patterns of the repositories it is for; empty is all.
    pub target_repos: Vec<String>,
    /// How many events led to the runs that it starts.
    pub chain_depth: u32,
    /// Its status.
    pub status: EventStatus,
    /// Workflows that matched.
    pub matched_count: u32,
    /// Times its delivery was tried and failed.
    pub attempts: u32,
    /// The instance that delivers it.
    pub claimed_by: Option<InstanceId>,
    /// Not before this.
    pub next_attempt_at: Option<Ts>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// What happened, for people.
    pub note: Option<String>,
    /// The decision trace.
    pub trace: Option<Json>,
    /// The runs that it started.
    pub run_ids: Vec<RunId>,
    /// Why it is dead: `exhausted_retries` or `non_retryable`.
    pub dlq_reason: Option<String>,
    /// The request that brought it.
    pub request_id: String,
    /// When it was stored.
    pub created_at: Ts,
    /// When it was done with.
    pub finished_at: Option<Ts>,
    /// Claims in a row that came to no end, the one of now included; 0 in lists.
    pub claims: u32,
}

impl BusEvent {
    /// After so many claims without an end an event is only taken while no other such one is being delivered.
    pub const SUSPECT: i64 = 2;

    /// It was taken alone, because it may be what ends processes.
    pub fn is_suspect(&self) -> bool {
        i64::from(self.claims) > Self::SUSPECT
    }
}

/// Which events to list.
#[derive(Clone, Debug, Default)]
pub struct EventFilter {
    /// Of this name.
    pub name: Option<String>,
    /// In this status.
    pub status: Option<EventStatus>,
    /// From this source.
    pub routing_key: Option<String>,
    /// From this repository.
    pub repo: Option<String>,
    /// Of this run.
    pub run_id: Option<RunId>,
}

/// How an attempt to deliver an event ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventOutcome {
    /// Everybody who listens has it.
    Done,
    /// Not everybody; it is tried again at this time.
    Retry(String, Ts),
    /// It is given up, for this reason.
    Dead(String, &'static str),
}

/// The result of one attempt, written in one transaction.
#[derive(Clone, Debug)]
pub struct ProcessedEvent {
    /// The event.
    pub id: EventId,
    /// How it ended.
    pub outcome: EventOutcome,
    /// Workflows that matched.
    pub matched_count: u32,
    /// What happened, for people.
    pub note: Option<String>,
    /// The decision trace.
    pub trace: Option<Json>,
    /// Why workflows that matched did not start though nothing that they say forbids it.
    pub refused: Option<String>,
    /// The runs to create; those that exist from an earlier attempt are found by their key.
    pub runs: Vec<NewRun>,
}

/// How far the times of a schedule have been looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleState {
    /// The registered workflow.
    pub registration_id: RegistrationId,
    /// Pattern and zone.
    pub schedule_key: String,
    /// Every time up to here was fired or passed over.
    pub cursor_at: Ts,
    /// The time it fired for last.
    pub last_fired_at: Option<Ts>,
    /// The event of that firing.
    pub last_event_id: Option<EventId>,
}

/// A schedule whose time has come.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleFire {
    /// The registered workflow.
    pub registration_id: RegistrationId,
    /// Pattern and zone.
    pub schedule_key: String,
    /// The time it fires for.
    pub due: Ts,
    /// What it tells.
    pub event: NewEvent,
}

/// Says that events of one repository may start workflows of another one.
#[derive(Clone, Debug, PartialEq)]
pub struct NewTrust {
    /// Organisation.
    pub org: String,
    /// Source of the repository that emits.
    pub source_routing_key: String,
    /// That repository.
    pub source_repo: String,
    /// Source of the repository whose workflows start.
    pub target_routing_key: String,
    /// That repository.
    pub target_repo: String,
    /// Patterns of event names; none is all.
    pub allowed_events: Option<Vec<String>>,
    /// Who says so.
    pub created_by: String,
}

/// A stored [`NewTrust`].
#[derive(Clone, Debug, PartialEq)]
pub struct EventTrust {
    /// Its id.
    pub id: TrustId,
    /// What it says.
    pub trust: NewTrust,
    /// False: it does not count.
    pub enabled: bool,
    /// When it was stored.
    pub created_at: Ts,
}
