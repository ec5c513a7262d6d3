//! Settings that belong together.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kici_sys::cgroup::Limits;
use kici_sys::confine::User;
use secrecy::SecretString;

use super::{Config, Reader, keys};

/// Processes and threads of one job, where the host can limit them.
const MAX_PROCESSES: u64 = 4_096;
const DEFAULT_PORT: u64 = 8_080;

macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$what:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name { $($(#[$what])* $variant,)* }

        impl $name {
            /// As it stands in a configuration.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            fn parse(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(format!("`{text}` is not one of: {}", [$($word),*].join(", "))),
                }
            }
        }
    };
}

words! {
    /// Whether steps are kept from what builds do not need.
    Hardening {
        /// With all that the kernel has for it.
        #[default]
        Auto = "auto",
        /// Not: for hosts whose jobs administer the host.
        Off = "off",
    }
}

words! {
    /// After which jobs the reset command runs.
    ResetOn {
        /// After each.
        #[default]
        Always = "always",
        /// After those that did not succeed.
        Failure = "on-failure",
    }
}

words! {
    /// What happens to output while too much waits for the orchestrator.
    Pressure {
        /// The command waits; nothing is lost.
        #[default]
        Pause = "pause",
        /// The command goes on; what does not fit is left out, counted and said.
        Drop = "drop",
    }
}

/// What steps may do on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Isolation {
    /// Whether they are kept from what builds do not need.
    pub hardening: Hardening,
    /// What they may write besides their workspace and temporary files.
    pub writable: Vec<PathBuf>,
    /// Whether they run in namespaces of their own, by bwrap(1).
    pub sandbox: bool,
    /// Whether the sandbox has the network of the host.
    pub network: bool,
    /// Limits of a job.
    pub limits: Limits,
    /// Another user for them.
    pub user: Option<Arc<User>>,
    /// Whether what a job leaves running is ended with it.
    pub orphan_cleanup: bool,
}

/// What happens between two jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reset {
    /// A command for `sh -c`.
    pub command: Option<String>,
    /// Its limit.
    pub timeout: Duration,
    /// After which jobs.
    pub on: ResetOn,
    /// Whether the agent takes no more work after `threshold` failures in a row.
    pub drain_on_failure: bool,
    /// How many.
    pub threshold: u32,
}

/// Where health and metrics are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Address and port.
    pub address: SocketAddr,
    /// The port was named: an agent that cannot have it does not start.
    pub asked: bool,
}

/// What holds for an agent that a scaler started.
#[derive(Clone, Debug)]
pub struct Scaled {
    /// A scaler started it.
    pub managed: bool,
    /// Buys this agent its token, once; not used where there is a token.
    pub claim_code: Option<SecretString>,
    /// How long it stays without work; zero is not at all.
    pub idle: Duration,
    /// How long it waits for the job that it was started for.
    pub pending_dispatch: Duration,
}

pub(super) fn pressure(text: &str) -> Result<Pressure, String> {
    Pressure::parse(text)
}

fn network(text: &str) -> Result<bool, String> {
    match text {
        "isolated" => Ok(false),
        "host" => Ok(true),
        _ => Err(format!("`{text}` is not isolated or host")),
    }
}

fn user(name: &str) -> Result<Arc<User>, String> {
    if kici_sys::host::uid() != 0 {
        return Err("needs an agent that runs as root, which alone can become another user".to_owned());
    }
    match User::named(name) {
        Ok(Some(user)) if user.uid == 0 => Err(format!("`{name}` is root; name a user without rights")),
        Ok(Some(user)) => Ok(Arc::new(user)),
        Ok(None) => {
            Err(format!("this host has no user `{name}`; make one with: useradd --system --create-home {name}"))
        }
        Err(error) => Err(format!("the users of this host cannot be read: {error}")),
    }
}

fn directories(text: &str) -> Result<Vec<PathBuf>, String> {
    keys::list(text).iter().map(|path| keys::directory(path)).collect()
}

impl Config {
    /// The first directory on the way to the workspaces that the user of the steps may not enter, with that user.
    #[must_use]
    pub fn closed_way(&self) -> Option<(&Path, &User)> {
        let user = self.isolation.user.as_deref()?;
        let closed = |dir: &&Path| {
            dir.metadata().is_ok_and(|meta| {
                let class = if meta.uid() == user.uid {
                    0o100
                } else if user.gid == meta.gid() || user.groups.contains(&meta.gid()) {
                    0o010
                } else {
                    0o001
                };
                meta.mode() & class == 0
            })
        };
        // The agent opens its own directories itself.
        let dir = self.work_dir.ancestors().skip(1).filter(|dir| *dir != self.state_dir).find(closed)?;
        Some((dir, user))
    }
}

impl Reader {
    /// A limit; 0 is none.
    fn limit(&mut self, name: &str) -> Option<u64> {
        Some(self.number(name, 0, 0, 1 << 50)).filter(|limit| *limit > 0)
    }

    pub(super) fn isolation(&mut self, env: &BTreeMap<String, String>) -> Isolation {
        let sandbox = self.boolean("sandbox", false);
        if sandbox && program("bwrap", env).is_none() {
            let place = self.entries.get("sandbox").map_or_else(String::new, |entry| entry.place.clone());
            self.problem(place, format!("needs bwrap, which is not in PATH; {BWRAP_HINT}"));
        }
        let user = self.parsed("sandbox_user", user);
        let home = match &user {
            Some(user) => Some(user.home.clone()),
            None => env.get("HOME").map(PathBuf::from).filter(|home| home.is_absolute()),
        };
        // A sandbox has a home of its own.
        let home = home.filter(|_| !sandbox);
        Isolation {
            hardening: self.parsed("hardening", Hardening::parse).unwrap_or_default(),
            writable: self.parsed("writable_paths", directories).unwrap_or_else(|| home.into_iter().collect()),
            sandbox,
            network: self.parsed("sandbox_network", network).unwrap_or(false),
            limits: Limits {
                processes: Some(MAX_PROCESSES),
                memory_bytes: self.limit("sandbox_memory_bytes"),
                nano_cpus: self.limit("sandbox_nano_cpus"),
            },
            user,
            orphan_cleanup: self.boolean("orphan_cleanup", true),
        }
    }

    pub(super) fn reset(&mut self) -> Reset {
        let text = |text: &str| if text.trim().is_empty() { Err("is empty".to_owned()) } else { Ok(text.to_owned()) };
        Reset {
            command: self.parsed("between_jobs_reset_command", text),
            timeout: self.millis("between_jobs_reset_timeout_ms", 60_000),
            on: self.parsed("between_jobs_reset_run_on", ResetOn::parse).unwrap_or_default(),
            drain_on_failure: self.boolean("drain_on_reset_failure", false),
            threshold: u32::try_from(self.number("reset_failure_threshold", 3, 1, 1_000)).unwrap_or(3),
        }
    }

    pub(super) fn scaled(&mut self) -> Scaled {
        let idle = self.parsed("scaler_idle_timeout_ms", |text| {
            let ms = text.parse::<i64>().map_err(|_| format!("`{text}` is not a number"))?;
            Ok(Duration::from_millis(u64::try_from(ms).unwrap_or(0)))
        });
        Scaled {
            managed: self.boolean("scaler_managed", false),
            claim_code: self.parsed("scaler_claim_code", keys::claim_code),
            idle: idle.unwrap_or(Duration::from_millis(5_000)),
            pending_dispatch: self.millis("scaler_pending_dispatch_timeout_ms", 60_000),
        }
    }

    pub(super) fn listen(&mut self) -> Option<Listen> {
        let port = u16::try_from(self.number("port", DEFAULT_PORT, 0, 65_535)).unwrap_or(0);
        let address = |text: &str| text.parse::<IpAddr>().map_err(|_| format!("`{text}` is not an address"));
        let bind = self.parsed("bind", address).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let asked = self.entries.contains_key("port");
        (port > 0).then(|| Listen { address: SocketAddr::new(bind, port), asked })
    }

    /// Where the token, or what buys it, was read from.
    pub(super) fn private_files(&self) -> Vec<PathBuf> {
        let file = self.entries.get("agent_token_file").map(|entry| PathBuf::from(&entry.value));
        // The place of a key in a file names the file.
        let in_file = |key: &str| self.entries.get(key).and_then(|entry| entry.place.split_once(" key `"));
        let configs = ["agent_token", "scaler_claim_code"].into_iter().filter_map(in_file);
        file.into_iter().chain(configs.map(|(path, _)| PathBuf::from(path))).collect()
    }
}

/// How bwrap comes onto a host.
pub(crate) const BWRAP_HINT: &str =
    "install the package bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)";

/// Where a program is, by the PATH of `env`.
pub(crate) fn program(name: &str, env: &BTreeMap<String, String>) -> Option<PathBuf> {
    env.get("PATH")?.split(':').map(|dir| PathBuf::from(dir).join(name)).find(|path| path.is_file())
}
