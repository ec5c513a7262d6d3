//! The bytes: `PUT /objects/v1/uploads/ID` and `GET /objects/v1/blobs/KEY`. The signature in the query is all that lets anybody in;
//! it is never logged. Nothing is held in memory but a few pieces.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, put};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use kici_api::problem::{Code, Problem};
use kici_blobs::{BlobError, Blobs};
use kici_engine::ids::UploadId;
use kici_engine::time::Clock;
use kici_store::Store;
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::urls::{BadUrl, PUT_LIFE, ROOT, Signer, Verb};

/// Transfers at once, each way.
const MAX_TRANSFERS: usize = 64;
/// A sender that sends nothing for this long is gone.
const IDLE: Duration = Duration::from_secs(60);
/// Attempts at one upload.
const MAX_ATTEMPTS: u32 = 16;
/// A client that finds no room comes back after this long, in seconds.
const BUSY_RETRY_S: u32 = 2;

/// What the routes need.
#[derive(Clone)]
pub(crate) struct Transfers {
    store: Store,
    blobs: Blobs,
    clock: Arc<dyn Clock>,
    signer: Arc<Signer>,
    up: Arc<Semaphore>,
    down: Arc<Semaphore>,
}

impl Transfers {
    /// With room for a fixed number of transfers.
    pub(crate) fn new(store: Store, blobs: Blobs, clock: Arc<dyn Clock>, signer: Arc<Signer>) -> Self {
        let room = || Arc::new(Semaphore::new(MAX_TRANSFERS));
        Self { store, blobs, clock, signer, up: room(), down: room() }
    }

    fn let_in(&self, verb: Verb, name: &str, query: Option<&str>) -> Result<(), Problem> {
        let of = |key: &str| query?.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        let expires = of("expires").and_then(|text| text.parse().ok());
        let (Some(expires), Some(signature)) = (expires, of("signature")) else {
            return Err(Problem::new(Code::AuthMissing, "the address is not signed"));
        };
        match self.signer.check(verb, name, expires, signature, self.clock.now()) {
            Ok(()) => Ok(()),
            Err(BadUrl::Forged) => Err(Problem::new(Code::AuthInvalid, "the signature of the address is not good")),
            Err(BadUrl::Expired) => Err(Problem::new(Code::Gone, "the address has expired; ask for a new one")),
        }
    }
}

/// The routes.
pub(crate) fn router(transfers: Transfers) -> Router {
    Router::new()
        .route(&format!("{ROOT}/uploads/{{id}}"), put(send))
        .route(&format!("{ROOT}/blobs/{{*key}}"), get(fetch))
        .layer(DefaultBodyLimit::disable())
        .with_state(transfers)
}

fn room(semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Problem> {
    let busy = |_| Problem::unavailable("too many transfers are under way; try again", BUSY_RETRY_S);
    Arc::clone(semaphore).try_acquire_owned().map_err(busy)
}

fn unavailable(error: &dyn std::fmt::Display) -> Problem {
    tracing::warn!(%error, "a transfer failed");
    Problem::unavailable("the object store or the database cannot be used now; try again", BUSY_RETRY_S)
}

/// Receives an upload whole, or not at all.
async fn send(
    State(transfers): State<Transfers>,
    Path(name): Path<String>,
    request: axum::extract::Request,
) -> Result<StatusCode, Problem> {
    transfers.let_in(Verb::Put, &name, request.uri().query())?;
    let id: UploadId = name.parse().map_err(|_| Problem::not_found("upload"))?;
    let _room = room(&transfers.up)?;
    let taken = transfers.store.upload_take(id, MAX_ATTEMPTS).await.map_err(|error| unavailable(&error))?;
    let upload = taken.ok_or_else(|| Problem::new(Code::Gone, "the upload is over; begin a new one"))?;
    let too_large = || {
        let most = upload.max_bytes;
        Problem::new(Code::RequestTooLarge, format!("the archive is larger than the {most} bytes that are allowed"))
    };
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: u64| length > upload.max_bytes) {
        return Err(too_large());
    }
    let digest = Arc::new(std::sync::Mutex::new(Sha256::new()));
    let pieces = hashed(request.into_body().into_data_stream(), Arc::clone(&digest));
    let size = match transfers.blobs.put_stream(&upload.blob_key, pieces, upload.max_bytes).await {
        Ok(size) => size,
        Err(BlobError::TooLarge { .. }) => return Err(too_large()),
        Err(BlobError::Full(_)) => return Err(Problem::unavailable("the object store is full", 30)),
        Err(error) => return Err(unavailable(&error)),
    };
    let sha256 = {
        let digest = digest.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        hex::encode(digest.clone().finalize())
    };
    let noted = transfers.store.upload_received(id, upload.attempts, sha256, size).await;
    metrics::counter!("kici_orch_object_bytes_total", "direction" => "in").increment(size);
    match noted {
        Ok(true) => Ok(StatusCode::NO_CONTENT),
        Ok(false) => {
            // Nobody will ever point to it.
            if let Err(error) = transfers.blobs.delete(&upload.blob_key).await {
                tracing::warn!(%error, key = upload.blob_key, "an object that nobody needs stays");
            }
            Err(Problem::new(Code::Conflict, "the upload was completed meanwhile"))
        }
        Err(error) => Err(unavailable(&error)),
    }
}

/// The pieces of a body, counted into `digest`; ends with an error when nothing comes for a while.
fn hashed(
    body: BodyDataStream,
    digest: Arc<std::sync::Mutex<Sha256>>,
) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Send {
    futures::stream::unfold(Some(body), move |body| {
        let digest = Arc::clone(&digest);
        async move {
            let mut body = body?;
            match tokio::time::timeout(IDLE, body.next()).await {
                Ok(None) => None,
                Ok(Some(Ok(piece))) => {
                    digest.lock().unwrap_or_else(std::sync::PoisonError::into_inner).update(&piece);
                    Some((Ok(piece), Some(body)))
                }
                Ok(Some(Err(error))) => Some((Err(std::io::Error::other(error)), None)),
                Err(_) => Some((Err(std::io::ErrorKind::TimedOut.into()), None)),
            }
        }
    })
}

async fn fetch(
    State(transfers): State<Transfers>,
    Path(key): Path<String>,
    headers: HeaderMap,
    uri: http::Uri,
) -> Result<Response, Problem> {
    transfers.let_in(Verb::Get, &key, uri.query())?;
    let room = room(&transfers.down)?;
    serve(&transfers.blobs, &key, headers.get(header::RANGE), room).await
}

/// An object, or the part of it that is asked for, as the body of an answer.
pub(crate) async fn serve(
    blobs: &Blobs,
    key: &str,
    range: Option<&HeaderValue>,
    room: OwnedSemaphorePermit,
) -> Result<Response, Problem> {
    let size = blobs.size(key).await.map_err(|error| unavailable(&error))?;
    let size = size.ok_or_else(|| Problem::new(Code::Gone, "the object is no longer kept"))?;
    let part = match range.map(|value| wanted(value, size)) {
        None | Some(Wanted::Whole) => None,
        Some(Wanted::Part(part)) => Some(part),
        Some(Wanted::Nothing) => {
            let mut response = StatusCode::RANGE_NOT_SATISFIABLE.into_response();
            set(&mut response, header::CONTENT_RANGE, &format!("bytes */{size}"));
            return Ok(response);
        }
    };
    let stream = match &part {
        None => blobs.get_stream(key).await,
        Some(part) => blobs.get_range_stream(key, part.clone()).await,
    };
    let stream = match stream {
        Ok(stream) => stream,
        Err(BlobError::NotFound(_)) => return Err(Problem::new(Code::Gone, "the object is no longer kept")),
        Err(error) => return Err(unavailable(&error)),
    };
    // A reader that reads nothing does not keep its place for ever. The room is held until the last piece is taken.
    let over = tokio::time::sleep_until(Instant::now() + PUT_LIFE);
    let counted = stream.take_until(over).inspect(move |piece| {
        let _held = &room;
        if let Ok(piece) = piece {
            metrics::counter!("kici_orch_object_bytes_total", "direction" => "out").increment(piece.len() as u64);
        }
    });
    let length = part.as_ref().map_or(size, |part| part.end - part.start);
    let mut response = Body::from_stream(counted).into_response();
    if let Some(part) = part {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        set(&mut response, header::CONTENT_RANGE, &format!("bytes {}-{}/{size}", part.start, part.end - 1));
    }
    for (name, value) in [
        (header::CONTENT_TYPE, "application/zstd"),
        (header::ACCEPT_RANGES, "bytes"),
        (header::CACHE_CONTROL, "private, no-store"),
        (header::CONTENT_LENGTH, &*length.to_string()),
    ] {
        set(&mut response, name, value);
    }
    Ok(response)
}

fn set(response: &mut Response, name: header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

/// What a `Range` asks for (RFC 9110, 14.2).
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    /// Several ranges, or something that is none: the header does not count.
    Whole,
    /// These bytes.
    Part(Range<u64>),
    /// Bytes that there are not.
    Nothing,
}

fn wanted(range: &HeaderValue, size: u64) -> Wanted {
    let text = range.to_str().unwrap_or_default();
    let Some((first, last)) = text.strip_prefix("bytes=").and_then(|range| range.trim().split_once('-')) else {
        return Wanted::Whole;
    };
    match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if last < first => Wanted::Whole,
        (Ok(first), _) if first >= size => Wanted::Nothing,
        (Ok(first), Ok(last)) => Wanted::Part(first..last.saturating_add(1).min(size)),
        (Ok(first), Err(_)) if last.is_empty() => Wanted::Part(first..size),
        (Err(_), Ok(0)) if first.is_empty() => Wanted::Nothing,
        (Err(_), Ok(_)) if first.is_empty() && size == 0 => Wanted::Nothing,
        (Err(_), Ok(suffix)) if first.is_empty() => Wanted::Part(size.saturating_sub(suffix)..size),
        _ => Wanted::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_the_standard_has_them() {
        for (text, expected) in [
            ("bytes=0-9", Wanted::Part(0..10)),
            ("bytes=5-", Wanted::Part(5..100)),
            ("bytes=-10", Wanted::Part(90..100)),
            ("bytes=-1000", Wanted::Part(0..100)),
            ("bytes=90-1000", Wanted::Part(90..100)),
            ("bytes=100-", Wanted::Nothing),
            ("bytes=-0", Wanted::Nothing),
            ("bytes=9-5", Wanted::Whole),
            ("bytes=0-1,3-4", Wanted::Whole),
            ("bytes=x-", Wanted::Whole),
            ("lines=1-2", Wanted::Whole),
        ] {
            assert_eq!(wanted(&HeaderValue::from_static(text), 100), expected, "{text}");
        }
    }
}
