//! Many jobs, agents whose connections break at any moment and that do not hear every frame.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use kici_engine::state::{FailureReason, JobStatus};

use crate::support::robot::{Chance, Ledger, Robot};
use crate::support::*;

const JOBS: usize = 200;
const AGENTS: u64 = 20;

/// An agent that is cut off again and again.
async fn life(world: &World, mut robot: Robot) {
    loop {
        let session = Duration::from_millis(200 + robot.chance.below(1_200));
        let _ = tokio::time::timeout(session, robot.serve(world)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_2_broken_sessions_and_lost_frames_end_every_job_and_start_none_twice() {
    let seed = u64::from(std::process::id());
    each_with(
        |config| config.max_depth = 10_000,
        async |world| {
            let ledger = Ledger::default();
            let defs: Vec<JobDef> = (0..JOBS).map(|n| job(Box::leak(format!("plain-{n}").into_boxed_str()))).collect();
            let (_, jobs) = world.create(&defs).await;
            let lives = (1..=AGENTS).map(|n| {
                let mut robot = Robot::new(&format!("a{n}"), ledger.clone());
                robot.chance = Chance::new(seed + n);
                robot.deaf_to_one_in = Some(20);
                life(&world, robot)
            });
            let sweeps = async {
                let mut pace = tokio::time::interval(Duration::from_millis(100));
                loop {
                    pace.tick().await;
                    for sweep in world.dispatcher.reconcilers() {
                        let _ = sweep.run().await;
                    }
                }
            };
            let over = async {
                for job in &jobs {
                    let any = [JobStatus::Success, JobStatus::Failed, JobStatus::TimedOutStale];
                    world.until(*job, &any).await;
                }
            };
            tokio::select! {
                () = over => {}
                _ = join_all(lives) => {}
                () = sweeps => {}
            }
            let mut starts: BTreeMap<String, Vec<u32>> = BTreeMap::new();
            for (job, epoch) in ledger.lock().unwrap().iter() {
                starts.entry(job.clone()).or_default().push(*epoch);
            }
            let mut done = 0;
            for job in &jobs {
                let ended = world.job(*job).await;
                let began = starts.remove(&job.uuid().to_string()).unwrap_or_default();
                assert!(began.len() <= 1, "seed {seed}: {job} ran at epochs {began:?}");
                match ended.status {
                    JobStatus::Success => done += 1,
                    _ => assert!(
                        matches!(ended.failure_reason, Some(FailureReason::GaveUp | FailureReason::AgentLost)),
                        "seed {seed}: {ended:?}"
                    ),
                }
                assert!(
                    ended.status != JobStatus::Success || began.len() == 1,
                    "seed {seed}: {job} succeeded unstarted"
                );
            }
            assert!(done > JOBS * 9 / 10, "seed {seed}: only {done} of {JOBS} succeeded");
        },
    )
    .await;
}
