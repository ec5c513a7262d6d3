//! The question of `wait_for` to a web address.

use std::time::Duration;

/// A GET that counts as yes when it is answered with 2xx. Redirects are followed; the body is not read.
///
/// # Errors
/// What came instead, in words.
pub(super) async fn get(url: &str, limit: Duration) -> Result<(), String> {
    let parsed: reqwest::Url = url.parse().map_err(|error| format!("`{url}` is not a web address: {error}"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(format!("`{url}` is not a web address: only http and https are asked"));
    }
    let client = reqwest::Client::builder()
        .user_agent(concat!("kici-agent/", env!("CARGO_PKG_VERSION")))
        .timeout(limit)
        .build()
        .map_err(|error| format!("no HTTP client: {error}"))?;
    let answer = client.get(parsed).send().await.map_err(|error| cause(&error))?;
    let status = answer.status();
    if status.is_success() { Ok(()) } else { Err(format!("it answered {status}")) }
}

/// The innermost cause, which is the one that people know.
fn cause(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "it did not answer in time".to_owned();
    }
    let mut inner: &dyn std::error::Error = error;
    while let Some(next) = inner.source() {
        inner = next;
    }
    inner.to_string()
}
