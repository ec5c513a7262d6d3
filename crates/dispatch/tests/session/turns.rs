//! Turns in concurrency groups and retries, as agents see them.

use std::time::Duration;

use kici_engine::concurrency::SlotAsk;
use kici_engine::ids::{JobId, RunId};
use kici_engine::lock::Retry;
use kici_engine::state::{FailureClass, FailureReason, JobStatus, RunStatus};
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;

use crate::support::*;

async fn grouped(world: &World, cancel_in_progress: bool) -> (RunId, JobId) {
    let defs = [job("deploy")];
    let (mut run, (id, jobs)) = world.new_run(&defs, None, &workflow(&defs));
    run.concurrency = Some(SlotAsk { group: "prod".into(), max: 1, cancel_in_progress });
    world.create_run(run).await;
    (id, jobs[0])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_run_holds_no_agent_and_goes_on_when_the_slot_comes_free() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (_, first) = grouped(&world, false).await;
        let (_, second) = grouped(&world, false).await;
        let running = agent.offer().await.job.unwrap();
        assert_eq!(job_ref(&running).job_id, first);
        assert!(agent.begin(&running).await);
        assert!(agent.quiet().await, "the second one waits for the first, not for an agent");
        assert_eq!(world.job(second).await.status, JobStatus::Waiting);
        agent.update(&running, "success", "").await;
        assert_eq!(job_ref(&agent.offer().await.job.unwrap()).job_id, second);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_20_old_and_new_never_overlap_when_the_new_one_cancels() {
    each(async |world| {
        let mut one = Agent::connect(&world, "a1").await;
        let (old, _) = grouped(&world, true).await;
        let running = one.offer().await.job.unwrap();
        assert!(one.begin(&running).await);
        let mut two = Agent::connect(&world, "a2").await;
        let (new, job) = grouped(&world, true).await;
        let Down::JobCancel(cancel) = one.next().await else { panic!("a cancel") };
        assert!(!cancel.force, "as if a person had cancelled it");
        assert!(two.quiet().await, "the old one still unwinds");
        let run = world.store.run_get(old).await.unwrap().unwrap();
        assert_eq!((run.cancelled_by, run.failure_reason), (Some(new.to_string()), Some(FailureReason::Superseded)));
        one.update(&running, "cancelled", "superseded").await;
        world.until_run(old, RunStatus::Cancelled).await;
        let offer = tokio::select! { offer = one.offer() => offer, offer = two.offer() => offer };
        assert_eq!(job_ref(&offer.job.unwrap()).job_id, job);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_orchestrator_had_not_told_is_told_by_the_next() {
    kici_store::testing::TestStore::each(async |stored: kici_store::testing::TestStore| {
        // The first one never starts its tasks: it dies right after the commit that passes the slot on.
        let dead = World::new(stored.store.clone(), config("node-1"), stored.clock.clone(), None);
        let (first, _) = grouped(&dead, false).await;
        let (_, second) = grouped(&dead, false).await;
        let request = kici_store::model::CancelRequest {
            run_id: first,
            by: "user".into(),
            reason: FailureReason::CancelledByUser,
            force: false,
        };
        stored.store.run_cancel(request, dead.dispatcher.activate()).await.unwrap();
        assert_eq!(dead.job(second).await.status, JobStatus::Waiting);

        let next = World::new(stored.store.clone(), config("node-1"), stored.clock.clone(), None);
        next.dispatcher.start().await.unwrap();
        let mut agent = Agent::connect(&next, "a1").await;
        assert_eq!(job_ref(&agent.offer().await.job.unwrap()).job_id, second);
        next.dispatcher.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_a_slot_ends_at_its_limit() {
    let short = |config: &mut kici_dispatch::DispatchConfig| config.concurrency_wait = Duration::from_millis(200);
    each_with(short, async |world| {
        let (_, first) = grouped(&world, false).await;
        let (run, job) = grouped(&world, false).await;
        let sweep =
            |name: &'static str| world.dispatcher.reconcilers().into_iter().find(|sweep| sweep.name() == name).unwrap();
        while sweep("dispatch_long_waits").run().await.unwrap() == 0 {
            tokio::task::yield_now().await;
        }
        world.until_run(run, RunStatus::Failed).await;
        let job = world.job(job).await;
        assert_eq!(
            (job.failure_reason, job.failure_class),
            (Some(FailureReason::ConcurrencyWait), Some(FailureClass::Timeout))
        );
        assert!(job.failure_message.unwrap().contains("concurrency.wait_timeout_ms"));
        assert_eq!(world.job(first).await.status, JobStatus::Queued);
        assert_eq!(sweep("dispatch_left_slots").run().await.unwrap(), 0);
    })
    .await;
}

async fn stubborn(world: &World, on: &[FailureClass]) -> (RunId, JobId) {
    let defs = [job("build")];
    let mut workflow = workflow(&defs);
    workflow.jobs[0].retry = Some(Retry { attempts: 1, on: on.to_vec() });
    let (run, (id, jobs)) = world.new_run(&defs, None, &workflow);
    world.create_run(run).await;
    (id, jobs[0])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_is_offered_again_under_a_new_epoch_until_no_attempt_is_left() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, id) = stubborn(&world, &[FailureClass::User]).await;
        let first = agent.offer().await.job.unwrap();
        assert!(agent.begin(&first).await);
        agent.update(&first, "failed", "step_failed").await;
        let second = agent.offer().await.job.unwrap();
        assert_eq!((job_ref(&second).job_id, second.dispatch_epoch), (id, 2));
        assert_eq!(world.job(id).await.attempt, 2);
        assert!(agent.begin(&second).await);
        agent.update(&second, "failed", "step_failed").await;
        world.until_run(run, RunStatus::Failed).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_job_of_a_lost_agent_is_tried_again_elsewhere_after_the_recovery_window() {
    each(async |world| {
        let mut lost = Agent::connect(&world, "a1").await;
        let (_, id) = stubborn(&world, &[FailureClass::Lost]).await;
        let first = lost.offer().await.job.unwrap();
        assert!(lost.begin(&first).await);
        lost.drop_connection();
        world.until(id, &[JobStatus::Recovering]).await;
        let mut other = Agent::connect(&world, "a2").await;
        let again = other.offer().await.job.unwrap();
        assert_eq!((job_ref(&again).job_id, again.dispatch_epoch), (id, 2));
        // The first agent comes back too late.
        let back = Register { in_flight_jobs: vec![held(&first, true)], ..register("a1", &["default"]) };
        let agent = Agent::with(&world, back, "").await.unwrap();
        assert_eq!(agent.ack.job_verdicts[0].verdict(), Verdict::Abandon);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_job_of_an_agent_that_lets_jobs_go_on_is_never_tried_again() {
    each(async |world| {
        let stays = Register { keep_running_when_fenced: true, ..register("a1", &["default"]) };
        let mut lost = Agent::with(&world, stays, "").await.unwrap();
        let (run, id) = stubborn(&world, &[FailureClass::Lost]).await;
        let first = lost.offer().await.job.unwrap();
        assert!(lost.begin(&first).await);
        lost.drop_connection();
        world.until_run(run, RunStatus::Failed).await;
        assert_eq!(world.job(id).await.failure_reason, Some(FailureReason::AgentLost));
    })
    .await;
}
