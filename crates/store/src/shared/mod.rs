//! The queries, compiled once for each database: `backend` and the macros come from the parent module.

use super::backend;

pub(crate) mod schema;

pub(crate) mod artifacts;
pub(crate) mod batches;
pub(crate) mod bus;
pub(crate) mod caches;
pub(crate) mod claims;
pub(crate) mod credentials;
pub(crate) mod deliveries;
pub(crate) mod delivery_claims;
pub(crate) mod ends;
pub(crate) mod event_claims;
pub(crate) mod event_lists;
pub(crate) mod fleet;
pub(crate) mod gates;
pub(crate) mod generated;
pub(crate) mod kept;
pub(crate) mod meta;
mod new_runs;
mod objects;
pub(crate) mod overflow;
pub(crate) mod queue;
pub(crate) mod queue_lists;
pub(crate) mod results;
pub(crate) mod retention;
pub(crate) mod roster;
mod rows;
pub(crate) mod run_lists;
pub(crate) mod runs;
pub(crate) mod schedules;
pub(crate) mod settle;
pub(crate) mod slots;
pub(crate) mod sources;
pub(crate) mod steps;
pub(crate) mod tokens;
pub(crate) mod trust;
pub(crate) mod uploads;
