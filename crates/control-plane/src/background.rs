//! What operators see of the background work: when each part ran last, for how long, what it changed and why it failed.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kici_api::dto::system::ReconcilerView;
use kici_engine::time::Ts;

/// How a part is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) name: &'static str,
    pub(crate) period: Duration,
    /// Only the instance that holds the lease runs it.
    pub(crate) leader_only: bool,
}

/// The state of all parts of this process.
#[derive(Debug, Default)]
pub(crate) struct Statuses(Mutex<BTreeMap<&'static str, ReconcilerView>>);

impl Statuses {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, ReconcilerView>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, schedule: Schedule) {
        let view = ReconcilerView {
            name: schedule.name.to_owned(),
            interval_ms: millis(schedule.period),
            leader_only: schedule.leader_only,
            running: false,
            runs: 0,
            failures: 0,
            last_started_at: None,
            last_duration_ms: None,
            last_changed: None,
            last_error: None,
        };
        self.lock().insert(schedule.name, view);
    }

    pub(crate) fn began(&self, name: &str, now: Ts) {
        if let Some(view) = self.lock().get_mut(name) {
            view.running = true;
            view.last_started_at = Some(now);
        }
    }

    pub(crate) fn ended(&self, name: &str, took: Duration, result: &Result<u64, String>) {
        if let Some(view) = self.lock().get_mut(name) {
            view.running = false;
            view.runs += 1;
            view.failures += u64::from(result.is_err());
            view.last_duration_ms = Some(millis(took));
            view.last_changed = result.as_ref().ok().copied();
            view.last_error = result.as_ref().err().cloned();
        }
    }

    /// By name.
    pub(crate) fn all(&self) -> Vec<ReconcilerView> {
        self.lock().values().cloned().collect()
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_shown_until_the_next_good_run() {
        let statuses = Statuses::default();
        statuses.add(Schedule { name: "sweep", period: Duration::from_secs(10), leader_only: true });
        statuses.began("sweep", Ts::from_micros(5));
        assert!(statuses.all()[0].running);
        statuses.ended("sweep", Duration::from_millis(3), &Err("no database".to_owned()));
        let view = statuses.all().remove(0);
        assert_eq!((view.running, view.runs, view.failures), (false, 1, 1));
        assert_eq!((view.last_error.as_deref(), view.last_changed), (Some("no database"), None));
        statuses.ended("sweep", Duration::from_millis(3), &Ok(2));
        let view = statuses.all().remove(0);
        assert_eq!((view.runs, view.failures, view.last_error, view.last_changed), (2, 1, None, Some(2)));
        assert_eq!((view.interval_ms, view.last_started_at), (10_000, Some(Ts::from_micros(5))));
    }
}
