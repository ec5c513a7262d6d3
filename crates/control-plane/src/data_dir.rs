//! The data directory: chosen, made private, locked against a second daemon.
//!
//! ```text
//! LOCK  address  instance-id  secret.key  bootstrap-token   db/kici.sqlite3   logs/<job>/<epoch>/   objects/
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use kici_engine::ids::InstanceId;

/// The data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// No candidate can be written to.
    #[error("no data directory: {tried} cannot be written; set instance.data_dir (KICI_DATA_DIR)")]
    None {
        /// What was tried and why it failed.
        tried: String,
    },
    /// Another daemon holds it.
    #[error("{} is in use by another kici-orchestrator; stop it or set another instance.data_dir", .0.display())]
    InUse(PathBuf),
    /// A file of it could not be read or written.
    #[error("{}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The stored instance id is damaged.
    #[error("{}: {problem}; delete the file to get a new id", path.display())]
    BadInstanceId {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// An open, locked data directory. The lock lasts as long as this value.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> DataDirError + '_ {
    move |source| DataDirError::Io { path: path.to_owned(), source }
}

/// Where the data directory is looked for when none is configured.
pub fn candidates(state_home: Option<&str>, home: Option<&str>) -> Vec<PathBuf> {
    let state = state_home.map(PathBuf::from).or_else(|| home.map(|home| Path::new(home).join(".local/state")));
    std::iter::once(PathBuf::from("/var/lib/kici/default")).chain(state.map(|dir| dir.join("kici/default"))).collect()
}

impl DataDir {
    /// Opens the first of `candidates` that can be written to, creating it with mode 0700, and locks it.
    ///
    /// # Errors
    /// [`DataDirError`] when none can be written to or another process holds the lock.
    pub fn open(candidates: &[PathBuf]) -> Result<Self, DataDirError> {
        let mut tried = Vec::new();
        for path in candidates {
            match Self::prepare(path) {
                Ok(lock) => {
                    // Windows of doubt about the owner end here: whoever holds the lock owns the directory.
                    return match lock.try_lock() {
                        Ok(()) => Ok(Self { path: path.clone(), _lock: lock }),
                        Err(_) => Err(DataDirError::InUse(path.clone())),
                    };
                }
                Err(error) => tried.push(format!("{} ({error})", path.display())),
            }
        }
        Err(DataDirError::None { tried: tried.join(", ") })
    }

    /// Creates the directory and opens its lock file, which proves that it can be written to.
    fn prepare(path: &Path) -> io::Result<File> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path.join("LOCK"))
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A directory below it, created with mode 0700.
    ///
    /// # Errors
    /// [`DataDirError::Io`] when it cannot be created.
    pub fn sub(&self, name: &str) -> Result<PathBuf, DataDirError> {
        let path = self.path.join(name);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(io_at(&path))?;
        Ok(path)
    }

    /// The id of this instance: the configured one, else the stored one, else `fresh`, which is then stored.
    ///
    /// # Errors
    /// [`DataDirError`] when the file is damaged or cannot be written.
    pub fn instance_id(&self, configured: Option<&str>, fresh: &str) -> Result<InstanceId, DataDirError> {
        let path = self.path.join("instance-id");
        let text = match (configured, fs::read_to_string(&path)) {
            (Some(text), _) => text.to_owned(),
            (None, Ok(text)) => text.trim().to_owned(),
            (None, Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                self.write_private("instance-id", fresh.as_bytes())?;
                fresh.to_owned()
            }
            (None, Err(source)) => return Err(DataDirError::Io { path, source }),
        };
        InstanceId::new(text).map_err(|error| DataDirError::BadInstanceId { path, problem: error.to_string() })
    }

    /// Reads a file of the directory; `None` when it does not exist.
    ///
    /// # Errors
    /// [`DataDirError::Io`] on any other failure.
    pub fn read(&self, name: &str) -> Result<Option<String>, DataDirError> {
        let path = self.path.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(DataDirError::Io { path, source }),
        }
    }

    /// Writes a file that only the owner may read, durably and whole or not at all.
    ///
    /// # Errors
    /// [`DataDirError::Io`] when it cannot be written.
    pub fn write_private(&self, name: &str, contents: &[u8]) -> Result<PathBuf, DataDirError> {
        let path = self.path.join(name);
        let partial = self.path.join(format!("{name}.partial"));
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&partial)?;
            // An older partial file may have been left with another mode.
            file.set_permissions(fs::Permissions::from_mode(0o600))?;
            file.write_all(contents)?;
            file.sync_all()?;
            fs::rename(&partial, &path)?;
            File::open(&self.path)?.sync_all()
        };
        write().map_err(io_at(&path))?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_private_and_has_one_owner() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b");
        let dir = DataDir::open(std::slice::from_ref(&path)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(matches!(DataDir::open(std::slice::from_ref(&path)), Err(DataDirError::InUse(_))));
        drop(dir);
        assert!(DataDir::open(&[path]).is_ok());
    }

    #[test]
    fn the_instance_id_is_kept() {
        let root = tempfile::tempdir().unwrap();
        let dir = DataDir::open(&[root.path().to_owned()]).unwrap();
        assert_eq!(dir.instance_id(None, "node-1").unwrap().as_str(), "node-1");
        assert_eq!(dir.instance_id(None, "node-2").unwrap().as_str(), "node-1");
        assert_eq!(dir.instance_id(Some("mine"), "node-2").unwrap().as_str(), "mine");
        let mode = fs::metadata(root.path().join("instance-id")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named_with_the_reason() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let error = DataDir::open(&[file.join("x")]).unwrap_err().to_string();
        assert!(error.contains("file/x") && error.contains("KICI_DATA_DIR"), "{error}");
    }
}
