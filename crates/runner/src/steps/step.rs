//! One step, from its condition to its last report. Nothing here changes the job: what a step brings about comes back as
//! [`Done`], so that steps of a group can run side by side.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kici_engine::check::CheckResult;
use kici_engine::expr;
use kici_engine::lock::{Action, Probe, Step, Value};
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use tokio::sync::watch;
use tokio::time::Instant;

use super::command::{Base, Refused, Went};
use super::tree::Tree;
use super::{Outcome, Run};
use crate::key::step_key;
use crate::lines::Lines;
use crate::ports::{Reporter, StepReport};
use crate::spool::StepLog;
use crate::stop::Stop;

/// Longest name that is made from a script.
const NAME_CHARS: usize = 80;

/// What a step brought about.
pub(super) struct Done {
    pub(super) index: usize,
    pub(super) status: StepStatus,
    pub(super) outputs: BTreeMap<String, String>,
    /// It makes the job a failure.
    pub(super) failure: Option<Outcome>,
    /// The job was told to stop while it ran.
    pub(super) stopped: Option<Stop>,
    /// The limit of the job was reached while it ran.
    pub(super) deadline: bool,
    /// For later steps.
    pub(super) exports: Vec<(String, String)>,
    /// For the front of their PATH.
    pub(super) path: String,
    /// It found drift and left it.
    pub(super) drift: bool,
    /// Its check found nothing to do: it is skipped, and its outputs are there.
    pub(super) in_sync: bool,
    /// What it started.
    pub(super) trees: Vec<Tree>,
}

impl Done {
    pub(super) fn without_run(index: usize, status: StepStatus) -> Self {
        Self {
            index,
            status,
            outputs: BTreeMap::new(),
            failure: None,
            stopped: None,
            deadline: false,
            exports: Vec::new(),
            path: String::new(),
            drift: false,
            in_sync: false,
            trees: Vec::new(),
        }
    }
}

/// One attempt of a step while it goes on.
pub(super) struct Attempt<'a> {
    pub(super) step: &'a Step,
    pub(super) base: &'a Base,
    /// Its files.
    pub(super) dir: PathBuf,
    /// When it is over.
    pub(super) until: Instant,
    pub(super) limit: Duration,
    pub(super) after_stop: bool,
}

impl Run<'_> {
    /// Runs the step, or skips it, and reports it.
    pub(super) async fn perform(
        &self,
        index: usize,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Done {
        let step = &self.job.spec.steps[index];
        match self.wanted(step) {
            Ok(true) => {}
            Ok(false) => {
                let cancelled = self.stopping && step.condition.is_none();
                let status = if cancelled { StepStatus::Cancelled } else { StepStatus::Skipped };
                return self.report_without_run(index, status, None, reporter).await;
            }
            Err(message) => return self.refuse(index, Refused(FailureReason::ExprError, message), reporter).await,
        }
        let checking = self.job.spec.check_mode.is_check();
        if checking && !matches!(step.action, Action::Check(_)) {
            return self.report_without_run(index, StepStatus::Skipped, Some(CheckResult::NoCheck), reporter).await;
        }
        let base = match self.base(step) {
            Ok(base) => base,
            Err(refused) => return self.refuse(index, refused, reporter).await,
        };
        let mut trees = Vec::new();
        if !checking {
            trees.append(&mut self.before_step(index, reporter, stop).await);
        }
        if let Some(went) = self.restore_of(index, &base, reporter, stop).await {
            let done = self.hold_up(index, &base, went, reporter).await;
            return Done { trees, ..done };
        }
        let began = Instant::now();
        let mut done = self.run_and_report(index, &base, reporter, stop).await;
        self.save_of(&mut done, &base, reporter, stop).await;
        if !checking {
            let took = began.elapsed();
            trees.append(&mut self.after_step(index, &done, took, reporter, stop).await);
        }
        trees.append(&mut done.trees);
        Done { trees, ..done }
    }

    /// Restores the caches of a step. Some is why it does not start.
    async fn restore_of(
        &self,
        index: usize,
        base: &Base,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Option<Went> {
        let step = &self.job.spec.steps[index];
        if step.cache.is_empty() {
            return None;
        }
        let env = self.seen(base);
        self.restore_all(&step.cache, Some(index), 0, &env, step.composite, reporter, stop).await
    }

    /// Saves the caches of a step that has ended. A failure that counts is one of the job.
    async fn save_of(&self, done: &mut Done, base: &Base, reporter: &dyn Reporter, stop: &mut watch::Receiver<Stop>) {
        let step = &self.job.spec.steps[done.index];
        let ended = matches!(done.status, StepStatus::Success | StepStatus::Failed);
        if step.cache.is_empty() || !ended || done.deadline || done.stopped.is_some() || self.stopping {
            return;
        }
        let (env, success) = (self.seen(base), done.status == StepStatus::Success);
        let at = step.composite;
        let failed = self.save_all(&step.cache, Some(done.index), 0, success, &env, at, reporter, stop).await;
        let Some(went) = failed else { return };
        done.deadline |= went.deadline;
        done.stopped = went.stopped;
        if went.status == StepStatus::Failed && !went.deadline && !step.continue_on_error {
            let message = self.job.masker.mask_text(&format!("cache of step `{}`: {}", base.name, went.message));
            let key = step_key(done.index);
            done.failure.get_or_insert(Outcome {
                failed_step: format!("{}/{}/{}", key.kind, key.owner_index, key.ordinal),
                ..Outcome::new(JobStatus::Failed, Some(went.reason), message)
            });
        }
    }

    /// A step that does not start because of its caches.
    async fn hold_up(&self, index: usize, base: &Base, went: Went, reporter: &dyn Reporter) -> Done {
        let mut report = StepReport::new(step_key(index), &base.name, StepStatus::Running, self.job.clock.now());
        report.group = self.group_name(&self.job.spec.steps[index]);
        reporter.step(report.clone()).await;
        let message = if went.stopped.is_none() { format!("cache: {}", went.message) } else { went.message };
        self.settle(index, Went { message, ..went }, report, reporter).await
    }

    /// The attempts of a step that can start, with a report before and after.
    async fn run_and_report(
        &self,
        index: usize,
        base: &Base,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Done {
        let mut report = StepReport::new(step_key(index), &base.name, StepStatus::Running, self.job.clock.now());
        report.group = self.group_name(&self.job.spec.steps[index]);
        reporter.step(report.clone()).await;
        let mut trees = Vec::new();
        let went = match self.attempts(index, base, &mut report, &mut trees, reporter, stop).await {
            Ok(went) => went,
            Err(error) => Went::failed(FailureReason::SandboxFailed, format!("the output cannot be kept: {error}")),
        };
        let done = self.settle(index, went, report, reporter).await;
        Done { trees, ..done }
    }

    async fn attempts(
        &self,
        index: usize,
        base: &Base,
        report: &mut StepReport,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        let step = &self.job.spec.steps[index];
        let limit = step.timeout_ms.map_or(self.job.step_timeout, Duration::from_millis);
        let limit = super::limit_of(limit, self.stopping);
        let mut log = self.job.spool.open(&step_key(index)).await?;
        self.say(&mut log, &base.notes).await?;
        let went = loop {
            let name =
                if report.attempt == 1 { format!("step-{index}") } else { format!("step-{index}.{}", report.attempt) };
            let attempt = Attempt {
                step,
                base,
                dir: self.job.scratch.join(name),
                until: Instant::now() + limit,
                limit,
                after_stop: self.stopping,
            };
            let went = self.act(index, &attempt, &mut log, trees, reporter, stop).await?;
            let pause = match &step.retry {
                // Once the job is on its way out, one attempt has to do: nobody waits for more.
                Some(retry) if went.may_retry() && !self.stopping => retry.pause(report.attempt, went.exit_code),
                _ => None,
            };
            let Some(pause) = pause.map(Duration::from_millis) else { break went };
            let attempts = step.retry.as_ref().map_or(1, |retry| retry.attempts);
            let text = format!(
                "attempt {} of {attempts}: {}; again in {} s",
                report.attempt,
                went.message,
                pause.as_secs_f64()
            );
            self.say(&mut log, &[text]).await?;
            // Nothing of it stays: neither its outputs nor what it left running, which the next attempt would meet.
            self.discard(&went.outputs);
            for mut tree in trees.drain(..) {
                tree.kill().await;
            }
            if let Some(interrupted) = self.sleep(pause, self.stopping, stop).await {
                break interrupted;
            }
            report.attempt += 1;
            report.at = self.job.clock.now();
            reporter.step(report.clone()).await;
        };
        if went.status != StepStatus::Success && !went.message.is_empty() {
            self.say(&mut log, std::slice::from_ref(&went.message)).await?;
        }
        report.log = log.close(self.job.clock.now()).await?;
        Ok(went)
    }

    async fn act(
        &self,
        index: usize,
        attempt: &Attempt<'_>,
        log: &mut StepLog,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        match &attempt.step.action {
            Action::Run(script) if self.job.spec.generate => {
                let jobs = self.jobs_file(attempt)?;
                let own = Some(("KICI_JOBS", jobs.as_path()));
                let went = self.script(attempt, "run", script, own, log, trees, reporter, stop).await?;
                self.report_jobs(attempt, went, &jobs, log, reporter, stop).await
            }
            Action::Run(script) => self.script(attempt, "", script, None, log, trees, reporter, stop).await,
            Action::Check(check) => self.check(attempt, check, log, trees, reporter, stop).await,
            Action::WaitFor(wait) => self.wait_for(attempt, wait, log, trees, reporter, stop).await,
            Action::Emit(emit) => self.emit(index, attempt, emit, log, reporter, stop).await,
        }
    }

    /// Lines of the agent in the log of a step.
    pub(super) async fn say(&self, log: &mut StepLog, texts: &[String]) -> io::Result<()> {
        if texts.is_empty() {
            return Ok(());
        }
        let mut lines = Lines::default();
        texts.iter().for_each(|text| lines.say(self.job.clock.now(), &self.job.masker.mask_text(text)));
        log.append(&lines).await
    }

    fn wanted(&self, step: &Step) -> Result<bool, String> {
        match self.held_back(step) {
            Some(Ok(())) => return Ok(false),
            Some(Err(message)) if self.outcome.is_none() => return Err(message),
            Some(Err(_)) => return Ok(false),
            None => {}
        }
        let standing = self.standing_at(step.composite);
        if step.condition.is_none() {
            return Ok(standing == expr::Outcome::Success);
        }
        let env = self.seen_at(step.composite)?;
        let context = self.context(&env, step.composite);
        expr::eval_step_condition(step.condition.as_deref(), standing, &context, &self.functions())
            .map_err(|error| format!("if: {error}"))
    }

    /// The group of a step, else the step file that it stands in.
    pub(super) fn group_name(&self, step: &Step) -> String {
        let group = step.group.and_then(|group| Some((group, self.job.spec.groups.get(group as usize)?)));
        match (group, step.composite) {
            (Some((number, group)), _) => group.name.clone().unwrap_or_else(|| format!("parallel {}", number + 1)),
            (None, Some(at)) => self.used_name(at),
            (None, None) => String::new(),
        }
    }

    /// Reports how a step went and says what follows from it.
    async fn settle(&self, index: usize, went: Went, mut report: StepReport, reporter: &dyn Reporter) -> Done {
        let step = &self.job.spec.steps[index];
        report.failure_allowed =
            went.status == StepStatus::Failed && step.continue_on_error && went.reason != FailureReason::JobTimeout;
        let mut done = Done::without_run(index, went.status);
        if went.status == StepStatus::Failed && !report.failure_allowed {
            let message = self.job.masker.mask_text(&format!("step `{}`: {}", report.name, went.message));
            let key = &report.key;
            done.failure = Some(Outcome {
                exit_code: went.exit_code,
                signal: went.signal,
                failed_step: format!("{}/{}/{}", key.kind, key.owner_index, key.ordinal),
                ..Outcome::new(JobStatus::Failed, Some(went.reason), message)
            });
        }
        done.outputs.clone_from(&went.outputs);
        (done.stopped, done.deadline) = (went.stopped, went.deadline);
        (done.exports, done.path) = (went.exports, went.path);
        done.drift = went.check == Some(CheckResult::WouldChange);
        done.in_sync = went.check == Some(CheckResult::InSync);
        report.status = went.status;
        report.at = self.job.clock.now();
        report.exit_code = went.exit_code;
        report.message = self.job.masker.mask_text(&went.message);
        report.outputs = went.outputs;
        report.summary = went.summary;
        report.check = went.check;
        report.drift = went.drift;
        reporter.step(report).await;
        done
    }

    pub(super) async fn report_without_run(
        &self,
        index: usize,
        status: StepStatus,
        check: Option<CheckResult>,
        reporter: &dyn Reporter,
    ) -> Done {
        let step = &self.job.spec.steps[index];
        let mut report = StepReport::new(step_key(index), plain_name(step), status, self.job.clock.now());
        report.group = self.group_name(step);
        report.check = check;
        reporter.step(report).await;
        Done::without_run(index, status)
    }

    /// A step that cannot start: it failed, with a log that says why.
    async fn refuse(&self, index: usize, refused: Refused, reporter: &dyn Reporter) -> Done {
        let Refused(reason, message) = refused;
        let step = &self.job.spec.steps[index];
        let mut report = StepReport::new(step_key(index), plain_name(step), StepStatus::Running, self.job.clock.now());
        report.group = self.group_name(step);
        reporter.step(report.clone()).await;
        if let Ok(mut log) = self.job.spool.open(&step_key(index)).await {
            // The report carries the message too.
            let _ = self.say(&mut log, std::slice::from_ref(&message)).await;
            report.log = log.close(self.job.clock.now()).await.unwrap_or_default();
        }
        self.settle(index, Went::failed(reason, message), report, reporter).await
    }
}

/// The name of a step when nothing can be rendered: as written, or the first line of its script.
pub(super) fn plain_name(step: &Step) -> String {
    let text = |value: &Value| match value {
        Value::Static { r#static } => r#static.clone(),
        Value::Template { template, .. } => template.clone(),
    };
    if let Some(name) = &step.name {
        return text(name);
    }
    let (before, script) = match &step.action {
        Action::Run(script) => ("", script.clone()),
        Action::Check(check) => ("", check.script.clone()),
        Action::WaitFor(wait) => match &wait.probe {
            Probe::Run(script) => ("wait for ", script.clone()),
            Probe::Url(url) => ("wait for ", text(url)),
        },
        Action::Emit(emit) => ("emit ", text(&emit.event)),
    };
    let line = script.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    before.chars().chain(line.chars()).take(NAME_CHARS).collect()
}
