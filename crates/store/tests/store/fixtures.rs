//! What the tests of this crate share.

use std::collections::BTreeMap;
use std::sync::Arc;

use kici_engine::event::{Event, EventKind, ForkState};
use kici_engine::ids::{DeliveryRowId, IdSource, JobId, RunId, SourceId};
use kici_engine::lock::{Matcher, Selector};
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_store::model::*;
use kici_store::testing::{TestIds, TestStore, agent};

/// A run with a plan that is easy to write down.
pub struct Plan {
    run: NewRun,
}

pub fn selector(label: &str) -> Selector {
    Selector { labels: vec![Matcher::Exact { value: label.to_owned() }], ..Selector::default() }
}

pub fn entry(label: &str) -> QueueEntry {
    QueueEntry {
        selector: selector(label),
        requires_machine_id: None,
        expires_at: None,
        priority: 0,
        pinned_agent_id: None,
        slot: None,
        git_credentials: None,
    }
}

impl Plan {
    pub fn new(dedup_key: &str) -> Self {
        let event = Event {
            kind: EventKind::Push,
            raw_name: "push".to_owned(),
            action: None,
            org: "default".to_owned(),
            routing_key: "local:x".to_owned(),
            provider: "local".to_owned(),
            source: "src".to_owned(),
            repo: Some("o/r".to_owned()),
            git_ref: Some("refs/heads/main".to_owned()),
            sha: Some("a".repeat(40)),
            target_branch: Some("main".to_owned()),
            source_branch: None,
            base_sha: None,
            tag: None,
            default_branch: Some("main".to_owned()),
            is_fork_pr: ForkState::No,
            pr_number: None,
            sender: kici_engine::event::Sender::default(),
            commit_message: Some("Grüße \u{0} \u{1F980}".to_owned()),
            inputs: BTreeMap::new(),
            requested_workflow: None,
            payload: serde_json::json!({ "kept": true }),
            check_mode: Default::default(),
            chain_depth: 0,
        };
        let run = NewRun {
            id: RunId::mint(&TestIds),
            org: "default".to_owned(),
            source_id: SourceId::from_uuid(TestIds.uuid()),
            delivery_id: None,
            dedup_key: dedup_key.to_owned(),
            repo: "o/r".to_owned(),
            git_ref: Some("refs/heads/main".to_owned()),
            sha: "a".repeat(40),
            workflow_name: "ci".to_owned(),
            run_name: "ci: Grüße".to_owned(),
            lock_digest: "d1".to_owned(),
            lock_json: br#"{"name":"ci"}"#.to_vec(),
            event,
            trigger_kind: "push".to_owned(),
            inputs: BTreeMap::from([("n".to_owned(), serde_json::json!(1))]),
            request_id: "req-1".to_owned(),
            chain_depth: 0,
            timeout: None,
            concurrency: None,
            attempt: 1,
            parent_run_id: None,
            jobs: Vec::new(),
            needs: Vec::new(),
        };
        Self { run }
    }

    /// A job that the store activates.
    pub fn job(self, name: &str) -> Self {
        self.with(name, name, |_| {})
    }

    /// A job that is queued from the start.
    pub fn queued(self, name: &str) -> Self {
        self.with(name, name, |job| job.start = JobStart::Queued(entry("default")))
    }

    pub fn with(mut self, name: &str, base: &str, change: impl FnOnce(&mut NewJob)) -> Self {
        let mut job = NewJob {
            id: JobId::mint(&TestIds),
            name: name.to_owned(),
            base_name: base.to_owned(),
            job_index: 0,
            variant_label: (name != base).then(|| name.to_owned()),
            matrix: None,
            fanout: None,
            display_name: name.to_owned(),
            max_parallel: None,
            fail_fast: false,
            timeout: None,
            kind: None,
            start: JobStart::Pending,
        };
        change(&mut job);
        self.run.jobs.push(job);
        self
    }

    pub fn needs(mut self, job: &str, upstream: &str, run_on: &[JobStatus]) -> Self {
        let (job_name, upstream) = (job.to_owned(), upstream.to_owned());
        let (group, generator, resolved) = (None, None, false);
        self.run.needs.push(NewNeed { job_name, upstream, run_on: run_on.to_vec(), group, generator, resolved });
        self
    }

    pub fn of_delivery(mut self, id: DeliveryRowId) -> Self {
        self.run.delivery_id = Some(id);
        self
    }

    pub fn run(self) -> NewRun {
        self.run
    }

    pub async fn create(self, t: &TestStore) -> CreatedRun {
        t.store.run_create(self.run, None, enqueue()).await.unwrap()
    }
}

/// Sends every ready job to the queue, skips those named `skip…`, fails those named `bad…`.
#[derive(Debug)]
struct Enqueue;

impl Activate for Enqueue {
    fn activate(&self, job: &ReadyJob) -> Activation {
        assert_eq!(*job.lock_json, br#"{"name":"ci"}"#);
        if job.job.name.starts_with("skip") {
            Activation::Skip { reason: "its condition is false".to_owned() }
        } else if job.job.name.starts_with("bad") {
            Activation::Fail { reason: FailureReason::ExprError, message: "no such variable".to_owned() }
        } else {
            let pinned_agent_id = job.job.fanout.as_ref().map(|fanout| fanout.host.clone());
            Activation::Enqueue(QueueEntry { pinned_agent_id, ..entry("default") })
        }
    }
}

pub fn enqueue() -> Arc<dyn Activate> {
    Arc::new(Enqueue)
}

/// Claims up to `limit` jobs of the label `default` for an agent.
pub async fn claim(t: &TestStore, name: &str, limit: u32) -> Vec<ClaimedJob> {
    let pending = t.store.queue_selectors_pending().await.unwrap();
    let digests = pending.into_iter().map(|selector| selector.digest).collect();
    let request = ClaimRequest { agent_id: agent(name), digests, limit, except: Vec::new() };
    t.store.queue_claim(vec![request]).await.unwrap()
}

/// Claims one job and starts it.
pub async fn start(t: &TestStore, name: &str) -> ClaimedJob {
    let job = claim(t, name, 1).await.pop().expect("a job waits");
    assert_eq!(t.store.queue_ack(job.job_ref, agent(name)).await.unwrap(), Guarded::Applied);
    let verdict = t.store.job_start(job.job_ref, agent(name), Default::default()).await.unwrap();
    assert!(matches!(verdict, StartVerdict::Granted { .. }), "{verdict:?}");
    job
}

pub fn result(job: &ClaimedJob, status: JobStatus) -> JobResult {
    JobResult {
        job: job.job_ref,
        agent_id: Some(job.agent_id.clone()),
        status,
        reason: (status == JobStatus::Failed).then_some(FailureReason::StepFailed),
        message: (status == JobStatus::Failed).then(|| "exit code 1\0".to_owned()),
        outputs: BTreeMap::from([("v".to_owned(), job.job.name.clone())]),
        evidence: Some(serde_json::json!({ "exit_code": 1 })),
        log_bytes: 12,
        at: None,
    }
}

pub async fn finish(t: &TestStore, job: &ClaimedJob, status: JobStatus) -> Effects {
    match t.store.job_finish(result(job, status), enqueue()).await.unwrap() {
        JobFinished::Applied(effects) => *effects,
        other => panic!("{other:?}"),
    }
}

pub async fn statuses(t: &TestStore, run: RunId) -> Vec<(String, JobStatus)> {
    let jobs = t.store.jobs_of_run(run).await.unwrap();
    jobs.into_iter().map(|job| (job.name, job.status)).collect()
}

pub async fn status_of(t: &TestStore, run: RunId, job: &str) -> JobStatus {
    statuses(t, run).await.into_iter().find(|(name, _)| name == job).expect("the job").1
}

pub fn step(job: &ClaimedJob, ordinal: u32, status: StepStatus, at: kici_engine::time::Ts) -> StepWrite {
    StepWrite {
        job: job.job_ref,
        step_key: format!("step-0-{ordinal}"),
        ordinal,
        name: format!("step {ordinal}"),
        status,
        at,
        exit_code: status.is_terminal().then_some(0),
        message: None,
        outputs: BTreeMap::new(),
        log_bytes: 5,
        log_lines: 1,
        missing_bytes: 0,
        missing_lines: 0,
        failure_allowed: false,
        summary: None,
        attempt: 1,
        check: None,
        drift: None,
        group: None,
    }
}
