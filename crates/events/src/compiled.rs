//! What commits say about workflows, kept by commit: a commit never changes, so neither does what it compiles to.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use kici_engine::compile::{CompiledSet, compile_set};
use kici_engine::ids::SourceId;
use kici_engine::lockfile::LockFileError;
use kici_engine::repository::{
    CONFIG_FILE, ConfigError, LOCK_FILE, LockMode, RepositoryConfig, ResolvedSet, read_config, resolve,
};
use kici_forge::WorkflowFiles;

/// Which commit of which repository, read through which source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CommitKey {
    pub source: SourceId,
    pub repo: String,
    pub sha: String,
}

/// What a commit says.
#[derive(Debug)]
pub(crate) struct Commit {
    /// Its settings, or why nothing of it may run.
    pub config: Result<RepositoryConfig, ConfigError>,
    /// Its compiled files.
    pub set: CompiledSet,
    /// Its workflows: those of the files and of the lock document.
    pub resolved: ResolvedSet,
    /// Some of its files could not be read.
    pub unread: bool,
}

impl Commit {
    fn of(files: &WorkflowFiles) -> Self {
        let skipped = |path: &str| files.skipped.iter().find(|skipped| skipped.path == path);
        // Settings that nobody could read may have asked for more care than the defaults do.
        let config = match (skipped(CONFIG_FILE), files.config.as_deref()) {
            (Some(skipped), _) => Err(ConfigError { line: 1, column: 1, problem: skipped.reason.clone() }),
            (None, Some(text)) => read_config(text),
            (None, None) => Ok(RepositoryConfig::default()),
        };
        let set = compile_set(&files.sources());
        let mut resolved = match config {
            Ok(config) => resolve(config, &set, files.lock.as_deref()),
            Err(_) => ResolvedSet::default(),
        };
        if let Some(skipped) = skipped(LOCK_FILE)
            && config.as_ref().is_ok_and(|config| config.lock != LockMode::Ignore)
        {
            resolved.corrupt = Some(LockFileError::Shape(skipped.reason.clone()));
            resolved.missing = false;
        }
        let ignored = config.as_ref().is_ok_and(|config| config.lock == LockMode::Ignore);
        let unread = files.skipped.iter().any(|skipped| !(ignored && skipped.path == LOCK_FILE));
        Self { config, set, resolved, unread }
    }

    /// Whether every file and the lock document can be used, so that what is not there any more is known to be gone.
    pub fn is_whole(&self) -> bool {
        let files = !self.set.files.iter().any(|(_, file)| file.has_errors());
        files && !self.unread && self.config.is_ok() && self.resolved.corrupt.is_none() && !self.resolved.missing
    }
}

#[derive(Debug, Default)]
struct Entries {
    sets: HashMap<CommitKey, Arc<Commit>>,
    oldest_first: VecDeque<CommitKey>,
}

/// The cache; the oldest entry makes room.
#[derive(Debug)]
pub(crate) struct CompileCache {
    max: usize,
    entries: Mutex<Entries>,
}

impl CompileCache {
    pub(crate) fn new(max: usize) -> Self {
        Self { max: max.max(1), entries: Mutex::default() }
    }

    /// What a commit says.
    pub(crate) fn get(&self, key: &CommitKey, files: &WorkflowFiles) -> Arc<Commit> {
        if let Some(known) = self.lock().sets.get(key) {
            return Arc::clone(known);
        }
        let compiled = Arc::new(Commit::of(files));
        let mut entries = self.lock();
        if entries.sets.insert(key.clone(), Arc::clone(&compiled)).is_none() {
            entries.oldest_first.push_back(key.clone());
        }
        while entries.oldest_first.len() > self.max {
            if let Some(oldest) = entries.oldest_first.pop_front() {
                entries.sets.remove(&oldest);
            }
        }
        compiled
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
