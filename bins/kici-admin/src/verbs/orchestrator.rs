//! `orchestrator`.

use std::time::Duration;

use clap::Subcommand;
use kici_api::client::Client;
use kici_api::dto::system::{Drain, DrainState, OrchestratorStatus, ReconcilerView};
use tokio::time::{Instant, sleep};

use super::Context;
use crate::args::duration;
use crate::exit::{Failure, VERDICT};
use crate::output::{Column, fields, optional, status, text};

/// How often a waiting drain looks.
const LOOK: Duration = Duration::from_secs(1);

/// The orchestrator itself.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Hand out no more jobs; running ones finish, new ones queue
    Drain {
        /// Shown in health and diagnosis
        #[arg(long)]
        reason: Option<String>,
        /// Wait until no job runs
        #[arg(long)]
        wait: bool,
        /// Give up waiting after this time; the node stays draining
        #[arg(long, default_value = "1h", value_parser = duration, requires = "wait")]
        wait_timeout: Duration,
        /// Only show the state
        #[arg(long, conflicts_with_all = ["wait", "reason"])]
        status: bool,
    },
    /// Hand out jobs again
    Resume,
    /// Whether it leads and drains, and how its background work is
    Status,
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let client = context.client()?;
    match verb {
        Verb::Drain { status: true, .. } => show(context, &client.drain_state().await?)?,
        Verb::Drain { reason, wait, wait_timeout, .. } => {
            let state = client.drain(&Drain { drain: true, reason }).await?;
            if wait {
                return wait_until_idle(context, &client, wait_timeout).await;
            }
            show(context, &state)?;
        }
        Verb::Status => show_status(context, &client.status().await?)?,
        Verb::Resume => show(context, &client.drain(&Drain { drain: false, reason: None }).await?)?,
    }
    Ok(0)
}

async fn wait_until_idle(context: &Context, client: &Client, limit: Duration) -> Result<u8, Failure> {
    let deadline = Instant::now() + limit;
    loop {
        let state = client.drain_state().await?;
        if state.jobs_running == 0 {
            show(context, &state)?;
            return Ok(0);
        }
        if Instant::now() >= deadline {
            show(context, &state)?;
            context.out.say(format!(
                "{} jobs still run and the node stays draining; `kici-admin orchestrator resume` lets it work again",
                state.jobs_running
            ));
            return Ok(VERDICT);
        }
        sleep(LOOK).await;
    }
}

fn show(context: &Context, state: &DrainState) -> Result<(), Failure> {
    context.out.document(state, |_| {
        fields(&[
            ("draining", if state.draining { "yes" } else { "no" }.to_owned()),
            ("reason", state.reason.clone().unwrap_or_default()),
            ("jobs running", state.jobs_running.to_string()),
        ])
    })
}

fn show_status(context: &Context, state: &OrchestratorStatus) -> Result<(), Failure> {
    context.out.document(state, |out| {
        let word = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
        let head = fields(&[
            ("instance", state.instance_id.clone()),
            ("leader", word(state.leader)),
            ("draining", word(state.drain.draining)),
            ("jobs running", state.drain.jobs_running.to_string()),
        ]);
        let columns: [Column<'_, ReconcilerView>; 8] = [
            ("BACKGROUND WORK", Box::new(|r| text(&r.name))),
            ("STATUS", Box::new(|r| status(condition(r)))),
            ("EVERY", Box::new(|r| text(format!("{} s", r.interval_ms / 1000)))),
            ("RUNS", Box::new(|r| text(r.runs))),
            ("FAILED", Box::new(|r| text(r.failures))),
            ("TOOK", Box::new(|r| optional(r.last_duration_ms.map(|ms| format!("{ms} ms")).as_ref()))),
            ("CHANGED", Box::new(|r| optional(r.last_changed.as_ref()))),
            ("LAST ERROR", Box::new(|r| optional(r.last_error.as_ref()))),
        ];
        format!("{head}\n{}", out.table(&state.reconcilers, &columns))
    })
}

/// One word for the last activation.
fn condition(reconciler: &ReconcilerView) -> &'static str {
    match reconciler {
        r if r.running => "running",
        r if r.last_error.is_some() => "failed",
        r if r.runs == 0 && r.leader_only => "standby",
        r if r.runs == 0 => "waiting",
        _ => "success",
    }
}
