//! How often an address may try claim codes.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

/// Tries of one address within [`WINDOW`].
pub const MAX_TRIES: u32 = 30;
/// Tries older than this do not count.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Addresses that are remembered; while so many are at it, no further one is let in.
const MAX_ADDRESSES: usize = 10_000;

/// Counts tries by address.
#[derive(Debug, Default)]
pub struct Attempts {
    seen: HashMap<IpAddr, (Duration, u32)>,
}

impl Attempts {
    /// Counts a try at `now`, a time since any fixed moment. False when it is one too many.
    pub fn take(&mut self, from: IpAddr, now: Duration) -> bool {
        let over = |began: Duration| now.saturating_sub(began) >= WINDOW;
        if self.seen.len() >= MAX_ADDRESSES && !self.seen.contains_key(&from) {
            self.seen.retain(|_, (began, _)| !over(*began));
            if self.seen.len() >= MAX_ADDRESSES {
                return false;
            }
        }
        let (began, tries) = self.seen.entry(from).or_insert((now, 0));
        if over(*began) {
            (*began, *tries) = (now, 0);
        }
        *tries = tries.saturating_add(1);
        *tries <= MAX_TRIES
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(n: u32) -> IpAddr {
        Ipv4Addr::from_bits(n).into()
    }

    #[test]
    fn thirty_tries_a_minute_for_each_address() {
        let mut attempts = Attempts::default();
        let at = Duration::from_secs;
        assert!((0..MAX_TRIES).all(|_| attempts.take(address(1), at(5))));
        assert!(!attempts.take(address(1), at(64)));
        assert!(attempts.take(address(2), at(64)));
        assert!(attempts.take(address(1), at(65)));
    }

    #[test]
    fn a_crowd_of_addresses_takes_no_more_memory_and_passes() {
        let mut attempts = Attempts::default();
        let crowd = u32::try_from(MAX_ADDRESSES).unwrap();
        assert!((0..crowd).all(|n| attempts.take(address(n), Duration::ZERO)));
        assert!(!attempts.take(address(crowd), Duration::from_secs(59)));
        assert!(attempts.take(address(0), Duration::from_secs(59)), "who is known goes on");
        assert!(attempts.take(address(crowd), Duration::from_secs(60)));
        assert!(attempts.seen.len() < 10);
    }
}
