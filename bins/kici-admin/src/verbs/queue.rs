//! `queue`.

use clap::Subcommand;
use kici_api::dto::queue::{AgentVerdict, QueueEntry, QueueFilter};
use kici_engine::ids::{JobId, RunId};
use kici_engine::state::QueueStatus;

use super::{Context, pages};
use crate::args::Paging;
use crate::exit::Failure;
use crate::output::{Column, fields, optional, status, text};

/// Jobs that wait for an agent.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List the queue
    List {
        /// Only this status [default: all that are open]
        #[arg(long)]
        status: Option<QueueStatus>,
        /// Only jobs of this run
        #[arg(long)]
        run: Option<RunId>,
        /// Only jobs that ask for this label
        #[arg(long)]
        label: Option<String>,
        #[command(flatten)]
        paging: Paging,
    },
    /// Show a row
    Show {
        /// The job
        job: JobId,
    },
    /// Say why a job waits, agent by agent
    Explain {
        /// The job
        job: JobId,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::List { status, run, label, paging } => {
            let filter = QueueFilter { status, run, label };
            let page = pages(&paging, |page| {
                let (client, filter) = (&client, &filter);
                async move { client.queue(filter, &page).await }
            });
            out.page(&page.await?, "nothing waits", &columns(context))?;
        }
        Verb::Show { job } => {
            let entry = client.queue_entry(job).await?;
            out.document(&entry, |_| show(context, &entry))?;
        }
        Verb::Explain { job } => {
            let explanation = client.explain_queue(job).await?;
            out.document(&explanation, |out| {
                let columns: [Column<'_, AgentVerdict>; 3] = [
                    ("AGENT", Box::new(|a| text(&a.agent_id))),
                    ("COULD RUN IT", Box::new(|a| status(if a.eligible { "yes" } else { "no" }))),
                    ("WHY", Box::new(|a| text(&a.reason))),
                ];
                format!(
                    "{}\n{}\n\n{}",
                    show(context, &explanation.entry),
                    explanation.verdict,
                    out.table(&explanation.agents, &columns)
                )
            })?;
        }
    }
    Ok(0)
}

fn columns(context: &Context) -> Vec<Column<'_, QueueEntry>> {
    vec![
        ("JOB ID", Box::new(|e| text(e.job_id))),
        ("WORKFLOW", Box::new(|e| text(&e.workflow))),
        ("JOB", Box::new(|e| text(&e.job))),
        ("STATUS", Box::new(|e| status(e.status.as_str()))),
        ("LABELS", Box::new(|e| text(e.labels.join(",")))),
        ("AGENT", Box::new(|e| optional(e.agent_id.as_ref()))),
        ("QUEUED", Box::new(|e| text(context.out.time(Some(e.created_at))))),
        ("REASON", Box::new(|e| optional(e.routing_reason.as_ref()))),
    ]
}

fn show(context: &Context, entry: &QueueEntry) -> String {
    let out = &context.out;
    let time = |at: Option<_>| at.map(|at| out.time(Some(at))).unwrap_or_default();
    fields(&[
        ("job", format!("{} ({})", entry.job, entry.job_id)),
        ("run", format!("{} of {}", entry.run_id, entry.workflow)),
        ("status", entry.status.to_string()),
        ("labels", entry.labels.join(", ")),
        ("exclude", entry.exclude.join(", ")),
        ("agent", entry.agent_id.clone().unwrap_or_default()),
        ("hand-overs", format!("{} ({} undone)", entry.epoch, entry.attempts)),
        ("reason", entry.routing_reason.clone().unwrap_or_default()),
        ("provisioning", entry.last_provisioning_error.clone().unwrap_or_default()),
        ("queued", time(Some(entry.created_at))),
        ("expires", time(entry.expires_at)),
        ("handed over", time(entry.dispatched_at)),
        ("answer due", time(entry.ack_deadline)),
        ("recovery ends", time(entry.recovery_deadline)),
        ("unroutable", time(entry.unroutable_since)),
    ])
}
