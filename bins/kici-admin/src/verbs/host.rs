//! `host`.

use std::time::Duration;

use clap::Subcommand;
use kici_api::dto::hosts::{DeclareHost, HostEffect, HostFilter, HostView, PreviewHosts, RebootHost};
use kici_api::page::Page;
use kici_engine::hosts::OnUnreachable;
use kici_engine::ids::AgentId;
use serde_json::Value as Json;

use super::Context;
use crate::args::{duration, key_value, typed};
use crate::exit::Failure;
use crate::output::{Column, fields, optional, status, text};

/// Hosts.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Declare a host, or change what was declared; what is left out stays
    Declare {
        /// Id of its agent
        id: AgentId,
        /// Its name; stands above what its agent says
        #[arg(long)]
        hostname: Option<String>,
        /// Labels that its agent will have; they count until it registers
        #[arg(long, value_delimiter = ',')]
        labels: Option<Vec<String>>,
        /// A property; true, false and numbers are typed; may be given again
        #[arg(long = "prop", value_name = "KEY=VALUE", value_parser = key_value)]
        properties: Vec<(String, String)>,
        /// A property to remove; may be given again
        #[arg(long = "unset-prop", value_name = "KEY")]
        unset: Vec<String>,
    },
    /// List hosts
    List {
        /// Labels, globs, /regex/, status=, lifecycle=, property:KEY=VALUE; `,` and, `|` or, `!` not
        #[arg(long)]
        selector: Option<String>,
        /// Only hosts in this state: ready, unreachable or stale
        #[arg(long)]
        status: Option<String>,
    },
    /// Show one host
    Get {
        /// Id of its agent
        id: AgentId,
    },
    /// Remove a host that is not connected
    Remove {
        /// Id of its agent
        id: AgentId,
    },
    /// Announce that a host is about to restart: it gets no jobs until it is back. Restart it yourself
    Reboot {
        /// Id of its agent
        id: AgentId,
        /// It gets jobs again after this time even if it is not back: 10m, 1h
        #[arg(long, value_parser = duration)]
        deadline: Option<Duration>,
    },
    /// Call the restart of a host off
    CancelReboot {
        /// Id of its agent
        id: AgentId,
    },
    /// Show which hosts a `runs_on_all` job would go to now
    Preview {
        /// Labels, globs, /regex/; `,` and, `|` or, `!` not
        selector: String,
        /// What becomes of the job on a host that is out of contact: hold, skip or fail
        #[arg(long, default_value = "hold", value_parser = parse_policy)]
        on_unreachable: OnUnreachable,
        /// Also hosts whose agent never registered
        #[arg(long)]
        include_uninitialized: bool,
    },
}

fn parse_policy(word: &str) -> Result<OnUnreachable, String> {
    match word {
        "hold" => Ok(OnUnreachable::Hold),
        "skip" => Ok(OnUnreachable::Skip),
        "fail" => Ok(OnUnreachable::Fail),
        _ => Err("use hold, skip or fail".to_owned()),
    }
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::Declare { id, hostname, labels, properties, unset } => {
            let mut properties = typed("--prop", &properties)?;
            properties.extend(unset.into_iter().map(|key| (key, Json::Null)));
            let (host, created) = client.declare_host(&id, &DeclareHost { hostname, labels, properties }).await?;
            out.say(if created { "declared" } else { "changed" });
            show(context, &host)?;
        }
        Verb::List { selector, status } => {
            let status = status.map(|word| format!("status={word}"));
            let selector = match (selector, status) {
                // The condition holds for every alternative.
                (Some(selector), Some(status)) => Some(format!("{status},{selector}")),
                (selector, status) => selector.or(status),
            };
            let mut page = Page { items: Vec::new(), next_cursor: None };
            loop {
                let filter = HostFilter { selector: selector.clone(), limit: Some(1000), cursor: page.next_cursor };
                let next = client.hosts(&filter).await?;
                page.items.extend(next.items);
                page.next_cursor = next.next_cursor;
                if page.next_cursor.is_none() {
                    break;
                }
            }
            out.page(&page, "no hosts; declare one with `host declare`, or start an agent", &columns(context))?;
        }
        Verb::Get { id } => show(context, &client.host(&id).await?)?,
        Verb::Remove { id } => {
            out.confirm(&format!("Host {id} and its properties will be forgotten."))?;
            client.remove_host(&id).await?;
            out.say(format!("{id} removed"));
        }
        Verb::Reboot { id, deadline } => {
            let request = RebootHost { deadline_s: deadline.map(|span| span.as_secs()) };
            show(context, &client.reboot_host(&id, &request).await?)?;
        }
        Verb::CancelReboot { id } => show(context, &client.cancel_host_reboot(&id).await?)?,
        Verb::Preview { selector, on_unreachable, include_uninitialized } => {
            let request = PreviewHosts { selector, on_unreachable, include_uninitialized };
            let preview = client.preview_hosts(&request).await?;
            out.document(&preview, |out| out.table(&preview.hosts, &effects()))?;
            if let Some(note) = &preview.note {
                out.say(note);
            }
        }
    }
    Ok(0)
}

fn show(context: &Context, host: &HostView) -> Result<(), Failure> {
    let out = &context.out;
    let properties: Vec<String> = host.properties.iter().map(|(key, value)| format!("{key}={value}")).collect();
    out.document(host, |out| {
        fields(&[
            ("host", host.id.to_string()),
            ("status", host.status.to_string()),
            ("hostname", host.hostname.clone().unwrap_or_default()),
            ("labels", host.labels.join(", ")),
            ("automatic labels", host.automatic_labels.join(", ")),
            ("declared labels", host.declared_labels.clone().unwrap_or_default().join(", ")),
            ("properties", properties.join(", ")),
            ("lifecycle", host.lifecycle.to_string()),
            ("version", host.version.clone().unwrap_or_default()),
            ("last seen", out.time(host.last_seen_at)),
            ("restarts until", host.reboot_pending_until.map_or_else(String::new, |at| out.time(Some(at)))),
        ])
    })
}

fn effects() -> Vec<Column<'static, HostEffect>> {
    vec![
        ("HOST", Box::new(|h| text(&h.id))),
        ("STATUS", Box::new(|h| status(h.status.as_str()))),
        ("JOB", Box::new(|h| text(h.effect.as_str()))),
    ]
}

fn columns(context: &Context) -> Vec<Column<'_, HostView>> {
    vec![
        ("ID", Box::new(|h| text(&h.id))),
        ("STATUS", Box::new(|h| status(h.status.as_str()))),
        ("HOSTNAME", Box::new(|h| optional(h.hostname.as_ref()))),
        ("LABELS", Box::new(|h| text(h.labels.join(",")))),
        ("LIFECYCLE", Box::new(|h| text(h.lifecycle))),
        ("VERSION", Box::new(|h| optional(h.version.as_ref()))),
        ("LAST SEEN", Box::new(|h| text(context.out.time(h.last_seen_at)))),
    ]
}
