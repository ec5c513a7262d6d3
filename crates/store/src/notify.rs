//! Wake-ups: hints that something changed. The woken task reads the database; every consumer also polls.

use kici_engine::ids::RunId;
use tokio::sync::broadcast;

/// Wake-ups that a subscriber may be behind before they are merged into [`Wakeup::Missed`].
const BACKLOG: usize = 1024;

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Topic {
    /// A delivery waits for processing.
    Deliveries,
    /// An event of the internal bus waits for delivery.
    Events,
    /// Rows of the dispatch queue wait for an agent.
    Queue,
    /// There is news for those that wait for slots of concurrency groups, or have them.
    Slots,
    /// There is news for jobs that wait for runs that they started.
    Gates,
    /// Something of this run.
    Run(RunId),
    /// A token was revoked.
    Revocations,
    /// Jobs are to be stopped at agents of other instances.
    Cancels,
}

/// One wake-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakeup {
    /// This changed.
    Changed(Topic),
    /// Anything may have changed: the subscriber was too slow, or the connection that carries the hints was renewed.
    Missed,
}

impl Wakeup {
    /// Its form in a notification of PostgreSQL.
    pub(crate) fn to_text(self) -> String {
        match self {
            Self::Changed(Topic::Deliveries) => "deliveries".to_owned(),
            Self::Changed(Topic::Events) => "events".to_owned(),
            Self::Changed(Topic::Queue) => "queue".to_owned(),
            Self::Changed(Topic::Slots) => "slots".to_owned(),
            Self::Changed(Topic::Gates) => "gates".to_owned(),
            Self::Changed(Topic::Revocations) => "revocations".to_owned(),
            Self::Changed(Topic::Cancels) => "cancels".to_owned(),
            Self::Changed(Topic::Run(id)) => format!("run:{}", id.uuid()),
            Self::Missed => "all".to_owned(),
        }
    }

    /// Reads [`to_text`](Self::to_text); what is not understood (a newer instance) may be anything.
    pub(crate) fn of_text(text: &str) -> Self {
        match text {
            "deliveries" => Self::Changed(Topic::Deliveries),
            "events" => Self::Changed(Topic::Events),
            "queue" => Self::Changed(Topic::Queue),
            "slots" => Self::Changed(Topic::Slots),
            "gates" => Self::Changed(Topic::Gates),
            "revocations" => Self::Changed(Topic::Revocations),
            "cancels" => Self::Changed(Topic::Cancels),
            other => other
                .strip_prefix("run:")
                .and_then(|id| id.parse().ok())
                .map_or(Self::Missed, |id| Self::Changed(Topic::Run(id))),
        }
    }
}

/// A subscription to wake-ups.
#[derive(Debug)]
pub struct Wakeups {
    receiver: broadcast::Receiver<Wakeup>,
    wanted: fn(&Topic) -> bool,
}

impl Wakeups {
    /// Waits for the next wake-up; none once the store is closed.
    pub async fn next(&mut self) -> Option<Wakeup> {
        use broadcast::error::RecvError;
        loop {
            match self.receiver.recv().await {
                Ok(Wakeup::Changed(topic)) if !(self.wanted)(&topic) => {}
                Ok(wakeup) => return Some(wakeup),
                Err(RecvError::Lagged(_)) => return Some(Wakeup::Missed),
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

/// Hands wake-ups to the subscribers in this process.
#[derive(Clone, Debug)]
pub(crate) struct Notifier(broadcast::Sender<Wakeup>);

impl Notifier {
    pub(crate) fn new() -> Self {
        Self(broadcast::channel(BACKLOG).0)
    }

    pub(crate) fn publish(&self, wakeup: Wakeup) {
        // Nobody listening is fine.
        let _ = self.0.send(wakeup);
    }

    pub(crate) fn subscribe(&self, wanted: fn(&Topic) -> bool) -> Wakeups {
        Wakeups { receiver: self.0.subscribe(), wanted }
    }
}
