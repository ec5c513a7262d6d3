//! How much one session may send: two token buckets, and the point where a flood ends the session.

use std::time::Duration;

/// The limits of one session.
#[derive(Clone, Copy, Debug)]
pub struct RateLimits {
    /// Frames at once.
    pub frames_burst: u32,
    /// Frames per second in the long run.
    pub frames_per_s: u32,
    /// Bytes at once.
    pub bytes_burst: u32,
    /// Bytes per second in the long run.
    pub bytes_per_s: u32,
    /// A session that is over its limits for this long without a pause is closed.
    pub disconnect_after: Duration,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self {
            frames_burst: 200,
            frames_per_s: 100,
            bytes_burst: 2 << 20,
            bytes_per_s: 512 << 10,
            disconnect_after: Duration::from_secs(5),
        }
    }
}

/// What to do with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// Process it.
    Within,
    /// Refuse it; the sender should wait this long.
    Over {
        /// When the next frame of this size would be within the limits.
        retry_after: Duration,
    },
    /// Close the session.
    Flood,
}

/// The buckets of one session. Time is passed in, as the time since the session began.
#[derive(Debug)]
pub struct Meter {
    limits: RateLimits,
    frames: f64,
    bytes: f64,
    last: Duration,
    over_since: Option<Duration>,
    last_over: Duration,
}

impl Meter {
    /// Full buckets.
    pub fn new(limits: RateLimits) -> Self {
        Self {
            frames: f64::from(limits.frames_burst),
            bytes: f64::from(limits.bytes_burst),
            last: Duration::ZERO,
            over_since: None,
            last_over: Duration::ZERO,
            limits,
        }
    }

    /// Accounts one frame of `size` bytes that came `now` after the session began.
    pub fn take(&mut self, now: Duration, size: usize) -> Rate {
        let passed = now.saturating_sub(self.last).as_secs_f64();
        self.last = self.last.max(now);
        let limits = self.limits;
        self.frames = (self.frames + passed * f64::from(limits.frames_per_s)).min(f64::from(limits.frames_burst));
        self.bytes = (self.bytes + passed * f64::from(limits.bytes_per_s)).min(f64::from(limits.bytes_burst));
        // A frame larger than the bucket passes when the bucket is full: it could never pass otherwise.
        let size = f64::from(u32::try_from(size).unwrap_or(u32::MAX)).min(f64::from(limits.bytes_burst));
        if self.frames >= 1.0 && self.bytes >= size {
            self.frames -= 1.0;
            self.bytes -= size;
            return Rate::Within;
        }
        self.over(now, size)
    }

    fn over(&mut self, now: Duration, size: f64) -> Rate {
        let limits = self.limits;
        // A second without a refusal is a pause: the count starts again.
        let since = match self.over_since {
            Some(since) if now.saturating_sub(self.last_over) < Duration::from_secs(1) => since,
            _ => now,
        };
        self.over_since = Some(since);
        self.last_over = now;
        if now.saturating_sub(since) >= limits.disconnect_after {
            return Rate::Flood;
        }
        let for_frames = (1.0 - self.frames) / f64::from(limits.frames_per_s.max(1));
        let for_bytes = (size - self.bytes) / f64::from(limits.bytes_per_s.max(1));
        Rate::Over { retry_after: Duration::from_secs_f64(for_frames.max(for_bytes).max(0.001)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_then_the_rate_holds() {
        let mut meter = Meter::new(RateLimits::default());
        let passed = (0..300).filter(|_| meter.take(Duration::ZERO, 10) == Rate::Within).count();
        assert_eq!(passed, 200);
        let passed = (0..300).filter(|_| meter.take(Duration::from_millis(500), 10) == Rate::Within).count();
        assert_eq!(passed, 50);
    }

    #[test]
    fn bytes_are_limited_too_and_a_giant_frame_passes_alone() {
        let mut meter = Meter::new(RateLimits::default());
        assert_eq!(meter.take(Duration::ZERO, 8 << 20), Rate::Within);
        let Rate::Over { retry_after } = meter.take(Duration::ZERO, 512 << 10) else { panic!("over") };
        assert_eq!(retry_after, Duration::from_secs(1));
        assert_eq!(meter.take(retry_after, 512 << 10), Rate::Within);
    }

    #[test]
    fn five_seconds_over_without_a_pause_end_the_session_and_a_pause_forgives() {
        let mut meter = Meter::new(RateLimits::default());
        let flood = |meter: &mut Meter, from: u64, to: u64| {
            (from..to).any(|ms| {
                let at = Duration::from_millis(ms);
                (0..3).any(|_| meter.take(at, 1) == Rate::Flood)
            })
        };
        assert!(!flood(&mut meter, 0, 4_900));
        assert!(!flood(&mut meter, 10_000, 14_900), "the pause starts the count again");
        assert!(flood(&mut meter, 14_900, 17_000));
    }
}
