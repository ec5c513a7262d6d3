//! Files of a container that the agent fetches and puts there. What is fetched is told and packed by our program inside, with the
//! rights of the steps, and believed as little as they are. What is put there comes by way of a container that never runs, so that
//! no step can lead the engine elsewhere; our program inside then moves it to its place.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt as _;
use kici_containers::Engine;
use kici_sys::init::wire::{Bytes, File, Start};
use serde_json::Value as Json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio_util::io::ReaderStream;

use super::job::Inside;
use super::link::{Process, Stream};
use super::said;
use super::spec::{PROGRAM, SCRATCH, WORKSPACE};
use crate::archive::ArchiveError;
use crate::stash::flow::{self, Inward};

/// Bytes of a list of paths that goes in.
const MAX_LIST_BYTES: usize = 32 << 20;
/// Longest name that comes out, with the letter of its kind.
const MAX_NAME_BYTES: usize = 4096 + 1;
/// Files and directories that are looked at to find those that match.
const MAX_LOOKED_AT: u64 = 2_000_000;
/// Of what our program says about a fault.
const MAX_SAID_BYTES: u64 = 4096;
/// How long our program may take for anything but packing, which its receiver limits.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// A container that never runs, with the workspace in it. Made when it is needed.
pub(super) struct Door {
    name: String,
    document: Json,
    id: tokio::sync::Mutex<Option<String>>,
}

impl Door {
    pub(super) fn new(name: String, document: Json) -> Self {
        Self { name, document, id: tokio::sync::Mutex::default() }
    }

    /// Its id.
    pub(super) async fn open(&self, engine: &Engine) -> Result<String, String> {
        let mut id = self.id.lock().await;
        if let Some(id) = &*id {
            return Ok(id.clone());
        }
        let made = engine.create(&self.name, &self.document).await.map_err(said)?;
        Ok(id.insert(made).clone())
    }
}

/// Something that takes the place of what is at a path inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Below the directory that was brought in.
    pub from: String,
    /// Where `to` starts, inside.
    pub root: PathBuf,
    /// Its parts, between slashes.
    pub to: String,
}

/// Our program at work on files. It is ended when this is dropped.
struct Helper {
    process: Process,
    out: Option<Stream>,
    err: Stream,
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.process.discard();
    }
}

impl Helper {
    /// Its output. Asked for once.
    fn output(&mut self) -> Result<Stream, String> {
        self.out.take().ok_or_else(|| "the output is read already".to_owned())
    }

    /// Waits for its end; gives what it said beside its output.
    async fn end(mut self) -> Result<String, String> {
        let mut text = Vec::new();
        // Its connection does not fail: it ends.
        let _ = (&mut self.err).take(MAX_SAID_BYTES).read_to_end(&mut text).await;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        let status = self.process.exit().await;
        match (status.success(), text.is_empty()) {
            (true, _) => Ok(text),
            (false, false) => Err(text),
            (false, true) => {
                Err(format!("the files in the container cannot be reached: {}", crate::steps::describe(status)))
            }
        }
    }
}

/// An archive of files inside, while it is made.
pub struct Packing(Helper);

impl Packing {
    /// Gives the archive, a plain tar, to `read` on a thread of its own. Also returns how many things were left out because they
    /// are no files.
    ///
    /// # Errors
    /// Of `read`, or why it could not be packed.
    pub(crate) async fn read<T: Send + 'static>(
        self,
        read: impl FnOnce(Inward) -> Result<T, ArchiveError> + Send + 'static,
    ) -> Result<(T, u64), ArchiveError> {
        let mut helper = self.0;
        let mut pieces = ReaderStream::new(helper.output().map_err(ArchiveError::Unfit)?);
        let (input, filler, _) = flow::inward(u64::MAX);
        let reading = tokio::task::spawn_blocking(move || read(input));
        let work = async {
            while let Some(piece) = pieces.next().await {
                if filler.send(piece).await.is_err() {
                    // Whoever reads has seen enough.
                    return None;
                }
            }
            drop(filler);
            Some(helper.end().await)
        };
        let (ended, read) = tokio::join!(work, reading);
        let read = read.unwrap_or_else(|error| Err(ArchiveError::Unfit(format!("reading was ended: {error}"))));
        match ended {
            // What it says is the cause of what is wrong with its archive.
            Some(Err(said)) => Err(ArchiveError::Unfit(said)),
            Some(Ok(said)) => Ok((read?, said.parse().unwrap_or(0))),
            None => Ok((read?, 0)),
        }
    }
}

fn joined<'a>(fields: impl Iterator<Item = &'a [u8]>) -> Bytes {
    fields.collect::<Vec<_>>().join(&0)
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_encoded_bytes()
}

impl Inside {
    /// Where the workspace is, inside.
    pub fn workspace(&self) -> &'static Path {
        Path::new(WORKSPACE)
    }

    /// The home directory of the steps, inside; none when the image and its engine name none.
    pub fn home(&self) -> Option<&Path> {
        self.home.as_deref()
    }

    /// Starts our program on files.
    async fn helper(&self, verb: &str, fields: Bytes) -> Result<Helper, String> {
        if fields.len() > MAX_LIST_BYTES {
            return Err("there are too many paths".to_owned());
        }
        let list = format!("{SCRATCH}/list-{}", self.lists.fetch_add(1, Ordering::Relaxed));
        let words = [PROGRAM, "files", verb, &list].map(|word| word.as_bytes().to_vec()).to_vec();
        let start = Start {
            root: "/".into(),
            cwd: "/".into(),
            commands: vec![words],
            files: vec![File { path: list.into_bytes(), mode: 0o600, content: fields }],
            ..Start::default()
        };
        let (process, out, err) = self.link.start(start).await?;
        Ok(Helper { process, out: Some(out), err })
    }

    /// Which of the paths there are; each with where it starts.
    ///
    /// # Errors
    /// In words.
    pub async fn look(&self, paths: &[(PathBuf, String)]) -> Result<Vec<bool>, String> {
        if paths.is_empty() {
            return Ok(Vec::new());
        }
        let fields = joined(paths.iter().flat_map(|(root, path)| [bytes(root), path.as_bytes()]));
        let look = async {
            let mut helper = self.helper("look", fields).await?;
            let mut told = Vec::new();
            let out = helper.output()?;
            let read = out.take(paths.len() as u64).read_to_end(&mut told).await;
            read.map_err(|error| error.to_string())?;
            helper.end().await?;
            match told.len() == paths.len() {
                true => Ok(told.into_iter().map(|letter| letter == b'1').collect()),
                false => Err("the files in the container cannot be looked at".to_owned()),
            }
        };
        within(look).await
    }

    /// Tells every file, directory and other thing of the workspace but its `.git`: the letter of its kind (`f`, `d` or `o`) and its
    /// path. A directory comes before what is in it.
    ///
    /// # Errors
    /// In words.
    pub async fn list(&self, mut each: impl FnMut(u8, &str) -> Result<(), String>) -> Result<(), String> {
        let list = async {
            let mut helper = self.helper("list", WORKSPACE.into()).await?;
            let mut out = BufReader::new(helper.output()?);
            let (mut name, mut count) = (Vec::new(), 0);
            loop {
                name.clear();
                let most = MAX_NAME_BYTES as u64 + 1;
                let read = (&mut out).take(most).read_until(0, &mut name).await.map_err(|error| error.to_string())?;
                if read == 0 {
                    break;
                }
                count += 1;
                if name.pop() != Some(0) || count > MAX_LOOKED_AT {
                    return Err("there are too many files to look for a pattern".to_owned());
                }
                // What is not text matches no pattern.
                if let Some((kind, path)) = name.split_first()
                    && let Ok(path) = std::str::from_utf8(path)
                {
                    each(*kind, path)?;
                }
            }
            helper.end().await.map(drop)
        };
        within(list).await
    }

    /// Packs paths, each with where it starts and with what its name begins in the archive.
    ///
    /// # Errors
    /// In words.
    pub async fn pack(&self, items: &[(PathBuf, String, &str)]) -> Result<Packing, String> {
        let fields =
            joined(items.iter().flat_map(|(root, path, anchor)| [bytes(root), path.as_bytes(), anchor.as_bytes()]));
        self.helper("pack", fields).await.map(Packing)
    }

    /// Puts the files of a directory of the host beside those of the workspace; where, inside.
    async fn bring_in(&self, from: &Path) -> Result<PathBuf, String> {
        let mut id = [0_u8; 6];
        getrandom::fill(&mut id).map_err(|error| error.to_string())?;
        let name = format!(".kici-{}", hex::encode(id));
        let door = self.door.open(&self.engine).await?;
        self.engine.add(&door, WORKSPACE, &name, from, self.owner).await.map_err(said)?;
        Ok(Path::new(WORKSPACE).join(name))
    }

    /// Puts what lies in a directory of the host in the place of what is at each path inside, and nothing else.
    ///
    /// # Errors
    /// In words; then some of it may have been put there.
    pub async fn replace(&self, from: &Path, moves: &[Move]) -> Result<(), String> {
        if moves.is_empty() {
            return Ok(());
        }
        let replace = async {
            let stage = self.bring_in(from).await?;
            let moves = moves.iter().flat_map(|one| [one.from.as_bytes(), bytes(&one.root), one.to.as_bytes()]);
            let fields = joined(std::iter::once(bytes(&stage)).chain(moves));
            self.helper("replace", fields).await?.end().await.map(drop)
        };
        within(replace).await
    }

    /// Puts all that is in a directory of the host into a directory of the workspace: directories are joined, files replaced.
    ///
    /// # Errors
    /// In words; then some of it may have been put there.
    pub async fn join(&self, from: &Path, into: &str) -> Result<(), String> {
        let join = async {
            let stage = self.bring_in(from).await?;
            let fields = joined([bytes(&stage), WORKSPACE.as_bytes(), into.as_bytes()].into_iter());
            self.helper("join", fields).await?.end().await.map(drop)
        };
        within(join).await
    }
}

async fn within<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let late = |_| "the files in the container took too long".to_owned();
    tokio::time::timeout(LIMIT, work).await.map_err(late)?
}
