//! What an agent keeps on disk beside its jobs, and what an earlier process left behind.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::AgentId;
use kici_engine::time::Clock;
use kici_protocol::agent::{AgentFrame, agent_frame};

use crate::config::Config;
use crate::confine::{Host, let_through};
use crate::job;
use crate::journal::{Journal, Unfinished};
use crate::key::JobKey;
use crate::outbox::Outbox;
use crate::spool::{Limits, Spool};

/// Why an agent cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another agent uses the directory.
    #[error("{0} is in use by another agent; give each agent its own state_dir")]
    InUse(PathBuf),
    /// A file.
    #[error("{path}: {error}; is state_dir writable for this user?")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A directory that the user of the steps may not enter.
    #[error(
        "{user} cannot enter {dir}, which holds the workspaces: no step could start; use another state_dir, or: chmod o+x {dir}"
    )]
    Closed {
        /// Which.
        dir: PathBuf,
        /// Name of the user.
        user: String,
    },
    /// The port of health and metrics.
    #[error("health and metrics cannot be served: {0}; set port to a free one, or to 0")]
    Listen(io::Error),
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StartError + '_ {
    move |error| StartError::Io { path: path.to_owned(), error }
}

/// The state directory, locked for this process.
#[derive(Debug)]
pub struct State {
    /// The directory.
    pub dir: PathBuf,
    /// Name of the agent.
    pub agent_id: AgentId,
    /// What it has taken on.
    pub journal: Arc<Journal>,
    _lock: File,
}

/// Waiting words of one delivery, in order.
pub type Waiting = (JobKey, Vec<AgentFrame>);

/// What an earlier process left.
#[derive(Debug, Default)]
pub struct Leftovers {
    /// The cluster its results are for, with its outbox.
    pub outbox: Option<(String, Outbox)>,
    /// Results that wait, by file.
    pub parcels: Vec<Waiting>,
    /// Logs that wait.
    pub spools: Vec<(JobKey, Arc<Spool>)>,
}

impl State {
    /// Locks and opens the directory, and ends what an earlier process left running. Blocks.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn open(config: &Config, host: &Host, clock: &dyn Clock) -> Result<(Self, Leftovers), StartError> {
        let dir = config.state_dir.clone();
        for path in [&dir, &dir.join("spool"), &dir.join("outbox"), &config.work_dir] {
            std::fs::create_dir_all(path).map_err(at(path))?;
        }
        if config.isolation.user.is_some() {
            // The directories in them stay closed, but for those of jobs.
            for path in [&dir, &config.work_dir] {
                let_through(path).map_err(at(path))?;
            }
        }
        if let Some((dir, user)) = config.closed_way() {
            return Err(StartError::Closed { dir: dir.to_owned(), user: user.name.clone() });
        }
        let path = dir.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path).map_err(at(&path))?;
        if lock.try_lock().is_err() {
            return Err(StartError::InUse(dir));
        }
        let agent_id = match &config.agent_id {
            Some(id) => id.clone(),
            None => made_id(&dir.join("agent-id"))?,
        };
        let path = dir.join("jobs.journal");
        let (journal, unfinished) = Journal::open(&path).map_err(at(&path))?;
        let state = Self { dir, agent_id, journal: Arc::new(journal), _lock: lock };
        let leftovers = state.recover(config, host, unfinished, clock)?;
        Ok((state, leftovers))
    }

    /// The outbox of a cluster, and what is in it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn outbox(&self, cluster: &str) -> io::Result<(Outbox, Vec<Waiting>)> {
        let (outbox, stored) = Outbox::open(&self.dir.join("outbox").join(safe_name(cluster)))?;
        let parcels = stored
            .into_iter()
            .filter_map(|stored| stored.frames.first().and_then(key_of).map(|key| (key, stored.frames)))
            .collect();
        Ok((outbox, parcels))
    }

    /// Remembers the cluster for the next start.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn remember_cluster(&self, cluster: &str) -> io::Result<()> {
        std::fs::write(self.dir.join("cluster"), cluster)
    }

    /// Where the logs of a job are kept.
    pub fn spool_dir(&self, job: JobKey) -> PathBuf {
        self.dir.join("spool").join(job.file_name())
    }

    fn recover(
        &self,
        config: &Config,
        host: &Host,
        unfinished: Vec<Unfinished>,
        clock: &dyn Clock,
    ) -> Result<Leftovers, StartError> {
        let mut left = Leftovers::default();
        if let Ok(cluster) = std::fs::read_to_string(self.dir.join("cluster")) {
            let (outbox, parcels) = self.outbox(&cluster).map_err(at(&self.dir))?;
            left.parcels = parcels;
            left.outbox = Some((cluster, outbox));
        }
        for job in unfinished {
            let mut killed: u32 = job.keepers.iter().map(|keeper| kici_sys::process::kill_leftovers(*keeper)).sum();
            let key = job.job;
            killed += host.end_leftover(&key.file_name());
            tracing::warn!(job = %key, name = job.name, workflow = job.workflow, killed, "a job was held when the agent died");
            delete(&config.work_dir.join(key.file_name()));
            let _ = std::fs::remove_dir_all(crate::credentials::socket_dir(config, key));
            // Of one that had not started nothing is said: the orchestrator gives it to an agent again.
            if job.started {
                self.give_up(&mut left, key, clock).map_err(at(&self.dir))?;
            }
            self.journal.done(key).map_err(at(&self.dir))?;
        }
        remove_old(&config.work_dir);
        let dir = self.dir.join("spool");
        for entry in std::fs::read_dir(&dir).map_err(at(&dir))?.flatten() {
            let path = entry.path();
            let key = std::fs::read(path.join("job.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
            match (
                key,
                Spool::recover(
                    &path,
                    Limits { max_step_bytes: 0, max_unacked_bytes: u64::MAX, pressure: crate::config::Pressure::Pause },
                ),
            ) {
                (Some(key), Ok(spool)) => left.spools.push((key, spool)),
                (_, result) => {
                    tracing::error!(dir = %path.display(), error = ?result.err(), "a spool cannot be read and is left alone");
                }
            }
        }
        Ok(left)
    }

    /// A job that ran when the agent died ends as failed, unless its result is in the outbox already.
    fn give_up(&self, left: &mut Leftovers, key: JobKey, clock: &dyn Clock) -> io::Result<()> {
        let Some((_, outbox)) = &left.outbox else { return Ok(()) };
        let known = left.parcels.iter_mut().find(|(job, _)| *job == key);
        if known.as_ref().is_some_and(|(_, frames)| frames.iter().any(is_result)) {
            return Ok(());
        }
        let frame = job::restarted(key, clock.now());
        outbox.append(&key.file_name(), std::slice::from_ref(&frame))?;
        match known {
            Some((_, frames)) => frames.push(frame),
            None => left.parcels.push((key, vec![frame])),
        }
        Ok(())
    }
}

/// Deletes directories of jobs that nothing tells about any more. Other agents with the same `work_dir` may be at work: theirs
/// are locked, or so new that they will be.
fn remove_old(work_dir: &Path) {
    const AGE: Duration = Duration::from_secs(24 * 3_600);
    let is_old = |path: &Path| {
        path.metadata().and_then(|meta| meta.modified()).is_ok_and(|at| at.elapsed().is_ok_and(|age| age > AGE))
    };
    let is_job = |path: &Path| path.join("workspace").is_dir() && path.join("scratch").is_dir();
    for path in std::fs::read_dir(work_dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if is_job(&path) && is_old(&path) && is_old(&path.join("scratch")) {
            let Ok(lock) = File::options().create(true).truncate(false).write(true).open(path.join(job::LOCK)) else {
                continue;
            };
            if lock.try_lock().is_ok() {
                tracing::info!(dir = %path.display(), "deleting the workspace of a job that is long over");
                delete(&path);
            }
        }
    }
}

fn delete(dir: &Path) {
    if let Err(error) = job::remove_now(dir) {
        tracing::warn!(dir = %dir.display(), %error, "cannot delete a workspace; it is tried again at a later start");
    }
}

/// Writes down whose logs a spool holds.
///
/// # Errors
/// When it cannot be written.
pub fn mark_spool(dir: &Path, job: JobKey) -> io::Result<()> {
    std::fs::write(dir.join("job.json"), serde_json::to_vec(&job)?)
}

/// True for the frame that ends a job.
pub fn is_result(frame: &AgentFrame) -> bool {
    matches!(frame.frame, Some(agent_frame::Frame::JobUpdate(_)))
}

fn key_of(frame: &AgentFrame) -> Option<JobKey> {
    let job = match &frame.frame {
        Some(agent_frame::Frame::JobUpdate(update)) => update.job.as_ref(),
        Some(agent_frame::Frame::StepUpdate(update)) => update.job.as_ref(),
        _ => None,
    };
    job.and_then(|job| JobKey::try_from(job).ok())
}

/// `<host name>-<8 hex>`, made once.
fn made_id(path: &Path) -> Result<AgentId, StartError> {
    if let Some(id) = std::fs::read_to_string(path).ok().and_then(|text| AgentId::new(text.trim()).ok()) {
        return Ok(id);
    }
    let mut bytes = [0_u8; 4];
    getrandom::fill(&mut bytes).map_err(|error| at(path)(io::Error::other(error)))?;
    let host: String = kici_sys::host::hostname()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c))
        .take(64)
        .collect();
    let text = format!("{}-{}", if host.is_empty() { "agent" } else { &host }, hex::encode(bytes));
    std::fs::write(path, &text).map_err(at(path))?;
    AgentId::new(text).map_err(|error| at(path)(io::Error::other(error)))
}

/// A cluster id comes from the network: nothing of it may lead out of the directory.
fn safe_name(cluster: &str) -> String {
    let name: String = cluster.chars().filter(|c| c.is_ascii_alphanumeric() || "_-".contains(*c)).take(80).collect();
    if name.is_empty() { "default".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_workspaces_go_but_not_those_of_jobs_that_run() {
        let dir = tempfile::tempdir().expect("a directory");
        let past = std::time::SystemTime::UNIX_EPOCH;
        let job = |name: &str, is_old: bool| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.join("workspace/cache")).expect("made");
            std::fs::create_dir_all(path.join("scratch")).expect("made");
            std::fs::write(path.join("workspace/cache/file"), "").expect("written");
            let lock = job::lock(&path).expect("locked");
            for path in [path.join("scratch"), path].into_iter().filter(|_| is_old) {
                File::open(path).and_then(|dir| dir.set_modified(past)).expect("set");
            }
            lock
        };
        let _running = job("running", true);
        drop(job("crashed", true));
        drop(job("new", false));
        // As module caches do.
        let cache = dir.path().join("crashed/workspace/cache");
        std::fs::set_permissions(cache, std::os::unix::fs::PermissionsExt::from_mode(0o555)).expect("set");
        std::fs::create_dir(dir.path().join("somebody's")).expect("made");
        remove_old(dir.path());
        let mut left: Vec<_> = std::fs::read_dir(dir.path()).expect("there").flatten().map(|e| e.file_name()).collect();
        left.sort();
        assert_eq!(left, ["new", "running", "somebody's"]);
    }
}
