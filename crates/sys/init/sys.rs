//! The few calls that the standard library does not have.

use std::io;

/// signal(7), the same on all architectures that we run on.
pub const SIGTERM: i32 = 15;
/// See [`SIGTERM`].
pub const SIGKILL: i32 = 9;
const SIGCHLD: i32 = 17;
const SIG_DFL: usize = 0;
const SIG_IGN: usize = 1;
/// prctl(2).
const PR_SET_DUMPABLE: i32 = 4;
const PR_SET_CHILD_SUBREAPER: i32 = 36;

unsafe extern "C" {
    fn kill(pid: i32, signal: i32) -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn signal(signal: i32, handler: usize) -> usize;
    fn prctl(option: i32, a: usize, b: usize, c: usize, d: usize) -> i32;
    fn close(fd: i32) -> i32;
}

/// Sends a signal to a process, to a group where it is negative, or to all where it is -1. Whether there was one.
pub fn send(pid: i32, number: i32) -> bool {
    // SAFETY: kill takes numbers only.
    unsafe { kill(pid, number) == 0 }
}

/// Waits for the end of any child. None when there is none.
pub fn wait_any() -> Option<(i32, i32)> {
    loop {
        let mut status = 0;
        // SAFETY: `status` lives for the call.
        let pid = unsafe { waitpid(-1, &mut status, 0) };
        if pid > 0 {
            return Some((pid, status));
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Children leave no zombies, whoever started them.
pub fn ignore_children() {
    // SAFETY: no handler runs: the signal is ignored.
    unsafe { signal(SIGCHLD, SIG_IGN) };
}

/// Children are waited for again.
pub fn mind_children() {
    // SAFETY: no handler runs: the signal does what it does by default.
    unsafe { signal(SIGCHLD, SIG_DFL) };
}

/// Other processes of the same user may not look into this one: neither its memory nor its descriptors.
pub fn hide() {
    // SAFETY: prctl takes numbers only with this option.
    unsafe { prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) };
}

/// What descendants leave behind becomes a child of this process.
pub fn adopt_strays() {
    // SAFETY: prctl takes numbers only with this option.
    unsafe { prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
}

/// Closes standard output and error output. Nothing may be printed any more.
pub fn close_output() {
    // SAFETY: the standard library does not own these two, and nothing here writes to them afterwards.
    unsafe {
        close(1);
        close(2);
    }
}
