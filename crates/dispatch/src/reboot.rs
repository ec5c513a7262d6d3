//! Restarts of hosts. Once one is announced, no job goes to the host until it is back, the deadline passes or it is called
//! off. The job that asked for it succeeds when the host goes down; every other job of the host is an ordinary loss.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::{AgentId, SessionId};
use kici_engine::time::Ts;
use kici_protocol::NOT_ASSIGNED;
use kici_protocol::agent::{CancelRebootRequest, RequestRebootRequest};
use kici_store::StoreError;
use kici_store::model::{JobRef, PendingReboot, RosterHost};
use tokio::time::Instant;
use tonic::Status;

use crate::decide::calls::Call;
use crate::dispatcher::{DispatchError, Dispatcher};
use crate::offer::read_ref;
use crate::registry::{Identity, Reboot};
use crate::timers::Timer;

/// A host is never kept from work for longer.
pub const MAX_REBOOT: Duration = Duration::from_secs(24 * 3600);

/// Why a restart is not announced.
#[derive(Debug, thiserror::Error)]
pub enum RebootError {
    /// No such host.
    #[error("host `{0}` is not known")]
    NoSuchHost(AgentId),
    /// The orchestrator runs there.
    #[error("host `{0}` is this orchestrator's own; restart it by hand")]
    OwnHost(AgentId),
    /// The deadline is out of bounds.
    #[error("the deadline must be 1 s to {} h", MAX_REBOOT.as_secs() / 3600)]
    Deadline,
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Dispatcher {
    /// Announces the restart of a host. Returns until when it is waited for.
    ///
    /// # Errors
    /// [`RebootError`]; then nothing changed.
    pub async fn request_reboot(
        self: &Arc<Self>,
        agent: &AgentId,
        job: Option<JobRef>,
        deadline: Option<Duration>,
        by: &str,
    ) -> Result<Ts, RebootError> {
        let deadline = deadline.unwrap_or(self.config.reboot_deadline);
        if !(Duration::from_secs(1)..=MAX_REBOOT).contains(&deadline) {
            return Err(RebootError::Deadline);
        }
        let host = self.store.roster_get(agent.clone()).await?.ok_or_else(|| RebootError::NoSuchHost(agent.clone()))?;
        if host.machine_id.is_some() && host.machine_id == self.config.machine_id {
            return Err(RebootError::OwnHost(agent.clone()));
        }
        let until = self.clock.now().plus(deadline);
        let job = job.map(|job| job.job_id);
        // In memory first: no job may slip in between.
        self.registry.set_reboot(agent, Some(Reboot { until: Instant::now() + deadline, job }));
        let pending = PendingReboot { until, job, boot_id: host.boot_id, by: by.to_owned() };
        let stored = self.store.roster_reboot_request(agent.clone(), pending).await;
        if !matches!(stored, Ok(true)) {
            self.let_work(agent);
            return Err(stored.err().map_or_else(|| RebootError::NoSuchHost(agent.clone()), RebootError::Store));
        }
        self.deadlines.set(Timer::Pauses, Instant::now() + deadline);
        tracing::info!(host = %agent, by, until = %until, "a host is about to restart and gets no jobs");
        Ok(until)
    }

    /// Calls a restart off. False when none was pending.
    ///
    /// # Errors
    /// The database's.
    pub async fn cancel_reboot(&self, agent: &AgentId) -> Result<bool, DispatchError> {
        let host = self.store.roster_get(agent.clone()).await?;
        let Some(reboot) = host.and_then(|host| host.reboot) else { return Ok(false) };
        let cleared = self.store.roster_reboot_clear(agent.clone(), reboot.until).await?;
        if cleared {
            self.let_work(agent);
        }
        Ok(cleared)
    }

    fn let_work(&self, agent: &AgentId) {
        if self.registry.set_reboot(agent, None) {
            self.wake();
        }
    }

    /// A running job asks for the restart of its host.
    ///
    /// # Errors
    /// A status for the agent; internal faults in one fixed sentence.
    pub async fn job_asks_reboot(
        self: &Arc<Self>,
        session: SessionId,
        request: &RequestRebootRequest,
    ) -> Result<Ts, Status> {
        self.may_call(session, Call::RequestReboot)?;
        let (agent, job) = self.running_job(session, request.job.as_ref())?;
        let deadline = (request.deadline_ms > 0).then(|| Duration::from_millis(request.deadline_ms));
        let by = format!("job:{}", job.job_id);
        self.request_reboot(&agent, Some(job), deadline, &by).await.map_err(|error| match error {
            RebootError::Store(error) => unavailable(&error),
            RebootError::Deadline => Status::invalid_argument(error.to_string()),
            refused => Status::failed_precondition(refused.to_string()),
        })
    }

    /// A running job calls the restart off that it asked for.
    ///
    /// # Errors
    /// As [`job_asks_reboot`](Self::job_asks_reboot).
    pub async fn job_cancels_reboot(&self, session: SessionId, request: &CancelRebootRequest) -> Result<bool, Status> {
        self.may_call(session, Call::CancelReboot)?;
        let (agent, job) = self.running_job(session, request.job.as_ref())?;
        if !self.registry.asked_reboot(session, job.job_id) {
            return Ok(false);
        }
        self.cancel_reboot(&agent).await.map_err(|error| match error {
            DispatchError::Store(error) => unavailable(&error),
            other => Status::internal(other.to_string()),
        })
    }

    /// A started job of a session, at this epoch.
    ///
    /// # Errors
    /// A status for the agent when the job is not its.
    pub fn started_job(
        &self,
        session: SessionId,
        job: Option<&kici_protocol::common::JobRef>,
    ) -> Result<(AgentId, JobRef), Status> {
        let job = read_ref(job).map_err(Status::invalid_argument)?;
        let started = self.registry.with_job(session, job, |tracked| tracked.started);
        match (started, self.registry.identity(session)) {
            (Some(true), Some(identity)) => Ok((identity.agent_id, job)),
            _ => Err(Status::permission_denied(NOT_ASSIGNED)),
        }
    }

    fn running_job(
        &self,
        session: SessionId,
        job: Option<&kici_protocol::common::JobRef>,
    ) -> Result<(AgentId, JobRef), Status> {
        let job = read_ref(job).map_err(Status::invalid_argument)?;
        let started = self.registry.with_job(session, job, |tracked| tracked.started && !tracked.cancelling);
        match (started, self.registry.identity(session)) {
            (Some(true), Some(identity)) => Ok((identity.agent_id, job)),
            _ => Err(Status::permission_denied(NOT_ASSIGNED)),
        }
    }

    /// A new session of an agent: the restart is over, unless the host has not gone down yet (the agent or an orchestrator
    /// was restarted, or the connection broke).
    pub(crate) async fn reboot_at_register(
        self: &Arc<Self>,
        agent: &Identity,
        boot_id: &str,
    ) -> Result<Option<Reboot>, StoreError> {
        let host = self.store.roster_get(agent.agent_id.clone()).await?;
        let Some(reboot) = host.and_then(|host| host.reboot) else { return Ok(None) };
        let now = self.clock.now();
        let same_boot = !boot_id.is_empty() && reboot.boot_id.as_deref() == Some(boot_id);
        if same_boot && reboot.until > now {
            let until = Instant::now() + reboot.until.since(now);
            self.deadlines.set(Timer::Pauses, until);
            return Ok(Some(Reboot { until, job: reboot.job }));
        }
        if let Some(job) = reboot.job.filter(|_| !same_boot) {
            // Its end was not seen if no orchestrator was there when the host went down.
            let rows = self.store.queue_owned_by(agent.agent_id.clone()).await?;
            for row in rows.iter().filter(|row| row.job_id == job && row.started_at.is_some()) {
                self.finish_rebooted(row.job_ref()).await;
            }
        }
        self.store.roster_reboot_clear(agent.agent_id.clone(), reboot.until).await?;
        tracing::info!(host = %agent.agent_id, "the restart of a host is over");
        Ok(None)
    }

    /// Restarts whose deadline passed end; those that another instance announced count here too.
    pub(crate) async fn sweep_reboots(&self) -> Result<u64, DispatchError> {
        let now = self.clock.now();
        let pending = self.store.roster_rebooting().await?;
        let mut changed = 0;
        for host in &pending {
            changed += u64::from(self.follow_reboot(host, now).await?);
        }
        for (agent, _) in self.registry.rebooting() {
            if !pending.iter().any(|host| host.agent_id == agent) {
                self.let_work(&agent);
                changed += 1;
            }
        }
        Ok(changed)
    }

    async fn follow_reboot(&self, host: &RosterHost, now: Ts) -> Result<bool, DispatchError> {
        let Some(reboot) = &host.reboot else { return Ok(false) };
        if reboot.until <= now {
            let over = self.store.roster_reboot_clear(host.agent_id.clone(), reboot.until).await?;
            if over {
                tracing::warn!(host = %host.agent_id, by = reboot.by, "a host did not restart in time; it gets jobs again");
                self.let_work(&host.agent_id);
            }
            return Ok(over);
        }
        if self.registry.rebooting().iter().any(|(agent, _)| *agent == host.agent_id) {
            return Ok(false);
        }
        let until = Instant::now() + reboot.until.since(now);
        self.deadlines.set(Timer::Pauses, until);
        Ok(self.registry.set_reboot(&host.agent_id, Some(Reboot { until, job: reboot.job })))
    }
}

fn unavailable(error: &StoreError) -> Status {
    tracing::warn!(%error, "the restart of a host could not be written");
    Status::unavailable("the restart cannot be noted now; try again")
}
