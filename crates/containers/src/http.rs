//! One request and its answer, over a connection of its own: connecting to a local socket costs nothing, and nothing is shared
//! that could be left in a wrong state.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

/// Longest answer that is read as a whole.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// Limit of a request that works on what is there.
pub(crate) const SHORT: Duration = Duration::from_secs(60);

/// Why an engine did not do something.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// It does not answer.
    #[error("the container engine at {path} does not answer: {error}; is it running, and may the agent's user use it?")]
    NotReachable {
        /// Its socket.
        path: PathBuf,
        /// Why not.
        error: String,
    },
    /// It does not want to.
    #[error("{what}: {message}")]
    Refused {
        /// What was asked for.
        what: String,
        /// The status of HTTP.
        status: u16,
        /// Its own words.
        message: String,
    },
    /// It takes too long.
    #[error("{what}: no answer within {} s", .limit.as_secs())]
    TimedOut {
        /// What was asked for.
        what: String,
        /// The limit.
        limit: Duration,
    },
    /// It answers something that is no answer.
    #[error("{what}: the container engine answered what cannot be understood: {message}")]
    Protocol {
        /// What was asked for.
        what: String,
        /// What is wrong with it.
        message: String,
    },
}

impl EngineError {
    /// Whether what was asked about does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }

    /// Whether it is in use, or in the state already that was asked for.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { status: 304 | 409, .. })
    }
}

/// What is sent.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Nothing.
pub(crate) fn empty() -> Body {
    Full::new(Bytes::new()).map_err(|never| match never {}).boxed_unsync()
}

/// Bytes that are made while they are sent.
pub(crate) fn stream(bytes: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Body {
    use futures::TryStreamExt as _;
    StreamBody::new(bytes.map_ok(Frame::data)).boxed_unsync()
}

/// A request, named for errors.
pub(crate) struct Ask<'a> {
    pub(crate) what: &'a str,
    pub(crate) method: Method,
    /// With its query, without the version.
    pub(crate) path: String,
    pub(crate) headers: Vec<(header::HeaderName, String)>,
    pub(crate) body: Body,
    pub(crate) limit: Duration,
}

impl<'a> Ask<'a> {
    pub(crate) fn new(what: &'a str, method: Method, path: impl Into<String>) -> Self {
        Self { what, method, path: path.into(), headers: Vec::new(), body: empty(), limit: SHORT }
    }

    pub(crate) fn json(mut self, body: &Json) -> Self {
        self.headers.push((header::CONTENT_TYPE, "application/json".to_owned()));
        self.body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {}).boxed_unsync();
        self
    }

    pub(crate) fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }
}

/// The connection to a socket.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) socket: PathBuf,
    /// `/v1.41`, or nothing before it is known.
    pub(crate) prefix: String,
    tasks: TaskTracker,
    /// Requests that make something.
    making: TaskTracker,
}

impl Client {
    pub(crate) fn new(socket: &Path) -> Self {
        let making = TaskTracker::new();
        // Else nobody could wait for it to be empty; it takes requests all the same.
        making.close();
        Self { socket: socket.to_owned(), prefix: String::new(), tasks: TaskTracker::new(), making }
    }

    /// Sees a request to its end, also when nobody waits for it any more: an engine that has heard half of one may still do it,
    /// and what it then makes would come after everything was removed.
    pub(crate) async fn make(&self, what: &str, ask: Ask<'static>) -> Result<Bytes, EngineError> {
        let client = self.clone();
        let made = self.making.spawn(async move { client.bytes(ask).await });
        let gone = |error: tokio::task::JoinError| EngineError::Protocol {
            what: what.to_owned(),
            message: format!("the request was not seen to its end: {error}"),
        };
        made.await.map_err(gone)?
    }

    /// Waits until no request is under way any more that makes something.
    pub(crate) async fn settled(&self) {
        self.making.wait().await;
    }

    fn unreachable(&self, error: impl std::fmt::Display) -> EngineError {
        EngineError::NotReachable { path: self.socket.clone(), error: error.to_string() }
    }

    async fn send(&self, ask: Ask<'_>) -> Result<Response<Incoming>, EngineError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.unreachable(error))?;
        // It ends with the answer, or when what the answer became is dropped.
        self.tasks.spawn(connection.with_upgrades());
        let mut request = Request::builder().method(ask.method).uri(format!("{}{}", self.prefix, ask.path));
        request = request.header(header::HOST, "localhost");
        for (name, value) in ask.headers {
            request = request.header(name, value);
        }
        let request = request.body(ask.body).map_err(|error| EngineError::Protocol {
            what: ask.what.to_owned(),
            message: format!("the request cannot be made: {error}"),
        })?;
        sender.send_request(request).await.map_err(|error| self.unreachable(error))
    }

    /// The answer before its body; a refusal is an error.
    pub(crate) async fn open(&self, ask: Ask<'_>) -> Result<Response<Incoming>, EngineError> {
        let (what, limit) = (ask.what.to_owned(), ask.limit);
        let late = |_| EngineError::TimedOut { what: what.clone(), limit };
        let answer = timeout(limit, self.send(ask)).await.map_err(late)??;
        let status = answer.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(answer);
        }
        let body = timeout(limit, whole(answer)).await.map_err(late)?.unwrap_or_default();
        let text =
            serde_json::from_slice::<Json>(&body).ok().and_then(|body| Some(body["message"].as_str()?.to_owned()));
        let message = text.unwrap_or_else(|| format!("status {status}"));
        Err(EngineError::Refused { what, status: status.as_u16(), message })
    }

    /// The whole body of an answer.
    pub(crate) async fn bytes(&self, ask: Ask<'_>) -> Result<Bytes, EngineError> {
        let (what, limit) = (ask.what.to_owned(), ask.limit);
        let answer = self.open(ask).await?;
        let body =
            timeout(limit, whole(answer)).await.map_err(|_| EngineError::TimedOut { what: what.clone(), limit })?;
        body.map_err(|message| EngineError::Protocol { what, message })
    }

    /// An answer in JSON.
    pub(crate) async fn json<T: DeserializeOwned>(&self, ask: Ask<'_>) -> Result<T, EngineError> {
        let what = ask.what.to_owned();
        read(&what, &self.bytes(ask).await?)
    }
}

/// Reads an answer in JSON.
pub(crate) fn read<T: DeserializeOwned>(what: &str, body: &[u8]) -> Result<T, EngineError> {
    serde_json::from_slice(body)
        .map_err(|error| EngineError::Protocol { what: what.to_owned(), message: error.to_string() })
}

async fn whole(answer: Response<Incoming>) -> Result<Bytes, String> {
    let body = http_body_util::Limited::new(answer.into_body(), MAX_ANSWER_BYTES);
    body.collect().await.map(http_body_util::Collected::to_bytes).map_err(|error| error.to_string())
}

/// A part of a path or query, with everything else than letters and digits encoded (RFC 3986, 2.1).
pub(crate) fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte.into()),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_name_becomes_part_of_a_query() {
        assert_eq!(encode("reg:5000/a?b=c&d#e"), "reg%3A5000%2Fa%3Fb%3Dc%26d%23e");
    }
}
