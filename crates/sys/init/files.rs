//! Files of the job for its agent: which there are, an archive of some, and new ones put in their places. It runs as a command of a
//! step does, with the rights of one, and the agent believes nothing that comes out of it.
//!
//! It is called with a verb and the path of a file with the fields, NUL between them, which is removed when it is read. Links on the
//! way to a path are not followed: what a job keeps is what its workflow names. A step that swaps one meanwhile only fools itself.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use crate::first::CAREFULLY;
use crate::tar::{self, Entry, Kind, MAX_NAME};

/// What the program is called with.
pub const WORD: &str = "files";
/// Deepest directory.
const MAX_DEPTH: usize = 128;
/// Bytes that are written at once.
const PIECE: usize = 128 * 1024;
/// Exit code of words that are none.
const USAGE: u8 = 2;

pub fn run(words: Vec<OsString>) -> ExitCode {
    crate::sys::hide();
    let [verb, list] = words.as_slice() else { return ExitCode::from(USAGE) };
    let done = fields(Path::new(list)).and_then(|fields| {
        let mut out = BufWriter::with_capacity(PIECE, io::stdout().lock());
        match (verb.to_str().unwrap_or_default(), fields.as_slice()) {
            ("look", pairs) => look(pairs, &mut out)?,
            ("list", [root]) => list_all(Path::new(root), &mut Vec::new(), 0, &mut out)?,
            ("pack", triples) => pack(triples, &mut out)?,
            ("replace", [stage, triples @ ..]) => staged(stage, |mark| replace(Path::new(stage), triples, mark))?,
            ("join", [stage, root, into]) => staged(stage, |mark| {
                let into = way(Path::new(root), into)?;
                join(Path::new(stage), &into, mark)
            })?,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        out.flush()
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn fields(list: &Path) -> io::Result<Vec<OsString>> {
    let text = fs::read(list)?;
    let _ = fs::remove_file(list);
    Ok(text.split(|byte| *byte == 0).map(|field| OsString::from_vec(field.to_vec())).collect())
}

/// An error in words that name what it is about.
fn of(what: impl AsRef<Path>) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", what.as_ref().display()))
}

fn unfit(text: String) -> io::Error {
    io::Error::other(text)
}

fn look_at(path: &Path) -> io::Result<Option<Metadata>> {
    match path.symlink_metadata() {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(of(path)(error)),
    }
}

fn names(dir: &Path) -> io::Result<Vec<OsString>> {
    let entries = fs::read_dir(dir).map_err(of(dir))?;
    let mut names = entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// Where `path`, its parts between slashes, is below `root`; none where it is not there.
fn find(root: &Path, path: &OsStr) -> io::Result<Option<(PathBuf, Metadata)>> {
    let mut at = root.to_owned();
    let mut found = None;
    for part in Path::new(path) {
        if found.as_ref().is_some_and(|meta: &Metadata| !meta.is_dir()) {
            let shown = Path::new(path).display();
            return Err(unfit(format!("`{shown}` goes through a link or a file, which is not followed")));
        }
        at.push(part);
        match look_at(&at)? {
            Some(meta) => found = Some(meta),
            None => return Ok(None),
        }
    }
    Ok(found.map(|meta| (at, meta)))
}

/// Tells of each pair of a root and a path whether it is there: `1` or `0`.
fn look(pairs: &[OsString], out: &mut impl Write) -> io::Result<()> {
    for pair in pairs.chunks_exact(2) {
        // What is behind a link is told as not there; packing it says why.
        let there = look_at(&Path::new(&pair[0]).join(&pair[1])).is_ok_and(|found| found.is_some());
        out.write_all(if there { b"1" } else { b"0" })?;
    }
    Ok(())
}

/// Everything below a directory but its `.git`: a letter for the kind, the path, NUL. A directory comes before what is in it.
fn list_all(dir: &Path, at: &mut Vec<u8>, depth: usize, out: &mut impl Write) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(unfit("there are too many directories in each other to look for a pattern".to_owned()));
    }
    for name in names(dir)? {
        if at.is_empty() && name == ".git" {
            continue;
        }
        let path = dir.join(&name);
        let Some(meta) = look_at(&path)? else { continue };
        let before = at.len();
        if before > 0 {
            at.push(b'/');
        }
        at.extend(name.as_bytes());
        let letter = match meta.file_type() {
            kind if kind.is_dir() => b'd',
            kind if kind.is_file() => b'f',
            _ => b'o',
        };
        out.write_all(&[letter])?;
        out.write_all(at)?;
        out.write_all(&[0])?;
        if meta.is_dir() {
            list_all(&path, at, depth + 1, out)?;
        }
        at.truncate(before);
    }
    Ok(())
}

/// An archive of paths: triples of a root, a path below it, and what its name begins with in the archive.
fn pack(triples: &[OsString], out: &mut impl Write) -> io::Result<()> {
    let mut left_out = 0_u64;
    for triple in triples.chunks_exact(3) {
        let Some((path, meta)) = find(Path::new(&triple[0]), &triple[1])? else { continue };
        let mut name = triple[2].as_bytes().to_vec();
        if !name.is_empty() {
            name.push(b'/');
        }
        name.extend(triple[1].as_bytes());
        entry(&path, name, &meta, 0, out, &mut left_out)?;
    }
    tar::end(out)?;
    if left_out > 0 {
        eprintln!("{left_out}");
    }
    Ok(())
}

fn entry(
    path: &Path,
    name: Vec<u8>,
    meta: &Metadata,
    depth: usize,
    out: &mut impl Write,
    left_out: &mut u64,
) -> io::Result<()> {
    if name.len() > MAX_NAME - 1 || depth > MAX_DEPTH {
        return Err(unfit(format!("`{}` is too deep", path.display())));
    }
    let kind = meta.file_type();
    let modified = meta.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let mut header = Entry {
        name,
        kind: Kind::File,
        target: Vec::new(),
        mode: meta.permissions().mode() & 0o777,
        modified: modified.map_or(0, |since| since.as_secs()),
        size: 0,
    };
    if kind.is_dir() {
        let inner = header.name.clone();
        header.kind = Kind::Dir;
        header.name.push(b'/');
        tar::write(out, &header)?;
        for part in names(path)? {
            let below = path.join(&part);
            let Some(meta) = look_at(&below)? else { continue };
            entry(&below, [&inner, &b"/"[..], part.as_bytes()].concat(), &meta, depth + 1, out, left_out)?;
        }
        return Ok(());
    }
    if kind.is_symlink() {
        header.kind = Kind::Link;
        header.mode = 0o777;
        header.target = fs::read_link(path).map_err(of(path))?.into_os_string().into_vec();
        if header.target.len() > MAX_NAME - 1 {
            return Err(unfit(format!("the link `{}` is too long", path.display())));
        }
        return tar::write(out, &header);
    }
    if !kind.is_file() {
        *left_out += 1;
        return Ok(());
    }
    let file = match OpenOptions::new().read(true).custom_flags(CAREFULLY).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(of(path)(error)),
    };
    let meta = file.metadata().map_err(of(path))?;
    if !meta.is_file() {
        *left_out += 1;
        return Ok(());
    }
    header.size = meta.len();
    tar::write(out, &header)?;
    if io::copy(&mut file.take(header.size), out)? < header.size {
        return Err(unfit(format!("`{}` became shorter while it was packed", path.display())));
    }
    tar::pad(out, header.size)
}

/// Does something with what the agent put into `stage`, and removes what is left there. `mark` makes names that nobody else has.
fn staged(stage: &OsStr, work: impl FnOnce(&OsStr) -> io::Result<()>) -> io::Result<()> {
    let stage = Path::new(stage);
    let mark = stage.file_name().unwrap_or_default();
    let done = work(mark);
    done.and(remove(stage))
}

/// The directory at `path` below `root`, made where it is missing.
fn way(root: &Path, path: impl AsRef<Path>) -> io::Result<PathBuf> {
    let mut dir = root.to_owned();
    for part in path.as_ref() {
        dir.push(part);
        match fs::create_dir(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if !look_at(&dir)?.is_some_and(|meta| meta.is_dir()) {
                    let part = Path::new(part).display();
                    return Err(unfit(format!("`{part}` is a link or a file, and is not gone through")));
                }
            }
            Err(error) => return Err(of(&dir)(error)),
        }
    }
    Ok(dir)
}

/// Names beside `mark` in a directory: for what comes, and for what was there.
fn aside(dir: &Path, mark: &OsStr) -> [PathBuf; 2] {
    [".new", ".old"].map(|end| {
        let mut name = mark.to_owned();
        name.push(end);
        dir.join(name)
    })
}

/// Puts things that lie in `stage` in the place of what is at each path, and nothing else: triples of the path in `stage`, a root and
/// the path below it. What is new is put beside it first, so that it comes at once.
fn replace(stage: &Path, triples: &[OsString], mark: &OsStr) -> io::Result<()> {
    for triple in triples.chunks_exact(3) {
        let (from, to) = (stage.join(&triple[0]), Path::new(&triple[2]));
        let Some(name) = to.file_name() else { continue };
        let dir = way(Path::new(&triple[1]), to.parent().unwrap_or(Path::new("")))?;
        let ([fresh, old], place) = (aside(&dir, mark), dir.join(name));
        let placed = (|| {
            carry(&from, &fresh)?;
            if look_at(&place)?.is_some() {
                fs::rename(&place, &old).map_err(of(&place))?;
            }
            fs::rename(&fresh, &place).map_err(of(&place))
        })();
        let cleared = remove(&fresh).and(remove(&old));
        placed.and(cleared)?;
    }
    Ok(())
}

/// Puts all that is in `from` into `into`: directories are joined, files replaced.
fn join(from: &Path, into: &Path, mark: &OsStr) -> io::Result<()> {
    for name in names(from)? {
        let (source, place) = (from.join(&name), into.join(&name));
        let (Some(meta), there) = (look_at(&source)?, look_at(&place)?) else { continue };
        let there_is_dir = there.as_ref().is_some_and(Metadata::is_dir);
        if meta.is_dir() && there_is_dir {
            join(&source, &place, mark)?;
            continue;
        }
        if there_is_dir {
            let name = Path::new(&name).display();
            return Err(unfit(format!("`{name}` is a directory here and a file in the artifact")));
        }
        let [fresh, _] = aside(into, mark);
        let placed = carry(&source, &fresh).and_then(|()| {
            if meta.is_dir() && there.is_some() {
                remove(&place)?;
            }
            fs::rename(&fresh, &place).map_err(of(&place))
        });
        placed.and(remove(&fresh))?;
    }
    Ok(())
}

/// Moves something to where nothing is, by copying it where the filesystem is another one.
fn carry(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => copy(from, to).map_err(of(to)),
        moved => moved.map_err(of(to)),
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let meta = from.symlink_metadata()?;
    if meta.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if meta.is_dir() {
        fs::create_dir(to)?;
        for name in names(from)? {
            copy(&from.join(&name), &to.join(&name))?;
        }
        let dir = File::open(to)?;
        dir.set_permissions(meta.permissions())?;
        return dir.set_modified(meta.modified()?);
    }
    let mut source = OpenOptions::new().read(true).custom_flags(CAREFULLY).open(from)?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to)?;
    io::copy(&mut source, &mut file)?;
    file.set_permissions(meta.permissions())?;
    file.set_modified(meta.modified()?)
}

/// Removes something with all in it. Nothing happens where there is nothing.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match look_at(path)? {
        None => return Ok(()),
        Some(meta) if meta.is_dir() => match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                // It was closed to everybody, as some module caches are.
                open_directories(path);
                fs::remove_dir_all(path)
            }
            removed => removed,
        },
        Some(_) => fs::remove_file(path),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(of(path)),
    }
}

/// Lets us into a directory and all below it.
fn open_directories(dir: &Path) {
    // What cannot be opened cannot be removed either, which is said then.
    let _ = fs::set_permissions(dir, Permissions::from_mode(0o700));
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        open_directories(&entry.path());
    }
}
