//! A database server that dies under load.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kici_api::dto::events::DeliveryFilter;
use kici_api::page::PageQuery;
use kici_engine::state::RunStatus;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::stack::{Stack, until};

/// A server of its own, since it is to be killed.
pub struct Server {
    dir: TempDir,
    programs: PathBuf,
    owner: Option<(u32, u32)>,
}

impl Server {
    /// None where PostgreSQL is not installed.
    pub fn new() -> Option<Self> {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
        let programs =
            versions.map(|entry| entry.path().join("bin")).filter(|path| path.join("initdb").exists()).max()?;
        let dir = tempfile::Builder::new().prefix("kici-pg-").tempdir().unwrap();
        let owner = nix::unistd::geteuid().is_root().then(|| {
            let user = nix::unistd::User::from_name("postgres").unwrap().expect("the user postgres");
            (user.uid.as_raw(), user.gid.as_raw())
        });
        if let Some((uid, gid)) = owner {
            chown(dir.path(), Some(uid), Some(gid)).unwrap();
        }
        let server = Self { dir, programs, owner };
        server.run("initdb", &["--no-sync", "-U", "postgres", "-A", "trust"]);
        server.start();
        Some(server)
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let mut command = Command::new(self.programs.join(program));
        command.args(arguments).arg("-D").arg(self.data()).current_dir("/").stdin(Stdio::null());
        let log = fs::File::options().create(true).append(true).open(self.dir.path().join("out")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        if let Some((uid, gid)) = self.owner {
            command.uid(uid).gid(gid);
        }
        let log = || fs::read_to_string(self.dir.path().join("out")).unwrap();
        assert!(command.status().unwrap().success(), "{program}: {}", log());
    }

    fn start(&self) {
        let options = format!("-k {} -c listen_addresses='' -c max_connections=100", self.dir.path().display());
        self.run("pg_ctl", &["-w", "-t", "60", "-o", &options, "start"]);
    }

    /// As a crash: no checkpoint, connections cut.
    fn kill(&self) {
        self.run("pg_ctl", &["-m", "immediate", "-w", "stop"]);
    }

    pub fn url(&self) -> String {
        let path = Path::new(self.dir.path()).to_str().unwrap().replace('/', "%2F");
        format!("postgres://postgres@{path}/postgres")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.data().join("postmaster.pid").exists() {
            self.kill();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgresql_server_that_dies_under_load_and_comes_back_loses_nothing() {
    const TALK: &str = r#"
on: push
jobs:
  talk:
    runs_on: default
    checkout: false
    run: |
      n=0
      until [ -e "@GO@" ]; do n=$((n + 1)); echo "line $n"; sleep 0.02; done
"#;
    let Some(server) = Server::new() else { return };
    let stack = Stack::start(Some(server.url())).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[("KICI_AGENT_MAX_CONCURRENCY", "4")]).await;
    let go = stack.dir.path().join("go");
    let talk = TALK.replace("@GO@", go.to_str().unwrap());
    let repository = stack.repository("app", &[(".kici/workflows/talk.yaml", &talk)]).await;
    let run = stack.push_one(&repository, "app").await;
    stack.speaks(run).await;

    let other = "on: push\njobs: { a: { runs_on: default, checkout: false, run: echo a } }\n";
    let load = stack.repository("load", &[(".kici/workflows/w.yaml", other)]).await;
    let url = format!("http://{}/webhooks/default/load", stack.address);
    let body = json!({"ref": "refs/heads/main", "before": "0".repeat(40), "after": load.head()});
    let post = async |n: u32| {
        let request = stack.http.post(&url).header("x-delivery-id", format!("d{n}")).json(&body);
        request.send().await.unwrap()
    };
    let mut accepted = Vec::new();
    let mut number = 0;
    while accepted.len() < 20 {
        number += 1;
        if post(number).await.status() == 202 {
            accepted.push(format!("d{number}"));
        }
    }
    // The last ones are still being worked on.
    server.kill();
    let health = stack.http.get(format!("http://{}/health", stack.address)).send().await.unwrap();
    assert_eq!(health.status(), 200);
    let ready = stack.http.get(format!("http://{}/ready", stack.address)).send().await.unwrap();
    assert_eq!(ready.status(), 503);
    let ready: Value = ready.json().await.unwrap();
    assert_ne!(ready["checks"]["db"], "ok", "{ready}");
    let refused = stack.client.runs(&Default::default(), &PageQuery::default()).await.unwrap_err();
    assert_eq!(refused.problem().expect("a problem").status, 503, "{refused}");
    let refused = post(10_000).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    // The job ends while its result cannot be stored.
    fs::write(&go, "").unwrap();

    server.start();
    until("readiness", async || stack.client.ready().await.ok().filter(|ready| ready.ready)).await;
    // From the first moment on, every call works again: no dead connection is handed out.
    for n in 0..30 {
        stack.client.runs(&Default::default(), &PageQuery::default()).await.unwrap_or_else(|e| panic!("{n}: {e}"));
        let answer = post(20_000 + n).await;
        assert_eq!(answer.status(), 202, "{n}: {}\n{}", answer.text().await.unwrap(), stack.logs());
        accepted.push(format!("d{}", 20_000 + n));
    }
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let lines = stack.log(run, "talk").await;
    let expected: Vec<String> = (1..=lines.len()).map(|n| format!("line {n}")).collect();
    assert_eq!(lines, expected);
    for id in accepted {
        let filter = DeliveryFilter { delivery_id: Some(id.clone()), ..DeliveryFilter::default() };
        let made = until(&format!("the run of {id}"), async || {
            stack.client.deliveries(&filter, &PageQuery::default()).await.ok()?.items.first()?.first_run_id
        })
        .await;
        assert_eq!(stack.ended(made).await.run.status, RunStatus::Success);
    }
}
