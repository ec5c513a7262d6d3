//! Credentials that were made a moment ago: git asks several times for one command.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kici_engine::time::Ts;
use tokio::time::Instant;

use super::{Ask, Minted};
use crate::grants::GrantId;

/// How long a credential may be given out again.
const LIFE: Duration = Duration::from_secs(60);
/// Never when it ends so soon: the command that gets it may take a while.
const MARGIN: Duration = Duration::from_secs(5 * 60);
/// Most that are remembered.
const MAX: usize = 256;

/// What a credential was made for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub ask: Ask,
    pub grants: Vec<GrantId>,
}

/// A credential and since when it is there.
pub(super) struct Kept {
    minted: Minted,
    since: Instant,
}

impl Kept {
    pub fn new(minted: Minted) -> Self {
        Self { minted, since: Instant::now() }
    }

    /// The credential, while it may be given out again.
    pub fn good(&self, now: Ts) -> Option<Minted> {
        let lasts = self.minted.expires_at.is_none_or(|at| at > now.plus(MARGIN));
        (self.since.elapsed() < LIFE && lasts).then(|| self.minted.clone())
    }
}

type Slot = Arc<tokio::sync::Mutex<Option<Kept>>>;

/// See the module.
#[derive(Default)]
pub(super) struct Memo {
    slots: Mutex<HashMap<Key, Slot>>,
}

impl Memo {
    pub fn slot(&self, key: &Key) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() >= MAX && !slots.contains_key(key) {
            // Those in use are held by their users.
            slots.retain(|_, slot| Arc::strong_count(slot) > 1);
        }
        Arc::clone(slots.entry(key.clone()).or_default())
    }

    pub async fn keep(&self, key: Key, minted: Minted, now: Ts) {
        let kept = Kept::new(minted);
        if kept.good(now).is_some() {
            *self.slot(&key).lock().await = Some(kept);
        }
    }

    pub fn forget(&self, which: impl Fn(&Key) -> bool) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).retain(|key, _| !which(key));
    }
}
