//! What the commands do, one module per group.

pub(crate) mod agent;
pub(crate) mod agent_token;
pub(crate) mod artifact;
pub(crate) mod audit;
mod bus;
pub(crate) mod cache;
pub(crate) mod event;
pub(crate) mod event_trust;
pub(crate) mod host;
pub(crate) mod orchestrator;
pub(crate) mod queue;
pub(crate) mod run;
mod run_logs;
pub(crate) mod schedule;
pub(crate) mod source;
pub(crate) mod token;
pub(crate) mod workflow;

use std::time::Duration;

use clap::CommandFactory;
use kici_api::client::{Client, ClientError};
use kici_api::dto::tokens::{TokenCreated, TokenRevoked};
use kici_api::page::{Page, PageQuery};

use crate::args::{Cli, Command, Global, Paging};
use crate::exit::Failure;
use crate::output::{Output, fields};
use crate::{connect, diagnose};

/// What a command works with.
pub(crate) struct Context {
    pub out: Output,
    global: Global,
    timeout: Duration,
}

impl Context {
    /// A client of the server that the options name. Made late: some commands need none.
    pub fn client(&self) -> Result<Client, Failure> {
        connect::client(&self.global, self.timeout)
    }
}

/// Runs the command and gives its exit code.
pub(crate) async fn run(cli: Cli) -> Result<u8, Failure> {
    let timeout = cli.global.timeout;
    let context = Context { out: Output::new(&cli.global), global: cli.global, timeout };
    match cli.command {
        Command::Run(verb) => run::run(&context, verb).await,
        Command::Source(verb) => source::run(&context, verb).await,
        Command::AgentToken(verb) => agent_token::run(&context, verb).await,
        Command::Token(verb) => token::run(&context, verb).await,
        Command::Agent(verb) => agent::run(&context, verb).await,
        Command::Host(verb) => host::run(&context, verb).await,
        Command::Event(verb) => event::run(&context, verb).await,
        Command::EventTrust(verb) => event_trust::run(&context, verb).await,
        Command::Schedule(verb) => schedule::run(&context, verb).await,
        Command::Registration(verb) => schedule::registration(&context, verb).await,
        Command::Queue(verb) => queue::run(&context, verb).await,
        Command::Workflow(verb) => workflow::run(&context, verb).await,
        Command::Orchestrator(verb) => orchestrator::run(&context, verb).await,
        Command::Audit(verb) => audit::run(&context, verb).await,
        Command::Artifact(verb) => artifact::run(&context, verb).await,
        Command::Cache(verb) => cache::run(&context, verb).await,
        Command::Diagnose => diagnose::run(&context).await,
        Command::Completions { shell } => {
            // Into memory first: the generator panics when its reader goes away.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "kici-admin", &mut script);
            context.out.print(String::from_utf8_lossy(&script).trim_end())?;
            Ok(0)
        }
    }
}

/// The page that is asked for, or all of them as one.
pub(crate) async fn pages<T, F>(paging: &Paging, fetch: impl Fn(PageQuery) -> F) -> Result<Page<T>, ClientError>
where
    F: Future<Output = Result<Page<T>, ClientError>>,
{
    let limit = if paging.all { Some(kici_api::page::MAX_LIMIT) } else { paging.limit };
    let mut page = fetch(PageQuery { limit, cursor: paging.cursor.clone() }).await?;
    while paging.all && page.next_cursor.is_some() {
        let next = fetch(PageQuery { limit, cursor: page.next_cursor.take() }).await?;
        page.items.extend(next.items);
        page.next_cursor = next.next_cursor;
    }
    Ok(page)
}

/// A new token. For people it stands alone on stdout, so that it can be piped into a file.
fn token_created(out: &Output, created: &TokenCreated) -> Result<(), Failure> {
    out.say(format!("{} made; this is the only time the token is shown:", created.id));
    out.document(created, |_| created.token.expose().to_owned())
}

fn token_revoked(out: &Output, revoked: &TokenRevoked) -> Result<(), Failure> {
    out.document(revoked, |_| fields(&[("sessions closed", revoked.sessions_closed.to_string())]))
}
