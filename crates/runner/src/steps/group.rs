//! Steps that run side by side.

use std::ops::Range;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kici_engine::state::{FailureReason, StepStatus};
use tokio::sync::watch;

use super::Run;
use super::exec::TIMEOUT_GRACE;
use super::step::Done;
use crate::key::step_key;
use crate::ports::{Reporter, StepReport};
use crate::stop::{Stop, strengthen};

impl Run<'_> {
    /// Runs the steps of a group within its window and waits for all of them.
    pub(super) async fn group(
        &mut self,
        steps: Range<usize>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) {
        let first = steps.start;
        let done = self.side_by_side(steps, reporter, stop).await;
        let mut done: Vec<Option<Done>> = done.into_iter().map(Some).collect();
        done.sort_by_key(|done| done.as_ref().map_or(first, |done| done.index));
        for done in done.into_iter().flatten() {
            self.absorb(done);
        }
    }

    async fn side_by_side(
        &self,
        steps: Range<usize>,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> Vec<Done> {
        let spec = &self.job.spec;
        let group = spec.steps[steps.start].group.and_then(|group| spec.groups.get(group as usize));
        let (fail_fast, window) = group.map_or((true, None), |group| (group.fail_fast, group.max_parallel));
        let window = window.map_or(usize::MAX, |limit| (limit as usize).max(1));
        let (tell, hear) = watch::channel(stop.borrow().clone());
        let (mut waiting, mut done) = (steps.clone(), Vec::new());
        let mut running = FuturesUnordered::new();
        let start = |index: usize| {
            let mut hear = hear.clone();
            async move { self.perform(index, reporter, &mut hear).await }
        };
        running.extend(waiting.by_ref().take(window).map(start));
        for index in waiting.clone() {
            self.report_pending(index, reporter).await;
        }
        let (mut failed, mut late) = (false, false);
        let mut heard_stop = true;
        loop {
            tokio::select! {
                next = running.next() => {
                    let Some(mut one) = next else { break };
                    failed |= one.failure.is_some();
                    late |= one.deadline;
                    if fail_fast && failed {
                        strengthen(&tell, fail_fast_stop(&one));
                    }
                    // A step that only its sibling ended was not told to stop by anybody else.
                    let job_stop = stop.borrow().clone();
                    one.stopped = one.stopped.filter(|_| job_stop != Stop::Run).map(|_| job_stop);
                    done.push(one);
                    // After a cancel the steps go on that ask for it, until a stronger word.
                    let stopped = match &*stop.borrow() {
                        Stop::Run => false,
                        Stop::Graceful { .. } => !self.stopping,
                        Stop::Force { .. } | Stop::Abandon { .. } => true,
                    };
                    let halted = stopped || late || (fail_fast && failed);
                    if !halted {
                        running.extend(waiting.next().map(start));
                    }
                }
                changed = stop.changed(), if heard_stop => match changed {
                    Ok(()) => strengthen(&tell, stop.borrow().clone()),
                    Err(_) => heard_stop = false,
                },
            }
        }
        drop(running);
        for index in waiting {
            done.push(self.report_without_run(index, StepStatus::Cancelled, None, reporter).await);
        }
        done
    }

    async fn report_pending(&self, index: usize, reporter: &dyn Reporter) {
        let step = &self.job.spec.steps[index];
        let name = super::step::plain_name(step);
        let mut report = StepReport::new(step_key(index), name, StepStatus::Pending, self.job.clock.now());
        report.group = self.group_name(step);
        reporter.step(report).await;
    }
}

fn fail_fast_stop(done: &Done) -> Stop {
    let message = done.failure.as_ref().map_or_else(String::new, |outcome| outcome.message.clone());
    Stop::Graceful {
        reason: FailureReason::FailFast,
        message: format!("cancelled, because {message}"),
        grace: TIMEOUT_GRACE,
        more_steps: true,
    }
}
