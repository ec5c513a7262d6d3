//! `workflow`: works on files, without a server.

mod compile;
mod convert;
mod event;
mod explain;
mod files;
mod local;
mod validate;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kici_engine::schema::workflow_schema;

use super::Context;
use crate::exit::Failure;

/// Workflow files.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Check workflow files; exit 2 when one has errors
    Validate {
        /// A file, a folder of them, or a repository
        #[arg(default_value = ".")]
        path: PathBuf,
        /// Form of the diagnostics [default: long; json with --output json]
        #[arg(long)]
        format: Option<validate::DiagnosticFormat>,
    },
    /// Run workflows on this machine, on the files as they are; exit 1 when a job fails, 2 when nothing runs, 130 when
    /// interrupted
    Run(local::Run),
    /// Tell why each trigger matches an event or not; exit 2 when nothing would run
    Explain(explain::Explain),
    /// Write the lock document of a repository; exit 2 when a file has errors
    Compile(compile::Compile),
    /// Turn workflow files of other systems into KiCI's, with a report of what is lost; exit 2 when one is refused
    Convert(convert::Convert),
    /// Print the JSON Schema of workflow files, for editors
    Schema,
}

/// Where a repository is and what happened in it.
#[derive(Debug, Args)]
pub(crate) struct Repository {
    /// The repository
    #[arg(long, default_value = ".")]
    repo: PathBuf,
    /// The event file is a body as GitHub sends it, of this X-GitHub-Event
    #[arg(long, value_name = "EVENT")]
    kind: Option<String>,
    /// A file that the event changed, for filters by path; may be given again
    #[arg(long, value_name = "PATH")]
    changed: Vec<String>,
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    match verb {
        Verb::Schema => {
            let schema = serde_json::to_string_pretty(&workflow_schema());
            context.out.print(&schema.map_err(|error| Failure::other(error.to_string()))?)?;
            Ok(0)
        }
        Verb::Validate { path, format } => validate::run(&context.out, &path, format),
        Verb::Run(run) => local::run(&context.out, run).await,
        Verb::Explain(explain) => explain::run(&context.out, &explain),
        Verb::Compile(compile) => compile::run(&context.out, &compile),
        Verb::Convert(convert) => convert::run(&context.out, &convert),
    }
}
