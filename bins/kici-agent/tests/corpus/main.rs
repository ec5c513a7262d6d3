//! Hostile jobs against a whole agent: what each tries, and that it ends as it must. The agent outlives them all, and nothing of
//! them stays.

mod cases;
#[path = "../../../../crates/runner/tests/fake/mod.rs"]
mod fake;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../harness/page.rs"]
mod page;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cases::{CASES, Case, LONG_SECRET, SECRET, Seen};
use fake::{Fake, Frame, job, offer, script, token};
use kici_engine::lock::Step;
use kici_protocol::agent::{JobOffer, JobUpdate, orchestrator_frame::Frame as Down};
use kici_sys::process::{ProcessId, descendants};

/// Jobs at once.
const AT_ONCE: usize = 6;

struct Site {
    dir: PathBuf,
    agent: harness::Killed,
    fake: Fake,
}

impl Site {
    /// Below the target directory: temporary directories are open to steps.
    async fn start() -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("corpus-{}", std::process::id()));
        for name in ["home", "outside", "state/work/other/workspace"] {
            std::fs::create_dir_all(dir.join(name)).expect("made");
        }
        std::fs::write(dir.join("state/work/other/workspace/file"), "of another job").expect("written");
        std::fs::write(dir.join("token"), token()).expect("written");
        let fake = Fake::start();
        let mut command = harness::command(&dir.join("state"));
        command
            .env("KICI_ORCHESTRATOR_URL", fake.url())
            .env("KICI_AGENT_TOKEN_FILE", dir.join("token"))
            .env("KICI_AGENT_MAX_CONCURRENCY", AT_ONCE.to_string())
            .env("HOME", dir.join("home"));
        let agent = harness::Killed(command.spawn().expect("started"));
        fake.registered().await;
        Self { dir, agent, fake }
    }

    fn id(&self) -> ProcessId {
        ProcessId::of(i32::try_from(self.agent.0.id()).expect("a pid")).expect("the agent lives")
    }

    fn offer(&self, number: u128, case: &Case) -> JobOffer {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id().pid)).expect("alive");
        let group = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(2)).expect("a group");
        let path = |name: &str| self.dir.join(name).display().to_string();
        let fill = |text: &str| {
            text.replace("{agent}", &self.id().pid.to_string())
                .replace("{group}", group)
                .replace("{state}", &path("state"))
                .replace("{token}", &path("token"))
                .replace("{outside}", &path("outside"))
        };
        let step = |text: &&str| Step { timeout_ms: case.timeout_ms, ..script(&fill(text)) };
        let mask = vec![SECRET.to_owned(), LONG_SECRET.to_owned()];
        JobOffer { mask, ..offer(&job(number, 1), case.steps.iter().map(step).collect()) }
    }

    /// Whether system calls of steps are filtered, as the doctor says.
    fn filters_calls(&self) -> bool {
        let mut command = harness::command(&self.dir.join("state"));
        command.env("KICI_ORCHESTRATOR_URL", self.fake.url()).env("HOME", self.dir.join("home"));
        let output = command.args(["doctor", "--output", "json"]).stdout(Stdio::piped()).output().expect("runs");
        let page: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let checks = page["checks"].as_array().expect("a list");
        checks.iter().any(|found| found["check"] == "system calls (seccomp)" && found["state"] == "ok")
    }

    /// The next result, of whichever job.
    async fn result(&self) -> JobUpdate {
        let terminal = |frame: &Frame| match frame {
            Frame::JobUpdate(update) if !["running", "cancelling"].contains(&update.state.as_str()) => {
                Some(update.clone())
            }
            Frame::JobReject(reject) => panic!("a job was rejected: {reject:?}"),
            _ => None,
        };
        self.fake.next("a result", terminal).await
    }

    /// All logs of a job, once they are sealed, as they are stored.
    async fn text(&self, number: u128, case: &Case) -> String {
        let mut text = String::new();
        for step in 0..case.steps.len() {
            let name = format!("step-{step}-0");
            // A step that did not run has no log.
            if step == 0 || !self.fake.log(&job(number, 1), &name).bytes.is_empty() {
                self.fake.sealed(&job(number, 1), &name).await;
            }
            text += &String::from_utf8(self.fake.log(&job(number, 1), &name).bytes).expect("UTF-8");
        }
        text
    }

    async fn judge(&self, number: u128, case: &Case, result: &JobUpdate) -> Vec<String> {
        let text = self.text(number, case).await;
        let log = self.fake.log(&job(number, 1), "step-0-0");
        let strays = result.evidence.as_ref().map_or(0, |evidence| evidence.strays_killed);
        let seen = Seen { log: &log, text: &text, strays, outside: &self.dir.join("outside") };
        let end = if result.state == "success" { "success" } else { result.reason.as_str() };
        let mut faults = Vec::new();
        if end != case.ends {
            faults.push(format!("ends as {end} ({}) instead of {}", result.message, case.ends));
        }
        faults.extend(
            case.says.iter().filter(|word| !text.contains(**word)).map(|word| format!("does not say {word:?}")),
        );
        faults.extend(case.never.iter().filter(|word| text.contains(**word)).map(|word| format!("says {word:?}")));
        if !(case.holds)(&seen) {
            faults.push(format!("its last condition does not hold ({strays} strays, {} bytes)", seen.log.bytes.len()));
        }
        let shown: String = text.chars().take(600).collect();
        faults.into_iter().map(|fault| format!("{}: {fault}\n{shown}", case.name)).collect()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.agent.kill();
        // What a failed test leaves is looked at before the next build.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn the_page_of_the_corpus_lists_every_job_with_its_outcome() {
    let words =
        |words: &[&str]| words.iter().map(|word| format!("`{}`", page::cell(word))).collect::<Vec<_>>().join(", ");
    let mut table = "| # | the job | ends | its log says | never |\n|---|---|---|---|---|\n".to_owned();
    for (at, case) in CASES.iter().enumerate() {
        let (end, says, never) = (page::end(case.ends), words(case.says), words(case.never));
        table += &format!("| {} | {} | {end} | {says} | {never} |\n", at + 1, page::cell(case.name));
    }
    page::holds("jobs on a host", &table);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_hostile_job_ends_as_stated_and_leaves_nothing() {
    assert!(CASES.len() >= 40);
    let mut site = Site::start().await;
    let filters = site.filters_calls();
    let (run, left_out): (Vec<_>, Vec<_>) =
        CASES.iter().enumerate().partition(|(_, case)| filters || !case.needs_filter);
    for (_, case) in left_out {
        eprintln!("not run, since this host filters no system calls: {}", case.name);
    }
    let mut waiting = run.into_iter();
    let mut open: BTreeMap<String, (u128, &Case)> = BTreeMap::new();
    let mut faults = Vec::new();
    loop {
        while open.len() < AT_ONCE
            && let Some((at, case)) = waiting.next()
        {
            let number = at as u128 + 10;
            open.insert(job(number, 1).job_id, (number, case));
            site.fake.send(Down::JobOffer(site.offer(number, case))).await;
        }
        if open.is_empty() {
            break;
        }
        let result = site.result().await;
        let id = result.job.as_ref().expect("a job").job_id.clone();
        let (number, case) = open.remove(&id).expect("one of the corpus");
        faults.extend(site.judge(number, case, &result).await);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
    // Nothing is left of any of them: no process, no directory.
    let left = || std::fs::read_dir(site.dir.join("state/work")).expect("there").flatten().count();
    let waited = tokio::time::timeout(fake::LIMIT, async {
        while left() > 1 || !descendants(site.id()).is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "{} directories, {:?}", left(), descendants(site.id()));
    Command::new("kill").arg(site.agent.0.id().to_string()).status().expect("sent");
    let ended = tokio::task::block_in_place(|| site.agent.0.wait()).expect("waited");
    assert_eq!(ended.code(), Some(0), "the agent outlived them all");
}
