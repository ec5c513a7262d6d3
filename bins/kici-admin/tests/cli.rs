//! The program against the router on loopback: exit codes, output forms, the server's words.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;

use kici_access::Role;
use kici_api::problem::Problem;
use kici_api::testing::Fake;
use kici_engine::ids::JobId;
use serde_json::Value as Json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

struct Server {
    fake: Arc<Fake>,
    address: SocketAddr,
    token: String,
    _stop: DropGuard,
    _tasks: TaskTracker,
}

async fn serve() -> Server {
    let fake = Fake::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
    let app = axum::serve(listener, fake.router()).with_graceful_shutdown(stop.clone().cancelled_owned());
    tasks.spawn(async move { app.await.unwrap() });
    let token = fake.token(Role::Owner, None);
    Server { fake, address, token, _stop: stop.drop_guard(), _tasks: tasks }
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kici-admin"));
    command.env_clear().stdin(Stdio::null()).kill_on_drop(true);
    command
}

impl Server {
    fn command(&self, arguments: &str) -> Command {
        let mut command = program();
        command.env("KICI_ADMIN_URL", format!("http://{}", self.address)).env("KICI_ADMIN_TOKEN", &self.token);
        command.args(arguments.split_whitespace());
        command
    }

    async fn run(&self, arguments: &str) -> Ran {
        Ran::of(self.command(arguments).output().await.unwrap())
    }
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }

    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self.out
    }

    #[track_caller]
    fn fails(self, code: i32, part: &str) {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(self.err.contains(part), "{}", self.err);
        assert_eq!(self.err.lines().count(), 1, "one clear line: {}", self.err);
    }
}

#[tokio::test]
async fn every_list_and_show_is_one_document_and_quiet() {
    let server = serve().await;
    let fake = &server.fake;
    fake.add_source("demo");
    fake.add_agent("agent-1");
    fake.add_host("host-1");
    let (run, job) = fake.add_run("demo");
    fake.add_step(job, "step-main-0");
    let delivery = fake.add_delivery("demo", "dead");
    let (event, registration) = (fake.add_event("ping", "processed"), fake.add_registration("nightly"));
    for verb in [
        "run list".to_owned(),
        "run list --all --status running,failed --since 2h".to_owned(),
        format!("run show {run}"),
        format!("run show {run} --steps"),
        "source list".to_owned(),
        "source get demo".to_owned(),
        "agent-token list".to_owned(),
        "token list".to_owned(),
        "agent list --label linux --status ready".to_owned(),
        "host list --selector role:web|none --status unreachable".to_owned(),
        "host get host-1".to_owned(),
        "host preview role:web --on-unreachable skip".to_owned(),
        "event list".to_owned(),
        format!("event show {delivery}"),
        format!("event explain {delivery}"),
        format!("event show {event}"),
        format!("event explain {event}"),
        format!("event show {event} --payload"),
        "event list --internal".to_owned(),
        "event emit deploy.done --payload {\"env\":\"prod\"} --target acme/*".to_owned(),
        format!("event redeliver {event}"),
        "event-trust list".to_owned(),
        "event-trust add --source a:acme/app --target b:acme/lib --event p*".to_owned(),
        "event-trust test --source a:acme/app --target b:acme/lib --event ping".to_owned(),
        "schedule list".to_owned(),
        format!("schedule trigger {registration}"),
        "registration list".to_owned(),
        format!("registration disable {registration}"),
        "event dlq list".to_owned(),
        "event dlq count".to_owned(),
        format!("queue list --run {run}"),
        format!("queue show {job}"),
        format!("queue explain {job}"),
        "orchestrator drain --status".to_owned(),
        "diagnose".to_owned(),
    ] {
        let ran = server.run(&format!("{verb} -o json")).await;
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{verb}");
        serde_json::from_str::<Json>(&ran.out).unwrap_or_else(|error| panic!("{verb}: {error}: {}", ran.out));
        let yaml = server.run(&format!("{verb} --output yaml")).await;
        assert!(yaml.code == 0 && !yaml.out.is_empty(), "{verb}");
        let table = server.run(&verb).await;
        assert_eq!(table.code, 0, "{verb}: {}", table.err);
        assert!(!table.out.contains('\x1b'), "no colours in a pipe");
    }
    let table = server.run("run list --utc").await.ok();
    let mut lines = table.lines();
    assert!(lines.next().unwrap().starts_with("RUN "), "{table}");
    let row = lines.next().unwrap();
    assert!(row.contains("running") && row.contains("main") && row.contains("5f3c9e1d ") && row.contains("Z"), "{row}");
    assert!(server.run("source list").await.ok().contains("/webhooks/default/demo"));
}

#[tokio::test]
async fn exit_codes_tell_failures_apart() {
    let server = serve().await;
    server.fake.add_source("demo");
    let (run, _) = server.fake.add_run("demo");
    let auditor = server.fake.token(Role::Auditor, None);

    server.run(&format!("run cancel {run} --token {auditor}")).await.fails(3, "`run.cancel` is needed");
    server.run("run list --token kici_admin_x").await.fails(3, "mistyped");
    server.run("source get none").await.fails(4, "source `none` does not exist");
    server.run(&format!("run rerun {run}")).await.fails(5, "cancel it first (run.active, request req_");
    server.run("run list --status broken").await.fails(7, "status: `broken` is not a run status");
    server.run("run list --limit 999").await.fails(7, "limit: must be a number from 1 to 200");
    server.fake.world().outage = Some(Problem::unavailable("the database does not answer", 1));
    server.run("run list").await.fails(6, "the database does not answer");
    server.fake.world().outage = None;
    server.run("source remove demo").await.fails(64, "--yes");
    server.run("run list --since yesterday").await.fails(64, "is no time");
    assert_eq!(server.run("run lst").await.code, 64);
    assert_eq!(server.run("run show nonsense").await.code, 64);
    assert_eq!(server.run("--help").await.code, 0);
    server.run("source remove demo --yes").await.ok();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = listener.local_addr().unwrap();
    drop(listener);
    server.run(&format!("run list --url http://{nobody}")).await.fails(6, "does not answer");
    for (wrong, remedy) in [
        ("run list --url ftp://x", "use an http or https URL, for instance http://127.0.0.1:4000"),
        ("run list --url nonsense", "use an http or https URL, for instance http://127.0.0.1:4000"),
        ("run list --limit x", "use a whole number"),
        ("source add github x --app-id abc", "use a whole number"),
        ("event dlq retry x", "expected `dlv_` or `evt_` followed by a UUID"),
        ("run list --token a --token-file b", "cannot be used with '--token'"),
    ] {
        let ran = server.run(wrong).await;
        assert_eq!(ran.code, 64, "{wrong}: {}", ran.err);
        assert!(ran.err.contains(remedy), "{wrong}: {}", ran.err);
    }
}

#[tokio::test]
async fn a_token_file_on_the_command_line_goes_before_the_variable() {
    let server = serve().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &server.token).unwrap();
    let run = |file: &Path| {
        let mut command = server.command("source list --token-file");
        command.env("KICI_ADMIN_TOKEN", "kici_admin_of_another_server").arg(file);
        async move { Ran::of(command.output().await.unwrap()) }
    };
    run(file.path()).await.ok();
    run(Path::new("/nowhere")).await.fails(64, "--token-file /nowhere");
}

#[tokio::test]
async fn a_silent_server_is_a_timeout() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let ran =
        program().args(["run", "list", "--token", "x", "--timeout", "50ms", "--url", &url]).output().await.unwrap();
    Ran::of(ran).fails(6, "did not answer within");
}

#[tokio::test]
async fn logs_are_prefixed_and_followed_to_the_end() {
    let server = serve().await;
    let (run, job) = server.fake.add_run("demo");
    server.fake.add_step(job, "step-main-0");
    server.fake.add_lines(job, "step-main-0", &["one", "two"]);
    assert_eq!(server.run(&format!("run logs {run}")).await.ok(), "build | one\nbuild | two\n");
    assert_eq!(server.run(&format!("run logs {run} --job build --step 0")).await.ok(), "one\ntwo\n");

    let mut child =
        server.command(&format!("run logs -f {run}")).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut head = [0; 24];
    child.stdout.as_mut().unwrap().read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"build | one\nbuild | two\n");
    server.fake.add_lines(job, "step-main-0", &["three"]);
    server.fake.end_run(run, true);
    let rest = Ran::of(child.wait_with_output().await.unwrap());
    assert_eq!((rest.out.as_str(), rest.err.as_str()), ("build | three\n", "run success\n"));

    let lines = server.run(&format!("run logs {run} -o json")).await.ok();
    assert!(lines.lines().all(|line| serde_json::from_str::<Json>(line).is_ok()), "{lines}");
}

#[tokio::test]
async fn watch_gives_the_runs_outcome() {
    let server = serve().await;
    for (success, code) in [(true, 0), (false, 1)] {
        let (run, job): (_, JobId) = server.fake.add_run("demo");
        server.fake.add_step(job, "step-main-0");
        server.fake.end_run(run, success);
        let ran = server.run(&format!("run watch {run}")).await;
        assert_eq!(ran.code, code, "{}", ran.err);
        assert!(ran.out.contains("job build"), "{}", ran.out);
    }
}

#[tokio::test]
async fn sources_are_added_with_their_secrets_from_files() {
    let server = serve().await;
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "s3cret\n").unwrap();
    let add = format!("source add github gh --app-id 7 --webhook-secret-file {} -o json", secret.display());
    let source: Json = serde_json::from_str(&server.run(&add).await.ok()).unwrap();
    assert_eq!(source["config"], serde_json::json!({ "app_id": 7 }));
    assert_eq!(source["secrets"], serde_json::json!(["webhook_secret"]));
    server.run("source add local gh /srv/x").await.fails(5, "a source `gh` exists");
    server.run("source add github x --app-id 7 --webhook-secret-file /nope").await.fails(64, "/nope");
    let generic = "source add generic hook --verification token --header x-token --event-header x-kind -o json";
    let source: Json = serde_json::from_str(&server.run(generic).await.ok()).unwrap();
    assert_eq!(source["config"]["verification"], serde_json::json!({ "type": "token", "header": "x-token" }));
    assert_eq!(source["config"]["event_from"], serde_json::json!({ "header": "x-kind" }));
    server.run("source disable hook").await.ok();
    assert!(server.run("source list").await.ok().contains("no"));
}

#[tokio::test]
async fn a_new_token_stands_alone_on_stdout() {
    let server = serve().await;
    let ran = server.run("agent-token create --labels linux,x64 --expires 30d").await;
    assert!(ran.out.starts_with("kici_agent_") && ran.out.lines().count() == 1, "{}", ran.out);
    assert!(ran.err.contains("only time"));
    let token = server.run("token create ci --role admin -o json").await;
    let json: Json = serde_json::from_str(&token.out).unwrap();
    let id = json["id"].as_str().unwrap();
    server.run(&format!("token revoke {id} --yes")).await.ok();
}

#[tokio::test]
async fn the_bootstrap_token_serves_this_machine_only() {
    let server = serve().await;
    let dir = tempfile::tempdir().unwrap();
    let here = format!("http://{}", server.address);
    let run = |url: String, dir: &Path| {
        let mut command = program();
        command.args(["source", "list", "--url", &url, "--data-dir"]).arg(dir);
        async move { Ran::of(command.output().await.unwrap()) }
    };
    run(here.clone(), dir.path()).await.fails(3, "bootstrap-token cannot be read");
    std::fs::write(dir.path().join("bootstrap-token"), format!("{}\n", server.token)).unwrap();
    run(here, dir.path()).await.ok();
    run("http://ci.example:4000".to_owned(), dir.path()).await.fails(3, "only for this machine");
}

#[tokio::test]
async fn a_profile_names_server_and_token() {
    let server = serve().await;
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join(".config/kici");
    std::fs::create_dir_all(&folder).unwrap();
    let token = home.path().join("token");
    std::fs::write(&token, &server.token).unwrap();
    let text = format!("[profile.prod]\nurl = \"http://{}\"\ntoken_file = \"{}\"\n", server.address, token.display());
    std::fs::write(folder.join("admin.toml"), text).unwrap();
    let run = |profile: &'static str| {
        let mut command = program();
        command.env("HOME", home.path()).args(["agent", "list", "--profile", profile]);
        async move { Ran::of(command.output().await.unwrap()) }
    };
    assert_eq!(run("prod").await.code, 0);
    run("test").await.fails(64, "no [profile.test]; it has: prod");
}

#[tokio::test]
async fn runs_are_started_by_hand() {
    let server = serve().await;
    server.fake.add_source("demo");
    let ran = server.run("run trigger demo ci --input level=3 --input env=prod --idempotency-key k").await;
    assert!(ran.out.starts_with("run_") && ran.err.contains("run logs -f run_"), "{}{}", ran.out, ran.err);
    assert_eq!(server.run("run trigger demo ci --idempotency-key k").await.ok(), ran.out, "the same key, the same run");
    server.run("run trigger demo deploy").await.fails(5, "has no `manual` trigger");
    server.run("source trigger none").await.fails(4, "source `none`");
    assert_eq!(server.run("run trigger demo ci --input level").await.code, 64);
}

#[tokio::test]
async fn a_drain_that_does_not_end_says_how_to_undo_it() {
    let server = serve().await;
    assert!(server.run("orchestrator drain --wait --wait-timeout 1s").await.ok().contains("draining"));
    assert!(server.fake.world().draining);
    server.run("orchestrator resume").await.ok();
    assert!(!server.fake.world().draining);
}

#[tokio::test]
async fn the_status_shows_background_work_that_failed_and_why() {
    let server = serve().await;
    let shown = server.run("orchestrator status").await.ok();
    for text in ["leader", "sweep", "failed", "no database", "10 s"] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
}

#[tokio::test]
async fn workflows_are_checked_without_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join(".kici/workflows");
    std::fs::create_dir_all(&folder).unwrap();
    let good = "name: ci\non: push\njobs:\n  build:\n    runs_on: default\n    steps:\n      - run: make\n";
    std::fs::write(folder.join("ci.yaml"), good).unwrap();
    let run = |format: &'static str| {
        let mut command = program();
        command.args(["workflow", "validate"]).arg(dir.path()).args(["--format", format]);
        async move { Ran::of(command.output().await.unwrap()) }
    };
    let ran = run("long").await;
    assert_eq!((ran.code, ran.out.as_str()), (0, ""), "{}", ran.err);
    assert!(ran.err.contains("1 file, 1 workflow, 0 errors"), "{}", ran.err);

    std::fs::write(folder.join("bad.yaml"), good.replace("jobs:", "jbos:")).unwrap();
    let long = run("long").await;
    assert_eq!(long.code, 2);
    assert!(long.out.contains("jbos") && long.out.contains("bad.yaml"), "{}", long.out);
    assert!(run("short").await.out.lines().all(|line| line.contains("bad.yaml")));
    let json: Json = serde_json::from_str(&run("json").await.out).unwrap();
    assert_eq!(json["valid"], false);

    let schema = Ran::of(program().args(["workflow", "schema"]).output().await.unwrap()).ok();
    assert!(serde_json::from_str::<Json>(&schema).unwrap()["$schema"].is_string());
    let missing = Ran::of(program().args(["workflow", "validate", "/nope"]).output().await.unwrap());
    missing.fails(64, "/nope");
}

#[tokio::test]
async fn completions_need_nothing() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = Ran::of(program().args(["completions", shell]).output().await.unwrap());
        assert!(ran.ok().contains("agent-token"));
    }
    // A pager that is closed early is no failure.
    let mut child =
        program().args(["completions", "bash"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let ran = Ran::of(child.wait_with_output().await.unwrap());
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
}

#[tokio::test]
async fn hosts_are_declared_with_typed_properties_changed_and_removed() {
    let server = serve().await;
    let declared =
        server.run("host declare db-1 --labels role:db --prop rack=3 --prop ssd=true --prop zone=b -o json").await;
    assert_eq!(declared.err, "declared\n");
    let host: Json = serde_json::from_str(&declared.out).unwrap();
    assert_eq!(host["properties"], serde_json::json!({"rack": 3, "ssd": true, "zone": "b"}));
    let changed = server.run("host declare db-1 --unset-prop zone -o json").await;
    assert_eq!(changed.err, "changed\n");
    let host: Json = serde_json::from_str(&changed.out).unwrap();
    assert_eq!((&host["labels"], host["properties"].get("zone")), (&serde_json::json!(["role:db"]), None));
    assert!(server.run("host preview role:db --include-uninitialized").await.ok().contains("hold"));
    server.run("host list --selector a|").await.fails(7, "at character 2");
    assert!(server.run("host reboot db-1 --deadline 10m --utc").await.ok().contains("restarts until"));
    server.run("host cancel-reboot db-1").await.ok();
    server.run("host cancel-reboot db-1").await.fails(5, "not about to restart");
    server.run("host remove db-1").await.fails(64, "--yes");
    server.run("host remove db-1 --yes -q").await.ok();
    server.run("host get db-1").await.fails(4, "db-1");
}
