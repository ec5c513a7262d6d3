//! Jobs that are placed at an agent in the transaction that creates their run.

use kici_engine::ids::{JobId, RunId};
use kici_engine::state::{JobStatus, QueueStatus, RunStatus};
use kici_protocol::common;
use kici_store::model::QueueEntry;

use crate::support::*;

/// A run of one job.
async fn create(world: &World) -> (RunId, JobId, usize) {
    let defs = [job("build")];
    let (run, (_, jobs)) = world.new_run(&defs, None, &workflow(&defs));
    let (id, placed) = world.create_placed(run).await;
    (id, jobs[0], placed)
}

async fn finish(agent: &mut Agent, job: &common::JobRef) {
    assert!(agent.begin(job).await);
    let done = agent.update(job, "success", "").await;
    agent.settled(done).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_an_idle_system_a_job_is_at_an_agent_as_soon_as_its_run_exists() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        // The first ones may come while the pump still looks at what the registration or the last job freed.
        let (run, job_id) = loop {
            let (run, job_id, placed) = create(&world).await;
            if placed == 1 {
                break (run, job_id);
            }
            let job = agent.offer().await.job.unwrap();
            finish(&mut agent, &job).await;
        };
        let row = world.store.queue_get(job_id).await.unwrap().unwrap();
        assert_eq!((row.status, row.dispatch_epoch), (QueueStatus::Dispatched, 1));
        assert_eq!(row.agent_id.as_ref().map(|agent| agent.as_str()), Some("a1"));
        let history = world.store.dispatch_history(job_id).await.unwrap();
        assert_eq!((history.len(), history[0].epoch), (1, 1));
        let job = agent.offer().await.job.unwrap();
        assert_eq!((job.job_id.clone(), job.dispatch_epoch), (job_id.uuid().to_string(), 1));
        finish(&mut agent, &job).await;
        world.until_run(run, RunStatus::Success).await;
        assert_eq!(world.job(job_id).await.status, JobStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_job_never_overtakes_one_that_waits() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let mut created = Vec::new();
        for _ in 0..5 {
            created.push(create(&world).await.1);
        }
        for waiting in 0..5 {
            let job = agent.offer().await.job.unwrap();
            assert_eq!(job.job_id, created[waiting].uuid().to_string());
            finish(&mut agent, &job).await;
            created.push(create(&world).await.1);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_set_aside_for_a_run_that_never_came_is_free_again() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        let entry = QueueEntry {
            selector: selector("default"),
            requires_machine_id: None,
            expires_at: None,
            priority: 0,
            pinned_agent_id: None,
            slot: None,
        };
        for _ in 0..20 {
            let failed = world.dispatcher.place();
            let id = JobId::mint(world.ids.as_ref());
            let once = failed.place(id, &entry, "digest");
            assert_eq!(failed.place(id, &entry, "digest"), once, "a repeated transaction gets the same answer");
            if once.is_some() {
                assert_eq!(world.dispatcher.place().place(JobId::mint(world.ids.as_ref()), &entry, "digest"), None);
            }
            drop(failed);
        }
        create(&world).await;
        let job = agent.offer().await.job.unwrap();
        finish(&mut agent, &job).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orchestrator_that_drains_places_nothing() {
    each(async |world| {
        let mut agent = Agent::connect(&world, "a1").await;
        world.dispatcher.drain(true);
        let (_, job_id, placed) = create(&world).await;
        assert_eq!(placed, 0);
        assert!(agent.quiet().await);
        world.dispatcher.drain(false);
        assert_eq!(agent.offer().await.job.unwrap().job_id, job_id.uuid().to_string());
    })
    .await;
}
