//! `audit`.

use clap::Subcommand;
use kici_api::dto::audit::{AuditFilter, AuditView};
use kici_engine::ids::{JobId, RunId};
use serde_json::Value as Json;

use super::{Context, pages};
use crate::args::Paging;
use crate::exit::Failure;
use crate::output::{Column, optional, text};

/// Who got, or was refused, which secret
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List entries, newest first
    List {
        /// Only for this run
        #[arg(long)]
        run: Option<RunId>,
        /// Only for this job
        #[arg(long)]
        job: Option<JobId>,
        /// Only this action: git_credential.mint, git_credential.revoke
        #[arg(long)]
        action: Option<String>,
        /// Only this outcome
        #[arg(long, value_parser = ["allowed", "denied", "error"])]
        outcome: Option<String>,
        /// Only by this actor
        #[arg(long)]
        actor: Option<String>,
        #[command(flatten)]
        paging: Paging,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    let Verb::List { run, job, action, outcome, actor, paging } = verb;
    let filter = AuditFilter { run, job, action, outcome, actor, from: None, to: None };
    let page = pages(&paging, |page| {
        let (client, filter) = (&client, &filter);
        async move { client.audit(filter, &page).await }
    })
    .await?;
    out.page(&page, "no entries", &columns(context))?;
    Ok(0)
}

fn columns(context: &Context) -> Vec<Column<'_, AuditView>> {
    vec![
        ("TIME", Box::new(|entry| text(context.out.time(Some(entry.created_at))))),
        ("ACTOR", Box::new(|entry| text(&entry.actor))),
        ("ACTION", Box::new(|entry| text(&entry.action))),
        ("OUTCOME", Box::new(|entry| text(&entry.outcome))),
        ("SCOPE", Box::new(|entry| optional(entry.scope.as_ref()))),
        ("KEY", Box::new(|entry| optional(entry.key.as_ref()))),
        ("DETAIL", Box::new(|entry| text(detail(entry.metadata.as_ref())))),
    ]
}

/// What was granted, or why nothing was.
fn detail(metadata: Option<&Json>) -> String {
    let Some(metadata) = metadata else { return String::new() };
    if let Some(reason) = metadata.get("reason").and_then(Json::as_str) {
        return reason.to_owned();
    }
    let pairs = |name: &str| {
        let map = metadata.get(name)?.as_object()?;
        let pairs: Vec<String> =
            map.iter().map(|(name, level)| format!("{name}={}", level.as_str().unwrap_or_default())).collect();
        Some(pairs.join(" "))
    };
    match metadata.get("scoped").and_then(Json::as_bool) {
        Some(true) => pairs("granted").unwrap_or_default(),
        Some(false) => format!("static, asked for {}", pairs("requested").unwrap_or_default()),
        None => String::new(),
    }
}
