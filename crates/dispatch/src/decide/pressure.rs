//! When a queue counts as too long: a short burst does not.

use std::sync::Mutex;

/// Samples above the limit, in a row, that make a warning.
const SAMPLES: u32 = 2;

/// Watches one number against its limit.
#[derive(Debug, Default)]
pub struct Pressure {
    /// Samples above the limit in a row.
    above: Mutex<u32>,
}

impl Pressure {
    /// Takes a sample. True when the pressure has begun with it, false when it has ended, none when nothing changed.
    pub fn observe(&self, high: bool) -> Option<bool> {
        let mut above = self.above.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let before = *above;
        *above = if high { before.saturating_add(1) } else { 0 };
        match (before, *above) {
            (_, SAMPLES) if before < SAMPLES => Some(true),
            (SAMPLES.., 0) => Some(false),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_with_the_second_sample_and_is_told_once() {
        let pressure = Pressure::default();
        let told: Vec<_> =
            [true, false, true, true, true, false, false].into_iter().map(|high| pressure.observe(high)).collect();
        assert_eq!(told, [None, None, None, Some(true), None, Some(false), None]);
    }
}
