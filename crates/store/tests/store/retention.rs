//! What is old goes, and nothing that is open.

use std::time::Duration;

use kici_engine::state::{JobStatus, RunStatus};
use kici_engine::time::Clock;
use kici_store::model::*;
use kici_store::testing::TestStore;

use crate::fixtures::{Plan, claim, finish, start};

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test(flavor = "multi_thread")]
async fn ended_rows_of_the_queue_go_after_their_time_and_open_ones_never() {
    TestStore::each(|t| async move {
        Plan::new("1").queued("a").create(&t).await;
        let ended = start(&t, "a1").await;
        finish(&t, &ended, JobStatus::Success).await;
        Plan::new("2").queued("b").queued("c").create(&t).await;
        let held = claim(&t, "a1", 1).await.pop().unwrap();
        let prune = async || t.store.queue_prune(t.clock.now().minus(DAY), 100).await.unwrap();
        assert_eq!(prune().await, 0, "too young");
        t.clock.advance(DAY * 2);
        assert_eq!((prune().await, prune().await), (1, 0));
        assert!(t.store.queue_get(ended.job.id).await.unwrap().is_none());
        assert!(t.store.queue_get(held.job.id).await.unwrap().is_some());
        assert_eq!(t.store.queue_counts().await.unwrap().pending, 1);
        // The job itself and its history stay.
        assert_eq!(t.store.job_get(ended.job.id).await.unwrap().unwrap().status, JobStatus::Success);
        assert_eq!(t.store.dispatch_history(ended.job.id).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_go_with_everything_that_is_theirs_once_they_have_ended() {
    TestStore::each(|t| async move {
        let old = Plan::new("1").queued("a").job("b").needs("b", "a", &[JobStatus::Failed]).create(&t).await.run_id;
        let job = start(&t, "a1").await;
        finish(&t, &job, JobStatus::Success).await;
        let open = Plan::new("2").queued("a").create(&t).await.run_id;
        t.clock.advance(DAY * 3);
        let before = t.clock.now().minus(DAY);
        assert_eq!(t.store.runs_with_old_logs(before, 10).await.unwrap(), [old]);
        t.store.run_logs_gone(vec![old]).await.unwrap();
        assert!(t.store.runs_with_old_logs(before, 10).await.unwrap().is_empty());
        assert!(t.store.run_get(old).await.unwrap().unwrap().logs_expired_at.is_some());

        assert_eq!(t.store.runs_older(before, 10).await.unwrap(), [old]);
        assert_eq!(t.store.runs_prune(vec![old, open]).await.unwrap(), 1, "an open run is left alone");
        assert!(t.store.run_get(old).await.unwrap().is_none());
        assert!(t.store.jobs_of_run(old).await.unwrap().is_empty());
        assert!(t.store.needs_of_run(old).await.unwrap().is_empty());
        assert!(t.store.dispatch_history(job.job.id).await.unwrap().is_empty());
        assert_eq!(t.store.run_get(open).await.unwrap().unwrap().status, RunStatus::Pending);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_go_after_their_bodies_and_never_before_they_are_processed() {
    TestStore::each(|t| async move {
        let (done, waits) = (crate::inbox::insert(&t, "1").await, crate::inbox::insert(&t, "2").await);
        let outcome = DeliveryOutcome { status: DeliveryStatus::Processed, error: None, note: None };
        assert!(t.store.delivery_finish(done, outcome).await.unwrap());
        t.store.trace_put(done, serde_json::json!({})).await.unwrap();
        let finished = t.store.delivery_get(done).await.unwrap().unwrap().finished_at.unwrap();
        assert!(t.store.delivery_body_moved(done, finished, Some("k1".to_owned()), None).await.unwrap());
        t.clock.advance(DAY * 3);
        let before = t.clock.now().minus(DAY);
        assert_eq!(t.store.deliveries_prune(before, 10).await.unwrap(), 0, "its body would be lost from sight");
        assert_eq!(t.store.payloads_older(before, 10).await.unwrap(), [(done, "k1".to_owned())]);
        assert!(!t.store.delivery_body_expired(done, "k0".to_owned()).await.unwrap());
        assert!(t.store.delivery_body_expired(done, "k1".to_owned()).await.unwrap());
        assert!(t.store.payloads_older(before, 10).await.unwrap().is_empty());
        assert_eq!(t.store.traces_prune(before, 10).await.unwrap(), 1);
        assert!(t.store.trace_get(done).await.unwrap().is_none());
        assert_eq!(t.store.deliveries_prune(before, 10).await.unwrap(), 1);
        assert!(t.store.delivery_get(done).await.unwrap().is_none());
        assert!(t.store.delivery_get(waits).await.unwrap().is_some());
    })
    .await;
}
