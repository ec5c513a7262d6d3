//! The merged logs of a run: statuses and lines of all its jobs, live, until the run has ended and every line was sent.
//!
//! The database is read; live changes only say when. A change that is missed delays nothing for longer than
//! [`ALIVE`], because the state is read again then.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use futures::FutureExt;
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::{JobStatus, RunStatus, StepStatus};
use tokio::time::Instant;

use super::auth::Session;
use crate::dto::logs::{DEFAULT_LINES, EndReason, FollowEvent, FollowRequest};
use crate::dto::runs::{JobView, RunDetail, StepView};
use crate::dto::stream::Change;
use crate::live::{Received, Subscription};
use crate::ports::{Caller, JobRef, LogRequest, Ports, StepRef};
use crate::problem::{Code, Problem};

/// A sign of life, and a fresh look at the state, after this long without a change.
const ALIVE: Duration = Duration::from_secs(15);
/// The token is looked up again after this long.
const REAUTH: Duration = Duration::from_secs(60);
/// How long the last lines may take to arrive once the run has ended.
const LAST_LINES: Duration = Duration::from_secs(30);

/// How long the end of a job waits for the job's last lines, so that it is told after them.
const END_AFTER_LINES: Duration = Duration::from_secs(2);

/// A step of one hand-over.
type StepId = (JobId, u32, String);

/// Where one step's log stands.
#[derive(Debug, Default)]
struct StepLog {
    status: Option<StepStatus>,
    next_seq: u64,
    complete: bool,
    /// There may be lines that were not read.
    unread: bool,
}

/// Follows one run.
pub(super) struct Follower {
    ports: Ports,
    caller: Caller,
    session: Session,
    run: RunId,
    request: FollowRequest,
    changes: Subscription,
    run_status: RunStatus,
    run_told: Option<RunStatus>,
    jobs: HashMap<JobId, (JobStatus, Option<String>, Option<String>)>,
    /// Ends of jobs that are told once their lines are.
    late: Vec<(JobId, Instant, FollowEvent)>,
    steps: BTreeMap<StepId, StepLog>,
    /// Steps with unread lines take turns.
    turn: Option<StepId>,
    out: VecDeque<FollowEvent>,
    stale: bool,
    ended: bool,
    ended_since: Option<Instant>,
    authorised_at: Instant,
}

impl Follower {
    /// Begins to follow.
    ///
    /// # Errors
    /// 404 when the run, a job, or a step of a run that has ended does not exist; what the port says otherwise.
    pub async fn open(
        ports: Ports,
        caller: Caller,
        session: Session,
        run: RunId,
        request: FollowRequest,
    ) -> Result<Self, Problem> {
        // Subscribed before the first look, so that nothing falls between.
        let changes = ports.live.subscribe(None);
        let detail = ports.runs.get(&caller, run).await?;
        let mut follower = Self {
            ports,
            caller,
            session,
            run,
            changes,
            run_status: detail.run.status,
            run_told: None,
            jobs: HashMap::new(),
            late: Vec::new(),
            steps: BTreeMap::new(),
            turn: None,
            out: VecDeque::new(),
            stale: false,
            ended: false,
            ended_since: None,
            authorised_at: Instant::now(),
            request,
        };
        for position in std::mem::take(&mut follower.request.positions) {
            let log = StepLog { next_seq: position.next_seq, ..StepLog::default() };
            follower.steps.insert((position.job_id, position.epoch, position.step), log);
        }
        if let Some(job) = &follower.request.job
            && !detail.jobs.iter().any(|view| names_job(view, job))
        {
            return Err(Problem::not_found(format_args!("job `{job}` of {run}")));
        }
        follower.apply(detail).await?;
        // A run that goes on may still come to a step of that name.
        if let Some(step) = &follower.request.step
            && follower.run_status.is_terminal()
            && follower.steps.is_empty()
        {
            return Err(Problem::not_found(format_args!("step `{step}` of {run}")));
        }
        Ok(follower)
    }

    /// The next event; `None` after the end.
    pub async fn next(&mut self) -> Option<FollowEvent> {
        loop {
            if let Some(event) = self.out.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            if let Err(problem) = self.advance().await {
                self.end(if problem.is(Code::NotFound) { EndReason::NotFound } else { EndReason::Shutdown });
            }
        }
    }

    async fn advance(&mut self) -> Result<(), Problem> {
        if self.stale {
            self.stale = false;
            let detail = self.ports.runs.get(&self.caller, self.run).await?;
            return self.apply(detail).await;
        }
        if let Some(step) = self.next_unread() {
            return self.read(step).await;
        }
        let complete = self.steps.values().all(|log| log.complete);
        if !self.request.follow || (self.run_status.is_terminal() && complete) {
            let cancelled = self.run_status == RunStatus::Cancelled;
            self.end(if cancelled { EndReason::Cancelled } else { EndReason::Completed });
            return Ok(());
        }
        self.wait().await;
        Ok(())
    }

    /// Tells the ends of jobs whose lines are told or late, and the run's status after them.
    fn tell_ends(&mut self, all: bool) {
        let now = Instant::now();
        for (job, since, event) in std::mem::take(&mut self.late) {
            let lines_wait = self.steps.iter().any(|(id, log)| id.0 == job && !log.complete);
            if lines_wait && !all && now.duration_since(since) < END_AFTER_LINES {
                self.late.push((job, since, event));
            } else {
                self.out.push_back(event);
            }
        }
        let run_waits = self.run_status.is_terminal() && !self.late.is_empty();
        if self.run_told != Some(self.run_status) && !run_waits {
            self.run_told = Some(self.run_status);
            self.out.push_back(FollowEvent::Run { run_id: self.run, status: self.run_status });
        }
    }

    fn end(&mut self, reason: EndReason) {
        self.tell_ends(true);
        self.out.push_back(FollowEvent::End { reason, status: self.run_status });
        self.ended = true;
    }

    /// Takes over a fresh look at the run and tells what is new.
    async fn apply(&mut self, detail: RunDetail) -> Result<(), Problem> {
        self.run_status = detail.run.status;
        let wanted: Vec<&JobView> = detail
            .jobs
            .iter()
            .filter(|job| self.request.job.as_deref().is_none_or(|name| names_job(job, name)))
            .collect();
        for job in &wanted {
            let failure = job.failure.as_ref().map(|f| f.message.clone().unwrap_or_else(|| f.reason.to_string()));
            let reason = failure.or_else(|| job.routing_reason.clone());
            let known = (job.status, job.agent_id.clone(), reason.clone());
            let before = self.jobs.insert(job.id, known.clone());
            if before.as_ref() == Some(&known) {
                continue;
            }
            let event = FollowEvent::Job {
                job_id: job.id,
                name: job.name.clone(),
                status: job.status,
                agent_id: job.agent_id.clone(),
                reason,
            };
            self.late.retain(|(id, ..)| *id != job.id);
            // The first word about a job gives its name, so it comes before everything else.
            if before.is_some() && job.status.is_terminal() {
                self.late.push((job.id, Instant::now(), event));
            } else {
                self.out.push_back(event);
            }
        }
        let one = (wanted.len() == 1).then(|| JobRef::Id(wanted[0].id));
        let steps = self.ports.runs.steps(&self.caller, self.run, one.as_ref(), None).await?;
        for step in steps.iter().filter(|step| wanted.iter().any(|job| job.id == step.job_id)) {
            self.apply_step(step);
        }
        // A job that was handed over again has other steps now: lines of the earlier ones are not waited for.
        for (id, log) in &mut self.steps {
            if wanted.iter().any(|job| job.id == id.0 && job.epoch > id.1) {
                log.complete = true;
            }
        }
        self.tell_ends(false);
        Ok(())
    }

    fn apply_step(&mut self, step: &StepView) {
        if self.request.step.as_deref().is_some_and(|name| !names_step(step, name)) {
            return;
        }
        let log = self.steps.entry((step.job_id, step.epoch, step.key.clone())).or_default();
        if log.status != Some(step.status) {
            log.status = Some(step.status);
            self.out.push_back(FollowEvent::Step {
                job_id: step.job_id,
                epoch: step.epoch,
                step: step.key.clone(),
                name: step.name.clone(),
                status: step.status,
                exit_code: step.exit_code,
            });
        }
        // The totals in the row may lag behind the lines, so an open log is always read; and they stay at zero when a step
        // ended without its agent's word, so an empty one is looked at once.
        if self.request.statuses_only {
            log.complete = true;
        } else if !log.complete {
            log.unread = !(step.log.complete && step.log.lines > 0 && log.next_seq >= step.log.lines);
            log.complete = !log.unread;
        }
    }

    /// The unread step after the one that was read last.
    fn next_unread(&self) -> Option<StepId> {
        let mut unread = self.steps.iter().filter(|(_, log)| log.unread).map(|(id, _)| id);
        let first = unread.clone().next()?;
        let next = self.turn.as_ref().and_then(|turn| unread.find(|id| *id > turn));
        Some(next.unwrap_or(first).clone())
    }

    async fn read(&mut self, id: StepId) -> Result<(), Problem> {
        let Some(log) = self.steps.get_mut(&id) else { return Ok(()) };
        let request = LogRequest {
            run: self.run,
            job: JobRef::Id(id.0),
            epoch: Some(id.1),
            step: StepRef::Key(id.2.clone()),
            from_seq: log.next_seq,
            limit: DEFAULT_LINES,
        };
        let range = self.ports.runs.logs(&self.caller, &request).await?;
        log.next_seq = log.next_seq.max(range.next_seq);
        log.complete |= range.complete;
        // A range may end early for its size. While the step goes on, the next change says so; after its end none may come.
        let ended = log.status.is_some_and(StepStatus::is_terminal);
        let least = if ended { 1 } else { DEFAULT_LINES as usize };
        log.unread = !range.complete && range.lines.len() >= least;
        if !range.lines.is_empty() {
            let (job_id, epoch, step) = id.clone();
            self.out.push_back(FollowEvent::Lines { job_id, epoch, step, lines: range.lines });
        }
        self.turn = Some(id);
        self.tell_ends(false);
        Ok(())
    }

    /// Waits for a change, a sign of life, or the end of patience.
    async fn wait(&mut self) {
        let now = Instant::now();
        if self.run_status.is_terminal() {
            let since = *self.ended_since.get_or_insert(now);
            if now.duration_since(since) >= LAST_LINES {
                return self.end(EndReason::Incomplete);
            }
        }
        let patience = if self.late.is_empty() { ALIVE } else { END_AFTER_LINES };
        match tokio::time::timeout(patience, self.changes.recv()).await {
            Ok(received) => {
                self.received(received);
                // Changes that are there already are taken together: one look serves them all.
                while let Some(received) = self.changes.recv().now_or_never() {
                    self.received(received);
                }
            }
            Err(_) if !self.late.is_empty() => self.stale = true,
            Err(_) => {
                self.stale = true;
                self.out.push_back(FollowEvent::Alive {});
            }
        }
        if now.duration_since(self.authorised_at) >= REAUTH {
            self.authorised_at = now;
            if !self.session.stands().await {
                self.end(EndReason::Forbidden);
            }
        }
    }

    fn received(&mut self, received: Received) {
        match received {
            Received::Gap => self.stale = true,
            Received::Closed => self.end(EndReason::Shutdown),
            Received::Change(numbered) => match &*numbered.change {
                Change::Log { run_id, job_id, epoch, step } if *run_id == self.run => {
                    match self.steps.get_mut(&(*job_id, *epoch, step.clone())) {
                        Some(log) => log.unread |= !log.complete,
                        None => self.stale = true,
                    }
                }
                change => self.stale |= change.run_id() == Some(self.run),
            },
        }
    }
}

fn names_job(job: &JobView, name: &str) -> bool {
    job.name == name || job.base_name == name || name.parse() == Ok(job.id)
}

fn names_step(step: &StepView, name: &str) -> bool {
    step.key == name || step.name == name || name.parse() == Ok(step.ordinal)
}
