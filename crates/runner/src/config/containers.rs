//! What jobs get of a container engine.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kici_engine::lock::{Container, ContainerOptions, Pull, Value, is_image};

use super::{Reader, keys};

/// What jobs get of a container engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerPolicy {
    /// Its socket; looked for when none is set.
    pub socket: Option<PathBuf>,
    /// The image of jobs that name none; none: they run on the host.
    pub image: Option<String>,
    /// Privileged containers are allowed.
    pub privileged: bool,
    /// Capabilities that are allowed besides the harmless ones.
    pub capabilities: Vec<String>,
    /// Containers of failed jobs are ended but kept until the next start.
    pub keep_failed: bool,
    /// The agent runs in the image of the job already.
    pub already_inside: bool,
}

impl ContainerPolicy {
    /// The container of a job that names none.
    pub fn by_default(&self) -> Option<Container> {
        self.image.as_ref().map(|image| Container {
            image: Value::fixed(image.clone()),
            env: BTreeMap::new(),
            user: None,
            pull: Pull::default(),
            credentials: None,
            options: ContainerOptions::default(),
        })
    }

    pub(super) fn describe(&self) -> Vec<(&'static str, String)> {
        let none = |what: &str| format!("({what})");
        vec![
            ("execution_mode", if self.image.is_some() { "container" } else { "bare" }.to_owned()),
            ("container_socket", self.socket.as_ref().map_or(none("looked for"), |path| path.display().to_string())),
            ("container_image", self.image.clone().unwrap_or_else(|| none("none"))),
            ("container_allow_privileged", self.privileged.to_string()),
            ("container_allow_capabilities", self.capabilities.join(",")),
            ("docker_keep_failed", self.keep_failed.to_string()),
            ("job_image_agent", self.already_inside.to_string()),
        ]
    }
}

/// Whether jobs that name no container run in one.
fn execution_mode(text: &str) -> Result<bool, String> {
    match text {
        "bare" | "bare-metal" => Ok(false),
        "container" => Ok(true),
        "firecracker" => Err("`firecracker` is not supported yet; use bare or container".to_owned()),
        _ => Err(format!("`{text}` is not bare or container")),
    }
}

fn image(text: &str) -> Result<String, String> {
    if is_image(text) { Ok(text.to_owned()) } else { Err(format!("`{text}` is not the name of an image")) }
}

fn capabilities(text: &str) -> Result<Vec<String>, String> {
    let names = keys::list(text);
    let legal = |name: &str| name != "ALL" && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
    match names.iter().find(|name| !legal(name) || name.starts_with("CAP_")) {
        Some(name) => {
            Err(format!("`{name}` is not a capability; names are in capitals without CAP_, such as SYS_PTRACE"))
        }
        None => Ok(names),
    }
}

/// Unlike a directory it must not be relative to where the agent was started.
fn socket(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    if path.starts_with('/') { Ok(path.into()) } else { Err(format!("`{text}` is not the full path of a socket")) }
}

impl Reader {
    pub(super) fn containers(&mut self) -> ContainerPolicy {
        let by_default = self.parsed("execution_mode", execution_mode).unwrap_or(false);
        let image = self.parsed("container_image", image);
        let place = |reader: &Self, key: &str| reader.entries.get(key).map(|entry| entry.place.clone());
        if by_default && !self.entries.contains_key("container_image") {
            let place = place(self, "execution_mode").unwrap_or_default();
            self.problem(place, "container needs container_image, the image of jobs that name none");
        }
        if let Some(place) = place(self, "container_image").filter(|_| !by_default) {
            self.problem(place, "has no effect without execution_mode = container");
        }
        ContainerPolicy {
            socket: self.parsed("container_socket", socket),
            image: image.filter(|_| by_default),
            privileged: self.boolean("container_allow_privileged", false),
            capabilities: self.parsed("container_allow_capabilities", capabilities).unwrap_or_default(),
            keep_failed: self.boolean("docker_keep_failed", false),
            already_inside: self.boolean("job_image_agent", false),
        }
    }
}
