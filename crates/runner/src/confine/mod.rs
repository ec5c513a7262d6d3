//! How the commands of a job are kept within the job: what this host has for that, and what of it a job gets.

mod bwrap;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kici_sys::cgroup::{Delegated, JobGroup, Limits, NotDelegated, Usage};
use kici_sys::confine::{Calls, Confinement, Files, Reach, User, calls_available, landlock_abi};
use kici_sys::process::Spawn;
use sha2::{Digest, Sha256};

use crate::config::{BWRAP_HINT, Config, Hardening, Isolation, program};
use crate::container::Containers;
use bwrap::Bwrap;

/// Directories for temporary files that every program expects to write.
const TEMPORARY: [&str; 2] = ["/tmp", "/var/tmp"];

/// What of `/dev` steps of root get: what programs expect to be there. The rest of it is the host - its disks, its memory.
const DEVICES: [&str; 13] = [
    "/dev/full",
    "/dev/fuse",
    "/dev/kvm",
    "/dev/mqueue",
    "/dev/net/tun",
    "/dev/null",
    "/dev/ptmx",
    "/dev/pts",
    "/dev/random",
    "/dev/shm",
    "/dev/tty",
    "/dev/urandom",
    "/dev/zero",
];

/// What this host has, found out once.
#[derive(Debug)]
pub struct Host {
    isolation: Isolation,
    /// The version of Landlock, where it is there.
    pub landlock: Option<u32>,
    /// The filter of system calls, or why there is none.
    pub calls: Result<Arc<Calls>, String>,
    /// The filter inside of a sandbox.
    inner_calls: Option<Arc<Calls>>,
    /// The place for groups of jobs, or why there is none and what would help.
    pub groups: Result<Delegated, String>,
    /// Tells the groups of this agent from those of others on the host.
    scope: String,
    reach: Reach,
    bwrap: Option<PathBuf>,
    /// What is made on its container engine.
    pub containers: Containers,
}

impl Host {
    /// Looks at the host. Takes over the control group of this process where it may.
    pub fn find(config: &Config) -> Self {
        Self::with(config, Delegated::find())
    }

    /// The same without changing anything.
    pub fn look(config: &Config) -> Self {
        Self::with(config, Delegated::look())
    }

    fn with(config: &Config, groups: Result<Delegated, NotDelegated>) -> Self {
        let landlock = landlock_abi();
        // Landlock lets a step trace only what it started itself; without it no process may be attached to at all.
        let calls = if calls_available() {
            let group = kici_sys::host::process_group();
            Calls::new(std::process::id(), group, landlock.is_some()).map(Arc::new).map_err(|error| error.to_string())
        } else {
            Err("this kernel filters no system calls (CONFIG_SECCOMP_FILTER)".to_owned())
        };
        Self {
            landlock,
            inner_calls: calls.as_ref().ok().and_then(|_| Calls::for_namespace().ok()).map(Arc::new),
            calls,
            groups: groups.map_err(|error| error.to_string()),
            scope: hex::encode(&Sha256::digest(config.state_dir.as_os_str().as_encoded_bytes())[..4]),
            reach: reach(config),
            bwrap: program("bwrap", &config.agent_env),
            isolation: config.isolation.clone(),
            containers: Containers::new(config),
        }
    }

    /// Files of the agent that steps could read or change, since they lie below what steps may write.
    pub fn exposed(&self) -> Vec<&Path> {
        self.reach.exposed()
    }

    /// Whether the rules for files can be made, on this host as it is.
    ///
    /// # Errors
    /// In words.
    pub fn try_files(&self) -> Result<(), String> {
        Files::new(&self.reach).map(drop).map_err(|error| error.to_string())
    }

    /// Where bwrap is.
    pub fn bwrap(&self) -> Option<&Path> {
        self.bwrap.as_deref()
    }

    fn group_name(&self, job: &str) -> String {
        format!("{}-{job}", self.scope)
    }

    /// Ends and removes the group of a job that an earlier process of this agent left. Returns how many processes it held.
    pub fn end_leftover(&self, name: &str) -> u32 {
        self.groups.as_ref().map_or(0, |place| place.end_leftover(&self.group_name(name)))
    }

    /// Makes what a job gets. Blocks. `name` is unique among jobs that run at the same time, `dir` the job's, `limits` what it
    /// may use.
    ///
    /// # Errors
    /// In words, with the remedy: the job then must not run.
    pub fn job(&self, name: &str, dir: &Path, limits: &Limits) -> Result<JobConfinement, String> {
        let hardened = self.isolation.hardening == Hardening::Auto;
        let sandbox = match (self.isolation.sandbox, &self.bwrap) {
            (false, _) => None,
            (true, Some(program)) => Some(program),
            (true, None) => return Err(format!("sandbox = true needs bwrap; {BWRAP_HINT}")),
        };
        let mut base = Confinement { user: self.isolation.user.clone(), ..Confinement::default() };
        let mut wrap = None;
        if let Some(program) = sandbox {
            let workspace = dir.join("workspace");
            let canonical = workspace.canonicalize().map_err(|error| format!("{}: {error}", workspace.display()))?;
            wrap = Some(Bwrap {
                program: program.clone(),
                workspace,
                canonical,
                scratch: dir.join("scratch"),
                writable: self.isolation.writable.clone(),
                network: self.isolation.network,
                calls: self.inner_calls.clone().filter(|_| hardened),
            });
        } else if hardened {
            base.calls = self.calls.as_ref().ok().cloned();
            base.drop_capabilities = true;
            if self.landlock.is_some() {
                let mut reach = self.reach.clone();
                reach.writable.extend([dir.join("workspace"), dir.join("scratch")]);
                let files = Files::new(&reach).map_err(|error| format!("steps cannot be kept from files: {error}"))?;
                base.files = Some(Arc::new(files));
            }
        }
        let group = match &self.groups {
            Ok(place) => Some(place.job(&self.group_name(name), limits).map_err(|error| {
                format!("the group of the job cannot be made: {error}; is the unit of the agent set to Delegate=yes?")
            })?),
            Err(_) => None,
        };
        Ok(JobConfinement { base, wrap, group: group.map(Arc::new), user: self.isolation.user.clone() })
    }
}

/// What steps can reach on the whole host, without the directories of their job.
fn reach(config: &Config) -> Reach {
    let mut writable: Vec<PathBuf> = TEMPORARY.iter().map(PathBuf::from).collect();
    writable.extend(config.host_env.get("TMPDIR").map(PathBuf::from));
    let uid = config.isolation.user.as_ref().map_or_else(kici_sys::host::uid, |user| user.uid);
    if uid != 0 {
        // Their own entries there; those of the kernel and of others are closed to them anyway.
        writable.push("/proc".into());
        writable.push(format!("/run/user/{uid}").into());
    }
    writable.extend(config.isolation.writable.iter().cloned());
    let mut hidden = Vec::new();
    if uid == 0 {
        hidden.push("/dev".into());
        writable.extend(DEVICES.map(PathBuf::from));
    } else {
        // Their modes tell which are for that user.
        writable.push("/dev".into());
    }
    if config.isolation.user.is_none() {
        // Of another user they are closed by their modes.
        hidden.extend([config.state_dir.clone(), config.work_dir.clone()]);
        hidden.extend(config.private_files.iter().cloned());
    }
    Reach { writable, hidden }
}

/// What the commands of one job are confined by. The default is not at all.
#[derive(Debug, Default)]
pub struct JobConfinement {
    base: Confinement,
    wrap: Option<Bwrap>,
    group: Option<Arc<JobGroup>>,
    user: Option<Arc<User>>,
}

impl JobConfinement {
    /// Confines a command of the job.
    ///
    /// # Errors
    /// When its group cannot be made.
    pub fn apply(&self, spawn: Spawn) -> io::Result<Spawn> {
        let mut spawn = Spawn { confine: self.base.clone(), ..spawn };
        if let Some(wrap) = &self.wrap {
            spawn = wrap.around(spawn)?;
        }
        self.grouped(spawn)
    }

    /// Puts a command of the agent that works for the job into the group of the job, and confines it no further.
    ///
    /// # Errors
    /// When its group cannot be made.
    pub fn grouped(&self, mut spawn: Spawn) -> io::Result<Spawn> {
        if let Some(group) = &self.group {
            spawn.group = Some(Arc::new(group.command()?));
        }
        Ok(spawn)
    }

    /// Gives a file or directory of the job to the user of its steps.
    ///
    /// # Errors
    /// When it cannot be changed.
    pub fn give(&self, path: &Path) -> io::Result<()> {
        match &self.user {
            Some(user) => std::os::unix::fs::lchown(path, Some(user.uid), Some(user.gid)),
            None => Ok(()),
        }
    }

    /// Gives a directory with all in it to the user of its steps. Blocks. The directory itself goes last: until then it is
    /// closed to that user, of whom other processes may run, and nothing in it can be swapped for a link.
    ///
    /// # Errors
    /// When one of them cannot be changed.
    pub fn give_all(&self, path: &Path) -> io::Result<()> {
        if self.user.is_none() {
            return Ok(());
        }
        if path.symlink_metadata()?.is_dir() {
            for entry in std::fs::read_dir(path)? {
                self.give_all(&entry?.path())?;
            }
        }
        self.give(path)
    }

    /// Lets the user of the steps through a directory that stays the agent's.
    ///
    /// # Errors
    /// When it cannot be changed.
    pub fn open_way(&self, dir: &Path) -> io::Result<()> {
        match &self.user {
            Some(_) => let_through(dir),
            None => Ok(()),
        }
    }

    /// Whether what its commands write to their home directory is there for the next one: a sandbox makes a new one each time.
    pub fn keeps_home(&self) -> bool {
        self.wrap.is_none()
    }

    /// The user of its steps, where that is another one than the agent's.
    pub fn user_id(&self) -> Option<u32> {
        self.user.as_ref().map(|user| user.uid)
    }

    /// What the job used, where that is counted.
    pub fn usage(&self) -> Usage {
        self.group.as_ref().map(|group| group.usage()).unwrap_or_default()
    }

    /// Ends all that is left of the job, and removes its group. Blocks. Returns how many processes that were.
    pub fn end(&self) -> u32 {
        self.group.as_ref().map_or(0, |group| group.end()) + kici_sys::process::kill_strays()
    }
}

/// Others may pass, not look around.
pub(crate) fn let_through(dir: &Path) -> io::Result<()> {
    let mode = dir.metadata()?.permissions().mode();
    std::fs::set_permissions(dir, PermissionsExt::from_mode(mode | 0o011))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn the_way_is_opened_and_nothing_else_is_changed() {
        let dir = tempfile::tempdir().expect("a directory");
        for (before, after) in [(0o700, 0o711), (0o1777, 0o1777), (0o750, 0o751)] {
            std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(before)).expect("set");
            let_through(dir.path()).expect("set");
            assert_eq!(dir.path().metadata().expect("there").mode() & 0o7777, after);
        }
    }

    #[test]
    fn a_tree_is_given_whole_and_its_links_are_not_followed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path("tree/a/b")).expect("made");
        std::fs::write(path("outside"), "").expect("written");
        std::os::unix::fs::symlink(path("outside"), path("tree/a/link")).expect("made");
        // Its own user may be given what it has.
        let uid = if kici_sys::host::uid() == 0 { 12_345 } else { kici_sys::host::uid() };
        let gid = path("tree").metadata().expect("there").gid();
        let user = User { name: "ci".into(), uid, gid, groups: Vec::new(), home: "/".into(), shell: "/bin/sh".into() };
        let confine = JobConfinement { user: Some(Arc::new(user)), ..JobConfinement::default() };
        let before = path("outside").metadata().expect("there").uid();
        confine.give_all(&path("tree")).expect("given");
        for name in ["tree", "tree/a", "tree/a/b", "tree/a/link"] {
            assert_eq!(path(name).symlink_metadata().expect("there").uid(), uid, "{name}");
        }
        assert_eq!(path("outside").metadata().expect("there").uid(), before);
    }
}
