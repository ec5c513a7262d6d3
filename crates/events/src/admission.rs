//! Admission: how many verified deliveries are stored at the same time, how many wait for that and for how long. A call
//! that is turned away here may still be kept as overflow (see [`crate::Inbox`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How often the delay of the runtime's timers is sampled, and how many samples count.
const LAG_EVERY: Duration = Duration::from_millis(50);
const LAG_SAMPLES: usize = 100;

/// Limits of admission.
#[derive(Clone, Debug)]
pub struct AdmissionConfig {
    /// Deliveries stored at the same time.
    pub max_in_flight: usize,
    /// Of these, those of one organisation.
    pub per_org: usize,
    /// Calls that may wait for their turn.
    pub queue_depth: usize,
    /// How long each may wait.
    pub queue_wait: Duration,
    /// Above this delay of the runtime's timers (99th percentile) nobody waits.
    pub max_lag: Duration,
}

/// Why a call did not get a turn; the words are values of a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shed {
    /// Too many wait already.
    QueueFull,
    /// It waited as long as it may.
    QueueWait,
    /// The process is too late with everything.
    Lag,
}

impl Shed {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::QueueWait => "queue_wait",
            Self::Lag => "lag",
        }
    }
}

/// Held while a delivery is stored.
#[derive(Debug)]
pub(crate) struct Turn {
    _org: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

/// Gives out turns.
pub struct Admission {
    config: AdmissionConfig,
    all: Arc<Semaphore>,
    orgs: Mutex<HashMap<String, Arc<Semaphore>>>,
    waiting: AtomicUsize,
    lag_micros: AtomicU64,
}

impl Admission {
    /// Nobody has a turn yet.
    pub fn new(config: AdmissionConfig) -> Self {
        let all = Arc::new(Semaphore::new(config.max_in_flight));
        Self { config, all, orgs: Mutex::default(), waiting: AtomicUsize::new(0), lag_micros: AtomicU64::new(0) }
    }

    /// A turn for a call of `org`, at once or after waiting for it.
    pub(crate) async fn enter(&self, org: &str) -> Result<Turn, Shed> {
        let org = self.org(org);
        if let Some(turn) = self.free(&org) {
            return Ok(turn);
        }
        if Duration::from_micros(self.lag_micros.load(Ordering::Relaxed)) > self.config.max_lag {
            return Err(Shed::Lag);
        }
        let _place = Place::take(&self.waiting, self.config.queue_depth).ok_or(Shed::QueueFull)?;
        let turn = async {
            let org = org.acquire_owned().await.ok()?;
            let all = Arc::clone(&self.all).acquire_owned().await.ok()?;
            Some(Turn { _org: org, _all: all })
        };
        tokio::time::timeout(self.config.queue_wait, turn).await.ok().flatten().ok_or(Shed::QueueWait)
    }

    fn free(&self, org: &Arc<Semaphore>) -> Option<Turn> {
        let now = |turns: &Arc<Semaphore>| -> Result<_, TryAcquireError> { Arc::clone(turns).try_acquire_owned() };
        Some(Turn { _org: now(org).ok()?, _all: now(&self.all).ok()? })
    }

    /// The turns of an organisation. Calls come here only after they were verified, so the map holds organisations that
    /// have a source.
    fn org(&self, org: &str) -> Arc<Semaphore> {
        let mut orgs = self.orgs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = orgs.get(org) {
            return Arc::clone(turns);
        }
        let turns = Arc::new(Semaphore::new(self.config.per_org));
        orgs.insert(org.to_owned(), Arc::clone(&turns));
        turns
    }

    /// Samples the delay of the runtime's timers until `stop`.
    pub async fn watch_lag(&self, stop: CancellationToken) {
        let mut late = [0_u64; LAG_SAMPLES];
        for index in (0..LAG_SAMPLES).cycle() {
            let due = Instant::now() + LAG_EVERY;
            if stop.run_until_cancelled(tokio::time::sleep_until(due)).await.is_none() {
                return;
            }
            late[index] = u64::try_from(due.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.lag_micros.store(percentile_99(&late), Ordering::Relaxed);
        }
    }
}

/// With a hundred samples the second largest.
fn percentile_99(samples: &[u64; LAG_SAMPLES]) -> u64 {
    let mut sorted = *samples;
    sorted.sort_unstable();
    sorted[LAG_SAMPLES * 99 / 100 - 1]
}

/// A place in the queue, given back on drop, also when the caller hangs up.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(waiting: &'a AtomicUsize, depth: usize) -> Option<Self> {
        let taken = waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < depth).then_some(n + 1));
        let before = taken.ok()?;
        set_depth(before + 1);
        Some(Self(waiting))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        set_depth(self.0.fetch_sub(1, Ordering::Relaxed) - 1);
    }
}

fn set_depth(waiting: usize) {
    metrics::gauge!("kici_orch_ingest_queue_depth").set(f64::from(u32::try_from(waiting).unwrap_or(u32::MAX)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(max_in_flight: usize, per_org: usize, queue_depth: usize) -> Admission {
        Admission::new(AdmissionConfig {
            max_in_flight,
            per_org,
            queue_depth,
            queue_wait: Duration::from_secs(3),
            max_lag: Duration::from_millis(200),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_is_waited_for_three_seconds_and_no_longer() {
        let admission = admission(1, 1, 10);
        let held = admission.enter("a").await.unwrap();
        let before = Instant::now();
        assert_eq!(admission.enter("a").await.unwrap_err(), Shed::QueueWait);
        assert_eq!(before.elapsed(), Duration::from_secs(3));
        let (next, ()) = tokio::join!(admission.enter("a"), async { drop(held) });
        next.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn one_organisation_leaves_room_for_the_others() {
        let admission = admission(10, 2, 0);
        let _held = [admission.enter("a").await.unwrap(), admission.enter("a").await.unwrap()];
        assert_eq!(admission.enter("a").await.unwrap_err(), Shed::QueueFull);
        admission.enter("b").await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_has_an_end_and_a_caller_that_hangs_up_leaves_it() {
        let admission = admission(1, 1, 1);
        let _held = admission.enter("a").await.unwrap();
        {
            let mut waits = std::pin::pin!(admission.enter("a"));
            assert!(futures::poll!(waits.as_mut()).is_pending());
            assert_eq!(admission.enter("a").await.unwrap_err(), Shed::QueueFull);
        }
        assert_eq!(admission.enter("a").await.unwrap_err(), Shed::QueueWait);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_lags_lets_nobody_wait_but_takes_what_it_has_a_turn_for() {
        let admission = admission(1, 1, 10);
        admission.lag_micros.store(200_001, Ordering::Relaxed);
        let _held = admission.enter("a").await.unwrap();
        assert_eq!(admission.enter("a").await.unwrap_err(), Shed::Lag);
    }

    #[test]
    fn one_late_sample_of_a_hundred_is_no_lag() {
        let mut samples = [0; LAG_SAMPLES];
        samples[7] = 900_000;
        assert_eq!(percentile_99(&samples), 0);
        samples[8] = 800_000;
        assert_eq!(percentile_99(&samples), 800_000);
    }
}
