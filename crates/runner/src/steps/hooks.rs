//! Hooks: scripts around the steps. Each has at most five minutes and a row and log of its own.

use std::io;
use std::time::Duration;

use kici_engine::lock::{Action, MAX_HOOK_MS, Step};
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_protocol::agent::StepKey;
use tokio::sync::watch;

use super::command::{Refused, Went};
use super::exec::{Bounds, Ended};
use super::step::{Done, plain_name};
use super::tree::Tree;
use super::{Outcome, Run, describe};
use crate::key::hook_key;
use crate::ports::{Reporter, StepReport};
use crate::stop::Stop;

/// What hooks are told about what they follow, as variables.
type Facts = Vec<(&'static str, String)>;

impl Run<'_> {
    /// The job's hooks before a step.
    pub(super) async fn before_step(
        &self,
        index: usize,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Vec<Tree> {
        let mut trees = Vec::new();
        let facts = vec![("KICI_STEP_INDEX", index.to_string())];
        for (nth, hook) in self.job.spec.hooks.before_step.iter().enumerate() {
            if self.interrupted(self.stopping, stop).is_some() {
                break;
            }
            // An observer: how it ends changes nothing.
            self.hook("before_step", Some(index), nth, hook, &facts, self.stopping, &mut trees, reporter, stop).await;
        }
        trees
    }

    /// The step's own hooks, inside out, then the job's after a step.
    pub(super) async fn after_step(
        &self,
        index: usize,
        done: &Done,
        took: Duration,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Vec<Tree> {
        let mut trees = Vec::new();
        let step = &self.job.spec.steps[index];
        let mut facts = facts(done.status.as_str(), done.failure.as_ref(), took);
        facts.push(("KICI_STEP_INDEX", index.to_string()));
        let cancelled = done.status == StepStatus::Cancelled;
        let mut stopping = self.stopping || cancelled || done.deadline;
        let on_cancel = step.on_cancel.iter().filter(|_| cancelled || done.deadline).map(|hook| ("on_cancel", hook));
        let own = on_cancel.chain(step.cleanup.iter().map(|hook| ("cleanup", hook)));
        let after = self.job.spec.hooks.after_step.iter().map(|hook| ("after_step", hook));
        for (nth, (kind, hook)) in own.chain(after).enumerate() {
            if stop.borrow().runs_nothing_more() {
                break;
            }
            // A cancel that comes now leaves what still has to be cleaned up.
            stopping |= *stop.borrow() != Stop::Run;
            if stopping && kind == "after_step" {
                break;
            }
            self.hook(kind, Some(index), nth, hook, &facts, stopping, &mut trees, reporter, stop).await;
        }
        trees
    }

    /// The job's hooks after its steps. `outcome` is how they ended.
    pub(super) async fn at_end(
        &mut self,
        mut outcome: Outcome,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Outcome {
        if self.job.spec.check_mode.is_check() || outcome.abandoned || stop.borrow().runs_nothing_more() {
            return outcome;
        }
        let hooks = &self.job.spec.hooks;
        let (kind, first) = match outcome.status {
            _ if self.stopping => ("on_cancel", &hooks.on_cancel),
            JobStatus::Success => ("on_success", &hooks.on_success),
            JobStatus::Cancelled => ("on_cancel", &hooks.on_cancel),
            _ => ("on_failure", &hooks.on_failure),
        };
        let all = first.iter().map(|hook| (kind, hook)).chain(hooks.cleanup.iter().map(|hook| ("cleanup", hook)));
        let mut trees = Vec::new();
        for (nth, (kind, hook)) in all.enumerate() {
            if stop.borrow().runs_nothing_more() {
                break;
            }
            // A cancel that comes now leaves what still has to be cleaned up.
            let stopping = self.stopping || *stop.borrow() != Stop::Run;
            let facts = facts(outcome.status.as_str(), Some(&outcome), self.began.elapsed());
            let failed = self.hook(kind, None, nth, hook, &facts, stopping, &mut trees, reporter, stop).await;
            if let Some((went, name)) = failed {
                outcome = judged(outcome, kind, nth, &name, &went);
            }
        }
        self.trees.append(&mut trees);
        outcome
    }

    /// Runs one hook. Some is a hook that did not succeed, with its name.
    #[allow(clippy::too_many_arguments, reason = "a hook is named by its kind, its owner and its place")]
    async fn hook(
        &self,
        kind: &str,
        owner: Option<usize>,
        nth: usize,
        hook: &Step,
        facts: &[(&'static str, String)],
        after_stop: bool,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Option<(Went, String)> {
        let key = hook_key(kind, owner, nth);
        let (name, ran) = match self.base(hook) {
            Ok(base) => {
                let mut report = StepReport::new(key.clone(), &base.name, StepStatus::Running, self.job.clock.now());
                reporter.step(report.clone()).await;
                let ran =
                    self.hook_script(&key, hook, &base, facts, after_stop, trees, &mut report, reporter, stop).await;
                (base.name, ran.map(|went| (went, report.log)))
            }
            Err(Refused(reason, message)) => {
                (plain_name(hook), Ok((Went::failed(reason, message), Default::default())))
            }
        };
        let (went, log) = ran.unwrap_or_else(|error| {
            let message = format!("the output cannot be kept: {error}");
            (Went::failed(FailureReason::SandboxFailed, message), Default::default())
        });
        let mut report = StepReport::new(key, &name, went.status, self.job.clock.now());
        report.exit_code = went.exit_code;
        report.message = self.job.masker.mask_text(&went.message);
        report.log = log;
        report.failure_allowed = went.status == StepStatus::Failed && matches!(kind, "before_step" | "after_step");
        reporter.step(report).await;
        (went.status != StepStatus::Success).then_some((went, name))
    }

    #[allow(clippy::too_many_arguments, reason = "the same as its only caller")]
    async fn hook_script(
        &self,
        key: &StepKey,
        hook: &Step,
        base: &super::command::Base,
        facts: &[(&'static str, String)],
        after_stop: bool,
        trees: &mut Vec<Tree>,
        report: &mut StepReport,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        let Action::Run(script) = &hook.action else {
            return Ok(Went::failed(FailureReason::SandboxFailed, "a hook is a script"));
        };
        let mut log = self.job.spool.open(key).await?;
        let limit = Duration::from_millis(hook.timeout_ms.unwrap_or(MAX_HOOK_MS).min(MAX_HOOK_MS));
        let dir = self.job.scratch.join(crate::key::step_file_name(key));
        let went = match self.files_with_space(&dir, script).await {
            Err(Refused(reason, message)) => Went::failed(reason, message),
            Ok(files) => {
                let command = self.command(base, &files, &[], facts);
                // The limit of the job counts for its steps; a hook has its own.
                let bounds = Bounds { timeout: limit, deadline: None, after_stop };
                match self.run_command(&command, bounds, &mut log, trees, reporter, stop).await? {
                    Ok(ended) => hook_went(ended, limit),
                    Err(message) => Went::failed(FailureReason::StepFailed, message),
                }
            }
        };
        if went.status != StepStatus::Success {
            self.say(&mut log, std::slice::from_ref(&went.message)).await?;
        }
        report.log = log.close(self.job.clock.now()).await?;
        Ok(went)
    }
}

fn hook_went(ended: Ended, limit: Duration) -> Went {
    match ended {
        Ended::Exit(status) if status.success() => Went { exit_code: Some(0), ..Went::success() },
        Ended::Exit(status) => {
            Went { exit_code: status.code(), ..Went::failed(FailureReason::StepFailed, describe(status)) }
        }
        Ended::TimedOut => {
            let message = format!("ran longer than its limit of {} s", limit.as_secs_f64());
            Went::failed(FailureReason::StepTimeout, message)
        }
        other => Went::interrupted(other),
    }
}

fn facts(status: &str, outcome: Option<&Outcome>, took: Duration) -> Facts {
    let reason = outcome.and_then(|outcome| outcome.reason).map_or("", FailureReason::as_str);
    let step = outcome.map_or_else(String::new, |outcome| outcome.failed_step.clone());
    vec![
        ("KICI_OUTCOME_STATUS", status.to_owned()),
        ("KICI_OUTCOME_REASON", reason.to_owned()),
        ("KICI_OUTCOME_FAILED_STEP", step),
        ("KICI_OUTCOME_DURATION_MS", took.as_millis().to_string()),
    ]
}

/// How a job ends one of whose hooks did not succeed: a success becomes a failure, anything else only a longer reason.
fn judged(outcome: Outcome, kind: &str, nth: usize, name: &str, went: &Went) -> Outcome {
    let text = format!("{kind} hook `{name}`: {}", went.message);
    if outcome.status != JobStatus::Success {
        return Outcome { message: format!("{}; {text}", outcome.message), ..outcome };
    }
    let key = hook_key(kind, None, nth);
    let cancelled = went.stopped.as_ref().map(Outcome::of_stop);
    let failed = cancelled.unwrap_or_else(|| Outcome::new(JobStatus::Failed, Some(went.reason), text));
    Outcome {
        exit_code: went.exit_code,
        failed_step: format!("{}/{}/{}", key.kind, key.owner_index, key.ordinal),
        outputs: outcome.outputs,
        ..failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_hook_fails_a_success_and_only_lengthens_another_reason() {
        let went = Went::failed(FailureReason::StepFailed, "exit code 2");
        let outcome = |status, reason| Outcome::new(status, reason, "why");
        let failed = judged(outcome(JobStatus::Success, None), "cleanup", 1, "rm", &went);
        assert_eq!((failed.status, failed.reason), (JobStatus::Failed, Some(FailureReason::StepFailed)));
        assert_eq!(failed.failed_step, "hook:cleanup/-1/1");
        for status in [JobStatus::Failed, JobStatus::Cancelled] {
            let same = judged(outcome(status, Some(FailureReason::CancelledByUser)), "on_cancel", 0, "undo", &went);
            assert_eq!((same.status, same.reason), (status, Some(FailureReason::CancelledByUser)));
            assert_eq!(same.message, "why; on_cancel hook `undo`: exit code 2");
        }
    }
}
