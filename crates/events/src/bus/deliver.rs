//! From an event to the runs it causes. Reads, decides, and returns everything that is to be written as one value.

use std::sync::Arc;

use kici_engine::event::{Event, EventKind, ForkState, Sender};
use kici_engine::event_name;
use kici_engine::ids::RegistrationId;
use kici_engine::pattern::Patterns;
use kici_store::model::{BusEvent, EventTrust, Registration};
use serde_json::Value as Json;
use tokio::sync::OnceCell;

use crate::planner::{Decision, Planner, Retry};
use crate::registrations::{Haste, Told};
use crate::runs::Cause;

/// Who is told of an event, and in which forms.
pub(crate) struct Audience {
    forms: Vec<Event>,
    registrations: Vec<Arc<Registration>>,
    /// Those that an earlier attempt has started.
    served: Vec<RegistrationId>,
    /// Read when the first one needs it.
    trust: OnceCell<Vec<EventTrust>>,
}

impl Audience {
    /// Those who may listen.
    pub(crate) fn registrations(&self) -> &[Arc<Registration>] {
        &self.registrations
    }

    /// A decision about nobody yet.
    pub(crate) fn decision(&self) -> Decision {
        let mut decision = Decision::new(&self.forms[0]);
        if self.registrations.is_empty() {
            decision.notes.push("no registered workflow listens to it".to_owned());
        }
        decision
    }
}

impl Planner {
    /// Finds out who is to be told of an event.
    ///
    /// # Errors
    /// [`Retry`] when the database does not answer.
    pub(crate) async fn audience(&self, event: &BusEvent) -> Result<Audience, Retry> {
        let (kinds, forms) = forms(event);
        // What a job waits for is the work of its own repository, wherever else somebody listens.
        let gate = event.job_id.is_some() && self.store.gate_of_event(event.id).await?;
        let own = (event.routing_key.as_deref().unwrap_or_default(), event.source_repo.as_deref().unwrap_or_default());
        let mut registrations = self.registry.listening(&event.org, gate.then_some(own), kinds).await?;
        registrations.retain(|registration| is_for(event, registration));
        let served = match event.run_ids.is_empty() {
            true => Vec::new(),
            false => self.store.event_served(event.run_ids.clone()).await?,
        };
        Ok(Audience { forms, registrations, served, trust: OnceCell::new() })
    }

    /// Decides what one of the audience does with an event. `last` says that no other attempt follows.
    ///
    /// # Errors
    /// [`Retry`] when another attempt may help.
    pub(crate) async fn tell(
        &self,
        decision: &mut Decision,
        event: &BusEvent,
        audience: &Audience,
        registration: &Registration,
        last: bool,
    ) -> Result<(), Retry> {
        let told = Told { org: &event.org, request_id: &event.request_id, events: &audience.forms };
        let Some(candidate) = self.candidate(decision, registration, &told).await? else { return Ok(()) };
        if tells_of(event, registration) {
            let name = &registration.workflow_name;
            decision.notes.push(format!("{name}: the event tells of its own run, and no workflow starts itself"));
            return Ok(());
        }
        if !same_source(event, registration) {
            let read = || self.store.event_trust_list(event.org.clone());
            let trust = audience.trust.get_or_try_init(read).await?;
            if !trust.iter().any(|one| allows(one, event, registration)) {
                decision.notes.push(untrusted(event, registration));
                return Ok(());
            }
        }
        if audience.served.contains(&registration.id) {
            decision.matched += 1;
            return Ok(());
        }
        let haste = if last { Haste::Now } else { Haste::CanWait };
        let cause = Cause::Event(event.id, registration.id);
        self.run_candidate(decision, &told, cause, candidate, haste).await
    }
}

/// Whether an event tells of the end of a run, or of a job, of this very workflow: one that heard it would start itself for ever.
fn tells_of(event: &BusEvent, registration: &Registration) -> bool {
    let end = matches!(event.name.as_str(), event_name::WORKFLOW_COMPLETE | event_name::JOB_COMPLETE);
    end && event.routing_key.as_ref() == Some(&registration.routing_key)
        && event.source_repo.as_ref() == Some(&registration.repo)
        && event.payload.get("workflow").and_then(Json::as_str) == Some(registration.workflow_name.as_str())
}

/// The trigger types that listen, and the event in the forms that they know.
fn forms(event: &BusEvent) -> (&'static [&'static str], Vec<Event>) {
    let own = |kind: EventKind| normalised(event, kind, &event.name);
    let life = |name: &str| normalised(event, EventKind::Lifecycle, name);
    match event.name.as_str() {
        event_name::WORKFLOW_COMPLETE => {
            (&["lifecycle", "workflow_complete"], vec![own(EventKind::WorkflowComplete), life("workflow_complete")])
        }
        event_name::JOB_COMPLETE => {
            let mut forms = vec![own(EventKind::JobComplete), life("job_complete")];
            let status = event.payload.get("status").and_then(Json::as_str).unwrap_or_default();
            if event_name::is_failure(status) {
                forms.push(life("job_failed"));
            }
            (&["job_complete", "lifecycle"], forms)
        }
        event_name::REGISTRATION_UPDATED => (&["lifecycle"], vec![life("registration_updated")]),
        event_name::WORKFLOWS_FAILED_BATCH => (&["workflows_failed_batch"], vec![own(EventKind::WorkflowsFailedBatch)]),
        event_name::SCHEDULE_FIRE => (&["schedule"], vec![own(EventKind::Schedule)]),
        _ => (&["kici_event"], vec![own(EventKind::KiciEvent)]),
    }
}

fn normalised(event: &BusEvent, kind: EventKind, name: &str) -> Event {
    Event {
        kind,
        raw_name: name.to_owned(),
        action: None,
        org: event.org.clone(),
        routing_key: event.routing_key.clone().unwrap_or_default(),
        provider: "internal".to_owned(),
        source: String::new(),
        repo: event.source_repo.clone(),
        git_ref: None,
        sha: None,
        target_branch: None,
        source_branch: None,
        base_sha: None,
        tag: None,
        default_branch: None,
        is_fork_pr: ForkState::No,
        pr_number: None,
        sender: Sender { username: Some(event.emitted_by.clone()), user_id: None },
        commit_message: None,
        inputs: Default::default(),
        requested_workflow: None,
        check_mode: Default::default(),
        payload: event.payload.clone(),
        chain_depth: event.chain_depth,
    }
}

/// Whether the event is meant for this registration at all.
fn is_for(event: &BusEvent, registration: &Registration) -> bool {
    let named = event.registration_id.is_none_or(|only| only == registration.id);
    // Patterns were checked when the event was stored.
    let targets = || Patterns::compile(&event.target_repos).is_ok_and(|list| list.matches(&registration.repo));
    named && (event.target_repos.is_empty() || targets())
}

/// Repositories of one source trust each other (R34). An event of a person or of the system without a repository comes from
/// nobody who would need trust; one of a repository whose source is not known does.
fn same_source(event: &BusEvent, registration: &Registration) -> bool {
    match &event.routing_key {
        Some(key) => *key == registration.routing_key,
        None => event.source_repo.is_none(),
    }
}

/// Whether a stored statement lets the event start the registration.
pub(crate) fn allows(trust: &EventTrust, event: &BusEvent, registration: &Registration) -> bool {
    let says = &trust.trust;
    trust.enabled
        && event.routing_key.as_ref() == Some(&says.source_routing_key)
        && event.source_repo.as_ref() == Some(&says.source_repo)
        && says.target_routing_key == registration.routing_key
        && says.target_repo == registration.repo
        && allows_name(says.allowed_events.as_deref(), &event.name)
}

/// Whether a list of patterns allows the name of an event; no list allows all.
pub fn allows_name(patterns: Option<&[String]>, name: &str) -> bool {
    // They were checked when they were stored.
    patterns.is_none_or(|list| Patterns::compile(list).is_ok_and(|list| list.matches(name)))
}

fn untrusted(event: &BusEvent, registration: &Registration) -> String {
    format!(
        "{}: untrusted_source: {} may not start workflows of {}; see `kici-admin event-trust add`",
        registration.workflow_name,
        event.source_repo.as_deref().unwrap_or("an unknown repository"),
        registration.repo
    )
}
