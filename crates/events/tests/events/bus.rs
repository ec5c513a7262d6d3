//! Events of the internal bus.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kici_engine::ids::EventId;
use kici_engine::time::Clock as _;
use kici_events::{Bus, Emit, EmitError};
use kici_forge::testing::Fault;
use kici_store::model::{
    Activate, Activation, BusEvent, CancelRequest, EventLimits, EventOrigin, EventStatus, NewTrust, ReadyJob,
};
use kici_store::testing::TestStore;
use serde_json::{Value as Json, json};

use crate::world::{Created, SHA, World, activate, call, private_key, push};

const LIMITS: EventLimits = EventLimits { max_depth: 10, per_minute: Some(5) };

fn emit(name: &str, payload: Json, from: Option<(&str, &str)>) -> Emit {
    Emit {
        origin: EventOrigin::Outside {
            org: "default".to_owned(),
            routing_key: from.map(|(key, _)| key.to_owned()),
            repo: from.map(|(_, repo)| repo.to_owned()),
            by: "user:alice".to_owned(),
        },
        name: name.to_owned(),
        payload,
        target_repos: Vec::new(),
        key: None,
        request_id: "r1".to_owned(),
    }
}

fn workflow(name: &str, on: &str) -> String {
    format!(
        "name: {name}\non: {on}\njobs: {{ a: {{ runs_on: default, run: 'true', env: {{ R: \"${{{{ repo }}}}\" }} }} }}\n"
    )
}

async fn event(world: &World, id: EventId) -> BusEvent {
    world.test.store.event_get(id).await.unwrap().unwrap()
}

async fn emitted(world: &World, one: Emit) -> EventId {
    Bus::new(world.test.store.clone(), LIMITS).emit(one).await.unwrap().0
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_starts_those_who_listen_for_its_name_its_document_and_its_source() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[
            (".kici/workflows/a.yaml", &workflow("a", "{ event: { name: rescan, match: { \"$.scope\": [all, x] } } }")),
            (".kici/workflows/b.yaml", &workflow("b", "{ event: { name: rescan, not: { \"$.scope\": all } } }")),
            (".kici/workflows/c.yaml", &workflow("c", "{ event: { name: other } }")),
            (".kici/workflows/d.yaml", &workflow("d", "{ event: { name: rescan, source: \"acme/*\" } }")),
            (".kici/workflows/e.yaml", &workflow("e", "{ event: { name: rescan, source: \"evil/*\" } }")),
        ]);
        world.register("gh", "acme/app").await;
        let from = Some(("github:7", "acme/lib"));
        let id = emitted(&world, emit("rescan", json!({"scope": "all"}), from)).await;
        assert_eq!(world.deliver(&world.event_worker()).await, 1);
        let found = event(&world, id).await;
        assert_eq!((found.status, found.matched_count), (EventStatus::Processed, 2), "{found:?}");
        let runs = world.runs().await;
        let names: Vec<&str> = runs.iter().map(|run| run.workflow_name.as_str()).collect();
        assert_eq!(names, ["a", "d"]);
        assert_eq!(found.run_ids, runs.iter().map(|run| run.id).collect::<Vec<_>>());
        let run = &runs[0];
        assert_eq!((run.repo.as_str(), run.sha.as_str(), run.trigger_kind.as_str()), ("acme/app", SHA, "kici_event"));
        assert_eq!((run.chain_depth, run.event.repo.as_deref()), (1, Some("acme/lib")));
        assert_eq!((run.event.routing_key.as_str(), run.event.sha.as_deref()), ("github:7", Some(SHA)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_sizes_rates_and_keys_are_judged_before_anything_is_stored() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        let bus = Bus::new(world.test.store.clone(), LIMITS);
        let refused = async |one: Emit| bus.emit(one).await.unwrap_err();
        for name in ["__schedule_fire", "kici.scaler.scale-up", "Bad Name"] {
            assert!(matches!(refused(emit(name, json!({}), None)).await, EmitError::Name(_)), "{name}");
        }
        let large = json!({"x": "x".repeat(256 * 1024)});
        assert!(matches!(refused(emit("a", large, None)).await, EmitError::TooLarge(_)));
        let odd = Emit { target_repos: vec!["/(/".to_owned()], ..emit("a", json!({}), None) };
        assert!(matches!(refused(odd).await, EmitError::Targets(_)));
        // The same key is the same event, and counts once.
        let keyed = Emit { key: Some("k".to_owned()), ..emit("a", json!({}), Some(("s", "o/r"))) };
        let first = bus.emit(keyed.clone()).await.unwrap();
        for _ in 0..10 {
            assert_eq!(bus.emit(keyed.clone()).await.unwrap(), (first.0, true));
        }
        // 5 a minute of one name from one source; others have their own.
        for _ in 0..4 {
            bus.emit(emit("a", json!({}), Some(("s", "o/r")))).await.unwrap();
        }
        world.test.clock.advance(Duration::from_secs(20));
        match refused(emit("a", json!({}), Some(("s", "o/r")))).await {
            EmitError::TooMany { after, most: 5, .. } => assert_eq!(after, Duration::from_secs(40)),
            other => panic!("{other}"),
        }
        bus.emit(emit("b", json!({}), Some(("s", "o/r")))).await.unwrap();
        bus.emit(emit("a", json!({}), Some(("t", "o/r")))).await.unwrap();
        world.test.clock.advance(Duration::from_secs(41));
        bus.emit(emit("a", json!({}), Some(("s", "o/r")))).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_between_repositories_is_read_when_an_event_is_delivered() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        world.app_source("other", 8, private_key()).await;
        for repo in ["acme/app", "acme/far"] {
            world.repository_of(repo, &[(".kici/workflows/w.yaml", &workflow("w", "{ event: { name: ping } }"))]);
        }
        world.register("gh", "acme/app").await;
        world.register("other", "acme/far").await;
        let worker = world.event_worker();
        let from = Some(("github:7", "acme/lib"));
        let trust = NewTrust {
            org: "default".to_owned(),
            source_routing_key: "github:7".to_owned(),
            source_repo: "acme/lib".to_owned(),
            target_routing_key: "github:8".to_owned(),
            target_repo: "acme/far".to_owned(),
            allowed_events: Some(vec!["p*".to_owned(), "!pong".to_owned()]),
            created_by: "user:alice".to_owned(),
        };
        let added = world.test.store.event_trust_add(trust).await.unwrap();
        emitted(&world, emit("ping", json!({}), from)).await;
        world.deliver(&worker).await;
        let repos: Vec<String> = world.runs().await.into_iter().map(|run| run.repo).collect();
        assert_eq!(repos, ["acme/app", "acme/far"]);

        // Taken back between the emission and the delivery: it does not count any more.
        let id = emitted(&world, emit("ping", json!({}), from)).await;
        assert!(world.test.store.event_trust_remove(added.id).await.unwrap());
        world.deliver(&worker).await;
        let found = event(&world, id).await;
        assert_eq!((found.status, found.run_ids.len(), found.attempts), (EventStatus::Processed, 1, 0));
        let note = found.note.unwrap();
        assert!(note.contains("w: untrusted_source: acme/lib may not start workflows of acme/far"), "{note}");

        // An event that a person emits on nobody's behalf reaches all; targets narrow it.
        let before = world.runs().await.len();
        emitted(&world, emit("ping", json!({}), None)).await;
        world.deliver(&worker).await;
        assert_eq!(world.runs().await.len(), before + 2);
        let narrow = Emit { target_repos: vec!["acme/*".into(), "!acme/app".into()], ..emit("ping", json!({}), None) };
        emitted(&world, narrow).await;
        world.deliver(&worker).await;
        let runs = world.runs().await;
        assert_eq!((runs.len(), runs.last().unwrap().repo.as_str()), (before + 3, "acme/far"));
    })
    .await;
}

/// Panics so many times before it does what it should, as a fault of the program would.
struct Explodes(AtomicU32);

impl Activate for Explodes {
    fn activate(&self, ready: &ReadyJob) -> Activation {
        if self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            panic!("a fault on purpose");
        }
        activate().activate(ready)
    }
}

/// Its second job is only judged when the first has ended, and at once if that is skipped.
const JUDGED: &str = "
name: w
on: { event: { name: ping } }
jobs:
  a: { runs_on: default, run: 'true', if: \"branch == 'nowhere'\" }
  b: { runs_on: default, run: 'true', needs: { job: a, when: always } }
";

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_fails_is_tried_again_and_dies_after_five_attempts() {
    for (faults, dies) in [(4, false), (5, true)] {
        TestStore::each(|test| async move {
            let world = World::new(test).await;
            world.github_source(private_key()).await;
            world.repository(&[(".kici/workflows/w.yaml", JUDGED)]);
            world.register("gh", "acme/app").await;
            let worker = world.event_worker_with(Arc::new(Created(Arc::new(Explodes(AtomicU32::new(faults))))));
            let id = emitted(&world, emit("ping", json!({}), None)).await;
            for attempt in 1..=5 {
                assert_eq!(world.deliver(&worker).await, 1, "attempt {attempt} of {faults}");
                assert_eq!(world.deliver(&worker).await, 0, "the next one is not due yet");
                world.test.clock.advance(Duration::from_secs(301));
            }
            assert_eq!(world.deliver(&worker).await, 0);
            let found = event(&world, id).await;
            assert_eq!(found.attempts, faults);
            if dies {
                assert_eq!((found.status, found.dlq_reason.as_deref()), (EventStatus::Dead, Some("exhausted_retries")));
                assert!(found.last_error.is_some());
                assert_eq!(world.runs().await.len(), 0);
                assert!(world.test.store.event_reopen(id).await.unwrap());
                assert_eq!(world.deliver(&worker).await, 1, "retried by a person");
            }
            assert_eq!((event(&world, id).await.status, world.runs().await.len()), (EventStatus::Processed, 1));
            assert!(!world.test.store.event_discard(id, "x".to_owned()).await.unwrap(), "it is not dead");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_reaches_some_is_repeated_for_the_others_only() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        for repo in ["acme/app", "acme/slow"] {
            world.repository_of(repo, &[(".kici/workflows/w.yaml", &workflow("w", "{ event: { name: ping } }"))]);
            world.register("gh", repo).await;
        }
        let worker = world.event_worker();
        // Longer than anybody waits within one attempt.
        let headers = vec![("retry-after", "600".to_owned())];
        let fault = Fault { call: "/repos/acme/slow/".to_owned(), status: 429, headers };
        world.github.state().faults.push_back(fault);
        let id = emitted(&world, emit("ping", json!({}), None)).await;
        world.deliver(&worker).await;
        let first = event(&world, id).await;
        assert_eq!((first.status, first.attempts, first.run_ids.len()), (EventStatus::Pending, 1, 1), "{first:?}");
        world.test.clock.advance(Duration::from_secs(10));
        assert_eq!(world.deliver(&worker).await, 1);
        let second = event(&world, id).await;
        assert_eq!((second.status, second.run_ids.len()), (EventStatus::Processed, 2), "{second:?}");
        assert_eq!(second.run_ids[0], first.run_ids[0], "nothing was done twice");
        assert_eq!(world.runs().await.len(), 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_of_runs_and_jobs_are_told_to_those_who_listen_and_to_nobody_else() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let build =
            "name: build\non: push\njobs: { a: { runs_on: default, run: x }, b: { runs_on: default, run: x } }\n";
        let quiet: [(&str, &str); 1] = [(".kici/workflows/build.yaml", build)];
        world.repository(&quiet);
        let cancelled = |run| CancelRequest {
            run_id: run,
            reason: kici_engine::state::FailureReason::CancelledByUser,
            by: "user:alice".to_owned(),
            force: false,
        };
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        let run = world.settle().await.1.runs[0].run_id;
        world.test.store.run_cancel(cancelled(run), activate()).await.unwrap();
        assert_eq!(world.test.store.event_counts().await.unwrap().len(), 0, "nobody listens");

        world.repository(&[
            (".kici/workflows/build.yaml", build),
            (
                ".kici/workflows/a.yaml",
                &workflow("after", "{ workflow_complete: { workflow: build, status: cancelled } }"),
            ),
            (".kici/workflows/b.yaml", &workflow("good", "{ workflow_complete: { status: success } }")),
            (".kici/workflows/c.yaml", &workflow("job", "{ job_complete: { workflow: build, job: b } }")),
            (".kici/workflows/d.yaml", &workflow("life", "{ lifecycle: { events: [workflow_complete] } }")),
            (".kici/workflows/e.yaml", &workflow("none", "{ lifecycle: { events: [job_failed] } }")),
        ]);
        world.register("gh", "acme/app").await;
        // That the workflows changed is not told, since nobody wants to know.
        let worker = world.event_worker();
        assert_eq!(world.deliver(&worker).await, 0);
        world.inbox.accept(call("push", "d2", &push())).await.unwrap();
        let run = world.settle().await.1.runs[0].run_id;
        world.test.store.run_cancel(cancelled(run), activate()).await.unwrap();
        // Two jobs and the run ended; what they started has not.
        assert_eq!(world.deliver(&worker).await, 3);
        let mut names: Vec<String> = world.runs().await.into_iter().skip(2).map(|run| run.workflow_name).collect();
        names.sort();
        assert_eq!(names, ["after", "job", "life"]);
        let after = world.runs().await.into_iter().find(|run| run.workflow_name == "after").unwrap();
        assert_eq!((after.chain_depth, after.trigger_kind.as_str()), (1, "workflow_complete"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_registered_workflows_is_told_once() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        let watch = workflow("watch", "{ lifecycle: { events: registration_updated, sources: \"acme/*\" } }");
        world.repository(&[(".kici/workflows/watch.yaml", &watch)]);
        world.register("gh", "acme/app").await;
        let worker = world.event_worker();
        world.deliver(&worker).await;
        let before = world.runs().await.len();
        // The same again is no change.
        world.register("gh", "acme/app").await;
        assert_eq!(world.deliver(&worker).await, 0);
        let more = [(".kici/workflows/watch.yaml", watch.as_str()), (".kici/workflows/n.yaml", &workflow("n", "push"))];
        world.repository(&more);
        world.register("gh", "acme/app").await;
        assert_eq!(world.deliver(&worker).await, 1);
        let runs = world.runs().await;
        assert_eq!(runs.len(), before + 1);
        assert_eq!(runs.last().unwrap().trigger_kind, "lifecycle");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_delivered_by_whoever_has_time_after_its_deliverer_died() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/w.yaml", &workflow("w", "{ event: { name: ping } }"))]);
        world.register("gh", "acme/app").await;
        let worker = world.event_worker();
        emitted(&world, emit("ping", json!({}), None)).await;
        // Claimed by a process that then dies.
        let claimed = world.test.store.event_claim(10, Duration::from_secs(60)).await.unwrap();
        assert_eq!(claimed.len(), 1);
        assert_eq!(world.deliver(&worker).await, 0);
        world.test.clock.advance(Duration::from_secs(61));
        assert_eq!(world.deliver(&worker).await, 1);
        // It was not dead after all: what it decided is not written a second time.
        worker.attempt(claimed[0].clone()).await;
        assert_eq!(world.runs().await.len(), 1);
    })
    .await;
}

/// Ends all runs that have not ended, by a cancel, and delivers what that leads to, until nothing more comes of it.
async fn until_quiet(world: &World) -> usize {
    let worker = world.event_worker();
    for _ in 0..20 {
        for run in world.runs().await.into_iter().filter(|run| !run.status.is_terminal()) {
            let cancel = CancelRequest {
                run_id: run.id,
                reason: kici_engine::state::FailureReason::CancelledByUser,
                by: "user:alice".to_owned(),
                force: false,
            };
            world.test.store.run_cancel(cancel, activate()).await.unwrap();
        }
        if world.deliver(&worker).await == 0 {
            break;
        }
    }
    world.runs().await.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workflow_does_not_start_itself_by_its_own_end() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let job = "{ runs_on: default, run: x }";
        let text = format!("name: w\non: [push, job_complete]\njobs: {{ a: {job}, b: {job}, c: {job} }}\n");
        world.repository(&[(".kici/workflows/w.yaml", &text)]);
        world.register("gh", "acme/app").await;
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        assert_eq!(world.settle().await.1.runs.len(), 1);
        assert_eq!(until_quiet(&world).await, 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_has_failed_or_was_skipped_as_its_run_was_made_is_told_too() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let build = "name: build\non: push\njobs:\n  a: { runs_on: default, run: x, if: \"int(branch) == 1\" }\n  \
                     b: { runs_on: default, run: x, if: \"branch == 'nowhere'\" }\n  c: { runs_on: default, run: x }\n";
        world.repository(&[
            (".kici/workflows/build.yaml", build),
            (".kici/workflows/a.yaml", &workflow("alarm", "{ lifecycle: { events: [job_failed] } }")),
        ]);
        world.register("gh", "acme/app").await;
        world.test.store.events_prune(world.test.clock.now().plus(Duration::from_secs(1)), 100).await.unwrap();
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        assert_eq!(world.settle().await.1.runs.len(), 1);
        // Only the failure: nobody listens to the other ends.
        let worker = world.event_worker();
        assert_eq!(world.deliver(&worker).await, 1);
        assert_eq!(world.runs().await.last().unwrap().workflow_name, "alarm");
        let skipped = workflow("skips", "{ job_complete: { status: skipped } }");
        world.repository(&[(".kici/workflows/build.yaml", build), (".kici/workflows/s.yaml", &skipped)]);
        world.register("gh", "acme/app").await;
        world.inbox.accept(call("push", "d2", &push())).await.unwrap();
        assert_eq!(world.settle().await.1.runs.len(), 1);
        assert_eq!(world.deliver(&worker).await, 2);
        assert_eq!(world.runs().await.last().unwrap().workflow_name, "skips");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_that_branches_out_is_stopped_long_before_its_depth_would() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let jobs: Vec<String> = (0..40).map(|n| format!("j{n}: {{ runs_on: default, run: x }}")).collect();
        let text = |name: &str, on: &str| format!("name: {name}\non: {on}\njobs: {{ {} }}\n", jobs.join(", "));
        world.repository(&[
            (".kici/workflows/a.yaml", &text("a", "push")),
            (".kici/workflows/b.yaml", &text("b", "{ job_complete: { workflow: a } }")),
        ]);
        world.register("gh", "acme/app").await;
        world.inbox.accept(call("push", "d1", &push())).await.unwrap();
        world.settle().await;
        // 40 jobs start 40 runs of 40 jobs, whose 1600 ends would be told next.
        assert_eq!(until_quiet(&world).await, 41);
        let events: u64 = world.test.store.event_counts().await.unwrap().into_values().sum();
        assert!((1000..1100).contains(&events), "{events} events");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_ends_its_deliverer_again_and_again_is_given_up() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        let id = emitted(&world, emit("ping", json!({}), None)).await;
        for claim in 1..=5 {
            let claimed = world.test.store.event_claim(1, Duration::from_secs(60)).await.unwrap();
            assert_eq!(claimed.len(), 1, "claim {claim}");
            world.test.clock.advance(Duration::from_secs(61));
        }
        assert!(world.test.store.event_claim(1, Duration::from_secs(60)).await.unwrap().is_empty());
        let found = event(&world, id).await;
        assert_eq!((found.status, found.dlq_reason.as_deref()), (EventStatus::Dead, Some("exhausted_retries")));
        assert!(world.test.store.event_reopen(id).await.unwrap());
        assert_eq!(world.deliver(&world.event_worker()).await, 1);
        assert_eq!(event(&world, id).await.status, EventStatus::Processed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_ends_its_deliverer_does_not_take_those_beside_it_along() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        let store = world.test.store.clone();
        let poison = emitted(&world, emit("a", json!({}), None)).await;
        world.test.clock.advance(Duration::from_secs(1));
        let neighbour = emitted(&world, emit("b", json!({}), None)).await;
        let claim = async || {
            let claimed = store.event_claim(10, Duration::from_secs(60)).await.unwrap();
            claimed.into_iter().map(|event| (event.id, event.claims)).collect::<Vec<_>>()
        };
        let killed = async || store.event_claims_release(vec![kici_store::testing::instance("node-1")]).await.unwrap();
        for claims in 1..=2 {
            assert_eq!(claim().await, [(poison, claims), (neighbour, claims)]);
            killed().await;
        }
        assert_eq!(claim().await, [(poison, 3)], "from now on one at a time");
        assert!(claim().await.is_empty());
        killed().await;
        // The one with fewer ends comes first, and is delivered.
        assert_eq!(world.deliver(&world.event_worker()).await, 2, "each alone");
        assert_eq!(event(&world, neighbour).await.status, EventStatus::Processed);
        assert_eq!(event(&world, poison).await.status, EventStatus::Processed);

        // An orderly stop costs nothing.
        let slow = emitted(&world, emit("c", json!({}), None)).await;
        for _ in 0..10 {
            assert_eq!(claim().await, [(slow, 1)]);
            assert_eq!(store.event_claims_return().await.unwrap(), 1);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_that_does_not_answer_keeps_an_event_from_nobody_else() {
    TestStore::each(|test| async move {
        let world = World::new(test).await;
        world.github_source(private_key()).await;
        for repo in ["acme/hangs", "acme/app"] {
            world.repository_of(repo, &[(".kici/workflows/w.yaml", &workflow("w", "{ event: { name: ping } }"))]);
            world.register("gh", repo).await;
        }
        world.github.state().hangs.push("/repos/acme/hangs/".to_owned());
        let worker = world.event_worker_of(Duration::from_secs(2));
        let id = emitted(&world, emit("ping", json!({}), None)).await;
        assert_eq!(world.deliver(&worker).await, 1);
        let first = event(&world, id).await;
        assert_eq!((first.status, first.attempts, first.run_ids.len()), (EventStatus::Pending, 1, 1), "{first:?}");
        assert_eq!(world.runs().await[0].repo, "acme/app");
        world.github.state().hangs.clear();
        world.test.clock.advance(Duration::from_secs(301));
        assert_eq!(world.deliver(&worker).await, 1);
        assert_eq!((event(&world, id).await.status, world.runs().await.len()), (EventStatus::Processed, 2));
    })
    .await;
}
