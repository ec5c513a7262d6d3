//! What an operation gets besides its connection.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kici_engine::ids::{IdSource, InstanceId};
use kici_engine::time::{Clock, Ts};
use uuid::Uuid;

use crate::notify::Topic;

/// Lock documents kept in memory; they are named by their content, so an entry is never out of date.
const LOCKS_KEPT: usize = 256;
/// Digests of selectors kept in memory.
const SELECTORS_KEPT: usize = 4096;
/// Longest chain of events unless something else is set.
const MAX_CHAIN_DEPTH: u32 = 10;

/// What all operations of a store share.
pub(crate) struct Shared {
    pub(crate) node: InstanceId,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) ids: Arc<dyn IdSource>,
    /// Names this opening of the database: marks its own notifications on PostgreSQL, and its leases.
    pub(crate) mark: Uuid,
    locks: Mutex<HashMap<String, Arc<Vec<u8>>>>,
    /// Selectors that are stored. None is ever deleted.
    selectors: Mutex<HashSet<String>>,
    room: Mutex<Option<Room>>,
    /// The trigger types of registered workflows, at a version of the registry.
    listened: Mutex<Option<(i64, Arc<BTreeSet<String>>)>>,
    max_chain_depth: AtomicU32,
}

/// How many more jobs the queue takes. Measured from time to time, counted down in between: a soft limit.
#[derive(Clone, Copy, Debug)]
struct Room {
    max: u64,
    left: u64,
}

impl Shared {
    pub(crate) fn new(node: InstanceId, clock: Arc<dyn Clock>, ids: Arc<dyn IdSource>) -> Self {
        let mark = ids.uuid();
        Self {
            node,
            clock,
            ids,
            mark,
            locks: Mutex::default(),
            selectors: Mutex::default(),
            room: Mutex::default(),
            listened: Mutex::default(),
            max_chain_depth: AtomicU32::new(MAX_CHAIN_DEPTH),
        }
    }
}

impl Shared {
    /// Says how many jobs wait and how many may; see `Ctx::take_room`.
    pub(crate) fn set_room(&self, max: u64, pending: u64) {
        *self.room.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Room { max, left: max.saturating_sub(pending) });
    }
}

impl Shared {
    /// Sets the longest chain of events.
    pub(crate) fn set_max_chain_depth(&self, max: u32) {
        self.max_chain_depth.store(max, Ordering::Relaxed);
    }
}

/// One run of one operation.
pub(crate) struct Ctx {
    shared: Arc<Shared>,
    /// When the operation began; all rows it writes carry this time.
    pub(crate) now: Ts,
    topics: Mutex<Vec<Topic>>,
    /// What was read, perhaps of what this transaction wrote itself: nobody else may see it before the commit.
    fresh: Mutex<Fresh>,
}

/// See `Ctx::fresh`.
#[derive(Default)]
struct Fresh {
    locks: HashMap<String, Arc<Vec<u8>>>,
    selectors: Vec<String>,
    listened: Option<(i64, Arc<BTreeSet<String>>)>,
}

impl Ctx {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), now: shared.clock.now(), topics: Mutex::default(), fresh: Mutex::default() }
    }

    /// Now, not when the operation began: for times that must not run against those of whoever held a lock before.
    pub(crate) fn later(&self) -> Ts {
        self.shared.clock.now()
    }

    /// This instance.
    pub(crate) fn node(&self) -> &InstanceId {
        &self.shared.node
    }

    /// This start of this instance.
    pub(crate) fn incarnation(&self) -> Uuid {
        self.shared.mark
    }

    /// A fresh id.
    pub(crate) fn uuid(&self) -> Uuid {
        self.shared.ids.uuid()
    }

    /// The source of fresh ids.
    pub(crate) fn ids(&self) -> &dyn IdSource {
        &*self.shared.ids
    }

    /// Wakes the subscribers of `topic` once the transaction is committed.
    pub(crate) fn wake(&self, topic: Topic) {
        let mut topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        if !topics.contains(&topic) {
            topics.push(topic);
        }
    }

    /// Room for one more job in the queue; else how many it takes. A transaction that is undone gives nothing back, the next
    /// measurement does.
    pub(crate) fn take_room(&self) -> Result<(), u64> {
        let mut room = self.shared.room.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *room {
            None => Ok(()),
            Some(Room { max, left: 0 }) => Err(*max),
            Some(room) => {
                room.left -= 1;
                Ok(())
            }
        }
    }

    /// Longest chain of events.
    pub(crate) fn max_chain_depth(&self) -> u32 {
        self.shared.max_chain_depth.load(Ordering::Relaxed)
    }

    /// What registered workflows listen to, if it is known for this version of the registry.
    pub(crate) fn listened_at(&self, version: i64) -> Option<Arc<BTreeSet<String>>> {
        let at = |kept: &Option<(i64, Arc<BTreeSet<String>>)>| {
            kept.as_ref().filter(|(known, _)| *known == version).map(|(_, types)| Arc::clone(types))
        };
        // The own one first: a version that this transaction made may have been made, with other content, by one that was
        // undone.
        let own = at(&self.fresh.lock().unwrap_or_else(PoisonError::into_inner).listened);
        own.or_else(|| at(&self.shared.listened.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Keeps what [`listened_at`](Self::listened_at) gives.
    pub(crate) fn keep_listened(&self, version: i64, types: &Arc<BTreeSet<String>>) {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner).listened = Some((version, Arc::clone(types)));
    }

    /// What [`wake`](Self::wake) was told.
    pub(crate) fn topics(&self) -> Vec<Topic> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What it has read is committed: others may have it.
    pub(crate) fn share(&self) {
        let fresh = std::mem::take(&mut *self.fresh.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(listened) = fresh.listened {
            *self.shared.listened.lock().unwrap_or_else(PoisonError::into_inner) = Some(listened);
        }
        if !fresh.selectors.is_empty() {
            let mut selectors = self.shared.selectors.lock().unwrap_or_else(PoisonError::into_inner);
            if selectors.len() + fresh.selectors.len() > SELECTORS_KEPT {
                selectors.clear();
            }
            selectors.extend(fresh.selectors);
        }
        if fresh.locks.is_empty() {
            return;
        }
        let mut locks = self.shared.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if locks.len() + fresh.locks.len() > LOCKS_KEPT {
            locks.clear();
        }
        locks.extend(fresh.locks);
    }

    /// Whether a selector is known to be stored.
    pub(crate) fn selector_kept(&self, digest: &str) -> bool {
        self.shared.selectors.lock().unwrap_or_else(PoisonError::into_inner).contains(digest)
    }

    /// Keeps that a selector is stored.
    pub(crate) fn keep_selector(&self, digest: String) {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner).selectors.push(digest);
    }

    /// A lock document from memory.
    pub(crate) fn lock_kept(&self, digest: &str) -> Option<Arc<Vec<u8>>> {
        let known = self.shared.locks.lock().unwrap_or_else(PoisonError::into_inner).get(digest).cloned();
        known.or_else(|| self.fresh.lock().unwrap_or_else(PoisonError::into_inner).locks.get(digest).cloned())
    }

    /// Keeps a lock document that was read from the database.
    pub(crate) fn keep_lock(&self, digest: &str, body: &Arc<Vec<u8>>) {
        let mut fresh = self.fresh.lock().unwrap_or_else(PoisonError::into_inner);
        fresh.locks.insert(digest.to_owned(), Arc::clone(body));
    }
}
