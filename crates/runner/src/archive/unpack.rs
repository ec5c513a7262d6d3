//! Unpacking, into an empty directory that nobody else knows.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kici_sys::init::tar::{self, BadTar, Entry, Kind};

use super::dir::is_no_directory;
use super::{ArchiveError, Dir, Limits, Links, shown, stays_inside};

/// Largest window of the decoder: 128 MiB, zstd's own limit for what is not asked for on purpose.
const WINDOW_LOG: u32 = 27;
/// Deepest directory.
const MAX_DEPTH: usize = 160;
/// Directories whose mode and time are set at the end.
const MAX_DIRS: usize = 200_000;

/// What was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Files and links.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl From<BadTar> for ArchiveError {
    fn from(bad: BadTar) -> Self {
        match bad {
            BadTar::Refused(text) => Self::Refused(text),
            BadTar::Io(error) => Self::Io { what: "the archive".to_owned(), error },
        }
    }
}

/// Unpacks an archive into `into`, which must be empty, and reads `input` to its end.
///
/// # Errors
/// [`ArchiveError`]; what is in `into` must then not be used.
pub fn unpack(input: impl Read, into: &Dir, limits: Limits, links: Links) -> Result<Unpacked, ArchiveError> {
    let stream = || ArchiveError::io("the archive");
    let mut decoder = zstd::stream::read::Decoder::new(input).map_err(stream())?;
    decoder.window_log_max(WINDOW_LOG).map_err(stream())?;
    let mut unpacker =
        Unpacker { into, limits, links, done: Unpacked::default(), entries: 0, later: Vec::new(), dirs: Vec::new() };
    while let Some(entry) = tar::read(&mut decoder)? {
        unpacker.entry(&entry, &mut decoder)?;
    }
    // What is behind the end has to be nothing, or it could be anything.
    let mut block = [0; tar::BLOCK];
    loop {
        match decoder.read(&mut block).map_err(stream())? {
            0 => break,
            n if block[..n].iter().all(|byte| *byte == 0) => {}
            _ => return Err(ArchiveError::Refused("something follows its end".to_owned())),
        }
    }
    unpacker.finish()
}

struct Unpacker<'a> {
    into: &'a Dir,
    limits: Limits,
    links: Links,
    done: Unpacked,
    entries: u64,
    /// Links are made when all files are there, so that no file can go through one.
    later: Vec<(Vec<OsString>, OsString)>,
    /// Modes and times of directories, likewise.
    dirs: Vec<(Vec<OsString>, u32, u64)>,
}

impl Unpacker<'_> {
    fn entry(&mut self, entry: &Entry, input: &mut impl Read) -> Result<(), ArchiveError> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(ArchiveError::Refused(format!("it holds more than {} entries", self.limits.entries)));
        }
        let parts = parts(&entry.name)?;
        match entry.kind {
            Kind::Dir => {
                self.dir(&parts, entry)?;
                if self.dirs.len() < MAX_DIRS {
                    let parts = parts.iter().map(|part| OsStr::from_bytes(part).to_owned()).collect();
                    self.dirs.push((parts, entry.mode | 0o700, entry.modified));
                }
            }
            Kind::Link => {
                let target = &entry.target;
                if target.is_empty() || target.contains(&0) {
                    return Err(refused(&entry.name, "is a link to nothing"));
                }
                if self.links == Links::Inside && !stays_inside(&parts, target) {
                    return Err(refused(&entry.name, "is a link that leaves the directory"));
                }
                let at = parts.iter().map(|part| OsStr::from_bytes(part).to_owned()).collect();
                self.later.push((at, OsStr::from_bytes(target).to_owned()));
                self.done.files += 1;
            }
            Kind::File => self.file(&parts, entry, input)?,
        }
        Ok(())
    }

    fn dir(&self, parts: &[&[u8]], entry: &Entry) -> Result<Option<Dir>, ArchiveError> {
        let mut dir: Option<Dir> = None;
        for part in parts {
            let here = dir.as_ref().unwrap_or(self.into);
            match here.make(OsStr::from_bytes(part)) {
                Ok((inner, _)) => dir = Some(inner),
                Err(error) if is_no_directory(&error) => {
                    return Err(refused(&entry.name, "goes through something that is no directory"));
                }
                Err(error) => return Err(ArchiveError::io(shown(&entry.name))(error)),
            }
        }
        Ok(dir)
    }

    fn file(&mut self, parts: &[&[u8]], entry: &Entry, input: &mut impl Read) -> Result<(), ArchiveError> {
        let left = self.limits.bytes - self.done.bytes;
        if entry.size > left {
            return Err(ArchiveError::Refused(format!("it holds more than {} bytes", self.limits.bytes)));
        }
        let Some((name, above)) = parts.split_last() else { return Err(refused(&entry.name, "has no name")) };
        let dir = self.dir(above, entry)?;
        let dir = dir.as_ref().unwrap_or(self.into);
        let io = || ArchiveError::io(shown(&entry.name));
        let mut file = match dir.create(OsStr::from_bytes(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(refused(&entry.name, "comes twice"));
            }
            Err(error) => return Err(io()(error)),
        };
        let copied = io::copy(&mut input.take(entry.size), &mut file).map_err(io())?;
        if copied < entry.size {
            return Err(ArchiveError::Refused("it ends in the middle".to_owned()));
        }
        tar::skip_pad(input, entry.size)?;
        file.set_permissions(std::fs::Permissions::from_mode(entry.mode)).map_err(io())?;
        if let Some(at) = time(entry.modified) {
            file.set_modified(at).map_err(io())?;
        }
        self.done.files += 1;
        self.done.bytes += entry.size;
        Ok(())
    }

    fn finish(self) -> Result<Unpacked, ArchiveError> {
        for (at, target) in &self.later {
            let name = at.join(OsStr::new("/"));
            let io = || ArchiveError::io(shown(name.as_bytes()));
            let parts: Vec<&[u8]> = at.iter().map(|part| part.as_bytes()).collect();
            let Some((last, above)) = parts.split_last() else { continue };
            let entry = Entry {
                name: name.as_bytes().to_vec(),
                kind: Kind::Link,
                target: Vec::new(),
                mode: 0,
                modified: 0,
                size: 0,
            };
            let dir = self.dir(above, &entry)?;
            match dir.as_ref().unwrap_or(self.into).link(OsStr::from_bytes(last), target) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(refused(name.as_bytes(), "is a link and something else, or comes twice"));
                }
                result => result.map_err(io())?,
            }
        }
        // The deepest first: to set the time of one changes nothing above it, but to make something in it does.
        for (at, mode, modified) in self.dirs.iter().rev() {
            let mut dir: Option<Dir> = None;
            for part in at {
                let here = dir.as_ref().unwrap_or(self.into);
                dir = Some(here.child(part).map_err(ArchiveError::io(shown(part.as_bytes())))?);
            }
            if let Some(dir) = dir {
                dir.finish(*mode, time(*modified)).map_err(ArchiveError::io("a directory of the archive"))?;
            }
        }
        Ok(self.done)
    }
}

fn time(seconds: u64) -> Option<SystemTime> {
    // Beyond what file systems keep.
    (seconds < 1 << 33).then(|| UNIX_EPOCH.checked_add(Duration::from_secs(seconds))).flatten()
}

fn refused(name: &[u8], what: &str) -> ArchiveError {
    ArchiveError::Refused(format!("`{}` {what}", shown(name)))
}

/// The parts of a name, at least one.
pub(super) fn parts(name: &[u8]) -> Result<Vec<&[u8]>, ArchiveError> {
    if name.starts_with(b"/") {
        return Err(refused(name, "is absolute"));
    }
    let mut parts = Vec::new();
    for part in name.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(refused(name, "climbs out")),
            part if part.contains(&0) => return Err(refused(name, "holds a NUL")),
            part => parts.push(part),
        }
    }
    if parts.is_empty() || parts.len() > MAX_DEPTH {
        return Err(refused(name, "has no name, or too many parts"));
    }
    Ok(parts)
}
