//! Rows as the API shows them.

use std::collections::BTreeMap;

use kici_api::dto::events::DeliveryView;
use kici_api::dto::runs::{FailureView, HandOverView, JobView, LogTotals, NeedView, RunView, SlotView, StepView};
use kici_api::page::{PageRequest, Position, Slice};
use kici_engine::state::JobStatus;
use kici_store::model::{self, Cursor, Listed, NeedEdge, Page};
use serde_json::Value as Json;

/// The page that the API asks for, as the store takes it.
pub(super) fn page(request: PageRequest) -> Page {
    Page { limit: request.limit, after: request.after.map(|at| Cursor { at: at.at, id: at.id }) }
}

/// A listed page as the API gives it.
pub(super) fn slice<T, V>(listed: Listed<T>, view: impl Fn(T) -> V) -> Slice<V> {
    Slice {
        items: listed.items.into_iter().map(view).collect(),
        next: listed.next.map(|next| Position { at: next.at, id: next.id }),
    }
}

pub(super) fn run(run: &model::Run) -> RunView {
    let failure = run.failure_reason.map(|reason| FailureView {
        reason,
        class: reason.class(),
        message: run.failure_message.clone(),
        evidence: None,
    });
    RunView {
        id: run.id,
        source: run.event.source.clone(),
        repo: run.repo.clone(),
        git_ref: run.git_ref.clone(),
        sha: run.sha.clone(),
        workflow: run.workflow_name.clone(),
        name: run.run_name.clone(),
        trigger: run.trigger_kind.clone(),
        status: run.status,
        check_mode: run.event.check_mode,
        failure,
        attempt: run.attempt,
        parent_run_id: run.parent_run_id,
        cancel_requested_at: run.cancel_requested_at,
        created_at: run.created_at,
        started_at: run.started_at,
        finished_at: run.finished_at,
    }
}

pub(super) fn job(job: &model::Job, edges: &[NeedEdge], slots: &[model::Slot]) -> JobView {
    let failure = job.failure_reason.map(|reason| FailureView {
        reason,
        class: reason.class(),
        message: job.failure_message.clone(),
        evidence: job.evidence.clone(),
    });
    let matrix: BTreeMap<String, Json> =
        job.matrix.iter().flatten().map(|(name, value)| (name.clone(), Json::String(value.clone()))).collect();
    let needs = edges
        .iter()
        .filter(|edge| edge.job_name == job.name && !edge.resolved)
        .map(|edge| NeedView {
            job: edge.generator.as_ref().unwrap_or(&edge.need.job).clone(),
            group: edge.need.group.clone(),
            when: edge.need.run_on.clone(),
        })
        .collect();
    JobView {
        id: job.id,
        run_id: job.run_id,
        name: job.name.clone(),
        base_name: job.base_name.clone(),
        display_name: job.display_name.clone(),
        matrix,
        needs,
        kind: job.kind.map(|kind| kind.as_str().to_owned()),
        status: job.status,
        // A skipped job has a reason without a failure; it is shown where the others show theirs.
        routing_reason: job.routing_reason.clone().or_else(|| wait_reason(job, slots)).or_else(|| skip_reason(job)),
        failure,
        agent_id: job.agent_id.as_ref().map(ToString::to_string),
        epoch: job.dispatch_epoch,
        attempt: job.attempt,
        earlier: Vec::new(),
        outputs: job.outputs.clone(),
        log_bytes: job.log_bytes,
        timeout_ms: job.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
        created_at: job.created_at,
        ready_at: job.ready_at,
        started_at: job.started_at,
        finished_at: job.finished_at,
    }
}

/// What a waiting job waits for: its own slot, else that of its run.
pub(super) fn wait_reason(job: &model::Job, slots: &[model::Slot]) -> Option<String> {
    if job.status != JobStatus::Waiting {
        return None;
    }
    let queued = |slot: &&model::Slot| slot.status == model::SlotStatus::Queued;
    let of = |wanted| slots.iter().filter(queued).find(|slot| slot.job_id == wanted);
    let slot = of(None).or_else(|| of(Some(job.id)))?;
    let holders = slot.held_by.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let place = match slot.place {
        Some(place) => format!("place {place} of {}", slot.waiting),
        None => "superseded by a newer run".to_owned(),
    };
    let holders = if holders.is_empty() { String::new() } else { format!(", held by {holders}") };
    Some(format!("waits for a slot of concurrency group `{}`: {place}{holders}", slot.group))
}

pub(super) fn hand_over(record: model::DispatchRecord) -> HandOverView {
    HandOverView {
        epoch: record.epoch,
        agent_id: record.agent_id.to_string(),
        at: record.dispatched_at,
        ended_at: record.ended_at,
        outcome: record.outcome,
        reason: record.reason,
    }
}

pub(super) fn slot(slot: model::Slot) -> SlotView {
    SlotView {
        job_id: slot.job_id,
        group: slot.group,
        max: slot.max,
        status: slot.status.as_str().to_owned(),
        place: slot.place,
        waiting: slot.waiting,
        held_by: slot.held_by,
        superseded_by: slot.superseded_by,
        created_at: slot.created_at,
        acquired_at: slot.acquired_at,
        ended_at: slot.ended_at,
    }
}

fn skip_reason(job: &model::Job) -> Option<String> {
    job.failure_reason.is_none().then(|| job.failure_message.clone()).flatten()
}

pub(super) fn step(step: model::Step, log_complete: bool) -> StepView {
    StepView {
        job_id: step.job_id,
        epoch: step.epoch,
        key: step.step_key,
        ordinal: step.ordinal,
        name: step.name,
        status: step.status,
        exit_code: step.exit_code,
        message: step.message,
        failure_allowed: step.failure_allowed,
        outputs: step.outputs,
        summary: step.summary,
        attempt: step.attempt,
        check: step.check,
        drift: step.drift,
        group: step.group,
        log: LogTotals {
            bytes: step.log_bytes,
            lines: step.log_lines,
            missing_bytes: step.missing_bytes,
            missing_lines: step.missing_lines,
            complete: log_complete,
        },
        started_at: step.started_at,
        finished_at: step.finished_at,
    }
}

pub(super) fn delivery(row: model::Delivery, source: String) -> DeliveryView {
    DeliveryView {
        id: row.id,
        delivery_id: row.delivery_id,
        source,
        provider: row.provider,
        channel: row.channel,
        event: row.event,
        action: row.action,
        status: row.status.as_str().to_owned(),
        matched_count: row.matched_count,
        repo: row.repo,
        git_ref: row.git_ref,
        sha: row.sha,
        first_run_id: row.first_run_id,
        error: row.error,
        note: row.note,
        attempts: row.attempts,
        payload_bytes: row.payload_bytes,
        payload_sha256: row.payload_sha256,
        payload_omitted: row.payload_omitted,
        next_attempt_at: row.next_attempt_at,
        received_at: row.received_at,
        finished_at: row.finished_at,
        request_id: Some(row.request_id),
    }
}
