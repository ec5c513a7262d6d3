//! Settings of an agent: a flat `agent.toml`, then `KICI_*` variables, then flags; later wins. All mistakes are reported at
//! once, each with the place it was read from.

mod containers;
mod describe;
mod keys;
mod parts;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kici_engine::ids::AgentId;
use secrecy::SecretString;

pub use containers::ContainerPolicy;
pub use keys::{KEYS, Key};
pub(crate) use parts::{BWRAP_HINT, program};
pub use parts::{Hardening, Isolation, Listen, Pressure, Reset, ResetOn, Scaled};

/// The settings of an agent.
#[derive(Clone, Debug)]
pub struct Config {
    /// The orchestrator, `http://` or `https://`.
    pub orchestrator_url: String,
    /// Name of the agent; `None` makes one and keeps it in the state directory.
    pub agent_id: Option<AgentId>,
    /// The token; `None` where the orchestrator asks for none.
    pub agent_token: Option<SecretString>,
    /// Labels besides those that the orchestrator derives.
    pub labels: Vec<String>,
    /// Facts about the host for people.
    pub properties: BTreeMap<String, String>,
    /// Jobs at once.
    pub max_concurrency: u32,
    /// Filter of the log.
    pub log_level: String,
    /// Form of the log: `auto`, `json` or `pretty`.
    pub log_format: String,
    /// Limit of a step that names none.
    pub default_step_timeout: Duration,
    /// Longest time from SIGTERM to SIGKILL that a job may ask for.
    pub max_grace_period: Duration,
    /// How long running jobs may go on after SIGTERM to the agent.
    pub shutdown_grace: Duration,
    /// Limit of one git command.
    pub git_timeout: Duration,
    /// git gets credentials over `http://` too.
    pub git_allow_insecure_http: bool,
    /// Credential helpers of the host stay on beside the agent's.
    pub git_inherit_host_helpers: bool,
    /// Unacknowledged log bytes of a job at which its commands are paused.
    pub log_spool_max_bytes: u64,
    /// Log bytes of a step when the orchestrator names no limit; 0 is none.
    pub max_log_size_bytes: u64,
    /// Between two signs of life of a job, unless the orchestrator names another.
    pub job_heartbeat_interval: Duration,
    /// Jobs go on after the lease is lost; the orchestrator never gives them to another agent.
    pub keep_running_when_fenced: bool,
    /// What must outlive a restart.
    pub state_dir: PathBuf,
    /// Workspaces.
    pub work_dir: PathBuf,
    /// Sockets of jobs.
    pub runtime_dir: PathBuf,
    /// Variables of the host that steps see: the allow-list and `pass_env`, with the home of their user.
    pub host_env: BTreeMap<String, String>,
    /// The same with the home of the agent's own user: what the agent itself starts must not read what steps can write.
    pub agent_env: BTreeMap<String, String>,
    /// What steps may do on this host.
    pub isolation: Isolation,
    /// What jobs get of a container engine.
    pub containers: ContainerPolicy,
    /// Variables of the agent by which the engine is found.
    pub engine_env: BTreeMap<String, String>,
    /// What happens between two jobs.
    pub reset: Reset,
    /// What holds for an agent that a scaler started.
    pub scaled: Scaled,
    /// What happens to output that the orchestrator does not take.
    pub pressure: Pressure,
    /// Where health and metrics are served; `None` where they are not.
    pub listen: Option<Listen>,
    /// Files that hold the token.
    pub private_files: Vec<PathBuf>,
    /// `KICI_*` variables that are not the agent's, where that is no mistake.
    pub ignored: Vec<Problem>,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct Problem {
    /// The variable, the flag or the key in its file.
    pub place: String,
    /// What is wrong and what would be right.
    pub message: String,
}

/// All mistakes of a configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the configuration has {} mistake(s):", self.0.len())?;
        self.0.iter().try_for_each(|problem| writeln!(f, "  {problem}"))
    }
}

impl std::error::Error for Problems {}

/// Where settings are read from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file; `None` reads `/etc/kici/agent.toml` if it exists.
    pub file: Option<PathBuf>,
    /// The environment.
    pub env: BTreeMap<String, String>,
    /// Flags by key.
    pub flags: BTreeMap<String, String>,
}

impl Sources {
    /// The environment of this process; names and values that are not UTF-8 are left out.
    pub fn from_process(file: Option<PathBuf>, flags: BTreeMap<String, String>) -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self { file, env: std::env::vars_os().filter_map(text).collect(), flags }
    }
}

/// A value and where it stands.
#[derive(Clone, Debug)]
struct Entry {
    value: String,
    place: String,
}

struct Reader {
    entries: BTreeMap<&'static str, Entry>,
    problems: Vec<Problem>,
    ignored: Vec<Problem>,
}

impl Config {
    /// Reads and checks everything.
    ///
    /// # Errors
    /// All [`Problems`] at once.
    pub fn load(sources: &Sources) -> Result<Self, Problems> {
        let mut reader = Reader { entries: BTreeMap::new(), problems: Vec::new(), ignored: Vec::new() };
        reader.file(sources.file.as_deref());
        reader.environment(&sources.env);
        for (name, value) in &sources.flags {
            reader.set(name, value.clone(), format!("--{}", name.replace(['_', '.'], "-")));
        }
        let config = reader.config(&sources.env);
        match config {
            Some(config) if reader.problems.is_empty() => Ok(config),
            _ => Err(Problems(reader.problems)),
        }
    }
}

impl Reader {
    fn problem(&mut self, place: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem { place: place.into(), message: message.into() });
    }

    fn file(&mut self, path: Option<&Path>) {
        let (path, asked) = path.map_or((Path::new("/etc/kici/agent.toml"), false), |path| (path, true));
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !asked => return,
            Err(error) => return self.problem(path.display().to_string(), error.to_string()),
        };
        match text.parse::<toml::Table>() {
            Ok(table) => self.table(path, "", &table),
            Err(error) => self.problem(path.display().to_string(), error.message().to_owned()),
        }
    }

    fn table(&mut self, path: &Path, prefix: &str, table: &toml::Table) {
        for (name, value) in table {
            let key = format!("{prefix}{name}");
            let place = format!("{} key `{key}`", path.display());
            let text = match value {
                toml::Value::Table(inner) => {
                    self.table(path, &format!("{key}."), inner);
                    continue;
                }
                toml::Value::String(text) => text.clone(),
                toml::Value::Array(list) => list
                    .iter()
                    .map(|item| item.as_str().map_or(item.to_string(), str::to_owned))
                    .collect::<Vec<_>>()
                    .join(","),
                other => other.to_string(),
            };
            self.set(&key, text, place);
        }
    }

    fn environment(&mut self, env: &BTreeMap<String, String>) {
        // A scaler may be newer than the agent that it starts.
        let yes = |value: &str| matches!(value, "true" | "1");
        let of_file = self.entries.get("scaler_managed").is_some_and(|entry| yes(&entry.value));
        let of_env =
            ["KICI_SCALER_MANAGED", "KICI_DEV"].iter().any(|name| env.get(*name).is_some_and(|value| yes(value)));
        let is_lenient = of_file || of_env;
        for (name, value) in env.iter().filter(|(name, _)| name.starts_with("KICI_")) {
            match KEYS.iter().find(|key| key.env == name) {
                Some(key) => self.set(key.name, value.clone(), name.clone()),
                None if keys::is_foreign(name) => {}
                None => {
                    let known = KEYS.iter().map(|key| key.env);
                    let hint = nearest(name, known).map_or(String::new(), |near| format!("; did you mean {near}?"));
                    let message = format!("is not a variable of the agent{hint}");
                    let all = if is_lenient { &mut self.ignored } else { &mut self.problems };
                    all.push(Problem { place: name.clone(), message });
                }
            }
        }
    }

    fn set(&mut self, name: &str, value: String, place: String) {
        match KEYS.iter().find(|key| key.name == name) {
            Some(key) => drop(self.entries.insert(key.name, Entry { value, place })),
            None => {
                let hint = nearest(name, KEYS.iter().map(|key| key.name));
                let hint = hint.map_or(String::new(), |near| format!("; did you mean `{near}`?"));
                self.problem(place, format!("is not a key of the agent{hint}"));
            }
        }
    }

    /// A value as `parse` reads it; `None` when it is not set or wrong.
    fn parsed<T>(&mut self, name: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let entry = self.entries.get(name)?.clone();
        match parse(&entry.value) {
            Ok(value) => Some(value),
            Err(message) => {
                self.problem(entry.place, message);
                None
            }
        }
    }

    fn number(&mut self, name: &str, default: u64, min: u64, max: u64) -> u64 {
        let parse = |text: &str| match text.parse::<u64>() {
            Ok(n) if (min..=max).contains(&n) => Ok(n),
            _ => Err(format!("`{text}` is not a number from {min} to {max}")),
        };
        self.parsed(name, parse).unwrap_or(default)
    }

    fn millis(&mut self, name: &str, default: u64) -> Duration {
        Duration::from_millis(self.number(name, default, 1, 10 * 365 * 24 * 3_600_000))
    }

    fn boolean(&mut self, name: &str, default: bool) -> bool {
        let parse = |text: &str| match text {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            _ => Err(format!("`{text}` is not true, false, 1 or 0")),
        };
        self.parsed(name, parse).unwrap_or(default)
    }

    fn token(&mut self) -> Option<SecretString> {
        if let (Some(_), Some(file)) = (self.entries.get("agent_token"), self.entries.get("agent_token_file")) {
            let place = file.place.clone();
            self.problem(place, "agent_token is set too; keep one of the two");
        }
        let from_file = self.parsed("agent_token_file", |path| {
            let text = std::fs::read_to_string(path).map_err(|error| format!("`{path}` cannot be read: {error}"))?;
            keys::token(text.trim()).map_err(|message| format!("the text in `{path}` {message}"))
        });
        let direct = self.parsed("agent_token", |text| keys::token(text).map_err(|m| format!("the value {m}")));
        direct.or(from_file)
    }

    fn host_env(&mut self, env: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let names = self.parsed("pass_env", |text| {
            let names = keys::list(text);
            match names.iter().find(|name| name.starts_with("KICI_")) {
                Some(name) => Err(format!("`{name}` is never passed on: KICI_ names belong to the agent")),
                None => Ok(names),
            }
        });
        let allowed = crate::steps::environment::HOST_VARIABLES.iter().map(|name| (*name).to_owned());
        let names = allowed.chain(names.unwrap_or_default());
        names.filter_map(|name| env.get(&name).map(|value| (name, value.clone()))).collect()
    }

    fn config(&mut self, env: &BTreeMap<String, String>) -> Option<Config> {
        if !self.entries.contains_key("orchestrator_url") {
            self.problem("orchestrator_url", "is not set; give KICI_ORCHESTRATOR_URL or --orchestrator-url");
        }
        let url = self.parsed("orchestrator_url", keys::url);
        let state_dir = self.parsed("state_dir", keys::directory).unwrap_or_else(|| keys::default_state_dir(env));
        let work_dir = self.parsed("work_dir", keys::directory).unwrap_or_else(|| state_dir.join("work"));
        let runtime_dir = self.parsed("runtime_dir", keys::directory);
        let runtime_dir = runtime_dir.unwrap_or_else(|| keys::default_runtime_dir(env, &state_dir));
        if let Err(message) = crate::credentials::check_runtime_dir(&runtime_dir) {
            let place = self.entries.get("runtime_dir").map_or("runtime_dir".to_owned(), |entry| entry.place.clone());
            self.problem(place, message);
        }
        let agent_env = self.host_env(env);
        let mut host_env = agent_env.clone();
        let isolation = self.isolation(env);
        let containers = self.containers();
        let engine_env = ["DOCKER_HOST", "XDG_RUNTIME_DIR"];
        let engine_env =
            engine_env.iter().filter_map(|name| Some(((*name).to_owned(), env.get(*name)?.clone()))).collect();
        if let Some(user) = &isolation.user {
            host_env.insert("HOME".to_owned(), user.home.display().to_string());
            host_env.insert("USER".to_owned(), user.name.clone());
            host_env.insert("SHELL".to_owned(), user.shell.display().to_string());
        }
        let scaled = self.scaled();
        let of_scaler = scaled.managed;
        Some(Config {
            agent_id: self.parsed("agent_id", |text| AgentId::new(text).map_err(|error| error.to_string())),
            agent_token: self.token(),
            labels: self.parsed("labels", |text| keys::labels(text, of_scaler)).unwrap_or_default(),
            properties: self.parsed("properties", keys::properties).unwrap_or_default(),
            max_concurrency: u32::try_from(self.number("max_concurrency", 1, 1, 1_024)).unwrap_or(1),
            log_level: self.parsed("log_level", |text| Ok(text.to_owned())).unwrap_or_else(|| "info".to_owned()),
            log_format: self.parsed("log_format", keys::log_format).unwrap_or_else(|| "auto".to_owned()),
            default_step_timeout: self.millis("default_step_timeout_ms", 1_800_000),
            max_grace_period: self.millis("max_grace_period_ms", 30_000),
            shutdown_grace: self.millis("shutdown_grace_ms", 10_000),
            git_timeout: self.millis("git.timeout_ms", 120_000),
            git_allow_insecure_http: self.boolean("git.allow_insecure_http", false),
            git_inherit_host_helpers: self.boolean("git.inherit_host_helpers", false),
            log_spool_max_bytes: self.number("log_spool_max_bytes", 256 << 20, 1 << 16, 1 << 50),
            max_log_size_bytes: self.number("max_log_size_bytes", 512 << 20, 0, 1 << 50),
            job_heartbeat_interval: self.millis("job_heartbeat_interval_ms", 60_000),
            keep_running_when_fenced: self.boolean("keep_running_when_fenced", false),
            host_env,
            agent_env,
            isolation,
            containers,
            engine_env,
            reset: self.reset(),
            scaled,
            pressure: self.parsed("backpressure_mode", parts::pressure).unwrap_or_default(),
            listen: self.listen(),
            private_files: self.private_files(),
            ignored: std::mem::take(&mut self.ignored),
            state_dir,
            work_dir,
            runtime_dir,
            orchestrator_url: url?,
        })
    }
}

fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known.map(|k| (strsim::damerau_levenshtein(name, k), k)).filter(|(d, _)| *d <= 3).min().map(|(_, k)| k)
}

#[cfg(test)]
mod tests;
