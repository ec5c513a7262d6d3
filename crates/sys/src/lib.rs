//! The operating system: clock and ids, process trees, facts about this host. The only crate that may hold `unsafe`.
//!
//! Process trees need Linux 5.9 or newer (subreaper, pidfd, `close_range`).

pub mod clock;
pub mod host;
pub mod ids;
#[cfg(target_os = "linux")]
pub mod process;
