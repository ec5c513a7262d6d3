//! The typed client.
//!
//! The program installs a rustls crypto provider before it makes a client.

/// A path below one of the two roots.
macro_rules! path {
    ($root:expr $(, $segment:expr)*) => { &[$root[0], $root[1], $root[2] $(, $segment)*][..] };
}

mod bus;
mod follow;
mod resources;
mod stored;
mod terminal;

use std::time::Duration;

use reqwest::{Certificate, Method, RequestBuilder, Response};
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde::de::DeserializeOwned;
use url::{Host, Url};

pub use follow::Follow;
pub use stored::Download;
pub use terminal::for_terminal;

use crate::problem::Problem;

/// How to reach a server.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The server, without `/api/v1`.
    pub url: Url,
    /// The admin token.
    pub token: Option<SecretString>,
    /// Limit for one answer; streams have none.
    pub timeout: Duration,
    /// Certificates in PEM to trust besides the platform's.
    pub ca_pem: Option<Vec<u8>>,
    /// `name/version` of the program.
    pub user_agent: String,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server refused; its words, its code and the request's id.
    #[error("{} ({}, request {})", .0.detail, .0.code, .0.request_id)]
    Refused(Problem),
    /// No connection.
    #[error("{url} does not answer: {cause}; is the orchestrator running there?")]
    Unreachable {
        /// The server.
        url: Url,
        /// The deepest cause.
        cause: String,
    },
    /// A connection, but no answer in time.
    #[error("{url} did not answer within {} s", .timeout.as_secs())]
    Timeout {
        /// The server.
        url: Url,
        /// The limit.
        timeout: Duration,
    },
    /// Something answered, and not as this API does.
    #[error("{url} answered {status} and not as a KiCI orchestrator does; check the URL")]
    NotOurs {
        /// The server.
        url: Url,
        /// The HTTP status.
        status: u16,
    },
    /// The answer does not have the form that this version expects.
    #[error("the answer was not understood ({cause}); are client and server of the same version?")]
    Undecodable {
        /// What is wrong with it.
        cause: String,
    },
    /// The client could not be made.
    #[error("the client could not be set up: {0}")]
    Setup(String),
}

impl ClientError {
    /// The server's problem document, when it sent one.
    pub const fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused(problem) => Some(problem),
            _ => None,
        }
    }

    /// True when the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Refused(problem) => matches!(problem.status, 429 | 500 | 502 | 503 | 504),
            Self::Unreachable { .. } | Self::Timeout { .. } => true,
            Self::NotOurs { status, .. } => matches!(status, 502..=504),
            Self::Undecodable { .. } | Self::Setup(_) => false,
        }
    }
}

/// A client of one server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    url: Url,
    token: Option<SecretString>,
    timeout: Duration,
}

/// No query, no body.
const NOTHING: [(); 0] = [];

impl Client {
    /// A client.
    ///
    /// # Errors
    /// [`ClientError::Setup`] when the certificates do not parse, the URL cannot be a base, or TLS cannot be set up.
    pub fn new(config: ClientConfig) -> Result<Self, ClientError> {
        let setup = |error: reqwest::Error| ClientError::Setup(deepest(&error));
        if config.url.cannot_be_a_base() || !matches!(config.url.scheme(), "http" | "https") {
            return Err(ClientError::Setup(format!("`{}` is not an http or https URL", config.url)));
        }
        let mut builder =
            reqwest::Client::builder().user_agent(&config.user_agent).connect_timeout(config.timeout.min(CONNECT));
        if is_loopback(&config.url) {
            // A proxy cannot reach our loopback.
            builder = builder.no_proxy();
        }
        if let Some(pem) = &config.ca_pem {
            builder = builder.tls_certs_merge(Certificate::from_pem_bundle(pem).map_err(setup)?);
        }
        let http = builder.build().map_err(setup)?;
        Ok(Self { http, url: config.url, token: config.token, timeout: config.timeout })
    }

    /// The server.
    pub const fn url(&self) -> &Url {
        &self.url
    }

    fn request(&self, method: Method, path: &[&str]) -> RequestBuilder {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        let request = self.http.request(method, url);
        match &self.token {
            Some(token) => request.bearer_auth(token.expose_secret()),
            None => request,
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, ClientError> {
        let response = request.send().await.map_err(|error| self.failed(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let retry_after_s = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        let text = response.bytes().await.unwrap_or_default();
        match serde_json::from_slice::<Problem>(&text) {
            Ok(problem) => Err(ClientError::Refused(Problem { retry_after_s, ..problem })),
            Err(_) => Err(ClientError::NotOurs { url: self.url.clone(), status: status.as_u16() }),
        }
    }

    fn failed(&self, error: &reqwest::Error) -> ClientError {
        let url = self.url.clone();
        if error.is_timeout() && !error.is_connect() {
            return ClientError::Timeout { url, timeout: self.timeout };
        }
        ClientError::Unreachable { url, cause: deepest(error) }
    }

    async fn decode<T: DeserializeOwned>(&self, response: Response) -> Result<T, ClientError> {
        let bytes = response.bytes().await.map_err(|error| self.failed(&error))?;
        serde_json::from_slice(&bytes).map_err(|error| ClientError::Undecodable { cause: error.to_string() })
    }

    async fn get<T: DeserializeOwned>(&self, path: &[&str], query: &impl Serialize) -> Result<T, ClientError> {
        let request = self.request(Method::GET, path).query(query).timeout(self.timeout);
        self.decode(self.send(request).await?).await
    }

    async fn post<T: DeserializeOwned>(&self, path: &[&str], body: &impl Serialize) -> Result<T, ClientError> {
        let request = self.request(Method::POST, path).json(body).timeout(self.timeout);
        self.decode(self.send(request).await?).await
    }

    async fn put<T: DeserializeOwned>(&self, path: &[&str], body: &impl Serialize) -> Result<T, ClientError> {
        let request = self.request(Method::PUT, path).json(body).timeout(self.timeout);
        self.decode(self.send(request).await?).await
    }

    async fn delete<T: DeserializeOwned>(&self, path: &[&str]) -> Result<T, ClientError> {
        let request = self.request(Method::DELETE, path).timeout(self.timeout);
        self.decode(self.send(request).await?).await
    }
}

/// Limit for a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// True when the URL names this machine.
pub fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// The last error of the chain says what happened; those before it say that something did.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(cause) = deepest.source() {
        deepest = cause;
    }
    deepest.to_string()
}
