//! The end of an agent in order: it says that it takes no more work, and goes once that is heard.

use std::time::Duration;

use tokio::time::Instant;

/// An orchestrator that does not answer is not waited for longer.
const LIMIT: Duration = Duration::from_secs(2);

/// What the orchestrator knows of the leave, in this session.
#[derive(Debug, Default)]
pub(super) struct Leave {
    /// A registration is under way, which may not have said so: the orchestrator may offer jobs before its answer is here.
    registering: bool,
    /// The number of the frame that says so.
    said: Option<u64>,
    /// Everything up to this number is settled.
    heard: u64,
    /// Since when there is nothing more to do.
    done: Option<Instant>,
}

impl Leave {
    /// Nothing that was said in an earlier session counts.
    pub(super) fn new_session(&mut self) {
        (self.registering, self.said, self.heard) = (false, None, 0);
    }

    /// A session begins.
    pub(super) fn registers(&mut self) {
        self.registering = true;
    }

    /// The number of the last word on it; none when it was taken back, or could not be sent.
    pub(super) fn said(&mut self, seq: Option<u64>) {
        self.said = seq;
    }

    /// Everything up to this number is settled.
    pub(super) fn heard(&mut self, up_to_seq: u64) {
        self.heard = up_to_seq;
    }

    /// Whether the agent may go: there is nothing more to do, and it is known, or there is nobody to know it.
    pub(super) fn is_over(&mut self, done: bool, connected: bool, now: Instant) -> bool {
        if !done {
            self.done = None;
            return false;
        }
        let since = *self.done.get_or_insert(now);
        !(connected || self.registering) || self.said.is_some_and(|said| said <= self.heard) || now >= since + LIMIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_when_its_word_is_heard_or_nobody_listens() {
        let now = Instant::now();
        let mut leave = Leave::default();
        leave.said(Some(4));
        leave.heard(3);
        assert!(!leave.is_over(true, true, now), "offers may be on their way");
        assert!(leave.is_over(true, false, now));
        leave.heard(4);
        assert!(leave.is_over(true, true, now));
        assert!(!leave.is_over(false, true, now + LIMIT), "it holds something again");
        leave.new_session();
        assert!(!leave.is_over(true, true, now), "the new session has not heard it");
        assert!(leave.is_over(true, true, now + LIMIT));
        leave.registers();
        assert!(!leave.is_over(true, false, now), "it may be in already");
    }
}
