//! Archives of files: tar in zstd, written from and unpacked into directories that steps may change at the same time. Nothing is
//! ever followed: each part of a path is opened by itself, and links are only links.
//!
//! What is read may be hostile. Names that climb, are absolute or go through links, devices, hard links and everything else that
//! is not a plain file, a directory or a symbolic link refuse the whole archive, as does more than the limits allow.

mod dir;
mod pack;
mod repack;
#[cfg(test)]
mod tests;
mod unpack;

use std::io;

pub use dir::{Dir, is_no_directory};
pub use pack::{Item, Packed, Patterns, is_in, matching, pack};
pub use repack::{contents, repack};
pub use unpack::{Unpacked, unpack};

/// How much one archive may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Unpacked bytes of all files.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
    /// Only what this user could read is packed; none where it is the one that packs.
    pub reader: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 32 << 30, entries: 1_000_000, reader: None }
    }
}

/// Where symbolic links may point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Anywhere: a job restores what it, or another one that it trusts, had there.
    Any,
    /// To what is in the archive's directory: others look at it.
    Inside,
}

/// Why an archive was not written or unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It is not what it should be; nothing of it may be used.
    #[error("the archive is refused: {0}")]
    Refused(String),
    /// What was to be packed cannot be.
    #[error("{0}")]
    Unfit(String),
    /// More than the limits allow.
    #[error("{0}")]
    TooMuch(String),
    /// A file or the stream.
    #[error("{what}: {error}")]
    Io {
        /// Which.
        what: String,
        /// Why.
        error: io::Error,
    },
}

impl ArchiveError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Io { what, error }
    }
}

/// Whether a link at `at` (its parts) to `target` stays below the root.
fn stays_inside(at: &[&[u8]], target: &[u8]) -> bool {
    if target.starts_with(b"/") {
        return false;
    }
    let mut depth = at.len().saturating_sub(1);
    for part in target.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => match depth.checked_sub(1) {
                Some(up) => depth = up,
                None => return false,
            },
            _ => depth += 1,
        }
    }
    true
}

/// A name for messages.
fn shown(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    text.chars().take(200).flat_map(char::escape_debug).collect()
}
