//! The verbs that work on files, without a server.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value as Json;

struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn run(dir: &Path, arguments: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kici-admin"));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", dir).current_dir(dir).stdin(Stdio::null());
    let output = command.arg("workflow").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
}

const CI: &str = r#"
name: ci
on:
  push: { branches: [main, master], paths: ["src/**"] }
  manual: { inputs: { level: { type: integer, default: 1 } } }
jobs:
  build:
    runs_on: linux
    outputs: { v: "${{ steps.v.outputs.v }}" }
    steps:
      - { id: v, run: 'echo "v=$(cat version)" >> "$KICI_OUTPUT"' }
  test:
    runs_on: linux
    needs: build
    matrix: { n: [1, 2] }
    env: { V: "${{ needs.build.outputs.v }}" }
    run: echo "got $V $MATRIX_N level=${INPUT_LEVEL:-none} event=${SECRET:-hidden}"
"#;

fn repository(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join(".kici/workflows")).unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

#[test]
fn a_workflow_runs_on_the_files_as_they_are() {
    let dir = repository(&[(".kici/workflows/ci.yaml", CI), ("version", "7\n")]);
    let ran = run(dir.path(), &["run", "--local"]);
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("test (1) | got 7 1 level=none event=hidden"), "{}", ran.out);
    assert!(ran.out.contains("STATUS") && ran.err.contains("ci: success"), "{}{}", ran.out, ran.err);

    let by_hand = run(dir.path(), &["run", "--local", "ci", "--input", "level=3", "--job", "test", "-o", "json"]);
    assert_eq!(by_hand.code, 0, "{}", by_hand.err);
    let lines: Vec<Json> = by_hand.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text = |line: &&Json| line["text"].as_str().is_some_and(|text| text.starts_with("got 7 2 level=3"));
    assert!(lines.iter().any(|line| text(&line)), "{}", by_hand.out);
    let result = lines.last().unwrap();
    assert_eq!((result["type"].as_str(), result["status"].as_str()), (Some("result"), Some("success")));
    assert_eq!(result["jobs"][0]["outputs"]["v"], "7");
}

#[test]
fn a_local_run_tells_its_outcome_by_its_exit_code() {
    let fails = CI.replace("run: echo", "run: exit 3 #");
    let dir = repository(&[(".kici/workflows/ci.yaml", &fails), ("version", "7\n")]);
    let ran = run(dir.path(), &["run", "--local"]);
    assert_eq!(ran.code, 1, "{}", ran.err);
    assert!(ran.out.contains("exit code 3"), "{}", ran.out);
    for (arguments, code, part) in [
        (&["run"][..], 64, "--local"),
        (&["run", "--local", "cd"], 64, "there is no workflow `cd`; there are: ci"),
        (&["run", "--local", "ci", "--job", "x"], 64, "there is no job `x`; there are: build, test"),
        (&["run", "--local", "ci", "--input", "level=high"], 64, "input `level`"),
        (&["run", "--local", "--event", "none.json"], 64, "none.json"),
        (&["run", "--local", "--repo", "/nowhere"], 64, "/nowhere"),
    ] {
        let ran = run(dir.path(), arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(part), "{arguments:?}: {}", ran.err);
    }
    std::fs::write(dir.path().join("tag.json"), r#"{"kind": "tag", "tag": "v1"}"#).unwrap();
    let ran = run(dir.path(), &["run", "--local", "--event", "tag.json"]);
    assert_eq!(ran.code, 2, "{}", ran.err);
}

#[test]
fn an_interrupted_run_leaves_no_process_behind() {
    let source = "on: push\njobs:\n  a:\n    runs_on: x\n    run: |\n      setsid sleep 1000 &\n      echo $! > pid.new; mv pid.new pid\n      sleep 1000\n";
    let dir = repository(&[(".kici/workflows/ci.yaml", source)]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kici-admin"));
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.args(["workflow", "run", "--local"]).spawn().unwrap();
    let pid = loop {
        if let Ok(text) = std::fs::read_to_string(dir.path().join("pid")) {
            break text.trim().to_owned();
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended too early");
        std::thread::yield_now();
    };
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!Path::new("/proc").join(pid).exists());
}

#[test]
fn explain_names_the_filter_that_says_no() {
    let dir = repository(&[(".kici/workflows/ci.yaml", CI)]);
    let event = |text: &str| std::fs::write(dir.path().join("event.json"), text).unwrap();
    event(r#"{"kind": "push", "target_branch": "topic"}"#);
    let ran = run(dir.path(), &["explain", "event.json"]);
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(ran.out.contains("NO  branches: wants"), "{}", ran.out);

    event(r#"{"kind": "push", "target_branch": "main"}"#);
    let ran = run(dir.path(), &["explain", "event.json", "--changed", "docs/a"]);
    assert!(ran.code == 2 && ran.out.contains("NO  paths"), "{}", ran.out);
    let ran = run(dir.path(), &["explain", "event.json", "--changed", "src/a", "-o", "json"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let json: Json = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(json["workflows"][0]["jobs"], serde_json::json!(["build", "test (1)", "test (2)"]));

    let body = r#"{"ref": "refs/heads/main", "before": "0000000000000000000000000000000000000000", "after": "1111111111111111111111111111111111111111", "repository": {"full_name": "o/r", "default_branch": "main"}, "head_commit": {"message": "x [skip ci]"}, "commits": []}"#;
    event(body);
    let ran = run(dir.path(), &["explain", "event.json", "--kind", "push"]);
    assert!(ran.code == 2 && ran.out.contains("[skip ci]"), "{}{}", ran.out, ran.err);
    assert_eq!(run(dir.path(), &["explain", "event.json"]).code, 64, "such a body needs --kind");
}

#[test]
fn the_lock_document_is_the_same_every_time() {
    let dir = repository(&[(".kici/workflows/ci.yaml", CI), (".kici/workflows/_part.yaml", "not a workflow")]);
    assert_eq!(run(dir.path(), &["compile", "--check"]).code, 2);
    assert_eq!(run(dir.path(), &["compile"]).code, 0);
    let lock = dir.path().join(".kici/kici.lock.json");
    let first = std::fs::read(&lock).unwrap();
    let document = kici_engine::lockfile::read(&first).unwrap();
    assert_eq!(document.workflows[0].source.file, ".kici/workflows/ci.yaml");
    assert_eq!(run(dir.path(), &["compile", "--check"]).code, 0);
    // From another place, and with Windows line ends, it is the same document.
    std::fs::write(dir.path().join(".kici/workflows/ci.yaml"), CI.replace('\n', "\r\n")).unwrap();
    let elsewhere = run(Path::new("/"), &["compile", &dir.path().display().to_string(), "--check"]);
    assert_eq!(elsewhere.code, 0, "{}", elsewhere.err);
    std::fs::write(dir.path().join(".kici/workflows/ci.yaml"), CI.replace("linux", "macos")).unwrap();
    let stale = run(dir.path(), &["compile", "--check"]);
    assert!(stale.code == 2 && stale.err.contains("is stale"), "{}", stale.err);
    std::fs::write(dir.path().join(".kici/workflows/ci.yaml"), CI.replace("needs", "neds")).unwrap();
    let bad = run(dir.path(), &["compile"]);
    assert!(bad.code == 2 && bad.err.contains("K0102"), "{}", bad.err);
    assert_eq!(std::fs::read(&lock).unwrap(), first, "nothing is written");
}

#[test]
fn a_converted_workflow_runs() {
    let theirs = "name: CI\non: [push]\njobs:\n  Build:\n    runs-on: ubuntu-latest\n    permissions: read-all\n    strategy: { matrix: { n: [1, 2] } }\n    steps:\n      - uses: actions/checkout@v4\n      - run: echo \"value ${{ matrix.n }}\"\n        if: github.event_name == 'push'\n";
    let dir = repository(&[("theirs.yml", theirs)]);
    let ran = run(dir.path(), &["convert", "theirs.yml", "--from", "github", "--repo", "."]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains("theirs.yml:6:5: jobs.Build.permissions:"), "{}", ran.out);
    let ran = run(dir.path(), &["run", "--local"]);
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("build (2) | value 2"), "{}", ran.out);
    assert_eq!(run(dir.path(), &["convert", "theirs.yml", "--repo", "."]).code, 64, "nothing is replaced unasked");
    std::fs::write(dir.path().join("bad.yml"), "a: [").unwrap();
    let bad = run(dir.path(), &["convert", "bad.yml", "theirs.yml", "--report", "json"]);
    assert_eq!(bad.code, 2);
    let json: Json = serde_json::from_str(&bad.out).unwrap();
    assert_eq!(
        (json["files"][0]["result"].as_str(), json["files"][1]["result"].as_str()),
        (Some("refused"), Some("runs_with_loss"))
    );
}

/// What is plain shell there runs here, with what jobs hand to each other.
#[test]
fn converted_workflows_of_other_systems_run() {
    let gitlab = "stages: [build, test]\nbuild:\n  stage: build\n  image: debian\n  script: [mkdir -p out, echo seven > out/v]\n  cache: { key: k, paths: [deps] }\n  artifacts: { paths: [out/v] }\nmaybe:\n  stage: build\n  rules: [{ if: $CI_COMMIT_TAG }]\n  script: echo x > out/x\n  artifacts: { paths: [out/x] }\ntest:\n  stage: test\n  script: 'echo \"got $(cat out/v) of $CI_JOB_NAME\"'\n";
    let woodpecker = "matrix: { N: [1, 2] }\nsteps:\n  one: { image: 'alpine:${N}', commands: ['echo one $N > made'] }\n  two: { image: 'alpine:${N}', commands: [cat made] }\n";
    for (name, text, line) in
        [(".gitlab-ci.yml", gitlab, "test | got seven of test"), (".woodpecker.yml", woodpecker, "(2) | one 2")]
    {
        let dir = repository(&[(name, text)]);
        let ran = run(dir.path(), &["convert", name]);
        assert!(ran.out.starts_with("# Converted from") && ran.out.contains("container:"), "{}{}", ran.out, ran.err);
        let ran = run(dir.path(), &["convert", name, "--repo", ".", "--no-containers"]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        let ran = run(dir.path(), &["run", "--local", "--event", "push"]);
        assert_eq!(ran.code, 0, "{name}: {}{}", ran.out, ran.err);
        assert!(ran.out.contains(line), "{name}: {}", ran.out);
    }
}

/// A copy of an example: some of them write files.
fn example(name: &str) -> tempfile::TempDir {
    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().flatten() {
            let target = to.join(entry.file_name());
            match entry.file_type().unwrap().is_dir() {
                true => copy(&entry.path(), &target),
                false => drop(std::fs::copy(entry.path(), target).unwrap()),
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name), dir.path());
    dir
}

#[test]
fn the_examples_run() {
    for (name, event, line) in [
        ("ci", "manual", "cargo test --features full against pg16"),
        ("deploy", "manual", "terraform plan for staging"),
        ("org-policy", "manual", "scanner --json ()"),
        ("hello", "push", "hello"),
    ] {
        let dir = example(name);
        let ran = run(dir.path(), &["run", "--local", "--event", event]);
        assert_eq!(ran.code, 0, "{name}: {}{}", ran.out, ran.err);
        assert!(ran.out.contains(line), "{name}: {}", ran.out);
    }
    // Its hosts are known to an orchestrator only.
    let dir = example("fleet");
    let fleet = run(dir.path(), &["run", "--local", "--event", "manual"]);
    assert!(fleet.out.contains("event `fleet-patched` goes nowhere"), "{}{}", fleet.out, fleet.err);
    assert!(fleet.out.contains("check-2 | check part 2 of 2"), "{}{}", fleet.out, fleet.err);
}

/// What a job starts are the workflows beside it; their jobs are shown below their workflow.
#[test]
fn a_local_run_runs_the_workflows_that_it_starts() {
    let caller = "name: caller\non: { manual: {} }\njobs: { call: { invoke: { event: go, payload: { who: you } } } }\n";
    let called = "name: called\non: { event: { name: go } }\njobs: { greet: { runs_on: x, env: { WHO: '${{ event.payload.who }}' }, run: 'echo hello $WHO; exit ${CODE:-0}' } }\n";
    let dir = repository(&[(".kici/workflows/caller.yaml", caller), (".kici/workflows/called.yaml", called)]);
    let ran = run(dir.path(), &["run", "--local", "caller", "--event", "manual"]);
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("called/greet | hello you"), "{}", ran.out);
    let fails = called.replace("${CODE:-0}", "1");
    std::fs::write(dir.path().join(".kici/workflows/called.yaml"), fails).unwrap();
    let ran = run(dir.path(), &["run", "--local", "caller", "--event", "manual"]);
    assert_eq!(ran.code, 1, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("of `called` ended as failed"), "{}", ran.out);
}

#[test]
fn bytes_that_are_not_text_are_named_by_line() {
    let dir = repository(&[]);
    std::fs::write(dir.path().join(".kici/workflows/ci.yaml"), b"name: ci\non: push # \xff\n").unwrap();
    let ran = run(dir.path(), &["validate", "."]);
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(ran.err.contains("ci.yaml:2: not UTF-8"), "{}", ran.err);
}

#[test]
fn an_input_that_is_given_twice_is_refused() {
    let dir = repository(&[(".kici/workflows/ci.yaml", CI), ("version", "7\n")]);
    let ran = run(dir.path(), &["run", "--local", "ci", "--input", "level=3", "--input", "level=4"]);
    assert_eq!(ran.code, 64, "{}", ran.err);
    assert!(ran.err.contains("--input level=… is given twice"), "{}", ran.err);
}
