//! What becomes of a job when its agent is gone.

use kici_engine::state::FailureReason;

/// What the decision looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostJob {
    /// The agent was started for its job by a scaler.
    pub scaler_managed: bool,
    /// The agent said that it took the job.
    pub acked: bool,
    /// The start was granted: user code may have run.
    pub started: bool,
    /// The run is being cancelled.
    pub cancelling: bool,
    /// It asked for a restart of its host, which is pending.
    pub rebooted: bool,
}

/// What to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Triage {
    /// Back into the queue at once. Safe when nothing was started: the start permit was never given.
    Requeue,
    /// Wait for the agent for one recovery window; then decide by [`recovery_expired`].
    Recover,
    /// It failed.
    Fail(FailureReason),
    /// It is cancelled.
    Cancel,
    /// It did what it was for: its host restarts.
    Succeed,
}

/// The decision at the disconnect.
pub fn triage(job: LostJob) -> Triage {
    match job {
        LostJob { cancelling: true, .. } => Triage::Cancel,
        LostJob { rebooted: true, started: true, .. } => Triage::Succeed,
        LostJob { started: false, scaler_managed: true, .. } => Triage::Requeue,
        LostJob { started: false, acked: false, .. } => Triage::Requeue,
        // It may have been the network: its backend, or the end of its grace, says whether it is gone.
        _ => Triage::Recover,
    }
}

/// The decision when the recovery window ended without the agent.
pub fn recovery_expired(job: LostJob) -> Triage {
    match job {
        LostJob { cancelling: true, .. } => Triage::Cancel,
        LostJob { rebooted: true, started: true, .. } => Triage::Succeed,
        LostJob { started: false, .. } => Triage::Requeue,
        _ => Triage::Fail(FailureReason::AgentLost),
    }
}

/// The decision when the agent registered without a job that the database gives it.
pub fn forgotten(job: LostJob) -> Triage {
    match job {
        LostJob { cancelling: true, .. } => Triage::Cancel,
        LostJob { rebooted: true, started: true, .. } => Triage::Succeed,
        LostJob { started: false, .. } => Triage::Requeue,
        _ => Triage::Fail(FailureReason::AgentForgotJob),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: LostJob =
        LostJob { scaler_managed: false, acked: false, started: false, cancelling: false, rebooted: false };

    fn all() -> impl Iterator<Item = LostJob> {
        (0u8..32).map(|bits| LostJob {
            scaler_managed: bits & 1 != 0,
            acked: bits & 2 != 0 || bits & 4 != 0,
            started: bits & 4 != 0,
            cancelling: bits & 8 != 0,
            rebooted: bits & 16 != 0,
        })
    }

    #[test]
    fn the_table_of_disconnects() {
        let scaler = LostJob { scaler_managed: true, ..JOB };
        let acked = LostJob { acked: true, ..JOB };
        let started = LostJob { acked: true, started: true, ..JOB };
        assert_eq!(triage(scaler), Triage::Requeue);
        assert_eq!(triage(LostJob { scaler_managed: true, ..started }), Triage::Recover);
        assert_eq!(triage(LostJob { scaler_managed: true, ..acked }), Triage::Requeue, "it is started anew");
        assert_eq!(triage(JOB), Triage::Requeue);
        assert_eq!(triage(acked), Triage::Recover);
        assert_eq!(triage(started), Triage::Recover);
        assert_eq!(triage(LostJob { cancelling: true, ..started }), Triage::Cancel);
        let asked = LostJob { rebooted: true, ..started };
        for decide in [triage, recovery_expired, forgotten] {
            assert_eq!(decide(asked), Triage::Succeed);
            assert_ne!(decide(LostJob { started: false, ..asked }), Triage::Succeed, "it cannot have asked");
        }
        assert_eq!(recovery_expired(acked), Triage::Requeue);
        assert_eq!(recovery_expired(started), Triage::Fail(FailureReason::AgentLost));
    }

    #[test]
    fn a_started_job_never_runs_again() {
        for job in all().filter(|job| job.started) {
            for decide in [triage, recovery_expired, forgotten] {
                assert_ne!(decide(job), Triage::Requeue, "{job:?}");
            }
        }
    }

    #[test]
    fn a_cancelled_run_takes_every_lost_job_with_it() {
        for job in all().filter(|job| job.cancelling) {
            for decide in [triage, recovery_expired, forgotten] {
                assert_eq!(decide(job), Triage::Cancel);
            }
        }
    }

    #[test]
    fn nothing_recovers_for_ever() {
        for job in all() {
            assert_ne!(recovery_expired(job), Triage::Recover);
            assert_ne!(forgotten(job), Triage::Recover);
        }
    }
}
