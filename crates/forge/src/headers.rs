//! Request headers as a delivery keeps them.

use std::collections::BTreeMap;

use http::HeaderMap;
use serde::{Deserialize, Serialize};

/// Headers of a delivery: lower-case names, the first value of each. A value that is not visible ASCII is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Headers(BTreeMap<String, String>);

/// Names (exact, lower-case) that carry credentials or signatures and are never stored.
const CREDENTIALS: [&str; 6] =
    ["authorization", "proxy-authorization", "cookie", "set-cookie", "x-gitlab-token", "x-api-key"];

impl Headers {
    /// The value of a header; `name` in any case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).or_else(|| self.0.get(&name.to_ascii_lowercase())).map(String::as_str)
    }

    /// What may be stored: without credentials, signatures and the headers named in `also`.
    #[must_use]
    pub fn redacted(&self, also: &[String]) -> Self {
        let hidden = |name: &str| {
            CREDENTIALS.contains(&name)
                || name.contains("signature")
                || name.contains("token")
                || name.contains("secret")
                || also.iter().any(|h| h.eq_ignore_ascii_case(name))
        };
        Self(self.0.iter().filter(|(name, _)| !hidden(name)).map(|(n, v)| (n.clone(), v.clone())).collect())
    }

    /// Every header, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(n, v)| (n.as_str(), v.as_str()))
    }
}

impl From<&HeaderMap> for Headers {
    fn from(map: &HeaderMap) -> Self {
        let mut out = BTreeMap::new();
        for (name, value) in map {
            if let Ok(value) = value.to_str() {
                out.entry(name.as_str().to_owned()).or_insert_with(|| value.to_owned());
            }
        }
        Self(out)
    }
}

impl<N: AsRef<str>, V: Into<String>> FromIterator<(N, V)> for Headers {
    fn from_iter<T: IntoIterator<Item = (N, V)>>(pairs: T) -> Self {
        let mut out = BTreeMap::new();
        for (name, value) in pairs {
            out.entry(name.as_ref().to_ascii_lowercase()).or_insert_with(|| value.into());
        }
        Self(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_and_signatures_are_not_stored() {
        let headers = Headers::from_iter([
            ("X-GitHub-Event", "push"),
            ("Authorization", "Bearer x"),
            ("X-Hub-Signature-256", "sha256=00"),
            ("X-Gitlab-Token", "t"),
            ("X-Own", "v"),
        ]);
        let kept = headers.redacted(&["x-own".to_owned()]);
        assert_eq!(kept.iter().collect::<Vec<_>>(), [("x-github-event", "push")]);
        assert_eq!(headers.get("x-GITHUB-event"), Some("push"));
    }
}
