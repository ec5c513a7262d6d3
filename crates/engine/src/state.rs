//! Statuses of runs, jobs, steps and queue rows, the job state machine, failure classes, and how a run's status follows
//! from its jobs.

/// A stored or received word that is not one of an enum's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what}; expected one of: {expected}")]
pub struct UnknownWord {
    /// What was read.
    pub text: String,
    /// Which vocabulary it should belong to.
    pub what: &'static str,
    /// The vocabulary, comma separated.
    pub expected: String,
}

/// Enums that are words in the database, on the wire and in JSON.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident ($what:literal) { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word that stands for this value in storage, on the wire and in JSON.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::state::UnknownWord;

            fn from_str(text: &str) -> Result<Self, $crate::state::UnknownWord> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err($crate::state::UnknownWord {
                        text: text.chars().take(80).collect(),
                        what: $what,
                        expected: [$($word,)*].join(", "),
                    }),
                }
            }
        }
    };
}
pub(crate) use words;

words! {
    /// Status of a run.
    RunStatus("run status") {
        /// No job has started.
        Pending = "pending",
        /// At least one job has started and not all are terminal.
        Running = "running",
        /// Every open job is held for a person, a timer or a slot.
        Held = "held",
        /// A cancel was asked for and jobs are still unwinding.
        Cancelling = "cancelling",
        /// All jobs ended well, or were skipped.
        Success = "success",
        /// A job failed.
        Failed = "failed",
        /// Cancelled by a person, a newer run or a shutdown.
        Cancelled = "cancelled",
    }
}

impl RunStatus {
    /// True for `success`, `failed` and `cancelled`: nothing changes a run after that.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Success | Self::Failed | Self::Cancelled)
    }
}

words! {
    /// Status of a job.
    JobStatus("job status") {
        /// Waits for the jobs it needs.
        Pending = "pending",
        /// Ready; waits for an agent, or an agent prepares it.
        Queued = "queued",
        /// Held for a person.
        Held = "held",
        /// Waits for a timer or a concurrency slot.
        Waiting = "waiting",
        /// Its steps run under a granted start.
        Running = "running",
        /// Its agent is out of contact and may come back.
        Recovering = "recovering",
        /// Being cancelled; hooks may still run.
        Cancelling = "cancelling",
        /// Ended well.
        Success = "success",
        /// Ended badly.
        Failed = "failed",
        /// Cancelled.
        Cancelled = "cancelled",
        /// Did not run: a condition was false or what it needs did not end as asked.
        Skipped = "skipped",
        /// Its agent fell silent.
        TimedOutStale = "timed_out_stale",
        /// Dropped because the workflow at the agent differed from the planned one.
        DriftDropped = "drift_dropped",
        /// No agent could ever run it.
        Unroutable = "unroutable",
    }
}

impl JobStatus {
    /// True when nothing changes the job any more.
    pub const fn is_terminal(self) -> bool {
        use JobStatus::*;
        matches!(self, Success | Failed | Cancelled | Skipped | TimedOutStale | DriftDropped | Unroutable)
    }

    /// True for the statuses that `when: on-failure` means.
    pub const fn is_failure(self) -> bool {
        use JobStatus::*;
        matches!(self, Failed | TimedOutStale | DriftDropped | Unroutable)
    }

    /// All terminal statuses.
    pub fn terminal() -> impl Iterator<Item = JobStatus> {
        Self::ALL.iter().copied().filter(|s| s.is_terminal())
    }
}

words! {
    /// Status of a step.
    StepStatus("step status") {
        /// Not reached, or a parallel child behind its limit.
        Pending = "pending",
        /// Its command runs.
        Running = "running",
        /// Exit code 0.
        Success = "success",
        /// Failed, also when `continue_on_error` lets the job go on.
        Failed = "failed",
        /// Its condition was false, or an earlier step failed.
        Skipped = "skipped",
        /// Cancelled with its job or by a failing sibling.
        Cancelled = "cancelled",
    }
}

impl StepStatus {
    /// True when the step is over.
    pub const fn is_terminal(self) -> bool {
        !matches!(self, Self::Pending | Self::Running)
    }
}

words! {
    /// Status of a row of the dispatch queue.
    QueueStatus("queue status") {
        /// Waits for an agent.
        Pending = "pending",
        /// Claimed for an agent at the row's epoch.
        Dispatched = "dispatched",
        /// The agent is out of contact; the recovery deadline runs.
        Recovering = "recovering",
        /// Its job ended with a result.
        Completed = "completed",
        /// Its job failed without a result.
        Failed = "failed",
        /// Nobody took it in time.
        Expired = "expired",
        /// Its job was cancelled before or while it was handed over.
        Cancelled = "cancelled",
    }
}

impl QueueStatus {
    /// True when the row never leaves its status again.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Expired | Self::Cancelled)
    }
}

words! {
    /// What can happen to a job. With [`JobStatus`] this is the whole state machine, see [`transition`].
    JobEvent("job event") {
        /// Its needs are met.
        Enqueue = "enqueue",
        /// Its start was granted to an agent.
        Start = "start",
        /// Its agent reports success.
        Succeed = "succeed",
        /// It failed; [`FailureReason::status`] says which failure status is shown.
        Fail = "fail",
        /// Cancelled at once.
        Cancel = "cancel",
        /// A cancel begins; the agent may run hooks.
        CancelGraceful = "cancel_graceful",
        /// A second cancel: no hooks.
        CancelForce = "cancel_force",
        /// The cancelled job has unwound.
        Complete = "complete",
        /// It does not run.
        Skip = "skip",
        /// A person must decide.
        Hold = "hold",
        /// A timer or a concurrency slot must come.
        Wait = "wait",
        /// The hold was approved.
        Approve = "approve",
        /// The hold was rejected.
        Reject = "reject",
        /// Nobody decided in time.
        Expire = "expire",
        /// The timer ended or the slot came free.
        TimerDone = "timer_done",
        /// Its agent is out of contact.
        Recover = "recover",
        /// Handed to the queue again after a loss; only where the job's `retry` allows it.
        Requeue = "requeue",
    }
}

/// An event that a status does not accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a {state} job does not accept `{event}`")]
pub struct InvalidTransition {
    /// The status the job has.
    pub state: JobStatus,
    /// What was tried.
    pub event: JobEvent,
}

/// The 30 legal transitions. A terminal status accepts nothing.
pub const TRANSITIONS: &[(JobStatus, JobEvent, JobStatus)] = {
    use JobEvent as E;
    use JobStatus as S;
    &[
        (S::Pending, E::Enqueue, S::Queued),
        (S::Pending, E::Cancel, S::Cancelled),
        (S::Pending, E::Skip, S::Skipped),
        (S::Pending, E::Hold, S::Held),
        (S::Pending, E::Wait, S::Waiting),
        (S::Queued, E::Start, S::Running),
        (S::Queued, E::Fail, S::Failed),
        (S::Queued, E::Cancel, S::Cancelled),
        (S::Running, E::Succeed, S::Success),
        (S::Running, E::Fail, S::Failed),
        (S::Running, E::Cancel, S::Cancelled),
        (S::Running, E::CancelGraceful, S::Cancelling),
        (S::Running, E::Recover, S::Recovering),
        (S::Running, E::Requeue, S::Queued),
        (S::Recovering, E::Start, S::Running),
        (S::Recovering, E::Fail, S::Failed),
        (S::Recovering, E::Cancel, S::Cancelled),
        (S::Recovering, E::Requeue, S::Queued),
        (S::Cancelling, E::CancelForce, S::Cancelled),
        (S::Cancelling, E::Complete, S::Cancelled),
        (S::Cancelling, E::Fail, S::Failed),
        (S::Cancelling, E::Succeed, S::Success),
        (S::Held, E::Approve, S::Queued),
        (S::Held, E::Reject, S::Cancelled),
        (S::Held, E::Expire, S::Cancelled),
        (S::Held, E::Cancel, S::Cancelled),
        (S::Held, E::Wait, S::Waiting),
        (S::Waiting, E::TimerDone, S::Queued),
        (S::Waiting, E::Cancel, S::Cancelled),
        (S::Waiting, E::Hold, S::Held),
    ]
};

/// The status that `event` leads to.
///
/// # Errors
/// [`InvalidTransition`] when the pair is not in [`TRANSITIONS`].
pub fn transition(state: JobStatus, event: JobEvent) -> Result<JobStatus, InvalidTransition> {
    TRANSITIONS
        .iter()
        .find(|(from, on, _)| *from == state && *on == event)
        .map(|(_, _, to)| *to)
        .ok_or(InvalidTransition { state, event })
}

/// The statuses that accept `event`: the `WHERE status IN (…)` of the update that applies it.
pub fn sources(event: JobEvent) -> Vec<JobStatus> {
    TRANSITIONS.iter().filter(|(_, on, _)| *on == event).map(|(from, _, _)| *from).collect()
}

/// The events that `state` accepts.
pub fn valid_events(state: JobStatus) -> Vec<JobEvent> {
    TRANSITIONS.iter().filter(|(from, _, _)| *from == state).map(|(_, on, _)| *on).collect()
}

words! {
    /// The class of a failure: who has to act on it.
    FailureClass("failure class") {
        /// The job's own doing.
        User = "user",
        /// A limit in time.
        Timeout = "timeout",
        /// Killed for its use of memory.
        Oom = "oom",
        /// The agent was lost.
        Lost = "lost",
        /// Our side, or the host.
        Infra = "infra",
        /// Somebody wanted it to stop.
        Cancelled = "cancelled",
        /// A rule forbids it.
        Policy = "policy",
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $word:literal => $class:ident,)*) => {
        words! {
            /// Why a job did not end in success. Each reason belongs to one [`FailureClass`].
            FailureReason("failure reason") { $($(#[$doc])* $variant = $word,)* }
        }

        impl FailureReason {
            /// The class this reason belongs to.
            pub const fn class(self) -> FailureClass {
                match self { $(Self::$variant => FailureClass::$class,)* }
            }
        }
    };
}

reasons! {
    /// A step exited with another code than 0.
    StepFailed = "step_failed" => User,
    /// An `init` command failed.
    InitFailed = "init_failed" => User,
    /// An expression could not be evaluated.
    ExprError = "expr_error" => User,
    /// The jobs that a generator made cannot be used, or it made none.
    DynamicEval = "dynamic_eval" => User,
    /// A workflow that it started did not succeed, or nobody listens to its event.
    InvokeFailed = "invoke_failed" => User,
    /// A check found drift.
    DriftDetected = "drift_detected" => User,
    /// A step ran longer than its limit.
    StepTimeout = "step_timeout" => Timeout,
    /// The job ran longer than its limit.
    JobTimeout = "job_timeout" => Timeout,
    /// The run lasted longer than its limit.
    WorkflowTimeout = "workflow_timeout" => Timeout,
    /// `init` ran longer than its limit.
    InitTimeout = "init_timeout" => Timeout,
    /// No concurrency slot came free in time.
    ConcurrencyWait = "concurrency_wait" => Timeout,
    /// The kernel killed it for its use of memory.
    OomKilled = "oom_killed" => Oom,
    /// The agent did not come back within the recovery window.
    AgentLost = "agent_lost" => Lost,
    /// The agent was restarted while the job ran.
    AgentRestarted = "agent_restarted" => Lost,
    /// The agent came back without the job.
    AgentForgotJob = "agent_forgot_job" => Lost,
    /// No heartbeat of the job came for too long.
    StaleHeartbeat = "stale_heartbeat" => Lost,
    /// The commit could not be checked out.
    CheckoutFailed = "checkout_failed" => Infra,
    /// The sandbox could not be set up.
    SandboxFailed = "sandbox_failed" => Infra,
    /// The process that runs the job died.
    RunnerCrashed = "runner_crashed" => Infra,
    /// A credential could not be had.
    LostCredential = "lost_credential" => Infra,
    /// The delivery to agents was undone too often.
    GaveUp = "gave_up" => Infra,
    /// It waits for jobs of its run that nothing can end.
    NeedsDeadlock = "needs_deadlock" => Infra,
    /// The queue was full.
    QueueFull = "queue_full" => Infra,
    /// No agent took it in time.
    QueueExpired = "queue_expired" => Infra,
    /// The offer is larger than a frame may be.
    OfferTooLarge = "offer_too_large" => Infra,
    /// The host it must run on is out of contact.
    HostUnreachable = "host_unreachable" => Infra,
    /// Cancelled by a person.
    CancelledByUser = "cancelled_by_user" => Cancelled,
    /// A newer run of the same group took over.
    Superseded = "superseded" => Cancelled,
    /// A sibling failed and `fail_fast` is on.
    FailFast = "fail_fast" => Cancelled,
    /// The agent was shut down.
    AgentShutdown = "agent_shutdown" => Cancelled,
    /// A person rejected it.
    ApprovalRejected = "approval_rejected" => Policy,
    /// Nobody decided in time.
    ApprovalExpired = "approval_expired" => Policy,
    /// No agent and no pool could ever run it.
    Unroutable = "unroutable" => Policy,
    /// No known host has the labels that it asks for, or too many have.
    NoHosts = "no_hosts" => Policy,
    /// The workflow at the commit differs from the locked one.
    LockDrift = "lock_drift" => Policy,
    /// The job is no longer part of the workflow.
    DriftDropped = "drift_dropped" => Policy,
    /// It asks for something that cannot be given here.
    NotSupported = "not_supported" => Policy,
    /// A workflow that it wanted to start was refused.
    InvokeRefused = "invoke_refused" => Policy,
    /// A credential was refused.
    CredentialRefused = "credential_refused" => Policy,
}

impl FailureReason {
    /// The failure status that [`JobEvent::Fail`] with this reason shows.
    pub const fn status(self) -> JobStatus {
        match self {
            Self::StaleHeartbeat => JobStatus::TimedOutStale,
            Self::DriftDropped => JobStatus::DriftDropped,
            Self::Unroutable => JobStatus::Unroutable,
            _ => JobStatus::Failed,
        }
    }
}

/// What [`run_status`] looks at in a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobView {
    /// Its status.
    pub status: JobStatus,
    /// Why it did not succeed, once it ended.
    pub reason: Option<FailureReason>,
    /// True once its steps were granted a start.
    pub started: bool,
}

/// The status of a run, from all its jobs. `cancel_requested` is true once somebody cancelled the run.
///
/// A run without jobs is a success: every job of its plan was left out by a condition.
pub fn run_status(jobs: &[JobView], cancel_requested: bool) -> RunStatus {
    let open = || jobs.iter().filter(|j| !j.status.is_terminal());
    if open().next().is_none() {
        return run_outcome(jobs, cancel_requested);
    }
    if cancel_requested {
        return RunStatus::Cancelling;
    }
    if open().all(|j| matches!(j.status, JobStatus::Held | JobStatus::Waiting)) {
        return RunStatus::Held;
    }
    if jobs.iter().any(|j| j.started) { RunStatus::Running } else { RunStatus::Pending }
}

/// The outcome when every job is terminal: `failed` if a job has a failure status or was cancelled by a rule, else
/// `cancelled` if any job was, else `success` (skipped jobs count as success).
fn run_outcome(jobs: &[JobView], cancel_requested: bool) -> RunStatus {
    let by_rule = |j: &JobView| {
        j.status == JobStatus::Cancelled && j.reason.is_some_and(|r| r.class() != FailureClass::Cancelled)
    };
    if jobs.iter().any(|j| j.status.is_failure() || by_rule(j)) {
        RunStatus::Failed
    } else if jobs.iter().any(|j| j.status == JobStatus::Cancelled) || (cancel_requested && jobs.is_empty()) {
        RunStatus::Cancelled
    } else {
        RunStatus::Success
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_table_has_30_transitions_over_17_events() {
        assert_eq!(TRANSITIONS.len(), 30);
        assert_eq!(JobEvent::ALL.len(), 17);
        let mut pairs: Vec<_> = TRANSITIONS.iter().map(|(from, on, _)| (*from, *on)).collect();
        pairs.sort_unstable();
        pairs.dedup();
        assert_eq!(pairs.len(), 30, "no pair stands twice");
    }

    /// The table of the specification (dispatch 2.8 and the five rows of `settled.md`), copied by hand.
    #[test]
    fn acceptance_23_the_table_is_that_of_the_specification() {
        let table = "
            pending: enqueue>queued cancel>cancelled skip>skipped hold>held wait>waiting
            queued: start>running fail>failed cancel>cancelled
            running: succeed>success fail>failed cancel>cancelled cancel_graceful>cancelling recover>recovering requeue>queued
            recovering: start>running fail>failed cancel>cancelled requeue>queued
            cancelling: cancel_force>cancelled complete>cancelled fail>failed succeed>success
            held: approve>queued reject>cancelled expire>cancelled cancel>cancelled wait>waiting
            waiting: timer_done>queued cancel>cancelled hold>held";
        let mut want = Vec::new();
        for (from, row) in table.lines().filter_map(|line| line.trim().split_once(": ")) {
            for (on, to) in row.split(' ').filter_map(|arrow| arrow.split_once('>')) {
                want.push(format!("{from} {on} {to}"));
            }
        }
        let word = |event: JobEvent| event.as_str();
        let mut found: Vec<_> = TRANSITIONS.iter().map(|(from, on, to)| format!("{from} {} {to}", word(*on))).collect();
        want.sort();
        found.sort();
        assert_eq!(found, want);
    }

    #[test]
    fn words_round_trip_and_name_their_vocabulary() {
        for status in JobStatus::ALL {
            assert_eq!(status.as_str().parse::<JobStatus>().as_ref(), Ok(status));
        }
        let error = "runing".parse::<RunStatus>().unwrap_err().to_string();
        assert!(error.starts_with("`runing` is not a run status; expected one of: pending, running"), "{error}");
    }

    fn any_job() -> impl Strategy<Value = JobView> {
        (
            proptest::sample::select(JobStatus::ALL),
            proptest::option::of(proptest::sample::select(FailureReason::ALL)),
            any::<bool>(),
        )
            .prop_map(|(status, reason, started)| JobView { status, reason, started })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn acceptance_23_random_walks_follow_the_table_and_stop_at_terminal_states(
            events in proptest::collection::vec(proptest::sample::select(JobEvent::ALL), 0..12)
        ) {
            let mut state = JobStatus::Pending;
            for event in events {
                let listed = TRANSITIONS.iter().any(|(from, on, _)| *from == state && *on == event);
                match transition(state, event) {
                    Ok(next) => {
                        prop_assert!(listed && !state.is_terminal());
                        state = next;
                    }
                    Err(error) => {
                        prop_assert!(!listed);
                        prop_assert_eq!(error, InvalidTransition { state, event });
                    }
                }
            }
        }

        #[test]
        fn a_run_is_terminal_exactly_when_all_its_jobs_are(
            jobs in proptest::collection::vec(any_job(), 1..6), cancel in any::<bool>()
        ) {
            let status = run_status(&jobs, cancel);
            prop_assert_eq!(status.is_terminal(), jobs.iter().all(|j| j.status.is_terminal()));
            if status == RunStatus::Success {
                prop_assert!(jobs.iter().all(|j| matches!(j.status, JobStatus::Success | JobStatus::Skipped)));
            }
        }
    }

    #[test]
    fn a_rejected_job_fails_the_run_though_it_reads_cancelled() {
        let job = |reason| JobView { status: JobStatus::Cancelled, reason: Some(reason), started: false };
        assert_eq!(run_status(&[job(FailureReason::ApprovalRejected)], false), RunStatus::Failed);
        assert_eq!(run_status(&[job(FailureReason::CancelledByUser)], true), RunStatus::Cancelled);
    }
}
