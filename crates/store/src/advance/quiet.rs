//! Ends of jobs from which nothing follows for any other job of their run: of a job with many variants all but the last.

use kici_engine::lock::RUN_HOOKS_JOB;
use kici_engine::state::{JobStatus, JobView, RunStatus};

use crate::model::{Job, Run};

/// One way in which other jobs of the run stand.
#[derive(Clone, Debug)]
pub(crate) struct Other {
    /// Their key in the lock.
    pub(crate) base_name: String,
    /// What the status of the run depends on.
    pub(crate) view: JobView,
    /// They take turns with other runs.
    pub(crate) takes_turns: bool,
}

/// Whether nothing can follow for the other jobs of a run when `job` ends as `end`, or is tried again instead. What needs it
/// needs all its variants, one of which is open; none of them waits for its turn; and the run just goes on.
pub(crate) fn is_quiet(run: &Run, job: &Job, others: &[Other], end: JobStatus) -> bool {
    let variant_open = others.iter().any(|other| other.base_name == job.base_name && !other.view.status.is_terminal());
    let takes_turns =
        run.concurrency.is_some() || job.group_name.is_some() || others.iter().any(|other| other.takes_turns);
    let goes_on = run.status == RunStatus::Running && run.started_at.is_some() && run.cancel_requested_at.is_none();
    // The first failure of a `fail_fast` job ends its variants.
    let ends_others = job.fail_fast && end != JobStatus::Success;
    let plain = job.kind.is_none() && job.max_parallel.is_none() && job.base_name != RUN_HOOKS_JOB;
    variant_open && goes_on && plain && !takes_turns && !ends_others
}
