//! Which job of a local run is next. Pure: the same decisions as the orchestrator's, from the same functions of the engine.

use std::collections::{BTreeMap, BTreeSet};

use kici_engine::lock::Need;
use kici_engine::needs::{self, Node};
use kici_engine::plan::{self, Activation, JobPlan, JobRef, NeedResult, Needs, RunPlan, Scope, Start};
use kici_engine::state::{FailureReason, JobStatus, JobView, RunStatus, run_status};

use crate::steps::Outcome;

/// A job of a local run.
#[derive(Clone, Debug)]
pub struct Entry {
    /// As planned.
    pub plan: JobPlan,
    /// Its status now.
    pub status: JobStatus,
    /// Why it is not a success.
    pub reason: Option<FailureReason>,
    /// In words.
    pub message: String,
    /// Its outputs, once it has ended.
    pub outputs: BTreeMap<String, String>,
    /// Its needs were found met.
    judged: bool,
}

/// The jobs of a local run and what became of them.
#[derive(Debug)]
pub struct Board<'a> {
    scope: Scope<'a>,
    entries: Vec<Entry>,
    cancelled: bool,
}

impl<'a> Board<'a> {
    /// The jobs of a plan; with `only` that job (all its variants) and what it needs.
    ///
    /// # Errors
    /// The names there are, when `only` is none of them.
    pub fn new(scope: Scope<'a>, plan: RunPlan, only: Option<&str>) -> Result<Self, String> {
        let wanted = only.map(|name| closure(&plan.jobs, name)).transpose()?;
        let kept = plan.jobs.into_iter().filter(|job| wanted.as_ref().is_none_or(|w| w.contains(&job.base_name)));
        let entry = |plan: JobPlan| Entry {
            plan,
            status: JobStatus::Pending,
            reason: None,
            message: String::new(),
            outputs: BTreeMap::new(),
            judged: false,
        };
        let mut board = Self { scope, entries: kept.map(entry).collect(), cancelled: false };
        for at in 0..board.entries.len() {
            if let [edge, ..] = &board.entries[at].plan.groups[..] {
                let reason = format!("it needs the jobs of group `{}`, which a local run does not run", edge.group);
                board.apply(at, Activation::Skip { reason });
            } else if let Start::Now(activation) = board.entries[at].plan.start.clone() {
                board.apply(at, activation);
            }
        }
        board.settle();
        Ok(board)
    }

    /// All jobs, in the order of the plan.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The next job to run, if any can.
    pub fn next(&self) -> Option<usize> {
        self.entries.iter().position(|entry| entry.status == JobStatus::Queued)
    }

    /// Results of what a job needs.
    pub fn needs_of(&self, at: usize) -> Needs {
        let edges = self.entries[at].plan.needs.iter();
        edges.filter_map(|need| Some((need.job.clone(), self.result(&need.job)?))).collect()
    }

    /// A job starts.
    pub fn start(&mut self, at: usize) {
        self.entries[at].status = JobStatus::Running;
    }

    /// A job has ended; settles what follows from it.
    pub fn finish(&mut self, at: usize, outcome: &Outcome) {
        let entry = &mut self.entries[at];
        entry.status = outcome.status;
        entry.reason = outcome.reason;
        entry.message.clone_from(&outcome.message);
        entry.outputs.clone_from(&outcome.outputs);
        if entry.plan.fail_fast && entry.status.is_failure() {
            let base = entry.plan.base_name.clone();
            let message = format!("`{}` failed and fail_fast is on", entry.plan.name);
            self.cancel(FailureReason::FailFast, &message, |other| other.plan.base_name == base);
        }
        self.settle();
    }

    /// Ends what has not started.
    pub fn stop(&mut self, reason: FailureReason, message: &str) {
        self.cancelled = true;
        self.cancel(reason, message, |_| true);
    }

    /// The status of the run.
    pub fn run_status(&self) -> RunStatus {
        let view = |entry: &Entry| JobView { status: entry.status, reason: entry.reason, started: entry.judged };
        let views: Vec<JobView> = self.entries.iter().map(view).collect();
        run_status(&views, self.cancelled)
    }

    fn cancel(&mut self, reason: FailureReason, message: &str, which: impl Fn(&Entry) -> bool) {
        for entry in &mut self.entries {
            if matches!(entry.status, JobStatus::Pending | JobStatus::Queued) && which(entry) {
                entry.status = JobStatus::Cancelled;
                entry.reason = Some(reason);
                message.clone_into(&mut entry.message);
            }
        }
    }

    /// Judges waiting jobs until nothing changes.
    fn settle(&mut self) {
        loop {
            let nodes: Vec<Node> = self.entries.iter().map(node).collect();
            let found = needs::propagate(&nodes);
            if found.ready.is_empty() && found.skipped.is_empty() {
                return;
            }
            for (at, reason) in found.skipped {
                self.entries[at].status = JobStatus::Skipped;
                self.entries[at].message = reason;
            }
            for at in found.ready {
                let needs = self.needs_of(at);
                let plan = &self.entries[at].plan;
                let job = JobRef {
                    name: &plan.name,
                    job_index: plan.job_index,
                    matrix: &plan.matrix,
                    fanout: plan.fanout.as_ref(),
                    needs: &needs,
                };
                let activation = plan::activate(self.scope, job, None);
                self.apply(at, activation);
            }
        }
    }

    fn apply(&mut self, at: usize, activation: Activation) {
        let entry = &mut self.entries[at];
        entry.judged = true;
        match activation {
            // There is one machine, and it was chosen by starting the run on it.
            Activation::Enqueue { .. } => entry.status = JobStatus::Queued,
            // Never as if it had not been asked for.
            Activation::Hold { reason } => {
                entry.status = JobStatus::Failed;
                entry.reason = Some(FailureReason::NotSupported);
                entry.message = reason;
            }
            Activation::Invoke { event, .. } => {
                entry.status = JobStatus::Failed;
                entry.reason = Some(FailureReason::NotSupported);
                entry.message = format!("only an orchestrator can start the workflows that listen to event `{event}`");
            }
            Activation::Skip { reason } => {
                entry.status = JobStatus::Skipped;
                entry.message = reason;
            }
            Activation::Fail { reason, message } => {
                entry.status = JobStatus::Failed;
                entry.reason = Some(reason);
                entry.message = message;
            }
        }
    }

    fn result(&self, base: &str) -> Option<NeedResult> {
        let variants: Vec<&Entry> = self.entries.iter().filter(|entry| entry.plan.base_name == base).collect();
        let status = needs::aggregate(variants.iter().map(|entry| entry.status))?;
        Some(NeedResult {
            status,
            outputs: needs::merge_outputs(variants.iter().map(|entry| &entry.outputs)),
            hosts: None,
        })
    }
}

fn node(entry: &Entry) -> Node {
    Node {
        base_name: entry.plan.base_name.clone(),
        status: entry.status,
        needs_satisfied: entry.judged,
        needs: entry.plan.needs.clone(),
    }
}

/// A job and everything it needs, by base name.
fn closure(jobs: &[JobPlan], name: &str) -> Result<BTreeSet<String>, String> {
    let needs: BTreeMap<&str, &[Need]> = jobs.iter().map(|job| (job.base_name.as_str(), &job.needs[..])).collect();
    if !needs.contains_key(name) {
        let known: Vec<&str> = needs.into_keys().collect();
        return Err(format!("there is no job `{name}`; there are: {}", known.join(", ")));
    }
    let mut wanted = BTreeSet::new();
    let mut open = vec![name];
    while let Some(job) = open.pop() {
        if wanted.insert(job.to_owned()) {
            open.extend(needs.get(job).into_iter().flat_map(|edges| edges.iter()).map(|need| need.job.as_str()));
        }
    }
    Ok(wanted)
}
