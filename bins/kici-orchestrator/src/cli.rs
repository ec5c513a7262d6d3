//! Arguments.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use kici_control_plane::config::Layers;

/// Takes in events, plans runs, gives jobs to agents, keeps logs and results.
#[derive(Debug, Parser)]
#[command(name = "kici-orchestrator", version)]
pub struct Cli {
    /// Configuration file (TOML).
    #[arg(long, env = "KICI_CONFIG", global = true)]
    pub config: Option<PathBuf>,
    /// Directory for everything local; `instance.data_dir`.
    #[arg(long, global = true)]
    pub data_dir: Option<String>,
    /// Address of REST, webhooks, metrics and gRPC; `server.listen`.
    #[arg(long, global = true)]
    pub listen: Option<String>,
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs the orchestrator; the default.
    Run,
    /// Looks at the configuration without starting.
    #[command(subcommand)]
    Config(ConfigCommand),
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Checks flags, variables and file; exits 2 when something is wrong.
    Check,
    /// Prints the reference page of all keys (Markdown).
    #[command(hide = true)]
    Reference,
}

impl Cli {
    /// The layers that the configuration is merged from.
    ///
    /// # Errors
    /// When a named file cannot be read.
    #[allow(clippy::disallowed_methods, reason = "the one place where the environment is read")]
    pub fn layers(&self) -> anyhow::Result<Layers> {
        let mut flags = Vec::new();
        flags.extend(self.data_dir.clone().map(|dir| ("instance.data_dir", dir)));
        flags.extend(self.listen.clone().map(|address| ("server.listen", address)));
        let variables: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        let file = match &self.config {
            // A file that was named must be there.
            Some(path) => Some(path.clone()),
            None => default_files(&variables).into_iter().find(|path| path.exists()),
        };
        let file = file.map(read).transpose()?;
        Ok(Layers { flags, variables, file })
    }
}

fn read(path: PathBuf) -> anyhow::Result<(PathBuf, String)> {
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok((path, text))
}

fn default_files(variables: &BTreeMap<String, String>) -> Vec<PathBuf> {
    let config_home = variables.get("XDG_CONFIG_HOME").map(PathBuf::from);
    let config_home = config_home.or_else(|| variables.get("HOME").map(|home| Path::new(home).join(".config")));
    let mut files = vec![PathBuf::from("/etc/kici/orchestrator.toml")];
    files.extend(config_home.map(|dir| dir.join("kici/orchestrator.toml")));
    files
}
