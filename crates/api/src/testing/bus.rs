//! A bus that keeps what is emitted and delivers nothing.

use async_trait::async_trait;
use kici_engine::ids::{EventId, RegistrationId, TrustId};

use super::{Fake, NOW};
use crate::dto::bus::{
    AddEventTrust, ChangeRegistration, EmitEvent, EventDetail, EventEmitted, EventFilter, EventTrustVerdict,
    EventTrustView, EventView, RegistrationView, ScheduleView, TestEventTrust, TriggerSchedule,
};
use crate::page::{PageRequest, Slice};
use crate::ports::{Answer, Bus, Caller};
use crate::problem::Problem;

impl Fake {
    fn bus_event(&self, id: EventId) -> Answer<EventView> {
        let world = self.reach()?;
        let found = world.events.iter().find(|event| event.id == id).cloned();
        found.ok_or_else(|| Problem::not_found(format_args!("event {id}")))
    }

    fn registered(&self, id: RegistrationId) -> Answer<RegistrationView> {
        let world = self.reach()?;
        let found = world.registrations.iter().find(|one| one.id == id).cloned();
        found.ok_or_else(|| Problem::not_found(format_args!("registration {id}")))
    }

    /// Stores an event.
    pub fn add_event(&self, name: &str, status: &str) -> EventId {
        let id = EventId::mint(self);
        let view = EventView {
            id,
            name: name.to_owned(),
            status: status.to_owned(),
            source: Some("app".to_owned()),
            repo: Some("local/app".to_owned()),
            run_id: None,
            job_id: None,
            emitted_by: "user:alice".to_owned(),
            registration_id: None,
            target_repos: vec![],
            chain_depth: 1,
            matched_count: 0,
            run_ids: vec![],
            attempts: 0,
            error: None,
            note: None,
            next_attempt_at: None,
            created_at: NOW,
            finished_at: None,
        };
        self.world().events.insert(0, view);
        id
    }

    /// Registers a workflow that a schedule starts.
    pub fn add_registration(&self, workflow: &str) -> RegistrationId {
        let id = RegistrationId::mint(self);
        self.world().registrations.push(RegistrationView {
            id,
            routing_key: "local:app".to_owned(),
            repo: "local/app".to_owned(),
            workflow: workflow.to_owned(),
            sha: "1".repeat(40),
            default_branch: Some("main".to_owned()),
            trigger_types: vec!["schedule".to_owned()],
            enabled: true,
            disabled_by: None,
            updated_at: NOW,
        });
        id
    }
}

#[async_trait]
impl Bus for Fake {
    async fn list(&self, _: &Caller, filter: &EventFilter, _: PageRequest) -> Answer<Slice<EventView>> {
        let wanted = |event: &&EventView| filter.name.as_ref().is_none_or(|name| event.name == *name);
        Ok(Slice { items: self.reach()?.events.iter().filter(wanted).cloned().collect(), next: None })
    }

    async fn get(&self, _: &Caller, id: EventId) -> Answer<EventDetail> {
        Ok(EventDetail { event: self.bus_event(id)?, trace: None, runs: vec![] })
    }

    async fn payload(&self, _: &Caller, id: EventId) -> Answer<serde_json::Value> {
        self.bus_event(id)?;
        Ok(serde_json::json!({}))
    }

    async fn emit(&self, _: &Caller, request: &EmitEvent, _: Option<&str>) -> Answer<EventEmitted> {
        drop(self.reach()?);
        Ok(EventEmitted { event_id: self.add_event(&request.name, "pending") })
    }

    async fn redeliver(&self, _: &Caller, id: EventId) -> Answer<EventEmitted> {
        let name = self.bus_event(id)?.name;
        Ok(EventEmitted { event_id: self.add_event(&name, "pending") })
    }

    async fn schedules(&self, _: &Caller) -> Answer<Vec<ScheduleView>> {
        let world = self.reach()?;
        let view = |one: &RegistrationView| ScheduleView {
            registration_id: one.id,
            workflow: one.workflow.clone(),
            repo: one.repo.clone(),
            cron: "0 3 * * *".to_owned(),
            timezone: "UTC".to_owned(),
            offset_ms: 0,
            enabled: one.enabled,
            next_at: Some(NOW),
            last_fired_at: None,
            last_event_id: None,
            problem: None,
        };
        Ok(world.registrations.iter().map(view).collect())
    }

    async fn trigger_schedule(
        &self,
        _: &Caller,
        id: RegistrationId,
        _: &TriggerSchedule,
        _: Option<&str>,
    ) -> Answer<EventEmitted> {
        self.registered(id)?;
        Ok(EventEmitted { event_id: self.add_event("__schedule_fire", "pending") })
    }

    async fn registrations(&self, _: &Caller) -> Answer<Vec<RegistrationView>> {
        Ok(self.reach()?.registrations.clone())
    }

    async fn change_registration(
        &self,
        _: &Caller,
        id: RegistrationId,
        request: ChangeRegistration,
    ) -> Answer<RegistrationView> {
        self.registered(id)?;
        for one in self.reach()?.registrations.iter_mut().filter(|one| one.id == id) {
            one.enabled = request.enabled;
        }
        self.registered(id)
    }

    async fn trust(&self, _: &Caller) -> Answer<Vec<EventTrustView>> {
        Ok(self.reach()?.trust.clone())
    }

    async fn add_trust(&self, caller: &Caller, request: &AddEventTrust) -> Answer<EventTrustView> {
        let view = EventTrustView {
            id: TrustId::mint(self),
            source: request.source.clone(),
            target: request.target.clone(),
            events: request.events.clone(),
            created_by: caller.actor.to_string(),
            created_at: NOW,
        };
        self.reach()?.trust.push(view.clone());
        Ok(view)
    }

    async fn remove_trust(&self, _: &Caller, id: TrustId) -> Answer<()> {
        let mut world = self.reach()?;
        let before = world.trust.len();
        world.trust.retain(|one| one.id != id);
        if world.trust.len() == before { Err(Problem::not_found(format_args!("event trust {id}"))) } else { Ok(()) }
    }

    async fn test_trust(&self, _: &Caller, request: &TestEventTrust) -> Answer<EventTrustVerdict> {
        let allowed =
            self.reach()?.trust.iter().any(|one| one.source == request.source && one.target == request.target);
        Ok(EventTrustVerdict { allowed, reason: "the fake's list".to_owned() })
    }
}
