//! `cache`.

use clap::{Args, Subcommand};
use kici_api::dto::stored::{CacheFilter, CacheView, CachesDeleted, DeleteCaches, StoredKind};

use super::{Context, pages};
use crate::args::Paging;
use crate::exit::Failure;
use crate::output::{Column, optional, text};

/// Which entries.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Which {
    /// Only of this repository
    #[arg(long)]
    repo: Option<String>,
    /// Only keys that begin so
    #[arg(long)]
    key_prefix: Option<String>,
    /// Only in this scope
    #[arg(long, value_parser = ["shared", "isolated"])]
    scope: Option<String>,
}

/// Caches of workflows
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List entries, newest first
    List {
        /// Only with this key
        #[arg(long)]
        key: Option<String>,
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        paging: Paging,
    },
    /// Show how much is kept of caches and artifacts
    Stats,
    /// Remove entries, after asking
    Delete {
        /// Only with this key
        key: Option<String>,
        #[command(flatten)]
        which: Which,
        /// All caches, where nothing else says which
        #[arg(long)]
        all: bool,
        /// Only count what would be removed
        #[arg(long)]
        dry_run: bool,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::List { key, which, paging } => {
            let filter = CacheFilter { repo: which.repo, key, key_prefix: which.key_prefix, scope: which.scope };
            let page = pages(&paging, |page| {
                let (client, filter) = (&client, &filter);
                async move { client.caches(filter, &page).await }
            })
            .await?;
            out.page(&page, "no entries", &columns(context))?;
        }
        Verb::Stats => {
            let totals = client.stored_totals().await?;
            out.document(&totals, |out| out.table(&totals.kinds, &kinds(context)))?;
            if !totals.missing.is_empty() {
                out.say(format!("hits and misses of these are not counted in: {}", totals.missing.join(", ")));
            }
        }
        Verb::Delete { key, which, all, dry_run } => {
            let (repo, key_prefix, scope) = (which.repo, which.key_prefix, which.scope);
            let wanted = DeleteCaches { repo, key, key_prefix, scope, apply: false, all };
            let would = client.delete_caches(&wanted).await?;
            let about = counted(&would);
            if dry_run || would.entries == 0 {
                return out.document(&would, |_| format!("{about} would be removed")).map(|()| 0);
            }
            out.confirm(&format!("{about} will be removed."))?;
            let gone = client.delete_caches(&DeleteCaches { apply: true, ..wanted }).await?;
            out.document(&gone, |_| format!("{} removed", counted(&gone)))?;
        }
    }
    Ok(0)
}

fn counted(deleted: &CachesDeleted) -> String {
    let word = if deleted.entries == 1 { "entry" } else { "entries" };
    format!("{} {word} with {} bytes", deleted.entries, deleted.bytes)
}

fn columns(context: &Context) -> Vec<Column<'_, CacheView>> {
    vec![
        ("KEY", Box::new(|entry| text(&entry.key))),
        ("REPO", Box::new(|entry| text(&entry.repo))),
        ("SCOPE", Box::new(|entry| text(entry.scope))),
        ("RUN", Box::new(|entry| optional(entry.run_id.as_ref()))),
        ("BYTES", Box::new(|entry| text(entry.size))),
        ("SAVED", Box::new(|entry| text(context.out.time(Some(entry.created_at))))),
        ("READ", Box::new(|entry| text(context.out.time(Some(entry.last_read_at))))),
    ]
}

fn kinds(context: &Context) -> Vec<Column<'_, StoredKind>> {
    vec![
        ("KIND", Box::new(|kind| text(&kind.kind))),
        ("ENTRIES", Box::new(|kind| text(kind.objects))),
        ("BYTES", Box::new(|kind| text(kind.bytes))),
        ("QUOTA", Box::new(|kind| text(kind.quota_bytes))),
        ("OLDEST", Box::new(|kind| optional(kind.oldest_at.map(|at| context.out.time(Some(at))).as_ref()))),
        ("HITS", Box::new(|kind| text(kind.hits))),
        ("MISSES", Box::new(|kind| text(kind.misses))),
    ]
}
