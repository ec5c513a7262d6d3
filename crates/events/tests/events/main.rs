//! From a call at the door to rows in the database, on both databases, against a fake forge.

mod bus;
mod gaps;
mod github;
mod hooks;
mod intake;
mod lock;
mod schedules;
mod webhooks;
mod world;
