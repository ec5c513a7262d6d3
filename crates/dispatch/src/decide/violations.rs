//! How often an agent may speak for a job that is not its own.

use std::time::Duration;

/// Violations that end a session.
pub const MAX_VIOLATIONS: u32 = 5;
/// The window they are counted in; it starts again when it lapses.
pub const VIOLATION_WINDOW: Duration = Duration::from_secs(60);

/// What is known about who owns a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// The agent holds it at this epoch, or held it until a moment ago.
    Owned,
    /// It does not; refused, and counted.
    NotOwned,
    /// It held an older epoch of it once; refused, not counted.
    StaleEpoch,
    /// The database did not answer in time; refused, not counted.
    Unknown,
}

/// The count of one session. Time is passed in, as the time since the session began.
#[derive(Debug, Default)]
pub struct Violations {
    window_start: Option<Duration>,
    count: u32,
}

impl Violations {
    /// Counts one verdict. True when the session must end.
    pub fn record(&mut self, now: Duration, verdict: Ownership) -> bool {
        if verdict != Ownership::NotOwned {
            return false;
        }
        match self.window_start {
            Some(start) if now.saturating_sub(start) < VIOLATION_WINDOW => self.count += 1,
            _ => {
                self.window_start = Some(now);
                self.count = 1;
            }
        }
        self.count >= MAX_VIOLATIONS
    }
}

/// What a queue row says about an agent's claim to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOwner<'a> {
    /// The agent in the row.
    pub agent: Option<&'a str>,
    /// The agent that may take it up again.
    pub recovery_agent: Option<&'a str>,
    /// The row's epoch.
    pub epoch: u32,
    /// True for `dispatched`, `recovering` and terminal rows.
    pub handed_over: bool,
}

/// The verdict from the database row: the agent owns the job when the row names it, at the frame's epoch.
pub fn ownership(row: Option<RowOwner<'_>>, agent: &str, epoch: u32, held_epoch_before: bool) -> Ownership {
    let Some(row) = row else { return Ownership::NotOwned };
    let named = row.agent == Some(agent) || row.recovery_agent == Some(agent);
    if row.handed_over && named && row.epoch == epoch {
        Ownership::Owned
    } else if epoch <= row.epoch && held_epoch_before {
        Ownership::StaleEpoch
    } else {
        Ownership::NotOwned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fifth_violation_within_60_s_ends_the_session() {
        let mut v = Violations::default();
        let at = Duration::from_secs;
        for n in 0..4 {
            assert!(!v.record(at(n), Ownership::NotOwned));
            assert!(!v.record(at(n), Ownership::Unknown));
            assert!(!v.record(at(n), Ownership::StaleEpoch));
        }
        assert!(v.record(at(59), Ownership::NotOwned));
        let mut v = Violations::default();
        assert!(!(0..4).any(|n| v.record(at(n), Ownership::NotOwned)));
        assert!(!v.record(at(60), Ownership::NotOwned), "the window lapsed");
    }

    #[test]
    fn a_terminal_row_of_another_agent_is_not_owned() {
        let row = |agent, epoch| RowOwner { agent: Some(agent), recovery_agent: None, epoch, handed_over: true };
        assert_eq!(ownership(Some(row("a", 2)), "a", 2, true), Ownership::Owned);
        assert_eq!(ownership(Some(row("b", 2)), "a", 2, false), Ownership::NotOwned);
        assert_eq!(ownership(Some(row("b", 2)), "a", 1, true), Ownership::StaleEpoch);
        assert_eq!(ownership(Some(row("b", 2)), "a", 1, false), Ownership::NotOwned);
        assert_eq!(ownership(Some(row("a", 2)), "a", 3, false), Ownership::NotOwned);
        assert_eq!(ownership(None, "a", 1, false), Ownership::NotOwned);
    }
}
