//! Sources: typed configuration, its validation, and the secrets that belong to it.

mod generic;
mod secrets;
mod validate;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use kici_engine::ids::SourceId;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::forge::GitHost;
pub use generic::{Extract, GenericConfig, Verification};
pub use secrets::SourceSecrets;
pub(crate) use validate::is_repo_name;

/// What a source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// A GitHub App.
    Github,
    /// Any program that can send an HTTP request.
    Generic,
    /// A repository on this machine.
    Local,
}

impl SourceKind {
    /// The word in storage and JSON; also the provider of its events.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Github => "github",
            Self::Generic => "generic",
            Self::Local => "local",
        }
    }
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for SourceKind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        [Self::Github, Self::Generic, Self::Local].into_iter().find(|k| k.as_str() == text).ok_or_else(|| {
            ConfigError::new("kind", format!("`{text}` is not a kind of source"), "use github, generic or local")
        })
    }
}

/// A value of a source that cannot be used: which, why, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}`: {problem}; {remedy}")]
pub struct ConfigError {
    /// The field, dotted.
    pub field: String,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl ConfigError {
    fn new(field: &str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { field: field.to_owned(), problem: problem.into(), remedy: remedy.into() }
    }
}

/// A source as the database keeps it, without its secrets.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// Its id.
    pub id: SourceId,
    /// Organisation.
    pub org: String,
    /// Name, unique in the organisation.
    pub name: String,
    /// Raised by every change.
    pub version: i64,
    /// What it is and how it is set up.
    pub config: SourceConfig,
}

impl Source {
    /// `github:<app>`, `generic:<org>:<source id>` or `local:<source id>`; unique in the installation.
    pub fn routing_key(&self) -> String {
        match &self.config {
            SourceConfig::Github(c) => format!("github:{}", c.app_id),
            SourceConfig::Generic(_) => format!("generic:{}:{}", self.org, self.id.uuid()),
            SourceConfig::Local(_) => format!("local:{}", self.id.uuid()),
        }
    }

    /// Headers that are not stored with a delivery, beside the ones that never are: those that the source names, and the one
    /// that proves who calls.
    pub fn strip_headers(&self) -> Vec<String> {
        let SourceConfig::Generic(config) = &self.config else { return Vec::new() };
        let proof = match &config.verification {
            Verification::Hmac { header } | Verification::Token { header } => Some(header.clone()),
            Verification::Bearer {} | Verification::Cidr { .. } | Verification::None { .. } => None,
        };
        config.strip_headers.iter().cloned().chain(proof).collect()
    }

    /// The repository of a local source's events.
    pub fn local_repo(&self) -> Option<String> {
        match &self.config {
            SourceConfig::Local(c) => Some(c.repo.clone().unwrap_or_else(|| format!("local/{}", self.name))),
            SourceConfig::Github(_) | SourceConfig::Generic(_) => None,
        }
    }
}

/// Configuration of a source, by kind.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceConfig {
    /// A GitHub App.
    Github(GithubConfig),
    /// A generic webhook.
    Generic(Box<GenericConfig>),
    /// A repository on this machine.
    Local(LocalConfig),
}

/// A GitHub App.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GithubConfig {
    /// Numeric id of the App.
    pub app_id: u64,
    /// REST address; for GitHub Enterprise Server `https://HOST/api/v3`.
    #[serde(default = "github_api")]
    pub base_url: String,
    /// Address of clones; derived from `base_url` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub web_url: Option<String>,
}

fn github_api() -> String {
    "https://api.github.com".to_owned()
}

impl GithubConfig {
    /// Configuration of an App on github.com.
    pub fn new(app_id: u64) -> Self {
        Self { app_id, base_url: github_api(), web_url: None }
    }

    /// The host that repositories are cloned from.
    pub fn git_host(&self) -> Option<GitHost> {
        GitHost::of_url(&self.web_base(), true)
    }

    /// Where repositories are cloned from, without a final slash.
    pub fn web_base(&self) -> String {
        let base = self.web_url.as_deref().unwrap_or(&self.base_url).trim_end_matches('/');
        if base == "https://api.github.com" {
            return "https://github.com".to_owned();
        }
        base.strip_suffix("/api/v3").unwrap_or(base).to_owned()
    }
}

/// A repository on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalConfig {
    /// Absolute path of the work tree or the bare repository.
    pub path: PathBuf,
    /// Name of the repository in events; `local/<source name>` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Default branch; found in the repository when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_branch: Option<String>,
}

impl LocalConfig {
    /// A repository at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), repo: None, default_branch: None }
    }

    /// Checks that the path exists and lies below one of `allowed` (`sources.local_paths`), symbolic links resolved.
    ///
    /// # Errors
    /// [`ConfigError`] naming the setting.
    pub fn check_allowed(&self, allowed: &[PathBuf]) -> Result<(), ConfigError> {
        let real = self.path.canonicalize().map_err(|e| {
            ConfigError::new("path", format!("{}: {e}", self.path.display()), "give the path of a git repository")
        })?;
        let inside = |root: &PathBuf| root.canonicalize().is_ok_and(|root| real.starts_with(root));
        if allowed.iter().any(inside) {
            return Ok(());
        }
        Err(ConfigError::new(
            "path",
            format!("{} is not below an allowed folder", real.display()),
            "add its folder to sources.local_paths",
        ))
    }

    /// Whether a git repository is there, with a work tree or bare.
    ///
    /// # Errors
    /// [`ConfigError`] naming the setting.
    pub fn check_repository(&self) -> Result<(), ConfigError> {
        if self.path.join(".git").exists() || self.path.join("HEAD").is_file() {
            return Ok(());
        }
        let problem = format!("{} holds no git repository", self.path.display());
        Err(ConfigError::new("path", problem, "give the folder that `git rev-parse --show-toplevel` names"))
    }
}

impl SourceConfig {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// [`ConfigError`] naming the field and the remedy.
    pub fn from_json(kind: SourceKind, json: Json) -> Result<Self, ConfigError> {
        let bad = |e: serde_json::Error| {
            ConfigError::new("config", e.to_string(), format!("see the keys of a {kind} source in the documentation"))
        };
        let config = match kind {
            SourceKind::Github => Self::Github(serde_json::from_value(json).map_err(bad)?),
            SourceKind::Generic => Self::Generic(Box::new(serde_json::from_value(json).map_err(bad)?)),
            SourceKind::Local => Self::Local(serde_json::from_value(json).map_err(bad)?),
        };
        config.validate()?;
        Ok(config)
    }

    /// The configuration as stored. Holds no secret.
    pub fn to_json(&self) -> Json {
        let json = match self {
            Self::Github(c) => serde_json::to_value(c),
            Self::Generic(c) => serde_json::to_value(c),
            Self::Local(c) => serde_json::to_value(c),
        };
        // Fails only for maps with non-text keys and for paths that are not UTF-8; `validate` refuses the latter.
        json.unwrap_or(Json::Null)
    }

    /// Its kind.
    pub const fn kind(&self) -> SourceKind {
        match self {
            Self::Github(_) => SourceKind::Github,
            Self::Generic(_) => SourceKind::Generic,
            Self::Local(_) => SourceKind::Local,
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ConfigError`] for the first that cannot be used.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::Github(c) => validate::github(c),
            Self::Generic(c) => validate::generic(c),
            Self::Local(c) => validate::local(c),
        }
    }
}

/// Path as text; `validate` has refused paths that are not UTF-8.
pub(crate) fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;
    use serde_json::json;

    use super::*;

    fn error(kind: SourceKind, json: Json) -> String {
        SourceConfig::from_json(kind, json).unwrap_err().to_string()
    }

    #[test]
    fn bad_values_are_named_with_a_remedy() {
        let g = SourceKind::Generic;
        let table = [
            (SourceKind::Github, json!({"app_id": 0}), "`app_id`: 0 is not an App id"),
            (SourceKind::Github, json!({"app_id": 1, "base_url": "ftp://x"}), "`base_url`: must be an http or https"),
            (SourceKind::Github, json!({"app_id": 1, "base_url": "https://u:p@x"}), "`base_url`: must be"),
            (SourceKind::Github, json!({"app": 1}), "`config`: unknown field `app`"),
            (g, json!({"verification": {"type": "none"}}), "`verification`: type `none`"),
            (g, json!({"verification": {"type": "cidr", "allow": []}}), "`verification.allow`: is empty"),
            (g, json!({"verification": {"type": "cidr", "allow": ["x"]}}), "`config`: "),
            (g, json!({"verification": {"type": "hmac", "header": "a b"}}), "`verification.header`: `a b` is not"),
            (g, json!({"verification": {"type": "bearer"}, "repo_from": {"path": "repo"}}), "`repo_from`: `repo`"),
            (
                g,
                json!({"verification": {"type": "bearer"}, "rate_limit_rpm": 0}),
                "`rate_limit_rpm`: 0 is out of range",
            ),
            (SourceKind::Local, json!({"path": "x"}), "`path`: `x` is not usable"),
            (SourceKind::Local, json!({"path": "/x", "repo": "a/../b"}), "`repo`: `a/../b` is not a repository"),
            (SourceKind::Local, json!({"path": "/x", "default_branch": "-x"}), "`default_branch`: `-x`"),
        ];
        for (kind, json, expected) in table {
            let text = error(kind, json);
            assert!(text.starts_with(expected), "{text}");
        }
    }

    #[test]
    fn configurations_round_trip() {
        let table = [
            SourceConfig::Github(GithubConfig::new(7)),
            SourceConfig::Generic(Box::new(GenericConfig::new(Verification::Bearer {}))),
            SourceConfig::Generic(Box::new(GenericConfig {
                repo_from: Some(Extract::Path("$.repo".to_owned())),
                ..GenericConfig::new(Verification::Cidr { allow: vec!["10.0.0.0/8".parse().unwrap()] })
            })),
            SourceConfig::Local(LocalConfig::new("/srv/repo")),
        ];
        for config in table {
            assert_eq!(SourceConfig::from_json(config.kind(), config.to_json()), Ok(config));
        }
    }

    #[test]
    fn web_address_follows_the_api_address() {
        let mut config = GithubConfig::new(1);
        assert_eq!(config.web_base(), "https://github.com");
        config.base_url = "https://ghe.example/api/v3/".to_owned();
        assert_eq!(config.web_base(), "https://ghe.example");
        config.web_url = Some("https://git.example/".to_owned());
        assert_eq!(config.web_base(), "https://git.example");
    }

    #[test]
    fn secrets_round_trip_and_stay_hidden() {
        let secrets = SourceSecrets { webhook: vec!["hush".into()], private_key: Some("pem".into()) };
        assert!(!format!("{secrets:?}").contains("hush"));
        let back = SourceSecrets::from_unsealed(&secrets.to_sealable()).unwrap();
        assert_eq!(back.webhook[0].expose_secret(), "hush");
        assert_eq!(back.private_key.unwrap().expose_secret(), "pem");
        let error = SourceSecrets::from_unsealed(&"hush{".into()).unwrap_err().to_string();
        assert!(!error.contains("hush"), "{error}");
    }

    #[test]
    fn local_paths_must_be_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("repo");
        std::fs::create_dir(&inside).unwrap();
        let config = LocalConfig::new(&inside);
        assert_eq!(config.check_allowed(&[dir.path().to_owned()]), Ok(()));
        assert!(config.check_repository().unwrap_err().to_string().contains("holds no git repository"));
        std::fs::create_dir(inside.join(".git")).unwrap();
        assert_eq!(config.check_repository(), Ok(()));
        let outside = config.check_allowed(&[inside.join("x")]).unwrap_err().to_string();
        assert!(outside.contains("sources.local_paths"), "{outside}");
        let sibling = dir.path().join("rep");
        std::fs::create_dir(&sibling).unwrap();
        assert!(config.check_allowed(&[sibling]).is_err(), "a name prefix is not a parent folder");
    }
}
