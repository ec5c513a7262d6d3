//! Schedules.

use std::time::Duration;

use kici_engine::time::{Clock as _, Ts};
use kici_events::{ScheduleError, Schedules};
use kici_store::model::{EventFilter, Page};
use kici_store::testing::TestStore;
use serde_json::json;

use crate::world::{World, call, private_key, push};

/// The test clock starts at 2027-01-15T08:00:00Z.
const NIGHTLY: &str = "
name: nightly
on:
  schedule: { cron: \"*/5 * * * *\", inputs: { env: production } }
  manual: { inputs: { env: { type: enum, values: [staging, production], default: staging }, n: { type: integer, default: 2 } } }
jobs: { a: { runs_on: default, run: 'true' } }
";

async fn world(test: TestStore, text: &str) -> World {
    let world = World::new(test).await;
    world.github_source(private_key()).await;
    world.repository(&[(".kici/workflows/n.yaml", text)]);
    world.register("gh", "acme/app").await;
    world
}

fn schedules(world: &World) -> Schedules {
    Schedules::new(world.test.store.clone(), world.test.clock.clone())
}

async fn payloads(world: &World) -> Vec<serde_json::Value> {
    let page = Page { limit: 100, after: None };
    let listed = world.test.store.event_list(EventFilter::default(), page).await.unwrap();
    listed.items.into_iter().rev().map(|event| event.payload).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_fires_at_its_times_from_when_it_is_known_and_starts_its_workflow_with_its_inputs() {
    TestStore::each(|test| async move {
        let world = world(test, NIGHTLY).await;
        let schedules = schedules(&world);
        world.test.clock.advance(Duration::from_secs(3600));
        assert_eq!(schedules.run().await.unwrap(), 0, "known from now on");
        assert_eq!(schedules.run().await.unwrap(), 0);
        world.test.clock.advance(Duration::from_secs(299));
        assert_eq!(schedules.run().await.unwrap(), 0);
        world.test.clock.advance(Duration::from_secs(1));
        assert_eq!(schedules.run().await.unwrap(), 1);
        assert_eq!(schedules.run().await.unwrap(), 0);
        let due = world.test.clock.now();
        let told = json!({"cron": "*/5 * * * *", "timezone": "UTC", "due_at": due, "missed_count": 0});
        assert_eq!(payloads(&world).await, [told]);
        world.deliver(&world.event_worker()).await;
        let runs = world.runs().await;
        assert_eq!(runs.len(), 1);
        assert_eq!((runs[0].trigger_kind.as_str(), runs[0].repo.as_str()), ("schedule", "acme/app"));
        assert_eq!(serde_json::to_value(&runs[0].inputs).unwrap(), json!({"env": "production", "n": 2}));

        // A push with an unrelated change neither fires it again nor forgets where it was.
        let more = [
            (".kici/workflows/n.yaml", NIGHTLY),
            (".kici/workflows/x.yaml", "on: push\njobs: {a: {runs_on: l, run: x}}"),
        ];
        world.repository(&more);
        world.register("gh", "acme/app").await;
        assert_eq!(schedules.run().await.unwrap(), 0);
        world.test.clock.advance(Duration::from_secs(300));
        assert_eq!(schedules.run().await.unwrap(), 1);
        let listed = schedules.list().await.unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].last_fired_at, Some(world.test.clock.now()));
        assert_eq!(listed[0].next_at, Some(world.test.clock.now().plus(Duration::from_secs(300))));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_missed_is_one_firing_and_what_is_older_than_catchup_none() {
    TestStore::each(|test| async move {
        let text = NIGHTLY.replace("inputs: { env: production } }", "catchup: 4h }");
        let world = world(test, &text).await;
        let schedules = schedules(&world);
        schedules.run().await.unwrap();
        world.test.clock.advance(Duration::from_secs(3 * 3600 + 60));
        assert_eq!(schedules.run().await.unwrap(), 1);
        let told = payloads(&world).await;
        assert_eq!(told[0]["missed_count"], 35);
        let nightly = text.replace("*/5 * * * *", "0 9 * * *");
        world.repository(&[(".kici/workflows/n.yaml", &nightly)]);
        world.register("gh", "acme/app").await;
        schedules.run().await.unwrap();
        // Until 15:01 on the day after: 9:00 is 6 hours ago.
        world.test.clock.advance(Duration::from_secs(28 * 3600));
        assert_eq!(schedules.run().await.unwrap(), 0);
        assert_eq!(payloads(&world).await.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_instances_that_look_at_once_and_one_that_comes_back_fire_each_time_once() {
    TestStore::each(|test| async move {
        let world = world(test, NIGHTLY).await;
        let other = if world.test.store.backend() == "postgres" {
            world.test.sibling("node-2").await
        } else {
            world.test.store.clone()
        };
        let first = schedules(&world);
        let second = Schedules::new(other, world.test.clock.clone());
        first.run().await.unwrap();
        for round in 0..20 {
            world.test.clock.advance(Duration::from_secs(300));
            let (a, b) = tokio::join!(first.run(), second.run());
            assert_eq!(a.unwrap() + b.unwrap(), 1, "round {round}");
        }
        // A process that dies right behind the commit does not know that it fired; the next one does not fire again.
        world.test.clock.advance(Duration::from_secs(300));
        world.test.store.death().behind(1);
        assert!(first.run().await.is_err());
        world.test.store.death().over();
        assert_eq!(first.run().await.unwrap(), 0);
        let due: Vec<Ts> =
            payloads(&world).await.iter().map(|told| serde_json::from_value(told["due_at"].clone()).unwrap()).collect();
        assert_eq!(due.len(), 21);
        assert!(due.windows(2).all(|pair| pair[1].since(pair[0]) == Duration::from_secs(300)), "{due:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disabled_registration_is_passed_over_and_several_schedules_keep_their_own_times() {
    TestStore::each(|test| async move {
        let text = NIGHTLY.replace(
            "schedule: { cron: \"*/5 * * * *\", inputs: { env: production } }",
            "schedule: [{ cron: \"0 * * * *\" }, { cron: \"30 * * * *\", timezone: Asia/Kolkata, jitter: 1m }]",
        );
        let world = world(test, &text).await;
        let schedules = schedules(&world);
        schedules.run().await.unwrap();
        let id = schedules.list().await.unwrap()[0].registration.id;
        // Kolkata is half an hour off: both are due on the hour, the second a little later.
        world.test.clock.advance(Duration::from_secs(3600 + 60));
        assert_eq!(schedules.run().await.unwrap(), 2);
        world.test.store.registration_enable(id, false, "user:alice".to_owned()).await.unwrap();
        world.test.clock.advance(Duration::from_secs(3600));
        assert_eq!(schedules.run().await.unwrap(), 0);
        assert!(schedules.list().await.unwrap().iter().all(|one| one.next_at.is_none()));
        world.test.store.registration_enable(id, true, "user:alice".to_owned()).await.unwrap();
        assert_eq!(schedules.run().await.unwrap(), 0, "what passed while it was disabled is gone");

        let fire = async |cron, key: &str| schedules.fire(id, cron, "user:alice", key.to_owned()).await;
        assert!(matches!(fire(None, "k").await, Err(ScheduleError::Several(..))));
        assert!(matches!(fire(Some("1 1 * * *"), "k").await, Err(ScheduleError::None(_))));
        let event = fire(Some("0 * * * *"), "k").await.unwrap();
        assert_eq!(fire(Some("0 * * * *"), "k").await.unwrap(), event, "the same request");
        world.deliver(&world.event_worker()).await;
        assert_eq!(world.test.store.event_get(event).await.unwrap().unwrap().run_ids.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_arrives_late_does_not_bring_back_the_workflows_of_its_commit() {
    TestStore::each(|test| async move {
        let mut world = world(test, NIGHTLY).await;
        let before = world.register("gh", "acme/app").await;
        let newer = world.repository(&[(".kici/workflows/n.yaml", &NIGHTLY.replace("*/5", "*/7"))]);
        let after = world.register("gh", "acme/app").await;
        assert_ne!(before[0].lock_digest, after[0].lock_digest);
        assert_eq!(before[0].id, after[0].id);
        world.inbox.accept(call("push", "late", &push())).await.unwrap();
        let (delivery, _) = world.settle().await;
        assert!(delivery.note.as_deref().unwrap().contains("newer commit"), "{delivery:?}");
        let now = world.test.store.registration_list("default".to_owned(), None, None).await.unwrap();
        assert_eq!((now[0].sha.as_str(), &now[0].lock_digest), (newer.as_str(), &after[0].lock_digest));
        let mut next = push();
        next["after"] = json!(newer);
        world.inbox.accept(call("push", "next", &next)).await.unwrap();
        assert_eq!(world.settle().await.0.note, None);
    })
    .await;
}
