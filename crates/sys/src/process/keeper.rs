//! What happens between fork and exec. Everything here runs in the child of a fork of a program with threads: only
//! async-signal-safe calls (signal-safety(7)), no allocation, no locks.

use std::ffi::{CString, OsStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;

use nix::libc;

use super::Spawn;
use crate::cgroup::RawGroup;
use crate::confine::{Confinement, KEEPER, NOT_KEEPER, is_comparison};

/// Enough for a few system calls in a row.
const STACK_BYTES: usize = 64 * 1024;

/// Everything exec needs, laid out before the fork, since nothing may be allocated after it.
pub(super) struct Image {
    /// Full paths, tried in order as execvp(3) does.
    programs: Vec<CString>,
    /// Addresses of the texts below, ended by 0.
    argv: Vec<usize>,
    envp: Vec<usize>,
    _texts: Vec<CString>,
    stack: Vec<u8>,
    confine: Confine,
}

/// The confinement in the form in which the system calls take it. The descriptors belong to the `Spawn`.
struct Confine {
    files: Option<RawFd>,
    group: Option<RawGroup>,
    filter: Vec<libc::sock_filter>,
    user: Option<(u32, u32, Vec<u32>)>,
    drop_capabilities: bool,
    keep: Vec<RawFd>,
}

impl Confine {
    fn new(of: &Confinement, group: Option<RawGroup>) -> Self {
        Self {
            files: of.files.as_ref().map(|files| files.raw()),
            group,
            filter: of.calls.as_ref().map(|calls| calls.program.clone()).unwrap_or_default(),
            user: of.user.as_ref().map(|user| (user.uid, user.gid, user.groups.clone())),
            drop_capabilities: of.drop_capabilities,
            keep: of.keep.iter().map(|fd| fd.as_raw_fd()).collect(),
        }
    }

    /// Puts the keeper, which is this process, into the places that stand for it. Allocates nothing.
    fn name_keeper(&mut self) {
        let keeper = std::process::id();
        for instruction in self.filter.iter_mut().filter(|i| is_comparison(i.code)) {
            match instruction.k {
                KEEPER => instruction.k = keeper,
                NOT_KEEPER => instruction.k = keeper.wrapping_neg(),
                _ => {}
            }
        }
    }
}

/// What the command's side of the split works with.
struct Start<'a> {
    image: &'a Image,
    /// It is in its group already.
    is_placed: bool,
    error: c_int,
}

impl Image {
    pub(super) fn new(spawn: &Spawn) -> io::Result<Self> {
        let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let program = spawn.program.as_bytes();
        let path = spawn.env.iter().find(|(name, _)| name == "PATH").map_or(OsStr::new(""), |(_, path)| path);
        let programs = if program.contains(&b'/') {
            vec![text(program)?]
        } else {
            let dirs = path.as_bytes().split(|b| *b == b':').filter(|dir| !dir.is_empty());
            dirs.map(|dir| text(&[dir, b"/", program].concat())).collect::<io::Result<_>>()?
        };
        let mut texts = vec![text(program)?];
        for arg in &spawn.args {
            texts.push(text(arg.as_bytes())?);
        }
        let args = texts.len();
        for (name, value) in &spawn.env {
            texts.push(text(&[name.as_bytes(), b"=", value.as_bytes()].concat())?);
        }
        let addresses = |texts: &[CString]| texts.iter().map(|t| t.as_ptr() as usize).chain([0]).collect();
        let (argv, envp) = (addresses(&texts[..args]), addresses(&texts[args..]));
        let confine = Confine::new(&spawn.confine, spawn.group.as_ref().map(|group| group.raw()));
        Ok(Self { programs, argv, envp, _texts: texts, stack: vec![0; STACK_BYTES], confine })
    }
}

/// Becomes a subreaper and starts the command, which shares this memory until it has executed (vfork(2)): a second copy of
/// the page tables would cost more than all the rest. This process becomes the keeper and returns only when the command
/// cannot be executed. `report` gets the pid of the command and later its wait status, 4 bytes each in native order.
pub(super) fn split(report: RawFd, image: &mut Image) -> io::Result<()> {
    image.confine.name_keeper();
    let top = image.stack.as_mut_ptr_range().end;
    let mut start = Start { image, is_placed: false, error: 0 };
    // SAFETY: setsid(2) and prctl(2) take plain numbers.
    unsafe {
        libc::setsid();
        if libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    if let Some(group) = start.image.confine.group
        && let Some(child) = start_in(group, start.image)?
    {
        keep(child, report);
    }
    // SAFETY: clone(2) runs `execute` on a stack of its own, aligned down to 16
    // bytes, inside memory that outlives it, because CLONE_VFORK suspends this process until the other has executed or ended.
    let child = unsafe {
        let top = top.sub(top as usize % 16).cast::<c_void>();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        libc::clone(execute, top, flags, (&raw mut start).cast())
    };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    if start.error != 0 {
        return Err(io::Error::from_raw_os_error(start.error));
    }
    keep(child, report)
}

/// `struct clone_args` of clone3(2) up to its member `cgroup`.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// `CLONE_INTO_CGROUP`: the process begins its life in the group, which spares it the move.
const INTO_CGROUP: u64 = 0x2_0000_0000;

/// Starts the command in its group. `None` where the kernel (before Linux 5.7) or a filter of system calls does not allow that.
/// It gets a copy of this memory, since sharing it would need a stack and so assembly; what went wrong it says in a page that
/// stays shared.
fn start_in(group: RawGroup, image: &Image) -> io::Result<Option<libc::pid_t>> {
    let size = std::mem::size_of::<c_int>();
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping; nothing else is touched.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let error = page.cast::<c_int>();
    let args = CloneArgs {
        // As in vfork(2) this process goes on when the other has executed or ended.
        flags: INTO_CGROUP | libc::CLONE_VFORK as u64,
        exit_signal: libc::SIGCHLD as u64,
        cgroup: group.place as u64,
        ..CloneArgs::default()
    };
    // SAFETY: clone3(2) reads `args`, whose size is given, and without CLONE_VM acts as fork(2) does. The other side makes only
    // async-signal-safe calls and never returns from here. The page holds a number that is 0 at first, and only one side at a
    // time runs.
    unsafe {
        let child = libc::syscall(libc::SYS_clone3, &raw const args, std::mem::size_of::<CloneArgs>());
        if child == 0 {
            let mut start = Start { image, is_placed: true, error: 0 };
            let status = execute((&raw mut start).cast());
            error.write_volatile(start.error);
            libc::_exit(status);
        }
        let failed = error.read_volatile();
        libc::munmap(page, size);
        match libc::pid_t::try_from(child) {
            Ok(child) if child > 0 && failed == 0 => Ok(Some(child)),
            Ok(child) if child > 0 => Err(io::Error::from_raw_os_error(failed)),
            _ => Ok(None),
        }
    }
}

/// The side of the command. Returns only when there is nothing to execute, with the reason in `Start::error`.
extern "C" fn execute(start: *mut c_void) -> c_int {
    // SAFETY: `split` passes a `Start` that outlives this call. The addresses are those of texts in the image, ended by 0.
    // All calls are async-signal-safe.
    unsafe {
        let start = &mut *start.cast::<Start<'_>>();
        libc::setsid();
        libc::umask(0o022);
        let confined =
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && confine(&start.image.confine, start.is_placed);
        if !confined {
            start.error = *libc::__errno_location();
            return 127;
        }
        let argv = start.image.argv.as_ptr().cast::<*const c_char>();
        let envp = start.image.envp.as_ptr().cast::<*const c_char>();
        let mut error = libc::ENOENT;
        for program in &start.image.programs {
            libc::execve(program.as_ptr(), argv, envp);
            match *libc::__errno_location() {
                libc::ENOENT | libc::ENOTDIR => {}
                other => error = other,
            }
            if !matches!(error, libc::ENOENT | libc::EACCES) {
                break;
            }
        }
        // Written only now: after a successful exec it must still read 0.
        start.error = error;
        127
    }
}

/// Capabilities that ordinary builds of root need (capabilities(7)): those that containers usually have, but for mknod, which
/// would open every device of the host.
const KEPT_CAPABILITIES: u64 = 1 << 0 // chown
    | 1 << 1 // dac_override
    | 1 << 3 // fowner
    | 1 << 4 // fsetid
    | 1 << 5 // kill
    | 1 << 6 // setgid
    | 1 << 7 // setuid
    | 1 << 8 // setpcap
    | 1 << 10 // net_bind_service
    | 1 << 13 // net_raw
    | 1 << 18 // sys_chroot
    | 1 << 29 // audit_write
    | 1 << 31; // setfcap
const LAST_CAPABILITY: u32 = 63;

/// Confines this process, which keeps no descriptor above 2 but those named. False when something cannot be put into force;
/// errno says why.
///
/// # Safety
/// Only in the side of the command: it changes the process for good.
unsafe fn confine(confine: &Confine, is_placed: bool) -> bool {
    // SAFETY: all calls are async-signal-safe and take numbers, or addresses of memory that outlives them. The raw calls do
    // not concern other threads, as those of the C library would.
    unsafe {
        if let Some(group) = confine.group.filter(|_| !is_placed)
            && libc::write(group.procs, c"0".as_ptr().cast(), 1) != 1
        {
            return false;
        }
        // Whoever started this program may have left descriptors open in it. Before Linux 5.11 they are passed on.
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        for fd in &confine.keep {
            if libc::fcntl(*fd, libc::F_SETFD, 0) != 0 {
                return false;
            }
        }
        if confine.drop_capabilities {
            libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
            for capability in (0..=LAST_CAPABILITY).filter(|at| KEPT_CAPABILITIES & (1 << at) == 0) {
                // Refused to all who have none that could be dropped, and past the kernel's last one.
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
        }
        if let Some((uid, gid, groups)) = &confine.user
            && (libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) != 0
                || libc::syscall(libc::SYS_setresgid, *gid, *gid, *gid) != 0
                || libc::syscall(libc::SYS_setresuid, *uid, *uid, *uid) != 0)
        {
            return false;
        }
        if let Some(files) = confine.files
            && libc::syscall(libc::SYS_landlock_restrict_self, files, 0) != 0
        {
            return false;
        }
        if !confine.filter.is_empty() {
            let Ok(len) = u16::try_from(confine.filter.len()) else { return false };
            let program = libc::sock_fprog { len, filter: confine.filter.as_ptr().cast_mut() };
            let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
            if libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) != 0 {
                return false;
            }
        }
        true
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
