//! Retries, checks, waiting, groups, hooks and init.

use kici_engine::check::CheckResult;
use kici_engine::lock::{Action, Backoff, Check, Composite, Group, Probe, StepRetry, WaitFor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::tests::*;
use super::*;

pub(super) fn named(id: &str, run: &str) -> Step {
    Step { id: Some(id.into()), ..script(run) }
}

pub(super) fn retry(attempts: u32, on_exit: &[i32]) -> Option<StepRetry> {
    Some(StepRetry { attempts, delay_ms: 1, backoff: Backoff::Fixed, max_delay_ms: 1, on_exit: on_exit.to_vec() })
}

pub(super) fn check(look: &str, apply: &str) -> Check {
    Check { script: look.into(), apply: apply.into(), when_in_sync: None, drift_exit_code: None }
}

pub(super) fn checked(check: Check) -> Step {
    Step { action: Action::Check(check), ..script("") }
}

pub(super) fn in_group(run: &str) -> Step {
    Step { group: Some(0), ..script(run) }
}

pub(super) fn group(fail_fast: bool, max_parallel: Option<u32>) -> Vec<Group> {
    vec![Group { name: Some("prep".into()), source: SourceRef::default(), fail_fast, max_parallel }]
}

/// Kind, status of the last word on each step and hook, in order of their last words.
fn rows(heard: &Heard) -> Vec<String> {
    let reports = heard.reports.lock().expect("lock");
    let last = reports.iter().filter(|report| report.status.is_terminal());
    last.map(|report| format!("{}/{} {}", report.key.kind, report.key.owner_index, report.status)).collect()
}

#[tokio::test]
async fn a_failed_attempt_leaves_nothing_but_its_log() {
    let dir = tempfile::tempdir().expect("a directory");
    let flaky = "echo x >> tries; n=$(wc -l < tries); echo n=$n >> $KICI_OUTPUT; echo L$n=1 >> $KICI_ENV; \
                 echo s$n >> $KICI_SUMMARY; [ $n -ge 3 ] || exit 75";
    let steps = vec![Step { retry: retry(5, &[75]), ..named("f", flaky) }, script("echo ${L1:-no} ${L3:-no}")];
    let mut job = job(&dir, steps);
    job.spec.outputs.insert("n".into(), template("${{ steps.f.outputs.n }}"));
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.status, outcome.outputs["n"].as_str()), (JobStatus::Success, "3"));
    let last = heard.last(0);
    assert_eq!((last.attempt, last.summary.as_str()), (3, "s3\n"));
    assert_eq!(
        log(&job),
        [
            "m attempt 1 of 5: exit code 75; again in 0.001 s",
            "m attempt 2 of 5: exit code 75; again in 0.001 s",
            "o no 1"
        ]
    );
}

#[tokio::test]
async fn an_exit_code_that_is_not_named_and_the_last_attempt_are_final() {
    let dir = tempfile::tempdir().expect("a directory");
    let steps = vec![
        Step { retry: retry(5, &[75]), continue_on_error: true, ..script("exit 1") },
        Step { retry: retry(2, &[]), ..script("exit 9") },
    ];
    let job = job(&dir, steps);
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.exit_code, outcome.reason), (Some(9), Some(FailureReason::StepFailed)));
    assert_eq!((heard.last(0).attempt, heard.last(1).attempt), (1, 2));
}

#[tokio::test]
async fn a_cancel_ends_the_pause_between_attempts() {
    let dir = tempfile::tempdir().expect("a directory");
    let slow =
        StepRetry { attempts: 3, delay_ms: 600_000, backoff: Backoff::Fixed, max_delay_ms: 600_000, on_exit: vec![] };
    let job = job(&dir, vec![Step { retry: Some(slow), ..script("exit 1") }]);
    let (tx, mut stop) = watch::channel(Stop::Run);
    let heard = Heard::default();
    let tell = async {
        while job.spool.total_bytes() == 0 {
            job.spool.more().await;
        }
        crate::stop::strengthen(&tx, graceful());
    };
    let outcome = tokio::join!(run(&job, &heard, &mut stop), tell).0;
    assert_eq!(outcome.status, JobStatus::Cancelled);
    assert_eq!(heard.statuses(), ["cancelled"]);
}

pub(super) fn graceful() -> Stop {
    let grace = Duration::from_millis(100);
    Stop::Graceful { reason: FailureReason::CancelledByUser, message: "by ann".into(), grace, more_steps: true }
}

#[tokio::test]
async fn drift_is_applied_and_what_is_in_sync_only_gives_its_outputs() {
    let dir = tempfile::tempdir().expect("a directory");
    let drifted = check("echo s3cr3t file missing > $KICI_DRIFT", "cat $KICI_DRIFT; echo done=1 >> $KICI_OUTPUT");
    let in_sync = Check { when_in_sync: Some("echo v=7 >> $KICI_OUTPUT".into()), ..check("true", "echo never") };
    let by_code = Check { drift_exit_code: Some(2), ..check("echo note > $KICI_DRIFT; exit 2", "echo applied") };
    let code_in_sync = Check { drift_exit_code: Some(2), ..check("echo note > $KICI_DRIFT", "echo never") };
    let mut second = checked(in_sync);
    second.id = Some("s".into());
    let broken = Step { continue_on_error: true, ..checked(check("exit 3", "echo never")) };
    let mut job = job(&dir, vec![checked(drifted), second, checked(by_code), checked(code_in_sync), broken]);
    job.spec.outputs.insert("v".into(), template("${{ steps.s.outputs.v }} ${{ steps.s.status }}"));
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.status, outcome.outputs["v"].as_str()), (JobStatus::Success, "7 skipped"));
    assert_eq!(heard.statuses(), ["success", "skipped", "success", "skipped", "failed"]);
    let found: Vec<Option<CheckResult>> = (0..5).map(|index| heard.last(index).check).collect();
    use CheckResult::{Applied, InSync};
    assert_eq!(found, [Some(Applied), Some(InSync), Some(Applied), Some(InSync), None]);
    assert_eq!((heard.last(0).drift.as_str(), heard.last(0).outputs["done"].as_str()), ("*** file missing\n", "1"));
    let lines = log(&job);
    assert!(lines.contains(&"o *** file missing".to_owned()) && !lines.contains(&"o never".to_owned()), "{lines:?}");
    assert_eq!(lines.last().map(String::as_str), Some("m check: exit code 3"));
}

#[tokio::test]
async fn check_modes_change_nothing_and_report_what_would() {
    for (mode, status, reason) in [
        (CheckMode::Check, JobStatus::Success, None),
        (CheckMode::CheckFailOnDrift, JobStatus::Failed, Some(FailureReason::DriftDetected)),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let steps = vec![
            script("touch changed"),
            checked(check("echo d > $KICI_DRIFT", "touch changed")),
            checked(check("true", "touch changed")),
            Step { retry: retry(3, &[]), ..script("touch changed") },
        ];
        let mut job = job(&dir, steps);
        job.spec.check_mode = mode;
        job.spec.hooks.cleanup = vec![script("touch changed")];
        job.spec.hooks.before_step = vec![script("touch changed")];
        let heard = Heard::default();
        let outcome = go(&job, &heard).await;
        assert_eq!((outcome.status, outcome.reason), (status, reason), "{}", outcome.message);
        assert!(!job.workspace.join("changed").exists());
        use CheckResult::{InSync, NoCheck, WouldChange};
        let found: Vec<Option<CheckResult>> = (0..4).map(|index| heard.last(index).check).collect();
        assert_eq!(found, [Some(NoCheck), Some(WouldChange), Some(InSync), Some(NoCheck)]);
        assert_eq!(heard.statuses(), ["skipped", "success", "skipped", "skipped"]);
        assert_eq!(heard.last(1).drift, "d\n");
    }
}

#[tokio::test]
async fn waiting_for_a_script_ends_with_its_first_yes_or_its_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let wait = |run: &str, timeout_ms| Step {
        action: Action::WaitFor(WaitFor { probe: Probe::Run(run.into()), interval_ms: 1, timeout_ms }),
        ..script("")
    };
    let up = wait("echo x >> asked; [ $(wc -l < asked) -ge 3 ] && echo ok=1 >> $KICI_OUTPUT", 60_000);
    let job = job(&dir, vec![Step { id: Some("w".into()), ..up }, wait("exit 4", 250)]);
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!(heard.statuses(), ["success", "failed"]);
    assert_eq!(heard.last(0).outputs["ok"], "1");
    assert_eq!(outcome.reason, Some(FailureReason::StepTimeout));
    assert!(outcome.message.contains("not there within 0.25 s"), "{}", outcome.message);
    let lines = log(&job);
    assert_eq!(lines[..2], ["m not yet: exit code 1", "m there, asked 3 times"], "equal answers are told once");
}

#[tokio::test]
async fn waiting_for_an_address_asks_until_it_answers_with_2xx() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let dir = tempfile::tempdir().expect("a directory");
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = format!("http://{}/health", server.local_addr().expect("an address"));
    let wait = WaitFor { probe: Probe::Url(template("${{ env.WHERE }}")), interval_ms: 1, timeout_ms: 60_000 };
    let mut step = Step { action: Action::WaitFor(wait), ..script("") };
    step.env.insert("WHERE".into(), Value::fixed(address));
    let job = job(&dir, vec![step]);
    let heard = Heard::default();
    let serve = async {
        for answer in ["503 Service Unavailable", "204 No Content"] {
            let (mut peer, _) = server.accept().await.expect("a call");
            let mut asked = [0; 1024];
            let n = peer.read(&mut asked).await.expect("read");
            assert!(asked[..n].starts_with(b"GET /health HTTP/1.1"));
            let text = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            peer.write_all(text.as_bytes()).await.expect("answered");
        }
    };
    let outcome = tokio::join!(go(&job, &heard), serve).0;
    assert_eq!(outcome.status, JobStatus::Success, "{}", outcome.message);
    assert_eq!(log(&job), ["m not yet: it answered 503 Service Unavailable", "m there, asked 2 times"]);
}

#[tokio::test]
async fn a_group_runs_side_by_side_and_its_outputs_are_there_afterwards() {
    let dir = tempfile::tempdir().expect("a directory");
    // Each waits for the other: one after the other they would never end.
    let meet = |me: &str, other: &str| {
        format!(
            "touch {me}; while [ ! -e {other} ]; do sleep 0.01; done; echo v={me} >> $KICI_OUTPUT; echo X=1 >> $KICI_ENV"
        )
    };
    let child = |id: &str, run: String| Step { id: Some(id.into()), ..in_group(&run) };
    let mut after = script("echo $V ${X:-unset}");
    after.env.insert("V".into(), template("${{ steps.a.outputs.v }}${{ steps.b.outputs.v }}"));
    let mut job = job(&dir, vec![child("a", meet("a", "b")), child("b", meet("b", "a")), after]);
    job.spec.groups = group(true, None);
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!(outcome.status, JobStatus::Success, "{}", outcome.message);
    assert_eq!((heard.last(0).group.as_str(), heard.last(2).group.as_str()), ("prep", ""));
    let lines = log(&job);
    assert_eq!(lines.last().map(String::as_str), Some("o ab unset"));
    assert!(lines[0].contains("side by side cannot set them"), "{lines:?}");
}

#[tokio::test]
async fn a_failure_in_a_group_cancels_its_siblings_and_fails_the_job() {
    let dir = tempfile::tempdir().expect("a directory");
    let steps = vec![
        in_group("while [ ! -e up ]; do sleep 0.01; done; exit 5"),
        Step { cleanup: vec![script("touch cleaned")], ..in_group("touch up; exec sleep 600") },
        in_group("touch late"),
        script("touch after"),
    ];
    let mut job = job(&dir, steps);
    job.spec.groups = group(true, Some(2));
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.status, outcome.exit_code), (JobStatus::Failed, Some(5)));
    let last: Vec<&str> = (0..4).map(|index| heard.last(index).status.as_str()).collect();
    assert_eq!(last, ["failed", "cancelled", "cancelled", "skipped"]);
    let pending = heard.reports.lock().expect("lock").iter().filter(|r| r.status == StepStatus::Pending).count();
    assert_eq!(pending, 1, "the one behind the limit");
    assert!(!job.workspace.join("late").exists() && job.workspace.join("cleaned").exists());
    assert!(heard.last(1).message.contains("cancelled, because step"), "{}", heard.last(1).message);
}

#[tokio::test]
async fn without_fail_fast_a_group_goes_through_and_failures_that_are_allowed_fail_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let steps = vec![Step { continue_on_error: true, ..in_group("exit 5") }, in_group("exit 6"), in_group("exit 7")];
    let mut job = job(&dir, steps);
    job.spec.groups = group(false, Some(1));
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.exit_code, outcome.failed_step.as_str()), (Some(6), "step/1/0"), "the first of the file");
    assert_eq!(heard.statuses(), ["failed", "failed", "failed"]);
}

#[tokio::test]
async fn a_cancel_reaches_all_steps_of_a_group() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut job = job(&dir, vec![in_group("echo up; exec sleep 600"), in_group("exec sleep 600"), in_group("true")]);
    job.spec.groups = group(true, Some(2));
    let (tx, mut stop) = watch::channel(Stop::Run);
    let heard = Heard::default();
    let tell = async {
        while job.spool.total_bytes() == 0 {
            job.spool.more().await;
        }
        crate::stop::strengthen(&tx, graceful());
    };
    let outcome = tokio::join!(run(&job, &heard, &mut stop), tell).0;
    assert_eq!((outcome.status, outcome.message.as_str()), (JobStatus::Cancelled, "by ann"));
    let last: Vec<&str> = (0..3).map(|index| heard.last(index).status.as_str()).collect();
    assert_eq!(last, ["cancelled", "cancelled", "cancelled"]);
    assert!(heard.trees.lock().expect("lock").iter().all(|keeper| !keeper.is_alive()));
}

#[tokio::test]
async fn hooks_follow_success_and_failure_and_see_how_it_went() {
    let tell = "echo $KICI_OUTCOME_STATUS $KICI_OUTCOME_REASON $KICI_OUTCOME_FAILED_STEP";
    for (run, expected) in [
        (
            "true",
            vec![
                "hook:before_step/0",
                "step/0",
                "hook:cleanup/0",
                "hook:after_step/0",
                "hook:on_success/-1",
                "hook:cleanup/-1",
            ],
        ),
        (
            "exit 3",
            vec![
                "hook:before_step/0",
                "step/0",
                "hook:cleanup/0",
                "hook:after_step/0",
                "hook:on_failure/-1",
                "hook:cleanup/-1",
            ],
        ),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut job = job(&dir, vec![Step { cleanup: vec![script("true")], ..script(run) }]);
        job.spec.hooks.before_step = vec![script("exit 1")];
        job.spec.hooks.after_step = vec![script("exit 1")];
        job.spec.hooks.on_success = vec![script(tell)];
        job.spec.hooks.on_failure = vec![script(tell)];
        job.spec.hooks.on_cancel = vec![script("echo never")];
        job.spec.hooks.cleanup = vec![script(tell)];
        let heard = Heard::default();
        let outcome = go(&job, &heard).await;
        let kinds: Vec<String> =
            rows(&heard).iter().map(|row| row.split(' ').next().unwrap_or_default().to_owned()).collect();
        assert_eq!(kinds, expected);
        let said: Vec<String> = log(&job).into_iter().filter(|line| line.starts_with("o ")).collect();
        if run == "true" {
            assert_eq!((outcome.status, said), (JobStatus::Success, vec!["o success".into(), "o success".into()]));
        } else {
            let line = "o failed step_failed step/0/0".to_owned();
            assert_eq!((outcome.exit_code, said), (Some(3), vec![line.clone(), line]));
        }
    }
}

#[tokio::test]
async fn a_hook_that_fails_turns_a_success_but_only_lengthens_a_failure() {
    for (run, hook, message) in [
        ("true", "exit 8", "on_success hook `exit 8`: exit code 8"),
        ("exit 3", "exit 8", "step `exit 3`: exit code 3; on_failure hook `exit 8`: exit code 8"),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut job = job(&dir, vec![script(run)]);
        (job.spec.hooks.on_success, job.spec.hooks.on_failure) = (vec![script(hook)], vec![script(hook)]);
        job.spec.hooks.cleanup = vec![script("touch cleaned")];
        let outcome = go(&job, &Heard::default()).await;
        assert_eq!((outcome.status, outcome.message.as_str()), (JobStatus::Failed, message));
        assert!(job.workspace.join("cleaned").exists());
    }
}

/// A job with a hook of every kind that matters, told `told` once its step runs.
async fn hooked(told: Stop) -> (Job, Heard, Outcome, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let step = Step {
        on_cancel: vec![script("echo step-on-cancel")],
        cleanup: vec![script("echo step-cleanup")],
        ..script("trap '' TERM; echo up; sleep 600")
    };
    let mut job = job(&dir, vec![step, script("echo never")]);
    job.spec.hooks.on_cancel = vec![script("echo job-on-cancel; exit 1")];
    // Longer than the grace of the cancel, which must not cut it.
    job.spec.hooks.cleanup = vec![script("sleep 0.5; echo job-cleanup")];
    job.spec.hooks.on_failure = vec![script("echo never")];
    let (tx, mut stop) = watch::channel(Stop::Run);
    let heard = Heard::default();
    let tell = async {
        while job.spool.total_bytes() == 0 {
            job.spool.more().await;
        }
        crate::stop::strengthen(&tx, told);
    };
    let outcome = tokio::join!(run(&job, &heard, &mut stop), tell).0;
    (job, heard, outcome, dir)
}

#[tokio::test]
async fn a_graceful_cancel_runs_the_cancel_hooks_inside_out_and_stays_cancelled() {
    let (job, heard, outcome, _dir) = hooked(graceful()).await;
    assert_eq!(outcome.status, JobStatus::Cancelled);
    assert_eq!(outcome.message, "by ann; on_cancel hook `echo job-on-cancel; exit 1`: exit code 1");
    let said: Vec<String> = log(&job).into_iter().filter(|line| line.starts_with("o ")).collect();
    assert_eq!(said, ["o up", "o step-on-cancel", "o step-cleanup", "o job-on-cancel", "o job-cleanup"]);
    assert_eq!(heard.last(1).status, StepStatus::Cancelled);
}

#[tokio::test]
async fn a_forced_cancel_and_a_lost_lease_run_no_hook() {
    let force = Stop::Force { reason: FailureReason::CancelledByUser, message: "now".into() };
    let grace = Duration::from_millis(50);
    let lost = Stop::Graceful { reason: FailureReason::AgentLost, message: "gone".into(), grace, more_steps: false };
    for told in [force, lost] {
        let (job, heard, _, _dir) = hooked(told).await;
        assert!(rows(&heard).iter().all(|row| row.starts_with("step/")), "{:?}", rows(&heard));
        assert!(!log(&job).contains(&"o job-cleanup".to_owned()));
    }
}

#[tokio::test]
async fn an_init_command_that_cannot_start_says_why_and_ends_its_log() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut broken = job(&dir, vec![script("true")]);
    broken.spec.init = vec![Step { working_directory: Some(Value::fixed("nowhere")), ..script("true") }];
    let outcome = go(&broken, &Heard::default()).await;
    assert_eq!(outcome.reason, Some(FailureReason::InitFailed));
    assert_eq!(log(&broken), ["m working_directory `nowhere` does not exist"]);
    broken.spool.close();
    assert!(matches!(broken.spool.next(1, 1), Ok(crate::spool::Next::Done)));
}

#[tokio::test]
async fn init_prepares_the_environment_and_its_failure_keeps_steps_from_running() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut ready = job(&dir, vec![script("echo $TOOL ${PATH%%:*}")]);
    ready.spec.init = vec![script("echo TOOL=7 >> $KICI_ENV; echo /tools >> $KICI_PATH")];
    let heard = Heard::default();
    assert_eq!(go(&ready, &heard).await.status, JobStatus::Success);
    assert_eq!(rows(&heard), ["init/-1 success", "step/0 success"]);
    assert_eq!(log(&ready), ["o 7 /tools"]);
    for (init, reason) in [
        (script("exit 4"), FailureReason::InitFailed),
        (Step { timeout_ms: Some(100), ..script("exec sleep 600") }, FailureReason::InitTimeout),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut broken = job(&dir, vec![script("touch ran")]);
        broken.spec.init = vec![init, script("touch ran")];
        broken.spec.hooks.on_failure = vec![script("touch told")];
        let heard = Heard::default();
        let outcome = go(&broken, &heard).await;
        assert_eq!((outcome.status, outcome.reason), (JobStatus::Failed, Some(reason)));
        assert_eq!(outcome.failed_step, "init/-1/10");
        assert!(!broken.workspace.join("ran").exists() && broken.workspace.join("told").exists());
        assert_eq!(heard.statuses(), ["failed", "skipped", "success"]);
    }
}

pub(super) fn used(path: &str, id: &str, outputs: &[(&str, &str)]) -> Composite {
    Composite {
        parent: None,
        id: Some(id.into()),
        name: None,
        source: SourceRef::default(),
        path: path.into(),
        condition: None,
        inputs: serde_json::from_value(json!({"n": {"type": "integer", "required": true}})).expect("an input"),
        with: [("n".to_owned(), template("${{ steps.first.outputs.n }}"))].into(),
        env: BTreeMap::new(),
        outputs: outputs.iter().map(|(name, text)| ((*name).to_owned(), template(text))).collect(),
    }
}

pub(super) fn inside(at: u32, id: &str, run: &str) -> Step {
    Step { composite: Some(at), ..named(id, run) }
}

#[tokio::test]
async fn a_step_file_has_inputs_and_ids_of_its_own_and_gives_outputs() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut twice = inside(0, "first", "echo got $INPUT_N $TWICE; echo r=$TWICE >> $KICI_OUTPUT");
    twice.env.insert("TWICE".into(), template("${{ inputs.n * 2 }}"));
    let mut last = script("echo $R ${INPUT_N:-gone} $N");
    last.env.insert("R".into(), template("${{ steps.up.outputs.r }} ${{ steps.up.status }}"));
    last.env.insert("N".into(), template("${{ steps.first.outputs.n }}"));
    let mut job = job(&dir, vec![named("first", "echo n=21 >> $KICI_OUTPUT"), twice, last]);
    job.spec.composites = vec![used(".kici/steps/twice.yaml", "up", &[("r", "${{ steps.first.outputs.r }}")])];
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!(outcome.status, JobStatus::Success, "{}", outcome.message);
    assert_eq!(log(&job), ["o got 21 42", "o 42 success gone 21"]);
    assert_eq!(heard.last(1).group, "up");
}

#[tokio::test]
async fn a_step_file_is_skipped_as_a_whole_and_a_wrong_input_fails_before_it_runs() {
    for (condition, n, statuses, message) in [
        (Some("false"), "1", ["success", "skipped", "skipped", "success"], ""),
        (None, "many", ["success", "failed", "skipped", "skipped"], "input `n`"),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let steps = vec![
            named("first", &format!("echo n={n} >> $KICI_OUTPUT")),
            inside(0, "a", "echo never"),
            inside(0, "b", "echo never"),
            script("echo after"),
        ];
        let mut job = job(&dir, steps);
        job.spec.composites = vec![Composite { condition: condition.map(str::to_owned), ..used("p", "up", &[]) }];
        let heard = Heard::default();
        let outcome = go(&job, &heard).await;
        assert_eq!(heard.statuses(), statuses);
        assert!(outcome.message.contains(message), "{}", outcome.message);
        assert!(!log(&job).contains(&"o never".to_owned()));
    }
}

#[tokio::test]
async fn a_step_file_that_asks_to_run_after_a_failure_runs_until_its_own() {
    let dir = tempfile::tempdir().expect("a directory");
    let steps = vec![
        named("first", "echo n=1 >> $KICI_OUTPUT; exit 3"),
        inside(0, "a", "echo tidy; exit 4"),
        inside(0, "b", "echo never"),
    ];
    let mut job = job(&dir, steps);
    job.spec.composites = vec![Composite { condition: Some("failure()".into()), ..used("p", "up", &[]) }];
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.exit_code, heard.statuses()), (Some(3), vec!["failed", "failed", "skipped"]));
    assert!(log(&job).contains(&"o tidy".to_owned()));
}
