//! What this agent has taken on: an append-only file of facts, so that a restarted agent knows which jobs it held and which
//! processes they left behind. Accepting a job is synced to disk; the other facts only need to outlive the process.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use kici_engine::time::Ts;
use kici_sys::process::ProcessId;
use serde::{Deserialize, Serialize};

use crate::key::JobKey;

/// The file is emptied when no job is held and it is larger than this.
const COMPACT_BYTES: u64 = 64 * 1024;

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
enum Fact {
    /// A job was accepted.
    Accepted { job: JobKey, workflow: String, name: String, at: Ts, boot: String },
    /// The start of the job was granted: from here on its user code may have run.
    Started { job: JobKey },
    /// The job started a process tree with this keeper.
    Tree { job: JobKey, pid: i32, start: u64 },
    /// The job is over and its result is in the outbox.
    Done { job: JobKey },
}

/// A job that an earlier process accepted and did not finish.
#[derive(Clone, Debug, PartialEq)]
pub struct Unfinished {
    /// Which.
    pub job: JobKey,
    /// Name of its workflow.
    pub workflow: String,
    /// Its name.
    pub name: String,
    /// Its start had been granted.
    pub started: bool,
    /// Keepers of the trees it started in this boot of the host.
    pub keepers: Vec<ProcessId>,
}

/// The open journal. One process at a time, which the lock of the state directory ensures.
#[derive(Debug)]
pub struct Journal {
    inner: Mutex<Inner>,
    boot: String,
}

#[derive(Debug)]
struct Inner {
    file: File,
    bytes: u64,
    held: u32,
}

impl Journal {
    /// Opens or makes the file and returns what is unfinished. A torn last line is ignored: it was never acknowledged.
    ///
    /// # Errors
    /// When the file cannot be read or made.
    pub fn open(path: &Path) -> io::Result<(Self, Vec<Unfinished>)> {
        let boot = kici_sys::host::boot_id().unwrap_or_default();
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let mut open: BTreeMap<JobKey, Unfinished> = BTreeMap::new();
        for line in text.split(|b| *b == b'\n') {
            match serde_json::from_slice(line) {
                Ok(Fact::Accepted { job, workflow, name, boot: then, .. }) => {
                    // Processes of an earlier boot are gone and their pids mean nothing.
                    let keepers = if then == boot { Vec::with_capacity(1) } else { Vec::new() };
                    open.insert(job, Unfinished { job, workflow, name, started: false, keepers });
                }
                Ok(Fact::Started { job }) => {
                    if let Some(unfinished) = open.get_mut(&job) {
                        unfinished.started = true;
                    }
                }
                Ok(Fact::Tree { job, pid, start }) => {
                    if let Some(unfinished) = open.get_mut(&job) {
                        unfinished.keepers.push(ProcessId { pid, start });
                    }
                }
                Ok(Fact::Done { job }) => drop(open.remove(&job)),
                Err(_) => {}
            }
        }
        let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at as u64 + 1);
        if whole < text.len() as u64 {
            file.set_len(whole)?;
        }
        let held = u32::try_from(open.len()).unwrap_or(u32::MAX);
        let inner = Inner { file, bytes: whole, held };
        Ok((Self { inner: Mutex::new(inner), boot }, open.into_values().collect()))
    }

    /// Writes down that a job was accepted, and syncs.
    ///
    /// # Errors
    /// When it cannot be written; the job must then not be acknowledged.
    pub fn accepted(&self, job: JobKey, workflow: &str, name: &str, at: Ts) -> io::Result<()> {
        let (workflow, name, boot) = (workflow.to_owned(), name.to_owned(), self.boot.clone());
        let file = {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.append(&Fact::Accepted { job, workflow, name, at, boot })?;
            inner.held += 1;
            inner.file.try_clone()?
        };
        file.sync_data()
    }

    /// Writes down that the start of a job was granted, before its user code runs.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn started(&self, job: JobKey) -> io::Result<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.append(&Fact::Started { job })
    }

    /// Writes down a tree of a job.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn tree(&self, job: JobKey, keeper: ProcessId) -> io::Result<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.append(&Fact::Tree { job, pid: keeper.pid, start: keeper.start })
    }

    /// Writes down that a job is over.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn done(&self, job: JobKey) -> io::Result<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.append(&Fact::Done { job })?;
        inner.held = inner.held.saturating_sub(1);
        if inner.held == 0 && inner.bytes > COMPACT_BYTES {
            inner.file.set_len(0)?;
            inner.bytes = 0;
        }
        Ok(())
    }
}

impl Inner {
    fn append(&mut self, fact: &Fact) -> io::Result<()> {
        let mut line = serde_json::to_vec(fact)?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // Half a fact, as on a full disk, would swallow the next one.
            self.file.set_len(self.bytes)?;
            return Err(error);
        }
        self.bytes += line.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_finished_is_found_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("journal");
        let (journal, none) = Journal::open(&path).expect("made");
        assert!(none.is_empty());
        let (a, b) = (JobKey::for_test(1, 1), JobKey::for_test(2, 5));
        let keeper = ProcessId { pid: 4, start: 9 };
        journal.accepted(a, "ci", "build", Ts::from_micros(1)).expect("written");
        journal.accepted(b, "ci", "test", Ts::from_micros(1)).expect("written");
        journal.started(b).expect("written");
        journal.tree(b, keeper).expect("written");
        journal.done(a).expect("written");
        std::fs::OpenOptions::new().append(true).open(&path).expect("open").write_all(b"{\"fact\":\"do").expect("torn");
        let (_journal, left) = Journal::open(&path).expect("opened");
        assert_eq!(left.len(), 1);
        assert_eq!((left[0].job, left[0].started, left[0].keepers.as_slice()), (b, true, [keeper].as_slice()));
    }
}
