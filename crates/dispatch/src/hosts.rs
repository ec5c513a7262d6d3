//! The roster of hosts: what operators declare, how each host stands, and the upkeep of the list.

use kici_engine::hosts::{HostStatus, Lifecycle, host_status};
use kici_engine::ids::AgentId;
use kici_store::model::{AgentType, DeclaredHost, HostRemoved, RosterHost};

use crate::dispatcher::{DispatchError, Dispatcher};
use crate::meters;

impl Dispatcher {
    /// How a known host stands, by the one rule. A session that is open here counts as a sign of life: the row is brought up
    /// to date once a minute only.
    pub fn host_status(&self, host: &RosterHost) -> HostStatus {
        let now = self.clock.now();
        let here = self.registry.agent(&host.agent_id).is_some();
        let lifecycle = match host.lifecycle {
            AgentType::Static => Lifecycle::Static,
            AgentType::Ephemeral => Lifecycle::Ephemeral,
        };
        let (connected, seen) =
            if here { (true, Some(now)) } else { (host.connected_instance_id.is_some(), host.last_seen) };
        host_status(lifecycle, connected, seen, now, self.config.roster_grace)
    }

    /// A known host as selectors see it.
    pub fn host(&self, host: &RosterHost) -> kici_engine::hosts::Host {
        let seen = host.host(self.clock.now(), self.config.roster_grace);
        kici_engine::hosts::Host { status: self.host_status(host), ..seen }
    }

    /// Declares a host. True when it was not known before.
    ///
    /// # Errors
    /// The database's.
    pub async fn declare_host(&self, declared: DeclaredHost) -> Result<(RosterHost, bool), DispatchError> {
        let stored = self.store.roster_declare(declared).await?;
        self.forget_known_hosts().await;
        // A waiting job may have found its host, or lost it.
        self.routing.notify_one();
        Ok(stored)
    }

    /// Removes a host that is not connected.
    ///
    /// # Errors
    /// The database's.
    pub async fn remove_host(&self, agent: &AgentId) -> Result<HostRemoved, DispatchError> {
        if self.registry.agent(agent).is_some() {
            return Ok(HostRemoved::Connected);
        }
        let removed = self.store.roster_remove(agent.clone()).await?;
        self.forget_known_hosts().await;
        self.routing.notify_one();
        Ok(removed)
    }

    async fn forget_known_hosts(&self) {
        *self.known_hosts.lock().await = None;
    }

    /// Forgets ephemeral hosts that are gone for long, and counts static ones that are out of contact.
    pub(crate) async fn sweep_roster(&self) -> Result<u64, DispatchError> {
        let gone = self.store.roster_reap(self.clock.now().minus(self.config.roster_ttl)).await?;
        for agent in &gone {
            tracing::debug!(%agent, "an ephemeral host that is gone was forgotten");
        }
        let hosts = self.store.roster_list().await?;
        let unreachable = hosts.iter().filter(|host| self.host_status(host) == HostStatus::Unreachable).count();
        meters::hosts_unreachable(unreachable);
        Ok(gone.len() as u64)
    }
}
