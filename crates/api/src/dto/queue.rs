//! The dispatch queue.

use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::state::QueueStatus;
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// One row of the queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueEntry {
    /// The job; also the row's id.
    #[schema(value_type = String)]
    pub job_id: JobId,
    /// Its run.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// Its workflow.
    pub workflow: String,
    /// Its name.
    pub job: String,
    /// The row's status.
    #[schema(value_type = String)]
    pub status: QueueStatus,
    /// Labels that an agent must offer; patterns as `/regex/`.
    pub labels: Vec<String>,
    /// Labels that an agent must not offer.
    pub exclude: Vec<String>,
    /// How often a hand-over was undone.
    pub attempts: u32,
    /// How often it was handed over.
    pub epoch: u32,
    /// The agent that has it.
    pub agent_id: Option<String>,
    /// Why nobody takes it.
    pub routing_reason: Option<String>,
    /// Why no agent could be started for it, the last time that was tried.
    pub last_provisioning_error: Option<String>,
    /// When it was queued.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Ts,
    /// When it is given up; null = never.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Ts>,
    /// When it was handed over last.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub dispatched_at: Option<Ts>,
    /// Until when the agent has to answer.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ack_deadline: Option<Ts>,
    /// Until when a lost agent may come back.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub recovery_deadline: Option<Ts>,
    /// Since when no agent could run it.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub unroutable_since: Option<Ts>,
}

/// Filters of the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct QueueFilter {
    /// Only this status; open rows when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub status: Option<QueueStatus>,
    /// Only jobs of this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub run: Option<RunId>,
    /// Only jobs that ask for this label.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
}

/// Why a job waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueExplanation {
    /// The row.
    pub entry: QueueEntry,
    /// One sentence: what it waits for.
    pub verdict: String,
    /// Each known agent and why it has not taken the job.
    pub agents: Vec<AgentVerdict>,
}

/// Whether one agent could run a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentVerdict {
    /// The agent.
    #[schema(value_type = String)]
    pub agent_id: AgentId,
    /// True when its labels fit, whether or not it has room.
    pub eligible: bool,
    /// `has a free slot`, `missing label gpu`, `draining`, ….
    pub reason: String,
}
