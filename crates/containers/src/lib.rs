//! Docker and Podman over the socket of their API (Docker Engine API 1.41, which Podman serves too).
//!
//! This crate knows requests and answers, not what they are for: jobs and pools of agents are elsewhere.

#![forbid(unsafe_code)]

mod archive;
mod attach;
mod container;
mod engine;
mod http;
mod image;
mod place;

pub use archive::{Owner, first_text, single_file};
pub use attach::{Attached, Chunk, Input, Output};
pub use container::{Executed, State};
pub use engine::{Engine, Kind, Labels, Left, Removed};
pub use http::EngineError;
pub use image::{Credentials, Image};
pub use place::{NoEngine, find, is_there};
