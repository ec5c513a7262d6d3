//! One method per route.

use bytes::Bytes;
use kici_engine::ids::{AgentId, DeliveryRowId, JobId, RunId, TokenId};
use reqwest::Method;

use super::{Client, ClientError, NOTHING};
use crate::dto::access_log::{AccessFilter, AccessView};
use crate::dto::agents::{AgentFilter, AgentView, DrainAgent};
use crate::dto::audit::{AuditFilter, AuditView};
use crate::dto::bus::{DeadLetter, LetterId, LetterRetried};
use crate::dto::events::{DeliveryFilter, DeliveryView, Discard, DlqCount, Explanation};
use crate::dto::hosts::{DeclareHost, HostFilter, HostView, HostsPreview, PreviewHosts, RebootHost};
use crate::dto::logs::{LogQuery, LogRange};
use crate::dto::queue::{QueueEntry, QueueExplanation, QueueFilter};
use crate::dto::runs::{
    CancelAccepted, CancelRun, RerunRun, RunAccepted, RunDetail, RunFilter, RunView, StepView, TriggerRun,
};
use crate::dto::sources::{AddSource, DeliveryAccepted, SetSecrets, SourceView, TriggerSource};
use crate::dto::system::{Capabilities, Diagnosis, Drain, DrainState, OrchestratorStatus, Ready};
use crate::dto::tokens::{
    AdminTokenView, AgentTokenView, CreateAdminToken, CreateAgentToken, TokenCreated, TokenRevoked,
};
use crate::dto::workflows::{ValidateWorkflows, ValidationReport};
use crate::page::{Page, PageQuery};

const RUNS: [&str; 3] = ["api", "v1", "runs"];
pub(super) const ADMIN: [&str; 3] = ["api", "v1", "admin"];

pub(super) type Answer<T> = Result<T, ClientError>;

/// Every method fails with [`ClientError`].
impl Client {
    /// Runs, newest first.
    pub async fn runs(&self, filter: &RunFilter, page: &PageQuery) -> Answer<Page<RunView>> {
        self.list(path!(RUNS), filter, page).await
    }

    /// One run with its jobs.
    pub async fn run(&self, id: RunId) -> Answer<RunDetail> {
        self.get(path!(RUNS, &id.to_string()), &NOTHING).await
    }

    /// The steps of a run, or of one of its jobs.
    pub async fn steps(&self, id: RunId, job: Option<&str>) -> Answer<Vec<StepView>> {
        self.get(path!(RUNS, &id.to_string(), "steps"), &[("job", job)]).await
    }

    /// The steps of a job at an earlier hand-over.
    pub async fn steps_at(&self, id: RunId, job: &str, epoch: u32) -> Answer<Vec<StepView>> {
        let epoch = epoch.to_string();
        self.get(path!(RUNS, &id.to_string(), "steps"), &[("job", job), ("epoch", &epoch)]).await
    }

    /// A range of one step's log.
    pub async fn step_logs(&self, id: RunId, job: &str, step: &str, query: &LogQuery) -> Answer<LogRange> {
        self.get(path!(RUNS, &id.to_string(), "jobs", job, "steps", step, "logs"), query).await
    }

    /// Cancels a run.
    pub async fn cancel_run(&self, id: RunId, request: CancelRun) -> Answer<CancelAccepted> {
        self.post(path!(RUNS, &id.to_string(), "cancel"), &request).await
    }

    /// Repeats a run. The same `key` within 24 h gives the same run.
    pub async fn rerun(&self, id: RunId, request: RerunRun, key: Option<&str>) -> Answer<RunAccepted> {
        self.keyed(path!(RUNS, &id.to_string(), "rerun"), &request, key).await
    }

    /// Starts a workflow by hand. The same `key` within 24 h gives the same run.
    pub async fn trigger_run(&self, request: &TriggerRun, key: Option<&str>) -> Answer<RunAccepted> {
        self.keyed(path!(RUNS), request, key).await
    }

    /// Checks workflow files.
    pub async fn validate_workflows(&self, request: &ValidateWorkflows) -> Answer<ValidationReport> {
        self.post(&["api", "v1", "workflows", "validate"], request).await
    }

    /// All sources.
    pub async fn sources(&self) -> Answer<Page<SourceView>> {
        self.get(path!(ADMIN, "sources"), &NOTHING).await
    }

    /// One source by name or id.
    pub async fn source(&self, name: &str) -> Answer<SourceView> {
        self.get(path!(ADMIN, "sources", name), &NOTHING).await
    }

    /// Adds a source.
    pub async fn add_source(&self, request: &AddSource) -> Answer<SourceView> {
        self.post(path!(ADMIN, "sources"), request).await
    }

    /// Removes a source.
    pub async fn remove_source(&self, name: &str) -> Answer<()> {
        self.delete_empty(path!(ADMIN, "sources", name), &()).await
    }

    /// Enables or disables a source.
    pub async fn enable_source(&self, name: &str, enabled: bool) -> Answer<SourceView> {
        let verb = if enabled { "enable" } else { "disable" };
        self.post(path!(ADMIN, "sources", name, verb), &serde_json::json!({})).await
    }

    /// Gives a source new secrets.
    pub async fn set_source_secrets(&self, name: &str, request: &SetSecrets) -> Answer<SourceView> {
        self.put(path!(ADMIN, "sources", name, "secrets"), request).await
    }

    /// Sends a push event for a ref of a source.
    pub async fn trigger_source(&self, name: &str, request: &TriggerSource) -> Answer<DeliveryAccepted> {
        self.post(path!(ADMIN, "sources", name, "trigger"), request).await
    }

    /// Tokens of agents.
    pub async fn agent_tokens(&self) -> Answer<Page<AgentTokenView>> {
        self.get(path!(ADMIN, "agent-tokens"), &NOTHING).await
    }

    /// Makes a token for agents.
    pub async fn create_agent_token(&self, request: &CreateAgentToken) -> Answer<TokenCreated> {
        self.post(path!(ADMIN, "agent-tokens"), request).await
    }

    /// Revokes a token of agents.
    pub async fn revoke_agent_token(&self, id: TokenId) -> Answer<TokenRevoked> {
        self.delete(path!(ADMIN, "agent-tokens", &id.to_string())).await
    }

    /// Tokens of operators.
    pub async fn admin_tokens(&self) -> Answer<Page<AdminTokenView>> {
        self.get(path!(ADMIN, "tokens"), &NOTHING).await
    }

    /// Makes a token for operators.
    pub async fn create_admin_token(&self, request: &CreateAdminToken) -> Answer<TokenCreated> {
        self.post(path!(ADMIN, "tokens"), request).await
    }

    /// Revokes a token of operators.
    pub async fn revoke_admin_token(&self, id: TokenId) -> Answer<TokenRevoked> {
        self.delete(path!(ADMIN, "tokens", &id.to_string())).await
    }

    /// Connected and known agents.
    pub async fn agents(&self, filter: &AgentFilter) -> Answer<Page<AgentView>> {
        self.get(path!(ADMIN, "agents"), filter).await
    }

    /// Starts or ends the drain of an agent.
    pub async fn drain_agent(&self, id: &AgentId, request: &DrainAgent) -> Answer<AgentView> {
        self.post(path!(ADMIN, "agents", id.as_str(), "drain"), request).await
    }

    /// Known hosts, by id.
    pub async fn hosts(&self, filter: &HostFilter) -> Answer<Page<HostView>> {
        self.get(path!(ADMIN, "hosts"), filter).await
    }

    /// One host.
    pub async fn host(&self, id: &AgentId) -> Answer<HostView> {
        self.get(path!(ADMIN, "hosts", id.as_str()), &NOTHING).await
    }

    /// Declares a host; true when it was not known before.
    pub async fn declare_host(&self, id: &AgentId, request: &DeclareHost) -> Answer<(HostView, bool)> {
        let path = path!(ADMIN, "hosts", id.as_str());
        let response = self.send(self.request(Method::PUT, path).json(request).timeout(self.timeout)).await?;
        let created = response.status().as_u16() == 201;
        Ok((self.decode(response).await?, created))
    }

    /// Removes a host.
    pub async fn remove_host(&self, id: &AgentId) -> Answer<()> {
        self.delete_empty(path!(ADMIN, "hosts", id.as_str()), &()).await
    }

    /// Announces the restart of a host.
    pub async fn reboot_host(&self, id: &AgentId, request: &RebootHost) -> Answer<HostView> {
        self.post(path!(ADMIN, "hosts", id.as_str(), "reboot"), request).await
    }

    /// Calls the restart of a host off.
    pub async fn cancel_host_reboot(&self, id: &AgentId) -> Answer<HostView> {
        self.delete(path!(ADMIN, "hosts", id.as_str(), "reboot")).await
    }

    /// Which hosts a fan-out would go to now.
    pub async fn preview_hosts(&self, request: &PreviewHosts) -> Answer<HostsPreview> {
        self.post(path!(ADMIN, "hosts", "preview"), request).await
    }

    /// Deliveries, newest first.
    pub async fn deliveries(&self, filter: &DeliveryFilter, page: &PageQuery) -> Answer<Page<DeliveryView>> {
        self.list(path!(ADMIN, "event-log"), filter, page).await
    }

    /// One delivery.
    pub async fn delivery(&self, id: DeliveryRowId) -> Answer<DeliveryView> {
        self.get(path!(ADMIN, "event-log", &id.to_string()), &NOTHING).await
    }

    /// The body of a delivery as it was received.
    pub async fn delivery_payload(&self, id: DeliveryRowId) -> Answer<Bytes> {
        let request = self.request(Method::GET, path!(ADMIN, "event-log", &id.to_string(), "payload"));
        let response = self.send(request.timeout(self.timeout)).await?;
        response.bytes().await.map_err(|error| self.failed(&error))
    }

    /// Why a delivery started what it started.
    pub async fn explain_delivery(&self, id: DeliveryRowId) -> Answer<Explanation> {
        self.get(path!(ADMIN, "event-log", &id.to_string(), "explain"), &NOTHING).await
    }

    /// Works on a delivery again.
    pub async fn redeliver(&self, id: DeliveryRowId) -> Answer<DeliveryAccepted> {
        self.post(path!(ADMIN, "event-log", &id.to_string(), "redeliver"), &serde_json::json!({})).await
    }

    /// Dead letters, newest first.
    pub async fn dead_letters(&self, page: &PageQuery) -> Answer<Page<DeadLetter>> {
        self.get(path!(ADMIN, "event-dlq"), page).await
    }

    /// How many dead letters there are.
    pub async fn dead_letter_count(&self) -> Answer<DlqCount> {
        self.get(path!(ADMIN, "event-dlq", "count"), &NOTHING).await
    }

    /// Tries a dead letter again.
    pub async fn retry_dead_letter(&self, id: LetterId) -> Answer<LetterRetried> {
        self.post(path!(ADMIN, "event-dlq", &id.to_string(), "retry"), &serde_json::json!({})).await
    }

    /// Gives a dead letter up.
    pub async fn discard_dead_letter(&self, id: LetterId, request: &Discard) -> Answer<()> {
        self.delete_empty(path!(ADMIN, "event-dlq", &id.to_string()), request).await
    }

    /// Rows of the queue, newest first.
    pub async fn queue(&self, filter: &QueueFilter, page: &PageQuery) -> Answer<Page<QueueEntry>> {
        self.list(path!(ADMIN, "queue"), filter, page).await
    }

    /// One row of the queue.
    pub async fn queue_entry(&self, job: JobId) -> Answer<QueueEntry> {
        self.get(path!(ADMIN, "queue", &job.to_string()), &NOTHING).await
    }

    /// Why a job waits.
    pub async fn explain_queue(&self, job: JobId) -> Answer<QueueExplanation> {
        self.get(path!(ADMIN, "queue", &job.to_string(), "explain"), &NOTHING).await
    }

    /// Whether the node drains.
    pub async fn drain_state(&self) -> Answer<DrainState> {
        self.get(path!(ADMIN, "drain"), &NOTHING).await
    }

    /// Starts or ends the drain of the node.
    pub async fn drain(&self, request: &Drain) -> Answer<DrainState> {
        self.post(path!(ADMIN, "drain"), request).await
    }

    /// How the node and its background work are.
    pub async fn status(&self) -> Answer<OrchestratorStatus> {
        self.get(path!(ADMIN, "status"), &NOTHING).await
    }

    /// Checks the node.
    pub async fn diagnose(&self) -> Answer<Diagnosis> {
        self.get(path!(ADMIN, "diagnose"), &NOTHING).await
    }

    /// The access log, newest first.
    pub async fn access_log(&self, filter: &AccessFilter, page: &PageQuery) -> Answer<Page<AccessView>> {
        self.list(path!(ADMIN, "access-log"), filter, page).await
    }

    /// The audit log of secrets, newest first.
    pub async fn audit(&self, filter: &AuditFilter, page: &PageQuery) -> Answer<Page<AuditView>> {
        self.list(path!(ADMIN, "audit"), filter, page).await
    }

    /// What the server can do; needs no token.
    pub async fn capabilities(&self) -> Answer<Capabilities> {
        self.get(&["api", "v1", "capabilities"], &NOTHING).await
    }

    /// Whether the server can work; needs no token.
    pub async fn ready(&self) -> Answer<Ready> {
        let request = self.request(Method::GET, &["ready"]).timeout(self.timeout);
        let response = request.send().await.map_err(|error| self.failed(&error))?;
        let status = response.status().as_u16();
        // 503 carries the same document.
        if status != 200 && status != 503 {
            return Err(ClientError::NotOurs { url: self.url.clone(), status });
        }
        self.decode(response).await
    }

    pub(super) async fn list<T: serde::de::DeserializeOwned>(
        &self,
        path: &[&str],
        filter: &impl serde::Serialize,
        page: &PageQuery,
    ) -> Answer<Page<T>> {
        let request = self.request(Method::GET, path).query(filter).query(page).timeout(self.timeout);
        self.decode(self.send(request).await?).await
    }

    pub(super) async fn keyed<T: serde::de::DeserializeOwned>(
        &self,
        path: &[&str],
        body: &impl serde::Serialize,
        key: Option<&str>,
    ) -> Answer<T> {
        let mut request = self.request(Method::POST, path).json(body).timeout(self.timeout);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        self.decode(self.send(request).await?).await
    }

    pub(super) async fn delete_empty(&self, path: &[&str], body: &impl serde::Serialize) -> Answer<()> {
        let request = self.request(Method::DELETE, path).timeout(self.timeout);
        // `()` stands for no body.
        let empty = serde_json::to_value(body).is_ok_and(|json| json.is_null());
        self.send(if empty { request } else { request.json(body) }).await.map(drop)
    }
}
