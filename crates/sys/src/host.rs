//! Facts about this host, and settings of this process.

use std::io;
use std::path::Path;

use nix::sys::statvfs::statvfs;
use sha2::{Digest, Sha256};

/// What tells whether two processes are on the same machine: SHA-256 (hex) of `/etc/machine-id` (machine-id(5)), or of the
/// kernel's boot id where there is none. The number itself is not given away, as machine-id(5) asks.
pub fn machine_id() -> Option<String> {
    ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"]
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .map(|text| text.trim().to_owned())
        .find(|text| !text.is_empty())
        .map(|text| hex::encode(Sha256::digest(format!("kici:{text}"))))
}

/// The kernel's id of this boot; process start times count from it.
pub fn boot_id() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// Name of this host; `localhost` when the kernel has none that is UTF-8.
pub fn hostname() -> String {
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "localhost".to_owned())
}

/// Release of the kernel, such as `6.1.0-18-amd64`.
pub fn os_release() -> String {
    nix::sys::utsname::uname().map(|u| u.release().to_string_lossy().into_owned()).unwrap_or_default()
}

/// Memory of the host in MiB, from `/proc/meminfo`.
pub fn total_memory_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    kib.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib / 1024)
}

/// Processors that this process may use.
pub fn cpu_count() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// Effective user id of this process.
pub fn uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Name of the effective user, its number when it has no name.
pub fn user_name() -> String {
    let uid = nix::unistd::geteuid();
    match nix::unistd::User::from_uid(uid) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    }
}

/// Opens a file that somebody else may have put there: a symbolic link is not followed, and a pipe without a writer does not
/// hold the caller up. `None` when it is no plain file.
///
/// # Errors
/// The error of open(2), such as `NotFound`.
pub fn open_plain(path: &Path) -> io::Result<Option<std::fs::File>> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = nix::fcntl::OFlag::O_NOFOLLOW | nix::fcntl::OFlag::O_NONBLOCK;
    let file = match std::fs::File::options().read(true).custom_flags(flags.bits()).open(path) {
        Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ELOOP as i32) => return Ok(None),
        file => file?,
    };
    Ok(file.metadata()?.is_file().then_some(file))
}

/// Whether this user may make files in a directory.
pub fn can_write(dir: &Path) -> bool {
    nix::unistd::access(dir, nix::unistd::AccessFlags::W_OK | nix::unistd::AccessFlags::X_OK).is_ok()
}

/// Process group of this process.
pub fn process_group() -> u32 {
    u32::try_from(nix::unistd::getpgrp().as_raw()).unwrap_or_default()
}

/// A file without a name that holds `bytes`, to be read from its start.
///
/// # Errors
/// The error of memfd_create(2) or write(2).
#[cfg(target_os = "linux")]
pub fn memory_file(bytes: &[u8]) -> io::Result<std::os::fd::OwnedFd> {
    use std::io::{Seek, Write};
    let fd = nix::sys::memfd::memfd_create(c"kici", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// Bytes that this user may still write to the file system of `path`.
///
/// # Errors
/// The error of statvfs(3).
pub fn disk_free_bytes(path: &Path) -> io::Result<u64> {
    let stat = statvfs(path)?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

/// Whether other processes of the same user may trace this one and read its memory and environment
/// (`PR_SET_DUMPABLE`, prctl(2)).
///
/// # Errors
/// The error of prctl(2).
#[cfg(target_os = "linux")]
pub fn set_dumpable(yes: bool) -> io::Result<()> {
    Ok(nix::sys::prctl::set_dumpable(yes)?)
}

/// Takes variables out of the environment of this process, so that nothing it does later can pass them on. Only while the
/// process has one thread; false when it has more and nothing was changed.
#[cfg(target_os = "linux")]
pub fn forget_variables(names: &[&str]) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    if threads != 1 {
        return false;
    }
    for name in names {
        // SAFETY: this is the only thread (just counted), so nobody reads or writes the environment meanwhile.
        unsafe { std::env::remove_var(name) };
    }
    true
}

/// Files that this process makes from now on are for its own user only.
pub fn private_files() {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_there() {
        assert_eq!(machine_id(), machine_id());
        assert_eq!(machine_id().map(|id| id.len()), Some(64));
        assert!(total_memory_mib().is_some_and(|mib| mib > 0));
        assert!(cpu_count() > 0);
        assert!(disk_free_bytes(Path::new("/")).is_ok());
        assert!(!hostname().is_empty() && !user_name().is_empty() && !os_release().is_empty());
    }
}
