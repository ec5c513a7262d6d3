//! The part of a job's life that has to do with containers.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use kici_engine::state::{FailureReason, JobStatus, StepStatus};
use tokio::time::{Instant, sleep_until};

use super::Ctx;
use crate::container::{Entered, JobContainers, Notes, Wanted};
use crate::credentials::Access;
use crate::key::container_key;
use crate::lines::Lines;
use crate::ports::{Reporter, StepReport};
use crate::spool::StepLog;
use crate::steps::Outcome;
use crate::stop::stopped;

/// What a job has of containers when it starts.
#[derive(Default)]
pub(super) struct Contained {
    pub(super) entered: Option<Entered>,
    /// Where its services are.
    pub(super) variables: BTreeMap<String, String>,
}

fn sandbox_failed(message: impl Into<String>) -> Box<Outcome> {
    Box::new(Outcome::new(JobStatus::Failed, Some(FailureReason::SandboxFailed), message))
}

impl Ctx {
    pub(super) fn has_container(&self) -> bool {
        self.wanted.as_ref().is_some_and(Wanted::has_container)
    }

    /// Checks out, and meanwhile makes the containers of the job, where it has some.
    pub(super) async fn beside(
        &self,
        checkout: impl Future<Output = Result<(), Box<Outcome>>>,
        workspace: &Path,
        scratch: &Path,
        access: Option<&Access>,
        deadline: Option<Instant>,
    ) -> Result<Contained, Box<Outcome>> {
        let Some(wanted) = &self.wanted else {
            checkout.await?;
            return Ok(Contained::default());
        };
        let mut report = StepReport::new(container_key(), "containers", StepStatus::Running, self.clock.now());
        self.step(report.clone()).await;
        let (notes, mut lines) = Notes::new();
        let io = |error: std::io::Error| sandbox_failed(format!("the log of the containers cannot be kept: {error}"));
        let mut log = self.spool.open(&container_key()).await.map_err(io)?;
        let (mut checked_out, mut made) = (Ok(()), Ok(Contained::default()));
        let work = async {
            let prepared;
            (checked_out, prepared) = tokio::join!(checkout, self.make(wanted, access, &notes, deadline));
            made = match prepared {
                Ok(job) if checked_out.is_ok() => self.enter(job, workspace, scratch, &notes, deadline).await,
                Ok(_) => Ok(Contained::default()),
                Err(outcome) => Err(outcome),
            };
        };
        let mut work = Box::pin(work);
        let mut done = false;
        while !done {
            tokio::select! {
                biased;
                Some(line) = lines.recv() => self.note(&mut log, &line).await.map_err(io)?,
                () = &mut work => done = true,
            }
        }
        drop(work);
        while let Ok(line) = lines.try_recv() {
            self.note(&mut log, &line).await.map_err(io)?;
        }
        if let Err(outcome) = &made {
            self.note(&mut log, &outcome.message).await.map_err(io)?;
            report.message = self.masker.mask_text(&outcome.message);
        }
        report.log = log.close(self.clock.now()).await.map_err(io)?;
        report.at = self.clock.now();
        report.status = match (&checked_out, made.as_ref().map_err(|outcome| outcome.status)) {
            (Ok(()), Ok(_)) => StepStatus::Success,
            (Err(_), Ok(_)) | (_, Err(JobStatus::Cancelled)) => StepStatus::Cancelled,
            (_, Err(_)) => StepStatus::Failed,
        };
        let is_abandoned = made.as_ref().err().is_some_and(|outcome| outcome.abandoned);
        if !is_abandoned {
            self.step(report).await;
        }
        checked_out?;
        made.map_err(|outcome| Box::new(Outcome { message: self.masker.mask_text(&outcome.message), ..*outcome }))
    }

    async fn note(&self, log: &mut StepLog, line: &str) -> std::io::Result<()> {
        let mut lines = Lines::default();
        lines.say(self.clock.now(), &self.masker.mask_text(line));
        log.append(&lines).await
    }

    /// Waits for something that prepares the job, unless the job is told to stop or its time is over.
    async fn unless_stopped<T>(
        &self,
        work: impl Future<Output = Result<T, String>>,
        deadline: Option<Instant>,
    ) -> Result<T, Box<Outcome>> {
        let late = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let mut stop = self.stop.clone();
        tokio::select! {
            biased;
            stop = stopped(&mut stop) => Err(Box::new(Outcome::of_stop(&stop))),
            done = work => done.map_err(sandbox_failed),
            () = late => {
                let message = "the job ran longer than its limit while its containers were made";
                Err(Box::new(Outcome::new(JobStatus::Failed, Some(FailureReason::JobTimeout), message)))
            }
        }
    }

    async fn make(
        &self,
        wanted: &Wanted,
        access: Option<&Access>,
        notes: &Notes,
        deadline: Option<Instant>,
    ) -> Result<JobContainers, Box<Outcome>> {
        let answering = access.map(Access::answering);
        self.unless_stopped(self.host.containers.prepare(self.key, wanted, answering, notes), deadline).await
    }

    async fn enter(
        &self,
        mut job: JobContainers,
        workspace: &Path,
        scratch: &Path,
        notes: &Notes,
        deadline: Option<Instant>,
    ) -> Result<Contained, Box<Outcome>> {
        let entering = self.host.containers.enter(&mut job, workspace, scratch);
        let entered = self.unless_stopped(entering, deadline).await?;
        if let Some(entered) = &entered {
            notes.say("the container runs");
            // Set once: a job enters one container.
            let _ = self.inside.set(Arc::clone(&entered.inside));
        }
        Ok(Contained { entered, variables: job.variables })
    }

    /// Ends what is left in the container of the job, and judges the end of the job by what it used.
    pub(super) async fn leave_container(&self, outcome: Outcome) -> Outcome {
        let Some(inside) = self.inside.get() else { return outcome };
        let usage = inside.usage().await;
        let gone = inside.closed();
        let mut outcome = outcome.with_usage(usage);
        outcome.strays_killed += inside.kill_all().await;
        if let Some(why) = gone
            && outcome.status == JobStatus::Failed
            && outcome.reason == Some(FailureReason::StepFailed)
        {
            outcome.reason = Some(FailureReason::SandboxFailed);
            outcome.message = self.masker.mask_text(&format!("{}; the container is gone: {why}", outcome.message));
        }
        outcome
    }

    /// Removes what was made on the engine.
    pub(super) async fn clean(&self, failed: bool) {
        if self.wanted.is_none() {
            return;
        }
        if failed && self.config.containers.keep_failed {
            tracing::warn!(job = %self.key, "docker_keep_failed: the containers of the job are kept until the next start");
            return self.host.containers.end(self.key).await;
        }
        self.host.containers.clean(self.key).await;
    }
}
