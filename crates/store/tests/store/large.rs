//! Runs with many variants of a job: what the end of one costs, and what follows from it.

use std::sync::{Mutex, PoisonError};

use diesel::connection::{Instrumentation, InstrumentationEvent, set_default_instrumentation};
use kici_engine::ids::RunId;
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_store::model::*;
use kici_store::testing::{TestStore, agent};

use crate::fixtures::{Plan, entry, finish, start, status_of};

/// More than are read whole.
const MANY: usize = 70;

/// So many variants of `v` that are queued, and a job that needs them.
fn plan(key: &str, count: usize, change: impl Fn(&mut NewJob)) -> Plan {
    let queued = |job: &mut NewJob| {
        job.start = JobStart::Queued(entry("default"));
        change(job);
    };
    let plan = (0..count).fold(Plan::new(key), |plan, n| plan.with(&format!("v ({n})"), "v", queued));
    plan.job("after").needs("after", "v", &[JobStatus::Success])
}

async fn run(t: &TestStore, id: RunId) -> Run {
    t.store.run_get(id).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_many_variants_begins_with_the_end_of_the_last_one() {
    TestStore::each(|t| async move {
        let id = plan("k", MANY, |_| {}).create(&t).await.run_id;
        let mut started = Vec::new();
        for _ in 0..MANY {
            started.push(start(&t, "a1").await);
        }
        let last = started.pop().unwrap();
        for job in &started {
            let effects = finish(&t, job, JobStatus::Success).await;
            assert_eq!((effects.finished_jobs.len(), effects.newly_queued.len()), (1, 0));
            assert_eq!((effects.run.status, effects.run_finished), (RunStatus::Running, false));
        }
        assert_eq!(status_of(&t, id, "after").await, JobStatus::Pending);
        let again =
            t.store.job_finish(crate::fixtures::result(&started[0], JobStatus::Failed), crate::fixtures::enqueue());
        assert!(matches!(again.await.unwrap(), JobFinished::Duplicate(JobStatus::Success)));
        assert_eq!(finish(&t, &last, JobStatus::Success).await.newly_queued.len(), 1);
        let after = start(&t, "a1").await;
        assert_eq!(after.needs["v"].status, JobStatus::Success);
        assert!(finish(&t, &after, JobStatus::Success).await.run_finished);
        assert_eq!(run(&t, id).await.status, RunStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_failure_among_many_variants_fails_the_run_at_its_end_or_ends_the_others_at_once() {
    TestStore::each(|t| async move {
        let id = plan("k", MANY, |_| {}).create(&t).await.run_id;
        for n in 0..MANY {
            let job = start(&t, "a1").await;
            let end = if n == 3 { JobStatus::Failed } else { JobStatus::Success };
            let effects = finish(&t, &job, end).await;
            assert_eq!(effects.run_finished, n + 1 == MANY);
        }
        let ended = run(&t, id).await;
        assert_eq!((ended.status, ended.failure_reason), (RunStatus::Failed, Some(FailureReason::StepFailed)));
        assert!(ended.failure_message.unwrap().starts_with("v (3): "));
        assert_eq!(status_of(&t, id, "after").await, JobStatus::Skipped);

        let id = plan("l", MANY, |job| job.fail_fast = true).create(&t).await.run_id;
        let job = start(&t, "a1").await;
        let effects = finish(&t, &job, JobStatus::Failed).await;
        assert_eq!(effects.finished_jobs.len(), MANY + 1, "those that wait for agents are cancelled");
        assert_eq!(run(&t, id).await.status, RunStatus::Failed);

        // The turn of the next one has come.
        let id = plan("m", MANY, |job| job.max_parallel = Some(2)).create(&t).await.run_id;
        let job = start(&t, "a1").await;
        assert_eq!(finish(&t, &job, JobStatus::Success).await.newly_queued.len(), 1);
        assert_eq!(run(&t, id).await.status, RunStatus::Running);
    })
    .await;
}

static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn recorder() -> Option<Box<dyn Instrumentation>> {
    Some(Box::new(|event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::StartQuery { query, .. } = event {
            SEEN.lock().unwrap_or_else(PoisonError::into_inner).push(query.to_string());
        }
    }))
}

/// The statements about a run and one job of it that its end takes, without their values.
async fn statements_of_an_end(t: &TestStore, key: &str, count: usize) -> Vec<String> {
    let id = plan(key, count, |_| {}).create(t).await.run_id;
    let first = t.store.jobs_of_run(id).await.unwrap()[0].id;
    let job = t.store.queue_claim_by_id(first, agent("a1")).await.unwrap().unwrap();
    t.store.job_start(job.job_ref, agent("a1"), Default::default()).await.unwrap();
    SEEN.lock().unwrap_or_else(PoisonError::into_inner).clear();
    finish(t, &job, JobStatus::Success).await;
    let about = [id.uuid().to_string(), job.job_ref.job_id.uuid().to_string()];
    let mut seen = std::mem::take(&mut *SEEN.lock().unwrap_or_else(PoisonError::into_inner));
    seen.retain(|sql| about.iter().any(|id| sql.contains(id)) && !sql.contains("pg_notify"));
    seen.iter().map(|sql| sql.split(" -- binds:").next().unwrap_or_default().trim().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_one_of_many_variants_reads_no_more_the_more_there_are() {
    set_default_instrumentation(recorder).unwrap();
    TestStore::each(|t| async move {
        let some = statements_of_an_end(&t, "some", MANY).await;
        let more = statements_of_an_end(&t, "more", MANY * 3).await;
        assert!(some.len() > 4, "{some:#?}");
        assert_eq!(some, more);
        // And each reads one row, some rows, or each of few ways once.
        let of_many = |sql: &&String| sql.starts_with("SELECT") && sql.contains("run_id") && !sql.contains("\"runs\"");
        for sql in more.iter().filter(of_many) {
            let bounded =
                sql.contains("LIMIT") || sql.contains("DISTINCT") || sql.contains("\"id\" =") || sql.contains("`id` =");
            assert!(bounded, "{sql}");
        }
    })
    .await;
}
