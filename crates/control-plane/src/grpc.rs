//! The gRPC service of agents: control sessions go to the dispatcher, log streams to the log store.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::ConnectInfo;
use kici_dispatch::{ClaimError, Dispatcher, Ownership, Reported, SessionStream};
use kici_events::{Bus, Emit, EmitError, MAX_PAYLOAD_BYTES};
use kici_protocol::NOT_ASSIGNED;
use kici_protocol::agent::agent_bootstrap_server::{AgentBootstrap, AgentBootstrapServer};
use kici_protocol::agent::agent_gateway_server::{AgentGateway, AgentGatewayServer};
use kici_protocol::agent::{
    AgentCredentials, AgentFrame, ArtifactBeginRequest, ArtifactBeginResponse, ArtifactCommitRequest,
    ArtifactCommitResponse, ArtifactDownloadRequest, ArtifactDownloadResponse, CacheBeginSaveRequest,
    CacheBeginSaveResponse, CacheCommitSaveRequest, CacheCommitSaveResponse, CacheRestoreRequest, CacheRestoreResponse,
    CancelRebootRequest, CancelRebootResponse, ClaimCredentialsRequest, ClaimCredentialsResponse, EmitEventRequest,
    EmitEventResponse, EventRefused, GeneratedKept, GeneratedRefused, GetHostRequest, GitCredentialRequest,
    GitCredentialResponse, InventoryHost, LogChunk, QueryInventoryRequest, QueryInventoryResponse,
    ReportGeneratedRequest, ReportGeneratedResponse, RequestRebootRequest, RequestRebootResponse,
    RevokeGitTokenRequest, RevokeGitTokenResponse, claim_credentials_response, emit_event_response,
    report_generated_response,
};
use kici_store::model::{EventOrigin, JobRef};
use secrecy::ExposeSecret as _;
use serde_json::{Value as Json, json};
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use crate::broker::GitBroker;
use crate::logs::LogAppender;
use crate::logs::service::{self, LogAcks};
use crate::stored::Stored;

/// Serves `kici.agent.v1.AgentGateway`.
pub(crate) struct Gateway {
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) bus: Bus,
    pub(crate) logs: LogAppender,
    pub(crate) broker: Arc<GitBroker>,
    pub(crate) stored: Arc<Stored>,
    pub(crate) tasks: TaskTracker,
}

impl Gateway {
    /// The service with this installation's limits.
    pub(crate) fn into_service(self) -> AgentGatewayServer<Self> {
        AgentGatewayServer::new(self)
            .max_decoding_message_size(kici_protocol::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(kici_protocol::MAX_MESSAGE_BYTES)
    }
}

#[tonic::async_trait]
impl AgentGateway for Gateway {
    type SessionStream = SessionStream;
    type StreamLogsStream = LogAcks;

    async fn session(&self, request: Request<Streaming<AgentFrame>>) -> Result<Response<SessionStream>, Status> {
        let (metadata, _, frames) = request.into_parts();
        let stream = self.dispatcher.session(&metadata, frames).await?;
        Ok(Response::new(stream))
    }

    async fn stream_logs(&self, request: Request<Streaming<LogChunk>>) -> Result<Response<LogAcks>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let mut chunks = request.into_inner();
        let (key, job) = service::opened(&mut chunks).await?;
        match self.dispatcher.owns(session, job).await {
            Ownership::Owned => {}
            // A job that is tried again has another epoch already while the rest of this one's log is under way.
            Ownership::StaleEpoch if self.dispatcher.ended_lately(job).await => {}
            Ownership::Unknown => return Err(Status::unavailable(NOT_ASSIGNED)),
            Ownership::NotOwned | Ownership::StaleEpoch => return Err(Status::permission_denied(NOT_ASSIGNED)),
        }
        let answers = service::serve(&self.logs, job.run_id, key, chunks, &self.tasks).await?;
        Ok(Response::new(answers))
    }

    async fn request_reboot(
        &self,
        request: Request<RequestRebootRequest>,
    ) -> Result<Response<RequestRebootResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let until = self.dispatcher.job_asks_reboot(session, &request.into_inner()).await?;
        Ok(Response::new(RequestRebootResponse { pending_until_us: until.as_micros() }))
    }

    async fn git_credential(
        &self,
        request: Request<GitCredentialRequest>,
    ) -> Result<Response<GitCredentialResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        if speaker.standing != Ownership::Owned {
            self.broker.turned_away(&speaker, &request).await;
            return Err(Status::permission_denied(NOT_ASSIGNED));
        }
        Ok(Response::new(self.broker.credential(speaker, request).await?))
    }

    async fn revoke_git_token(
        &self,
        request: Request<RevokeGitTokenRequest>,
    ) -> Result<Response<RevokeGitTokenResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        // Also of a job that was taken away meanwhile: who has a token may end it.
        if !matches!(speaker.standing, Ownership::Owned | Ownership::StaleEpoch) {
            return Err(Status::permission_denied(NOT_ASSIGNED));
        }
        self.broker.revoke(&speaker, &request).await?;
        Ok(Response::new(RevokeGitTokenResponse {}))
    }

    async fn cancel_reboot(
        &self,
        request: Request<CancelRebootRequest>,
    ) -> Result<Response<CancelRebootResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let cancelled = self.dispatcher.job_cancels_reboot(session, &request.into_inner()).await?;
        Ok(Response::new(CancelRebootResponse { cancelled }))
    }

    async fn cache_restore(
        &self,
        request: Request<CacheRestoreRequest>,
    ) -> Result<Response<CacheRestoreResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        self.stored.cache_restore(&speaker, request).await.map(Response::new)
    }

    async fn cache_begin_save(
        &self,
        request: Request<CacheBeginSaveRequest>,
    ) -> Result<Response<CacheBeginSaveResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        self.stored.cache_begin(&speaker, request).await.map(Response::new)
    }

    async fn cache_commit_save(
        &self,
        request: Request<CacheCommitSaveRequest>,
    ) -> Result<Response<CacheCommitSaveResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        self.stored.cache_commit(&speaker, request).await.map(Response::new)
    }

    async fn artifact_begin(
        &self,
        request: Request<ArtifactBeginRequest>,
    ) -> Result<Response<ArtifactBeginResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        self.stored.artifact_begin(&speaker, request).await.map(Response::new)
    }

    async fn artifact_commit(
        &self,
        request: Request<ArtifactCommitRequest>,
    ) -> Result<Response<ArtifactCommitResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        self.stored.artifact_commit(&speaker, request).await.map(Response::new)
    }

    async fn artifact_download(
        &self,
        request: Request<ArtifactDownloadRequest>,
    ) -> Result<Response<ArtifactDownloadResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let speaker = self.dispatcher.speaks_for(session, request.job.as_ref()).await?;
        self.stored.artifact_download(&speaker, request).await.map(Response::new)
    }

    async fn query_inventory(
        &self,
        request: Request<QueryInventoryRequest>,
    ) -> Result<Response<QueryInventoryResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        Ok(Response::new(self.dispatcher.query_inventory(session, request.get_ref()).await?))
    }

    async fn get_host(&self, request: Request<GetHostRequest>) -> Result<Response<InventoryHost>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        Ok(Response::new(self.dispatcher.get_host(session, request.get_ref()).await?))
    }

    async fn report_generated(
        &self,
        request: Request<ReportGeneratedRequest>,
    ) -> Result<Response<ReportGeneratedResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let reported = self.dispatcher.report_generated(session, request.job.as_ref(), request.document).await?;
        let answer = match reported {
            Reported::Kept { jobs, digest } => report_generated_response::Answer::Kept(GeneratedKept { jobs, digest }),
            Reported::Refused(reason) => report_generated_response::Answer::Refused(GeneratedRefused { reason }),
        };
        Ok(Response::new(ReportGeneratedResponse { answer: Some(answer) }))
    }

    async fn emit_event(&self, request: Request<EmitEventRequest>) -> Result<Response<EmitEventResponse>, Status> {
        let session = self.dispatcher.caller(request.metadata())?;
        let request = request.into_inner();
        let (agent_id, job) = self.dispatcher.started_job(session, request.job.as_ref())?;
        let answer = match self.emit(request, EventOrigin::Job { job, agent_id }, job).await {
            Ok(id) => emit_event_response::Answer::EventId(id),
            Err(EmitError::Store(error)) => {
                tracing::warn!(%error, "an event could not be stored");
                return Err(Status::unavailable("the event cannot be stored now; try again"));
            }
            Err(EmitError::NotRunning) => return Err(Status::permission_denied(NOT_ASSIGNED)),
            Err(refused) => {
                let after = match &refused {
                    EmitError::TooMany { after, .. } => u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1),
                    _ => 0,
                };
                let refused = EventRefused { reason: refused.to_string(), retry_after_ms: after };
                emit_event_response::Answer::Refused(refused)
            }
        };
        Ok(Response::new(EmitEventResponse { answer: Some(answer) }))
    }
}

impl Gateway {
    async fn emit(&self, request: EmitEventRequest, origin: EventOrigin, job: JobRef) -> Result<String, EmitError> {
        // Before it is parsed.
        if request.payload_json.len() > MAX_PAYLOAD_BYTES {
            return Err(EmitError::TooLarge(request.payload_json.len()));
        }
        let payload: Json = match request.payload_json.as_slice() {
            [] => json!({}),
            bytes => serde_json::from_slice(bytes).map_err(|error| EmitError::Payload(error.to_string()))?,
        };
        let EmitEventRequest { step_index, attempt, seq, .. } = request;
        let key = format!("job:{}:{}:{step_index}:{attempt}:{seq}", job.job_id.uuid(), job.epoch);
        let emit = Emit {
            origin,
            name: request.name,
            payload,
            target_repos: request.target_repos,
            key: Some(key),
            request_id: job.run_id.to_string(),
        };
        Ok(self.bus.emit(emit).await?.0.to_string())
    }
}

/// Largest request before authentication, in bytes.
const MAX_CLAIM_BYTES: usize = 1024;

/// Serves `kici.agent.v1.AgentBootstrap`.
pub(crate) struct Bootstrap {
    pub(crate) dispatcher: Arc<Dispatcher>,
}

impl Bootstrap {
    pub(crate) fn into_service(self) -> AgentBootstrapServer<Self> {
        AgentBootstrapServer::new(self).max_decoding_message_size(MAX_CLAIM_BYTES)
    }
}

#[tonic::async_trait]
impl AgentBootstrap for Bootstrap {
    async fn claim_credentials(
        &self,
        request: Request<ClaimCredentialsRequest>,
    ) -> Result<Response<ClaimCredentialsResponse>, Status> {
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| peer.ip());
        let Some(peer) = peer.filter(|peer| peer.to_canonical().is_loopback()) else {
            // The listener speaks plain text; what ends TLS in front of it calls from this machine.
            return Err(Status::failed_precondition("a claim code is only taken over TLS; put a TLS proxy in front"));
        };
        let result = match self.dispatcher.redeem_claim(&request.into_inner().claim_code, peer).await {
            Ok(credentials) => claim_credentials_response::Result::Credentials(AgentCredentials {
                agent_token: credentials.agent_token.expose_secret().to_owned(),
                agent_id: credentials.agent_id.to_string(),
                orchestrator_url: credentials.orchestrator_url,
                labels: credentials.labels,
            }),
            Err(ClaimError::Refused(reason)) => {
                claim_credentials_response::Result::ErrorReason(reason.as_str().to_owned())
            }
            Err(error @ ClaimError::TooMany) => return Err(Status::resource_exhausted(error.to_string())),
            Err(error @ ClaimError::Unavailable(_)) => return Err(Status::unavailable(error.to_string())),
            Err(error @ ClaimError::Lost) => return Err(Status::internal(error.to_string())),
        };
        Ok(Response::new(ClaimCredentialsResponse { result: Some(result) }))
    }
}
