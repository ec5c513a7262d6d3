//! `cargo xtask`: the project's own automation.
#![forbid(unsafe_code)]

mod bench;
mod chaos;
mod ci;
mod dev;
mod engines;
mod fuzz;
mod generated;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(bin_name = "cargo xtask", about = "Automation of the KiCI repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// From a checkout to a running CI: starts everything, runs a repository's workflows and shows the logs
    Dev(dev::Options),
    /// Every check and every test, as continuous integration runs them
    Ci,
    /// Every test on both databases; as root on Debian it installs what they need
    Test {
        /// Arguments for the test runner: a part of a test's name, `-p CRATE`, ...
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Rules that the compiler does not check: licences, crate arrows, migrations, sizes, documentation
    Tidy,
    /// Measures speed and size of release builds on both databases
    Bench(bench::Options),
    /// Feeds damaged input to what reads files and messages of strangers
    Fuzz(fuzz::Options),
    /// Kills, freezes and cuts off the programs of an installation under load, and checks that no job is lost or run twice
    Chaos(chaos::Options),
    /// Writes the generated files anew
    Gen,
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    match task {
        Task::Dev(options) => return Ok(ExitCode::from(dev::run(&workspace, &options)?)),
        Task::Ci => ci::run(&workspace)?,
        Task::Test { arguments } => test::run(&workspace, &arguments)?,
        Task::Tidy => tidy::run(&workspace)?,
        Task::Bench(options) => bench::run(&workspace, &options)?,
        Task::Fuzz(options) => fuzz::run(&workspace, &options)?,
        Task::Chaos(options) => return chaos::run(&workspace, &options),
        Task::Gen => generated::write(&workspace)?,
    }
    Ok(ExitCode::SUCCESS)
}
