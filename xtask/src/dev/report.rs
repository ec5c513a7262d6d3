//! What is said when runs are over, and when nothing ran.

use comfy_table::presets::NOTHING;
use comfy_table::{Cell, Color, ContentArrangement, Table};
use kici_api::dto::runs::{JobView, RunDetail};
use kici_engine::compile::compile_set;
use kici_engine::diagnostic::render_long;
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
    text(&table)
}

/// One line for a run.
pub(crate) fn verdict(screen: &Screen, detail: &RunDetail) -> String {
    let run = &detail.run;
    let took = span(Some(run.created_at), run.finished_at);
    let why = run.failure.as_ref().and_then(|failure| failure.message.as_deref());
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    // A run is named after its commit unless the workflow says otherwise.
    let title = if run.name == run.workflow { String::new() } else { format!(" \"{}\"", run.name) };
    format!("{}{title}: {} in {took}{why}  ({})", run.workflow, screen.status(run.status.as_str()), run.id)
}

/// Whether every run succeeded.
pub(crate) fn all_succeeded(runs: &[RunDetail]) -> bool {
    runs.iter().all(|detail| detail.run.status == RunStatus::Success)
}

/// Every mistake in files that do not compile, with the lines it is about.
pub(crate) fn mistakes(files: &[(String, String)], colour: bool) -> Vec<String> {
    let set = compile_set(files);
    let broken = files.iter().zip(&set.files).filter(|(_, (_, compiled))| compiled.has_errors());
    broken
        .flat_map(|((_, source), (_, compiled))| compiled.diagnostics.iter().map(move |each| (each, source)))
        .map(|(diagnostic, source)| render_long(diagnostic, source, colour).trim_end().to_owned())
        .collect()
}

/// Why a delivery of this status started nothing.
pub(crate) fn nothing(status: &str) -> &str {
    match status {
        "processed" => "no trigger matched",
        "workflow_invalid" => "the workflow files have mistakes",
        "lockfile_missing" => "the commit has no workflow files",
        other => other,
    }
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
    text(&table)
}

/// The table without the spaces that fill its last column.
fn text(table: &Table) -> String {
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mistake_of_a_broken_file_is_shown_with_its_line() {
        let good =
            (".kici/workflows/a.yaml".to_owned(), "on: push\njobs: { x: { runs_on: default, run: 'true' } }\n".into());
        let bad = (
            ".kici/workflows/b.yaml".to_owned(),
            "on: push\njobs:\n  x: { runs_on: default, runn: 'true' }\n  y: { needs: z, runs_on: default, run: 'true' }\n"
                .into(),
        );
        assert_eq!(mistakes(std::slice::from_ref(&good), false), Vec::<String>::new());
        let found = mistakes(&[good, bad], false);
        assert!(found.len() >= 2, "{found:#?}");
        assert!(found.iter().any(|text| text.contains("b.yaml:3") && text.contains("runn")), "{found:#?}");
        assert!(found.iter().any(|text| text.contains("b.yaml:4") && text.contains('z')), "{found:#?}");
    }
}
