//! Caches, artifacts and `hash_files()` of jobs whose files lie in a container.

use kici_engine::state::RunStatus;

use crate::engine;
use crate::stack::Stack;

const WORKFLOW: &str = r#"
on: push
defaults: { runs_on: default, container: { image: "localhost/kici-test/ci:1", pull: never } }
jobs:
  build:
    cache: { key: "deps-${{ hash_files('lock', 'sub/*.lock') }}", paths: [deps, ~/.tool/cache], restore_keys: [deps-] }
    artifacts: { upload: [{ name: bin, paths: [out/app, "logs/*.log"] }] }
    steps:
      - test -e deps/x && echo "found $(cat deps/x) $(cat ~/.tool/cache/y)" || echo nothing found
      - |
        mkdir -p deps out logs ~/.tool/cache made && rm -rf deps/* && cat lock > deps/x && echo tool > ~/.tool/cache/y
        echo app-$(cat lock) > out/app && chmod +x out/app && echo line > logs/a.log && echo no > logs/b.txt
        echo changed > made/x; mkdir deps/closed && touch deps/closed/f && chmod 500 deps/closed; echo mine > beside
      - { env: { H: "${{ hash_files('made/*') }}" }, run: "echo hash $H" }
      - |
        set +e
        kici cache restore --key own --restore-key o mine
        rm -rf mine; mkdir mine && echo 1 > mine/1 && ln -s 1 mine/link
        kici cache save --key own mine
        kici artifact upload extra mine; echo code $?
        kici artifact upload ../bad mine; echo code $?
        kici artifact upload bad /etc/passwd; echo code $?
        ln -s /etc leak; kici artifact upload leak leak; echo code $?
        kici artifact upload deep leak/passwd; echo code $?
        kici cache save --required --key deep leak/passwd; echo code $?
        ls -A | grep -c '^[.]kici-'; true
  test:
    needs: build
    checkout: false
    artifacts: { download: [{ name: bin, from: build, path: got }] }
    steps:
      - echo "got $(cat got/out/app) $(cat got/logs/a.log) $(ls got/logs | wc -l) $(stat -c '%u %a' got/out/app)"
      - |
        set +e
        kici artifact download extra --from build && echo "extra $(cat mine/link)"
        kici artifact download nothing; echo code $?
        mkdir -p blocked/mine/1; kici artifact download extra --path blocked; echo code $?
  closed:
    needs: build
    container: { image: "localhost/kici-test/busybox:1", pull: never, options: { read_only: true } }
    cache: { key: "deps-${{ hash_files('lock', 'sub/*.lock') }}", paths: [deps] }
    run: echo "read $(cat deps/x) $(stat -c %u deps/x)"
"#;

async fn kept(kind: &str) {
    let Some(engine) = engine::engine(kind).await else { return };
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let socket = engine.socket().to_str().unwrap();
    let _agent = stack.start_agent("a1", token.token.expose(), &[("KICI_CONTAINER_SOCKET", socket)]).await;
    let files = [(".kici/workflows/ci.yaml", WORKFLOW), ("lock", "one"), ("sub/a.lock", "two")];
    let repository = stack.repository("app", &files).await;
    for found in [false, true] {
        repository.commit(&[("other", if found { "x" } else { "y" })]);
        let run = stack.push_one(&repository, "app").await;
        let ended = stack.ended(run).await;
        let lines = stack.log(run, "build").await;
        assert_eq!(ended.run.status, RunStatus::Success, "{lines:#?} {:#?}\n{}", ended.jobs, stack.logs());
        let says = |lines: &[String], line: &str| assert!(lines.iter().any(|l| l == line), "{line:?}: {lines:#?}");
        says(&lines, if found { "found one tool" } else { "nothing found" });
        says(&lines, if found { r#"{"hit":true,"matched_key":"own"}"# } else { r#"{"hit":false,"matched_key":null}"# });
        // SHA-256 over `made/x`, NUL and the digest of `changed\n`.
        says(&lines, "hash 93b64bb5880d09f7e42c0e1989e4f67fbbc8984954671b97892d2d350c2372fe");
        let codes: Vec<&String> = lines.iter().filter(|line| line.starts_with("code ")).collect();
        assert_eq!(codes, ["code 0", "code 2", "code 2", "code 1", "code 1", "code 1"], "{lines:#?}");
        says(&lines, "0");
        let steps = stack.client.steps(run, Some("build")).await.unwrap();
        let save = steps.iter().find(|step| step.key.starts_with("cache_save")).expect("a row");
        assert_eq!(save.status.as_str(), if found { "skipped" } else { "success" }, "{steps:#?}");
        let lines = stack.log(run, "test").await;
        says(&lines, "got app-one line 1 1000 755");
        says(&lines, "extra 1");
        let codes: Vec<&String> = lines.iter().filter(|line| line.starts_with("code ")).collect();
        assert_eq!(codes, ["code 3", "code 1"], "{lines:#?}");
        says(&stack.log(run, "closed").await, "read one 0");
    }
}

#[tokio::test]
async fn jobs_in_docker_keep_and_find_files_as_others_do() {
    kept("docker").await;
}

#[tokio::test]
async fn jobs_in_podman_keep_and_find_files_as_others_do() {
    kept("podman").await;
}
