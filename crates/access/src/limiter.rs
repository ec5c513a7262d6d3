//! A limit on failed logins per address, so that tokens cannot be guessed at speed.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kici_engine::time::Ts;

/// Too many failures from one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many failed logins from this address; try again in {} s", .retry_after.as_secs().max(1))]
pub struct Limited {
    /// When the next try is allowed.
    pub retry_after: Duration,
}

/// Counts failures per address in a fixed window. IPv6 callers count per /64, since one host owns that many addresses.
/// Memory is bounded: when the table is full, the entry that started first is dropped.
#[derive(Debug)]
pub struct FailureLimiter {
    max_failures: u32,
    window: Duration,
    capacity: usize,
    entries: Mutex<HashMap<IpAddr, (Ts, u32)>>,
}

impl Default for FailureLimiter {
    /// Five failures per minute, 10 000 addresses.
    fn default() -> Self {
        Self::new(5, Duration::from_secs(60), 10_000)
    }
}

impl FailureLimiter {
    /// At most `max_failures` per `window`, for at most `capacity` addresses.
    pub fn new(max_failures: u32, window: Duration, capacity: usize) -> Self {
        Self { max_failures, window, capacity: capacity.max(1), entries: Mutex::new(HashMap::new()) }
    }

    /// Whether `address` may try now.
    ///
    /// # Errors
    /// [`Limited`] with the time to wait.
    pub fn check(&self, address: IpAddr, now: Ts) -> Result<(), Limited> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        match entries.get(&bucket(address)) {
            Some((start, count)) if *count >= self.max_failures && now.since(*start) < self.window => {
                Err(Limited { retry_after: self.window - now.since(*start) })
            }
            _ => Ok(()),
        }
    }

    /// Records a failure.
    pub fn failed(&self, address: IpAddr, now: Ts) {
        let key = bucket(address);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if !entries.contains_key(&key) && entries.len() >= self.capacity {
            entries.retain(|_, (start, _)| now.since(*start) < self.window);
            if entries.len() >= self.capacity
                && let Some(oldest) = entries.iter().min_by_key(|(_, (start, _))| *start).map(|(k, _)| *k)
            {
                entries.remove(&oldest);
            }
        }
        let entry = entries.entry(key).or_insert((now, 0));
        if now.since(entry.0) >= self.window {
            *entry = (now, 0);
        }
        entry.1 = entry.1.saturating_add(1);
    }
}

fn bucket(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn at(seconds: i64) -> Ts {
        Ts::from_micros(seconds * 1_000_000)
    }

    #[test]
    fn five_failures_close_the_door_for_a_minute() {
        let limiter = FailureLimiter::default();
        for second in 0..5 {
            assert_eq!(limiter.check(ip("192.0.2.1"), at(second)), Ok(()));
            limiter.failed(ip("192.0.2.1"), at(second));
        }
        let limited = limiter.check(ip("::ffff:192.0.2.1"), at(10));
        assert_eq!(limited, Err(Limited { retry_after: Duration::from_secs(50) }));
        assert_eq!(limiter.check(ip("192.0.2.2"), at(10)), Ok(()));
        assert_eq!(limiter.check(ip("192.0.2.1"), at(60)), Ok(()));
        limiter.failed(ip("192.0.2.1"), at(60));
        assert_eq!(limiter.check(ip("192.0.2.1"), at(61)), Ok(()), "a new window starts empty");
    }

    #[test]
    fn one_ipv6_network_is_one_caller() {
        let limiter = FailureLimiter::new(2, Duration::from_secs(60), 10);
        limiter.failed(ip("2001:db8::1"), at(0));
        limiter.failed(ip("2001:db8::2"), at(0));
        assert!(limiter.check(ip("2001:db8::3"), at(0)).is_err());
        assert!(limiter.check(ip("2001:db8:0:1::1"), at(0)).is_ok());
    }

    #[test]
    fn the_table_stays_bounded() {
        let limiter = FailureLimiter::new(1, Duration::from_secs(60), 3);
        for n in 0..100u8 {
            limiter.failed(IpAddr::from([192, 0, 2, n]), at(i64::from(n) / 10));
        }
        assert_eq!(limiter.entries.lock().unwrap().len(), 3);
        assert!(limiter.check(ip("192.0.2.99"), at(10)).is_err());
    }
}
