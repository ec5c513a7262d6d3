//! The two programs that run beside us, and their end.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// How long a program may take to stop before it is killed.
const GRACE: Duration = Duration::from_secs(15);

/// What is shown of the log of a program that ended by itself.
const TAIL_BYTES: u64 = 4_096;

/// A program in a process group of its own: the terminal's Ctrl-C reaches only us, and we decide the order of the end.
pub(crate) struct Program {
    name: &'static str,
    child: Child,
    group: Pid,
    log: PathBuf,
    pid_file: PathBuf,
}

impl Program {
    /// Starts a program. What it prints goes to `<data>/<name>.log`.
    pub(crate) fn start(name: &'static str, mut command: Command, data: &Path) -> Result<Self> {
        let log = data.join(format!("{name}.log"));
        let output = File::create(&log).with_context(|| log.display().to_string())?;
        command
            .current_dir(data)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .kill_on_drop(true);
        let child = command.spawn().with_context(|| format!("{name} does not start"))?;
        let id = child.id().context("the program ended at once")?;
        let pid_file = data.join(format!("{name}.pid"));
        fs::write(&pid_file, id.to_string())?;
        Ok(Self { name, child, group: Pid::from_raw(id.cast_signed()), log, pid_file })
    }

    /// Its process.
    pub(crate) fn pid(&self) -> i32 {
        self.group.as_raw()
    }

    /// The end of what it printed.
    pub(crate) fn said(&self) -> String {
        tail(&self.log)
    }

    /// Waits until the program ends by itself, which it should not, and says what it said last.
    pub(crate) async fn ended(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => {
                anyhow::anyhow!(
                    "{} ended ({status}); the end of {}:\n{}",
                    self.name,
                    self.log.display(),
                    tail(&self.log)
                )
            }
            Err(error) => anyhow::Error::new(error).context(format!("{} cannot be waited for", self.name)),
        }
    }

    /// Asks the program to stop, waits, and kills what is left of its group.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let status = self.stop_within(GRACE).await;
        // The group may outlive its leader: what remains of it goes now.
        signal(self.group, Signal::SIGKILL)?;
        let _ = fs::remove_file(&self.pid_file);
        match status? {
            Some(_) => Ok(()),
            None => bail!(
                "{} did not stop within {} s and was killed; see {}",
                self.name,
                GRACE.as_secs(),
                self.log.display()
            ),
        }
    }

    async fn stop_within(&mut self, grace: Duration) -> Result<Option<ExitStatus>> {
        if self.child.id().is_none() {
            return Ok(self.child.try_wait()?);
        }
        signal(self.group, Signal::SIGTERM)?;
        if let Ok(status) = timeout(grace, self.child.wait()).await {
            return Ok(Some(status?));
        }
        signal(self.group, Signal::SIGKILL)?;
        self.child.wait().await?;
        Ok(None)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Only reached by a way out that did not stop it, a second Ctrl-C or a panic; there is nobody to tell.
        let _ = signal(self.group, Signal::SIGKILL);
    }
}

/// One of our programs with `variables` as its only `KICI_*` variables: what stands in this shell is not meant for it.
pub(crate) fn kici(binary: &Path, variables: &[(&str, String)]) -> Command {
    let mut command = Command::new(binary);
    for (key, _) in std::env::vars_os() {
        if key.to_string_lossy().starts_with("KICI_") {
            command.env_remove(key);
        }
    }
    command.envs(variables.iter().map(|(key, value)| (*key, value)));
    command
}

/// Ends programs that a killed `xtask dev` left in this data directory. The caller holds the directory's lock, so
/// nobody else looks after them.
pub(crate) async fn end_leftovers(data: &Path, names: &[&str]) -> Result<()> {
    for name in names {
        let pid_file = data.join(format!("{name}.pid"));
        let Ok(text) = fs::read_to_string(&pid_file) else { continue };
        let Ok(id) = text.trim().parse::<i32>() else { continue };
        // The number may belong to somebody else by now: it is ours only if it runs our program in our directory.
        let ours = || {
            let link = |what: &str| fs::read_link(format!("/proc/{id}/{what}")).unwrap_or_default();
            let program =
                link("exe").to_string_lossy().trim_end_matches(" (deleted)").ends_with(&format!("/kici-{name}"));
            program && link("cwd") == data
        };
        if ours() {
            eprintln!("stopping kici-{name} (process {id}), left from before");
            signal(Pid::from_raw(id), Signal::SIGTERM)?;
            // It is not our child, so its end cannot be awaited.
            let gone = async {
                while ours() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            if timeout(GRACE, gone).await.is_err() {
                signal(Pid::from_raw(id), Signal::SIGKILL)?;
            }
        }
        fs::remove_file(&pid_file)?;
    }
    Ok(())
}

/// Signals a process group; one that is gone is no fault.
fn signal(group: Pid, signal: Signal) -> Result<()> {
    match killpg(group, signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("{signal} to process group {group}")),
    }
}

fn tail(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    };
    read().unwrap_or_else(|error| format!("(not readable: {error})"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tokio::io::AsyncReadExt;

    use super::*;

    fn script(data: &Path, text: &str) -> PathBuf {
        let path = data.join("program");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[tokio::test]
    async fn an_early_end_shows_the_log() {
        let data = tempfile::tempdir().unwrap();
        let binary = script(data.path(), "echo \"x=$KICI_X\"; exit 3");
        let mut program = Program::start("test", kici(&binary, &[("KICI_X", "1".into())]), data.path()).unwrap();
        let error = program.ended().await.to_string();
        assert!(error.contains("exit status: 3") && error.ends_with("x=1"), "{error}");
        program.stop().await.unwrap();
    }

    #[tokio::test]
    async fn stop_ends_the_whole_group() {
        let data = tempfile::tempdir().unwrap();
        let fifo = data.path().join("alive");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let binary = script(data.path(), "exec 3>alive; trap '' TERM; sleep 600 & echo up >&3; wait");
        let mut program = Program::start("test", kici(&binary, &[]), data.path()).unwrap();
        let mut alive = tokio::fs::File::open(&fifo).await.unwrap();
        alive.read_exact(&mut [0; 3]).await.unwrap();
        assert_eq!(program.stop_within(Duration::from_millis(50)).await.unwrap(), None);
        program.stop().await.unwrap();
        // The end of the file comes when the last process of the group is gone.
        assert_eq!(alive.read(&mut [0; 1]).await.unwrap(), 0);
        assert!(!data.path().join("test.pid").exists());
    }
}
