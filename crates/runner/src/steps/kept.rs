//! Caches and artifacts that a workflow declares: each restoring, saving, taking and handing over is a step of its own, with a row
//! and a log.

use std::io;

use kici_engine::lock::{Cache, Download, IfEmpty, Upload};
use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use kici_protocol::agent::StepKey;
use tokio::sync::watch;

use super::command::Went;
use super::environment::Variables;
use super::exec::{Ended, told};
use super::{Job, Outcome, Run};
use crate::key::{artifact_key, cache_key};
use crate::ports::{Reporter, StepReport};
use crate::spool::StepLog;
use crate::stash::{DepotError, Restored, Saved, StashError};
use crate::stop::Stop;

/// What came of one of them.
struct Came {
    status: StepStatus,
    message: String,
    notes: Vec<String>,
}

/// Restores the caches of a job and takes its artifacts, before its start is asked for. Some is the end of the job.
pub async fn prepare(job: &Job, reporter: &dyn Reporter, stop: &mut watch::Receiver<Stop>) -> Option<Outcome> {
    if job.spec.cache.is_empty() && job.spec.artifacts.download.is_empty() {
        return None;
    }
    let run = Run::new(job);
    let env = match run.seen_at(None) {
        Ok(env) => env,
        Err(message) => return Some(Outcome::new(JobStatus::Failed, Some(FailureReason::ExprError), message)),
    };
    if let Some(went) = run.restore_all(&job.spec.cache, None, 0, &env, None, reporter, stop).await {
        return Some(ended(&went, "cache"));
    }
    for (nth, download) in job.spec.artifacts.download.iter().enumerate() {
        let went = run.take(nth, download, &env, reporter, stop).await;
        if went.status != StepStatus::Success {
            let outcome = ended(&went, "artifact");
            let key = artifact_key("download", nth);
            return Some(Outcome { failed_step: format!("{}/-1/{nth}", key.kind), ..outcome });
        }
    }
    None
}

/// The end that this brings to a job.
fn ended(went: &Went, what: &str) -> Outcome {
    match &went.stopped {
        Some(stop) => Outcome::of_stop(stop),
        None => Outcome::new(JobStatus::Failed, Some(went.reason), format!("{what}: {}", went.message)),
    }
}

fn fault(error: &StashError) -> FailureReason {
    match error {
        StashError::Bad(_) => FailureReason::ExprError,
        // The store is not the workflow's fault.
        StashError::Depot(DepotError::Unavailable(_)) => FailureReason::SandboxFailed,
        _ => FailureReason::StepFailed,
    }
}

impl Run<'_> {
    /// Restores caches in their order. Some is why the step or job that they belong to does not go on.
    #[allow(clippy::too_many_arguments, reason = "a cache belongs to a job, a step or a command of init")]
    pub(super) async fn restore_all(
        &self,
        caches: &[Cache],
        owner: Option<usize>,
        first: usize,
        env: &Variables,
        at: Option<u32>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Option<Went> {
        for (nth, cache) in caches.iter().enumerate() {
            let key = cache_key("restore", owner, first + nth);
            let rendered = self.rendered(cache, env, at);
            let name = title("restore cache", rendered.as_ref().map(|(key, ..)| key.as_str()));
            let (key_text, paths, restore_keys) = match rendered {
                Ok(rendered) => rendered,
                Err(message) => {
                    let went = Went::failed(FailureReason::ExprError, message);
                    return Some(self.told_only(key, &name, went, false, reporter).await);
                }
            };
            let work = self.job.stash.as_deref().map(|stash| async move {
                let found = stash.restore(&key_text, &restore_keys, &paths).await?;
                Ok(restored(&key_text, found))
            });
            let went = self.kept_step(key, &name, !cache.required, reporter, stop, work).await;
            if went.stopped.is_some() || went.deadline || (cache.required && went.status == StepStatus::Failed) {
                return Some(went);
            }
        }
        None
    }

    /// Saves caches. Some is a failure that counts.
    #[allow(clippy::too_many_arguments, reason = "a cache belongs to a job, a step or a command of init")]
    pub(super) async fn save_all(
        &self,
        caches: &[Cache],
        owner: Option<usize>,
        first: usize,
        success: bool,
        env: &Variables,
        at: Option<u32>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Option<Went> {
        if self.job.spec.check_mode.is_check() {
            return None;
        }
        let mut failed = None;
        for (nth, cache) in caches.iter().enumerate().filter(|(_, cache)| cache.when.holds(success)) {
            let key = cache_key("save", owner, first + nth);
            let (name, rendered) = match self.rendered(cache, env, at) {
                Ok((key, paths, _)) => (title("save cache", Ok::<_, ()>(key.as_str())), (key, paths)),
                Err(message) => {
                    let went = Went::failed(FailureReason::ExprError, message);
                    let name = title("save cache", Err(()));
                    failed.get_or_insert(self.told_only(key, &name, went, false, reporter).await);
                    continue;
                }
            };
            let work = self
                .job
                .stash
                .as_deref()
                .map(|stash| async move { Ok(saved(stash.save(&rendered.0, &rendered.1).await?, "the cache")) });
            let went = self.kept_step(key, &name, !cache.required, reporter, stop, work).await;
            let counts = cache.required && went.status == StepStatus::Failed;
            if went.stopped.is_some() || went.deadline {
                return Some(went);
            }
            if counts {
                failed.get_or_insert(went);
            }
        }
        failed
    }

    /// Hands the artifacts of the job over. A failure is one of the job: it is never green without its artifacts.
    pub(super) async fn hand_over(
        &mut self,
        mut outcome: Outcome,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Outcome {
        let success = outcome.status == JobStatus::Success;
        if !self.keeps(&outcome, stop) || self.job.spec.artifacts.upload.is_empty() {
            return outcome;
        }
        let env = match self.seen_at(None) {
            Ok(env) => env,
            Err(message) => return worse(outcome, FailureReason::ExprError, message, String::new()),
        };
        let uploads = &self.job.spec.artifacts.upload;
        for (nth, upload) in uploads.iter().enumerate().filter(|(_, upload)| upload.when.holds(success)) {
            let went = self.upload(nth, upload, &env, reporter, stop).await;
            if let Some(stop) = &went.stopped {
                self.stopping = true;
                return Outcome::of_stop(stop);
            }
            if went.status == StepStatus::Failed {
                let failed_step = format!("artifact:upload/-1/{nth}");
                let message = self.job.masker.mask_text(&format!("artifact: {}", went.message));
                outcome = worse(outcome, went.reason, message, failed_step);
            }
        }
        outcome
    }

    /// Saves the caches of the job.
    pub(super) async fn save_own(
        &self,
        outcome: Outcome,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Outcome {
        if self.job.spec.cache.is_empty() || !self.keeps(&outcome, stop) {
            return outcome;
        }
        let env = match self.seen_at(None) {
            Ok(env) => env,
            Err(message) => return worse(outcome, FailureReason::ExprError, message, String::new()),
        };
        let success = outcome.status == JobStatus::Success;
        match self.save_all(&self.job.spec.cache, None, 0, success, &env, None, reporter, stop).await {
            Some(went) if went.stopped.is_none() => {
                let message = self.job.masker.mask_text(&format!("cache: {}", went.message));
                worse(outcome, went.reason, message, String::new())
            }
            // A result that is there beats a cancel that comes now.
            _ => outcome,
        }
    }

    /// Whether something of the job is kept after this end: not when it is on its way out.
    fn keeps(&self, outcome: &Outcome, stop: &watch::Receiver<Stop>) -> bool {
        let late = self.job.deadline.is_some_and(|deadline| deadline <= tokio::time::Instant::now());
        let ended = matches!(outcome.status, JobStatus::Success | JobStatus::Failed);
        ended
            && !late
            && !self.stopping
            && !outcome.abandoned
            && *stop.borrow() == Stop::Run
            && !self.job.spec.check_mode.is_check()
    }

    async fn upload(
        &self,
        nth: usize,
        upload: &Upload,
        env: &Variables,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Went {
        let key = artifact_key("upload", nth);
        let texts = self.render(&upload.name, env, None).and_then(|name| {
            let paths = upload.paths.iter().map(|path| self.render(path, env, None)).collect::<Result<Vec<_>, _>>()?;
            Ok((name, paths))
        });
        let title = title("upload artifact", texts.as_ref().map(|(name, _)| name.as_str()));
        let (name, paths) = match texts {
            Ok(texts) => texts,
            Err(message) => {
                let went = Went::failed(FailureReason::ExprError, message);
                return self.told_only(key, &title, went, false, reporter).await;
            }
        };
        let work = self.job.stash.as_deref().map(|stash| async move {
            let done = stash.upload(&name, &paths, upload.expire_in_ms).await?;
            Ok(match (done, upload.if_empty) {
                (Saved::Empty, IfEmpty::Fail) => {
                    let message = format!("nothing is there for `{name}`: no file matches {}", paths.join(", "));
                    Came { status: StepStatus::Failed, message, notes: Vec::new() }
                }
                (done, _) => saved(done, "the artifact"),
            })
        });
        self.kept_step(key, &title, false, reporter, stop, work).await
    }

    async fn take(
        &self,
        nth: usize,
        download: &Download,
        env: &Variables,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Went {
        let key = artifact_key("download", nth);
        let texts = self.render(&download.name, env, None).and_then(|name| {
            let path = download.path.as_ref().map(|path| self.render(path, env, None)).transpose()?;
            Ok((name, path.unwrap_or_default()))
        });
        let title = title("download artifact", texts.as_ref().map(|(name, _)| name.as_str()));
        let (name, path) = match texts {
            Ok(texts) => texts,
            Err(message) => {
                let went = Went::failed(FailureReason::ExprError, message);
                return self.told_only(key, &title, went, false, reporter).await;
            }
        };
        let work = self.job.stash.as_deref().map(|stash| async move {
            let found = stash.download(&name, download.from.as_deref(), &path).await?;
            let note = format!("{} files, {} bytes", found.files, found.bytes);
            Ok(Came { status: StepStatus::Success, message: String::new(), notes: vec![note] })
        });
        self.kept_step(key, &title, false, reporter, stop, work).await
    }

    fn rendered(
        &self,
        cache: &Cache,
        env: &Variables,
        at: Option<u32>,
    ) -> Result<(String, Vec<String>, Vec<String>), String> {
        let all = |values: &[kici_engine::lock::Value]| {
            values.iter().map(|value| self.render(value, env, at)).collect::<Result<Vec<_>, _>>()
        };
        Ok((self.render(&cache.key, env, at)?, all(&cache.paths)?, all(&cache.restore_keys)?))
    }

    /// One of them, with its reports and its log. A failure that is `allowed` is said and changes nothing.
    async fn kept_step(
        &self,
        key: StepKey,
        name: &str,
        allowed: bool,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
        work: Option<impl Future<Output = Result<Came, StashError>>>,
    ) -> Went {
        let deadline = self.job.deadline;
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let name = self.job.masker.mask_text(name);
        let mut report = StepReport::new(key.clone(), name, StepStatus::Running, self.job.clock.now());
        reporter.step(report.clone()).await;
        let mut notes = Vec::new();
        let went = match work {
            None => {
                notes.push("nothing is kept here: this run has no store".to_owned());
                Went { status: StepStatus::Skipped, ..Went::success() }
            }
            Some(work) => {
                let done = tokio::select! {
                    done = work => done.map_err(Some),
                    () = late => Err(None),
                    stop = told(stop, false) => return self.cut(report, Ended::Stopped(stop), reporter).await,
                };
                match done {
                    Ok(done) => {
                        notes = done.notes;
                        let went = Went::failed(FailureReason::StepFailed, done.message);
                        Went { status: done.status, ..went }
                    }
                    Err(Some(StashError::Depot(DepotError::Nowhere(why)))) => {
                        notes.push(why.to_owned());
                        Went { status: StepStatus::Skipped, ..Went::success() }
                    }
                    Err(Some(error)) => Went::failed(fault(&error), error.to_string()),
                    Err(None) => return self.cut(report, Ended::DeadlineReached, reporter).await,
                }
            }
        };
        report.failure_allowed = allowed && went.status == StepStatus::Failed;
        if !went.message.is_empty() {
            notes.push(went.message.clone());
        }
        if let Ok(log) = self.noted(&key, &notes).await {
            report.log = log;
        }
        self.report_end(report, &went, reporter).await;
        went
    }

    async fn cut(&self, report: StepReport, ended: Ended, reporter: &dyn Reporter) -> Went {
        let went = Went::interrupted(ended);
        self.report_end(report, &went, reporter).await;
        went
    }

    /// A failure before anything was done.
    async fn told_only(&self, key: StepKey, name: &str, went: Went, allowed: bool, reporter: &dyn Reporter) -> Went {
        let name = self.job.masker.mask_text(name);
        let mut report = StepReport::new(key.clone(), name, StepStatus::Running, self.job.clock.now());
        reporter.step(report.clone()).await;
        report.failure_allowed = allowed;
        if let Ok(log) = self.noted(&key, std::slice::from_ref(&went.message)).await {
            report.log = log;
        }
        self.report_end(report, &went, reporter).await;
        went
    }

    async fn noted(&self, key: &StepKey, notes: &[String]) -> io::Result<crate::spool::Seal> {
        let mut log: StepLog = self.job.spool.open(key).await?;
        self.say(&mut log, notes).await?;
        log.close(self.job.clock.now()).await
    }

    async fn report_end(&self, mut report: StepReport, went: &Went, reporter: &dyn Reporter) {
        report.status = went.status;
        report.at = self.job.clock.now();
        report.message = self.job.masker.mask_text(&went.message);
        reporter.step(report).await;
    }
}

fn title<E>(what: &str, of: Result<&str, E>) -> String {
    of.map_or_else(|_| what.to_owned(), |of| format!("{what} {of}").chars().take(200).collect())
}

fn restored(key: &str, found: Restored) -> Came {
    let mut notes = found.notes;
    match &found.matched_key {
        None => notes.push(format!("no entry is found for {key}")),
        Some(matched) => {
            let how = if found.exact { "" } else { "by one of the restore_keys: " };
            notes.push(format!("{how}{matched}: {} files, {} bytes", found.files, found.bytes));
        }
    }
    Came { status: StepStatus::Success, message: String::new(), notes }
}

fn saved(done: Saved, what: &str) -> Came {
    let (status, notes) = match done {
        Saved::Stored { files, packed, mut notes } => {
            notes.push(format!("{files} files, {packed} bytes packed"));
            (StepStatus::Success, notes)
        }
        Saved::Exists => (StepStatus::Skipped, vec![format!("{what} is there already and stays")]),
        Saved::Empty => (StepStatus::Skipped, vec![format!("nothing is there for {what}")]),
    };
    Came { status, message: String::new(), notes }
}

/// A success becomes a failure; another end only gets more to say.
fn worse(outcome: Outcome, reason: FailureReason, message: String, failed_step: String) -> Outcome {
    if outcome.status == JobStatus::Success {
        let outputs = outcome.outputs;
        return Outcome { outputs, failed_step, ..Outcome::new(JobStatus::Failed, Some(reason), message) };
    }
    let message = if outcome.message.is_empty() { message } else { format!("{}; {message}", outcome.message) };
    Outcome { message, ..outcome }
}
