//! Deadlines in memory: one ordered map and one waiting task for all of them, however many there are. They only make
//! things happen on time; what must happen even after a crash is also a column that a sweep reads.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Mutex;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Deadlines by key; setting a key again moves its deadline.
#[derive(Debug)]
pub struct Deadlines<K> {
    inner: Mutex<Inner<K>>,
    earlier: Notify,
}

#[derive(Debug)]
struct Inner<K> {
    by_time: BTreeMap<(Instant, u64), K>,
    by_key: HashMap<K, (Instant, u64)>,
    next: u64,
}

impl<K: Clone + Eq + Hash> Default for Deadlines<K> {
    fn default() -> Self {
        let inner = Inner { by_time: BTreeMap::new(), by_key: HashMap::new(), next: 0 };
        Self { inner: Mutex::new(inner), earlier: Notify::new() }
    }
}

impl<K: Clone + Eq + Hash> Deadlines<K> {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inner<K>> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Sets the deadline of `key`.
    pub fn set(&self, key: K, at: Instant) {
        let mut inner = self.lock();
        let first = inner.by_time.first_key_value().map(|((first, _), _)| *first);
        if let Some(old) = inner.by_key.remove(&key) {
            inner.by_time.remove(&old);
        }
        let slot = (at, inner.next);
        inner.next += 1;
        inner.by_time.insert(slot, key.clone());
        inner.by_key.insert(key, slot);
        drop(inner);
        if first.is_none_or(|first| at < first) {
            self.earlier.notify_one();
        }
    }

    /// Takes the deadline of `key` away. True when it had one that has not been delivered.
    pub fn cancel(&self, key: &K) -> bool {
        let mut inner = self.lock();
        let Some(slot) = inner.by_key.remove(key) else { return false };
        inner.by_time.remove(&slot);
        true
    }

    /// How many deadlines are set.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.lock().by_key.len()
    }

    /// Waits for the earliest deadlines and takes them away. Cancel safe.
    pub async fn due(&self) -> Vec<K> {
        loop {
            let first = self.lock().by_time.first_key_value().map(|((at, _), _)| *at);
            match first {
                None => self.earlier.notified().await,
                Some(at) => tokio::select! {
                    () = tokio::time::sleep_until(at) => return self.take(Instant::now().max(at)),
                    () = self.earlier.notified() => {}
                },
            }
        }
    }

    fn take(&self, now: Instant) -> Vec<K> {
        let mut inner = self.lock();
        let mut due = Vec::new();
        while let Some(entry) = inner.by_time.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let key = entry.remove();
            inner.by_key.remove(&key);
            due.push(key);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn deadlines_come_in_order_and_cancelled_ones_do_not() {
        let deadlines = Deadlines::default();
        let now = Instant::now();
        for (key, secs) in [("late", 9), ("soon", 1), ("never", 2), ("moved", 3)] {
            deadlines.set(key, now + Duration::from_secs(secs));
        }
        assert!(deadlines.cancel(&"never"));
        assert!(!deadlines.cancel(&"never"));
        deadlines.set("moved", now + Duration::from_secs(20));
        assert_eq!(deadlines.len(), 3);
        assert_eq!(deadlines.due().await, ["soon"]);
        assert_eq!(deadlines.due().await, ["late"]);
        assert_eq!(deadlines.due().await, ["moved"]);
        assert_eq!(Instant::now() - now, Duration::from_secs(20));
    }

    #[tokio::test(start_paused = true)]
    async fn an_earlier_deadline_shortens_the_wait() {
        let deadlines = Deadlines::default();
        let now = Instant::now();
        deadlines.set(1, now + Duration::from_secs(60));
        let (due, ()) = tokio::join!(deadlines.due(), async {
            tokio::task::yield_now().await;
            deadlines.set(2, now + Duration::from_secs(1));
        });
        assert_eq!(due, [2]);
        assert_eq!(Instant::now() - now, Duration::from_secs(1));
    }
}
