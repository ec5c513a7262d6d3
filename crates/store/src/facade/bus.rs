//! Operations on the internal bus, on schedules and on trust between repositories.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::{EventId, InstanceId, RegistrationId, RunId, TrustId};
use kici_engine::time::Ts;

use super::{Backend, Lane, Store};
use crate::model::*;
use crate::{StoreError, pg, sqlite};

impl Lane {
    /// That of the run whose job emits, which is locked meanwhile.
    fn emitter(origin: &EventOrigin) -> Self {
        match origin {
            EventOrigin::Job { job, .. } => Self::of(job.run_id.uuid()),
            EventOrigin::Outside { .. } => Self::META,
        }
    }
}

facade! {
    /// Stores an event, unless its key is known or a limit says no.
    write(Lane::emitter(&new.origin)) bus::event_emit(new: NewEvent, limits: EventLimits) -> Emitted;
    /// Claims the oldest pending events that are free and due. Claims older than `lease` count as free.
    write(Lane::CLAIMS) event_claims::event_claim(limit: u32, lease: Duration) -> Vec<BusEvent>;
    /// Frees the claims of these instances; returns how many.
    write(Lane::CLAIMS) event_claims::event_claims_release(instances: Vec<InstanceId>) -> u64;
    /// Gives the claims of this instance back, as at an orderly stop: they count as not taken. Returns how many.
    write(Lane::CLAIMS) event_claims::event_claims_return() -> u64;
    /// Ends an attempt to deliver an event that this instance has claimed, with the runs that came of it.
    write(Lane::of(done.id.uuid())) bus::event_process(done: ProcessedEvent, activate: Arc<dyn Activate>) -> Processed;
    /// Keeps the claim on an event that this instance delivers, and creates runs that came of it.
    write(Lane::of(id.uuid())) bus::event_progress(id: EventId, runs: Vec<NewRun>, activate: Arc<dyn Activate>) -> Processed;
    /// The registrations that an event has started these runs for.
    read bus::event_served(runs: Vec<RunId>) -> Vec<RegistrationId>;
    /// Puts a dead event back to `pending`, from attempt 0; false when it is not dead.
    write(Lane::of(id.uuid())) bus::event_reopen(id: EventId) -> bool;
    /// Gives a dead event up; false when it is not dead.
    write(Lane::of(id.uuid())) bus::event_discard(id: EventId, note: String) -> bool;
    /// Stores a copy of an event, to be delivered anew; none when there is no such event.
    write(Lane::of(id.uuid())) bus::event_replay(id: EventId, by: String, request_id: String) -> Option<EventId>;
    /// One event.
    read bus::event_get(id: EventId) -> Option<BusEvent>;
    /// Events, newest first; without their documents and traces.
    read event_lists::event_list(filter: EventFilter, page: Page) -> Listed<BusEvent>;
    /// How many events are in each status.
    read event_lists::event_counts() -> BTreeMap<EventStatus, u64>;
    /// Deliveries and events that are dead and wait for a person.
    read event_lists::dead_letters() -> u64;
    /// Deletes events that are done with and were stored before `before`; dead ones stay.
    write(Lane::META) bus::events_prune(before: Ts, limit: u32) -> u64;

    /// How far all schedules were looked at.
    read schedules::schedule_states() -> Vec<ScheduleState>;
    /// Notes a schedule that was not known: its times count from now on.
    write(Lane::META) schedules::schedule_seen(registration: RegistrationId, key: String) -> ();
    /// Passes over the times of a schedule up to `until` without firing; false when that was done before.
    write(Lane::META) schedules::schedule_pass(registration: RegistrationId, key: String, until: Ts) -> bool;
    /// Fires a schedule for a time, once, whoever else tries; none when it was fired for this time or a later one.
    write(Lane::META) schedules::schedule_fire(fire: ScheduleFire) -> Option<EventId>;

    /// Tells workflows that collect failures of those whose time is over; returns how many were told.
    write(Lane::META) batches::batches_close(limit: u32) -> u64;

    /// Which repositories may start workflows of others, by repository.
    read trust::event_trust_list(org: String) -> Vec<EventTrust>;
    /// Lets a repository start workflows of another one; `Exists` when that is said already.
    write(Lane::META) trust::event_trust_add(new: NewTrust) -> EventTrust;
    /// Takes that back; false when it is not there.
    write(Lane::META) trust::event_trust_remove(id: TrustId) -> bool;
}
