//! A whole installation of real processes on loopback: an orchestrator, agents, repositories on disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use diesel::Connection as _;
use diesel::connection::SimpleConnection as _;
use kici_api::client::{Client, ClientConfig};
use kici_api::dto::events::DeliveryView;
use kici_api::dto::logs::{FollowEvent, FollowRequest};
use kici_api::dto::runs::{RunDetail, RunFilter};
use kici_api::dto::sources::{AddSource, SourceKind};
use kici_api::dto::tokens::CreateAgentToken;
use kici_api::page::PageQuery;
use kici_engine::ids::RunId;
use kici_engine::state::JobStatus;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tempfile::TempDir;

use crate::surroundings::{Repository, Tmpfs};

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that is killed when the test ends.
pub struct Process(Child);

impl Process {
    /// The most memory that it has had resident so far, in MiB.
    pub fn peak_mib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }

    pub fn signal(&self, signal: Signal) {
        // The process is a child that was not waited for, so its pid is still its own.
        let _ = kill(Pid::from_raw(self.0.id() as i32), signal);
    }

    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        let _ = self.0.wait();
    }

    pub async fn exit_code(&mut self) -> Option<i32> {
        until("the process to exit", async || self.0.try_wait().unwrap()).await.code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

/// Asks again and again until there is an answer; the processes under test have no other way to tell.
pub async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asked = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

/// Sends a request until it is answered: a server that refuses a body before it has read all of it may end the connection
/// under a sender that still writes.
pub async fn answered(request: reqwest::RequestBuilder) -> reqwest::Response {
    until("an answer", async || request.try_clone().expect("the body is at hand").send().await.ok()).await
}

/// One installation. Its parts go in this order: a process before the mount it writes to, a mount before its directory.
pub struct Stack {
    pub orchestrator: Option<Process>,
    pub mounts: Vec<Tmpfs>,
    pub dir: TempDir,
    pub database: Option<String>,
    pub address: String,
    /// The owner's; of another installation on the same database where that was first.
    pub token: String,
    pub client: Client,
    pub http: reqwest::Client,
    /// Further variables of the orchestrator.
    pub variables: Vec<(&'static str, &'static str)>,
}

/// A program that was built beside this one.
pub fn binary(name: &str) -> PathBuf {
    let ours = PathBuf::from(env!("CARGO_BIN_EXE_kici-orchestrator"));
    let path = ours.with_file_name(name);
    assert!(path.exists(), "{} is missing; build it with `cargo build --workspace`", path.display());
    path
}

/// A command without any of this process' settings.
pub fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin").stdin(Stdio::null());
    command
}

fn connect(address: &str, token: Option<&str>) -> Client {
    Client::new(ClientConfig {
        url: format!("http://{address}").parse().unwrap(),
        token: token.map(|token| token.to_owned().into()),
        timeout: PATIENCE,
        ca_pem: None,
        user_agent: "test/0".to_owned(),
    })
    .unwrap()
}

fn log_file(path: &Path) -> Stdio {
    fs::File::options().create(true).append(true).open(path).unwrap().into()
}

impl Stack {
    /// Starts an orchestrator on a database of its own: SQLite, or the given one.
    pub async fn start(database: Option<String>) -> Self {
        let mut stack = Self::unstarted(database);
        stack.start_orchestrator("127.0.0.1:0").await;
        stack
    }

    /// The directories of an installation.
    pub fn unstarted(database: Option<String>) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("repos")).unwrap();
        let http = reqwest::Client::new();
        let client = connect("127.0.0.1:1", None);
        Self {
            orchestrator: None,
            mounts: Vec::new(),
            dir,
            database,
            address: String::new(),
            token: String::new(),
            client,
            http,
            variables: Vec::new(),
        }
    }

    /// Puts a small file system at `name`; false where this process may not mount, which only people without root put up with.
    pub fn mount(&mut self, name: &str, mib: u32) -> bool {
        let mount = Tmpfs::mount(&self.dir.path().join(name), mib);
        let mounted = mount.is_some();
        assert!(mounted || kici_sys::host::uid() != 0, "root may not mount a tmpfs here");
        self.mounts.extend(mount);
        mounted
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Starts the orchestrator and waits until it is ready.
    pub async fn start_orchestrator(&mut self, listen: &str) {
        let _ = fs::remove_file(self.data().join("address"));
        self.orchestrator = Some(self.spawn_orchestrator(listen));
        let file = self.data().join("address");
        self.address = until("the orchestrator's address", async || fs::read_to_string(&file).ok()).await;
        if let Ok(token) = fs::read_to_string(self.data().join("bootstrap-token")) {
            self.token = token.trim().to_owned();
        }
        self.client = connect(&self.address, Some(&self.token));
        until("readiness", async || self.client.ready().await.ok().filter(|ready| ready.ready)).await;
    }

    pub fn spawn_orchestrator(&self, listen: &str) -> Process {
        let mut command = clean(Path::new(env!("CARGO_BIN_EXE_kici-orchestrator")));
        command
            .env("KICI_DATA_DIR", self.data())
            .env("KICI_SERVER_LISTEN", listen)
            .env("KICI_SOURCES_LOCAL_PATHS", self.dir.path().join("repos"))
            .env("KICI_STARTUP_BACKOFF_MS", "0")
            .envs(self.variables.iter().copied())
            .stdout(log_file(&self.dir.path().join("orchestrator.log")))
            .stderr(log_file(&self.dir.path().join("orchestrator.log")));
        if let Some(url) = &self.database {
            command.env("KICI_DATABASE_URL", url);
        }
        Process(command.spawn().unwrap())
    }

    /// A client with another token.
    pub fn client_with(&self, token: &str) -> Client {
        connect(&self.address, Some(token))
    }

    /// What both programs have logged so far, for the message of a failing assertion.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        for entry in fs::read_dir(self.dir.path()).unwrap().flatten() {
            if entry.path().extension().is_some_and(|ending| ending == "log") {
                text += &format!("== {}\n{}", entry.path().display(), fs::read_to_string(entry.path()).unwrap());
            }
        }
        text
    }

    pub async fn agent_token(&self) -> kici_api::dto::tokens::TokenCreated {
        self.client.create_agent_token(&CreateAgentToken::default()).await.unwrap()
    }

    /// Starts an agent and waits until it is connected.
    pub async fn start_agent(&self, name: &str, token: &str, more: &[(&str, &str)]) -> Process {
        let process = self.spawn_agent(name, token, more);
        until("the agent to connect", async || {
            let agents = self.client.agents(&Default::default()).await.ok()?;
            agents.items.iter().any(|agent| agent.id.as_str() == name && agent.connected_at.is_some()).then_some(())
        })
        .await;
        process
    }

    pub fn spawn_agent(&self, name: &str, token: &str, more: &[(&str, &str)]) -> Process {
        let own = [("KICI_AGENT_ID", name), ("KICI_AGENT_TOKEN", token), ("KICI_LABELS", "default")];
        self.spawn_claiming(name, &[&own[..], more].concat())
    }

    /// Starts an agent that nobody told who it is.
    pub fn spawn_claiming(&self, directory: &str, settings: &[(&str, &str)]) -> Process {
        let mut command = clean(&binary("kici-agent"));
        let log = self.dir.path().join(format!("{directory}.log"));
        command
            .env("KICI_ORCHESTRATOR_URL", format!("http://{}", self.address))
            .env("KICI_STATE_DIR", self.dir.path().join(directory))
            .env("KICI_PORT", "0")
            .envs(settings.iter().copied())
            .stdout(log_file(&log))
            .stderr(log_file(&log));
        Process(command.spawn().unwrap())
    }

    /// Runs a statement on the SQLite file beside the orchestrator.
    pub fn sqlite(&self, statement: &str) {
        let file = self.data().join("db/kici.sqlite3");
        let mut conn = diesel::SqliteConnection::establish(file.to_str().unwrap()).unwrap();
        conn.batch_execute(&format!("PRAGMA busy_timeout = 5000; {statement}")).unwrap();
    }

    /// A repository with these files, committed on `main`, as a source of the same name.
    pub async fn repository(&self, name: &str, files: &[(&str, &str)]) -> Repository {
        Repository::create(&self.dir.path().join("repos").join(name), files);
        self.known_repository(name).await
    }

    /// A repository that is there already, as a source of the same name.
    pub async fn known_repository(&self, name: &str) -> Repository {
        let repository = Repository { path: self.dir.path().join("repos").join(name) };
        self.client
            .add_source(&AddSource {
                name: name.to_owned(),
                kind: SourceKind::Local,
                config: json!({"path": repository.path}),
                secrets: Default::default(),
            })
            .await
            .unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
        repository
    }

    /// Posts a push of `main`.
    pub async fn post_push(&self, repository: &Repository, source: &str) -> reqwest::Response {
        let body = json!({"ref": "refs/heads/main", "before": "0".repeat(40), "after": repository.head()});
        let url = format!("http://{}/webhooks/default/{source}", self.address);
        self.http.post(url).json(&body).send().await.unwrap()
    }

    /// Sends a push of `main` and waits until it is settled.
    pub async fn deliver(&self, repository: &Repository, source: &str) -> DeliveryView {
        let sent = self.post_push(repository, source).await;
        assert_eq!(sent.status(), 202);
        let answer: serde_json::Value = sent.json().await.unwrap();
        let id = answer["delivery_id"].as_str().unwrap().parse().unwrap();
        until("the delivery to be processed", async || {
            let delivery = self.client.delivery(id).await.ok()?;
            (delivery.status != "received").then_some(delivery)
        })
        .await
    }

    /// Sends a push of `main` and waits for the runs that it makes.
    pub async fn push(&self, repository: &Repository, source: &str) -> Vec<RunId> {
        let id = self.deliver(repository, source).await.id;
        let filter = RunFilter { delivery: Some(id), ..RunFilter::default() };
        let runs = self.client.runs(&filter, &PageQuery::default()).await.unwrap();
        runs.items.iter().map(|run| run.id).collect()
    }

    /// The one run of a push.
    pub async fn push_one(&self, repository: &Repository, source: &str) -> RunId {
        let runs = self.push(repository, source).await;
        assert_eq!(runs.len(), 1, "{}", self.logs());
        runs[0]
    }

    /// Waits until a job has this status.
    pub async fn job_is(&self, run: RunId, status: JobStatus) {
        until(&format!("a job that is {status:?}"), async || {
            let detail = self.client.run(run).await.ok()?;
            detail.jobs.iter().any(|job| job.status == status).then_some(())
        })
        .await;
    }

    /// Waits until a step has said something.
    pub async fn speaks(&self, run: RunId) {
        let mut follow = self.client.follow(run, FollowRequest { follow: true, ..FollowRequest::default() });
        while let Some(event) = follow.next().await {
            if matches!(event.unwrap(), FollowEvent::Lines { step, .. } if step.starts_with("step-")) {
                return;
            }
        }
        panic!("the run ended in silence\n{}", self.logs());
    }

    /// Waits until a run has ended.
    pub async fn ended(&self, run: RunId) -> RunDetail {
        until("the run to end", async || {
            let detail = self.client.run(run).await.ok()?;
            detail.run.status.is_terminal().then_some(detail)
        })
        .await
    }

    /// The texts of all lines of a job's steps, in order, as the API follows them.
    pub async fn log(&self, run: RunId, job: &str) -> Vec<String> {
        let request = FollowRequest { job: Some(job.to_owned()), follow: true, ..FollowRequest::default() };
        let mut follow = self.client.follow(run, request);
        let mut lines = Vec::new();
        while let Some(event) = follow.next().await {
            match event.unwrap() {
                FollowEvent::Lines { step, lines: more, .. } if step.starts_with("step-") => {
                    lines.extend(more.into_iter().map(|line| line.text));
                }
                _ => {}
            }
        }
        lines
    }
}
