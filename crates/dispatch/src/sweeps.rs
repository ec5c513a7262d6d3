//! Background work: each part is a reconciler, without input, idempotent, bounded per activation. The program runs them by
//! their interval and shows their state; running one twice, or on two instances, does no harm.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kici_engine::scaling::Trigger;
use kici_engine::state::{FailureReason, QueueStatus};
use kici_protocol::close::CloseReason;
use kici_store::model::{AgentType, FailRequest, HeldJob, JobRef, QueueRow, RequeueFrom};

use crate::dispatcher::{DispatchError, Dispatcher};
use crate::meters;
use crate::outcome::Undone;

/// How long expired tokens stay in lists.
const TOKENS_KEPT: Duration = Duration::from_secs(24 * 3600);
/// How long claim codes that expired are told from unknown ones.
const CLAIMS_KEPT: Duration = Duration::from_secs(3600);
/// Rows handled in one activation.
const BATCH: u32 = 100;

/// A piece of background work.
#[async_trait]
pub trait Reconciler: Send + Sync {
    /// Its name, for logs, metrics and operators.
    fn name(&self) -> &'static str;
    /// How often it runs without a signal.
    fn interval(&self) -> Duration;
    /// True when one instance is enough; every write is guarded, so that two for a moment do no harm.
    fn leader_only(&self) -> bool;
    /// One activation; returns how many things it changed.
    async fn run(&self) -> Result<u64, DispatchError>;
}

#[derive(Clone, Copy, Debug)]
enum Sweep {
    CatchUp,
    ExpiredAcks,
    ExpiredRecoveries,
    ExpiredPending,
    Unstarted,
    Stale,
    JobTimeouts,
    RunDeadlines,
    StuckCancels,
    IdleRuns,
    Routing,
    SilentSessions,
    Tokens,
    Beats,
    Depth,
    Roster,
    Reboots,
    Turns,
    Gates,
    LongWaits,
    LeftSlots,
    Room,
    Cancelled,
    PendingScale,
}

struct Entry {
    dispatcher: Arc<Dispatcher>,
    sweep: Sweep,
}

#[async_trait]
impl Reconciler for Entry {
    fn name(&self) -> &'static str {
        match self.sweep {
            Sweep::CatchUp => "dispatch_catch_up",
            Sweep::ExpiredAcks => "dispatch_expired_acks",
            Sweep::ExpiredRecoveries => "dispatch_expired_recoveries",
            Sweep::ExpiredPending => "dispatch_expired_pending",
            Sweep::Unstarted => "dispatch_unstarted",
            Sweep::Stale => "dispatch_stale_jobs",
            Sweep::JobTimeouts => "dispatch_job_timeouts",
            Sweep::RunDeadlines => "dispatch_run_deadlines",
            Sweep::StuckCancels => "dispatch_stuck_cancels",
            Sweep::IdleRuns => "dispatch_idle_runs",
            Sweep::Routing => "dispatch_routing",
            Sweep::SilentSessions => "dispatch_silent_sessions",
            Sweep::Tokens => "dispatch_tokens",
            Sweep::Beats => "dispatch_heartbeats",
            Sweep::Depth => "dispatch_queue_depth",
            Sweep::Roster => "dispatch_roster",
            Sweep::Reboots => "dispatch_reboots",
            Sweep::Turns => "dispatch_turns",
            Sweep::Gates => "dispatch_gates",
            Sweep::LongWaits => "dispatch_long_waits",
            Sweep::LeftSlots => "dispatch_left_slots",
            Sweep::Room => "dispatch_queue_room",
            Sweep::Cancelled => "dispatch_cancelled",
            Sweep::PendingScale => "dispatch_pending_scale",
        }
    }

    fn interval(&self) -> Duration {
        let grace = self.dispatcher.config.unroutable_grace;
        Duration::from_secs(match self.sweep {
            Sweep::Room => 1,
            Sweep::PendingScale => return self.dispatcher.config.pending_sweep_interval,
            Sweep::CatchUp | Sweep::RunDeadlines | Sweep::Depth | Sweep::Turns | Sweep::Gates => 5,
            Sweep::ExpiredAcks | Sweep::ExpiredRecoveries | Sweep::StuckCancels | Sweep::SilentSessions => 10,
            Sweep::Reboots | Sweep::Cancelled => 10,
            Sweep::Routing => return (grace / 4).clamp(Duration::from_secs(5), Duration::from_secs(30)),
            Sweep::JobTimeouts | Sweep::LongWaits => 15,
            Sweep::ExpiredPending
            | Sweep::Unstarted
            | Sweep::Stale
            | Sweep::Tokens
            | Sweep::Beats
            | Sweep::Roster
            | Sweep::IdleRuns
            | Sweep::LeftSlots => 60,
        })
    }

    fn leader_only(&self) -> bool {
        matches!(
            self.sweep,
            Sweep::ExpiredAcks
                | Sweep::ExpiredRecoveries
                | Sweep::StuckCancels
                | Sweep::LongWaits
                | Sweep::Roster
                | Sweep::LeftSlots
                | Sweep::IdleRuns
                | Sweep::PendingScale
        )
    }

    async fn run(&self) -> Result<u64, DispatchError> {
        let d = &self.dispatcher;
        match self.sweep {
            Sweep::CatchUp => Ok(d.catch_up().await),
            Sweep::ExpiredAcks => d.sweep_acks().await,
            Sweep::ExpiredRecoveries => d.sweep_recoveries().await,
            Sweep::ExpiredPending => d.sweep_pending().await,
            Sweep::Unstarted => d.sweep_unstarted().await,
            Sweep::Stale => d.sweep_stale().await,
            Sweep::JobTimeouts => d.sweep_job_timeouts().await,
            Sweep::RunDeadlines => d.sweep_run_deadlines().await,
            Sweep::StuckCancels => d.sweep_cancels().await,
            Sweep::IdleRuns => d.sweep_idle_runs().await,
            Sweep::Routing => d.probe_routing().await,
            Sweep::SilentSessions => Ok(d.sweep_silent()),
            Sweep::Tokens => d.sweep_tokens().await,
            Sweep::Beats => d.save_signs_of_life().await,
            Sweep::Depth => d.measure_depth().await,
            Sweep::Roster => d.sweep_roster().await,
            Sweep::Reboots => d.sweep_reboots().await,
            Sweep::Turns => d.settle_turns().await,
            Sweep::Gates => d.settle_gates().await,
            Sweep::LongWaits => d.end_long_waits().await,
            Sweep::LeftSlots => d.reclaim_slots().await,
            Sweep::Room => d.measure_room().await,
            Sweep::Cancelled => d.sweep_cancelled().await,
            Sweep::PendingScale => d.redrive(Trigger::Sweep).await,
        }
    }
}

impl Dispatcher {
    /// The background work of dispatch.
    pub fn reconcilers(self: &Arc<Self>) -> Vec<Arc<dyn Reconciler>> {
        let all = [
            Sweep::CatchUp,
            Sweep::ExpiredAcks,
            Sweep::ExpiredRecoveries,
            Sweep::ExpiredPending,
            Sweep::Unstarted,
            Sweep::Stale,
            Sweep::JobTimeouts,
            Sweep::RunDeadlines,
            Sweep::StuckCancels,
            Sweep::IdleRuns,
            Sweep::Routing,
            Sweep::SilentSessions,
            Sweep::Tokens,
            Sweep::Beats,
            Sweep::Depth,
            Sweep::Roster,
            Sweep::Reboots,
            Sweep::Turns,
            Sweep::Gates,
            Sweep::LongWaits,
            Sweep::LeftSlots,
            Sweep::Room,
            Sweep::Cancelled,
        ];
        let on_demand = self.scaler.as_ref().map(|_| Sweep::PendingScale);
        all.into_iter()
            .chain(on_demand)
            .map(|sweep| Arc::new(Entry { dispatcher: self.clone(), sweep }) as Arc<dyn Reconciler>)
            .collect()
    }

    /// Unanswered offers whose timer died with its process.
    async fn sweep_acks(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let rows = self.store.queue_expired_acks(BATCH).await?;
        let mut undone = Vec::new();
        for row in rows {
            let (job, Some(agent)) = (row.job_ref(), row.agent_id.clone()) else { continue };
            if self.registry.holder(job).is_some_and(|(_, _, tracked)| tracked.acked) {
                continue;
            }
            let why = format!("agent {agent} did not answer the offer");
            let from = RequeueFrom::AwaitingAck(agent.clone());
            if self.requeue_quietly(Undone::new(job, from, why.clone(), "ack_timeout")).await {
                undone.push(job.job_id);
                if let Some(local) = self.registry.agent(&agent) {
                    self.close_session(local.session_id, CloseReason::DispatchAckTimeout, &why, job).await;
                }
            }
        }
        if !undone.is_empty() {
            self.jobs_queued(&undone);
        }
        Ok(undone.len() as u64)
    }

    async fn sweep_recoveries(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let rows = self.store.queue_expired_recoveries(BATCH).await?;
        for row in &rows {
            self.end_recovery(row).await;
        }
        Ok(rows.len() as u64)
    }

    async fn sweep_pending(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let rows = self.store.queue_expired_pending(BATCH).await?;
        for row in &rows {
            let why = self.explain(row.job_id).await.ok().and_then(|explanation| explanation.unroutable);
            let waited = self.clock.now().since(row.created_at).as_secs();
            let (reason, message) = match why {
                Some(why) => (FailureReason::Unroutable, why),
                None => {
                    let tried = row
                        .last_provisioning_error
                        .as_ref()
                        .map(|error| format!("; an agent for it could not be started: {error}"));
                    (
                        FailureReason::QueueExpired,
                        format!("no agent took it within {waited} s{}", tried.unwrap_or_default()),
                    )
                }
            };
            let (only_from, queue_status) = (vec![QueueStatus::Pending], QueueStatus::Expired);
            self.fail(FailRequest { job: row.job_ref(), only_from, queue_status, reason, message, retry: false }).await;
        }
        Ok(rows.len() as u64)
    }

    /// Handed out, never started, and silent: with an agent that is here, its signs of life count; otherwise the row.
    async fn sweep_unstarted(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let before = self.clock.now().minus(self.config.stale_after);
        let rows = self.store.queue_unstarted_since(before, BATCH).await?;
        let mine = self.own_and_dead_instances().await?;
        let watched = |row: &QueueRow| row.owner_instance_id.as_ref().is_none_or(|owner| mine.contains(owner));
        let mut changed = 0;
        for row in rows.iter().filter(|row| row.status == QueueStatus::Dispatched && watched(row)) {
            let (job, Some(agent)) = (row.job_ref(), row.agent_id.clone()) else { continue };
            if self.registry.holder(job).is_some_and(|(_, _, tracked)| tracked.last_heartbeat > before) {
                continue;
            }
            self.registry.untrack_of(&agent, job, false);
            let why = format!("agent {agent} gave no sign of life for the job");
            self.requeue(Undone::new(job, RequeueFrom::NotStarted(agent), why, "agent_lost")).await;
            changed += 1;
        }
        Ok(changed)
    }

    async fn sweep_stale(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let before = self.clock.now().minus(self.config.stale_after);
        let jobs = self.store.jobs_stale(before, BATCH).await?;
        let mine = self.own_and_dead_instances().await?;
        let mut changed = 0;
        for held in jobs {
            let watched = held.owner.as_ref().is_none_or(|owner| mine.contains(owner));
            let alive = self.registry.holder(held.job).is_some_and(|(_, _, tracked)| tracked.last_heartbeat > before);
            if watched && !alive {
                self.stale(held.job).await;
                self.kill_at_agent(held);
                changed += 1;
            }
        }
        Ok(changed)
    }

    /// The backstop of the agents' own job time-outs.
    async fn sweep_job_timeouts(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let slack = self.config.max_grace + self.config.cancel_slack;
        let jobs = self.store.jobs_past_timeout(slack, BATCH).await?;
        let count = jobs.len() as u64;
        for held in jobs {
            let message = "it ran longer than its limit and its agent did not end it".to_owned();
            let (reason, queue_status) = (FailureReason::JobTimeout, QueueStatus::Failed);
            let request =
                FailRequest { job: held.job, only_from: Vec::new(), queue_status, reason, message, retry: false };
            self.kill_at_agent(held);
            self.fail(request).await;
        }
        Ok(count)
    }

    /// The database gives the job up; the agent must too.
    fn kill_at_agent(self: &Arc<Self>, held: HeldJob) {
        if self.registry.holder(held.job).is_some() {
            self.stop_at_agents(&[held], true);
        }
    }

    async fn sweep_run_deadlines(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let runs = self.store.runs_past_deadline(BATCH).await?;
        for run in &runs {
            match self.cancel_run(*run, "timeout", FailureReason::WorkflowTimeout, false).await {
                Ok(_) | Err(DispatchError::AlreadyTerminal(_) | DispatchError::NoSuchRun) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(runs.len() as u64)
    }

    async fn sweep_cancels(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let before = self.clock.now().minus(self.config.recovery_window * 2);
        let runs = self.store.runs_cancelling_since(before, BATCH).await?;
        for run in &runs {
            tracing::warn!(run = %run, "a run did not end after its cancel; ending it");
            match self.cancel_run(*run, "system", FailureReason::CancelledByUser, true).await {
                Ok(_) | Err(DispatchError::AlreadyTerminal(_) | DispatchError::NoSuchRun) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(runs.len() as u64)
    }

    /// The backstop of everything that happens when a job ends: open runs in which nothing is handed out, waits for an
    /// agent or is held. Each change of a job settles its run in the same transaction, so there is nothing to find.
    async fn sweep_idle_runs(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let before = self.clock.now().minus(self.config.stale_after);
        let mut changed = 0;
        for run in self.store.runs_idle(before, BATCH).await? {
            let effects = match self.store.run_unstick(run, self.activate()).await {
                Ok(Some(effects)) => effects,
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!(%run, %error, "a run that stands still cannot go on yet");
                    continue;
                }
            };
            tracing::error!(%run, status = %effects.run.status, "a run stood still and goes on; please report this");
            self.apply_effects(&effects);
            changed += 1;
        }
        Ok(changed)
    }

    fn sweep_silent(&self) -> u64 {
        let silent = self.registry.silent(self.config.heartbeat_timeout);
        for link in &silent {
            let seconds = self.config.heartbeat_timeout.as_secs();
            link.close(CloseReason::HeartbeatTimeout, format!("no frame came for {seconds} s"));
        }
        silent.len() as u64
    }

    pub(crate) async fn close_invalid_tokens(&self) {
        if let Err(error) = self.sweep_tokens().await {
            tracing::warn!(%error, "revoked tokens could not be looked for");
        }
    }

    /// Sessions of revoked tokens end; those of expired ephemeral tokens end once they hold no job. Tokens that expired long
    /// ago are deleted, those in use after their sessions only.
    async fn sweep_tokens(&self) -> Result<u64, DispatchError> {
        let in_use = self.registry.tokens();
        let now = self.clock.now();
        let kept = in_use.iter().map(|(id, _, _)| *id).collect();
        let claims = self.store.claims_reap(now.minus(CLAIMS_KEPT)).await?;
        let reaped = self.store.agent_token_reap(now.minus(TOKENS_KEPT), kept).await?.len() as u64 + claims;
        if in_use.is_empty() {
            return Ok(reaped);
        }
        let tokens = self.store.agent_token_list().await?;
        let mut closed = reaped;
        for (id, link, busy) in in_use {
            let token = tokens.iter().find(|token| token.id == id);
            let revoked = token.is_some_and(|token| token.revoked_at.is_some());
            // One that is gone was deleted because it had expired.
            let expired = token.is_none_or(|token| {
                token.agent_type == AgentType::Ephemeral && token.expires_at.is_some_and(|at| at <= now)
            });
            if revoked {
                link.close(CloseReason::AuthRevoked, "the token was revoked; give the agent a new one");
            } else if expired && !busy {
                link.close(CloseReason::AuthFailed, "the token has expired");
            } else {
                continue;
            }
            closed += 1;
        }
        Ok(closed)
    }

    /// Signs of life of agents and jobs, in one write each.
    async fn save_signs_of_life(&self) -> Result<u64, DispatchError> {
        let now = self.clock.now();
        let seen: Vec<_> = self.registry.take_seen().into_iter().map(|agent| (agent, now)).collect();
        let beats = self.registry.take_beats();
        let count = (seen.len() + beats.len()) as u64;
        if !seen.is_empty() {
            self.store.roster_seen(seen).await?;
        }
        if !beats.is_empty() {
            self.store.job_heartbeats(beats).await?;
        }
        Ok(count)
    }

    async fn measure_depth(&self) -> Result<u64, DispatchError> {
        let counts = self.store.queue_counts().await?;
        meters::queue_depth(counts.pending, counts.dispatched, counts.recovering);
        let threshold = self.config.backpressure_threshold;
        let high = threshold > 0 && counts.pending > threshold;
        meters::backpressure(high);
        if let Some(began) = self.backpressure.observe(high) {
            match began {
                true => tracing::warn!(
                    waiting = counts.pending,
                    threshold,
                    "many jobs wait for agents; add agents, or raise queue.backpressure_threshold"
                ),
                false => tracing::info!(waiting = counts.pending, threshold, "fewer jobs wait for agents again"),
            }
        }
        Ok(0)
    }

    /// Tells the store how many jobs wait, so that it refuses more than may.
    pub(crate) async fn measure_room(&self) -> Result<u64, DispatchError> {
        let waiting = self.store.queue_waiting(self.config.max_depth).await?;
        self.store.limit_queue(self.config.max_depth, waiting);
        Ok(0)
    }

    pub(crate) async fn close_session(
        self: &Arc<Self>,
        session: kici_engine::ids::SessionId,
        reason: CloseReason,
        message: &str,
        undone: JobRef,
    ) {
        if let Some(link) = self.registry.link(session) {
            link.close(reason, message);
        }
        self.session_over(session, Some(undone)).await;
    }
}
