//! Checks of a source's fields.

use super::{ConfigError, Extract, GenericConfig, GithubConfig, LocalConfig, Verification};

pub(super) fn github(config: &GithubConfig) -> Result<(), ConfigError> {
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

pub(super) fn generic(config: &GenericConfig) -> Result<(), ConfigError> {
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

pub(super) fn local(config: &LocalConfig) -> Result<(), ConfigError> {
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
