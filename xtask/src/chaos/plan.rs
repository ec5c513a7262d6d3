//! Which faults happen when: all of it follows from the seed.

use std::fmt;
use std::time::Duration;

/// Small and repeatable (xorshift64*).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        // A state of zero would stay zero.
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// From 0 to `limit`, without `limit`.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit.max(1)
    }

    /// Between the two, in milliseconds.
    fn between(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }
}

/// What a connection does to the bytes between an agent and the orchestrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weather {
    /// Nothing gets through, and what is open is cut.
    Cut,
    /// Bytes of the agent do not arrive; those of the orchestrator do.
    StallUp,
    /// Bytes of the orchestrator do not arrive; those of the agent do.
    StallDown,
    /// Every byte is late by this time.
    Delay(Duration),
}

/// Whom a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Agent(usize),
    Orchestrator,
    Database,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// SIGKILL, and a new start after this time.
    Kill(Victim, Duration),
    /// SIGSTOP, and SIGCONT after this time.
    Freeze(Victim, Duration),
    /// An agent's connection is like this for this time; then what is open is cut as well, or goes on.
    Network { agent: usize, weather: Weather, lasts: Duration, then_cut: bool },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = |victim: &Victim| match victim {
            Victim::Agent(number) => format!("agent-{number}"),
            Victim::Orchestrator => "orchestrator".to_owned(),
            Victim::Database => "postgres".to_owned(),
        };
        match self {
            Self::Kill(victim, rest) => write!(f, "kill -9 {}, start after {} ms", who(victim), rest.as_millis()),
            Self::Freeze(victim, lasts) => write!(f, "freeze {} for {} ms", who(victim), lasts.as_millis()),
            Self::Network { agent, weather, lasts, then_cut } => {
                let end = if *then_cut { ", then cut" } else { "" };
                write!(f, "network of agent-{agent}: {weather:?} for {} ms{end}", lasts.as_millis())
            }
        }
    }
}

/// A fault and when it begins, counted from the start.
pub(super) type Timed = (Duration, Fault);

/// The faults of one run, by time. None begins after `length`, and each is over a few seconds later.
pub(super) fn plan(seed: u64, length: Duration, agents: usize, database: bool) -> Vec<Timed> {
    let mut random = Random::new(seed);
    let mut faults = Vec::new();
    // The more agents, the closer together: each is hit about twice a minute.
    let pace = 24_000 / agents.max(1) as u64;
    series(&mut random, length, (pace / 2, pace * 3 / 2 + 1), &mut faults, |random| {
        let victim = Victim::Agent(random.below(agents as u64) as usize);
        match random.below(2) {
            0 => Fault::Kill(victim, random.between(50, 2_000)),
            _ => Fault::Freeze(victim, random.between(300, 7_000)),
        }
    });
    series(&mut random, length, (pace / 2, pace * 3 / 2 + 1), &mut faults, |random| {
        let weather = match random.below(4) {
            0 => Weather::Cut,
            1 => Weather::StallUp,
            2 => Weather::StallDown,
            _ => Weather::Delay(random.between(5, 300)),
        };
        let agent = random.below(agents as u64) as usize;
        Fault::Network { agent, weather, lasts: random.between(200, 6_000), then_cut: random.below(2) == 0 }
    });
    series(&mut random, length, (4_000, 14_000), &mut faults, |random| match random.below(3) {
        0 => Fault::Freeze(Victim::Orchestrator, random.between(300, 6_000)),
        _ => Fault::Kill(Victim::Orchestrator, random.between(0, 2_000)),
    });
    if database {
        series(&mut random, length, (7_000, 20_000), &mut faults, |random| match random.below(2) {
            0 => Fault::Freeze(Victim::Database, random.between(300, 5_000)),
            _ => Fault::Kill(Victim::Database, random.between(0, 2_000)),
        });
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

fn series(
    random: &mut Random,
    length: Duration,
    (from, to): (u64, u64),
    faults: &mut Vec<Timed>,
    mut fault: impl FnMut(&mut Random) -> Fault,
) {
    let mut at = random.between(0, to);
    while at < length {
        faults.push((at, fault(random)));
        at += random.between(from.max(1), to.max(from + 2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_faults_again_and_another_seed_others() {
        let length = Duration::from_secs(60);
        assert_eq!(plan(7, length, 6, true), plan(7, length, 6, true));
        assert_ne!(plan(7, length, 6, true), plan(8, length, 6, true));
    }

    #[test]
    fn every_kind_of_fault_happens_and_none_begins_after_the_end() {
        for seed in 0..50 {
            let faults = plan(seed, Duration::from_secs(300), 20, true);
            assert!(faults.iter().all(|(at, _)| *at < Duration::from_secs(300)));
            let has = |wanted: fn(&Fault) -> bool| assert!(faults.iter().any(|(_, fault)| wanted(fault)), "{seed}");
            has(|fault| matches!(fault, Fault::Kill(Victim::Agent(_), _)));
            has(|fault| matches!(fault, Fault::Freeze(Victim::Agent(_), _)));
            has(|fault| matches!(fault, Fault::Kill(Victim::Orchestrator, _)));
            has(|fault| matches!(fault, Fault::Freeze(Victim::Orchestrator, _)));
            has(|fault| matches!(fault, Fault::Kill(Victim::Database, _)));
            has(|fault| matches!(fault, Fault::Freeze(Victim::Database, _)));
            for weather in [Weather::Cut, Weather::StallUp, Weather::StallDown] {
                let found = |fault: &Fault| matches!(fault, Fault::Network { weather: w, .. } if *w == weather);
                assert!(faults.iter().any(|(_, fault)| found(fault)), "{seed}: {weather:?}");
            }
        }
    }

    #[test]
    fn sqlite_has_no_server_to_kill() {
        let faults = plan(1, Duration::from_secs(300), 20, false);
        let hits = |fault: &Fault| matches!(fault, Fault::Kill(v, _) | Fault::Freeze(v, _) if *v == Victim::Database);
        assert!(!faults.iter().any(|(_, fault)| hits(fault)));
    }
}
