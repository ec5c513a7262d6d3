//! Agents on demand: what the scaler is asked, what becomes of its answers, and how its agents get their jobs.

use std::sync::Arc;
use std::time::Duration;

use kici_dispatch::{AgentAuth, DispatchOutcome};
use kici_engine::ids::{AgentId, JobId, RunId};
use kici_engine::scaling::{Cap, ScaleVerdict, Trigger};
use kici_engine::state::{FailureReason, JobStatus, QueueStatus};
use kici_protocol::agent::{InFlightJob, Register};
use kici_store::model::TokenKind;
use tokio::sync::Semaphore;

use crate::registration::new_token;
use crate::support::*;

fn on(label: &'static str, name: &'static str) -> JobDef {
    JobDef { label, ..job(name) }
}

/// So many jobs for a pool.
fn many(label: &'static str, count: usize) -> Vec<JobDef> {
    (0..count).map(|n| on(label, Box::leak(format!("{label}-{n}").into_boxed_str()))).collect()
}

async fn one(world: &World, label: &'static str, name: &'static str) -> (RunId, JobId) {
    let (run, jobs) = world.create(&[on(label, name)]).await;
    (run, jobs[0])
}

/// The agent that was started for a job registers.
async fn arrives(world: &World, scaler: &FakeScaler, label: &str, job: JobId) -> Agent {
    let agent = world.wait(async || scaler.agent_of(job)).await;
    Agent::with(world, register(agent.as_str(), &[label]), "").await.expect("it is wanted")
}

async fn reason(world: &World, job: JobId, wanted: &str) {
    let seen = world.wait(async || {
        let reason = world.job(job).await.routing_reason?;
        reason.contains(wanted).then_some(reason)
    });
    seen.await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_no_agent_takes_gets_one_that_begins_with_it() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            scaler.pool("gpu", 2);
            let (_, older) = one(&world, "gpu", "older").await;
            let (_, newer) = one(&world, "gpu", "newer").await;
            reason(&world, older, "agent scaler-container-older (container) is being started for it").await;
            let asked = world.wait(async || (scaler.asked_for(newer) > 0).then(|| scaler.book().asked.clone())).await;
            let asked = asked.iter().find(|asked| asked.job_id == newer).unwrap();
            assert_eq!((asked.job_name.as_str(), &asked.selector), ("newer", &selector("gpu")));

            // Its own job, though another one waits before it.
            let mut second = arrives(&world, &scaler, "gpu", newer).await;
            assert!(second.ack.scaler_managed && second.ack.pending_dispatch);
            assert_eq!(second.ack.recovery_window_ms, 90_000);
            let bound = second.offer().await.job.unwrap();
            assert_eq!(job_ref(&bound).job_id, newer);
            assert!(second.begin(&bound).await);
            // Before the second one is free again: it would take what waits.
            let mut first = arrives(&world, &scaler, "gpu", older).await;
            assert_eq!(job_ref(&first.work().await).job_id, older);
            assert_eq!(world.job(older).await.routing_reason, None);
            let done = second.update(&bound, "success", "").await;
            second.settled(done).await;
            // Its slot comes free a moment after its result is durable.
            world.wait(async || world.dispatcher.agents().iter().all(|a| a.jobs.is_empty()).then_some(())).await;
            let settled = |job: JobId, agent: &Agent| scaler.book().settled.contains(&(job, Some(agent.agent_id())));
            assert!(settled(newer, &second) && settled(older, &first));
            second.drop_connection();
            world.wait(async || (!scaler.book().disconnected.is_empty()).then_some(())).await;
            assert_eq!(scaler.book().disconnected[0], (AgentId::new("scaler-container-newer").unwrap(), false));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_free_again_takes_what_waits_though_another_one_is_being_started_for_it() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            scaler.pool("gpu", 2);
            let (_, older) = one(&world, "gpu", "older").await;
            let mut first = arrives(&world, &scaler, "gpu", older).await;
            let (_, newer) = one(&world, "gpu", "newer").await;
            let late = world.wait(async || scaler.agent_of(newer)).await;
            assert_eq!(job_ref(&first.work().await).job_id, older);
            let taken = first.offer().await.job.unwrap();
            assert_eq!(job_ref(&taken).job_id, newer);
            assert!(first.begin(&taken).await);
            let late = Agent::with(&world, register(late.as_str(), &["gpu"]), "").await.expect("it is wanted");
            assert!(!late.ack.pending_dispatch, "its job is under way elsewhere");
        },
    )
    .await;
}

/// Does something while another transaction has locked the rows of the queue, and until a while after.
async fn while_locked<T>(stored: &kici_store::testing::TestStore, act: impl Future<Output = T>) -> T {
    // The second lock tells that the first one is held.
    const LOCK: &str = "BEGIN; SELECT 1 FROM dispatch_queue FOR UPDATE; SELECT pg_advisory_xact_lock(77); \
                        SELECT pg_sleep(0.4); COMMIT";
    const WAIT: &str = "DO $$ BEGIN WHILE NOT EXISTS (SELECT 1 FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
                        WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.objid = 77) \
                        LOOP PERFORM pg_sleep(0.005); END LOOP; END $$";
    let acts = async {
        stored.sql(WAIT).await;
        act.await
    };
    tokio::join!(stored.sql(LOCK), acts).1
}

/// A dispatcher on PostgreSQL whose safety net does not come within a test.
async fn on_postgres(test: impl AsyncFn(&World, &FakeScaler, &kici_store::testing::TestStore)) {
    let Some(stored) = kici_store::testing::TestStore::postgres().await else { return };
    let _clock = keep_time(stored.clock.clone());
    let scaler = Arc::new(FakeScaler::default());
    let mut settings = config("node-1");
    settings.redrive_interval = Duration::from_secs(3600);
    let world = World::new(stored.store.clone(), settings, stored.clock.clone(), Some(scaler.clone()));
    world.dispatcher.start().await.unwrap();
    test(&world, &scaler, &stored).await;
    world.dispatcher.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_gets_the_job_that_it_was_started_for_though_its_row_is_locked_for_a_moment() {
    on_postgres(async |world, scaler, stored| {
        scaler.pool("gpu", 2);
        let (_, older) = one(world, "gpu", "older").await;
        let (_, newer) = one(world, "gpu", "newer").await;
        let agent = world.wait(async || scaler.agent_of(newer)).await;
        let arrives = async {
            let mut agent = Agent::with(world, register(agent.as_str(), &["gpu"]), "").await.expect("it is wanted");
            agent.offer().await.job.unwrap()
        };
        let offered = while_locked(stored, arrives).await;
        assert_eq!(job_ref(&offered).job_id, newer);
        assert_eq!(world.row(older).await.status, QueueStatus::Pending);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pass_could_not_claim_because_it_was_locked_is_given_out_soon() {
    on_postgres(async |world, _, stored| {
        let (_, waits) = one(world, "default", "waits").await;
        let arrives = async {
            let mut agent = Agent::connect(world, "a1").await;
            agent.offer().await.job.unwrap()
        };
        let offered = while_locked(stored, arrives).await;
        assert_eq!(job_ref(&offered).job_id, waits);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_scaler_says_of_a_new_job_is_not_lost_to_a_look_that_began_before() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            backlog(&world, &scaler, 1).await;
            // A look that has read what waits and is held up before it is done.
            let (go_on, held_up) = std::sync::mpsc::channel();
            scaler.book().hold_up = Some(held_up);
            let world = Arc::new(world);
            let look = tokio_util::task::TaskTracker::new().spawn({
                let world = Arc::clone(&world);
                async move { world.sweep("dispatch_routing").await }
            });
            world.wait(async || scaler.book().hold_up.is_none().then_some(())).await;
            scaler.pool("gpu", 1);
            let (_, newer) = one(&world, "gpu", "newer").await;
            let said = async || world.dispatcher.explain(newer).await.unwrap().scaler;
            world.wait(&said).await;
            go_on.send(()).unwrap();
            look.await.unwrap();
            reason(&world, newer, "is being started for it").await;
            assert!(said().await.is_some());
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_whose_job_is_gone_takes_what_waits() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            scaler.pool("gpu", 1);
            let (run, job) = one(&world, "gpu", "gone").await;
            let agent = world.wait(async || scaler.agent_of(job)).await;
            let record = scaler.book().records[&agent].clone();
            world.dispatcher.cancel_run(run, "alice", FailureReason::CancelledByUser, false).await.unwrap();
            world.wait(async || scaler.book().settled.contains(&(job, None)).then_some(())).await;
            let (_, other) = one(&world, "gpu", "other").await;
            world.wait(async || (scaler.asked_for(other) > 0).then_some(())).await;
            assert_eq!(record.bound_job, Some(job));
            let mut agent = Agent::with(&world, register(agent.as_str(), &["gpu"]), "").await.unwrap();
            assert!(!agent.ack.pending_dispatch, "it need not wait for a job that is gone");
            assert_eq!(job_ref(&agent.work().await).job_id, other);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_has_five_outcomes() {
    each_scaled(
        |config| config.unroutable_grace = Duration::ZERO,
        async |world, scaler| {
            scaler.pool("gpu", 0);
            let dispatch = async |job| world.dispatcher.dispatch(job).await.unwrap();
            let (_, nowhere) = one(&world, "tpu", "nowhere").await;
            assert_eq!(dispatch(nowhere).await, DispatchOutcome::QueuedNoBackend { job_id: nowhere });
            let (_, full) = one(&world, "gpu", "full").await;
            assert_eq!(dispatch(full).await, DispatchOutcome::Queued { job_id: full });
            let (_, waits) = one(&world, "default", "waits").await;
            assert_eq!(dispatch(waits).await, DispatchOutcome::QueuedNoBackend { job_id: waits });
            let mut agent = Agent::connect(&world, "a1").await;
            let busy = agent.offer().await.job.unwrap();
            assert_eq!(job_ref(&busy).job_id, waits);
            agent.accept(&busy).await;
            assert_eq!(dispatch(waits).await, DispatchOutcome::Duplicate { job_id: waits }, "nothing is sent again");
            let (_, next) = one(&world, "default", "next").await;
            assert_eq!(dispatch(next).await, DispatchOutcome::Queued { job_id: next }, "its agent is busy");
            // Nobody but this call looks for an agent while nothing wakes the others.
            world.dispatcher.drain(true);
            let (run, drained) = one(&world, "default", "drained").await;
            assert_eq!(dispatch(drained).await, DispatchOutcome::Queued { job_id: drained });
            world.dispatcher.cancel_run(run, "alice", FailureReason::CancelledByUser, false).await.unwrap();
            assert!(matches!(dispatch(drained).await, DispatchOutcome::Rejected { .. }));
            assert!(agent.quiet().await);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_to_a_free_agent_says_which() {
    each_with(
        |config| config.redrive_interval = Duration::from_secs(3600),
        async |world| {
            // It follows no wake-ups: only the call looks for an agent.
            let quiet = world.unstarted().await;
            world.dispatcher.drain(true);
            let mut agent = Agent::with(&quiet, register("a1", &["default"]), "").await.unwrap();
            let (_, job) = one(&world, "default", "build").await;
            let outcome = quiet.dispatcher.dispatch(job).await.unwrap();
            assert_eq!(outcome, DispatchOutcome::Dispatched { agent_id: agent.agent_id(), job_id: job });
            assert_eq!(job_ref(agent.offer().await.job.as_ref().unwrap()).job_id, job);
            quiet.dispatcher.stop().await;
        },
    )
    .await;
}

/// Jobs for a full pool that the scaler has been asked for once each.
async fn backlog(world: &World, scaler: &FakeScaler, count: usize) -> Vec<JobId> {
    scaler.pool("gpu", 0);
    let (_, jobs) = world.create(&many("gpu", count)).await;
    world.wait(async || jobs.iter().all(|job| scaler.asked_for(*job) > 0).then_some(())).await;
    jobs
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pass_starts_ten_agents_and_the_next_one_the_rest() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            let jobs = backlog(&world, &scaler, 30).await;
            scaler.pool("gpu", 12);
            assert_eq!(world.dispatcher.redrive(Trigger::Sweep).await.unwrap(), 10);
            assert!(jobs[..10].iter().all(|job| scaler.agent_of(*job).is_some()), "the oldest first");
            assert_eq!(world.dispatcher.redrive(Trigger::Sweep).await.unwrap(), 2);
            assert_eq!(world.dispatcher.redrive(Trigger::Sweep).await.unwrap(), 0);
            assert_eq!(scaler.book().started.len(), 12);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_during_a_pass_returns_nothing_and_causes_one_more() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            backlog(&world, &scaler, 13).await;
            scaler.pool("gpu", 13);
            let gate = Arc::new(Semaphore::new(0));
            scaler.book().gate = Some(gate.clone());
            let asked = scaler.book().asked.len();
            let first = async { world.dispatcher.redrive(Trigger::Sweep).await.unwrap() };
            let others = async {
                world.wait(async || (scaler.book().asked.len() > asked).then_some(())).await;
                let overlapping = world.dispatcher.redrive(Trigger::Hook).await.unwrap();
                assert_eq!((overlapping, world.dispatcher.redrive(Trigger::Hook).await.unwrap()), (0, 0));
                gate.add_permits(1000);
            };
            let (started, ()) = tokio::join!(first, others);
            assert_eq!(started, 13, "ten, and three by the one further pass that both calls caused");
            // The pass is over: the next call begins one.
            scaler.pool("gpu", 5);
            assert_eq!(world.dispatcher.redrive(Trigger::Hook).await.unwrap(), 0);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_for_a_full_pool_do_not_keep_a_newer_one_from_a_free_pool() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            backlog(&world, &scaler, 20).await;
            let before = scaler.book().asked.len();
            let (_, newer) = world.create(&[on("arm", "newer")]).await;
            world.wait(async || (scaler.asked_for(newer[0]) > 0).then_some(())).await;
            scaler.pool("arm", 1);
            assert_eq!(world.dispatcher.redrive(Trigger::Sweep).await.unwrap(), 1);
            assert!(scaler.agent_of(newer[0]).is_some());
            assert_eq!(scaler.book().asked.len(), before + 3, "one of the twenty was enough");
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn room_that_comes_free_is_used_at_once_and_a_draining_orchestrator_asks_nobody() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            let jobs = backlog(&world, &scaler, 2).await;
            scaler.pool("gpu", 1);
            world.dispatcher.capacity_freed();
            world.wait(async || scaler.agent_of(jobs[0])).await;
            world.dispatcher.drain(true);
            scaler.pool("gpu", 1);
            let asked = scaler.book().asked.len();
            assert_eq!(world.sweep("dispatch_pending_scale").await, 0);
            let (_, third) = one(&world, "gpu", "third").await;
            assert_eq!(world.dispatcher.dispatch(third).await.unwrap(), DispatchOutcome::Queued { job_id: third });
            assert_eq!(scaler.book().asked.len(), asked);
            world.dispatcher.drain(false);
            world.sweep("dispatch_pending_scale").await;
            assert_eq!(scaler.book().started.len(), 2);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_scaler_says_stands_with_the_job() {
    each_scaled(
        |_| {},
        async |world, scaler| {
            let instead = |label: &str, verdict: ScaleVerdict| scaler.book().instead.insert(label.into(), verdict);
            for pool in ["full", "broken", "off", "huge"] {
                scaler.pool(pool, 0);
            }
            instead("broken", ScaleVerdict::Failed { error: "no such image".into() });
            instead("off", ScaleVerdict::Skipped { reason: "draining".into() });
            instead("huge", ScaleVerdict::Unsatisfiable { cap: Cap::ResourceCapCpu, requested: 8000, max: 4000 });
            let defs = [on("full", "full"), on("broken", "broken"), on("off", "off"), on("huge", "huge")];
            let (_, jobs) = world.create(&defs).await;
            reason(&world, jobs[0], "max_agents is reached").await;
            reason(&world, jobs[1], "could not be started for it: no such image").await;
            assert_eq!(world.row(jobs[1]).await.last_provisioning_error.as_deref(), Some("no such image"));
            reason(&world, jobs[2], "draining").await;
            let failed = world.until(jobs[3], &[JobStatus::Unroutable]).await;
            assert_eq!(
                failed.failure_message.unwrap(),
                "no pool is large enough: it asks for 8000 and resource_cap_cpu allows 4000"
            );
            assert!(world.dispatcher.explain(jobs[0]).await.unwrap().scaler.unwrap().contains("no room"));

            // A start that fails later says so too, and an agent that takes the job ends it.
            world.dispatcher.provisioning_failed(jobs[0], "exit code 1: bad token").await.unwrap();
            reason(&world, jobs[0], "exit code 1: bad token").await;
            let mut agent = Agent::with(&world, register("a1", &["full"]), "").await.unwrap();
            assert_eq!(job_ref(&agent.work().await).job_id, jobs[0]);
            assert_eq!(world.row(jobs[0]).await.last_provisioning_error, None);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_waited_in_vain_tells_why_no_agent_came() {
    each_scaled(
        |config| config.queue_timeout = Duration::from_millis(300),
        async |world, scaler| {
            scaler.book().instead.insert("gpu".into(), ScaleVerdict::Failed { error: "no such image".into() });
            scaler.pool("gpu", 1);
            let (_, job) = one(&world, "gpu", "build").await;
            // On a busy machine its time is over before the scaler was asked.
            world.wait(async || world.row(job).await.last_provisioning_error).await;
            let expired = world
                .wait(async || {
                    world.sweep("dispatch_expired_pending").await;
                    let job = world.job(job).await;
                    job.status.is_terminal().then_some(job)
                })
                .await;
            assert_eq!(expired.failure_reason, Some(FailureReason::QueueExpired));
            assert!(expired.failure_message.unwrap().ends_with("an agent for it could not be started: no such image"));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_scaled_to_zero_is_somebody() {
    each_scaled(
        |config| config.unroutable_grace = Duration::from_millis(200),
        async |world, scaler| {
            scaler.pool("gpu", 0);
            let (_, pooled) = one(&world, "gpu", "pooled").await;
            let (_, nowhere) = one(&world, "tpu", "nowhere").await;
            world
                .wait(async || {
                    world.sweep("dispatch_routing").await;
                    (world.job(nowhere).await.status == JobStatus::Unroutable).then_some(())
                })
                .await;
            let row = world.row(pooled).await;
            assert_eq!((row.status, row.unroutable_since), (QueueStatus::Pending, None));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_agents_that_a_scaler_started_register_as_such_and_keep_its_gate() {
    each_scaled(
        |config| config.auth = AgentAuth::Token,
        async |world, scaler| {
            scaler.pool("gpu", 1);
            let (_, job) = one(&world, "gpu", "build").await;
            let name = world.wait(async || scaler.agent_of(job)).await.to_string();
            let ordinary = new_token(&world, |_| {}).await;
            let of_scaler = new_token(&world, |token| token.kind = TokenKind::Scaler).await;
            let with =
                async |name: &str, token: &str| Agent::with(&world, register(name, &["gpu", "default"]), token).await;
            assert_eq!(with(&name, &ordinary).await.err().unwrap(), "UNAUTHORIZED", "a name of a scaler's agent");
            assert_eq!(with("scaler-container-unknown", &of_scaler).await.err().unwrap(), "UNAUTHORIZED");
            scaler.book().blind = true;
            assert_eq!(with(&name, &of_scaler).await.err().unwrap(), "INTERNAL", "it comes back");
            scaler.book().blind = false;
            let mut agent = with(&name, &of_scaler).await.unwrap();
            // The gate is the scaler's, in no token: it stays when the agent registers anew.
            let again = Register { agent_id: name.clone(), ..register(&name, &["gpu", "default"]) };
            let seq = agent.send(kici_protocol::agent::agent_frame::Frame::Register(again)).await;
            agent.settled(seq).await;
            let (_, ungated) = one(&world, "default", "ungated").await;
            assert_eq!(job_ref(&agent.work_after_register().await).job_id, job);
            assert_eq!(world.row(ungated).await.status, QueueStatus::Pending);
            assert!(agent.quiet().await);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_9_a_scaler_is_asked_again_for_the_job_of_an_agent_that_died_before_the_start() {
    each_scaled(
        |config| config.scaler_reconnect_grace = Duration::from_millis(400),
        async |world, scaler| {
            scaler.pool("gpu", 5);
            let (_, job) = one(&world, "gpu", "build").await;
            let mut agent = arrives(&world, &scaler, "gpu", job).await;
            let offered = agent.offer().await.job.unwrap();
            let acked = agent.accept(&offered).await;
            agent.settled(acked).await;
            scaler.book().records.clear();
            agent.drop_connection();
            // The same id, and one delivery less.
            world.wait(async || (scaler.asked_for(job) == 2).then_some(())).await;
            assert_eq!(world.row(job).await.dispatch_attempts, 1);

            let mut agent = arrives(&world, &scaler, "gpu", job).await;
            let again = agent.offer().await.job.unwrap();
            assert!(agent.begin(&again).await);
            agent.drop_connection();
            // It may have been the network.
            world.until_row(job, QueueStatus::Recovering).await;
            assert_eq!(world.job(job).await.status, JobStatus::Recovering);
            let failed = world.until(job, &[JobStatus::Failed]).await;
            assert_eq!(failed.failure_reason, Some(FailureReason::AgentLost));
            assert_eq!((world.row(job).await.dispatch_epoch, scaler.asked_for(job)), (2, 2), "it is not run again");
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_9_an_agent_that_its_backend_says_is_gone_is_not_waited_for() {
    each_scaled(
        |config| config.scaler_reconnect_grace = Duration::from_secs(3600),
        async |world, scaler| {
            scaler.pool("gpu", 2);
            let (_, lost) = one(&world, "gpu", "lost").await;
            let (_, kept) = one(&world, "gpu", "kept").await;
            let mut first = arrives(&world, &scaler, "gpu", lost).await;
            let mut second = arrives(&world, &scaler, "gpu", kept).await;
            let (one, two) = (first.offer().await.job.unwrap(), second.offer().await.job.unwrap());
            assert!(first.begin(&one).await && second.begin(&two).await);
            let (gone, back) = (first.agent_id(), second.agent_id());
            first.drop_connection();
            second.drop_connection();
            world.until_row(lost, QueueStatus::Recovering).await;
            world.until_row(kept, QueueStatus::Recovering).await;
            world.dispatcher.agent_gone(&gone, "its container exited with 137").await.unwrap();
            let failed = world.until(lost, &[JobStatus::Failed]).await;
            assert!(failed.failure_message.unwrap().ends_with("its container exited with 137"));
            // The other one comes back within its grace and goes on.
            let register = Register {
                in_flight_jobs: vec![InFlightJob { job: Some(two.clone()), started: true }],
                ..register(back.as_str(), &["gpu"])
            };
            let mut second = Agent::with(&world, register, "").await.unwrap();
            let done = second.update(&two, "success", "").await;
            second.settled(done).await;
            assert_eq!(world.job(kept).await.status, JobStatus::Success);
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_jobs_are_offered_again_by_the_leader_only_and_not_at_all_without_a_scaler() {
    each(async |world| {
        assert!(world.dispatcher.reconcilers().iter().all(|sweep| sweep.name() != "dispatch_pending_scale"));
        assert_eq!(world.dispatcher.redrive(Trigger::Sweep).await.unwrap(), 0);
    })
    .await;
    each_scaled(
        |config| config.pending_sweep_interval = Duration::from_secs(7),
        async |world, _| {
            let all = world.dispatcher.reconcilers();
            let sweep = all.iter().find(|sweep| sweep.name() == "dispatch_pending_scale").expect("it is there");
            assert!(sweep.leader_only());
            assert_eq!(sweep.interval(), Duration::from_secs(7));
        },
    )
    .await;
}
