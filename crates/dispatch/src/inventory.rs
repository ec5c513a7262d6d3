//! What jobs may know of the hosts: the roster without anything that leads to one of them.

use kici_engine::hosts::{HostQuery, is_reserved_property};
use kici_engine::ids::{AgentId, SessionId};
use kici_protocol::NOT_ASSIGNED;
use kici_protocol::agent::{GetHostRequest, InventoryHost, QueryInventoryRequest, QueryInventoryResponse};
use kici_store::StoreError;
use kici_store::model::RosterHost;
use tonic::Status;

use crate::decide::calls::{Call, allowed, role_of};
use crate::dispatcher::{DispatchError, Dispatcher};

/// Hosts in one answer.
const MAX_HOSTS: usize = 1000;
/// Longest selector in bytes.
const MAX_SELECTOR: usize = 4096;
/// Property of a host: the version of the agent that was last put there.
const STAGED_VERSION: &str = "kici:staged-agent-version";

impl Dispatcher {
    /// Hosts that a selector means, by agent, for a started job.
    ///
    /// # Errors
    /// A status for the agent: `INVALID_ARGUMENT` with the place in the selector, `PERMISSION_DENIED`; internal faults in one
    /// fixed sentence.
    pub async fn query_inventory(
        &self,
        session: SessionId,
        request: &QueryInventoryRequest,
    ) -> Result<QueryInventoryResponse, Status> {
        self.may_call(session, Call::QueryInventory)?;
        self.started_job(session, request.job.as_ref())?;
        if request.selector.len() > MAX_SELECTOR {
            return Err(Status::invalid_argument(format!("selector: at most {MAX_SELECTOR} bytes are allowed")));
        }
        let query = HostQuery::parse(&request.selector)
            .map_err(|fault| Status::invalid_argument(format!("selector: {fault}")))?;
        let limit = match request.limit as usize {
            0 => MAX_HOSTS,
            limit => limit.min(MAX_HOSTS),
        };
        let roster = self.store.roster_list().await.map_err(|error| unavailable(&error))?;
        let mut found = roster
            .iter()
            .filter(|host| host.agent_id.as_str() > request.cursor.as_str() && query.matches(&self.host(host)));
        let hosts: Vec<InventoryHost> = found.by_ref().take(limit).map(|host| self.shown(host)).collect();
        let more = found.next().and_then(|_| hosts.last());
        let next_cursor = more.map(|last| last.agent_id.clone()).unwrap_or_default();
        Ok(QueryInventoryResponse { hosts, next_cursor })
    }

    /// One host, for a started job.
    ///
    /// # Errors
    /// As [`query_inventory`](Self::query_inventory), and `NOT_FOUND`.
    pub async fn get_host(&self, session: SessionId, request: &GetHostRequest) -> Result<InventoryHost, Status> {
        self.may_call(session, Call::GetHost)?;
        self.started_job(session, request.job.as_ref())?;
        let agent = AgentId::new(request.agent_id.clone())
            .map_err(|error| Status::invalid_argument(format!("agent_id: {error}")))?;
        let host = self.store.roster_get(agent.clone()).await.map_err(|error| unavailable(&error))?;
        host.map(|host| self.shown(&host)).ok_or_else(|| Status::not_found(format!("host `{agent}` is not known")))
    }

    /// Whether the agent of a session has the role for a call.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`.
    pub(crate) fn may_call(&self, session: SessionId, call: Call) -> Result<(), Status> {
        let Some(identity) = self.registry.identity(session) else {
            return Err(Status::permission_denied(NOT_ASSIGNED));
        };
        allowed(call, role_of(identity.scaler_managed)).map_err(|refused| {
            tracing::warn!(agent = %identity.agent_id, call = call.as_str(), "an agent made a call that it has no role for");
            Status::permission_denied(refused.message)
        })
    }

    /// Notes which version of the agent was put on a host, whatever version it reports itself. False when there is no such host.
    ///
    /// # Errors
    /// The database's.
    pub async fn record_staged_version(&self, agent: &AgentId, version: &str) -> Result<bool, DispatchError> {
        Ok(self.store.roster_property_set(agent.clone(), STAGED_VERSION.to_owned(), version.into()).await?)
    }

    fn shown(&self, host: &RosterHost) -> InventoryHost {
        let seen = self.host(host);
        let properties = seen.properties.iter().filter(|(key, _)| !is_reserved_property(key));
        InventoryHost {
            agent_id: host.agent_id.to_string(),
            hostname: host.hostname.clone().unwrap_or_default(),
            labels: seen.labels.iter().map(ToString::to_string).collect(),
            platform: host.platform.clone().unwrap_or_default(),
            arch: host.arch.clone().unwrap_or_default(),
            status: seen.status.as_str().to_owned(),
            lifecycle_class: seen.lifecycle.as_str().to_owned(),
            scaler_managed: host.scaler_managed,
            properties: properties.map(|(key, value)| (key.clone(), value.to_string())).collect(),
            version: host.version.clone().unwrap_or_default(),
            last_seen_us: host.last_seen.map_or(0, |at| at.as_micros()),
        }
    }
}

fn unavailable(error: &StoreError) -> Status {
    tracing::warn!(%error, "the roster could not be read for a job");
    Status::unavailable("the hosts cannot be listed now; try again")
}
