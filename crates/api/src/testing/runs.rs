//! Runs, jobs, steps and logs of the fake.

use std::collections::BTreeMap;

use async_trait::async_trait;
use kici_engine::check::CheckMode;
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::{JobStatus, RunStatus, StepStatus};

use super::{Fake, NOW, World};
use crate::dto::logs::{LogLine, LogRange, LogStream};
use crate::dto::runs::{
    CancelAccepted, CancelRun, JobView, LogTotals, RerunRun, RunAccepted, RunDetail, RunFilter, RunView, StepView,
    TriggerRun,
};
use crate::dto::stream::Change;
use crate::page::{PageRequest, Position, Slice};
use crate::ports::{Answer, Caller, JobRef, LogRequest, Runs, StepRef};
use crate::problem::{Code, Problem};

impl Fake {
    /// A running run of `source` with one running job.
    pub fn add_run(&self, source: &str) -> (RunId, JobId) {
        let (run, job) = (RunId::mint(self), JobId::mint(self));
        let view = RunView {
            id: run,
            source: source.to_owned(),
            repo: "acme/app".to_owned(),
            git_ref: Some("refs/heads/main".to_owned()),
            sha: "5f3c9e1d5f3c9e1d5f3c9e1d5f3c9e1d5f3c9e1d".to_owned(),
            workflow: "ci".to_owned(),
            name: "ci".to_owned(),
            trigger: "push".to_owned(),
            status: RunStatus::Running,
            check_mode: CheckMode::Apply,
            failure: None,
            attempt: 1,
            parent_run_id: None,
            cancel_requested_at: None,
            created_at: NOW,
            started_at: Some(NOW),
            finished_at: None,
        };
        let mut world = self.world();
        world.runs.insert(0, view);
        world.jobs.push(job_view(run, job));
        (run, job)
    }

    /// A running step of a job.
    pub fn add_step(&self, job: JobId, key: &str) {
        let mut world = self.world();
        let ordinal = u32::try_from(world.steps.iter().filter(|s| s.job_id == job).count()).unwrap_or(0);
        world.steps.push(StepView {
            job_id: job,
            epoch: 1,
            key: key.to_owned(),
            ordinal,
            name: key.to_owned(),
            status: StepStatus::Running,
            exit_code: None,
            message: None,
            failure_allowed: false,
            outputs: BTreeMap::new(),
            summary: None,
            attempt: 1,
            check: None,
            drift: None,
            group: None,
            log: LogTotals::default(),
            started_at: Some(NOW),
            finished_at: None,
        });
        let run_id = run_of(&world, job);
        drop(world);
        let status = StepStatus::Running;
        self.live.publish(Change::Step { run_id, job_id: job, epoch: 1, step: key.to_owned(), status });
    }

    /// More lines of a step.
    pub fn add_lines(&self, job: JobId, key: &str, texts: &[&str]) {
        let mut world = self.world();
        let lines = world.lines.entry((job, 1, key.to_owned())).or_default();
        for text in texts {
            let seq = lines.len() as u64;
            lines.push(LogLine { seq, at: NOW, stream: LogStream::Out, text: (*text).to_owned() });
        }
        let run_id = run_of(&world, job);
        drop(world);
        self.live.publish(Change::Log { run_id, job_id: job, epoch: 1, step: key.to_owned() });
    }

    /// Ends the run, its job and its steps; their logs are complete.
    pub fn end_run(&self, run: RunId, success: bool) {
        let mut world = self.world();
        let World { runs, jobs, steps, lines, .. } = &mut *world;
        let (run_status, job_status, step_status) = if success {
            (RunStatus::Success, JobStatus::Success, StepStatus::Success)
        } else {
            (RunStatus::Failed, JobStatus::Failed, StepStatus::Failed)
        };
        for job in jobs.iter_mut().filter(|job| job.run_id == run) {
            job.status = job_status;
            for step in steps.iter_mut().filter(|step| step.job_id == job.id) {
                step.status = step_status;
                step.exit_code = Some(i32::from(!success));
                let count = lines.get(&(job.id, 1, step.key.clone())).map_or(0, Vec::len);
                step.log = LogTotals { lines: count as u64, complete: true, ..LogTotals::default() };
            }
        }
        for view in runs.iter_mut().filter(|view| view.id == run) {
            view.status = run_status;
            view.finished_at = Some(NOW);
        }
        drop(world);
        let routing_key = "local:demo".to_owned();
        self.live.publish(Change::Run {
            run_id: run,
            routing_key: Some(routing_key),
            status: run_status,
            created: false,
        });
    }
}

fn job_view(run: RunId, job: JobId) -> JobView {
    JobView {
        id: job,
        run_id: run,
        name: "build".to_owned(),
        base_name: "build".to_owned(),
        display_name: "build".to_owned(),
        matrix: BTreeMap::new(),
        needs: Vec::new(),
        kind: None,
        status: JobStatus::Running,
        failure: None,
        agent_id: Some("agent-1".to_owned()),
        epoch: 1,
        attempt: 1,
        earlier: Vec::new(),
        routing_reason: None,
        outputs: BTreeMap::new(),
        log_bytes: 0,
        timeout_ms: None,
        created_at: NOW,
        ready_at: Some(NOW),
        started_at: Some(NOW),
        finished_at: None,
    }
}

fn run_of(world: &World, job: JobId) -> RunId {
    world
        .jobs
        .iter()
        .find(|view| view.id == job)
        .map_or_else(|| RunId::from_uuid(uuid::Uuid::nil()), |view| view.run_id)
}

/// The run, unless it lies outside the caller's scope (routing keys are `local:<source>` here).
fn find<'a>(world: &'a World, caller: &Caller, run: RunId) -> Answer<&'a RunView> {
    let visible = |view: &&RunView| view.id == run && caller.sees(&format!("local:{}", view.source));
    world.runs.iter().find(visible).ok_or_else(|| Problem::not_found(format_args!("run {run}")))
}

#[async_trait]
impl Runs for Fake {
    async fn list(&self, caller: &Caller, filter: &RunFilter, page: PageRequest) -> Answer<Slice<RunView>> {
        let world = self.reach()?;
        assert!(!world.panic, "the run list panics");
        let statuses = filter.statuses().map_err(|error| Problem::rejected("status", error.to_string()))?;
        let wanted = |view: &&RunView| {
            caller.sees(&format!("local:{}", view.source))
                && (statuses.is_empty() || statuses.contains(&view.status))
                && page.after.is_none_or(|after| (view.created_at, view.id.uuid()) < (after.at, after.id))
        };
        let items = world.runs.iter().filter(wanted).take(page.limit as usize + 1).cloned().collect();
        Ok(Slice::from_overfetch(items, page.limit, |view: &RunView| Position {
            at: view.created_at,
            id: view.id.uuid(),
        }))
    }

    async fn get(&self, caller: &Caller, run: RunId) -> Answer<RunDetail> {
        let world = self.reach()?;
        Ok(RunDetail {
            run: find(&world, caller, run)?.clone(),
            delivery_id: None,
            cancelled_by: None,
            inputs: BTreeMap::new(),
            request_id: None,
            jobs: world.jobs.iter().filter(|job| job.run_id == run).cloned().collect(),
            slots: Vec::new(),
        })
    }

    async fn jobs(&self, caller: &Caller, run: RunId) -> Answer<Vec<JobView>> {
        Runs::get(self, caller, run).await.map(|detail| detail.jobs)
    }

    async fn steps(
        &self,
        caller: &Caller,
        run: RunId,
        job: Option<&JobRef>,
        epoch: Option<u32>,
    ) -> Answer<Vec<StepView>> {
        let jobs = Runs::jobs(self, caller, run).await?;
        let named = |view: &JobView| match job {
            None => true,
            Some(JobRef::Id(id)) => view.id == *id,
            Some(JobRef::Name(name)) => view.name == *name,
        };
        let ids: Vec<JobId> = jobs.iter().filter(|view| named(view)).map(|view| view.id).collect();
        Ok(self
            .reach()?
            .steps
            .iter()
            .filter(|step| ids.contains(&step.job_id) && epoch.is_none_or(|epoch| step.epoch == epoch))
            .cloned()
            .collect())
    }

    async fn logs(&self, caller: &Caller, request: &LogRequest) -> Answer<LogRange> {
        let steps = Runs::steps(self, caller, request.run, Some(&request.job), None).await?;
        let named = |view: &&StepView| match &request.step {
            StepRef::Ordinal(ordinal) => view.ordinal == *ordinal,
            StepRef::Key(key) => view.key == *key,
        };
        let step = steps.iter().find(named).ok_or_else(|| Problem::not_found("the step"))?;
        let world = self.reach()?;
        let all = world.lines.get(&(step.job_id, 1, step.key.clone())).map_or(&[][..], Vec::as_slice);
        let from = usize::try_from(request.from_seq).unwrap_or(usize::MAX).min(all.len());
        let lines: Vec<LogLine> = all[from..].iter().take(request.limit as usize).cloned().collect();
        let next_seq = (from + lines.len()) as u64;
        Ok(LogRange { lines, next_seq, complete: step.log.complete && next_seq == all.len() as u64 })
    }

    async fn cancel(&self, caller: &Caller, run: RunId, _: CancelRun) -> Answer<CancelAccepted> {
        if find(&*self.reach()?, caller, run)?.status.is_terminal() {
            return Err(Problem::new(Code::RunTerminal, format!("{run} has ended")));
        }
        self.end_run(run, false);
        let status = RunStatus::Cancelling;
        Ok(CancelAccepted { run_id: run, status, agents_notified: 1, unreachable: vec![], pending_cancelled: 0 })
    }

    async fn rerun(&self, caller: &Caller, run: RunId, _: RerunRun, _: Option<&str>) -> Answer<RunAccepted> {
        let source = {
            let world = self.reach()?;
            let view = find(&world, caller, run)?;
            if !view.status.is_terminal() {
                return Err(Problem::new(Code::RunActive, format!("{run} is {}; cancel it first", view.status)));
            }
            view.source.clone()
        };
        Ok(RunAccepted { run_id: self.add_run(&source).0, existing: false })
    }

    async fn trigger(&self, caller: &Caller, request: &TriggerRun, key: Option<&str>) -> Answer<RunAccepted> {
        if let Some(run_id) = key.and_then(|key| self.world().keys.get(key).copied()) {
            return Ok(RunAccepted { run_id, existing: true });
        }
        let known = self.reach()?.sources.iter().any(|source| source.name == request.source);
        if !known || !caller.sees(&format!("local:{}", request.source)) {
            return Err(Problem::not_found(format_args!("source `{}`", request.source)));
        }
        if request.workflow != "ci" {
            let detail = format!("workflow `{}` has no `manual` trigger; add `on: manual` to it", request.workflow);
            return Err(Problem::new(Code::NoManualTrigger, detail));
        }
        let run_id = self.add_run(&request.source).0;
        if let Some(key) = key {
            self.world().keys.insert(key.to_owned(), run_id);
        }
        Ok(RunAccepted { run_id, existing: false })
    }
}
