//! An orchestrator that dies right behind each of its writes, one after the other: whatever it had done until then, the
//! next process and the agents bring every job to an end, and no job starts twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::{FailureReason, JobStatus, QueueStatus};
use kici_store::model::QueueFilter;
use kici_store::testing::{TestIds, TestStore};

use crate::support::robot::{Ledger, Robot};
use crate::support::*;

/// Scenarios at the same time; they mostly wait.
const PARALLEL: usize = 6;
/// No scenario has more writes; the loop ends with the first one that outlives its death.
const MOST: usize = 400;

const JOBS: [JobDef; 7] = [
    job("build"),
    JobDef { needs: &["build"], ..job("deploy") },
    job("picky"),
    job("slow"),
    job("wobbly"),
    job("fatal"),
    JobDef { needs: &["fatal"], ..job("after") },
];

/// What one scenario came to.
struct Ended {
    /// The write behind which the process died; none when it lived to the end.
    death: Option<&'static str>,
}

#[tokio::test(flavor = "multi_thread")]
async fn complaint_11_after_a_death_behind_any_write_every_job_ends_and_none_starts_twice() {
    for make in [Database::Sqlite, Database::Postgres] {
        let mut deaths: BTreeMap<&'static str, usize> = BTreeMap::new();
        let mut scenarios = futures::stream::iter(1..MOST).map(|write| scenario(make, write)).buffered(PARALLEL);
        let mut outlived = false;
        while let Some(ended) = scenarios.next().await {
            match ended {
                // No server.
                None => return,
                Some(Ended { death: Some(name) }) => *deaths.entry(name).or_default() += 1,
                Some(Ended { death: None }) => {
                    outlived = true;
                    break;
                }
            }
        }
        assert!(outlived, "more writes than {MOST}: {deaths:?}");
        let died: BTreeSet<&str> = deaths.keys().copied().collect();
        // Which write has which number depends on the order of things; these are many enough to be met in any.
        let writes = ["queue_claim", "job_start", "job_report", "queue_recover"];
        assert!(writes.iter().all(|name| died.contains(name)), "{deaths:?}");
        eprintln!("{make:?}: {deaths:?}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Database {
    Sqlite,
    Postgres,
}

/// None: there is no such database here.
async fn scenario(database: Database, write: usize) -> Option<Ended> {
    let stored = match database {
        Database::Sqlite => TestStore::sqlite().await,
        Database::Postgres => TestStore::postgres().await?,
    };
    let _clock = keep_time(stored.clock.clone());
    let mut config = config("node-1");
    config.ownership_timeout = Duration::from_millis(500);
    config.stale_after = Duration::from_secs(6);
    // Sessions of the robots break several times in a row, with offers under way: each is an undone delivery.
    config.max_attempts = 50;
    // Robots that share a busy machine come back within this time.
    config.recovery_window = Duration::from_secs(15);
    let ids = Arc::new(TestIds);
    let world = World::on(stored.store.clone(), config.clone(), stored.clock.clone(), ids.clone()).await;
    let (run, jobs) = world.create(&JOBS).await;
    let (cancelled, endless) = world.create(&[job("endless")]).await;
    let ledger = Ledger::default();
    let mut robots = ["a1", "a2"].map(|id| Robot::new(id, Arc::clone(&ledger)));
    stored.store.death().behind(write);

    let runs = [run, cancelled];
    let before = live(&world, &mut robots, cancelled, &endless, &runs);
    let outlived = tokio::select! {
        () = before => true,
        () = stored.store.death().came() => false,
    };
    let death = if outlived { None } else { stored.store.death().writes().last().copied() };
    if !outlived {
        // The next process on the same database. The agents are still there.
        stored.store.close().await;
        let store = stored.reopened().await;
        let next = World::on(store, config, stored.clock.clone(), ids).await;
        live(&next, &mut robots, cancelled, &endless, &runs).await;
        check(&next, &ledger, &jobs, &endless, write, death).await;
        next.dispatcher.stop().await;
        next.store.close().await;
    } else {
        // All had ended: what background work writes from here on is not part of it.
        stored.store.death().behind(usize::MAX);
        stored.store.death().over();
        check(&world, &ledger, &jobs, &endless, write, death).await;
    }
    Some(Ended { death })
}

/// Agents work, the sweeps sweep, and somebody cancels what never ends, until all runs have ended.
async fn live(world: &World, robots: &mut [Robot; 2], cancelled: RunId, endless: &[JobId], runs: &[RunId]) {
    let [one, two] = robots;
    let sweeps = async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            for sweep in world.dispatcher.reconcilers() {
                // A dead process sweeps no more.
                let _ = sweep.run().await;
            }
        }
    };
    let cancel = async {
        loop {
            if world
                .store
                .job_get(endless[0])
                .await
                .is_ok_and(|job| job.is_some_and(|j| j.status == JobStatus::Running))
            {
                let reason = FailureReason::CancelledByUser;
                let _ = world.dispatcher.cancel_run(cancelled, "user ann", reason, false).await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let over = async {
        for run in runs {
            loop {
                let found = world.store.run_get(*run).await;
                if found.is_ok_and(|run| run.is_some_and(|run| run.status.is_terminal())) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    let ended = tokio::select! {
        ended = tokio::time::timeout(PATIENCE, over) => ended.is_ok(),
        () = one.serve(world) => false,
        () = two.serve(world) => false,
        () = sweeps => false,
        () = cancel => false,
    };
    // A dead process sees nothing; its caller knows.
    assert!(ended || world.store.death().is_here(), "a run does not end: {:#?}", open(world, runs).await);
}

async fn open(world: &World, runs: &[RunId]) -> Vec<String> {
    let mut open = Vec::new();
    for run in runs {
        for job in world.store.jobs_of_run(*run).await.unwrap() {
            let row = world.store.queue_get(job.id).await.unwrap();
            if !job.status.is_terminal() {
                open.push(format!("{} {} {row:?}", job.name, job.status));
            }
        }
    }
    open
}

async fn check(
    world: &World,
    ledger: &Mutex<Vec<(String, u32)>>,
    jobs: &[JobId],
    endless: &[JobId],
    write: usize,
    death: Option<&str>,
) {
    let context = format!("death behind write {write} ({death:?})");
    let starts = ledger.lock().unwrap().clone();
    let ids: BTreeSet<&String> = starts.iter().map(|(job, _)| job).collect();
    assert_eq!(ids.len(), starts.len(), "{context}: started twice: {starts:?}");
    for (def, id) in JOBS.iter().zip(jobs).chain([(&job("endless"), &endless[0])]) {
        let job = world.job(*id).await;
        let started = ids.contains(&id.uuid().to_string());
        let fits = match def.name {
            // Lost with its agent, or with the answer that granted its start.
            "fatal" => job.status == JobStatus::Failed,
            "after" => job.status == JobStatus::Skipped && !started,
            "endless" => job.status == JobStatus::Cancelled,
            _ => job.status == JobStatus::Success && started,
        };
        assert!(fits, "{context}: {} is {} ({:?}), started: {started}", def.name, job.status, job.failure_message);
    }
    let statuses = vec![QueueStatus::Pending, QueueStatus::Dispatched, QueueStatus::Recovering];
    let left = world.store.queue_list(QueueFilter { statuses, limit: 10, ..Default::default() }).await.unwrap();
    assert!(left.is_empty(), "{context}: rows that nobody will move: {left:?}");
}
