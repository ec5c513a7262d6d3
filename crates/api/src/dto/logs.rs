//! Log lines: ranges of one step, and the merged stream of a run.

use kici_engine::ids::{JobId, RunId};
use kici_engine::state::{JobStatus, RunStatus, StepStatus};
use kici_engine::time::Ts;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Lines per range when the caller names no limit.
pub const DEFAULT_LINES: u32 = 1_000;
/// Most lines per range.
pub const MAX_LINES: u32 = 10_000;

/// Where a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogStream {
    /// The command's standard output (`o` in the stored form).
    Out,
    /// The command's standard error (`e`).
    Err,
    /// A remark of the agent's own (`m`), for instance that lines are missing here.
    Meta,
}

impl LogStream {
    /// The letter of the stored form.
    pub const fn letter(self) -> char {
        match self {
            Self::Out => 'o',
            Self::Err => 'e',
            Self::Meta => 'm',
        }
    }

    /// From the letter of the stored form.
    pub const fn from_letter(letter: char) -> Option<Self> {
        match letter {
            'o' => Some(Self::Out),
            'e' => Some(Self::Err),
            'm' => Some(Self::Meta),
            _ => None,
        }
    }
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// Its number in the step's log, from 0.
    pub seq: u64,
    /// When the agent read it.
    #[schema(value_type = String, format = DateTime)]
    pub at: Ts,
    /// Where it came from.
    pub stream: LogStream,
    /// The text, masked, without its line end. Bytes that are not UTF-8 read as U+FFFD.
    pub text: String,
}

/// A range of one step's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogRange {
    /// Lines in order, without holes.
    pub lines: Vec<LogLine>,
    /// Ask for this `from_seq` next. Also in the header `x-next-seq`.
    pub next_seq: u64,
    /// True when no line follows this range, now or later. Also in the header `x-log-complete`.
    pub complete: bool,
}

/// Which lines of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct LogQuery {
    /// First line, from 0.
    pub from_seq: u64,
    /// Most lines, 1 to 10,000; 1,000 when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// The hand-over; the latest when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u32>,
    /// `json` (default) or `text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<LogFormat>,
}

/// How a range of lines is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// A [`LogRange`].
    Json,
    /// The text of the lines alone.
    Text,
}

/// What to follow, and where to go on: the body of `POST /runs/{id}/logs/follow`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FollowRequest {
    /// Only this job: its id, or its name (with or without matrix values).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Only this step: its key, its name or its ordinal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// False: what is there now, then end. True: stay until the run has ended and its logs are complete.
    pub follow: bool,
    /// Only statuses, no lines.
    pub statuses_only: bool,
    /// Lines that the caller has already.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<LogPosition>,
}

/// How far one step's log was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogPosition {
    /// The job.
    #[schema(value_type = String)]
    pub job_id: JobId,
    /// The hand-over.
    pub epoch: u32,
    /// The step's key.
    pub step: String,
    /// The first line that is still wanted.
    pub next_seq: u64,
}

/// One line of the JSON-lines answer to a follow request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FollowEvent {
    /// The run has this status.
    Run {
        /// The run.
        #[schema(value_type = String)]
        run_id: RunId,
        /// Its status.
        #[schema(value_type = String)]
        status: RunStatus,
    },
    /// A job has this status. Sent once at the start for each job and after each change.
    Job {
        /// The job.
        #[schema(value_type = String)]
        job_id: JobId,
        /// Its name.
        name: String,
        /// Its status.
        #[schema(value_type = String)]
        status: JobStatus,
        /// The agent that has it.
        agent_id: Option<String>,
        /// Why nobody takes it, or why it failed.
        reason: Option<String>,
    },
    /// A step has this status.
    Step {
        /// The job.
        #[schema(value_type = String)]
        job_id: JobId,
        /// The hand-over.
        epoch: u32,
        /// The step's key.
        step: String,
        /// The step's name.
        name: String,
        /// Its status.
        #[schema(value_type = String)]
        status: StepStatus,
        /// Exit code of its command.
        exit_code: Option<i32>,
    },
    /// Lines of one step that follow on those sent before.
    Lines {
        /// The job.
        #[schema(value_type = String)]
        job_id: JobId,
        /// The hand-over.
        epoch: u32,
        /// The step's key.
        step: String,
        /// The lines.
        lines: Vec<LogLine>,
    },
    /// Nothing happened for a while; the connection lives.
    Alive {},
    /// The last line of the answer.
    End {
        /// Why it ends.
        reason: EndReason,
        /// The run's status at the end.
        #[schema(value_type = String)]
        status: RunStatus,
    },
}

/// Why a stream of logs ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// Every line was sent.
    Completed,
    /// The run was cancelled; every line was sent.
    Cancelled,
    /// Lines exist that did not arrive in time; ask for the range later.
    Incomplete,
    /// It does not exist.
    NotFound,
    /// The token may not read it, or no longer.
    Forbidden,
    /// Too many topics or streams.
    Limit,
    /// The server goes away: connect again.
    Shutdown,
}
