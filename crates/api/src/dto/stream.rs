//! Live changes, as `GET /api/v1/stream` sends them (Server-Sent Events).

use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::state::{JobStatus, RunStatus, StepStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::agents::AgentStatus;

/// Something changed. It carries ids and statuses only; the rest is read by REST.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Change {
    /// A run was created or has another status.
    Run {
        /// The run.
        #[schema(value_type = String)]
        run_id: RunId,
        /// Of its source, where the node has it at hand; a caller bound to a source sees the change only then.
        routing_key: Option<String>,
        /// Its status.
        #[schema(value_type = String)]
        status: RunStatus,
        /// True when it was created just now.
        created: bool,
    },
    /// A job was created or has another status.
    Job {
        /// Its run.
        #[schema(value_type = String)]
        run_id: RunId,
        /// The job.
        #[schema(value_type = String)]
        job_id: JobId,
        /// Its status.
        #[schema(value_type = String)]
        status: JobStatus,
    },
    /// A step has another status.
    Step {
        /// Its run.
        #[schema(value_type = String)]
        run_id: RunId,
        /// Its job.
        #[schema(value_type = String)]
        job_id: JobId,
        /// The hand-over.
        epoch: u32,
        /// Its key.
        step: String,
        /// Its status.
        #[schema(value_type = String)]
        status: StepStatus,
    },
    /// A step has more log lines, or its log is complete.
    Log {
        /// Its run.
        #[schema(value_type = String)]
        run_id: RunId,
        /// Its job.
        #[schema(value_type = String)]
        job_id: JobId,
        /// The hand-over.
        epoch: u32,
        /// Its key.
        step: String,
    },
    /// An agent came, went or drains.
    Agent {
        /// The agent.
        #[schema(value_type = String)]
        agent_id: AgentId,
        /// What it is up to.
        status: AgentStatus,
    },
    /// The dead letters changed.
    Dlq {},
}

impl Change {
    /// The run that it is about.
    pub fn run_id(&self) -> Option<RunId> {
        match self {
            Self::Run { run_id, .. }
            | Self::Job { run_id, .. }
            | Self::Step { run_id, .. }
            | Self::Log { run_id, .. } => Some(*run_id),
            Self::Agent { .. } | Self::Dlq {} => None,
        }
    }

    /// The name of the SSE event.
    pub fn event_name(&self) -> &'static str {
        match self {
            Self::Run { created: true, .. } => "run.new",
            Self::Run { .. } => "run.status",
            Self::Job { .. } => "job.status",
            Self::Step { .. } => "step.status",
            Self::Log { .. } => "log.more",
            Self::Agent { .. } => "agent.changed",
            Self::Dlq {} => "dlq.changed",
        }
    }
}
