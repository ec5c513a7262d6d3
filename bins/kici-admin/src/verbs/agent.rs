//! `agent`.

use clap::Subcommand;
use kici_api::dto::agents::{AgentFilter, AgentStatus, AgentView, DrainAgent};
use kici_engine::ids::AgentId;

use super::Context;
use crate::exit::Failure;
use crate::output::{Column, fields, optional, status, text};

/// Agents.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List agents
    List {
        /// Only agents that offer this label
        #[arg(long)]
        label: Option<String>,
        /// Only agents in this state
        #[arg(long, value_parser = parse_status)]
        status: Option<AgentStatus>,
    },
    /// Give an agent no more work; it ends its jobs, then itself
    Drain {
        /// Its id
        id: AgentId,
        /// Shown in lists
        #[arg(long)]
        reason: Option<String>,
        /// Give it work again
        #[arg(long)]
        resume: bool,
    },
}

const STATUSES: [(&str, AgentStatus); 4] = [
    ("ready", AgentStatus::Ready),
    ("draining", AgentStatus::Draining),
    ("unreachable", AgentStatus::Unreachable),
    ("stale", AgentStatus::Stale),
];

fn parse_status(word: &str) -> Result<AgentStatus, String> {
    let found = STATUSES.iter().find(|(name, _)| *name == word).map(|(_, status)| *status);
    found.ok_or_else(|| "use ready, draining, unreachable or stale".to_owned())
}

fn status_word(agent: &AgentView) -> &'static str {
    STATUSES.iter().find(|(_, status)| *status == agent.status).map_or("?", |(name, _)| name)
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::List { label, status } => {
            let page = client.agents(&AgentFilter { label, status }).await?;
            out.page(
                &page,
                "no agents; make a token with `agent-token create` and start kici-agent with it",
                &columns(context),
            )?;
        }
        Verb::Drain { id, reason, resume } => {
            let agent = client.drain_agent(&id, &DrainAgent { drain: !resume, reason }).await?;
            out.document(&agent, |_| {
                fields(&[
                    ("agent", agent.id.to_string()),
                    ("status", status_word(&agent).to_owned()),
                    ("jobs", agent.jobs.len().to_string()),
                ])
            })?;
        }
    }
    Ok(0)
}

fn columns(context: &Context) -> Vec<Column<'_, AgentView>> {
    vec![
        ("ID", Box::new(|a| text(&a.id))),
        ("STATUS", Box::new(|a| status(status_word(a)))),
        ("JOBS", Box::new(|a| text(format!("{}/{}", a.jobs.len(), a.max_concurrency)))),
        (
            "PLATFORM",
            Box::new(|a| {
                text([a.platform.as_deref(), a.arch.as_deref()].into_iter().flatten().collect::<Vec<_>>().join("/"))
            }),
        ),
        ("VERSION", Box::new(|a| optional(a.version.as_ref()))),
        ("LABELS", Box::new(|a| text(a.labels.join(",")))),
        ("LAST SEEN", Box::new(|a| text(context.out.time(a.last_seen_at)))),
    ]
}
