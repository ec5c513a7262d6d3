//! The one thread that writes segments. Appends that wait are written together, made durable together and acknowledged
//! together, so a flood from many jobs costs few disk flushes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kici_engine::ids::RunId;
use tokio::sync::{Notify, broadcast, mpsc, oneshot};
use tokio::time::Instant;

use super::marks::{SealMark, delivery_dir, read_mark, step_files, sync_dirs, write_mark};
use super::segment::{Appended, Segment, segment_path};
use super::{LogKey, StepFile};

/// Appends that may wait; with chunks of at most 256 KiB this bounds the memory of a stalled disk to 32 MiB.
const QUEUE: usize = 128;
/// Bytes and time after which waiting appends are flushed although more are queued.
const GROUP_BYTES: usize = 4 * 1024 * 1024;
const GROUP_TIME: Duration = Duration::from_millis(15);
/// Segments that are kept open between appends.
const MAX_OPEN: usize = 512;

/// Why a log stream cannot go on. The agent keeps what is not acknowledged and comes back.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LogError {
    /// The file system has no space left.
    #[error("no space left for logs; acknowledgements stop until there is")]
    Full,
    /// Any other failure of the disk.
    #[error("the log store failed: {0}")]
    Io(String),
    /// Data begins beyond what is stored.
    #[error("log data at offset {offset} of {step} begins beyond the stored {stored} bytes")]
    Gap {
        /// Which step.
        step: StepFile,
        /// Where the data begins.
        offset: u64,
        /// What is stored.
        stored: u64,
    },
    /// The writer has stopped.
    #[error("the log store is shutting down")]
    Closed,
}

impl From<io::Error> for LogError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            _ => Self::Io(error.to_string()),
        }
    }
}

/// What is durable of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepAck {
    /// Bytes from the start of the stream.
    pub durable: u64,
    /// The agent said that this is all.
    pub sealed: bool,
}

/// News that a log has grown or was sealed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Grown {
    /// The run.
    pub run: RunId,
    /// The delivery of the job.
    pub key: LogKey,
    /// The step.
    pub step: StepFile,
}

/// Acknowledgements that a stream has not sent yet; newer ones replace older ones of the same step.
#[derive(Debug)]
pub(super) struct Acks {
    run: RunId,
    waiting: Mutex<(BTreeMap<StepFile, StepAck>, Option<LogError>)>,
    changed: Notify,
}

impl Acks {
    fn new(run: RunId) -> Self {
        Self { run, waiting: Mutex::default(), changed: Notify::new() }
    }

    fn put(&self, step: StepFile, ack: StepAck) {
        self.lock().0.insert(step, ack);
        self.changed.notify_one();
    }

    fn fail(&self, error: LogError) {
        self.lock().1.get_or_insert(error);
        self.changed.notify_one();
    }

    fn failed(&self) -> bool {
        self.lock().1.is_some()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (BTreeMap<StepFile, StepAck>, Option<LogError>)> {
        self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Waits for acknowledgements; what is durable is given before an error is.
    async fn take(&self) -> Result<BTreeMap<StepFile, StepAck>, LogError> {
        loop {
            let changed = self.changed.notified();
            {
                let mut waiting = self.lock();
                if !waiting.0.is_empty() {
                    return Ok(std::mem::take(&mut waiting.0));
                }
                if let Some(error) = waiting.1.clone() {
                    return Err(error);
                }
            }
            changed.await;
        }
    }
}

enum Command {
    Resume { key: LogKey, reply: oneshot::Sender<Result<BTreeMap<StepFile, StepAck>, LogError>> },
    Append { key: LogKey, step: StepFile, offset: u64, data: Bytes, acks: Arc<Acks> },
    Seal { key: LogKey, step: StepFile, mark: SealMark, acks: Arc<Acks> },
    Forget { key: LogKey, reply: oneshot::Sender<()> },
    Settle { reply: oneshot::Sender<()> },
}

/// Whether the log store takes data.
#[derive(Debug, Default)]
pub struct LogHealth(AtomicBool);

impl LogHealth {
    /// True after a write failed for want of space and until one succeeds.
    pub fn is_full(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// There is space again; the next write that fails says otherwise. Without this a log whose agent is gone would hold
    /// everything up for ever.
    pub fn space_found(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The handle of the writer thread.
#[derive(Clone, Debug)]
pub struct LogAppender {
    commands: mpsc::Sender<Command>,
    grown: broadcast::Sender<Grown>,
    sealed: broadcast::Sender<LogKey>,
    health: Arc<LogHealth>,
}

/// One `StreamLogs` call: appends go in, acknowledgements come out.
#[derive(Debug)]
pub(super) struct LogStream {
    key: LogKey,
    appender: LogAppender,
    acks: Arc<Acks>,
}

impl LogAppender {
    /// Starts the thread on `<root>/<job>/<epoch>/<step>.seg`. It ends when the last handle is dropped, after flushing.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(root: PathBuf) -> io::Result<(Self, std::thread::JoinHandle<()>)> {
        let (commands, queue) = mpsc::channel(QUEUE);
        let appender = Self {
            commands,
            grown: broadcast::channel(4096).0,
            sealed: broadcast::channel(4096).0,
            health: Arc::default(),
        };
        let writer = Writer {
            root,
            open: HashMap::new(),
            grown: appender.grown.clone(),
            sealed: appender.sealed.clone(),
            health: Arc::clone(&appender.health),
        };
        let thread = std::thread::Builder::new().name("log-writer".to_owned()).spawn(move || writer.run(queue))?;
        Ok((appender, thread))
    }

    /// Logs that grow, for those who follow them. A lagging receiver only has to look again.
    pub fn grown(&self) -> broadcast::Receiver<Grown> {
        self.grown.subscribe()
    }

    /// Jobs of which a step was sealed.
    pub fn sealed(&self) -> broadcast::Receiver<LogKey> {
        self.sealed.subscribe()
    }

    /// Whether there is space for logs.
    pub fn health(&self) -> &LogHealth {
        &self.health
    }

    /// Begins a stream and tells what is already durable of each step.
    pub(super) async fn stream(
        &self,
        run: RunId,
        key: LogKey,
    ) -> Result<(LogStream, BTreeMap<StepFile, StepAck>), LogError> {
        let (reply, known) = oneshot::channel();
        self.commands.send(Command::Resume { key, reply }).await.map_err(|_| LogError::Closed)?;
        let known = known.await.map_err(|_| LogError::Closed)??;
        Ok((LogStream { key, appender: self.clone(), acks: Arc::new(Acks::new(run)) }, known))
    }

    /// Closes the files of a delivery, so that they may be removed.
    pub(super) async fn forget(&self, key: LogKey) {
        let (reply, done) = oneshot::channel();
        if self.commands.send(Command::Forget { key, reply }).await.is_ok() {
            // An answer that never comes means that the thread is gone, and with it the open files.
            let _ = done.await;
        }
    }
}

impl LogStream {
    /// Hands over a chunk. Waits while the writer is behind, which holds back the sender through HTTP/2 flow control.
    pub(super) async fn append(&self, step: StepFile, offset: u64, data: Bytes) -> Result<(), LogError> {
        let acks = Arc::clone(&self.acks);
        let command = Command::Append { key: self.key, step, offset, data, acks };
        self.appender.commands.send(command).await.map_err(|_| LogError::Closed)
    }

    /// Hands over the agent's word that a step's log is complete.
    pub(super) async fn seal(&self, step: StepFile, mark: SealMark) -> Result<(), LogError> {
        let command = Command::Seal { key: self.key, step, mark, acks: Arc::clone(&self.acks) };
        self.appender.commands.send(command).await.map_err(|_| LogError::Closed)
    }

    /// Waits until everything handed over before has been written or refused.
    pub(super) async fn settled(&self) -> Result<(), LogError> {
        let (reply, done) = oneshot::channel();
        let command = Command::Settle { reply };
        self.appender.commands.send(command).await.map_err(|_| LogError::Closed)?;
        done.await.map_err(|_| LogError::Closed)
    }

    /// The acknowledgements that are there, without waiting.
    pub(super) fn acknowledged_now(&self) -> Result<Option<BTreeMap<StepFile, StepAck>>, LogError> {
        let mut waiting = self.acks.lock();
        if !waiting.0.is_empty() {
            return Ok(Some(std::mem::take(&mut waiting.0)));
        }
        waiting.1.clone().map_or(Ok(None), Err)
    }

    /// Waits for the next acknowledgements.
    pub(super) async fn acknowledged(&self) -> Result<BTreeMap<StepFile, StepAck>, LogError> {
        self.acks.take().await
    }
}

struct Writer {
    root: PathBuf,
    open: HashMap<(LogKey, StepFile), Segment>,
    grown: broadcast::Sender<Grown>,
    sealed: broadcast::Sender<LogKey>,
    health: Arc<LogHealth>,
}

/// What waits for the flush of a group.
#[derive(Default)]
struct Group {
    bytes: usize,
    dirty: HashMap<(LogKey, StepFile), Vec<Arc<Acks>>>,
    seals: Vec<(LogKey, StepFile, SealMark, Arc<Acks>)>,
    settled: Vec<oneshot::Sender<()>>,
}

impl Writer {
    fn run(mut self, mut queue: mpsc::Receiver<Command>) {
        while let Some(first) = queue.blocking_recv() {
            let started = Instant::now();
            let mut group = Group::default();
            self.handle(first, &mut group);
            while group.bytes < GROUP_BYTES && started.elapsed() < GROUP_TIME {
                match queue.try_recv() {
                    Ok(command) => self.handle(command, &mut group),
                    Err(_) => break,
                }
            }
            self.flush(group);
            if self.open.len() > MAX_OPEN {
                self.open.clear();
            }
        }
    }

    fn handle(&mut self, command: Command, group: &mut Group) {
        match command {
            Command::Resume { key, reply } => {
                // The caller may be gone; nothing depends on it.
                let _ = reply.send(self.known(key).map_err(LogError::from));
            }
            Command::Append { key, step, offset, data, acks } => {
                // After a failure the rest of the stream is void: the agent resumes from what was acknowledged.
                if !acks.failed() {
                    group.bytes += data.len();
                    match self.append(key, &step, offset, &data) {
                        Ok(()) => group.dirty.entry((key, step)).or_default().push(acks),
                        Err(error) => self.fail(&acks, error),
                    }
                }
            }
            Command::Seal { key, step, mark, acks } => {
                if !acks.failed() {
                    group.seals.push((key, step, mark, acks));
                }
            }
            Command::Forget { key, reply } => {
                self.open.retain(|(open, _), _| *open != key);
                let _ = reply.send(());
            }
            Command::Settle { reply } => group.settled.push(reply),
        }
    }

    fn fail(&self, acks: &Acks, error: LogError) {
        if matches!(error, LogError::Full) {
            self.health.0.store(true, Ordering::Relaxed);
        }
        acks.fail(error);
    }

    fn dir(&self, key: LogKey) -> PathBuf {
        delivery_dir(&self.root, key)
    }

    fn segment(&mut self, key: LogKey, step: &StepFile) -> io::Result<&mut Segment> {
        let dir = self.dir(key);
        match self.open.entry((key, step.clone())) {
            std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(entry) => {
                fs::create_dir_all(&dir)?;
                Ok(entry.insert(Segment::open(&segment_path(&dir, step.as_str()))?))
            }
        }
    }

    /// How far a step is that is sealed and not open. It is not opened again: its segment may be gone, and an empty one in its
    /// place would be sealed as the log.
    fn closed(&self, key: LogKey, step: &StepFile) -> Option<StepAck> {
        if self.open.contains_key(&(key, step.clone())) {
            return None;
        }
        read_mark(&self.dir(key), step).map(|mark| StepAck { durable: mark.bytes, sealed: true })
    }

    fn append(&mut self, key: LogKey, step: &StepFile, offset: u64, data: &Bytes) -> Result<(), LogError> {
        if self.closed(key, step).is_some() {
            return Ok(());
        }
        let segment = self.segment(key, step)?;
        match segment.append(offset, data)? {
            Appended::Grown(_) | Appended::Known => Ok(()),
            Appended::Gap => Err(LogError::Gap { step: step.clone(), offset, stored: segment.durable() }),
        }
    }

    /// Makes the group durable, then acknowledges it.
    fn flush(&mut self, group: Group) {
        let mut grown = HashSet::new();
        let mut new_dirs = HashSet::new();
        for ((key, step), streams) in group.dirty {
            if let Some(ack) = self.closed(key, &step) {
                streams.iter().for_each(|acks| acks.put(step.clone(), ack));
                continue;
            }
            let synced = self.segment(key, &step).and_then(|segment| {
                let before = segment.durable();
                let durable = segment.sync()?;
                metrics::counter!("kici_orch_log_bytes_stored_total").increment(durable.saturating_sub(before));
                Ok((durable, before == 0))
            });
            match synced {
                Ok((durable, fresh)) => {
                    self.health.0.store(false, Ordering::Relaxed);
                    if fresh && new_dirs.insert(key) {
                        // The name of a new file is durable only after its directory is.
                        let _ = sync_dirs(&self.root, &self.dir(key));
                    }
                    for acks in streams {
                        acks.put(step.clone(), StepAck { durable, sealed: false });
                        grown.insert(Grown { run: acks.run, key, step: step.clone() });
                    }
                }
                Err(error) => {
                    let error = LogError::from(error);
                    streams.iter().for_each(|acks| self.fail(acks, error.clone()));
                }
            }
        }
        for (key, step, mark, acks) in group.seals {
            match self.seal(key, &step, mark) {
                Ok(ack) => {
                    acks.put(step.clone(), ack);
                    grown.insert(Grown { run: acks.run, key, step });
                    // Nobody may listen; the sealer also looks by itself.
                    let _ = self.sealed.send(key);
                }
                Err(error) => self.fail(&acks, error),
            }
        }
        for news in grown {
            let _ = self.grown.send(news);
        }
        for reply in group.settled {
            let _ = reply.send(());
        }
    }

    fn seal(&mut self, key: LogKey, step: &StepFile, mark: SealMark) -> Result<StepAck, LogError> {
        let dir = self.dir(key);
        if let Some(known) = read_mark(&dir, step) {
            return Ok(StepAck { durable: known.bytes, sealed: true });
        }
        let durable = self.segment(key, step)?.sync()?;
        if durable != mark.bytes {
            return Err(LogError::Gap { step: step.clone(), offset: mark.bytes, stored: durable });
        }
        write_mark(&dir, step, mark)?;
        Ok(StepAck { durable, sealed: true })
    }

    /// What is durable of each step of a delivery.
    fn known(&mut self, key: LogKey) -> io::Result<BTreeMap<StepFile, StepAck>> {
        let dir = self.dir(key);
        let mut known = BTreeMap::new();
        for (step, name) in step_files(&dir)? {
            let ack = match read_mark(&dir, &step) {
                Some(mark) => StepAck { durable: mark.bytes, sealed: true },
                // A mark that is not whole was never acknowledged; its segment stands beside it.
                None if name.ends_with(".seal") => continue,
                None => StepAck { durable: self.segment(key, &step)?.sync()?, sealed: false },
            };
            known.insert(step, ack);
        }
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::JobId;

    use super::*;

    fn run() -> RunId {
        RunId::from_uuid(uuid::Uuid::from_u128(2))
    }

    fn key() -> LogKey {
        LogKey { job: JobId::from_uuid(uuid::Uuid::from_u128(1)), epoch: 1 }
    }

    fn step() -> StepFile {
        StepFile::new("step", 0, 0).unwrap()
    }

    async fn ack(stream: &LogStream) -> StepAck {
        stream.acknowledged().await.unwrap().remove(&step()).unwrap()
    }

    #[tokio::test]
    async fn what_is_acknowledged_survives_a_restart_and_the_stream_resumes_from_there() {
        let root = tempfile::tempdir().unwrap();
        let (appender, thread) = LogAppender::start(root.path().to_owned()).unwrap();
        let (stream, known) = appender.stream(run(), key()).await.unwrap();
        assert!(known.is_empty());
        stream.append(step(), 0, Bytes::from_static(b"1 o a\n")).await.unwrap();
        assert_eq!(ack(&stream).await, StepAck { durable: 6, sealed: false });
        drop((stream, appender));
        thread.join().unwrap();

        let (appender, _thread) = LogAppender::start(root.path().to_owned()).unwrap();
        let (stream, known) = appender.stream(run(), key()).await.unwrap();
        assert_eq!(known.get(&step()), Some(&StepAck { durable: 6, sealed: false }));
        stream.append(step(), 0, Bytes::from_static(b"1 o a\n2 o b\n")).await.unwrap();
        assert_eq!(ack(&stream).await.durable, 12);
        let mark = SealMark { bytes: 12, lines: 2, missing_bytes: 0, missing_lines: 0, complete: true };
        stream.seal(step(), mark).await.unwrap();
        assert_eq!(ack(&stream).await, StepAck { durable: 12, sealed: true });
    }

    #[tokio::test]
    async fn a_log_that_was_moved_away_and_is_sent_again_leaves_no_file() {
        let root = tempfile::tempdir().unwrap();
        let (appender, _thread) = LogAppender::start(root.path().to_owned()).unwrap();
        let (stream, _) = appender.stream(run(), key()).await.unwrap();
        stream.append(step(), 0, Bytes::from_static(b"1 o a\n")).await.unwrap();
        assert_eq!(ack(&stream).await.durable, 6);
        let mark = SealMark { bytes: 6, lines: 1, missing_bytes: 0, missing_lines: 0, complete: true };
        stream.seal(step(), mark).await.unwrap();
        assert!(ack(&stream).await.sealed);
        // As the sealer does once the log is in the object store.
        appender.forget(key()).await;
        let segment = segment_path(&delivery_dir(root.path(), key()), step().as_str());
        fs::remove_file(&segment).unwrap();
        stream.append(step(), 0, Bytes::from_static(b"1 o a\n")).await.unwrap();
        assert_eq!(ack(&stream).await, StepAck { durable: 6, sealed: true });
        assert!(!segment.exists());
    }

    #[tokio::test]
    async fn a_gap_ends_the_stream_and_nothing_is_stored_out_of_order() {
        let root = tempfile::tempdir().unwrap();
        let (appender, _thread) = LogAppender::start(root.path().to_owned()).unwrap();
        let (stream, _) = appender.stream(run(), key()).await.unwrap();
        stream.append(step(), 3, Bytes::from_static(b"x\n")).await.unwrap();
        assert!(matches!(stream.acknowledged().await, Err(LogError::Gap { offset: 3, stored: 0, .. })));
        let early = SealMark { bytes: 5, lines: 1, missing_bytes: 0, missing_lines: 0, complete: true };
        let (stream, _) = appender.stream(run(), key()).await.unwrap();
        stream.seal(step(), early).await.unwrap();
        assert!(matches!(stream.acknowledged().await, Err(LogError::Gap { .. })));
    }

    #[test]
    fn step_keys_cannot_leave_their_directory() {
        for bad in ["", "../x", "a/b", "A", "a b", &"x".repeat(41)] {
            assert!(StepFile::new(bad, 0, 0).is_err(), "{bad}");
        }
        assert_eq!(StepFile::new("hook:cleanup", -1, 2).unwrap().as_str(), "hook_cleanup--1-2");
    }
}
