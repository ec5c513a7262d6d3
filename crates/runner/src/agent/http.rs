//! Health and metrics of a running agent, for a supervisor and a scraper on this host.

use std::io;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use kici_telemetry::metrics::Metrics;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::config::Listen;

/// How the agent is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Health {
    /// Its name.
    pub agent_id: String,
    /// It has a session with the orchestrator.
    pub connected: bool,
    /// Jobs that it holds.
    pub active_jobs: usize,
    /// Why it takes no work, in words; empty when it does.
    pub not_ready: Vec<String>,
}

struct Shared {
    health: watch::Receiver<Health>,
    metrics: Option<Metrics>,
}

/// Opens the port. A port that nobody asked for may be taken, by a second agent on the host: then nothing listens.
pub(super) async fn bind(listen: Option<Listen>) -> io::Result<Option<TcpListener>> {
    let Some(listen) = listen else { return Ok(None) };
    match TcpListener::bind(listen.address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if !listen.asked => {
            tracing::warn!(address = %listen.address, %error, "no health and metrics; set port to a free one, or to 0");
            Ok(None)
        }
        Err(error) => Err(io::Error::new(error.kind(), format!("port {}: {error}", listen.address))),
    }
}

/// Answers until the agent ends.
pub(super) async fn serve(listener: TcpListener, health: watch::Receiver<Health>, metrics: Option<Metrics>) {
    let router = Router::new()
        .route("/health", get(health_page))
        .route("/ready", get(ready_page))
        .route("/metrics", get(metrics_page))
        .with_state(Arc::new(Shared { health, metrics }));
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "health and metrics are not served any more");
    }
}

async fn health_page(State(shared): State<Arc<Shared>>) -> Json<Health> {
    Json(shared.health.borrow().clone())
}

async fn ready_page(State(shared): State<Arc<Shared>>) -> Response {
    let health = shared.health.borrow().clone();
    let ready = health.connected && health.not_ready.is_empty();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health)).into_response()
}

async fn metrics_page(State(shared): State<Arc<Shared>>) -> Response {
    match &shared.metrics {
        Some(metrics) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics.render()).into_response(),
        None => (StatusCode::NOT_FOUND, "this process keeps no metrics").into_response(),
    }
}
