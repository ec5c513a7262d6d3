//! Schedules.

use std::time::Duration;

use kici_engine::time::{Clock as _, Ts};
use kici_events::{ScheduleError, Schedules};
use kici_forge::testing::Fault;
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

/// How often a look is to be expected.
const TICK: Duration = Duration::from_secs(30);

async fn world(test: TestStore, text: &str) -> World {
    let world = World::new(test).await;
    world.github_source(private_key()).await;
    world.repository(&[(".kici/workflows/n.yaml", text)]);
    world.register("gh", "acme/app").await;
    world
}

fn schedules(world: &World) -> Schedules {
    Schedules::new(world.test.store.clone(), world.test.clock.clone(), TICK)
}

async fn payloads(world: &World) -> Vec<serde_json::Value> {
    let page = Page { limit: 100, after: None };
    let listed = world.test.store.event_list(EventFilter::default(), page).await.unwrap();
    let mut payloads = Vec::new();
    for event in listed.items.into_iter().rev() {
        assert!(event.payload.is_null(), "lists have no documents");
        payloads.push(world.test.store.event_get(event.id).await.unwrap().unwrap().payload);
    }
    payloads
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
        let second = Schedules::new(other, world.test.clock.clone(), TICK);
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
        let fired = schedules.fire(id, Some("0 * * * *"), "user:alice", None).await;
        assert!(matches!(fired, Err(ScheduleError::Disabled(_))));
        world.test.store.registration_enable(id, true, "user:alice".to_owned()).await.unwrap();
        assert_eq!(schedules.run().await.unwrap(), 0, "what passed while it was disabled is gone");

        let fire = async |cron, key: &str| schedules.fire(id, cron, "user:alice", Some(key.to_owned())).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_that_was_taken_out_and_comes_back_counts_from_then_on() {
    TestStore::each(|test| async move {
        let world = world(test, NIGHTLY).await;
        let schedules = schedules(&world);
        schedules.run().await.unwrap();
        world.test.clock.advance(Duration::from_secs(300));
        assert_eq!(schedules.run().await.unwrap(), 1);
        let other = NIGHTLY.replace("*/5 * * * *", "0 0 1 1 *");
        for (text, days) in [(other.as_str(), 7), (NIGHTLY, 0)] {
            world.repository(&[(".kici/workflows/n.yaml", text)]);
            world.register("gh", "acme/app").await;
            assert_eq!(world.test.store.schedule_states().await.unwrap().len(), 0, "{text}");
            assert_eq!(schedules.run().await.unwrap(), 0, "{text}");
            world.test.clock.advance(Duration::from_secs(days * 24 * 3600));
        }
        assert_eq!(schedules.run().await.unwrap(), 0, "what passed meanwhile is not its own");
        world.test.clock.advance(Duration::from_secs(300));
        assert_eq!(schedules.run().await.unwrap(), 1);
        assert_eq!(payloads(&world).await[1]["missed_count"], 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_came_between_two_looks_fires_however_short_catchup_is() {
    TestStore::each(|test| async move {
        let text = NIGHTLY.replace("inputs: { env: production } }", "catchup: 1s }");
        let world = world(test, &text).await;
        let schedules = schedules(&world);
        schedules.run().await.unwrap();
        world.test.clock.advance(Duration::from_secs(300 + 25));
        assert_eq!(schedules.run().await.unwrap(), 1);
        world.test.clock.advance(Duration::from_secs(600 + 80));
        assert_eq!(schedules.run().await.unwrap(), 0, "that was missed");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn registrations_that_changed_since_a_push_was_judged_are_not_written_over() {
    TestStore::each(|test| async move {
        let mut world = world(test, NIGHTLY).await;
        // The judged push is the head and not what is registered; before it is written a newer one is.
        let sha = world.repository(&[(".kici/workflows/n.yaml", &NIGHTLY.replace("*/5", "*/6"))]);
        let mut older = push();
        older["after"] = json!(sha);
        world.inbox.accept(call("push", "older", &older)).await.unwrap();
        let (work, source) = world.work.recv().await.unwrap();
        let done = world.planner.process(&work, &source).await.unwrap();
        let newer = world.repository(&[(".kici/workflows/n.yaml", &NIGHTLY.replace("*/5", "*/7"))]);
        world.register("gh", "acme/app").await;
        assert!(world.test.store.delivery_process(done, crate::world::activate()).await.is_err());
        let now = || world.test.store.registration_list("default".to_owned(), None, None);
        assert_eq!(now().await.unwrap()[0].sha, newer);
        let again = world.planner.process(&work, &source).await.unwrap();
        world.test.store.delivery_process(again, crate::world::activate()).await.unwrap();
        assert_eq!(now().await.unwrap()[0].sha, newer);
        // A forge that does not answer is asked again later.
        let down = Fault {
            call: "/git/ref/heads/main".to_owned(),
            status: 429,
            headers: vec![("retry-after", "600".to_owned())],
        };
        world.github.state().faults.push_back(down);
        assert!(world.planner.process(&work, &source).await.is_err());
    })
    .await;
}
