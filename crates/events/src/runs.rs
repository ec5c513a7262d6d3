//! From a plan to the rows of a run.

use std::time::Duration;

use kici_engine::event::Event;
use kici_engine::ids::{DeliveryRowId, EventId, IdSource, JobId, RegistrationId, RunId, SourceId};
use kici_engine::lock::{GitCredentials, Workflow};
use kici_engine::plan::{Activation, JobPlan, RunPlan, Start, wants_payload};
use kici_engine::time::{Clock, Ts};
use kici_store::model::{JobStart, NewJob, NewNeed, NewRun, QueueEntry};
use serde_json::Value as Json;
use sha2::{Digest as _, Sha256};

/// Where a run comes from and where its code lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub org: &'a str,
    pub source: SourceId,
    pub repo: &'a str,
    pub git_ref: Option<&'a str>,
    pub sha: &'a str,
    pub cause: Cause,
    pub request_id: &'a str,
    /// Only agents on this machine can fetch the commit.
    pub machine_id: Option<&'a str>,
}

/// What started a run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cause {
    /// A delivery of a source.
    Delivery(DeliveryRowId),
    /// An event of the internal bus, by this registration.
    Event(EventId, RegistrationId),
    /// A person.
    Person,
}

impl Cause {
    fn delivery(self) -> Option<DeliveryRowId> {
        match self {
            Self::Delivery(id) => Some(id),
            Self::Event(..) | Self::Person => None,
        }
    }
}

/// A stored form of a workflow: JSON and its digest.
#[derive(Clone, Debug)]
pub(crate) struct LockForm {
    pub digest: String,
    pub json: Vec<u8>,
}

/// The lock document of a workflow as it is stored.
pub(crate) fn lock_form(workflow: &Workflow) -> LockForm {
    // The lock model holds maps with text keys and plain values only, which always serialise.
    let json = serde_json::to_vec(workflow).unwrap_or_default();
    LockForm { digest: hex::encode(Sha256::digest(&json)), json }
}

/// Makes rows out of plans.
pub(crate) struct RunMaker<'a> {
    pub clock: &'a dyn Clock,
    pub ids: &'a dyn IdSource,
    pub queue_timeout: Option<Duration>,
}

impl RunMaker<'_> {
    /// The rows of one run.
    pub(crate) fn run(
        &self,
        id: RunId,
        origin: Origin<'_>,
        workflow: &Workflow,
        event: &Event,
        trigger_kind: &str,
        plan: RunPlan,
    ) -> NewRun {
        let lock = lock_form(workflow);
        let expires_at = self.queue_timeout.map(|timeout| self.clock.now().plus(timeout));
        let needs = plan.jobs.iter().flat_map(NewNeed::of_plan).collect();
        let jobs = plan.jobs.into_iter().map(|job| self.job(job, workflow, origin.machine_id, expires_at)).collect();
        NewRun {
            id,
            org: origin.org.to_owned(),
            source_id: origin.source,
            delivery_id: origin.cause.delivery(),
            dedup_key: dedup_key(id, origin, workflow, event),
            repo: origin.repo.to_owned(),
            git_ref: origin.git_ref.map(str::to_owned),
            sha: origin.sha.to_owned(),
            workflow_name: workflow.name.clone(),
            run_name: plan.run_name,
            lock_digest: lock.digest,
            lock_json: lock.json,
            event: stored_event(workflow, event),
            trigger_kind: trigger_kind.to_owned(),
            inputs: event.inputs.clone(),
            request_id: origin.request_id.to_owned(),
            chain_depth: event.chain_depth,
            timeout: plan.timeout_ms.map(Duration::from_millis),
            concurrency: plan.concurrency,
            attempt: 1,
            parent_run_id: None,
            jobs,
            needs,
        }
    }

    fn job(&self, job: JobPlan, workflow: &Workflow, machine_id: Option<&str>, expires_at: Option<Ts>) -> NewJob {
        let git = workflow.jobs.get(job.job_index).and_then(|job| job.git_credentials.clone());
        let start = start(job.start.clone(), machine_id, expires_at, git);
        NewJob::of_plan(JobId::mint(self.ids), job, start)
    }
}

/// One run per delivery and workflow, and per event and registration, however often they are processed; each start by hand is
/// a run of its own.
fn dedup_key(id: RunId, origin: Origin<'_>, workflow: &Workflow, event: &Event) -> String {
    match origin.cause {
        Cause::Delivery(id) => format!("{}:{}:{}/{}", id.uuid(), event.routing_key, origin.repo, workflow.name),
        Cause::Event(id, registration) => format!("ev:{}:{}", id.uuid(), registration.uuid()),
        Cause::Person => format!("manual:{}", id.uuid()),
    }
}

fn start(
    start: Start,
    machine_id: Option<&str>,
    expires_at: Option<Ts>,
    git_credentials: Option<GitCredentials>,
) -> JobStart {
    match start {
        // What comes of these two is decided, and written, where the run is.
        Start::AfterNeeds | Start::Now(Activation::Invoke { .. } | Activation::Hold { .. }) => JobStart::Pending,
        Start::Now(Activation::Enqueue { selector, pinned, slot }) => JobStart::Queued(QueueEntry {
            selector,
            requires_machine_id: machine_id.map(str::to_owned),
            expires_at,
            priority: 0,
            pinned_agent_id: pinned,
            slot,
            git_credentials: git_credentials.map(Box::new),
        }),
        Start::Now(Activation::Skip { reason }) => JobStart::Skipped { reason },
        Start::Now(Activation::Fail { reason, message }) => JobStart::Failed { reason, message },
    }
}

/// The event as it is kept with the run: its payload only where an expression may look at it, since payloads are large and
/// the delivery keeps them anyway.
fn stored_event(workflow: &Workflow, event: &Event) -> Event {
    let mut kept = event.clone();
    if !wants_payload(workflow) {
        kept.payload = Json::Null;
    }
    kept
}
