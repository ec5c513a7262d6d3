//! Cancelling runs.

use std::time::Duration;

use kici_engine::ids::RunId;
use kici_engine::lock::RUN_HOOKS_JOB;
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_engine::time::Clock;
use kici_store::model::*;
use kici_store::testing::{TestStore, agent};

use crate::fixtures::{Plan, claim, enqueue, finish, start, statuses};

fn request(run_id: RunId, force: bool) -> CancelRequest {
    CancelRequest { run_id, by: "alice".to_owned(), reason: FailureReason::CancelledByUser, force }
}

async fn cancel(t: &TestStore, run: RunId, force: bool) -> Effects {
    match t.store.run_cancel(request(run, force), enqueue()).await.unwrap() {
        CancelOutcome::Cancelling { effects } => *effects,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_nobody_holds_is_cancelled_at_once() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").job("b").needs("b", "a", &[JobStatus::Success]).create(&t).await.run_id;
        let effects = cancel(&t, run, false).await;
        assert!(effects.run_finished && effects.to_stop.is_empty());
        assert_eq!((effects.run.status, effects.run.cancelled_by.as_deref()), (RunStatus::Cancelled, Some("alice")));
        assert!(statuses(&t, run).await.iter().all(|(_, status)| *status == JobStatus::Cancelled));
        assert!(claim(&t, "a1", 5).await.is_empty());
        let again = t.store.run_cancel(request(run, false), enqueue()).await.unwrap();
        assert!(matches!(again, CancelOutcome::AlreadyTerminal(RunStatus::Cancelled)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_hold_jobs_are_named_and_a_real_result_beats_the_cancel() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").queued("b").queued("c").create(&t).await.run_id;
        let (a, b) = (start(&t, "a1").await, start(&t, "a1").await);
        let c = claim(&t, "a2", 1).await.pop().unwrap();
        let effects = cancel(&t, run, false).await;
        let told: Vec<_> = effects.to_stop.iter().map(|held| (held.job, held.started)).collect();
        assert_eq!(told, [(a.job_ref, true), (b.job_ref, true), (c.job_ref, false)]);
        assert_eq!((effects.run.status, effects.run_finished), (RunStatus::Cancelling, false));
        assert_eq!(t.store.job_start(c.job_ref, agent("a2"), Default::default()).await.unwrap(), StartVerdict::Denied);
        assert_eq!(t.store.queue_get(c.job.id).await.unwrap().unwrap().status, QueueStatus::Cancelled);

        assert_eq!(cancel(&t, run, false).await.to_stop.len(), 2, "a repeated cancel tells the agents again");
        let deadline = Some(t.clock.now().plus(Duration::from_secs(40)));
        assert_eq!(t.store.job_cancelling(a.job_ref, agent("a1"), deadline).await.unwrap(), Guarded::Applied);
        assert_eq!(t.store.job_cancelling(a.job_ref, agent("a9"), deadline).await.unwrap(), Guarded::Lost);
        assert_eq!(t.store.job_get(a.job.id).await.unwrap().unwrap().cancel_deadline, deadline);
        finish(&t, &a, JobStatus::Success).await;
        let effects = finish(&t, &b, JobStatus::Cancelled).await;
        assert_eq!((effects.run.status, effects.run_finished), (RunStatus::Cancelled, true));
        assert_eq!(effects.finished_jobs[0].reason, Some(FailureReason::CancelledByUser));
        assert_eq!(statuses(&t, run).await[0].1, JobStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn force_ends_what_unwinds() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").create(&t).await.run_id;
        let a = start(&t, "a1").await;
        cancel(&t, run, false).await;
        t.clock.advance(Duration::from_secs(300));
        let before = t.clock.now().minus(Duration::from_secs(240));
        let deadline = Some(t.clock.now().plus(Duration::from_secs(60)));
        assert_eq!(t.store.job_cancelling(a.job_ref, agent("a1"), deadline).await.unwrap(), Guarded::Applied);
        assert!(t.store.runs_cancelling_since(before, 5).await.unwrap().is_empty(), "its agent has said until when");
        t.clock.advance(Duration::from_secs(61));
        assert_eq!(t.store.runs_cancelling_since(before, 5).await.unwrap(), [run]);
        let effects = cancel(&t, run, true).await;
        assert!(effects.run_finished);
        assert_eq!(effects.to_stop[0].job, a.job_ref);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_lost_while_cancelling_completes_the_cancel() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").create(&t).await.run_id;
        let a = start(&t, "a1").await;
        cancel(&t, run, false).await;
        let fail = FailRequest {
            job: a.job_ref,
            only_from: Vec::new(),
            queue_status: QueueStatus::Failed,
            reason: FailureReason::AgentLost,
            message: "agent a1 is gone".to_owned(),
            retry: false,
        };
        let JobFinished::Applied(effects) = t.store.job_fail(fail, enqueue()).await.unwrap() else { panic!() };
        assert_eq!((effects.run.status, effects.run_finished), (RunStatus::Cancelled, true));
        assert_eq!(effects.finished_jobs[0].status, JobStatus::Cancelled);
    })
    .await;
}

/// A run with a job, one that needs it, and the job of the workflow's hooks, which needs both however they end.
fn hooked() -> Plan {
    let all: Vec<JobStatus> = JobStatus::terminal().collect();
    let plan = Plan::new("k").queued("a").job("b").job(RUN_HOOKS_JOB).needs("b", "a", &[JobStatus::Success]);
    plan.needs(RUN_HOOKS_JOB, "a", &all).needs(RUN_HOOKS_JOB, "b", &all)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hooks_of_a_workflow_run_after_a_cancel_that_cut_something_off() {
    TestStore::each(|t| async move {
        let run = hooked().create(&t).await.run_id;
        let a = start(&t, "a1").await;
        let effects = cancel(&t, run, false).await;
        assert_eq!((effects.run.status, effects.run_finished), (RunStatus::Cancelling, false));
        assert!(claim(&t, "a2", 5).await.is_empty(), "not before everything else has ended");
        let effects = finish(&t, &a, JobStatus::Cancelled).await;
        assert_eq!((effects.newly_queued.len(), effects.run.status), (1, RunStatus::Cancelling));
        let hooks = start(&t, "a2").await;
        assert_eq!((hooks.job.name.as_str(), hooks.needs["a"].status), (RUN_HOOKS_JOB, JobStatus::Cancelled));
        let minutes = |n: u64| Duration::from_secs(60 * n);
        let late = async |t: &TestStore| {
            let before = t.clock.now().minus(minutes(4));
            t.store.runs_cancelling_since(before, 5).await.unwrap()
        };
        t.clock.advance(minutes(20));
        assert!(late(&t).await.is_empty(), "the hooks have their own limits");
        t.clock.advance(minutes(20));
        assert_eq!(late(&t).await, [run], "but not for ever");
        let effects = finish(&t, &hooks, JobStatus::Success).await;
        assert_eq!((effects.run.status, effects.run_finished), (RunStatus::Cancelled, true));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_hooks_of_a_workflow_run_before_it_began_or_after_a_forced_cancel() {
    TestStore::each(|t| async move {
        let run = hooked().create(&t).await.run_id;
        assert!(cancel(&t, run, false).await.run_finished);
        assert!(statuses(&t, run).await.iter().all(|(_, status)| *status == JobStatus::Cancelled));
        let plan = hooked();
        let run =
            t.store.run_create(NewRun { dedup_key: "k2".into(), ..plan.run() }, None, enqueue()).await.unwrap().run_id;
        start(&t, "a1").await;
        cancel(&t, run, false).await;
        assert!(cancel(&t, run, true).await.run_finished);
        assert!(claim(&t, "a2", 5).await.is_empty());
    })
    .await;
}
