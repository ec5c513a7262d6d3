//! The metric catalogue (operations 4.5): the one list of names that programs emit and the reference page shows.

use std::collections::BTreeSet;

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
}

/// The program that emits a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// `kici-orchestrator`.
    Orchestrator,
    /// `kici-agent`.
    Agent,
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// Full name.
    pub name: &'static str,
    /// How it behaves.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Unit (`seconds`, `bytes`), empty for plain counts.
    pub unit: &'static str,
    /// One line for people.
    pub help: &'static str,
    /// Who emits it.
    pub service: Service,
    /// Upper bounds of the buckets of a histogram, in its unit.
    pub buckets: &'static [f64],
}

/// Requests, commits, hand-overs: 1 ms to 5 s.
const QUICK: &[f64] = &[0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
/// Runs, jobs and steps: 1 s to 30 min.
const LONG: &[f64] = &[1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0];
/// Counts of things handled together.
const SIZES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];

macro_rules! catalogue {
    ($($service:ident { $($kind:ident $name:literal [$($label:literal),*] $unit:literal $($buckets:ident)? : $help:literal;)* })*) => {
        /// Every metric that this build emits, by service and name.
        pub const CATALOGUE: &[Metric] = &[$($(Metric {
            name: $name,
            kind: Kind::$kind,
            labels: &[$($label),*],
            unit: $unit,
            help: $help,
            service: Service::$service,
            buckets: catalogue!(@ $($buckets)?),
        },)*)*];
    };
    (@) => { &[] };
    (@ $buckets:ident) => { $buckets };
}

catalogue! {
    Orchestrator {
        Counter "kici_orch_access_log_dropped_total" [] "": "Entries of the access log that could not be written.";
        Gauge "kici_orch_agents_active" [] "": "Agents that are connected and registered here.";
        Counter "kici_orch_credential_requests_total" ["kind", "result"] "": "Git credentials that jobs asked for.";
        Counter "kici_orch_db_conflicts_total" ["operation"] "": "Transactions that were run again because others changed the same rows.";
        Counter "kici_orch_db_errors_total" ["kind"] "": "Writes that the database failed.";
        Histogram "kici_orch_db_write_batch_size" [] "" SIZES: "State changes that were committed together.";
        Gauge "kici_orch_declared_hosts_unreachable" [] "": "Static hosts that are out of contact.";
        Counter "kici_orch_dedup_hits_total" [] "": "Deliveries that were dropped because they are stored already.";
        Histogram "kici_orch_dispatch_ack_latency_seconds" [] "seconds" QUICK: "From an offer to the agent's answer.";
        Gauge "kici_orch_dispatch_queue_backpressure" [] "": "1 while more jobs wait for agents than queue.backpressure_threshold.";
        Gauge "kici_orch_dispatch_queue_depth" ["status"] "": "Rows of the dispatch queue.";
        Counter "kici_orch_dispatch_requeues_total" ["reason"] "": "Jobs that went back to the queue.";
        Counter "kici_orch_dispatch_rows_pruned_total" [] "": "Old rows of the dispatch queue that were deleted.";
        Gauge "kici_orch_draining" [] "": "1 while this instance takes no new work.";
        Counter "kici_orch_event_dispatch_success_total" ["event_name"] "": "Events of the bus that were delivered; emitted ones under one name.";
        Gauge "kici_orch_event_dlq_depth" [] "": "Dead deliveries and events that wait for a decision.";
        Counter "kici_orch_event_dlq_total" ["event_name", "reason"] "": "Events of the bus that were given up.";
        Counter "kici_orch_event_retry_total" ["event_name"] "": "Attempts to deliver an event of the bus that failed.";
        Counter "kici_orch_events_refused_total" ["reason"] "": "Events that were not taken: depth, name, payload, rate, size, stale, store, targets.";
        Histogram "kici_orch_execution_duration_seconds" [] "seconds" LONG: "Duration of runs.";
        Counter "kici_orch_executions_total" ["status"] "": "Runs that ended.";
        Counter "kici_orch_generated_refused_total" [] "": "Documents of generated jobs that were refused.";
        Histogram "kici_orch_http_request_duration_seconds" ["route"] "seconds" QUICK: "Duration of HTTP requests.";
        Counter "kici_orch_http_requests_total" ["route", "method", "code"] "": "HTTP requests.";
        Counter "kici_orch_ingest_admitted_total" [] "": "Deliveries that were let in.";
        Counter "kici_orch_ingest_overflow_captured_total" [] "": "Deliveries that were kept as overflow.";
        Counter "kici_orch_ingest_overflow_dropped_total" ["reason"] "": "Deliveries that the overflow had no room for, or that grew too old in it.";
        Counter "kici_orch_ingest_overflow_replayed_total" [] "": "Deliveries that were taken from the overflow.";
        Gauge "kici_orch_ingest_queue_depth" [] "": "Deliveries that wait to be let in.";
        Counter "kici_orch_ingest_shed_total" ["reason"] "": "Deliveries that were put off under load.";
        Gauge "kici_orch_job_consecutive_failures" ["job"] "": "Failures in a row of a background job.";
        Histogram "kici_orch_job_duration_seconds" ["job"] "seconds" QUICK: "Duration of a background job.";
        Gauge "kici_orch_job_last_failure_timestamp_seconds" ["job"] "seconds": "When a background job last failed.";
        Gauge "kici_orch_job_last_success_timestamp_seconds" ["job"] "seconds": "When a background job last succeeded.";
        Counter "kici_orch_job_recovery_total" ["outcome"] "": "Jobs whose agent was out of contact, by what became of them.";
        Counter "kici_orch_job_runs_total" ["job", "result"] "": "Runs of background jobs.";
        Counter "kici_orch_jobs_dispatched_total" ["status"] "": "Jobs that were offered to an agent, queued or rejected.";
        Counter "kici_orch_log_bytes_stored_total" [] "bytes": "Bytes of job logs that are durable.";
        Counter "kici_orch_log_chunks_received_total" ["source"] "": "Log chunks that arrived.";
        Counter "kici_orch_log_gap_total" ["source"] "": "Ranges that are missing in job logs.";
        Counter "kici_orch_nonmonotonic_job_status_writes_total" ["rejected_status"] "": "Status changes that were refused because the job had moved on.";
        Counter "kici_orch_object_bytes_total" ["direction"] "bytes": "Bytes of caches and artifacts that came in and went out.";
        Counter "kici_orch_ownership_violations_total" ["kind"] "": "Frames about jobs that the sender does not own.";
        Histogram "kici_orch_queue_wait_seconds" ["pool"] "seconds" LONG: "From a job being ready to its start.";
        Counter "kici_orch_retention_rows_deleted_total" ["table"] "": "Rows that were deleted because of their age.";
        Counter "kici_orch_runs_superseded_total" [] "": "Runs that were cancelled because a newer one of their concurrency group cancels what is in progress.";
        Counter "kici_orch_scaler_claims_redeemed_total" ["outcome"] "": "Claim codes that were brought: redeemed, invalid, consumed, expired, revoked, lost, rate_limited.";
        Counter "kici_orch_scaler_redispatch_total" ["trigger"] "": "Agents started for jobs that had waited.";
        Gauge "kici_orch_sse_clients" ["topic"] "": "Open event streams.";
        Counter "kici_orch_sse_gaps_total" ["topic"] "": "Event streams that lost their place.";
        Counter "kici_orch_stale_runs_detected_total" [] "": "Runs that were found out of contact.";
        Counter "kici_orch_step_logs_pruned_total" [] "": "Objects of logs that were removed because of their age.";
        Counter "kici_orch_steps_total" ["status"] "": "Steps that ended.";
        Gauge "kici_orch_stored_bytes" ["kind"] "bytes": "Bytes of caches and artifacts that are kept.";
        Gauge "kici_orch_stored_objects" ["kind"] "": "Entries of caches and artifacts that are kept.";
        Histogram "kici_orch_trigger_match_duration_seconds" [] "seconds" QUICK: "Time to match the workflows of one event.";
        Counter "kici_orch_unroutable_fast_failed_total" [] "": "Jobs that failed because no agent could ever run them.";
        Counter "kici_orch_user_cache_evicted_total" ["reason"] "": "Entries of caches that were removed: age, quota.";
        Counter "kici_orch_user_cache_ops_total" ["op", "result"] "": "Restores and saves of caches.";
        Counter "kici_orch_webhook_pipeline_failures_total" ["phase"] "": "Failures after a delivery was accepted.";
        Counter "kici_orch_webhook_signature_failures_total" ["source"] "": "Deliveries with a wrong signature.";
        Counter "kici_orch_webhooks_processed_total" ["result"] "": "Deliveries by outcome.";
        Counter "kici_orch_webhooks_received_total" ["source"] "": "Deliveries that arrived and were verified.";
    }
    Agent {
        Histogram "kici_agent_clone_duration_seconds" [] "seconds" LONG: "Duration of checkouts.";
        Gauge "kici_agent_connected" [] "": "1 while the session with the orchestrator is open.";
        Counter "kici_agent_credential_requests_total" ["outcome"] "": "Git credentials and write windows that steps asked for.";
        Gauge "kici_agent_jobs_active" [] "": "Jobs that are running here.";
        Counter "kici_agent_jobs_total" ["status"] "": "Jobs that ended.";
        Gauge "kici_agent_log_backpressure_active" [] "": "1 while output of steps is held back.";
        Counter "kici_agent_log_backpressure_events_total" [] "": "Times that output of steps was held back.";
        Counter "kici_agent_log_bytes_total" [] "bytes": "Bytes of output that were read from steps.";
        Counter "kici_agent_log_lines_dropped_total" ["mode"] "": "Lines that a log limit cut out.";
        Counter "kici_agent_orphans_killed_total" [] "": "Processes that jobs left running and that were ended.";
        Gauge "kici_agent_outbox_pending" [] "": "Results that the orchestrator has not acknowledged.";
        Counter "kici_agent_reset_failures_total" [] "": "Resets between two jobs that failed.";
        Histogram "kici_agent_step_duration_seconds" [] "seconds" LONG: "Duration of steps.";
        Counter "kici_agent_steps_total" ["status"] "": "Steps that ended.";
    }
}

/// The entry of `name`.
pub fn lookup(name: &str) -> Option<&'static Metric> {
    CATALOGUE.iter().find(|metric| metric.name == name)
}

/// The metrics of one program.
pub fn of(service: Service) -> impl Iterator<Item = &'static Metric> {
    CATALOGUE.iter().filter(move |metric| metric.service == service)
}

/// The names in a page in Prometheus' text format that the catalogue does not have; for the tests of the programs.
pub fn undeclared(page: &str) -> BTreeSet<String> {
    let name = |line: &str| line.split(['{', ' ']).next().unwrap_or_default().to_owned();
    let declared = |name: &str| {
        lookup(name).is_some()
            || ["_bucket", "_sum", "_count"]
                .iter()
                .filter_map(|suffix| name.strip_suffix(suffix))
                .any(|base| lookup(base).is_some_and(|metric| metric.kind == Kind::Histogram))
    };
    let samples = page.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    samples.map(name).filter(|name| !declared(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_sorted_and_end_in_their_unit() {
        for service in [Service::Orchestrator, Service::Agent] {
            let names: Vec<_> = of(service).map(|metric| metric.name).collect();
            assert!(names.is_sorted() && names.windows(2).all(|pair| pair[0] != pair[1]));
        }
        for metric in CATALOGUE {
            let prefix = if metric.service == Service::Agent { "kici_agent_" } else { "kici_orch_" };
            assert!(metric.name.starts_with(prefix), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Histogram, !metric.buckets.is_empty(), "{}", metric.name);
            assert!(metric.unit != "seconds" || metric.name.ends_with("_seconds"), "{}", metric.name);
            assert!(metric.buckets.is_sorted() && metric.help.ends_with('.'), "{}", metric.name);
        }
    }

    #[test]
    fn a_page_is_compared_with_the_catalogue() {
        let page = "# HELP x y\nkici_orch_draining 0\nkici_orch_execution_duration_seconds_bucket{le=\"1\"} 0\n\
                    kici_orch_draining_count 1\nkici_orch_other{a=\"b\"} 1\n";
        let want: BTreeSet<_> = ["kici_orch_draining_count", "kici_orch_other"].map(str::to_owned).into();
        assert_eq!(undeclared(page), want);
    }
}
