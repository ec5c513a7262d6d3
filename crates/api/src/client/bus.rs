//! The internal bus: one method per route.

use kici_engine::ids::{EventId, RegistrationId, TrustId};
use reqwest::Method;
use serde_json::Value as Json;

use super::resources::{ADMIN, Answer};
use super::{Client, NOTHING};
use crate::dto::bus::{
    AddEventTrust, ChangeRegistration, EmitEvent, EventDetail, EventEmitted, EventFilter, EventTrustVerdict,
    EventTrustView, EventView, RegistrationView, ScheduleView, TestEventTrust, TriggerSchedule,
};
use crate::page::{Page, PageQuery};

/// Every method fails with [`super::ClientError`].
impl Client {
    /// Events of the bus, newest first.
    pub async fn events(&self, filter: &EventFilter, page: &PageQuery) -> Answer<Page<EventView>> {
        self.list(path!(ADMIN, "events"), filter, page).await
    }

    /// One event, with the runs that it started and why.
    pub async fn event(&self, id: EventId) -> Answer<EventDetail> {
        self.get(path!(ADMIN, "events", &id.to_string()), &NOTHING).await
    }

    /// The document of an event.
    pub async fn event_payload(&self, id: EventId) -> Answer<Json> {
        self.get(path!(ADMIN, "events", &id.to_string(), "payload"), &NOTHING).await
    }

    /// Emits an event; calls with the same key give the same one.
    pub async fn emit_event(&self, request: &EmitEvent, key: Option<&str>) -> Answer<EventEmitted> {
        self.keyed(path!(ADMIN, "events", "emit"), request, key).await
    }

    /// Delivers an event again, as a new one.
    pub async fn redeliver_event(&self, id: EventId) -> Answer<EventEmitted> {
        self.post(path!(ADMIN, "events", &id.to_string(), "redeliver"), &serde_json::json!({})).await
    }

    /// The schedules of registered workflows.
    pub async fn schedules(&self) -> Answer<Page<ScheduleView>> {
        self.get(path!(ADMIN, "schedules"), &NOTHING).await
    }

    /// Fires a schedule now; calls with the same key give the same event.
    pub async fn trigger_schedule(
        &self,
        id: RegistrationId,
        request: &TriggerSchedule,
        key: Option<&str>,
    ) -> Answer<EventEmitted> {
        self.keyed(path!(ADMIN, "schedules", &id.to_string(), "trigger"), request, key).await
    }

    /// The registered workflows.
    pub async fn registrations(&self) -> Answer<Page<RegistrationView>> {
        self.get(path!(ADMIN, "registrations"), &NOTHING).await
    }

    /// Enables or disables a registered workflow.
    pub async fn change_registration(
        &self,
        id: RegistrationId,
        request: &ChangeRegistration,
    ) -> Answer<RegistrationView> {
        let id = id.to_string();
        let patch = self.request(Method::PATCH, path!(ADMIN, "registrations", &id)).json(request);
        self.decode(self.send(patch.timeout(self.timeout)).await?).await
    }

    /// Which repositories may start workflows of others.
    pub async fn event_trust(&self) -> Answer<Page<EventTrustView>> {
        self.get(path!(ADMIN, "event-trust"), &NOTHING).await
    }

    /// Lets events of one repository start workflows of another one.
    pub async fn add_event_trust(&self, request: &AddEventTrust) -> Answer<EventTrustView> {
        self.post(path!(ADMIN, "event-trust"), request).await
    }

    /// Takes that back.
    pub async fn remove_event_trust(&self, id: TrustId) -> Answer<()> {
        self.delete_empty(path!(ADMIN, "event-trust", &id.to_string()), &()).await
    }

    /// Says whether an event of one repository may start workflows of another one.
    pub async fn test_event_trust(&self, request: &TestEventTrust) -> Answer<EventTrustVerdict> {
        self.post(path!(ADMIN, "event-trust", "test"), request).await
    }
}
