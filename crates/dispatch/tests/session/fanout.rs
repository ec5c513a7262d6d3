//! Jobs that run once on each host.

use std::time::Duration;

use crate::support::*;
use kici_engine::hosts::OnUnreachable;
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_store::model::DeclaredHost;

/// A host that an operator declared and whose agent is away.
async fn declare(world: &World, id: &str) {
    let declared = DeclaredHost {
        agent_id: instance(id),
        hostname: None,
        labels: Some(vec!["default".into()]),
        properties: Default::default(),
        by: "test".into(),
    };
    world.dispatcher.declare_host(declared).await.unwrap();
}

/// The row of a host that has just registered is written apart from the answer.
async fn known(world: &World, id: &str) {
    world.wait(async || world.store.roster_get(instance(id)).await.unwrap().filter(|host| host.initialized())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_job_goes_to_its_host_and_to_no_other_agent_whatever_hands_it_out() {
    each(async |world| {
        let mut first = Agent::connect(&world, "a1").await;
        let mut second = Agent::connect(&world, "a2").await;
        known(&world, "a1").await;
        known(&world, "a2").await;
        let (run, jobs) = world.fan_out(&["a2"], |_| {}).await;
        let offer = second.offer().await;
        let spec: kici_engine::jobspec::JobSpec = serde_json::from_slice(&offer.spec_json).unwrap();
        assert_eq!(spec.fanout.map(|fanout| fanout.host.to_string()).as_deref(), Some("a2"));
        let job = offer.job.unwrap();
        assert_eq!(job_ref(&job).job_id, jobs[0]);

        // Its agent goes away before the start: requeued, re-driven, swept and claimed by id, and still only for a2.
        second.drop_connection();
        world.until_row(jobs[0], QueueStatus::Pending).await;
        world.dispatcher.wake();
        assert!(first.quiet().await);
        assert!(world.store.queue_claim_by_id(jobs[0], instance("a1")).await.unwrap().is_none());
        let why = world.wait(async || world.job(jobs[0]).await.routing_reason).await;
        assert!(why.contains("host a2") && why.contains("not connected"), "{why}");

        let mut back = Agent::connect(&world, "a2").await;
        back.work().await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_job_waits_with_the_reason_when_its_host_lost_the_labels() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        known(&world, "a1").await;
        agent.send(kici_protocol::agent::agent_frame::Frame::Register(register("a1", &["other"]))).await;
        assert!(matches!(agent.next().await, kici_protocol::agent::orchestrator_frame::Frame::RegisterAck(_)));
        let (_, jobs) = world.fan_out(&["a1"], |_| {}).await;
        let why = world.wait(async || world.job(jobs[0]).await.routing_reason).await;
        assert!(why.contains("does not fit any more") && why.contains("`default`"), "{why}");
        assert_eq!(world.row(jobs[0]).await.unroutable_since, None, "labels can come back");
        assert!(agent.quiet().await);
        agent.send(kici_protocol::agent::agent_frame::Frame::Register(register("a1", &["default"]))).await;
        assert!(matches!(agent.next().await, kici_protocol::agent::orchestrator_frame::Frame::RegisterAck(_)));
        agent.work().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_17_a_host_that_is_down_is_waited_for_skipped_or_fails_the_job() {
    each(async |world| {
        let mut up = Agent::connect(&world, "a1").await;
        known(&world, "a1").await;
        declare(&world, "a2").await;
        let hosts = ["a1", "a2"];

        let (skipping, jobs) = world.fan_out(&hosts, |job| job.on_unreachable = OnUnreachable::Skip).await;
        up.work().await;
        world.until_run(skipping, RunStatus::Success).await;
        let skipped = world.job(jobs[1]).await;
        assert_eq!(skipped.status, JobStatus::Skipped);
        assert_eq!(skipped.failure_message.as_deref(), Some("host `a2` is unreachable"));

        let (failing, jobs) = world.fan_out(&hosts, |job| job.on_unreachable = OnUnreachable::Fail).await;
        up.work().await;
        world.until_run(failing, RunStatus::Failed).await;
        let failed = world.job(jobs[1]).await;
        assert_eq!((failed.status, failed.failure_reason), (JobStatus::Failed, Some(FailureReason::HostUnreachable)));

        let (holding, jobs) = world.fan_out(&hosts, |_| {}).await;
        up.work().await;
        assert_eq!(world.job(jobs[1]).await.status, JobStatus::Queued);
        let mut late = Agent::connect(&world, "a2").await;
        late.work().await;
        world.until_run(holding, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_17_a_rolling_job_takes_one_host_after_the_other_and_stops_at_the_first_failure() {
    each(async |world| {
        let mut agents = Vec::new();
        for id in ["a1", "a2", "a3", "a4"] {
            agents.push(Agent::connect(&world, id).await);
            known(&world, id).await;
        }
        let rolling = |job: &mut kici_engine::lock::Job| (job.max_parallel, job.fail_fast) = (Some(1), true);
        let (run, jobs) = world.fan_out(&["a1", "a2", "a3", "a4"], rolling).await;
        agents[0].work().await;
        let second = agents[1].offer().await.job.unwrap();
        assert!(agents[2].quiet().await, "one at a time");
        assert!(agents[1].begin(&second).await);
        let failed = agents[1].update(&second, "failed", "step_failed").await;
        agents[1].settled(failed).await;
        world.until_run(run, RunStatus::Failed).await;
        let mut statuses = Vec::new();
        for job in jobs {
            statuses.push(world.job(job).await.status);
        }
        use JobStatus::{Failed, Skipped, Success};
        assert_eq!(statuses, [Success, Failed, Skipped, Skipped]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whether_a_host_is_up_is_asked_when_its_turn_comes() {
    each_with(
        |config| config.recovery_window = Duration::from_millis(100),
        async |world| {
            let mut first = Agent::connect(&world, "a1").await;
            let second = Agent::connect(&world, "a2").await;
            known(&world, "a1").await;
            known(&world, "a2").await;
            let change = |job: &mut kici_engine::lock::Job| {
                job.max_parallel = Some(1);
                job.on_unreachable = OnUnreachable::Skip;
            };
            let (run, jobs) = world.fan_out(&["a1", "a2"], change).await;
            let job = first.offer().await.job.unwrap();
            // Up when the run was planned, gone when it would be next.
            second.drop_connection();
            let gone = async || {
                world
                    .store
                    .roster_get(instance("a2"))
                    .await
                    .unwrap()
                    .filter(|host| host.connected_instance_id.is_none())
            };
            world.wait(gone).await;
            assert!(first.begin(&job).await);
            let done = first.update(&job, "success", "").await;
            first.settled(done).await;
            world.until_run(run, RunStatus::Success).await;
            assert_eq!(world.job(jobs[1]).await.status, JobStatus::Skipped);
        },
    )
    .await;
}
