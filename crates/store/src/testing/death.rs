//! A process that dies right behind one of its writes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::StoreError;

/// Counts the writes of a store, and lets the process be dead to the database behind a given one: that one is committed,
/// its caller does not get to know, and nothing is read or written any more.
#[derive(Debug)]
pub struct Death {
    state: Mutex<State>,
    dead: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    counting: bool,
    writes: Vec<&'static str>,
    after: Option<usize>,
}

impl Default for Death {
    fn default() -> Self {
        Self { state: Mutex::default(), dead: watch::Sender::new(false) }
    }
}

fn dead() -> StoreError {
    StoreError::Unavailable("this process is dead".to_owned())
}

impl Death {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts writes from now on, and dies behind the one with this number, from 1.
    pub fn behind(&self, write: usize) {
        *self.lock() = State { counting: true, writes: Vec::new(), after: Some(write) };
    }

    /// Does not answer from now on.
    pub fn now(&self) {
        self.dead.send_replace(true);
    }

    /// Answers again.
    pub fn over(&self) {
        self.dead.send_replace(false);
    }

    /// Names of the writes that were counted so far.
    pub fn writes(&self) -> Vec<&'static str> {
        self.lock().writes.clone()
    }

    /// Waits until the process is dead.
    pub async fn came(&self) {
        // The sender lives as long as this.
        let _ = self.dead.subscribe().wait_for(|dead| *dead).await;
    }

    /// Whether it is.
    pub fn is_here(&self) -> bool {
        *self.dead.borrow()
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        if self.is_here() { Err(dead()) } else { Ok(()) }
    }

    pub(crate) fn after(&self, name: &'static str, committed: bool) -> Result<(), StoreError> {
        let mut state = self.lock();
        self.check()?;
        if !state.counting || !committed {
            return Ok(());
        }
        state.writes.push(name);
        if state.after == Some(state.writes.len()) {
            self.dead.send_replace(true);
            return Err(dead());
        }
        Ok(())
    }
}
