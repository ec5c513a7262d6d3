//! `workflow run --local`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use kici_engine::event::{ChangedFiles, Event, EventKind};
use kici_engine::lock::Workflow;
use kici_engine::state::{FailureReason, RunStatus, StepStatus};
use kici_engine::trigger::{self, Outcome, match_workflow};
use kici_engine::{inputs, time::Ts};
use kici_runner::config::Sources;
use kici_runner::local::{self, DEFAULT_GRACE, Ended, Entry, LocalError, Screen, Settings, Summary};
use kici_runner::ports::StepReport;
use kici_runner::stop::{Stop, strengthen};
use kici_sys::clock::SystemClock;
use kici_sys::ids::SystemIds;
use serde_json::{Value as Json, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::{Repository, event, files};
use crate::args::{Format, key_value};
use crate::exit::{FAILED, Failure};
use crate::output::{Output, printable, span, status, text};

/// Ended by SIGINT, as shells say it.
const INTERRUPTED: u8 = 130;
/// Limit of a step that names none, as on an agent.
const STEP_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// A run on this machine.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Name of a workflow [default: every one that the event starts]
    workflow: Option<String>,
    /// On this machine; the only place so far. `run trigger` starts a run on an orchestrator
    #[arg(long, required = true)]
    local: bool,
    /// What happened: push, manual, or a file with an event (see `workflow explain`) [default: push; manual with --input]
    #[arg(long, value_name = "FILE|push|manual")]
    event: Option<String>,
    /// An input of a start by hand; may be given again
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    input: Vec<(String, String)>,
    /// Only this job and what it needs
    #[arg(long)]
    job: Option<String>,
    /// A variable of this environment that steps may see, besides PATH, HOME and the like; may be given again
    #[arg(long = "env", value_name = "NAME")]
    pass_env: Vec<String>,
    /// With the time of each line
    #[arg(long)]
    timestamps: bool,
    #[command(flatten)]
    repository: Repository,
}

pub(super) async fn run(out: &Output, run: Run) -> Result<u8, Failure> {
    let repo = run.repository.repo.canonicalize();
    let repo = repo.map_err(|error| files::unreadable(&run.repository.repo, &error))?;
    let set = files::compile(out, &repo)?;
    let workflows: Vec<&Workflow> = set.workflows().collect();
    let event = happened(&run, &repo)?;
    let chosen = choose(out, &run, &workflows, event)?;
    let scratch = tempfile::Builder::new().prefix("kici-local-").tempdir()?;
    let environment = Sources::from_process(None, BTreeMap::new()).env;
    let (tell, stop) = watch::channel(Stop::Run);
    let tell = Arc::new(tell);
    let all = Arc::new(set.workflows().cloned().collect::<Vec<_>>());
    let mut worst = 0;
    let mut results = Vec::new();
    for (at, (workflow, event)) in chosen.iter().enumerate() {
        let settings = Settings {
            workspace: repo.clone(),
            scratch: scratch.path().join(at.to_string()),
            host: local::host_variables(environment.clone(), &run.pass_env),
            clock: Arc::new(SystemClock),
            ids: Arc::new(SystemIds),
            step_timeout: STEP_TIMEOUT,
            only: run.job.clone(),
            workflows: Arc::clone(&all),
        };
        let screen = Terminal::new(out, workflow, run.timestamps, Arc::clone(&tell));
        let summary = tokio::select! {
            summary = local::run(&settings, workflow, event, &screen, &stop) => summary,
            error = interrupted(&tell) => return Err(error),
        };
        match summary {
            Ok(summary) => {
                worst = worst.max(code(summary.status));
                results.push((workflow.name.clone(), summary));
            }
            Err(LocalError::Declined { workflow, reason }) => out.say(format!("{workflow} declines: {reason}")),
            Err(error @ LocalError::NoSuchJob(_)) if chosen.len() == 1 => {
                return Err(Failure::usage(error.to_string()));
            }
            Err(error @ LocalError::NoSuchJob(_)) => out.say(format!("{}: {error}", workflow.name)),
            Err(error) => return Err(Failure::other(error.to_string())),
        }
        if *stop.borrow() != Stop::Run {
            break;
        }
    }
    if results.is_empty() {
        return Err(event::nothing("nothing ran"));
    }
    show(out, &results)?;
    Ok(if *stop.borrow() == Stop::Run { worst } else { INTERRUPTED })
}

fn code(status: RunStatus) -> u8 {
    if status == RunStatus::Success { 0 } else { FAILED }
}

/// The event that was asked for.
fn happened(run: &Run, repo: &Path) -> Result<Event, Failure> {
    match run.event.as_deref() {
        None if run.input.is_empty() => Ok(event::of_repository(repo, EventKind::Push)),
        None | Some("manual") => Ok(event::of_repository(repo, EventKind::Manual)),
        Some("push") => Ok(event::of_repository(repo, EventKind::Push)),
        Some(file) => event::load(&PathBuf::from(file), run.repository.kind.as_deref()),
    }
}

/// The workflows to run, each with its event. One that is named runs, whatever its triggers say, unless an event was named
/// too.
fn choose<'a>(
    out: &Output,
    run: &Run,
    workflows: &[&'a Workflow],
    event: Event,
) -> Result<Vec<(&'a Workflow, Event)>, Failure> {
    let mut candidates = workflows.to_vec();
    if let Some(name) = &run.workflow {
        candidates.retain(|workflow| workflow.name == *name);
        if candidates.is_empty() {
            let known: Vec<&str> = workflows.iter().map(|workflow| workflow.name.as_str()).collect();
            return Err(Failure::usage(format!("there is no workflow `{name}`; there are: {}", known.join(", "))));
        }
    }
    let changed = match event::changed(&run.repository, &event) {
        ChangedFiles::Unavailable(_) => ChangedFiles::Unavailable("not compared on this machine".to_owned()),
        known => known,
    };
    let mut chosen = Vec::new();
    for workflow in candidates {
        let mut event = event.clone();
        if event.kind == EventKind::Manual {
            let Some(declared) = trigger::manual_trigger(workflow).and_then(trigger::declared_inputs) else {
                if run.workflow.is_some() {
                    let text = format!(
                        "workflow `{}` cannot be started by hand; add `manual: {{}}` to its `on`",
                        workflow.name
                    );
                    return Err(Failure::usage(text));
                }
                continue;
            };
            event.requested_workflow = Some(workflow.name.clone());
            let given = event::inputs(&run.input)?;
            event.inputs = inputs::validate(declared, &given).map_err(|errors| {
                Failure::usage(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
            })?;
        } else if !run.input.is_empty() {
            return Err(Failure::usage("--input is for a start by hand; leave --event out, or say --event manual"));
        }
        let matched = matches!(match_workflow(workflow, &event, Some(&changed)).outcome, Outcome::Matched { .. });
        if !matched && run.workflow.is_some() && run.event.is_none() {
            out.say(format!("{}: its triggers do not ask for this push; it runs because it was named", workflow.name));
        } else if !matched {
            continue;
        }
        chosen.push((workflow, event));
    }
    if chosen.is_empty() {
        let text = format!("no workflow runs for this {}; `workflow explain` says why, or name one", event.kind);
        return Err(event::nothing(text));
    }
    Ok(chosen)
}

/// Passes on SIGINT and SIGTERM: the first asks the steps to end, the second ends them. Returns only when a handler cannot
/// be installed.
async fn interrupted(tell: &watch::Sender<Stop>) -> Failure {
    let (mut int, mut term) = match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(int), Ok(term)) => (int, term),
        (Err(error), _) | (_, Err(error)) => return error.into(),
    };
    loop {
        tokio::select! {
            _ = int.recv() => {}
            _ = term.recv() => {}
        }
        let (reason, message) = (FailureReason::CancelledByUser, "interrupted".to_owned());
        if *tell.borrow() == Stop::Run {
            eprintln!("stopping; once more to kill");
            strengthen(tell, Stop::Graceful { reason, message, grace: DEFAULT_GRACE, more_steps: true });
        } else {
            strengthen(tell, Stop::Force { reason, message });
        }
    }
}

/// Shows a run as it goes.
struct Terminal<'a> {
    out: &'a Output,
    workflow: &'a str,
    timestamps: bool,
    tell: Arc<watch::Sender<Stop>>,
    /// Names of the steps by job and key, for JSON.
    names: Mutex<BTreeMap<String, String>>,
}

impl<'a> Terminal<'a> {
    fn new(out: &'a Output, workflow: &'a Workflow, timestamps: bool, tell: Arc<watch::Sender<Stop>>) -> Self {
        Self { out, workflow: &workflow.name, timestamps, tell, names: Mutex::default() }
    }

    /// A reader that went away ends the run; the steps must not stay behind.
    fn write(&self, text: &str) {
        let mut stdout = std::io::stdout().lock();
        if writeln!(stdout, "{text}").and_then(|()| stdout.flush()).is_err() {
            let message = "the output cannot be written".to_owned();
            let reason = FailureReason::CancelledByUser;
            strengthen(&self.tell, Stop::Graceful { reason, message, grace: DEFAULT_GRACE, more_steps: true });
        }
    }

    fn event(&self, document: &Json) {
        self.write(&document.to_string());
    }

    fn people(&self) -> bool {
        self.out.format == Format::Table
    }

    fn head(&self, job: &str, text: &str) {
        let line = format!("{} | {}", printable(job), printable(text));
        self.write(&if self.out.colour { format!("\x1b[1m{line}\x1b[0m") } else { line });
    }
}

impl Screen for Terminal<'_> {
    fn note(&self, text: &str) {
        self.out.say(format!("{}: {}", printable(self.workflow), printable(text)));
    }

    fn job_starts(&self, job: &Entry) {
        if !self.people() {
            let (workflow, name) = (self.workflow, &job.plan.name);
            self.event(&json!({ "type": "job", "workflow": workflow, "job": name, "status": "running" }));
        }
    }

    fn step(&self, job: &str, report: &StepReport) {
        if !self.people() {
            self.names.lock().unwrap_or_else(PoisonError::into_inner).insert(key(&report.key), report.name.clone());
            return self.event(&json!({
                "type": "step", "workflow": self.workflow, "job": job, "step": report.name, "status": report.status,
                "at": report.at, "exit_code": report.exit_code, "message": report.message, "outputs": report.outputs,
            }));
        }
        match report.status {
            StepStatus::Running => self.head(job, &format!("> {}", report.name)),
            StepStatus::Success => {}
            ended if report.message.is_empty() => self.head(job, &format!("< {}: {ended}", report.name)),
            ended => self.head(job, &format!("< {}: {ended}: {}", report.name, report.message)),
        }
    }

    fn lines(&self, job: &str, step: &kici_runner::local::StepKey, lines: &[u8]) {
        for line in String::from_utf8_lossy(lines).lines() {
            let mut parts = line.splitn(3, ' ');
            let (Some(at), Some(channel), Some(content)) = (parts.next(), parts.next(), parts.next()) else { continue };
            let at = Ts::from_micros(at.parse().unwrap_or_default());
            if self.people() {
                let at = if self.timestamps { format!("{at} ") } else { String::new() };
                let mark = if channel == "m" { "[kici] " } else { "" };
                self.write(&format!("{} | {at}{mark}{content}", printable(job)));
            } else {
                let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                let name = names.get(&key(step)).cloned().unwrap_or_default();
                drop(names);
                let stream = match channel {
                    "o" => "out",
                    "e" => "err",
                    _ => "meta",
                };
                self.event(&json!({
                    "type": "line", "workflow": self.workflow, "job": job, "step": name, "at": at, "stream": stream,
                    "text": content,
                }));
            }
        }
    }

    fn job_ends(&self, _job: &Entry, _took: Duration) {}
}

fn key(step: &kici_runner::local::StepKey) -> String {
    format!("{}/{}/{}", step.kind, step.owner_index, step.ordinal)
}

fn show(out: &Output, results: &[(String, Summary)]) -> Result<(), Failure> {
    if out.format != Format::Table {
        for (workflow, summary) in results {
            let jobs = summary.jobs.iter().map(|job| {
                json!({
                    "job": job.entry.plan.name, "status": job.entry.status, "reason": job.entry.reason,
                    "message": job.entry.message, "outputs": job.entry.outputs,
                    "took_ms": job.took.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
                })
            });
            let jobs: Vec<Json> = jobs.collect();
            out.json_line(&json!({ "type": "result", "workflow": workflow, "status": summary.status, "jobs": jobs }))?;
        }
        return Ok(());
    }
    let rows: Vec<(&String, &Ended)> =
        results.iter().flat_map(|(workflow, summary)| summary.jobs.iter().map(move |job| (workflow, job))).collect();
    let table = out.table(
        &rows,
        &[
            ("WORKFLOW", Box::new(|(workflow, _)| text(workflow))),
            ("JOB", Box::new(|(_, job)| text(&job.entry.plan.display_name))),
            ("STATUS", Box::new(|(_, job)| status(job.entry.status.as_str()))),
            ("TOOK", Box::new(|(_, job)| text(job.took.map_or_else(|| "-".to_owned(), span)))),
            ("WHY", Box::new(|(_, job)| text(&job.entry.message))),
        ],
    );
    out.print(&format!("\n{}", table.trim_end()))?;
    for (workflow, summary) in results {
        out.say(format!("{workflow}: {}", summary.status));
    }
    Ok(())
}
