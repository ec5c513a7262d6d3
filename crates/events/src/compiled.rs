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

/// The cache; the oldest entry makes room.
#[derive(Debug)]
pub(crate) struct CompileCache {
    max: usize,
    entries: Mutex<(HashMap<CommitKey, Arc<CompiledSet>>, VecDeque<CommitKey>)>,
}

impl CompileCache {
    pub(crate) fn new(max: usize) -> Self {
        Self { max: max.max(1), entries: Mutex::default() }
    }

    /// The compiled files of a commit.
    pub(crate) fn get(&self, key: &CommitKey, files: &WorkflowFiles) -> Arc<CompiledSet> {
        if let Some(known) = self.lock().0.get(key) {
            return Arc::clone(known);
        }
        let sources: Vec<(String, String)> =
            files.files.iter().map(|file| (file.path.clone(), file.content.clone())).collect();
        let compiled = Arc::new(compile_set(&sources));
        let mut entries = self.lock();
        if entries.0.insert(key.clone(), Arc::clone(&compiled)).is_none() {
            entries.1.push_back(key.clone());
            if entries.1.len() > self.max {
                if let Some(oldest) = entries.1.pop_front() {
                    entries.0.remove(&oldest);
                }
            }
        }
        compiled
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (HashMap<CommitKey, Arc<CompiledSet>>, VecDeque<CommitKey>)> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
