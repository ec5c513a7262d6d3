//! Waves against a model that a reader can check.

use std::sync::Arc;

use kici_engine::event::Event;
use kici_engine::ids::{RunId, SourceId};
use kici_engine::lock::{Need, Selector};
use proptest::prelude::*;
use uuid::Uuid;

use super::*;

const NOW: Ts = Ts::from_micros(1_800_000_000_000_000);

struct Always;

impl Activate for Always {
    fn activate(&self, _: &ReadyJob) -> Activation {
        Activation::Enqueue(QueueEntry {
            selector: Selector::default(),
            requires_machine_id: None,
            expires_at: None,
            priority: 0,
            pinned_agent_id: None,
            git_credentials: None,
            slot: None,
        })
    }
}

fn run() -> Run {
    let event: Event = serde_json::from_value(serde_json::json!({
        "kind": "push", "raw_name": "push", "org": "default", "routing_key": "local:1", "provider": "local",
        "source": "s", "is_fork_pr": "no",
    }))
    .unwrap();
    Run {
        id: RunId::from_uuid(Uuid::from_u128(1)),
        org: "default".to_owned(),
        source_id: SourceId::from_uuid(Uuid::from_u128(2)),
        delivery_id: None,
        dedup_key: String::new(),
        repo: "o/r".to_owned(),
        git_ref: None,
        sha: String::new(),
        workflow_name: "w".to_owned(),
        run_name: "w".to_owned(),
        lock_digest: String::new(),
        event,
        trigger_kind: "push".to_owned(),
        status: RunStatus::Pending,
        failure_reason: None,
        failure_message: None,
        cancel_requested_at: None,
        cancelled_by: None,
        attempt: 1,
        parent_run_id: None,
        inputs: BTreeMap::new(),
        request_id: String::new(),
        chain_depth: 0,
        concurrency: None,
        logs_expired_at: None,
        created_at: NOW,
        started_at: None,
        finished_at: None,
        timeout: None,
        deadline: None,
    }
}

fn job(index: u32, max_parallel: Option<u32>, fail_fast: bool) -> Job {
    Job {
        id: JobId::from_uuid(Uuid::from_u128(u128::from(index) + 10)),
        run_id: RunId::from_uuid(Uuid::from_u128(1)),
        name: format!("t ({index})"),
        base_name: "t".to_owned(),
        job_index: 0,
        variant_label: Some(index.to_string()),
        matrix: None,
        display_name: String::new(),
        status: JobStatus::Pending,
        needs_satisfied: true,
        ready_at: None,
        max_parallel,
        fail_fast,
        group_name: None,
        failure_reason: None,
        failure_class: None,
        failure_message: None,
        evidence: None,
        agent_id: None,
        dispatch_epoch: 0,
        attempt: 1,
        outputs: BTreeMap::new(),
        routing_reason: None,
        log_bytes: 0,
        created_at: NOW,
        started_at: None,
        finished_at: None,
        last_heartbeat_at: None,
        timeout: None,
        cancel_deadline: None,
        fanout: None,
        kind: None,
    }
}

/// What must become of the variants, written as plainly as possible.
struct Model {
    jobs: Vec<JobStatus>,
    window: usize,
    fail_fast: bool,
}

impl Model {
    fn settle(&mut self) {
        if self.fail_fast && self.jobs.contains(&JobStatus::Failed) {
            for job in &mut self.jobs {
                match *job {
                    JobStatus::Pending => *job = JobStatus::Skipped,
                    JobStatus::Queued => *job = JobStatus::Cancelled,
                    _ => {}
                }
            }
        }
        let busy = |job: &&JobStatus| matches!(job, JobStatus::Queued | JobStatus::Running);
        while self.jobs.iter().filter(busy).count() < self.window {
            let Some(next) = self.jobs.iter_mut().find(|job| **job == JobStatus::Pending) else { return };
            *next = JobStatus::Queued;
        }
    }
}

proptest! {
    #[test]
    fn waves_release_in_order_keep_their_window_and_stop_at_a_failure(
        count in 1_u32..12,
        max_parallel in proptest::option::of(1_u32..5),
        fail_fast: bool,
        steps in proptest::collection::vec((0_usize..12, 0_u8..6), 0..60),
    ) {
        let jobs = (0..count).map(|index| job(index, max_parallel, fail_fast)).collect();
        let mut state = RunState::new(run(), jobs, Vec::new(), BTreeMap::new());
        let window = max_parallel.map_or(usize::MAX, |max| max as usize);
        let mut model = Model { jobs: vec![JobStatus::Pending; count as usize], window, fail_fast };
        let lock = Arc::new(Vec::new());
        let settle = |state: &mut RunState, model: &mut Model| {
            model.settle();
            let advanced = state.advance(NOW, Some(&Always), Some(&lock), &|| Ok(())).unwrap();
            prop_assert_eq!(advanced, Advanced::Stable);
            let now: Vec<JobStatus> = state.jobs.iter().map(|job| job.status).collect();
            prop_assert_eq!(&now, &model.jobs);
            Ok(())
        };
        settle(&mut state, &mut model)?;
        for (pick, action) in steps {
            let at = pick % count as usize;
            let (event, reason, to) = match (model.jobs[at], action) {
                (JobStatus::Queued, _) => (JobEvent::Start, None, JobStatus::Running),
                (JobStatus::Running, 0) => (JobEvent::Fail, Some(FailureReason::StepFailed), JobStatus::Failed),
                (JobStatus::Running, _) => (JobEvent::Succeed, None, JobStatus::Success),
                _ => continue,
            };
            state.apply(at, event, reason, None, NOW).unwrap();
            model.jobs[at] = to;
            settle(&mut state, &mut model)?;
        }
    }
}

/// Jobs of a running run by base name and status; all of them have started or can have.
fn standing() -> impl Strategy<Value = Vec<(u8, JobStatus, bool)>> {
    let status = proptest::sample::select(vec![
        JobStatus::Pending,
        JobStatus::Queued,
        JobStatus::Running,
        JobStatus::Held,
        JobStatus::Success,
        JobStatus::Failed,
        JobStatus::Skipped,
        JobStatus::Cancelled,
    ]);
    proptest::collection::vec((0_u8..3, status, proptest::bool::weighted(0.2)), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, max_global_rejects: 100_000, ..ProptestConfig::default() })]
    #[test]
    fn of_a_quiet_end_nothing_follows_but_for_the_job_itself(
        standing in standing(),
        edges in proptest::collection::vec((0_u8..3, 0_u8..3, proptest::bool::ANY), 0..4),
        fail_fast: bool,
        end in proptest::sample::select(vec![JobEvent::Succeed, JobEvent::Fail, JobEvent::Cancel]),
    ) {
        let name = |base: u8| format!("b{base}");
        let mut jobs = vec![Job { base_name: name(0), status: JobStatus::Running, started_at: Some(NOW), ..job(0, None, fail_fast) }];
        for ((base, status, parallel), index) in standing.into_iter().zip(1..) {
            let started_at = matches!(status, JobStatus::Running | JobStatus::Success | JobStatus::Failed).then_some(NOW);
            // Of one job all variants say the same.
            let max_parallel = (parallel && base != 0).then_some(1);
            let fail_fast = fail_fast && base == 0;
            jobs.push(Job { base_name: name(base), status, started_at, ..job(index, max_parallel, fail_fast) });
        }
        // Needs lead from lower numbers to higher ones.
        let needs: Vec<NeedEdge> = edges
            .into_iter()
            .filter(|(up, down, _)| up < down)
            .flat_map(|(up, down, always)| {
                let when = if always { vec![JobStatus::Success, JobStatus::Failed, JobStatus::Cancelled] } else { vec![JobStatus::Success] };
                let below: Vec<String> =
                    jobs.iter().filter(|job| job.base_name == name(down)).map(|job| job.name.clone()).collect();
                below.into_iter().map(move |job_name| NeedEdge {
                    job_name,
                    need: Need::on(name(up), when.clone()),
                    generator: None,
                    resolved: false,
                })
            })
            .collect();
        let run = Run { status: RunStatus::Running, started_at: Some(NOW), ..run() };
        let lock = Arc::new(Vec::new());
        let mut state = RunState::new(run, jobs, needs.clone(), BTreeMap::new());
        // As it stood after whatever came before.
        state.advance(NOW, Some(&Always), Some(&lock), &|| Ok(())).unwrap();
        state.conclude(NOW);
        let (run, jobs) = (state.run.clone(), state.jobs.clone());
        prop_assume!(run.status == RunStatus::Running);
        let (status, reason) = match end {
            JobEvent::Succeed => (JobStatus::Success, None),
            JobEvent::Fail => (JobStatus::Failed, Some(FailureReason::StepFailed)),
            _ => (JobStatus::Cancelled, Some(FailureReason::AgentShutdown)),
        };
        let others: Vec<quiet::Other> = jobs[1..]
            .iter()
            .map(|job| quiet::Other {
                base_name: job.base_name.clone(),
                view: JobView { status: job.status, reason: job.failure_reason, started: job.started_at.is_some() },
                takes_turns: job.group_name.is_some(),
            })
            .collect();
        prop_assume!(quiet::is_quiet(&run, &jobs[0], &others, status));
        let mut whole = RunState::new(run.clone(), jobs.clone(), needs, BTreeMap::new());
        let mut alone = RunState::new(run, vec![jobs[0].clone()], Vec::new(), BTreeMap::new());
        alone.others = others.into_iter().map(|other| other.view).collect();
        for state in [&mut whole, &mut alone] {
            state.apply(0, end, reason, None, NOW).unwrap();
            let advanced = state.advance(NOW, Some(&Always), Some(&lock), &|| Ok(())).unwrap();
            prop_assert_eq!(advanced, Advanced::Stable);
            state.conclude(NOW);
        }
        let changed: Vec<&Job> = whole.changed().collect();
        prop_assert_eq!(changed, alone.changed().collect::<Vec<_>>());
        prop_assert_eq!(&whole.run, &alone.run);
        prop_assert_eq!(whole.jobs.len(), jobs.len());
    }
}
