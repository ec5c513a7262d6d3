//! `token`.

use std::time::Duration;

use clap::Subcommand;
use kici_api::dto::tokens::{AdminTokenView, CreateAdminToken};
use kici_engine::ids::TokenId;

use super::{Context, token_created, token_revoked};
use crate::args::duration;
use crate::exit::Failure;
use crate::output::{Column, optional, text};

/// Tokens of operators and programs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Make a token; it is shown once
    Create {
        /// What it is for
        label: String,
        /// What it may do
        #[arg(long, value_parser = ["owner", "admin", "auditor"])]
        role: String,
        /// It sees only the runs and events of the source with this routing key
        #[arg(long)]
        routing_key: Option<String>,
        /// Ends after this time: 12h, 30d
        #[arg(long, value_parser = duration)]
        expires: Option<Duration>,
    },
    /// List tokens
    List,
    /// Revoke a token
    Revoke {
        /// Its id
        id: TokenId,
    },
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::Create { label, role, routing_key, expires } => {
            let expires_in_s = expires.map(|span| span.as_secs());
            let role = role.parse().map_err(|error| Failure::usage(format!("--role: {error}")))?;
            let request = CreateAdminToken { label, role, routing_key, expires_in_s };
            token_created(out, &client.create_admin_token(&request).await?)?;
        }
        Verb::List => out.page(&client.admin_tokens().await?, "no tokens", &columns(context))?,
        Verb::Revoke { id } => {
            out.confirm(&format!("Whoever uses token {id} will be locked out."))?;
            token_revoked(out, &client.revoke_admin_token(id).await?)?;
        }
    }
    Ok(0)
}

fn columns(context: &Context) -> Vec<Column<'_, AdminTokenView>> {
    vec![
        ("ID", Box::new(|t| text(t.id))),
        ("LABEL", Box::new(|t| text(&t.label))),
        ("PREFIX", Box::new(|t| text(&t.prefix))),
        ("ROLE", Box::new(|t| text(t.role))),
        ("SCOPE", Box::new(|t| optional(t.routing_key.as_ref()))),
        ("LAST USED", Box::new(|t| text(context.out.time(t.last_used_at)))),
        ("EXPIRES", Box::new(|t| text(context.out.time(t.expires_at)))),
        ("REVOKED", Box::new(|t| text(context.out.time(t.revoked_at)))),
    ]
}
