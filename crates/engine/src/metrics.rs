//! The metric catalogue (operations 4.5): the one list of names that programs emit and the reference page shows.

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

/// Every metric that this build emits, by name.
pub const CATALOGUE: &[Metric] = &[];

/// The entry of `name`.
pub fn lookup(name: &str) -> Option<&'static Metric> {
    CATALOGUE.iter().find(|metric| metric.name == name)
}
