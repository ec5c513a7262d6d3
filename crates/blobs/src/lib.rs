//! Object storage: logs, and later caches, artifacts and packages.
//!
//! [`Blobs`] puts objects into a folder of this machine, each atomically and synced to disk: after a successful put the
//! object survives a power cut, and nobody ever sees half of one. [`log`] keeps a step's log so that any range of lines
//! can be read without unpacking the rest.

#![forbid(unsafe_code)]

mod error;
pub mod log;
mod store;

pub use error::BlobError;
pub use store::{Blob, Blobs, ByteStream};
