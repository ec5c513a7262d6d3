//! `kici-agent doctor`: what is in force on this host and what is missing.

use std::process::ExitCode;

use kici_runner::config::Config;
use kici_runner::confine::Host;
use kici_runner::doctor::{self, State};
use kici_sys::clock::SystemClock;

/// Prints the findings. Fails when jobs cannot run.
pub fn run(config: &Config, json: bool) -> ExitCode {
    // Fails only when a provider is there already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let host = Host::look(config);
    let mut found = doctor::examine(config, &host);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(async {
            found.push(doctor::containers(config, &host).await);
            found.extend(doctor::orchestrator(config, &SystemClock).await);
        }),
        Err(error) => eprintln!("kici-agent: the orchestrator was not asked: {error}"),
    }
    if json {
        println!("{}", doctor::json(&found));
    } else {
        print!("{}", doctor::table(&found));
    }
    let broken = found.iter().any(|finding| finding.state == State::Broken);
    if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
