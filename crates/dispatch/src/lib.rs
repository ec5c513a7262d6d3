//! Which agent runs a job: queue, registry, hand-over with acknowledgement and epoch, recovery, cancel.

#![forbid(unsafe_code)]

pub mod config;
mod deadlines;
pub mod decide;
pub mod ports;
