//! What an agent with a sandbox or a user for its steps keeps them from, and what it says of its host.

#[path = "../../../crates/runner/tests/fake/mod.rs"]
mod fake;
mod harness;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use fake::{Fake, job, offer, script, token};
use kici_protocol::agent::{JobCancel, orchestrator_frame::Frame as Down};
use kici_sys::process::{ProcessId, descendants};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct Site {
    dir: PathBuf,
    agent: harness::Killed,
    fake: Fake,
}

impl Site {
    /// Below the target directory: temporary directories are open to steps.
    async fn start(name: &str, settings: &[(&str, &str)]) -> Self {
        Self::start_below(Path::new(env!("CARGO_TARGET_TMPDIR")), name, settings).await
    }

    async fn start_below(base: &Path, name: &str, settings: &[(&str, &str)]) -> Self {
        let dir = base.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("made");
        std::fs::write(dir.join("token"), token()).expect("written");
        std::fs::set_permissions(dir.join("token"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("set");
        let fake = Fake::start();
        let mut command = harness::command(&dir.join("state"));
        command
            .env("KICI_ORCHESTRATOR_URL", fake.url())
            .env("KICI_AGENT_TOKEN_FILE", dir.join("token"))
            .envs(settings.iter().copied());
        let agent = harness::Killed(command.spawn().expect("started"));
        fake.registered().await;
        Self { dir, agent, fake }
    }

    /// Runs scripts as the steps of a job; what they said.
    async fn run(&self, scripts: &[&str]) -> String {
        let fill = |text: &str| {
            text.replace("{agent}", &self.agent.0.id().to_string()).replace("{dir}", &self.dir.display().to_string())
        };
        let job = job(2, 1);
        let steps = scripts.iter().map(|text| script(&fill(text))).collect();
        self.fake.send(Down::JobOffer(offer(&job, steps))).await;
        let result = self.fake.result(&job).await;
        let mut text = format!("{} {}\n", result.state, result.message);
        for step in 0..scripts.len() {
            text += &self.fake.sealed(&job, &format!("step-{step}-0")).await.join("\n");
            text.push('\n');
        }
        text
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.agent.kill();
        // What a failed test leaves is looked at before the next build.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_17_a_sandboxed_step_sees_its_workspace_and_nothing_of_the_host() {
    let site = Site::start("sandbox", &[("KICI_SANDBOX", "true")]).await;
    let first = "pwd; echo x > file; echo out=put >> $KICI_OUTPUT; echo HELLO=there >> $KICI_ENV
        ls /proc/{agent} || echo no agent
        ls {dir}/token || echo no token
        echo x > /usr/kici-test || echo usr is read-only
        grep -c : /proc/net/dev
        mount -t tmpfs none /mnt 2>&1 || echo no mount
        env; echo tmp=$TMPDIR; touch $TMPDIR/a $HOME/b && echo home works";
    let text = site.run(&[first, "cat file; echo hello=$HELLO"]).await;
    let words = [
        "success",
        "/workspace\n",
        "no agent",
        "no token",
        "usr is read-only",
        "\n1\n",
        "no mount",
        "tmp=/tmp",
        "home works",
    ];
    says(&text, &words);
    says(&text, &["\nx\n", "hello=there"]);
    assert!(!text.contains("KICI_AGENT") && !text.contains("KICI_ORCHESTRATOR"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandboxed_step_gets_term_and_its_grace_when_it_is_cancelled() {
    let site = Site::start("grace", &[("KICI_SANDBOX", "true")]).await;
    let job = job(2, 1);
    let text = "trap 'echo cleaned up; exit 1' TERM; echo up; while :; do sleep 0.05; done";
    site.fake.send(Down::JobOffer(offer(&job, vec![script(text)]))).await;
    site.fake.logged(&job, "step-0-0", " o up").await;
    let reason = "cancelled_by_user".to_owned();
    let cancel = JobCancel { job: Some(job.clone()), reason, force: false, grace_ms: 20_000 };
    site.fake.send(Down::JobCancel(cancel)).await;
    assert_eq!(site.fake.result(&job).await.state, "cancelled");
    says(&site.fake.sealed(&job, "step-0-0").await.join("\n"), &["cleaned up"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_of_another_user_own_their_workspace_and_cannot_read_the_agents_files() {
    let directory = tempfile::tempdir().expect("a directory");
    if kici_sys::host::uid() != 0 {
        let mut command = harness::command(directory.path());
        let output = command.env("KICI_ORCHESTRATOR_URL", "http://127.0.0.1:1").env("KICI_SANDBOX_USER", "nobody");
        let output = output.args(["config", "check"]).output().expect("runs");
        assert_eq!(output.status.code(), Some(78));
        return says(&String::from_utf8_lossy(&output.stderr), &["needs an agent that runs as root"]);
    }
    // A target directory may be below one that is closed to others; a file's own mode is what counts here.
    let site = Site::start_below(Path::new("/tmp"), "kici-user", &[("KICI_SANDBOX_USER", "nobody")]).await;
    let first = "id -un; echo user=$USER; echo x > file && mkdir dir && echo workspace works
        echo out=put >> $KICI_OUTPUT; echo HELLO=there >> $KICI_ENV; echo '# text' >> $KICI_SUMMARY
        cat {dir}/token || echo no token; ls {dir}/state || echo no listing; cat {dir}/state/jobs.journal || echo no journal
        kill -9 {agent} || echo no kill; cat /proc/{agent}/environ || echo no environment";
    let text = site.run(&[first, "cat file; echo hello=$HELLO; touch dir/later && echo still works"]).await;
    says(&text, &["success", "nobody\n", "user=nobody", "workspace works", "no token", "no listing", "no journal"]);
    says(&text, &["no kill", "no environment", "hello=there", "still works"]);
}

#[test]
fn an_agent_whose_workspaces_its_user_cannot_reach_does_not_start() {
    if kici_sys::host::uid() != 0 {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("set");
    let mut command = harness::command(&directory.path().join("state"));
    command.env("KICI_ORCHESTRATOR_URL", "http://127.0.0.1:1").env("KICI_AGENT_TOKEN", token());
    let output = command.env("KICI_SANDBOX_USER", "nobody").output().expect("runs");
    let words = [
        format!("nobody cannot enter {}", directory.path().display()),
        format!("chmod o+x {}", directory.path().display()),
    ];
    assert!(!output.status.success());
    says(&String::from_utf8_lossy(&output.stderr), &words.each_ref().map(String::as_str));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_ends_its_keeper_leaves_nothing_behind() {
    // Hardened steps cannot.
    let site = Site::start("keeper", &[("KICI_HARDENING", "off")]).await;
    let job = job(2, 1);
    let text = "setsid sleep 600 > /dev/null 2>&1 & echo $! > {dir}/pid; (setsid sleep 600 &) > /dev/null 2>&1; kill -9 $PPID; sleep 600";
    let text = text.replace("{dir}", &site.dir.display().to_string());
    site.fake.send(Down::JobOffer(offer(&job, vec![script(&text)]))).await;
    let result = site.fake.result(&job).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "step_failed"));
    let pid = std::fs::read_to_string(site.dir.join("pid")).expect("written").trim().parse().expect("a number");
    let gone = async {
        while ProcessId::of(pid).is_some_and(|id| id.is_alive()) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        let agent = ProcessId::of(i32::try_from(site.agent.0.id()).expect("a pid")).expect("the agent lives");
        while !descendants(agent).is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(fake::LIMIT, gone).await.expect("nothing is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_of_jobs_are_served_under_the_names_of_the_catalogue() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let site = Site::start("metrics", &[("KICI_PORT", &port.to_string())]).await;
    says(&site.run(&["echo one; sleep 60 > /dev/null 2>&1 &"]).await, &["success"]);
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.expect("asked");
    let mut page = String::new();
    stream.read_to_string(&mut page).await.expect("answered");
    let (_, body) = page.split_once("\r\n\r\n").expect("a body");
    says(
        body,
        &["kici_agent_jobs_total{status=\"success\"} 1", "kici_agent_orphans_killed_total 1", "kici_agent_connected 1"],
    );
    says(body, &["kici_agent_step_duration_seconds_count 1", "kici_agent_steps_total{status=\"success\"} 1"]);
    assert_eq!(kici_engine::metrics::undeclared(body), Default::default());
}

#[test]
fn without_bwrap_a_sandbox_is_refused_with_the_way_to_get_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = harness::command(directory.path());
    command
        .env("PATH", directory.path())
        .env("KICI_SANDBOX", "true")
        .env("KICI_ORCHESTRATOR_URL", "http://127.0.0.1:1");
    let output = command.output().expect("runs");
    assert_eq!(output.status.code(), Some(78));
    says(&String::from_utf8_lossy(&output.stderr), &["KICI_SANDBOX: needs bwrap", "apt-get install bubblewrap"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_tells_what_is_in_force_and_fails_without_an_orchestrator() {
    let directory = tempfile::tempdir().expect("a directory");
    let run = |args: &[&str]| {
        let mut command = harness::command(directory.path());
        command.env("KICI_ORCHESTRATOR_URL", "http://127.0.0.1:1").stdout(Stdio::piped());
        command.args(args).output().expect("runs")
    };
    let output = run(&["doctor", "--output", "json"]);
    assert_eq!(output.status.code(), Some(1), "nobody answers");
    let page: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let state = |check: &str| {
        let found = page["checks"].as_array().expect("a list").iter().find(|found| found["check"] == check);
        found.unwrap_or_else(|| panic!("{check} is not in {page}"))["state"].clone()
    };
    for check in ["kernel", "git", "process trees", "files (Landlock)", "system calls (seccomp)"] {
        assert_eq!(state(check), "ok", "{check}");
    }
    assert_eq!((state("orchestrator"), state("sandbox (bwrap)")), ("broken".into(), "off".into()));
    let table = String::from_utf8(run(&["doctor"]).stdout).expect("text");
    says(&table, &["orchestrator", "BROKEN", "-> see orchestrator_url"]);
}
