//! What the dispatcher needs from the rest of the orchestrator.

use async_trait::async_trait;
use kici_engine::ids::{JobId, RunId, SourceId};
use kici_engine::state::{FailureReason, JobStatus, RunStatus, StepStatus};
use secrecy::SecretString;

/// Which commit a job needs.
#[derive(Clone, Debug)]
pub struct CloneRequest {
    /// The run.
    pub run_id: RunId,
    /// The job.
    pub job_id: JobId,
    /// The source that the run's event came from.
    pub source_id: SourceId,
    /// `owner/name`.
    pub repo: String,
    /// Full ref, when the event had one.
    pub git_ref: Option<String>,
    /// The commit.
    pub sha: String,
}

/// Where a job's agent fetches the commit from.
#[derive(Clone, Debug)]
pub struct CloneSource {
    /// `https://…`, `ssh://…` or `file://…`.
    pub url: String,
    /// User and password for this URL, for the fetch only.
    pub basic: Option<(String, SecretString)>,
    /// The host of its source, see [`Clones::git_host`].
    pub git_host: Option<GitHost>,
}

/// No clone source could be had.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CloneError {
    /// It may work later: the delivery is undone and tried again, within the job's budget.
    #[error("{0}")]
    Transient(String),
    /// It will not work: the job fails.
    #[error("{message}")]
    Permanent {
        /// The reason that the job shows.
        reason: FailureReason,
        /// One line for people.
        message: String,
    },
}

/// Where git reaches the repositories of a source with credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GitHost {
    /// `https` or `http`.
    pub protocol: String,
    /// In lower case, with its port unless that is the usual one.
    pub host: String,
    /// Owners and names that differ in case are the same.
    pub ignore_case: bool,
}

/// Clone sources with credentials for jobs.
#[async_trait]
pub trait Clones: Send + Sync {
    /// The host of a source; none where git needs no credentials (a repository on a disk). For jobs without a checkout, which
    /// wait for it: no forge is asked, and no secret opened.
    async fn git_host(&self, source: SourceId) -> Result<Option<GitHost>, CloneError>;

    /// The source for this job, with a credential that can only read it.
    async fn source(&self, request: &CloneRequest) -> Result<CloneSource, CloneError>;
}

/// Something that a reader of runs or agents may want to see at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A run has this status.
    Run {
        /// The run.
        run_id: RunId,
        /// Of its source, where it is known at hand.
        routing_key: Option<String>,
        /// Its status.
        status: RunStatus,
    },
    /// A job has this status.
    Job {
        /// Its run.
        run_id: RunId,
        /// The job.
        job_id: JobId,
        /// Its status.
        status: JobStatus,
    },
    /// A step has this status.
    Step {
        /// Its run.
        run_id: RunId,
        /// Its job.
        job_id: JobId,
        /// The hand-over of the job.
        epoch: u32,
        /// `kind-owner-ordinal`.
        step_key: String,
        /// Its status.
        status: StepStatus,
    },
    /// An agent came, went or changed.
    Agent {
        /// Its name.
        agent_id: String,
        /// True while it is connected here.
        connected: bool,
    },
}

/// Receives changes after they are committed. Calls must not block: a slow reader loses changes, never the dispatcher.
pub trait Changes: Send + Sync {
    /// One change.
    fn publish(&self, change: Change);
}
