//! The orchestrator as `xtask dev` talks to it.

use std::cell::RefCell;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kici_api::client::{Client, ClientConfig, ClientError};
use kici_api::dto::events::Explanation;
use kici_api::dto::logs::{EndReason, FollowEvent, FollowRequest};
use kici_api::dto::runs::{CancelRun, RunDetail, RunFilter};
use kici_api::dto::sources::{AddSource, DeliveryAccepted, SourceKind};
use kici_api::dto::tokens::CreateAgentToken;
use kici_api::page::PageQuery;
use kici_engine::ids::{DeliveryRowId, RunId};
use kici_engine::trigger::WorkflowDecision;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::repo::{Push, Repo};
use super::screen::Screen;

/// How long the orchestrator may take to be ready; a migration of a large database is not expected here.
const START: Duration = Duration::from_secs(60);

/// Limit of one call.
const CALL: Duration = Duration::from_secs(30);

/// Pauses between looks at something that no stream tells of: short at first, since it is mostly there at once.
const PAUSES: [u64; 4] = [2, 10, 50, 200];

/// What became of a push.
pub(crate) type Decided = Explanation;

/// The interface of the orchestrator.
#[derive(Clone)]
pub(crate) struct Server {
    client: Client,
    http: reqwest::Client,
    url: String,
    token_file: PathBuf,
}

/// TLS needs its provider even where only loopback is called.
pub(crate) fn install_crypto() {
    // An error means that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

impl Server {
    /// Waits until the orchestrator on `address` is ready, and takes the first owner's token.
    pub(crate) async fn connect(address: SocketAddr, data: &Path) -> Result<Self> {
        let url = format!("http://{address}");
        let config = |token| -> Result<ClientConfig> {
            let user_agent = concat!("xtask/", env!("CARGO_PKG_VERSION")).to_owned();
            Ok(ClientConfig { url: url.parse()?, token, timeout: CALL, ca_pem: None, user_agent })
        };
        let open = Client::new(config(None)?)?;
        let ready = async {
            let mut pauses = Pauses::default();
            loop {
                match open.ready().await {
                    Ok(state) if state.ready => return Ok(()),
                    Ok(_) | Err(ClientError::Unreachable { .. } | ClientError::Timeout { .. }) => pauses.next().await,
                    Err(error) => return Err(anyhow::Error::new(error)),
                }
            }
        };
        timeout(START, ready)
            .await
            .with_context(|| format!("the orchestrator was not ready in {} s", START.as_secs()))??;
        let token_file = data.join("bootstrap-token");
        let token = fs::read_to_string(&token_file)
            .with_context(|| format!("{}; `--fresh` begins anew", token_file.display()))?;
        let client = Client::new(config(Some(token.trim().to_owned().into()))?)?;
        let http = reqwest::Client::builder().no_proxy().timeout(CALL).build()?;
        Ok(Self { client, http, url, token_file })
    }

    pub(crate) fn url(&self) -> String {
        self.url.clone()
    }

    /// The typed client, as the first owner.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Where the operator's token is.
    pub(crate) fn token_file(&self) -> &Path {
        &self.token_file
    }

    /// The agent's token: the one in `file`, or a new one that is kept there.
    pub(crate) async fn agent_token(&self, file: &Path) -> Result<String> {
        if let Ok(token) = fs::read_to_string(file) {
            return Ok(token);
        }
        let request = CreateAgentToken { note: Some("cargo xtask dev".into()), ..CreateAgentToken::default() };
        let token = self.client.create_agent_token(&request).await.context("agent token")?.token;
        let mut kept = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
        kept.write_all(token.expose().as_bytes())?;
        Ok(token.expose().to_owned())
    }

    /// The name of the source for a repository, which is added if there is none yet.
    pub(crate) async fn source_of(&self, repo: &Repo) -> Result<String> {
        let path = repo.path.to_str().context("the repository's path is not UTF-8")?;
        let sources = self.client.sources().await.context("sources")?.items;
        let same = |source: &&_| is_local(source, path);
        if let Some(source) = sources.iter().find(same) {
            return Ok(source.name.clone());
        }
        let wanted = repo.source_name();
        let taken = |name: &str| sources.iter().any(|source| source.name == name);
        let mut numbered = (2..).map(|number| format!("{wanted}-{number}"));
        let name = std::iter::once(wanted.clone()).chain(numbered.by_ref()).find(|name| !taken(name)).unwrap_or(wanted);
        let config = json!({ "path": path });
        let request = AddSource { name, kind: SourceKind::Local, config, secrets: Default::default() };
        Ok(self.client.add_source(&request).await.context("the source of the repository")?.name)
    }

    /// Sends a push as the repository's hook would.
    pub(crate) async fn push(&self, source: &str, push: &Push, default_branch: &str) -> Result<DeliveryRowId> {
        let body = json!({
            "ref": push.git_ref,
            "before": push.before,
            "after": push.after,
            "default_branch": default_branch,
        });
        // The same commit may be run again: without an id of its own the delivery would count as a repetition.
        let id = format!("dev-{:016x}{:016x}", getrandom::u64()?, getrandom::u64()?);
        let request = self.http.post(format!("{}/webhooks/default/{source}", self.url)).header("x-delivery-id", id);
        let response = request.header("x-event-type", "push").json(&body).send().await.context("the push")?;
        let status = response.status();
        let text = response.text().await?;
        if !status.is_success() {
            bail!("the push was refused ({status}): {text}");
        }
        let accepted: DeliveryAccepted = serde_json::from_str(&text).context("the answer to the push")?;
        Ok(accepted.delivery_id)
    }

    /// Waits until a delivery is decided: it started runs, it started none, or an attempt at it failed.
    pub(crate) async fn decided(&self, delivery: DeliveryRowId) -> Result<Decided> {
        let mut pauses = Pauses::default();
        loop {
            let explanation = self.client.explain_delivery(delivery).await.context("the push")?;
            let view = &explanation.delivery;
            if view.finished_at.is_some() || view.error.is_some() {
                return Ok(explanation);
            }
            pauses.next().await;
        }
    }

    /// Shows runs, each under its scope, until the last has ended.
    pub(crate) async fn follow(&self, runs: &[(RunId, String)], screen: &mut Screen) -> Result<()> {
        let screen = RefCell::new(screen);
        let each = runs.iter().map(|(run, scope)| self.follow_one(*run, scope, &screen));
        futures::future::try_join_all(each).await?;
        Ok(())
    }

    async fn follow_one(&self, run: RunId, scope: &str, screen: &RefCell<&mut Screen>) -> Result<()> {
        let mut events = self.client.follow(run, FollowRequest { follow: true, ..FollowRequest::default() });
        while let Some(event) = events.next().await {
            let event = event.with_context(|| format!("the logs of {run}"))?;
            screen.borrow_mut().show(scope, &event);
            if let FollowEvent::End { reason, .. } = event {
                match reason {
                    EndReason::Completed | EndReason::Cancelled => {}
                    EndReason::Incomplete => eprintln!("warning: some lines of {run} did not arrive"),
                    other => bail!("the logs of {run} ended early: {other:?}"),
                }
            }
        }
        Ok(())
    }

    /// Waits until a run has ended.
    pub(crate) async fn ended(&self, run: RunId) -> Result<RunDetail> {
        let mut events = self.client.follow(run, FollowRequest { follow: true, ..FollowRequest::default() });
        while let Some(event) = events.next().await {
            event.with_context(|| format!("the end of {run}"))?;
        }
        self.run(run).await
    }

    /// A run with its jobs.
    pub(crate) async fn run(&self, run: RunId) -> Result<RunDetail> {
        Ok(self.client.run(run).await?)
    }

    /// Asks a run to end, as a person would.
    pub(crate) async fn cancel(&self, run: RunId) -> Result<()> {
        self.client.cancel_run(run, CancelRun { force: false }).await?;
        Ok(())
    }

    /// Cancels every open run and waits, for at most `limit`, until none is open.
    pub(crate) async fn cancel_all(&self, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        let mut cancelled = Vec::new();
        let mut pauses = Pauses::default();
        loop {
            let filter = RunFilter { status: Some("pending,running,held,cancelling".into()), ..RunFilter::default() };
            let open = self.client.runs(&filter, &PageQuery::default()).await?.items;
            if open.is_empty() || Instant::now() > end {
                return Ok(());
            }
            for run in open {
                if !cancelled.contains(&run.id) {
                    // It may have ended in between, which is as good.
                    let _ = self.client.cancel_run(run.id, CancelRun { force: true }).await;
                    cancelled.push(run.id);
                }
            }
            pauses.next().await;
        }
    }
}

/// The decisions on the repository's workflows, as the trace of a delivery holds them.
pub(crate) fn decisions(decided: &Decided) -> Result<Vec<WorkflowDecision>> {
    let workflows = decided.trace.as_ref().and_then(|trace| trace.get("workflows"));
    Ok(workflows.map(|list| serde_json::from_value(list.clone())).transpose()?.unwrap_or_default())
}

fn is_local(source: &kici_api::dto::sources::SourceView, path: &str) -> bool {
    source.kind == SourceKind::Local && source.config.get("path").and_then(|value| value.as_str()) == Some(path)
}

/// Waits a little longer each time.
#[derive(Default)]
struct Pauses(usize);

impl Pauses {
    async fn next(&mut self) {
        // Each length several times, so that what takes 30 ms is not found after 200.
        let pause = PAUSES[(self.0 / 8).min(PAUSES.len() - 1)];
        self.0 = self.0.saturating_add(1);
        sleep(Duration::from_millis(pause)).await;
    }
}
