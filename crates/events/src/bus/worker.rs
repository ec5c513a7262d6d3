//! Delivers stored events until everybody who listens has them, or they are dead letters.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::EventId;
use kici_engine::time::Clock;
use kici_store::model::{BusEvent, CreatedRun, EventOutcome, NewRun, Processed, ProcessedEvent};
use kici_store::{Store, StoreError, Topic};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::planner::{Planner, Retry};
use crate::worker::{RunsCreated, backoff};

/// Events delivered at the same time.
const WORKERS: usize = 4;

/// How events are delivered.
#[derive(Clone, Copy, Debug)]
pub struct EventWorkerConfig {
    /// Age at which the claim of a silent process is void. A process that works renews it.
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
    /// An event that was taken alone is done: the next one may be.
    alone: Notify,
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
        Arc::new(Self { store, planner, clock, created, config, alone: Notify::new() })
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
                () = self.alone.notified() => {}
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
        let alone = event.is_suspect();
        self.attempt_in_span(event).instrument(span).await;
        if alone {
            self.alone.notify_one();
        }
    }

    async fn attempt_in_span(&self, event: BusEvent) {
        match self.deliver(&event).await {
            Ok(Some(done)) => self.finish(&event, done).await,
            Ok(None) => {}
            Err(error) => self.failed(&event, error.to_string()).await,
        }
    }

    /// Tells everybody who listens, each by itself: what one of them leads to is written before the next is asked, so that
    /// neither a slow nor a faulty one keeps the others from it. None when the claim was lost on the way.
    async fn deliver(&self, event: &BusEvent) -> Result<Option<ProcessedEvent>, Retry> {
        let last = event.attempts + 1 >= self.config.max_attempts;
        // Several of them fit into the lease, which is renewed with everything that is written.
        let limit = self.config.lease / 4;
        let audience = self.planner.audience(event).await?;
        let mut decision = audience.decision();
        let mut problem = None;
        let mut renewed = Instant::now();
        for registration in audience.registrations() {
            let name = &registration.workflow_name;
            let told = self.planner.tell(&mut decision, event, &audience, registration, last);
            match tokio::time::timeout(limit, told).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => problem = Some(format!("{name}: {error}")),
                Err(_) => problem = Some(format!("{name}: it took longer than {} s", limit.as_secs_f32())),
            }
            if decision.runs.is_empty() && renewed.elapsed() < limit {
                continue;
            }
            let runs = std::mem::take(&mut decision.runs);
            match self.progress(event, runs).await {
                Ok(true) => renewed = Instant::now(),
                Ok(false) => return Ok(None),
                Err(error) => problem = Some(format!("{name}: {error}")),
            }
        }
        let note = (!decision.notes.is_empty()).then(|| decision.notes.join("; "));
        Ok(Some(ProcessedEvent {
            id: event.id,
            outcome: problem.map_or(EventOutcome::Done, |problem| self.again(event, problem)),
            matched_count: decision.matched,
            trace: Some(decision.trace.into_json(note.as_deref())),
            note,
            refused: (!decision.refused.is_empty()).then(|| decision.refused.join("; ")),
            runs: Vec::new(),
        }))
    }

    /// Writes runs and keeps the claim; false when it was lost.
    async fn progress(&self, event: &BusEvent, runs: Vec<NewRun>) -> Result<bool, StoreError> {
        let activate = self.created.activate();
        let mut processed = self.store.event_progress(event.id, runs, activate.clone()).await?;
        activate.placed(processed.runs.iter_mut().flat_map(|run| std::mem::take(&mut run.placed)).collect());
        if !processed.applied {
            tracing::warn!("the claim on this event was lost; another instance delivers it");
        }
        for run in processed.runs {
            self.announce(run).await;
        }
        Ok(processed.applied)
    }

    async fn finish(&self, event: &BusEvent, done: ProcessedEvent) {
        let outcome = done.outcome.clone();
        match self.store.event_process(done, self.created.activate()).await {
            Ok(processed) if processed.applied => self.count(event.id, &event.name, &outcome),
            Ok(_) => tracing::warn!("the claim on this event was lost; another instance delivers it"),
            Err(error) => self.failed(event, error.to_string()).await,
        }
    }

    fn again(&self, event: &BusEvent, problem: String) -> EventOutcome {
        if event.attempts + 1 >= self.config.max_attempts {
            return EventOutcome::Dead(problem, "exhausted_retries");
        }
        let pause = backoff(self.config.retry_base, self.config.retry_max, event.attempts, event.id.uuid());
        EventOutcome::Retry(problem, self.clock.now().plus(pause))
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
            refused: None,
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
    use kici_engine::event_name as of;
    let own = [
        of::JOB_COMPLETE,
        of::REGISTRATION_UPDATED,
        of::SCHEDULE_FIRE,
        of::WORKFLOW_COMPLETE,
        of::WORKFLOWS_FAILED_BATCH,
    ];
    own.into_iter().find(|known| *known == name).unwrap_or("emitted")
}
