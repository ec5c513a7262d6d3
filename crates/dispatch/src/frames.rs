//! Frames about jobs, read into values. What cannot be read is refused with the field's name.

use std::collections::BTreeMap;

use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_engine::time::Ts;
use kici_protocol::agent::agent_frame::Frame;
use kici_protocol::agent::{Evidence, JobUpdate, RejectReason, StepUpdate};
use kici_store::model::{JobRef, StepWrite};
use serde_json::{Value as Json, json};

use crate::offer::read_ref;
use crate::registry::slots::Refusal;

/// Longest free text that is stored, in bytes.
const MAX_TEXT: usize = 2000;
/// Longest summary of a step, in bytes.
const MAX_SUMMARY: usize = 1 << 20;
/// Longest description of drift.
const MAX_DRIFT: usize = 64 * 1024;

/// A frame about one job.
#[derive(Debug)]
pub(crate) enum JobFrame {
    Ack,
    Reject { refusal: Refusal, detail: String },
    Start,
    Cancelling { deadline: Option<Ts> },
    Finished(Box<Finished>),
    Step(Box<StepWrite>),
    Heartbeat,
    CancelAnswer(Answer),
}

/// An agent's answer to a cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    UnknownJob,
    AlreadyTerminal,
    Cancelling,
}

/// The end of a job, as its agent says.
#[derive(Debug)]
pub(crate) struct Finished {
    pub status: JobStatus,
    pub reason: Option<FailureReason>,
    pub message: Option<String>,
    pub outputs: BTreeMap<String, String>,
    pub evidence: Option<Json>,
    pub log_bytes: u64,
    pub at: Ts,
}

/// Reads a frame about a job.
pub(crate) fn read(frame: Frame) -> Result<(JobRef, JobFrame), String> {
    Ok(match frame {
        Frame::JobAck(ack) => (read_ref(ack.job.as_ref())?, JobFrame::Ack),
        Frame::JobReject(reject) => {
            let refusal = match reject.reason() {
                RejectReason::Draining => Refusal::Draining,
                RejectReason::Resetting => Refusal::Resetting,
                RejectReason::Unsupported => Refusal::Unsupported,
                RejectReason::Busy | RejectReason::Unspecified => Refusal::Busy,
            };
            (read_ref(reject.job.as_ref())?, JobFrame::Reject { refusal, detail: text(reject.detail) })
        }
        Frame::JobUpdate(update) => (read_ref(update.job.as_ref())?, read_update(update)?),
        Frame::StepUpdate(update) => {
            let job = read_ref(update.job.as_ref())?;
            (job, JobFrame::Step(Box::new(read_step(job, update)?)))
        }
        Frame::JobHeartbeat(beat) => (read_ref(beat.job.as_ref())?, JobFrame::Heartbeat),
        Frame::CancelAnswer(answer) => {
            let said = match answer.answer.as_str() {
                "unknown_job" => Answer::UnknownJob,
                "already_terminal" => Answer::AlreadyTerminal,
                "cancelling" => Answer::Cancelling,
                other => return Err(format!("cancel_answer.answer: `{}` is not known", text(other.to_owned()))),
            };
            (read_ref(answer.job.as_ref())?, JobFrame::CancelAnswer(said))
        }
        Frame::Register(_) | Frame::Heartbeat(_) | Frame::AgentStatus(_) | Frame::FrameNack(_) => {
            return Err("the frame is not about a job".to_owned());
        }
    })
}

fn read_update(update: JobUpdate) -> Result<JobFrame, String> {
    let status: JobStatus = update.state.parse().map_err(|error| format!("job_update.state: {error}"))?;
    match status {
        JobStatus::Running => Ok(JobFrame::Start),
        JobStatus::Cancelling => Ok(JobFrame::Cancelling {
            deadline: (update.cancel_deadline_us > 0).then(|| Ts::from_micros(update.cancel_deadline_us)),
        }),
        JobStatus::Success | JobStatus::Failed | JobStatus::Cancelled => {
            let reason = read_reason(status, &update.reason);
            Ok(JobFrame::Finished(Box::new(Finished {
                status,
                reason,
                message: some_text(update.message),
                outputs: update.outputs.into_iter().collect(),
                evidence: update.evidence.map(evidence),
                log_bytes: update.log_bytes,
                at: Ts::from_micros(update.at_us),
            })))
        }
        other => Err(format!("job_update.state: an agent cannot say `{other}`")),
    }
}

/// A word of a newer build reads as the plainest reason of its status; the message says the rest.
fn read_reason(status: JobStatus, word: &str) -> Option<FailureReason> {
    match status {
        JobStatus::Success => None,
        JobStatus::Cancelled => Some(word.parse().unwrap_or(FailureReason::CancelledByUser)),
        _ => Some(word.parse().unwrap_or(FailureReason::StepFailed)),
    }
}

fn evidence(evidence: Evidence) -> Json {
    let mut out = serde_json::Map::new();
    let mut put = |key: &str, value: Json| {
        out.insert(key.to_owned(), value);
    };
    if let Some(code) = evidence.exit_code {
        put("exit_code", json!(code));
    }
    if let Some(signal) = evidence.signal {
        put("signal", json!(signal));
    }
    if let Some(bytes) = evidence.peak_memory_bytes {
        put("peak_memory_bytes", json!(bytes));
    }
    if let Some(bytes) = evidence.memory_limit_bytes {
        put("memory_limit_bytes", json!(bytes));
    }
    if !evidence.failed_step.is_empty() {
        put("failed_step", json!(text(evidence.failed_step)));
    }
    if evidence.strays_killed > 0 {
        put("strays_killed", json!(evidence.strays_killed));
    }
    Json::Object(out)
}

fn read_step(job: JobRef, update: StepUpdate) -> Result<StepWrite, String> {
    let key = update.step.as_ref().ok_or("step_update.step is missing")?;
    if !key.is_valid() {
        return Err("step_update.step: the kind or the owner is not a legal one".to_owned());
    }
    let status: StepStatus = update.state.parse().map_err(|error| format!("step_update.state: {error}"))?;
    Ok(StepWrite {
        job,
        step_key: key.text(),
        ordinal: key.place(),
        name: text(update.name),
        status,
        at: Ts::from_micros(update.at_us),
        exit_code: update.exit_code,
        message: some_text(update.message),
        outputs: update.outputs.into_iter().collect(),
        log_bytes: update.log_bytes,
        log_lines: update.log_lines,
        missing_bytes: update.missing_bytes,
        missing_lines: update.missing_lines,
        failure_allowed: update.failure_allowed,
        summary: Some(cut(update.summary, MAX_SUMMARY)).filter(|text| !text.is_empty()),
        attempt: update.attempt.max(1),
        // A word of a newer agent is no reason to lose the step.
        check: update.check_result.parse().ok(),
        drift: Some(cut(update.drift, MAX_DRIFT)).filter(|text| !text.is_empty()),
        group: some_text(update.group),
    })
}

fn some_text(message: String) -> Option<String> {
    Some(text(message)).filter(|text| !text.is_empty())
}

fn text(message: String) -> String {
    cut(message, MAX_TEXT)
}

fn cut(mut text: String, limit: usize) -> String {
    text.truncate(text.floor_char_boundary(limit));
    // PostgreSQL stores no NUL in text.
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

#[cfg(test)]
mod tests {
    use kici_protocol::agent::StepKey;
    use kici_protocol::common;

    use super::*;

    fn job() -> Option<common::JobRef> {
        let id = uuid::Uuid::from_u128(4).to_string();
        Some(common::JobRef { run_id: id.clone(), job_id: id, dispatch_epoch: 1 })
    }

    fn update(state: &str, reason: &str) -> Result<JobFrame, String> {
        let update = JobUpdate { job: job(), state: state.into(), reason: reason.into(), ..Default::default() };
        read(Frame::JobUpdate(update)).map(|(_, frame)| frame)
    }

    #[test]
    fn an_agent_may_say_five_states_and_no_others() {
        for state in JobStatus::ALL {
            let legal = ["running", "cancelling", "success", "failed", "cancelled"].contains(&state.as_str());
            assert_eq!(update(state.as_str(), "").is_ok(), legal, "{state}");
        }
        assert!(update("done", "").unwrap_err().starts_with("job_update.state: `done`"));
    }

    #[test]
    fn unknown_reasons_of_newer_agents_keep_the_status() {
        let Ok(JobFrame::Finished(done)) = update("failed", "melted") else { panic!("finished") };
        assert_eq!((done.status, done.reason), (JobStatus::Failed, Some(FailureReason::StepFailed)));
        let Ok(JobFrame::Finished(done)) = update("cancelled", "agent_shutdown") else { panic!("finished") };
        assert_eq!(done.reason, Some(FailureReason::AgentShutdown));
        let Ok(JobFrame::Finished(done)) = update("success", "oom_killed") else { panic!("finished") };
        assert_eq!(done.reason, None);
    }

    #[test]
    fn step_keys_that_could_leave_a_directory_and_nul_bytes_are_not_stored() {
        let step = |kind: &str, name: &str| {
            let step = StepKey { kind: kind.into(), owner_index: 0, ordinal: 0 };
            let update = StepUpdate {
                job: job(),
                step: Some(step),
                name: name.into(),
                state: "running".into(),
                ..Default::default()
            };
            read(Frame::StepUpdate(update)).map(|(_, frame)| frame)
        };
        assert!(step("../../etc", "x").is_err());
        let Ok(JobFrame::Step(write)) = step("step", &format!("a\0{}", "ä".repeat(2000))) else { panic!("step") };
        assert!(write.name.starts_with("a\u{fffd}ä") && write.name.len() <= MAX_TEXT + 2);
        assert_eq!(write.step_key, "step-0-0");
    }
}
