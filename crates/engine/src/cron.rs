//! Times of schedules (workflows-and-events R42): a cron pattern in a time zone.
//!
//! Where the clocks go forward, a time that does not exist is met at the first instant after the gap, and where they go back,
//! one that comes twice is met the first time. A pattern whose hours begin with `*` names no hour: it goes on at its pace.

use std::time::Duration;

use chrono::{DateTime, LocalResult, NaiveDateTime, TimeDelta, TimeZone as _, Timelike as _, Utc};
use chrono_tz::Tz;
use croner::parser::{CronParser, Year};

use crate::time::Ts;

/// Shortest time between two firings.
pub const MIN_INTERVAL: Duration = Duration::from_secs(60);
/// Longest `catchup`: what was missed longer ago is never made up for.
pub const MAX_CATCHUP: Duration = Duration::from_secs(30 * 24 * 3600);
/// Longest `jitter`.
pub const MAX_JITTER: Duration = Duration::from_secs(24 * 3600);
/// Longest pattern, in bytes.
const MAX_PATTERN_BYTES: usize = 200;
/// Firings that are looked at for the shortest pause between two: beyond a day's worth a pattern repeats itself.
const SAMPLE: usize = 120;
/// 2024-01-01T00:00:00Z: the sample begins with a year that has a 29th of February.
const SAMPLE_START: Ts = Ts::from_micros(1_704_067_200_000_000);

/// Longest gap in a zone's time, in minutes: a whole day, where one crosses the date line.
const MAX_GAP_MINUTES: u32 = 25 * 60;

/// A schedule that cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CronError {
    /// Not a pattern.
    #[error("`{pattern}` is not a cron pattern ({problem}); write minute, hour, day of month, month and day of week")]
    Pattern {
        /// As written.
        pattern: String,
        /// What the parser says.
        problem: String,
    },
    /// Not a zone.
    #[error("`{0}` is not a time zone; write a name of the IANA database such as `Europe/Berlin`")]
    Zone(String),
    /// It never comes.
    #[error("`{0}` names a time that never comes")]
    Never(String),
    /// Too often.
    #[error("`{pattern}` fires every {seconds} s; the shortest interval is {} s", MIN_INTERVAL.as_secs())]
    TooOften {
        /// As written.
        pattern: String,
        /// The shortest pause.
        seconds: u64,
    },
}

/// A pattern in a zone.
#[derive(Clone, Debug)]
pub struct Cron {
    pattern: croner::Cron,
    zone: Tz,
    /// It says at which hours, on the clock that people read.
    names_hours: bool,
}

/// A time that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// The latest one.
    pub at: Ts,
    /// Earlier ones that it stands for too.
    pub missed: u64,
}

impl Cron {
    /// Reads a pattern of 5 fields, or of 6 with seconds first, and the name of a zone.
    ///
    /// # Errors
    /// [`CronError`].
    pub fn parse(pattern: &str, zone: &str) -> Result<Self, CronError> {
        let shown = || crate::yaml::shorten(pattern);
        let refused = |problem: String| CronError::Pattern { pattern: shown(), problem };
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(refused(format!("it is longer than {MAX_PATTERN_BYTES} bytes")));
        }
        let parser = CronParser::builder().year(Year::Disallowed).build();
        let parsed = parser.parse(pattern).map_err(|error| refused(error.to_string()))?;
        let zone = zone.parse::<Tz>().map_err(|_| CronError::Zone(crate::yaml::shorten(zone)))?;
        let cron = Self { pattern: parsed, zone, names_hours: names_hours(pattern) };
        let mut at = cron.next_after(SAMPLE_START).ok_or_else(|| CronError::Never(shown()))?;
        for _ in 0..SAMPLE {
            let Some(next) = cron.next_after(at) else { break };
            let pause = next.since(at);
            if pause < MIN_INTERVAL {
                return Err(CronError::TooOften { pattern: shown(), seconds: pause.as_secs() });
            }
            at = next;
        }
        Ok(cron)
    }

    /// The first time after `at`; none if there is none.
    pub fn next_after(&self, at: Ts) -> Option<Ts> {
        let local = at.to_datetime().with_timezone(&self.zone);
        if !self.names_hours {
            let next = self.pattern.find_next_occurrence(&local, false).ok()?;
            return Some(Ts::from_datetime(next.to_utc()));
        }
        // What the clock shows, as if it never were put forward or back.
        let mut shown = local.naive_local().and_utc();
        loop {
            shown = self.pattern.find_next_occurrence(&shown, false).ok()?;
            let next = Ts::from_datetime(self.first_instant(shown)?);
            // Within an hour that comes twice, and right behind one that did not come, the clock shows what was met before.
            if next > at {
                return Some(next);
            }
        }
    }

    /// When the clock shows this for the first time; for what it never shows, the first instant after the gap.
    fn first_instant(&self, shown: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut at: NaiveDateTime = shown.naive_utc();
        for _ in 0..=MAX_GAP_MINUTES {
            match self.zone.from_local_datetime(&at) {
                LocalResult::Single(one) => return Some(one.to_utc()),
                LocalResult::Ambiguous(one, other) => return Some(one.to_utc().min(other.to_utc())),
                LocalResult::None => at = at.with_second(0)?.checked_add_signed(TimeDelta::minutes(1))?,
            }
        }
        None
    }

    /// What has come after `after` and up to `now`, but not longer than `catchup` ago.
    pub fn due(&self, after: Ts, now: Ts, catchup: Duration) -> Option<Due> {
        let window = now.minus(catchup.min(MAX_CATCHUP));
        let mut found: Option<Due> = None;
        let mut at = after.max(window);
        while let Some(next) = self.next_after(at).filter(|next| *next <= now && *next > at) {
            found = Some(Due { at: next, missed: found.map_or(0, |earlier| earlier.missed + 1) });
            at = next;
        }
        found
    }
}

/// Whether the hours of a pattern are named, and not every one or every so many.
fn names_hours(pattern: &str) -> bool {
    let fields: Vec<&str> = pattern.split_whitespace().collect();
    match fields.as_slice() {
        [alias] => !alias.eq_ignore_ascii_case("@hourly"),
        [_, hours, _, _, _] | [_, _, hours, _, _, _] => !hours.starts_with(['*', '?']),
        _ => false,
    }
}

/// Names a schedule among those of its workflow, and with it what was looked at.
pub fn schedule_key(cron: &str, timezone: &str) -> String {
    format!("{cron}\n{timezone}")
}

/// How much later than its time a schedule fires, so that those of one time do not all fire at once: below `jitter`, and
/// always the same for the same `seed`.
pub fn offset(jitter: Duration, seed: u128) -> Duration {
    let range = jitter.min(MAX_JITTER).as_millis();
    if range == 0 {
        return Duration::ZERO;
    }
    // The low half of a version 7 UUID is random, and a multiplier spreads what is alike.
    let spread = (seed & u128::from(u64::MAX)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    Duration::from_millis(u64::try_from(spread % range).unwrap_or(0))
}

#[cfg(test)]
mod tests;
