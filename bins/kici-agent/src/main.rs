//! The agent: takes jobs from an orchestrator and runs them.

#![forbid(unsafe_code)]

mod arguments;
mod doctor;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kici_runner::agent::{Agent, signals};
use kici_runner::config::Config;
use kici_runner::session::EXIT_CONFIG;
use kici_sys::clock::SystemClock;
use kici_telemetry::{Service, TelemetryConfig};

fn main() -> ExitCode {
    kici_sys::host::private_files();
    let arguments = arguments::command().get_matches();
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
    run(config).unwrap_or_else(|error| {
        eprintln!("kici-agent: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(config: Config) -> anyhow::Result<ExitCode> {
    kici_sys::host::forget_variables(&["KICI_AGENT_TOKEN"]);
    kici_sys::host::set_dumpable(false)?;
    kici_sys::process::adopt_strays()?;
    kici_telemetry::init(&TelemetryConfig {
        service: Service::Agent,
        instance_id: config.agent_id.as_ref().map(ToString::to_string).unwrap_or_default(),
        level: config.log_level.clone(),
        format: config.log_format.parse()?,
    })?;
    let metrics = kici_telemetry::metrics::install()?;
    // Fails only when a provider is there already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).max_blocking_threads(8).thread_keep_alive(Duration::from_secs(10)).enable_all();
    let runtime = runtime.build()?;
    let ended = runtime
        .block_on(async { anyhow::Ok(Agent::run(config, Arc::new(SystemClock), signals()?, Some(metrics)).await?) })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let Some(message) = ended.message {
        eprintln!("kici-agent: {message}");
    }
    Ok(ExitCode::from(ended.exit))
}
