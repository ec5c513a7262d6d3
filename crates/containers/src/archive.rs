//! Trees of files as tar streams, to be put into containers. Links are taken as they are and never followed.

use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use bytes::Bytes;
use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Pieces that may wait for the engine.
const PIECES: usize = 8;
const PIECE_BYTES: usize = 256 * 1024;
/// O_NOFOLLOW | O_NONBLOCK on Linux (open(2)).
#[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
const CAREFULLY: i32 = 0o100_000 | 0o4_000;
#[cfg(not(any(target_arch = "aarch64", target_arch = "arm")))]
const CAREFULLY: i32 = 0o400_000 | 0o4_000;

/// Who owns what is put in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

struct Pipe {
    to: mpsc::Sender<io::Result<Bytes>>,
    buffer: Vec<u8>,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.buffer).into();
        self.to.blocking_send(Ok(piece)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// The tree below `root`, the directory itself included and called `name`, as an archive; it is read while it is sent. What is
/// neither a file, a directory nor a link is left out.
pub(crate) fn tree(root: &Path, name: &str, owner: Owner) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (to, from) = mpsc::channel(PIECES);
    let (root, name) = (root.to_owned(), name.to_owned());
    tokio::task::spawn_blocking(move || {
        let pipe = Pipe { to: to.clone(), buffer: Vec::new() };
        if let Err(error) = write_tree(pipe, &root, &name, owner) {
            // The engine gets a broken body, and refuses it.
            let _ = to.blocking_send(Err(error));
        }
    });
    ReceiverStream::new(from)
}

fn write_tree(to: impl Write, root: &Path, name: &str, owner: Owner) -> io::Result<()> {
    let mut archive = tar::Builder::new(to);
    archive.mode(tar::HeaderMode::Complete);
    add(&mut archive, root, Path::new(name), owner)?;
    let mut inner = archive.into_inner()?;
    inner.flush()
}

fn add(archive: &mut tar::Builder<impl Write>, path: &Path, name: &Path, owner: Owner) -> io::Result<()> {
    let meta = path.symlink_metadata()?;
    let mut header = tar::Header::new_gnu();
    header.set_mode(meta.permissions().mode() & 0o7777);
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
    header.set_uid(owner.uid.into());
    header.set_gid(owner.gid.into());
    header.set_size(0);
    let kind = meta.file_type();
    if kind.is_symlink() {
        header.set_entry_type(tar::EntryType::Symlink);
        return archive.append_link(&mut header, name, std::fs::read_link(path)?);
    }
    if kind.is_dir() {
        header.set_entry_type(tar::EntryType::Directory);
        archive.append_data(&mut header, name, io::empty())?;
        let mut entries: Vec<_> = std::fs::read_dir(path)?.collect::<io::Result<_>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            add(archive, &entry.path(), &name.join(entry.file_name()), owner)?;
        }
        return Ok(());
    }
    if !kind.is_file() {
        return Ok(());
    }
    let file = std::fs::File::options().read(true).custom_flags(CAREFULLY).open(path)?;
    let size = file.metadata()?.len();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(size);
    // A file that grows or shrinks meanwhile must not break what follows it.
    archive.append_data(&mut header, name, io::Read::take(io::Read::chain(file, io::repeat(0)), size))
}

/// An archive with one file, executable for everybody.
///
/// # Errors
/// When the name is too long.
pub fn single_file(name: &str, content: &[u8]) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o755);
    header.set_size(content.len() as u64);
    header.set_entry_type(tar::EntryType::Regular);
    archive.append_data(&mut header, name, content)?;
    archive.into_inner()
}

/// The text of the first plain file of an archive, at most 1 MiB; empty when there is none.
///
/// # Errors
/// When it is no archive.
pub fn first_text(archive: &[u8]) -> io::Result<String> {
    const MOST: u64 = 1024 * 1024;
    let mut archive = tar::Archive::new(archive);
    for entry in archive.entries()? {
        let entry = entry?;
        if entry.header().entry_type().is_file() {
            let mut bytes = Vec::new();
            io::Read::read_to_end(&mut io::Read::take(entry, MOST), &mut bytes)?;
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn links_stay_links_and_everything_has_its_new_owner() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path("w/a")).expect("made");
        std::fs::write(path("secret"), "secret").expect("written");
        std::fs::write(path("w/a/run"), "x").expect("written");
        std::fs::set_permissions(path("w/a/run"), std::fs::Permissions::from_mode(0o755)).expect("set");
        std::os::unix::fs::symlink(path("secret"), path("w/out")).expect("made");
        std::os::unix::fs::symlink("a", path("w/in")).expect("made");
        let _socket = std::os::unix::net::UnixListener::bind(path("w/socket")).expect("bound");
        let long = "n".repeat(180);
        std::fs::write(path("w/a").join(&long), "").expect("written");
        let mut bytes = Vec::new();
        write_tree(&mut bytes, &path("w"), ".", Owner { uid: 1000, gid: 7 }).expect("made");
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut found = Vec::new();
        for entry in archive.entries().expect("an archive") {
            let mut entry = entry.expect("an entry");
            let mut content = String::new();
            entry.read_to_string(&mut content).expect("read");
            let header = entry.header();
            assert_eq!((header.uid().expect("one"), header.gid().expect("one")), (1000, 7));
            let name = entry.path().expect("one").display().to_string();
            let link = entry.link_name().expect("readable").map(|link| link.display().to_string());
            found.push((name, header.mode().expect("one") & 0o111 != 0, content, link));
        }
        let secret = path("secret").display().to_string();
        let name = |entry: &(String, bool, String, Option<String>)| {
            entry.0.trim_start_matches('.').trim_matches('/').to_owned()
        };
        assert_eq!(found.iter().map(name).collect::<Vec<_>>(), ["", "a", &format!("a/{long}"), "a/run", "in", "out"]);
        assert_eq!(found[3].2, "x");
        assert!(found[3].1, "it stays executable");
        assert_eq!((found[5].2.as_str(), found[5].3.as_deref()), ("", Some(secret.as_str())));
        assert!(!String::from_utf8_lossy(&bytes).contains("secretsecret"));
    }
}
