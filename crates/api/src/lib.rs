//! The REST interface of a KiCI orchestrator: the documents that travel, the router (`server`), and the typed client
//! (`client`).
//!
//! The server half knows no database. What it needs it states as one port per resource ([`ports`]); the program that
//! mounts it implements them.

#![forbid(unsafe_code)]

#[cfg(feature = "client")]
pub mod client;
pub mod dto;
#[cfg(feature = "server")]
pub mod live;
pub mod page;
#[cfg(feature = "server")]
pub mod ports;
pub mod problem;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "testing")]
pub mod testing;
