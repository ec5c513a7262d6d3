//! What long answers share: the limit per subject, and the form of a stream of JSON lines.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::stream::{self, Stream};
use kici_access::Actor;

use super::follow::Follower;
use crate::ports::Caller;
use crate::problem::{Code, Problem};

/// Open streams per subject.
const MAX_STREAMS: usize = 256;

/// Counts the open streams of each subject.
#[derive(Clone, Default)]
pub(super) struct Slots(Arc<Mutex<HashMap<Actor, usize>>>);

/// One open stream; dropping it frees its place.
pub(super) struct Slot {
    slots: Slots,
    actor: Actor,
}

impl Slots {
    /// A place for one more stream of the caller.
    ///
    /// # Errors
    /// 429 `stream.limit` when it has 256.
    pub fn take(&self, caller: &Caller) -> Result<Slot, Problem> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(caller.actor.clone()).or_default();
        if *count >= MAX_STREAMS {
            let detail = format!("{MAX_STREAMS} streams are open for this token; close some");
            return Err(Problem::new(Code::StreamLimit, detail));
        }
        *count += 1;
        Ok(Slot { slots: self.clone(), actor: caller.actor.clone() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = self.slots.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.actor) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.actor);
            }
        }
    }
}

/// The events of a follower, one JSON document per line.
pub(super) fn json_lines(follower: Follower, slot: Slot) -> impl Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold((follower, slot), |(mut follower, slot)| async move {
        let event = follower.next().await?;
        // Events hold text, numbers and ids only: they always serialise.
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        Some((Ok(Bytes::from(line)), (follower, slot)))
    })
}
