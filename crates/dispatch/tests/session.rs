//! Sessions of agents against a dispatcher over a real store: the acceptance list of dispatch, by number.

mod support;

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kici_dispatch::ports::CloneError;
use kici_dispatch::{AgentAuth, Ownership};
use kici_engine::state::{FailureReason, JobStatus, QueueStatus, RunStatus};
use kici_protocol::agent::agent_frame::Frame as Up;
use kici_protocol::agent::orchestrator_frame::Frame as Down;
use kici_protocol::agent::*;
use kici_protocol::common;
use kici_store::model::{AgentType, NewAgentToken, TokenKind};
use sha2::{Digest, Sha256};
use support::*;

async fn nack(agent: &mut Agent) -> FrameNack {
    match agent.next().await {
        Down::FrameNack(nack) => nack,
        other => panic!("a refusal was due, not {other:?}"),
    }
}

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
        assert_eq!(world.dispatcher.agents()[0].jobs.len(), 0);
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
    each(async |world| {
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
        |config| config.auth = AgentAuth::Token,
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

async fn new_token(world: &World, change: impl FnOnce(&mut NewAgentToken)) -> String {
    let token = format!("kici_agent_{}", world.ids.uuid());
    let mut new = NewAgentToken {
        token_hash: hex(&Sha256::digest(token.as_bytes())),
        token_prefix: "01900000".into(),
        label: None,
        labels: None,
        mandatory_labels: None,
        agent_type: AgentType::Static,
        kind: TokenKind::Static,
        bound_agent_id: None,
        created_by: "test".into(),
        expires_at: None,
    };
    change(&mut new);
    world.store.agent_token_create(new).await.unwrap();
    token
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_13_a_token_covers_its_labels_its_agent_and_its_host() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let scoped = new_token(&world, |token| token.labels = Some(vec!["default".into()])).await;
            let other = new_token(&world, |_| {}).await;
            let refused = |result: Result<Agent, String>| result.err();
            let with = |register: Register, token: String| {
                let world = &world;
                async move { Agent::with(world, register, &token).await }
            };
            let extra = register("a1", &["default", "gpu"]);
            assert_eq!(refused(with(extra, scoped.clone()).await).as_deref(), Some("UNAUTHORIZED"));
            let own = register("a1", &["default", "kici:os:windows", "kici:host:production"]);
            let mut agent = with(own, scoped.clone()).await.unwrap();
            assert!(agent.ack.labels.contains(&"kici:os:linux".to_owned()));
            assert!(agent.ack.labels.contains(&"kici:host:host-a1".to_owned()));
            assert!(!agent.ack.labels.iter().any(|label| label == "kici:host:production"));
            // The name, and the host, are taken by another token.
            assert_eq!(refused(with(register("a1", &[]), other.clone()).await).as_deref(), Some("UNAUTHORIZED"));
            let foreign = Register { hostname: "HOST-A1".into(), ..register("a2", &[]) };
            assert_eq!(refused(with(foreign, other.clone()).await).as_deref(), Some("UNAUTHORIZED"));
            // The same gates on the same session.
            agent.send(Up::Register(register("a1", &["default", "gpu"]))).await;
            assert_eq!(agent.goodbye().await, "UNAUTHORIZED");
            assert_eq!(
                refused(with(register("a3", &[]), "kici_agent_unknown".into()).await).as_deref(),
                Some("Unauthenticated")
            );
            assert_eq!(refused(with(register("a3", &[]), String::new()).await).as_deref(), Some("Unauthenticated"));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_14_a_bootstrap_token_lets_one_of_two_in() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let token = new_token(&world, |token| token.kind = TokenKind::Bootstrap).await;
            let (one, two) = tokio::join!(
                Agent::with(&world, register("a1", &["default"]), &token),
                Agent::with(&world, register("a2", &["default"]), &token)
            );
            assert_eq!(u8::from(one.is_ok()) + u8::from(two.is_ok()), 1);
            assert!(Agent::with(&world, register("a3", &["default"]), &token).await.is_err());
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_15_a_revoked_token_ends_its_sessions_at_once_and_by_the_sweep() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let token = new_token(&world, |_| {}).await;
            let mut agent = Agent::with(&world, register("a1", &["default"]), &token).await.unwrap();
            let id = world.store.agent_token_list().await.unwrap()[0].id;
            world.store.agent_token_revoke(id).await.unwrap();
            assert_eq!(agent.goodbye().await, "AUTH_REVOKED");
            world.wait(async || (world.dispatcher.close_token(id) == 0).then_some(())).await;
            let again = Agent::with(&world, register("a1", &["default"]), &token).await;
            assert_eq!(again.err().as_deref(), Some("Unauthenticated"));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_16_a_gated_agent_takes_only_jobs_that_name_its_label() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let gated = new_token(&world, |token| token.mandatory_labels = Some(vec!["gpu".into()])).await;
            let mut agent = Agent::with(&world, register("a1", &["default", "gpu"]), &gated).await.unwrap();
            let (_, plain) = world.create(&[job("build")]).await;
            // Again on the same session: the gate stays.
            agent.send(Up::Register(register("a1", &["default", "gpu"]))).await;
            assert!(matches!(agent.next().await, Down::RegisterAck(_)));
            let (_, gpu) = world.create(&[JobDef { label: "gpu", ..job("train") }]).await;
            let offered = agent.offer().await.job.unwrap();
            assert_eq!(job_ref(&offered).job_id, gpu[0]);
            assert!(agent.begin(&offered).await);
            let done = agent.update(&offered, "success", "").await;
            agent.settled(done).await;
            assert!(agent.quiet().await);
            let row = world.row(plain[0]).await;
            assert_eq!((row.status, row.dispatch_epoch), (QueueStatus::Pending, 0));
            let why = world.wait(async || world.job(plain[0]).await.routing_reason).await;
            assert!(why.contains("gpu"), "{why}");
        },
    )
    .await;
}

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
