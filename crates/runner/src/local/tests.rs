use kici_engine::compile::compile_file;
use kici_engine::event::{EventKind, ForkState, Sender};
use kici_engine::ids::IdSource;
use kici_engine::time::{ManualClock, Ts};
use tempfile::TempDir;

use super::*;

#[derive(Default)]
struct Heard {
    lines: Mutex<Vec<String>>,
    /// Told to stop when a line with this text is seen.
    trip: Option<(&'static str, watch::Sender<Stop>, Stop)>,
}

impl Heard {
    fn say(&self, line: String) {
        if let Some((text, tell, stop)) = &self.trip
            && line.contains(text)
        {
            strengthen(tell, stop.clone());
        }
        self.lines.lock().expect("lock").push(line);
    }

    fn all(&self) -> Vec<String> {
        self.lines.lock().expect("lock").clone()
    }
}

impl Screen for Heard {
    fn note(&self, text: &str) {
        self.say(format!("! {text}"));
    }

    fn job_starts(&self, job: &Entry) {
        self.say(format!("+{}", job.plan.name));
    }

    fn step(&self, job: &str, report: &StepReport) {
        if report.status.is_terminal() {
            self.say(format!("{job}: {}", report.status));
        }
    }

    fn lines(&self, job: &str, _step: &StepKey, lines: &[u8]) {
        let text = String::from_utf8(lines.to_vec()).expect("UTF-8");
        text.lines().for_each(|line| self.say(format!("{job}| {}", line.splitn(3, ' ').nth(2).expect("a line"))));
    }

    fn job_ends(&self, job: &Entry, _took: Duration) {
        self.say(format!("-{} {}", job.plan.name, job.status));
    }
}

struct Ids(std::sync::atomic::AtomicU64);

impl IdSource for Ids {
    fn uuid(&self) -> uuid::Uuid {
        uuid::Uuid::from_u128(u128::from(self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst)))
    }
}

fn event() -> Event {
    Event {
        kind: EventKind::Push,
        raw_name: "push".into(),
        action: None,
        org: "default".into(),
        routing_key: "local:test".into(),
        provider: "local".into(),
        source: "local".into(),
        repo: Some("local/test".into()),
        git_ref: Some("refs/heads/main".into()),
        sha: Some("a".repeat(40)),
        target_branch: Some("main".into()),
        source_branch: None,
        base_sha: None,
        tag: None,
        default_branch: Some("main".into()),
        is_fork_pr: ForkState::No,
        pr_number: None,
        sender: Sender::default(),
        commit_message: None,
        inputs: BTreeMap::new(),
        requested_workflow: None,
        check_mode: Default::default(),
        payload: Json::Null,
        chain_depth: 0,
    }
}

struct World {
    dir: TempDir,
    settings: Settings,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let workspace = dir.path().join("tree");
        std::fs::create_dir_all(&workspace).expect("made");
        let settings = Settings {
            workspace,
            scratch: dir.path().join("scratch"),
            host: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
            clock: Arc::new(ManualClock::new(Ts::from_micros(1))),
            ids: Arc::new(Ids(1.into())),
            step_timeout: Duration::from_secs(60),
            only: None,
            workflows: Arc::default(),
        };
        Self { dir, settings }
    }

    async fn run(&self, source: &str, heard: &Heard, stop: &watch::Receiver<Stop>) -> Result<Summary, LocalError> {
        let compiled = compile_file("ci.yaml", source);
        assert_eq!(compiled.diagnostics, []);
        run(&self.settings, &compiled.workflows[0], &event(), heard, stop).await
    }

    async fn go(&self, source: &str, heard: &Heard) -> Result<Summary, LocalError> {
        let (_tell, stop) = watch::channel(Stop::Run);
        self.run(source, heard, &stop).await
    }
}

fn statuses(summary: &Summary) -> Vec<String> {
    summary.jobs.iter().map(|job| format!("{} {}", job.entry.plan.name, job.entry.status)).collect()
}

const CHAIN: &str = r#"
name: chain
on: push
defaults: { runs_on: linux }
jobs:
  last:
    needs: [{ job: test, when: always }, build]
    env: { V: "${{ needs.build.outputs.v }}" }
    checkout: false
    run: echo "last $V $(ls | wc -l)"
  build:
    outputs: { v: "${{ steps.v.outputs.v }}" }
    steps:
      - { id: v, run: 'echo v=7 >> "$KICI_OUTPUT"; touch built' }
  test:
    needs: build
    matrix: { n: [1, 2] }
    run: test -e built; echo "test $MATRIX_N"; test "$MATRIX_N" = 1
  never:
    needs: test
    run: echo never
  off:
    if: branch != 'main'
    run: echo off
"#;

#[tokio::test]
async fn jobs_run_in_the_order_of_their_needs_with_outputs_conditions_and_variants() {
    let (world, heard) = (World::new(), Heard::default());
    let summary = world.go(CHAIN, &heard).await.expect("a run");
    assert_eq!(summary.status, RunStatus::Failed);
    assert_eq!(
        statuses(&summary),
        ["last success", "build success", "test (1) success", "test (2) failed", "never skipped", "off skipped"]
    );
    let expected = [
        "+build",
        "build: success",
        "-build success",
        "+test (1)",
        "test (1)| test 1",
        "test (1): success",
        "-test (1) success",
        "+test (2)",
        "test (2)| test 2",
        "test (2)| exit code 1",
        "test (2): failed",
        "-test (2) failed",
        "+last",
        "last| last 7 0",
        "last: success",
        "-last success",
    ];
    assert_eq!(heard.all(), expected);
    assert!(world.settings.workspace.join("built").exists(), "steps work on the tree itself");
    assert!(summary.jobs[4].took.is_none() && summary.jobs[4].entry.message.starts_with("upstream_unmet: test"));
}

#[tokio::test]
async fn one_job_brings_what_it_needs_and_nothing_else() {
    let (mut world, heard) = (World::new(), Heard::default());
    world.settings.only = Some("test".into());
    let summary = world.go(CHAIN, &heard).await.expect("a run");
    assert_eq!(statuses(&summary), ["build success", "test (1) success", "test (2) failed"]);
    world.settings.only = Some("tset".into());
    let error = world.go(CHAIN, &heard).await.expect_err("no such job").to_string();
    assert_eq!(error, "there is no job `tset`; there are: build, last, never, off, test");
}

#[tokio::test]
async fn fail_fast_cancels_the_variants_that_have_not_started() {
    let (world, heard) = (World::new(), Heard::default());
    let source = "on: push\njobs:\n  a:\n    runs_on: x\n    matrix: { n: [1, 2, 3] }\n    fail_fast: true\n    run: 'exit $MATRIX_N'\n";
    let summary = world.go(source, &heard).await.expect("a run");
    assert_eq!(statuses(&summary), ["a (1) failed", "a (2) cancelled", "a (3) cancelled"]);
    assert_eq!(summary.jobs[1].entry.reason, Some(FailureReason::FailFast));
    assert_eq!(summary.status, RunStatus::Failed);
}

#[tokio::test]
async fn a_stop_ends_the_process_tree_and_cancels_the_rest() {
    let world = World::new();
    let (tell, stop) = watch::channel(Stop::Run);
    let cancel = Stop::Graceful {
        reason: FailureReason::CancelledByUser,
        message: "interrupted".into(),
        grace: Duration::from_secs(5),
        more_steps: true,
    };
    let heard = Heard { trip: Some(("started", tell, cancel)), ..Heard::default() };
    let source = "on: push\ndefaults: { runs_on: x }\njobs:\n  a:\n    steps:\n      - |\n        setsid sleep 1000 &\n        echo $! > pid\n        echo started\n        sleep 1000\n      - { if: 'always()', run: echo cleanup }\n  b: { run: 'true' }\n";
    let summary = world.run(source, &heard, &stop).await.expect("a run");
    assert_eq!(statuses(&summary), ["a cancelled", "b cancelled"]);
    assert_eq!(summary.status, RunStatus::Cancelled);
    assert!(heard.all().contains(&"a| cleanup".to_owned()), "{:?}", heard.all());
    let pid = std::fs::read_to_string(world.settings.workspace.join("pid")).expect("a pid");
    assert!(!Path::new("/proc").join(pid.trim()).exists(), "what left its session was ended too");
}

#[tokio::test]
async fn the_limit_of_the_workflow_fails_the_running_job() {
    let (world, heard) = (World::new(), Heard::default());
    let source = "on: push\ntimeout: 1s\ndefaults: { runs_on: x }\njobs:\n  a: { run: sleep 1000 }\n  b: { needs: a, run: 'true' }\n";
    let summary = world.go(source, &heard).await.expect("a run");
    assert_eq!(summary.status, RunStatus::Failed);
    assert_eq!(summary.jobs[0].entry.reason, Some(FailureReason::WorkflowTimeout));
}

#[tokio::test]
async fn what_only_an_orchestrator_does_is_named_and_jobs_see_the_variables_of_an_agent() {
    let (mut world, heard) = (World::new(), Heard::default());
    let source = "on: push\nconcurrency: { group: x }\nrequires: [{ file: go.mod }]\ndefaults: { runs_on: x }\nhooks: { on_success: 'echo ended $KICI_OUTCOME_STATUS' }\njobs:\n  a:\n    concurrency: { group: y }\n    retry: { attempts: 2 }\n    run: echo $KICI_JOB_NAME $KICI_CHECK_MODE\n";
    let summary = world.go(source, &heard).await.expect("a run");
    assert_eq!(summary.status, RunStatus::Success);
    let said = heard.all();
    let keys: Vec<&str> = said.iter().filter_map(|line| line.strip_prefix("! ")?.split(" is").next()).collect();
    assert_eq!(keys, ["`requires`", "`concurrency`", "job `a`: `concurrency`", "job `a`: `retry`"]);
    for line in ["a| a apply", "ended success"] {
        assert!(said.iter().any(|one| one.ends_with(line)), "{line}: {said:?}");
    }
    world.settings.only = Some("b".into());
    let heard = Heard::default();
    let source = "on: push\njobs:\n  a: { runs_on: x, retry: { attempts: 2 }, run: 'true' }\n  b: { runs_on_all: web, run: 'true' }\n";
    let summary = world.go(source, &heard).await.expect("a run");
    assert_eq!((summary.status, heard.all().len()), (RunStatus::Failed, 1), "{:?}", heard.all());
    assert!(heard.all()[0].starts_with("! job `b`: `runs_on_all` finds no hosts"), "{:?}", heard.all());
}

const MAKER: &str = r#"
name: maker
on: push
defaults: { runs_on: x, env: { D: default }, working_directory: sub }
hooks: { cleanup: { run: 'echo "joined: $S"', env: { S: "${{ needs.join.status }}" }, working_directory: "." } }
jobs:
  build: { outputs: { v: "7" }, run: "true" }
  plan:
    needs: build
    generate: { group: shards, run: 'cat ../jobs.json > "$KICI_JOBS"' }
  join:
    needs: [{ group: shards, when: always }, plan]
    env: { S: "${{ needs.shards.status }} ${{ needs.shards.outputs.one }}" }
    run: echo "joined $S"
  none: { generate: { run: 'echo "{\"jobs\": []}" > "$KICI_JOBS"' } }
  after: { needs: { group: none }, run: 'echo after nothing' }
"#;

/// Generated jobs are part of a local run, as they are of one of an orchestrator, with defaults and step files.
#[tokio::test]
async fn jobs_that_a_job_makes_run() {
    let (mut world, heard) = (World::new(), Heard::default());
    std::fs::create_dir(world.settings.workspace.join("sub")).expect("made");
    let jobs = r#"{"jobs": [
      {"name": "one", "needs": "build", "matrix": {"n": [1, 2]}, "outputs": {"one": "${{ steps.s.outputs.w }}"},
       "env": {"V": "${{ needs.build.outputs.v }}"},
       "steps": [{"id": "s", "use": "./.kici/steps/say.yaml", "with": {"word": "${{ env.V }}"}}]},
      {"name": "two", "needs": [{"job": "one", "when": "always"}], "run": "echo two $D in $(basename $PWD); exit 1"}]}"#;
    std::fs::write(world.settings.workspace.join("jobs.json"), jobs).expect("written");
    let part = "inputs: { word: {} }\noutputs: { w: \"${{ steps.o.outputs.w }}\" }\nsteps:\n  - { id: o, run: 'echo \"say $INPUT_WORD\"; echo w=$INPUT_WORD >> \"$KICI_OUTPUT\"' }\n";
    let files = [("ci.yaml", MAKER), (".kici/steps/say.yaml", part)];
    let set = kici_engine::compile::compile_set(&files.map(|(path, text)| (path.to_owned(), text.to_owned())));
    assert_eq!(set.diagnostics().count(), 0, "{:?}", set.diagnostics().collect::<Vec<_>>());
    let workflow = set.workflows().next().expect("a workflow");
    let (_tell, stop) = watch::channel(Stop::Run);
    let summary = run(&world.settings, workflow, &event(), &heard, &stop).await.expect("a run");
    let mut found = statuses(&summary);
    found.sort();
    let expected = [
        "_hooks success",
        "after success",
        "build success",
        "join success",
        "none success",
        "one (1) success",
        "one (2) success",
        "plan success",
        "two failed",
    ];
    assert_eq!(found, expected, "{:#?}", heard.all());
    let said = heard.all();
    for line in ["one (2)| say 7", "two| two default in sub", "join| joined failed 7", "after| after nothing"] {
        assert!(said.contains(&line.to_owned()), "{line}: {said:#?}");
    }
    assert!(said.iter().any(|line| line.ends_with("| joined: success")), "{said:#?}");

    // One job brings the jobs that it needs, made ones too. Each run has files of its own.
    let scratch = world.settings.scratch.clone();
    world.settings.scratch = scratch.join("second");
    world.settings.only = Some("join".into());
    let summary = run(&world.settings, workflow, &event(), &Heard::default(), &stop).await.expect("a run");
    assert_eq!(summary.jobs.len(), 6, "{:?}", statuses(&summary));

    // What may not join fails its maker.
    world.settings.scratch = scratch.join("third");
    world.settings.only = None;
    std::fs::write(world.settings.workspace.join("jobs.json"), r#"{"jobs": [{"name": "build", "run": "x"}]}"#)
        .expect("written");
    let summary = run(&world.settings, workflow, &event(), &Heard::default(), &stop).await.expect("a run");
    let maker = summary.jobs.iter().find(|job| job.entry.plan.name == "plan").expect("a job");
    assert_eq!(maker.entry.reason, Some(FailureReason::DynamicEval), "{}", maker.entry.message);
    let join = summary.jobs.iter().find(|job| job.entry.plan.name == "join").expect("a job");
    assert_eq!(join.entry.status, JobStatus::Skipped);
}

#[tokio::test]
async fn a_job_runs_the_workflows_that_listen_and_is_judged_by_them() {
    let mut world = World::new();
    let compiled = |source: &str| {
        let compiled = compile_file("ci.yaml", source);
        assert_eq!(compiled.diagnostics, []);
        compiled.workflows
    };
    let listeners = "name: good\non: { event: [{ name: go }, { name: mixed }] }\njobs: { a: { runs_on: x, env: { V: '${{ event.payload.v }}' }, run: echo \"v $V $KICI_SHA\" } }\n---\nname: bad\non: { event: { name: mixed } }\njobs: { a: { runs_on: x, run: exit 1 } }\n---\nname: circle\non: { event: { name: round } }\njobs: { again: { invoke: { event: round, optional: true } } }\n---\nname: slow\non: { event: { name: slow } }\njobs: { a: { runs_on: x, run: sleep 1000 } }\n";
    world.settings.workflows = Arc::new(compiled(listeners));
    for (invoke, status, reason) in [
        ("event: go, payload: { v: \"${{ branch }}\" }", JobStatus::Success, None),
        ("event: mixed, payload: { v: 1 }", JobStatus::Failed, Some(FailureReason::InvokeFailed)),
        ("event: nobody", JobStatus::Failed, Some(FailureReason::InvokeFailed)),
        ("event: nobody, optional: true", JobStatus::Success, None),
        ("event: round, optional: true", JobStatus::Failed, Some(FailureReason::InvokeFailed)),
    ] {
        let heard = Heard::default();
        let source = format!("on: push\njobs:\n  call: {{ invoke: {{ {invoke} }} }}\n");
        let summary = world.go(&source, &heard).await.expect("a run");
        let call = &summary.jobs[0].entry;
        assert_eq!((call.status, call.reason), (status, reason), "{invoke}: {} {:?}", call.message, heard.all());
        if invoke.starts_with("event: go") {
            assert!(heard.all().contains(&format!("good/a| v main {}", "a".repeat(40))), "{:?}", heard.all());
        }
    }
    let source = "on: push\njobs:\n  call: { timeout: 1s, invoke: { event: slow } }\n";
    let summary = world.go(source, &Heard::default()).await.expect("a run");
    assert_eq!(summary.jobs[0].entry.reason, Some(FailureReason::JobTimeout));
    assert_eq!(summary.status, RunStatus::Failed);
}

#[tokio::test]
async fn a_workflow_that_declines_is_no_run() {
    let (world, heard) = (World::new(), Heard::default());
    let source = "on: push\nif: branch == 'x'\njobs:\n  a: { runs_on: x, run: 'true' }\n";
    let error = world.go(source, &heard).await.expect_err("no run");
    assert!(matches!(error, LocalError::Declined { .. }) && heard.all().is_empty());
    assert!(!world.dir.path().join("scratch").exists());
}

#[test]
fn only_listed_variables_of_the_host_are_passed_on() {
    let all = [("PATH", "p"), ("CARGO_HOME", "c"), ("AWS_SECRET", "s"), ("KICI_X", "k")];
    let all = all.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let passed = host_variables(all, &["CARGO_HOME".into(), "KICI_X".into()]);
    assert_eq!(passed.keys().collect::<Vec<_>>(), ["CARGO_HOME", "PATH"]);
}
