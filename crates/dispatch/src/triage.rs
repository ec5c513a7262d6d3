//! Agents that are gone: what becomes of their jobs, at once, when the recovery window ends, and after a restart.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kici_engine::ids::{AgentId, SessionId};
use kici_engine::state::{FailureReason, QueueStatus};
use kici_store::model::{FailRequest, JobRef, KEEPS_RUNNING, QueueRow, RequeueFrom};
use tokio::time::Instant;

use crate::decide::triage::{self, LostJob, Triage};
use crate::dispatcher::{DispatchError, Dispatcher};
use crate::meters;
use crate::outcome::Undone;
use crate::ports::Change;
use crate::registry::Identity;
use crate::timers::Timer;

/// A change that the database did not take.
#[derive(Clone, Debug)]
pub(crate) enum LateTriage {
    Requeue(Undone),
    Fail(FailRequest),
    Cancel(JobRef),
    Rebooted(JobRef),
    Recover { job: JobRef, agent_id: AgentId, window: Duration },
}

impl Dispatcher {
    /// A session ended. Whoever comes first takes its jobs, without the one that is `undone` already; a session that was
    /// replaced leaves nothing.
    pub(crate) async fn session_over(self: &Arc<Self>, session: SessionId, undone: Option<JobRef>) {
        let Some(identity) = self.registry.identity(session) else { return };
        // If it comes back while its jobs are being judged, it is let in behind that: a job that it goes on with must not be
        // judged as left behind.
        let _door = self.comings.door(&identity.agent_id).await;
        let Some(mut departed) = self.registry.remove(session) else { return };
        departed.jobs.retain(|tracked| Some(tracked.job) != undone);
        let agent_id = departed.identity.agent_id.clone();
        meters::agents_active(self.registry.counts().0);
        self.changes.publish(Change::Agent { agent_id: agent_id.to_string(), connected: false });
        if self.stopping.is_cancelled() {
            // The jobs go on; the start of the next process takes them into recovery.
            return;
        }
        tracing::info!(agent = %agent_id, jobs = departed.jobs.len(), "an agent left");
        let identity = &departed.identity;
        join_all(departed.jobs.iter().map(|job| async move {
            let lost = LostJob {
                scaler_managed: identity.scaler_managed,
                acked: job.acked,
                started: job.started,
                cancelling: job.cancelling,
                rebooted: departed.reboot_job == Some(job.job.job_id),
            };
            self.carry_out(job.job, identity, triage::triage(lost), !departed.leaving).await;
        }))
        .await;
        if let Err(error) = self.store.roster_disconnected(agent_id.clone()).await {
            tracing::warn!(agent = %agent_id, %error, "the end of a session could not be written");
        }
        if let Some(scaler) = self.scaler.as_ref().filter(|_| departed.identity.scaler_managed) {
            scaler.disconnected(&agent_id, departed.jobs.iter().any(|job| job.started));
        }
        if !departed.jobs.is_empty() {
            self.wake();
        }
    }

    /// How long an agent may be away from a job that it started.
    pub(crate) fn window_of(&self, agent: &Identity) -> Duration {
        if agent.scaler_managed { self.config.scaler_reconnect_grace } else { self.config.recovery_window }
    }

    /// `counts`: a delivery that is undone was one too many. An agent that said that it takes no more work may leave before it
    /// has answered the last offers.
    async fn carry_out(self: &Arc<Self>, job: JobRef, identity: &Identity, triage: Triage, counts: bool) {
        let agent = &identity.agent_id;
        match triage {
            Triage::Requeue => {
                let (why, meter) = match counts {
                    true => (format!("agent {agent} was lost before the job started"), "agent_lost"),
                    false => (format!("agent {agent} left before the job started"), "agent_left"),
                };
                let from = RequeueFrom::NotStarted(agent.clone());
                let undone = Undone { counts, ..Undone::new(job, from, why, meter) };
                if !self.requeue(undone).await {
                    // If its start was granted in the very last moment, the agent may be back with it.
                    self.recover(job, agent.clone(), self.window_of(identity)).await;
                }
            }
            Triage::Recover => self.recover(job, agent.clone(), self.window_of(identity)).await,
            Triage::Cancel => self.finish_cancelled(job).await,
            Triage::Succeed => self.finish_rebooted(job).await,
            Triage::Fail(reason) => {
                let message = format!("agent {agent} was lost while the job ran");
                let (only_from, queue_status) = (vec![QueueStatus::Dispatched], QueueStatus::Failed);
                // It may still run there: agents end their jobs themselves only within the recovery window.
                self.fail(FailRequest { job, only_from, queue_status, reason, message, retry: false }).await;
            }
        }
    }

    /// The agent registered and does not know a job that the database gives it.
    pub(crate) async fn forgotten(self: &Arc<Self>, job: JobRef, agent: &Identity, started: bool, cancelling: bool) {
        let lost = LostJob { scaler_managed: agent.scaler_managed, acked: true, started, cancelling, rebooted: false };
        let agent_id = &agent.agent_id;
        match triage::forgotten(lost) {
            Triage::Fail(reason) => {
                let message = format!("agent {agent_id} came back without the job; it was restarted or lost its state");
                let (only_from, queue_status) =
                    (vec![QueueStatus::Dispatched, QueueStatus::Recovering], QueueStatus::Failed);
                self.fail(FailRequest { job, only_from, queue_status, reason, message, retry: true }).await;
            }
            Triage::Cancel => self.finish_cancelled(job).await,
            Triage::Succeed => self.finish_rebooted(job).await,
            Triage::Requeue | Triage::Recover => {
                let why = format!("agent {agent_id} came back without the job");
                self.requeue(Undone::new(job, RequeueFrom::NotStarted(agent_id.clone()), why, "agent_lost")).await;
            }
        }
    }

    pub(crate) async fn recovery_due(self: &Arc<Self>, job: JobRef) {
        match self.store.queue_get(job.job_id).await {
            Ok(Some(row)) if row.job_ref() == job => self.end_recovery(&row).await,
            Ok(_) => {}
            // The sweep reads the same column.
            Err(error) => tracing::warn!(job = %job.job_id, %error, "a recovery window ended unseen"),
        }
    }

    /// Ends the recovery of a row whose window is over. Guarded: a reconnect at the same moment wins or loses as a whole.
    pub(crate) async fn end_recovery(self: &Arc<Self>, row: &QueueRow) {
        let now = self.clock.now();
        if row.status != QueueStatus::Recovering || row.recovery_deadline.is_some_and(|deadline| deadline > now) {
            return;
        }
        let job = row.job_ref();
        let cancelling = match self.store.run_get(job.run_id).await {
            Ok(run) => run.is_some_and(|run| run.cancel_requested_at.is_some()),
            Err(error) => {
                tracing::warn!(job = %job.job_id, %error, "a recovery window ended unseen");
                return;
            }
        };
        let host = match &row.agent_id {
            Some(agent) => match self.store.roster_get(agent.clone()).await {
                Ok(host) => host,
                Err(error) => {
                    tracing::warn!(job = %job.job_id, %error, "a recovery window ended unseen");
                    return;
                }
            },
            None => None,
        };
        let scaler_managed = host.as_ref().is_some_and(|host| host.scaler_managed);
        // A host takes longer to restart than an agent may be away; its jobs were handed out before this process began.
        let rebooted = host.and_then(|host| host.reboot).is_some_and(|reboot| reboot.job == Some(job.job_id));
        let started = row.started_at.is_some();
        let lost = LostJob { scaler_managed, acked: true, started, cancelling, rebooted };
        let agent = row.agent_id.as_ref().map_or("unknown", AgentId::as_str);
        let window =
            if scaler_managed { self.config.scaler_reconnect_grace } else { self.config.recovery_window }.as_secs();
        let what = triage::recovery_expired(lost);
        meters::recovered(match what {
            Triage::Cancel => "cancelled",
            Triage::Succeed => "finished",
            Triage::Fail(_) => "failed",
            Triage::Requeue | Triage::Recover => "requeued",
        });
        match what {
            Triage::Cancel => self.finish_cancelled(job).await,
            Triage::Succeed => self.finish_rebooted(job).await,
            Triage::Fail(reason) => {
                let message =
                    format!("agent {agent} was lost while the job ran and did not come back within {window} s");
                let (only_from, queue_status) = (vec![QueueStatus::Recovering], QueueStatus::Failed);
                let retry = self.has_fenced_itself(row.agent_id.as_ref()).await;
                self.fail(FailRequest { job, only_from, queue_status, reason, message, retry }).await;
            }
            Triage::Requeue | Triage::Recover => {
                let why = format!("agent {agent} did not come back within {window} s");
                self.requeue(Undone::new(job, RequeueFrom::RecoveryExpired, why, "agent_lost")).await;
            }
        }
    }

    /// Whether a lost agent has certainly ended its jobs when the recovery window is over. All do, unless they said at
    /// their registration that they let jobs go on.
    async fn has_fenced_itself(&self, agent: Option<&AgentId>) -> bool {
        let Some(agent) = agent else { return false };
        match self.store.roster_get(agent.clone()).await {
            Ok(Some(host)) => !host.properties.contains_key(KEEPS_RUNNING),
            Ok(None) => false,
            Err(error) => {
                tracing::warn!(%agent, %error, "whether an agent lets jobs go on cannot be told; its job is not tried again");
                false
            }
        }
    }

    /// Jobs that this instance or a dead one had handed out: their agents get one recovery window to come back.
    pub(crate) async fn recover_after_start(self: &Arc<Self>) -> Result<(), DispatchError> {
        let instances = self.own_and_dead_instances().await?;
        let rows = self.store.queue_owned_by_instances(instances).await?;
        let now = self.clock.now();
        for row in &rows {
            let job = row.job_ref();
            match (row.status, &row.agent_id) {
                (QueueStatus::Dispatched, Some(agent)) => {
                    self.recover(job, agent.clone(), self.config.recovery_window).await;
                }
                (QueueStatus::Recovering, _) => {
                    let left = row.recovery_deadline.map_or_else(Default::default, |deadline| deadline.since(now));
                    self.deadlines.set(Timer::Recovery(job), Instant::now() + left);
                }
                _ => {}
            }
        }
        if !rows.is_empty() {
            tracing::info!(jobs = rows.len(), "waiting for the agents of jobs that were handed out before the start");
        }
        Ok(())
    }

    /// This instance and those without a sign of life for a recovery window, and at least for a minute.
    pub(crate) async fn own_and_dead_instances(&self) -> Result<Vec<kici_engine::ids::InstanceId>, DispatchError> {
        let silence = self.config.recovery_window.max(std::time::Duration::from_secs(60));
        let mut instances = self.store.instance_dead(self.clock.now().minus(silence)).await?;
        instances.retain(|instance| *instance != self.config.instance);
        instances.push(self.config.instance.clone());
        Ok(instances)
    }

    /// Changes that the database did not take before. Returns how many were tried.
    pub(crate) async fn catch_up(self: &Arc<Self>) -> u64 {
        let late = std::mem::take(&mut *self.late_triage.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        let count = late.len() as u64;
        for triage in late {
            match triage {
                LateTriage::Requeue(undone) => {
                    let _door = match &undone.from {
                        RequeueFrom::NotStarted(agent) | RequeueFrom::AwaitingAck(agent) => {
                            Some(self.comings.door(agent).await)
                        }
                        RequeueFrom::RecoveryExpired => None,
                    };
                    if !self.is_held_again(undone.job) {
                        self.requeue(undone).await;
                    }
                }
                LateTriage::Fail(request) => self.fail(request).await,
                LateTriage::Cancel(job) => self.finish_cancelled(job).await,
                LateTriage::Rebooted(job) => self.finish_rebooted(job).await,
                LateTriage::Recover { job, agent_id, window } => {
                    let _door = self.comings.door(&agent_id).await;
                    if !self.is_held_again(job) {
                        self.recover(job, agent_id, window).await;
                    }
                }
            }
        }
        count
    }

    /// Whether an agent has come back with a job that was to be judged as left behind.
    fn is_held_again(&self, job: JobRef) -> bool {
        let held = self.registry.holder(job).is_some();
        if held {
            tracing::info!(job = %job.job_id, epoch = job.epoch, "an agent is back with a job; it goes on there");
        }
        held
    }

    /// A started job gave no sign of life for too long.
    pub(crate) async fn stale(self: &Arc<Self>, job: JobRef) {
        meters::stale_found();
        let seconds = self.config.stale_after.as_secs();
        let message = format!("no heartbeat of the job came for {seconds} s");
        let reason = FailureReason::StaleHeartbeat;
        self.fail(FailRequest {
            job,
            only_from: vec![QueueStatus::Dispatched],
            queue_status: QueueStatus::Failed,
            reason,
            message,
            retry: false,
        })
        .await;
    }
}
