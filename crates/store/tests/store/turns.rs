//! Turns in concurrency groups, retries, and the limit of the queue.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kici_engine::concurrency::SlotAsk;
use kici_engine::ids::RunId;
use kici_engine::lock::Retry;
use kici_engine::state::{FailureClass, FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_engine::time::{Clock, Ts};
use kici_store::model::*;
use kici_store::testing::{TestStore, agent};

use crate::fixtures::{Plan, claim, enqueue, entry, finish, result, start, status_of, statuses};

fn ask(group: &str) -> SlotAsk {
    SlotAsk { group: group.to_owned(), max: 1, cancel_in_progress: false }
}

fn newest_wins(group: &str) -> SlotAsk {
    SlotAsk { cancel_in_progress: true, ..ask(group) }
}

async fn create(t: &TestStore, key: &str, slot: Option<SlotAsk>) -> RunId {
    let mut run = Plan::new(key).queued("a").run();
    run.concurrency = slot;
    t.clock.advance(Duration::from_millis(1));
    t.store.run_create(run, None, enqueue()).await.unwrap().run_id
}

/// What the dispatcher does with news.
async fn spread(store: &kici_store::Store, activate: &Arc<dyn Activate>) {
    for news in store.slot_news(100).await.unwrap() {
        match news.superseded_by {
            None => drop(store.run_advance(news.run_id, activate.clone()).await.unwrap()),
            Some(newer) => {
                let (by, reason) = (newer.to_string(), FailureReason::Superseded);
                let request = CancelRequest { run_id: news.run_id, by, reason, force: false };
                store.run_cancel(request, activate.clone()).await.unwrap();
            }
        }
    }
}

async fn slot_of(t: &TestStore, run: RunId) -> Slot {
    t.store.slots_of_run(run).await.unwrap().pop().expect("a slot")
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_a_group_take_turns_in_the_order_of_their_age() {
    TestStore::each(|t| async move {
        let (first, second, third) = (
            create(&t, "1", Some(ask("g"))).await,
            create(&t, "2", Some(ask("g"))).await,
            create(&t, "3", Some(ask("g"))).await,
        );
        let other = create(&t, "other", Some(ask("another group"))).await;
        assert_eq!(status_of(&t, first, "a").await, JobStatus::Queued);
        assert_eq!(status_of(&t, other, "a").await, JobStatus::Queued);
        assert_eq!(status_of(&t, second, "a").await, JobStatus::Waiting);
        assert_eq!(t.store.run_get(second).await.unwrap().unwrap().status, RunStatus::Held);
        let slot = slot_of(&t, third).await;
        assert_eq!((slot.place, slot.waiting, slot.held_by), (Some(2), 2, vec![first]));
        assert_eq!(t.store.queue_counts().await.unwrap().pending, 2, "who waits has no row in the queue");

        let job = start(&t, "a1").await;
        assert_eq!(job.job.run_id, first);
        finish(&t, &job, JobStatus::Failed).await;
        // The slot is passed on in the transaction that ended its holder; the run learns of it next.
        let slot = slot_of(&t, second).await;
        assert_eq!(slot.status, SlotStatus::Active);
        assert_eq!(status_of(&t, second, "a").await, JobStatus::Waiting);
        spread(&t.store, &enqueue()).await;
        assert_eq!(status_of(&t, second, "a").await, JobStatus::Queued);
        assert!(t.store.slot_news(10).await.unwrap().is_empty());
        assert_eq!(slot_of(&t, third).await.place, Some(1));
        assert_eq!(slot_of(&t, first).await.status, SlotStatus::Completed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_run_that_is_cancelled_leaves_the_queue_and_frees_nobody() {
    TestStore::each(|t| async move {
        let first = create(&t, "1", Some(ask("g"))).await;
        let second = create(&t, "2", Some(ask("g"))).await;
        let third = create(&t, "3", Some(ask("g"))).await;
        let request = |run_id| CancelRequest {
            run_id,
            by: "user ann".to_owned(),
            reason: FailureReason::CancelledByUser,
            force: false,
        };
        t.store.run_cancel(request(second), enqueue()).await.unwrap();
        assert_eq!(t.store.run_get(second).await.unwrap().unwrap().status, RunStatus::Cancelled);
        assert_eq!(slot_of(&t, second).await.status, SlotStatus::Cancelled);
        assert_eq!(status_of(&t, third, "a").await, JobStatus::Waiting);
        // One that waits for an agent has the slot all the same.
        t.store.run_cancel(request(first), enqueue()).await.unwrap();
        spread(&t.store, &enqueue()).await;
        assert_eq!(status_of(&t, third, "a").await, JobStatus::Queued);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_run_gets_the_slot_only_when_the_older_one_has_ended() {
    TestStore::each(|t| async move {
        let first = create(&t, "1", Some(newest_wins("g"))).await;
        let old = start(&t, "a1").await;
        let second = create(&t, "2", Some(newest_wins("g"))).await;
        let third = create(&t, "3", Some(newest_wins("g"))).await;
        spread(&t.store, &enqueue()).await;
        let run = t.store.run_get(second).await.unwrap().unwrap();
        assert_eq!(run.status, RunStatus::Cancelled, "what never started is superseded at once");
        assert_eq!((run.failure_reason, run.cancelled_by), (Some(FailureReason::Superseded), Some(third.to_string())));
        assert_eq!(status_of(&t, first, "a").await, JobStatus::Cancelling);
        assert_eq!(status_of(&t, third, "a").await, JobStatus::Waiting, "the old one still unwinds");
        assert!(t.store.slot_news(10).await.unwrap().is_empty());

        finish(&t, &old, JobStatus::Cancelled).await;
        spread(&t.store, &enqueue()).await;
        assert_eq!(status_of(&t, third, "a").await, JobStatus::Queued);
    })
    .await;
}

fn job_slots(key: &str, group: &str, names: &[&str]) -> NewRun {
    let mut plan = Plan::new(key);
    for name in names {
        let slot = Some(ask(group));
        plan = plan.with(name, name, |job| job.start = JobStart::Queued(QueueEntry { slot, ..entry("default") }));
    }
    plan.run()
}

/// Sends jobs to the queue that ask for a slot of a group.
struct Grouped(&'static str);

impl Activate for Grouped {
    fn activate(&self, _: &ReadyJob) -> Activation {
        Activation::Enqueue(QueueEntry { slot: Some(ask(self.0)), ..entry("default") })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_take_turns_across_runs_and_within_one() {
    TestStore::each(|t| async move {
        let grouped: Arc<dyn Activate> = Arc::new(Grouped("deploy"));
        let one = t.store.run_create(job_slots("1", "deploy", &["a", "b"]), None, grouped.clone()).await.unwrap();
        t.clock.advance(Duration::from_millis(1));
        let two = t.store.run_create(job_slots("2", "deploy", &["c"]), None, grouped.clone()).await.unwrap();
        assert_eq!(one.ready.len(), 1);
        let expect = async |expected: [JobStatus; 3]| {
            let mut found: Vec<_> = statuses(&t, one.run_id).await.into_iter().map(|(_, status)| status).collect();
            found.push(status_of(&t, two.run_id, "c").await);
            assert_eq!(found, expected);
        };
        use JobStatus::{Queued, Success, Waiting};
        expect([Queued, Waiting, Waiting]).await;
        for expected in [[Success, Queued, Waiting], [Success, Success, Queued], [Success, Success, Success]] {
            let job = start(&t, "a1").await;
            let done = t.store.job_finish(result(&job, JobStatus::Success), grouped.clone()).await.unwrap();
            assert!(matches!(done, JobFinished::Applied(_)), "{done:?}");
            spread(&t.store, &grouped).await;
            expect(expected).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_of_a_run_covers_its_jobs_of_the_same_group() {
    TestStore::each(|t| async move {
        let mut run = job_slots("1", "deploy", &["a", "b"]);
        run.concurrency = Some(ask("deploy"));
        let grouped: Arc<dyn Activate> = Arc::new(Grouped("deploy"));
        let created = t.store.run_create(run, None, grouped).await.unwrap();
        assert_eq!(created.ready.len(), 2);
        assert_eq!(t.store.slots_of_run(created.run_id).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_too_long_fails_with_the_class_timeout() {
    TestStore::each(|t| async move {
        let first = create(&t, "1", Some(ask("g"))).await;
        let mut run = Plan::new("2").queued("a").job("later").needs("later", "a", &[JobStatus::Failed]).run();
        run.concurrency = Some(ask("g"));
        let second = t.store.run_create(run, None, enqueue()).await.unwrap().run_id;
        let since = t.clock.now();
        assert!(t.store.slots_waiting_since(Ts::from_micros(0), 10).await.unwrap().is_empty());
        let waits = t.store.slots_waiting_since(since, 10).await.unwrap();
        assert_eq!(waits.iter().map(|wait| (wait.run_id, wait.job_id)).collect::<Vec<_>>(), [(second, None)]);
        let effects = t.store.slot_expire(waits[0].clone(), "too long".to_owned(), enqueue()).await.unwrap();
        let effects = effects.expect("it waited");
        assert!(effects.run_finished);
        assert_eq!(
            (effects.run.status, effects.run.failure_reason),
            (RunStatus::Failed, Some(FailureReason::ConcurrencyWait))
        );
        assert_eq!(FailureReason::ConcurrencyWait.class(), FailureClass::Timeout);
        let ends: Vec<_> = statuses(&t, second).await.into_iter().map(|(_, status)| status).collect();
        assert_eq!(ends, [JobStatus::Failed, JobStatus::Cancelled]);
        assert!(t.store.slot_expire(waits[0].clone(), "again".to_owned(), enqueue()).await.unwrap().is_none());
        assert_eq!(slot_of(&t, first).await.status, SlotStatus::Active);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_run_takes_its_turn_again() {
    TestStore::each(|t| async move {
        let first = create(&t, "1", Some(ask("g"))).await;
        let job = start(&t, "a1").await;
        finish(&t, &job, JobStatus::Failed).await;
        let second = create(&t, "2", Some(ask("g"))).await;
        let Rerun::Planned(again) = t.store.run_rerun_plan(first, false).await.unwrap() else { panic!() };
        let again = t.store.run_create(*again, None, enqueue()).await.unwrap().run_id;
        assert_eq!(status_of(&t, second, "a").await, JobStatus::Queued);
        assert_eq!(slot_of(&t, again).await.held_by, [second]);
    })
    .await;
}

/// Of each run the time in which it had its slot, from the history.
async fn intervals(t: &TestStore, runs: &[RunId]) -> Vec<(Ts, Ts)> {
    let mut intervals = Vec::new();
    for run in runs {
        for slot in t.store.slots_of_run(*run).await.unwrap() {
            assert!(slot.ended_at.is_some(), "{slot:?}");
            if let (Some(from), Some(to)) = (slot.acquired_at, slot.ended_at) {
                intervals.push((from, to));
            }
        }
    }
    intervals.sort();
    intervals
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_20_a_hundred_runs_on_two_coordinators_are_never_active_together() {
    let Some(t) = TestStore::postgres().await else { return };
    let other = t.sibling("node-2").await;
    let stores = [&t.store, &other];
    let creating = (0..100).map(|n| {
        let mut run = Plan::new(&format!("k{n}")).queued("a").run();
        run.concurrency = Some(ask("g"));
        stores[n % 2].run_create(run, None, enqueue())
    });
    let tick = async {
        let pace = Duration::from_millis(1);
        let mut ticks = tokio::time::interval(pace);
        loop {
            ticks.tick().await;
            t.clock.advance(pace);
        }
    };
    let work = async {
        let created = futures::future::try_join_all(creating).await.unwrap();
        let runs: Vec<RunId> = created.into_iter().map(|created| created.run_id).collect();
        let node = async |n: usize| {
            let mut taken = Vec::new();
            while !all_ended(stores[n]).await {
                spread(stores[n], &enqueue()).await;
                for job in claim_on(stores[n], &format!("a{n}")).await {
                    let (me, job_ref) = (job.agent_id.clone(), job.job_ref);
                    stores[n].job_start(job_ref, me, Default::default()).await.unwrap();
                    taken.push(job.job.run_id);
                    // The end is told to the other node every other time.
                    let teller = stores[(n + taken.len()) % 2];
                    teller.job_finish(result(&job, JobStatus::Success), enqueue()).await.unwrap();
                }
            }
            taken
        };
        let (one, two) = tokio::join!(node(0), node(1));
        let all: Vec<RunId> = one.into_iter().chain(two).collect();
        assert_eq!((all.len(), all.iter().collect::<BTreeSet<_>>().len()), (100, 100), "each ran once");
        let intervals = intervals(&t, &runs).await;
        assert_eq!(intervals.len(), 100);
        for pair in intervals.windows(2) {
            assert!(pair[0].1 <= pair[1].0, "two were active: {pair:?}");
        }
    };
    tokio::select! { () = work => {} () = tick => {} }
    other.close().await;
}

async fn all_ended(store: &kici_store::Store) -> bool {
    store.runs_open(1).await.unwrap().is_empty()
}

async fn claim_on(store: &kici_store::Store, name: &str) -> Vec<ClaimedJob> {
    let pending = store.queue_selectors_pending().await.unwrap();
    let digests = pending.into_iter().map(|selector| selector.digest).collect();
    let request = ClaimRequest { agent_id: agent(name), digests, limit: 5, except: Vec::new() };
    store.queue_claim(vec![request]).await.unwrap()
}

/// Sends everything to the queue, and tries again after a failure of these classes.
struct Stubborn(u32, Vec<FailureClass>);

impl Activate for Stubborn {
    fn activate(&self, _: &ReadyJob) -> Activation {
        Activation::Enqueue(entry("default"))
    }

    fn again(&self, _: &ReadyJob) -> Option<Again> {
        Some(Again { policy: Retry { attempts: self.0, on: self.1.clone() }, expires_at: None })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_tried_again_before_anything_terminal_is_written() {
    TestStore::each(|t| async move {
        let activate: Arc<dyn Activate> = Arc::new(Stubborn(1, vec![FailureClass::User]));
        let run = Plan::new("k").queued("a").job("b").needs("b", "a", &[JobStatus::Success]).create(&t).await.run_id;
        let first = start(&t, "a1").await;
        let step = crate::fixtures::step(&first, 0, kici_engine::state::StepStatus::Running, t.clock.now());
        t.store.step_upsert(vec![step]).await.unwrap();
        let done = t.store.job_finish(result(&first, JobStatus::Failed), activate.clone()).await.unwrap();
        let JobFinished::Applied(effects) = done else { panic!("{done:?}") };
        assert_eq!((effects.retried.as_slice(), effects.finished_jobs.len()), ([first.job_ref].as_slice(), 0));
        assert_eq!(effects.run.status, RunStatus::Running, "a run that has begun does not go back");
        let job = t.store.job_get(first.job.id).await.unwrap().unwrap();
        assert_eq!((job.status, job.attempt, job.agent_id, job.failure_reason), (JobStatus::Queued, 2, None, None));
        let row = t.store.queue_get(first.job.id).await.unwrap().unwrap();
        assert_eq!((row.status, row.started_at, row.dispatch_attempts), (QueueStatus::Pending, None, 0));
        // What the agent of the first attempt still says is refused.
        let late = t.store.job_finish(result(&first, JobStatus::Success), activate.clone()).await.unwrap();
        assert!(matches!(late, JobFinished::Stale), "{late:?}");

        let second = start(&t, "a2").await;
        assert_eq!(second.job_ref.epoch, 2);
        let steps = t.store.steps_of_job(first.job.id, 1).await.unwrap();
        assert_eq!(steps[0].status, kici_engine::state::StepStatus::Failed, "steps stay with their attempt");
        let history = t.store.dispatch_history(first.job.id).await.unwrap();
        assert_eq!(history[0].outcome.as_deref(), Some("retried"));
        assert!(history[0].reason.as_deref().unwrap().starts_with("step_failed: exit code 1"), "{history:?}");
        // No attempt is left.
        let done = t.store.job_finish(result(&second, JobStatus::Failed), activate).await.unwrap();
        let JobFinished::Applied(effects) = done else { panic!("{done:?}") };
        assert!(effects.run_finished && effects.run.status == RunStatus::Failed);
        assert_eq!(status_of(&t, run, "b").await, JobStatus::Skipped);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_failure_of_a_listed_class_is_tried_again_and_no_cancelled_run() {
    TestStore::each(|t| async move {
        let activate: Arc<dyn Activate> = Arc::new(Stubborn(3, vec![FailureClass::Lost]));
        Plan::new("1").queued("a").create(&t).await;
        let user = start(&t, "a1").await;
        let done = t.store.job_finish(result(&user, JobStatus::Failed), activate.clone()).await.unwrap();
        assert!(matches!(done, JobFinished::Applied(effects) if effects.run_finished));

        let lost = |job: &ClaimedJob, retry: bool| FailRequest {
            job: job.job_ref,
            only_from: Vec::new(),
            queue_status: QueueStatus::Failed,
            reason: FailureReason::AgentLost,
            message: "agent a1 is gone".to_owned(),
            retry,
        };
        Plan::new("2").queued("a").create(&t).await;
        let gone = start(&t, "a1").await;
        let done = t.store.job_fail(lost(&gone, true), activate.clone()).await.unwrap();
        assert!(matches!(done, JobFinished::Applied(effects) if !effects.retried.is_empty()));
        let gone = start(&t, "a2").await;
        let done = t.store.job_fail(lost(&gone, false), activate.clone()).await.unwrap();
        assert!(matches!(done, JobFinished::Applied(effects) if effects.run_finished), "it may still run there");

        let run = Plan::new("3").queued("a").create(&t).await.run_id;
        let gone = start(&t, "a1").await;
        let (by, reason) = ("user".to_owned(), FailureReason::CancelledByUser);
        t.store.run_cancel(CancelRequest { run_id: run, by, reason, force: false }, activate.clone()).await.unwrap();
        t.store.job_fail(lost(&gone, true), activate).await.unwrap();
        assert_eq!(t.store.run_get(run).await.unwrap().unwrap().status, RunStatus::Cancelled);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_10_a_full_queue_fails_new_jobs_and_takes_back_old_ones() {
    TestStore::each(|t| async move {
        let first = Plan::new("1").queued("a").create(&t).await.run_id;
        let job = claim(&t, "a1", 1).await.pop().unwrap();
        Plan::new("2").queued("a").create(&t).await;
        assert_eq!(t.store.queue_waiting(10).await.unwrap(), 1);
        t.store.limit_queue(1, 1);
        let full = Plan::new("3").queued("a").job("b").needs("b", "a", &[JobStatus::Success]).create(&t).await;
        assert_eq!((full.status, full.ready.len()), (RunStatus::Failed, 0));
        let jobs = t.store.jobs_of_run(full.run_id).await.unwrap();
        let first_job = (jobs[0].status, jobs[0].failure_reason, jobs[0].failure_class);
        assert_eq!(first_job, (JobStatus::Failed, Some(FailureReason::QueueFull), Some(FailureClass::Infra)));
        assert!(jobs[0].failure_message.as_deref().unwrap().contains("queue.max_depth"));
        assert_eq!(jobs[1].status, JobStatus::Skipped, "those that need it learn of it");

        let request = RequeueRequest {
            job: job.job_ref,
            from: RequeueFrom::NotStarted(agent("a1")),
            reason: "refused".to_owned(),
            budget: 5,
            counts: true,
            expires_at: None,
        };
        let back = t.store.queue_requeue(request, enqueue()).await.unwrap();
        assert!(matches!(back, Requeued::Requeued { .. }), "{back:?}");
        assert_eq!(status_of(&t, first, "a").await, JobStatus::Queued);
        // A later measurement finds room, which is then counted down.
        t.store.limit_queue(3, 2);
        assert_eq!(Plan::new("4").queued("a").queued("b").create(&t).await.ready.len(), 1);
    })
    .await;
}
