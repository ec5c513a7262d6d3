//! The internal bus: events, schedules, registrations, and trust between repositories.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kici_api::dto::bus::{
    AddEventTrust, ChangeRegistration, EmitEvent, EventDetail, EventEmitted, EventFilter, EventTrustVerdict,
    EventTrustView, EventView, RegistrationView, RepoRef, ScheduleView, TestEventTrust, TriggerSchedule,
};
use kici_api::dto::events::RunRef;
use kici_api::page::{PageRequest, Slice};
use kici_api::ports::{Answer, Bus, Caller};
use kici_api::problem::{Code, Problem};
use kici_engine::ids::{EventId, RegistrationId, TrustId};
use kici_engine::pattern::Patterns;
use kici_events::{Emit, EmitError, ScheduleError, Schedules, SourceBook, allows_name};
use kici_store::Store;
use kici_store::model::{self, BusEvent, EventOrigin, NewTrust, Registration};
use serde_json::{Value as Json, json};

use super::{DEFAULT_ORG, fault, views};

/// Runs of one event that are shown.
const RUNS_SHOWN: usize = 200;
/// Patterns of one statement of trust.
const MAX_PATTERNS: usize = 100;

/// Longest name of a repository.
const MAX_REPO_BYTES: usize = 200;

/// The bus over the store.
pub(crate) struct BusBook {
    pub(crate) store: Store,
    pub(crate) bus: kici_events::Bus,
    pub(crate) schedules: Arc<Schedules>,
    pub(crate) sources: SourceBook,
}

/// A source with one of its repositories.
struct Place {
    routing_key: String,
    repo: String,
}

impl BusBook {
    /// Names of sources by routing key.
    async fn names(&self) -> Answer<BTreeMap<String, String>> {
        let sources = self.store.source_list(DEFAULT_ORG.to_owned()).await.map_err(fault::store)?;
        Ok(sources.into_iter().map(|source| (source.routing_key, source.name)).collect())
    }

    async fn visible(&self, caller: &Caller, id: EventId) -> Answer<BusEvent> {
        let missing = || Problem::not_found(format!("event {id}"));
        let event = self.store.event_get(id).await.map_err(fault::store)?.ok_or_else(missing)?;
        if sees(caller, event.routing_key.as_deref()) { Ok(event) } else { Err(missing()) }
    }

    async fn all_registrations(&self, caller: &Caller) -> Answer<Vec<Registration>> {
        let scope = caller.routing_key.clone();
        self.store.registration_list(DEFAULT_ORG.to_owned(), scope, None).await.map_err(fault::store)
    }

    async fn source(&self, field: &str, name: &str) -> Answer<model::Source> {
        let found = self.store.source_get(DEFAULT_ORG.to_owned(), name.to_owned()).await.map_err(fault::store)?;
        found.ok_or_else(|| Problem::rejected(field, format!("there is no source `{name}`")))
    }

    /// The origin of an event that a person emits; none when it comes from nobody in particular.
    async fn origin(&self, caller: &Caller, request: &EmitEvent) -> Answer<Option<Place>> {
        let source = match (&request.source, &caller.routing_key) {
            (Some(name), _) => Some(self.source("source", name).await?),
            (None, Some(scope)) => {
                let own = self.store.source_by_routing_key(scope.clone()).await.map_err(fault::store)?;
                let gone = || Problem::rejected("source", "the source of this token was removed");
                Some(own.ok_or_else(gone)?)
            }
            (None, None) => None,
        };
        let Some(source) = source else {
            return match &request.repo {
                Some(_) => Err(Problem::rejected("source", "say which source the repository belongs to")),
                None => Ok(None),
            };
        };
        if !caller.sees(&source.routing_key) {
            return Err(Problem::rejected("source", format!("there is no source `{}`", source.name)));
        }
        let own = self.sources.open(&source).ok().and_then(|open| open.source.local_repo());
        let repo = request.repo.clone().or(own);
        let repo = repo.ok_or_else(|| Problem::rejected("repo", "say which repository of the source emits it"))?;
        if repo.is_empty()
            || repo.len() > MAX_REPO_BYTES
            || repo.contains(|c: char| c.is_control() || c.is_whitespace())
        {
            let detail = format!("a repository is 1 to {MAX_REPO_BYTES} bytes without blanks, as `owner/name`");
            return Err(Problem::rejected("repo", detail));
        }
        Ok(Some(Place { routing_key: source.routing_key, repo }))
    }

    /// A repository of a source that is known to have workflows.
    async fn place(&self, field: &str, named: &RepoRef) -> Answer<Place> {
        let source = self.source(&format!("{field}.source"), &named.source).await?;
        let scope = Some(source.routing_key.clone());
        let known = self.store.registration_list(DEFAULT_ORG.to_owned(), scope, None).await.map_err(fault::store)?;
        if known.iter().all(|registration| registration.repo != named.repo) {
            let detail = format!("source `{}` knows no workflows of a repository `{}`", named.source, named.repo);
            return Err(Problem::rejected(format!("{field}.repo"), detail));
        }
        Ok(Place { routing_key: source.routing_key, repo: named.repo.clone() })
    }

    async fn places(&self, source: &RepoRef, target: &RepoRef) -> Answer<(Place, Place)> {
        if source == target {
            return Err(Problem::rejected("target", "a repository needs no trust in itself"));
        }
        Ok((self.place("source", source).await?, self.place("target", target).await?))
    }
}

fn sees(caller: &Caller, routing_key: Option<&str>) -> bool {
    caller.routing_key.is_none() || routing_key.is_some_and(|key| caller.sees(key))
}

fn event(event: &BusEvent, names: &BTreeMap<String, String>) -> EventView {
    EventView {
        id: event.id,
        name: event.name.clone(),
        status: event.status.as_str().to_owned(),
        source: event.routing_key.as_ref().map(|key| names.get(key).unwrap_or(key).clone()),
        repo: event.source_repo.clone(),
        run_id: event.run_id,
        job_id: event.job_id,
        emitted_by: event.emitted_by.clone(),
        registration_id: event.registration_id,
        target_repos: event.target_repos.clone(),
        chain_depth: event.chain_depth,
        matched_count: event.matched_count,
        run_ids: event.run_ids.clone(),
        attempts: event.attempts,
        error: event.last_error.clone(),
        note: event.note.clone(),
        next_attempt_at: event.next_attempt_at,
        created_at: event.created_at,
        finished_at: event.finished_at,
    }
}

fn registration(one: Registration) -> RegistrationView {
    RegistrationView {
        id: one.id,
        routing_key: one.routing_key,
        repo: one.repo,
        workflow: one.workflow_name,
        sha: one.sha,
        default_branch: one.default_branch,
        trigger_types: one.trigger_types,
        enabled: one.enabled,
        disabled_by: one.disabled_by,
        updated_at: one.updated_at,
    }
}

fn refused(error: EmitError) -> Problem {
    match error {
        EmitError::Name(_) => Problem::rejected("name", error.to_string()),
        EmitError::TooLarge(_) | EmitError::Payload(_) => Problem::rejected("payload", error.to_string()),
        EmitError::Targets(problem) => Problem::rejected("target_repos", problem),
        EmitError::TooMany { after, .. } => {
            let seconds = u32::try_from(after.max(Duration::from_secs(1)).as_secs()).unwrap_or(u32::MAX);
            Problem { retry_after_s: Some(seconds), ..Problem::new(Code::EventRate, error.to_string()) }
        }
        EmitError::NotRunning | EmitError::TooDeep(..) => Problem::new(Code::Conflict, error.to_string()),
        EmitError::Store(error) => fault::store(error),
    }
}

/// What a request is stored under, per caller: keys of others are others. Without a key each request is one of its own.
fn request_key(caller: &Caller, kind: &str, key: Option<&str>) -> Option<String> {
    key.map(|key| format!("api:{kind}:{}:{key}", caller.actor))
}

/// A key that was used for something else before.
fn key_taken(id: EventId) -> Problem {
    Problem::new(Code::Conflict, format!("this Idempotency-Key belongs to another request, which made event {id}"))
}

fn trust_view(one: model::EventTrust, names: &BTreeMap<String, String>) -> EventTrustView {
    let name = |key: &String| names.get(key).unwrap_or(key).clone();
    let says = one.trust;
    EventTrustView {
        id: one.id,
        source: RepoRef { source: name(&says.source_routing_key), repo: says.source_repo },
        target: RepoRef { source: name(&says.target_routing_key), repo: says.target_repo },
        events: says.allowed_events,
        created_by: says.created_by,
        created_at: one.created_at,
    }
}

#[async_trait]
impl Bus for BusBook {
    async fn list(&self, caller: &Caller, filter: &EventFilter, page: PageRequest) -> Answer<Slice<EventView>> {
        let status = filter.status.as_deref().map(str::parse).transpose();
        let status =
            status.map_err(|error: kici_engine::state::UnknownWord| Problem::rejected("status", error.to_string()))?;
        let mut routing_key = caller.routing_key.clone();
        if let Some(name) = &filter.source {
            let named = self.source("source", name).await?.routing_key;
            if !caller.sees(&named) {
                return Ok(Slice { items: Vec::new(), next: None });
            }
            routing_key = Some(named);
        }
        let wanted = model::EventFilter {
            name: filter.name.clone(),
            status,
            routing_key,
            repo: filter.repo.clone(),
            run_id: filter.run,
        };
        let listed = self.store.event_list(wanted, views::page(page)).await.map_err(fault::store)?;
        let names = self.names().await?;
        Ok(views::slice(listed, |row| event(&row, &names)))
    }

    async fn get(&self, caller: &Caller, id: EventId) -> Answer<EventDetail> {
        let found = self.visible(caller, id).await?;
        let mut runs = Vec::new();
        for run in found.run_ids.iter().take(RUNS_SHOWN) {
            let run = self.store.run_get(*run).await.map_err(fault::store)?;
            let run = run.filter(|run| caller.sees(&run.event.routing_key));
            runs.extend(run.map(|run| RunRef { run_id: run.id, workflow: run.workflow_name, status: run.status }));
        }
        let names = self.names().await?;
        Ok(EventDetail { event: event(&found, &names), trace: found.trace, runs })
    }

    async fn payload(&self, caller: &Caller, id: EventId) -> Answer<Json> {
        Ok(self.visible(caller, id).await?.payload)
    }

    async fn emit(&self, caller: &Caller, request: &EmitEvent, key: Option<&str>) -> Answer<EventEmitted> {
        let place = self.origin(caller, request).await?;
        let (routing_key, repo) = place.map_or((None, None), |place| (Some(place.routing_key), Some(place.repo)));
        let origin =
            EventOrigin::Outside { org: DEFAULT_ORG.to_owned(), routing_key, repo, by: caller.actor.to_string() };
        let emit = Emit {
            origin,
            name: request.name.clone(),
            payload: request.payload.clone().unwrap_or_else(|| json!({})),
            target_repos: request.target_repos.clone(),
            key: request_key(caller, "emit", key),
            request_id: caller.request_id.clone(),
        };
        let (event_id, known) = self.bus.emit(emit.clone()).await.map_err(refused)?;
        if known && let Some(stored) = self.store.event_get(event_id).await.map_err(fault::store)? {
            let EventOrigin::Outside { routing_key, repo, .. } = &emit.origin else { return Err(key_taken(event_id)) };
            let same = (&stored.name, &stored.payload, &stored.target_repos)
                == (&emit.name, &emit.payload, &emit.target_repos)
                && (&stored.routing_key, &stored.source_repo) == (routing_key, repo);
            if !same {
                return Err(key_taken(event_id));
            }
        }
        Ok(EventEmitted { event_id })
    }

    async fn redeliver(&self, caller: &Caller, id: EventId) -> Answer<EventEmitted> {
        self.visible(caller, id).await?;
        let by = caller.actor.to_string();
        let copy = self.store.event_replay(id, by, caller.request_id.clone()).await.map_err(fault::store)?;
        let event_id = copy.ok_or_else(|| Problem::not_found(format!("event {id}")))?;
        Ok(EventEmitted { event_id })
    }

    async fn schedules(&self, caller: &Caller) -> Answer<Vec<ScheduleView>> {
        let listed = self.schedules.list().await.map_err(fault::store)?;
        let seen = listed.into_iter().filter(|one| caller.sees(&one.registration.routing_key));
        let view = |one: kici_events::ScheduleView| ScheduleView {
            registration_id: one.registration.id,
            workflow: one.registration.workflow_name,
            repo: one.registration.repo,
            cron: one.cron,
            timezone: one.timezone,
            offset_ms: u64::try_from(one.offset.as_millis()).unwrap_or(u64::MAX),
            enabled: one.registration.enabled,
            next_at: one.next_at,
            last_fired_at: one.last_fired_at,
            last_event_id: one.last_event_id,
            problem: one.problem,
        };
        Ok(seen.map(view).collect())
    }

    async fn trigger_schedule(
        &self,
        caller: &Caller,
        id: RegistrationId,
        request: &TriggerSchedule,
        key: Option<&str>,
    ) -> Answer<EventEmitted> {
        if self.all_registrations(caller).await?.iter().all(|one| one.id != id) {
            return Err(Problem::not_found(format!("registration {id}")));
        }
        let by = caller.actor.to_string();
        let fired = self.schedules.fire(id, request.cron.as_deref(), &by, request_key(caller, "schedule", key)).await;
        let event_id = fired.map_err(|error| match error {
            ScheduleError::None(_) | ScheduleError::Disabled(_) => Problem::new(Code::Conflict, error.to_string()),
            ScheduleError::Several(..) => Problem::rejected("cron", error.to_string()),
            ScheduleError::Store(error) => fault::store(error),
        })?;
        if key.is_some()
            && let Some(stored) = self.store.event_get(event_id).await.map_err(fault::store)?
        {
            let asked = request.cron.as_deref();
            let other = asked.is_some_and(|cron| stored.payload.get("cron").and_then(Json::as_str) != Some(cron));
            if stored.registration_id != Some(id) || other {
                return Err(key_taken(event_id));
            }
        }
        Ok(EventEmitted { event_id })
    }

    async fn registrations(&self, caller: &Caller) -> Answer<Vec<RegistrationView>> {
        Ok(self.all_registrations(caller).await?.into_iter().map(registration).collect())
    }

    async fn change_registration(
        &self,
        caller: &Caller,
        id: RegistrationId,
        request: ChangeRegistration,
    ) -> Answer<RegistrationView> {
        let missing = || Problem::not_found(format!("registration {id}"));
        let find = |list: Vec<Registration>| list.into_iter().find(|one| one.id == id);
        find(self.all_registrations(caller).await?).ok_or_else(missing)?;
        let by = caller.actor.to_string();
        self.store.registration_enable(id, request.enabled, by).await.map_err(fault::store)?;
        find(self.all_registrations(caller).await?).map(registration).ok_or_else(missing)
    }

    async fn trust(&self, _: &Caller) -> Answer<Vec<EventTrustView>> {
        let names = self.names().await?;
        let listed = self.store.event_trust_list(DEFAULT_ORG.to_owned()).await.map_err(fault::store)?;
        Ok(listed.into_iter().map(|one| trust_view(one, &names)).collect())
    }

    async fn add_trust(&self, caller: &Caller, request: &AddEventTrust) -> Answer<EventTrustView> {
        if let Some(patterns) = &request.events {
            if patterns.is_empty() || patterns.len() > MAX_PATTERNS {
                return Err(Problem::rejected(
                    "events",
                    format!("give 1 to {MAX_PATTERNS} patterns, or leave it out for all"),
                ));
            }
            Patterns::compile(patterns).map_err(|error| Problem::rejected("events", error.to_string()))?;
        }
        let (source, target) = self.places(&request.source, &request.target).await?;
        let new = NewTrust {
            org: DEFAULT_ORG.to_owned(),
            source_routing_key: source.routing_key,
            source_repo: source.repo,
            target_routing_key: target.routing_key,
            target_repo: target.repo,
            allowed_events: request.events.clone(),
            created_by: caller.actor.to_string(),
        };
        let added = self.store.event_trust_add(new).await.map_err(fault::store)?;
        Ok(trust_view(added, &self.names().await?))
    }

    async fn remove_trust(&self, _: &Caller, id: TrustId) -> Answer<()> {
        match self.store.event_trust_remove(id).await.map_err(fault::store)? {
            true => Ok(()),
            false => Err(Problem::not_found(format!("event trust {id}"))),
        }
    }

    async fn test_trust(&self, _: &Caller, request: &TestEventTrust) -> Answer<EventTrustVerdict> {
        let (source, target) = self.places(&request.source, &request.target).await?;
        if source.routing_key == target.routing_key {
            let reason = "repositories of one source trust each other".to_owned();
            return Ok(EventTrustVerdict { allowed: true, reason });
        }
        let listed = self.store.event_trust_list(DEFAULT_ORG.to_owned()).await.map_err(fault::store)?;
        let found = listed.into_iter().find(|one| {
            let says = &one.trust;
            (says.source_routing_key == source.routing_key && says.source_repo == source.repo)
                && (says.target_routing_key == target.routing_key && says.target_repo == target.repo)
        });
        let (allowed, reason) = match found {
            None => (false, "no statement of trust names the two repositories".to_owned()),
            Some(one) if !one.enabled => (false, format!("{} is switched off", one.id)),
            Some(one) if !allows_name(one.trust.allowed_events.as_deref(), &request.event) => {
                (false, format!("{} does not name `{}`", one.id, request.event))
            }
            Some(one) => (true, format!("{} says so", one.id)),
        };
        Ok(EventTrustVerdict { allowed, reason })
    }
}
