//! Compiled workflow sets, kept by commit: a commit never changes, so neither does what it compiles to.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use kici_engine::compile::{CompiledSet, compile_set};
use kici_engine::ids::SourceId;
use kici_forge::WorkflowFiles;

/// Which commit of which repository, read through which source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CommitKey {
    pub source: SourceId,
    pub repo: String,
    pub sha: String,
}

#[derive(Debug, Default)]
struct Entries {
    sets: HashMap<CommitKey, Arc<CompiledSet>>,
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

    /// The compiled files of a commit.
    pub(crate) fn get(&self, key: &CommitKey, files: &WorkflowFiles) -> Arc<CompiledSet> {
        if let Some(known) = self.lock().sets.get(key) {
            return Arc::clone(known);
        }
        let compiled = Arc::new(compile_set(&files.sources()));
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
