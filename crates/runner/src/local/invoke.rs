//! Jobs that start other workflows: those that listen run one after the other, as part of the job.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Duration;

use kici_engine::event::{Event, EventKind, ForkState, Sender};
use kici_engine::ids::RunId;
use kici_engine::invoke::{Child, Started, Verdict, judge};
use kici_engine::plan::{RunInfo, Scope};
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_engine::trigger::{self, Outcome as Match, match_workflow};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Entry, Job, LocalError, Screen, Settings, StepKey, Summary, relay, run_of};
use crate::local::board::Invocation;
use crate::ports::StepReport;
use crate::steps::Outcome;
use crate::stop::Stop;

/// Longest chain of events each of which led to the next, as an orchestrator has it by default.
const MAX_CHAIN_DEPTH: u32 = 10;

/// A run that was started and has ended.
struct Ended {
    id: String,
    workflow: String,
    status: RunStatus,
}

impl Job<'_> {
    /// Runs what listens to the event, and judges the job by how that ended, as an orchestrator does.
    pub(super) async fn invoke(
        &self,
        invocation: &Invocation,
        stop: &watch::Receiver<Stop>,
    ) -> Result<Outcome, LocalError> {
        let depth = self.scope.event.chain_depth.saturating_add(1);
        if depth > MAX_CHAIN_DEPTH {
            let message = format!(
                "event `{}` was refused: a chain of {depth} events, each of which led to the next; at most \
                 {MAX_CHAIN_DEPTH} are allowed",
                invocation.event
            );
            return Ok(Outcome::new(JobStatus::Failed, Some(FailureReason::InvokeRefused), message));
        }
        let definition = &self.scope.workflow.jobs[self.board.entries()[self.at].plan.job_index];
        let limit = definition.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
        let (tell, told) = watch::channel(stop.borrow().clone());
        let over = (FailureReason::JobTimeout, "the job took longer than its limit".to_owned());
        let (runs, refused) = tokio::select! {
            done = self.listeners(invocation, depth, &told) => done?,
            never = relay(stop.clone(), &tell, limit, over) => match never {},
        };
        if let Stop::Graceful { reason, message, .. } | Stop::Force { reason, message } = &*told.borrow() {
            return Ok(Outcome::new(JobStatus::Cancelled, Some(*reason), message.clone()));
        }
        let children: Vec<Child<'_>> =
            runs.iter().map(|run| Child { id: &run.id, workflow: &run.workflow, status: run.status }).collect();
        let verdict = judge(&Started {
            event: &invocation.event,
            repo: self.scope.run.repo,
            delivered: true,
            refused: refused.as_deref(),
            optional: invocation.optional,
            runs: &children,
        });
        let outcome = match verdict {
            Verdict::Success => Outcome::new(JobStatus::Success, None, ""),
            Verdict::Fail(reason, message) => Outcome::new(JobStatus::Failed, Some(reason), message),
            // Nothing is open any more.
            Verdict::Wait(message) => Outcome::new(JobStatus::Failed, Some(FailureReason::InvokeFailed), message),
        };
        let ids: Vec<&str> = runs.iter().map(|run| run.id.as_str()).collect();
        Ok(Outcome { outputs: BTreeMap::from([("runs".to_owned(), ids.join(" "))]), ..outcome })
    }

    async fn listeners(
        &self,
        invocation: &Invocation,
        depth: u32,
        told: &watch::Receiver<Stop>,
    ) -> Result<(Vec<Ended>, Option<String>), LocalError> {
        let event = self.event(invocation, depth);
        let (mut runs, mut refused) = (Vec::new(), None);
        for (nth, workflow) in self.settings.workflows.iter().enumerate() {
            let Match::Matched { trigger, .. } = match_workflow(workflow, &event, None).outcome else { continue };
            let inputs = trigger::run_inputs(workflow, trigger, &event);
            let event = Event { inputs: inputs.unwrap_or_default(), ..event.clone() };
            let run = RunInfo { id: RunId::mint(&*self.settings.ids), ..self.scope.run };
            let settings = Settings {
                scratch: self.settings.scratch.join(format!("invoked-{}-{nth}", self.at)),
                only: None,
                ..self.settings.clone()
            };
            let screen = Within { screen: self.screen, workflow: &workflow.name };
            match boxed(&settings, Scope { workflow, event: &event, run }, &screen, told).await {
                Ok(summary) => {
                    let (id, workflow) = (run.id.to_string(), workflow.name.clone());
                    runs.push(Ended { id, workflow, status: summary.status });
                }
                Err(LocalError::Plan(error)) => refused = Some(error.to_string()),
                Err(error @ LocalError::Declined { .. }) => self.screen.note(&error.to_string()),
                Err(error) => return Err(error),
            }
        }
        Ok((runs, refused))
    }

    fn event(&self, invocation: &Invocation, depth: u32) -> Event {
        Event {
            kind: EventKind::KiciEvent,
            raw_name: invocation.event.clone(),
            action: None,
            org: self.scope.event.org.clone(),
            routing_key: self.scope.event.routing_key.clone(),
            provider: "internal".to_owned(),
            source: String::new(),
            repo: Some(self.scope.run.repo.to_owned()),
            git_ref: None,
            sha: None,
            target_branch: None,
            source_branch: None,
            base_sha: None,
            tag: None,
            default_branch: None,
            is_fork_pr: ForkState::No,
            pr_number: None,
            sender: Sender::default(),
            commit_message: None,
            inputs: BTreeMap::new(),
            requested_workflow: None,
            check_mode: self.scope.event.check_mode,
            payload: invocation.payload.clone(),
            chain_depth: depth,
        }
    }
}

/// A run within a run.
fn boxed<'a>(
    settings: &'a Settings,
    scope: Scope<'a>,
    screen: &'a dyn Screen,
    told: &'a watch::Receiver<Stop>,
) -> Pin<Box<dyn Future<Output = Result<Summary, LocalError>> + Send + 'a>> {
    Box::pin(run_of(settings, scope, screen, told))
}

/// Shows the jobs of a run that another one started under the name of their workflow.
struct Within<'a> {
    screen: &'a dyn Screen,
    workflow: &'a str,
}

impl Within<'_> {
    fn name(&self, job: &str) -> String {
        format!("{}/{job}", self.workflow)
    }

    fn entry(&self, job: &Entry) -> Entry {
        let mut job = job.clone();
        job.plan.name = self.name(&job.plan.name);
        job
    }
}

impl Screen for Within<'_> {
    fn note(&self, text: &str) {
        self.screen.note(&format!("{}: {text}", self.workflow));
    }

    fn job_starts(&self, job: &Entry) {
        self.screen.job_starts(&self.entry(job));
    }

    fn step(&self, job: &str, report: &StepReport) {
        self.screen.step(&self.name(job), report);
    }

    fn lines(&self, job: &str, step: &StepKey, lines: &[u8]) {
        self.screen.lines(&self.name(job), step, lines);
    }

    fn job_ends(&self, job: &Entry, took: Duration) {
        self.screen.job_ends(&self.entry(job), took);
    }
}
