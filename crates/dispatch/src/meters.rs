//! The metrics of dispatch. Names and meanings are in the catalogue, `kici_engine::metrics`.

use std::time::Duration;

use kici_store::model::Run;

pub(crate) fn agents_active(count: usize) {
    metrics::gauge!("kici_orch_agents_active").set(count as f64);
}

pub(crate) fn hosts_unreachable(count: usize) {
    metrics::gauge!("kici_orch_declared_hosts_unreachable").set(count as f64);
}

pub(crate) fn draining(drain: bool) {
    metrics::gauge!("kici_orch_draining").set(if drain { 1.0 } else { 0.0 });
}

pub(crate) fn dispatched(count: usize) {
    metrics::counter!("kici_orch_jobs_dispatched_total", "status" => "dispatched").increment(count as u64);
}

/// What became of a job that was not handed over at once; `outcome` is a word of `DispatchOutcome`.
pub(crate) fn outcome(outcome: &'static str) {
    metrics::counter!("kici_orch_jobs_dispatched_total", "status" => outcome).increment(1);
}

/// Agents that a pass over waiting jobs has started.
pub(crate) fn redispatched(trigger: &'static str, count: u32) {
    metrics::counter!("kici_orch_scaler_redispatch_total", "trigger" => trigger).increment(count.into());
}

pub(crate) fn claim_redeemed(outcome: &'static str) {
    metrics::counter!("kici_orch_scaler_claims_redeemed_total", "outcome" => outcome).increment(1);
}

pub(crate) fn ack_latency(waited: Duration) {
    metrics::histogram!("kici_orch_dispatch_ack_latency_seconds").record(waited.as_secs_f64());
}

/// `reason` is one of `ack_timeout`, `reject`, `agent_lost`, `preparation`, `retry`.
pub(crate) fn requeued(reason: &'static str) {
    metrics::counter!("kici_orch_dispatch_requeues_total", "reason" => reason).increment(1);
}

/// A job whose agent was out of contact; `outcome` is one of `resumed`, `requeued`, `failed`, `cancelled`, `finished`.
pub(crate) fn recovered(outcome: &'static str) {
    metrics::counter!("kici_orch_job_recovery_total", "outcome" => outcome).increment(1);
}

pub(crate) fn ownership_violation(kind: &'static str) {
    metrics::counter!("kici_orch_ownership_violations_total", "kind" => kind).increment(1);
}

pub(crate) fn step_finished(status: &'static str) {
    metrics::counter!("kici_orch_steps_total", "status" => status).increment(1);
}

pub(crate) fn run_finished(run: &Run) {
    metrics::counter!("kici_orch_executions_total", "status" => run.status.as_str()).increment(1);
    if let (Some(started), Some(finished)) = (run.started_at, run.finished_at) {
        metrics::histogram!("kici_orch_execution_duration_seconds").record(finished.since(started).as_secs_f64());
    }
}

pub(crate) fn queue_wait(waited: Duration) {
    metrics::histogram!("kici_orch_queue_wait_seconds", "pool" => "agents").record(waited.as_secs_f64());
}

pub(crate) fn queue_depth(pending: u64, dispatched: u64, recovering: u64) {
    for (status, count) in [("pending", pending), ("dispatched", dispatched), ("recovering", recovering)] {
        metrics::gauge!("kici_orch_dispatch_queue_depth", "status" => status).set(count as f64);
    }
}

pub(crate) fn backpressure(high: bool) {
    metrics::gauge!("kici_orch_dispatch_queue_backpressure").set(if high { 1.0 } else { 0.0 });
}

pub(crate) fn superseded() {
    metrics::counter!("kici_orch_runs_superseded_total").increment(1);
}

pub(crate) fn unroutable_failed() {
    metrics::counter!("kici_orch_unroutable_fast_failed_total").increment(1);
}

pub(crate) fn stale_found() {
    metrics::counter!("kici_orch_stale_runs_detected_total").increment(1);
}

pub(crate) fn nonmonotonic(rejected: &'static str) {
    metrics::counter!("kici_orch_nonmonotonic_job_status_writes_total", "rejected_status" => rejected).increment(1);
}
