//! Runs, jobs and steps.

use std::sync::Arc;

use async_trait::async_trait;
use kici_api::dto::logs::LogRange;
use kici_api::dto::runs::{
    CancelAccepted, CancelRun, JobView, RerunRun, RunAccepted, RunDetail, RunFilter, RunView, StepView, TriggerRun,
};
use kici_api::page::{PageRequest, Slice};
use kici_api::ports::{Answer, Caller, JobRef, LogRequest, Runs, StepRef};
use kici_api::problem::{Code, Problem};
use kici_dispatch::{DispatchError, Dispatcher};
use kici_engine::ids::RunId;
use kici_engine::state::FailureReason;
use kici_engine::time::Clock;
use kici_events::{Manual, Planner, SourceBook};
use kici_store::Store;
use kici_store::model::{self, CreatedRun, Rerun};

use super::{DEFAULT_ORG, announce, fault, views};
use crate::logs::{LogKey, LogReader, StepFile};

/// Runs over the store, the planner and the dispatcher.
pub(crate) struct RunBook {
    pub(crate) store: Store,
    pub(crate) sources: SourceBook,
    pub(crate) planner: Arc<Planner>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) logs: LogReader,
    pub(crate) announcer: Arc<announce::Announcer>,
    pub(crate) clock: Arc<dyn Clock>,
    /// Runs that ended this long ago are removed; 0 is never.
    pub(crate) runs_days: u32,
}

impl RunBook {
    /// True while the agent has not brought the log that it spoke of: results may arrive before logs.
    async fn log_awaited(&self, job: &model::Job, epoch: u32, step: &str) -> Answer<bool> {
        let steps = self.store.steps_of_job(job.id, epoch).await.map_err(fault::store)?;
        let row = steps.into_iter().find(|row| row.step_key == step);
        Ok(row.is_some_and(|row| row.log_bytes > 0 && row.log_state != Some(model::LogState::Sealed)))
    }

    /// A run that the caller may see.
    async fn visible(&self, caller: &Caller, id: RunId) -> Answer<model::Run> {
        match self.store.run_get(id).await.map_err(fault::store)? {
            Some(run) if caller.sees(&run.event.routing_key) => Ok(run),
            None if self.expired(id) => {
                let days = self.runs_days;
                let detail = format!("run {id} is no longer kept: expired (retention.runs_days is {days})");
                Err(Problem::new(Code::Gone, detail))
            }
            _ => Err(Problem::not_found(format!("run {id}"))),
        }
    }

    /// Whether a run of this id would be too old to be kept: ids say when they were made.
    fn expired(&self, id: RunId) -> bool {
        let Some(made) = id.uuid().get_timestamp().filter(|_| self.runs_days > 0) else { return false };
        let (seconds, _) = made.to_unix();
        let age = self.clock.now().as_micros() / 1_000_000 - i64::try_from(seconds).unwrap_or(i64::MAX);
        age > i64::from(self.runs_days) * 86_400
    }

    async fn jobs_of(&self, run: &model::Run) -> Answer<(Vec<JobView>, Vec<model::Slot>)> {
        let jobs = self.store.jobs_of_run(run.id).await.map_err(fault::store)?;
        let edges = self.store.needs_of_run(run.id).await.map_err(fault::store)?;
        let takes_turns = run.concurrency.is_some() || jobs.iter().any(|job| job.group_name.is_some());
        let slots = match takes_turns {
            true => self.store.slots_of_run(run.id).await.map_err(fault::store)?,
            false => Vec::new(),
        };
        Ok((jobs.iter().map(|job| views::job(job, &edges, &slots)).collect(), slots))
    }

    async fn job(&self, run: RunId, wanted: &JobRef) -> Answer<model::Job> {
        let jobs = self.store.jobs_of_run(run).await.map_err(fault::store)?;
        let found = jobs.into_iter().find(|job| match wanted {
            JobRef::Id(id) => job.id == *id,
            JobRef::Name(name) => job.name == *name || job.display_name == *name,
        });
        found.ok_or_else(|| match wanted {
            JobRef::Id(id) => Problem::not_found(format!("job {id} of {run}")),
            JobRef::Name(name) => Problem::not_found(format!("job `{name}` of {run}")),
        })
    }

    /// The store's filter; none when nothing can match.
    async fn filter(&self, caller: &Caller, filter: &RunFilter) -> Answer<Option<model::RunFilter>> {
        let statuses = filter.statuses().map_err(|error| Problem::rejected("status", error.to_string()))?;
        let mut source_id = None;
        if let Some(name) = &filter.source {
            match self.store.source_get(DEFAULT_ORG.to_owned(), name.clone()).await.map_err(fault::store)? {
                Some(source) => source_id = Some(source.id),
                None => return Err(Problem::rejected("source", format!("there is no source `{name}`"))),
            }
        }
        if let Some(scope) = &caller.routing_key {
            let own = self.store.source_by_routing_key(scope.clone()).await.map_err(fault::store)?;
            match own {
                Some(own) if source_id.is_none_or(|id| id == own.id) => source_id = Some(own.id),
                _ => return Ok(None),
            }
        }
        Ok(Some(model::RunFilter {
            source_id,
            delivery_id: filter.delivery,
            repo: filter.repo.clone(),
            git_ref: filter.git_ref.clone(),
            sha: filter.sha.clone(),
            workflow_name: filter.workflow.clone(),
            statuses,
        }))
    }

    /// What follows every creation of a run.
    fn created(&self, created: &CreatedRun, routing_key: &str) -> RunAccepted {
        self.announcer.run_created(created, routing_key);
        RunAccepted { run_id: created.run_id, existing: !created.created }
    }
}

#[async_trait]
impl Runs for RunBook {
    async fn list(&self, caller: &Caller, filter: &RunFilter, page: PageRequest) -> Answer<Slice<RunView>> {
        let Some(wanted) = self.filter(caller, filter).await? else {
            return Ok(Slice { items: Vec::new(), next: None });
        };
        let listed = self.store.run_list(wanted, views::page(page)).await.map_err(fault::store)?;
        let mut slice = views::slice(listed, |run| views::run(&run));
        if let Some(since) = filter.since {
            // Newest first: the first older one ends the list.
            let fresh = slice.items.iter().take_while(|run| run.created_at >= since).count();
            if fresh < slice.items.len() {
                slice.items.truncate(fresh);
                slice.next = None;
            }
        }
        Ok(slice)
    }

    async fn get(&self, caller: &Caller, id: RunId) -> Answer<RunDetail> {
        let run = self.visible(caller, id).await?;
        let (mut jobs, slots) = self.jobs_of(&run).await?;
        for job in jobs.iter_mut().filter(|job| job.epoch > 1) {
            let history = self.store.dispatch_history(job.id).await.map_err(fault::store)?;
            let earlier = history.into_iter().filter(|record| record.epoch < job.epoch);
            job.earlier = earlier.map(views::hand_over).collect();
        }
        Ok(RunDetail {
            run: views::run(&run),
            delivery_id: run.delivery_id,
            cancelled_by: run.cancelled_by,
            inputs: run.inputs,
            request_id: Some(run.request_id),
            jobs,
            slots: slots.into_iter().map(views::slot).collect(),
        })
    }

    async fn jobs(&self, caller: &Caller, id: RunId) -> Answer<Vec<JobView>> {
        let run = self.visible(caller, id).await?;
        Ok(self.jobs_of(&run).await?.0)
    }

    async fn steps(
        &self,
        caller: &Caller,
        id: RunId,
        job: Option<&JobRef>,
        epoch: Option<u32>,
    ) -> Answer<Vec<StepView>> {
        self.visible(caller, id).await?;
        let steps = match job {
            None => self.store.steps_of_run(id).await.map_err(fault::store)?,
            Some(job) => {
                let job = self.job(id, job).await?;
                self.store.steps_of_job(job.id, epoch.unwrap_or(job.dispatch_epoch)).await.map_err(fault::store)?
            }
        };
        let mut views = Vec::with_capacity(steps.len());
        for step in steps {
            let complete = self.logs.is_complete(&step).await;
            views.push(views::step(step, complete));
        }
        Ok(views)
    }

    async fn logs(&self, caller: &Caller, request: &LogRequest) -> Answer<LogRange> {
        let run = self.visible(caller, request.run).await?;
        if let Some(at) = run.logs_expired_at {
            let detail =
                format!("the logs of run {} are no longer kept: expired on {at} (retention.logs_days)", run.id);
            return Err(Problem::new(Code::Gone, detail));
        }
        let job = self.job(request.run, &request.job).await?;
        let epoch = request.epoch.unwrap_or(job.dispatch_epoch);
        let step = match &request.step {
            StepRef::Key(key) => key.clone(),
            StepRef::Ordinal(ordinal) => {
                let steps = self.store.steps_of_job(job.id, epoch).await.map_err(fault::store)?;
                let found = steps.into_iter().find(|step| step.ordinal == *ordinal);
                found.ok_or_else(|| Problem::not_found(format!("step {ordinal} of job `{}`", job.name)))?.step_key
            }
        };
        let file = StepFile::stored(&step).map_err(|error| Problem::rejected("step", error.to_string()))?;
        let key = LogKey { job: job.id, epoch };
        let over = job.status.is_terminal() && !self.log_awaited(&job, epoch, &step).await?;
        self.logs.range(run.id, key, &file, request.from_seq, request.limit, over).await.map_err(|error| {
            tracing::error!(%error, job = %job.id, step, "a log cannot be read");
            Problem::unavailable("the log cannot be read now; try again", 2)
        })
    }

    async fn cancel(&self, caller: &Caller, id: RunId, request: CancelRun) -> Answer<CancelAccepted> {
        self.visible(caller, id).await?;
        let by = caller.actor.to_string();
        match self.dispatcher.cancel_run(id, &by, FailureReason::CancelledByUser, request.force).await {
            Ok(done) => {
                let run = self.visible(caller, id).await?;
                let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                Ok(CancelAccepted {
                    run_id: id,
                    status: run.status,
                    agents_notified: count(done.agents_notified),
                    unreachable: done.unreachable.iter().map(ToString::to_string).collect(),
                    pending_cancelled: count(done.pending_cancelled),
                })
            }
            Err(DispatchError::AlreadyTerminal(status)) => {
                Err(Problem::new(Code::RunTerminal, format!("run {id} has ended with `{status}`; nothing to cancel")))
            }
            Err(error) => Err(fault::dispatch(error)),
        }
    }

    async fn rerun(&self, caller: &Caller, id: RunId, request: RerunRun, key: Option<&str>) -> Answer<RunAccepted> {
        let run = self.visible(caller, id).await?;
        let planned = self.store.run_rerun_plan(id, request.failed_only).await.map_err(fault::store)?;
        let new = match planned {
            Rerun::NotFound => return Err(Problem::not_found(format!("run {id}"))),
            Rerun::StillOpen(status) => {
                let detail = format!("run {id} is {status}; cancel it or wait until it has ended");
                return Err(Problem::new(Code::RunActive, detail));
            }
            Rerun::NothingFailed => {
                let detail =
                    format!("no job of run {id} failed, so there is nothing to repeat; repeat the whole run instead");
                return Err(Problem::new(Code::Conflict, detail));
            }
            Rerun::Planned(new) => *new,
        };
        let key = key.map(|key| (format!("rerun:{id}"), key.to_owned()));
        let created = self.store.run_create(new, key, self.dispatcher.activate()).await.map_err(fault::store)?;
        Ok(self.created(&created, &run.event.routing_key))
    }

    async fn trigger(&self, caller: &Caller, request: &TriggerRun, key: Option<&str>) -> Answer<RunAccepted> {
        let stored =
            self.store.source_get(DEFAULT_ORG.to_owned(), request.source.clone()).await.map_err(fault::store)?;
        let stored = stored.filter(|source| caller.sees(&source.routing_key));
        let stored = stored.ok_or_else(|| {
            Problem::rejected("source", format!("there is no source `{}`; see `source list`", request.source))
        })?;
        if !stored.enabled {
            return Err(Problem::new(Code::Conflict, format!("source `{}` is disabled", stored.name)));
        }
        let open = self.sources.open(&stored).map_err(|error| Problem::new(Code::Conflict, error.to_string()))?;
        let actor = caller.actor.to_string();
        let manual = Manual {
            source: &open,
            repo: request.repo.as_deref(),
            workflow: &request.workflow,
            git_ref: request.git_ref.as_deref(),
            inputs: request.inputs.clone(),
            check_mode: request.check_mode,
            actor: &actor,
            request_key: key.map(|key| ("manual".to_owned(), key.to_owned())),
            request_id: &caller.request_id,
        };
        let created = self.planner.start_manual(manual, self.dispatcher.activate()).await.map_err(fault::manual)?;
        Ok(self.created(&created, &stored.routing_key))
    }
}
