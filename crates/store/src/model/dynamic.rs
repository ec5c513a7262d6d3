//! Jobs that other jobs make, and jobs that wait for runs that they started.

use std::collections::BTreeMap;
use std::time::Duration;

use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::lock::Need;
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_engine::time::Ts;

use super::{Job, JobRef, NewJob, NewNeed, RosterHost, Run};

/// Jobs that a generator made, to join their run.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The run.
    pub run: Run,
    /// The generator.
    pub job: Job,
    /// The lock document of the run, JSON of `kici_engine::lock::Workflow`.
    pub lock_json: std::sync::Arc<Vec<u8>>,
    /// The jobs, JSON of a list of `kici_engine::lock::Job`.
    pub members_json: std::sync::Arc<Vec<u8>>,
    /// Jobs of the run so far.
    pub planned: usize,
    /// Those of them that are pinned to hosts.
    pub on_hosts: usize,
    /// The known hosts, where the jobs ask for them.
    pub hosts: Vec<RosterHost>,
}

/// A run with the jobs of a generator.
#[derive(Clone, Debug)]
pub struct Expansion {
    /// Digest of its lock document from now on.
    pub lock_digest: String,
    /// That document.
    pub lock_json: Vec<u8>,
    /// The jobs that join; none of them is queued yet.
    pub jobs: Vec<NewJob>,
    /// Their edges.
    pub needs: Vec<NewNeed>,
    /// Edges that jobs of the run get besides, by base name.
    pub gained: Vec<(String, Need)>,
    /// The group that is known now.
    pub group: String,
}

/// What an agent reports of a generator.
#[derive(Clone, Debug)]
pub struct NewGenerated {
    /// The generator's delivery.
    pub job: JobRef,
    /// The agent that reports it.
    pub agent_id: AgentId,
    /// Digest of `members_json`.
    pub digest: String,
    /// JSON of a list of `kici_engine::lock::Job`.
    pub members_json: Vec<u8>,
    /// How many.
    pub count: u32,
    /// Some of them go to hosts.
    pub wants_hosts: bool,
}

/// A job with `invoke` that waits for what it started.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenGate {
    /// Its run.
    pub run_id: RunId,
    /// The job.
    pub job_id: JobId,
    /// Its status.
    pub status: JobStatus,
    /// When it began to wait.
    pub started_at: Option<Ts>,
    /// How long it may wait.
    pub timeout: Option<Duration>,
    /// The event it emitted; none where it was refused.
    pub event_name: String,
    /// Whether everybody who listens was told.
    pub delivered: bool,
    /// It is a success when nobody listens.
    pub optional: bool,
    /// Why something that should have started was refused.
    pub refused: Option<String>,
    /// The runs that it started.
    pub runs: Vec<GateRun>,
}

/// What becomes of an [`OpenGate`].
#[derive(Clone, Debug, PartialEq)]
pub enum GateVerdict {
    /// Everything that it started ended well.
    Success {
        /// Its outputs.
        outputs: BTreeMap<String, String>,
    },
    /// It fails.
    Failed {
        /// Why.
        reason: FailureReason,
        /// For people.
        message: String,
    },
    /// The job has ended, and what it started was told.
    Ended,
}

/// A run that an [`OpenGate`] waits for.
#[derive(Clone, Debug, PartialEq)]
pub struct GateRun {
    /// Its id.
    pub id: RunId,
    /// Its workflow.
    pub workflow_name: String,
    /// Its status.
    pub status: RunStatus,
}
