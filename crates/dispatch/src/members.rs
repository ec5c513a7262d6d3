//! Jobs that generators make: taken from the agent, judged by the compiler, kept, and planned when the generator has ended well.

use std::time::Duration;

use kici_engine::compile::compile_fragment;
use kici_engine::ids::{JobId, SessionId};
use kici_engine::lock::{Job, Need, Workflow};
use kici_engine::plan::{self, Fleet, Scope, Start};
use kici_protocol::{NOT_ASSIGNED, common};
use kici_store::model::{Expansion, Generated, Guarded, JobStart, NewGenerated, NewJob, NewNeed};
use sha2::{Digest as _, Sha256};
use tonic::Status;

use crate::activate::{Activator, run_info};
use crate::dispatcher::Dispatcher;
use crate::locks::LockError;

/// What became of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reported {
    /// The jobs are kept; they join the run when the generator ends well.
    Kept {
        /// How many.
        jobs: u32,
        /// Digest of them as they are kept.
        digest: String,
    },
    /// They cannot be used.
    Refused(String),
}

impl Dispatcher {
    /// Takes the document that the generator of a session's job wrote. Repeated with the same document it has the same answer.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` when the job is not the caller's at this epoch, `UNAVAILABLE` when the database does not answer.
    pub async fn report_generated(
        &self,
        session: SessionId,
        job: Option<&common::JobRef>,
        document: Vec<u8>,
    ) -> Result<Reported, Status> {
        let (agent_id, job) = self.started_job(session, job)?;
        let unavailable = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "generated jobs cannot be kept now");
            Status::unavailable("the jobs cannot be kept now; try again")
        };
        let (run, row) = (self.store.run_get(job.run_id).await, self.store.job_get(job.job_id).await);
        let (run, row) = (run.map_err(|error| unavailable(&error))?, row.map_err(|error| unavailable(&error))?);
        let (Some(run), Some(row)) = (run, row) else { return Err(Status::permission_denied(NOT_ASSIGNED)) };
        let workflow = match self.locks.load(&self.store, &run.lock_digest).await {
            Ok(workflow) => workflow,
            Err(LockError::Store(error)) => return Err(unavailable(&error)),
            Err(error) => return Ok(Reported::Refused(error.to_string())),
        };
        let index = row.job_index as usize;
        // Some megabytes of jobs take a while, and nobody else is to wait for it.
        let judged = tokio::task::spawn_blocking(move || judge(&workflow, index, &document)).await;
        let members = match judged.map_err(|error| unavailable(&error))? {
            Ok(members) => members,
            Err(why) => {
                metrics::counter!("kici_orch_generated_refused_total").increment(1);
                tracing::info!(job = %job.job_id, why, "the jobs of a generator were refused");
                return Ok(Reported::Refused(why));
            }
        };
        let members_json = serde_json::to_vec(&members).map_err(|error| unavailable(&error))?;
        let digest = hex::encode(Sha256::digest(&members_json));
        let count = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let new = NewGenerated {
            job,
            agent_id,
            digest: digest.clone(),
            members_json,
            count,
            wants_hosts: members.iter().any(|job| job.runs_on_all.is_some()),
        };
        match self.store.generated_put(new).await.map_err(|error| unavailable(&error))? {
            Guarded::Applied => Ok(Reported::Kept { jobs: count, digest }),
            Guarded::Lost => Err(Status::permission_denied(NOT_ASSIGNED)),
        }
    }
}

/// The jobs of a document, if they could join the run as it is now. It may change until they do: then they are judged again.
fn judge(workflow: &Workflow, index: usize, document: &[u8]) -> Result<Vec<Job>, String> {
    let members = compile_fragment(workflow, index, document).map_err(|error| error.to_string())?;
    plan::merge(workflow, index, members.clone())?;
    Ok(members)
}

/// The run of a generator with its jobs; for the transaction that ends the generator.
pub(crate) fn expand(activator: &Activator, made: &Generated) -> Result<Expansion, String> {
    let workflow = activator.locks.read(&made.run.lock_digest, &made.lock_json).map_err(|error| error.to_string())?;
    let members: Vec<Job> =
        serde_json::from_slice(&made.members_json).map_err(|error| format!("the kept jobs cannot be read: {error}"))?;
    let index = made.job.job_index as usize;
    let merged = plan::merge(&workflow, index, members)?;
    let now = activator.clock.now();
    let hosts = made.hosts.iter().map(|host| host.host(now, Duration::ZERO)).collect();
    let fleet = Fleet { hosts, max_hosts: activator.max_fanout_hosts };
    let scope = Scope { workflow: &merged, event: &made.run.event, run: run_info(&made.run) };
    let plans = plan::plan_members(scope, workflow.jobs.len(), &fleet, made.planned, made.on_hosts)?;
    let needs = plans.iter().flat_map(NewNeed::of_plan).collect();
    let jobs = plans.into_iter().map(|plan| {
        let start = match &plan.start {
            Start::Now(plan::Activation::Fail { reason, message }) => {
                JobStart::Failed { reason: *reason, message: message.clone() }
            }
            Start::Now(_) | Start::AfterNeeds => JobStart::Pending,
        };
        NewJob::of_plan(JobId::mint(&*activator.ids), plan, start)
    });
    let jobs = jobs.collect();
    let generate = workflow.jobs.get(index).and_then(|job| job.generate.as_ref());
    let group = generate.map(|generate| generate.group.clone()).ok_or("the job makes no jobs")?;
    let lock_json = serde_json::to_vec(&merged).map_err(|error| error.to_string())?;
    Ok(Expansion {
        lock_digest: hex::encode(Sha256::digest(&lock_json)),
        jobs,
        needs,
        gained: gained(&workflow, &merged),
        group,
        lock_json,
    })
}

/// The edges that jobs of the run have after the jobs of a generator joined it and had not before.
fn gained(before: &Workflow, after: &Workflow) -> Vec<(String, Need)> {
    let new = |(old, now): (&Job, &Job)| -> Vec<(String, Need)> {
        let added = now.needs.iter().filter(|need| !old.needs.contains(need));
        added.map(|need| (now.name.clone(), need.clone())).collect()
    };
    before.jobs.iter().zip(&after.jobs).flat_map(new).collect()
}
