//! Programs that are killed, frozen and started again, as a supervisor of the host would.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

/// How often the supervisor looks whether a program has ended by itself.
const LOOK: Duration = Duration::from_millis(250);

type Make = dyn Fn() -> Command + Send + Sync;

/// One program. A fault holds it from its beginning to its end, so that two never mix.
pub(super) struct Supervised {
    pub(super) name: String,
    pub(super) log: PathBuf,
    make: Box<Make>,
    child: Mutex<Option<Child>>,
    ended_by_itself: AtomicU32,
    stopping: AtomicBool,
    /// Signals go to its children as well: they lead process groups of their own.
    with_children: bool,
}

impl Supervised {
    pub(super) fn new(
        name: impl Into<String>,
        directory: &std::path::Path,
        with_children: bool,
        make: impl Fn() -> Command + Send + Sync + 'static,
    ) -> Self {
        let name = name.into();
        Self {
            log: directory.join(format!("{name}.log")),
            name,
            make: Box::new(make),
            child: Mutex::new(None),
            ended_by_itself: AtomicU32::new(0),
            stopping: AtomicBool::new(false),
            with_children,
        }
    }

    pub(super) async fn start(&self) -> Result<()> {
        let mut child = self.child.lock().await;
        self.launch(&mut child)
    }

    fn launch(&self, child: &mut Option<Child>) -> Result<()> {
        let output = fs::File::options().create(true).append(true).open(&self.log);
        let output = output.with_context(|| self.log.display().to_string())?;
        let mut command = (self.make)();
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0).kill_on_drop(true);
        *child = Some(command.spawn().with_context(|| format!("{} does not start", self.name))?);
        Ok(())
    }

    /// SIGKILL, then a new start.
    pub(super) async fn kill_and_restart(&self, rest: Duration) -> Result<()> {
        let mut child = self.child.lock().await;
        self.end(&mut child).await;
        tokio::time::sleep(rest).await;
        self.launch(&mut child)
    }

    /// SIGSTOP, then SIGCONT.
    pub(super) async fn freeze(&self, lasts: Duration) {
        let child = self.child.lock().await;
        let Some(pid) = child.as_ref().and_then(Child::id) else { return };
        let all = self.family(pid);
        signal(&all, Signal::SIGSTOP);
        tokio::time::sleep(lasts).await;
        signal(&all, Signal::SIGCONT);
    }

    /// Ends it for good.
    pub(super) async fn finish(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let mut child = self.child.lock().await;
        self.end(&mut child).await;
    }

    async fn end(&self, child: &mut Option<Child>) {
        let Some(mut child) = child.take() else { return };
        if let Some(pid) = child.id() {
            signal(&self.family(pid), Signal::SIGKILL);
        }
        // Killed: the wait is short and only reaps.
        let _ = child.wait().await;
    }

    fn family(&self, pid: u32) -> Vec<i32> {
        let mut all = vec![pid.cast_signed()];
        if self.with_children {
            all.extend(children_of(pid));
        }
        all
    }

    /// Starts it again whenever it has ended by itself.
    pub(super) async fn supervise(&self) {
        while !self.stopping.load(Ordering::SeqCst) {
            tokio::time::sleep(LOOK).await;
            let Ok(mut child) = self.child.try_lock() else { continue };
            let ended = child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() && !self.stopping.load(Ordering::SeqCst) {
                self.ended_by_itself.fetch_add(1, Ordering::SeqCst);
                if let Err(error) = self.launch(&mut child) {
                    eprintln!("{}: {error:#}", self.name);
                }
            }
        }
    }

    /// How often it ended although nobody killed it.
    pub(super) fn own_ends(&self) -> u32 {
        self.ended_by_itself.load(Ordering::SeqCst)
    }
}

fn signal(pids: &[i32], signal: Signal) {
    for pid in pids {
        // One that has just ended is as good.
        let _ = kill(Pid::from_raw(*pid), signal);
    }
}

/// Direct children, as the kernel tells (proc(5), `stat`, 4th field).
fn children_of(parent: u32) -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pid = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<i32>().ok();
    entries
        .filter_map(pid)
        .filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // The name of the program may hold spaces and brackets.
            let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
            fields.split(' ').nth(1).is_some_and(|of| of.parse() == Ok(parent))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_ends_by_itself_is_counted_and_started_again_and_a_killed_one_is_not_counted() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("starts");
        let script = format!("echo x >> {0}; [ $(wc -l < {0}) -gt 1 ] && exec sleep 600", file.display());
        let program = Supervised::new("test", directory.path(), true, move || {
            let mut command = Command::new("sh");
            command.args(["-c", &script]);
            command
        });
        program.start().await.unwrap();
        let starts = || fs::read_to_string(&file).unwrap_or_default().lines().count();
        let wait = async |count| {
            while starts() < count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let supervised = async {
            wait(2).await;
            program.kill_and_restart(Duration::ZERO).await.unwrap();
            wait(3).await;
            program.finish().await;
        };
        tokio::join!(program.supervise(), supervised);
        assert_eq!((starts(), program.own_ends()), (3, 1));
    }
}
