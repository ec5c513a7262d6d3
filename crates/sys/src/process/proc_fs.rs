//! Finding and signalling processes through `/proc` (proc(5)) and pidfds, safe against pid reuse.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::libc;
use nix::sys::signal::Signal;

/// A process: its pid together with its start time, since pids are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessId {
    /// Process id.
    pub pid: i32,
    /// Start in clock ticks since boot (field 22 of `/proc/<pid>/stat`).
    pub start: u64,
}

impl ProcessId {
    /// The process that has this pid now.
    pub fn of(pid: i32) -> Option<Self> {
        Stat::read(pid).map(|stat| Self { pid, start: stat.start })
    }

    /// True while this very process exists and is not a zombie.
    pub fn is_alive(self) -> bool {
        Stat::read(self.pid).is_some_and(|stat| stat.start == self.start && !stat.dead)
    }

    /// Sends a signal to this very process; false when it no longer exists.
    pub fn signal(self, signal: Signal) -> bool {
        // SAFETY: pidfd_open(2) takes numbers and returns a fresh descriptor or -1.
        let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        let Some(raw) = i32::try_from(raw).ok().filter(|fd| *fd >= 0) else { return false };
        // SAFETY: the kernel just handed us this descriptor; nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // Checked after the descriptor pins the process: were the pid another's by now, the start time would differ.
        if !self.is_alive() {
            return false;
        }
        let none = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: a null siginfo is allowed (pidfd_send_signal(2)); the descriptor is open.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd.as_raw_fd(), signal as i32, none, 0) == 0 }
    }
}

struct Stat {
    parent: i32,
    start: u64,
    dead: bool,
}

impl Stat {
    fn read(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The name in field 2 is in brackets and may itself hold spaces and brackets, so fields count from the last `)`.
    fn parse(stat: &[u8]) -> Option<Self> {
        let end = stat.iter().rposition(|b| *b == b')')?;
        let rest = std::str::from_utf8(stat.get(end + 2..)?).ok()?;
        let fields: Vec<&str> = rest.split(' ').collect();
        Some(Self {
            dead: matches!(*fields.first()?, "Z" | "X"),
            parent: fields.get(1)?.parse().ok()?,
            start: fields.get(19)?.parse().ok()?,
        })
    }
}

/// Every living process below `root`, without `root`; zombies do not count.
pub fn descendants(root: ProcessId) -> Vec<ProcessId> {
    let mut children: HashMap<i32, Vec<(ProcessId, bool)>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        if let Some(stat) = Stat::read(pid) {
            children.entry(stat.parent).or_default().push((ProcessId { pid, start: stat.start }, stat.dead));
        }
    }
    let mut found = Vec::new();
    let mut open = vec![root.pid];
    while let Some(parent) = open.pop() {
        for (id, dead) in children.remove(&parent).unwrap_or_default() {
            open.push(id.pid);
            if !dead {
                found.push(id);
            }
        }
    }
    found
}

/// SIGTERM to everything below the children of a wrapper.
pub(super) fn terminate_below(wrapper: i32) {
    let Some(wrapper) = ProcessId::of(wrapper) else { return };
    let parent = |id: &ProcessId| Stat::read(id.pid).map(|stat| stat.parent);
    let inner = descendants(wrapper).into_iter().filter(|id| parent(id).is_some_and(|parent| parent != wrapper.pid));
    for id in inner {
        id.signal(Signal::SIGTERM);
    }
}

/// The children of this process, zombies included.
pub(super) fn children() -> Vec<ProcessId> {
    let me = i32::try_from(std::process::id()).unwrap_or_default();
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let child = |pid| Stat::read(pid).filter(|stat| stat.parent == me).map(|stat| ProcessId { pid, start: stat.start });
    pids.filter_map(child).collect()
}

/// One sweep: stops everything below `root` until no new process shows up, so that nothing can fork on, then kills it.
/// Returns how many were killed.
pub(super) fn kill_below(root: ProcessId) -> u32 {
    let mut all = descendants(root);
    let mut seen = 0;
    while all.len() > seen {
        seen = all.len();
        for id in &all {
            id.signal(Signal::SIGSTOP);
        }
        all = descendants(root);
    }
    let killed = all.iter().filter(|id| id.signal(Signal::SIGKILL)).count();
    u32::try_from(killed).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let line = b"7 (a) S (b)) R 3 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        let stat = Stat::parse(line).expect("a stat line");
        assert_eq!((stat.parent, stat.start, stat.dead), (3, 4242, false));
        assert!(Stat::parse(b"garbage").is_none());
    }

    #[test]
    fn another_start_time_is_another_process() {
        let me = ProcessId::of(i32::try_from(std::process::id()).expect("a pid")).expect("alive");
        assert!(me.is_alive());
        assert!(!ProcessId { start: me.start + 1, ..me }.signal(Signal::SIGCONT));
    }
}
