//! `POST /webhooks/…`: the door for deliveries. Verification and storing are `kici_events`'; this is only HTTP.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{ConnectInfo, Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kici_api::problem::{Code, Problem};
use kici_api::server::RequestId;
use kici_events::{Call, Inbox, Refusal, Route};
use kici_forge::Headers;
use serde_json::json;

use crate::adapters::Node;

/// A sender comes back after this long when there is no space, in seconds.
const FULL_RETRY_S: u32 = 30;

/// What the routes need.
#[derive(Clone)]
pub(crate) struct Intake {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) node: Arc<Node>,
    pub(crate) max_body_bytes: usize,
}

/// The routes; request ids are made by the layer around them.
pub(crate) fn router(intake: Intake) -> Router {
    Router::new()
        .route("/webhooks/github/{app}", post(github))
        .route("/webhooks/{org}/{source}", post(named))
        .with_state(intake)
}

async fn github(
    State(intake): State<Intake>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Extension(id): Extension<RequestId>,
    Path(app): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let app =
        app.parse().map_err(|_| Problem::not_found(format!("GitHub App `{app}` (the numeric id is asked for)")))?;
    intake.take(Route::Github { app }, peer, id, &headers, body).await
}

async fn named(
    State(intake): State<Intake>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Extension(id): Extension<RequestId>,
    Path((org, source)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    intake.take(Route::Named { org, source }, peer, id, &headers, body).await
}

impl Intake {
    async fn take(
        &self,
        route: Route,
        peer: SocketAddr,
        RequestId(request_id): RequestId,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Response, Problem> {
        // The last space is for the results of jobs that run already.
        if let Some(problem) = self.node.disk_problem() {
            let detail = format!("there is no space for deliveries: {problem}; free some and send it again");
            return Err(Problem::unavailable(detail, FULL_RETRY_S));
        }
        let body = match Limited::new(body, self.max_body_bytes).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                let detail = format!("the body is larger than {} bytes (ingest.max_body_bytes)", self.max_body_bytes);
                return Err(Problem::new(Code::RequestTooLarge, detail));
            }
            Err(_) => {
                let detail = "the body ended before it was complete; send it again";
                return Err(Problem::new(Code::RequestInvalid, detail));
            }
        };
        let headers = Headers::from(headers);
        let call = Call { route, headers, remote: Some(peer.ip()), body, request_id };
        let accepted = self.inbox.accept(call).await.map_err(refused)?;
        let document = json!({"delivery_id": accepted.id, "duplicate": accepted.duplicate});
        Ok((StatusCode::ACCEPTED, Json(document)).into_response())
    }
}

fn refused(refusal: Refusal) -> Problem {
    let detail = refusal.to_string();
    match refusal {
        Refusal::UnknownSource => Problem::new(Code::NotFound, detail),
        Refusal::BadSignature => {
            metrics::counter!("kici_orch_webhook_signature_failures_total").increment(1);
            Problem::new(Code::AuthInvalid, detail)
        }
        Refusal::Misconfigured(_) => {
            tracing::error!(detail, "a source cannot take deliveries");
            Problem::new(Code::Internal, detail)
        }
        Refusal::TooLarge { .. } => Problem::new(Code::RequestTooLarge, detail),
        Refusal::Busy { .. } => Problem { retry_after_s: Some(5), ..Problem::new(Code::StreamLimit, detail) },
        Refusal::Unavailable(error) => {
            tracing::error!(%error, "a delivery cannot be stored");
            Problem::unavailable("the delivery cannot be stored now; send it again", 10)
        }
    }
}
