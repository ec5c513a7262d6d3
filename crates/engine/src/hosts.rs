//! Hosts: how one stands, which of them a selector means, and what becomes of a job on a host that is out of contact.
//!
//! One grammar and one matcher serve `runs_on_all` in workflow files, the list of hosts and the preview of a fan-out, so
//! that all three mean the same hosts.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::ids::AgentId;
use crate::labels::{LabelSet, MAX_MATCHERS, RESERVED_PREFIX, SelectorError, Term};
use crate::lock::{Matcher, Selector};
use crate::state::words;
use crate::time::Ts;

mod query;
mod selector;

pub use query::{HostQuery, QueryFault};
pub use selector::{HostSelector, OnUnreachable};

/// Most hosts that one `runs_on_all` job goes to, unless configured otherwise.
pub const DEFAULT_MAX_HOSTS: usize = 1024;

words! {
    /// How long a host stays known.
    Lifecycle("lifecycle class") {
        /// Declared or set up by people: known until it is removed.
        Static = "static",
        /// Made for one or a few jobs: forgotten some time after it is gone.
        Ephemeral = "ephemeral",
    }
}

words! {
    /// How a host stands. Derived where it is shown, never stored.
    HostStatus("host status") {
        /// Connected, and heard of lately.
        Ready = "ready",
        /// A static host that is out of contact.
        Unreachable = "unreachable",
        /// An ephemeral host that is out of contact.
        Stale = "stale",
    }
}

/// The one rule for [`HostStatus`]: ready is connected to some orchestrator and heard of within `grace`.
pub fn host_status(
    lifecycle: Lifecycle,
    connected: bool,
    last_seen: Option<Ts>,
    now: Ts,
    grace: Duration,
) -> HostStatus {
    match lifecycle {
        _ if connected && last_seen.is_some_and(|at| now.since(at) <= grace) => HostStatus::Ready,
        Lifecycle::Static => HostStatus::Unreachable,
        Lifecycle::Ephemeral => HostStatus::Stale,
    }
}

/// True for the property names that only the system and operators set (`kici:…`, in any case).
pub fn is_reserved_property(key: &str) -> bool {
    key.get(..RESERVED_PREFIX.len()).is_some_and(|prefix| prefix.eq_ignore_ascii_case(RESERVED_PREFIX))
}

/// A known host, as selectors see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// Its agent.
    pub agent_id: AgentId,
    /// All its labels: those of its agent, or the declared ones while no agent has registered.
    pub labels: LabelSet,
    /// How long it stays known.
    pub lifecycle: Lifecycle,
    /// How it stands.
    pub status: HostStatus,
    /// A scaler made it: no target of a fan-out.
    pub scaler_managed: bool,
    /// Its agent has registered at least once.
    pub initialized: bool,
    /// Properties; the reserved ones are not matched.
    pub properties: BTreeMap<String, Json>,
}

/// A [`HostSelector`] made ready for matching.
#[derive(Clone, Debug, Default)]
pub struct HostMatcher {
    include: Vec<Vec<Term>>,
    exclude: Vec<Term>,
}

impl HostMatcher {
    /// Checks and compiles a selector. Without groups it means every host that is not excluded.
    ///
    /// # Errors
    /// [`SelectorError`]: a matcher that is none, a group without a label, or too many matchers.
    pub fn compile(selector: &HostSelector) -> Result<Self, SelectorError> {
        let count = selector.include.iter().map(Vec::len).sum::<usize>() + selector.exclude.len();
        if count > MAX_MATCHERS {
            return Err(SelectorError::TooMany(count));
        }
        if selector.include.iter().any(Vec::is_empty) {
            return Err(SelectorError::Empty);
        }
        let all = |list: &[Matcher]| list.iter().map(Term::compile).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            include: selector.include.iter().map(|group| all(group)).collect::<Result<_, _>>()?,
            exclude: all(&selector.exclude)?,
        })
    }

    /// The first group that `labels` satisfies, unless they are excluded. Without groups it is 0.
    pub fn group(&self, labels: &LabelSet) -> Option<usize> {
        if self.exclude.iter().any(|term| term.hit(labels).is_some()) {
            return None;
        }
        if self.include.is_empty() {
            return Some(0);
        }
        self.include.iter().position(|group| group.iter().all(|term| term.hit(labels).is_some()))
    }

    /// Whether the selector means a host with these labels.
    pub fn matches(&self, labels: &LabelSet) -> bool {
        self.group(labels).is_some()
    }
}

/// The hosts that a fan-out goes to, in the order of their agents. Hosts of scalers are none of them, and hosts whose agent
/// never registered only when the job asks for those.
pub fn targets<'a>(matcher: &HostMatcher, include_uninitialized: bool, hosts: &'a [Host]) -> Vec<&'a Host> {
    let usable = |host: &&Host| !host.scaler_managed && (host.initialized || include_uninitialized);
    let mut found: Vec<&Host> = hosts.iter().filter(usable).filter(|host| matcher.matches(&host.labels)).collect();
    found.sort_by(|a, b| a.agent_id.cmp(&b.agent_id));
    found
}

/// The labels that the agent of a fanned-out job must have: the group that the host satisfies now, else the first.
pub fn pinned_selector(selector: &HostSelector, labels: &LabelSet) -> Selector {
    let group = HostMatcher::compile(selector).ok().and_then(|matcher| matcher.group(labels)).unwrap_or_default();
    let labels = selector.include.get(group).cloned().unwrap_or_default();
    Selector { labels, exclude: selector.exclude.clone(), ..Selector::default() }
}

/// What becomes of a job on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// It runs.
    Run,
    /// It waits for the host.
    Hold,
    /// It is skipped.
    Skip,
    /// It fails.
    Fail,
}

impl Reach {
    /// Its word.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Hold => "hold",
            Self::Skip => "skip",
            Self::Fail => "fail",
        }
    }
}

/// What becomes of a job on a host that stands like this. An ephemeral host that is gone does not come back: its job is
/// skipped whatever the job asks for. `None` is a host that is not known any more.
pub fn reach(host: Option<(Lifecycle, HostStatus)>, policy: OnUnreachable) -> Reach {
    match (host, policy) {
        (Some((_, HostStatus::Ready)), _) => Reach::Run,
        (Some((Lifecycle::Ephemeral, _)), _) | (_, OnUnreachable::Skip) => Reach::Skip,
        (_, OnUnreachable::Hold) => Reach::Hold,
        (_, OnUnreachable::Fail) => Reach::Fail,
    }
}

/// The place of a job in its fan-out over hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fanout {
    /// The host: only its agent runs the job.
    pub host: AgentId,
    /// From 0, in the order of the agents' names.
    pub index: u32,
    /// How many hosts there are.
    pub total: u32,
}

impl Fanout {
    /// What expressions see as `fanout`.
    pub fn context(&self) -> Json {
        serde_json::json!({
            "host": self.host.as_str(),
            "index": self.index,
            "total": self.total,
            "first": self.index == 0,
            "last": self.index + 1 == self.total,
        })
    }
}

#[cfg(test)]
mod tests;
