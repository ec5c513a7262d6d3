//! The internal bus: what steps and people emit, ends of runs and jobs, schedules that fire.
//!
//! [`Bus`] stores an event once, [`EventWorker`] delivers it to the registered workflows that listen, [`Schedules`] makes
//! events out of times. The row of an event is the work item, as that of a delivery is.

mod deliver;
mod emit;
mod schedules;
mod worker;

pub use deliver::allows_name;
pub use emit::{Bus, Emit, EmitError, MAX_PAYLOAD_BYTES, MAX_TARGETS};
pub use schedules::{ScheduleError, ScheduleView, Schedules};
pub use worker::{EventWorker, EventWorkerConfig};
