//! How a KiCI process speaks about itself: one log stream and one set of metrics.
//!
//! [`init`] installs the log subscriber, [`metrics::install`] the metrics recorder. Both are called once, by a
//! program's `main`, before anything else; libraries only use the `tracing` and `metrics` facades and stay silent in
//! a process that installs neither.
#![forbid(unsafe_code)]

mod json;
mod logging;
pub mod metrics;

pub use logging::{Format, Service, TelemetryConfig, init, name_instance};

/// Why the logging or metrics set-up of a process failed.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter does not parse.
    #[error(
        "log.level `{filter}` is not a level or filter ({problem}); use error, warn, info, debug, trace or target=level pairs"
    )]
    Filter {
        /// What was configured.
        filter: String,
        /// What the parser says.
        problem: String,
    },
    /// The format has no such name.
    #[error("log.format `{0}` is not known; use auto, json or pretty")]
    Format(String),
    /// A subscriber or recorder is there already.
    #[error("the process already has a {0}; set it up once, at the start of main")]
    AlreadyInstalled(&'static str),
    /// The recorder refused its configuration.
    #[error("the metrics recorder refused its buckets: {0}")]
    Recorder(String),
}
