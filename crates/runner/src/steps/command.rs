//! One script of a step or hook: its environment and files, the process, and what it left in the files.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kici_engine::check::CheckResult;
use kici_engine::lock::{Shell, Step};
use kici_engine::state::{FailureReason, StepStatus};
use kici_sys::process::Spawn;
use tokio::sync::watch;
use tokio::time::Instant;

use super::environment::{Environment, Variables, to_os};
use super::exec::{Bounds, Ended, Output, follow, told};
use super::files::{self, StepFiles};
use super::step::{Attempt, plain_name};
use super::tree::{Pipes, Tree};
use super::{MAX_JOB_OUTPUT_BYTES, MAX_STEP_OUTPUT_BYTES, Outcome, Run, describe, shell};
use crate::ports::Reporter;
use crate::spool::StepLog;
use crate::stop::Stop;

/// Why a step cannot start.
pub(super) struct Refused(pub(super) FailureReason, pub(super) String);

/// What all scripts of a step have in common, rendered.
pub(super) struct Base {
    pub(super) name: String,
    layers: Vec<Variables>,
    cwd: PathBuf,
    shell: Option<Shell>,
    /// Words for its log.
    pub(super) notes: Vec<String>,
}

/// A script that is ready to be started.
pub(super) struct Command {
    pub(super) spawn: Spawn,
    /// In a container: what is taken where the program does not exist in its image.
    or: Option<(OsString, Vec<OsString>)>,
    /// In a container: the files that are made there before, and come back.
    files: Vec<PathBuf>,
}

/// How a script, or a step made of several, went.
pub(super) struct Went {
    pub(super) status: StepStatus,
    pub(super) exit_code: Option<i32>,
    pub(super) signal: Option<i32>,
    pub(super) reason: FailureReason,
    pub(super) message: String,
    pub(super) outputs: BTreeMap<String, String>,
    pub(super) summary: String,
    /// For the environment of later steps.
    pub(super) exports: Vec<(String, String)>,
    /// For the front of their PATH.
    pub(super) path: String,
    pub(super) stopped: Option<Stop>,
    pub(super) deadline: bool,
    pub(super) check: Option<CheckResult>,
    /// What differs.
    pub(super) drift: String,
}

impl Went {
    pub(super) fn failed(reason: FailureReason, message: impl Into<String>) -> Self {
        Self {
            status: StepStatus::Failed,
            exit_code: None,
            signal: None,
            reason,
            message: message.into(),
            outputs: BTreeMap::new(),
            summary: String::new(),
            exports: Vec::new(),
            path: String::new(),
            stopped: None,
            deadline: false,
            check: None,
            drift: String::new(),
        }
    }

    pub(super) fn success() -> Self {
        Self { status: StepStatus::Success, ..Self::failed(FailureReason::StepFailed, "") }
    }

    /// By a word to the job or its limit.
    pub(super) fn interrupted(ended: Ended) -> Self {
        match ended {
            Ended::Stopped(stop) => {
                let message = Outcome::of_stop(&stop).message;
                let went = Self::failed(FailureReason::CancelledByUser, message);
                Self { status: StepStatus::Cancelled, stopped: Some(stop), ..went }
            }
            _ => {
                Self { deadline: true, ..Self::failed(FailureReason::JobTimeout, "the job ran longer than its limit") }
            }
        }
    }

    /// Whether another attempt could help: it failed by itself.
    pub(super) fn may_retry(&self) -> bool {
        let own = matches!(self.reason, FailureReason::StepFailed | FailureReason::StepTimeout);
        self.status == StepStatus::Failed && own && !self.deadline
    }
}

impl Run<'_> {
    /// Renders what the scripts of a step have in common.
    pub(super) fn base(&self, step: &Step) -> Result<Base, Refused> {
        let expr_error = |message| Refused(FailureReason::ExprError, message);
        let spec = &self.job.spec;
        let below = self.environment.of_step([&spec.variables], []).0;
        let job = self.render_all(&spec.env, &below, None).map_err(expr_error)?;
        let at = step.composite;
        let mut layers = vec![spec.variables.clone(), job];
        layers.extend(self.frame_at(at).map(|frame| frame.env.clone()));
        let seen = self.environment.of_step(&layers, []).0;
        layers.push(self.render_all(&step.env, &seen, at).map_err(expr_error)?);
        let name = match &step.name {
            Some(name) => self.render(name, &seen, at).map_err(expr_error)?,
            None => plain_name(step),
        };
        let cwd = self.directory(step, &seen)?;
        let (_, refused) = self.environment.of_step(&layers, []);
        let notes = refused.iter().map(|name| match name.starts_with("KICI_") {
            true => format!("`{name}` is not set: names with KICI_ belong to the agent"),
            false => format!("`{name}` is not set: it is not a number that git could work with"),
        });
        Ok(Base { name, cwd, shell: step.shell.clone(), notes: notes.collect(), layers })
    }

    /// The environment that expressions of a step see.
    pub(super) fn seen(&self, base: &Base) -> Variables {
        self.environment.of_step(&base.layers, []).0
    }

    /// The directory a step starts in; it must lie in the workspace.
    fn directory(&self, step: &Step, env: &Variables) -> Result<PathBuf, Refused> {
        let Some(value) = &step.working_directory else { return Ok(self.job.workspace.clone()) };
        let text = self.render(value, env, step.composite).map_err(|m| Refused(FailureReason::ExprError, m))?;
        let bad = |why: &str| Refused(FailureReason::StepFailed, format!("working_directory `{text}` {why}"));
        if let Some(inside) = &self.job.container {
            return inside.directory(&text).map_err(bad);
        }
        let root = self.job.workspace.canonicalize().map_err(|error| bad(&error.to_string()))?;
        let dir = root.join(&text).canonicalize().map_err(|_| bad("does not exist"))?;
        if dir.starts_with(&root) { Ok(dir) } else { Err(bad("lies outside the workspace")) }
    }

    /// Runs one script of an attempt. `part` tells the scripts of an attempt apart; `own` is one more file that it writes to, with
    /// the variable that names it.
    #[allow(clippy::too_many_arguments, reason = "an attempt lends its log and its trees for the time of one script")]
    pub(super) async fn script(
        &self,
        attempt: &Attempt<'_>,
        part: &str,
        script: &str,
        own: Option<(&'static str, &Path)>,
        log: &mut StepLog,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        let dir = if part.is_empty() { attempt.dir.clone() } else { attempt.dir.join(part) };
        let files = match self.files_with_space(&dir, script).await {
            Ok(files) => files,
            Err(Refused(reason, message)) => return Ok(Went::failed(reason, message)),
        };
        // A word may have come while hooks ran before the step, or while the disk was full.
        if let Some(interrupted) = self.interrupted(attempt.after_stop, stop) {
            return Ok(interrupted);
        }
        let bounds = Bounds {
            timeout: attempt.until.saturating_duration_since(Instant::now()),
            deadline: self.job.deadline.filter(|_| !attempt.after_stop),
            after_stop: attempt.after_stop,
        };
        let own: Vec<(&'static str, &Path)> = own.into_iter().collect();
        let command = self.command(attempt.base, &files, &own, &[]);
        let ended = match self.run_command(&command, bounds, log, trees, reporter, stop).await? {
            Ok(ended) => ended,
            Err(message) => return Ok(Went::failed(FailureReason::StepFailed, message)),
        };
        let mut notes = Vec::new();
        let grouped = attempt.step.group.is_some();
        let went = self.went(ended, attempt.limit, &files, grouped, &mut notes);
        self.say(log, &notes).await?;
        Ok(went)
    }

    /// Makes the files of a script, and waits for that while the disk is full.
    pub(super) async fn files_with_space(&self, dir: &Path, script: &str) -> Result<StepFiles, Refused> {
        loop {
            let made = StepFiles::create(dir, script);
            let given = made.and_then(|files| files.give(dir, &self.job.confine).map(|()| files));
            let error = match given {
                Ok(files) => return Ok(files),
                Err(error) => error,
            };
            let refused =
                |error: io::Error| Refused(FailureReason::SandboxFailed, format!("{}: {error}", dir.display()));
            self.job.spool.ride_out(error).await.map_err(refused)?;
            // The next try makes the files anew.
            let _ = std::fs::remove_dir_all(dir);
        }
    }

    /// The process of a script. `own` are files and `facts` texts that only KiCI sets.
    pub(super) fn command(
        &self,
        base: &Base,
        files: &StepFiles,
        own: &[(&'static str, &Path)],
        facts: &[(&'static str, String)],
    ) -> Command {
        let named = [
            ("KICI_OUTPUT", files.output.as_path()),
            ("KICI_ENV", &files.env),
            ("KICI_PATH", &files.path),
            ("KICI_SUMMARY", &files.summary),
        ];
        let named: Vec<_> = named.into_iter().chain(own.iter().copied()).collect();
        let place = |path: &Path| match &self.job.container {
            Some(inside) => inside.place(path),
            None => path.to_owned(),
        };
        let placed: Vec<_> = named.iter().map(|(name, path)| (*name, place(path))).collect();
        let placed = placed.iter().map(|(name, path)| (*name, path.as_path()));
        let (mut env, _) = self.environment.of_step(&base.layers, placed);
        env.extend(facts.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        let path = env.get("PATH").map_or("", String::as_str);
        let script = place(&files.script);
        // What an image has is seen when the command is started there.
        let (shell, or) = match (&self.job.container, &base.shell) {
            (Some(_), None) => (Some(&Shell::Bash), Some(shell::command(Some(&Shell::Sh), &script, path))),
            (_, shell) => (shell.as_ref(), None),
        };
        let (program, args) = shell::command(shell, &script, path);
        let spawn = Spawn { program, args, env: to_os(&env), cwd: base.cwd.clone(), ..Spawn::default() };
        let own_files = [files.script.as_path()].into_iter().chain(named.iter().map(|(_, path)| *path));
        Command { spawn, or, files: own_files.map(Path::to_owned).collect() }
    }

    /// Starts a process and follows it to its end. The inner error is words for why it did not start.
    pub(super) async fn run_command(
        &self,
        command: &Command,
        bounds: Bounds,
        log: &mut StepLog,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Result<Ended, String>> {
        let (mut tree, pipes) = match self.start(command, reporter).await {
            Ok(started) => started,
            Err(message) => return Ok(Err(message)),
        };
        let mut output = Output::new(log, &self.job.masker, &*self.job.clock);
        let ended = follow(&mut tree, pipes, &mut output, bounds, stop).await;
        if let Tree::Inside(inside, process) = &tree {
            inside.bring_back(process, &command.files);
        }
        trees.push(tree);
        ended.map(Ok)
    }

    /// Starts a command where the job runs. The error is words.
    async fn start(&self, command: &Command, reporter: &dyn Reporter) -> Result<(Tree, Pipes), String> {
        let spawn = &command.spawn;
        if let Some(inside) = &self.job.container {
            let (process, out, err) = inside.start(spawn, command.or.as_ref(), &command.files).await?;
            let pipes = Pipes { stdout: Box::pin(out), stderr: Box::pin(err) };
            return Ok((Tree::Inside(Arc::clone(inside), process), pipes));
        }
        let confined = self.job.confine.apply(spawn.clone());
        let started = confined.and_then(|confined| Tree::spawn(&confined));
        let (tree, pipes) =
            started.map_err(|error| format!("cannot start `{}`: {error}", spawn.program.to_string_lossy()))?;
        tree.keeper().into_iter().for_each(|keeper| reporter.tree(keeper));
        Ok((tree, pipes))
    }

    /// Judges the end of a script and reads what it wrote into its files, also when it failed.
    fn went(&self, ended: Ended, limit: Duration, files: &StepFiles, grouped: bool, notes: &mut Vec<String>) -> Went {
        let mut went = match ended {
            Ended::Exit(status) if status.success() => Went { exit_code: Some(0), ..Went::success() },
            Ended::Exit(status) => Went {
                exit_code: status.code(),
                signal: status.signal(),
                ..Went::failed(FailureReason::StepFailed, describe(status))
            },
            Ended::TimedOut => {
                let limit = limit.as_secs_f64();
                Went::failed(FailureReason::StepTimeout, format!("ran longer than its limit of {limit} s"))
            }
            other => Went::interrupted(other),
        };
        let mut read = |path| {
            files::read(path).unwrap_or_else(|problem| {
                notes.push(problem);
                String::new()
            })
        };
        let (output, env, path) = (read(&files.output), read(&files.env), read(&files.path));
        went.summary = self.job.masker.mask_text(&read(&files.summary));
        let (outputs, problems) = files::assignments(&output);
        notes.extend(problems.iter().map(|problem| format!("$KICI_OUTPUT {problem}")));
        let (changes, problems) = files::assignments(&env);
        notes.extend(problems.iter().map(|problem| format!("$KICI_ENV {problem}")));
        if grouped && (!changes.is_empty() || !path.trim().is_empty()) {
            notes.push("$KICI_ENV and $KICI_PATH were ignored: steps that run side by side cannot set them".to_owned());
        } else {
            let (exports, refused) = Environment::acceptable(changes);
            notes.extend(refused.iter().map(|name| format!("$KICI_ENV: `{name}` may not be set; its old value stays")));
            (went.exports, went.path) = (exports, path);
        }
        let mask = |(name, value): (String, String)| (name, self.job.masker.mask_text(&value));
        went.outputs = outputs.into_iter().map(mask).collect();
        self.check_outputs(went)
    }

    fn check_outputs(&self, went: Went) -> Went {
        let size = output_bytes(&went.outputs);
        let used = self.output_bytes.fetch_add(size, Ordering::Relaxed);
        if size <= MAX_STEP_OUTPUT_BYTES && used + size <= MAX_JOB_OUTPUT_BYTES {
            return went;
        }
        self.output_bytes.fetch_sub(size, Ordering::Relaxed);
        let message = "its outputs are larger than 1 MiB, or those of the job than 8 MiB";
        Went { summary: went.summary, ..Went::failed(FailureReason::StepFailed, message) }
    }

    /// The outputs of an attempt or question that another one follows count no more.
    pub(super) fn discard(&self, outputs: &BTreeMap<String, String>) {
        self.output_bytes.fetch_sub(output_bytes(outputs), Ordering::Relaxed);
    }

    /// Why nothing more may be started now: a word to the job, or its limit.
    pub(super) fn interrupted(&self, after_stop: bool, stop: &watch::Receiver<Stop>) -> Option<Went> {
        let told = stop.borrow().clone();
        let late = self.job.deadline.is_some_and(|deadline| !after_stop && deadline <= Instant::now());
        let ends = if after_stop { told.runs_nothing_more() } else { told != Stop::Run };
        let ended = ends.then_some(Ended::Stopped(told)).or_else(|| late.then_some(Ended::DeadlineReached));
        ended.map(Went::interrupted)
    }

    /// Sleeps; some is how it was interrupted.
    pub(super) async fn sleep(
        &self,
        pause: Duration,
        after_stop: bool,
        stop: &mut watch::Receiver<Stop>,
    ) -> Option<Went> {
        let until = Instant::now() + pause;
        let deadline = self.job.deadline.filter(|deadline| !after_stop && *deadline < until);
        tokio::select! {
            () = tokio::time::sleep_until(deadline.unwrap_or(until)) => {
                deadline.map(|_| Went::interrupted(Ended::DeadlineReached))
            }
            stop = told(stop, after_stop) => Some(Went::interrupted(Ended::Stopped(stop))),
        }
    }
}

fn output_bytes(outputs: &BTreeMap<String, String>) -> usize {
    outputs.iter().map(|(name, value)| name.len() + value.len()).sum()
}
