//! `POST /webhooks/…`: the door for deliveries. Verification and storing are `kici_events`'; this is only HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{ConnectInfo, Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kici_api::problem::{Code, Problem};
use kici_api::server::RequestId;
use kici_events::{Call, Inbox, Refusal, Route, body_limit};
use kici_forge::Headers;
use serde_json::json;
use tokio::sync::Semaphore;

use crate::adapters::Node;

/// A sender comes back after this long when there is no space, in seconds.
const FULL_RETRY_S: u32 = 30;

/// Bodies in memory that nobody has verified yet, in KiB: a full-sized one and many usual ones.
const UNVERIFIED_KIB: u32 = 96 * 1024;
/// How long a call waits for its share of them.
const SHARE_WAIT: Duration = Duration::from_secs(3);
/// How long a body may take to come.
const BODY_WAIT: Duration = Duration::from_secs(30);

/// What the routes need.
#[derive(Clone)]
pub(crate) struct Intake {
    inbox: Arc<Inbox>,
    node: Arc<Node>,
    max_body_bytes: usize,
    /// Of [`UNVERIFIED_KIB`].
    share: Arc<Semaphore>,
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
    pub(crate) fn new(inbox: Arc<Inbox>, node: Arc<Node>, max_body_bytes: usize) -> Self {
        Self { inbox, node, max_body_bytes, share: Arc::new(Semaphore::new(UNVERIFIED_KIB as usize)) }
    }

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
        let source = self.inbox.source(&route).await.map_err(refused)?;
        let own = body_limit(&source);
        let limit = self.max_body_bytes.min(own);
        let announced = body.size_hint().upper().unwrap_or(limit as u64);
        if announced > limit as u64 {
            // A sender that is cut off while it sends does not see the answer.
            let mut rest = Limited::new(body, self.max_body_bytes);
            let read = async { while let Some(Ok(_)) = rest.frame().await {} };
            let _ = tokio::time::timeout(BODY_WAIT, read).await;
            return Err(self.too_large(own));
        }
        // Whoever sends slowly holds his share for as long, and no more memory than that.
        let kib = u32::try_from(announced.div_ceil(1024)).unwrap_or(u32::MAX).clamp(1, UNVERIFIED_KIB);
        let share = tokio::time::timeout(SHARE_WAIT, self.share.acquire_many(kib)).await;
        let Ok(Ok(_share)) = share else { return Err(refused(Refusal::Busy { stored: false })) };
        let body = match tokio::time::timeout(BODY_WAIT, Limited::new(body, limit).collect()).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(self.too_large(own)),
            Ok(Err(_)) => {
                let detail = "the body ended before it was complete; send it again";
                return Err(Problem::new(Code::RequestInvalid, detail));
            }
            Err(_) => {
                let detail = format!("the body did not come within {} s; send it again", BODY_WAIT.as_secs());
                return Err(Problem::new(Code::RequestInvalid, detail));
            }
        };
        let headers = Headers::from(headers);
        let call = Call { route, headers, remote: Some(peer.ip()), body, request_id };
        let accepted = self.inbox.accept_for(source, call).await.map_err(refused)?;
        let document = json!({"delivery_id": accepted.id, "duplicate": accepted.duplicate});
        Ok((StatusCode::ACCEPTED, Json(document)).into_response())
    }

    /// `own` is the limit of the source.
    fn too_large(&self, own: usize) -> Problem {
        if own < self.max_body_bytes {
            return refused(Refusal::TooLarge { limit: own });
        }
        let detail = format!("the body is larger than {} bytes (ingest.max_body_bytes)", self.max_body_bytes);
        Problem::new(Code::RequestTooLarge, detail)
    }
}

fn refused(refusal: Refusal) -> Problem {
    let detail = refusal.to_string();
    match refusal {
        Refusal::UnknownSource => Problem::new(Code::NotFound, detail),
        Refusal::BadSignature => Problem::new(Code::AuthInvalid, detail),
        Refusal::Misconfigured(_) => {
            tracing::error!(detail, "a source cannot take deliveries");
            Problem::new(Code::SourceMisconfigured, detail)
        }
        Refusal::TooLarge { .. } => Problem::new(Code::RequestTooLarge, detail),
        Refusal::TooOften { retry_after, .. } => {
            let seconds = u32::try_from(retry_after.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1);
            Problem { retry_after_s: Some(seconds), ..Problem::new(Code::IngestRate, detail) }
        }
        Refusal::Busy { .. } => Problem { retry_after_s: Some(5), ..Problem::new(Code::IngestBusy, detail) },
        Refusal::Unavailable(error) => {
            tracing::error!(%error, "a delivery cannot be stored");
            Problem::unavailable("the delivery cannot be stored now; send it again", 10)
        }
    }
}
