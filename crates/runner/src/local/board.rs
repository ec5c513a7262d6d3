//! Which job of a local run is next. Pure: the same decisions as the orchestrator's, from the same functions of the engine.

use std::collections::{BTreeMap, BTreeSet};

use kici_engine::event::Event;
use kici_engine::lock::{Job, Need, Workflow};
use kici_engine::needs::{self, Node};
use kici_engine::plan::{
    self, Activation, Fleet, GroupEdge, JobPlan, JobRef, NeedResult, Needs, RunInfo, RunPlan, Scope, Start,
};
use kici_engine::state::{FailureReason, JobStatus, JobView, RunStatus, run_status};
use serde_json::Value as Json;

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
    /// The groups that it needs, also those whose jobs are known by now.
    groups: Vec<GroupEdge>,
    /// What it starts instead of steps.
    invocation: Option<Invocation>,
}

/// An event whose listeners a job starts and waits for.
#[derive(Clone, Debug, PartialEq)]
pub struct Invocation {
    /// Name of the event.
    pub event: String,
    /// Its document.
    pub payload: Json,
    /// It is a success when nobody listens.
    pub optional: bool,
}

impl Entry {
    fn new(plan: JobPlan) -> Self {
        Self {
            groups: plan.groups.clone(),
            plan,
            status: JobStatus::Pending,
            reason: None,
            message: String::new(),
            outputs: BTreeMap::new(),
            judged: false,
            invocation: None,
        }
    }

    /// What it starts instead of steps; known once its needs are met.
    pub fn invocation(&self) -> Option<&Invocation> {
        self.invocation.as_ref()
    }
}

/// The jobs of a local run and what became of them.
#[derive(Debug)]
pub struct Board<'a> {
    /// With the jobs that joined it.
    workflow: Workflow,
    event: &'a Event,
    run: RunInfo<'a>,
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
        let Scope { workflow, event, run } = scope;
        let mut board =
            Self { workflow: workflow.clone(), event, run, entries: kept.map(Entry::new).collect(), cancelled: false };
        for at in 0..board.entries.len() {
            if let Start::Now(activation) = board.entries[at].plan.start.clone() {
                board.apply(at, activation);
            }
        }
        board.settle();
        Ok(board)
    }

    /// The run, with the jobs that joined it.
    pub fn scope(&self) -> Scope<'_> {
        Scope { workflow: &self.workflow, event: self.event, run: self.run }
    }

    /// All jobs, in the order of the plan.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The next job to run, if any can.
    pub fn next(&self) -> Option<usize> {
        self.entries.iter().position(|entry| entry.status == JobStatus::Queued)
    }

    /// Results of what a job needs: of jobs, and of groups as a whole.
    pub fn needs_of(&self, at: usize) -> Needs {
        let entry = &self.entries[at];
        let mut results: Needs = BTreeMap::new();
        let mut groups: BTreeMap<&str, Vec<&str>> =
            entry.groups.iter().map(|edge| (edge.group.as_str(), Vec::new())).collect();
        for need in &entry.plan.needs {
            results.extend(self.result(&[need.job.as_str()]).map(|result| (need.job.clone(), result)));
            if let Some(group) = &need.group {
                groups.entry(group.as_str()).or_default().push(&need.job);
            }
        }
        for (group, members) in groups {
            let maker = || entry.groups.iter().find(|edge| edge.group == group).map(|edge| edge.generator.as_str());
            // A group without jobs shows how its generator ended.
            let bases = if members.is_empty() { maker().into_iter().collect() } else { members };
            results.extend(self.result(&bases).map(|result| (group.to_owned(), result)));
        }
        results
    }

    /// A job starts.
    pub fn start(&mut self, at: usize) {
        self.entries[at].status = JobStatus::Running;
    }

    /// A job has ended; settles what follows from it. The jobs that it made join the run when it ended well.
    pub fn finish(&mut self, at: usize, outcome: &Outcome, made: Option<Vec<Job>>) {
        let entry = &mut self.entries[at];
        entry.status = outcome.status;
        entry.reason = outcome.reason;
        entry.message.clone_from(&outcome.message);
        entry.outputs.clone_from(&outcome.outputs);
        if let Some(made) = made.filter(|_| outcome.status == JobStatus::Success)
            && let Err(why) = self.join(at, made)
        {
            let entry = &mut self.entries[at];
            (entry.status, entry.reason, entry.message) = (JobStatus::Failed, Some(FailureReason::DynamicEval), why);
        }
        let entry = &self.entries[at];
        if entry.plan.fail_fast && entry.status.is_failure() {
            let base = entry.plan.base_name.clone();
            let message = format!("`{}` failed and fail_fast is on", entry.plan.name);
            self.cancel(FailureReason::FailFast, &message, |other| other.plan.base_name == base);
        }
        self.settle();
    }

    /// Jobs join the run behind all others; what needs their group needs them from now on.
    fn join(&mut self, maker: usize, made: Vec<Job>) -> Result<(), String> {
        let index = self.entries[maker].plan.job_index;
        let first = self.workflow.jobs.len();
        let merged = plan::merge(&self.workflow, index, made)?;
        let scope = Scope { workflow: &merged, event: self.event, run: self.run };
        let plans = plan::plan_members(scope, first, &Fleet::default(), self.entries.len(), 0)?;
        let group = merged.jobs[index].generate.as_ref().map(|generate| generate.group.clone());
        for entry in &mut self.entries {
            entry.plan.needs.clone_from(&merged.jobs[entry.plan.job_index].needs);
            entry.plan.groups.retain(|edge| Some(&edge.group) != group.as_ref());
        }
        self.workflow = merged;
        for plan in plans {
            let start = plan.start.clone();
            self.entries.push(Entry::new(plan));
            if let Start::Now(fault @ Activation::Fail { .. }) = start {
                self.apply(self.entries.len() - 1, fault);
            }
        }
        Ok(())
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
                let activation = plan::activate(self.scope(), job, None);
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
            Activation::Invoke { event, payload, .. } => {
                let invoke = self.workflow.jobs.get(entry.plan.job_index).and_then(|job| job.invoke.as_ref());
                let optional = invoke.is_some_and(|invoke| invoke.optional);
                entry.invocation = Some(Invocation { event, payload, optional });
                entry.status = JobStatus::Queued;
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

    /// What jobs show together, by their base names; none while one of them is open.
    fn result(&self, bases: &[&str]) -> Option<NeedResult> {
        let variants: Vec<&Entry> =
            self.entries.iter().filter(|entry| bases.contains(&entry.plan.base_name.as_str())).collect();
        let status = needs::aggregate(variants.iter().map(|entry| entry.status))?;
        Some(NeedResult {
            status,
            outputs: needs::merge_outputs(variants.iter().map(|entry| &entry.outputs)),
            hosts: None,
        })
    }
}

fn node(entry: &Entry) -> Node {
    // Jobs that do not exist yet are there, and needed, in the moment in which their generator succeeds.
    let waiting = entry.plan.groups.iter().map(|edge| Need::on(&edge.generator, edge.run_on.clone()));
    Node {
        base_name: entry.plan.base_name.clone(),
        status: entry.status,
        needs_satisfied: entry.judged,
        needs: entry.plan.needs.iter().cloned().chain(waiting).collect(),
    }
}

/// A job and everything it needs, by base name.
fn closure(jobs: &[JobPlan], name: &str) -> Result<BTreeSet<String>, String> {
    let edges = |job: &'_ JobPlan| -> Vec<String> {
        let makers = job.groups.iter().map(|edge| edge.generator.clone());
        job.needs.iter().map(|need| need.job.clone()).chain(makers).collect()
    };
    let needs: BTreeMap<&str, Vec<String>> = jobs.iter().map(|job| (job.base_name.as_str(), edges(job))).collect();
    if !needs.contains_key(name) {
        let known: Vec<&str> = needs.into_keys().collect();
        return Err(format!("there is no job `{name}`; there are: {}", known.join(", ")));
    }
    let mut wanted = BTreeSet::new();
    let mut open = vec![name];
    while let Some(job) = open.pop() {
        if wanted.insert(job.to_owned()) {
            open.extend(needs.get(job).into_iter().flatten().map(String::as_str));
        }
    }
    Ok(wanted)
}
