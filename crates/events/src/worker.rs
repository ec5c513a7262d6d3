//! The worker: takes stored deliveries, has them planned, writes what comes of them.
//!
//! Fresh deliveries of this process come through a channel, so that nothing polls on the way. The database is asked when it
//! signals and every few seconds: it holds what the channel had no room for and what a dead process left behind.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use kici_engine::ids::DeliveryRowId;
use kici_engine::time::{Clock, Ts};
use kici_forge::Headers;
use kici_store::model::{Activate, Delivery, DeliveryOutcome, DeliveryStatus, Processed};
use kici_store::{Store, StoreError, Topic};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;
use uuid::Uuid;

use crate::planner::{Planner, Retry, Work};
use crate::sources::{OpenSource, SourceBook};

/// Deliveries that wait in memory; more wait in the database.
pub const QUEUE: usize = 256;
/// How often the database is asked without a signal.
const POLL: Duration = Duration::from_secs(5);
/// Limit of one attempt; well below the claim's, so that a claim needs no renewal.
const ATTEMPT: Duration = Duration::from_secs(600);
const BACKOFF_BASE: Duration = Duration::from_secs(5);
const BACKOFF_MAX: Duration = Duration::from_secs(300);

/// Before a verdict that could not be written is written again.
const SETTLE_AGAIN: Duration = Duration::from_secs(2);

/// What becomes of a delivery that was not processed.
#[derive(Clone)]
enum Verdict {
    /// It is over.
    Finish(DeliveryOutcome),
    /// It is tried again, for this reason, at that time.
    Retry(String, Ts),
}

/// Decides on the jobs of new runs and is told about them.
pub trait RunsCreated: Send + Sync {
    /// The decisions on jobs whose needs are met, for one delivery.
    fn activate(&self) -> Arc<dyn Activate>;

    /// The runs of one delivery, with the jobs that are ready.
    fn created(&self, processed: &Processed, routing_key: &str);
}

/// How a worker works.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Deliveries processed at the same time.
    pub workers: usize,
    /// Age at which the claim of a silent process is void.
    pub claim_timeout: Duration,
    /// Attempts before a delivery is dead; also processes that end in a row while they process it.
    pub max_attempts: u32,
    /// Age at which a delivery that waits as overflow is dead.
    pub overflow_age: Duration,
}

/// Processes deliveries until it is cancelled.
pub struct Worker {
    store: Store,
    sources: SourceBook,
    planner: Arc<Planner>,
    clock: Arc<dyn Clock>,
    created: Arc<dyn RunsCreated>,
    config: WorkerConfig,
    /// A delivery that was taken alone is done: the next one may be.
    alone: Notify,
}

impl Worker {
    /// A worker over these parts.
    pub fn new(
        store: Store,
        sources: SourceBook,
        planner: Arc<Planner>,
        clock: Arc<dyn Clock>,
        created: Arc<dyn RunsCreated>,
        config: WorkerConfig,
    ) -> Arc<Self> {
        Arc::new(Self { store, sources, planner, clock, created, config, alone: Notify::new() })
    }

    /// Works until `stop`, then lets what is under way finish on `tasks`.
    pub async fn run(
        self: Arc<Self>,
        mut fresh: mpsc::Receiver<(Work, Arc<OpenSource>)>,
        stop: CancellationToken,
        tasks: TaskTracker,
    ) {
        let slots = Arc::new(Semaphore::new(self.config.workers));
        let mut wakeups = self.store.subscribe(|topic| matches!(topic, Topic::Deliveries));
        let mut poll = tokio::time::interval(POLL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The database may hold more than there was a slot for.
        let mut more = false;
        loop {
            let slot = tokio::select! {
                () = stop.cancelled() => break,
                slot = Arc::clone(&slots).acquire_owned() => slot,
            };
            // The semaphore is never closed.
            let Ok(slot) = slot else { break };
            // What the database holds is older than what comes through the channel, which may never be empty.
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = std::future::ready(()), if more => None,
                _ = poll.tick() => None,
                next = fresh.recv() => next,
                _ = wakeups.next() => None,
                () = self.alone.notified() => None,
            };
            match next {
                Some((work, source)) => {
                    let (worker, stop) = (Arc::clone(&self), stop.clone());
                    tasks.spawn(async move {
                        worker.process(work, &source, &stop).await;
                        drop(slot);
                    });
                }
                None => {
                    drop(slot);
                    more = self.take_stored(&slots, &tasks, &stop).await;
                }
            }
        }
    }

    /// Claims and processes what the database holds; with room left, also what waits as overflow. A free slot comes
    /// first, so that lack of room never costs a delivery an attempt. True when the slots ran out first.
    async fn take_stored(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> bool {
        loop {
            let free = u32::try_from(slots.available_permits()).unwrap_or(u32::MAX);
            if free == 0 {
                return true;
            }
            let claim_timeout = self.config.claim_timeout;
            // A process may end for reasons of its own, so that once is never enough.
            let max_claims = self.config.max_attempts.max(2);
            let claimed = match self.store.delivery_claim(free, claim_timeout, max_claims).await {
                Ok(claimed) => claimed,
                Err(error) => {
                    tracing::warn!(%error, "deliveries cannot be claimed; trying again shortly");
                    return false;
                }
            };
            let claimed = if claimed.is_empty() { self.drain(free).await } else { claimed };
            if claimed.is_empty() {
                return false;
            }
            for delivery in claimed {
                let Ok(slot) = Arc::clone(slots).acquire_owned().await else { return false };
                let (worker, stop) = (Arc::clone(self), stop.clone());
                tasks.spawn(async move {
                    worker.attempt(delivery, &stop).await;
                    drop(slot);
                });
            }
        }
    }

    /// Up to `limit` deliveries of the overflow, oldest first.
    async fn drain(&self, limit: u32) -> Vec<Delivery> {
        let drained = match self.store.delivery_drain(limit, self.config.overflow_age).await {
            Ok(drained) => drained,
            Err(error) => {
                tracing::warn!(%error, "the overflow cannot be read; trying again shortly");
                return Vec::new();
            }
        };
        if drained.dropped > 0 {
            metrics::counter!("kici_orch_ingest_overflow_dropped_total", "reason" => "max_age")
                .increment(drained.dropped);
            tracing::error!(deliveries = drained.dropped, "no room for deliveries; see `kici-admin event dlq list`");
        }
        let taken = u64::try_from(drained.claimed.len()).unwrap_or(u64::MAX);
        metrics::counter!("kici_orch_ingest_overflow_replayed_total").increment(taken);
        drained.claimed
    }

    /// Processes a claimed delivery, and writes what comes of it: done, again later, or dead.
    pub async fn attempt(&self, delivery: Delivery, stop: &CancellationToken) {
        let alone = delivery.is_suspect();
        self.attempt_claimed(delivery, stop).await;
        if alone {
            self.alone.notify_one();
        }
    }

    async fn attempt_claimed(&self, delivery: Delivery, stop: &CancellationToken) {
        let id = delivery.id;
        match self.load(&delivery).await {
            Ok(Ok((work, source))) => self.process(work, &source, stop).await,
            Ok(Err(problem)) => {
                let outcome = DeliveryOutcome { status: DeliveryStatus::Failed, error: Some(problem), note: None };
                self.settle(id, Verdict::Finish(outcome), stop).await;
            }
            Err(error) => self.retry(id, &error.to_string(), delivery.attempts, stop).await,
        }
    }

    /// The work of a stored delivery, or why there is none.
    async fn load(&self, delivery: &Delivery) -> Result<Result<(Work, OpenSource), String>, StoreError> {
        let Some(body) = self.store.delivery_body(delivery.id).await? else {
            return Ok(Err("its body is no longer kept; have the sender send it again".to_owned()));
        };
        let Some(stored) = self.store.source_by_id(delivery.source_id).await? else {
            return Ok(Err("its source is gone".to_owned()));
        };
        let source = match self.sources.open(&stored) {
            Ok(source) => source,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let headers: Headers = serde_json::from_value(body.headers).unwrap_or_default();
        let work = Work {
            id: delivery.id,
            org: delivery.org.clone(),
            event: delivery.event.clone(),
            request_id: delivery.request_id.clone(),
            headers,
            body: body.body,
        };
        Ok(Ok((work, source)))
    }

    async fn process(&self, work: Work, source: &OpenSource, stop: &CancellationToken) {
        let span = tracing::info_span!("delivery", delivery = %work.id, request_id = %work.request_id);
        self.process_in_span(work, source, stop).instrument(span).await;
    }

    async fn process_in_span(&self, work: Work, source: &OpenSource, stop: &CancellationToken) {
        let attempt = async {
            loop {
                let done = self.planner.process(&work, source).await?;
                let summary = (done.outcome.status, done.outcome.note.clone());
                let activate = self.created.activate();
                match self.store.delivery_process(done, activate.clone()).await {
                    Ok(mut processed) => {
                        let placed = processed.runs.iter_mut().flat_map(|run| std::mem::take(&mut run.placed));
                        activate.placed(placed.collect());
                        return Ok::<_, Retry>((processed, summary));
                    }
                    // Another push of the repository was written meanwhile: this one is judged anew, and no attempt is lost.
                    Err(StoreError::Changed { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        };
        // A panic was logged where it happened; it must not leave the claim to lapse.
        let attempt = AssertUnwindSafe(attempt).catch_unwind();
        let failed = match tokio::time::timeout(ATTEMPT, attempt).await {
            Ok(Ok(Ok((processed, (status, note))))) => {
                let result = match status {
                    DeliveryStatus::Failed | DeliveryStatus::Dead => "error",
                    _ if processed.runs.is_empty() => "skipped",
                    _ => "matched",
                };
                metrics::counter!("kici_orch_webhooks_processed_total", "result" => result).increment(1);
                tracing::info!(%status, runs = processed.runs.len(), note, "delivery processed");
                self.created.created(&processed, &source.source.routing_key());
                return;
            }
            Ok(Ok(Err(retry))) => retry.to_string(),
            Ok(Err(_panic)) => "a defect of the orchestrator: processing panicked; its log has the place".to_owned(),
            Err(_) => "processing took longer than 10 minutes".to_owned(),
        };
        metrics::counter!("kici_orch_webhook_pipeline_failures_total", "phase" => "process").increment(1);
        let attempts = match self.store.delivery_get(work.id).await {
            Ok(row) => row.map_or(0, |row| row.attempts),
            Err(_) => 0,
        };
        self.retry(work.id, &failed, attempts, stop).await;
    }

    /// Counts a failed attempt: again later, or dead.
    async fn retry(&self, id: DeliveryRowId, problem: &str, attempts: u32, stop: &CancellationToken) {
        let verdict = if attempts + 1 >= self.config.max_attempts {
            let note = Some(format!("gave up after {} attempts", attempts + 1));
            let outcome = DeliveryOutcome { status: DeliveryStatus::Dead, error: Some(problem.to_owned()), note };
            tracing::error!(delivery = %id, problem, "delivery is dead; see `kici-admin event dlq list`");
            Verdict::Finish(outcome)
        } else {
            let next = self.clock.now().plus(backoff(BACKOFF_BASE, BACKOFF_MAX, attempts, id.uuid()));
            tracing::warn!(delivery = %id, problem, attempts, "delivery failed, trying again later");
            Verdict::Retry(problem.to_owned(), next)
        };
        self.settle(id, verdict, stop).await;
    }

    /// Writes a verdict, as often as it takes: what failed is mostly the database, and the delivery is claimed by this
    /// process until it is written. At a stop it is left; the next start frees the claim.
    async fn settle(&self, id: DeliveryRowId, verdict: Verdict, stop: &CancellationToken) {
        loop {
            let written = match verdict.clone() {
                Verdict::Finish(outcome) => self.store.delivery_finish(id, outcome).await,
                Verdict::Retry(problem, next) => self.store.delivery_retry(id, problem, next).await,
            };
            let Err(error) = written else { return };
            tracing::error!(delivery = %id, %error, "the failure of a delivery cannot be written");
            let passes = matches!(error, StoreError::Unavailable(_) | StoreError::Full(_) | StoreError::Conflict(_));
            if !passes || stop.run_until_cancelled(tokio::time::sleep(SETTLE_AGAIN)).await.is_none() {
                return;
            }
        }
    }
}

/// `base` doubled per attempt up to `most`, spread over that time by the id, so that what failed together does not come back
/// together.
pub(crate) fn backoff(base: Duration, most: Duration, attempts: u32, id: Uuid) -> Duration {
    let full = base.saturating_mul(1 << attempts.min(10)).min(most);
    let millis = u64::try_from(full.as_millis()).unwrap_or(u64::MAX);
    let spread = id.as_u128() % u128::from(millis.max(1));
    Duration::from_millis(millis / 2 + u64::try_from(spread / 2).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_grows_to_five_minutes_and_stays_there() {
        let id: Uuid = "0190aaaa-0000-7000-8000-123456789abc".parse().unwrap();
        for attempts in 0..40 {
            let full = (5_000u64 << attempts.min(10)).min(300_000);
            let wait = u64::try_from(backoff(BACKOFF_BASE, BACKOFF_MAX, attempts, id).as_millis()).unwrap();
            assert!(wait >= full / 2 && wait <= full, "{attempts}: {wait}");
        }
    }
}
