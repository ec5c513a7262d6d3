//! Events: from a call at the door to the runs it causes.
//!
//! [`Inbox`] verifies and stores, [`Worker`] takes stored deliveries, [`Planner`] decides what each causes. The row of a
//! delivery is the work item: a crash at any point leaves it to be taken again, and the key of each run makes a second
//! attempt harmless.

#![forbid(unsafe_code)]

mod admission;
mod bus;
mod compiled;
mod gaps;
mod inbox;
mod manual;
mod planner;
pub mod ports;
mod rate;
mod registrations;
mod registry;
mod runs;
mod sources;
mod trace;
mod worker;

pub use admission::{Admission, AdmissionConfig};
pub use bus::{
    Bus, Emit, EmitError, EventWorker, EventWorkerConfig, MAX_PAYLOAD_BYTES, MAX_TARGETS, ScheduleError, ScheduleView,
    Schedules, allows_name,
};
pub use gaps::{GapRepair, Repaired};
pub use inbox::{Accepted, Call, Inbox, Refusal, Route, body_limit};
pub use manual::{Manual, ManualError};
pub use planner::{Planner, PlannerConfig, Retry, Work};
pub use sources::{OpenSource, SourceBook, SourceError, typed};
pub use worker::{QUEUE, RunsCreated, Worker, WorkerConfig};

/// The one organisation that exists; leaving it out means it.
pub const DEFAULT_ORG: &str = "default";
