//! Caches and artifacts of one job: archives of its files go to a depot and come back. Used by what the workflow declares and by
//! what steps ask for over the socket of the job.

mod depot;
pub(crate) mod flow;
mod ground;
pub mod local;
mod place;
pub mod remote;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use kici_engine::cache::{CachePath, Root, artifact_pattern, below, check_artifact_name, check_key};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Semaphore;

pub use depot::{Archive, Depot, DepotError, Pieces, Place, Target};

use crate::archive::{self, ArchiveError, Dir, Limits, Links, Patterns};
use crate::confine::JobConfinement;
use crate::container::Inside;
use ground::{Ground, Wanted};

/// Archives of one job on their way at once.
const AT_ONCE: usize = 4;
/// One attempt to fetch or send an archive, at most.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Further attempts.
const RETRIES: u32 = 2;
/// Before the first of them; longer before the next.
const PAUSE: Duration = Duration::from_secs(1);

/// Why something was not restored, saved, taken or handed over.
#[derive(Debug, thiserror::Error)]
pub enum StashError {
    /// A key, a name or a path is none.
    #[error("{0}")]
    Bad(String),
    /// The depot.
    #[error(transparent)]
    Depot(#[from] DepotError),
    /// The files, or the archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
}

/// What was found under a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// The key of the entry; none when there is none.
    pub matched_key: Option<String>,
    /// It is the very key that was asked for.
    pub exact: bool,
    /// Its files and their bytes.
    pub files: u64,
    /// Unpacked.
    pub bytes: u64,
    /// Words for people.
    pub notes: Vec<String>,
}

/// What became of files that were to be saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Saved {
    /// They are kept.
    Stored {
        /// Files and links.
        files: u64,
        /// Bytes of the archive.
        packed: u64,
        /// Words for people.
        notes: Vec<String>,
    },
    /// There is an entry of this key already, and it stays.
    Exists,
    /// None of the paths is there.
    Empty,
}

/// The caches and artifacts of one job.
pub struct Stash {
    depot: Arc<dyn Depot>,
    ground: Ground,
    scratch: PathBuf,
    turns: Semaphore,
    exact: Mutex<BTreeSet<String>>,
    limits: Limits,
}

/// The home directory of the steps. Absent where what is there does not outlive a command.
#[derive(Clone, Debug)]
pub struct Home {
    /// Where it is.
    pub dir: PathBuf,
    /// What steps may write: nothing else of it is replaced on their behalf.
    pub writable: Vec<PathBuf>,
    /// What belongs to the agent: it is neither kept nor replaced.
    pub hidden: Vec<PathBuf>,
}

impl Home {
    /// Whether steps could do to `path` what is done for them.
    fn admits(&self, path: &str) -> bool {
        let forms = |path: &Path| [path.to_owned(), path.canonicalize().unwrap_or_else(|_| path.to_owned())];
        let wanted = forms(&self.dir).map(|home| home.join(path));
        let any = |of: &[PathBuf], test: &dyn Fn(&Path, &Path) -> bool| {
            of.iter().flat_map(|one| forms(one)).any(|one| wanted.iter().any(|wanted| test(wanted, &one)))
        };
        any(&self.writable, &|wanted, one| wanted.starts_with(one))
            && !any(&self.hidden, &|wanted, one| wanted.starts_with(one) || one.starts_with(wanted))
    }
}

impl Stash {
    /// For files in `workspace` and `home`, by way of `scratch`, a private directory of the job.
    pub fn new(
        depot: Arc<dyn Depot>,
        workspace: PathBuf,
        home: Option<Home>,
        scratch: PathBuf,
        confine: Arc<JobConfinement>,
    ) -> Self {
        let limits = Limits { reader: confine.user_id(), ..Limits::default() };
        Self::on(Ground::Host { workspace, home, confine }, depot, scratch, limits)
    }

    /// For files of a job in a container; `inside` is set when that runs.
    pub fn inside(depot: Arc<dyn Depot>, inside: Arc<OnceLock<Arc<Inside>>>, scratch: PathBuf) -> Self {
        Self::on(Ground::Inside(inside), depot, scratch, Limits::default())
    }

    fn on(ground: Ground, depot: Arc<dyn Depot>, scratch: PathBuf, limits: Limits) -> Self {
        let turns = Semaphore::new(AT_ONCE);
        Self { depot, ground, scratch, turns, exact: Mutex::default(), limits }
    }

    /// Whether a restore found this very key: then there is nothing to save under it.
    pub fn found_exactly(&self, key: &str) -> bool {
        self.exact.lock().unwrap_or_else(PoisonError::into_inner).contains(key)
    }

    /// Puts the files of an entry where they were. Exactly the paths are replaced, nothing beside or above them.
    ///
    /// # Errors
    /// [`StashError`]; then nothing was replaced, or, if the disk failed in between, some of the paths.
    pub async fn restore(&self, key: &str, restore_keys: &[String], paths: &[String]) -> Result<Restored, StashError> {
        for text in std::iter::once(key).chain(restore_keys.iter().map(String::as_str)) {
            check_key(text).map_err(|error| StashError::Bad(format!("key `{}`: {error}", text.escape_debug())))?;
        }
        let (paths, notes) = self.ground.rooted(paths)?;
        let _turn = self.turns.acquire().await;
        let mut attempt = 0;
        loop {
            let Some((matched, archive)) = self.depot.find_cache(key, restore_keys).await? else {
                return Ok(Restored { notes, ..Restored::default() });
            };
            let fetched = self.fetch(&archive, Links::Any).await;
            let scratch = match fetched {
                Ok(scratch) => scratch,
                Err(error) if attempt < RETRIES && worth_another(&error) => {
                    attempt += 1;
                    tokio::time::sleep(PAUSE * attempt).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let absent = self.ground.replace(&scratch.dir, &paths).await?;
            let mut notes = notes;
            if absent > 0 {
                notes.push(format!("{absent} of the paths are not in the entry"));
            }
            let exact = matched == key;
            if exact {
                self.exact.lock().unwrap_or_else(PoisonError::into_inner).insert(matched.clone());
            }
            let done = scratch.done;
            return Ok(Restored { matched_key: Some(matched), exact, files: done.files, bytes: done.bytes, notes });
        }
    }

    /// Keeps files under a key, unless there is an entry of it.
    ///
    /// # Errors
    /// [`StashError`]; then nothing is kept.
    pub async fn save(&self, key: &str, paths: &[String]) -> Result<Saved, StashError> {
        check_key(key).map_err(|error| StashError::Bad(format!("key `{}`: {error}", key.escape_debug())))?;
        if self.found_exactly(key) {
            return Ok(Saved::Exists);
        }
        let (paths, mut notes) = self.ground.rooted(paths)?;
        if !self.ground.any_there(&paths).await? {
            return Ok(Saved::Empty);
        }
        // What lies in another path is in it already.
        let outer = |path: &&CachePath| !paths.iter().any(|other| other != *path && other.holds(path));
        let items = paths.iter().filter(outer).map(|path| (path.root, path.path.clone(), path.root.anchor()));
        let items: Vec<Wanted> = items.collect();
        let _turn = self.turns.acquire().await;
        let mut attempt = 0;
        loop {
            let Some(target) = self.depot.begin_cache(key).await? else { return Ok(Saved::Exists) };
            let sent = self.send(&target, &items, Links::Any).await;
            let committed = match sent {
                Ok((sha256, packed, size)) => match self.depot.commit_cache(&target, key, &sha256).await {
                    Ok(true) => {
                        notes.extend(missing(&packed));
                        return Ok(Saved::Stored { files: packed.files, packed: size, notes });
                    }
                    Ok(false) => return Ok(Saved::Exists),
                    Err(error) => StashError::Depot(error),
                },
                Err(error) => error,
            };
            if attempt >= RETRIES || !worth_another(&committed) {
                return Err(committed);
            }
            attempt += 1;
            tokio::time::sleep(PAUSE * attempt).await;
        }
    }

    /// Hands files of the workspace over under a name.
    ///
    /// # Errors
    /// [`StashError`]; then there is no such artifact.
    pub async fn upload(
        &self,
        name: &str,
        patterns: &[String],
        expire_in_ms: Option<u64>,
    ) -> Result<Saved, StashError> {
        check_artifact_name(name)
            .map_err(|error| StashError::Bad(format!("artifact `{}`: {error}", name.escape_debug())))?;
        let mut clean = Vec::with_capacity(patterns.len());
        for text in patterns {
            let pattern = artifact_pattern(text)
                .map_err(|error| StashError::Bad(format!("path `{}`: {error}", text.escape_debug())))?;
            clean.push(pattern);
        }
        let present = self.ground.matching(Patterns::of(&clean)?).await?;
        if present.is_empty() {
            return Ok(Saved::Empty);
        }
        let items: Vec<Wanted> = present.into_iter().map(|path| (Root::Workspace, path, "")).collect();
        let _turn = self.turns.acquire().await;
        let mut attempt = 0;
        loop {
            let target = self.depot.begin_artifact(name, expire_in_ms).await?;
            let failed = match self.send(&target, &items, Links::Inside).await {
                Ok((sha256, packed, size)) => match self.depot.commit_artifact(&target, name, &sha256).await {
                    Ok(()) => {
                        let notes = missing(&packed);
                        return Ok(Saved::Stored { files: packed.files, packed: size, notes });
                    }
                    Err(error) => StashError::Depot(error),
                },
                Err(error) => error,
            };
            if attempt >= RETRIES || !worth_another(&failed) {
                return Err(failed);
            }
            attempt += 1;
            tokio::time::sleep(PAUSE * attempt).await;
        }
    }

    /// Puts the files of an artifact of the run into a directory of the workspace.
    ///
    /// # Errors
    /// [`StashError`], also when there is no such artifact.
    pub async fn download(&self, name: &str, from: Option<&str>, path: &str) -> Result<Restored, StashError> {
        check_artifact_name(name)
            .map_err(|error| StashError::Bad(format!("artifact `{}`: {error}", name.escape_debug())))?;
        let into = below(path).map_err(|error| StashError::Bad(format!("path `{}`: {error}", path.escape_debug())))?;
        let _turn = self.turns.acquire().await;
        let mut attempt = 0;
        loop {
            let Some(found) = self.depot.find_artifact(name, from).await? else {
                let of = from.map_or_else(|| "this run".to_owned(), |from| format!("job `{from}` of this run"));
                return Err(StashError::Depot(DepotError::Refused(format!("{of} has no artifact `{name}`"))));
            };
            match self.fetch(&found, Links::Inside).await {
                Ok(scratch) => {
                    self.ground.merge(&scratch.dir, into).await?;
                    let done = scratch.done;
                    let matched_key = Some(name.to_owned());
                    return Ok(Restored {
                        matched_key,
                        exact: true,
                        files: done.files,
                        bytes: done.bytes,
                        notes: Vec::new(),
                    });
                }
                Err(error) if attempt < RETRIES && worth_another(&error) => {
                    attempt += 1;
                    tokio::time::sleep(PAUSE * attempt).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn fetch(&self, archive: &Archive, links: Links) -> Result<Scratch, StashError> {
        let scratch = Scratch::new(&self.scratch)?;
        let pieces = self.depot.fetch(archive).await?;
        receive(scratch, archive, pieces, self.limits, links).await
    }

    /// Packs and sends at once. Gives the digest, what was packed, and the size.
    async fn send(
        &self,
        target: &Target,
        items: &[Wanted],
        links: Links,
    ) -> Result<(String, archive::Packed, u64), StashError> {
        let ready = self.ground.wanted(items).await?;
        let (writer, pieces, meter) = flow::outward(target.max_bytes);
        let packing = ready.pack(writer, self.limits, links);
        let both = async { tokio::join!(self.depot.send(target, pieces), packing) };
        let late = |_| DepotError::Unavailable("the archive was not taken in time".to_owned());
        let (sent, packed) = tokio::time::timeout(ATTEMPT_LIMIT, both).await.map_err(late)?;
        let packed = match (packed, &sent) {
            // Nobody took the rest: what the other side said is the news.
            (Err(ArchiveError::Io { error, .. }), Err(_)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                return Err(sent.err().map_or_else(
                    || DepotError::Unavailable("the archive was not taken".to_owned()).into(),
                    StashError::Depot,
                ));
            }
            (Err(ArchiveError::Io { error, .. }), _) if error.kind() == std::io::ErrorKind::FileTooLarge => {
                let most = target.max_bytes;
                let text = format!("the archive has more than the {most} bytes that are allowed, packed");
                return Err(ArchiveError::TooMuch(text).into());
            }
            (packed, _) => packed?,
        };
        sent?;
        let (sha256, size) = meter.read();
        Ok((sha256, packed, size))
    }
}

/// Takes an archive into a fresh directory and checks that it is the one that was meant. Nothing of it is used before.
async fn receive(
    scratch: Scratch,
    archive: &Archive,
    pieces: Pieces,
    limits: Limits,
    links: Links,
) -> Result<Scratch, StashError> {
    let (mut input, filler, meter) = flow::inward(archive.size);
    let dir = scratch.dir.clone();
    let unpacked = blocking(move || {
        let into = Dir::open(&dir).map_err(|error| ArchiveError::Io { what: dir.display().to_string(), error })?;
        let unpacked = archive::unpack(&mut input, &into, limits, links);
        if matches!(unpacked, Err(ArchiveError::Refused(_))) {
            // To its end, so that its digest tells whether it is bad or was damaged on the way.
            let _ = std::io::copy(&mut input, &mut std::io::sink());
        }
        unpacked
    });
    let both = async { tokio::join!(flow::fill(pieces, filler), unpacked).1 };
    let late = |_| DepotError::Unavailable("the archive did not come in time".to_owned());
    let done = tokio::time::timeout(ATTEMPT_LIMIT, both).await.map_err(late)?;
    let (sha256, size) = meter.read();
    match done {
        Ok(done) if sha256 == archive.sha256 && size == archive.size => Ok(Scratch { done, ..scratch }),
        // A stream that broke looks like a bad archive; what came whole and is bad is one.
        Err(error) if sha256 == archive.sha256 => Err(error.into()),
        Err(error @ (ArchiveError::Unfit(_) | ArchiveError::TooMuch(_))) => Err(error.into()),
        _ => Err(DepotError::Unavailable("the archive that came is not the one that was meant".to_owned()).into()),
    }
}

/// Unpacks an artifact that a person fetches into `dir`, which is made if it is not there. Gives its files and bytes.
///
/// # Errors
/// [`StashError`]; then nothing of it is in `dir`, unless the disk failed at the very end.
pub async fn unpack_into(dir: &Path, archive: &Archive, pieces: Pieces) -> Result<(u64, u64), StashError> {
    let io = |error| ArchiveError::Io { what: dir.display().to_string(), error };
    std::fs::create_dir_all(dir).map_err(io)?;
    let scratch = receive(Scratch::new(dir)?, archive, pieces, Limits::default(), Links::Inside).await?;
    let root = dir.to_owned();
    // The scratch is removed here and not behind the back of a command that ends.
    let merged = move || {
        place::merge(&scratch.dir, &root, "", &JobConfinement::default())?;
        let (files, bytes) = (scratch.done.files, scratch.done.bytes);
        scratch.remove();
        Ok((files, bytes))
    };
    Ok(blocking(merged).await?)
}

/// Writes an archive that a person fetches. What was written is only good when this succeeds.
///
/// # Errors
/// [`StashError`], also when what came is not what was meant.
pub async fn write_into(
    out: &mut (impl AsyncWrite + Unpin),
    archive: &Archive,
    mut pieces: Pieces,
) -> Result<(), StashError> {
    let io = |error| ArchiveError::Io { what: "the archive".to_owned(), error };
    let meter = flow::Meter::default();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(io)?;
        if meter.count(&piece) > archive.size {
            break;
        }
        out.write_all(&piece).await.map_err(io)?;
    }
    out.flush().await.map_err(io)?;
    if meter.read() == (archive.sha256.clone(), archive.size) {
        return Ok(());
    }
    Err(DepotError::Unavailable("the archive that came is not the one that was meant".to_owned()).into())
}

fn missing(packed: &archive::Packed) -> Vec<String> {
    let mut notes: Vec<String> = packed.missing.iter().map(|path| format!("`{path}` is not there")).collect();
    if packed.left_out > 0 {
        notes.push(format!("{} things that are no files were left out", packed.left_out));
    }
    notes
}

/// Whether the same again could end otherwise.
fn worth_another(error: &StashError) -> bool {
    match error {
        StashError::Depot(DepotError::Unavailable(_)) => true,
        StashError::Archive(ArchiveError::Io { .. }) => true,
        StashError::Bad(_) | StashError::Depot(_) | StashError::Archive(_) => false,
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
) -> Result<T, ArchiveError> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| Err(ArchiveError::Unfit(format!("the work on the files was ended: {error}"))))
}

/// A directory for one attempt, gone with it.
struct Scratch {
    dir: PathBuf,
    done: archive::Unpacked,
    _gone: Gone,
}

struct Gone(PathBuf);

impl Scratch {
    fn new(parent: &Path) -> Result<Self, StashError> {
        let mut id = [0_u8; 8];
        let io = |error: std::io::Error| ArchiveError::Io { what: parent.display().to_string(), error };
        getrandom::fill(&mut id).map_err(|error| io(std::io::Error::other(error)))?;
        let dir = parent.join(format!("unpack-{}", hex::encode(id)));
        std::fs::create_dir_all(parent).map_err(io)?;
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&dir).map_err(io)?;
        Ok(Self { dir: dir.clone(), done: archive::Unpacked::default(), _gone: Gone(dir) })
    }

    /// Removes it now. What is left after an error is tried once more when it is dropped.
    fn remove(self) {
        let _ = crate::job::remove_now(&self.dir);
    }
}

impl Drop for Gone {
    fn drop(&mut self) {
        let dir = std::mem::take(&mut self.0);
        let removed = move || {
            // The directory of the job is removed in any case.
            let _ = crate::job::remove_now(&dir);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(removed)),
            Err(_) => removed(),
        }
    }
}
