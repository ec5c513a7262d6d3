//! How often a source may call (`rate_limit_rpm` of generic sources). Each node counts for itself.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kici_engine::ids::SourceId;
use kici_engine::time::Ts;

/// Calls of this much time may come at once.
const WINDOW: Duration = Duration::from_secs(60);
/// Sources that are remembered before those that were silent are forgotten.
const MANY: usize = 1000;

/// For each source the time up to which its calls so far would last if they came evenly.
#[derive(Debug, Default)]
pub(crate) struct Rates(Mutex<HashMap<SourceId, Ts>>);

impl Rates {
    /// Counts a call, of which `per_minute` are allowed. `Err` is the time until there is room; then it was not counted.
    pub(crate) fn take(&self, source: SourceId, per_minute: u32, now: Ts) -> Result<(), Duration> {
        let share = WINDOW / per_minute.max(1);
        let mut used = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if used.len() >= MANY {
            used.retain(|_, until| *until > now);
        }
        // Further ahead is only what a clock that was set back has left; it must not shut the source out for as long.
        let until = used.get(&source).copied().filter(|until| *until <= now.plus(WINDOW));
        let until = until.unwrap_or(now).max(now).plus(share);
        let over = until.since(now).saturating_sub(WINDOW);
        if !over.is_zero() {
            return Err(over);
        }
        used.insert(source, until);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn source(n: u128) -> SourceId {
        SourceId::from_uuid(Uuid::from_u128(n))
    }

    #[test]
    fn a_minutes_calls_may_come_at_once_and_then_one_at_a_time() {
        let rates = Rates::default();
        let start = Ts::from_micros(1_000_000_000);
        for call in 0..60 {
            assert_eq!(rates.take(source(1), 60, start), Ok(()), "{call}");
        }
        assert_eq!(rates.take(source(1), 60, start), Err(Duration::from_secs(1)));
        assert_eq!(rates.take(source(2), 60, start), Ok(()), "each source has its own");
        let later = start.plus(Duration::from_millis(2500));
        assert_eq!((rates.take(source(1), 60, later), rates.take(source(1), 60, later)), (Ok(()), Ok(())));
        assert_eq!(rates.take(source(1), 60, later), Err(Duration::from_millis(500)));
        let rested = later.plus(Duration::from_secs(3600));
        assert_eq!((0..100).filter(|_| rates.take(source(1), 60, rested).is_ok()).count(), 60);
        let back = start.minus(Duration::from_secs(500));
        assert_eq!(rates.take(source(1), 60, back), Ok(()), "a clock that was set back");
    }

    #[test]
    fn silent_sources_are_forgotten() {
        let rates = Rates::default();
        for n in 0..5000 {
            let now = Ts::from_micros(1_000_000 * i64::try_from(n).unwrap());
            assert_eq!(rates.take(source(n), 600, now), Ok(()));
        }
        assert!(rates.0.lock().unwrap().len() <= MANY);
    }
}
