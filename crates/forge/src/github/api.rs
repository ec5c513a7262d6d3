//! Calls to GitHub's REST interface: bounded answers, time-outs, waiting for rate limits.
//! <https://docs.github.com/en/rest/using-the-rest-api/best-practices-for-using-the-rest-api>

use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use kici_engine::time::Clock;
use reqwest::{Method, Response, StatusCode, header};
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use url::Url;

use crate::forge::ForgeError;

/// Time for one request.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Longest answer that is read. A compare of 300 files with patches stays far below.
const MAX_ANSWER: usize = 25 * 1024 * 1024;
/// Longest wait that the forge may ask for before we give up and let the caller come back later.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// How often and how patiently a call is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Wait before the first repetition; doubled each time.
    pub delay: Duration,
    /// Repetitions.
    pub times: usize,
}

impl Default for Retry {
    /// Three, after 1, 2 and 4 seconds.
    fn default() -> Self {
        Self { delay: Duration::from_secs(1), times: 3 }
    }
}

pub(super) struct Api {
    http: reqwest::Client,
    base: String,
    clock: Arc<dyn Clock>,
    pub retry: Retry,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("base", &self.base).finish_non_exhaustive()
    }
}

/// A failed try, and how long the forge wants us to wait.
struct Failure {
    error: ForgeError,
    wait: Option<Duration>,
}

impl Api {
    pub fn new(http: reqwest::Client, base: &str, clock: Arc<dyn Clock>) -> Self {
        Self { http, base: base.trim_end_matches('/').to_owned(), clock, retry: Retry::default() }
    }

    /// An address below the base. Parts may hold slashes; everything else is escaped.
    pub fn url(&self, parts: &[&str]) -> Result<Url, ForgeError> {
        let bad = || ForgeError::unavailable("GitHub", format!("`base_url` {} is not an address", self.base));
        let mut url = Url::parse(&self.base).map_err(|_| bad())?;
        let pieces = parts.iter().flat_map(|p| p.split('/'));
        url.path_segments_mut().map_err(|()| bad())?.pop_if_empty().extend(pieces);
        Ok(url)
    }

    /// Gets a JSON document.
    pub async fn get<T: DeserializeOwned>(&self, what: &str, url: Url, token: &SecretString) -> Result<T, ForgeError> {
        let response = self.send(what, Method::GET, url, token, None, JSON).await?;
        read_json(what, response).await
    }

    /// Gets a list with the address of its next page.
    pub async fn page<T: DeserializeOwned>(
        &self,
        what: &str,
        url: Url,
        token: &SecretString,
    ) -> Result<(T, Option<Url>), ForgeError> {
        let response = self.send(what, Method::GET, url, token, None, JSON).await?;
        let link = response.headers().get(header::LINK).and_then(|l| l.to_str().ok());
        let next = link.and_then(next_page).filter(|next| self.is_ours(next));
        Ok((read_json(what, response).await?, next))
    }

    /// Gets a file as it is, up to `max` bytes and one.
    pub async fn raw(&self, what: &str, url: Url, token: &SecretString, max: usize) -> Result<Vec<u8>, ForgeError> {
        let response = self.send(what, Method::GET, url, token, None, RAW).await?;
        read(what, response, max + 1, true).await
    }

    /// Posts a JSON document.
    pub async fn post<T: DeserializeOwned>(
        &self,
        what: &str,
        url: Url,
        token: &SecretString,
        body: &Json,
    ) -> Result<T, ForgeError> {
        let response = self.send(what, Method::POST, url, token, Some(body), JSON).await?;
        read_json(what, response).await
    }

    /// Posts a JSON document; only that it was taken counts.
    pub async fn order(&self, what: &str, url: Url, token: &SecretString, body: &Json) -> Result<(), ForgeError> {
        self.send(what, Method::POST, url, token, Some(body), JSON).await.map(drop)
    }

    /// Deletes what is at an address.
    pub async fn delete(&self, what: &str, url: Url, token: &SecretString) -> Result<(), ForgeError> {
        self.send(what, Method::DELETE, url, token, None, JSON).await.map(drop)
    }

    /// The token goes only where the base is: a page link must not carry it away.
    fn is_ours(&self, url: &Url) -> bool {
        Url::parse(&self.base).is_ok_and(|base| base.origin() == url.origin())
    }

    async fn send(
        &self,
        what: &str,
        method: Method,
        url: Url,
        token: &SecretString,
        body: Option<&Json>,
        accept: &str,
    ) -> Result<Response, ForgeError> {
        let attempt = || async {
            let mut request = self
                .http
                .request(method.clone(), url.clone())
                .timeout(TIMEOUT)
                .bearer_auth(token.expose_secret())
                .header(header::ACCEPT, accept)
                .header(header::USER_AGENT, "kici")
                .header("x-github-api-version", "2022-11-28");
            if let Some(body) = body {
                request = request.json(body);
            }
            let response = request.send().await.map_err(|e| Failure {
                // Without the address: it may hold what a log should not.
                error: ForgeError::unavailable(what, e.without_url()),
                wait: None,
            })?;
            self.judge(what, response).await
        };
        let backoff = ExponentialBuilder::default()
            .with_min_delay(self.retry.delay)
            .with_factor(2.0)
            .with_max_times(self.retry.times);
        attempt
            .retry(backoff)
            .when(|failure| failure.error.is_retryable())
            .adjust(|failure, delay| match (failure.wait, delay) {
                (Some(wait), _) if wait > MAX_WAIT => None,
                (Some(wait), Some(delay)) => Some(wait.max(delay)),
                (_, delay) => delay,
            })
            .notify(|failure, delay| {
                tracing::debug!(error = %failure.error, delay_ms = delay.as_millis(), "calling GitHub again");
            })
            .await
            .map_err(|failure| failure.error)
    }

    async fn judge(&self, what: &str, response: Response) -> Result<Response, Failure> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        if let Some(wait) = self.rate_limited(&response) {
            let error = ForgeError::RateLimited { retry_after_s: wait.as_secs().max(1) };
            return Err(Failure { error, wait: Some(wait) });
        }
        let body = read(what, response, 64 * 1024, true).await.unwrap_or_default();
        let message = serde_json::from_slice::<Json>(&body).ok();
        let message = message.as_ref().and_then(|m| m.get("message")?.as_str()).unwrap_or_default();
        let message: String = message.chars().filter(|c| !c.is_control()).take(200).collect();
        let error = match status {
            // 409: the repository is empty. 422: no such commit.
            StatusCode::NOT_FOUND | StatusCode::GONE | StatusCode::CONFLICT | StatusCode::UNPROCESSABLE_ENTITY => {
                ForgeError::NotFound { what: what.to_owned(), hint: message }
            }
            status if status.is_server_error() => ForgeError::unavailable(what, format!("{status} {message}")),
            status => ForgeError::Refused { what: what.to_owned(), status: status.as_u16(), message },
        };
        Err(Failure { error, wait: None })
    }

    /// How long to wait when this is a rate limit: 429, or 403 with a hint that it is one.
    fn rate_limited(&self, response: &Response) -> Option<Duration> {
        let number = |name: &str| response.headers().get(name)?.to_str().ok()?.trim().parse::<i64>().ok();
        let after = number("retry-after");
        let spent = number("x-ratelimit-remaining") == Some(0);
        let limited = match response.status() {
            StatusCode::TOO_MANY_REQUESTS => true,
            StatusCode::FORBIDDEN => after.is_some() || spent,
            _ => false,
        };
        if !limited {
            return None;
        }
        let now = self.clock.now().as_micros() / 1_000_000;
        let until_reset = || number("x-ratelimit-reset").filter(|_| spent).map(|at| at - now);
        let seconds = after.or_else(until_reset).unwrap_or(0);
        Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
    }
}

const JSON: &str = "application/vnd.github+json";
const RAW: &str = "application/vnd.github.raw+json";

async fn read_json<T: DeserializeOwned>(what: &str, response: Response) -> Result<T, ForgeError> {
    let body = read(what, response, MAX_ANSWER, false).await?;
    serde_json::from_slice(&body).map_err(|e| ForgeError::unavailable(what, format!("unexpected answer: {e}")))
}

/// Reads an answer of at most `max` bytes; beyond, it is cut or refused.
async fn read(what: &str, mut response: Response, max: usize, cut: bool) -> Result<Vec<u8>, ForgeError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|e| ForgeError::unavailable(what, e.without_url()))? {
        body.extend_from_slice(&chunk);
        if body.len() > max {
            if cut {
                body.truncate(max);
                break;
            }
            return Err(ForgeError::unavailable(what, format!("the answer is longer than {max} bytes")));
        }
    }
    Ok(body)
}

/// The `next` address of a Link header (RFC 8288, as far as GitHub uses it).
fn next_page(link: &str) -> Option<Url> {
    link.split(',').find_map(|part| {
        let (address, rest) = part.trim().strip_prefix('<')?.split_once('>')?;
        rest.split(';').any(|p| p.trim() == r#"rel="next""#).then(|| Url::parse(address).ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_pages_are_found() {
        let link = r#"<https://x/a?page=1>; rel="prev", <https://x/a?page=3>; rel="next", <https://x/a>; rel="last""#;
        assert_eq!(next_page(link).unwrap().as_str(), "https://x/a?page=3");
        assert_eq!(next_page(r#"<https://x/a>; rel="last""#), None);
        assert_eq!(next_page("nonsense"), None);
    }
}
