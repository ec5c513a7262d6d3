//! SSH keys of a checkout: in files of their own, for as short as can be, with a list of known hosts of their own, since the one
//! of the host would refuse a port that something else was found at before.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret, SecretString};

/// How the host proves that it is the right one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKeys {
    /// The key that it shows first is taken.
    AcceptNew,
    /// It must be one of these lines of a `known_hosts` file (sshd(8)).
    Pinned(String),
}

/// A key to reach a repository with. `Debug` does not show it.
#[derive(Clone, Debug)]
pub struct SshKey {
    /// The private key as OpenSSH writes it.
    pub private_key: SecretString,
    /// Who may be at the other end.
    pub hosts: HostKeys,
}

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SshError {
    /// Nothing is pinned.
    #[error("the host keys are to be pinned and none is given; give the lines of known_hosts, or accept new ones")]
    NothingPinned,
    /// A file.
    #[error("the key cannot be kept in {dir}: {error}")]
    Io {
        /// Where.
        dir: PathBuf,
        /// Why not.
        error: io::Error,
    },
}

/// The files of one key. Dropping it deletes them.
#[derive(Debug)]
pub struct KeyFiles {
    dir: PathBuf,
    pinned: bool,
    has_key: bool,
}

impl KeyFiles {
    /// Writes the files into a new directory `dir`; without a key they are an empty list of known hosts.
    ///
    /// # Errors
    /// [`SshError`]; then nothing is left.
    pub fn write(dir: &Path, key: Option<&SshKey>) -> Result<Self, SshError> {
        let known = match key.map(|key| &key.hosts) {
            Some(HostKeys::Pinned(lines)) if lines.trim().is_empty() => return Err(SshError::NothingPinned),
            Some(HostKeys::Pinned(lines)) => Some(lines),
            Some(HostKeys::AcceptNew) | None => None,
        };
        let failed = |error| SshError::Io { dir: dir.to_owned(), error };
        fs::DirBuilder::new().mode(0o700).create(dir).map_err(failed)?;
        let files = Self { dir: dir.to_owned(), pinned: known.is_some(), has_key: key.is_some() };
        files.file("known_hosts", known.map_or("", String::as_str)).map_err(failed)?;
        if let Some(key) = key {
            files.file("key", key.private_key.expose_secret()).map_err(failed)?;
        }
        Ok(files)
    }

    fn file(&self, name: &str, text: &str) -> io::Result<()> {
        let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(self.dir.join(name))?;
        file.write_all(text.as_bytes())?;
        // OpenSSH refuses a key whose last line does not end.
        if text.is_empty() || text.ends_with('\n') { Ok(()) } else { file.write_all(b"\n") }
    }

    /// What `GIT_SSH_COMMAND` is set to; git gives it to a shell.
    pub fn command(&self) -> String {
        let path = |name: &str| {
            let path = self.dir.join(name).display().to_string();
            format!("'{}'", path.replace('\'', r"'\''"))
        };
        // Not that of the user, whose home steps may write: it names commands to run.
        let system = Path::new("/etc/ssh/ssh_config");
        let config = if system.is_file() { system } else { Path::new("/dev/null") }.display();
        let checking = if self.pinned { "yes" } else { "accept-new" };
        let mut command = format!(
            "ssh -F {config} -o BatchMode=yes -o StrictHostKeyChecking={checking} -o UserKnownHostsFile={} -o GlobalKnownHostsFile=/dev/null",
            path("known_hosts")
        );
        if self.has_key {
            command.push_str(&format!(" -o IdentitiesOnly=yes -o IdentityAgent=none -i {}", path("key")));
        }
        command
    }
}

impl Drop for KeyFiles {
    fn drop(&mut self) {
        // The directory of the job, which it lies in, goes at the latest with the job.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn key(hosts: HostKeys) -> SshKey {
        SshKey { private_key: "-----BEGIN\nhush\n-----END".into(), hosts }
    }

    #[test]
    fn a_key_lies_in_private_files_and_is_gone_with_them() {
        let parent = tempfile::tempdir().expect("a directory");
        let dir = parent.path().join("it's here");
        let files = KeyFiles::write(&dir, Some(&key(HostKeys::AcceptNew))).expect("written");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&dir.join("key")), mode(&dir.join("known_hosts"))), (0o700, 0o600, 0o600));
        assert_eq!(fs::read_to_string(dir.join("key")).expect("read"), "-----BEGIN\nhush\n-----END\n");
        let command = files.command();
        for part in [
            "ssh -F /",
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "StrictHostKeyChecking=accept-new",
            r"it'\''s here/key'",
        ] {
            assert!(command.contains(part), "{command}");
        }
        assert!(!command.contains("hush") && !format!("{files:?}").contains("hush"));
        drop(files);
        assert!(!dir.exists());
    }

    #[test]
    fn pinned_hosts_are_strict_and_must_be_given() {
        let parent = tempfile::tempdir().expect("a directory");
        let dir = parent.path().join("k");
        let error = KeyFiles::write(&dir, Some(&key(HostKeys::Pinned(" \n".into())))).expect_err("nothing pinned");
        assert!(matches!(error, SshError::NothingPinned) && !dir.exists());
        let files = KeyFiles::write(&dir, Some(&key(HostKeys::Pinned("h ssh-ed25519 AAAA".into())))).expect("written");
        assert!(files.command().contains("StrictHostKeyChecking=yes"));
        assert_eq!(fs::read_to_string(dir.join("known_hosts")).expect("read"), "h ssh-ed25519 AAAA\n");
    }

    #[test]
    fn without_a_key_only_the_known_hosts_are_of_its_own() {
        let parent = tempfile::tempdir().expect("a directory");
        let files = KeyFiles::write(&parent.path().join("k"), None).expect("written");
        assert!(!files.command().contains(" -i ") && files.command().contains("known_hosts"));
    }
}
