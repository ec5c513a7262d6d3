//! The operating system: clock and ids, process trees and what they may do, facts about this host. The only crate that may hold `unsafe`.
//!
//! Process trees need Linux 5.9 or newer (subreaper, pidfd, `close_range`).

#[cfg(target_os = "linux")]
pub mod cgroup;
pub mod clock;
#[cfg(target_os = "linux")]
pub mod confine;
pub mod host;
pub mod ids;
pub mod init;
#[cfg(target_os = "linux")]
pub mod process;
