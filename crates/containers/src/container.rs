//! Containers.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use http::{Method, header};
use serde::Deserialize;
use serde_json::{Value as Json, json};

use crate::archive::{Owner, tree};
use crate::attach::{Attached, Chunk, Pieces};
use crate::http::{Ask, EngineError, encode, stream};
use crate::{Engine, Kind};

/// Limit of putting files into a container.
const COPY: Duration = Duration::from_secs(1_800);

/// How a container is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct State {
    /// It runs.
    pub running: bool,
    /// A process of it was ended for want of memory.
    #[serde(rename = "OOMKilled")]
    pub oom_killed: bool,
    /// How its first process ended.
    pub exit_code: i64,
    /// Ports of its host by `5432/tcp`.
    #[serde(skip)]
    pub ports: BTreeMap<String, u16>,
}

/// How a command in a container went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Its exit code.
    pub code: i64,
    /// What it said, both streams, at most 64 KiB.
    pub output: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Made {
    id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Inspected {
    state: State,
    #[serde(default)]
    network_settings: Networking,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Networking {
    ports: Option<BTreeMap<String, Option<Vec<Binding>>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Binding {
    host_port: String,
}

const MAX_SAID_BYTES: usize = 64 * 1024;

/// Podman's words for a container that does not run any more.
fn ended(error: &EngineError) -> bool {
    matches!(error, EngineError::Refused { message, .. } if message.contains("can only kill running containers"))
}

/// The text of a stream of pieces, its end where it is long.
fn text(bytes: &[u8]) -> String {
    let mut pieces = Pieces::default();
    pieces.buffer().extend_from_slice(bytes);
    let mut said = Vec::new();
    while let Ok(Some(Chunk::Out(bytes) | Chunk::Err(bytes))) = pieces.next() {
        said.extend_from_slice(&bytes);
    }
    let from = said.len().saturating_sub(MAX_SAID_BYTES);
    String::from_utf8_lossy(&said[from..]).into_owned()
}

impl Engine {
    /// Makes a container from a document of the API (`ContainerCreate`) and returns its id. It does not run yet.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn create(&self, name: &str, document: &Json) -> Result<String, EngineError> {
        let path = format!("/containers/create?name={}", encode(name));
        let what = "making a container";
        let answer = self.client().make(what, Ask::new(what, Method::POST, path).json(document)).await?;
        Ok(crate::http::read::<Made>(what, &answer)?.id)
    }

    /// Starts it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn start(&self, id: &str) -> Result<(), EngineError> {
        let what = "starting a container";
        let ask = Ask::new(what, Method::POST, format!("/containers/{}/start", encode(id)));
        match self.client().make(what, ask).await {
            Err(error) if !error.is_conflict() => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends all its processes at once. One that does not run any more is as good.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn kill(&self, id: &str) -> Result<(), EngineError> {
        let ask = Ask::new("ending a container", Method::POST, format!("/containers/{}/kill", encode(id)));
        match self.client().bytes(ask).await {
            Err(error) if !error.is_conflict() && !error.is_not_found() && !ended(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// How it is.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn inspect(&self, id: &str) -> Result<State, EngineError> {
        let ask = Ask::new("looking at a container", Method::GET, format!("/containers/{}/json", encode(id)));
        let found: Inspected = self.client().json(ask).await?;
        let ports = found.network_settings.ports.unwrap_or_default().into_iter().filter_map(|(port, bindings)| {
            let first = bindings?.into_iter().next()?;
            Some((port, first.host_port.parse().ok()?))
        });
        Ok(State { ports: ports.collect(), ..found.state })
    }

    /// The last lines of its output.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn logs(&self, id: &str, lines: u32) -> Result<String, EngineError> {
        let path = format!("/containers/{}/logs?stdout=true&stderr=true&tail={lines}", encode(id));
        let bytes = self.client().bytes(Ask::new("reading the log of a container", Method::GET, path)).await?;
        Ok(text(&bytes))
    }

    /// Runs a command in it, and waits for its end.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn exec(&self, id: &str, words: &[&str], limit: Duration) -> Result<Executed, EngineError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Ended {
            exit_code: Option<i64>,
        }
        let what = "running a command in a container";
        let body = json!({"Cmd": words, "AttachStdout": true, "AttachStderr": true});
        let path = format!("/containers/{}/exec", encode(id));
        let made: Made = self.client().json(Ask::new(what, Method::POST, path).json(&body)).await?;
        let path = format!("/exec/{}/start", encode(&made.id));
        let start = Ask::new(what, Method::POST, path).json(&json!({"Detach": false, "Tty": false})).within(limit);
        let said = self.client().bytes(start).await?;
        let ended: Ended =
            self.client().json(Ask::new(what, Method::GET, format!("/exec/{}/json", encode(&made.id)))).await?;
        Ok(Executed { code: ended.exit_code.unwrap_or(-1), output: text(&said) })
    }

    /// Attaches to the standard streams of a running container.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn attach(&self, id: &str) -> Result<Attached, EngineError> {
        let what = "attaching to a container";
        let path = format!("/containers/{}/attach?stream=true&stdin=true&stdout=true&stderr=true", encode(id));
        let mut ask = Ask::new(what, Method::POST, path);
        ask.headers = vec![(header::CONNECTION, "Upgrade".to_owned()), (header::UPGRADE, "tcp".to_owned())];
        let answer = self.client().open(ask).await?;
        let upgraded = hyper::upgrade::on(answer)
            .await
            .map_err(|error| EngineError::Protocol { what: what.to_owned(), message: error.to_string() })?;
        Ok(Attached::new(upgraded))
    }

    /// Puts a tree of files into a directory of a container that is a volume of its own, and gives the directory with all in it to
    /// `owner`. It need not run.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn fill(&self, id: &str, dir: &str, from: &Path, owner: Owner) -> Result<(), EngineError> {
        match (self.kind, dir.rsplit_once('/')) {
            // Docker passes over what an archive says of the directory itself, so it has to come with its name.
            (Kind::Docker, Some((parent, name))) => {
                let parent = if parent.is_empty() { "/" } else { parent };
                self.put(id, parent, tree(from, name, owner)).await
            }
            _ => self.put(id, dir, tree(from, ".", owner)).await,
        }
    }

    /// Puts a tree of files under a new name into a directory of a container, and gives all of it to `owner`. It need not run.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn add(&self, id: &str, dir: &str, name: &str, from: &Path, owner: Owner) -> Result<(), EngineError> {
        self.put(id, dir, tree(from, name, owner)).await
    }

    /// Unpacks an archive into a directory of a container, which need not run.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn put(
        &self,
        id: &str,
        dir: &str,
        archive: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    ) -> Result<(), EngineError> {
        let path = format!("/containers/{}/archive?path={}", encode(id), encode(dir));
        let mut ask = Ask::new("copying into a container", Method::PUT, path).within(COPY);
        ask.headers.push((header::CONTENT_TYPE, "application/x-tar".to_owned()));
        ask.body = stream(archive);
        self.client().bytes(ask).await.map(drop)
    }

    /// A file or directory of a container as an archive; none when it is not there.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn get(&self, id: &str, path: &str) -> Result<Option<Bytes>, EngineError> {
        let path = format!("/containers/{}/archive?path={}", encode(id), encode(path));
        match self.client().bytes(Ask::new("copying out of a container", Method::GET, path)).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }
}
