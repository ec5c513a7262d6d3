//! Logs of jobs: received from agents, made durable, acknowledged by byte offset, sealed into the object store, read back.
//!
//! A live log is a segment file per step below `<data>/logs/<job>/<epoch>/`. An offset is acknowledged after fdatasync
//! only. When the agent has sealed a step, the segment is compressed into the object store and removed; until then the
//! segment is the truth, so a crash at any point loses nothing.

mod marks;
mod reader;
mod sealer;
mod segment;
pub(crate) mod service;
mod writer;

use std::fmt;

use kici_engine::ids::JobId;

pub(crate) use reader::LogReader;
pub(crate) use sealer::LogSealer;
pub(crate) use writer::{Grown, LogAppender, LogError, StepAck};

/// One delivery of a job whose logs are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogKey {
    /// The job.
    pub job: JobId,
    /// The epoch of the delivery.
    pub epoch: u32,
}

/// The name of a step in file names: `kind-owner-ordinal`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepFile(String);

/// A step key that cannot be a file name.
#[derive(Debug, thiserror::Error)]
#[error("step key `{0}` is not of the form kind-owner-ordinal with a kind of [a-z0-9_:]{{1,40}}")]
pub struct BadStepKey(String);

impl StepFile {
    /// From the parts of a `StepKey`.
    ///
    /// # Errors
    /// [`BadStepKey`] when the kind holds other characters than `[a-z0-9_:]` or is empty or too long.
    pub fn new(kind: &str, owner_index: i32, ordinal: u32) -> Result<Self, BadStepKey> {
        let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b':');
        if kind.is_empty() || kind.len() > 40 || !kind.bytes().all(legal) {
            return Err(BadStepKey(kind.chars().take(60).collect()));
        }
        Ok(Self(format!("{}-{owner_index}-{ordinal}", kind.replace(':', "_"))))
    }

    /// From its stored form.
    ///
    /// # Errors
    /// [`BadStepKey`] when it is not of that form.
    pub fn stored(text: &str) -> Result<Self, BadStepKey> {
        let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'-');
        if (1..=80).contains(&text.len()) && text.bytes().all(legal) {
            Ok(Self(text.to_owned()))
        } else {
            Err(BadStepKey(text.chars().take(80).collect()))
        }
    }

    /// The file name without its ending.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for StepFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
