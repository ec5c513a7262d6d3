//! Which server, with which token.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kici_api::client::{Client, ClientConfig, is_loopback};
use secrecy::SecretString;
use serde::Deserialize;
use url::Url;

use crate::args::{Global, address};
use crate::exit::{DENIED, Failure};

/// The orchestrator's own default address.
const DEFAULT_URL: &str = "http://127.0.0.1:4000";

/// `admin.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profiles {
    #[serde(default)]
    profile: std::collections::BTreeMap<String, Profile>,
}

/// One server in `admin.toml`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    url: Option<String>,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
}

/// Places that the environment names.
struct Places {
    config: Option<PathBuf>,
    state: Option<PathBuf>,
}

impl Places {
    /// The one place that reads them.
    #[allow(clippy::disallowed_methods, reason = "the program's places are read here and nowhere else")]
    fn read() -> Self {
        let path = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = path("HOME");
        let under_home = |tail: &str| home.as_ref().map(|home| home.join(tail));
        Self {
            config: path("XDG_CONFIG_HOME").or_else(|| under_home(".config")),
            state: path("XDG_STATE_HOME").or_else(|| under_home(".local/state")),
        }
    }
}

/// A client for the command.
///
/// # Errors
/// A profile or file that cannot be read, a URL that is none, no token for a server that is not on this machine.
pub(crate) fn client(global: &Global, timeout: Duration) -> Result<Client, Failure> {
    let places = Places::read();
    let profile = match &global.profile {
        Some(name) => read_profile(&places, name)?,
        None => Profile::default(),
    };
    let url = match &global.url {
        Some(url) => url.clone(),
        None => {
            let text = profile.url.as_deref().unwrap_or(DEFAULT_URL);
            address(text).map_err(|remedy| Failure::usage(format!("url `{text}` of the profile: {remedy}")))?
        }
    };
    let token_file = global.token_file.clone().or(profile.token_file);
    let (token, origin) = token(global, &places, token_file, &url)?;
    if global.verbose {
        eprintln!("server {url}, token from {origin}");
    }
    let ca_file = global.ca_file.clone().or(profile.ca_file);
    let ca_pem =
        ca_file.map(|path| fs::read(&path).map_err(|error| unreadable("--ca-file", &path, &error))).transpose()?;
    let user_agent = concat!("kici-admin/", env!("CARGO_PKG_VERSION")).to_owned();
    let config = ClientConfig { url, token: Some(token), timeout, ca_pem, user_agent };
    Ok(Client::new(config)?)
}

fn unreadable(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("{what} {}: {error}", path.display()))
}

fn read_profile(places: &Places, name: &str) -> Result<Profile, Failure> {
    let path = places.config.as_ref().map(|dir| dir.join("kici/admin.toml"));
    let path = path.ok_or_else(|| Failure::usage("--profile needs HOME or XDG_CONFIG_HOME to be set"))?;
    let text = fs::read_to_string(&path).map_err(|error| unreadable("--profile", &path, &error))?;
    let mut profiles: Profiles =
        toml::from_str(&text).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    let known = profiles.profile.keys().cloned().collect::<Vec<_>>().join(", ");
    profiles
        .profile
        .remove(name)
        .ok_or_else(|| Failure::usage(format!("{} has no [profile.{name}]; it has: {known}", path.display())))
}

/// The token: the one that is named, else, for a server on this machine, its bootstrap token.
fn token(
    global: &Global,
    places: &Places,
    file: Option<PathBuf>,
    url: &Url,
) -> Result<(SecretString, String), Failure> {
    if let Some(token) = global.token.as_ref().filter(|_| global.token_file.is_none()) {
        return Ok((token.trim().into(), "--token or KICI_ADMIN_TOKEN".to_owned()));
    }
    if let Some(path) = file {
        let text = fs::read_to_string(&path).map_err(|error| unreadable("--token-file", &path, &error))?;
        if text.trim().is_empty() {
            return Err(Failure::usage(format!(
                "--token-file: {} is empty; it must hold an admin token",
                path.display()
            )));
        }
        return Ok((text.trim().into(), path.display().to_string()));
    }
    let missing = |detail: String| Failure::new(DENIED, format!("no token: {detail}"));
    if !is_loopback(url) {
        let detail = "use --token-file, --profile or KICI_ADMIN_TOKEN; the bootstrap token is only for this machine";
        return Err(missing(detail.to_owned()));
    }
    let directories = match &global.data_dir {
        Some(directory) => vec![directory.clone()],
        None => {
            let state = places.state.as_ref().map(|dir| dir.join("kici/default"));
            [Some(PathBuf::from("/var/lib/kici/default")), state].into_iter().flatten().collect()
        }
    };
    let files: Vec<PathBuf> = directories.iter().map(|directory| directory.join("bootstrap-token")).collect();
    for path in &files {
        if let Ok(text) = fs::read_to_string(path) {
            return Ok((text.trim().into(), path.display().to_string()));
        }
    }
    let looked = files.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" and ");
    Err(missing(format!("{looked} cannot be read; use --token-file, KICI_ADMIN_TOKEN or --data-dir")))
}
