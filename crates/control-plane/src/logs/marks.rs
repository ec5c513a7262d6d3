//! The files of a delivery's logs: where they lie, and the marks of steps whose log is complete.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{LogKey, StepFile};

/// What the agent said of a finished step; stored beside the segment until it is in the object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SealMark {
    pub(super) bytes: u64,
    pub(super) lines: u64,
    pub(super) missing_bytes: u64,
    pub(super) missing_lines: u64,
    /// False when the orchestrator sealed the log without the agent's word.
    pub(super) complete: bool,
}

/// `<root>/<job>/<epoch>`.
pub(super) fn delivery_dir(root: &Path, key: LogKey) -> PathBuf {
    root.join(key.job.uuid().to_string()).join(key.epoch.to_string())
}

/// The steps that have a segment or a seal in `dir`, seals first.
pub(super) fn step_files(dir: &Path) -> io::Result<Vec<(StepFile, String)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut files = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(step) = name.strip_suffix(".seal").or_else(|| name.strip_suffix(".seg")) {
            files.push((StepFile(step.to_owned()), name));
        }
    }
    files.sort_by_key(|(step, name)| (!name.ends_with(".seal"), step.clone()));
    Ok(files)
}

/// The seal of a step, if it is there and whole.
pub(super) fn read_mark(dir: &Path, step: &StepFile) -> Option<SealMark> {
    let bytes = fs::read(dir.join(format!("{step}.seal"))).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Stores the seal of a step, durably and whole or not at all.
pub(super) fn write_mark(dir: &Path, step: &StepFile, mark: SealMark) -> io::Result<()> {
    let partial = dir.join(format!("{step}.seal.partial"));
    let mut file = File::create(&partial)?;
    file.write_all(&serde_json::to_vec(&mark)?)?;
    file.sync_all()?;
    fs::rename(&partial, dir.join(format!("{step}.seal")))?;
    File::open(dir)?.sync_all()
}

/// Makes the names of `dir` and of its parents up to `root` durable.
pub(super) fn sync_dirs(root: &Path, dir: &Path) -> io::Result<()> {
    for level in dir.ancestors() {
        File::open(level)?.sync_all()?;
        if level == root {
            break;
        }
    }
    Ok(())
}
