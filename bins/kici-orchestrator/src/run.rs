//! The life of the process around the assembly.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use kici_control_plane::config::{Config, Layers};
use kici_control_plane::{Orchestrator, Surroundings, data_dir};
use kici_telemetry::{Service, TelemetryConfig};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::Cli;

/// Runs until a signal.
///
/// # Errors
/// When the configuration is wrong or a part does not start.
pub fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    let layers = cli.layers()?;
    let config = match Config::load(&layers) {
        Ok(config) => config,
        Err(error) => {
            // A supervisor that restarts at once would spin on a fault that only a person can mend.
            crate::complain(&error.into());
            let wait = backoff(&layers);
            if !wait.is_zero() {
                eprintln!("ends in {} s, so that a supervisor does not spin (startup.backoff_ms)", wait.as_secs_f32());
                std::thread::sleep(wait);
            }
            return Ok(ExitCode::FAILURE);
        }
    };
    kici_telemetry::init(&TelemetryConfig {
        service: Service::Orchestrator,
        instance_id: config.instance_id.clone().unwrap_or_default(),
        level: config.log_level.clone(),
        format: config.log_format.parse()?,
    })?;
    // The first provider that is installed wins; this is the only one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let around = Surroundings {
        clock: Arc::new(kici_sys::clock::SystemClock),
        ids: Arc::new(kici_sys::ids::SystemIds),
        metrics: kici_telemetry::metrics::install()?,
        data_dirs: data_dir::candidates(
            layers.variables.get("XDG_STATE_HOME").map(String::as_str),
            layers.variables.get("HOME").map(String::as_str),
        ),
        machine_id: kici_sys::host::machine_id().context("this machine has no identity")?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let orchestrator = Orchestrator::start(config, around).await?;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        orchestrator.stop().await;
        Ok(ExitCode::SUCCESS)
    })
}

/// `startup.backoff_ms`, read without the checks that have just failed.
fn backoff(layers: &Layers) -> std::time::Duration {
    let given = layers.variables.get("KICI_STARTUP_BACKOFF_MS").and_then(|text| text.parse().ok());
    std::time::Duration::from_millis(given.unwrap_or(30_000))
}
