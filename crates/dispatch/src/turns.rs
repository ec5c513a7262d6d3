//! Turns in concurrency groups: carries out what the groups decided for other runs, ends waits that take too long, and takes
//! slots back that were left behind. The database says what is to be done; a signal only makes it sooner.

use std::sync::Arc;

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
        for one in &news {
            match one.superseded_by {
                Some(newer) => {
                    let by = newer.to_string();
                    match self.cancel_run(one.run_id, &by, FailureReason::Superseded, false).await {
                        Ok(_) => meters::superseded(),
                        Err(DispatchError::AlreadyTerminal(_) | DispatchError::NoSuchRun) => {}
                        Err(error) => return Err(error),
                    }
                }
                None => {
                    if let Some(effects) = self.store.run_advance(one.run_id, self.activate()).await? {
                        self.apply_effects(&effects);
                    }
                }
            }
        }
        if news.len() as u64 >= u64::from(BATCH) {
            self.turns.notify_one();
        }
        Ok(news.len() as u64)
    }

    /// Ends waits that are longer than the limit.
    pub(crate) async fn end_long_waits(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let before = self.clock.now().minus(self.config.concurrency_wait);
        let waits = self.store.slots_waiting_since(before, BATCH).await?;
        let count = waits.len() as u64;
        for wait in waits {
            let message = self.waited(&wait);
            if let Some(effects) = self.store.slot_expire(wait, message, self.activate()).await? {
                self.apply_effects(&effects);
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
