//! A forge for real git: the REST interface of a fake GitHub, and `git http-backend` (git-http-backend(1)) behind HTTP with Basic
//! authentication that the tokens of the fake open.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kici_api::dto::SecretText;
use kici_api::dto::sources::{AddSource, SourceKind};
use kici_engine::ids::RunId;
use kici_engine::time::Clock;
use kici_forge::testing::{FakeGithub, FakeRepo, PRIVATE_KEY};
use kici_forge::verify::sign;
use kici_sys::clock::SystemClock;
use secrecy::SecretString;
use serde_json::json;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::stack::{Stack, until};

const WEBHOOK_SECRET: &str = "a secret for tests";
/// A password that opens `acme/static`, and nothing else.
pub const STATIC_PASSWORD: &str = "st4tic-p4ssword-for-tests";

/// One request for a repository.
#[derive(Clone, Debug)]
pub struct Seen {
    /// `acme/app`.
    pub repo: String,
    /// Whether it is part of a push.
    pub push: bool,
    /// Password that it came with.
    pub token: Option<String>,
    /// Answer.
    pub status: u16,
}

struct Shared {
    root: PathBuf,
    fake: Arc<FakeGithub>,
    seen: Mutex<Vec<Seen>>,
    exposed: Mutex<Vec<String>>,
}

/// The forge. Stops when dropped.
pub struct GitHost {
    pub fake: Arc<FakeGithub>,
    pub url: String,
    shared: Arc<Shared>,
    dir: TempDir,
    stop: CancellationToken,
}

impl Drop for GitHost {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn git(dir: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new("git");
    command.args(["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]);
    let output = command.args(arguments).current_dir(dir).output().expect("git runs");
    assert!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl GitHost {
    pub async fn start() -> Self {
        let fake = Arc::new(FakeGithub::start(Arc::new(SystemClock)).await.unwrap());
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("srv");
        fs::create_dir(&root).unwrap();
        let shared = Arc::new(Shared { root, fake: fake.clone(), seen: Mutex::default(), exposed: Mutex::default() });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let router = Router::new().fallback(serve).with_state(shared.clone());
        let stopped = stop.clone().cancelled_owned();
        TaskTracker::new().spawn(async move { axum::serve(listener, router).with_graceful_shutdown(stopped).await });
        Self { fake, url, shared, dir, stop }
    }

    /// A repository with these files on `main`; returns its commit. `submodules` are (path, repository, commit).
    pub fn repository(&self, name: &str, files: &[(&str, &str)], submodules: &[(&str, &str, &str)]) -> String {
        let bare = self.bare(name);
        fs::create_dir_all(&bare).unwrap();
        git(&bare, &["init", "-q", "--bare"]);
        git(&bare, &["config", "http.receivepack", "true"]);
        git(&bare, &["config", "uploadpack.allowAnySHA1InWant", "true"]);
        let work = self.dir.path().join("work").join(name);
        fs::create_dir_all(&work).unwrap();
        git(&work, &["init", "-q"]);
        for (path, content) in files {
            let path = work.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        for (path, of, sha) in submodules {
            let entry = format!("[submodule \"{path}\"]\n\tpath = {path}\n\turl = {}/{of}.git\n", self.url);
            fs::write(work.join(".gitmodules"), entry).unwrap();
            git(&work, &["update-index", "--add", "--cacheinfo", &format!("160000,{sha},{path}")]);
        }
        git(&work, &["add", "-A"]);
        for (path, _, sha) in submodules {
            git(&work, &["update-index", "--add", "--cacheinfo", &format!("160000,{sha},{path}")]);
        }
        git(&work, &["commit", "-qm", "first"]);
        git(&work, &["push", "-q", &bare.display().to_string(), "HEAD:refs/heads/main"]);
        let sha = git(&work, &["rev-parse", "HEAD"]);
        let contents = files.iter().map(|(path, text)| ((*path).to_owned(), text.as_bytes().to_vec())).collect();
        let repo = FakeRepo {
            installation: Some(5),
            permissions: [("contents", "write"), ("metadata", "read")].map(|(k, v)| (k.into(), v.into())).into(),
            default_branch: "main".into(),
            branches: [("main".to_owned(), sha.clone())].into(),
            commits: [(sha.clone(), contents)].into(),
            ..FakeRepo::default()
        };
        self.fake.state().repos.insert(name.to_owned(), repo);
        sha
    }

    fn bare(&self, name: &str) -> PathBuf {
        self.shared.root.join(format!("{name}.git"))
    }

    /// Names of the branches of a repository.
    pub fn branches(&self, name: &str) -> Vec<String> {
        let all = git(&self.bare(name), &["for-each-ref", "--format=%(refname:short)", "refs/heads"]);
        all.lines().map(str::to_owned).collect()
    }

    /// A branch at the commit of `main`, made on the disk.
    pub fn make_branch(&self, name: &str, branch: &str) {
        git(&self.bare(name), &["update-ref", &format!("refs/heads/{branch}"), "refs/heads/main"]);
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Processes that showed a password to everybody while git used it.
    pub fn exposed(&self) -> Vec<String> {
        self.shared.exposed.lock().unwrap().clone()
    }

    /// The tokens that were given out, with their permissions.
    pub fn minted(&self) -> Vec<(String, String)> {
        self.fake.state().minted.iter().map(|(token, _, permissions)| (token.clone(), permissions.clone())).collect()
    }

    /// Makes the forge known to an orchestrator, as the source `gh`.
    pub async fn add_to(&self, stack: &Stack) {
        let secrets = [("webhook_secret", WEBHOOK_SECRET), ("private_key", PRIVATE_KEY)];
        let secrets = secrets.map(|(name, value)| (name.to_owned(), SecretText::new(value))).into();
        let config = json!({"app_id": 7, "base_url": self.fake.base_url(), "web_url": self.url});
        let request = AddSource { name: "gh".into(), kind: SourceKind::Github, config, secrets };
        stack.client.add_source(&request).await.unwrap_or_else(|error| panic!("{error}\n{}", stack.logs()));
    }

    /// Tells an orchestrator of a push to `main`, and waits for the run that comes of it.
    pub async fn push(&self, stack: &Stack, repo: &str, sha: &str) -> RunId {
        let (owner, name) = repo.split_once('/').unwrap();
        let body = json!({
            "ref": "refs/heads/main", "before": "0".repeat(40), "after": sha, "created": false, "deleted": false, "forced": false,
            "repository": {"id": 1, "name": name, "full_name": repo, "owner": {"login": owner}, "default_branch": "main"},
            "sender": {"id": 1, "login": "a"}, "head_commit": {"id": sha, "message": "first"}, "commits": [],
        });
        let body = body.to_string();
        let sent = stack
            .http
            .post(format!("http://{}/webhooks/github/7", stack.address))
            .header("x-github-event", "push")
            .header("x-github-delivery", format!("{repo}-{sha}"))
            .header("x-hub-signature-256", sign(&SecretString::from(WEBHOOK_SECRET), body.as_bytes()))
            .header("content-type", "application/json")
            .body(body)
            .send()
            .await
            .unwrap();
        assert_eq!(sent.status(), 202);
        let answer: serde_json::Value = sent.json().await.unwrap();
        let id = answer["delivery_id"].as_str().unwrap().parse().unwrap();
        let delivery = until("the delivery to be processed", async || {
            let delivery = stack.client.delivery(id).await.ok()?;
            (delivery.status != "received").then_some(delivery)
        })
        .await;
        delivery.first_run_id.unwrap_or_else(|| panic!("{delivery:?}\n{}", stack.logs()))
    }
}

impl Shared {
    /// Looks for a password, plain and as HTTP carries it, in the arguments of all processes, and in their environment. The
    /// agent's own checkout, which no step runs beside, has it in the environment of its git.
    fn look_for(&self, token: &str) {
        let users = ["x-access-token", "bot"];
        let encoded = users.map(|user| STANDARD.encode(format!("{user}:{token}")));
        let needles: Vec<&[u8]> =
            [token.as_bytes()].into_iter().chain(encoded.iter().map(|text| text.as_bytes())).collect();
        let of_checkout = self.fake.state().minted.iter().any(|(t, _, held)| t == token && held.contains("metadata"));
        let places: &[&str] = if of_checkout { &["cmdline"] } else { &["cmdline", "environ"] };
        for process in fs::read_dir("/proc").unwrap().flatten() {
            for place in places {
                // Gone, or somebody else's.
                let bytes = fs::read(process.path().join(place)).unwrap_or_default();
                let shows = |needle: &&[u8]| bytes.windows(needle.len()).any(|window| window == *needle);
                if needles.iter().any(shows) {
                    let shown = format!("{place}: {}", String::from_utf8_lossy(&bytes).replace('\0', " "));
                    self.exposed.lock().unwrap().push(shown);
                }
            }
        }
    }
}

fn answer(status: u16, text: &str) -> Response {
    let mut response = Response::builder().status(status);
    if status == 401 {
        response = response.header("www-authenticate", "Basic realm=\"git\"");
    }
    response.body(Body::from(text.to_owned())).unwrap()
}

async fn serve(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let query = request.uri().query().unwrap_or_default().to_owned();
    let Some((repo, _)) = path.trim_start_matches('/').split_once(".git/") else { return answer(404, "no repository") };
    let push = path.ends_with("/git-receive-pack") || query.contains("git-receive-pack");
    let header = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    let basic = header.and_then(|value| value.strip_prefix("Basic ")).and_then(|text| STANDARD.decode(text).ok());
    let token = basic.and_then(|bytes| String::from_utf8(bytes).ok()?.split_once(':').map(|(_, t)| t.to_owned()));
    let now = SystemClock.now();
    let admits = |write| {
        token.as_ref().is_some_and(|token| {
            (token == STATIC_PASSWORD && repo == "acme/static") || shared.fake.state().admits(token, repo, write, now)
        })
    };
    let status = match (admits(push), admits(false)) {
        (true, _) => 200,
        (false, true) => 403,
        (false, false) => 401,
    };
    shared.seen.lock().unwrap().push(Seen { repo: repo.to_owned(), push, token: token.clone(), status });
    if status != 200 {
        return answer(status, "no");
    }
    // git waits for the answer: it and whatever started it are alive.
    if let Some(token) = token {
        let looked = shared.clone();
        tokio::task::spawn_blocking(move || looked.look_for(&token)).await.unwrap();
    }
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 64 << 20).await.unwrap();
    let root = shared.root.clone();
    let run = move || backend(&root, &path, &query, &parts, &body);
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// One CGI request (RFC 3875).
fn backend(root: &Path, path: &str, query: &str, parts: &axum::http::request::Parts, body: &Bytes) -> Response {
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut command = Command::new("git");
    command
        .arg("http-backend")
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("GIT_PROJECT_ROOT", root)
        .env("GIT_HTTP_EXPORT_ALL", "1")
        .env("PATH_INFO", path)
        .env("QUERY_STRING", query)
        .env("REQUEST_METHOD", parts.method.as_str())
        .env("CONTENT_TYPE", header("content-type"))
        .env("CONTENT_LENGTH", body.len().to_string())
        .env("HTTP_CONTENT_ENCODING", header("content-encoding"))
        .env("GIT_PROTOCOL", header("git-protocol"))
        .env("REMOTE_USER", "x")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let body = body.clone();
    let writer = std::thread::spawn(move || drop(std::io::Write::write_all(&mut stdin, &body)));
    let output = child.wait_with_output().unwrap().stdout;
    writer.join().unwrap();
    let end = output.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let mut response = Response::builder();
    for line in String::from_utf8_lossy(&output[..end]).lines() {
        let (name, value) = line.split_once(": ").unwrap();
        response = match name {
            "Status" => response.status(value[..3].parse::<u16>().unwrap()),
            _ => response.header(name, value),
        };
    }
    response.body(Body::from(output[end + 4..].to_vec())).unwrap()
}
