//! Words that must reach the orchestrator whatever happens: terminal statuses of steps and jobs. One append-only file per
//! delivery of a job, synced before its frames are sent and deleted when all of them are acknowledged.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kici_engine::ids::JobId;
use kici_protocol::agent::AgentFrame;
use prost::Message;
use uuid::Uuid;

/// A record that nobody took for this long goes to `dead/`, and is deleted after as long again.
pub const KEEP: Duration = Duration::from_secs(7 * 24 * 3600);

/// The outbox of one cluster on disk. Its methods block.
#[derive(Debug)]
pub struct Outbox {
    dir: PathBuf,
    /// Files whose directory entry is synced already.
    known: Mutex<HashSet<String>>,
}

/// The frames of one delivery that an earlier process left.
#[derive(Debug)]
pub struct Stored {
    /// Its file, `<job uuid>.<epoch>`.
    pub file: String,
    /// The job.
    pub job: JobId,
    /// The epoch.
    pub epoch: u32,
    /// The frames, in order.
    pub frames: Vec<AgentFrame>,
}

impl Outbox {
    /// Opens the outbox in `dir` and reads what is in it. A torn last record was never sent and is left out.
    ///
    /// # Errors
    /// When the directory cannot be made or read.
    pub fn open(dir: &Path) -> io::Result<(Self, Vec<Stored>)> {
        std::fs::create_dir_all(dir.join("dead"))?;
        let mut stored = Vec::new();
        let mut known = HashSet::new();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            let Some((job, epoch)) = parse_name(&name) else { continue };
            let bytes = std::fs::read(entry.path())?;
            let mut rest = bytes.as_slice();
            let mut frames = Vec::new();
            while !rest.is_empty() {
                let mut after = rest;
                match AgentFrame::decode_length_delimited(&mut after) {
                    Ok(frame) if frame.frame.is_some() => frames.push(frame),
                    _ => break,
                }
                rest = after;
            }
            if !rest.is_empty() {
                // What is appended later must not stand behind bytes that cannot be read.
                OpenOptions::new().write(true).open(entry.path())?.set_len((bytes.len() - rest.len()) as u64)?;
            }
            known.insert(name.clone());
            stored.push(Stored { file: name, job, epoch, frames });
        }
        stored.sort_by(|a, b| a.file.cmp(&b.file));
        Ok((Self { dir: dir.to_owned(), known: Mutex::new(known) }, stored))
    }

    /// Appends frames of one delivery and syncs file and directory. After an error the frames may still be sent: they are
    /// then only as safe as this process.
    ///
    /// # Errors
    /// When they cannot be written, as on a full disk.
    pub fn append(&self, file: &str, frames: &[AgentFrame]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for frame in frames {
            frame.encode_length_delimited(&mut bytes).map_err(io::Error::other)?;
        }
        let path = self.dir.join(file);
        let mut open = OpenOptions::new().append(true).create(true).open(&path)?;
        let before = open.metadata()?.len();
        if let Err(error) = open.write_all(&bytes) {
            // Half a record would hide the ones behind it.
            open.set_len(before)?;
            return Err(error);
        }
        open.sync_data()?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(file) {
            File::open(&self.dir)?.sync_all()?;
            known.insert(file.to_owned());
        }
        Ok(())
    }

    /// Deletes the record of a delivery: all its frames are acknowledged or void.
    pub fn remove(&self, file: &str) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(file);
        if let Err(error) = std::fs::remove_file(self.dir.join(file))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(file, %error, "cannot delete an acknowledged outbox record; it will be sent again");
        }
    }

    /// Puts the record of a delivery aside: the orchestrator will not take it.
    pub fn bury(&self, file: &str, why: &str) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(file);
        tracing::error!(file, why, "a result could not be delivered and was moved to outbox/dead");
        if let Err(error) = std::fs::rename(self.dir.join(file), self.dir.join("dead").join(file)) {
            tracing::error!(file, %error, "cannot move an outbox record");
        }
    }

    /// Files in `dead/` that are older than [`KEEP`] are deleted. Returns the files of the outbox itself that are as old.
    pub fn expired(&self) -> Vec<String> {
        for (name, path) in old_files(&self.dir.join("dead")) {
            tracing::warn!(file = name, "deleting a dead outbox record");
            let _ = std::fs::remove_file(path);
        }
        old_files(&self.dir).into_iter().map(|(name, _)| name).filter(|name| parse_name(name).is_some()).collect()
    }
}

fn old_files(dir: &Path) -> Vec<(String, PathBuf)> {
    let is_old = |path: &Path| {
        path.metadata().and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok()).is_some_and(|age| age > KEEP)
    };
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| is_old(&entry.path()))
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect()
}

fn parse_name(name: &str) -> Option<(JobId, u32)> {
    let (uuid, epoch) = name.rsplit_once('.')?;
    Some((JobId::from_uuid(Uuid::try_parse(uuid).ok()?), epoch.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use kici_protocol::agent::{JobUpdate, agent_frame};

    use super::*;
    use crate::key::JobKey;

    fn frame(state: &str) -> AgentFrame {
        let update = JobUpdate { state: state.to_owned(), ..JobUpdate::default() };
        AgentFrame { seq: 0, frame: Some(agent_frame::Frame::JobUpdate(update)) }
    }

    #[test]
    fn frames_are_read_back_in_order_and_a_torn_one_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let key = JobKey::for_test(3, 2);
        let name = key.file_name();
        let (outbox, none) = Outbox::open(dir.path()).expect("opened");
        assert!(none.is_empty());
        outbox.append(&name, &[frame("a"), frame("b")]).expect("written");
        outbox.append(&name, &[frame("c")]).expect("written");
        let path = dir.path().join(&name);
        let whole = std::fs::read(&path).expect("there");
        std::fs::write(&path, &whole[..whole.len() - 1]).expect("torn");
        let (outbox, stored) = Outbox::open(dir.path()).expect("opened");
        assert_eq!((stored[0].job, stored[0].epoch), (key.job, 2));
        assert_eq!(stored[0].frames, [frame("a"), frame("b")]);
        outbox.bury(&name, "test");
        assert!(dir.path().join("dead").join(&name).exists());
        assert!(Outbox::open(dir.path()).expect("opened").1.is_empty());
    }
}
