//! The assembly of an orchestrator: adapters that implement the libraries' ports, servers, background reconcilers, start
//! and stop order.

#![forbid(unsafe_code)]

pub mod config;
pub mod data_dir;
pub mod logs;
