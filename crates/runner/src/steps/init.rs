//! Commands that prepare a job after its checkout and before its first step.

use std::time::Duration;

use kici_engine::lock::{Action, Step};
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use tokio::sync::watch;
use tokio::time::Instant;

use super::command::{Refused, Went};
use super::step::{Attempt, plain_name};
use super::tree::Tree;
use super::{Outcome, Run};
use crate::key::{init_cache, init_key};
use crate::ports::{Reporter, StepReport};
use crate::spool::StepLog;
use crate::stop::Stop;

/// Limit of a command that names none.
const DEFAULT_LIMIT: Duration = Duration::from_secs(600);

impl Run<'_> {
    /// Runs the commands in order. The first that fails fails the job, and no step runs that does not ask for it. They
    /// run in check mode too: what looks for drift needs its tools.
    pub(super) async fn init(&mut self, reporter: &dyn Reporter, stop: &mut watch::Receiver<Stop>) {
        for (nth, command) in self.job.spec.init.iter().enumerate() {
            let now = stop.borrow().clone();
            if now != Stop::Run || self.outcome.is_some() {
                return;
            }
            let mut trees = Vec::new();
            let went = self.init_command(nth, command, &mut trees, reporter, stop).await;
            self.trees.append(&mut trees);
            self.environment.take(went.exports);
            self.environment.extend_path(&went.path);
            if let Some(stop) = &went.stopped {
                self.stopping = true;
                self.outcome = Some(Outcome::of_stop(stop));
            } else if went.deadline {
                self.deadline_reached();
            } else if went.status != StepStatus::Success {
                let reason = match went.reason {
                    FailureReason::StepTimeout => FailureReason::InitTimeout,
                    FailureReason::StepFailed => FailureReason::InitFailed,
                    other => other,
                };
                let key = init_key(nth);
                let message = format!("init `{}`: {}", plain_name(command), went.message);
                self.outcome = Some(Outcome {
                    exit_code: went.exit_code,
                    signal: went.signal,
                    failed_step: format!("{}/{}/{}", key.kind, key.owner_index, key.ordinal),
                    ..Outcome::new(JobStatus::Failed, Some(reason), self.job.masker.mask_text(&message))
                });
            }
        }
    }

    async fn init_command(
        &self,
        nth: usize,
        command: &Step,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Went {
        let env = if command.cache.is_empty() { None } else { self.base(command).ok().map(|base| self.seen(&base)) };
        if let Some(env) = &env {
            let first = init_cache(nth, 0);
            if let Some(went) = self.restore_all(&command.cache, None, first, env, None, reporter, stop).await {
                return went;
            }
        }
        let went = self.init_alone(nth, command, trees, reporter, stop).await;
        if let (StepStatus::Success, Some(env)) = (went.status, &env) {
            let first = init_cache(nth, 0);
            let failed = self.save_all(&command.cache, None, first, true, env, None, reporter, stop).await;
            if let Some(failed) = failed {
                return Went { exports: went.exports, path: went.path, ..failed };
            }
        }
        went
    }

    async fn init_alone(
        &self,
        nth: usize,
        command: &Step,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Went {
        let key = init_key(nth);
        let mut report = StepReport::new(key.clone(), plain_name(command), StepStatus::Running, self.job.clock.now());
        reporter.step(report.clone()).await;
        let went = match self.job.spool.open(&key).await {
            Ok(mut log) => {
                let went = self.init_script(nth, command, &mut log, trees, reporter, stop).await;
                if went.status != StepStatus::Success {
                    // The report carries the message too.
                    let _ = self.say(&mut log, std::slice::from_ref(&went.message)).await;
                }
                report.log = log.close(self.job.clock.now()).await.unwrap_or_default();
                went
            }
            Err(error) => Went::failed(FailureReason::SandboxFailed, format!("its log cannot be kept: {error}")),
        };
        report.status = went.status;
        report.at = self.job.clock.now();
        report.exit_code = went.exit_code;
        report.message = self.job.masker.mask_text(&went.message);
        reporter.step(report).await;
        went
    }
    async fn init_script(
        &self,
        nth: usize,
        command: &Step,
        log: &mut StepLog,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Went {
        let Action::Run(script) = &command.action else {
            return Went::failed(FailureReason::SandboxFailed, "init is a script");
        };
        let base = match self.base(command) {
            Ok(base) => base,
            Err(Refused(reason, message)) => return Went::failed(reason, message),
        };
        let limit = command.timeout_ms.map_or(DEFAULT_LIMIT, Duration::from_millis);
        let attempt = Attempt {
            step: command,
            base: &base,
            dir: self.job.scratch.join(format!("init-{nth}")),
            until: Instant::now() + limit,
            limit,
            after_stop: false,
        };
        let went = self.script(&attempt, "", script, None, log, trees, reporter, stop).await;
        went.unwrap_or_else(|error| Went::failed(FailureReason::SandboxFailed, error.to_string()))
    }
}
