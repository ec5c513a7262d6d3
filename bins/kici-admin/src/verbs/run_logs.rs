//! `run logs` and `run watch`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::IsTerminal as _;

use clap::Args;
use kici_api::client::{Client, for_terminal};
use kici_api::dto::logs::{EndReason, FollowEvent, FollowRequest, LogQuery, LogStream};
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::RunStatus;

use crate::args::{Format, whole};
use crate::exit::{FAILED, Failure, NOT_FOUND, PARTIAL};
use crate::output::{Output, printable};

/// Which logs.
#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// The run
    run: RunId,
    /// Stay until the run has ended
    #[arg(short, long)]
    follow: bool,
    /// Only this job: name or id
    #[arg(long)]
    job: Option<String>,
    /// Only this step: name, key or number
    #[arg(long)]
    step: Option<String>,
    /// An earlier hand-over of the job, as `run show` lists them
    #[arg(long, requires = "job", conflicts_with = "follow", value_parser = whole::<u32>)]
    epoch: Option<u32>,
    /// With the time of each line
    #[arg(long)]
    timestamps: bool,
}

/// Colours of the job prefixes (ANSI), in the order in which jobs appear.
const COLOURS: [u8; 6] = [36, 33, 35, 32, 34, 31];

/// Prints lines as they come, each with the name of its job.
struct Printer<'a> {
    out: &'a Output,
    jobs: BTreeMap<JobId, (String, u8)>,
    width: usize,
    prefixed: bool,
    timestamps: bool,
    terminal: bool,
}

impl<'a> Printer<'a> {
    fn new(out: &'a Output, prefixed: bool, timestamps: bool) -> Self {
        let terminal = std::io::stdout().is_terminal();
        Self { out, jobs: BTreeMap::new(), width: 0, prefixed, timestamps, terminal }
    }

    fn job(&mut self, id: JobId, name: &str) {
        let colour = COLOURS[self.jobs.len() % COLOURS.len()];
        self.width = self.width.max(name.chars().count());
        self.jobs.entry(id).or_insert_with(|| (printable(name), colour));
    }

    fn line(&self, job: JobId, at: kici_engine::time::Ts, stream: LogStream, text: &str) -> Result<(), Failure> {
        let mut line = String::new();
        if let Some((name, colour)) = self.jobs.get(&job).filter(|_| self.prefixed) {
            let prefix = format!("{name:width$} |", width = self.width);
            if self.out.colour {
                line = format!("\x1b[{colour}m{prefix}\x1b[0m ");
            } else {
                line = format!("{prefix} ");
            }
        }
        if self.timestamps {
            line.push_str(&format!("{at} "));
        }
        // What a job writes may hold anything. Pipes and files get it as it is.
        let text = match self.terminal {
            true => Cow::Owned(for_terminal(text, self.out.colour)),
            false => Cow::Borrowed(text),
        };
        match stream {
            // The agent's own remarks are told from the command's output.
            LogStream::Meta => line.push_str(&format!("[kici] {text}")),
            LogStream::Out | LogStream::Err => line.push_str(&text),
        }
        self.out.print(&line)
    }
}

/// Prints logs; exit code 8 when lines are missing at the end.
pub(crate) async fn logs(out: &Output, client: &Client, logs: Logs) -> Result<u8, Failure> {
    if let (Some(job), Some(epoch)) = (&logs.job, logs.epoch) {
        return earlier(out, client, &logs, job, epoch).await;
    }
    let prefixed = logs.job.is_none();
    let mut printer = Printer::new(out, prefixed, logs.timestamps);
    let request = FollowRequest { job: logs.job, step: logs.step, follow: logs.follow, ..FollowRequest::default() };
    let mut follow = client.follow(logs.run, request);
    let mut code = 0;
    while let Some(event) = follow.next().await {
        let event = event?;
        if out.format != Format::Table {
            out.json_line(&event)?;
        }
        match event {
            FollowEvent::Job { job_id, name, .. } => printer.job(job_id, &name),
            FollowEvent::Lines { job_id, lines, .. } if out.format == Format::Table => {
                for line in lines {
                    printer.line(job_id, line.at, line.stream, &line.text)?;
                }
            }
            FollowEvent::End { reason, status } => code = ended(out, logs.follow, reason, status),
            _ => {}
        }
    }
    Ok(code)
}

/// The logs of an earlier hand-over: nothing is added to them any more.
async fn earlier(out: &Output, client: &Client, logs: &Logs, job: &str, epoch: u32) -> Result<u8, Failure> {
    let printer = Printer::new(out, false, logs.timestamps);
    let mut code = 0;
    let mut steps = client.steps_at(logs.run, job, epoch).await?;
    if let Some(wanted) = &logs.step {
        steps.retain(|step| *wanted == step.key || *wanted == step.name || *wanted == step.ordinal.to_string());
    }
    if steps.is_empty() {
        let step = logs.step.as_ref().map_or_else(|| "no steps".to_owned(), |step| format!("no step `{step}`"));
        let text = format!("job `{job}` has {step} in epoch {epoch}; `run show` tells of its hand-overs");
        return Err(Failure::new(NOT_FOUND, text));
    }
    for step in steps {
        let mut query = LogQuery { epoch: Some(epoch), ..LogQuery::default() };
        loop {
            let range = client.step_logs(logs.run, job, &step.key, &query).await?;
            let complete = range.complete;
            if out.format == Format::Table {
                for line in &range.lines {
                    printer.line(step.job_id, line.at, line.stream, &line.text)?;
                }
            } else {
                out.json_line(&range)?;
            }
            if range.lines.is_empty() {
                code = if complete { code } else { PARTIAL };
                break;
            }
            query.from_seq = range.next_seq;
        }
    }
    Ok(code)
}

fn ended(out: &Output, followed: bool, reason: EndReason, status: RunStatus) -> u8 {
    match reason {
        EndReason::Completed | EndReason::Cancelled => {
            if followed {
                out.say(format!("run {status}"));
            }
            0
        }
        EndReason::Incomplete => {
            out.say(format!("run {status}; the last log lines did not arrive, ask again later"));
            PARTIAL
        }
        other => {
            out.say(format!("the log ended early: {}", serde_json::to_string(&other).unwrap_or_default()));
            PARTIAL
        }
    }
}

/// Tells statuses until the run has ended; exit code 1 when it did not succeed.
pub(crate) async fn watch(out: &Output, client: &Client, run: RunId) -> Result<u8, Failure> {
    let request = FollowRequest { follow: true, statuses_only: true, ..FollowRequest::default() };
    let mut follow = client.follow(run, request);
    let mut names = BTreeMap::new();
    let mut outcome = None;
    while let Some(event) = follow.next().await {
        let event = event?;
        if out.format != Format::Table {
            out.json_line(&event)?;
        } else if let Some(line) = status_line(&mut names, &event) {
            out.print(&line)?;
        }
        if let FollowEvent::End { status, .. } = event {
            outcome = Some(status);
        }
    }
    Ok(if outcome == Some(RunStatus::Success) { 0 } else { FAILED })
}

fn status_line(names: &mut BTreeMap<JobId, String>, event: &FollowEvent) -> Option<String> {
    Some(match event {
        FollowEvent::Run { status, .. } => format!("run {status}"),
        FollowEvent::Job { job_id, name, status, agent_id, reason } => {
            names.insert(*job_id, printable(name));
            let agent = agent_id.as_ref().map(|agent| format!(" on {agent}")).unwrap_or_default();
            let reason = reason.as_ref().map(|reason| format!(": {}", printable(reason))).unwrap_or_default();
            format!("job {} {status}{agent}{reason}", printable(name))
        }
        FollowEvent::Step { job_id, name, status, .. } => {
            let job = names.get(job_id).map_or("?", String::as_str);
            format!("  {job}: {} {status}", printable(name))
        }
        FollowEvent::Lines { .. } | FollowEvent::Alive {} | FollowEvent::End { .. } => return None,
    })
}
