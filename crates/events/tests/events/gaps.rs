//! R8: deliveries that GitHub could not bring to us.

use std::time::Duration;

use kici_engine::time::{Clock as _, Ts};
use kici_events::{GapRepair, Repaired};
use kici_forge::testing::{FakeDelivery, Fault};
use kici_store::testing::TestStore;

use crate::world::{World, call, private_key, push};

const MINUTE: Duration = Duration::from_secs(60);

fn repair(world: &World) -> GapRepair {
    GapRepair::new(world.test.store.clone(), world.sources.clone(), world.test.clock.clone())
}

async fn world(test: TestStore) -> World {
    let world = World::new(test).await;
    world.github_source(private_key()).await;
    world
}

fn failed(id: u64, guid: &str, at: Ts) -> FakeDelivery {
    FakeDelivery { id, guid: guid.to_owned(), at, status: 502 }
}

/// The attempts that were asked for since the last call, in order.
fn asked(world: &World) -> Vec<u64> {
    let mut state = world.github.state();
    let calls = std::mem::take(&mut state.calls);
    let number = |call: &String| call.strip_prefix("POST /app/hook/deliveries/")?.split('/').next()?.parse().ok();
    calls.iter().filter_map(number).collect()
}

/// What a look comes to that no fault disturbs.
fn fine(asked: usize) -> Repaired {
    Repaired { asked, problems: Vec::new() }
}

/// An answer that is not tried again within one look.
fn fault(call: &str) -> Fault {
    Fault { call: call.to_owned(), status: 429, headers: vec![("retry-after", "600".to_owned())] }
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_that_did_not_arrive_are_asked_for_again_and_not_while_they_may_be_on_their_way() {
    TestStore::each(|test| async move {
        let world = world(test).await;
        world.inbox.accept(call("push", "arrived", &push())).await.unwrap();
        let at = world.test.clock.now();
        world.github.state().deliveries = vec![failed(2, "lost", at), failed(1, "arrived", at)];
        let repair = repair(&world);
        assert_eq!(repair.run().await.unwrap(), fine(1));
        assert_eq!(asked(&world), [2]);
        assert_eq!(repair.run().await.unwrap(), fine(0), "it was asked for a moment ago");
        // It fails again: after a minute it is asked for by its newest attempt, and then after two more.
        world.test.clock.advance(MINUTE);
        let again = failed(3, "lost", world.test.clock.now());
        world.github.state().deliveries.insert(0, again);
        assert_eq!(repair.run().await.unwrap(), fine(1));
        assert_eq!(asked(&world), [3]);
        world.test.clock.advance(MINUTE);
        assert_eq!(repair.run().await.unwrap(), fine(0));
        world.test.clock.advance(MINUTE);
        assert_eq!(repair.run().await.unwrap(), fine(1));
        world.inbox.accept(call("push", "lost", &push())).await.unwrap();
        world.test.clock.advance(60 * MINUTE);
        assert_eq!(repair.run().await.unwrap(), fine(0), "it is here");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_long_outage_every_lost_delivery_is_asked_for_however_many_there_are() {
    TestStore::each(|test| async move {
        let world = world(test).await;
        let now = world.test.clock.now();
        let at = |n: u64| now.minus(Duration::from_secs(3000 - n));
        // Three pages of them; the newest comes first.
        world.github.state().deliveries = (1..=250).rev().map(|n| failed(n, &format!("lost-{n}"), at(n))).collect();
        let repair = repair(&world);
        let mut all = Vec::new();
        for expected in [100, 100, 50, 0] {
            assert_eq!(repair.run().await.unwrap(), fine(expected));
            let some = asked(&world);
            for n in &some {
                // They arrive.
                world.inbox.accept(call("push", &format!("lost-{n}"), &push())).await.unwrap();
            }
            all.extend(some);
            world.test.clock.advance(MINUTE);
        }
        assert_eq!(all, (1..=250).collect::<Vec<_>>(), "oldest first, each once");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forge_that_fails_half_way_is_asked_the_rest_at_the_next_look() {
    TestStore::each(|test| async move {
        let world = world(test).await;
        let now = world.test.clock.now();
        let at = |n: u64| now.minus(Duration::from_secs(3000 - n));
        world.github.state().deliveries = (1..=150).rev().map(|n| failed(n, &format!("lost-{n}"), at(n))).collect();
        let repair = repair(&world);
        // The second page is not to be had: what the first one said alone proves nothing.
        world.github.state().faults.push_back(fault("page=2"));
        let look = repair.run().await.unwrap();
        assert_eq!((look.asked, look.problems.len()), (0, 1), "{look:?}");
        assert!(look.problems[0].contains("source gh: the forge's log of deliveries cannot be read"), "{look:?}");
        assert!(asked(&world).is_empty());
        // A redelivery is refused in the middle.
        world.github.state().faults.push_back(fault("/deliveries/41/attempts"));
        let look = repair.run().await.unwrap();
        assert_eq!((look.asked, look.problems.len()), (40, 1), "{look:?}");
        assert!(look.problems[0].contains("lost-41"), "{look:?}");
        assert_eq!(asked(&world), (1..=41).collect::<Vec<_>>());
        // Long after, so that a look that began where the last one ended would not see them any more.
        world.test.clock.advance(10 * MINUTE);
        for n in 1..=40 {
            world.inbox.accept(call("push", &format!("lost-{n}"), &push())).await.unwrap();
        }
        assert_eq!(repair.run().await.unwrap(), fine(100));
        assert_eq!(asked(&world), (41..=140).collect::<Vec<_>>());
        assert_eq!(repair.run().await.unwrap(), fine(10));
        assert_eq!(asked(&world), (141..=150).collect::<Vec<_>>());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_goes_on_where_something_is_still_lost() {
    TestStore::each(|test| async move {
        let world = world(test).await;
        let at = world.test.clock.now();
        world.github.state().deliveries = vec![failed(1, "lost", at)];
        assert_eq!(repair(&world).run().await.unwrap(), fine(1));
        world.test.clock.advance(30 * MINUTE);
        assert_eq!(repair(&world).run().await.unwrap(), fine(1), "it did not arrive meanwhile");
        world.inbox.accept(call("push", "lost", &push())).await.unwrap();
        world.test.clock.advance(30 * MINUTE);
        assert_eq!(repair(&world).run().await.unwrap(), fine(0));
        // The log up to here needs no second look.
        asked(&world);
        world.test.clock.advance(30 * MINUTE);
        world.github.state().deliveries.push(failed(9, "before all looks", at));
        assert_eq!(repair(&world).run().await.unwrap(), fine(0));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_had_again_is_given_up() {
    TestStore::each(|test| async move {
        let world = world(test).await;
        let at = world.test.clock.now();
        world.github.state().deliveries = vec![failed(2, "old", at), failed(1, "unknown", at)];
        world.github.state().faults.push_back(Fault {
            call: "/deliveries/1/attempts".to_owned(),
            status: 404,
            headers: Vec::new(),
        });
        let repair = repair(&world);
        assert_eq!(repair.run().await.unwrap(), fine(1));
        assert_eq!(repair.run().await.unwrap(), fine(0), "it is still in the log");
        let mut asks = 0;
        for _ in 0..100 {
            world.test.clock.advance(60 * MINUTE);
            asks += repair.run().await.unwrap().asked;
        }
        let of_the_other = asked(&world).iter().filter(|id| **id == 1).count();
        assert_eq!(of_the_other, 1, "the forge does not have it");
        assert!((10..30).contains(&asks), "for three days, ever more rarely: {asks}");
        assert_eq!(repair.run().await.unwrap(), fine(0));
    })
    .await;
}
