//! The router. [`routes`] makes it over the ports; [`finish`] adds what every answer of the process needs (request ids,
//! problem documents, the panic handler), also around routes that are not part of this crate.

mod auth;
mod finish;
mod follow;
pub mod openapi;
mod request;
mod route;
mod routes;
mod sse;
mod streams;

use std::sync::Arc;

use axum::Router;
use axum::extract::FromRef;
use axum::routing::get;
use kici_access::{FailureLimiter, Recorder};
use kici_engine::time::Clock;

pub use auth::Session;
pub use finish::{RequestId, finish};
pub use route::Route;
pub use routes::table;

use crate::ports::Ports;

/// What the handlers share.
#[derive(Clone)]
pub struct ApiState {
    ports: Ports,
    clock: Arc<dyn Clock>,
    limiter: Arc<FailureLimiter>,
    recorder: Arc<Recorder>,
    slots: streams::Slots,
}

impl ApiState {
    /// State over `ports`. `clock` dates access-log entries and failed log-ins.
    pub fn new(ports: Ports, clock: Arc<dyn Clock>) -> Self {
        Self { ports, clock, limiter: Arc::default(), recorder: Arc::default(), slots: streams::Slots::default() }
    }
}

impl FromRef<ApiState> for Ports {
    fn from_ref(state: &ApiState) -> Self {
        state.ports.clone()
    }
}

/// `/api/v1/…`, `/health`, `/ready`, `/metrics` and `/`. Only `/api/v1` asks for a token. Wrap the result, merged with
/// other routes, in [`finish`].
pub fn routes(state: ApiState) -> Router {
    let api = table().into_iter().fold(Router::new(), |router, route| route.mount(router, &state));
    Router::new()
        .merge(api)
        .route("/", get(routes::system::root))
        .route("/health", get(routes::system::health))
        .route("/ready", get(routes::system::ready))
        .route("/metrics", get(routes::system::metrics))
        .with_state(state)
}
