//! Handing jobs out: claims, acknowledgements, rejections, ownership.

use std::time::Duration;

use crate::registration::new_token;
use crate::support::*;
use futures::future::join_all;
use kici_dispatch::{AgentAuth, Ownership};
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;
use kici_store::model::TokenKind;

use crate::nack;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_goes_from_the_queue_to_success() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[JobDef { checkout: true, ..job("build") }]).await;
        let offer = agent.offer().await;
        let job = offer.job.clone().unwrap();
        assert_eq!((offer.workflow.as_str(), offer.job_name.as_str(), job.dispatch_epoch), ("t", "build", 1));
        let checkout = offer.checkout.unwrap();
        assert_eq!((checkout.url.as_str(), checkout.depth), ("https://forge.example/o/r.git", 1));
        assert_eq!(offer.mask, ["clone-secret"]);
        assert_eq!(offer.grace_period_ms, 100);
        let spec: kici_engine::jobspec::JobSpec = serde_json::from_slice(&offer.spec_json).unwrap();
        assert_eq!(spec.steps.len(), 1);
        assert!(agent.begin(&job).await);
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Running);
        agent.step(&job, 0, "running").await;
        let step = agent.step(&job, 0, "success").await;
        agent.settled(step).await;
        let steps = world.store.steps_of_run(run).await.unwrap();
        assert_eq!(steps[0].step_key, "step-0-0");
        let done = agent.update(&job, "success", "").await;
        agent.settled(done).await;
        // The acknowledgement comes after the commit.
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Success);
        world.until_run(run, RunStatus::Success).await;
        world.wait(async || world.dispatcher.agents()[0].jobs.is_empty().then_some(())).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_1_fifty_triggers_and_one_slot_make_one_dispatch() {
    each(async |world| {
        world.dispatcher.drain(true);
        for _ in 0..10 {
            world.create(&[job("build")]).await;
        }
        let mut agent = Agent::connect(&world, "a1").await;
        world.dispatcher.drain(false);
        join_all((0..50).map(|_| async { world.dispatcher.wake() })).await;
        agent.offer().await;
        assert!(agent.quiet().await, "one slot takes one job");
        let counts = world.store.queue_counts().await.unwrap();
        assert_eq!((counts.dispatched, counts.pending), (1, 9));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_1_two_orchestrators_on_one_database_never_hand_a_job_out_twice() {
    // The agents begin to work once all jobs are there, which takes its time on a busy machine.
    let patient = |config: &mut kici_dispatch::DispatchConfig| config.ack_timeout = Duration::from_secs(20);
    each_with(patient, async |world| {
        let mut config = world.config.clone();
        config.instance = instance("node-2");
        let other = World::on(world.store.clone(), config, world.clock.clone(), world.ids.clone()).await;
        let mut agents = Vec::new();
        for n in 0..4 {
            let node = if n % 2 == 0 { &world } else { &other };
            agents.push(Agent::connect(node, &format!("a{n}")).await);
        }
        let mut runs = Vec::new();
        for _ in 0..20 {
            runs.push(world.create(&[job("build")]).await.0);
            other.dispatcher.wake();
        }
        let workers = agents.into_iter().map(|mut agent| async move {
            let mut done = Vec::new();
            while let Ok(job) = tokio::time::timeout(Duration::from_millis(1500), agent.work()).await {
                done.push(job.job_id);
            }
            done
        });
        let mut done: Vec<String> = join_all(workers).await.into_iter().flatten().collect();
        done.sort();
        let count = done.len();
        done.dedup();
        assert_eq!((done.len(), count), (20, 20));
        for run in runs {
            world.until_run(run, RunStatus::Success).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_3_a_swallowed_offer_goes_to_another_agent_and_closes_the_first() {
    each(async |world| {
        let mut silent = Agent::connect(&world, "a1").await;
        let (_, jobs) = world.create(&[job("build")]).await;
        let first = silent.offer().await.job.unwrap();
        let mut other = Agent::connect(&world, "a2").await;
        assert_eq!(silent.goodbye().await, "DISPATCH_ACK_TIMEOUT");
        let second = other.offer().await.job.unwrap();
        assert_eq!((second.job_id.clone(), second.dispatch_epoch), (first.job_id, 2));
        assert_eq!(world.row(jobs[0]).await.dispatch_attempts, 1);
        assert!(other.begin(&second).await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_4_an_acknowledgement_in_time_keeps_the_job() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (_, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        let acked = agent.accept(&job).await;
        agent.settled(acked).await;
        let row = world.wait(async || {
            let row = world.row(jobs[0]).await;
            row.acked_at.is_some().then_some(row)
        });
        let row = row.await;
        assert_eq!((row.ack_deadline, row.dispatch_attempts), (None, 0));
        // Past the deadline the job is still this agent's.
        tokio::time::sleep(world.config.ack_timeout + Duration::from_millis(200)).await;
        assert!(agent.ask(&job).await);
        assert_eq!(world.row(jobs[0]).await.dispatch_epoch, 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_5_an_orchestrator_that_dies_after_the_claim_leaves_a_job_that_is_delivered() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let lost = agent.offer().await.job.unwrap();
        let world = world.restarted().await;
        world.until_row(jobs[0], QueueStatus::Recovering).await;
        // The agent never saw the offer: it registers without it, and the job is free at once.
        let mut agent = Agent::connect(&world, "a1").await;
        let again = agent.offer().await.job.unwrap();
        assert_eq!(again.dispatch_epoch, lost.dispatch_epoch + 1);
        assert!(agent.begin(&again).await);
        let done = agent.update(&again, "success", "").await;
        agent.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_7_an_agent_that_comes_back_goes_on_with_its_job() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        assert!(agent.begin(&job).await);
        agent.drop_connection();
        world.until(jobs[0], &[JobStatus::Recovering]).await;
        let back = Register { in_flight_jobs: vec![held(&job, true)], ..register("a1", &["default"]) };
        let mut agent = Agent::with(&world, back, "").await.unwrap();
        let verdict = &agent.ack.job_verdicts[0];
        assert_eq!((verdict.verdict(), verdict.started), (Verdict::Resume, true));
        world.until(jobs[0], &[JobStatus::Running]).await;
        let done = agent.update(&job, "success", "").await;
        agent.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
        assert_eq!(world.row(jobs[0]).await.dispatch_epoch, 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_8_an_agent_that_comes_back_too_late_must_abandon_the_job() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        assert!(agent.begin(&job).await);
        agent.drop_connection();
        let failed = world.until(jobs[0], &[JobStatus::Failed]).await;
        assert_eq!(failed.failure_reason, Some(FailureReason::AgentLost));
        assert!(failed.failure_message.unwrap().contains("a1"));
        world.until_run(run, RunStatus::Failed).await;
        let back = Register { in_flight_jobs: vec![held(&job, true)], ..register("a1", &["default"]) };
        let mut agent = Agent::with(&world, back, "").await.unwrap();
        assert_eq!(agent.ack.job_verdicts[0].verdict(), Verdict::Abandon);
        // A result that was under way changes nothing and is acknowledged, so that it leaves the outbox.
        let done = agent.update(&job, "success", "").await;
        agent.settled(done).await;
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Failed);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_9_a_lost_scaler_agent_gives_back_what_it_did_not_start_and_fails_what_it_did() {
    each_with(
        |config| {
            config.auth = AgentAuth::Token;
            config.scaler_reconnect_grace = std::time::Duration::from_millis(300);
        },
        async |world| {
            let token = new_token(&world, |token| token.kind = TokenKind::Scaler).await;
            let mut agent = Agent::with(&world, register("s1", &["default"]), &token).await.unwrap();
            assert!(agent.ack.scaler_managed);
            let (_, jobs) = world.create(&[job("build")]).await;
            let offered = agent.offer().await.job.unwrap();
            let acked = agent.accept(&offered).await;
            agent.settled(acked).await;
            agent.drop_connection();
            world.until_row(jobs[0], QueueStatus::Pending).await;
            let mut agent = Agent::with(&world, register("s1", &["default"]), &token).await.unwrap();
            let again = agent.offer().await.job.unwrap();
            assert!(agent.begin(&again).await);
            agent.drop_connection();
            let failed = world.until(jobs[0], &[JobStatus::Failed]).await;
            assert_eq!(failed.failure_reason, Some(FailureReason::AgentLost));
            assert_eq!(world.row(jobs[0]).await.dispatch_epoch, 2);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_10_five_rejections_fail_the_job_with_the_reason() {
    each(async |world| {
        let mut agents = Vec::new();
        for n in 1..=5 {
            agents.push(Agent::connect(&world, &format!("a{n}")).await);
        }
        let (run, jobs) = world.create(&[job("build")]).await;
        for agent in &mut agents {
            let job = agent.offer().await.job.unwrap();
            agent.reject(&job, RejectReason::Unsupported).await;
        }
        let failed = world.until(jobs[0], &[JobStatus::Failed]).await;
        assert_eq!(failed.failure_reason, Some(FailureReason::GaveUp));
        let message = failed.failure_message.unwrap();
        assert!(message.contains("gave up after 5 deliveries") && message.contains("refused"), "{message}");
        world.until_run(run, RunStatus::Failed).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_8_agents_that_leave_in_order_do_not_eat_the_budget() {
    each(async |world| {
        let (run, jobs) = world.create(&[job("build")]).await;
        let expires_at = world.row(jobs[0]).await.expires_at;
        // More often than the budget has deliveries, in each order of word and leave.
        for n in 0..12 {
            let mut agent = Agent::connect(&world, &format!("a{n}")).await;
            let offered = agent.offer().await.job.unwrap();
            if n % 3 == 0 {
                let said = agent.reject(&offered, RejectReason::Draining).await;
                agent.settled(said).await;
            } else {
                let leaving = AgentStatus { draining: true, ..AgentStatus::default() };
                let said = agent.send(agent_frame::Frame::AgentStatus(leaving)).await;
                if n % 3 == 1 {
                    agent.settled(said).await;
                }
            }
            agent.drop_connection();
            let row = world.until_row(jobs[0], QueueStatus::Pending).await;
            assert_eq!((row.dispatch_attempts, row.expires_at), (0, expires_at), "leave {n}");
            world.wait(async || world.dispatcher.agents().is_empty().then_some(())).await;
        }
        // One that vanishes without a word does.
        let mut agent = Agent::connect(&world, "b1").await;
        agent.offer().await;
        agent.drop_connection();
        let row = world.until_row(jobs[0], QueueStatus::Pending).await;
        assert_eq!((row.dispatch_attempts, row.dispatch_epoch), (1, 13));
        let mut agent = Agent::connect(&world, "b2").await;
        agent.work().await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_asks_to_start_an_older_delivery_is_told_to_drop_it() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        world.create(&[job("build")]).await;
        let old = agent.offer().await.job.unwrap();
        agent.drop_connection();
        // It took the offer while its connection broke, and does not say so when it is back.
        let mut agent = Agent::connect(&world, "a1").await;
        let new = agent.offer().await.job.unwrap();
        assert_eq!((new.dispatch_epoch, new.job_id == old.job_id), (2, true));
        agent.update(&old, "running", "").await;
        let Down::StartDenied(denied) = agent.next().await else { panic!("a denial") };
        assert_eq!(denied.job, Some(old));
        assert_eq!(nack(&mut agent).await.code(), NackCode::StaleEpoch);
        assert!(agent.begin(&new).await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_back_keeps_its_job_though_its_leave_is_judged_late() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let running = agent.offer().await.job.unwrap();
        assert!(agent.begin(&running).await);
        world.store.death().now();
        agent.drop_connection();
        // What follows from its leave cannot be written.
        world.wait(async || (world.sweep("dispatch_catch_up").await == 1).then_some(())).await;
        world.store.death().over();
        let back = Register { in_flight_jobs: vec![held(&running, true)], ..register("a1", &["default"]) };
        let mut agent = Agent::with(&world, back, "").await.unwrap();
        assert_eq!(agent.ack.job_verdicts[0].verdict(), Verdict::Resume);
        assert_eq!(world.sweep("dispatch_catch_up").await, 1);
        assert_eq!(world.row(jobs[0]).await.status, QueueStatus::Dispatched);
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Running);
        assert!(agent.ask(&running).await, "it may ask again as often as it likes");
        let done = agent.update(&running, "success", "").await;
        agent.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_agent_does_not_eat_the_budget() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (_, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        agent.reject(&job, RejectReason::Busy).await;
        world.until_row(jobs[0], QueueStatus::Pending).await;
        world.dispatcher.wake();
        assert!(agent.quiet().await, "it is not asked again at once");
        assert_eq!(world.row(jobs[0]).await.dispatch_attempts, 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_12_frames_for_the_job_of_another_are_refused_and_the_fifth_disconnects() {
    each(async |world| {
        let mut owner = Agent::connect(&world, "a1").await;
        let (_, _) = world.create(&[job("build")]).await;
        let done = owner.work().await;
        let mut other = Agent::connect(&world, "a2").await;
        let mut replies = 0;
        for _ in 0..5 {
            other.step(&done, 0, "running").await;
        }
        let code = loop {
            match other.next().await {
                Down::FrameNack(nack) => {
                    assert_eq!(nack.code(), NackCode::Refused);
                    assert_eq!(nack.detail, "job is not assigned to this agent");
                    replies += 1;
                }
                Down::Goodbye(goodbye) => break goodbye.code,
                frame => panic!("{frame:?}"),
            }
        };
        assert_eq!((code.as_str(), replies), ("OWNERSHIP_VIOLATIONS", 5));
        let session = owner.session_id();
        assert_eq!(world.dispatcher.owns(session, job_ref(&done)).await, Ownership::Owned, "for a moment longer");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_epoch_is_refused_as_stale_and_is_no_violation() {
    each(async |world| {
        let mut first = Agent::connect(&world, "a1").await;
        world.create(&[job("build")]).await;
        let old = first.offer().await.job.unwrap();
        first.reject(&old, RejectReason::Unsupported).await;
        let mut second = Agent::connect(&world, "a2").await;
        let new = second.offer().await.job.unwrap();
        assert_eq!(new.dispatch_epoch, 2);
        for _ in 0..8 {
            first.update(&old, "success", "").await;
            assert_eq!(nack(&mut first).await.code(), NackCode::StaleEpoch);
        }
        assert!(second.begin(&new).await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_6_three_unanswered_offers_in_a_row_drain_an_agent_until_an_operator_lets_it_work() {
    each_with(
        |config| {
            config.ack_timeout = Duration::from_millis(250);
            config.max_attempts = 100;
        },
        async |world| {
            let (_, jobs) = world.create(&[job("build")]).await;
            for _ in 0..3 {
                let mut silent = Agent::connect(&world, "a1").await;
                silent.offer().await;
                assert_eq!(silent.goodbye().await, "DISPATCH_ACK_TIMEOUT");
            }
            let mut silent = Agent::connect(&world, "a1").await;
            assert!(silent.quiet().await);
            let why = world.dispatcher.explain(jobs[0]).await.unwrap().agents[0].obstacle.clone().unwrap();
            assert_eq!(why, "it drains: it left 3 offers in a row unanswered");
            world.dispatcher.drain_agent(&silent.agent_id(), false).await.unwrap();
            assert!(matches!(silent.next().await, Down::AgentDrain(AgentDrain { drain: false })));
            silent.work().await;
        },
    )
    .await;
}
