//! Sources: typed configuration, its validation, and the secrets that belong to it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use kici_engine::ids::SourceId;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

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

    /// Headers that are not stored with a delivery, beside the ones that never are.
    pub fn strip_headers(&self) -> &[String] {
        match &self.config {
            SourceConfig::Generic(c) => &c.strip_headers,
            SourceConfig::Github(_) | SourceConfig::Local(_) => &[],
        }
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

    /// Where repositories are cloned from, without a final slash.
    pub fn web_base(&self) -> String {
        let base = self.web_url.as_deref().unwrap_or(&self.base_url).trim_end_matches('/');
        if base == "https://api.github.com" {
            return "https://github.com".to_owned();
        }
        base.strip_suffix("/api/v3").unwrap_or(base).to_owned()
    }
}

/// Where a generic source takes a value from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extract {
    /// A request header.
    Header(String),
    /// An RFC 9535 JSONPath into the body; the first node counts.
    Path(String),
}

/// A generic webhook (R61).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenericConfig {
    /// How a call proves where it comes from.
    pub verification: Verification,
    /// Event name; absent value = `webhook`.
    #[serde(default = "event_header")]
    pub event_from: Extract,
    /// Action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action_from: Option<Extract>,
    /// Repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo_from: Option<Extract>,
    /// Ref; a bare name is a branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ref_from: Option<Extract>,
    /// Commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha_from: Option<Extract>,
    /// Delivery id; comes before the usual headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key_from: Option<Extract>,
    /// Events that are let in; empty = all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed_events: Vec<String>,
    /// Calls per minute.
    #[serde(default = "rate_limit")]
    pub rate_limit_rpm: u32,
    /// Headers that are not stored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strip_headers: Vec<String>,
    /// Largest body in bytes.
    #[serde(default = "max_payload")]
    pub max_payload_bytes: u64,
    /// For calls without a delivery id: how long an equal body counts as the same event, in milliseconds.
    #[serde(default = "dedup_window")]
    pub dedup_window_ms: u64,
}

fn event_header() -> Extract {
    Extract::Header("x-event-type".to_owned())
}

const fn rate_limit() -> u32 {
    600
}

const fn max_payload() -> u64 {
    1024 * 1024
}

const fn dedup_window() -> u64 {
    300_000
}

impl GenericConfig {
    /// A source with this verification and every other field at its default.
    pub fn new(verification: Verification) -> Self {
        Self {
            verification,
            event_from: event_header(),
            action_from: None,
            repo_from: None,
            ref_from: None,
            sha_from: None,
            idempotency_key_from: None,
            allowed_events: Vec::new(),
            rate_limit_rpm: rate_limit(),
            strip_headers: Vec::new(),
            max_payload_bytes: max_payload(),
            dedup_window_ms: dedup_window(),
        }
    }

    /// [`GenericConfig::dedup_window_ms`] as a duration.
    pub const fn dedup_window(&self) -> Duration {
        Duration::from_millis(self.dedup_window_ms)
    }

    fn extracts(&self) -> impl Iterator<Item = (&'static str, &Extract)> {
        [
            ("event_from", Some(&self.event_from)),
            ("action_from", self.action_from.as_ref()),
            ("repo_from", self.repo_from.as_ref()),
            ("ref_from", self.ref_from.as_ref()),
            ("sha_from", self.sha_from.as_ref()),
            ("idempotency_key_from", self.idempotency_key_from.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, extract)| extract.map(|e| (name, e)))
    }
}

/// How a call proves where it comes from (R3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Verification {
    /// HMAC-SHA256 of the body in hex, with or without `sha256=` before it.
    Hmac {
        /// Header that carries it.
        #[serde(default = "signature_header")]
        header: String,
    },
    /// The secret itself in a header, as GitLab sends it.
    Token {
        /// Header that carries it.
        #[serde(default = "token_header")]
        header: String,
    },
    /// `Authorization: Bearer <secret>`.
    Bearer {},
    /// The caller's address lies in one of these networks.
    Cidr {
        /// Networks such as `10.0.0.0/8`.
        #[serde(with = "networks")]
        allow: Vec<IpNet>,
    },
    /// No proof. Anyone who reaches the address can start workflows.
    None {
        /// Must be `true`, so that nobody gets here by accident.
        #[serde(default)]
        allow_unsigned: bool,
    },
}

/// Networks as text.
mod networks {
    use ipnet::IpNet;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(networks: &[IpNet], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(networks.iter().map(ToString::to_string))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let bad = |text: &str| serde::de::Error::custom(format!("`{text}` is not a network such as 10.0.0.0/8"));
        texts.iter().map(|text| text.parse().map_err(|_| bad(text))).collect()
    }
}

fn signature_header() -> String {
    "x-hub-signature-256".to_owned()
}

fn token_header() -> String {
    "x-gitlab-token".to_owned()
}

impl Verification {
    /// Whether it needs a secret.
    pub const fn needs_secret(&self) -> bool {
        matches!(self, Self::Hmac { .. } | Self::Token { .. } | Self::Bearer {})
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
            Self::Github(c) => validate_github(c),
            Self::Generic(c) => validate_generic(c),
            Self::Local(c) => validate_local(c),
        }
    }
}

fn validate_github(config: &GithubConfig) -> Result<(), ConfigError> {
    if config.app_id == 0 {
        return Err(ConfigError::new("app_id", "0 is not an App id", "copy the number from the App's settings page"));
    }
    for (field, text) in [("base_url", Some(&config.base_url)), ("web_url", config.web_url.as_ref())] {
        let Some(text) = text else { continue };
        let url = url::Url::parse(text).map_err(|e| {
            ConfigError::new(field, format!("`{text}`: {e}"), "write it like https://github.example.org/api/v3")
        })?;
        let plain = matches!(url.scheme(), "http" | "https") && url.username().is_empty() && url.password().is_none();
        if !plain || url.host().is_none() || url.query().is_some() || url.fragment().is_some() {
            return Err(ConfigError::new(
                field,
                "must be an http or https address without user, query and fragment",
                "write it like https://github.example.org/api/v3",
            ));
        }
    }
    Ok(())
}

fn validate_generic(config: &GenericConfig) -> Result<(), ConfigError> {
    match &config.verification {
        Verification::None { allow_unsigned: false } => {
            return Err(ConfigError::new(
                "verification",
                "type `none` lets anyone start workflows",
                "use hmac, token, bearer or cidr, or set verification.allow_unsigned to true",
            ));
        }
        Verification::Cidr { allow } if allow.is_empty() => {
            return Err(ConfigError::new("verification.allow", "is empty", "list networks such as 10.0.0.0/8"));
        }
        Verification::Hmac { header } | Verification::Token { header } => {
            check_header("verification.header", header)?;
        }
        _ => {}
    }
    for (field, extract) in config.extracts() {
        match extract {
            Extract::Header(name) => check_header(field, name)?,
            Extract::Path(path) => {
                serde_json_path::JsonPath::parse(path).map_err(|e| {
                    ConfigError::new(field, format!("`{path}`: {e}"), "write a JSONPath such as $.repository.full_name")
                })?;
            }
        }
    }
    let bounds = [
        ("rate_limit_rpm", u64::from(config.rate_limit_rpm), 1, 1_000_000),
        ("max_payload_bytes", config.max_payload_bytes, 1, 25 * 1024 * 1024),
        ("dedup_window_ms", config.dedup_window_ms, 0, 86_400_000),
    ];
    for (field, value, low, high) in bounds {
        if !(low..=high).contains(&value) {
            return Err(ConfigError::new(field, format!("{value} is out of range"), format!("use {low} to {high}")));
        }
    }
    Ok(())
}

fn check_header(field: &str, name: &str) -> Result<(), ConfigError> {
    http::HeaderName::from_bytes(name.as_bytes()).map(drop).map_err(|_| {
        ConfigError::new(field, format!("`{name}` is not a header name"), "write a name such as x-event-type")
    })
}

fn validate_local(config: &LocalConfig) -> Result<(), ConfigError> {
    if !config.path.is_absolute() || config.path.to_str().is_none_or(|p| p.contains(['\n', '\0'])) {
        return Err(ConfigError::new(
            "path",
            format!("`{}` is not usable", config.path.display()),
            "give an absolute path in UTF-8 without line breaks",
        ));
    }
    if let Some(repo) = &config.repo
        && !is_repo_name(repo)
    {
        return Err(ConfigError::new("repo", format!("`{repo}` is not a repository"), "write owner/name"));
    }
    if let Some(branch) = &config.default_branch
        && !crate::local::is_branch_name(branch)
    {
        return Err(ConfigError::new("default_branch", format!("`{branch}` is not a branch name"), "write e.g. main"));
    }
    Ok(())
}

/// Whether `text` is `owner/name` of plain characters, so that it can stand in a URL path.
pub(crate) fn is_repo_name(text: &str) -> bool {
    let legal = |part: &str| {
        !part.is_empty()
            && part.len() <= 100
            && part != "."
            && part != ".."
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    text.split_once('/').is_some_and(|(owner, name)| legal(owner) && legal(name))
}

/// The secrets of a source. `Debug` shows none of them.
#[derive(Clone, Debug, Default)]
pub struct SourceSecrets {
    /// Secrets that verify deliveries, the current one and those being rotated out.
    pub webhook: Vec<SecretString>,
    /// PEM private key of a GitHub App.
    pub private_key: Option<SecretString>,
}

#[derive(Serialize, Deserialize)]
struct SecretsForm {
    #[serde(default)]
    webhook: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    private_key: Option<String>,
}

impl SourceSecrets {
    /// The text to seal.
    pub fn to_sealable(&self) -> SecretString {
        let form = SecretsForm {
            webhook: self.webhook.iter().map(|s| s.expose_secret().to_owned()).collect(),
            private_key: self.private_key.as_ref().map(|s| s.expose_secret().to_owned()),
        };
        // Strings and lists of strings always serialise.
        SecretString::from(serde_json::to_string(&form).unwrap_or_default())
    }

    /// Reads what [`SourceSecrets::to_sealable`] wrote.
    ///
    /// # Errors
    /// [`ConfigError`] without any of the text.
    pub fn from_unsealed(text: &SecretString) -> Result<Self, ConfigError> {
        let form: SecretsForm = serde_json::from_str(text.expose_secret())
            .map_err(|_| ConfigError::new("secrets", "stored secrets are not readable", "set them again"))?;
        Ok(Self {
            webhook: form.webhook.into_iter().map(SecretString::from).collect(),
            private_key: form.private_key.map(SecretString::from),
        })
    }
}

/// Path as text; `validate` has refused paths that are not UTF-8.
pub(crate) fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
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
        let outside = config.check_allowed(&[inside.join("x")]).unwrap_err().to_string();
        assert!(outside.contains("sources.local_paths"), "{outside}");
        let sibling = dir.path().join("rep");
        std::fs::create_dir(&sibling).unwrap();
        assert!(config.check_allowed(&[sibling]).is_err(), "a name prefix is not a parent folder");
    }
}
