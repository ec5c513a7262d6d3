//! `agent-token`.

use std::time::Duration;

use clap::Subcommand;
use kici_api::dto::tokens::{AgentTokenUse, AgentTokenView, CreateAgentToken};
use kici_engine::ids::{AgentId, TokenId};

use super::{Context, token_created, token_revoked};
use crate::args::duration;
use crate::exit::Failure;
use crate::output::{Column, optional, text};

/// Tokens that agents register with.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Make a token; it is shown once
    Create {
        /// The only labels its agents may offer; any when left out
        #[arg(long, value_delimiter = ',')]
        labels: Option<Vec<String>>,
        /// A label that jobs must ask for to run there; may be given again
        #[arg(long, value_name = "LABEL")]
        mandatory_label: Vec<String>,
        /// Its agents may run jobs as root
        #[arg(long)]
        privileged_root: bool,
        /// For one agent that does not live long; ends after 1h unless --expires says otherwise
        #[arg(long, conflicts_with = "bootstrap", requires = "agent_id")]
        ephemeral: bool,
        /// For one agent, once, within 10 minutes
        #[arg(long, requires = "agent_id")]
        bootstrap: bool,
        /// The one agent that may use it
        #[arg(long, value_name = "ID")]
        agent_id: Option<AgentId>,
        /// A remark for people
        #[arg(long)]
        note: Option<String>,
        /// Ends after this time: 12h, 30d
        #[arg(long, value_parser = duration)]
        expires: Option<Duration>,
    },
    /// List tokens
    List,
    /// Revoke a token and close the sessions of its agents
    Revoke {
        /// Its id
        id: TokenId,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::Create { labels, mandatory_label, privileged_root, ephemeral, bootstrap, agent_id, note, expires } => {
            let request = CreateAgentToken {
                labels,
                mandatory_labels: mandatory_label,
                privileged_root,
                kind: match (ephemeral, bootstrap) {
                    (true, _) => AgentTokenUse::Ephemeral,
                    (_, true) => AgentTokenUse::Bootstrap,
                    _ => AgentTokenUse::Static,
                },
                agent_id,
                note,
                expires_in_s: expires.map(|span| span.as_secs()),
            };
            token_created(out, &client.create_agent_token(&request).await?)?;
        }
        Verb::List => {
            out.page(
                &client.agent_tokens().await?,
                "no tokens; make one with `agent-token create`",
                &columns(context),
            )?;
        }
        Verb::Revoke { id } => {
            out.confirm(&format!("Agents with token {id} will be disconnected and cannot come back with it."))?;
            token_revoked(out, &client.revoke_agent_token(id).await?)?;
        }
    }
    Ok(0)
}

fn columns(context: &Context) -> Vec<Column<'_, AgentTokenView>> {
    vec![
        ("ID", Box::new(|t| text(t.id))),
        ("PREFIX", Box::new(|t| text(&t.prefix))),
        ("TYPE", Box::new(|t| text(if t.kind == "static" { &t.agent_type } else { &t.kind }))),
        ("AGENT", Box::new(|t| optional(t.agent_id.as_ref()))),
        ("LABELS", Box::new(|t| text(t.labels.as_ref().map_or_else(|| "any".to_owned(), |labels| labels.join(","))))),
        ("NOTE", Box::new(|t| optional(t.note.as_ref()))),
        ("LAST SEEN", Box::new(|t| text(context.out.time(t.last_seen_at)))),
        ("EXPIRES", Box::new(|t| text(context.out.time(t.expires_at)))),
        ("REVOKED", Box::new(|t| text(context.out.time(t.revoked_at)))),
    ]
}
