//! Concurrency groups: who of those that ask for a slot gets one (dispatch 3.12.3, workflows-and-events R85).
//!
//! A group has one queue. Its order is the age of the run, so that commits are deployed in the order in which they came. A
//! slot is given up only when its holder has ended; a newcomer that cancels what is in progress waits for that end like
//! everybody else.

use serde::{Deserialize, Serialize};

use crate::ids::RunId;

/// Longest name of a group once it is rendered, in characters.
pub const MAX_GROUP_CHARS: usize = 256;

/// What a run or a job asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotAsk {
    /// Name of the group, rendered.
    pub group: String,
    /// How many may be active at once.
    pub max: u32,
    /// Older runs of the group are cancelled.
    pub cancel_in_progress: bool,
}

/// One that has a slot or waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The run it belongs to.
    pub run: RunId,
    /// It has a slot.
    pub active: bool,
    /// How many may be active at once, as it asked.
    pub max: u32,
    /// It has ended, or is gone.
    pub dead: bool,
    /// A newer run wants it to stop: it keeps its slot until it has ended, and gets none.
    pub superseded: bool,
}

/// Who has just come, among the claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newcomer {
    /// Its place.
    pub at: usize,
    /// It wants older runs to stop.
    pub cancel_in_progress: bool,
}

/// What changes, as places of claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// They are over and leave the group.
    pub ended: Vec<usize>,
    /// They get a slot, in this order.
    pub promoted: Vec<usize>,
    /// Their runs must be cancelled, because of the newcomer.
    pub superseded: Vec<usize>,
}

/// Settles a group. `claims` are all that have a slot and at least the first that wait, oldest first.
///
/// The queue is strict: while its head finds no room, nobody behind it gets a slot, though one that allows more at once
/// might. Claims of the newcomer's own run are never superseded by it.
pub fn arbitrate(claims: &[Claim], newcomer: Option<Newcomer>) -> Decision {
    let ended: Vec<usize> = (0..claims.len()).filter(|at| claims[*at].dead).collect();
    let superseded: Vec<usize> = match newcomer.filter(|new| new.cancel_in_progress && new.at < claims.len()) {
        Some(new) => {
            let older = |at: &usize| {
                let claim = &claims[*at];
                !claim.dead && !claim.superseded && claim.run != claims[new.at].run
            };
            (0..new.at).filter(older).collect()
        }
        None => Vec::new(),
    };
    let mut active = claims.iter().filter(|claim| claim.active && !claim.dead).count();
    let mut promoted = Vec::new();
    for (at, claim) in claims.iter().enumerate() {
        if claim.active || claim.dead || claim.superseded || superseded.contains(&at) {
            continue;
        }
        if active >= usize::try_from(claim.max.max(1)).unwrap_or(usize::MAX) {
            break;
        }
        promoted.push(at);
        active += 1;
    }
    Decision { ended, promoted, superseded }
}

#[cfg(test)]
mod tests;
