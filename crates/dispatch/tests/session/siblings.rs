//! Several orchestrators, races, and a database that does not answer.

use std::time::Duration;

use futures::future::join_all;
use kici_dispatch::AgentAuth;
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_protocol::NOT_ASSIGNED;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;
use kici_store::model::{Guarded, Instance, RequeueFrom, RequeueRequest, Requeued};

use crate::nack;
use crate::registration::new_token;
use crate::support::*;

/// Another orchestrator on the database of `world`.
async fn sibling(world: &World, name: &str) -> World {
    let mut config = world.config.clone();
    config.instance = instance(name);
    // On SQLite the store has one name; rows are owned by the name of the store.
    World::on(world.store.clone(), config, world.clock.clone(), world.ids.clone()).await
}

async fn beat(world: &World, name: &str) {
    let now = world.clock.now();
    let beat = Instance {
        instance_id: instance(name),
        incarnation: world.ids.uuid(),
        role: "coordinator".into(),
        address: None,
        version: "0.1.0".into(),
        started_at: now,
        last_seen_at: now,
        draining: false,
    };
    world.store.instance_heartbeat(beat).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_4_an_acknowledgement_at_the_deadline_keeps_the_job_or_undoes_it_never_both() {
    const AGENTS: u32 = 24;
    each(async |world| {
        let mut agents = Vec::new();
        for n in 0..AGENTS {
            agents.push(Agent::connect(&world, &format!("a{n}")).await);
        }
        world.dispatcher.drain(true);
        for _ in 0..AGENTS {
            world.create(&[job("build")]).await;
        }
        world.dispatcher.drain(false);
        let limit = world.config.ack_timeout;
        let answered = agents.into_iter().zip(0..).map(|(mut agent, n)| async move {
            let offered = agent.offer().await.job.unwrap();
            // Some just before the deadline, some just after it, most in the same moment.
            tokio::time::sleep((limit + Duration::from_millis(n / 2)).saturating_sub(Duration::from_millis(6))).await;
            agent.accept(&offered).await;
            agent.update(&offered, "running", "").await;
            let kept = loop {
                match agent.maybe_next().await {
                    Some(Down::StartGranted(_)) => break true,
                    // Refused because it is somebody else's by now, or said goodbye to.
                    Some(Down::FrameNack(_)) => {}
                    Some(Down::StartDenied(_) | Down::Goodbye(_)) | None => break false,
                    Some(other) => panic!("{other:?}"),
                }
            };
            (offered, kept, agent)
        });
        for (offered, kept, _agent) in join_all(answered).await {
            let row = world.row(job_ref(&offered).job_id).await;
            let undone = world.store.dispatch_history(row.job_id).await.unwrap();
            let undone = undone.iter().any(|record| record.epoch == 1 && record.ended_at.is_some());
            assert_eq!((row.started_at.is_some() && row.dispatch_epoch == 1, undone), (kept, !kept), "{row:?}");
            // What was undone may have gone to another silent agent meanwhile.
            assert_eq!(row.dispatch_attempts == 0, kept, "{row:?}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_4_of_an_answer_and_its_deadline_in_both_orders_one_takes_effect() {
    each(async |world| {
        // No agent is asked: the two statements meet in the database itself.
        world.dispatcher.drain(true);
        let (_, jobs) = world.create(&[job("first"), job("second"), job("both")]).await;
        let a1 = instance("a1");
        for (id, order) in jobs.into_iter().zip(["answer", "deadline", "together"]) {
            let claimed = world.store.queue_claim_by_id(id, a1.clone()).await.unwrap().unwrap();
            let job = claimed.job_ref;
            let armed = world.store.queue_ack_arm(job, a1.clone(), world.clock.now()).await.unwrap();
            assert_eq!(armed, Guarded::Applied);
            let answer = world.store.queue_ack(job, a1.clone());
            let from = RequeueFrom::AwaitingAck(a1.clone());
            let request =
                RequeueRequest { job, from, reason: "late".into(), budget: 5, counts: true, expires_at: None };
            let deadline = world.store.queue_requeue(request, world.dispatcher.activate());
            let (answer, deadline) = match order {
                "answer" => {
                    let answer = answer.await.unwrap();
                    (answer, deadline.await.unwrap())
                }
                "deadline" => {
                    let deadline = deadline.await.unwrap();
                    (answer.await.unwrap(), deadline)
                }
                _ => {
                    let (answer, deadline) = tokio::join!(answer, deadline);
                    (answer.unwrap(), deadline.unwrap())
                }
            };
            let kept = answer == Guarded::Applied;
            assert_eq!(kept, matches!(deadline, Requeued::Lost), "{order}");
            assert_ne!((order, kept), ("answer", false));
            assert_ne!((order, kept), ("deadline", true));
            let row = world.row(id).await;
            let wanted = if kept { QueueStatus::Dispatched } else { QueueStatus::Pending };
            assert_eq!((row.status, row.dispatch_attempts), (wanted, u32::from(!kept)), "{order}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_5_when_orchestrator_and_agent_die_after_the_offer_another_agent_gets_the_job() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        agent.offer().await;
        let world = world.restarted().await;
        let mut other = Agent::connect(&world, "a2").await;
        // Its first agent never comes back: the recovery window ends, and it had not started.
        let again = other.offer().await.job.unwrap();
        assert_eq!((again.dispatch_epoch, world.row(jobs[0]).await.dispatch_attempts), (2, 1));
        assert!(other.begin(&again).await);
        let done = other.update(&again, "success", "").await;
        other.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_6_a_restart_leaves_the_jobs_of_its_siblings_alone() {
    kici_store::testing::TestStore::each(async |stored: kici_store::testing::TestStore| {
        if stored.store.backend() == "sqlite" {
            // One process has the file; there are no siblings.
            return;
        }
        let _clock = keep_time(stored.clock.clone());
        let ids = std::sync::Arc::new(kici_store::testing::TestIds);
        let store = stored.sibling("node-2").await;
        let world = World::on(store, config("node-2"), stored.clock.clone(), ids.clone()).await;
        beat(&world, "node-2").await;
        let mut agents = Vec::new();
        let mut jobs = Vec::new();
        for n in 0..3 {
            let mut agent = Agent::connect(&world, &format!("a{n}")).await;
            let (_, created) = world.create(&[job("build")]).await;
            let offered = agent.offer().await.job.unwrap();
            assert!(agent.begin(&offered).await);
            agents.push((agent, offered));
            jobs.push(created[0]);
        }
        // The other orchestrator starts, for the first time or again, and sweeps.
        let other = World::on(stored.store.clone(), config("node-1"), stored.clock.clone(), ids).await;
        for name in ["dispatch_unstarted", "dispatch_stale_jobs", "dispatch_expired_recoveries", "dispatch_idle_runs"] {
            assert_eq!(other.sweep(name).await, 0, "{name}");
        }
        for ((mut agent, offered), id) in agents.into_iter().zip(jobs) {
            let row = other.row(id).await;
            assert_eq!((row.status, row.owner_instance_id), (QueueStatus::Dispatched, Some(instance("node-2"))));
            assert_eq!(other.job(id).await.status, JobStatus::Running);
            let done = agent.update(&offered, "success", "").await;
            agent.settled(done).await;
        }
        other.dispatcher.stop().await;
        world.dispatcher.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_7_an_agent_goes_on_with_its_job_at_another_orchestrator() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let job = agent.offer().await.job.unwrap();
        assert!(agent.begin(&job).await);
        agent.drop_connection();
        world.until(jobs[0], &[JobStatus::Recovering]).await;
        let other = sibling(&world, "node-2").await;
        let back = Register { in_flight_jobs: vec![held(&job, true)], ..register("a1", &["default"]) };
        let mut agent = Agent::with(&other, back, "").await.unwrap();
        assert_eq!(agent.ack.job_verdicts[0].verdict(), Verdict::Resume);
        // The window that the first one had opened ends without effect.
        tokio::time::sleep(world.config.recovery_window * 2).await;
        assert_eq!(world.job(jobs[0]).await.status, JobStatus::Running);
        let done = agent.update(&job, "success", "").await;
        agent.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
        other.dispatcher.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_11_a_database_that_does_not_answer_costs_no_agent_its_session_and_every_request_an_answer() {
    each_with(
        |config| config.ownership_timeout = Duration::from_millis(300),
        async |world| {
            let mut agent = Agent::connect(&world, "a1").await;
            world.create(&[job("build")]).await;
            let running = agent.offer().await.job.unwrap();
            agent.accept(&running).await;
            let foreign = kici_protocol::common::JobRef {
                job_id: "00000000-0000-7000-8000-000000000001".into(),
                ..running.clone()
            };
            world.store.death().now();
            // Far more than the number of violations that ends a session.
            for n in 0..20 {
                agent.step(&foreign, n, "running").await;
                let refused = nack(&mut agent).await;
                assert_eq!((refused.code(), refused.detail.as_str()), (NackCode::Refused, NOT_ASSIGNED));
                assert!(refused.retry_after_ms > 0, "it may be right later");
            }
            // Of a job that is known to be its own: told apart, and told when to ask again.
            for state in ["running", "success"] {
                agent.update(&running, state, "").await;
                let refused = nack(&mut agent).await;
                assert_eq!(refused.code(), NackCode::Unavailable);
                assert!(refused.retry_after_ms > 0);
            }
            assert_eq!(world.dispatcher.agents().len(), 1);
            world.store.death().over();
            assert!(agent.ask(&running).await, "it goes on where it was");
            let done = agent.update(&running, "success", "").await;
            agent.settled(done).await;
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_16_a_gated_agent_is_passed_over_after_a_drain_a_requeue_and_by_the_safety_net() {
    each_with(
        |config| {
            config.auth = AgentAuth::Token;
            config.redrive_interval = Duration::from_millis(50);
        },
        async |world| {
            let gated = new_token(&world, |token| token.mandatory_labels = Some(vec!["gpu".into()])).await;
            let open = new_token(&world, |_| {}).await;
            let mut gated = Agent::with(&world, register("a1", &["default", "gpu"]), &gated).await.unwrap();
            let mut other = Agent::with(&world, register("a2", &["default"]), &open).await.unwrap();
            // Given back: looked for again, not to the gated one.
            let (_, plain) = world.create(&[job("build")]).await;
            let offered = other.offer().await.job.unwrap();
            other.reject(&offered, RejectReason::Unsupported).await;
            world.until_row(plain[0], QueueStatus::Pending).await;
            assert!(gated.quiet().await);
            // Lost before its start.
            other.drop_connection();
            let mut other = Agent::with(&world, register("a3", &["default"]), &open).await.unwrap();
            let offered = other.offer().await.job.unwrap();
            other.drop_connection();
            world.until_row(plain[0], QueueStatus::Pending).await;
            // A drain ends.
            world.dispatcher.drain(true);
            world.dispatcher.drain(false);
            // Several turns of the safety net.
            assert!(gated.quiet().await && gated.quiet().await);
            let row = world.row(plain[0]).await;
            assert_eq!((row.status, row.dispatch_epoch), (QueueStatus::Pending, offered.dispatch_epoch));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_1_offers_that_are_swallowed_cost_one_delivery_each_and_no_job() {
    const JOBS: usize = 60;
    each(async |world| {
        let mut jobs = Vec::new();
        for _ in 0..JOBS {
            jobs.push(world.create(&[job("build")]).await.1[0]);
        }
        let swallowed = std::sync::atomic::AtomicUsize::new(0);
        let offers = std::sync::atomic::AtomicUsize::new(0);
        let work = (0..6).map(|n| {
            let (world, swallowed, offers) = (&world, &swallowed, &offers);
            async move {
                loop {
                    let mut agent = Agent::connect(world, &format!("a{n}")).await;
                    while let Some(Down::JobOffer(offer)) = agent.maybe_next().await {
                        use std::sync::atomic::Ordering::SeqCst;
                        if offers.fetch_add(1, SeqCst) % 10 == 9 {
                            swallowed.fetch_add(1, SeqCst);
                            continue;
                        }
                        let job = offer.job.unwrap();
                        if agent.begin(&job).await {
                            let done = agent.update(&job, "success", "").await;
                            agent.settled(done).await;
                        }
                    }
                }
            }
        });
        let done = async {
            for id in &jobs {
                world.until(*id, &[JobStatus::Success]).await;
            }
        };
        tokio::select! {
            () = done => {}
            _ = join_all(work) => {}
        }
        let mut attempts = 0;
        for id in jobs {
            let row = world.row(id).await;
            assert_eq!(row.dispatch_epoch, row.dispatch_attempts + 1, "each hand-over but the last was undone once");
            attempts += row.dispatch_attempts as usize;
        }
        assert_eq!(attempts, swallowed.into_inner());
        assert!(attempts >= JOBS / 10);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_5_a_death_before_the_start_is_an_attempt_and_one_after_it_is_lost_and_never_success() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, jobs) = world.create(&[job("build")]).await;
        let first = agent.offer().await.job.unwrap();
        agent.accept(&first).await;
        agent.drop_connection();
        // Forgotten: its process died.
        let mut agent = Agent::connect(&world, "a1").await;
        let second = agent.offer().await.job.unwrap();
        assert_eq!((second.dispatch_epoch, world.row(jobs[0]).await.dispatch_attempts), (2, 1));
        assert!(agent.begin(&second).await);
        agent.drop_connection();
        world.until_run(run, RunStatus::Failed).await;
        let job = world.job(jobs[0]).await;
        assert_eq!(job.failure_class, Some(kici_engine::state::FailureClass::Lost));
        assert_eq!(world.row(jobs[0]).await.dispatch_epoch, 2, "user code ran: it is not run again by itself");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_8_agents_that_die_of_a_job_before_its_start_end_it_with_the_budget() {
    each(async |world| {
        let (run, jobs) = world.create(&[job("build")]).await;
        for n in 0..5 {
            let mut agent = Agent::connect(&world, &format!("a{n}")).await;
            agent.offer().await;
            agent.drop_connection();
        }
        world.until_run(run, RunStatus::Failed).await;
        let job = world.job(jobs[0]).await;
        assert_eq!(job.failure_reason, Some(FailureReason::GaveUp));
        let message = job.failure_message.unwrap();
        assert!(message.contains("gave up after 5 deliveries") && message.contains("a4"), "{message}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_10_a_job_for_a_busy_agent_waits_beyond_the_grace_of_unroutable_ones() {
    each_with(
        |config| config.unroutable_grace = Duration::from_millis(100),
        async |world| {
            let mut agent = Agent::connect(&world, "a1").await;
            world.create(&[job("build")]).await;
            let running = agent.offer().await.job.unwrap();
            assert!(agent.begin(&running).await);
            let (_, waiting) = world.create(&[job("build")]).await;
            for _ in 0..5 {
                world.sweep("dispatch_routing").await;
                tokio::time::sleep(Duration::from_millis(60)).await;
            }
            let row = world.row(waiting[0]).await;
            assert_eq!((row.status, row.unroutable_since), (QueueStatus::Pending, None));
            let why = world.dispatcher.explain(waiting[0]).await.unwrap();
            assert!(why.unroutable.is_none() && why.agents[0].obstacle.is_some(), "{why:?}");
            let done = agent.update(&running, "success", "").await;
            agent.settled(done).await;
            agent.work().await;
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_21_a_cancel_reaches_the_agent_of_another_orchestrator_graceful_and_forced() {
    kici_store::testing::TestStore::each(async |stored: kici_store::testing::TestStore| {
        if stored.store.backend() == "sqlite" {
            return;
        }
        let _clock = keep_time(stored.clock.clone());
        let ids = std::sync::Arc::new(kici_store::testing::TestIds);
        let (clock, store) = (stored.clock.clone(), stored.sibling("node-2").await);
        let world = World::on(stored.store.clone(), config("node-1"), clock.clone(), ids.clone()).await;
        let other = World::on(store, config("node-2"), clock, ids).await;
        beat(&other, "node-2").await;
        for force in [false, true] {
            let mut agent = Agent::connect(&other, "a2").await;
            let (run, jobs) = world.create(&[job("build")]).await;
            let running = agent.offer().await.job.unwrap();
            assert!(agent.begin(&running).await);
            let report = world.dispatcher.cancel_run(run, "ann", FailureReason::CancelledByUser, force).await.unwrap();
            assert_eq!((report.agents_notified, report.unreachable), (0, vec![agent.agent_id()]));
            let Down::JobCancel(cancel) = agent.next().await else { panic!("a cancel") };
            assert_eq!((cancel.job.as_ref(), cancel.force), (Some(&running), force));
            let done = agent.update(&running, "cancelled", "cancelled_by_user").await;
            agent.settled(done).await;
            let ended = world.until(jobs[0], &[JobStatus::Cancelled]).await;
            assert_eq!(ended.failure_reason, Some(FailureReason::CancelledByUser));
            world.until_run(run, RunStatus::Cancelled).await;
            agent.drop_connection();
        }
        world.dispatcher.stop().await;
        other.dispatcher.stop().await;
        other.store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_21_a_cancel_that_no_wake_up_tells_of_reaches_the_agent_with_the_next_sweep() {
    each(async |world| {
        // It follows no wake-ups.
        let deaf = world.unstarted().await;
        world.dispatcher.drain(true);
        let mut agent = Agent::with(&deaf, register("a1", &["default"]), "").await.unwrap();
        let (run, jobs) = world.create(&[job("build")]).await;
        deaf.dispatcher.dispatch(jobs[0]).await.unwrap();
        let running = agent.offer().await.job.unwrap();
        assert!(agent.begin(&running).await);
        let request = kici_store::model::CancelRequest {
            run_id: run,
            by: "ann".into(),
            reason: FailureReason::CancelledByUser,
            force: false,
        };
        world.store.run_cancel(request, world.dispatcher.activate()).await.unwrap();
        assert!(agent.quiet().await);
        assert_eq!(deaf.sweep("dispatch_cancelled").await, 1);
        assert_eq!(deaf.sweep("dispatch_cancelled").await, 0, "it is told once");
        let Down::JobCancel(cancel) = agent.next().await else { panic!("a cancel") };
        assert!(!cancel.force);
        deaf.dispatcher.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_15_a_cancel_ends_the_run_though_the_agent_is_frozen_or_still_says_it_is_alive() {
    each_with(
        |config| config.cancel_slack = Duration::from_millis(300),
        async |world| {
            let mut agent = Agent::connect(&world, "a1").await;
            let (run, _) = world.create(&[job("build")]).await;
            let running = agent.offer().await.job.unwrap();
            assert!(agent.begin(&running).await);
            world.dispatcher.cancel_run(run, "user ann", FailureReason::CancelledByUser, false).await.unwrap();
            // It hears the cancel and goes on as before: signs of life do not put the end off.
            let alive = async {
                loop {
                    let beat = JobHeartbeat { job: Some(running.clone()), at_us: 1 };
                    agent.send(agent_frame::Frame::JobHeartbeat(beat)).await;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            tokio::select! {
                _ = world.until_run(run, RunStatus::Cancelled) => {}
                () = alive => {}
            }
            let Down::JobCancel(first) = agent.next().await else { panic!("a cancel") };
            let Down::JobCancel(second) = agent.next().await else { panic!("a second cancel") };
            assert_eq!((first.force, second.force), (false, true));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_25_rows_of_an_older_version_are_neither_taken_over_nor_lost() {
    kici_store::testing::TestStore::each(async |stored: kici_store::testing::TestStore| {
        let _clock = keep_time(stored.clock.clone());
        let ids = std::sync::Arc::new(kici_store::testing::TestIds);
        let mut settings = config("node-1");
        settings.stale_after = Duration::from_millis(1_500);
        let world = World::on(stored.store.clone(), settings, stored.clock.clone(), ids).await;
        let mut agent = Agent::connect(&world, "a1").await;
        let mut second = Agent::connect(&world, "a2").await;
        let (_, started) = world.create(&[job("build")]).await;
        let running = tokio::select! { offer = agent.offer() => offer, offer = second.offer() => offer }.job.unwrap();
        let (mut holder, mut other) = if world.row(started[0]).await.agent_id == Some(agent.agent_id()) {
            (agent, second)
        } else {
            (second, agent)
        };
        assert!(holder.begin(&running).await);
        let (run, unstarted) = world.create(&[job("build")]).await;
        let taken = other.offer().await.job.unwrap();
        let taken = other.accept(&taken).await;
        other.settled(taken).await;
        world.wait(async || world.row(unstarted[0]).await.acked_at).await;
        stored.sql("UPDATE dispatch_queue SET owner_instance_id = NULL, dispatched_at = NULL").await;
        // A start takes rows of its own and of dead instances only: these are nobody's.
        let world = world.restarted().await;
        for id in [started[0], unstarted[0]] {
            assert_eq!(world.row(id).await.status, QueueStatus::Dispatched);
        }
        // The agent that comes back has its job; the one that does not is found by its silence.
        let id = holder.id.clone();
        let back = Register { in_flight_jobs: vec![held(&running, true)], ..register(&id, &["default"]) };
        let mut holder = Agent::with(&world, back, "").await.unwrap();
        assert_eq!(holder.ack.job_verdicts[0].verdict(), Verdict::Resume);
        let done = holder.update(&running, "success", "").await;
        holder.settled(done).await;
        tokio::time::sleep(Duration::from_millis(1_600)).await;
        world.sweep("dispatch_unstarted").await;
        let again = holder.offer().await.job.unwrap();
        assert_eq!(job_ref(&again).job_id, unstarted[0]);
        assert!(holder.begin(&again).await);
        let done = holder.update(&again, "success", "").await;
        holder.settled(done).await;
        world.until_run(run, RunStatus::Success).await;
        world.dispatcher.stop().await;
    })
    .await;
}

/// Two orchestrators on one PostgreSQL; the second one serves sessions and hears nothing of the first.
async fn with_a_deaf_sibling(auth: AgentAuth, test: impl AsyncFn(&World, &World)) {
    let Some(stored) = kici_store::testing::TestStore::postgres().await else { return };
    let _clock = keep_time(stored.clock.clone());
    let ids = std::sync::Arc::new(kici_store::testing::TestIds);
    let with = |name| kici_dispatch::DispatchConfig { auth, ..config(name) };
    let world = World::on(stored.store.clone(), with("node-1"), stored.clock.clone(), ids).await;
    let store = stored.sibling("node-2").await;
    let deaf = World::new(store, with("node-2"), stored.clock.clone(), None);
    test(&world, &deaf).await;
    world.dispatcher.stop().await;
    deaf.dispatcher.stop().await;
    deaf.store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_15_a_revocation_at_one_orchestrator_ends_the_sessions_at_the_other() {
    let Some(stored) = kici_store::testing::TestStore::postgres().await else { return };
    let _clock = keep_time(stored.clock.clone());
    let ids = std::sync::Arc::new(kici_store::testing::TestIds);
    let with = |name| kici_dispatch::DispatchConfig { auth: AgentAuth::Token, ..config(name) };
    let world = World::on(stored.store.clone(), with("node-1"), stored.clock.clone(), ids.clone()).await;
    let store = stored.sibling("node-2").await;
    let other = World::on(store, with("node-2"), stored.clock.clone(), ids).await;
    let revoked = new_token(&world, |token| token.label = Some("old".into())).await;
    let kept = new_token(&world, |_| {}).await;
    let mut here = Agent::with(&world, register("a1", &["default"]), &revoked).await.unwrap();
    let mut there = Agent::with(&other, register("a2", &["default"]), &revoked).await.unwrap();
    let mut stays = Agent::with(&other, register("a3", &["default"]), &kept).await.unwrap();
    let tokens = world.store.agent_token_list().await.unwrap();
    let id = tokens.iter().find(|token| token.label.as_deref() == Some("old")).unwrap().id;
    assert!(world.store.agent_token_revoke(id).await.unwrap());
    assert_eq!(here.goodbye().await, "AUTH_REVOKED");
    assert_eq!(there.goodbye().await, "AUTH_REVOKED");
    assert!(stays.quiet().await);
    for world in [&world, &other] {
        let again = Agent::with(world, register("a2", &["default"]), &revoked).await;
        assert_eq!(again.err().as_deref(), Some("Unauthenticated"));
    }
    world.dispatcher.stop().await;
    other.dispatcher.stop().await;
    other.store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_15_a_revocation_that_the_other_orchestrator_does_not_hear_of_is_found_by_its_sweep() {
    with_a_deaf_sibling(AgentAuth::Token, async |world, deaf| {
        let token = new_token(world, |_| {}).await;
        let mut agent = Agent::with(deaf, register("a1", &["default"]), &token).await.unwrap();
        let id = world.store.agent_token_list().await.unwrap()[0].id;
        assert!(world.store.agent_token_revoke(id).await.unwrap());
        assert!(agent.quiet().await);
        assert_eq!(deaf.sweep("dispatch_tokens").await, 1);
        assert_eq!(agent.goodbye().await, "AUTH_REVOKED");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_21_a_cancel_ends_the_run_though_the_orchestrator_of_the_agent_is_down() {
    with_a_deaf_sibling(AgentAuth::None, async |world, deaf| {
        let runs_at = async |agent: &str| {
            let mut agent = Agent::connect(deaf, agent).await;
            let (run, jobs) = world.create(&[job("build")]).await;
            deaf.dispatcher.dispatch(jobs[0]).await.unwrap();
            let running = agent.offer().await.job.unwrap();
            assert!(agent.begin(&running).await);
            (agent, run, jobs[0], running)
        };
        // It lives, as far as anybody can tell: its agent is left to unwind the job.
        beat(deaf, "node-2").await;
        let (agent, run, id, _) = runs_at("a1").await;
        let cancel = async |run| world.dispatcher.cancel_run(run, "ann", FailureReason::CancelledByUser, false).await;
        let report = cancel(run).await.unwrap();
        assert_eq!((report.agents_notified, report.unreachable), (0, vec![agent.agent_id()]));
        assert_eq!(world.job(id).await.status, JobStatus::Cancelling);
        // And if it does not, the cancel is driven again until it is over.
        let over = async || {
            world.sweep("dispatch_stuck_cancels").await;
            let run = world.store.run_get(run).await.unwrap().unwrap();
            (run.status == RunStatus::Cancelled).then_some(())
        };
        world.wait(over).await;

        // It died, or stopped and left its agent behind.
        deaf.store.instance_remove(instance("node-2")).await.unwrap();
        let (_agent, run, id, running) = runs_at("a2").await;
        let report = cancel(run).await.unwrap();
        assert_eq!((report.agents_notified, report.unreachable.len()), (0, 0));
        world.until_run(run, RunStatus::Cancelled).await;
        assert_eq!(world.job(id).await.failure_reason, Some(FailureReason::CancelledByUser));
        // The agent finds its way to the one that is left, and has to end the job.
        let back = Register { in_flight_jobs: vec![held(&running, true)], ..register("a2", &["default"]) };
        let agent = Agent::with(world, back, "").await.unwrap();
        assert_eq!(agent.ack.job_verdicts[0].verdict(), Verdict::Abandon);
    })
    .await;
}
