//! A directory that is held open. What is done in it names one part of a path at a time and follows no link, so that nobody who
//! may write there can lead us elsewhere.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown, lchown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::libc::{ELOOP, O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK};

/// Whether something was not entered because it is no directory, a link to one among them.
pub fn is_no_directory(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotADirectory || error.raw_os_error() == Some(ELOOP)
}

/// See the module.
#[derive(Debug)]
pub struct Dir(File);

impl Dir {
    /// Opens a directory of ours by its path; links on the way to it are followed.
    ///
    /// # Errors
    /// When it is none, or cannot be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        OpenOptions::new().read(true).custom_flags(O_DIRECTORY).open(path).map(Self)
    }

    /// The path of an entry, by way of the open directory (proc(5), `/proc/self/fd`): only its last part is looked up.
    fn at(&self, name: &OsStr) -> PathBuf {
        let mut path = PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()));
        path.push(name);
        path
    }

    /// A directory in it.
    ///
    /// # Errors
    /// `ENOTDIR` or `ELOOP` for what is something else, a link among them.
    pub fn child(&self, name: &OsStr) -> io::Result<Self> {
        OpenOptions::new().read(true).custom_flags(O_DIRECTORY | O_NOFOLLOW).open(self.at(name)).map(Self)
    }

    /// A directory in it, made if it is not there; true when it was made.
    ///
    /// # Errors
    /// As [`Dir::child`].
    pub fn make(&self, name: &OsStr) -> io::Result<(Self, bool)> {
        let made = match DirBuilder::new().mode(0o755).create(self.at(name)) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        Ok((self.child(name)?, made))
    }

    /// A plain file in it, to be read.
    ///
    /// # Errors
    /// When it is a link; other things than files are opened without waiting for them, look at the metadata.
    pub fn file(&self, name: &OsStr) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK).open(self.at(name))
    }

    /// A new file in it.
    ///
    /// # Errors
    /// When there is something of this name.
    pub fn create(&self, name: &OsStr) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.at(name))
    }

    /// What is there under this name, which may be a link; none when there is nothing.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn look(&self, name: &OsStr) -> io::Result<Option<Metadata>> {
        match std::fs::symlink_metadata(self.at(name)) {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The names in it, sorted.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let entries = std::fs::read_dir(self.at(OsStr::new("")))?;
        let mut names = entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }

    /// Where a link in it points.
    ///
    /// # Errors
    /// When it is none.
    pub fn link_target(&self, name: &OsStr) -> io::Result<OsString> {
        std::fs::read_link(self.at(name)).map(PathBuf::into_os_string)
    }

    /// Makes a link in it.
    ///
    /// # Errors
    /// When there is something of this name.
    pub fn link(&self, name: &OsStr, target: &OsStr) -> io::Result<()> {
        std::os::unix::fs::symlink(target, self.at(name))
    }

    /// Moves an entry into another directory of the same filesystem; a file or an empty directory there is replaced.
    ///
    /// # Errors
    /// `CrossesDevices` for another filesystem.
    pub fn rename(&self, name: &OsStr, to: &Self, to_name: &OsStr) -> io::Result<()> {
        std::fs::rename(self.at(name), to.at(to_name))
    }

    /// Moves an entry into another directory, by copying it where the filesystem is another one. There must be nothing yet.
    ///
    /// # Errors
    /// As the system says; what was copied until then is left.
    pub fn carry(&self, name: &OsStr, to: &Self, to_name: &OsStr) -> io::Result<()> {
        match self.rename(name, to, to_name) {
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                self.copy(name, to, to_name)?;
                self.remove(name)
            }
            result => result,
        }
    }

    /// With its owner, mode and time.
    fn copy(&self, name: &OsStr, to: &Self, to_name: &OsStr) -> io::Result<()> {
        let Some(meta) = self.look(name)? else { return Err(io::ErrorKind::NotFound.into()) };
        if meta.is_dir() {
            let (from, (into, _)) = (self.child(name)?, to.make(to_name)?);
            for inner in from.names()? {
                from.copy(&inner, &into, &inner)?;
            }
            fchown(&into.0, Some(meta.uid()), Some(meta.gid()))?;
            return into.finish(meta.permissions().mode(), meta.modified().ok());
        }
        if meta.is_symlink() {
            to.link(to_name, &self.link_target(name)?)?;
            return lchown(to.at(to_name), Some(meta.uid()), Some(meta.gid()));
        }
        let (mut from, mut into) = (self.file(name)?, to.create(to_name)?);
        io::copy(&mut from, &mut into)?;
        fchown(&into, Some(meta.uid()), Some(meta.gid()))?;
        into.set_permissions(meta.permissions())?;
        meta.modified().map_or(Ok(()), |at| into.set_modified(at))
    }

    /// Removes an entry with all in it. Nothing happens when there is none.
    ///
    /// # Errors
    /// When something of it stays.
    pub fn remove(&self, name: &OsStr) -> io::Result<()> {
        let removed = match self.look(name)? {
            None => Ok(()),
            Some(meta) if meta.is_dir() => crate::job::remove_now(&self.at(name)),
            Some(_) => std::fs::remove_file(self.at(name)),
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// Sets its own mode and time.
    ///
    /// # Errors
    /// As the system says.
    pub fn finish(&self, mode: u32, modified: Option<SystemTime>) -> io::Result<()> {
        self.0.set_permissions(Permissions::from_mode(mode & 0o777))?;
        modified.map_or(Ok(()), |at| self.0.set_modified(at))
    }

    /// A path to an entry that is good as long as this is open, for what only takes paths.
    pub fn path(&self, name: &OsStr) -> PathBuf {
        self.at(name)
    }
}
