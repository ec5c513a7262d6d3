//! The agent itself, from its settings to its end.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use kici_runner::agent::{Agent, signals};
use kici_runner::config::Config;
use kici_sys::clock::SystemClock;
use kici_telemetry::{Service, TelemetryConfig};

use crate::services::Sockets;

/// Runs until the agent is told to stop or cannot go on.
pub fn run(config: Config) -> anyhow::Result<ExitCode> {
    kici_sys::host::forget_variables(&["KICI_AGENT_TOKEN", "KICI_SCALER_CLAIM_CODE"]);
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
    let sockets = Arc::new(Sockets::of_this_program());
    let run =
        async { anyhow::Ok(Agent::run(config, Arc::new(SystemClock), signals()?, sockets, Some(metrics)).await?) };
    // On a worker, as all that it talks to: each word between two threads costs a wake-up.
    let ended = runtime.block_on(runtime.spawn(run))??;
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let Some(message) = ended.message {
        eprintln!("kici-agent: {message}");
    }
    Ok(ExitCode::from(ended.exit))
}
