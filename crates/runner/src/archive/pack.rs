//! Packing.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::UNIX_EPOCH;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use kici_sys::init::tar::{self, Entry, Kind, MAX_NAME};

use super::{ArchiveError, Dir, Limits, Links, shown, stays_inside};

/// zstd's own default.
pub(super) const LEVEL: i32 = 3;
/// Entries that are looked at to find those that match.
const MAX_LOOKED_AT: u64 = 2_000_000;
/// Deepest directory.
const MAX_DEPTH: usize = 128;

/// Something to be packed, with all that is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<'a> {
    /// Where its path starts.
    pub root: &'a Path,
    /// Its parts, between slashes.
    pub path: String,
    /// What its name begins with in the archive, without a final slash; may be empty.
    pub anchor: &'static str,
}

/// What an archive holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Files and links.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Items of which nothing is there.
    pub missing: Vec<String>,
    /// Things that are neither files nor directories nor links, and were left out.
    pub left_out: u64,
}

/// Packs the items, in their order, into `out`.
///
/// # Errors
/// [`ArchiveError`]; what was written then is no archive.
pub fn pack(items: &[Item<'_>], out: impl Write, limits: Limits, links: Links) -> Result<Packed, ArchiveError> {
    let stream = || ArchiveError::io("the archive");
    let encoder = zstd::stream::write::Encoder::new(out, LEVEL).map_err(stream())?;
    let mut packer = Packer { out: encoder, packed: Packed::default(), entries: 0, limits, links };
    for item in items {
        packer.item(item)?;
    }
    tar::end(&mut packer.out).map_err(stream())?;
    let mut out = packer.out.finish().map_err(stream())?;
    out.flush().map_err(stream())?;
    Ok(packer.packed)
}

struct Packer<W: Write> {
    out: W,
    packed: Packed,
    entries: u64,
    limits: Limits,
    links: Links,
}

impl<W: Write> Packer<W> {
    fn item(&mut self, item: &Item<'_>) -> Result<(), ArchiveError> {
        let mut dir = Dir::open(item.root).map_err(ArchiveError::io(item.root.display().to_string()))?;
        let mut parts = item.path.split('/').peekable();
        while let Some(part) = parts.next() {
            let name = OsStr::new(part);
            if parts.peek().is_some() {
                dir = match dir.child(name) {
                    Ok(dir) => dir,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        self.packed.missing.push(item.path.clone());
                        return Ok(());
                    }
                    Err(error) => {
                        let text = format!("`{}`: `{part}` cannot be entered: {error}", item.path);
                        return Err(ArchiveError::Unfit(text));
                    }
                };
                continue;
            }
            let at = match item.anchor {
                "" => item.path.clone().into_bytes(),
                anchor => format!("{anchor}/{}", item.path).into_bytes(),
            };
            let found = dir.look(name).map_err(ArchiveError::io(item.path.clone()))?;
            match found {
                Some(meta) => self.entry(&dir, name, at, &meta, 0)?,
                None => self.packed.missing.push(item.path.clone()),
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        dir: &Dir,
        name: &OsStr,
        at: Vec<u8>,
        meta: &Metadata,
        depth: usize,
    ) -> Result<(), ArchiveError> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            let most = self.limits.entries;
            return Err(ArchiveError::TooMuch(format!("there are more than {most} files and directories to keep")));
        }
        if at.len() > MAX_NAME - 1 || depth > MAX_DEPTH {
            return Err(ArchiveError::Unfit(format!("`{}` is too deep", shown(&at))));
        }
        let io = |at: &[u8]| ArchiveError::io(shown(at));
        let modified = meta.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let mut entry = Entry {
            name: at.clone(),
            kind: Kind::File,
            target: Vec::new(),
            mode: meta.permissions().mode() & 0o777,
            modified: modified.map_or(0, |since| since.as_secs()),
            size: 0,
        };
        if meta.is_dir() {
            entry.kind = Kind::Dir;
            entry.name.push(b'/');
            tar::write(&mut self.out, &entry).map_err(io(&at))?;
            let inner = match dir.child(name) {
                Ok(inner) => inner,
                // It went meanwhile, as caches in use do.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(io(&at)(error)),
            };
            for name in inner.names().map_err(io(&at))? {
                let Some(meta) = inner.look(&name).map_err(io(&at))? else { continue };
                let mut below = at.clone();
                below.push(b'/');
                below.extend_from_slice(name.as_bytes());
                self.entry(&inner, &name, below, &meta, depth + 1)?;
            }
            return Ok(());
        }
        if meta.is_symlink() {
            entry.kind = Kind::Link;
            entry.target = dir.link_target(name).map_err(io(&at))?.into_vec();
            entry.mode = 0o777;
            let parts: Vec<&[u8]> = at.split(|b| *b == b'/').collect();
            if self.links == Links::Inside && !stays_inside(&parts, &entry.target) {
                let text = format!("`{}` is a link that leaves the workspace; copy what it points to", shown(&at));
                return Err(ArchiveError::Unfit(text));
            }
            if entry.target.len() > MAX_NAME - 1 {
                return Err(ArchiveError::Unfit(format!("the link `{}` is too long", shown(&at))));
            }
            self.packed.files += 1;
            return tar::write(&mut self.out, &entry).map_err(io(&at));
        }
        if !meta.is_file() {
            self.packed.left_out += 1;
            return Ok(());
        }
        let file = match dir.file(name) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(io(&at)(error)),
        };
        // What was opened counts, not what was looked at.
        let meta = file.metadata().map_err(io(&at))?;
        // For another user only what that one could read, whoever put it there.
        let readable = self.limits.reader.is_none_or(|uid| meta.uid() == uid || meta.mode() & 0o004 != 0);
        if !meta.is_file() || !readable {
            self.packed.left_out += 1;
            return Ok(());
        }
        entry.size = meta.len();
        self.packed.files += 1;
        self.packed.bytes += entry.size;
        if self.packed.bytes > self.limits.bytes {
            let most = self.limits.bytes;
            return Err(ArchiveError::TooMuch(format!("the files have more than {most} bytes, unpacked")));
        }
        tar::write(&mut self.out, &entry).map_err(io(&at))?;
        let copied = io::copy(&mut file.take(entry.size), &mut self.out).map_err(io(&at))?;
        if copied < entry.size {
            return Err(ArchiveError::Unfit(format!("`{}` became shorter while it was packed", shown(&at))));
        }
        tar::pad(&mut self.out, entry.size).map_err(io(&at))
    }
}

/// Paths and globs of a workflow.
#[derive(Clone, Debug)]
pub struct Patterns {
    /// Those that are paths.
    pub literal: Vec<String>,
    globs: GlobSet,
}

impl Patterns {
    /// Of these texts.
    ///
    /// # Errors
    /// [`ArchiveError::Unfit`] for a glob that is none.
    pub fn of(texts: &[String]) -> Result<Self, ArchiveError> {
        let is_glob = |text: &&String| text.contains(['*', '?', '[', '{', '\\']);
        let mut globs = GlobSetBuilder::new();
        for text in texts.iter().filter(is_glob) {
            let glob = GlobBuilder::new(text).literal_separator(true).backslash_escape(true).build();
            globs.add(glob.map_err(|error| ArchiveError::Unfit(error.to_string()))?);
        }
        let globs = globs.build().map_err(|error| ArchiveError::Unfit(error.to_string()))?;
        Ok(Self { literal: texts.iter().filter(|text| !is_glob(text)).cloned().collect(), globs })
    }

    /// Whether files have to be looked for.
    pub fn has_globs(&self) -> bool {
        !self.globs.is_empty()
    }

    /// Whether a glob matches a path.
    pub fn matches(&self, path: &str) -> bool {
        self.globs.is_match(path)
    }

    /// Sorted, without what lies in a directory that is there too.
    pub fn outermost(mut found: Vec<String>) -> Vec<String> {
        // In the order of their parts a directory stands right before what is in it.
        found.sort_by(|a, b| a.split('/').cmp(b.split('/')));
        let mut kept: Vec<String> = Vec::new();
        for path in found {
            if !kept.last().is_some_and(|dir| is_in(&path, dir)) {
                kept.push(path);
            }
        }
        kept
    }
}

/// Whether a path is a directory or lies in it.
pub fn is_in(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The files and directories below `root` that one of the patterns matches, sorted; what is in a directory that matches is not
/// listed apart. `.git` is left out unless a pattern names it.
///
/// # Errors
/// [`ArchiveError`].
pub fn matching(root: &Path, patterns: &Patterns) -> Result<Vec<String>, ArchiveError> {
    let mut found = patterns.literal.clone();
    if patterns.has_globs() {
        let root = Dir::open(root).map_err(ArchiveError::io(root.display().to_string()))?;
        let mut looked_at = 0;
        search(&root, &mut String::new(), &patterns.globs, &mut found, &mut looked_at)?;
    }
    Ok(Patterns::outermost(found))
}

fn search(
    dir: &Dir,
    at: &mut String,
    set: &GlobSet,
    found: &mut Vec<String>,
    looked_at: &mut u64,
) -> Result<(), ArchiveError> {
    let io = |at: &str| ArchiveError::io(at.to_owned());
    for name in dir.names().map_err(io(at))? {
        *looked_at += 1;
        if *looked_at > MAX_LOOKED_AT || at.split('/').count() > MAX_DEPTH {
            return Err(ArchiveError::TooMuch("there are too many files to look for a pattern".to_owned()));
        }
        // What is not text matches no pattern.
        let Some(text) = name.to_str() else { continue };
        if at.is_empty() && text == ".git" {
            continue;
        }
        let before = at.len();
        if !at.is_empty() {
            at.push('/');
        }
        at.push_str(text);
        let meta = dir.look(&name).map_err(io(at))?;
        if set.is_match(at.as_str()) {
            found.push(at.clone());
        } else if meta.is_some_and(|meta| meta.is_dir()) {
            match dir.child(&name) {
                Ok(inner) => search(&inner, at, set, found, looked_at)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(io(at)(error)),
            }
        }
        at.truncate(before);
    }
    Ok(())
}
