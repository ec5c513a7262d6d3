//! What a command may not do, from its first instruction on and for all that it starts.
//!
//! Each part is optional, since kernels and hosts differ: [`Files`] needs Landlock, [`Calls`] seccomp, [`crate::cgroup`]
//! a delegated subtree of cgroup v2, [`User`] an agent that is root. `no_new_privs` is always set (see [`crate::process`]).

mod calls;
mod files;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use calls::{Calls, calls_available};
pub(crate) use calls::{KEEPER, NOT_KEEPER, is_comparison};
pub use files::{Files, Reach, landlock_abi};

/// How a command is confined. The default is not at all.
#[derive(Clone, Debug, Default)]
pub struct Confinement {
    /// Which files it may read and write.
    pub files: Option<Arc<Files>>,
    /// Which system calls it may not make.
    pub calls: Option<Arc<Calls>>,
    /// Capabilities that ordinary builds do not need are dropped for good, also for root.
    pub drop_capabilities: bool,
    /// Another user to run as.
    pub user: Option<Arc<User>>,
    /// Descriptors that it gets, at their own numbers.
    pub keep: Vec<Arc<OwnedFd>>,
}

/// A user of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: std::path::PathBuf,
    /// Login shell.
    pub shell: std::path::PathBuf,
}

impl User {
    /// Looks a user up in the user database of this host; `None` when it has no such user.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn named(name: &str) -> io::Result<Option<Self>> {
        let Some(user) = nix::unistd::User::from_name(name)? else { return Ok(None) };
        let text = std::ffi::CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let groups = nix::unistd::getgrouplist(&text, user.gid)?;
        Ok(Some(Self {
            name: user.name,
            uid: user.uid.as_raw(),
            gid: user.gid.as_raw(),
            groups: groups.into_iter().map(nix::unistd::Gid::as_raw).collect(),
            home: user.dir,
            shell: user.shell,
        }))
    }
}
