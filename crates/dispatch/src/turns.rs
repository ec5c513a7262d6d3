//! Turns in concurrency groups: carries out what the groups decided for other runs, ends waits that take too long, and takes
//! slots back that were left behind. The database says what is to be done; a signal only makes it sooner.

use std::sync::Arc;

use kici_engine::ids::RunId;
use kici_engine::state::FailureReason;
use kici_store::model::SlotWait;

use crate::dispatcher::{DispatchError, Dispatcher};
use crate::meters;

/// Runs handled in one activation.
const BATCH: u32 = 200;

impl Dispatcher {
    /// Tells runs what became of their slots as soon as there is news.
    pub(crate) async fn watch_turns(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.stopping.cancelled() => return,
                () = self.turns.notified() => {}
            }
            if let Err(error) = self.settle_turns().await {
                tracing::warn!(%error, "who is next in a concurrency group could not be settled");
            }
        }
    }

    /// Lets runs go on that got a slot, and cancels those that a newer one wants to end. Returns how many.
    pub(crate) async fn settle_turns(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let news = self.store.slot_news(BATCH).await?;
        let mut done = 0;
        for one in &news {
            let told = match one.superseded_by {
                Some(newer) => self.end_for(one.run_id, &newer.to_string()).await,
                None => self.go_on(one.run_id).await,
            };
            // One run that cannot go on keeps no other waiting.
            match told {
                Ok(()) => done += 1,
                Err(error) => tracing::warn!(run = %one.run_id, %error, "a run cannot be told of its turn yet"),
            }
        }
        if done > 0 && news.len() as u64 >= u64::from(BATCH) {
            self.turns.notify_one();
        }
        Ok(done)
    }

    async fn end_for(self: &Arc<Self>, run: RunId, newer: &str) -> Result<(), DispatchError> {
        match self.cancel_run(run, newer, FailureReason::Superseded, false).await {
            Ok(_) => meters::superseded(),
            Err(DispatchError::AlreadyTerminal(_) | DispatchError::NoSuchRun) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn go_on(self: &Arc<Self>, run: RunId) -> Result<(), DispatchError> {
        if let Some(effects) = self.store.run_advance(run, self.activate()).await? {
            self.apply_effects(&effects);
        }
        Ok(())
    }

    /// Ends waits that are longer than the limit.
    pub(crate) async fn end_long_waits(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let before = self.clock.now().minus(self.config.concurrency_wait);
        let waits = self.store.slots_waiting_since(before, BATCH).await?;
        let count = waits.len() as u64;
        for wait in waits {
            let message = self.waited(&wait);
            let run = wait.run_id;
            match self.store.slot_expire(wait, message, self.activate()).await {
                Ok(Some(effects)) => self.apply_effects(&effects),
                Ok(None) => {}
                Err(error) => tracing::warn!(%run, %error, "a wait that is too long cannot be ended yet"),
            }
        }
        Ok(count)
    }

    fn waited(&self, wait: &SlotWait) -> String {
        let seconds = self.config.concurrency_wait.as_secs();
        format!(
            "no slot of concurrency group `{}` came free within {seconds} s; see concurrency.wait_timeout_ms",
            wait.group
        )
    }

    /// Slots of runs that have ended. There are none unless something went wrong.
    pub(crate) async fn reclaim_slots(&self) -> Result<u64, DispatchError> {
        let groups = self.store.slots_reclaim(BATCH).await?;
        if groups > 0 {
            tracing::warn!(groups, "slots of runs that have ended were taken back");
        }
        Ok(groups)
    }
}
