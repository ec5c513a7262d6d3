//! `event-trust`.

use clap::Subcommand;
use kici_api::dto::bus::{AddEventTrust, EventTrustView, RepoRef, TestEventTrust};
use kici_engine::ids::TrustId;

use super::Context;
use crate::exit::Failure;
use crate::output::{Column, Output, text};

/// Which repositories may start workflows of others by events.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List what is said, by repository
    List,
    /// Let events of one repository start workflows of another one
    Add {
        /// The repository that emits
        #[arg(long, value_name = "SOURCE:OWNER/NAME", value_parser = place)]
        source: RepoRef,
        /// The repository whose workflows start
        #[arg(long, value_name = "SOURCE:OWNER/NAME", value_parser = place)]
        target: RepoRef,
        /// Only events whose name fits this pattern; may be given again [default: all]
        #[arg(long, value_name = "PATTERN")]
        event: Vec<String>,
    },
    /// Take that back; it counts for events that are not delivered yet
    Remove {
        /// Its id
        id: TrustId,
    },
    /// Ask whether an event may; exit 0 when it may, 1 when not
    Test {
        /// The repository that emits
        #[arg(long, value_name = "SOURCE:OWNER/NAME", value_parser = place)]
        source: RepoRef,
        /// The repository whose workflows would start
        #[arg(long, value_name = "SOURCE:OWNER/NAME", value_parser = place)]
        target: RepoRef,
        /// Name of the event
        #[arg(long)]
        event: String,
    },
}

fn place(text: &str) -> Result<RepoRef, String> {
    match text.split_once(':') {
        Some((source, repo)) if !source.is_empty() && repo.contains('/') => {
            Ok(RepoRef { source: source.to_owned(), repo: repo.to_owned() })
        }
        _ => Err("expected SOURCE:OWNER/NAME, for example gh:acme/app".to_owned()),
    }
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::List => out.page(
            &client.event_trust().await?,
            "no repository may start workflows of another source",
            &columns(out),
        )?,
        Verb::Add { source, target, event } => {
            let events = (!event.is_empty()).then_some(event);
            let added = client.add_event_trust(&AddEventTrust { source, target, events }).await?;
            out.document(&added, |_| added.id.to_string())?;
        }
        Verb::Remove { id } => {
            client.remove_event_trust(id).await?;
            out.say(format!("{id} removed"));
        }
        Verb::Test { source, target, event } => {
            let verdict = client.test_event_trust(&TestEventTrust { source, target, event }).await?;
            let word = if verdict.allowed { "allowed" } else { "refused" };
            out.document(&verdict, |_| format!("{word}: {}", verdict.reason))?;
            return Ok(u8::from(!verdict.allowed));
        }
    }
    Ok(0)
}

fn columns(out: &Output) -> Vec<Column<'_, EventTrustView>> {
    vec![
        ("TRUST", Box::new(|t| text(t.id))),
        ("SOURCE", Box::new(|t| text(&t.source))),
        ("TARGET", Box::new(|t| text(&t.target))),
        ("EVENTS", Box::new(|t| text(t.events.as_ref().map_or("all".to_owned(), |list| list.join(", "))))),
        ("BY", Box::new(|t| text(&t.created_by))),
        ("CREATED", Box::new(|t| text(out.time(Some(t.created_at))))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_named_with_its_source() {
        assert_eq!(place("gh:acme/app").unwrap().to_string(), "gh:acme/app");
        for wrong in ["acme/app", ":acme/app", "gh:app", "gh"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }
}
