//! How jobs end: needs, cancel, drain, loss, limits.

use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use kici_dispatch::ports::CloneError;
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_protocol::agent::agent_frame::Frame as Up;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;
use kici_protocol::common;

use crate::nack;

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_19_two_last_upstreams_that_end_together_start_the_next_job_once() {
    const LAST: JobDef = JobDef { name: "last", needs: &["left", "right"], label: "default", checkout: false };
    each(async |world| {
        let mut one = Agent::connect(&world, "a1").await;
        let mut two = Agent::connect(&world, "a2").await;
        let (run, jobs) = world.create(&[job("left"), job("right"), LAST]).await;
        let (a, b) = (one.offer().await.job.unwrap(), two.offer().await.job.unwrap());
        assert!(one.begin(&a).await && two.begin(&b).await);
        tokio::join!(one.update(&a, "success", ""), two.update(&b, "success", ""));
        let last = tokio::select! { offer = one.offer() => offer, offer = two.offer() => offer }.job.unwrap();
        assert_eq!((job_ref(&last).job_id, last.dispatch_epoch), (jobs[2], 1));
        assert!(one.quiet().await && two.quiet().await);
        assert_eq!(world.store.run_get(run).await.unwrap().unwrap().status, RunStatus::Running);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_21_a_cancel_reaches_the_agent_and_the_job_ends_as_it_says() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build"), JobDef { label: "nowhere", ..job("other") }]).await;
        let running = agent.offer().await.job.unwrap();
        assert!(agent.begin(&running).await);
        let report = world.dispatcher.cancel_run(run, "user ann", FailureReason::CancelledByUser, false).await.unwrap();
        assert_eq!((report.agents_notified, report.pending_cancelled, report.unreachable.len()), (1, 1, 0));
        let Down::JobCancel(cancel) = agent.next().await else { panic!("a cancel") };
        assert!(!cancel.force);
        assert_eq!(cancel.grace_ms, 100);
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Cancelling);
        let done = agent.update(&running, "cancelled", "cancelled_by_user").await;
        agent.settled(done).await;
        world.until_run(run, RunStatus::Cancelled).await;
        assert_eq!(world.job(jobs[1]).await.status, JobStatus::Cancelled);
        let again = world.dispatcher.cancel_run(run, "user ann", FailureReason::CancelledByUser, false).await;
        assert!(again.is_err());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_21_a_cancel_of_a_job_whose_agent_is_gone_ends_the_run() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let running = agent.offer().await.job.unwrap();
        assert!(agent.begin(&running).await);
        agent.drop_connection();
        world.until(jobs[0], &[JobStatus::Recovering]).await;
        world.dispatcher.cancel_run(run, "user", FailureReason::CancelledByUser, false).await.unwrap();
        world.until_run(run, RunStatus::Cancelled).await;
        let back = Register { in_flight_jobs: vec![held(&running, true)], ..register("a1", &["default"]) };
        let agent = Agent::with(&world, back, "").await.unwrap();
        assert_eq!(agent.ack.job_verdicts[0].verdict(), Verdict::Abandon);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_21_a_cancel_before_the_start_denies_it_and_frees_the_slot() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, _) = world.create(&[job("build")]).await;
        let offered = agent.offer().await.job.unwrap();
        world.dispatcher.cancel_run(run, "user", FailureReason::CancelledByUser, true).await.unwrap();
        assert!(matches!(agent.next().await, Down::JobCancel(cancel) if cancel.force));
        assert!(!agent.begin(&offered).await, "no user code after a cancel");
        world.until_run(run, RunStatus::Cancelled).await;
        world.create(&[job("build")]).await;
        agent.work().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_22_a_draining_orchestrator_finishes_and_resumes_in_order() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        world.create(&[job("build")]).await;
        let running = agent.offer().await.job.unwrap();
        assert!(agent.begin(&running).await);
        let status = world.dispatcher.drain(true);
        assert_eq!((status.draining, status.jobs_running), (true, 1));
        let mut waiting = Vec::new();
        for _ in 0..3 {
            waiting.push(world.create(&[job("build")]).await.1[0]);
        }
        let done = agent.update(&running, "success", "").await;
        agent.settled(done).await;
        assert!(agent.quiet().await);
        assert_eq!(world.dispatcher.drain_status().jobs_running, 0);
        let explained = world.dispatcher.explain(waiting[0]).await.unwrap();
        assert_eq!(explained.orchestrator.as_deref(), Some("this orchestrator drains"));
        world.dispatcher.drain(false);
        for expected in waiting {
            assert_eq!(job_ref(&agent.work().await).job_id, expected);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_23_a_terminal_job_never_changes() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (_, jobs) = world.create(&[job("build")]).await;
        let done = agent.work().await;
        for state in ["failed", "cancelled", "success", "running", "cancelling"] {
            agent.update(&done, state, "").await;
        }
        for state in ["running", "failed"] {
            let seq = agent.step(&done, 0, state).await;
            agent.settled(seq).await;
        }
        let job = world.job(jobs[0]).await;
        assert_eq!((job.status, job.failure_reason), (JobStatus::Success, None));
        assert_eq!(world.row(jobs[0]).await.status, QueueStatus::Completed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_21_a_job_that_ran_out_of_memory_says_so_with_its_peak_and_its_limit() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let running = agent.offer().await.job.unwrap();
        assert!(agent.begin(&running).await);
        let (peak, limit) = (70_u64 << 20, 64_u64 << 20);
        let update = JobUpdate {
            job: Some(running),
            state: "failed".into(),
            reason: "oom_killed".into(),
            message: "exit code 2; the job was over its memory limit of 64 MiB (peak 70 MiB)".into(),
            evidence: Some(Evidence {
                exit_code: Some(2),
                peak_memory_bytes: Some(peak),
                memory_limit_bytes: Some(limit),
                ..Evidence::default()
            }),
            ..JobUpdate::default()
        };
        let done = agent.send(Up::JobUpdate(update)).await;
        agent.settled(done).await;
        let job = world.job(jobs[0]).await;
        let class = kici_engine::state::FailureClass::Oom;
        assert_eq!((job.failure_reason, job.failure_class), (Some(FailureReason::OomKilled), Some(class)));
        assert!(job.failure_message.unwrap().contains("memory limit of 64 MiB (peak 70 MiB)"));
        let evidence = job.evidence.unwrap();
        assert_eq!(
            (&evidence["peak_memory_bytes"], &evidence["memory_limit_bytes"]),
            (&serde_json::json!(peak), &serde_json::json!(limit))
        );
        let run = world.until_run(run, RunStatus::Failed).await;
        assert_eq!(run.failure_reason, Some(FailureReason::OomKilled), "neither a time-out nor a plain failure");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_24_a_result_in_the_outbox_beats_the_loss_of_its_agent() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        assert!(agent.begin(&job).await);
        agent.drop_connection();
        // Killed after the last step: it comes back without the job, the result waits on its disk.
        let back = Register { outbox_pending: vec![job.clone()], ..register("a1", &["default"]) };
        let mut agent = Agent::with(&world, back, "").await.unwrap();
        assert!(agent.ack.job_verdicts.is_empty());
        let done = agent.update(&job, "success", "").await;
        agent.settled(done).await;
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Success);
        // Sent again, because the acknowledgement was lost: acknowledged again, stored once.
        let again = agent.update(&job, "success", "").await;
        agent.settled(again).await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_forgot_a_started_job_fails_it_at_once() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (_, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        assert!(agent.begin(&job).await);
        agent.drop_connection();
        let _agent = Agent::connect(&world, "a1").await;
        let failed = world.until(jobs[0], &[JobStatus::Failed]).await;
        assert_eq!(failed.failure_reason, Some(FailureReason::AgentForgotJob));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_session_replaces_the_older_one_and_keeps_its_job() {
    each(async |world| {
        let mut old = Agent::connect(&world, "a1").await;
        let (run, _) = world.create(&[job("build")]).await;
        let job = old.offer().await.job.unwrap();
        assert!(old.begin(&job).await);
        let back = Register { in_flight_jobs: vec![held(&job, true)], ..register("a1", &["default"]) };
        let mut new = Agent::with(&world, back, "").await.unwrap();
        assert_eq!(old.goodbye().await, "SUPERSEDED");
        old.drop_connection();
        assert_eq!(world.dispatcher.agents().len(), 1);
        let done = new.update(&job, "success", "").await;
        new.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_frame_does_not_block_the_ones_behind_it() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (_, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        assert!(agent.begin(&job).await);
        let forged = common::JobRef { job_id: "00000000-0000-7000-8000-000000000001".into(), ..job.clone() };
        let refused = agent.step(&forged, 0, "running").await;
        let invalid = agent.update(&job, "melted", "").await;
        let done = agent.update(&job, "success", "").await;
        let mut codes = Vec::new();
        while codes.len() < 2 {
            let nack = nack(&mut agent).await;
            codes.push((nack.seq, nack.code()));
        }
        codes.sort_by_key(|(seq, _)| *seq);
        assert_eq!(codes, [(refused, NackCode::Refused), (invalid, NackCode::Invalid)]);
        agent.settled(done).await;
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_steps_is_refused_with_a_pause_while_results_pass() {
    each_with(
        |config| {
            config.rate.frames_burst = 5;
            config.rate.frames_per_s = 1;
        },
        async |world| {
            let mut agent = Agent::connect(&world, "a1").await;
            let (run, _) = world.create(&[job("build")]).await;
            let job = agent.offer().await.job.unwrap();
            assert!(agent.begin(&job).await);
            for n in 0..8 {
                agent.step(&job, n, "running").await;
            }
            let refused = nack(&mut agent).await;
            assert_eq!(refused.code(), NackCode::RateLimited);
            assert!(refused.retry_after_ms > 0);
            agent.update(&job, "success", "").await;
            world.until_run(run, RunStatus::Success).await;
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_out_of_order_and_a_missing_register_end_the_session() {
    each_with(
        |config| config.register_timeout = Duration::from_millis(200),
        async |world| {
            let mut agent = Agent::connect(&world, "a1").await;
            agent.seq = 7;
            agent.send(Up::Heartbeat(Heartbeat::default())).await;
            assert_eq!(agent.goodbye().await, "PROTOCOL");
            let old = Register { protocol_version: 0, ..register("a2", &["default"]) };
            assert_eq!(Agent::with(&world, old, "").await.err().as_deref(), Some("PROTOCOL"));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_source_that_is_refused_fails_the_job_and_one_that_is_late_is_tried_again() {
    const BUILD: JobDef = JobDef { checkout: true, ..job("build") };
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        *world.clones.0.lock().unwrap() = Some(CloneError::Permanent {
            reason: FailureReason::CredentialRefused,
            message: "the app is not installed on o/r".into(),
        });
        let (_, jobs) = world.create(&[BUILD]).await;
        let failed = world.until(jobs[0], &[JobStatus::Failed]).await;
        assert_eq!(failed.failure_reason, Some(FailureReason::CredentialRefused));
        *world.clones.0.lock().unwrap() = Some(CloneError::Transient("the forge does not answer".into()));
        let (_, jobs) = world.create(&[BUILD]).await;
        let failed = world.until(jobs[0], &[JobStatus::Failed]).await;
        assert_eq!(failed.failure_reason, Some(FailureReason::GaveUp));
        *world.clones.0.lock().unwrap() = None;
        world.create(&[BUILD]).await;
        agent.work().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_no_agent_can_run_says_why_at_once_and_fails_after_the_grace() {
    each_with(
        |config| config.unroutable_grace = Duration::from_millis(300),
        async |world| {
            let _agent = Agent::connect(&world, "a1").await;
            let (_, jobs) = world.create(&[JobDef { label: "gpu", ..job("train") }]).await;
            let why = world.wait(async || world.job(jobs[0]).await.routing_reason).await;
            assert!(why.contains("`gpu`") && why.contains("default"), "{why}");
            let explained = world.dispatcher.explain(jobs[0]).await.unwrap();
            assert_eq!(explained.unroutable.as_ref(), Some(&why));
            assert!(explained.agents[0].obstacle.as_ref().unwrap().contains("gpu"));
            world.wait(async || (world.sweep("dispatch_routing").await > 0).then_some(())).await;
            let failed = world.until(jobs[0], &[JobStatus::Unroutable]).await;
            assert!(failed.failure_message.unwrap().contains("`gpu`"));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_for_a_known_host_that_is_away_waits_and_says_so() {
    each(async |world| {
        let agent = Agent::connect(&world, "a1").await;
        let id = agent.agent_id();
        world.wait(async || world.store.roster_get(id.clone()).await.unwrap()).await;
        agent.drop_connection();
        world.wait(async || world.dispatcher.agents().is_empty().then_some(())).await;
        let (_, jobs) = world.create(&[job("build")]).await;
        let why = world.wait(async || world.job(jobs[0]).await.routing_reason).await;
        assert!(why.contains("a1") && why.contains("not connected"), "{why}");
        assert_eq!(world.row(jobs[0]).await.unroutable_since, None);
        let mut agent = Agent::connect(&world, "a1").await;
        agent.work().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_time_are_kept_by_the_sweeps() {
    each_with(
        |config| config.queue_timeout = Duration::from_millis(200),
        async |world| {
            let (_, waiting) = world.create(&[job("build")]).await;
            world.wait(async || (world.sweep("dispatch_expired_pending").await > 0).then_some(())).await;
            let expired = world.until(waiting[0], &[JobStatus::Failed, JobStatus::Unroutable]).await;
            assert!(expired.failure_message.is_some());
            assert_eq!(world.row(waiting[0]).await.status, QueueStatus::Expired);
            let mut agent = Agent::connect(&world, "a1").await;
            let (run, _) = world.create_with(&[job("build")], Some(Duration::from_millis(100))).await;
            let job = agent.offer().await.job.unwrap();
            assert!(agent.begin(&job).await);
            world.wait(async || (world.sweep("dispatch_run_deadlines").await > 0).then_some(())).await;
            assert!(matches!(agent.next().await, Down::JobCancel(_)));
            let done = agent.update(&job, "cancelled", "workflow_timeout").await;
            agent.settled(done).await;
            let run = world.until_run(run, RunStatus::Failed).await;
            assert_eq!(run.failure_reason, Some(FailureReason::WorkflowTimeout));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_agents_and_silent_jobs_are_found() {
    each_with(
        |config| {
            config.stale_after = Duration::from_millis(200);
            config.heartbeat_timeout = Duration::from_millis(700);
        },
        async |world| {
            let mut agent = Agent::connect(&world, "a1").await;
            let (_, jobs) = world.create(&[job("build")]).await;
            let job = agent.offer().await.job.unwrap();
            assert!(agent.begin(&job).await);
            world.wait(async || (world.sweep("dispatch_stale_jobs").await > 0).then_some(())).await;
            let stale = world.until(jobs[0], &[JobStatus::TimedOutStale]).await;
            assert_eq!(stale.failure_reason, Some(FailureReason::StaleHeartbeat));
            world.wait(async || (world.sweep("dispatch_silent_sessions").await > 0).then_some(())).await;
            assert_eq!(agent.goodbye().await, "HEARTBEAT_TIMEOUT");
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_says_goodbye_and_leaves_jobs_to_the_next_process() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        assert!(agent.begin(&job).await);
        let stopping = Arc::clone(&world.dispatcher);
        let (code, ()) = tokio::join!(agent.goodbye(), stopping.stop());
        assert_eq!(code, "GOING_AWAY");
        assert_eq!(world.row(jobs[0]).await.status, QueueStatus::Dispatched);
        let world = world.restarted().await;
        let back = Register { in_flight_jobs: vec![held(&job, true)], ..register("a1", &["default"]) };
        let mut agent = Agent::with(&world, back, "").await.unwrap();
        assert_eq!(agent.ack.job_verdicts[0].verdict(), Verdict::Resume);
        let done = agent.update(&job, "success", "").await;
        agent.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}
