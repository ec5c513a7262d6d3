//! What is stored, and what is not.

use std::sync::Arc;
use std::time::Duration;

use kici_events::{Refusal, RunsCreated};
use kici_forge::Headers;
use kici_forge::testing::Fault;
use kici_store::model::{Activate, DeliveryFilter, DeliveryOutcome, DeliveryStatus, Page, Processed};
use kici_store::testing::{TestStore, instance};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::world::{Created, OVERFLOW_ROWS, World, activate, call, private_key, push, work};

/// Age at which a claim is void.
const CLAIM: Duration = Duration::from_secs(900);

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_1_the_same_delivery_posted_50_times_at_once_is_one_row_and_one_run() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", "on: push\njobs: { a: { runs_on: default, run: x } }\n")]);
        let (other, mut others_work) = world.second_inbox().await;
        let calls = (0..50).map(|n| {
            let inbox = Arc::clone(if n % 2 == 0 { &world.inbox } else { &other });
            async move { inbox.accept(call("push", "same", &push())).await.unwrap() }
        });
        let answers = futures::future::join_all(calls).await;
        assert_eq!(answers.iter().filter(|accepted| accepted.duplicate).count(), 49);
        assert!(answers.iter().all(|accepted| accepted.id == answers[0].id));
        let (work, source) = tokio::select! {
            mine = world.work.recv() => mine.unwrap(),
            others = others_work.recv() => others.unwrap(),
        };
        let done = world.planner.process(&work, &source).await.unwrap();
        let processed = world.test.store.delivery_process(done, activate()).await.unwrap();
        assert_eq!((processed.runs.len(), world.runs().await.len()), (1, 1));
        assert!(world.work.try_recv().is_err() && others_work.try_recv().is_err());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processing_a_delivery_twice_makes_one_run() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", "on: push\njobs: { a: { runs_on: default, run: x } }\n")]);
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let (work, source) = world.work.recv().await.unwrap();
        // As after a crash between deciding and writing: both attempts decide, each with run ids of its own.
        let one = world.planner.process(&work, &source).await.unwrap();
        let two = world.planner.process(&work, &source).await.unwrap();
        let first = world.test.store.delivery_process(one, activate()).await.unwrap();
        let second = world.test.store.delivery_process(two, activate()).await.unwrap();
        assert!(first.applied && first.runs[0].created);
        assert!(!second.applied || !second.runs[0].created);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_signature_stores_nothing_and_does_not_use_up_the_id() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        let good = call("push", "d1", &push());
        let mut bad = good.clone();
        bad.headers = Headers::from_iter([
            ("x-github-event", "push".to_owned()),
            ("x-github-delivery", "d1".to_owned()),
            ("x-hub-signature-256", format!("sha256={}", "0".repeat(64))),
        ]);
        assert!(matches!(world.inbox.accept(bad).await, Err(Refusal::BadSignature)));
        let listed = world.test.store.delivery_list(DeliveryFilter::default(), Page::default()).await.unwrap();
        assert!(listed.items.is_empty());
        assert!(!world.inbox.accept(good).await.unwrap().duplicate);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_of_a_failed_delivery_is_taken_again() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        let first = world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let failed = DeliveryOutcome { status: DeliveryStatus::Failed, error: Some("x".to_owned()), note: None };
        assert!(world.test.store.delivery_finish(first.id, failed).await.unwrap());
        let again = world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        assert_eq!((again.id, again.duplicate), (first.id, false));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_finds_no_turn_is_kept_up_to_the_budget_and_only_after_verification() {
    TestStore::each(|test| async move {
        let world = World::with_turns(test, 0).await;
        world.github_source(private_key()).await;
        let mut forged = call("push", "forged", &push());
        forged.headers = Headers::from_iter([("x-github-event", "push".to_owned())]);
        assert!(matches!(world.inbox.accept(forged).await, Err(Refusal::BadSignature)));
        for n in 0..OVERFLOW_ROWS {
            let kept = world.inbox.accept(call("push", &n.to_string(), &push())).await;
            assert!(matches!(kept, Err(Refusal::Busy { stored: true })), "{kept:?}");
        }
        let again = world.inbox.accept(call("push", "0", &push())).await;
        assert!(matches!(again, Err(Refusal::Busy { stored: true })), "kept already: {again:?}");
        let over = world.inbox.accept(call("push", "over", &push())).await;
        assert!(matches!(over, Err(Refusal::Busy { stored: false })), "{over:?}");
        let counts = world.test.store.delivery_counts().await.unwrap();
        assert_eq!(counts, [(DeliveryStatus::Shed, u64::from(OVERFLOW_ROWS))].into());
    })
    .await;
}

/// Acceptance 22: a burst gets 202, or 429 with the delivery kept, and all that was taken or kept is processed.
#[tokio::test(flavor = "multi_thread")]
async fn a_burst_over_the_limits_loses_nothing_that_was_kept() {
    TestStore::each(|test| async move {
        let world = World::with_turns(test, 2).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", "on: push\njobs: { a: { runs_on: default, run: x } }\n")]);
        let calls = (0..40).map(|n| {
            let inbox = Arc::clone(&world.inbox);
            async move { inbox.accept(call("push", &format!("burst-{n}"), &push())).await }
        });
        let mut kept = 0;
        for answer in futures::future::join_all(calls).await {
            match answer {
                Ok(_) | Err(Refusal::Busy { stored: true }) => kept += 1,
                Err(Refusal::Busy { stored: false }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        assert!(kept > 0);
        let (stop, tasks, store) = (CancellationToken::new(), TaskTracker::new(), world.test.store.clone());
        let mut created = work(world, &stop, &tasks);
        for _ in 0..kept {
            created.recv().await.unwrap();
        }
        stop.cancel();
        tasks.close();
        tasks.wait().await;
        let counts = store.delivery_counts().await.unwrap();
        assert_eq!(counts, [(DeliveryStatus::Processed, kept)].into());
    })
    .await;
}

/// R6: an attempt that fails is repeated later, after the fifth the delivery is dead, and a person can give it a new life.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_cannot_be_processed_is_tried_five_times_and_dies() {
    for (faults, dies) in [(4, false), (5, true)] {
        TestStore::each(|test| async move {
            let mut world = World::new(test).await;
            world.github_source(private_key()).await;
            world.repository(&[(".kici/workflows/a.yaml", "on: push\njobs: { a: { runs_on: default, run: x } }\n")]);
            let id = world.inbox.accept(call("push", "d1", &push())).await.unwrap().id;
            // As when the process that took it in has died.
            drop(world.work.recv().await.unwrap());
            let store = world.test.store.clone();
            store.delivery_claims_release(vec![instance("node-1")]).await.unwrap();
            let (told, mut processed) = tokio::sync::mpsc::unbounded_channel();
            let (worker, stop) = (world.worker(told), CancellationToken::new());
            for attempt in 1..=5 {
                if attempt <= faults {
                    // Longer than anybody waits within one attempt.
                    let headers = vec![("retry-after", "600".to_owned())];
                    let fault = Fault { call: "/repos/acme/app/".to_owned(), status: 429, headers };
                    world.github.state().faults.push_back(fault);
                }
                let mut due = store.delivery_claim(10, CLAIM, 5).await.unwrap();
                assert_eq!(due.len(), 1, "attempt {attempt} of {faults}");
                worker.attempt(due.remove(0), &stop).await;
                assert!(store.delivery_claim(10, CLAIM, 5).await.unwrap().is_empty(), "the next one is not due yet");
                world.test.clock.advance(Duration::from_secs(301));
            }
            if dies {
                let dead = store.delivery_get(id).await.unwrap().unwrap();
                assert_eq!(
                    (dead.status, dead.note.as_deref()),
                    (DeliveryStatus::Dead, Some("gave up after 5 attempts"))
                );
                assert!(dead.error.is_some() && processed.try_recv().is_err());
                assert!(store.delivery_claim(10, CLAIM, 5).await.unwrap().is_empty(), "dead is dead");
                assert!(store.delivery_bodies_finished(5).await.unwrap().is_empty(), "a retry needs the body");
                assert!(store.delivery_reopen(id).await.unwrap());
                assert!(!store.delivery_reopen(id).await.unwrap(), "it is not dead any more");
                worker.attempt(store.delivery_claim(10, CLAIM, 5).await.unwrap().remove(0), &stop).await;
            }
            processed.try_recv().expect("processed");
            let done = store.delivery_get(id).await.unwrap().unwrap();
            assert_eq!((done.status, world.runs().await.len()), (DeliveryStatus::Processed, 1));
            assert!(!store.delivery_discard(id, "x".to_owned()).await.unwrap(), "it is not dead");
        })
        .await;
    }
}

/// Has a defect: the decisions on jobs panic.
struct Defect;

impl RunsCreated for Defect {
    fn activate(&self) -> Arc<dyn Activate> {
        panic!("a defect")
    }

    fn created(&self, _: &Processed, _: &str) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_while_a_delivery_is_processed_is_a_failed_attempt() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", "on: push\njobs: { a: { runs_on: default, run: x } }\n")]);
        let id = world.inbox.accept(call("push", "d1", &push())).await.unwrap().id;
        let (store, stop) = (world.test.store.clone(), CancellationToken::new());
        store.delivery_claims_release(vec![instance("node-1")]).await.unwrap();
        let taken = store.delivery_claim(10, CLAIM, 5).await.unwrap().remove(0);
        world.worker_with(Arc::new(Defect)).attempt(taken, &stop).await;
        let failed = store.delivery_get(id).await.unwrap().unwrap();
        assert_eq!((failed.status, failed.attempts), (DeliveryStatus::Received, 1));
        assert!(failed.claimed_by.is_none() && failed.error.unwrap().contains("panicked"));
        world.test.clock.advance(Duration::from_secs(301));
        let taken = store.delivery_claim(10, CLAIM, 5).await.unwrap().remove(0);
        world.worker_with(Arc::new(Created(activate()))).attempt(taken, &stop).await;
        assert_eq!(store.delivery_get(id).await.unwrap().unwrap().status, DeliveryStatus::Processed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_that_processes_did_not_survive_are_processed_one_after_the_other() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", "on: push\njobs: { a: { runs_on: default, run: x } }\n")]);
        for n in 0..3 {
            world.inbox.accept(call("push", &n.to_string(), &push())).await.unwrap();
            drop(world.work.recv().await.unwrap());
        }
        let store = world.test.store.clone();
        for claims in 2..=3 {
            store.delivery_claims_release(vec![instance("node-1")]).await.unwrap();
            let taken = store.delivery_claim(10, CLAIM, 5).await.unwrap();
            assert_eq!(taken[0].claims, claims);
            assert_eq!(taken.len(), if claims == 2 { 3 } else { 1 });
        }
        store.delivery_claims_release(vec![instance("node-1")]).await.unwrap();
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let mut created = work(world, &stop, &tasks);
        for _ in 0..3 {
            created.recv().await.unwrap();
        }
        stop.cancel();
        tasks.close();
        tasks.wait().await;
        assert_eq!(store.delivery_counts().await.unwrap(), [(DeliveryStatus::Processed, 3)].into());
    })
    .await;
}
