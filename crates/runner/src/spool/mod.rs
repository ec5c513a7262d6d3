//! The logs of one job on this agent's disk, until the orchestrator has sealed them. Only masked lines get here.

mod writer;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kici_protocol::agent::StepKey;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::config::Pressure;
use crate::key::{parse_step_file_name, step_file_name};
pub use writer::StepLog;

/// Bounds of the spool of one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one step's log; 0 is no limit. The first half and the newest half are kept.
    pub max_step_bytes: u64,
    /// Unacknowledged bytes of the job at which its commands are paused, or what they write is left out.
    pub max_unacked_bytes: u64,
    /// Which of the two.
    pub pressure: Pressure,
}

/// How the stream of a step ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// Its length in bytes.
    pub offset: u64,
    /// Its lines.
    pub lines: u64,
    /// Bytes that the limit left out.
    pub missing_bytes: u64,
    /// Lines that the limit left out.
    pub missing_lines: u64,
}

/// The spool of one job at one epoch; shared by its writers and its uploader.
#[derive(Debug)]
pub struct Spool {
    dir: PathBuf,
    limits: Limits,
    state: Mutex<State>,
    /// Woken when there is something to send.
    more: Notify,
    /// Woken when something was acknowledged.
    room: Notify,
}

#[derive(Debug, Default)]
struct State {
    steps: Vec<Step>,
    /// No further step will be opened.
    closed: bool,
    /// The disk refused a write.
    disk_full: bool,
}

#[derive(Debug)]
struct Step {
    key: StepKey,
    file: Arc<File>,
    written: u64,
    sent: u64,
    acked: u64,
    seal: Option<Seal>,
    seal_sent: bool,
    seal_acked: bool,
}

/// What the uploader sends next.
#[derive(Debug)]
pub enum Next {
    /// Bytes of a step at an offset.
    Data(StepKey, u64, Vec<u8>),
    /// The end of a step.
    Seal(StepKey, Seal),
    /// Nothing now.
    Wait,
    /// Everything is sealed at the orchestrator.
    Done,
}

impl Spool {
    /// An empty spool in a new directory.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn create(dir: &Path, limits: Limits) -> io::Result<Arc<Self>> {
        std::fs::create_dir_all(dir)?;
        Ok(Arc::new(Self::with(dir, limits, State::default())))
    }

    /// The spool that an earlier process left. Streams that it did not end are ended at their last whole line.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn recover(dir: &Path, limits: Limits) -> io::Result<Arc<Self>> {
        let mut state = State { closed: true, ..State::default() };
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let Some(key) = entry.file_name().to_str().and_then(parse_step_file_name) else { continue };
            let (file, seal) = writer::recover(&entry.path())?;
            state.steps.push(Step { written: seal.offset, seal: Some(seal), ..Step::new(key, file) });
        }
        state.steps.sort_by_key(|step| (step.key.owner_index, step.key.ordinal));
        Ok(Arc::new(Self::with(dir, limits, state)))
    }

    fn with(dir: &Path, limits: Limits, state: State) -> Self {
        Self { dir: dir.to_owned(), limits, state: Mutex::new(state), more: Notify::new(), room: Notify::new() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the log of a step. Waits while the disk is full.
    ///
    /// # Errors
    /// When its file cannot be made.
    pub async fn open(self: &Arc<Self>, key: &StepKey) -> io::Result<StepLog> {
        let path = self.dir.join(step_file_name(key));
        let file = loop {
            match File::options().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => break Arc::new(file),
                Err(error) => self.ride_out(error).await?,
            }
        };
        let mut state = self.lock();
        state.steps.push(Step::new(key.clone(), Arc::clone(&file)));
        Ok(StepLog::new(Arc::clone(self), state.steps.len() - 1, file, path))
    }

    /// No further step will be opened.
    pub fn close(&self) {
        self.lock().closed = true;
        self.more.notify_one();
    }

    /// Bytes of all streams so far.
    pub fn total_bytes(&self) -> u64 {
        self.lock().steps.iter().map(|step| step.written).sum()
    }

    /// True while writers wait because the disk is full.
    pub fn is_disk_full(&self) -> bool {
        self.lock().disk_full
    }

    /// Forgets what was sent but not acknowledged: a new upload starts.
    pub fn rewind(&self) {
        for step in &mut self.lock().steps {
            step.sent = step.acked;
            step.seal_sent = step.seal_acked;
        }
    }

    /// What to send next, at most `max` bytes of whole lines, unless `in_flight` bytes wait for an acknowledgement already.
    ///
    /// # Errors
    /// When the spool cannot be read.
    pub fn next(&self, max: usize, in_flight: u64) -> io::Result<Next> {
        let mut state = self.lock();
        let waiting: u64 = state.steps.iter().map(|step| step.sent.saturating_sub(step.acked)).sum();
        for step in &mut state.steps {
            if step.sent < step.written {
                if waiting >= in_flight {
                    return Ok(Next::Wait);
                }
                let (offset, bytes) = step.read(max)?;
                step.sent += bytes.len() as u64;
                return Ok(Next::Data(step.key.clone(), offset, bytes));
            }
            if let (Some(seal), false) = (step.seal, step.seal_sent) {
                step.seal_sent = true;
                return Ok(Next::Seal(step.key.clone(), seal));
            }
        }
        let done = state.closed && state.steps.iter().all(|step| step.seal_acked);
        Ok(if done { Next::Done } else { Next::Wait })
    }

    /// The orchestrator has `durable` bytes of a step. Less than before means that it lost some; they are sent again.
    pub fn ack(&self, key: &StepKey, durable: u64, sealed: bool) {
        let mut state = self.lock();
        if let Some(step) = state.steps.iter_mut().find(|step| step.key == *key) {
            let durable = durable.min(step.written);
            if durable < step.acked {
                step.sent = durable;
                step.seal_sent = false;
            }
            step.acked = durable;
            step.sent = step.sent.max(durable);
            step.seal_acked |= sealed;
        }
        drop(state);
        self.room.notify_waiters();
        self.more.notify_one();
    }

    /// Waits until there may be something to send.
    pub async fn more(&self) {
        self.more.notified().await;
    }

    /// True when nothing was written and no step opened.
    pub fn is_empty(&self) -> bool {
        self.lock().steps.is_empty()
    }

    /// Deletes the files.
    pub fn delete(&self) {
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            tracing::warn!(dir = %self.dir.display(), %error, "cannot delete the spool of a finished job");
        }
    }

    fn unacked(&self) -> u64 {
        self.lock().steps.iter().map(|step| step.written.saturating_sub(step.acked)).sum()
    }
}

impl Step {
    fn new(key: StepKey, file: Arc<File>) -> Self {
        Self { key, file, written: 0, sent: 0, acked: 0, seal: None, seal_sent: false, seal_acked: false }
    }

    /// Whole lines from `sent` on; at least one, also when it is longer than `max`.
    fn read(&self, max: usize) -> io::Result<(u64, Vec<u8>)> {
        let have = self.written - self.sent;
        let mut want = max;
        loop {
            let mut bytes = vec![0; want.min(usize::try_from(have).unwrap_or(usize::MAX))];
            self.file.read_exact_at(&mut bytes, self.sent)?;
            if let Some(end) = bytes.iter().rposition(|b| *b == b'\n') {
                bytes.truncate(end + 1);
                return Ok((self.sent, bytes));
            }
            if bytes.len() as u64 == have {
                return Ok((self.sent, bytes));
            }
            want *= 2;
        }
    }
}

#[cfg(test)]
mod tests;
