//! The agent: takes jobs from an orchestrator and runs them. Inside a job the same program is git's credential helper and the
//! command line of steps.

#![forbid(unsafe_code)]

mod arguments;
mod daemon;
mod doctor;
mod masks;
mod services;
mod stashes;
mod step;
mod step_stash;

use std::process::ExitCode;

use kici_runner::config::Config;
use kici_runner::session::EXIT_CONFIG;

fn main() -> ExitCode {
    let arguments = match arguments::called() {
        Ok(arguments) => arguments,
        Err(ended) => return ended,
    };
    kici_sys::host::private_files();
    let config = match Config::load(&arguments::sources(&arguments)) {
        Ok(config) => config,
        Err(problems) => {
            eprint!("kici-agent: {problems}");
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    if let Some(code) = arguments::answer(&arguments, &config) {
        return code;
    }
    daemon::run(config).unwrap_or_else(|error| {
        eprintln!("kici-agent: {error:#}");
        ExitCode::FAILURE
    })
}
