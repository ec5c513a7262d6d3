//! Times that start workflows. Whoever looks, each time fires once: the row of a schedule says up to where its times were
//! looked at, and is moved in the transaction that stores the event.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kici_engine::cron::{self, Cron};
use kici_engine::event_name;
use kici_engine::ids::{EventId, RegistrationId};
use kici_engine::lock::Trigger;
use kici_engine::time::{Clock, Ts};
use kici_store::model::{Emitted, EventLimits, EventOrigin, NewEvent, Registration, ScheduleFire, ScheduleState};
use kici_store::{Store, StoreError};
use serde_json::{Value as Json, json};

use crate::registry::Registry;

/// One schedule of a registered workflow.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleView {
    /// The registration.
    pub registration: Registration,
    /// The pattern.
    pub cron: String,
    /// The zone.
    pub timezone: String,
    /// How much later than its time it fires.
    pub offset: Duration,
    /// The next time; none when it is not enabled or never comes again.
    pub next_at: Option<Ts>,
    /// The time it fired for last.
    pub last_fired_at: Option<Ts>,
    /// The event of that.
    pub last_event_id: Option<EventId>,
    /// Why its times cannot be told.
    pub problem: Option<String>,
}

/// Why a schedule was not fired by hand.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// Not there.
    #[error("registration {0} has no schedule; see `kici-admin schedule list`")]
    None(RegistrationId),
    /// Several.
    #[error("registration {0} has several schedules; say which with `cron`: {1}")]
    Several(RegistrationId, String),
    /// Switched off.
    #[error("registration {0} is disabled; see `kici-admin registration enable`")]
    Disabled(RegistrationId),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// One schedule as a workflow writes it.
struct Entry {
    registration: Registration,
    cron: String,
    timezone: String,
    jitter: Duration,
    catchup: Duration,
}

impl Entry {
    fn key(&self) -> String {
        cron::schedule_key(&self.cron, &self.timezone)
    }

    fn offset(&self) -> Duration {
        cron::offset(self.jitter, self.registration.id.uuid().as_u128())
    }

    fn event(&self, payload: Json, key: Option<String>, by: &str) -> NewEvent {
        NewEvent {
            origin: EventOrigin::Outside {
                org: self.registration.org.clone(),
                routing_key: Some(self.registration.routing_key.clone()),
                repo: Some(self.registration.repo.clone()),
                by: by.to_owned(),
            },
            name: event_name::SCHEDULE_FIRE.to_owned(),
            payload,
            target_repos: Vec::new(),
            registration_id: Some(self.registration.id),
            emit_key: key,
            request_id: "schedule".to_owned(),
        }
    }
}

/// Looks at the times of all schedules.
pub struct Schedules {
    store: Store,
    clock: Arc<dyn Clock>,
    tick: Duration,
    registry: Registry,
}

impl Schedules {
    /// Over these parts; `tick` is how often somebody looks.
    pub fn new(store: Store, clock: Arc<dyn Clock>, tick: Duration) -> Self {
        let registry = Registry::new(store.clone());
        Self { store, clock, tick, registry }
    }

    /// One look: fires what is due, once. Returns how many fired. What was missed while nobody looked is one firing that
    /// counts the others; what is older than `catchup` is passed over. A schedule that was not known counts from now on.
    ///
    /// # Errors
    /// The database's.
    pub async fn run(&self) -> Result<u64, StoreError> {
        let entries = self.entries(None).await?;
        if entries.is_empty() {
            return Ok(0);
        }
        let states = self.states().await?;
        let mut fired = 0;
        for entry in &entries {
            fired += u64::from(self.look(entry, &states).await?);
        }
        Ok(fired)
    }

    async fn look(
        &self,
        entry: &Entry,
        states: &HashMap<(RegistrationId, String), ScheduleState>,
    ) -> Result<bool, StoreError> {
        let id = entry.registration.id;
        let key = entry.key();
        let Some(state) = states.get(&(id, key.clone())) else {
            self.store.schedule_seen(id, key).await?;
            return Ok(false);
        };
        // A pattern that this version does not read came with a lock of another program.
        let Ok(cron) = Cron::parse(&entry.cron, &entry.timezone) else { return Ok(false) };
        let now = self.clock.now().minus(entry.offset());
        if !entry.registration.enabled {
            self.store.schedule_pass(id, key, now).await?;
            return Ok(false);
        }
        // A time that came since the last look was not missed, however short the schedule's memory is.
        let catchup = entry.catchup.max(self.tick * 2);
        let Some(due) = cron.due(state.cursor_at, now, catchup) else { return Ok(false) };
        let payload = json!({
            "cron": entry.cron,
            "timezone": entry.timezone,
            "due_at": due.at,
            "missed_count": due.missed,
        });
        let once = format!("cron:{}:{}:{}", id.uuid(), due.at.as_micros(), key);
        let event = entry.event(payload, Some(once), "system");
        let fire = ScheduleFire { registration_id: id, schedule_key: key, due: due.at, event };
        let fired = self.store.schedule_fire(fire).await?;
        if let Some(event) = fired {
            tracing::info!(%event, workflow = entry.registration.workflow_name, due = %due.at, missed = due.missed, "a schedule fired");
        }
        Ok(fired.is_some())
    }

    /// All schedules, by repository and workflow.
    ///
    /// # Errors
    /// The database's.
    pub async fn list(&self) -> Result<Vec<ScheduleView>, StoreError> {
        let (entries, states, now) = (self.entries(None).await?, self.states().await?, self.clock.now());
        let views = entries.into_iter().map(|entry| {
            let state = states.get(&(entry.registration.id, entry.key()));
            let parsed = Cron::parse(&entry.cron, &entry.timezone);
            let offset = entry.offset();
            let from = now.minus(offset);
            let next =
                parsed.as_ref().ok().filter(|_| entry.registration.enabled).and_then(|cron| cron.next_after(from));
            ScheduleView {
                cron: entry.cron,
                timezone: entry.timezone,
                offset,
                next_at: next.map(|at| at.plus(offset)),
                last_fired_at: state.and_then(|state| state.last_fired_at),
                last_event_id: state.and_then(|state| state.last_event_id),
                problem: parsed.err().map(|error| error.to_string()),
                registration: entry.registration,
            }
        });
        Ok(views.collect())
    }

    /// Fires a schedule now, whatever its time; its own times stay as they are. `cron` says which where the workflow has
    /// several. Calls with the same `key` are one.
    ///
    /// # Errors
    /// [`ScheduleError`]; then nothing was fired.
    pub async fn fire(
        &self,
        registration: RegistrationId,
        cron: Option<&str>,
        by: &str,
        key: Option<String>,
    ) -> Result<EventId, ScheduleError> {
        let mut found = self.entries(Some(registration)).await?;
        if let Some(cron) = cron {
            found.retain(|entry| entry.cron == cron);
        }
        let entry = match found.as_slice() {
            [] => return Err(ScheduleError::None(registration)),
            [one] => one,
            several => {
                let patterns: Vec<String> = several.iter().map(|entry| format!("`{}`", entry.cron)).collect();
                return Err(ScheduleError::Several(registration, patterns.join(", ")));
            }
        };
        if !entry.registration.enabled {
            return Err(ScheduleError::Disabled(registration));
        }
        let payload = json!({
            "cron": entry.cron,
            "timezone": entry.timezone,
            "due_at": self.clock.now(),
            "missed_count": 0,
            "fired_by": by,
        });
        let limits = EventLimits { max_depth: u32::MAX, per_minute: None };
        match self.store.event_emit(entry.event(payload, key, by), limits).await? {
            Emitted::Stored(id) | Emitted::Known(id) => Ok(id),
            other => Err(StoreError::Db(format!("a schedule without limits was refused: {other:?}")).into()),
        }
    }

    async fn states(&self) -> Result<HashMap<(RegistrationId, String), ScheduleState>, StoreError> {
        let states = self.store.schedule_states().await?;
        Ok(states.into_iter().map(|state| ((state.registration_id, state.schedule_key.clone()), state)).collect())
    }

    /// The schedules of registered workflows, of one or of all.
    async fn entries(&self, only: Option<RegistrationId>) -> Result<Vec<Entry>, StoreError> {
        let org = crate::DEFAULT_ORG.to_owned();
        let mut registrations = self.registry.listening(&org, None, &["schedule"]).await?;
        // As they are shown: by repository and workflow.
        registrations.sort_by(|a, b| {
            (&a.routing_key, &a.repo, &a.workflow_name).cmp(&(&b.routing_key, &b.repo, &b.workflow_name))
        });
        registrations.retain(|registration| only.is_none_or(|id| id == registration.id));
        let mut entries = Vec::new();
        for registration in registrations {
            let Some(workflow) = self.registry.workflow(&registration.lock_digest).await? else {
                tracing::warn!(workflow = registration.workflow_name, "its stored lock document is missing");
                continue;
            };
            // Two triggers for the same time are one.
            let mut seen = BTreeMap::new();
            for trigger in &workflow.triggers {
                let Trigger::Schedule { cron, timezone, jitter_ms, catchup_ms, .. } = trigger else { continue };
                let entry = Entry {
                    registration: Registration::clone(&registration),
                    cron: cron.clone(),
                    timezone: timezone.clone(),
                    jitter: Duration::from_millis(*jitter_ms),
                    catchup: Duration::from_millis(*catchup_ms),
                };
                seen.entry(entry.key()).or_insert(entry);
            }
            entries.extend(seen.into_values());
        }
        Ok(entries)
    }
}
