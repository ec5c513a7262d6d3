//! Names of a delivery of a job and of its steps.

use std::fmt;

use kici_engine::ids::{JobId, ParseIdError, RunId};
use kici_protocol::agent::StepKey;
use kici_protocol::common::JobRef;
use serde::{Deserialize, Serialize};

/// One delivery of one job to this agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobKey {
    /// The job.
    pub job: JobId,
    /// The claim that gave it to this agent; an older one is void.
    pub epoch: u32,
    /// The run it belongs to.
    pub run: RunId,
}

impl JobKey {
    /// Its name as a file: `<job uuid>.<epoch>`.
    pub fn file_name(self) -> String {
        format!("{}.{}", self.job.uuid(), self.epoch)
    }

    /// As it stands in frames.
    pub fn to_ref(self) -> JobRef {
        JobRef { run_id: self.run.uuid().to_string(), job_id: self.job.uuid().to_string(), dispatch_epoch: self.epoch }
    }

    #[cfg(test)]
    pub(crate) fn for_test(job: u128, epoch: u32) -> Self {
        Self {
            job: JobId::from_uuid(uuid::Uuid::from_u128(job)),
            epoch,
            run: RunId::from_uuid(uuid::Uuid::from_u128(9)),
        }
    }
}

impl TryFrom<&JobRef> for JobKey {
    type Error = ParseIdError;

    fn try_from(job: &JobRef) -> Result<Self, ParseIdError> {
        Ok(Self { job: job.job_id.parse()?, epoch: job.dispatch_epoch, run: job.run_id.parse()? })
    }
}

impl fmt::Display for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (epoch {})", self.job, self.epoch)
    }
}

/// The key of a step that the workflow wrote.
pub fn step_key(index: usize) -> StepKey {
    StepKey { kind: "step".to_owned(), owner_index: i32::try_from(index).unwrap_or(i32::MAX), ordinal: 0 }
}

/// The key of a hook of a step, or of the job where there is no `owner`.
pub fn hook_key(kind: &str, owner: Option<usize>, nth: usize) -> StepKey {
    StepKey {
        kind: format!("hook:{kind}"),
        owner_index: owner.map_or(-1, |index| i32::try_from(index).unwrap_or(i32::MAX)),
        ordinal: u32::try_from(nth).unwrap_or(u32::MAX),
    }
}

/// The key of a command that prepares the job, after its checkout.
pub fn init_key(nth: usize) -> StepKey {
    StepKey { kind: "init".to_owned(), owner_index: -1, ordinal: 10 + u32::try_from(nth).unwrap_or_default() }
}

/// The key of the restoring or saving of a cache: of the job where there is no `owner`. Those of a command of `init` follow the job's
/// own, see [`init_cache`].
pub fn cache_key(verb: &str, owner: Option<usize>, nth: usize) -> StepKey {
    StepKey {
        kind: format!("cache:{verb}"),
        owner_index: owner.map_or(-1, |index| i32::try_from(index).unwrap_or(i32::MAX)),
        ordinal: u32::try_from(nth).unwrap_or(u32::MAX),
    }
}

/// The number of a cache of a command of `init` among the caches of the job.
pub fn init_cache(command: usize, nth: usize) -> usize {
    100 * (command + 1) + nth
}

/// The key of the handing over (`upload`) or taking (`download`) of an artifact.
pub fn artifact_key(verb: &str, nth: usize) -> StepKey {
    StepKey { kind: format!("artifact:{verb}"), owner_index: -1, ordinal: u32::try_from(nth).unwrap_or(u32::MAX) }
}

/// The key of the checkout, which the job owns.
pub fn checkout_key() -> StepKey {
    StepKey { kind: "checkout".to_owned(), owner_index: -1, ordinal: 0 }
}

/// The key of the preparation of a job's containers, which the job owns.
pub fn container_key() -> StepKey {
    StepKey { kind: "container".to_owned(), owner_index: -1, ordinal: 1 }
}

/// Only the first `_` of these kinds was a `:`; the names of hooks have a `_` of their own.
fn kind_of_text(text: &str) -> String {
    let split = ["hook", "cache", "artifact"].into_iter().find_map(|kind| {
        let rest = text.strip_prefix(kind)?.strip_prefix('_')?;
        Some(format!("{kind}:{rest}"))
    });
    split.unwrap_or_else(|| text.to_owned())
}

/// A step as a file name: `kind-owner-ordinal`, the `:` of a kind as `_`.
pub fn step_file_name(step: &StepKey) -> String {
    format!("{}-{}-{}", step.kind.replace(':', "_"), step.owner_index, step.ordinal)
}

/// The step of a file name that [`step_file_name`] made.
pub fn parse_step_file_name(name: &str) -> Option<StepKey> {
    let (rest, ordinal) = name.rsplit_once('-')?;
    let (kind, owner) = rest.rsplit_once('-')?;
    let (kind, sign) = kind.strip_suffix('-').map_or((kind, 1), |kind| (kind, -1));
    Some(StepKey {
        kind: kind_of_text(kind),
        owner_index: sign * owner.parse::<i32>().ok()?,
        ordinal: ordinal.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_file_names_round_trip() {
        for (key, name) in [
            (step_key(3), "step-3-0"),
            (checkout_key(), "checkout--1-0"),
            (container_key(), "container--1-1"),
            (init_key(0), "init--1-10"),
            (cache_key("restore", Some(3), 1), "cache_restore-3-1"),
            (cache_key("save", None, init_cache(0, 2)), "cache_save--1-102"),
            (artifact_key("upload", 4), "artifact_upload--1-4"),
            (hook_key("cleanup", Some(2), 1), "hook_cleanup-2-1"),
            (hook_key("on_failure", None, 0), "hook_on_failure--1-0"),
        ] {
            assert_eq!(step_file_name(&key), name);
            assert_eq!(parse_step_file_name(name), Some(key));
        }
        assert_eq!(parse_step_file_name("journal"), None);
    }
}
