//! `POST /webhooks/…`: the door for deliveries. Verification and storing are `kici_events`'; this is only HTTP.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kici_api::problem::{Code, Problem};
use kici_engine::ids::IdSource;
use kici_events::{Call, Inbox, Refusal, Route};
use kici_forge::Headers;
use serde_json::json;

/// What the routes need.
#[derive(Clone)]
pub(crate) struct Intake {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) ids: Arc<dyn IdSource>,
    pub(crate) max_body_bytes: usize,
}

/// The routes.
pub(crate) fn router(intake: Intake) -> Router {
    Router::new()
        .route("/webhooks/github/{app}", post(github))
        .route("/webhooks/{org}/{source}", post(named))
        .with_state(intake)
}

async fn github(
    State(intake): State<Intake>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(app): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    match app.parse() {
        Ok(app) => intake.take(Route::Github { app }, peer, headers, body).await,
        Err(_) => answer(Problem::rejected("app", "must be the numeric id of a GitHub App"), &intake.fresh_id()),
    }
}

async fn named(
    State(intake): State<Intake>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path((org, source)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    intake.take(Route::Named { org, source }, peer, headers, body).await
}

impl Intake {
    fn fresh_id(&self) -> String {
        self.ids.uuid().to_string()
    }

    /// The caller's request id where it is harmless, else a fresh one.
    fn request_id(&self, headers: &HeaderMap) -> String {
        let legal = |text: &&str| {
            (1..=128).contains(&text.len())
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        };
        let given = headers.get("x-request-id").and_then(|value| value.to_str().ok()).filter(legal);
        given.map_or_else(|| self.fresh_id(), str::to_owned)
    }

    async fn take(&self, route: Route, peer: SocketAddr, headers: HeaderMap, body: Body) -> Response {
        let request_id = self.request_id(&headers);
        let body = match Limited::new(body, self.max_body_bytes).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                let detail = format!("the body is larger than {} bytes (ingest.max_body_bytes)", self.max_body_bytes);
                return answer(Problem::new(Code::RequestTooLarge, detail), &request_id);
            }
            Err(_) => {
                let detail = "the body ended before it was complete; send it again";
                return answer(Problem::new(Code::RequestInvalid, detail), &request_id);
            }
        };
        let headers = Headers::from(&headers);
        let remote = Some(peer.ip());
        let call = Call { route, headers, remote, body, request_id: request_id.clone() };
        match self.inbox.accept(call).await {
            Ok(accepted) => {
                let document = json!({"delivery_id": accepted.id, "duplicate": accepted.duplicate});
                let head = [("x-request-id", request_id)];
                (StatusCode::ACCEPTED, head, axum::Json(document)).into_response()
            }
            Err(refusal) => refused(&refusal, &request_id),
        }
    }
}

fn refused(refusal: &Refusal, request_id: &str) -> Response {
    let detail = refusal.to_string();
    let problem = match refusal {
        Refusal::UnknownSource => Problem::new(Code::NotFound, detail),
        Refusal::BadSignature => {
            metrics::counter!("kici_orch_webhook_signature_failures_total").increment(1);
            Problem::new(Code::AuthInvalid, detail)
        }
        Refusal::Misconfigured(_) => {
            tracing::error!(request_id, %refusal, "a source cannot take deliveries");
            Problem::new(Code::Internal, detail)
        }
        Refusal::TooLarge { .. } => Problem::new(Code::RequestTooLarge, detail),
        Refusal::Busy => {
            let mut problem = Problem::new(Code::StreamLimit, detail);
            problem.retry_after_s = Some(5);
            problem
        }
        Refusal::Unavailable(error) => {
            tracing::error!(request_id, %error, "a delivery cannot be stored");
            let mut problem = Problem::new(Code::Unavailable, "the delivery cannot be stored now; send it again");
            problem.retry_after_s = Some(10);
            problem
        }
    };
    answer(problem, request_id)
}

fn answer(mut problem: Problem, request_id: &str) -> Response {
    problem.request_id = request_id.to_owned();
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let retry_after = problem.retry_after_s;
    let mut response = (status, axum::Json(problem)).into_response();
    let headers = response.headers_mut();
    headers.insert("content-type", http::HeaderValue::from_static("application/problem+json"));
    if let Ok(value) = http::HeaderValue::from_str(request_id) {
        headers.insert("x-request-id", value);
    }
    if let Some(seconds) = retry_after {
        headers.insert("retry-after", seconds.into());
    }
    response
}
