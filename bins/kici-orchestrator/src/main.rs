//! The KiCI orchestrator: parses arguments, loads the configuration, runs the assembly, maps errors to exit codes.

#![forbid(unsafe_code)]

mod cli;
mod run;

use std::process::ExitCode;

use clap::Parser as _;
use kici_control_plane::config::Config;

use crate::cli::{Cli, Command, ConfigCommand};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        Some(Command::Config(ConfigCommand::Reference)) => {
            print(&kici_control_plane::config::reference_page());
            ExitCode::SUCCESS
        }
        Some(Command::Config(ConfigCommand::Check)) => match cli.layers().and_then(|l| Ok(Config::load(&l)?)) {
            Ok(_) => {
                print("the configuration is valid\n");
                ExitCode::SUCCESS
            }
            Err(error) => {
                complain(&error);
                ExitCode::from(2)
            }
        },
        None | Some(Command::Run) => run::run(&cli).unwrap_or_else(|error| {
            complain(&error);
            ExitCode::FAILURE
        }),
    }
}

/// Writes to standard output; a reader that went away is no error of ours.
fn print(text: &str) {
    use std::io::Write as _;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// One line per cause on standard error.
fn complain(error: &anyhow::Error) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "error: {error:#}");
}
