//! Unpacked files go to where they belong. Steps may run meanwhile and may write there: every part of a path is opened by itself and
//! links are not followed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::archive::{ArchiveError, Dir, is_no_directory};
use crate::confine::JobConfinement;

/// Something that takes the place of what is at `to` below `root`.
#[derive(Clone, Debug)]
pub(super) struct Move {
    pub(super) from: PathBuf,
    pub(super) root: PathBuf,
    /// Its parts, between slashes.
    pub(super) to: String,
}

fn at(what: &str) -> impl FnOnce(io::Error) -> ArchiveError + '_ {
    move |error| ArchiveError::Io { what: what.to_owned(), error }
}

/// The directory at `parts`, made where it is missing and then given to the steps.
fn way(root: &Path, parts: &[&str], confine: &JobConfinement) -> Result<Dir, ArchiveError> {
    let mut dir = Dir::open(root).map_err(at(&root.display().to_string()))?;
    for part in parts {
        let name = OsStr::new(part);
        let (inner, made) = dir.make(name).map_err(|error| match is_no_directory(&error) {
            true => ArchiveError::Unfit(format!("`{part}` is a link or a file, and is not gone through")),
            false => at(part)(error),
        })?;
        if made {
            confine.give(&dir.path(name)).map_err(at(part))?;
        }
        dir = inner;
    }
    Ok(dir)
}

fn aside(name: &OsStr, what: &str) -> Result<OsString, ArchiveError> {
    let mut id = [0_u8; 6];
    getrandom::fill(&mut id).map_err(|error| at("randomness")(io::Error::other(error)))?;
    // Short, whatever the name is: names have at most 255 bytes.
    let head: Vec<u8> = name.as_bytes().iter().copied().take(100).collect();
    let mut aside = OsString::from(".");
    aside.push(OsStr::from_bytes(&head));
    aside.push(format!(".kici-{what}-{}", hex::encode(id)));
    Ok(aside)
}

/// Replaces what is at each path, and nothing else: what is new is put beside it first, so that it comes at once.
pub(super) fn replace(moves: &[Move], confine: &JobConfinement) -> Result<(), ArchiveError> {
    for one in moves {
        // It is not the steps' yet, so nothing in it can be swapped for a link.
        confine.give_all(&one.from).map_err(at(&one.to))?;
        let parts: Vec<&str> = one.to.split('/').collect();
        let Some((name, above)) = parts.split_last() else { continue };
        let (name, dir) = (OsStr::new(name), way(&one.root, above, confine)?);
        let (parent, from) = (one.from.parent(), one.from.file_name());
        let (Some(parent), Some(from)) = (parent, from) else { continue };
        let parent = Dir::open(parent).map_err(at(&one.to))?;
        let (fresh, old) = (aside(name, "new")?, aside(name, "old")?);
        let placed = (|| {
            parent.carry(from, &dir, &fresh)?;
            if dir.look(name)?.is_some() {
                dir.rename(name, &dir, &old)?;
            }
            dir.rename(&fresh, &dir, name)
        })();
        let cleared = dir.remove(&fresh).and(dir.remove(&old));
        placed.and(cleared).map_err(at(&one.to))?;
    }
    Ok(())
}

/// Puts all that is in `from` into the directory at `into` below `root`: directories are joined, files replaced.
pub(super) fn merge(from: &Path, root: &Path, into: &str, confine: &JobConfinement) -> Result<(), ArchiveError> {
    let parts: Vec<&str> = into.split('/').filter(|part| !part.is_empty()).collect();
    let (from, into) = (Dir::open(from).map_err(at("the archive"))?, way(root, &parts, confine)?);
    join(&from, &into, confine)
}

fn join(from: &Dir, into: &Dir, confine: &JobConfinement) -> Result<(), ArchiveError> {
    for name in from.names().map_err(at("the archive"))? {
        let shown = name.to_string_lossy().into_owned();
        let io = || at(&shown);
        let Some(meta) = from.look(&name).map_err(io())? else { continue };
        let there = into.look(&name).map_err(io())?;
        if meta.is_dir() && there.as_ref().is_some_and(std::fs::Metadata::is_dir) {
            let inner = into.child(&name).map_err(io())?;
            join(&from.child(&name).map_err(io())?, &inner, confine)?;
            continue;
        }
        if there.as_ref().is_some_and(std::fs::Metadata::is_dir) {
            return Err(ArchiveError::Unfit(format!("`{shown}` is a directory here and a file in the artifact")));
        }
        confine.give_all(&from.path(&name)).map_err(io())?;
        let fresh = aside(&name, "new")?;
        let placed = from.carry(&name, into, &fresh).and_then(|()| {
            if meta.is_dir() && there.is_some() {
                into.remove(&name)?;
            }
            into.rename(&fresh, into, &name)
        });
        placed.and(into.remove(&fresh)).map_err(io())?;
    }
    Ok(())
}
