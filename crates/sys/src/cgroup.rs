//! Groups of processes with limits, ended at once and judged by what they used (cgroups(7), cgroup v2 only).
//!
//! A job gets a group below the one of the agent, and each of its commands a group in that. Where the agent's own group is not
//! handed to it (`Delegate=yes` of systemd.resource-control(5)) there are none, and trees are ended by search instead.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::libc;

/// The controllers that limits need.
const WANTED: [&str; 3] = ["memory", "pids", "cpu"];
/// Where the agent itself goes, since a group with controllers for others may hold no processes.
const OWN: &str = "kici-agent";
/// What the groups of jobs begin with.
const PREFIX: &str = "kici-job-";
const SWEEP: Duration = Duration::from_millis(1);
const MAX_SWEEPS: u32 = 2_000;

/// The part of the hierarchy that this process may shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delegated {
    dir: PathBuf,
    controllers: Vec<String>,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum NotDelegated {
    /// No cgroup v2.
    #[error("cgroup v2 is not mounted; boot with systemd.unified_cgroup_hierarchy=1")]
    NoHierarchy,
    /// It belongs to somebody else.
    #[error("{0} is not handed to this process; set Delegate=yes in its unit")]
    NotOurs(PathBuf),
    /// It cannot be written.
    #[error("{0}: {1}; set Delegate=yes in the unit of the agent")]
    Closed(PathBuf, io::Error),
}

/// Limits of a job. None is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Processes and threads.
    pub processes: Option<u64>,
    /// Bytes of memory; more ends the job.
    pub memory_bytes: Option<u64>,
    /// Processor time in billionths of one processor.
    pub nano_cpus: Option<u64>,
}

/// What a job used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processes that the kernel ended for want of memory within the limit.
    pub oom_kills: u64,
    /// Most memory at one time.
    pub peak_memory_bytes: Option<u64>,
    /// Its limit.
    pub memory_limit_bytes: Option<u64>,
}

impl Delegated {
    /// Looks for the group of this process and takes it over: the first call moves this process into a group of its own.
    ///
    /// # Errors
    /// [`NotDelegated`], with the remedy.
    pub fn find() -> Result<Self, NotDelegated> {
        let (dir, is_root) = own()?;
        let closed = |error| NotDelegated::Closed(dir.clone(), error);
        let probe = dir.join(format!("{PREFIX}probe-{}", std::process::id()));
        make(&probe).and_then(|()| std::fs::remove_dir(&probe)).map_err(closed)?;
        let mut controllers = available(&dir);
        if !controllers.is_empty() && enable(&dir, &controllers, is_root).is_err() {
            // Somebody else is in this group too: groups, but no limits.
            controllers.clear();
        }
        Ok(Self { dir, controllers })
    }

    /// What [`Self::find`] would find, as far as can be told without changing anything.
    ///
    /// # Errors
    /// [`NotDelegated`], with the remedy.
    pub fn look() -> Result<Self, NotDelegated> {
        Self::look_at(own()?.0)
    }

    fn look_at(dir: PathBuf) -> Result<Self, NotDelegated> {
        if !crate::host::can_write(&dir) {
            return Err(NotDelegated::Closed(dir, io::ErrorKind::PermissionDenied.into()));
        }
        let controllers = available(&dir);
        Ok(Self { dir, controllers })
    }

    /// Groups in a directory that stands for a delegated one.
    pub fn at(dir: impl Into<PathBuf>, controllers: &[&str]) -> Self {
        Self { dir: dir.into(), controllers: controllers.iter().map(|name| (*name).to_owned()).collect() }
    }

    /// Where the groups are.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Which of `memory`, `pids` and `cpu` can be limited.
    pub fn controllers(&self) -> &[String] {
        &self.controllers
    }

    /// Whether the kernel ends a group at once (`cgroup.kill`, Linux 5.14).
    pub fn kills(&self) -> bool {
        const SINCE: (u32, u32) = (5, 14);
        // The root of a hierarchy has no such file, the groups in it do; perhaps there are none yet.
        let release = crate::host::os_release();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
        let known = numbers.next().zip(numbers.next()).is_some_and(|version| version >= SINCE);
        known || self.dir.join("cgroup.kill").exists()
    }

    /// Makes the group of a job. Limits without their controller are left out.
    ///
    /// # Errors
    /// When it cannot be made, or a limit is refused.
    pub fn job(&self, name: &str, limits: &Limits) -> io::Result<JobGroup> {
        let dir = self.dir.join(format!("{PREFIX}{name}"));
        make(&dir)?;
        let group = JobGroup { dir, made: AtomicU32::new(0) };
        let cpu = limits.nano_cpus.map(|nano| format!("{} 100000", (nano / 10_000).max(1_000)));
        let all = [
            ("pids", "pids.max", limits.processes.map(|n| n.to_string())),
            ("memory", "memory.max", limits.memory_bytes.map(|n| n.to_string())),
            // A leader that goes on without its children hangs; with this all end, and the verdict is plain.
            ("memory", "memory.oom.group", limits.memory_bytes.map(|_| "1".to_owned())),
            // Without this the limit is only where swapping begins.
            ("memory", "memory.swap.max", limits.memory_bytes.map(|_| "0".to_owned())),
            ("cpu", "cpu.max", cpu),
        ];
        for (controller, file, value) in all {
            let Some(value) = value.filter(|_| self.controllers.iter().any(|name| name == controller)) else {
                continue;
            };
            match std::fs::write(group.dir.join(file), value) {
                // A kernel without swap accounting has no such file.
                Err(error) if error.kind() == io::ErrorKind::NotFound && file == "memory.swap.max" => {}
                result => result?,
            }
        }
        Ok(group)
    }

    /// Ends and removes the group of a job that an earlier process left. Returns how many processes were in it.
    pub fn end_leftover(&self, name: &str) -> u32 {
        let dir = self.dir.join(format!("{PREFIX}{name}"));
        if dir.is_dir() { JobGroup { dir, made: AtomicU32::new(0) }.end() } else { 0 }
    }
}

/// The group of a job.
#[derive(Debug)]
pub struct JobGroup {
    dir: PathBuf,
    made: AtomicU32,
}

impl JobGroup {
    /// A group for one command of the job.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn command(&self) -> io::Result<StepGroup> {
        let dir = self.dir.join(self.made.fetch_add(1, Ordering::Relaxed).to_string());
        make(&dir)?;
        let procs = File::options().write(true).open(dir.join("cgroup.procs"))?;
        let place = File::open(&dir)?;
        Ok(StepGroup { dir, place, procs })
    }

    /// What the job used so far.
    pub fn usage(&self) -> Usage {
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse().ok();
        let event = |name: &str| {
            let text = read("memory.events")?;
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
            line?.trim().parse().ok()
        };
        Usage {
            oom_kills: event("oom_kill").unwrap_or(0),
            peak_memory_bytes: number("memory.peak"),
            memory_limit_bytes: number("memory.max"),
        }
    }

    /// Ends everything in the group and removes it. Blocks. Returns how many processes were in it.
    pub fn end(&self) -> u32 {
        let inner: Vec<PathBuf> = std::fs::read_dir(&self.dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .collect();
        let ended = inner.iter().map(|dir| count(dir)).sum();
        if ended > 0 {
            kill(&self.dir);
        }
        for sweep in 0..MAX_SWEEPS {
            let left = inner.iter().filter(|dir| std::fs::remove_dir(dir).is_err() && dir.exists()).count();
            if left == 0 {
                break;
            }
            if sweep > 0 {
                kill(&self.dir);
            }
            std::thread::sleep(SWEEP);
        }
        if let Err(error) = std::fs::remove_dir(&self.dir)
            && error.kind() != io::ErrorKind::NotFound
        {
            // What is left is empty; the next start of the agent with the same job removes it.
            return ended;
        }
        ended
    }
}

/// The group of one command; removed when nobody uses it any more and it is empty.
#[derive(Debug)]
pub struct StepGroup {
    dir: PathBuf,
    /// The directory: what clone3(2) starts a process in.
    place: File,
    /// What a process writes itself into, where the kernel cannot do that. Such a move waits for all processors
    /// (`cgroup_threadgroup_rwsem`), which takes many milliseconds on a quiet host.
    procs: File,
}

impl StepGroup {
    /// Ends everything in the group at once, where the kernel can. Returns how many processes were in it.
    pub fn kill(&self) -> u32 {
        let there = count(&self.dir);
        if there > 0 {
            kill(&self.dir);
        }
        there
    }

    pub(crate) fn raw(&self) -> RawGroup {
        RawGroup { place: self.place.as_raw_fd(), procs: self.procs.as_raw_fd() }
    }
}

/// The descriptors of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawGroup {
    pub place: RawFd,
    pub procs: RawFd,
}

impl Drop for StepGroup {
    fn drop(&mut self) {
        // What is not empty yet goes with the group of the job.
        let _ = std::fs::remove_dir(&self.dir);
    }
}

fn make(dir: &Path) -> io::Result<()> {
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", dir.display()))),
    }
}

fn count(dir: &Path) -> u32 {
    let text = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    u32::try_from(text.lines().count()).unwrap_or(u32::MAX)
}

/// An older kernel has no such file; trees are ended by search there.
fn kill(dir: &Path) {
    let file = dir.join("cgroup.kill");
    if file.exists() {
        // It is the kernel's; it can only be gone together with the group.
        let _ = std::fs::write(file, "1");
    }
}

/// The group that this process may shape, and whether it is the root of the hierarchy.
fn own() -> Result<(PathBuf, bool), NotDelegated> {
    let (mount, path) = place().ok_or(NotDelegated::NoHierarchy)?;
    let inside = path.trim_start_matches('/');
    let mut dir = mount.join(inside);
    if dir.file_name().is_some_and(|name| name == OWN) {
        dir.pop();
    }
    if is_ours(&dir, inside.is_empty()) { Ok((dir, inside.is_empty())) } else { Err(NotDelegated::NotOurs(dir)) }
}

/// The controllers that are wanted and there.
fn available(dir: &Path) -> Vec<String> {
    let there = std::fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    there.split_whitespace().filter(|name| WANTED.contains(name)).map(str::to_owned).collect()
}

/// The cgroup v2 of this process, as it stands in `/proc/self/cgroup`.
pub fn own_group() -> Option<String> {
    group_path(&std::fs::read_to_string("/proc/self/cgroup").ok()?)
}

/// Where cgroup v2 is mounted, and the group of this process in it.
fn place() -> Option<(PathBuf, String)> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    Some((mount_point(&mounts)?, group_path(&groups)?))
}

/// Field 5 of the line whose file system, after the separator, is cgroup2 (proc_pid_mountinfo(5)).
fn mount_point(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        (right.split(' ').next() == Some("cgroup2")).then_some(())?;
        left.split(' ').nth(4).map(PathBuf::from)
    })
}

fn group_path(groups: &str) -> Option<String> {
    groups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// Ours by systemd's mark or by ownership; without systemd nobody else shapes the hierarchy.
fn is_ours(dir: &Path, is_root: bool) -> bool {
    if !Path::new("/run/systemd/system").exists() {
        return true;
    }
    let uid = crate::host::uid();
    let owned = uid != 0 && dir.metadata().is_ok_and(|meta| meta.uid() == uid);
    !is_root && (owned || marked(dir, c"trusted.delegate") || marked(dir, c"user.delegate"))
}

fn marked(dir: &Path, name: &std::ffi::CStr) -> bool {
    let Ok(path) = CString::new(dir.as_os_str().as_bytes()) else { return false };
    let mut value = [0_u8; 8];
    // SAFETY: both names are NUL-terminated, and the length is that of the buffer.
    let n = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    n == 1 && value[0] == b'1'
}

/// Lets the groups below have controllers. All but the root must be empty for that, so this process steps aside.
fn enable(dir: &Path, controllers: &[String], is_root: bool) -> io::Result<()> {
    if !is_root {
        let own = dir.join(OWN);
        make(&own)?;
        std::fs::write(own.join("cgroup.procs"), std::process::id().to_string())?;
    }
    let text: Vec<String> = controllers.iter().map(|name| format!("+{name}")).collect();
    std::fs::write(dir.join("cgroup.subtree_control"), text.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hierarchy_is_found_also_where_both_versions_are_mounted() {
        let mounts = "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      32 30 0:28 / /sys/fs/cgroup/unified rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mount_point("31 30 0:27 / /x rw - cgroup cgroup rw"), None);
        assert_eq!(group_path("4:memory:/a\n0::/b/c\n"), Some("/b/c".into()));
    }

    #[test]
    fn a_look_changes_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("cgroup.controllers"), "cpuset cpu memory pids\n").expect("written");
        let seen = Delegated::look_at(dir.path().to_owned()).expect("writable");
        assert_eq!(seen.controllers(), ["cpu", "memory", "pids"]);
        seen.kills();
        assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 1);
    }

    #[tokio::test]
    async fn a_command_starts_in_its_group_without_a_move_and_is_moved_where_the_kernel_cannot_do_that() {
        use crate::process::{Spawn, Tree};
        use tokio::io::AsyncReadExt;
        let Ok(place) = Delegated::find() else { return };
        let job = place.job(&format!("start-{}", std::process::id()), &Limits::default()).expect("made");
        let nothing = || File::options().write(true).open("/dev/null").expect("there");
        for started_inside in [true, false] {
            let mut group = job.command().expect("made");
            // Of the two ways only one leads anywhere.
            if started_inside {
                group.procs = nothing();
            } else {
                group.place = nothing();
            }
            let name = group.dir.file_name().expect("named").to_string_lossy().into_owned();
            let spawn = Spawn {
                args: vec!["/proc/self/cgroup".into()],
                group: Some(std::sync::Arc::new(group)),
                ..Spawn::new("/bin/cat", "/")
            };
            let (mut tree, mut pipes) = Tree::spawn(&spawn).expect("spawned");
            let mut said = String::new();
            pipes.stdout.read_to_string(&mut said).await.expect("read");
            assert!(tree.command_exit().await.success());
            tree.kill().await;
            let ending = format!("start-{}/{name}", std::process::id());
            assert!(group_path(&said).is_some_and(|path| path.ends_with(&ending)), "{started_inside}: {said}");
        }
        job.end();
    }

    #[test]
    fn limits_are_written_and_usage_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let place = Delegated::at(dir.path(), &["memory", "pids"]);
        let limits = Limits { processes: Some(4096), memory_bytes: Some(1 << 30), nano_cpus: Some(2_000_000_000) };
        let job = place.job("a", &limits).expect("made");
        let text = |name: &str| std::fs::read_to_string(dir.path().join("kici-job-a").join(name)).ok();
        assert_eq!((text("pids.max"), text("memory.max")), (Some("4096".into()), Some("1073741824".into())));
        assert_eq!((text("memory.swap.max"), text("cpu.max")), (Some("0".into()), None));
        let events = "low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 7\n";
        std::fs::write(dir.path().join("kici-job-a/memory.events"), events).expect("written");
        std::fs::write(dir.path().join("kici-job-a/memory.peak"), "1000\n").expect("written");
        let usage = Usage { oom_kills: 1, peak_memory_bytes: Some(1000), memory_limit_bytes: Some(1 << 30) };
        assert_eq!(job.usage(), usage);
    }
}
