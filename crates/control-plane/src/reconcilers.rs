//! Background work of the assembly: each a reconciler without input, idempotent, bounded per activation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kici_dispatch::Reconciler;
use kici_engine::time::Clock;
use kici_events::GapRepair;
use kici_store::Store;
use kici_store::model::{Instance, LeaseAnswer};
use kici_telemetry::metrics::Metrics;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::adapters::Node;
use crate::config::EventLogConfig;
use crate::logs::LogSealer;
use crate::payloads::Payloads;
use crate::retention::Retention;

/// Instances are dead when they were silent for the recovery window, and at least for six beats.
const INSTANCE_BEAT: Duration = Duration::from_secs(10);
const DISK_CHECK: Duration = Duration::from_secs(1);
const PAYLOADS: Duration = Duration::from_secs(10);
const PAYLOAD_BATCH: u32 = 50;
const SEAL_CHECK: Duration = Duration::from_secs(30);
/// The lease of the instance that does what one instance is enough for: renewed three times within its life.
const LEADER: &str = "leader";
const LEASE_TTL: Duration = Duration::from_secs(15);
const LEASE_RENEWAL: Duration = Duration::from_secs(5);
const GAPS: Duration = Duration::from_secs(60);
const RETENTION: Duration = Duration::from_secs(600);
const UPKEEP: Duration = Duration::from_secs(5);

/// What the reconcilers work on.
pub(crate) struct Background {
    pub(crate) store: Store,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) node: Arc<Node>,
    pub(crate) payloads: Payloads,
    pub(crate) sealer: LogSealer,
    pub(crate) instance: Instance,
    pub(crate) event_log: EventLogConfig,
    pub(crate) gaps: GapRepair,
    pub(crate) retention: Retention,
    pub(crate) metrics: Metrics,
    /// True while this instance holds the lease.
    pub(crate) leads: AtomicBool,
}

impl Background {
    /// Starts all of them on `tasks`; they end with `stop`.
    pub(crate) fn start(self: Arc<Self>, tasks: &TaskTracker, stop: &CancellationToken) {
        every(tasks, stop, INSTANCE_BEAT, &self, |this| async move { this.beat().await });
        every(tasks, stop, DISK_CHECK, &self, |this| async move { this.watch_disk() });
        every(tasks, stop, PAYLOADS, &self, |this| async move { this.move_payloads().await });
        every(tasks, stop, SEAL_CHECK, &self, |this| async move { this.sealer.seal_all().await });
        every(tasks, stop, UPKEEP, &self, |this| async move { this.metrics.upkeep() });
        every(tasks, stop, LEASE_RENEWAL, &self, |this| async move { this.campaign().await });
        every(tasks, stop, GAPS, &self, |this| async move { this.repair_gaps().await });
        every(tasks, stop, RETENTION, &self, |this| async move { this.retain().await });
        for sweep in self.node.dispatcher.reconcilers() {
            let interval = sweep.interval();
            every(tasks, stop, interval, &self, move |this| {
                let sweep = Arc::clone(&sweep);
                async move { this.sweep(&*sweep).await }
            });
        }
        let this = Arc::clone(&self);
        let stop = stop.clone();
        // Finished steps are sealed as they end; the timer above finds what this misses.
        tasks.spawn(async move { this.sealer.follow(stop).await });
    }

    async fn beat(&self) {
        let mut instance = self.instance.clone();
        instance.last_seen_at = self.clock.now();
        if let Err(error) = self.store.instance_heartbeat(instance).await {
            tracing::warn!(%error, "this instance's sign of life cannot be written");
        }
    }

    /// Takes or renews the lease. Without an answer this instance stops leading; the lease ends by itself.
    async fn campaign(&self) {
        let leads = match self.store.lease_acquire(LEADER.to_owned(), LEASE_TTL).await {
            Ok(LeaseAnswer::Held { .. }) => true,
            Ok(LeaseAnswer::Other { .. }) => false,
            Err(error) => {
                tracing::warn!(%error, "the lease cannot be renewed");
                false
            }
        };
        if self.leads.swap(leads, Ordering::SeqCst) != leads {
            tracing::info!(leads, "leadership changed");
        }
    }

    /// One activation of a sweep; the next one is the retry of a failed one.
    async fn sweep(&self, sweep: &dyn Reconciler) {
        if sweep.leader_only() && !self.leads.load(Ordering::SeqCst) {
            return;
        }
        let job = sweep.name();
        let started = Instant::now();
        let result = match sweep.run().await {
            Ok(0) => "success",
            Ok(changed) => {
                tracing::debug!(job, changed, "sweep");
                "success"
            }
            Err(error) => {
                tracing::warn!(job, %error, "sweep failed");
                "failure"
            }
        };
        metrics::counter!("kici_orch_job_runs_total", "job" => job, "result" => result).increment(1);
        metrics::histogram!("kici_orch_job_duration_seconds", "job" => job).record(started.elapsed());
    }

    /// Asks forges to send again what did not arrive.
    async fn repair_gaps(&self) {
        if !self.leads.load(Ordering::SeqCst) {
            return;
        }
        match self.gaps.run().await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "deliveries that had not arrived were asked for again"),
            Err(error) => tracing::warn!(%error, "lost deliveries cannot be looked for"),
        }
    }

    /// Removes what is old.
    async fn retain(&self) {
        if !self.leads.load(Ordering::SeqCst) {
            return;
        }
        match self.retention.run().await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "old records were removed"),
            Err(error) => tracing::warn!(%error, "old records cannot be removed; it is tried again"),
        }
    }

    /// No space: no new jobs are given out, and `/ready` says why. Both heal by themselves.
    fn watch_disk(&self) {
        self.node.dispatcher.stop_claims(self.node.disk_problem());
    }

    async fn move_payloads(&self) {
        if let Err(problem) = self.payloads.move_finished(self.event_log.max_payload_bytes, PAYLOAD_BATCH).await {
            tracing::warn!(problem, "bodies of deliveries stay in the database for now");
        }
    }
}

fn every<T, F, W>(tasks: &TaskTracker, stop: &CancellationToken, period: Duration, this: &Arc<T>, work: W)
where
    T: Send + Sync + 'static,
    F: Future<Output = ()> + Send,
    W: Fn(Arc<T>) -> F + Send + 'static,
{
    let this = Arc::clone(this);
    let stop = stop.clone();
    tasks.spawn(async move {
        let mut tick = tokio::time::interval(period);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = tick.tick() => work(Arc::clone(&this)).await,
            }
        }
    });
}
