//! Many callers at once.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::join_all;
use kici_engine::state::{JobStatus, RunStatus};
use kici_store::StoreError;
use kici_store::model::*;
use kici_store::testing::{TestStore, agent};

use crate::fixtures::{Plan, claim, enqueue, entry, result, start};

#[tokio::test(flavor = "multi_thread")]
async fn eight_claimers_take_no_job_twice_and_none_is_left() {
    TestStore::each(|t| async move {
        let mut plan = Plan::new("k");
        for n in 0..100 {
            plan = plan.queued(&format!("j{n}"));
        }
        let run = plan.create(&t).await.run_id;
        let t = &t;
        let claimers = (0..8).map(|n| async move {
            let name = format!("a{n}");
            let mut taken = Vec::new();
            loop {
                let jobs = claim(t, &name, 3).await;
                if jobs.is_empty() {
                    return taken;
                }
                for job in jobs {
                    t.store.job_start(job.job_ref, agent(&name), Default::default()).await.unwrap();
                    let done = t.store.job_finish(result(&job, JobStatus::Success), enqueue()).await.unwrap();
                    assert!(matches!(done, JobFinished::Applied(_)), "{done:?}");
                    taken.push(job.job.id);
                }
            }
        });
        let taken: Vec<_> = join_all(claimers).await.into_iter().flatten().collect();
        assert_eq!((taken.len(), taken.iter().collect::<BTreeSet<_>>().len()), (100, 100));
        assert_eq!(t.store.run_get(run).await.unwrap().unwrap().status, RunStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_jobs_of_a_run_ending_together_settle_it_once() {
    TestStore::each(|t| async move {
        for round in 0..10 {
            Plan::new(&format!("k{round}")).queued("a").queued("b").create(&t).await;
            let jobs = [start(&t, "a1").await, start(&t, "a2").await];
            let done =
                join_all(jobs.iter().map(|job| t.store.job_finish(result(job, JobStatus::Success), enqueue()))).await;
            let finished = done.into_iter().filter(|done| match done {
                Ok(JobFinished::Applied(effects)) => effects.run_finished,
                other => panic!("{other:?}"),
            });
            assert_eq!(finished.count(), 1);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_instances_finishing_the_last_jobs_settle_the_run_once() {
    let Some(t) = TestStore::postgres().await else { return };
    let other = t.sibling("node-2").await;
    for round in 0..10 {
        Plan::new(&format!("k{round}")).queued("a").queued("b").create(&t).await;
        let (a, b) = (start(&t, "a1").await, start(&t, "a2").await);
        let (one, two) = tokio::join!(
            t.store.job_finish(result(&a, JobStatus::Success), enqueue()),
            other.job_finish(result(&b, JobStatus::Success), enqueue()),
        );
        let finished = [one, two].into_iter().filter(|done| match done {
            Ok(JobFinished::Applied(effects)) => effects.run_finished,
            other => panic!("{other:?}"),
        });
        assert_eq!(finished.count(), 1);
    }
    other.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_go_away_tear_nothing() {
    TestStore::each(|t| async move {
        let mut pending = Vec::new();
        for n in 0..200 {
            let run = Plan::new(&format!("k{n}")).queued("a").queued("b").run();
            let store = t.store.clone();
            let mut create = Box::pin(async move { store.run_create(run, None, enqueue()).await });
            // Sent to the writer, then dropped.
            let _ = futures::poll!(&mut create);
            if n % 2 == 0 {
                pending.push(create);
            }
        }
        for create in pending {
            create.await.unwrap();
        }
        let runs = t.store.run_list(RunFilter::default(), Page { limit: 500, after: None }).await.unwrap().items;
        assert!(runs.len() >= 100);
        for run in &runs {
            assert_eq!(t.store.jobs_of_run(run.id).await.unwrap().len(), 2);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_failing_write_fails_alone() {
    TestStore::each(|t| async move {
        let clash = |name: &str| {
            // Two jobs of one name violate a unique constraint: the whole run is undone.
            Plan::new(name).queued("a").queued("a").run()
        };
        let creates = (0..40).map(|n| {
            let run = if n % 8 == 0 { clash(&format!("k{n}")) } else { Plan::new(&format!("k{n}")).queued("a").run() };
            t.store.run_create(run, None, enqueue())
        });
        let outcomes = join_all(creates).await;
        let failed = outcomes.iter().filter(|outcome| matches!(outcome, Err(StoreError::Db(_)))).count();
        assert_eq!((failed, outcomes.iter().filter(|outcome| outcome.is_ok()).count()), (5, 35));
        let runs = t.store.run_list(RunFilter::default(), Page { limit: 500, after: None }).await.unwrap();
        assert_eq!(runs.items.len(), 35);
    })
    .await;
}

/// Panics on its first call.
#[derive(Debug)]
struct Explodes(std::sync::atomic::AtomicBool);

impl Activate for Explodes {
    fn activate(&self, _: &ReadyJob) -> Activation {
        assert!(!self.0.swap(false, std::sync::atomic::Ordering::SeqCst), "on purpose");
        Activation::Enqueue(entry("default"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_panics_leaves_the_store_usable() {
    TestStore::each(|t| async move {
        let activate: Arc<dyn Activate> = Arc::new(Explodes(true.into()));
        let lost = t.store.run_create(Plan::new("k").job("a").run(), None, activate.clone()).await.unwrap_err();
        assert!(matches!(lost, StoreError::Unavailable(_)), "{lost}");
        assert!(t.store.run_list(RunFilter::default(), Page::default()).await.unwrap().items.is_empty());
        t.store.run_create(Plan::new("k").job("a").run(), None, activate).await.unwrap();
    })
    .await;
}
