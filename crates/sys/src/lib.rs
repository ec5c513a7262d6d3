//! The operating system: clock and ids, process trees, facts about this host. The only crate that may hold `unsafe`.
//!
//! Linux is served fully. Elsewhere the same functions exist and do what POSIX offers; each says so.

pub mod clock;
pub mod ids;
