//! The internal bus: events, schedules, registrations, and trust between repositories.

use std::fmt;
use std::str::FromStr;

use kici_engine::ids::{DeliveryRowId, EventId, JobId, RegistrationId, RunId, TrustId};
use kici_engine::time::Ts;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value as Json;
use utoipa::{IntoParams, ToSchema};

use super::events::RunRef;

/// One event of the bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: EventId,
    /// Its name.
    pub name: String,
    /// `pending`, `processed`, `dead` or `discarded`.
    pub status: String,
    /// Name of the source it comes from.
    pub source: Option<String>,
    /// The repository it comes from.
    pub repo: Option<String>,
    /// The run that emitted it, or whose end it tells.
    #[schema(value_type = Option<String>)]
    pub run_id: Option<RunId>,
    /// The job likewise.
    #[schema(value_type = Option<String>)]
    pub job_id: Option<JobId>,
    /// Who emitted it.
    pub emitted_by: String,
    /// The only registered workflow it is for.
    #[schema(value_type = Option<String>)]
    pub registration_id: Option<RegistrationId>,
    /// Patterns of the repositories it is for; empty is all.
    pub target_repos: Vec<String>,
    /// How many events led to the runs that it starts.
    pub chain_depth: u32,
    /// Workflows that matched.
    pub matched_count: u32,
    /// The runs it started.
    #[schema(value_type = Vec<String>)]
    pub run_ids: Vec<RunId>,
    /// Attempts that failed.
    pub attempts: u32,
    /// Why the last attempt failed.
    pub error: Option<String>,
    /// What else is worth knowing.
    pub note: Option<String>,
    /// When the next attempt is due.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub next_attempt_at: Option<Ts>,
    /// When it was stored.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When it was done with.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Ts>,
}

/// Filters of the list of events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct EventFilter {
    /// Only this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Only this status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Only this source, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Only this repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Only this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub run: Option<RunId>,
}

/// An event, why it started what it started, and what that is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventDetail {
    /// The event.
    pub event: EventView,
    /// The decision trace, as of a delivery. Null before the first attempt to deliver it.
    #[schema(value_type = Option<Object>)]
    pub trace: Option<Json>,
    /// The runs it started.
    pub runs: Vec<RunRef>,
}

/// An event that a person emits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmitEvent {
    /// Its name.
    pub name: String,
    /// Its document; `{}` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub payload: Option<Json>,
    /// Name of the source on whose behalf it is emitted; then trust counts as if a job of it had emitted it. Without it the
    /// event reaches every repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The repository likewise, `owner/name`; a local source has only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Patterns of the repositories it is for; empty is all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub target_repos: Vec<String>,
}

/// An event that was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventEmitted {
    /// Its id.
    #[schema(value_type = String)]
    pub event_id: EventId,
}

/// A delivery or an event, by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LetterId {
    /// `dlv_…`
    Delivery(DeliveryRowId),
    /// `evt_…`
    Event(EventId),
}

impl fmt::Display for LetterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Delivery(id) => id.fmt(f),
            Self::Event(id) => id.fmt(f),
        }
    }
}

/// A text that names no dead letter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the id of a dead letter; expected `{delivery}` or `{event}` followed by a UUID",
    delivery = DeliveryRowId::PREFIX, event = EventId::PREFIX)]
pub struct ParseLetterError(String);

impl FromStr for LetterId {
    type Err = ParseLetterError;

    fn from_str(text: &str) -> Result<Self, ParseLetterError> {
        let parsed = match text.starts_with(EventId::PREFIX) {
            true => text.parse().map(Self::Event),
            false => text.parse().map(Self::Delivery),
        };
        parsed.map_err(|_| ParseLetterError(text.chars().take(80).collect()))
    }
}

impl Serialize for LetterId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LetterId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What was given up: a delivery that could not be worked on, or an event that could not be delivered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeadLetter {
    /// `delivery` or `event`.
    pub kind: String,
    /// Its id.
    #[schema(value_type = String)]
    pub id: LetterId,
    /// The forge's name of the event, or that on the bus.
    pub event: String,
    /// Name of the source it comes from.
    pub source: Option<String>,
    /// The repository it is about.
    pub repo: Option<String>,
    /// Attempts that failed.
    pub attempts: u32,
    /// Why the last one failed.
    pub error: Option<String>,
    /// `exhausted_retries` or `non_retryable`.
    pub reason: String,
    /// When it was stored.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When it was given up.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub dead_at: Option<Ts>,
}

/// A dead letter that is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LetterRetried {
    /// Its id.
    #[schema(value_type = String)]
    pub id: LetterId,
}

/// A schedule of a registered workflow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScheduleView {
    /// The registered workflow.
    #[schema(value_type = String)]
    pub registration_id: RegistrationId,
    /// Its name.
    pub workflow: String,
    /// Its repository.
    pub repo: String,
    /// The pattern.
    pub cron: String,
    /// The time zone of the pattern.
    pub timezone: String,
    /// How much later than its time it fires, in milliseconds (`jitter`).
    pub offset_ms: u64,
    /// False when the registration is disabled.
    pub enabled: bool,
    /// When it fires next.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub next_at: Option<Ts>,
    /// The time it fired for last.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_fired_at: Option<Ts>,
    /// The event of that.
    #[schema(value_type = Option<String>)]
    pub last_event_id: Option<EventId>,
    /// Why it never fires.
    pub problem: Option<String>,
}

/// Fires a schedule by hand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TriggerSchedule {
    /// Which one, where the workflow has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cron: Option<String>,
}

/// A registered workflow: one of a default branch that events without a commit of their own can start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegistrationView {
    /// Its id; it stays over pushes.
    #[schema(value_type = String)]
    pub id: RegistrationId,
    /// Its routing key.
    pub routing_key: String,
    /// Its repository.
    pub repo: String,
    /// Its name.
    pub workflow: String,
    /// The commit it was read at.
    pub sha: String,
    /// The branch.
    pub default_branch: Option<String>,
    /// The types of its triggers.
    pub trigger_types: Vec<String>,
    /// False: never started through the registration.
    pub enabled: bool,
    /// Who disabled it.
    pub disabled_by: Option<String>,
    /// Last change.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Ts,
}

/// Changes a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeRegistration {
    /// Whether it may start runs.
    pub enabled: bool,
}

/// A repository of a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RepoRef {
    /// Name of the source.
    pub source: String,
    /// `owner/name`.
    pub repo: String,
}

impl fmt::Display for RepoRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.source, self.repo)
    }
}

/// Lets events of one repository start workflows of another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddEventTrust {
    /// The repository that emits.
    pub source: RepoRef,
    /// The repository whose workflows start.
    pub target: RepoRef,
    /// Patterns of event names; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<String>>,
}

/// Asks whether an event of one repository may start workflows of another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TestEventTrust {
    /// The repository that emits.
    pub source: RepoRef,
    /// The repository whose workflows start.
    pub target: RepoRef,
    /// Name of the event.
    pub event: String,
}

/// The answer to [`TestEventTrust`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventTrustVerdict {
    /// Whether it may.
    pub allowed: bool,
    /// Why.
    pub reason: String,
}

/// A stored [`AddEventTrust`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventTrustView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: TrustId,
    /// The repository that emits.
    pub source: RepoRef,
    /// The repository whose workflows start.
    pub target: RepoRef,
    /// Patterns of event names; all if null.
    pub events: Option<Vec<String>>,
    /// Who said so.
    pub created_by: String,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
}
