//! The part of `event` that is about the internal bus.

use std::fmt::Write as _;
use std::io::Read as _;

use clap::Args;
use kici_api::client::Client;
use kici_api::dto::bus::{EmitEvent, EventDetail, EventFilter, EventView};
use kici_engine::ids::EventId;
use serde_json::Value as Json;

use super::event::decisions;
use super::{Context, pages};
use crate::args::Paging;
use crate::exit::Failure;
use crate::output::{Column, Output, fields, optional, printable, status, text};

/// What to emit.
#[derive(Debug, Args)]
pub(crate) struct Emit {
    /// Name of the event
    name: String,
    /// Its document: JSON, @FILE, or - for stdin [default: {}]
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,
    /// Emit on behalf of a repository of this source, so that trust counts [default: of nobody, which reaches all]
    #[arg(long)]
    source: Option<String>,
    /// That repository, owner/name; a local source has only one
    #[arg(long)]
    repo: Option<String>,
    /// Only for repositories that fit this pattern; may be given again
    #[arg(long, value_name = "PATTERN")]
    target: Vec<String>,
    /// The same key gives the same event
    #[arg(long)]
    idempotency_key: Option<String>,
}

/// Emits an event.
pub(super) async fn emit(context: &Context, client: &Client, emit: Emit) -> Result<(), Failure> {
    let payload = emit.payload.as_deref().map(document).transpose()?;
    let request =
        EmitEvent { name: emit.name, payload, source: emit.source, repo: emit.repo, target_repos: emit.target };
    let emitted = client.emit_event(&request, emit.idempotency_key.as_deref()).await?;
    context.out.document(&emitted, |_| emitted.event_id.to_string())
}

fn document(text: &str) -> Result<Json, Failure> {
    let read = match text.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file).map_err(|error| Failure::other(format!("{file}: {error}")))?,
        None if text == "-" => {
            let mut all = String::new();
            std::io::stdin().read_to_string(&mut all)?;
            all
        }
        None => text.to_owned(),
    };
    serde_json::from_str(&read).map_err(|error| Failure::usage(format!("--payload is not JSON: {error}")))
}

/// Lists events of the bus.
pub(super) async fn list(
    context: &Context,
    client: &Client,
    filter: EventFilter,
    paging: &Paging,
) -> Result<(), Failure> {
    let out = &context.out;
    let page = pages(paging, |page| {
        let filter = &filter;
        async move { client.events(filter, &page).await }
    });
    out.page(&page.await?, "no events", &columns(out))
}

/// Shows an event, or only its document.
pub(super) async fn show(context: &Context, client: &Client, id: EventId, payload: bool) -> Result<(), Failure> {
    let out = &context.out;
    if payload {
        let document = client.event_payload(id).await?;
        return out.document(&document, |_| format!("{document:#}"));
    }
    let detail = client.event(id).await?;
    out.document(&detail.event, |out| view(out, &detail.event))
}

/// Says why an event started what it started.
pub(super) async fn explain(context: &Context, client: &Client, id: EventId) -> Result<(), Failure> {
    let detail = client.event(id).await?;
    context.out.document(&detail, |out| explanation(out, &detail))
}

fn explanation(out: &Output, detail: &EventDetail) -> String {
    let mut people = view(out, &detail.event);
    people.push_str(&decisions(detail.trace.as_ref()));
    for run in &detail.runs {
        // Writing to a string does not fail.
        _ = write!(people, "\nstarted {} of {}: {}", run.run_id, printable(&run.workflow), run.status);
    }
    people
}

fn columns(out: &Output) -> Vec<Column<'_, EventView>> {
    vec![
        ("EVENT", Box::new(|e| text(e.id))),
        ("STATUS", Box::new(|e| status(&e.status))),
        ("NAME", Box::new(|e| text(&e.name))),
        ("REPOSITORY", Box::new(|e| optional(e.repo.as_ref()))),
        ("BY", Box::new(|e| text(&e.emitted_by))),
        ("RUNS", Box::new(|e| text(e.run_ids.len()))),
        ("CREATED", Box::new(|e| text(out.time(Some(e.created_at))))),
        ("NOTE", Box::new(|e| text(e.error.as_deref().or(e.note.as_deref()).unwrap_or_default()))),
    ]
}

fn view(out: &Output, event: &EventView) -> String {
    let time = |at: Option<_>| at.map(|at| out.time(Some(at))).unwrap_or_default();
    let id = |id: Option<String>| id.unwrap_or_default();
    fields(&[
        ("event", event.id.to_string()),
        ("name", event.name.clone()),
        ("status", event.status.clone()),
        ("source", event.source.clone().unwrap_or_default()),
        ("repository", event.repo.clone().unwrap_or_default()),
        ("emitted by", event.emitted_by.clone()),
        ("run", id(event.run_id.map(|id| id.to_string()))),
        ("job", id(event.job_id.map(|id| id.to_string()))),
        ("only for", id(event.registration_id.map(|id| id.to_string()))),
        ("targets", event.target_repos.join(", ")),
        ("chain depth", event.chain_depth.to_string()),
        ("matched", event.matched_count.to_string()),
        ("runs", event.run_ids.len().to_string()),
        ("attempts", event.attempts.to_string()),
        ("error", event.error.clone().unwrap_or_default()),
        ("note", event.note.clone().unwrap_or_default()),
        ("next attempt", time(event.next_attempt_at)),
        ("created", time(Some(event.created_at))),
        ("finished", time(event.finished_at)),
    ])
}
