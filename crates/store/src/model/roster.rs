//! The roster of hosts.

use std::collections::BTreeMap;
use std::time::Duration;

use kici_engine::hosts::{Host, Lifecycle, host_status};
use kici_engine::ids::{AgentId, InstanceId, JobId, TokenId};
use kici_engine::labels::{CanonicalLabel, LabelSet, host_label};
use kici_engine::time::Ts;
use serde_json::Value as Json;

use super::AgentType;

/// What an agent says of itself when it registers.
#[derive(Clone, Debug)]
pub struct RosterEntry {
    /// The agent.
    pub agent_id: AgentId,
    /// The token it used; none with authentication off.
    pub token_id: Option<TokenId>,
    /// How long it lives.
    pub lifecycle: AgentType,
    /// Started by a scaler.
    pub scaler_managed: bool,
    /// Canonical labels.
    pub labels: Vec<String>,
    /// Its host.
    pub hostname: Option<String>,
    /// Operating system.
    pub platform: Option<String>,
    /// Processor.
    pub arch: Option<String>,
    /// Version of the agent.
    pub version: Option<String>,
    /// Identity of the machine.
    pub machine_id: Option<String>,
    /// Identity of the host's present boot.
    pub boot_id: Option<String>,
    /// It lets jobs go on when it has lost contact for too long.
    pub keeps_running: bool,
    /// Properties; merged into those stored.
    pub properties: BTreeMap<String, Json>,
}

/// Property of a host whose agent lets jobs go on after their lease is lost. Set at registration only.
pub const KEEPS_RUNNING: &str = "kici:keep-running-when-fenced";

/// A stored host.
#[derive(Clone, Debug, PartialEq)]
pub struct RosterHost {
    /// The agent.
    pub agent_id: AgentId,
    /// The token it last used.
    pub token_id: Option<TokenId>,
    /// How long it lives.
    pub lifecycle: AgentType,
    /// Started by a scaler.
    pub scaler_managed: bool,
    /// Canonical labels.
    pub labels: Vec<String>,
    /// Its host.
    pub hostname: Option<String>,
    /// Operating system.
    pub platform: Option<String>,
    /// Processor.
    pub arch: Option<String>,
    /// Version of the agent.
    pub version: Option<String>,
    /// Identity of the machine.
    pub machine_id: Option<String>,
    /// The instance it is connected to.
    pub connected_instance_id: Option<InstanceId>,
    /// Last sign of life.
    pub last_seen: Option<Ts>,
    /// Properties.
    pub properties: BTreeMap<String, Json>,
    /// First seen.
    pub created_at: Ts,
    /// Last change.
    pub updated_at: Ts,
    /// When an operator declared it; none when it only registered.
    pub declared_at: Option<Ts>,
    /// Which operator.
    pub declared_by: Option<String>,
    /// Its host name as declared; stands above what the agent says.
    pub declared_hostname: Option<String>,
    /// Its labels as declared; they count until its agent registers.
    pub declared_labels: Option<Vec<String>>,
    /// Identity of the boot at the last registration.
    pub boot_id: Option<String>,
    /// It is about to restart.
    pub reboot: Option<PendingReboot>,
}

/// A restart that was announced. No job goes to the host until it is over.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingReboot {
    /// Forgotten then, if the host is not back before.
    pub until: Ts,
    /// The job that asked for it: it succeeds when the host goes down.
    pub job: Option<JobId>,
    /// The boot that ends with it, as far as the agent told.
    pub boot_id: Option<String>,
    /// Who asked for it.
    pub by: String,
}

impl RosterHost {
    /// True once its agent has registered.
    pub fn initialized(&self) -> bool {
        self.last_seen.is_some()
    }

    /// The host as selectors see it; `grace` is how long a connected host may be silent.
    pub fn host(&self, now: Ts, grace: Duration) -> Host {
        let lifecycle = match self.lifecycle {
            AgentType::Static => Lifecycle::Static,
            AgentType::Ephemeral => Lifecycle::Ephemeral,
        };
        Host {
            agent_id: self.agent_id.clone(),
            labels: self.effective_labels(),
            lifecycle,
            status: host_status(lifecycle, self.connected_instance_id.is_some(), self.last_seen, now, grace),
            scaler_managed: self.scaler_managed,
            initialized: self.initialized(),
            properties: self.properties.clone(),
        }
    }

    /// The labels its agent registered with; before that the declared ones and those that follow from the host name.
    pub fn effective_labels(&self) -> LabelSet {
        let declared = self.declared_labels.as_deref().unwrap_or_default();
        let texts = if self.initialized() { &self.labels } else { declared };
        let mut labels: LabelSet = texts.iter().filter_map(|text| CanonicalLabel::parse(text).ok()).collect();
        if !self.initialized() {
            labels.extend(self.hostname.as_deref().and_then(host_label));
        }
        labels
    }
}

/// What an operator says of a host. What is none stays as it is.
#[derive(Clone, Debug)]
pub struct DeclaredHost {
    /// Its agent.
    pub agent_id: AgentId,
    /// Its host name.
    pub hostname: Option<String>,
    /// Canonical labels that it will have.
    pub labels: Option<Vec<String>>,
    /// Properties to set; null removes one.
    pub properties: BTreeMap<String, Json>,
    /// Who declares it.
    pub by: String,
}

/// What became of the removal of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRemoved {
    /// It is gone.
    Removed,
    /// It is connected to a live instance.
    Connected,
    /// There is none.
    NotFound,
}
