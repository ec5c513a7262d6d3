//! Who may do what: tokens, roles and permissions, actors, the limit on failed logins, and what the access log keeps.
//!
//! Everything here is a function of its arguments. Storage is somebody else's: this crate hands out hashes to look up
//! and entries to write.

#![forbid(unsafe_code)]

mod actor;
mod limiter;
mod log;
mod permission;
mod token;

pub use actor::{Actor, ActorType};
pub use limiter::{FailureLimiter, Limited};
pub use log::{AccessEntry, AccessSource, Action, Outcome, Policy, Recorder, TargetType, policy};
pub use permission::{Permission, Role, UnknownName, role_has};
pub use token::{Token, TokenError, TokenKind};
