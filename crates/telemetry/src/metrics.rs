//! The metrics recorder of a process and its text.

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::TelemetryError;

/// 1 ms to 5 s: dispatch, matching, requests.
const MILLISECONDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];

/// 1 s to 30 min: runs, jobs, steps, builds.
const JOBS: [f64; 10] = [1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0];

/// Histograms that measure work of jobs; every other `_seconds` has the millisecond buckets.
const JOB_HISTOGRAMS: [&str; 5] = [
    "kici_orch_execution_duration_seconds",
    "kici_orch_job_duration_seconds",
    "kici_orch_queue_wait_seconds",
    "kici_orch_build_duration_seconds",
    "kici_agent_step_duration_seconds",
];

/// Reads the metrics of this process. Cloning it is cheap.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Every metric in the Prometheus text format 0.0.4.
    pub fn render(&self) -> String {
        self.handle.render()
    }

    /// Folds samples of histograms that nobody scraped. Call it every few seconds: without it, a process that is
    /// never scraped keeps each sample.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

/// Installs the metrics recorder of this process. Metrics that were touched before are lost, so it comes first.
///
/// # Errors
///
/// [`TelemetryError::AlreadyInstalled`] on a second call.
pub fn install() -> Result<Metrics, TelemetryError> {
    let recorder = recorder()?;
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|_| TelemetryError::AlreadyInstalled("metrics recorder"))?;
    Ok(Metrics { handle })
}

fn recorder() -> Result<PrometheusRecorder, TelemetryError> {
    let refused = |error: metrics_exporter_prometheus::BuildError| TelemetryError::Recorder(error.to_string());
    let mut builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &MILLISECONDS)
        .map_err(refused)?;
    for name in JOB_HISTOGRAMS {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.into()), &JOBS).map_err(refused)?;
    }
    Ok(builder.build_recorder())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_have_the_buckets_of_their_class() {
        let recorder = recorder().unwrap();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            metrics::counter!("kici_orch_dedup_hits_total").increment(2);
            metrics::histogram!("kici_orch_dispatch_ack_latency_seconds").record(0.004);
            metrics::histogram!("kici_orch_execution_duration_seconds").record(20.0);
        });
        let text = Metrics { handle }.render();
        assert!(text.contains("kici_orch_dedup_hits_total 2"), "{text}");
        assert!(text.contains("kici_orch_dispatch_ack_latency_seconds_bucket{le=\"0.005\"} 1"), "{text}");
        assert!(text.contains("kici_orch_execution_duration_seconds_bucket{le=\"15\"} 0"), "{text}");
        assert!(text.contains("kici_orch_execution_duration_seconds_bucket{le=\"30\"} 1"), "{text}");
    }

    #[test]
    fn upkeep_keeps_what_was_recorded() {
        let recorder = recorder().unwrap();
        let metrics = Metrics { handle: recorder.handle() };
        metrics::with_local_recorder(&recorder, || metrics::histogram!("x_seconds").record(1.0));
        metrics.upkeep();
        assert!(metrics.render().contains("x_seconds_count 1"));
    }
}
