//! The assembly of an orchestrator: adapters that implement the libraries' ports, servers, background reconcilers, start
//! and stop order.

#![forbid(unsafe_code)]

mod adapters;
mod background;
mod broker;
mod clones;
pub mod config;
pub mod data_dir;
mod grpc;
mod intake;
mod logs;
mod payloads;
mod reconcilers;
mod retention;
mod sealing;
mod server;
mod start;
mod stored;

pub use start::{Orchestrator, StartError, Surroundings};
