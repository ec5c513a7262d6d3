//! Delivers stored events until everybody who listens has them, or they are dead letters.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::EventId;
use kici_engine::time::Clock;
use kici_store::model::{BusEvent, CreatedRun, EventOutcome, Processed, ProcessedEvent};
use kici_store::{Store, StoreError, Topic};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::deliver::Delivered;
use crate::planner::{Planner, Retry};
use crate::worker::{RunsCreated, backoff};

/// Events delivered at the same time.
const WORKERS: usize = 4;

/// How events are delivered.
#[derive(Clone, Copy, Debug)]
pub struct EventWorkerConfig {
    /// Age at which the claim of a silent process is void; an attempt takes less.
    pub lease: Duration,
    /// Attempts before an event is dead.
    pub max_attempts: u32,
    /// Pause after the first failed attempt; it doubles.
    pub retry_base: Duration,
    /// Longest pause.
    pub retry_max: Duration,
    /// How often the database is asked without a signal.
    pub scan: Duration,
}

/// Delivers events until it is cancelled.
pub struct EventWorker {
    store: Store,
    planner: Arc<Planner>,
    clock: Arc<dyn Clock>,
    created: Arc<dyn RunsCreated>,
    config: EventWorkerConfig,
}

impl EventWorker {
    /// A worker over these parts.
    pub fn new(
        store: Store,
        planner: Arc<Planner>,
        clock: Arc<dyn Clock>,
        created: Arc<dyn RunsCreated>,
        config: EventWorkerConfig,
    ) -> Arc<Self> {
        Arc::new(Self { store, planner, clock, created, config })
    }

    /// Works until `stop`, then lets what is under way finish on `tasks`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken, tasks: TaskTracker) {
        let slots = Arc::new(Semaphore::new(WORKERS));
        // Before the first look: what is stored in between wakes.
        let mut wakeups = self.store.subscribe(|topic| matches!(topic, Topic::Events));
        let mut poll = tokio::time::interval(self.config.scan);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = wakeups.next() => {}
                _ = poll.tick() => {}
            }
            while let Ok(true) = self.take(&slots, &tasks, &stop).await {}
        }
    }

    /// Claims what there is a worker for; false when nothing is left to claim.
    async fn take(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<bool, StoreError> {
        let Some(Ok(slot)) = stop.run_until_cancelled(Arc::clone(slots).acquire_owned()).await else {
            return Ok(false);
        };
        let claimed = self.store.event_claim(1, self.config.lease).await;
        let event = match claimed {
            Ok(mut claimed) => claimed.pop(),
            Err(error) => {
                tracing::warn!(%error, "events cannot be claimed; trying again shortly");
                return Err(error);
            }
        };
        let Some(event) = event else { return Ok(false) };
        let worker = Arc::clone(self);
        tasks.spawn(async move {
            worker.attempt(event).await;
            drop(slot);
        });
        Ok(true)
    }

    /// One attempt to deliver a claimed event, whatever comes of it.
    pub async fn attempt(&self, event: BusEvent) {
        let span = tracing::info_span!("event", event = %event.id, name = event.name, request_id = %event.request_id);
        self.attempt_in_span(event).instrument(span).await;
    }

    async fn attempt_in_span(&self, event: BusEvent) {
        let last = event.attempts + 1 >= self.config.max_attempts;
        // Within the lease, so that nobody else takes it meanwhile.
        let limit = self.config.lease * 3 / 4;
        let work = async {
            let delivered = self.planner.deliver(&event, last).await?;
            let done = self.outcome(&event, delivered);
            let outcome = done.outcome.clone();
            let activate = self.created.activate();
            let mut processed = self.store.event_process(done, activate.clone()).await?;
            activate.placed(processed.runs.iter_mut().flat_map(|run| std::mem::take(&mut run.placed)).collect());
            Ok::<_, Retry>((outcome, processed))
        };
        match tokio::time::timeout(limit, work).await {
            Ok(Ok((outcome, processed))) => self.settled(&event, &outcome, processed).await,
            Ok(Err(error)) => self.failed(&event, error.to_string()).await,
            Err(_) => self.failed(&event, format!("delivering it took longer than {} s", limit.as_secs())).await,
        }
    }

    fn outcome(&self, event: &BusEvent, delivered: Delivered) -> ProcessedEvent {
        let Delivered { decision, again } = delivered;
        let note = (!decision.notes.is_empty()).then(|| decision.notes.join("; "));
        let outcome = again.map_or(EventOutcome::Done, |problem| self.again(event, problem));
        ProcessedEvent {
            id: event.id,
            outcome,
            matched_count: decision.matched,
            trace: Some(decision.trace.into_json(note.as_deref())),
            note,
            runs: decision.runs,
        }
    }

    fn again(&self, event: &BusEvent, problem: String) -> EventOutcome {
        if event.attempts + 1 >= self.config.max_attempts {
            return EventOutcome::Dead(problem, "exhausted_retries");
        }
        let pause = backoff(self.config.retry_base, self.config.retry_max, event.attempts, event.id.uuid());
        EventOutcome::Retry(problem, self.clock.now().plus(pause))
    }

    async fn settled(&self, event: &BusEvent, outcome: &EventOutcome, processed: Processed) {
        if !processed.applied {
            tracing::warn!("the claim on this event was lost; another instance delivers it");
            return;
        }
        self.count(event.id, &event.name, outcome);
        for run in processed.runs {
            self.announce(run).await;
        }
    }

    async fn announce(&self, run: CreatedRun) {
        // For live readers; whoever has no answer here finds the run in the lists.
        let Ok(Some(row)) = self.store.run_get(run.run_id).await else { return };
        let one = Processed { applied: true, runs: vec![run] };
        self.created.created(&one, &row.event.routing_key);
    }

    /// An attempt that wrote nothing: again later, or dead.
    async fn failed(&self, event: &BusEvent, problem: String) {
        let outcome = self.again(event, problem);
        let done = ProcessedEvent {
            id: event.id,
            outcome: outcome.clone(),
            matched_count: event.matched_count,
            note: event.note.clone(),
            trace: event.trace.clone(),
            runs: Vec::new(),
        };
        match self.store.event_process(done, self.created.activate()).await {
            Ok(_) => self.count(event.id, &event.name, &outcome),
            // The claim lapses, and the event is taken again.
            Err(error) => tracing::error!(%error, "the failure of an event cannot be written"),
        }
    }

    fn count(&self, id: EventId, name: &str, outcome: &EventOutcome) {
        let name = label(name);
        match outcome {
            EventOutcome::Done => {
                metrics::counter!("kici_orch_event_dispatch_success_total", "event_name" => name).increment(1);
                tracing::debug!("event delivered");
            }
            EventOutcome::Retry(problem, at) => {
                metrics::counter!("kici_orch_event_retry_total", "event_name" => name).increment(1);
                tracing::warn!(problem, next = %at, "an event was not delivered to everybody, trying again later");
            }
            EventOutcome::Dead(problem, reason) => {
                metrics::counter!("kici_orch_event_dlq_total", "event_name" => name, "reason" => *reason).increment(1);
                tracing::error!(event = %id, problem, "event is dead; see `kici-admin event dlq list`");
            }
        }
    }
}

/// Names that people choose would make a series each.
fn label(name: &str) -> &'static str {
    use kici_engine::event_name::{JOB_COMPLETE, REGISTRATION_UPDATED, SCHEDULE_FIRE, WORKFLOW_COMPLETE};
    let own = [JOB_COMPLETE, REGISTRATION_UPDATED, SCHEDULE_FIRE, WORKFLOW_COMPLETE];
    own.into_iter().find(|known| *known == name).unwrap_or("emitted")
}
