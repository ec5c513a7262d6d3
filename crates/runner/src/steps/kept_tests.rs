use kici_engine::lock::{Artifacts, Cache, Download, IfEmpty, KeepWhen, Upload};

use super::tests::{Heard, go, job, log, script, template};
use super::*;
use crate::stash::tests::Memory;

fn cache(key: &str, path: &str) -> Cache {
    Cache {
        key: template(key),
        paths: vec![Value::fixed(path)],
        restore_keys: Vec::new(),
        when: KeepWhen::Success,
        required: false,
        source: Default::default(),
    }
}

fn upload(name: &str, path: &str) -> Upload {
    Upload {
        name: Value::fixed(name),
        paths: vec![Value::fixed(path)],
        expire_in_ms: None,
        if_empty: IfEmpty::Warn,
        when: KeepWhen::Success,
        source: Default::default(),
    }
}

fn with_stash(mut job: Job, dir: &tempfile::TempDir, memory: &Arc<Memory>) -> Job {
    let stash =
        Stash::new(memory.clone(), job.workspace.clone(), None, dir.path().join("stash"), Arc::clone(&job.confine));
    job.stash = Some(Arc::new(stash));
    job
}

async fn whole(job: &Job, heard: &Heard) -> Outcome {
    let (_tx, mut stop) = watch::channel(Stop::Run);
    match prepare(job, heard, &mut stop).await {
        Some(outcome) => outcome,
        None => run(job, heard, &mut stop).await,
    }
}

fn kept(heard: &Heard) -> Vec<(String, &'static str)> {
    let reports = heard.reports.lock().expect("lock");
    let ended = reports.iter().filter(|report| report.status.is_terminal());
    ended.map(|report| (crate::key::step_file_name(&report.key), report.status.as_str())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caches_of_a_job_a_step_and_init_are_restored_and_saved_around_what_they_belong_to() {
    let memory = Arc::new(Memory::default());
    let make = |dir: &tempfile::TempDir| {
        let mut step = script("cat t/x s/x 2>/dev/null || true; mkdir -p t s i; echo job > t/x; echo step > s/x; true");
        step.cache = vec![cache("step-${{ agent.os }}", "s")];
        let mut made = job(dir, vec![step]);
        made.spec.cache = vec![cache("job-${{ hash_files('lock') }}", "t")];
        let mut init = script("mkdir -p i; echo init > i/x");
        init.cache = vec![cache("init", "i")];
        made.spec.init = vec![init];
        std::fs::write(made.workspace.join("lock"), "1").expect("written");
        with_stash(made, dir, &memory)
    };
    let names = [
        "cache_restore--1-0",
        "cache_restore--1-100",
        "init--1-10",
        "cache_save--1-100",
        "cache_restore-0-0",
        "step-0-0",
        "cache_save-0-0",
        "cache_save--1-0",
    ];
    let (first, heard) = (tempfile::tempdir().expect("a directory"), Heard::default());
    let made = make(&first);
    assert_eq!(whole(&made, &heard).await.status, JobStatus::Success, "{:?}", log(&made));
    assert_eq!(kept(&heard), names.map(|name| (name.to_owned(), "success")));
    let keys: Vec<String> = memory.caches.lock().expect("lock").keys().cloned().collect();
    assert_eq!(keys.len(), 3, "{keys:?}");
    assert!(keys[1].starts_with("job-") && keys[1].len() > 60 && keys[2] == "step-linux", "{keys:?}");

    let (second, heard) = (tempfile::tempdir().expect("a directory"), Heard::default());
    let made = make(&second);
    assert_eq!(whole(&made, &heard).await.status, JobStatus::Success);
    let lines = log(&made);
    assert!(lines.iter().any(|line| line == "o job") && lines.iter().any(|line| line == "o step"), "{lines:?}");
    // Found by their very keys: nothing to save.
    let saves: Vec<_> = kept(&heard).into_iter().filter(|(name, _)| name.starts_with("cache_save")).collect();
    assert!(saves.len() == 3 && saves.iter().all(|(_, status)| *status == "skipped"), "{saves:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_job_saves_what_asks_for_it_and_hands_over_what_is_for_failures() {
    let memory = Arc::new(Memory::default());
    let dir = tempfile::tempdir().expect("a directory");
    let mut made = job(&dir, vec![script("echo x > t; echo y > log; exit 3")]);
    made.spec.cache = vec![cache("plain", "t"), Cache { when: KeepWhen::Always, ..cache("always", "t") }];
    let logs = Upload { when: KeepWhen::Failure, ..upload("logs", "log") };
    made.spec.artifacts = Artifacts { upload: vec![upload("bin", "t"), logs], download: Vec::new() };
    let outcome = whole(&with_stash(made, &dir, &memory), &Heard::default()).await;
    assert_eq!((outcome.status, outcome.exit_code), (JobStatus::Failed, Some(3)));
    assert_eq!(memory.caches.lock().expect("lock").keys().collect::<Vec<_>>(), ["always"]);
    assert_eq!(memory.artifacts.lock().expect("lock").keys().collect::<Vec<_>>(), ["logs"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_not_green_without_its_artifacts() {
    let memory = Arc::new(Memory::default());
    let fails = async |uploads: Vec<Upload>| {
        let (dir, heard) = (tempfile::tempdir().expect("a directory"), Heard::default());
        let mut made = job(&dir, vec![script("true")]);
        made.spec.artifacts = Artifacts { upload: uploads, download: Vec::new() };
        (whole(&with_stash(made, &dir, &memory), &heard).await, kept(&heard))
    };
    let (outcome, steps) = fails(vec![Upload { if_empty: IfEmpty::Fail, ..upload("bin", "target/*") }]).await;
    assert_eq!((outcome.status, outcome.failed_step.as_str()), (JobStatus::Failed, "artifact:upload/-1/0"));
    assert!(outcome.message.contains("no file matches target/*"), "{}", outcome.message);
    assert_eq!(steps[1], ("artifact_upload--1-0".to_owned(), "failed"));
    let (outcome, _) = fails(vec![upload("../bad", "x")]).await;
    assert!(outcome.status == JobStatus::Failed && outcome.message.contains("../bad"), "{}", outcome.message);
    // Nothing there, and nobody minds.
    let (outcome, steps) = fails(vec![upload("bin", "target/*")]).await;
    assert_eq!((outcome.status, steps[1].1), (JobStatus::Success, "skipped"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_is_there_before_the_steps_and_a_missing_artifact_ends_the_job_before_them() {
    let memory = Arc::new(Memory::default());
    let dir = tempfile::tempdir().expect("a directory");
    let mut made = job(&dir, vec![script("mkdir -p out; echo made > out/app")]);
    made.spec.artifacts = Artifacts { upload: vec![upload("bin", "out/app")], download: Vec::new() };
    assert_eq!(whole(&with_stash(made, &dir, &memory), &Heard::default()).await.status, JobStatus::Success);

    let take = async |name: &str| {
        let (dir, heard) = (tempfile::tempdir().expect("a directory"), Heard::default());
        let mut made = job(&dir, vec![script("cat in/out/app")]);
        let download = Download {
            name: Value::fixed(name),
            from: None,
            path: Some(Value::fixed("in")),
            source: Default::default(),
        };
        made.spec.artifacts = Artifacts { upload: Vec::new(), download: vec![download] };
        let made = with_stash(made, &dir, &memory);
        let outcome = whole(&made, &heard).await;
        (outcome, log(&made), kept(&heard))
    };
    let (outcome, lines, _) = take("bin").await;
    assert!(outcome.status == JobStatus::Success && lines.contains(&"o made".to_owned()), "{lines:?}");
    let (outcome, _, steps) = take("other").await;
    assert_eq!((outcome.status, steps.len()), (JobStatus::Failed, 1));
    assert!(outcome.message.contains("no artifact `other`"), "{}", outcome.message);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_of_a_cache_fails_only_what_requires_it() {
    let run_with = async |required: bool| {
        let memory = Arc::new(Memory::default());
        memory.caches.lock().expect("lock").insert("k".to_owned(), b"nonsense".to_vec());
        let (dir, heard) = (tempfile::tempdir().expect("a directory"), Heard::default());
        let mut made = job(&dir, vec![script("echo ran")]);
        made.spec.cache = vec![Cache { required, ..cache("k", "t") }];
        let made = with_stash(made, &dir, &memory);
        (whole(&made, &heard).await, kept(&heard))
    };
    let (outcome, steps) = run_with(false).await;
    assert_eq!((outcome.status, steps[0].1, steps[1].1), (JobStatus::Success, "failed", "success"));
    let (outcome, steps) = run_with(true).await;
    assert_eq!((outcome.status, steps.len()), (JobStatus::Failed, 1));
    assert!(outcome.message.starts_with("cache: "), "{}", outcome.message);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_store_nothing_is_kept_and_that_is_said() {
    let (dir, heard) = (tempfile::tempdir().expect("a directory"), Heard::default());
    let mut made = job(&dir, vec![script("true")]);
    made.spec.cache = vec![cache("k", "t")];
    assert_eq!(go(&made, &heard).await.status, JobStatus::Success);
    assert_eq!(kept(&heard).last().expect("a step").1, "skipped");
    assert!(log(&made).iter().any(|line| line.contains("has no store")));
}
