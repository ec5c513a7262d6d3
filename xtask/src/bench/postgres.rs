//! A PostgreSQL server of our own, with its defaults: durability on.

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::unistd::{Uid, User};
use tokio::process::Command;

use crate::dev::children::Program;

pub(crate) struct Postgres {
    program: Program,
    port: u16,
    _directory: tempfile::TempDir,
}

impl Postgres {
    pub(crate) async fn start() -> Result<Self> {
        let bin =
            programs().context("PostgreSQL is not installed; `cargo xtask test` installs it, or use --only sqlite")?;
        // The server refuses to run as root.
        let user = if Uid::effective().is_root() {
            Some(User::from_name("postgres")?.context("there is no user postgres")?)
        } else {
            None
        };
        let directory = tempfile::Builder::new().prefix("kici-bench-pg").tempdir()?;
        if let Some(user) = &user {
            chown(directory.path(), Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
        }
        let command = |program: &str| {
            let mut command = Command::new(bin.join(program));
            command.current_dir(directory.path());
            if let Some(user) = &user {
                command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
            }
            command
        };
        let data = directory.path().join("data");
        let made = command("initdb").args(["--auth=trust", "--username=kici", "-D"]).arg(&data).output().await?;
        if !made.status.success() {
            bail!("initdb: {}", String::from_utf8_lossy(&made.stderr));
        }
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let mut server = command("postgres");
        server.arg("-D").arg(&data).args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
        server.arg("-c").arg(format!("unix_socket_directories={}", directory.path().display()));
        let program = Program::start("postgres", server, directory.path())?;
        let postgres = Self { program, port, _directory: directory };
        answers(&bin, port).await?;
        Ok(postgres)
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://kici@127.0.0.1:{}/postgres", self.port)
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.program.stop().await
    }
}

/// Waits until a server answers on `port`.
pub(crate) async fn answers(bin: &Path, port: u16) -> Result<()> {
    for _ in 0..200 {
        let mut probe = Command::new(bin.join("pg_isready"));
        let probe = probe.args(["--quiet", "--host=127.0.0.1", "--port", &port.to_string()]);
        if probe.status().await?.success() {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    bail!("PostgreSQL did not answer within 10 s")
}

/// The newest server on Debian, or the one in the path.
pub(crate) fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok();
    let debian = versions.into_iter().flatten().flatten().map(|version| version.path().join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let whole = |folder: &PathBuf| ["initdb", "postgres", "pg_isready"].iter().all(|name| folder.join(name).is_file());
    // A path may hold links to some of the programs only.
    debian.filter(whole).max().or_else(|| path.into_iter().find(whole))
}
