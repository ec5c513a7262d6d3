//! What the dispatcher needs from the rest of the orchestrator.

use async_trait::async_trait;
use kici_engine::ids::{AgentId, JobId, RunId, SourceId};
use kici_engine::labels::LabelSet;
use kici_engine::lock::Selector;
use kici_engine::scaling::ScaleVerdict;
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

/// The wish for an agent for one job.
#[derive(Clone, Debug, PartialEq)]
pub struct SpawnRequest {
    /// The job. One agent at a time is started for it, however often it is asked for.
    pub job_id: JobId,
    /// Its run.
    pub run_id: RunId,
    /// Its unique name in the run, for people.
    pub job_name: String,
    /// What the agent must offer. A pool fits by the labels that are named; it cannot promise what a pattern hits.
    pub selector: Selector,
    /// The agent must run on this machine.
    pub requires_machine_id: Option<String>,
}

/// What the scaler knows of an agent that it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spawned {
    /// The job that it was started for; none for one that was started ahead of demand.
    pub bound_job: Option<JobId>,
    /// Labels that a job must name to run there.
    pub mandatory: LabelSet,
    /// It belongs to a warm pool, which ends it.
    pub warm: bool,
}

/// The scaler cannot tell now.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ScalerUnavailable(pub String);

/// Whoever starts agents for jobs that no connected agent takes, and ends them again.
///
/// Calls about one job or agent may be repeated and may come late; the scaler's own rows say what is true.
#[async_trait]
pub trait Scaler: Send + Sync {
    /// Decides on an agent for a job and returns; the agent is started meanwhile. Its failure is told to
    /// [`provisioning_failed`](crate::Dispatcher::provisioning_failed).
    async fn request(&self, request: SpawnRequest) -> ScaleVerdict;

    /// Whether a pool fits, with room or without. Nothing is started.
    fn could_serve(&self, selector: &Selector, requires_machine_id: Option<&str>) -> bool;

    /// An agent with a scaler's id registers; none if no such agent is wanted.
    ///
    /// # Errors
    /// [`ScalerUnavailable`]; the agent is told to come back.
    async fn registering(&self, agent: &AgentId) -> Result<Option<Spawned>, ScalerUnavailable>;

    /// The session of one of its agents ended. `holds_job`: it may come back to a job that it started, within the grace.
    fn disconnected(&self, agent: &AgentId, holds_job: bool);

    /// A job needs no agent any more: it was handed to this one, or has ended.
    fn settled(&self, job: JobId, taken_by: Option<&AgentId>);
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
