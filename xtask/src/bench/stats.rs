//! Figures from samples.

use std::time::Duration;

/// Samples of one thing.
#[derive(Default)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    pub(crate) fn add(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub(crate) fn extend(&mut self, samples: impl IntoIterator<Item = Duration>) {
        self.0.extend(samples);
    }

    /// The value that `percent` of the samples do not exceed, in milliseconds (nearest rank).
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).map_or(f64::NAN, |sample| sample.as_secs_f64() * 1_000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut samples = Samples::default();
        (1..=100).rev().for_each(|ms| samples.add(Duration::from_millis(ms)));
        assert_eq!((samples.percentile(50), samples.percentile(99), samples.percentile(100)), (50.0, 99.0, 100.0));
        assert!(Samples::default().percentile(50).is_nan());
    }
}
