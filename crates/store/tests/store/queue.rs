//! Claims, answers, losses.

use std::time::Duration;

use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_engine::time::Clock;
use kici_store::model::*;
use kici_store::testing::{TestStore, agent, instance};
use tokio_util::sync::CancellationToken;

use crate::fixtures::{Plan, claim, enqueue, entry, finish, result, selector, start, status_of};

const WINDOW: Duration = Duration::from_secs(120);

fn requeue(job: &ClaimedJob, from: RequeueFrom, budget: u32) -> RequeueRequest {
    RequeueRequest { job: job.job_ref, from, reason: "no answer".to_owned(), budget, counts: true, expires_at: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_and_most_urgent_rows_of_matching_selectors_are_claimed() {
    TestStore::each(|t| async move {
        for (key, label, priority) in [("1", "default", 0), ("2", "gpu", 0), ("3", "arm", 0), ("4", "default", 5)] {
            let start = JobStart::Queued(QueueEntry { priority, ..entry(label) });
            Plan::new(key).with(key, key, |job| job.start = start).create(&t).await;
            t.clock.advance(Duration::from_secs(1));
        }
        let mut pending = t.store.queue_selectors_pending().await.unwrap();
        pending.sort_by_key(|p| p.waiting);
        assert_eq!(pending.iter().map(|p| p.waiting).collect::<Vec<_>>(), [1, 1, 2]);
        let wanted = [selector("default"), selector("gpu")];
        let digests: Vec<_> = pending.into_iter().filter(|p| wanted.contains(&p.selector)).map(|p| p.digest).collect();
        let request = |name: &str, limit| ClaimRequest {
            agent_id: agent(name),
            digests: digests.clone(),
            limit,
            except: Vec::new(),
        };
        let claimed = t.store.queue_claim(vec![request("a1", 2), request("a2", 5)]).await.unwrap();
        let found: Vec<_> = claimed.iter().map(|c| (c.agent_id.as_str(), c.job.name.as_str())).collect();
        assert_eq!(found, [("a1", "4"), ("a1", "1"), ("a2", "2")]);
        assert!(t.store.queue_claim(vec![request("a3", 5)]).await.unwrap().is_empty());
        let counts = t.store.queue_counts().await.unwrap();
        assert_eq!(counts, QueueCounts { pending: 1, dispatched: 3, recovering: 0 });
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_passes_over_rejected_and_expired_rows_and_a_claim_by_id_takes_one() {
    TestStore::each(|t| async move {
        let soon = t.clock.now().plus(Duration::from_secs(10));
        let start = JobStart::Queued(QueueEntry { expires_at: Some(soon), ..entry("default") });
        let run = Plan::new("k").with("a", "a", |job| job.start = start).queued("b").create(&t).await.run_id;
        let digests: Vec<_> = t.store.queue_selectors_pending().await.unwrap().into_iter().map(|p| p.digest).collect();
        assert_eq!(digests.len(), 1);
        let jobs = t.store.jobs_of_run(run).await.unwrap();
        let request = ClaimRequest { agent_id: agent("a1"), digests, limit: 5, except: vec![jobs[1].id] };
        t.clock.advance(Duration::from_secs(11));
        assert!(t.store.queue_claim(vec![request]).await.unwrap().is_empty());
        assert_eq!(t.store.queue_expired_pending(5).await.unwrap()[0].job_id, jobs[0].id);
        assert!(t.store.queue_claim_by_id(jobs[0].id, agent("a1")).await.unwrap().is_none());
        let b = t.store.queue_claim_by_id(jobs[1].id, agent("a1")).await.unwrap().unwrap();
        assert_eq!((b.job.name.as_str(), b.job_ref.epoch), ("b", 1));
        assert!(t.store.queue_claim_by_id(jobs[1].id, agent("a2")).await.unwrap().is_none());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_came_first_wins_over_its_deadline() {
    TestStore::each(|t| async move {
        Plan::new("k").queued("a").queued("b").create(&t).await;
        let claimed = claim(&t, "a1", 2).await;
        let (early, silent) = (&claimed[0], &claimed[1]);
        let deadline = t.clock.now().plus(Duration::from_secs(10));
        assert_eq!(t.store.queue_ack(early.job_ref, agent("a2")).await.unwrap(), Guarded::Lost);
        assert_eq!(t.store.queue_ack(early.job_ref, agent("a1")).await.unwrap(), Guarded::Applied);
        assert_eq!(t.store.queue_ack_arm(early.job_ref, agent("a1"), deadline).await.unwrap(), Guarded::Lost);
        assert_eq!(t.store.queue_ack_arm(silent.job_ref, agent("a1"), deadline).await.unwrap(), Guarded::Applied);
        assert!(t.store.queue_expired_acks(5).await.unwrap().is_empty());
        t.clock.advance(Duration::from_secs(10));
        assert_eq!(t.store.queue_expired_acks(5).await.unwrap()[0].job_ref(), silent.job_ref);
        let from = RequeueFrom::AwaitingAck(agent("a1"));
        let lost = t.store.queue_requeue(requeue(early, from.clone(), 5), enqueue()).await.unwrap();
        assert!(matches!(lost, Requeued::Lost));
        let back = t.store.queue_requeue(requeue(silent, from, 5), enqueue()).await.unwrap();
        assert!(matches!(back, Requeued::Requeued { attempts: 1 }));
        let again = claim(&t, "a2", 1).await.pop().unwrap();
        assert_eq!((again.job.id, again.job_ref.epoch), (silent.job.id, 2));
        let owns = |job, name| t.store.queue_ownership(job, agent(name));
        assert_eq!(owns(again.job_ref, "a2").await.unwrap(), Ownership::Owned);
        assert_eq!(owns(silent.job_ref, "a1").await.unwrap(), Ownership::FormerlyOwned);
        assert_eq!(owns(again.job_ref, "a1").await.unwrap(), Ownership::NotOwned);
        assert_eq!(
            t.store.job_start(silent.job_ref, agent("a1"), Default::default()).await.unwrap(),
            StartVerdict::Denied
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_is_granted_once_and_confirmed_again() {
    TestStore::each(|t| async move {
        let plan = Plan::new("k").queued("a").queued("b");
        let mut run = plan.run();
        run.timeout = Some(Duration::from_secs(60));
        let run = t.store.run_create(run, None, enqueue()).await.unwrap().run_id;
        let claimed = claim(&t, "a1", 2).await;
        let ask = |n: usize, name| t.store.job_start(claimed[n].job_ref, agent(name), Default::default());
        assert_eq!(ask(0, "a2").await.unwrap(), StartVerdict::Denied);
        let withdrawn = CancellationToken::new();
        withdrawn.cancel();
        let late = t.store.job_start(claimed[0].job_ref, agent("a1"), withdrawn).await;
        assert_eq!(late.unwrap(), StartVerdict::Denied, "nobody hears the answer");
        assert_eq!(ask(0, "a1").await.unwrap(), StartVerdict::Granted { run_started: true });
        assert_eq!(ask(0, "a1").await.unwrap(), StartVerdict::AlreadyGranted);
        assert_eq!(ask(1, "a1").await.unwrap(), StartVerdict::Granted { run_started: false });
        let run = t.store.run_get(run).await.unwrap().unwrap();
        assert_eq!(run.deadline, Some(t.clock.now().plus(Duration::from_secs(60))));
        t.clock.advance(Duration::from_secs(61));
        assert_eq!(t.store.runs_past_deadline(5).await.unwrap(), [run.id]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_undone_deliveries_fail_the_job() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").create(&t).await.run_id;
        for attempt in 1..=5 {
            let job = claim(&t, "a1", 1).await.pop().unwrap();
            let request = requeue(&job, RequeueFrom::NotStarted(agent("a1")), 5);
            match t.store.queue_requeue(request, enqueue()).await.unwrap() {
                Requeued::Requeued { attempts } => assert_eq!((attempts, attempts < 5), (attempt, true)),
                Requeued::GaveUp(effects) => {
                    assert_eq!((attempt, effects.run_finished), (5, true));
                    assert_eq!(effects.finished_jobs[0].reason, Some(FailureReason::GaveUp));
                }
                Requeued::Lost => panic!(),
            }
        }
        assert_eq!(t.store.run_get(run).await.unwrap().unwrap().status, RunStatus::Failed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_agent_comes_back_or_its_jobs_end() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").queued("b").create(&t).await.run_id;
        let (a, b) = (start(&t, "a1").await, start(&t, "a1").await);
        assert_eq!(t.store.queue_owned_by(agent("a1")).await.unwrap().len(), 2);
        let deadline = t.clock.now().plus(WINDOW);
        for job in [&a, &b] {
            let request = RecoverRequest { job: job.job_ref, agent_id: agent("a1"), deadline };
            assert_eq!(t.store.queue_recover(request.clone()).await.unwrap(), Guarded::Applied);
            assert_eq!(t.store.queue_recover(request).await.unwrap(), Guarded::Lost);
        }
        assert_eq!(status_of(&t, run, "a").await, JobStatus::Recovering);
        let resumed = t.store.queue_resume(a.job_ref, agent("a1")).await.unwrap();
        assert_eq!(resumed, Resumed::Resumed { started: true, cancelling: false });
        assert_eq!(t.store.queue_resume(a.job_ref, agent("a2")).await.unwrap(), Resumed::Abandon);
        assert_eq!(status_of(&t, run, "a").await, JobStatus::Running);
        finish(&t, &a, JobStatus::Success).await;

        t.clock.advance(WINDOW);
        let expired = t.store.queue_expired_recoveries(5).await.unwrap();
        assert_eq!(expired.iter().map(QueueRow::job_ref).collect::<Vec<_>>(), [b.job_ref]);
        let request = FailRequest {
            job: b.job_ref,
            only_from: vec![QueueStatus::Recovering],
            queue_status: QueueStatus::Failed,
            reason: FailureReason::AgentLost,
            message: "agent a1 did not come back within 120 s".to_owned(),
            retry: false,
        };
        let JobFinished::Applied(effects) = t.store.job_fail(request.clone(), enqueue()).await.unwrap() else {
            panic!()
        };
        assert_eq!((effects.run_finished, effects.run.status), (true, RunStatus::Failed));
        let again = t.store.job_fail(request, enqueue()).await.unwrap();
        assert!(matches!(again, JobFinished::Duplicate(JobStatus::Failed)));
        assert_eq!(t.store.queue_get(b.job.id).await.unwrap().unwrap().status, QueueStatus::Failed);
        let late = t.store.job_finish(result(&b, JobStatus::Success), enqueue()).await.unwrap();
        assert!(matches!(late, JobFinished::Duplicate(JobStatus::Failed)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_from_a_recovering_agent_counts() {
    TestStore::each(|t| async move {
        Plan::new("k").queued("a").create(&t).await;
        let job = start(&t, "a1").await;
        let deadline = t.clock.now().plus(WINDOW);
        let request = RecoverRequest { job: job.job_ref, agent_id: agent("a1"), deadline };
        t.store.queue_recover(request).await.unwrap();
        assert!(finish(&t, &job, JobStatus::Success).await.run_finished);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_moved_to_a_live_sibling_is_left_alone() {
    let Some(t) = TestStore::postgres().await else { return };
    Plan::new("k").queued("a").create(&t).await;
    let job = start(&t, "a1").await;
    let sibling = t.sibling("node-2").await;
    let beat = |name: &str| Instance {
        instance_id: instance(name),
        incarnation: uuid::Uuid::nil(),
        role: "coordinator".to_owned(),
        address: None,
        version: "0.1.0".to_owned(),
        started_at: t.clock.now(),
        last_seen_at: t.clock.now(),
        draining: false,
    };
    sibling.instance_heartbeat(beat("node-2")).await.unwrap();
    assert!(matches!(sibling.queue_resume(job.job_ref, agent("a1")).await.unwrap(), Resumed::Resumed { .. }));
    let deadline = t.clock.now().plus(WINDOW);
    let request = RecoverRequest { job: job.job_ref, agent_id: agent("a1"), deadline };
    assert_eq!(t.store.queue_recover(request.clone()).await.unwrap(), Guarded::Lost);
    t.clock.advance(Duration::from_secs(121));
    let dead = t.clock.now().minus(Duration::from_secs(120));
    assert_eq!(t.store.instance_dead(dead).await.unwrap(), [instance("node-2")]);
    assert_eq!(t.store.queue_owned_by_instances(vec![instance("node-2")]).await.unwrap().len(), 1);
    assert_eq!(t.store.queue_recover(request).await.unwrap(), Guarded::Applied);
    sibling.instance_remove(instance("node-2")).await.unwrap();
    assert_eq!(t.store.instance_dead(dead).await.unwrap(), [instance("node-2")], "it stopped and left a job");
    sibling.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_is_found_by_the_sweeps() {
    TestStore::each(|t| async move {
        let plan = Plan::new("k").with("a", "a", |job| {
            job.timeout = Some(Duration::from_secs(30));
            job.start = JobStart::Queued(entry("default"));
        });
        plan.queued("b").create(&t).await;
        let a = start(&t, "a1").await;
        let b = claim(&t, "a1", 1).await.pop().unwrap();
        t.clock.advance(Duration::from_secs(100));
        t.store.job_heartbeats(vec![(b.job_ref, t.clock.now())]).await.unwrap();
        let before = t.clock.now().minus(Duration::from_secs(50));
        let stale = t.store.jobs_stale(before, 5).await.unwrap();
        assert_eq!(stale.iter().map(|held| held.job).collect::<Vec<_>>(), [a.job_ref]);
        assert!(t.store.queue_unstarted_since(before, 5).await.unwrap().is_empty());
        assert_eq!(t.store.queue_unstarted_since(t.clock.now().plus(WINDOW), 5).await.unwrap().len(), 1);
        assert!(t.store.jobs_past_timeout(Duration::from_secs(70), 5).await.unwrap().is_empty());
        assert_eq!(t.store.jobs_past_timeout(Duration::from_secs(69), 5).await.unwrap()[0].job, a.job_ref);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_routing_reason_keeps_its_start_and_goes_with_the_claim() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").create(&t).await.run_id;
        let job_id = t.store.jobs_of_run(run).await.unwrap()[0].id;
        let since = t.clock.now();
        let routing = |since| Routing { job_id, reason: Some("no agent".to_owned()), unroutable_since: since };
        t.store.queue_routing_set(vec![routing(Some(since))]).await.unwrap();
        t.store.queue_routing_set(vec![routing(Some(since.plus(WINDOW)))]).await.unwrap();
        let row = t.store.queue_get(job_id).await.unwrap().unwrap();
        assert_eq!(row.unroutable_since, Some(since));
        assert_eq!(t.store.job_get(job_id).await.unwrap().unwrap().routing_reason.as_deref(), Some("no agent"));
        claim(&t, "a1", 1).await;
        assert_eq!(t.store.job_get(job_id).await.unwrap().unwrap().routing_reason, None);
        assert_eq!(t.store.queue_get(job_id).await.unwrap().unwrap().unroutable_since, None);
        // Whoever looked before the claim and writes after it: nothing is left to explain.
        t.store.queue_routing_set(vec![routing(Some(since))]).await.unwrap();
        assert_eq!(t.store.job_get(job_id).await.unwrap().unwrap().routing_reason, None);
        assert_eq!(t.store.queue_get(job_id).await.unwrap().unwrap().unroutable_since, None);
        let filter = QueueFilter { agent_id: Some(agent("a1")), limit: 10, ..QueueFilter::default() };
        assert_eq!(t.store.queue_list(filter).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_does_not_count_uses_up_no_budget_and_no_time_is_added() {
    TestStore::each(|t| async move {
        let limit = t.clock.now().plus(WINDOW);
        let start = JobStart::Queued(QueueEntry { expires_at: Some(limit), ..entry("default") });
        Plan::new("k").with("a", "a", |job| job.start = start).create(&t).await;
        for epoch in 1..=10 {
            let claimed = claim(&t, "a1", 1).await.pop().unwrap();
            assert_eq!(claimed.job_ref.epoch, epoch);
            let later = Some(t.clock.now().plus(WINDOW * 2));
            let free = RequeueRequest {
                counts: false,
                expires_at: later,
                ..requeue(&claimed, RequeueFrom::NotStarted(agent("a1")), 2)
            };
            let done = t.store.queue_requeue(free, enqueue()).await.unwrap();
            assert!(matches!(done, Requeued::Requeued { attempts: 0 }), "{done:?}");
            let row = t.store.queue_get(claimed.job_ref.job_id).await.unwrap().unwrap();
            assert_eq!((row.status, row.dispatch_attempts, row.expires_at), (QueueStatus::Pending, 0, Some(limit)));
        }
        let claimed = claim(&t, "a1", 1).await.pop().unwrap();
        let done =
            t.store.queue_requeue(requeue(&claimed, RequeueFrom::NotStarted(agent("a1")), 2), enqueue()).await.unwrap();
        assert!(matches!(done, Requeued::Requeued { attempts: 1 }), "{done:?}");
        let claimed = claim(&t, "a1", 1).await.pop().unwrap();
        let done =
            t.store.queue_requeue(requeue(&claimed, RequeueFrom::NotStarted(agent("a1")), 2), enqueue()).await.unwrap();
        assert!(matches!(done, Requeued::GaveUp(_)), "{done:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_asks_for_a_job_which_waits_for_it_has_come_back() {
    TestStore::each(|t| async move {
        Plan::new("k").queued("a").queued("b").create(&t).await;
        let started = start(&t, "a1").await;
        let unstarted = claim(&t, "a1", 1).await.pop().unwrap();
        for job in [&started, &unstarted] {
            let request =
                RecoverRequest { job: job.job_ref, agent_id: agent("a1"), deadline: t.clock.now().plus(WINDOW) };
            assert_eq!(t.store.queue_recover(request).await.unwrap(), Guarded::Applied);
        }
        let ask =
            async |job: JobRef, who: &str| t.store.job_start(job, agent(who), CancellationToken::new()).await.unwrap();
        assert_eq!(ask(started.job_ref, "a2").await, StartVerdict::Denied);
        let older = JobRef { epoch: 0, ..started.job_ref };
        assert_eq!(ask(older, "a1").await, StartVerdict::Denied);
        assert_eq!(ask(started.job_ref, "a1").await, StartVerdict::AlreadyGranted);
        assert!(matches!(ask(unstarted.job_ref, "a1").await, StartVerdict::Granted { .. }));
        for job in [&started, &unstarted] {
            let row = t.store.queue_get(job.job_ref.job_id).await.unwrap().unwrap();
            assert_eq!((row.status, row.recovery_deadline), (QueueStatus::Dispatched, None));
            assert_eq!(t.store.job_get(job.job_ref.job_id).await.unwrap().unwrap().status, JobStatus::Running);
        }
    })
    .await;
}
