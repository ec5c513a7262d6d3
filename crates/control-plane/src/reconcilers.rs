//! Background work of the assembly: each a reconciler without input, idempotent, bounded per activation.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::InstanceId;
use kici_engine::time::{Clock, Ts};
use kici_events::{GapRepair, Schedules};
use kici_store::model::{Instance, LeaseAnswer};
use kici_store::{Fence, Store, StoreError, fenced};
use kici_telemetry::metrics::Metrics;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::adapters::Node;
use crate::background::{Schedule, Statuses};
use crate::config::EventLogConfig;
use crate::logs::LogSealer;
use crate::payloads::Payloads;
use crate::retention::Retention;
use crate::stored::Stored;

/// Instances are dead when they were silent for the recovery window, and at least for six beats.
const INSTANCE_BEAT: Duration = Duration::from_secs(10);
const DISK_CHECK: Duration = Duration::from_secs(1);
const PAYLOADS: Duration = Duration::from_secs(10);
const PAYLOAD_BATCH: u32 = 50;
const SEAL_CHECK: Duration = Duration::from_secs(30);
/// The lease of the instance that does what one instance is enough for: renewed three times within its life.
pub(crate) const LEADER: &str = "leader";
const LEASE_TTL: Duration = Duration::from_secs(15);
const LEASE_RENEWAL: Duration = Duration::from_secs(5);
const GAPS: Duration = Duration::from_secs(60);
const RETENTION: Duration = Duration::from_secs(600);
const STORED: Duration = Duration::from_secs(300);
const OBJECTS: Duration = Duration::from_secs(10);
const BATCHES: Duration = Duration::from_secs(5);
const BATCH_LIMIT: u32 = 100;
const UPKEEP: Duration = Duration::from_secs(5);
const DEAD_LETTERS: Duration = Duration::from_secs(60);
const DEAD_INSTANCES: Duration = Duration::from_secs(30);
/// An instance that gave no sign of life for as long is dead.
const INSTANCE_SILENCE: Duration = Duration::from_secs(120);

/// Frees what instances that are `gone`, or dead, had begun to process; returns how much.
pub(crate) async fn free_claims(store: &Store, now: Ts, mut gone: Vec<InstanceId>) -> Result<u64, StoreError> {
    gone.extend(store.instance_dead(now.minus(INSTANCE_SILENCE)).await?);
    if gone.is_empty() {
        return Ok(0);
    }
    Ok(store.delivery_claims_release(gone.clone()).await? + store.event_claims_release(gone).await?)
}

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
    pub(crate) stored: Arc<Stored>,
    pub(crate) schedules: Arc<Schedules>,
    pub(crate) cron_tick: Duration,
    pub(crate) metrics: Metrics,
    pub(crate) statuses: Arc<Statuses>,
    /// The term in which this instance holds the lease; none while it does not.
    pub(crate) leads: Arc<watch::Sender<Option<i64>>>,
}

impl Background {
    /// Starts all of them on `tasks`; they end with `stop`.
    pub(crate) fn start(self: Arc<Self>, tasks: &TaskTracker, stop: &CancellationToken) {
        let each = |name, period| Schedule { name, period, leader_only: false };
        self.every(tasks, stop, each("instance_heartbeat", INSTANCE_BEAT), |this| async move { this.beat().await });
        self.every(tasks, stop, each("disk", DISK_CHECK), |this| async move { this.watch_disk() });
        self.every(tasks, stop, each("payloads", PAYLOADS), |this| async move { this.move_payloads().await });
        self.every(tasks, stop, each("log_seals", SEAL_CHECK), |this| async move {
            this.sealer.seal_all().await;
            Ok(0)
        });
        self.every(tasks, stop, each("metrics", UPKEEP), |this| async move {
            this.metrics.upkeep();
            Ok(0)
        });
        self.every(tasks, stop, each("lease", LEASE_RENEWAL), |this| async move { this.campaign().await });
        let gaps = Schedule { name: "delivery_gaps", period: GAPS, leader_only: true };
        self.every(tasks, stop, gaps, |this| async move { this.repair_gaps().await });
        let retention = Schedule { name: "retention", period: RETENTION, leader_only: true };
        self.every(tasks, stop, retention, |this| async move { this.retain().await });
        let dead = Schedule { name: "dead_letters", period: DEAD_LETTERS, leader_only: true };
        self.every(tasks, stop, dead, |this| async move { this.count_dead().await });
        let orphans = Schedule { name: "claims_of_the_dead", period: DEAD_INSTANCES, leader_only: true };
        self.every(tasks, stop, orphans, |this| async move {
            let freed = free_claims(&this.store, this.clock.now(), Vec::new()).await;
            freed.map_err(|error| format!("what dead instances had begun cannot be freed: {error}"))
        });
        let stored = Schedule { name: "caches", period: STORED, leader_only: true };
        self.every(tasks, stop, stored, |this| async move { this.stored.sweep().await });
        self.every(tasks, stop, each("objects", OBJECTS), |this| async move { this.stored.delete_objects().await });
        let cron = Schedule { name: "schedules", period: self.cron_tick, leader_only: true };
        self.every(tasks, stop, cron, |this| async move {
            let fired = this.schedules.run().await;
            fired.map_err(|error| format!("the times of schedules cannot be looked at: {error}"))
        });
        let batches = Schedule { name: "failed_batches", period: BATCHES, leader_only: true };
        self.every(tasks, stop, batches, |this| async move {
            let told = this.store.batches_close(BATCH_LIMIT).await;
            told.map_err(|error| format!("workflows that collect failures cannot be told: {error}"))
        });
        for sweep in self.node.dispatcher.reconcilers() {
            let (name, period, leader_only) = (sweep.name(), sweep.interval(), sweep.leader_only());
            self.every(tasks, stop, Schedule { name, period, leader_only }, move |_| {
                let sweep = Arc::clone(&sweep);
                async move { sweep.run().await.map_err(|error| error.to_string()) }
            });
        }
        let this = Arc::clone(&self);
        let stop = stop.clone();
        // Finished steps are sealed as they end; the timer above finds what this misses.
        tasks.spawn(async move { this.sealer.follow(stop).await });
    }

    /// Runs `work` again and again, never twice at once; the next activation is the retry of a failed one.
    fn every<F, W>(self: &Arc<Self>, tasks: &TaskTracker, stop: &CancellationToken, schedule: Schedule, work: W)
    where
        F: Future<Output = Result<u64, String>> + Send,
        W: Fn(Arc<Self>) -> F + Send + 'static,
    {
        self.statuses.add(schedule);
        let this = Arc::clone(self);
        let stop = stop.clone();
        let mut leads = self.leads.subscribe();
        tasks.spawn(async move {
            let mut tick = tokio::time::interval(schedule.period);
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            let mut turn = async || {
                tick.tick().await;
                if !schedule.leader_only {
                    return None;
                }
                // A new leader begins at once. The sender lives as long as this.
                leads.wait_for(Option::is_some).await.ok().and_then(|leads| *leads)
            };
            loop {
                let term = tokio::select! {
                    () = stop.cancelled() => return,
                    term = turn() => term,
                };
                let work = work(Arc::clone(&this));
                match term {
                    None => this.activate(schedule.name, work).await,
                    Some(term) => {
                        let fence = Fence { lease: LEADER.to_owned(), term };
                        this.activate(schedule.name, fenced(fence, work)).await;
                    }
                }
            }
        });
    }

    async fn activate(&self, job: &'static str, work: impl Future<Output = Result<u64, String>>) {
        self.statuses.began(job, self.clock.now());
        let started = Instant::now();
        let result = work.await;
        let now = self.clock.now().as_micros() as f64 / 1e6;
        let word = match &result {
            Ok(changed) => {
                if *changed > 0 {
                    tracing::debug!(job, changed, "background work");
                }
                metrics::gauge!("kici_orch_job_last_success_timestamp_seconds", "job" => job).set(now);
                metrics::gauge!("kici_orch_job_consecutive_failures", "job" => job).set(0.0);
                "success"
            }
            Err(error) => {
                tracing::warn!(job, error, "background work failed");
                metrics::gauge!("kici_orch_job_last_failure_timestamp_seconds", "job" => job).set(now);
                metrics::gauge!("kici_orch_job_consecutive_failures", "job" => job).increment(1.0);
                "failure"
            }
        };
        self.statuses.ended(job, started.elapsed(), &result);
        metrics::counter!("kici_orch_job_runs_total", "job" => job, "result" => word).increment(1);
        metrics::histogram!("kici_orch_job_duration_seconds", "job" => job).record(started.elapsed());
    }

    async fn beat(&self) -> Result<u64, String> {
        let mut instance = self.instance.clone();
        instance.last_seen_at = self.clock.now();
        let written = self.store.instance_heartbeat(instance).await;
        written.map(|()| 1).map_err(|error| format!("this instance's sign of life cannot be written: {error}"))
    }

    /// Takes or renews the lease. Without an answer this instance stops leading; the lease ends by itself.
    async fn campaign(&self) -> Result<u64, String> {
        let answer = self.store.lease_acquire(LEADER.to_owned(), LEASE_TTL).await;
        let term = match answer {
            Ok(LeaseAnswer::Held { term }) => Some(term),
            _ => None,
        };
        if self.leads.send_replace(term) != term {
            tracing::info!(leads = term.is_some(), term, "leadership changed");
        }
        answer.map(|_| u64::from(term.is_some())).map_err(|error| format!("the lease cannot be renewed: {error}"))
    }

    /// Asks forges to send again what did not arrive.
    async fn repair_gaps(&self) -> Result<u64, String> {
        let repaired =
            self.gaps.run().await.map_err(|error| format!("lost deliveries cannot be looked for: {error}"))?;
        if repaired.asked > 0 {
            tracing::info!(repaired.asked, "deliveries that had not arrived were asked for again");
        }
        if repaired.problems.is_empty() { Ok(repaired.asked as u64) } else { Err(repaired.problems.join("; ")) }
    }

    /// Tells how much waits for a person.
    async fn count_dead(&self) -> Result<u64, String> {
        let dead =
            self.store.dead_letters().await.map_err(|error| format!("dead letters cannot be counted: {error}"))?;
        metrics::gauge!("kici_orch_event_dlq_depth").set(dead as f64);
        Ok(0)
    }

    /// Removes what is old.
    async fn retain(&self) -> Result<u64, String> {
        let removed = self.retention.run().await;
        removed.map_err(|error| format!("old records cannot be removed; it is tried again: {error}"))
    }

    /// No space: no new jobs are given out, and `/ready` says why. Both heal by themselves.
    fn watch_disk(&self) -> Result<u64, String> {
        let problem = self.node.disk_problem();
        self.node.dispatcher.stop_claims(problem.clone());
        problem.map_or(Ok(0), Err)
    }

    async fn move_payloads(&self) -> Result<u64, String> {
        let now = self.clock.now();
        let moved = self.payloads.move_finished(self.event_log.max_payload_bytes, PAYLOAD_BATCH, now).await;
        moved.map_err(|problem| format!("bodies of deliveries stay in the database for now: {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use kici_engine::ids::SourceId;
    use kici_store::model::{DeliveryInserted, NewDelivery};
    use kici_store::testing::{TestIds, TestStore, instance};
    use uuid::Uuid;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_dead_instance_had_begun_is_freed_and_what_a_living_one_works_on_is_not() {
        TestStore::each(|test| async move {
            let mut claimed = Vec::new();
            for node in ["node-2", "node-3"] {
                let beat = Instance {
                    instance_id: instance(node),
                    incarnation: Uuid::from_u128(1),
                    role: "coordinator".to_owned(),
                    address: None,
                    version: "0".to_owned(),
                    started_at: test.clock.now(),
                    last_seen_at: test.clock.now(),
                    draining: false,
                };
                test.store.instance_heartbeat(beat.clone()).await.unwrap();
                let new = NewDelivery {
                    org: "default".to_owned(),
                    source_id: SourceId::mint(&TestIds),
                    delivery_id: node.to_owned(),
                    event: "push".to_owned(),
                    action: None,
                    provider: "generic".to_owned(),
                    channel: "direct".to_owned(),
                    repo: None,
                    git_ref: None,
                    sha: None,
                    request_id: "r".to_owned(),
                    headers: serde_json::json!({}),
                    body: Vec::new(),
                    claimed_by: Some(instance(node)),
                };
                let DeliveryInserted::Inserted(id) = test.store.delivery_insert(new).await.unwrap() else { panic!() };
                claimed.push((id, beat));
            }
            assert_eq!(free_claims(&test.store, test.clock.now(), Vec::new()).await.unwrap(), 0);
            test.clock.advance(INSTANCE_SILENCE + Duration::from_secs(1));
            let alive = Instance { last_seen_at: test.clock.now(), ..claimed[1].1.clone() };
            test.store.instance_heartbeat(alive).await.unwrap();
            assert_eq!(free_claims(&test.store, test.clock.now(), Vec::new()).await.unwrap(), 1);
            let taken = test.store.delivery_claim(10, Duration::from_secs(900), 5).await.unwrap();
            assert_eq!(taken.iter().map(|delivery| delivery.id).collect::<Vec<_>>(), [claimed[0].0]);
            assert_eq!(taken[0].claims, 2, "the claim of the dead one counts");
        })
        .await;
    }
}
