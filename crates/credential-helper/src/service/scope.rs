//! What the git of a job may ask about.

use crate::repository::{Case, Repository, canonical_host};

/// A host that git may get credentials for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// `https`, or `http` where the operator allows it.
    pub protocol: String,
    /// Canonical, see [`canonical_host`].
    pub host: String,
    /// How its names are compared.
    pub case: Case,
}

/// What a job's git may ask about.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// The hosts. None: git gets nothing.
    pub hosts: Vec<Host>,
    /// The job's own repository, which verbs mean that name none; `owner/name` is one at its host. None: the source's host gives
    /// no credentials.
    pub own: Option<Repository>,
}

impl Scope {
    /// The repository of a query; none when its host is none of ours, or the path is missing.
    pub(super) fn repository(&self, protocol: &str, host: &str, path: &str) -> Option<Repository> {
        let canonical = canonical_host(protocol, host)?;
        let known = self.hosts.iter().find(|known| known.protocol == protocol && known.host == canonical)?;
        Repository::parse(protocol, host, path, known.case).ok()
    }

    /// The repository that a person names: `owner/name`, `host/owner/name` or a URL.
    pub(super) fn named(&self, text: &str) -> Option<Repository> {
        if let Some((protocol, rest)) = text.split_once("://") {
            let (host, path) = rest.split_once('/')?;
            return self.repository(protocol, host, path);
        }
        let with_host = text.split_once('/').and_then(|(host, path)| {
            let is = |known: &&Host| canonical_host(&known.protocol, host).as_ref() == Some(&known.host);
            let known = self.hosts.iter().find(is)?;
            Repository::parse(&known.protocol, host, path, known.case).ok()
        });
        with_host.or_else(|| {
            // Only the source's: which of the others would be meant is anybody's guess.
            let own = self.own.as_ref()?.host();
            let host = self.hosts.iter().find(|known| known.host == own)?;
            Repository::parse(&host.protocol, &host.host, text, host.case).ok()
        })
    }
}
