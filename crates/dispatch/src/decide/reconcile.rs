//! What an agent that registers says it holds, against what the database says it holds.

use std::collections::BTreeSet;

/// One job at one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Held<J> {
    /// The job.
    pub job: J,
    /// The epoch of the hand-over.
    pub epoch: u32,
}

/// The two lists to compare, and what follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconciliation<J> {
    /// Try to take these up again; the database row decides between RESUME and ABANDON.
    pub try_resume: Vec<Held<J>>,
    /// The agent must stop these: the database gives them to nobody, to another agent, or at another epoch.
    pub abandon: Vec<Held<J>>,
    /// The database gives these to the agent, which does not know them; decide by [`super::triage::forgotten`] at once.
    pub forgotten: Vec<Held<J>>,
    /// Like `forgotten`, but a result waits in the agent's outbox: decide only when it did not come in time.
    pub awaiting_outbox: Vec<Held<J>>,
}

/// Compares what the agent lists (`listed`), what waits in its outbox, and the rows it owns.
pub fn reconcile<J: Copy + Ord>(listed: &[Held<J>], outbox: &[Held<J>], owned: &[Held<J>]) -> Reconciliation<J> {
    let listed: BTreeSet<Held<J>> = listed.iter().copied().collect();
    let outbox: BTreeSet<Held<J>> = outbox.iter().copied().collect();
    let owned: BTreeSet<Held<J>> = owned.iter().copied().collect();
    let unlisted = owned.difference(&listed);
    let (awaiting_outbox, forgotten) = unlisted.copied().partition(|held| outbox.contains(held));
    Reconciliation {
        try_resume: listed.intersection(&owned).copied().collect(),
        abandon: listed.difference(&owned).copied().collect(),
        forgotten,
        awaiting_outbox,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn held() -> impl Strategy<Value = Vec<Held<u8>>> {
        proptest::collection::vec((0u8..6, 1u32..3).prop_map(|(job, epoch)| Held { job, epoch }), 0..8)
    }

    proptest! {
        #[test]
        fn every_claim_of_both_sides_gets_exactly_one_answer(listed in held(), outbox in held(), owned in held()) {
            let r = reconcile(&listed, &outbox, &owned);
            for held in &listed {
                prop_assert_eq!(r.try_resume.contains(held) as u8 + r.abandon.contains(held) as u8, 1);
                prop_assert_eq!(r.try_resume.contains(held), owned.contains(held));
            }
            for held in &owned {
                let answers = [&r.try_resume, &r.forgotten, &r.awaiting_outbox];
                prop_assert_eq!(answers.iter().filter(|list| list.contains(held)).count(), 1);
                if r.awaiting_outbox.contains(held) { prop_assert!(outbox.contains(held)); }
            }
            for held in r.forgotten.iter().chain(&r.awaiting_outbox) {
                prop_assert!(!listed.contains(held) && owned.contains(held));
            }
        }
    }
}
