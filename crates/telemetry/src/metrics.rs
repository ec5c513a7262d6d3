//! The metrics recorder of a process and its text.

use kici_engine::metrics::{CATALOGUE, Kind, Metric};
use metrics::Unit;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::TelemetryError;

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

/// Installs the metrics recorder of this process and describes every metric of the catalogue to it. Metrics that were
/// touched before are lost, so it comes first.
///
/// # Errors
///
/// [`TelemetryError::AlreadyInstalled`] on a second call.
pub fn install() -> Result<Metrics, TelemetryError> {
    let recorder = recorder()?;
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|_| TelemetryError::AlreadyInstalled("metrics recorder"))?;
    CATALOGUE.iter().for_each(describe);
    Ok(Metrics { handle })
}

fn describe(metric: &Metric) {
    // A plain count has no unit; the text format leaves out what has none.
    let unit = Unit::from_string(metric.unit).unwrap_or(Unit::Count);
    match metric.kind {
        Kind::Counter => metrics::describe_counter!(metric.name, unit, metric.help),
        Kind::Gauge => metrics::describe_gauge!(metric.name, unit, metric.help),
        Kind::Histogram => metrics::describe_histogram!(metric.name, unit, metric.help),
    }
}

fn recorder() -> Result<PrometheusRecorder, TelemetryError> {
    let refused = |error: metrics_exporter_prometheus::BuildError| TelemetryError::Recorder(error.to_string());
    let mut builder = PrometheusBuilder::new();
    for metric in CATALOGUE.iter().filter(|metric| metric.kind == Kind::Histogram) {
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.into()), metric.buckets).map_err(refused)?;
    }
    Ok(builder.build_recorder())
}

#[cfg(test)]
mod tests {
    use kici_engine::metrics::lookup;

    use super::*;

    #[test]
    fn histograms_have_the_buckets_of_the_catalogue() {
        for metric in CATALOGUE.iter().filter(|metric| metric.kind == Kind::Histogram) {
            let recorder = recorder().unwrap();
            metrics::with_local_recorder(&recorder, || metrics::histogram!(metric.name).record(metric.buckets[1]));
            let text = Metrics { handle: recorder.handle() }.render();
            let below = format!("{}_bucket{{le=\"{}\"}} 0", metric.name, metric.buckets[0]);
            let within = format!("{}_bucket{{le=\"{}\"}} 1", metric.name, metric.buckets[1]);
            assert!(text.contains(&below) && text.contains(&within), "{text}");
        }
    }

    #[test]
    fn the_text_says_what_a_metric_is() {
        let recorder = recorder().unwrap();
        let handle = recorder.handle();
        let metric = lookup("kici_orch_http_request_duration_seconds").unwrap();
        metrics::with_local_recorder(&recorder, || {
            describe(metric);
            metrics::histogram!(metric.name).record(1.0);
        });
        let text = Metrics { handle }.render();
        assert!(text.contains(&format!("# HELP {} {}", metric.name, metric.help)), "{text}");
        assert!(text.contains(&format!("# TYPE {} histogram", metric.name)), "{text}");
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
