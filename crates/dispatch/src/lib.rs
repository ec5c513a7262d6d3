//! Which agent runs a job: registry of agents, hand-over with acknowledgement and epoch, start permit, recovery, cancel,
//! sweeps.
//!
//! The queue in the database is the truth; memory holds sessions, slots and timers that can be rebuilt from it. Pure
//! decisions are in [`decide`]; the rest reads, calls and writes.

#![forbid(unsafe_code)]

mod activate;
mod cancel;
mod claims;
mod comings;
pub mod config;
mod deadlines;
pub mod decide;
mod dispatcher;
mod frames;
mod gates;
mod hosts;
mod inventory;
mod link;
mod locks;
mod members;
mod meters;
mod offer;
mod outcome;
mod placing;
pub mod ports;
mod pump;
mod reboot;
mod register;
mod registry;
mod routing;
mod scaling;
mod services;
mod session;
mod sweeps;
mod timers;
mod track;
mod triage;
mod turns;

pub use cancel::CancelReport;
pub use claims::{ClaimError, Credentials};
pub use config::{AgentAuth, DispatchConfig};
pub use decide::violations::Ownership;
pub use dispatcher::{DispatchError, Dispatcher, DrainStatus, Ports};
pub use link::SessionStream;
pub use members::Reported;
pub use reboot::{MAX_REBOOT, RebootError};
pub use registry::{AgentView, HeldView};
pub use routing::{AgentVerdict, Explanation};
pub use scaling::DispatchOutcome;
pub use services::Speaker;
pub use sweeps::Reconciler;
