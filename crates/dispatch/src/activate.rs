//! Judges jobs whose needs are met, for the store's transactions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kici_engine::ids::IdSource;
use kici_engine::plan::{self, NeedResult, Needs, RunInfo, Scope};
use kici_engine::state::FailureReason;
use kici_engine::time::Clock;
use kici_store::model::{Activate, Activation, Again, Expansion, Generated, QueueEntry, ReadyJob, Run};

use crate::locks::Locks;

/// Largest document of an event, as JSON.
const MAX_INVOKE_BYTES: usize = 256 * 1024;

/// The engine's decision, with the time limit of waiting.
pub(crate) struct Activator {
    pub locks: Arc<Locks>,
    pub clock: Arc<dyn Clock>,
    pub queue_timeout: Duration,
    /// Hash of this machine's identity: where `file://` sources can be read.
    pub machine_id: Option<String>,
    /// How long a connected host may be silent.
    pub roster_grace: Duration,
    /// Ids of jobs that join a run.
    pub ids: Arc<dyn IdSource>,
    /// Most hosts of one job.
    pub max_fanout_hosts: usize,
}

impl Activator {
    /// When a job that is queued now has waited too long; none is never.
    pub fn expires_at(&self) -> Option<kici_engine::time::Ts> {
        (!self.queue_timeout.is_zero()).then(|| self.clock.now().plus(self.queue_timeout))
    }
}

/// Results of needed jobs, as the engine takes them.
pub(crate) fn needs_of(needs: &BTreeMap<String, kici_store::model::NeedResult>) -> Needs {
    let result = |need: &kici_store::model::NeedResult| NeedResult {
        status: need.status,
        outputs: need.outputs.clone(),
        hosts: need.hosts.clone(),
    };
    needs.iter().map(|(name, need)| (name.clone(), result(need))).collect()
}

/// The run, as expressions see it.
pub(crate) fn run_info(run: &Run) -> RunInfo<'_> {
    RunInfo { id: run.id, repo: &run.repo, git_ref: run.git_ref.as_deref(), sha: &run.sha, attempt: run.attempt }
}

impl Activate for Activator {
    fn activate(&self, ready: &ReadyJob) -> Activation {
        let workflow = match self.locks.read(&ready.run.lock_digest, &ready.lock_json) {
            Ok(workflow) => workflow,
            Err(error) => {
                return Activation::Fail { reason: FailureReason::ExprError, message: error.to_string() };
            }
        };
        let needs = needs_of(&ready.needs);
        let matrix = ready.job.matrix.clone().unwrap_or_default();
        let scope = Scope { workflow: &workflow, event: &ready.run.event, run: run_info(&ready.run) };
        let job = plan::JobRef {
            name: &ready.job.name,
            job_index: ready.job.job_index as usize,
            matrix: &matrix,
            fanout: ready.job.fanout.as_ref(),
            needs: &needs,
        };
        let host = ready.host.as_ref().map(|host| host.host(self.clock.now(), self.roster_grace));
        match plan::activate(scope, job, host.as_ref()) {
            plan::Activation::Enqueue { selector, pinned, slot } => Activation::Enqueue(QueueEntry {
                selector,
                requires_machine_id: (ready.run.event.provider == "local").then(|| self.machine_id.clone()).flatten(),
                expires_at: self.expires_at(),
                priority: 0,
                pinned_agent_id: pinned,
                slot,
                git_credentials: workflow
                    .jobs
                    .get(job.job_index)
                    .and_then(|job| job.git_credentials.clone())
                    .map(Box::new),
            }),
            plan::Activation::Invoke { event, payload, slot } => {
                // As for an event that a step emits.
                let bytes = serde_json::to_vec(&payload).map_or(0, |text| text.len());
                if bytes > MAX_INVOKE_BYTES {
                    let message = format!("invoke.payload has {bytes} bytes of JSON; {MAX_INVOKE_BYTES} are allowed");
                    return Activation::Fail { reason: FailureReason::ExprError, message };
                }
                let invoke = workflow.jobs.get(job.job_index).and_then(|job| job.invoke.as_ref());
                let optional = invoke.is_some_and(|invoke| invoke.optional);
                Activation::Invoke { event, payload, slot, optional }
            }
            plan::Activation::Hold { reason } => Activation::Hold { reason },
            plan::Activation::Skip { reason } => Activation::Skip { reason },
            plan::Activation::Fail { reason, message } => Activation::Fail { reason, message },
        }
    }

    fn expand(&self, made: &Generated) -> Result<Expansion, String> {
        crate::members::expand(self, made)
    }

    fn again(&self, failed: &ReadyJob) -> Option<Again> {
        let workflow = self.locks.read(&failed.run.lock_digest, &failed.lock_json).ok()?;
        let policy = workflow.jobs.get(failed.job.job_index as usize)?.retry.clone()?;
        Some(Again { policy, expires_at: self.expires_at() })
    }
}
