//! `orchestrator`.

use std::time::Duration;

use clap::Subcommand;
use kici_api::client::Client;
use kici_api::dto::system::{Drain, DrainState};
use tokio::time::{Instant, sleep};

use super::Context;
use crate::args::duration;
use crate::exit::{Failure, VERDICT};
use crate::output::fields;

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
