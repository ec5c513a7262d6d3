//! The operators' command line.

#![forbid(unsafe_code)]

mod args;
mod connect;
mod diagnose;
#[cfg(test)]
mod docs;
mod exit;
mod output;
mod verbs;

use std::process::ExitCode;

use args::Cli;
use exit::{Failure, USAGE};

fn main() -> ExitCode {
    let cli = match args::parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version go to stdout and are no fault.
            let code = if error.use_stderr() { USAGE } else { 0 };
            return if error.print().is_ok() { ExitCode::from(code) } else { ExitCode::FAILURE };
        }
    };
    match run(cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(),
    }
}

fn run(cli: Cli) -> Result<u8, Failure> {
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        return Err(Failure::other("TLS was set up twice"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::other(format!("the runtime cannot start: {error}")))?;
    runtime.block_on(verbs::run(cli))
}
