//! Jobs in containers and services beside jobs: the agent as a program, a real engine, images that have nothing of ours.

#[path = "../../../../crates/containers/tests/harness/mod.rs"]
mod engine;
#[path = "../../../../crates/runner/tests/fake/mod.rs"]
mod fake;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../harness/page.rs"]
mod page;

mod hostile;
mod lifecycle;
mod services;
mod steps;

use std::path::PathBuf;
use std::time::Duration;

use engine::BUSYBOX;
use fake::{Fake, Frame, LIMIT, job, offer, script, token};
use kici_containers::{Engine, Labels};
use kici_engine::lock::Step;
use kici_protocol::agent::{JobOffer, JobUpdate, RejectReason, orchestrator_frame::Frame as Down};
use kici_protocol::common::JobRef;
use serde_json::{Value as Json, json};

/// An agent with an engine.
struct Site {
    dir: PathBuf,
    agent: harness::Killed,
    fake: Fake,
    engine: Engine,
}

impl Site {
    /// None where there is no engine for tests.
    async fn start(kind: &str, settings: &[(&str, &str)]) -> Option<Self> {
        let engine = engine::engine(kind).await?;
        let dir = tempfile::tempdir().expect("a directory").keep();
        let fake = Fake::start();
        let agent = Self::agent(&dir, &fake, &engine, settings);
        fake.registered().await;
        Some(Self { dir, agent, fake, engine })
    }

    fn agent(dir: &std::path::Path, fake: &Fake, engine: &Engine, settings: &[(&str, &str)]) -> harness::Killed {
        let mut command = harness::command(&dir.join("state"));
        command
            .env("KICI_ORCHESTRATOR_URL", fake.url())
            .env("KICI_AGENT_TOKEN", token())
            .env("KICI_RUNTIME_DIR", dir.join("run"))
            .env("KICI_CONTAINER_SOCKET", engine.socket())
            .envs(settings.iter().copied());
        harness::Killed(command.spawn().expect("started"))
    }

    fn restart(&mut self) {
        self.agent.kill();
        self.agent = Self::agent(&self.dir, &self.fake, &self.engine, &[]);
    }

    /// Everything of this agent on the engine.
    async fn left(&self) -> kici_containers::Left {
        self.engine.labelled(&self.labels()).await.expect("listed")
    }

    /// The labels of everything of this agent.
    fn labels(&self) -> Labels {
        use sha2::Digest as _;
        let state = self.dir.join("state");
        let scope = hex::encode(&sha2::Sha256::digest(state.as_os_str().as_encoded_bytes())[..4]);
        [("kici-agent-scope".to_owned(), scope)].into()
    }

    /// Waits until nothing of this agent is on the engine any more.
    async fn nothing_left(&self) {
        let until = tokio::time::Instant::now() + LIMIT;
        loop {
            let left = self.left().await;
            if left.is_empty() {
                return;
            }
            assert!(tokio::time::Instant::now() < until, "still there: {left:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn send(&self, offer: JobOffer) {
        self.fake.send(Down::JobOffer(offer)).await;
    }

    /// Runs scripts as the steps of a job in the image without anything; its result and what the steps said.
    async fn run(&self, scripts: &[&str], more: Json) -> (JobUpdate, String) {
        let offer = contained(&job(2, 1), scripts.iter().map(|text| script(text)).collect(), more);
        self.run_offer(offer, scripts.len()).await
    }

    async fn run_offer(&self, offer: JobOffer, steps: usize) -> (JobUpdate, String) {
        let job = offer.job.clone().expect("a job");
        self.send(offer).await;
        let result = self.fake.result(&job).await;
        let mut text = String::new();
        for step in 0..steps {
            if !self.fake.log(&job, &format!("step-{step}-0")).bytes.is_empty() {
                text += &self.fake.sealed(&job, &format!("step-{step}-0")).await.join("\n");
                text.push('\n');
            }
        }
        (result, text)
    }

    /// What was said while the containers were made.
    async fn preparation(&self, job: &JobRef) -> String {
        self.fake.sealed(job, "container--1-1").await.join("\n")
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.agent.kill();
        // An engine has addresses for some thirty networks at once.
        let (engine, labels) = (self.engine.clone(), self.labels());
        let removing = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("built");
            runtime.block_on(async { engine.remove(&engine.labelled(&labels).await.unwrap_or_default()).await })
        });
        let _ = removing.join();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// An offer of a job in a container; `more` goes into its specification.
fn contained(job: &JobRef, steps: Vec<Step>, more: Json) -> JobOffer {
    let mut spec = json!({"container": {"image": {"static": BUSYBOX}, "pull": "never"}});
    merge(&mut spec, more);
    with(offer(job, steps), spec)
}

/// An offer with more in its specification.
fn with(offer: JobOffer, more: Json) -> JobOffer {
    let mut spec: Json = serde_json::from_slice(&offer.spec_json).expect("JSON");
    merge(&mut spec, more);
    JobOffer { spec_json: serde_json::to_vec(&spec).expect("JSON").into(), ..offer }
}

fn merge(into: &mut Json, more: Json) {
    match (into, more) {
        (Json::Object(into), Json::Object(more)) => {
            for (name, value) in more {
                merge(into.entry(name).or_insert(Json::Null), value);
            }
        }
        (into, more) => *into = more,
    }
}

fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
}

async fn rejected(fake: &Fake, wanted: &JobRef) -> (RejectReason, String) {
    fake.next("a rejection", |frame| match frame {
        Frame::JobReject(reject) if reject.job.as_ref() == Some(wanted) => {
            Some((reject.reason(), reject.detail.clone()))
        }
        _ => None,
    })
    .await
}
