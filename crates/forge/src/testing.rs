//! A GitHub for tests: the routes that [`crate::github`] uses, with state, call counts and faults to order.

mod routes;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kici_engine::time::{Clock, Ts};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Private key of the fake App, made for these tests only.
pub const PRIVATE_KEY: &str = include_str!("testing/app-key.pem");
const PUBLIC_KEY: &str = include_str!("testing/app-key.pub.pem");

/// A repository of the fake.
#[derive(Clone, Debug, Default)]
pub struct FakeRepo {
    /// Number of the App's installation; `None` = not installed.
    pub installation: Option<u64>,
    /// What the installation may do, by permission; empty = everything.
    pub permissions: BTreeMap<String, String>,
    /// Default branch.
    pub default_branch: String,
    /// Commit of each branch.
    pub branches: BTreeMap<String, String>,
    /// What each tag points at: a commit, or a tag object of `tag_objects`.
    pub tags: BTreeMap<String, String>,
    /// Commit of each annotated tag's object.
    pub tag_objects: BTreeMap<String, String>,
    /// Files of each commit: path to content.
    pub commits: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Changed files of each pull request.
    pub pulls: BTreeMap<u64, Vec<String>>,
    /// Changed files of each `base...head`.
    pub compares: BTreeMap<String, Vec<String>>,
}

/// An attempt to deliver.
#[derive(Clone, Debug)]
pub struct FakeDelivery {
    /// Number of the attempt.
    pub id: u64,
    /// Id of the delivery.
    pub guid: String,
    /// When.
    pub at: Ts,
    /// Answer.
    pub status: u16,
}

/// An answer that is given instead of the right one.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Calls whose `METHOD path` contains this.
    pub call: String,
    /// Status.
    pub status: u16,
    /// Headers.
    pub headers: Vec<(&'static str, String)>,
}

/// What the fake knows and has seen.
#[derive(Debug, Default)]
pub struct FakeState {
    /// By `owner/name`.
    pub repos: HashMap<String, FakeRepo>,
    /// Newest first.
    pub deliveries: Vec<FakeDelivery>,
    /// Given once each, in order, to the first call that fits.
    pub faults: VecDeque<Fault>,
    /// Calls whose `METHOD path` contains one of these are never answered.
    pub hangs: Vec<String>,
    /// `METHOD path?query` of every call.
    pub calls: Vec<String>,
    /// Tokens given out: (token, `owner/name`, permissions).
    pub minted: Vec<(String, String, String)>,
    /// When each token ends.
    pub ends: HashMap<String, Ts>,
    /// How much later it is for tokens than for everything else: an hour makes all tokens of the past hour invalid.
    pub tokens_ahead: Duration,
    /// How long tokens live; zero is an hour.
    pub token_life: Duration,
}

impl FakeState {
    /// Whether a token is good for a repository (`owner/name`) at `now`, to write or only to read.
    pub fn admits(&self, token: &str, repo: &str, write: bool, now: Ts) -> bool {
        let alive = self.ends.get(token).is_some_and(|end| now.plus(self.tokens_ahead) < *end);
        alive
            && self.minted.iter().any(|(minted, of, permissions)| {
                let permissions: BTreeMap<String, String> = serde_json::from_str(permissions).unwrap_or_default();
                let level = permissions.get("contents").map_or("none", String::as_str);
                minted == token && of == repo && (level == "write" || (level == "read" && !write))
            })
    }
}

/// A running fake. Stops when dropped.
#[derive(Debug)]
pub struct FakeGithub {
    base_url: String,
    state: Arc<Mutex<FakeState>>,
    stop: CancellationToken,
    _tasks: TaskTracker,
}

pub(crate) struct Shared {
    state: Arc<Mutex<FakeState>>,
    clock: Arc<dyn Clock>,
    base_url: String,
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FakeGithub {
    /// Starts one on a free port of 127.0.0.1. Tokens live for an hour by `clock`.
    ///
    /// # Errors
    /// When no port is to be had.
    pub async fn start(clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let base_url = format!("http://{}", listener.local_addr()?);
        let state = Arc::new(Mutex::new(FakeState::default()));
        let shared = Shared { state: Arc::clone(&state), clock, base_url: base_url.clone() };
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let stopped = stop.clone().cancelled_owned();
        tasks.spawn(async move {
            let server = axum::serve(listener, routes::router(Arc::new(shared)));
            if let Err(error) = server.with_graceful_shutdown(stopped).await {
                tracing::warn!(%error, "the fake GitHub ended");
            }
        });
        Ok(Self { base_url, state, stop, _tasks: tasks })
    }

    /// Its address, for `base_url` of a source.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// What it knows and has seen.
    pub fn state(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many calls so far contain `text`.
    pub fn calls(&self, text: &str) -> usize {
        self.state().calls.iter().filter(|c| c.contains(text)).count()
    }
}

impl Drop for FakeGithub {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
