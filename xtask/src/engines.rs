//! Docker and Podman for tests: engines of their own, with their own data and sockets, started before and ended after.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use tokio::time::Instant;

use crate::workspace::Workspace;

/// How long an engine may take to answer, and to end.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);

/// Podman as root without a session manager, also where control groups are of the first version beside the second.
const PODMAN: &str = r#"[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"#;

type Start = fn(&mut Engines) -> Result<PathBuf>;

/// The engines, the variables that name their sockets, and how they are started.
const ALL: [(&str, &str, Start); 2] =
    [("docker", "KICI_TEST_DOCKER_HOST", Engines::docker), ("podman", "KICI_TEST_PODMAN_HOST", Engines::podman)];

/// Engines that run for as long as this lives.
pub(crate) struct Engines {
    dir: PathBuf,
    running: Vec<Child>,
}

/// Starts the engines that are installed, and names them to tests. Those that are named already are left alone.
pub(crate) fn start(workspace: &Workspace) -> Result<Engines> {
    let mut engines =
        Engines { dir: std::env::temp_dir().join(format!("kici-engines-{}", std::process::id())), running: Vec::new() };
    for (name, variable, start) in ALL {
        let required = format!("KICI_REQUIRE_{}", name.to_uppercase());
        if workspace.shell.var_os(variable).is_none() {
            if !Uid::effective().is_root() {
                if workspace.is_ci() {
                    bail!("tests of containers need root, or {variable}=unix:///path of a {name} of their own");
                }
                eprintln!(
                    "note: not root, so tests with {name} are skipped; start one and set {variable}=unix:///its/socket"
                );
                continue;
            }
            let socket = start(&mut engines).with_context(|| format!("{name} cannot be started for tests"))?;
            workspace.shell.set_var(variable, format!("unix://{}", socket.display()));
        }
        // It is there, so a test that cannot use it has found a fault.
        workspace.shell.set_var(required, "1");
    }
    Ok(engines)
}

impl Engines {
    fn docker(&mut self) -> Result<PathBuf> {
        let dir = self.dir.join("docker");
        std::fs::create_dir_all(&dir)?;
        let socket = dir.join("docker.sock");
        let mut command = Command::new("dockerd");
        // Jobs have networks of their own; another engine of this machine may have the usual bridge.
        command.arg("--bridge").arg("none").arg("--host").arg(format!("unix://{}", socket.display()));
        for (option, place) in [("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "pid")] {
            command.arg(option).arg(dir.join(place));
        }
        self.spawn(command, &dir, &socket)?;
        Ok(socket)
    }

    fn podman(&mut self) -> Result<PathBuf> {
        let dir = self.dir.join("podman");
        std::fs::create_dir_all(&dir)?;
        let (socket, settings) = (dir.join("podman.sock"), dir.join("containers.conf"));
        std::fs::write(&settings, PODMAN)?;
        let mut command = Command::new("podman");
        command.env("CONTAINERS_CONF", settings);
        for (option, place) in [("--root", "data"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
            command.arg(option).arg(dir.join(place));
        }
        command.args(["system", "service", "--time=0"]).arg(format!("unix://{}", socket.display()));
        self.spawn(command, &dir, &socket)?;
        Ok(socket)
    }

    fn spawn(&mut self, mut command: Command, dir: &Path, socket: &Path) -> Result<()> {
        let log = dir.join("log");
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let mut child = command.spawn().with_context(|| command.get_program().display().to_string())?;
        let until = Instant::now() + LIMIT;
        let ended = loop {
            if std::os::unix::net::UnixStream::connect(socket).is_ok() {
                break None;
            }
            if let Some(status) = child.try_wait()? {
                break Some(format!("it ended with {status}"));
            }
            if Instant::now() > until {
                break Some("it does not listen".to_owned());
            }
            std::thread::sleep(PAUSE);
        };
        self.running.push(child);
        match ended {
            None => Ok(()),
            Some(why) => {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let last: Vec<&str> = said.lines().rev().take(10).collect();
                bail!("{why}; it said last: {}", last.into_iter().rev().collect::<Vec<_>>().join("\n"))
            }
        }
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        for child in &mut self.running {
            // Asked, not killed: it unmounts what it mounted.
            if let Ok(pid) = i32::try_from(child.id()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
            let until = Instant::now() + LIMIT;
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > until {
                    let _ = child.kill();
                    let _ = child.wait();
                    break;
                }
                std::thread::sleep(PAUSE);
            }
        }
        // What an engine leaves mounted would keep its directory. Nothing is said here: a log ends with the result of the tests.
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let ours =
            mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|at| Path::new(at).starts_with(&self.dir));
        for mount in ours {
            let _ = Command::new("umount").arg("--lazy").arg(mount).stderr(Stdio::null()).status();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
