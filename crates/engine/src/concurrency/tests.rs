use proptest::prelude::*;
use uuid::Uuid;

use super::*;

fn run(n: u128) -> RunId {
    RunId::from_uuid(Uuid::from_u128(n))
}

fn waiting(n: u128) -> Claim {
    Claim { run: run(n), active: false, max: 1, dead: false, superseded: false }
}

fn active(n: u128) -> Claim {
    Claim { active: true, ..waiting(n) }
}

#[test]
fn the_oldest_gets_the_slot_and_the_others_wait() {
    assert_eq!(arbitrate(&[waiting(1), waiting(2)], None).promoted, [0]);
    assert_eq!(arbitrate(&[active(1), waiting(2)], None), Decision::default());
    let gone = Claim { dead: true, ..active(1) };
    let orphan = Claim { dead: true, ..waiting(2) };
    let decision = arbitrate(&[gone, orphan, waiting(3), waiting(4)], None);
    assert_eq!((decision.ended, decision.promoted), (vec![0, 1], vec![2]), "an orphan at the head blocks nobody");
}

#[test]
fn a_newcomer_that_cancels_waits_for_the_end_of_the_older_holder() {
    let claims = [active(1), waiting(2), waiting(3)];
    let decision = arbitrate(&claims, Some(Newcomer { at: 2, cancel_in_progress: true }));
    assert_eq!(decision, Decision { ended: vec![], promoted: vec![], superseded: vec![0, 1] });
    // Later, when the older holder has ended: those that are superseded are passed over.
    let later =
        [Claim { dead: true, superseded: true, ..active(1) }, Claim { superseded: true, ..waiting(2) }, waiting(3)];
    assert_eq!(arbitrate(&later, None).promoted, [2]);
}

#[test]
fn a_newcomer_of_an_older_run_cancels_nobody_who_is_newer() {
    let claims = [waiting(1), active(2)];
    let decision = arbitrate(&claims, Some(Newcomer { at: 0, cancel_in_progress: true }));
    assert_eq!(decision, Decision::default());
}

#[test]
fn jobs_of_one_run_do_not_cancel_each_other() {
    let claims = [active(1), waiting(1)];
    let decision = arbitrate(&claims, Some(Newcomer { at: 1, cancel_in_progress: true }));
    assert_eq!(decision, Decision::default());
}

#[test]
fn nobody_overtakes_the_head_of_the_queue() {
    let claims = [active(1), waiting(2), Claim { max: 5, ..waiting(3) }];
    assert_eq!(arbitrate(&claims, None), Decision::default());
}

fn claims() -> impl Strategy<Value = Vec<Claim>> {
    let claim = (0..6_u128, any::<bool>(), 1..4_u32, any::<bool>(), any::<bool>());
    proptest::collection::vec(claim, 0..12).prop_map(|all| {
        let claim = |(n, active, max, dead, superseded)| Claim { run: run(n), active, max, dead, superseded };
        all.into_iter().map(claim).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn nobody_is_promoted_beyond_the_limit_and_nobody_is_left_who_fits(
        claims in claims(), at in 0..12_usize, cancel in any::<bool>()
    ) {
        let newcomer = (at < claims.len()).then_some(Newcomer { at, cancel_in_progress: cancel });
        let decision = arbitrate(&claims, newcomer);
        let mut active = claims.iter().filter(|claim| claim.active && !claim.dead).count();
        for at in &decision.promoted {
            let claim = &claims[*at];
            prop_assert!(!claim.active && !claim.dead && !claim.superseded);
            prop_assert!(active < claim.max as usize);
            active += 1;
        }
        prop_assert!(decision.promoted.is_sorted(), "first come, first served");
        let stops = |at: usize| claims[at].superseded || decision.superseded.contains(&at);
        let head = (0..claims.len()).find(|at| {
            !claims[*at].active && !claims[*at].dead && !stops(*at) && !decision.promoted.contains(at)
        });
        if let Some(head) = head {
            prop_assert!(active >= claims[head].max as usize, "the head waits only for room");
        }
        for at in &decision.superseded {
            let newcomer = newcomer.expect("somebody came");
            prop_assert!(newcomer.cancel_in_progress && *at < newcomer.at);
            prop_assert!(claims[*at].run != claims[newcomer.at].run && !claims[*at].dead);
            prop_assert!(!decision.promoted.contains(at) && !decision.ended.contains(at));
        }
    }

    #[test]
    fn whatever_comes_and_goes_the_group_stays_within_its_limit_and_empties(
        steps in proptest::collection::vec((any::<bool>(), any::<bool>(), 0..8_usize), 1..60), max in 1..3_u32
    ) {
        let mut group: Vec<Claim> = Vec::new();
        let mut next = 0;
        let settle = |group: &mut Vec<Claim>, newcomer: Option<Newcomer>| {
            let decision = arbitrate(group, newcomer);
            decision.superseded.iter().for_each(|at| group[*at].superseded = true);
            decision.promoted.iter().for_each(|at| group[*at].active = true);
            // What waits and is superseded is cancelled at once.
            group.retain(|claim| !claim.dead && (claim.active || !claim.superseded));
        };
        for (arrives, cancel, which) in steps {
            if arrives {
                next += 1;
                group.push(Claim { max, ..waiting(next) });
                let at = group.len() - 1;
                settle(&mut group, Some(Newcomer { at, cancel_in_progress: cancel }));
            } else if let Some(claim) = group.get_mut(which) {
                claim.dead = true;
                settle(&mut group, None);
            }
            prop_assert!(group.iter().filter(|claim| claim.active).count() <= max as usize);
        }
        while let Some(holder) = group.iter_mut().find(|claim| claim.active) {
            holder.dead = true;
            settle(&mut group, None);
        }
        prop_assert!(group.is_empty(), "nobody waits for ever: {group:?}");
    }
}
