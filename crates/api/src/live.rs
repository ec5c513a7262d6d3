//! Live changes on this node: a ring of recent ones that subscribers can resume from, and a broadcast of new ones.
//!
//! It only makes things sooner: a subscriber that falls behind is told so and reads the state by REST.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::dto::stream::Change;

/// Changes kept for resuming subscribers.
const RING: usize = 2_000;
/// How long they are kept.
const RING_AGE: Duration = Duration::from_secs(60);
/// Changes that a slow subscriber may lag behind.
const BACKLOG: usize = 256;

/// A change with its place in this process' order.
#[derive(Clone, Debug)]
pub struct Numbered {
    /// Grows by 1 with each change of this process, from 1.
    pub id: u64,
    /// The change.
    pub change: Arc<Change>,
}

/// Publishes changes to any number of subscribers.
#[derive(Debug)]
pub struct Hub {
    state: Mutex<State>,
    sender: broadcast::Sender<Numbered>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    ring: VecDeque<(Instant, Numbered)>,
}

/// What a subscriber got.
#[derive(Debug)]
pub enum Received {
    /// A change.
    Change(Numbered),
    /// Changes were lost: read the state again, then go on.
    Gap,
    /// The hub is gone: the process stops.
    Closed,
}

/// One subscriber's end.
#[derive(Debug)]
pub struct Subscription {
    replay: VecDeque<Numbered>,
    gap: bool,
    receiver: broadcast::Receiver<Numbered>,
}

impl Default for Hub {
    fn default() -> Self {
        Self { state: Mutex::default(), sender: broadcast::channel(BACKLOG).0 }
    }
}

impl Hub {
    /// A hub without subscribers.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Publishes a change. Never blocks.
    pub fn publish(&self, change: Change) {
        let now = Instant::now();
        // The lock also orders the broadcast, so that subscribers see ids rise.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.last += 1;
        let numbered = Numbered { id: state.last, change: Arc::new(change) };
        while state.ring.len() >= RING || state.ring.front().is_some_and(|(at, _)| now.duration_since(*at) > RING_AGE) {
            state.ring.pop_front();
        }
        state.ring.push_back((now, numbered.clone()));
        // An error means that nobody listens.
        let _ = self.sender.send(numbered);
    }

    /// Subscribes to everything from now on, or from the change after `after`. When that one is no longer in the ring, or
    /// is not of this process, the first thing received is [`Received::Gap`].
    pub fn subscribe(&self, after: Option<u64>) -> Subscription {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = self.sender.subscribe();
        let Some(after) = after else {
            return Subscription { replay: VecDeque::new(), gap: false, receiver };
        };
        let oldest = state.ring.front().map_or(state.last + 1, |(_, first)| first.id);
        if after > state.last || after + 1 < oldest {
            return Subscription { replay: VecDeque::new(), gap: true, receiver };
        }
        let replay = state.ring.iter().filter(|(_, n)| n.id > after).map(|(_, n)| n.clone()).collect();
        Subscription { replay, gap: false, receiver }
    }

    /// The id of the newest change; 0 before the first.
    pub fn last_id(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).last
    }
}

impl Subscription {
    /// The next change. Safe to drop and call again.
    pub async fn recv(&mut self) -> Received {
        if std::mem::take(&mut self.gap) {
            return Received::Gap;
        }
        if let Some(numbered) = self.replay.pop_front() {
            return Received::Change(numbered);
        }
        match self.receiver.recv().await {
            Ok(numbered) => Received::Change(numbered),
            Err(broadcast::error::RecvError::Lagged(_)) => Received::Gap,
            Err(broadcast::error::RecvError::Closed) => Received::Closed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ids(subscription: &mut Subscription, count: usize) -> Vec<Option<u64>> {
        let mut ids = Vec::new();
        for _ in 0..count {
            ids.push(match subscription.recv().await {
                Received::Change(numbered) => Some(numbered.id),
                Received::Gap | Received::Closed => None,
            });
        }
        ids
    }

    #[tokio::test]
    async fn a_subscriber_resumes_after_the_last_change_it_saw() {
        let hub = Hub::new();
        (0..3).for_each(|_| hub.publish(Change::Dlq {}));
        let mut subscription = hub.subscribe(Some(1));
        hub.publish(Change::Dlq {});
        assert_eq!(ids(&mut subscription, 3).await, [Some(2), Some(3), Some(4)]);
    }

    #[tokio::test]
    async fn changes_that_are_gone_are_told_as_a_gap() {
        let hub = Hub::new();
        (0..RING + 2).for_each(|_| hub.publish(Change::Dlq {}));
        assert_eq!(ids(&mut hub.subscribe(Some(1)), 1).await, [None], "left the ring");
        assert_eq!(ids(&mut hub.subscribe(Some(9_999)), 1).await, [None], "of another process");
        let mut slow = hub.subscribe(None);
        (0..=BACKLOG).for_each(|_| hub.publish(Change::Dlq {}));
        assert_eq!(ids(&mut slow, 1).await, [None], "too slow");
    }

    #[tokio::test(start_paused = true)]
    async fn old_changes_leave_the_ring() {
        let hub = Hub::new();
        hub.publish(Change::Dlq {});
        tokio::time::advance(RING_AGE * 2).await;
        hub.publish(Change::Dlq {});
        assert_eq!(ids(&mut hub.subscribe(Some(0)), 1).await, [None]);
    }
}
