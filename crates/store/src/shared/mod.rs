//! The queries, compiled once for each database: `backend` and the macros come from the parent module.

use super::backend;

pub(crate) mod schema;

pub(crate) mod deliveries;
pub(crate) mod fleet;
pub(crate) mod meta;
pub(crate) mod queue;
mod rows;
pub(crate) mod runs;
pub(crate) mod settle;
pub(crate) mod sources;
