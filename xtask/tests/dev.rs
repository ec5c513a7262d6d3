//! `cargo xtask dev` as a process: how it ends, and what it leaves.

use std::io::{BufRead, BufReader, Lines};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PASSES: &str = "on: push\njobs:\n  a: { runs_on: default, run: echo first line of $KICI_SHA }\n";

fn dev(data: &Path, args: &[&str]) -> Command {
    let xtask = PathBuf::from(env!("CARGO_BIN_EXE_xtask"));
    let binaries = xtask.parent().expect("a directory");
    for name in ["kici-orchestrator", "kici-agent"] {
        assert!(binaries.join(name).exists(), "{name} is missing; build it with `cargo build --workspace`");
    }
    let mut command = Command::new(&xtask);
    command.arg("dev").args(args).arg("--data").arg(data).arg("--binaries").arg(binaries);
    command.stdin(Stdio::null());
    command
}

fn git(repo: &Path, args: &[&str]) -> String {
    let mut command = Command::new("git");
    command.arg("-C").arg(repo).args(["-c", "user.name=t", "-c", "user.email=t@example.com"]).args(args);
    let output = command.output().expect("git runs");
    assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
}

/// A repository with one workflow file.
fn repo(below: &Path, workflow: &str) -> PathBuf {
    let repo = below.join("repo");
    std::fs::create_dir_all(repo.join(".kici/workflows")).expect("made");
    std::fs::write(repo.join(".kici/workflows/ci.yaml"), workflow).expect("written");
    git(&repo, &["init", "-q", "-b", "main"]);
    git(&repo, &["add", "."]);
    git(&repo, &["commit", "-q", "-m", "first"]);
    repo
}

fn once(workflow: Option<&str>) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let repo = workflow.map(|workflow| repo(dir.path(), workflow).display().to_string());
    let mut args = vec!["--once"];
    args.extend(repo.iter().flat_map(|repo| ["--repo", repo]));
    let Output { status, stdout, stderr } = dev(&dir.path().join("data"), &args).output().expect("xtask runs");
    (status.code(), format!("{}\n{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
}

#[test]
fn the_sample_runs_once_and_succeeds() {
    let (code, text) = once(None);
    assert_eq!(code, Some(0), "{text}");
    says(&text, &["server     http://127.0.0.1:", "greet", "report", "success"]);
}

#[test]
fn a_failed_run_ends_with_1_and_shows_the_step() {
    let (code, text) = once(Some("on: push\njobs:\n  a: { runs_on: default, run: 'echo about to fail; exit 3' }\n"));
    assert_eq!(code, Some(1), "{text}");
    says(&text, &["about to fail", "failed"]);
}

#[test]
fn nothing_that_matches_ends_with_2_and_the_reason() {
    let workflow = "on: { push: { branches: [release] } }\njobs:\n  a: { runs_on: default, run: 'true' }\n";
    let (code, text) = once(Some(workflow));
    assert_eq!(code, Some(2), "{text}");
    says(&text, &["nothing ran", "branches", "release"]);
    let (code, text) = once(Some("on: push\njobs:\n  a: { runs-on: default, run: 'true' }\n"));
    assert_eq!(code, Some(2), "{text}");
    says(&text, &["error[K0102]: unknown key `runs-on` in job `a`", "did you mean `runs_on`?"]);
}

struct Session {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    seen: String,
}

impl Session {
    fn start(data: &Path, repo: &Path) -> Self {
        let mut command = dev(data, &["--repo", &repo.display().to_string()]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("xtask runs");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, lines, seen: String::new() }
    }

    /// Reads up to a line with `text`; the line.
    fn until(&mut self, text: &str) -> String {
        for line in self.lines.by_ref() {
            let line = line.expect("UTF-8");
            self.seen += &line;
            self.seen.push('\n');
            if line.contains(text) {
                return line;
            }
        }
        panic!("{text:?} did not come: {}", self.seen);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        kill(pid, signal).expect("it lives");
    }

    fn code(mut self) -> Option<i32> {
        self.lines.by_ref().for_each(drop);
        self.child.wait().expect("it ends").code()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A failed test leaves nothing behind: on TERM it ends its programs too.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::SIGTERM);
            let _ = self.child.wait();
        }
    }
}

#[test]
fn each_commit_runs_and_an_interrupt_leaves_neither_hook_nor_process() {
    let dir = tempfile::tempdir().expect("a directory");
    let repo = repo(dir.path(), PASSES);
    let mut session = Session::start(&dir.path().join("data"), &repo);
    let server = session.until("server     http://");
    session.until(&format!("first line of {}", git(&repo, &["rev-parse", "HEAD"])));
    session.until("Ctrl-C stops");
    let hook = repo.join(".git/hooks/post-commit");
    assert!(std::fs::read_to_string(&hook).expect("a hook").contains("kici dev"));
    git(&repo, &["commit", "-q", "--allow-empty", "-m", "second"]);
    session.until(&format!("first line of {}", git(&repo, &["rev-parse", "HEAD"])));
    session.until("success");
    session.signal(Signal::SIGINT);
    assert_eq!(session.code(), Some(130));
    assert!(!hook.exists(), "the hook is removed");
    let address = server.split("http://").nth(1).and_then(|rest| rest.split_whitespace().next()).expect("an address");
    assert!(TcpStream::connect(address).is_err(), "the orchestrator has ended");
}

#[test]
fn an_interrupt_in_the_middle_of_a_job_ends_what_it_started() {
    let dir = tempfile::tempdir().expect("a directory");
    let pid = dir.path().join("pid");
    let run = format!("echo $$ > {}; echo it has begun; sleep 600", pid.display());
    let repo = repo(dir.path(), &format!("on: push\njobs:\n  a: {{ runs_on: default, run: '{run}' }}\n"));
    let mut session = Session::start(&dir.path().join("data"), &repo);
    session.until("it has begun");
    session.signal(Signal::SIGINT);
    assert_eq!(session.code(), Some(130));
    let pid = std::fs::read_to_string(&pid).expect("written").trim().parse().expect("a number");
    assert!(kill(Pid::from_raw(pid), None).is_err(), "the step has ended");
}

#[test]
fn a_commit_that_comes_while_a_job_runs_is_run_after_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let go = dir.path().join("go");
    let run = format!("echo first line of $KICI_SHA; until [ -e {} ]; do sleep 0.05; done", go.display());
    let repo = repo(dir.path(), &format!("on: push\njobs:\n  a: {{ runs_on: default, run: '{run}' }}\n"));
    let mut session = Session::start(&dir.path().join("data"), &repo);
    session.until("first line of");
    git(&repo, &["commit", "-q", "--allow-empty", "-m", "second"]);
    std::fs::write(&go, "").expect("written");
    session.until(&format!("first line of {}", git(&repo, &["rev-parse", "HEAD"])));
    session.until("success");
}

#[test]
fn a_push_to_a_bare_repository_runs_and_once_leaves_no_hook() {
    let dir = tempfile::tempdir().expect("a directory");
    let work = repo(dir.path(), PASSES);
    let bare = dir.path().join("bare.git");
    git(&work, &["clone", "-q", "--bare", ".", &bare.display().to_string()]);
    let hook = bare.join("hooks/post-receive");
    let data = dir.path().join("data");
    let done = dev(&data, &["--once", "--repo", &bare.display().to_string()]).output().expect("xtask runs");
    assert!(done.status.success() && !hook.exists(), "{}", String::from_utf8_lossy(&done.stdout));
    let mut session = Session::start(&data, &bare);
    session.until("Ctrl-C stops");
    git(&work, &["commit", "-q", "--allow-empty", "-m", "second"]);
    git(&work, &["push", "-q", &bare.display().to_string(), "main"]);
    session.until(&format!("first line of {}", git(&work, &["rev-parse", "HEAD"])));
    session.until("success");
}
