//! `check` with `apply`, and `wait_for`.

use std::io;
use std::path::Path;
use std::time::Duration;

use kici_engine::check::CheckResult;
use kici_engine::lock::{Check, Probe, WaitFor};
use kici_engine::state::{FailureReason, StepStatus};
use tokio::sync::watch;
use tokio::time::Instant;

use super::command::Went;
use super::exec::{Ended, told};
use super::step::Attempt;
use super::tree::Tree;
use super::{Run, files};
use crate::ports::Reporter;
use crate::spool::StepLog;
use crate::stop::Stop;

/// Longest description of drift that is kept.
const MAX_DRIFT_BYTES: usize = 64 * 1024;
/// Shortest pause between two questions.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Longest that one question to a web address may take.
const URL_LIMIT: Duration = Duration::from_secs(30);

impl Run<'_> {
    /// Looks for drift, and repairs it where the run may.
    pub(super) async fn check(
        &self,
        attempt: &Attempt<'_>,
        check: &Check,
        log: &mut StepLog,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        let drift_file = attempt.dir.join("drift");
        std::fs::create_dir_all(&attempt.dir)?;
        std::fs::File::create(&drift_file)?;
        self.job.confine.open_way(&attempt.dir)?;
        self.job.confine.give(&drift_file)?;
        let file = Some(("KICI_DRIFT", drift_file.as_path()));
        let looked = self.script(attempt, "check", &check.script, file, log, trees, reporter, stop).await?;
        let drift = self.drift_text(&drift_file, log).await?;
        let drifted = match (check.drift_exit_code, looked.status) {
            (Some(code), StepStatus::Failed) if looked.exit_code == Some(code) && looked.may_retry() => true,
            (_, StepStatus::Failed | StepStatus::Cancelled) => {
                let message = format!("check: {}", looked.message);
                return Ok(Went { message, ..looked });
            }
            (Some(_), _) => false,
            (None, _) => !drift.trim().is_empty(),
        };
        let checking = self.job.spec.check_mode.is_check();
        let text = match (drifted, checking) {
            (false, _) => "in sync",
            (true, false) => "drift found; applying",
            (true, true) => "drift found; nothing is applied in check mode",
        };
        self.say(log, &[text.to_owned()]).await?;
        let second = match (drifted, checking) {
            (true, false) => Some(("apply", check.apply.as_str(), CheckResult::Applied)),
            (false, false) => check.when_in_sync.as_deref().map(|script| ("in-sync", script, CheckResult::InSync)),
            _ => None,
        };
        let found = if drifted { drift } else { String::new() };
        let Some((part, script, result)) = second else {
            let (status, result) = match drifted {
                true => (StepStatus::Success, CheckResult::WouldChange),
                false => (StepStatus::Skipped, CheckResult::InSync),
            };
            return Ok(Went { status, message: String::new(), check: Some(result), drift: found, ..looked });
        };
        let mut went = self.script(attempt, part, script, file, log, trees, reporter, stop).await?;
        let mut outputs = looked.outputs;
        // A name that both set counts once.
        let twice = outputs.iter().filter(|(name, _)| went.outputs.contains_key(*name));
        self.discard(&twice.map(|(name, value)| (name.clone(), value.clone())).collect());
        outputs.append(&mut went.outputs);
        let summary = looked.summary + &went.summary;
        let mut exports = looked.exports;
        exports.append(&mut went.exports);
        let path = if looked.path.is_empty() { went.path } else { format!("{}\n{}", went.path, looked.path) };
        let (status, check) = match (went.status, result) {
            (StepStatus::Success, CheckResult::InSync) => (StepStatus::Skipped, Some(result)),
            (StepStatus::Success, _) => (StepStatus::Success, Some(result)),
            (other, _) => (other, None),
        };
        let message = if went.message.is_empty() { String::new() } else { format!("{part}: {}", went.message) };
        Ok(Went { status, message, check, outputs, summary, exports, path, drift: found, ..went })
    }

    /// What a check wrote to `$KICI_DRIFT`, masked and cut.
    async fn drift_text(&self, path: &Path, log: &mut StepLog) -> io::Result<String> {
        match files::read(path) {
            Ok(text) => {
                let mut text = self.job.masker.mask_text(&text);
                text.truncate(text.floor_char_boundary(MAX_DRIFT_BYTES));
                Ok(text)
            }
            Err(problem) => {
                // It is there, but cannot be read: something does differ.
                self.say(log, std::slice::from_ref(&problem)).await?;
                Ok(problem)
            }
        }
    }

    /// Asks until the answer is yes, or the time is over.
    pub(super) async fn wait_for(
        &self,
        attempt: &Attempt<'_>,
        wait: &WaitFor,
        log: &mut StepLog,
        trees: &mut Vec<Tree>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        let limit = Duration::from_millis(wait.timeout_ms);
        let limit = super::limit_of(limit, attempt.after_stop);
        let until = Instant::now() + limit;
        let interval = Duration::from_millis(wait.interval_ms).max(MIN_INTERVAL);
        let (mut asked, mut last) = (0_u32, String::new());
        loop {
            asked += 1;
            let part = format!("ask-{asked}");
            let dir = attempt.dir.join(&part);
            let attempt = Attempt { until, limit, dir: attempt.dir.clone(), ..*attempt };
            let mut went = match &wait.probe {
                Probe::Run(script) => self.script(&attempt, &part, script, None, log, trees, reporter, stop).await?,
                Probe::Url(url) => match self.render(url, &self.seen(attempt.base), attempt.step.composite) {
                    Ok(url) => self.ask(&url, &attempt, stop).await,
                    Err(message) => return Ok(Went::failed(FailureReason::ExprError, message)),
                },
            };
            if went.status == StepStatus::Success {
                self.say(log, &[format!("there, asked {asked} times")]).await?;
                return Ok(went);
            }
            if went.stopped.is_some() || went.deadline {
                return Ok(went);
            }
            if went.message != last {
                last.clone_from(&went.message);
                self.say(log, &[format!("not yet: {}", went.message)]).await?;
            }
            // Nothing of a question that was answered with no stays.
            self.discard(&went.outputs);
            let _ = std::fs::remove_dir_all(dir);
            for mut tree in trees.drain(..) {
                tree.kill().await;
            }
            // Both may be over by now: the limit of the job ends more than this step.
            if let Some(interrupted) = self.interrupted(attempt.after_stop, stop) {
                return Ok(interrupted);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || went.reason == FailureReason::StepTimeout {
                let message =
                    format!("not there within {} s, asked {asked} times: {}", limit.as_secs_f64(), went.message);
                went = Went::failed(FailureReason::StepTimeout, message);
                return Ok(went);
            }
            if let Some(interrupted) = self.sleep(interval.min(left), attempt.after_stop, stop).await {
                return Ok(interrupted);
            }
        }
    }

    async fn ask(&self, url: &str, attempt: &Attempt<'_>, stop: &mut watch::Receiver<Stop>) -> Went {
        let limit = attempt.until.saturating_duration_since(Instant::now()).min(URL_LIMIT);
        let deadline = self.job.deadline.filter(|_| !attempt.after_stop);
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            answer = super::probe::get(url, limit) => match answer {
                Ok(()) => Went::success(),
                Err(message) => Went::failed(FailureReason::StepFailed, message),
            },
            () = late => Went::interrupted(Ended::DeadlineReached),
            stop = told(stop, attempt.after_stop) => Went::interrupted(Ended::Stopped(stop)),
        }
    }
}
