//! The wall clock of this host.

use std::time::{SystemTime, UNIX_EPOCH};

use kici_engine::time::{Clock, Ts};

/// Reads the system's wall clock. It can step backwards; nothing is fenced by it.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "the one reader of the wall clock")]
    fn now(&self) -> Ts {
        let micros = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_micros()).unwrap_or(i64::MAX),
            Err(before) => -i64::try_from(before.duration().as_micros()).unwrap_or(i64::MAX),
        };
        Ts::from_micros(micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lies_after_this_was_written() {
        assert!(SystemClock.now() > Ts::parse_rfc3339("2025-01-01T00:00:00Z").expect("a date"));
    }
}
