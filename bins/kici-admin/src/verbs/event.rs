//! `event`.

use std::fmt::Write as _;
use std::io::Write as _;

use clap::Subcommand;
use kici_api::client::Client;
use kici_api::dto::bus::{DeadLetter, EventFilter, LetterId};
use kici_api::dto::events::{DeliveryFilter, DeliveryView, Discard, Explanation};
use kici_engine::diagnostic::{Diagnostic, render_short};
use kici_engine::ids::RunId;
use kici_engine::trigger::{Outcome, WorkflowDecision};

use super::{Context, bus, pages};
use crate::args::Paging;
use crate::exit::Failure;
use crate::output::{Column, Output, fields, optional, printable, status, text};

/// The event log and the dead letters.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List deliveries, or with --internal events of the internal bus, newest first
    List {
        /// Only this status
        #[arg(long)]
        status: Option<String>,
        /// Only this source
        #[arg(long)]
        source: Option<String>,
        /// Only this event
        #[arg(long)]
        event: Option<String>,
        /// Only this repository
        #[arg(long)]
        repo: Option<String>,
        /// Only deliveries whose sender's id holds this text
        #[arg(long)]
        delivery_id: Option<String>,
        /// Received since: RFC 3339, or an age such as 2h or 7d
        #[arg(long)]
        from: Option<String>,
        /// Received before: RFC 3339, or an age
        #[arg(long)]
        to: Option<String>,
        /// Only events of the internal bus; `--event` is then their name
        #[arg(long, conflicts_with_all = ["delivery_id", "from", "to"])]
        internal: bool,
        /// Only events of the internal bus that this run emitted, or that tell of it
        #[arg(long)]
        run: Option<RunId>,
        #[command(flatten)]
        paging: Paging,
    },
    /// Emit an event on the internal bus
    Emit(bus::Emit),
    /// Show a delivery or an event
    Show {
        /// Its id
        id: LetterId,
        /// Print its body as it was received, nothing else
        #[arg(long)]
        payload: bool,
    },
    /// Say why a delivery or an event started what it started
    Explain {
        /// Its id
        id: LetterId,
    },
    /// Work on a delivery again, or deliver an event again, as a new one
    Redeliver {
        /// Its id
        id: LetterId,
    },
    /// Deliveries and events that were given up
    #[command(subcommand)]
    Dlq(Dlq),
}

/// The dead letters.
#[derive(Debug, Subcommand)]
pub(crate) enum Dlq {
    /// List them, newest first
    List {
        #[command(flatten)]
        paging: Paging,
    },
    /// Count them
    Count,
    /// Try one again
    Retry {
        /// Its id
        id: LetterId,
    },
    /// Give one up
    Discard {
        /// Its id
        id: LetterId,
        /// Why; kept with it
        #[arg(long)]
        reason: String,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::List { status, source, event, repo, run, internal, paging, .. } if internal || run.is_some() => {
            bus::list(context, &client, EventFilter { name: event, status, source, repo, run }, &paging).await?;
        }
        Verb::List { status, source, event, repo, delivery_id, from, to, paging, .. } => {
            let from = from.as_deref().map(|text| out.instant(text)).transpose()?;
            let to = to.as_deref().map(|text| out.instant(text)).transpose()?;
            let filter = DeliveryFilter { status, source, event, repo, delivery_id, from, to };
            let page = pages(&paging, |page| {
                let (client, filter) = (&client, &filter);
                async move { client.deliveries(filter, &page).await }
            });
            out.page(&page.await?, "no deliveries", &columns(out))?;
        }
        Verb::Emit(emit) => bus::emit(context, &client, emit).await?,
        Verb::Show { id: LetterId::Event(id), payload } => bus::show(context, &client, id, payload).await?,
        Verb::Explain { id: LetterId::Event(id) } => bus::explain(context, &client, id).await?,
        Verb::Redeliver { id: LetterId::Event(id) } => {
            let emitted = client.redeliver_event(id).await?;
            out.document(&emitted, |_| emitted.event_id.to_string())?;
        }
        Verb::Show { id: LetterId::Delivery(id), payload: true } => {
            let body = client.delivery_payload(id).await?;
            std::io::stdout().write_all(&body)?;
        }
        Verb::Show { id: LetterId::Delivery(id), payload: false } => {
            let delivery = client.delivery(id).await?;
            out.document(&delivery, |out| show(out, &delivery))?;
        }
        Verb::Explain { id: LetterId::Delivery(id) } => {
            let explanation = client.explain_delivery(id).await?;
            out.document(&explanation, |out| explain(out, &explanation))?;
        }
        Verb::Redeliver { id: LetterId::Delivery(id) } => {
            let accepted = client.redeliver(id).await?;
            out.document(&accepted, |_| accepted.delivery_id.to_string())?;
        }
        Verb::Dlq(dlq) => dead_letters(out, &client, dlq).await?,
    }
    Ok(0)
}

async fn dead_letters(out: &Output, client: &Client, dlq: Dlq) -> Result<(), Failure> {
    match dlq {
        Dlq::List { paging } => {
            let page = pages(&paging, |page| async move { client.dead_letters(&page).await }).await?;
            out.page(&page, "no dead letters", &letters(out))
        }
        Dlq::Count => {
            let count = client.dead_letter_count().await?;
            out.document(&count, |_| count.count.to_string())
        }
        Dlq::Retry { id } => {
            let retried = client.retry_dead_letter(id).await?;
            out.document(&retried, |_| retried.id.to_string())
        }
        Dlq::Discard { id, reason } => {
            out.confirm(&format!("{id} will never start a run."))?;
            client.discard_dead_letter(id, &Discard { reason }).await?;
            out.say(format!("{id} discarded"));
            Ok(())
        }
    }
}

fn letters(out: &Output) -> Vec<Column<'_, DeadLetter>> {
    vec![
        ("ID", Box::new(|l| text(l.id))),
        ("KIND", Box::new(|l| text(&l.kind))),
        ("EVENT", Box::new(|l| text(&l.event))),
        ("SOURCE", Box::new(|l| optional(l.source.as_ref()))),
        ("REPOSITORY", Box::new(|l| optional(l.repo.as_ref()))),
        ("ATTEMPTS", Box::new(|l| text(l.attempts))),
        ("DEAD", Box::new(|l| text(out.time(l.dead_at)))),
        ("ERROR", Box::new(|l| optional(l.error.as_ref()))),
    ]
}

fn columns(out: &Output) -> Vec<Column<'_, DeliveryView>> {
    vec![
        ("DELIVERY", Box::new(|d| text(d.id))),
        ("STATUS", Box::new(|d| status(&d.status))),
        ("SOURCE", Box::new(|d| text(&d.source))),
        ("EVENT", Box::new(|d| text(event_name(d)))),
        ("REPOSITORY", Box::new(|d| optional(d.repo.as_ref()))),
        ("MATCHED", Box::new(|d| text(d.matched_count))),
        ("RECEIVED", Box::new(|d| text(out.time(Some(d.received_at))))),
        ("NOTE", Box::new(|d| text(d.error.as_deref().or(d.note.as_deref()).unwrap_or_default()))),
    ]
}

fn event_name(delivery: &DeliveryView) -> String {
    match &delivery.action {
        Some(action) => format!("{}.{action}", delivery.event),
        None => delivery.event.clone(),
    }
}

fn show(out: &Output, delivery: &DeliveryView) -> String {
    let time = |at: Option<_>| at.map(|at| out.time(Some(at))).unwrap_or_default();
    fields(&[
        ("delivery", delivery.id.to_string()),
        ("sender's id", delivery.delivery_id.clone()),
        ("status", delivery.status.clone()),
        ("source", format!("{} ({}, {})", delivery.source, delivery.provider, delivery.channel)),
        ("event", event_name(delivery)),
        ("repository", delivery.repo.clone().unwrap_or_default()),
        ("ref", delivery.git_ref.clone().unwrap_or_default()),
        ("commit", delivery.sha.clone().unwrap_or_default()),
        ("matched", delivery.matched_count.to_string()),
        ("first run", delivery.first_run_id.map(|id| id.to_string()).unwrap_or_default()),
        ("error", delivery.error.clone().unwrap_or_default()),
        ("note", delivery.note.clone().unwrap_or_default()),
        ("attempts", delivery.attempts.to_string()),
        ("next attempt", time(delivery.next_attempt_at)),
        ("body", format!("{} bytes, sha256 {}", delivery.payload_bytes, delivery.payload_sha256)),
        ("body left out", delivery.payload_omitted.clone().unwrap_or_default()),
        ("received", time(Some(delivery.received_at))),
        ("finished", time(delivery.finished_at)),
    ])
}

fn explain(out: &Output, explanation: &Explanation) -> String {
    let mut people = show(out, &explanation.delivery);
    let mistakes: Vec<_> = explanation.trace.iter().flat_map(mistakes).collect();
    if !mistakes.is_empty() {
        people.push_str(&format!("\n{}\n", mistakes.iter().map(|line| printable(line)).collect::<Vec<_>>().join("\n")));
    }
    people.push_str(&decisions(explanation.trace.as_ref()));
    for run in &explanation.runs {
        // Writing to a string does not fail.
        _ = write!(people, "\nstarted {} of {}: {}", run.run_id, printable(&run.workflow), run.status);
    }
    people
}

/// What a decision trace says of each workflow.
pub(super) fn decisions(trace: Option<&serde_json::Value>) -> String {
    let read = trace.and_then(|trace| {
        let workflows = trace.get("workflows").unwrap_or(trace);
        serde_json::from_value::<Vec<WorkflowDecision>>(workflows.clone()).ok()
    });
    match (read, trace) {
        (Some(decisions), _) => decisions.iter().map(|decision| format!("\n{}", decision_lines(decision))).collect(),
        // A trace of another version is shown as it is.
        (None, Some(trace)) => format!("\n{trace:#}\n"),
        (None, None) => "\nno decision trace: it is no longer kept, or matching was not reached\n".to_owned(),
    }
}

/// What is wrong with the workflow files, a line each.
fn mistakes(trace: &serde_json::Value) -> Vec<String> {
    let files = trace.get("files").and_then(serde_json::Value::as_array);
    let diagnostics = files.into_iter().flatten().filter_map(|file| file.get("diagnostics"));
    diagnostics
        .filter_map(|list| serde_json::from_value::<Vec<Diagnostic>>(list.clone()).ok())
        .flat_map(|list| list.iter().map(|each| render_short(each).trim_end().to_owned()).collect::<Vec<_>>())
        .collect()
}

pub(super) fn decision_lines(decision: &WorkflowDecision) -> String {
    let verdict = match &decision.outcome {
        Outcome::Matched { trigger, kind, note } => {
            let note = note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
            format!("runs: trigger {trigger} ({kind}) matched{note}")
        }
        Outcome::NotMatched => "does not run: no trigger matched".to_owned(),
        Outcome::NeedsFiles => "undecided: the changed files are not known".to_owned(),
    };
    let mut lines = format!("{} {}\n", printable(&decision.workflow), printable(&verdict));
    for trigger in &decision.triggers {
        // Writing to a string does not fail.
        _ = writeln!(lines, "  trigger {} ({})", trigger.trigger, trigger.kind);
        for check in &trigger.checks {
            let mark = if check.passed { "ok " } else { "NO " };
            let note = check.note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
            let line = format!("{}: wants {}, is {}{note}", check.check, check.expected, check.actual);
            _ = writeln!(lines, "    {mark} {}", printable(&line));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use kici_engine::compile::compile_set;
    use serde_json::json;

    use super::*;

    #[test]
    fn every_mistake_of_a_file_is_in_the_explanation() {
        let text = "on: push\njobs:\n  x: { runs_on: default, runn: 'true' }\n  y: { needs: z, runs_on: default, run: 'true' }\n";
        let set = compile_set(&[(".kici/workflows/a.yaml".to_owned(), text.to_owned())]);
        let trace = json!({ "files": [{ "path": "a", "diagnostics": set.files[0].1.diagnostics }], "workflows": [] });
        let found = mistakes(&trace);
        assert!(found.iter().any(|line| line.contains("a.yaml:3") && line.contains("runn")), "{found:#?}");
        assert!(found.iter().any(|line| line.contains("a.yaml:4")), "{found:#?}");
        assert_eq!(mistakes(&json!([])), Vec::<String>::new());
    }
}
