//! What happens between fork and exec. Everything here runs in the child of a fork of a program with threads: only
//! async-signal-safe calls (signal-safety(7)), no allocation, no locks.

use std::io;
use std::os::fd::RawFd;

use nix::libc;

/// Becomes a subreaper and forks: the child returns and goes on to exec, this process becomes the keeper and never
/// returns. `report` gets the pid of the child and later its wait status, 4 bytes each in native order.
pub(super) fn split(report: RawFd) -> io::Result<()> {
    // SAFETY: setsid(2), prctl(2), umask(2) and fork(2) take plain numbers. The forked child has one thread; it returns into
    // std's exec path, which is written for this state.
    unsafe {
        libc::setsid();
        if libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        match libc::fork() {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                libc::setsid();
                libc::umask(0o022);
                if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            }
            child => keep(child, report),
        }
    }
}

/// Reports how `command` ends, reaps all that is inherited, and exits when no child is left.
fn keep(command: libc::pid_t, report: RawFd) -> ! {
    // SAFETY: all calls are async-signal-safe. Descriptors other than `report` belong to nobody in this process, which
    // runs no destructor and never returns; closing them lets readers of the pipes see their end.
    unsafe {
        for signal in
            [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGPIPE]
        {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        close_all_but(report);
        tell(report, command);
        loop {
            let mut status = 0;
            let pid = libc::waitpid(-1, &raw mut status, 0);
            if pid == command {
                tell(report, status);
            } else if pid < 0 && *libc::__errno_location() != libc::EINTR {
                libc::_exit(0);
            }
        }
    }
}

/// # Safety
/// Nobody in this process may use any descriptor but `keep` afterwards.
unsafe fn close_all_but(keep: RawFd) {
    // SAFETY: close_range(2) and close(2) take numbers; the caller gives up all other descriptors.
    unsafe {
        let Ok(keep) = u32::try_from(keep) else { return };
        let below = keep == 0 || libc::syscall(libc::SYS_close_range, 0, keep - 1, 0) == 0;
        let above = libc::syscall(libc::SYS_close_range, keep + 1, u32::MAX, 0) == 0;
        if !(below && above) {
            for fd in (0..65_536).filter(|fd| u32::try_from(*fd) != Ok(keep)) {
                libc::close(fd);
            }
        }
    }
}

/// Writes 4 bytes, which a pipe takes whole (pipe(7), PIPE_BUF). The reader may be gone: nothing can be done then.
fn tell(report: RawFd, number: i32) {
    let bytes = number.to_ne_bytes();
    // SAFETY: the pointer and the length are those of `bytes`.
    unsafe { libc::write(report, bytes.as_ptr().cast(), bytes.len()) };
}
