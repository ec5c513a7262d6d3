//! Images.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use http::Method;
use http::header::HeaderName;
use http_body_util::BodyExt as _;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::{Value as Json, json};
use tokio::time::timeout;

use crate::Engine;
use crate::http::{Ask, EngineError, encode};

/// Longest pause between two words of a pull.
const PULL_SILENCE: Duration = Duration::from_secs(300);
/// Longest line of a pull.
const MAX_LINE_BYTES: usize = 1024 * 1024;

/// User and password of a registry.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// User name.
    pub user: String,
    /// Password or token.
    pub token: SecretString,
}

/// An image that the engine has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its digest.
    pub id: String,
    /// The user that it names; empty is root.
    pub user: String,
    /// Its environment, `NAME=value`.
    pub env: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Inspected {
    id: String,
    config: Option<ImageConfig>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ImageConfig {
    #[serde(default)]
    user: String,
    #[serde(default)]
    env: Option<Vec<String>>,
}

/// The registry, as engines name it in authorisations, of an image: that of Docker where it names none.
fn registry(image: &str) -> &str {
    match image.split_once('/') {
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => first,
        _ => "https://index.docker.io/v1/",
    }
}

/// Name and tag or digest; `latest` where there is neither.
fn parts(image: &str) -> (&str, &str) {
    if let Some((name, digest)) = image.split_once('@') {
        return (name, digest);
    }
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (image, "latest"),
    }
}

impl Engine {
    /// What the engine has of a name; none when it has nothing.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn image(&self, name: &str) -> Result<Option<Image>, EngineError> {
        let what = format!("looking for image `{name}`");
        let ask = Ask::new(&what, Method::GET, format!("/images/{}/json", encode(name)));
        match self.client().json::<Inspected>(ask).await {
            Ok(found) => {
                let config = found.config.unwrap_or(ImageConfig { user: String::new(), env: None });
                Ok(Some(Image { id: found.id, user: config.user, env: config.env.unwrap_or_default() }))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Fetches an image from its registry. `tell` hears what is worth a line for people.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn pull(
        &self,
        name: &str,
        credentials: Option<&Credentials>,
        mut tell: impl FnMut(&str) + Send,
    ) -> Result<(), EngineError> {
        let what = format!("fetching image `{name}`");
        let (path, tag) = parts(name);
        let query = format!("/images/create?fromImage={}&tag={}", encode(path), encode(tag));
        let mut ask = Ask::new(&what, Method::POST, query).within(PULL_SILENCE);
        if let Some(credentials) = credentials {
            let auth = json!({
                "username": credentials.user,
                "password": credentials.token.expose_secret(),
                "serveraddress": registry(name),
            });
            ask.headers.push((HeaderName::from_static("x-registry-auth"), URL_SAFE.encode(auth.to_string())));
        }
        let late = || EngineError::TimedOut { what: what.clone(), limit: PULL_SILENCE };
        let mut body = self.client().open(ask).await?.into_body();
        let mut line = Vec::new();
        while let Some(frame) = timeout(PULL_SILENCE, body.frame()).await.map_err(|_| late())? {
            let broken = |message: String| EngineError::Protocol { what: what.clone(), message };
            let Ok(bytes) = frame.map_err(|error| broken(error.to_string()))?.into_data() else { continue };
            for byte in bytes {
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > MAX_LINE_BYTES {
                        return Err(broken("a line without an end".to_owned()));
                    }
                    continue;
                }
                heard(&what, &std::mem::take(&mut line), &mut tell)?;
            }
        }
        heard(&what, &line, &mut tell)
    }

    /// Makes an image out of the archive of a root file system; for tests and for images of our own.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn import(&self, name: &str, archive: Vec<u8>, changes: &[&str]) -> Result<(), EngineError> {
        let what = format!("importing image `{name}`");
        let changes: String = changes.iter().map(|change| format!("&changes={}", encode(change))).collect();
        // The tag goes with the name: Podman overlooks the parameter for it here.
        let query = format!("/images/create?fromSrc=-&repo={}{changes}", encode(name));
        let mut ask = Ask::new(&what, Method::POST, query);
        ask.headers.push((http::header::CONTENT_TYPE, "application/x-tar".to_owned()));
        ask.body = crate::http::stream(futures::stream::iter([Ok(archive.into())]));
        let answer = self.client().bytes(ask).await?;
        answer.split(|byte| *byte == b'\n').try_for_each(|line| heard(&what, line, &mut |_| {}))
    }
}

/// One line of a pull: progress in JSON, or an error, which comes with status 200 too.
fn heard(what: &str, line: &[u8], tell: &mut impl FnMut(&str)) -> Result<(), EngineError> {
    let Ok(Json::Object(line)) = serde_json::from_slice::<Json>(line) else { return Ok(()) };
    let text = |name: &str| line.get(name).and_then(Json::as_str).filter(|text| !text.is_empty());
    let failed = text("error").or_else(|| line.get("errorDetail").and_then(|detail| detail["message"].as_str()));
    if let Some(message) = failed {
        let (what, message) = (what.to_owned(), message.to_owned());
        return Err(EngineError::Refused { what, status: 200, message });
    }
    // Of every layer there are hundreds of lines, with its id; what is said of the whole has none.
    if let Some(status) = text("status").filter(|_| !line.contains_key("id")) {
        tell(status);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(parts("rust"), ("rust", "latest"));
        assert_eq!(parts("rust:1.86"), ("rust", "1.86"));
        assert_eq!(parts("localhost:5000/a"), ("localhost:5000/a", "latest"));
        assert_eq!(parts("localhost:5000/a:3"), ("localhost:5000/a", "3"));
        assert_eq!(parts("a@sha256:00"), ("a", "sha256:00"));
        assert_eq!(registry("rust:1"), "https://index.docker.io/v1/");
        assert_eq!(registry("acme/app"), "https://index.docker.io/v1/");
        assert_eq!(registry("ghcr.io/acme/app"), "ghcr.io");
        assert_eq!(registry("localhost:5000/a"), "localhost:5000");
    }

    #[test]
    fn an_error_in_a_pull_is_one_although_the_status_is_good() {
        let mut said = Vec::new();
        let mut tell = |text: &str| said.push(text.to_owned());
        heard("x", br#"{"status":"Pulling from a","id":"1"}"#, &mut tell).expect("fine");
        heard("x", br#"{"status":"Status: Downloaded"}"#, &mut tell).expect("fine");
        heard("x", b"", &mut tell).expect("fine");
        let error =
            heard("x", br#"{"errorDetail":{"message":"denied"},"error":"denied"}"#, &mut tell).expect_err("one");
        assert_eq!(error.to_string(), "x: denied");
        assert_eq!(said, ["Status: Downloaded"]);
    }
}
