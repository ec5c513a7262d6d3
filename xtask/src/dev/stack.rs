//! The orchestrator and the agent of one `xtask dev`, and the directory they live in.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use xshell::cmd;

use super::children::{self, Program, kici};
use super::server::Server;
use crate::workspace::Workspace;

/// The port of a KiCI server.
const PORT: u16 = 4000;

/// Host variables that steps may see besides the agent's own allow-list: where the Rust toolchain is, and how to get
/// out of the house.
const PASSED: [&str; 10] = [
    "CARGO_HOME",
    "RUSTUP_HOME",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];

/// Where a toolchain lies below the home directory if nothing else is said. Steps have a home of their own.
const TOOLCHAIN: [(&str, &str); 2] = [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")];

/// Our directory, locked against a second `xtask dev`.
pub(crate) struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Opens the directory and makes it first if need be. `fresh` empties it, but only if it is one of ours.
    pub(crate) fn open(path: &Path, fresh: bool) -> Result<Self> {
        let marker = path.join("dev.lock");
        if path.is_dir() && fs::read_dir(path)?.next().is_some() && !marker.is_file() {
            bail!("{} is not a directory of `cargo xtask dev`; name another with --data", path.display());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(path).with_context(|| path.display().to_string())?;
        let lock = File::create(&marker).with_context(|| marker.display().to_string())?;
        if lock.try_lock().is_err() {
            bail!("another `cargo xtask dev` uses {}; stop it or name another with --data", path.display());
        }
        if fresh {
            empty(path, &marker)?;
        }
        fs::write(path.join(".gitignore"), "*\n")?;
        Ok(Self { path: path.canonicalize()?, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn empty(path: &Path, except: &Path) -> Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?.path();
        if entry == except {
            continue;
        }
        let result =
            if entry.is_dir() && !entry.is_symlink() { fs::remove_dir_all(&entry) } else { fs::remove_file(&entry) };
        result.with_context(|| format!("{} cannot be removed", entry.display()))?;
    }
    Ok(())
}

/// The running programs.
pub(crate) struct Stack {
    binaries: PathBuf,
    data: PathBuf,
    orchestrator: Program,
    agent: Option<Program>,
    labels: BTreeSet<String>,
    /// The orchestrator's interface.
    pub(crate) server: Server,
}

/// Where the programs are: at `ready`, or where they are built.
pub(crate) fn binaries(workspace: &Workspace, ready: Option<&Path>, release: bool) -> Result<PathBuf> {
    match ready {
        // Programs are started in other directories.
        Some(ready) => std::path::absolute(ready).context("the directory of the programs"),
        None => build(workspace, release),
    }
}

/// Builds the programs and answers where they are.
pub(crate) fn build(workspace: &Workspace, release: bool) -> Result<PathBuf> {
    let profile: &[&str] = if release { &["--release"] } else { &[] };
    // Not quiet: the first time takes minutes.
    let mut build =
        cmd!(workspace.shell, "cargo build --locked -p kici-orchestrator -p kici-agent {profile...}").quiet();
    // What cargo told us about ourselves: build scripts that watch these (ring) would run again, and all above them.
    let ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| ours(&name.to_string_lossy())) {
        build = build.env_remove(name);
    }
    build.run()?;
    // Beside us, or in the folder beside ours. Asking cargo would cost a third of a second.
    let own = std::env::current_exe()?;
    let target = own.ancestors().nth(2).context("xtask does not lie in a target directory")?;
    Ok(target.join(if release { "release" } else { "debug" }))
}

impl Stack {
    /// Starts the orchestrator and waits until it is ready. Repositories below `local_path` may be its sources.
    pub(crate) async fn start(data: &DataDir, binaries: PathBuf, local_path: &Path) -> Result<Self> {
        let data = data.path().to_owned();
        // Ended in the order in which they depend on each other.
        children::end_leftovers(&data, &["agent", "orchestrator"]).await?;
        let address = free_address()?;
        let variables = [
            ("KICI_DATA_DIR", data.display().to_string()),
            ("KICI_SERVER_LISTEN", address.to_string()),
            ("KICI_SOURCES_LOCAL_PATHS", local_path.display().to_string()),
            ("KICI_STARTUP_BACKOFF_MS", "0".into()),
        ];
        let mut orchestrator =
            Program::start("orchestrator", kici(&binaries.join("kici-orchestrator"), &variables), &data)?;
        let server = tokio::select! {
            server = Server::connect(address, &data) => server?,
            error = orchestrator.ended() => return Err(error),
        };
        Ok(Self { binaries, data, orchestrator, agent: None, labels: BTreeSet::new(), server })
    }

    /// Sees to it that an agent with at least these labels runs. Call it while no job runs: an agent that lacks a label
    /// is replaced. Answers whether one was started.
    pub(crate) async fn offer(&mut self, labels: BTreeSet<String>) -> Result<bool> {
        if self.agent.is_some() && labels.is_subset(&self.labels) {
            return Ok(false);
        }
        self.labels.extend(labels);
        if let Some(agent) = self.agent.take() {
            agent.stop().await?;
        }
        let state = self.data.join("agent");
        DirBuilder::new().recursive(true).mode(0o700).create(&state)?;
        let token = self.server.agent_token(&state.join("token")).await?;
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let mut variables = vec![
            ("KICI_ORCHESTRATOR_URL", self.server.url()),
            ("KICI_AGENT_TOKEN", token),
            ("KICI_AGENT_ID", "dev".to_owned()),
            ("KICI_LABELS", self.labels()),
            ("KICI_STATE_DIR", state.display().to_string()),
            ("KICI_AGENT_MAX_CONCURRENCY", jobs.to_string()),
            // Whoever stops us wants to stop; runs were cancelled before.
            ("KICI_SHUTDOWN_GRACE_MS", "2000".to_owned()),
            ("KICI_PASS_ENV", PASSED.join(",")),
            ("KICI_PORT", "0".to_owned()),
            // The files are the developer's own, and so are the toolchains that steps fill.
            ("KICI_HARDENING", "off".to_owned()),
        ];
        let home = std::env::home_dir().unwrap_or_default();
        for (variable, folder) in TOOLCHAIN {
            if std::env::var_os(variable).is_none() && home.join(folder).is_dir() {
                variables.push((variable, home.join(folder).display().to_string()));
            }
        }
        self.agent = Some(Program::start("agent", kici(&self.binaries.join("kici-agent"), &variables), &self.data)?);
        Ok(true)
    }

    /// The labels of the agent, separated by commas.
    pub(crate) fn labels(&self) -> String {
        self.labels.iter().map(String::as_str).collect::<Vec<_>>().join(",")
    }

    /// Waits until one of the programs ends by itself.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        let agent = async {
            match &mut self.agent {
                Some(agent) => agent.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            error = self.orchestrator.ended() => error,
            error = agent => error,
        }
    }

    /// Stops the agent, then the orchestrator, which so takes in what the agent still has to say.
    pub(crate) async fn stop(self) -> Result<()> {
        let agent = match self.agent {
            Some(agent) => agent.stop().await,
            None => Ok(()),
        };
        self.orchestrator.stop().await.and(agent)
    }
}

/// Our usual address, or another free port where that is taken.
fn free_address() -> Result<SocketAddr> {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)) {
        Ok(listener) => Ok(listener.local_addr()?),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
            println!("port {PORT} is taken, using {}", address.port());
            Ok(address)
        }
        Err(error) => Err(error).with_context(|| format!("127.0.0.1:{PORT}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_directory_is_emptied() {
        let top = tempfile::tempdir().unwrap();
        let foreign = top.path().join("foreign");
        fs::create_dir(&foreign).unwrap();
        fs::write(foreign.join("file"), "x").unwrap();
        assert!(DataDir::open(&foreign, true).err().unwrap().to_string().contains("is not a directory of"));

        let ours = top.path().join("ours");
        let held = DataDir::open(&ours, false).unwrap();
        fs::write(ours.join("file"), "x").unwrap();
        assert!(DataDir::open(&ours, true).err().unwrap().to_string().contains("another `cargo xtask dev`"));
        drop(held);
        assert!(ours.join("file").exists());
        drop(DataDir::open(&ours, true).unwrap());
        assert!(!ours.join("file").exists() && ours.join(".gitignore").exists());
    }
}
