//! What a word to the job and its limit keep from being started.

use kici_engine::lock::{Action, Probe, WaitFor};

use super::language_tests::{graceful, group, in_group, retry};
use super::tests::*;
use super::*;

#[tokio::test]
async fn the_limit_of_the_job_ends_waiting() {
    let dir = tempfile::tempdir().expect("a directory");
    let wait = WaitFor { probe: Probe::Run("exit 4".into()), interval_ms: 1, timeout_ms: 300 };
    let mut job = job(&dir, vec![Step { action: Action::WaitFor(wait), ..script("") }]);
    job.deadline = Some(Instant::now() + Duration::from_millis(300));
    let outcome = go(&job, &Heard::default()).await;
    assert_eq!((outcome.status, outcome.reason), (JobStatus::Failed, Some(FailureReason::JobTimeout)));
}

#[tokio::test]
async fn the_limit_of_the_job_keeps_what_waits_in_a_group_from_starting() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut job = job(&dir, vec![in_group("exec sleep 600"), in_group("touch late"), in_group("touch late")]);
    job.spec.groups = group(false, Some(1));
    job.spec.hooks.before_step = vec![script("touch hook-$KICI_STEP_INDEX")];
    job.deadline = Some(Instant::now() + Duration::from_millis(300));
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!(outcome.reason, Some(FailureReason::JobTimeout));
    assert_eq!(heard.last(1).status, StepStatus::Cancelled);
    let there = |name: &str| job.workspace.join(name).exists();
    assert!(there("hook-0") && !there("hook-1") && !there("late"));
}

#[tokio::test]
async fn what_comes_while_a_hook_runs_keeps_the_step_from_starting() {
    for cancelled in [true, false] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut job = job(&dir, vec![script("touch ran")]);
        let first = if cancelled { "echo up; exec sleep 600" } else { "echo up; sleep 0.4" };
        job.spec.hooks.before_step = vec![script(first), script("touch ran")];
        if !cancelled {
            job.deadline = Some(Instant::now() + Duration::from_millis(300));
        }
        let (tx, mut stop) = watch::channel(Stop::Run);
        let heard = Heard::default();
        let tell = async {
            while job.spool.total_bytes() == 0 {
                job.spool.more().await;
            }
            if cancelled {
                crate::stop::strengthen(&tx, graceful());
            }
        };
        let outcome = tokio::join!(run(&job, &heard, &mut stop), tell).0;
        let (status, step) = match cancelled {
            true => (JobStatus::Cancelled, StepStatus::Cancelled),
            false => (JobStatus::Failed, StepStatus::Failed),
        };
        assert_eq!((outcome.status, heard.last(0).status), (status, step));
        assert!(!job.workspace.join("ran").exists() && heard.trees.lock().expect("lock").len() == 1);
    }
}

#[tokio::test]
async fn the_limit_of_the_job_takes_the_path_of_a_cancel() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut job = job(&dir, vec![script("exec sleep 600")]);
    job.deadline = Some(Instant::now() + Duration::from_millis(200));
    job.spec.hooks.on_cancel = vec![script("echo undone")];
    job.spec.hooks.on_failure = vec![script("echo never")];
    let outcome = go(&job, &Heard::default()).await;
    assert_eq!((outcome.status, outcome.reason), (JobStatus::Failed, Some(FailureReason::JobTimeout)));
    assert!(log(&job).contains(&"o undone".to_owned()));
}

#[tokio::test]
async fn a_step_that_runs_after_a_cancel_is_not_tried_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let again = Step { condition: Some("always()".into()), retry: retry(5, &[]), ..script("exit 3") };
    let job = job(&dir, vec![again]);
    let (_tx, mut stop) = watch::channel(graceful());
    let heard = Heard::default();
    let outcome = run(&job, &heard, &mut stop).await;
    assert_eq!(outcome.status, JobStatus::Cancelled);
    assert_eq!((heard.last(0).status, heard.last(0).attempt), (StepStatus::Failed, 1));
}

#[tokio::test]
async fn a_failed_attempt_leaves_no_process_and_its_outputs_do_not_count() {
    let dir = tempfile::tempdir().expect("a directory");
    // A lock that the process of a failed attempt would hold; twelve times almost a MiB is more than a job may give out.
    let flaky = "exec 9>lock; flock -n 9 || exit 3; echo x >> tries; \
                 { printf 'big='; head -c 1000000 /dev/zero | tr '\\0' a; echo; } >> $KICI_OUTPUT; \
                 [ $(wc -l < tries) -ge 12 ] && exit; setsid sleep 600 > /dev/null 2>&1 & exit 4";
    let job = job(&dir, vec![Step { retry: retry(12, &[4]), ..script(flaky) }]);
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.status, outcome.message.as_str()), (JobStatus::Success, ""));
    assert_eq!((heard.last(0).attempt, outcome.strays_killed), (12, 0));
}
