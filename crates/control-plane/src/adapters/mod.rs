//! The ports of the API, implemented over store, planner, dispatcher and logs.

mod access;
mod announce;
mod audit;
mod bus;
mod events;
mod fault;
mod fleet;
mod hosts;
mod runs;
mod sources;
mod stored;
mod system;
mod tokens;
mod views;

pub(crate) use access::AccessBook;
pub(crate) use announce::{Announcer, LiveChanges, announce_logs};
pub(crate) use audit::AuditBook;
pub(crate) use bus::BusBook;
pub(crate) use events::EventBook;
pub(crate) use fleet::Fleet;
pub(crate) use hosts::HostBook;
pub(crate) use runs::RunBook;
pub(crate) use sources::SourceShelf;
pub(crate) use stored::StoredBook;
pub(crate) use system::Node;
pub(crate) use tokens::{AgentTokenBook, Tokens};

pub(crate) use kici_events::DEFAULT_ORG;
