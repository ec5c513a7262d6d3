//! Forges: where events come from and where the code lies.
//!
//! The pure half judges a delivery ([`verify`], [`delivery_id`]) and turns it into an [`kici_engine::event::Event`]
//! ([`normalise`]). The other half is the [`Forge`] port with one implementation per kind of source: [`local`] (a
//! repository on this machine, read through one long-lived `git cat-file`) and [`github`] (a GitHub App). [`Forges`]
//! gives out the one for a [`Source`]. Repository code is never executed here: only trees and blobs are read.

#![forbid(unsafe_code)]

mod cache;
pub mod delivery_id;
mod forge;
mod forges;
pub mod github;
mod headers;
pub mod local;
pub mod normalise;
mod source;
#[cfg(feature = "testing")]
pub mod testing;
pub mod verify;
mod workflows;

pub use cache::WorkflowCache;
pub use forge::{BasicAuth, CloneSource, FailedDelivery, Forge, ForgeError, GitHost, Head, Minted};
pub use forges::Forges;
pub use headers::Headers;
pub use source::{
    ConfigError, Extract, GenericConfig, GithubConfig, LocalConfig, Source, SourceConfig, SourceKind, SourceSecrets,
    Verification,
};
pub use workflows::{Limits, Skipped, WorkflowFile, WorkflowFiles};
