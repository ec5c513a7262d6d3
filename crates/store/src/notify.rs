//! Wake-ups: hints that something changed. The woken task reads the database; every consumer also polls.

use kici_engine::ids::RunId;

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Topic {
    /// A delivery waits for processing.
    Deliveries,
    /// Rows of the dispatch queue wait for an agent.
    Queue,
    /// Something of this run.
    Run(RunId),
    /// A token was revoked.
    Revocations,
}

/// A subscription to wake-ups.
#[derive(Debug)]
pub struct Wakeups {
    receiver: tokio::sync::broadcast::Receiver<Topic>,
    wanted: fn(&Topic) -> bool,
}

impl Wakeups {
    /// Waits for the next wake-up; none once the store is closed. Wake-ups that nobody fetched in time are merged into
    /// one of [`Missed`](Wakeup::Missed).
    pub async fn next(&mut self) -> Option<Wakeup> {
        use tokio::sync::broadcast::error::RecvError;
        loop {
            match self.receiver.recv().await {
                Ok(topic) if (self.wanted)(&topic) => return Some(Wakeup::Changed(topic)),
                Ok(_) => {}
                Err(RecvError::Lagged(_)) => return Some(Wakeup::Missed),
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

/// One wake-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakeup {
    /// This changed.
    Changed(Topic),
    /// Anything may have changed: the subscriber was too slow, or the connection that carries the hints was renewed.
    Missed,
}
