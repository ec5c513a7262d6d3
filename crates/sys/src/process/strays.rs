//! Processes that lost their keeper. A step may end its keeper, which has its user; what the keeper looked after then comes to
//! this process, if it asked for that, and is ended here.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getsid};

use super::proc_fs::{ProcessId, children, kill_below};

/// The keepers that this process has started, until they are found to be gone.
static KEEPERS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
static ADOPTS: AtomicBool = AtomicBool::new(false);
/// A keeper ended that should not have: something may have come to this process.
static SUSPECT: AtomicBool = AtomicBool::new(false);

/// Rounds in which strays are looked for: ending one may bring up its children.
const ROUNDS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(2);

/// Held while a keeper is started, so that it is never taken for a stray.
pub(super) fn lock() -> MutexGuard<'static, BTreeSet<i32>> {
    KEEPERS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn know(known: &mut BTreeSet<i32>, keeper: Option<u32>) {
    known.extend(keeper.and_then(|id| i32::try_from(id).ok()));
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
    known.retain(|keeper| children.iter().any(|child| child.pid == *keeper));
    let session = getsid(None).ok();
    let stray = |child: &ProcessId| {
        let of = getsid(Some(Pid::from_raw(child.pid))).ok();
        !known.contains(&child.pid) && of.is_some() && of != session
    };
    children.into_iter().filter(stray).collect()
}
