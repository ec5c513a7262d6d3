//! What is said when runs are over, and when nothing ran.

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{Cell, Color, ContentArrangement, Table};
use kici_api::dto::runs::{JobView, RunDetail};
use kici_engine::state::{JobStatus, RunStatus};
use kici_engine::time::Ts;
use kici_engine::trigger::{Outcome, WorkflowDecision};

use super::screen::Screen;
use crate::ci::seconds;

/// One table over the jobs of all runs.
pub(crate) fn results(runs: &[RunDetail]) -> String {
    let mut table = table(&["workflow", "job", "status", "time", ""]);
    for detail in runs {
        for job in &detail.jobs {
            table.add_row([
                Cell::new(&detail.run.workflow),
                Cell::new(&job.name),
                status(job.status),
                Cell::new(span(job.started_at, job.finished_at)),
                Cell::new(remark(job)),
            ]);
        }
    }
    table.to_string()
}

/// One line for a run.
pub(crate) fn verdict(screen: &Screen, detail: &RunDetail) -> String {
    let run = &detail.run;
    let took = span(Some(run.created_at), run.finished_at);
    let why = run.failure.as_ref().and_then(|failure| failure.message.as_deref());
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    format!("{} {} in {took}{why}  ({})", run.name, screen.status(run.status.as_str()), run.id)
}

/// Whether every run succeeded.
pub(crate) fn all_succeeded(runs: &[RunDetail]) -> bool {
    runs.iter().all(|detail| detail.run.status == RunStatus::Success)
}

/// Why a workflow did not run: each of its triggers with the first filter that did not hold.
pub(crate) fn explanation(decisions: &[WorkflowDecision]) -> String {
    let mut table = table(&["workflow", "trigger", "filter", "wanted", "found"]);
    for decision in decisions {
        if matches!(decision.outcome, Outcome::Matched { .. }) {
            continue;
        }
        for trigger in &decision.triggers {
            for check in trigger.checks.iter().filter(|check| !check.passed) {
                let name = decision.workflow.clone();
                table.add_row([
                    name,
                    trigger.kind.clone(),
                    check.check.clone(),
                    check.expected.clone(),
                    check.actual.clone(),
                ]);
            }
        }
    }
    table.to_string()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic).set_header(header);
    table
}

fn status(status: JobStatus) -> Cell {
    let cell = Cell::new(status);
    match status {
        JobStatus::Success => cell.fg(Color::Green),
        _ if status.is_failure() => cell.fg(Color::Red),
        _ => cell.fg(Color::Yellow),
    }
}

fn remark(job: &JobView) -> String {
    let failure = job.failure.as_ref().map(|failure| match &failure.message {
        Some(message) => message.clone(),
        None => failure.reason.as_str().to_owned(),
    });
    failure.or_else(|| job.routing_reason.clone()).unwrap_or_default()
}

fn span(from: Option<Ts>, to: Option<Ts>) -> String {
    match (from, to) {
        (Some(from), Some(to)) => seconds(to.since(from)),
        _ => "-".into(),
    }
}
