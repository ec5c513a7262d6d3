//! What follows from a change of a run's jobs: which become ready, are skipped or cancelled, and how the run stands. Pure;
//! `shared::settle` reads the rows it works on and writes what it changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kici_engine::ids::{AgentId, InstanceId, JobId};
use kici_engine::lock::RUN_HOOKS_JOB;
use kici_engine::needs::{Verdict, aggregate, decide, merge_outputs};
use kici_engine::plan::{HostResults, JobKind};
use kici_engine::state::{
    FailureReason, InvalidTransition, JobEvent, JobStatus, JobView, QueueStatus, RunStatus, run_status, transition,
};
use kici_engine::time::Ts;

use crate::StoreError;
use crate::advance::again::Retried;
use crate::advance::slots::SlotBook;
use crate::model::{
    Activate, Activation, Effects, FinishedJob, HeldJob, Job, JobRef, NeedEdge, NeedResult, QueueEntry, ReadyJob,
    RosterHost, Run, whole_group,
};

pub(crate) mod again;
pub(crate) mod quiet;
pub(crate) mod slots;

/// The open row of the queue that a job has.
#[derive(Clone, Debug)]
pub(crate) struct OpenRow {
    pub(crate) status: QueueStatus,
    pub(crate) epoch: u32,
    pub(crate) agent_id: Option<AgentId>,
    pub(crate) owner: Option<InstanceId>,
    pub(crate) started: bool,
}

/// An event that a job with `invoke` emits.
#[derive(Clone, Debug)]
pub(crate) struct Invoked {
    pub(crate) job: JobId,
    pub(crate) event: String,
    pub(crate) payload: serde_json::Value,
    pub(crate) optional: bool,
}

/// Whether [`RunState::advance`] is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advanced {
    /// Nothing more follows.
    Stable,
    /// A job is ready and the lock document must be read to judge it; call again with it.
    WantsLock,
    /// Jobs ask for slots of concurrency groups; call again once they are asked for.
    WantsSlots,
}

/// A run with all its jobs, and what was done to them.
pub(crate) struct RunState {
    pub(crate) run: Run,
    pub(crate) jobs: Vec<Job>,
    /// How the jobs stand that are not in `jobs` because nothing follows for them, see [`quiet`]; each way once.
    pub(crate) others: Vec<JobView>,
    pub(crate) open: BTreeMap<JobId, OpenRow>,
    /// Rows to add to the queue.
    pub(crate) enqueued: BTreeMap<JobId, QueueEntry>,
    /// What open rows of ended jobs end as, where it does not follow from the job.
    pub(crate) row_ends: BTreeMap<JobId, QueueStatus>,
    /// The hosts of jobs whose turn may come, as far as they are known.
    pub(crate) hosts: BTreeMap<AgentId, RosterHost>,
    /// Slots of concurrency groups.
    pub(crate) slots: SlotBook,
    edges: BTreeMap<String, Vec<NeedEdge>>,
    /// Groups whose jobs are not known yet, as edges name them, with the jobs that make them.
    groups: BTreeMap<String, String>,
    /// Longest chain of events that a job may make longer.
    pub(crate) max_chain_depth: u32,
    /// The version of the registry, if it was read with the run.
    pub(crate) registry_version: Option<i64>,
    /// Events that jobs with `invoke` emit.
    pub(crate) invoked: Vec<Invoked>,
    before: Vec<Job>,
    to_stop: Vec<HeldJob>,
    /// Jobs that are tried again, with the delivery that failed.
    pub(crate) again: BTreeMap<JobId, Retried>,
}

impl From<InvalidTransition> for StoreError {
    fn from(error: InvalidTransition) -> Self {
        Self::Corrupt { what: "job status", detail: error.to_string() }
    }
}

impl RunState {
    pub(crate) fn new(run: Run, jobs: Vec<Job>, needs: Vec<NeedEdge>, open: BTreeMap<JobId, OpenRow>) -> Self {
        let mut edges: BTreeMap<String, Vec<NeedEdge>> = BTreeMap::new();
        let mut groups = BTreeMap::new();
        for edge in needs {
            if let Some(generator) = edge.generator.clone().filter(|_| !edge.resolved) {
                groups.insert(edge.need.job.clone(), generator);
            }
            edges.entry(edge.job_name.clone()).or_default().push(edge);
        }
        let before = jobs.clone();
        Self {
            run,
            jobs,
            others: Vec::new(),
            open,
            enqueued: BTreeMap::new(),
            row_ends: BTreeMap::new(),
            hosts: BTreeMap::new(),
            slots: SlotBook::default(),
            edges,
            groups,
            max_chain_depth: u32::MAX,
            registry_version: None,
            invoked: Vec::new(),
            before,
            to_stop: Vec::new(),
            again: BTreeMap::new(),
        }
    }

    /// Where a job stands in `jobs`.
    pub(crate) fn position(&self, id: JobId) -> Option<usize> {
        self.jobs.iter().position(|job| job.id == id)
    }

    /// The job waits for no other one.
    pub(crate) fn needs_nothing(&self, at: usize) -> bool {
        !self.edges.contains_key(&self.jobs[at].name)
    }

    /// Moves a job along the state machine. A reason that is given replaces one that is there.
    pub(crate) fn apply(
        &mut self,
        at: usize,
        event: JobEvent,
        reason: Option<FailureReason>,
        message: Option<String>,
        now: Ts,
    ) -> Result<(), InvalidTransition> {
        let job = &mut self.jobs[at];
        let mut status = transition(job.status, event)?;
        if let Some(reason) = reason {
            job.failure_reason = Some(reason);
            job.failure_class = Some(reason.class());
        }
        if let Some(message) = message {
            job.failure_message = Some(message);
        }
        if event == JobEvent::Fail {
            status = job.failure_reason.map_or(status, FailureReason::status);
        }
        if status == JobStatus::Success {
            job.failure_reason = None;
            job.failure_class = None;
            job.failure_message = None;
        }
        if status == JobStatus::Queued && job.ready_at.is_none() {
            job.ready_at = Some(now);
        }
        if status.is_terminal() {
            job.finished_at = Some(now);
            job.routing_reason = None;
        }
        job.status = status;
        Ok(())
    }

    /// Stops a job that has not ended, for `reason`. With `force` nothing unwinds: the row ends now and the agent kills.
    pub(crate) fn stop(
        &mut self,
        at: usize,
        reason: FailureReason,
        force: bool,
        now: Ts,
    ) -> Result<(), InvalidTransition> {
        let job = &self.jobs[at];
        let event = match job.status {
            // Nobody has it who would unwind it.
            JobStatus::Running if job.kind == Some(JobKind::Invoke) => JobEvent::Cancel,
            JobStatus::Running if !force => JobEvent::CancelGraceful,
            JobStatus::Cancelling if force => JobEvent::CancelForce,
            JobStatus::Cancelling => return Ok(()),
            _ => JobEvent::Cancel,
        };
        // What made it stop first stays the reason.
        let reason = job.failure_reason.is_none().then_some(reason);
        let id = job.id;
        self.apply(at, event, reason, None, now)?;
        self.to_stop.extend(self.held(id));
        Ok(())
    }

    /// Agents that another instance must tell to stop a job.
    pub(crate) fn stops_elsewhere(&self, node: &InstanceId) -> bool {
        self.to_stop.iter().any(|held| held.owner.as_ref() != Some(node))
    }

    /// Who must be told again to stop.
    pub(crate) fn stop_again(&mut self, held: Vec<HeldJob>) {
        self.to_stop.extend(held);
    }

    /// Who must be told when this job is stopped.
    pub(crate) fn held(&self, id: JobId) -> Option<HeldJob> {
        let row = self.open.get(&id)?;
        Some(HeldJob {
            job: JobRef { run_id: self.run.id, job_id: id, epoch: row.epoch },
            agent_id: row.agent_id.clone()?,
            owner: row.owner.clone(),
            started: row.started,
        })
    }

    /// Does all that follows, until nothing more does. Without `activate` ready jobs stay as they are. `room` is asked for
    /// each job that is to go to the queue; its refusal says how many the queue takes.
    pub(crate) fn advance(
        &mut self,
        now: Ts,
        activate: Option<&dyn Activate>,
        lock: Option<&Arc<Vec<u8>>>,
        room: &dyn Fn() -> Result<(), u64>,
    ) -> Result<Advanced, StoreError> {
        let mut wants_lock = false;
        loop {
            let mut changed = self.fail_fast(now)?;
            for at in 0..self.jobs.len() {
                let waiting = self.jobs[at].status == JobStatus::Waiting;
                if !waiting && self.jobs[at].status != JobStatus::Pending {
                    continue;
                }
                // What the workflow wants to do about a cancel comes after everything else has ended.
                let hooks = self.runs_hooks_after_cancel(at);
                if self.run.cancel_requested_at.is_some() && !hooks {
                    let reason = self.run.failure_reason.unwrap_or(FailureReason::CancelledByUser);
                    self.stop(at, reason, false, now)?;
                    changed = true;
                    continue;
                }
                let verdict = match waiting {
                    false => self.judge(at),
                    true if self.turn_has_come(at) => Verdict::Ready,
                    true => Verdict::Wait,
                };
                match verdict {
                    Verdict::Wait => {}
                    Verdict::Skip { reason } => {
                        self.apply(at, JobEvent::Skip, None, Some(reason), now)?;
                        changed = true;
                    }
                    Verdict::Ready => match (activate, lock) {
                        (Some(activate), Some(lock)) => changed |= self.activate(at, (activate, lock), room, now)?,
                        (Some(_), None) => wants_lock = true,
                        (None, _) => self.jobs[at].needs_satisfied = true,
                    },
                }
            }
            if !changed {
                return Ok(match (wants_lock, self.slots.wanted.is_empty()) {
                    (true, _) => Advanced::WantsLock,
                    (false, false) => Advanced::WantsSlots,
                    (false, true) => Advanced::Stable,
                });
            }
        }
    }

    /// The hosts of the jobs that wait for their needs or their turn.
    pub(crate) fn pending_hosts(&self) -> BTreeSet<AgentId> {
        let pending = self.jobs.iter().filter(|job| job.status == JobStatus::Pending);
        pending.filter_map(|job| Some(job.fanout.as_ref()?.host.clone())).collect()
    }

    /// Whether a job runs the hooks of a workflow and has a cancel to answer: something had begun.
    pub(crate) fn runs_hooks_after_cancel(&self, at: usize) -> bool {
        self.jobs[at].base_name == RUN_HOOKS_JOB
            && self.jobs.iter().any(|job| job.started_at.is_some() || job.attempt > 1)
    }

    /// Fails jobs that wait although nothing is under way that could meet their needs. Only after [`Self::advance`]; a
    /// compiled workflow has no such jobs, so this is the answer to a fault elsewhere, and a stated one.
    pub(crate) fn fail_unreachable(&mut self, now: Ts) -> Result<(), InvalidTransition> {
        let waits = |job: &Job| job.status == JobStatus::Pending && !job.needs_satisfied;
        if self.jobs.iter().any(|job| !job.status.is_terminal() && !waits(job)) {
            return Ok(());
        }
        for at in 0..self.jobs.len() {
            if !waits(&self.jobs[at]) {
                continue;
            }
            let needs: Vec<&str> =
                self.edges.get(&self.jobs[at].name).into_iter().flatten().map(|edge| edge.need.job.as_str()).collect();
            let message = format!("it needs {} and nothing is left that could end them", needs.join(", "));
            self.apply(at, JobEvent::Enqueue, None, None, now)?;
            self.apply(at, JobEvent::Fail, Some(FailureReason::NeedsDeadlock), Some(message), now)?;
        }
        Ok(())
    }

    fn judge(&self, at: usize) -> Verdict {
        let edges = self.edges.get(&self.jobs[at].name).map_or(&[][..], Vec::as_slice);
        decide(edges.iter().filter(|edge| !edge.resolved).map(|edge| &edge.need), |base| self.status_of(base))
    }

    /// The status that a job, or a group whose jobs are not known yet, shows to those that need it; none while it is open.
    fn status_of(&self, base: &str) -> Option<JobStatus> {
        match self.groups.get(base) {
            None => aggregate(self.variants(base).map(|job| job.status)),
            // Its jobs are known in the moment in which their generator succeeds.
            Some(generator) => {
                aggregate(self.variants(generator).map(|job| job.status)).filter(|end| *end != JobStatus::Success)
            }
        }
    }

    fn variants<'s>(&'s self, base: &str) -> impl Iterator<Item = &'s Job> {
        self.jobs.iter().filter(move |job| job.base_name == base)
    }

    /// Judges a ready job; false when it must wait for its siblings.
    fn activate(
        &mut self,
        at: usize,
        (activate, lock): (&dyn Activate, &Arc<Vec<u8>>),
        room: &dyn Fn() -> Result<(), u64>,
        now: Ts,
    ) -> Result<bool, InvalidTransition> {
        self.jobs[at].needs_satisfied = true;
        if self.jobs[at].status == JobStatus::Pending && !self.has_room(at) {
            return Ok(false);
        }
        let job = self.jobs[at].clone();
        let needs = self.need_results(&job.name);
        let host = job.fanout.as_ref().and_then(|fanout| self.hosts.get(&fanout.host).cloned());
        let ready = ReadyJob { run: self.run.clone(), job, lock_json: Arc::clone(lock), needs, host };
        let into_queue = self.event_of_ready(at);
        match activate.activate(&ready) {
            Activation::Enqueue(entry) => {
                if !self.admit(at, entry.slot.as_ref(), now)? {
                    return Ok(self.jobs[at].status != ready.job.status);
                }
                self.apply(at, into_queue, None, None, now)?;
                match room() {
                    Ok(()) => drop(self.enqueued.insert(ready.job.id, entry)),
                    Err(most) => {
                        let full = FailureReason::QueueFull;
                        self.apply(at, JobEvent::Fail, Some(full), Some(queue_full(most)), now)?;
                    }
                }
            }
            Activation::Invoke { event, payload, slot, optional } => {
                if !self.admit(at, slot.as_ref(), now)? {
                    return Ok(self.jobs[at].status != ready.job.status);
                }
                self.apply(at, into_queue, None, None, now)?;
                self.invoke(at, Invoked { job: ready.job.id, event, payload, optional }, now)?;
            }
            Activation::Hold { reason } => {
                self.apply(at, JobEvent::Hold, None, None, now)?;
                self.jobs[at].routing_reason = Some(reason);
            }
            Activation::Skip { reason } if into_queue == JobEvent::Enqueue => {
                self.apply(at, JobEvent::Skip, None, Some(reason), now)?;
            }
            // It was to run when it began to wait, and nothing that it is judged by has changed since.
            Activation::Skip { reason } => self.apply(at, JobEvent::Cancel, None, Some(reason), now)?,
            Activation::Fail { reason, message } => {
                // There is no edge from `pending` to a failure.
                self.apply(at, into_queue, None, None, now)?;
                self.apply(at, JobEvent::Fail, Some(reason), Some(message), now)?;
            }
        }
        Ok(true)
    }

    /// A job that starts other workflows begins to wait for them, unless the chain of events is too long already.
    fn invoke(&mut self, at: usize, invoked: Invoked, now: Ts) -> Result<(), InvalidTransition> {
        let depth = self.run.chain_depth.saturating_add(1);
        if depth > self.max_chain_depth {
            let message = format!(
                "event `{}` was refused: a chain of {depth} events, each of which led to the next; at most {} are allowed \
                 (events.max_chain_depth)",
                invoked.event, self.max_chain_depth
            );
            return self.apply(at, JobEvent::Fail, Some(FailureReason::InvokeRefused), Some(message), now);
        }
        self.apply(at, JobEvent::Start, None, None, now)?;
        self.jobs[at].started_at = Some(now);
        self.jobs[at].routing_reason =
            Some(format!("waits for the workflows that listen to event `{}`", invoked.event));
        self.invoked.push(invoked);
        Ok(())
    }

    /// Jobs join the run, with their edges; those that need the group they form need them from now on.
    pub(crate) fn join(&mut self, jobs: Vec<Job>, edges: Vec<NeedEdge>, group: &str, gained: Vec<NeedEdge>) {
        // As rows they are all pending: what else they are is a change like any other.
        self.before.extend(jobs.iter().map(|job| Job { status: JobStatus::Pending, ..job.clone() }));
        self.jobs.extend(jobs);
        let whole = whole_group(group);
        self.groups.remove(&whole);
        for edge in self.edges.values_mut().flatten().filter(|edge| edge.need.job == whole) {
            edge.resolved = true;
        }
        for edge in edges.into_iter().chain(gained) {
            if let Some(generator) = edge.generator.clone().filter(|_| !edge.resolved) {
                self.groups.insert(edge.need.job.clone(), generator);
            }
            self.edges.entry(edge.job_name.clone()).or_default().push(edge);
        }
    }

    /// False when `max_parallel` variants of the job are under way.
    fn has_room(&self, at: usize) -> bool {
        let job = &self.jobs[at];
        let Some(max) = job.max_parallel else { return true };
        let under_way = self
            .variants(&job.base_name)
            .filter(|j| j.id != job.id && !j.status.is_terminal())
            .filter(|j| j.status != JobStatus::Pending || self.slots.concerns(j.id));
        under_way.count() < usize::try_from(max.max(1)).unwrap_or(usize::MAX)
    }

    /// Puts roots beyond `max_parallel` back: they are activated again when there is room.
    pub(crate) fn hold_back(&mut self) {
        for at in 0..self.jobs.len() {
            let job = &self.jobs[at];
            let Some(max) = job.max_parallel else { continue };
            let queued = |j: &&Job| j.base_name == job.base_name && j.status == JobStatus::Queued;
            let earlier = self.jobs[..at].iter().filter(queued).count();
            if job.status == JobStatus::Queued && earlier >= usize::try_from(max.max(1)).unwrap_or(usize::MAX) {
                self.enqueued.remove(&job.id);
                let job = &mut self.jobs[at];
                job.status = JobStatus::Pending;
                job.ready_at = None;
            }
        }
    }

    /// Fails the roots that the queue has no room for.
    pub(crate) fn shed(&mut self, now: Ts, room: &dyn Fn() -> Result<(), u64>) -> Result<(), InvalidTransition> {
        for at in 0..self.jobs.len() {
            let id = self.jobs[at].id;
            if self.enqueued.contains_key(&id)
                && let Err(most) = room()
            {
                self.enqueued.remove(&id);
                self.apply(at, JobEvent::Fail, Some(FailureReason::QueueFull), Some(queue_full(most)), now)?;
            }
        }
        Ok(())
    }

    /// After a failure no other variant starts: those that wait for their turn are skipped, those that wait for an agent are
    /// cancelled. What has started goes on.
    fn fail_fast(&mut self, now: Ts) -> Result<bool, InvalidTransition> {
        let failed = self.jobs.iter().filter(|job| job.fail_fast && job.status.is_failure());
        let failed: BTreeMap<String, String> = failed.map(|job| (job.base_name.clone(), job.name.clone())).collect();
        let mut changed = false;
        for at in 0..self.jobs.len() {
            let job = &self.jobs[at];
            let Some(first) = failed.get(&job.base_name) else { continue };
            match job.status {
                JobStatus::Pending => {
                    let reason = format!("fail_fast: {first} failed");
                    self.apply(at, JobEvent::Skip, None, Some(reason), now)?;
                }
                JobStatus::Queued | JobStatus::Held | JobStatus::Waiting => {
                    self.stop(at, FailureReason::FailFast, false, now)?;
                }
                _ => continue,
            }
            changed = true;
        }
        Ok(changed)
    }

    /// What a job needs, once all of it has ended.
    pub(crate) fn need_results(&self, job_name: &str) -> BTreeMap<String, NeedResult> {
        let edges = self.edges.get(job_name).map_or(&[][..], Vec::as_slice);
        need_results(edges, |base| self.variants(base).collect())
    }

    /// Brings the run's own columns up to date.
    pub(crate) fn conclude(&mut self, now: Ts) {
        let run = &mut self.run;
        if run.status.is_terminal() {
            return;
        }
        if run.started_at.is_none() {
            run.started_at = self.jobs.iter().filter_map(|job| job.started_at).min();
            run.deadline = run.started_at.zip(run.timeout).map(|(at, limit)| at.plus(limit));
        }
        let views: Vec<JobView> = self
            .jobs
            .iter()
            .map(|job| JobView {
                status: job.status,
                reason: job.failure_reason,
                started: job.started_at.is_some() || job.attempt > 1,
            })
            .chain(self.others.iter().copied())
            .collect();
        run.status = run_status(&views, run.cancel_requested_at.is_some());
        if run.status == RunStatus::Failed
            && run.failure_reason.is_none()
            && let Some(job) = self.jobs.iter().find(|job| job.status.is_failure())
        {
            run.failure_reason = job.failure_reason;
            run.failure_message = job.failure_message.as_ref().map(|text| format!("{}: {text}", job.name));
        }
        if run.status.is_terminal() {
            run.finished_at = Some(now);
        }
    }

    /// Jobs that differ from what was read.
    pub(crate) fn changed(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter().zip(&self.before).filter(|(now, before)| now != before).map(|(now, _)| now)
    }

    /// Jobs that ended since they were read.
    pub(crate) fn ended(&self) -> impl Iterator<Item = &Job> {
        let ended = |(now, before): &(&Job, &Job)| now.status.is_terminal() && !before.status.is_terminal();
        self.jobs.iter().zip(&self.before).filter(ended).map(|(now, _)| now)
    }

    /// What the open row of an ended job ends as.
    pub(crate) fn row_end(&self, job: &Job) -> QueueStatus {
        self.row_ends.get(&job.id).copied().unwrap_or(match job.status {
            JobStatus::Cancelled => QueueStatus::Cancelled,
            _ => QueueStatus::Completed,
        })
    }

    pub(crate) fn into_effects(self, was: RunStatus) -> Effects {
        let finished_jobs = self.ended().map(|job| self.finished(job)).collect();
        let run_finished = self.run.status.is_terminal() && !was.is_terminal();
        let newly_queued = self.enqueued.into_keys().collect();
        let retried = self.again.into_values().map(|retried| retried.job).collect();
        Effects { run: self.run, finished_jobs, newly_queued, to_stop: self.to_stop, retried, run_finished }
    }

    fn finished(&self, job: &Job) -> FinishedJob {
        FinishedJob {
            job: JobRef { run_id: job.run_id, job_id: job.id, epoch: job.dispatch_epoch },
            name: job.name.clone(),
            status: job.status,
            reason: job.failure_reason,
            agent_id: job.agent_id.clone(),
        }
    }
}

/// Why a job failed that the queue had no room for.
pub(crate) fn queue_full(most: u64) -> String {
    format!("{most} jobs wait for agents already (queue.max_depth); add agents, or run it again later")
}

/// What is shown of the jobs and groups that a job needs.
pub(crate) fn need_results<'a>(
    edges: &[NeedEdge],
    variants: impl Fn(&str) -> Vec<&'a Job>,
) -> BTreeMap<String, NeedResult> {
    let mut results: BTreeMap<String, NeedResult> = BTreeMap::new();
    for edge in edges {
        let Some(generator) = &edge.generator else {
            results.extend(need_result(&variants(&edge.need.job)).map(|result| (edge.need.job.clone(), result)));
            continue;
        };
        let Some(group) = &edge.need.group else { continue };
        let members = edges.iter().filter(|one| one.generator.is_none() && one.need.group.as_ref() == Some(group));
        let members: Vec<&Job> = members.flat_map(|one| variants(&one.need.job)).collect();
        // A group without jobs shows how its generator ended.
        let shown = if members.is_empty() { need_result(&variants(generator)) } else { need_result(&members) };
        results.extend(shown.map(|result| (group.clone(), result)));
    }
    results
}

/// The variants of one base name as one result; none while one is open.
pub(crate) fn need_result(variants: &[&Job]) -> Option<NeedResult> {
    let status = aggregate(variants.iter().map(|job| job.status))?;
    let outputs = merge_outputs(variants.iter().map(|job| &job.outputs));
    let on_hosts = variants.iter().filter_map(|job| Some((&job.fanout.as_ref()?.host, job.status, &job.outputs)));
    Some(NeedResult { status, outputs, hosts: HostResults::collect(on_hosts) })
}

#[cfg(test)]
mod tests;
