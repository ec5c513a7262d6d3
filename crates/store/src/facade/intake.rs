//! Operations on deliveries.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::{DeliveryRowId, InstanceId, SourceId};
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::{Backend, Lane, Store};
use crate::model::*;
use crate::{StoreError, pg, sqlite};

facade! {
    /// Stores a delivery before it is answered.
    write(Lane::text(&new.delivery_id)) deliveries::delivery_insert(new: NewDelivery) -> DeliveryInserted;
    /// Claims the oldest received deliveries that are free and due. Claims older than `claim_timeout` count as free. Of those
    /// that two or more processes did not survive it takes one, if none is in work here; any that `max_claims` processes did
    /// not survive is dead now.
    write(Lane::CLAIMS) delivery_claims::delivery_claim(limit: u32, claim_timeout: Duration, max_claims: u32) -> Vec<Delivery>;
    /// Frees the claims of these instances, which are gone; returns how many. The claims count as ones without an end.
    write(Lane::CLAIMS) delivery_claims::delivery_claims_release(instances: Vec<InstanceId>) -> u64;
    /// Gives the claims of this instance back, as at an orderly stop: they count as not taken. Returns how many.
    write(Lane::CLAIMS) delivery_claims::delivery_claims_return() -> u64;
    /// Stores a delivery as overflow, unless `limit` are stored so already.
    write(Lane::text(&new.delivery_id)) overflow::delivery_shed(new: NewDelivery, limit: u32) -> DeliveryShed;
    /// Takes up to `limit` deliveries from the overflow for this instance; those older than `max_age` become dead.
    write(Lane::CLAIMS) overflow::delivery_drain(limit: u32, max_age: Duration) -> Drained;
    /// Finishes a delivery without runs. False when it was finished already.
    write(Lane::of(id.uuid())) deliveries::delivery_finish(id: DeliveryRowId, outcome: DeliveryOutcome) -> bool;
    /// Counts a failed attempt and frees the delivery until `next_at`; false when it was finished already.
    write(Lane::of(id.uuid())) deliveries::delivery_retry(id: DeliveryRowId, error: String, next_at: Ts) -> bool;
    /// Puts a dead delivery back to `received`; false when it is not dead (any more).
    write(Lane::of(id.uuid())) deliveries::delivery_reopen(id: DeliveryRowId) -> bool;

    /// Gives up a dead delivery for good, with this note. False when it is not dead (any more).
    write(Lane::of(id.uuid())) deliveries::delivery_discard(id: DeliveryRowId, note: String) -> bool;
    /// Headers and body; none once they left the database.
    read deliveries::delivery_body(id: DeliveryRowId) -> Option<DeliveryBody>;
    /// One delivery.
    read deliveries::delivery_get(id: DeliveryRowId) -> Option<Delivery>;
    /// Deliveries, newest first.
    read deliveries::delivery_list(filter: DeliveryFilter, page: Page) -> Listed<Delivery>;
    /// Which of these ids of a sender, at most some hundred, are stored.
    read deliveries::deliveries_known(source_id: SourceId, ids: Vec<String>) -> Vec<String>;
    /// How many deliveries are in each status.
    read deliveries::delivery_counts() -> BTreeMap<DeliveryStatus, u64>;
    /// Finished deliveries whose body still lies in the database, oldest first.
    read deliveries::delivery_bodies_finished(limit: u32) -> Vec<Delivery>;
    /// Drops the body of a delivery that was finished at `finished_at`, once it lies under `key` in the object store or is left
    /// out for a reason. False when the delivery was opened again meanwhile; then nothing changed.
    write(Lane::of(id.uuid())) deliveries::delivery_body_moved(id: DeliveryRowId, finished_at: Ts, key: Option<String>, omitted: Option<String>) -> bool;
    /// Notes that the body under `key` in the object store is gone. False when the body lies elsewhere by now.
    write(Lane::of(id.uuid())) deliveries::delivery_body_expired(id: DeliveryRowId, key: String) -> bool;
    /// Keeps a decision trace.
    write(Lane::of(id.uuid())) deliveries::trace_put(id: DeliveryRowId, trace: Json) -> ();
    /// The decision trace of a delivery.
    read deliveries::trace_get(id: DeliveryRowId) -> Option<Json>;
    /// Finishes a delivery with all that came of it: runs, trace, registrations. `activate` judges jobs that are ready
    /// although they were given as `Pending`.
    write(Lane::of(done.id.uuid())) deliveries::delivery_process(done: ProcessedDelivery, activate: Arc<dyn Activate>) -> Processed;
}
