//! Comings and goings of an agent, one after the other: of two sessions of it, one judges the jobs that it left behind while the
//! other takes them up again, and each would be right alone.

use std::hash::{DefaultHasher, Hash, Hasher};

use kici_engine::ids::AgentId;
use tokio::sync::{Mutex, MutexGuard};

/// Agents that share one wait for each other's database statements, so there are some more than agents that come at a time.
const DOORS: usize = 256;

/// See the module.
#[derive(Debug)]
pub(crate) struct Comings(Vec<Mutex<()>>);

impl Default for Comings {
    fn default() -> Self {
        Self((0..DOORS).map(|_| Mutex::default()).collect())
    }
}

impl Comings {
    /// Waits until nobody else lets this agent in or out; the others wait until the guard is dropped. Nobody may ask for a
    /// second one meanwhile.
    pub async fn door(&self, agent: &AgentId) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        agent.hash(&mut hasher);
        // Less than DOORS, so it fits.
        let door = (hasher.finish() % DOORS as u64) as usize;
        self.0[door].lock().await
    }
}
