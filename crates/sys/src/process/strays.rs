//! Processes that lost their keeper. A step may end its keeper, which has its user; what the keeper looked after then comes to
//! this process, if it asked for that, and is ended here.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getsid};

use super::proc_fs::{ProcessId, children, kill_below};

/// The keepers that this process has started and not seen end. With their start times: pids are used again, and a stray must
/// not be taken for a keeper that had its pid.
static KEEPERS: LazyLock<Mutex<HashSet<ProcessId>>> = LazyLock::new(Mutex::default);
static ADOPTS: AtomicBool = AtomicBool::new(false);
/// A keeper ended that should not have: something may have come to this process.
static SUSPECT: AtomicBool = AtomicBool::new(false);

/// Rounds in which strays are looked for: ending one may bring up its children.
const ROUNDS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(2);

/// Held while a keeper is started, so that it is never taken for a stray.
pub(super) fn lock() -> MutexGuard<'static, HashSet<ProcessId>> {
    KEEPERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A keeper has ended and was reaped.
pub(super) fn forget(keeper: ProcessId) {
    lock().remove(&keeper);
}

/// A keeper ended otherwise than by itself.
pub(super) fn suspect() {
    SUSPECT.store(true, Ordering::Release);
}

/// From now on this process becomes the parent of what lost its keeper (`PR_SET_CHILD_SUBREAPER`).
///
/// # Errors
/// The error of prctl(2).
pub fn adopt_strays() -> io::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)?;
    ADOPTS.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether a keeper was ended since [`kill_strays`] looked last.
pub fn may_have_strays() -> bool {
    ADOPTS.load(Ordering::Relaxed) && SUSPECT.load(Ordering::Acquire)
}

/// Ends and reaps all processes that lost their keeper, with what is below them. Blocks. Returns how many it ended; 0 where
/// [`adopt_strays`] was not called or no keeper was ended. A child that is neither a keeper nor in the session of this process can be nothing else.
pub fn kill_strays() -> u32 {
    if !ADOPTS.load(Ordering::Relaxed) || !SUSPECT.swap(false, Ordering::AcqRel) {
        return 0;
    }
    let mut killed = 0;
    for _ in 0..ROUNDS {
        let found = strays();
        if found.is_empty() {
            break;
        }
        for stray in found {
            killed += kill_below(stray);
            killed += u32::from(stray.signal(Signal::SIGKILL));
            // It is nobody else's child: the runtime waits only for those that it started.
            let _ = waitpid(Pid::from_raw(stray.pid), Some(WaitPidFlag::WNOHANG));
        }
        std::thread::sleep(PAUSE);
    }
    killed
}

fn strays() -> Vec<ProcessId> {
    let mut known = lock();
    let children = children();
    known.retain(|keeper| children.contains(keeper));
    let session = getsid(None).ok();
    let stray = |child: &ProcessId| is_stray(&known, *child, getsid(Some(Pid::from_raw(child.pid))).ok(), session);
    children.into_iter().filter(stray).collect()
}

fn is_stray(keepers: &HashSet<ProcessId>, child: ProcessId, of: Option<Pid>, ours: Option<Pid>) -> bool {
    !keepers.contains(&child) && of.is_some() && of != ours
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stray_with_the_pid_of_an_old_keeper_is_a_stray() {
        let (old, child) = (ProcessId { pid: 7, start: 100 }, ProcessId { pid: 7, start: 900 });
        let (its, ours) = (Some(Pid::from_raw(7)), Some(Pid::from_raw(1)));
        assert!(is_stray(&HashSet::from([old]), child, its, ours));
        assert!(!is_stray(&HashSet::from([child]), child, its, ours), "a keeper that lives");
        assert!(!is_stray(&HashSet::new(), child, ours, ours), "of our session");
        assert!(!is_stray(&HashSet::new(), child, None, ours), "gone");
    }
}
