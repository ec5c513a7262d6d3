//! Caches and artifacts over real processes.

use std::fs;
use std::path::{Path, PathBuf};

use kici_api::dto::runs::RunDetail;
use kici_api::dto::stored::{CacheFilter, DeleteCaches};
use kici_engine::ids::RunId;
use kici_engine::state::RunStatus;
use kici_store::testing::TestStore;

use crate::stack::{Stack, binary, clean, until};

const WORKFLOW: &str = r#"
on: push
jobs:
  build:
    runs_on: default
    cache: { key: "deps-${{ hash_files('lock') }}", paths: [deps, ~/.tool/cache], restore_keys: [deps-] }
    artifacts: { upload: [{ name: bin, paths: [out/app, "logs/*.log"] }] }
    steps:
      - test -e deps/x && echo "found $(cat deps/x) $(cat ~/.tool/cache/y)" || echo nothing found
      - mkdir -p deps out logs ~/.tool/cache && cat lock > deps/x && echo tool > ~/.tool/cache/y
      - echo app-$(cat lock) > out/app && echo line > logs/a.log
      - |
        kici cache restore --key own --restore-key o mine
        mkdir -p mine && echo 1 > mine/1
        kici cache save --key own mine
        kici artifact upload extra mine
  test:
    needs: build
    runs_on: default
    checkout: false
    artifacts: { download: [{ name: bin, from: build, path: got }] }
    steps:
      - echo "got $(cat got/out/app) $(cat got/logs/a.log)"
      - kici artifact download extra --from build && echo "extra $(cat mine/1)"
      - |
        set +e
        kici artifact download nothing; echo code $?
        kici artifact upload ../bad mine; echo code $?
        kici artifact upload bad /etc/passwd; echo code $?
        kici artifact upload extra mine; echo code $?
        ln -s /etc/passwd leak; kici artifact upload leak leak; echo code $?
        kici cache save --key bad /etc; echo code $?
        kici cache restore --key bad ../x; echo code $?
"#;

async fn start(database: Option<String>) -> (Stack, crate::stack::Process, PathBuf) {
    let stack = Stack::start(database).await;
    let token = stack.agent_token().await;
    let home = stack.dir.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("mine"), "mine").unwrap();
    let agent = stack.start_agent("a1", token.token.expose(), &[("HOME", home.to_str().unwrap())]).await;
    (stack, agent, home)
}

async fn succeeded(stack: &Stack, run: RunId) -> RunDetail {
    let ended = stack.ended(run).await;
    let texts = stack.log(run, "build").await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{texts:#?}\n{}", ended.jobs, stack.logs());
    ended
}

/// Every file below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.flat_map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { vec![entry.path()] }).collect()
}

async fn whole(database: Option<String>) {
    let (stack, _agent, home) = start(database).await;
    let files_of = [(".kici/workflows/ci.yaml", WORKFLOW), ("lock", "one")];
    let repository = stack.repository("app", &files_of).await;
    let first = stack.push_one(&repository, "app").await;
    succeeded(&stack, first).await;
    let lines = stack.log(first, "build").await;
    assert!(lines.contains(&"nothing found".to_owned()), "{lines:#?}");
    assert!(lines.contains(&r#"{"hit":false,"matched_key":null}"#.to_owned()), "{lines:#?}");
    let lines = stack.log(first, "test").await;
    assert!(lines.contains(&"got app-one line".to_owned()) && lines.contains(&"extra 1".to_owned()), "{lines:#?}");
    let codes: Vec<&String> = lines.iter().filter(|line| line.starts_with("code ")).collect();
    assert_eq!(codes, ["code 3", "code 2", "code 2", "code 3", "code 1", "code 2", "code 2"], "{lines:#?}");

    let steps = stack.client.steps(first, Some("build")).await.unwrap();
    let kinds: Vec<&str> = steps.iter().map(|step| step.key.split('-').next().unwrap()).collect();
    let expected = ["checkout", "cache_restore", "step", "step", "step", "step", "artifact_upload", "cache_save"];
    assert_eq!(kinds, expected, "{steps:#?}");

    let artifacts = stack.client.artifacts(first).await.unwrap().items;
    let names: Vec<&str> = artifacts.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["bin", "extra"]);
    assert!(artifacts.iter().all(|one| one.job == "build" && one.expires_at.is_some()));

    // A second run at the same lock finds the very key.
    repository.commit(&[("other", "x")]);
    let second = stack.push_one(&repository, "app").await;
    succeeded(&stack, second).await;
    let lines = stack.log(second, "build").await;
    assert!(lines.contains(&"found one tool".to_owned()), "{lines:#?}");
    assert!(lines.contains(&r#"{"hit":true,"matched_key":"own"}"#.to_owned()), "{lines:#?}");
    let steps = stack.client.steps(second, Some("build")).await.unwrap();
    assert_eq!(steps.last().unwrap().status.as_str(), "skipped", "found by its key, so nothing is saved");
    assert_eq!(fs::read_to_string(home.join("mine")).unwrap(), "mine");

    let entries = stack.client.caches(&CacheFilter::default(), &Default::default()).await.unwrap().items;
    assert_eq!(entries.len(), 2, "{entries:#?}");
    let totals = stack.client.stored_totals().await.unwrap();
    assert_eq!(totals.kinds[0].objects, 2);
    assert!(totals.kinds[0].hits >= 2 && totals.kinds[0].misses >= 2, "{totals:?}");
    let wanted = DeleteCaches { key_prefix: Some("deps-".to_owned()), ..DeleteCaches::default() };
    let would = stack.client.delete_caches(&wanted).await.unwrap();
    assert_eq!((would.applied, would.entries), (false, 1));
    let gone = stack.client.delete_caches(&DeleteCaches { apply: true, ..wanted }).await.unwrap();
    assert_eq!((gone.applied, gone.entries), (true, 1));
    assert!(stack.client.delete_caches(&DeleteCaches { apply: true, ..Default::default() }).await.is_err());
    let objects = stack.data().join("objects/cache");
    until("the object to go", async || (files(&objects).len() == 1).then_some(())).await;
    // Signatures are not in any log.
    assert!(!stack.logs().contains("signature="), "{}", stack.logs());
}

#[tokio::test]
async fn what_one_job_keeps_others_find_and_hostile_names_and_paths_are_refused() {
    whole(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_on_postgresql() {
    let Some(database) = TestStore::postgres().await else { return };
    whole(Some(database.url().to_owned())).await;
}

const LARGE: &str = r#"
on: push
jobs:
  build:
    runs_on: default
    cache: { key: big, paths: [big] }
    artifacts: { upload: [{ name: big, paths: [big] }] }
    run: head -c 60000000 /dev/urandom > big
"#;

/// Kills the orchestrator while bytes of an archive come in.
#[tokio::test]
async fn killing_the_orchestrator_in_the_middle_of_an_upload_loses_nothing_and_leaves_nothing_visible() {
    let (mut stack, _agent, _) = start(None).await;
    let repository = stack.repository("app", &[(".kici/workflows/ci.yaml", LARGE)]).await;
    let run = stack.push_one(&repository, "app").await;
    let objects = stack.data().join("objects/artifacts");
    let half = until("half an archive", async || {
        files(&objects)
            .into_iter()
            .find(|path| path.to_string_lossy().contains('#') && path.metadata().is_ok_and(|m| m.len() > 0))
    })
    .await;
    stack.orchestrator.take().unwrap().kill();
    let address = stack.address.clone();
    stack.start_orchestrator(&address).await;
    // Whatever came in so far is not there for anybody.
    let shown = stack.client.artifacts(run).await.unwrap().items;
    assert!(shown.is_empty() || !half.exists(), "{shown:?}");
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let artifacts = stack.client.artifacts(run).await.unwrap().items;
    assert_eq!(artifacts.len(), 1);
    assert!(artifacts[0].size > 60_000_000, "{artifacts:?}");
    let dir = stack.dir.path().join("got");
    let output = clean(&binary("kici-admin"))
        .args(["artifact", "download", &run.to_string(), "big", "--dir"])
        .arg(&dir)
        .env("KICI_ADMIN_URL", format!("http://{}", stack.address))
        .env("KICI_DATA_DIR", stack.data())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::metadata(dir.join("big")).unwrap().len(), 60_000_000);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing of the work is left");
}
