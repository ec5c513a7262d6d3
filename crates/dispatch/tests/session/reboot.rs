//! Restarts of hosts.

use std::time::Duration;

use crate::support::*;
use kici_engine::ids::JobId;
use kici_engine::state::{JobStatus, QueueStatus, RunStatus};
use kici_protocol::agent::{CancelRebootRequest, Register, RequestRebootRequest};
use kici_protocol::common;

fn booted(id: &str, boot: &str) -> Register {
    Register { boot_id: boot.into(), max_concurrency: 2, ..register(id, &["default"]) }
}

async fn connect(world: &World, id: &str, boot: &str) -> Agent {
    let agent = Agent::with(world, booted(id, boot), "").await.unwrap();
    let boot = Some(boot.to_owned());
    world.wait(async || world.store.roster_get(instance(id)).await.unwrap().filter(|host| host.boot_id == boot)).await;
    agent
}

fn asks(job: &common::JobRef) -> RequestRebootRequest {
    RequestRebootRequest { job: Some(job.clone()), deadline_ms: 0 }
}

async fn pending(world: &World, id: &str) -> bool {
    world.store.roster_get(instance(id)).await.unwrap().unwrap().reboot.is_some()
}

/// An agent on whose host a job has asked for a restart.
async fn about_to_restart(world: &World) -> (Agent, JobId, common::JobRef) {
    let mut agent = connect(world, "a1", "boot-1").await;
    let (_, jobs) = world.create(&[job("patch")]).await;
    let patch = agent.offer().await.job.unwrap();
    assert!(agent.begin(&patch).await);
    world.dispatcher.job_asks_reboot(agent.session_id(), &asks(&patch)).await.unwrap();
    (agent, jobs[0], patch)
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_18_no_job_reaches_a_restarting_host_before_its_new_session() {
    each(async |world| {
        let mut agent = connect(&world, "a1", "boot-1").await;
        let (run, jobs) = world.create(&[job("patch")]).await;
        let patch = agent.offer().await.job.unwrap();
        let other = asks(&patch);
        let early = world.dispatcher.job_asks_reboot(agent.session_id(), &other).await.unwrap_err();
        assert_eq!(early.code(), tonic::Code::PermissionDenied, "it has not started");
        assert!(agent.begin(&patch).await);
        world.dispatcher.job_asks_reboot(agent.session_id(), &asks(&patch)).await.unwrap();

        let (_, waiting) = world.create(&[job("build")]).await;
        let (_, pinned) = world.fan_out(&["a1"], |_| {}).await;
        world.dispatcher.wake();
        assert!(agent.quiet().await, "one slot is free, and still");
        let why = world.dispatcher.explain(waiting[0]).await.unwrap();
        assert_eq!(why.agents[0].obstacle.as_deref(), Some("its host is about to restart"));

        // The host goes down: the job that asked for it has done its work.
        agent.drop_connection();
        world.until(jobs[0], &[JobStatus::Success]).await;
        world.until_run(run, RunStatus::Success).await;
        assert_eq!(world.row(pinned[0]).await.status, QueueStatus::Pending);
        let one_slot = Register { max_concurrency: 1, ..booted("a1", "boot-2") };
        let mut back = Agent::with(&world, one_slot, "").await.unwrap();
        assert!(!pending(&world, "a1").await);
        back.work().await;
        back.work().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_job_that_asked_succeeds_with_the_restart() {
    each_with(
        |config| config.recovery_window = Duration::from_millis(200),
        async |world| {
            let mut agent = connect(&world, "a1", "boot-1").await;
            let (_, patch) = world.create(&[job("patch")]).await;
            let asking = agent.offer().await.job.unwrap();
            assert!(agent.begin(&asking).await);
            let (_, other) = world.create(&[job("build")]).await;
            let innocent = agent.offer().await.job.unwrap();
            assert!(agent.begin(&innocent).await);
            world.dispatcher.job_asks_reboot(agent.session_id(), &asks(&asking)).await.unwrap();
            agent.drop_connection();
            world.until(patch[0], &[JobStatus::Success]).await;
            let lost = world.until(other[0], &[JobStatus::Failed, JobStatus::Success]).await;
            assert_eq!(lost.status, JobStatus::Failed, "the others are ordinary losses");
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_session_of_the_same_boot_does_not_end_the_wait_and_a_cancel_or_the_deadline_does() {
    each(async |world| {
        let agent = connect(&world, "a1", "boot-1").await;
        world.dispatcher.request_reboot(&instance("a1"), None, None, "test").await.unwrap();
        agent.drop_connection();
        let mut agent = connect(&world, "a1", "boot-1").await;
        world.create(&[job("build")]).await;
        assert!(agent.quiet().await, "the connection broke, the host is still to go down");
        assert!(world.dispatcher.cancel_reboot(&instance("a1")).await.unwrap());
        assert!(!world.dispatcher.cancel_reboot(&instance("a1")).await.unwrap());
        agent.work().await;

        world.dispatcher.request_reboot(&instance("a1"), None, Some(Duration::from_secs(1)), "test").await.unwrap();
        world.create(&[job("build")]).await;
        agent.work().await;
        world
            .wait(async || {
                world.sweep("dispatch_reboots").await;
                (!pending(&world, "a1").await).then_some(())
            })
            .await;
        let missing = world.dispatcher.request_reboot(&instance("nobody"), None, None, "test").await;
        assert!(matches!(missing, Err(kici_dispatch::RebootError::NoSuchHost(_))));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_that_no_orchestrator_saw_completes_the_job_when_the_host_is_back() {
    each(async |world| {
        let (_agent, id, _) = about_to_restart(&world).await;
        let later = world.restarted().await;
        let _back = connect(&later, "a1", "boot-2").await;
        later.until(id, &[JobStatus::Success]).await;
        later.dispatcher.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_stopped_by_the_restart_reports_the_end_of_the_job_that_asked_as_success() {
    each(async |world| {
        let (mut agent, id, patch) = about_to_restart(&world).await;
        let seq = agent.update(&patch, "cancelled", "agent_shutdown").await;
        agent.settled(seq).await;
        assert_eq!(world.job(id).await.status, JobStatus::Success);
        // The slot is free a moment after the result was acknowledged.
        world.wait(async || world.dispatcher.agents()[0].jobs.is_empty().then_some(())).await;
        let gone = CancelRebootRequest { job: Some(patch) };
        let late = world.dispatcher.job_cancels_reboot(agent.session_id(), &gone).await.unwrap_err();
        assert_eq!(late.code(), tonic::Code::PermissionDenied);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_orchestrators_own_host_is_not_restarted() {
    each_with(
        |config| config.machine_id = Some("machine-1".into()),
        async |world| {
            let own = Register { machine_id: "machine-1".into(), ..booted("a1", "boot-1") };
            let _agent = Agent::with(&world, own, "").await.unwrap();
            world.wait(async || world.store.roster_get(instance("a1")).await.unwrap()).await;
            let refused = world.dispatcher.request_reboot(&instance("a1"), None, None, "test").await;
            assert!(matches!(refused, Err(kici_dispatch::RebootError::OwnHost(_))));
        },
    )
    .await;
}
