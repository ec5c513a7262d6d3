//! `cargo xtask dev`: from a checkout to a running CI. Starts an orchestrator and an agent, runs the workflows of a
//! repository at its head, shows the logs live, and runs again after each commit or push.

pub(crate) mod children;
mod hook;
mod labels;
pub(crate) mod repo;
pub(crate) mod report;
mod screen;
pub(crate) mod server;
pub(crate) mod stack;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use kici_engine::ids::RunId;
use tokio::signal::unix::{SignalKind, signal};

use self::hook::{Hook, Installed};
use self::repo::{Push, Repo, ZERO};
use self::screen::Screen;
use self::stack::{DataDir, Stack};
use crate::workspace::Workspace;

/// How often the hook's mark is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// How long runs may take to end after they were cancelled.
const UNWIND: Duration = Duration::from_secs(10);

const SUCCEEDED: u8 = 0;
const FAILED: u8 = 1;
const NOTHING_MATCHED: u8 = 2;
const INTERRUPTED: u8 = 130;

#[derive(Args)]
pub(crate) struct Options {
    /// The repository to run; a sample is made when left out
    #[arg(long, value_name = "PATH")]
    repo: Option<PathBuf>,
    /// End with the result of the first run: 0 success, 1 failed, 2 nothing matched
    #[arg(long)]
    once: bool,
    /// Begin with an empty data directory
    #[arg(long)]
    fresh: bool,
    /// Where database, logs and the sample are kept
    #[arg(long, value_name = "DIR", default_value = ".kici-dev")]
    data: PathBuf,
    /// Use optimised programs
    #[arg(long)]
    release: bool,
    /// Programs that are built already, instead of building them
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "release")]
    binaries: Option<PathBuf>,
}

/// Answers the exit code.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<u8> {
    let data = DataDir::open(&options.data, options.fresh)?;
    let binaries = stack::binaries(workspace, options.binaries.as_deref(), options.release)?;
    let repo = match &options.repo {
        Some(path) => Repo::open(path)?,
        None => sample(workspace, data.path())?,
    };
    server::install_crypto();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(supervise(options, &data, binaries, &repo))
}

/// The repository made from `examples/hello`, as it was left the last time.
fn sample(workspace: &Workspace, data: &Path) -> Result<Repo> {
    let path = data.join("hello");
    if path.join(".git").exists() {
        return Repo::open(&path);
    }
    Repo::create(&workspace.root.join("examples/hello"), &path)
}

/// Runs until the work is done, a program fails, or somebody interrupts; then stops everything in order.
async fn supervise(options: &Options, data: &DataDir, binaries: PathBuf, repo: &Repo) -> Result<u8> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut stack = tokio::select! {
        stack = Stack::start(data, binaries, &repo.path) => stack?,
        _ = interrupt.recv() => return Ok(INTERRUPTED),
        _ = terminate.recv() => return Ok(INTERRUPTED),
    };
    let mut screen = Screen::new();
    let result = {
        let mut session = Session { stack: &mut stack, screen: &mut screen, repo, source: String::new() };
        tokio::select! {
            result = session.work(options.once, data.path()) => result,
            _ = interrupt.recv() => Ok(INTERRUPTED),
            _ = terminate.recv() => Ok(INTERRUPTED),
        }
    };
    screen.finish();
    let ending = async {
        if matches!(result, Ok(INTERRUPTED)) {
            println!("stopping");
            if let Err(error) = stack.server.cancel_all(UNWIND).await {
                eprintln!("warning: runs could not be cancelled: {error:#}");
            }
        }
        stack.stop().await
    };
    tokio::select! {
        stopped = ending => stopped?,
        // Once more means now: dropping the programs kills them.
        _ = interrupt.recv() => return Ok(INTERRUPTED),
    }
    result
}

struct Session<'a> {
    stack: &'a mut Stack,
    screen: &'a mut Screen,
    repo: &'a Repo,
    source: String,
}

impl Session<'_> {
    async fn work(&mut self, once: bool, data: &Path) -> Result<u8> {
        self.source = self.stack.server.source_of(self.repo).await?;
        let (push, detached) = self.repo.head()?;
        self.introduce(&push, detached)?;
        if once {
            return self.run(&push).await;
        }
        // Before the first run: what is committed meanwhile runs after it.
        let tips = self.repo.tips()?;
        let installed = Hook::install(self.repo, data)?;
        self.run(&push).await?;
        let mut hook = match installed {
            Installed::Hook(hook) => {
                println!("\n{} runs the next commit; Ctrl-C stops", hook.script().display());
                Some(hook)
            }
            Installed::Refused(reason) => {
                println!("\nno hook was installed: {reason}; Ctrl-C stops");
                None
            }
        };
        self.watch(hook.as_mut(), tips).await
    }

    fn introduce(&self, push: &Push, detached: bool) -> Result<()> {
        let Repo { path, .. } = self.repo;
        println!("repository {} at {} ({})", path.display(), push.short_sha(), push.branch());
        if detached {
            println!("note: HEAD is detached; it counts as `{}`", push.branch());
        }
        match self.repo.uncommitted()? {
            0 => {}
            1 => println!("note: 1 uncommitted change does not run"),
            count => println!("note: {count} uncommitted changes do not run"),
        }
        println!("server     {}  (token: {})", self.stack.server.url(), self.stack.server.token_file().display());
        Ok(())
    }

    /// Runs what each commit or push brings, until something ends.
    async fn watch(&mut self, mut hook: Option<&mut Hook>, mut tips: BTreeMap<String, String>) -> Result<u8> {
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = look.tick() => {}
                error = self.stack.failed() => return Err(error),
            }
            if !hook.as_mut().is_some_and(|hook| hook.fired()) {
                continue;
            }
            let now = self.repo.tips()?;
            for push in pushes(&tips, &now) {
                println!("\n{} is at {}", push.branch(), push.short_sha());
                self.run(&push).await?;
            }
            tips = now;
        }
    }

    /// Sends one push and shows what comes of it.
    async fn run(&mut self, push: &Push) -> Result<u8> {
        let files = self.repo.workflows(&push.after)?;
        let mistakes = report::mistakes(&files, self.screen.coloured());
        let labels = labels::wanted(&files);
        if self.stack.offer(labels).await? {
            println!("agent      labels {}", self.stack.labels());
        }
        let server = self.stack.server.clone();
        let delivery = server.push(&self.source, push, &self.repo.default_branch()).await?;
        let decided = tokio::select! {
            decided = server.decided(delivery) => decided?,
            error = self.stack.failed() => return Err(error),
        };
        for mistake in &mistakes {
            println!("\n{mistake}");
        }
        if decided.runs.is_empty() {
            return self.nothing(&decided, !mistakes.is_empty());
        }
        if let Some(note) = &decided.delivery.note {
            println!("note: {note}");
        }
        let alone = decided.runs.len() == 1;
        let runs: Vec<(RunId, String)> = decided
            .runs
            .iter()
            .map(|run| (run.run_id, if alone { String::new() } else { run.workflow.clone() }))
            .collect();
        self.follow(&runs).await
    }

    /// Follows runs to their end and reports.
    async fn follow(&mut self, runs: &[(RunId, String)]) -> Result<u8> {
        let server = self.stack.server.clone();
        tokio::select! {
            followed = server.follow(runs, self.screen) => followed?,
            error = self.stack.failed() => return Err(error),
        }
        self.screen.finish();
        let mut details = Vec::new();
        for (run, _) in runs {
            details.push(server.run(*run).await?);
        }
        println!("\n{}", report::results(&details));
        for detail in &details {
            println!("{}", report::verdict(self.screen, detail));
            println!("  {}/api/v1/runs/{}", server.url(), detail.run.id);
        }
        Ok(if report::all_succeeded(&details) { SUCCEEDED } else { FAILED })
    }

    /// Says why nothing ran. What is wrong with the files was shown before where `explained`.
    fn nothing(&self, decided: &server::Decided, explained: bool) -> Result<u8> {
        let delivery = &decided.delivery;
        // The note about a file names only its first mistake.
        let note = delivery.note.iter().filter(|_| !explained);
        let why = delivery.error.iter().chain(note).cloned().collect::<Vec<_>>();
        println!("\nnothing ran: {}", report::nothing(&delivery.status));
        for line in why {
            println!("{line}");
        }
        let decisions = server::decisions(decided).context("the decision trace")?;
        if !decisions.is_empty() {
            println!("{}", report::explanation(&decisions));
        }
        Ok(NOTHING_MATCHED)
    }
}

/// What changed between two looks at the branches. A branch that is gone runs nothing.
fn pushes(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<Push> {
    let changed = now.iter().filter(|(name, sha)| before.get(*name) != Some(sha));
    changed
        .map(|(name, sha)| Push {
            git_ref: name.clone(),
            before: before.get(name).cloned().unwrap_or_else(|| ZERO.into()),
            after: sha.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_branch_is_a_push() {
        let tips = |text: &str| {
            text.split(' ')
                .filter_map(|pair| pair.split_once('='))
                .map(|(name, sha)| (name.into(), sha.into()))
                .collect()
        };
        let seen = pushes(&tips("main=1 old=2 same=3"), &tips("main=4 same=3 new=5"));
        let seen: Vec<_> = seen.iter().map(|push| (&*push.git_ref, &*push.before, &*push.after)).collect();
        assert_eq!(seen, [("main", "1", "4"), ("new", ZERO, "5")]);
    }
}
