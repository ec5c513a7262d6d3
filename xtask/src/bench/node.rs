//! An orchestrator under measurement, with a repository whose branches each start one kind of work.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::Instant;

use super::postgres::Postgres;
use crate::dev::children::{Program, kici};
use crate::dev::repo::{Push, Repo, ZERO};
use crate::dev::server::Server;

/// What a push to a branch starts.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    /// Nothing: no trigger matches.
    Nothing,
    /// One job for a simulated agent.
    One,
    /// [`Work::MANY_JOBS`] jobs for simulated agents.
    Many,
    /// A step on the real agent that says when it began; no checkout.
    FirstInstruction,
    /// A checkout and a step that does nothing, on the real agent.
    Trivial,
    /// A step that does nothing, on the real agent; no checkout.
    Plain,
    /// A step that does nothing, in a container of the real agent; no checkout.
    Contained,
    /// A step that goes on until it is told to end, with a child in a session of its own.
    Hang,
    /// The same, but both ignore being told.
    Stubborn,
    /// A step that writes 1 GiB.
    Flood,
    /// A step that writes 16 MiB.
    Trickle,
}

impl Work {
    pub(crate) const MANY_JOBS: usize = 10;

    fn branch(self) -> &'static str {
        match self {
            Work::Nothing => "nothing",
            Work::One => "one",
            Work::Many => "many",
            Work::FirstInstruction => "first",
            Work::Trivial => "trivial",
            Work::Plain => "plain",
            Work::Contained => "contained",
            Work::Hang => "hang",
            Work::Stubborn => "stubborn",
            Work::Flood => "flood",
            Work::Trickle => "trickle",
        }
    }
}

/// One file per kind of work; `N` is its branch.
const WORKFLOWS: [(&str, &str); 10] = [
    ("one", "runs_on: simulated\n    checkout: false\n    run: 'true'"),
    (
        "many",
        "runs_on: simulated\n    checkout: false\n    matrix: { n: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] }\n    run: 'true'",
    ),
    (
        "first",
        "runs_on: real\n    checkout: false\n    outputs: { at: '${{ steps.at.outputs.at }}' }\n    steps:\n      - { id: at, shell: bash, run: 'echo \"at=$EPOCHREALTIME\" >> \"$KICI_OUTPUT\"' }",
    ),
    ("trivial", "runs_on: real\n    run: 'true'"),
    ("plain", "runs_on: real\n    checkout: false\n    run: 'true'"),
    (
        "contained",
        "runs_on: real\n    checkout: false\n    container: { image: 'kici-bench/busybox:1', pull: never }\n    run: 'true'",
    ),
    ("hang", "runs_on: real\n    checkout: false\n    run: 'setsid sleep 600 & exec sleep 600'"),
    (
        "stubborn",
        "runs_on: real\n    checkout: false\n    grace_period: 1s\n    run: \"trap '' TERM; setsid sleep 600 & while :; do sleep 600; done\"",
    ),
    ("flood", FLOOD),
    ("trickle", TRICKLE),
];

/// The image of [`Work::Contained`].
pub(super) const IMAGE: &str = "kici-bench/busybox:1";

/// Lines of 64 bytes.
const FLOOD: &str = "runs_on: real\n    checkout: false\n    run: seq -f the-quick-brown-fox-jumps-over-the-lazy-dog-and-so-on%010.0f 16777216";
const TRICKLE: &str = "runs_on: real\n    checkout: false\n    run: seq -f the-quick-brown-fox-jumps-over-the-lazy-dog-and-so-on%010.0f 262144";

pub(crate) struct Node {
    binaries: PathBuf,
    directory: tempfile::TempDir,
    postgres: Option<Postgres>,
    address: SocketAddr,
    orchestrator: Option<Program>,
    repo: Repo,
    sha: String,
    source: String,
    pub(crate) server: Server,
}

impl Node {
    /// Starts an orchestrator on `postgres`, or on SQLite.
    pub(crate) async fn start(binaries: &Path, postgres: Option<Postgres>) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("kici-bench").tempdir()?;
        let template = directory.path().join("template");
        let workflows = template.join(".kici/workflows");
        std::fs::create_dir_all(&workflows)?;
        for (branch, job) in WORKFLOWS {
            let text =
                format!("name: {branch}\non: {{ push: {{ branches: [{branch}] }} }}\njobs:\n  work:\n    {job}\n");
            std::fs::write(workflows.join(format!("{branch}.yaml")), text)?;
        }
        let repo = Repo::create(&template, &directory.path().join("repo"))?;
        let data = directory.path().join("data");
        std::fs::create_dir(&data)?;
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let orchestrator = launch(binaries, &data, &repo, postgres.as_ref(), address)?;
        let server = Server::connect(address, &data).await?;
        let source = server.source_of(&repo).await?;
        let sha = repo.head()?.0.after;
        let (binaries, orchestrator) = (binaries.to_owned(), Some(orchestrator));
        Ok(Self { binaries, directory, postgres, address, orchestrator, repo, sha, source, server })
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// A token for agents.
    pub(crate) async fn agent_token(&self) -> Result<String> {
        self.server.agent_token(&self.data().join("agent-token")).await
    }

    /// Starts a real agent.
    pub(crate) async fn agent(&self) -> Result<Program> {
        self.agent_with(&[]).await
    }

    /// Starts a real agent with these settings besides.
    pub(crate) async fn agent_with(&self, settings: &[(&'static str, String)]) -> Result<Program> {
        let state = self.directory.path().join("agent");
        std::fs::create_dir_all(&state)?;
        let mut variables = vec![
            ("KICI_ORCHESTRATOR_URL", self.server.url()),
            ("KICI_AGENT_TOKEN", self.agent_token().await?),
            ("KICI_AGENT_ID", "real".to_owned()),
            ("KICI_LABELS", "real".to_owned()),
            ("KICI_STATE_DIR", state.display().to_string()),
            ("KICI_PORT", "0".to_owned()),
        ];
        variables.extend(settings.iter().cloned());
        Program::start("agent", kici(&self.binaries.join("kici-agent"), &variables), self.directory.path())
    }

    /// Sends the push that starts `work`.
    pub(crate) async fn push(&self, work: Work) -> Result<kici_engine::ids::DeliveryRowId> {
        let git_ref = format!("refs/heads/{}", work.branch());
        let push = Push { git_ref, before: ZERO.into(), after: self.sha.clone() };
        self.server.push(&self.source, &push, "main").await
    }

    /// Stops the orchestrator and starts it on the same data. Answers the time from its start until it was ready.
    pub(crate) async fn restart(&mut self) -> Result<Duration> {
        if let Some(program) = self.orchestrator.take() {
            program.stop().await?;
        }
        let start = Instant::now();
        self.orchestrator =
            Some(launch(&self.binaries, &self.data(), &self.repo, self.postgres.as_ref(), self.address)?);
        Server::connect(self.address, &self.data()).await?;
        Ok(start.elapsed())
    }

    /// Resident memory of the orchestrator in MiB.
    pub(crate) fn resident(&self) -> Result<f64> {
        resident(self.orchestrator.as_ref().context("the orchestrator is stopped")?)
    }

    /// Processor time that the orchestrator has used (proc(5), `utime` and `stime`).
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let program = self.orchestrator.as_ref().context("the orchestrator is stopped")?;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", program.pid()))?;
        let (_, fields) = stat.rsplit_once(')').context("no name in stat")?;
        let ticks =
            |at: usize| -> Result<u64> { Ok(fields.split_whitespace().nth(at).context("stat is short")?.parse()?) };
        let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock tick")?;
        Ok(Duration::from_secs_f64((ticks(11)? + ticks(12)?) as f64 / per_second as f64))
    }

    /// Commits of the orchestrator so far.
    pub(crate) async fn commits(&self) -> Result<f64> {
        self.metric("kici_orch_db_write_batch_size_count ").await
    }

    /// Jobs that wait, as of the last count of the orchestrator.
    pub(crate) async fn queued(&self) -> Result<f64> {
        self.metric("kici_orch_dispatch_queue_depth{status=\"pending\"} ").await
    }

    async fn metric(&self, name: &str) -> Result<f64> {
        let page = reqwest::get(format!("{}/metrics", self.server.url())).await?.error_for_status()?.text().await?;
        let line =
            page.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no metric {name}"))?;
        Ok(line.trim().parse()?)
    }

    /// The address of its database, unless that is SQLite.
    pub(crate) fn postgres_url(&self) -> Option<String> {
        self.postgres.as_ref().map(Postgres::url)
    }

    /// What the orchestrator said last, for errors.
    pub(crate) fn said(&self) -> String {
        let said = self.orchestrator.as_ref().map(Program::said).unwrap_or_default();
        format!("the end of the orchestrator's log:\n{said}\n")
    }

    pub(crate) async fn stop(mut self) -> Result<()> {
        if let Some(program) = self.orchestrator.take() {
            program.stop().await?;
        }
        match self.postgres {
            Some(postgres) => postgres.stop().await,
            None => Ok(()),
        }
    }
}

fn launch(
    binaries: &Path,
    data: &Path,
    repo: &Repo,
    postgres: Option<&Postgres>,
    address: SocketAddr,
) -> Result<Program> {
    let mut variables = vec![
        ("KICI_DATA_DIR", data.display().to_string()),
        ("KICI_SERVER_LISTEN", address.to_string()),
        ("KICI_SOURCES_LOCAL_PATHS", repo.path.display().to_string()),
        // The load is sent faster than it is done.
        ("KICI_QUEUE_MAX_DEPTH", "1000000".to_owned()),
        ("KICI_STARTUP_BACKOFF_MS", "0".to_owned()),
    ];
    if let Some(postgres) = postgres {
        variables.push(("KICI_DATABASE_URL", postgres.url()));
    }
    Program::start("orchestrator", kici(&binaries.join("kici-orchestrator"), &variables), data)
}

/// Resident memory of a program in MiB, as the kernel counts it (proc(5), `VmRSS`).
pub(crate) fn resident(program: &Program) -> Result<f64> {
    memory(program, "VmRSS:")
}

/// The most that was resident since its start (`VmHWM`).
pub(crate) fn most_resident(program: &Program) -> Result<f64> {
    memory(program, "VmHWM:")
}

fn memory(program: &Program, field: &'static str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context(field)?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib / 1024.0)
}
