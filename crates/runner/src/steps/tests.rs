use std::sync::Mutex;

use async_trait::async_trait;
use kici_engine::check::CheckMode;
use kici_engine::lock::{Artifacts, Hooks, Stage};
pub(super) use kici_engine::lock::{SourceRef, Step};
use kici_engine::time::{ManualClock, Ts};
use kici_sys::process::{ProcessId, descendants};
use tempfile::TempDir;

use super::*;
use crate::key::step_key;
use crate::ports::{Emission, Emitted, Generated, StepReport};
use crate::spool::{Limits, Next};

#[derive(Default)]
pub(super) struct Heard {
    pub(super) reports: Mutex<Vec<StepReport>>,
    pub(super) trees: Mutex<Vec<ProcessId>>,
    pub(super) emissions: Mutex<Vec<Emission>>,
    /// What becomes of events; without it nothing ever does.
    pub(super) emitted: Option<Emitted>,
    pub(super) documents: Mutex<Vec<Vec<u8>>>,
    /// What becomes of generated jobs; without it nothing ever does.
    pub(super) generated: Option<Generated>,
    /// Told `Stop` when a step starts.
    pub(super) on_running: Option<(watch::Sender<Stop>, Stop)>,
}

#[async_trait]
impl Reporter for Heard {
    async fn step(&self, report: StepReport) {
        self.reports.lock().expect("lock").push(report);
    }

    async fn emit(&self, emission: Emission) -> Emitted {
        self.emissions.lock().expect("lock").push(emission);
        match &self.emitted {
            Some(emitted) => emitted.clone(),
            None => std::future::pending().await,
        }
    }

    async fn generated(&self, document: Vec<u8>) -> Generated {
        self.documents.lock().expect("lock").push(document);
        match &self.generated {
            Some(generated) => generated.clone(),
            None => std::future::pending().await,
        }
    }

    fn tree(&self, keeper: ProcessId) {
        self.trees.lock().expect("lock").push(keeper);
    }
}

impl Heard {
    pub(super) fn last(&self, index: usize) -> StepReport {
        let reports = self.reports.lock().expect("lock");
        reports.iter().rev().find(|r| r.key == step_key(index)).expect("a report").clone()
    }

    pub(super) fn statuses(&self) -> Vec<&'static str> {
        let reports = self.reports.lock().expect("lock");
        reports.iter().filter(|r| r.status.is_terminal()).map(|r| r.status.as_str()).collect()
    }
}

pub(super) fn script(run: &str) -> Step {
    Step::script(SourceRef::default(), run)
}

pub(super) fn template(text: &str) -> Value {
    Value::Template { template: text.to_owned(), stage: Stage::Agent }
}

pub(super) fn job(dir: &TempDir, steps: Vec<Step>) -> Job {
    let workspace = dir.path().join("workspace");
    std::fs::create_dir_all(&workspace).expect("made");
    Job {
        spec: JobSpec {
            workflow: "ci".into(),
            job: "build".into(),
            env: BTreeMap::new(),
            variables: BTreeMap::new(),
            fanout: None,
            generate: false,
            init: Vec::new(),
            cache: Vec::new(),
            artifacts: Artifacts::default(),
            steps,
            groups: Vec::new(),
            composites: Vec::new(),
            hooks: Hooks::default(),
            check_mode: CheckMode::Apply,
            outcome: None,
            container: None,
            services: BTreeMap::new(),
            resources: None,
            outputs: BTreeMap::new(),
            context: BTreeMap::new(),
        },
        workspace,
        scratch: dir.path().join("scratch"),
        host: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        job_facing: vec![("KICI_JOB_NAME", "build".to_owned())],
        git_config: Vec::new(),
        agent: json!({ "os": "linux" }),
        masker: Arc::new(Masker::new(["s3cr3t"])),
        spool: Spool::create(
            &dir.path().join("spool"),
            Limits { max_step_bytes: 0, max_unacked_bytes: u64::MAX, pressure: crate::config::Pressure::Pause },
        )
        .expect("made"),
        clock: Arc::new(ManualClock::new(Ts::from_micros(1))),
        step_timeout: Duration::from_secs(60),
        confine: Arc::default(),
        container: None,
        orphan_cleanup: true,
        stash: None,
        deadline: None,
    }
}

pub(super) async fn go(job: &Job, heard: &Heard) -> Outcome {
    let (_tx, mut stop) = watch::channel(Stop::Run);
    run(job, heard, &mut stop).await
}

/// The texts of the lines of a job's log.
pub(super) fn log(job: &Job) -> Vec<String> {
    let mut lines = Vec::new();
    while let Next::Data(key, offset, bytes) = next(job) {
        job.spool.ack(&key, offset + bytes.len() as u64, false);
        let text = String::from_utf8(bytes).expect("UTF-8");
        lines.extend(text.lines().map(|line| line.split_once(' ').expect("a line").1.to_owned()));
    }
    lines
}

fn next(job: &Job) -> Next {
    loop {
        match job.spool.next(1 << 20, u64::MAX).expect("readable") {
            Next::Seal(key, seal) => job.spool.ack(&key, seal.offset, true),
            other => return other,
        }
    }
}

#[tokio::test]
async fn results_flow_from_step_to_step_and_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut first = script(
        "echo A=1 >> $KICI_OUTPUT; echo B=two >> $KICI_ENV; echo /extra >> $KICI_PATH; echo '# hi' > $KICI_SUMMARY",
    );
    first.id = Some("one".into());
    let mut second = script("echo $GOT $B ${PATH%%:*} $KICI_JOB_NAME $MATRIX_OS");
    second.env.insert("GOT".into(), template("${{ steps.one.outputs.A }}"));
    let mut job = job(&dir, vec![first, second]);
    job.spec.variables.insert("MATRIX_OS".into(), "linux".into());
    job.spec.outputs.insert("result".into(), template("${{ steps.one.outputs.A }}!"));
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.status, outcome.outputs["result"].as_str()), (JobStatus::Success, "1!"));
    assert_eq!(log(&job), ["o 1 two /extra build linux"]);
    assert_eq!(heard.last(0).summary, "# hi\n");
    assert_eq!(heard.last(1).log.lines, 1);
}

#[tokio::test]
async fn a_failure_skips_what_does_not_ask_for_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let conditional = |condition: &str| Step { condition: Some(condition.into()), ..script("echo $KICI ran") };
    let steps = vec![
        Step { continue_on_error: true, ..script("exit 4") },
        script("echo s3cr3t; exit 3"),
        script("echo never"),
        conditional("failure()"),
        conditional("true"),
        conditional("always()"),
    ];
    let job = job(&dir, steps);
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!(heard.statuses(), ["failed", "failed", "skipped", "success", "skipped", "success"]);
    assert_eq!((outcome.status, outcome.reason), (JobStatus::Failed, Some(FailureReason::StepFailed)));
    assert_eq!((outcome.exit_code, outcome.failed_step.as_str()), (Some(3), "step/1/0"));
    assert_eq!(outcome.message, "step `echo ***; exit 3`: exit code 3");
    assert!(heard.last(0).failure_allowed && !heard.last(1).failure_allowed);
    assert_eq!(log(&job), ["m exit code 4", "o ***", "m exit code 3", "o true ran", "o true ran"]);
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let cases = [
        (Step { working_directory: Some(Value::fixed("nowhere")), ..script("true") }, "does not exist"),
        (Step { working_directory: Some(Value::fixed("..")), ..script("true") }, "outside the workspace"),
        (Step { condition: Some("1 + ".into()), ..script("true") }, "if: expression"),
        (
            Step { shell: Some(kici_engine::lock::Shell::Command(vec!["no-such".into()])), ..script("true") },
            "cannot start",
        ),
    ];
    for (index, (step, expected)) in cases.into_iter().enumerate() {
        let sub = TempDir::new_in(&dir).expect("a directory");
        let job = job(&sub, vec![step]);
        let heard = Heard::default();
        let outcome = go(&job, &heard).await;
        assert!(outcome.message.contains(expected), "{index}: {}", outcome.message);
        assert!(log(&job)[0].contains(expected));
    }
}

#[tokio::test]
async fn a_step_over_its_limit_is_ended_with_all_it_started() {
    let dir = tempfile::tempdir().expect("a directory");
    let step = script("sleep 600 & setsid sleep 600 & echo up; exec sleep 600");
    let job = job(&dir, vec![Step { timeout_ms: Some(300), ..step }, script("true")]);
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!(outcome.reason, Some(FailureReason::StepTimeout));
    assert_eq!(heard.statuses(), ["failed", "skipped"]);
    let keepers = heard.trees.lock().expect("lock").clone();
    assert!(keepers.iter().all(|keeper| descendants(*keeper).is_empty() && !keeper.is_alive()));
    assert_eq!(log(&job), ["o up", "m ran longer than its limit of 0.3 s"]);
}

#[tokio::test]
async fn the_limit_of_the_job_interrupts_and_fails_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let after = Step { condition: Some("always()".into()), ..script("echo after") };
    let mut job = job(&dir, vec![script("exec sleep 600"), script("true"), after]);
    job.deadline = Some(Instant::now() + Duration::from_millis(200));
    let heard = Heard::default();
    let outcome = go(&job, &heard).await;
    assert_eq!((outcome.status, outcome.reason), (JobStatus::Failed, Some(FailureReason::JobTimeout)));
    assert_eq!(heard.statuses(), ["failed", "cancelled", "success"]);
}

async fn stopped_by(told: Stop, run_script: &str) -> (Job, Heard, Outcome, TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let after = Step { condition: Some("cancelled()".into()), ..script("echo after") };
    let job = job(&dir, vec![script(run_script), script("true"), after]);
    let (tx, mut stop) = watch::channel(Stop::Run);
    let heard = Heard { on_running: Some((tx.clone(), told)), ..Heard::default() };
    let outcome = {
        let running = run(&job, &heard, &mut stop);
        let tell = async {
            // The step has said that it is up, so it is really running.
            while job.spool.total_bytes() == 0 {
                job.spool.more().await;
            }
            if let Some((tx, told)) = &heard.on_running {
                crate::stop::strengthen(tx, told.clone());
            }
        };
        tokio::join!(running, tell).0
    };
    (job, heard, outcome, dir)
}

#[tokio::test]
async fn a_graceful_cancel_lets_the_steps_run_that_ask_for_it() {
    let grace = Duration::from_millis(100);
    let told =
        Stop::Graceful { reason: FailureReason::CancelledByUser, message: "by ann".into(), grace, more_steps: true };
    let (job, heard, outcome, _dir) = stopped_by(told, "trap '' TERM; setsid sleep 600 & echo up; sleep 600").await;
    assert_eq!((outcome.status, outcome.message.as_str()), (JobStatus::Cancelled, "by ann"));
    assert_eq!(heard.statuses(), ["cancelled", "cancelled", "success"]);
    assert!(heard.trees.lock().expect("lock").iter().all(|keeper| !keeper.is_alive()));
    assert_eq!(log(&job), ["o up", "m by ann", "o after"]);
}

#[tokio::test]
async fn a_forced_cancel_runs_nothing_more() {
    let told = Stop::Force { reason: FailureReason::CancelledByUser, message: "now".into() };
    let (_job, heard, outcome, _dir) = stopped_by(told, "trap '' TERM; echo up; sleep 600").await;
    assert_eq!(outcome.status, JobStatus::Cancelled);
    assert_eq!(heard.statuses(), ["cancelled", "cancelled", "cancelled"]);
}

#[tokio::test]
async fn background_processes_live_until_the_job_ends_and_are_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let job = job(
        &dir,
        vec![script("sleep 600 >/dev/null 2>&1 & echo $! > pid"), script("kill -0 $(cat pid) && echo alive")],
    );
    let outcome = go(&job, &Heard::default()).await;
    assert_eq!((outcome.status, outcome.strays_killed), (JobStatus::Success, 1));
    assert_eq!(log(&job), ["o alive"]);
}

#[tokio::test]
async fn only_allowed_variables_reach_a_step() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut step = script("env | cut -d= -f1 | sort | tr '\\n' ' '");
    step.shell = Some(kici_engine::lock::Shell::Sh);
    step.env.insert("KICI_SHA".into(), Value::fixed("forged"));
    let job = job(&dir, vec![step]);
    go(&job, &Heard::default()).await;
    let lines = log(&job);
    assert_eq!(lines[0], "m `KICI_SHA` is not set: names with KICI_ belong to the agent");
    assert_eq!(
        lines[1].trim(),
        "o CI FORCE_COLOR KICI KICI_ENV KICI_JOB_NAME KICI_OUTPUT KICI_PATH KICI_SUMMARY PATH PWD"
    );
}

#[test]
fn complaint_21_a_failure_for_want_of_memory_is_one_of_its_own_kind() {
    let usage = |oom_kills| kici_sys::cgroup::Usage {
        oom_kills,
        peak_memory_bytes: Some(64 << 20),
        memory_limit_bytes: Some(64 << 20),
    };
    let failed = |reason| Outcome::new(JobStatus::Failed, Some(reason), "exit code 2");
    let cases = [
        (failed(FailureReason::StepFailed), 1, Some(FailureReason::OomKilled)),
        (failed(FailureReason::StepFailed), 0, Some(FailureReason::StepFailed)),
        (failed(FailureReason::StepTimeout), 1, Some(FailureReason::StepTimeout)),
        (Outcome::new(JobStatus::Success, None, ""), 1, None),
    ];
    for (outcome, kills, reason) in cases {
        assert_eq!(outcome.with_usage(usage(kills)).reason, reason);
    }
    let outcome = failed(FailureReason::StepFailed).with_usage(usage(1));
    assert_eq!(outcome.message, "exit code 2; the job was over its memory limit of 64 MiB (peak 64 MiB)");
}
