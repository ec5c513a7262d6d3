//! Which frames of a session are settled: the cumulative number that `FrameAck` may name.

use std::collections::BTreeSet;

/// Follows the sequence numbers of one session. A number is settled once its frame is committed or refused; the
/// cumulative number is the highest below which nothing is open.
#[derive(Debug, Default)]
pub struct Settled {
    last_seen: u64,
    open: BTreeSet<u64>,
    announced: u64,
}

/// A frame whose number does not follow its predecessor's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("frame {got} came where {expected} was due; numbers start at 1 and have no gaps")]
pub struct OutOfOrder {
    /// The number that was due.
    pub expected: u64,
    /// The number that came.
    pub got: u64,
}

impl Settled {
    /// Takes in the next frame as open.
    ///
    /// # Errors
    /// [`OutOfOrder`] when `seq` is not the successor of the last one.
    pub fn open(&mut self, seq: u64) -> Result<(), OutOfOrder> {
        let expected = self.last_seen + 1;
        if seq != expected {
            return Err(OutOfOrder { expected, got: seq });
        }
        self.last_seen = seq;
        self.open.insert(seq);
        Ok(())
    }

    /// Marks a frame as committed or refused. Returns true when the cumulative number rose.
    pub fn settle(&mut self, seq: u64) -> bool {
        let before = self.up_to();
        self.open.remove(&seq);
        self.up_to() > before
    }

    /// Every frame up to this number is settled.
    pub fn up_to(&self) -> u64 {
        self.open.first().map_or(self.last_seen, |first| first - 1)
    }

    /// The number to announce, once, if it rose since the last call.
    pub fn announce(&mut self) -> Option<u64> {
        let up_to = self.up_to();
        (up_to > self.announced).then(|| {
            self.announced = up_to;
            up_to
        })
    }

    /// How many frames are open.
    pub fn open_frames(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_have_no_gaps() {
        let mut settled = Settled::default();
        settled.open(1).unwrap();
        assert_eq!(settled.open(3), Err(OutOfOrder { expected: 2, got: 3 }));
        assert_eq!(settled.open(1), Err(OutOfOrder { expected: 2, got: 1 }));
    }

    proptest! {
        #[test]
        fn an_ack_never_covers_an_open_frame(order in Just((1..=40u64).collect::<Vec<_>>()).prop_shuffle()) {
            let mut settled = Settled::default();
            for seq in 1..=40 { settled.open(seq).unwrap(); }
            let mut done = BTreeSet::new();
            let mut last = 0;
            for seq in order {
                settled.settle(seq);
                done.insert(seq);
                if let Some(up_to) = settled.announce() {
                    prop_assert!(up_to > last);
                    prop_assert!((1..=up_to).all(|n| done.contains(&n)));
                    last = up_to;
                }
            }
            prop_assert_eq!(last, 40);
            prop_assert_eq!(settled.open_frames(), 0);
        }
    }
}
