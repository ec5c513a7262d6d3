//! One step, from its condition to its last report.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::Duration;

use kici_engine::expr;
use kici_engine::lock::{Step, Value};
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_sys::process::{Spawn, Tree};
use serde_json::json;
use tokio::sync::watch;

use super::environment::{Variables, to_os};
use super::exec::{Bounds, Ended, Output, follow};
use super::files::{self, StepFiles};
use super::{AFTER_CANCEL_LIMIT, MAX_JOB_OUTPUT_BYTES, MAX_STEP_OUTPUT_BYTES, Outcome, Run, describe, shell};
use crate::key::step_key;
use crate::lines::Lines;
use crate::ports::{Reporter, StepReport};
use crate::stop::Stop;

/// Longest name that is made from a script.
const NAME_CHARS: usize = 80;

/// A step that can start.
struct Ready {
    name: String,
    files: StepFiles,
    spawn: Spawn,
    /// Words for its log.
    notes: Vec<String>,
}

/// Why a step cannot start.
struct Refused(FailureReason, String);

/// How its command went.
struct Went {
    status: StepStatus,
    exit_code: Option<i32>,
    signal: Option<i32>,
    reason: FailureReason,
    message: String,
    outputs: BTreeMap<String, String>,
    summary: String,
}

impl Run<'_> {
    /// Runs the step, or skips it.
    pub(super) async fn step(&mut self, index: usize, reporter: &dyn Reporter, stop: &mut watch::Receiver<Stop>) {
        let step = &self.job.spec.steps[index];
        match self.wanted(step) {
            Ok(true) => {}
            Ok(false) => {
                let cancelled = self.stopping && step.condition.is_none();
                let status = if cancelled { StepStatus::Cancelled } else { StepStatus::Skipped };
                let report = StepReport::new(step_key(index), plain_name(step), status, self.job.clock.now());
                self.note(step, status, BTreeMap::new());
                return reporter.step(report).await;
            }
            Err(message) => return self.refuse(index, Refused(FailureReason::ExprError, message), reporter).await,
        }
        let ready = match self.prepare_with_space(index, step).await {
            Ok(ready) => ready,
            Err(refused) => return self.refuse(index, refused, reporter).await,
        };
        let mut report = StepReport::new(step_key(index), &ready.name, StepStatus::Running, self.job.clock.now());
        reporter.step(report.clone()).await;
        let went = match self.execute(index, &ready, &mut report, reporter, stop).await {
            Ok(went) => went,
            Err(error) => Went::failed(FailureReason::SandboxFailed, format!("the output cannot be kept: {error}")),
        };
        self.settle(index, went, report, reporter).await;
    }

    fn wanted(&self, step: &Step) -> Result<bool, String> {
        if step.condition.is_none() {
            return Ok(self.outcome.is_none());
        }
        let env = self.job_environment().map_err(|Refused(_, message)| message)?;
        let (condition, standing) = (step.condition.as_deref(), self.standing());
        expr::eval_step_condition(condition, standing, &self.context(&env), &self.functions())
            .map_err(|error| format!("if: {error}"))
    }

    fn job_environment(&self) -> Result<Variables, Refused> {
        let spec = &self.job.spec;
        let below = self.environment.of_step([&spec.variables], []).0;
        let job = self.render_all(&spec.env, &below).map_err(|m| Refused(FailureReason::ExprError, m))?;
        Ok(self.environment.of_step([&spec.variables, &job], []).0)
    }

    /// Prepares a step, and waits for that while the disk is full.
    async fn prepare_with_space(&self, index: usize, step: &Step) -> Result<Ready, Refused> {
        loop {
            let error = match self.prepare(index, step)? {
                Ok(ready) => return Ok(ready),
                Err(error) => error,
            };
            let dir = self.job.scratch.join(format!("step-{index}"));
            let refused =
                |error: io::Error| Refused(FailureReason::SandboxFailed, format!("{}: {error}", dir.display()));
            self.job.spool.ride_out(error).await.map_err(refused)?;
            // The next try makes the files anew.
            let _ = std::fs::remove_dir_all(&dir);
        }
    }

    fn prepare(&self, index: usize, step: &Step) -> Result<io::Result<Ready>, Refused> {
        let expr_error = |message| Refused(FailureReason::ExprError, message);
        let spec = &self.job.spec;
        let below = self.environment.of_step([&spec.variables], []).0;
        let job = self.render_all(&spec.env, &below).map_err(expr_error)?;
        let seen = self.environment.of_step([&spec.variables, &job], []).0;
        let own = self.render_all(&step.env, &seen).map_err(expr_error)?;
        let name = match &step.name {
            Some(name) => self.render(name, &seen).map_err(expr_error)?,
            None => plain_name(step),
        };
        let cwd = self.directory(step, &seen)?;
        let dir = self.job.scratch.join(format!("step-{index}"));
        let files = match StepFiles::create(&dir, &step.run) {
            Ok(files) => files,
            Err(error) => return Ok(Err(error)),
        };
        let named = [
            ("KICI_OUTPUT", files.output.as_path()),
            ("KICI_ENV", &files.env),
            ("KICI_PATH", &files.path),
            ("KICI_SUMMARY", &files.summary),
        ];
        let (env, refused) = self.environment.of_step([&spec.variables, &job, &own], named);
        let path = env.get("PATH").map_or("", String::as_str);
        let (program, args) = shell::command(step.shell.as_ref(), &files.script, path);
        let notes = refused.iter().map(|name| format!("`{name}` is not set: names with KICI_ belong to the agent"));
        let notes = notes.collect();
        Ok(Ok(Ready { name, spawn: Spawn { program, args, env: to_os(&env), cwd }, files, notes }))
    }

    /// The directory a step starts in; it must lie in the workspace.
    fn directory(&self, step: &Step, env: &Variables) -> Result<PathBuf, Refused> {
        let Some(value) = &step.working_directory else { return Ok(self.job.workspace.clone()) };
        let text = self.render(value, env).map_err(|m| Refused(FailureReason::ExprError, m))?;
        let bad = |why: &str| Refused(FailureReason::StepFailed, format!("working_directory `{text}` {why}"));
        let root = self.job.workspace.canonicalize().map_err(|error| bad(&error.to_string()))?;
        let dir = root.join(&text).canonicalize().map_err(|_| bad("does not exist"))?;
        if dir.starts_with(&root) { Ok(dir) } else { Err(bad("lies outside the workspace")) }
    }

    async fn execute(
        &mut self,
        index: usize,
        ready: &Ready,
        report: &mut StepReport,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        let step = &self.job.spec.steps[index];
        let mut log = self.job.spool.open(&step_key(index)).await?;
        let mut notes = Lines::default();
        ready.notes.iter().for_each(|note| notes.say(self.job.clock.now(), note));
        log.append(&notes).await?;
        notes.clear();
        let went = match Tree::spawn(&ready.spawn) {
            Ok((tree, pipes)) => {
                reporter.tree(tree.id());
                self.trees.push(tree);
                let limit = step.timeout_ms.map_or(self.job.step_timeout, Duration::from_millis);
                let after_stop = self.stopping;
                let bounds = Bounds {
                    timeout: if after_stop { limit.min(AFTER_CANCEL_LIMIT) } else { limit },
                    deadline: self.job.deadline.filter(|_| !after_stop),
                    after_stop,
                };
                let followed = match self.trees.last_mut() {
                    Some(tree) => {
                        let mut output = Output::new(&mut log, &self.job.masker, &*self.job.clock);
                        follow(tree, pipes, &mut output, bounds, stop).await
                    }
                    None => Ok(Ended::Stopped(Stop::Run)),
                };
                self.went(followed?, limit, &ready.files, &mut notes)
            }
            Err(error) => {
                let program = ready.spawn.program.to_string_lossy().into_owned();
                Went::failed(FailureReason::StepFailed, format!("cannot start `{program}`: {error}"))
            }
        };
        if went.status != StepStatus::Success && !went.message.is_empty() {
            notes.say(self.job.clock.now(), &went.message);
        }
        log.append(&notes).await?;
        report.log = log.close(self.job.clock.now()).await?;
        Ok(went)
    }

    /// Judges the end of a command and takes in what it wrote into its files, also when it failed.
    fn went(&mut self, ended: Ended, limit: Duration, files: &StepFiles, notes: &mut Lines) -> Went {
        let mut went = match &ended {
            Ended::Exit(status) if status.success() => {
                Went { status: StepStatus::Success, exit_code: Some(0), ..Went::failed(FailureReason::StepFailed, "") }
            }
            Ended::Exit(status) => Went {
                exit_code: status.code(),
                signal: status.signal(),
                ..Went::failed(FailureReason::StepFailed, describe(*status))
            },
            Ended::TimedOut => {
                let limit = limit.as_secs_f64();
                Went::failed(FailureReason::StepTimeout, format!("ran longer than its limit of {limit} s"))
            }
            Ended::DeadlineReached => {
                self.deadline_reached();
                Went::failed(FailureReason::JobTimeout, "the job ran longer than its limit")
            }
            Ended::Stopped(stop) => {
                self.stopping = true;
                let outcome = Outcome::of_stop(stop);
                let message = outcome.message.clone();
                self.outcome.get_or_insert(outcome);
                Went { status: StepStatus::Cancelled, ..Went::failed(FailureReason::CancelledByUser, message) }
            }
        };
        let now = self.job.clock.now();
        let mut say = |text: &str| notes.say(now, text);
        let mut read = |path| {
            files::read(path).unwrap_or_else(|problem| {
                say(&problem);
                String::new()
            })
        };
        let (output, env, path) = (read(&files.output), read(&files.env), read(&files.path));
        went.summary = self.job.masker.mask_text(&read(&files.summary));
        let (outputs, problems) = files::assignments(&output);
        problems.iter().for_each(|problem| say(&format!("$KICI_OUTPUT {problem}")));
        let (changes, problems) = files::assignments(&env);
        problems.iter().for_each(|problem| say(&format!("$KICI_ENV {problem}")));
        for name in self.environment.export(changes) {
            say(&format!("$KICI_ENV: `{name}` may not be set; its old value stays"));
        }
        self.environment.extend_path(&path);
        let mask = |(name, value): (String, String)| (name, self.job.masker.mask_text(&value));
        went.outputs = outputs.into_iter().map(mask).collect();
        self.check_outputs(&mut went);
        went
    }

    fn check_outputs(&mut self, went: &mut Went) {
        let size: usize = went.outputs.iter().map(|(name, value)| name.len() + value.len()).sum();
        if size > MAX_STEP_OUTPUT_BYTES || self.output_bytes + size > MAX_JOB_OUTPUT_BYTES {
            let message = "its outputs are larger than 1 MiB, or those of the job than 8 MiB";
            *went =
                Went { summary: std::mem::take(&mut went.summary), ..Went::failed(FailureReason::StepFailed, message) };
        } else {
            self.output_bytes += size;
        }
    }

    async fn settle(&mut self, index: usize, went: Went, mut report: StepReport, reporter: &dyn Reporter) {
        let step = &self.job.spec.steps[index];
        report.failure_allowed =
            went.status == StepStatus::Failed && step.continue_on_error && went.reason != FailureReason::JobTimeout;
        if went.status == StepStatus::Failed && !report.failure_allowed {
            let name = report.name.clone();
            let message = self.job.masker.mask_text(&format!("step `{name}`: {}", went.message));
            let key = report.key.clone();
            self.fail(Outcome {
                exit_code: went.exit_code,
                signal: went.signal,
                failed_step: format!("{}/{}/{}", key.kind, key.owner_index, key.ordinal),
                ..Outcome::new(JobStatus::Failed, Some(went.reason), message)
            });
        }
        self.note(step, went.status, went.outputs.clone());
        report.status = went.status;
        report.at = self.job.clock.now();
        report.exit_code = went.exit_code;
        report.message = self.job.masker.mask_text(&went.message);
        report.outputs = went.outputs;
        report.summary = went.summary;
        reporter.step(report).await;
    }

    /// A step that cannot start: it failed, with a log that says why.
    async fn refuse(&mut self, index: usize, refused: Refused, reporter: &dyn Reporter) {
        let Refused(reason, message) = refused;
        let step = &self.job.spec.steps[index];
        let mut report = StepReport::new(step_key(index), plain_name(step), StepStatus::Running, self.job.clock.now());
        reporter.step(report.clone()).await;
        if let Ok(mut log) = self.job.spool.open(&step_key(index)).await {
            let mut lines = Lines::default();
            lines.say(self.job.clock.now(), &self.job.masker.mask_text(&message));
            // The report carries the message too.
            let _ = log.append(&lines).await;
            report.log = log.close(self.job.clock.now()).await.unwrap_or_default();
        }
        self.settle(index, Went::failed(reason, message), report, reporter).await;
    }

    /// Remembers a result for expressions.
    fn note(&mut self, step: &Step, status: StepStatus, outputs: BTreeMap<String, String>) {
        if let Some(id) = &step.id {
            self.results.insert(id.clone(), json!({ "status": status.as_str(), "outputs": outputs }));
        }
    }
}

impl Went {
    fn failed(reason: FailureReason, message: impl Into<String>) -> Self {
        Self {
            status: StepStatus::Failed,
            exit_code: None,
            signal: None,
            reason,
            message: message.into(),
            outputs: BTreeMap::new(),
            summary: String::new(),
        }
    }
}

/// The name of a step when nothing can be rendered: as written, or the first line of its script.
pub(super) fn plain_name(step: &Step) -> String {
    match &step.name {
        Some(Value::Static { r#static }) => r#static.clone(),
        Some(Value::Template { template, .. }) => template.clone(),
        None => {
            let line = step.run.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
            line.chars().take(NAME_CHARS).collect()
        }
    }
}
