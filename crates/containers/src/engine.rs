//! An engine: what it is, and everything on it that carries certain labels.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use crate::http::{Ask, Client, EngineError, encode};

/// The newest version of the API that is spoken; both engines serve much older ones.
const NEWEST: (u32, u32) = (1, 45);
/// Limit of the first question.
const HELLO: Duration = Duration::from_secs(10);

/// Labels of what is made, by name.
pub type Labels = BTreeMap<String, String>;

/// Which engine it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Docker.
    Docker,
    /// Podman.
    Podman,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        })
    }
}

/// An engine that answers.
#[derive(Clone, Debug)]
pub struct Engine {
    client: Client,
    /// Which one it is.
    pub kind: Kind,
    /// Its version.
    pub version: String,
    /// Whether it runs without the rights of root.
    pub rootless: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Version {
    version: String,
    api_version: String,
    #[serde(default)]
    components: Vec<Component>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Component {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Info {
    #[serde(default)]
    security_options: Option<Vec<String>>,
}

/// A container, a network or a volume; volumes have no id.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Thing {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    labels: Option<Labels>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Volumes {
    #[serde(default)]
    volumes: Option<Vec<Thing>>,
}

/// What an engine has of something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Ids of containers.
    pub containers: Vec<String>,
    /// Ids of networks.
    pub networks: Vec<String>,
    /// Names of volumes.
    pub volumes: Vec<String>,
}

impl Left {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty() && self.networks.is_empty() && self.volumes.is_empty()
    }
}

/// What was removed.
#[derive(Debug, Default)]
pub struct Removed {
    /// How many things.
    pub count: usize,
    /// The first thing that could not be removed, and why.
    pub failed: Option<EngineError>,
}

fn version_of(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

impl Engine {
    /// Asks the engine behind a socket what it is.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn connect(socket: &Path) -> Result<Self, EngineError> {
        let mut client = Client::new(socket);
        let what = "asking the container engine for its version";
        let found: Version = client.json(Ask::new(what, Method::GET, "/version").within(HELLO)).await?;
        let spoken = version_of(&found.api_version).unwrap_or(NEWEST).min(NEWEST);
        client.prefix = format!("/v{}.{}", spoken.0, spoken.1);
        let podman = found.components.iter().any(|component| component.name == "Podman Engine");
        let info: Info =
            client.json(Ask::new("asking the container engine", Method::GET, "/info").within(HELLO)).await?;
        let rootless = info.security_options.unwrap_or_default().iter().any(|option| option.contains("rootless"));
        let kind = if podman { Kind::Podman } else { Kind::Docker };
        Ok(Self { client, kind, version: found.version, rootless })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.client.socket
    }

    /// Makes a network of its own for what is attached to it, and returns its id.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn create_network(&self, name: &str, labels: &Labels) -> Result<String, EngineError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Made {
            id: String,
        }
        let body = json!({"Name": name, "CheckDuplicate": true, "Driver": "bridge", "Labels": labels});
        let what = "making the network of the job";
        let answer = self.client.make(what, Ask::new(what, Method::POST, "/networks/create").json(&body)).await?;
        Ok(crate::http::read::<Made>(what, &answer)?.id)
    }

    /// Makes an empty volume. One of that name that is there already is as good.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn create_volume(&self, name: &str, labels: &Labels) -> Result<(), EngineError> {
        let body = json!({"Name": name, "Labels": labels});
        let what = "making a volume";
        self.client.make(what, Ask::new(what, Method::POST, "/volumes/create").json(&body)).await.map(drop)
    }

    /// Whether there is a volume of that name.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn has_volume(&self, name: &str) -> Result<bool, EngineError> {
        let ask = Ask::new("looking for a volume", Method::GET, format!("/volumes/{}", encode(name)));
        match self.client.json::<Json>(ask).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until nothing is made any more that was asked for, also by those who do not wait for it. What is listed afterwards
    /// is all there is.
    pub async fn settled(&self) {
        self.client.settled().await;
    }

    /// Everything that carries all of these labels.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn labelled(&self, labels: &Labels) -> Result<Left, EngineError> {
        let asked: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let filter = encode(&json!({"label": asked}).to_string());
        let ask = |what, path: &str| Ask::new(what, Method::GET, format!("{path}filters={filter}"));
        let containers = ask("listing containers", "/containers/json?all=true&");
        let networks = ask("listing networks", "/networks?");
        let volumes = ask("listing volumes", "/volumes?");
        // Podman lists volumes with any of the labels: what is not asked for must not be removed.
        let of = |things: Vec<Thing>| {
            let all = |thing: &Thing| {
                let own = thing.labels.as_ref();
                labels.iter().all(|(name, value)| own.is_some_and(|own| own.get(name) == Some(value)))
            };
            things.into_iter().filter(all).filter_map(|thing| thing.id.or(thing.name)).collect()
        };
        Ok(Left {
            containers: of(self.client.json(containers).await?),
            networks: of(self.client.json(networks).await?),
            volumes: of(self.client.json::<Volumes>(volumes).await?.volumes.unwrap_or_default()),
        })
    }

    /// Ends and removes what is there, in the order in which it can be: containers, then what they used. What is gone already
    /// counts as removed; what cannot be removed does not keep the rest.
    pub async fn remove(&self, left: &Left) -> Removed {
        let mut removed = Removed::default();
        if self.kind == Kind::Podman {
            // It would ask first, and wait ten seconds for programs that do not listen.
            futures::future::join_all(left.containers.iter().map(|id| self.kill(id))).await;
        }
        let containers = left
            .containers
            .iter()
            .map(|id| ("removing a container", format!("/containers/{}?force=true&v=true", encode(id))));
        let networks = left.networks.iter().map(|id| ("removing a network", format!("/networks/{}", encode(id))));
        let volumes =
            left.volumes.iter().map(|name| ("removing a volume", format!("/volumes/{}?force=true", encode(name))));
        // Containers side by side, since each waits for the death of its processes.
        let all = futures::future::join_all(containers.map(|(what, path)| self.delete(what, path))).await;
        let mut note = |result: Result<(), EngineError>| match result {
            Ok(()) => removed.count += 1,
            Err(error) => drop(removed.failed.get_or_insert(error)),
        };
        all.into_iter().for_each(&mut note);
        for (what, path) in networks.chain(volumes) {
            note(self.delete(what, path).await);
        }
        removed
    }

    async fn delete(&self, what: &str, path: String) -> Result<(), EngineError> {
        match self.client.bytes(Ask::new(what, Method::DELETE, path)).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}
