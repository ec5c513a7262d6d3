//! Sources, deliveries, registrations.

use std::time::Duration;

use kici_engine::ids::{IdSource, SourceId};
use kici_engine::time::Clock;
use kici_store::StoreError;
use kici_store::model::*;
use kici_store::testing::{TestIds, TestStore, instance};

use crate::fixtures::{Plan, enqueue};

pub fn source(name: &str, key: &str) -> NewSource {
    NewSource {
        id: SourceId::mint(&TestIds),
        org: "default".to_owned(),
        name: name.to_owned(),
        kind: SourceKind::Generic,
        routing_key: key.to_owned(),
        config: serde_json::json!({ "a": [1, "ü"] }),
        sealed_secrets: Some("sealed".to_owned()),
        enabled: true,
    }
}

fn delivery(source_id: SourceId, id: &str) -> NewDelivery {
    NewDelivery {
        org: "default".to_owned(),
        source_id,
        delivery_id: id.to_owned(),
        event: "push".to_owned(),
        action: None,
        provider: "generic".to_owned(),
        channel: "webhook".to_owned(),
        repo: None,
        git_ref: None,
        sha: None,
        request_id: "req".to_owned(),
        headers: serde_json::json!({ "x-event-type": "push" }),
        body: b"{\"zen\":\"\xff not UTF-8\"}".repeat(100),
        claimed_by: Some(instance("node-1")),
    }
}

/// A stored delivery.
pub async fn insert(t: &TestStore, id: &str) -> kici_engine::ids::DeliveryRowId {
    match t.store.delivery_insert(delivery(SourceId::mint(&TestIds), id)).await.unwrap() {
        DeliveryInserted::Inserted(row) => row,
        other => panic!("{other:?}"),
    }
}

fn outcome(status: DeliveryStatus) -> DeliveryOutcome {
    DeliveryOutcome { status, error: None, note: Some("why".to_owned()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_are_unique_versioned_and_removed_softly() {
    TestStore::each(|t| async move {
        let made = t.store.source_create(source("s", "generic:s")).await.unwrap();
        let taken = t.store.source_create(source("s", "generic:other")).await.unwrap_err();
        assert!(matches!(taken, StoreError::Exists { field: "name", .. }), "{taken}");
        let taken = t.store.source_create(source("s2", "generic:s")).await.unwrap_err();
        assert!(matches!(taken, StoreError::Exists { field: "routing key", .. }), "{taken}");
        assert_eq!(t.store.source_get("default".to_owned(), "s".to_owned()).await.unwrap(), Some(made.clone()));

        let off = SourceChange { enabled: Some(false), ..SourceChange::default() };
        let changed = t.store.source_update(made.id, 1, off.clone()).await.unwrap();
        assert_eq!((changed.version, changed.enabled, changed.config), (2, false, made.config.clone()));
        let stale = t.store.source_update(made.id, 1, off.clone()).await.unwrap_err();
        assert!(matches!(stale, StoreError::Changed { .. }), "{stale}");

        assert!(t.store.source_remove(made.id).await.unwrap());
        assert!(!t.store.source_remove(made.id).await.unwrap());
        assert_eq!(t.store.source_by_routing_key("generic:s".to_owned()).await.unwrap(), None);
        assert!(t.store.source_by_id(made.id).await.unwrap().unwrap().deleted_at.is_some());
        assert!(matches!(t.store.source_update(made.id, 3, off).await.unwrap_err(), StoreError::NotFound { .. }));
        t.store.source_create(source("s", "generic:s")).await.unwrap();
        assert_eq!(t.store.source_list("default".to_owned()).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_is_stored_once_and_reopened_only_after_a_failure() {
    TestStore::each(|t| async move {
        let source_id = SourceId::from_uuid(TestIds.uuid());
        let new = delivery(source_id, "d-1");
        let DeliveryInserted::Inserted(id) = t.store.delivery_insert(new.clone()).await.unwrap() else { panic!() };
        let body = t.store.delivery_body(id).await.unwrap().unwrap();
        assert_eq!((body.body, body.headers), (new.body.clone(), new.headers.clone()));
        let again = t.store.delivery_insert(new.clone()).await.unwrap();
        assert_eq!(again, DeliveryInserted::Duplicate { id, status: DeliveryStatus::Received });

        assert!(t.store.delivery_finish(id, outcome(DeliveryStatus::Failed)).await.unwrap());
        assert!(!t.store.delivery_finish(id, outcome(DeliveryStatus::Processed)).await.unwrap());
        assert_eq!(t.store.delivery_insert(new.clone()).await.unwrap(), DeliveryInserted::Reopened(id));
        t.store.delivery_finish(id, outcome(DeliveryStatus::Processed)).await.unwrap();
        let last = t.store.delivery_insert(new).await.unwrap();
        assert_eq!(last, DeliveryInserted::Duplicate { id, status: DeliveryStatus::Processed });
        let row = t.store.delivery_get(id).await.unwrap().unwrap();
        assert_eq!((row.payload_bytes, row.note.as_deref(), row.claimed_by), (2_100, Some("why"), None));
        assert_eq!(t.store.delivery_counts().await.unwrap()[&DeliveryStatus::Processed], 1);

        assert_eq!(t.store.delivery_bodies_finished(5).await.unwrap().len(), 1);
        let finished = row.finished_at.unwrap();
        let key = || Some("event-log/x".to_owned());
        assert!(
            !t.store.delivery_body_moved(id, t.clock.now().plus(Duration::from_secs(1)), key(), None).await.unwrap()
        );
        assert!(t.store.delivery_body(id).await.unwrap().is_some(), "it was finished at another time");
        assert!(t.store.delivery_body_moved(id, finished, key(), None).await.unwrap());
        assert_eq!(t.store.delivery_body(id).await.unwrap(), None);
        assert!(t.store.delivery_bodies_finished(5).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_are_freed_by_release_by_time_and_by_retry() {
    TestStore::each(|t| async move {
        let source_id = SourceId::from_uuid(TestIds.uuid());
        let DeliveryInserted::Inserted(id) = t.store.delivery_insert(delivery(source_id, "d-1")).await.unwrap() else {
            panic!()
        };
        let lapse = Duration::from_secs(900);
        assert!(t.store.delivery_claim(10, lapse, 5).await.unwrap().is_empty(), "claimed when it was stored");
        assert_eq!(t.store.delivery_claims_release(vec![instance("node-1")]).await.unwrap(), 1);
        assert_eq!(t.store.delivery_claim(10, lapse, 5).await.unwrap()[0].id, id);
        assert!(t.store.delivery_claim(10, lapse, 5).await.unwrap().is_empty());
        t.clock.advance(lapse + Duration::from_micros(1));
        assert_eq!(t.store.delivery_claim(10, lapse, 5).await.unwrap().len(), 1);
        let later = t.clock.now().plus(Duration::from_secs(60));
        assert!(t.store.delivery_retry(id, "forge is down".to_owned(), later).await.unwrap());
        assert!(t.store.delivery_claim(10, lapse, 5).await.unwrap().is_empty());
        t.clock.advance(Duration::from_secs(60));
        let claimed = t.store.delivery_claim(10, lapse, 5).await.unwrap();
        assert_eq!((claimed[0].attempts, claimed[0].error.as_deref()), (1, Some("forge is down")));
    })
    .await;
}

/// Ids of what is claimed, in order, with the claims that count.
async fn claim(t: &TestStore) -> Vec<(String, u32)> {
    let claimed = t.store.delivery_claim(10, Duration::from_secs(900), 5).await.unwrap();
    claimed.into_iter().map(|delivery| (delivery.delivery_id, delivery.claims)).collect()
}

fn owned(pairs: &[(&str, u32)]) -> Vec<(String, u32)> {
    pairs.iter().map(|(id, claims)| ((*id).to_owned(), *claims)).collect()
}

/// As when the process is killed and started again.
async fn restart(t: &TestStore) {
    t.store.delivery_claims_release(vec![instance("node-1")]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_processing_ends_five_processes_is_dead_and_its_neighbours_are_not() {
    TestStore::each(|t| async move {
        let source_id = SourceId::from_uuid(TestIds.uuid());
        let new = |id: &str| NewDelivery { claimed_by: None, ..delivery(source_id, id) };
        // The poisoned one is the oldest, and so first in every order by age.
        let DeliveryInserted::Inserted(poison) = t.store.delivery_insert(new("poison")).await.unwrap() else {
            panic!()
        };
        let mut ids = std::collections::BTreeMap::new();
        for name in ["a", "b"] {
            t.clock.advance(Duration::from_secs(1));
            let DeliveryInserted::Inserted(id) = t.store.delivery_insert(new(name)).await.unwrap() else { panic!() };
            ids.insert(name, id);
        }
        assert_eq!(claim(&t).await, owned(&[("poison", 1), ("a", 1), ("b", 1)]));
        restart(&t).await;
        assert_eq!(claim(&t).await, owned(&[("poison", 2), ("a", 2), ("b", 2)]), "one end may be chance");
        restart(&t).await;
        assert_eq!(claim(&t).await, owned(&[("poison", 3)]), "from now on one at a time");
        assert!(claim(&t).await.is_empty());
        // Others need not wait for it.
        t.store.delivery_insert(new("fresh")).await.unwrap();
        assert_eq!(claim(&t).await, owned(&[("fresh", 1)]));
        restart(&t).await;
        assert_eq!(claim(&t).await, owned(&[("a", 3), ("fresh", 2)]), "those with the fewest ends first");
        t.store.delivery_finish(ids["a"], outcome(DeliveryStatus::Processed)).await.unwrap();
        assert_eq!(claim(&t).await, owned(&[("b", 3)]));
        t.store.delivery_finish(ids["b"], outcome(DeliveryStatus::Processed)).await.unwrap();
        for claims in [4, 5] {
            assert_eq!(claim(&t).await, owned(&[("poison", claims)]));
            restart(&t).await;
            let fresh = t.store.delivery_claim(10, Duration::from_secs(900), 5).await.unwrap();
            if claims == 4 {
                assert_eq!(fresh.len(), 1, "`fresh` is taken alone as well by now: {fresh:?}");
                t.store.delivery_finish(fresh[0].id, outcome(DeliveryStatus::Processed)).await.unwrap();
            }
        }
        let dead = t.store.delivery_get(poison).await.unwrap().unwrap();
        assert_eq!((dead.status, dead.attempts), (DeliveryStatus::Dead, 0));
        let note = dead.note.unwrap();
        assert!(note.contains("5 times in a row the process ended while it was processed"), "{note}");
        assert!(dead.error.is_some() && dead.claimed_by.is_none() && dead.finished_at.is_some());
        assert!(t.store.delivery_body(poison).await.unwrap().is_some(), "a retry needs the body");
        // A person may give it a new life, all of it.
        assert!(t.store.delivery_reopen(poison).await.unwrap());
        assert_eq!(claim(&t).await, owned(&[("poison", 1)]));
        assert_eq!(t.store.delivery_get(poison).await.unwrap().unwrap().note, None);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orderly_stop_and_a_failed_attempt_cost_no_claim() {
    TestStore::each(|t| async move {
        let source_id = SourceId::from_uuid(TestIds.uuid());
        // Claimed as it was stored, and left in the queue of the process.
        let DeliveryInserted::Inserted(id) = t.store.delivery_insert(delivery(source_id, "d-1")).await.unwrap() else {
            panic!()
        };
        assert_eq!(t.store.delivery_get(id).await.unwrap().unwrap().claims, 1);
        for _ in 0..10 {
            assert_eq!(t.store.delivery_claims_return().await.unwrap(), 1);
            assert_eq!(t.store.delivery_claims_return().await.unwrap(), 0);
            assert_eq!(claim(&t).await, owned(&[("d-1", 1)]));
        }
        for claims in [2, 3] {
            restart(&t).await;
            assert_eq!(claim(&t).await, owned(&[("d-1", claims)]));
        }
        let now = t.clock.now();
        assert!(t.store.delivery_retry(id, "the forge is down".to_owned(), now).await.unwrap());
        let again = t.store.delivery_claim(10, Duration::from_secs(900), 5).await.unwrap().remove(0);
        assert_eq!((again.claims, again.attempts), (1, 1), "it came to an end, so it is not what ends processes");
        assert!(!again.is_suspect());
    })
    .await;
}

fn registrations(source_id: SourceId, names: &[&str]) -> RegistrationSet {
    RegistrationSet {
        org: "default".to_owned(),
        routing_key: "generic:s".to_owned(),
        source_id,
        repo: "o/r".to_owned(),
        sha: "b".repeat(40),
        default_branch: Some("main".to_owned()),
        keeps_others: false,
        seen: None,
        workflows: names
            .iter()
            .map(|name| RegisteredWorkflow {
                name: (*name).to_owned(),
                lock_digest: format!("digest-{name}"),
                lock_json: b"{}".to_vec(),
                trigger_types: vec!["generic_webhook".to_owned()],
            })
            .collect(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_delivery_that_is_processed_again_adopts_the_runs_it_had_made() {
    TestStore::each(|t| async move {
        let source = t.store.source_create(source("s", "generic:s")).await.unwrap();
        let DeliveryInserted::Inserted(id) = t.store.delivery_insert(delivery(source.id, "d-1")).await.unwrap() else {
            panic!()
        };
        let done = |runs| ProcessedDelivery {
            id,
            outcome: outcome(DeliveryStatus::Dead),
            matched_count: 1,
            repo: None,
            git_ref: None,
            sha: None,
            trace: None,
            runs,
            registrations: None,
        };
        let first = done(vec![Plan::new("d-1:ci").of_delivery(id).queued("a").run()]);
        let first = t.store.delivery_process(first, enqueue()).await.unwrap();
        assert!(t.store.delivery_reopen(id).await.unwrap());
        let two = ["d-1:ci", "d-1:docs"].map(|key| Plan::new(key).of_delivery(id).queued("a").run());
        let second = t.store.delivery_process(done(two.into()), enqueue()).await.unwrap();
        assert_eq!(second.runs.iter().map(|run| run.created).collect::<Vec<_>>(), [false, true]);
        let row = t.store.delivery_get(id).await.unwrap().unwrap();
        assert_eq!(row.first_run_id, Some(first.runs[0].run_id));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processing_writes_runs_trace_and_registrations_together_and_once() {
    TestStore::each(|t| async move {
        let source = t.store.source_create(source("s", "generic:s")).await.unwrap();
        let DeliveryInserted::Inserted(id) = t.store.delivery_insert(delivery(source.id, "d-1")).await.unwrap() else {
            panic!()
        };
        let done = ProcessedDelivery {
            id,
            outcome: outcome(DeliveryStatus::Processed),
            matched_count: 2,
            repo: Some("o/r".to_owned()),
            git_ref: None,
            sha: None,
            trace: Some(serde_json::json!({ "matched": true })),
            runs: vec![
                Plan::new("d-1:ci").of_delivery(id).queued("a").run(),
                Plan::new("d-1:docs").of_delivery(id).job("skip").run(),
            ],
            registrations: Some(registrations(source.id, &["ci", "docs"])),
        };
        let processed = t.store.delivery_process(done.clone(), enqueue()).await.unwrap();
        assert!(processed.applied);
        assert_eq!(processed.runs.iter().map(|run| run.ready.len()).collect::<Vec<_>>(), [1, 0]);
        assert!(!t.store.delivery_process(done, enqueue()).await.unwrap().applied);
        let row = t.store.delivery_get(id).await.unwrap().unwrap();
        assert_eq!((row.matched_count, row.first_run_id), (2, Some(processed.runs[0].run_id)));
        assert_eq!(t.store.trace_get(id).await.unwrap().unwrap()["matched"], true);
        assert_eq!(t.store.lock_document("digest-ci".to_owned()).await.unwrap().as_deref(), Some(&b"{}"[..]));

        let list = |kind: Option<&str>| t.store.registration_list("default".to_owned(), None, kind.map(str::to_owned));
        let ci = list(Some("generic_webhook")).await.unwrap().remove(0);
        t.store.registration_enable(ci.id, false, "someone".to_owned()).await.unwrap();
        t.store.registrations_replace(registrations(source.id, &["ci", "new"])).await.unwrap();
        let found = list(None).await.unwrap();
        let found: Vec<_> = found.iter().map(|r| (r.workflow_name.as_str(), r.enabled)).collect();
        assert_eq!(found, [("ci", false), ("new", true)]);
        assert!(list(Some("schedule")).await.unwrap().is_empty());
        assert_eq!(t.store.registry_version().await.unwrap(), 3);
        t.store.source_remove(source.id).await.unwrap();
        assert!(list(None).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_overflow_has_a_budget_is_drained_oldest_first_and_ages_out() {
    TestStore::each(|t| async move {
        let source_id = SourceId::from_uuid(TestIds.uuid());
        let shed = |id: &str| NewDelivery { claimed_by: None, ..delivery(source_id, id) };
        let minute = Duration::from_secs(60);
        for id in ["a", "b", "c"] {
            assert_eq!(t.store.delivery_shed(shed(id), 3).await.unwrap(), DeliveryShed::Kept);
            t.clock.advance(minute);
        }
        assert_eq!(t.store.delivery_shed(shed("d"), 3).await.unwrap(), DeliveryShed::NoRoom);
        assert_eq!(t.store.delivery_shed(shed("a"), 3).await.unwrap(), DeliveryShed::Kept);
        assert!(t.store.delivery_claim(10, minute, 5).await.unwrap().is_empty(), "overflow is not in the inbox");

        let first = t.store.delivery_drain(1, 10 * minute).await.unwrap();
        assert_eq!((first.claimed[0].delivery_id.as_str(), first.claimed[0].attempts, first.dropped), ("a", 0, 0));
        assert_eq!(first.claimed[0].status, DeliveryStatus::Received);
        assert!(t.store.delivery_body(first.claimed[0].id).await.unwrap().is_some());
        let known = t.store.delivery_shed(shed("a"), 3).await.unwrap();
        assert_eq!(known, DeliveryShed::Known { id: first.claimed[0].id });

        // `b` is two minutes old, `c` one.
        let late = t.store.delivery_drain(10, minute + Duration::from_secs(30)).await.unwrap();
        assert_eq!((late.claimed.len(), late.claimed[0].delivery_id.as_str(), late.dropped), (1, "c", 1));
        let dead = DeliveryFilter { statuses: vec![DeliveryStatus::Dead], ..DeliveryFilter::default() };
        let dead = t.store.delivery_list(dead, Page { after: None, limit: 10 }).await.unwrap().items;
        assert_eq!(dead.len(), 1);
        assert!(dead[0].error.as_deref().unwrap().contains("ingest.overflow_age_ms"), "{:?}", dead[0].error);
        // The sender tries again: it is taken as a new one would be.
        assert_eq!(t.store.delivery_insert(shed("b")).await.unwrap(), DeliveryInserted::Reopened(dead[0].id));
    })
    .await;
}
