//! Durable state on SQLite and PostgreSQL: one query code base, two backends.
//!
//! [`Store`] is the only way in. Its operations take and give the plain values of [`model`]; each write is one
//! transaction, committed together with others that are ready at the same time, and has been made durable when the
//! operation returns. A caller that goes away never tears a transaction: the writer finishes it.
#![forbid(unsafe_code)]
#![allow(clippy::duplicate_mod, reason = "each query is compiled once for each database, see `shared`")]

mod advance;
mod compat;
mod ctx;
mod error;
mod facade;
mod fence;
pub mod model;
mod notify;
mod pg;
#[cfg(all(test, feature = "testing"))]
mod plan_tests;
#[cfg(all(test, feature = "testing"))]
mod schema_tests;
mod sqlite;
#[cfg(feature = "testing")]
pub mod testing;
mod types;
mod write;

pub use error::StoreError;
pub use facade::{Durability, Store, StoreConfig};
pub use fence::{Fence, fenced};
pub use notify::{Topic, Wakeup, Wakeups};
