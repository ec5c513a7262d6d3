//! Where the socket of an engine is.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// There is no engine that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no container engine answers ({0}); start Docker or Podman, or let the agent's user use its socket")]
pub struct NoEngine(pub String);

/// The sockets that are tried, the first one first: the one that is set, that of `DOCKER_HOST`, then where Docker and Podman put
/// theirs, for the system and for the user.
fn candidates(set: Option<&Path>, env: &BTreeMap<String, String>) -> Result<Vec<PathBuf>, NoEngine> {
    if let Some(set) = set {
        return Ok(vec![set.to_owned()]);
    }
    if let Some(host) = env.get("DOCKER_HOST").filter(|host| !host.is_empty()) {
        let socket = host.strip_prefix("unix://").ok_or_else(|| {
            // An address may carry a user's name.
            NoEngine("DOCKER_HOST is no unix:// address; containers need an engine on the same host".to_owned())
        })?;
        return Ok(vec![socket.into()]);
    }
    let mut all: Vec<PathBuf> = vec!["/run/docker.sock".into(), "/var/run/docker.sock".into()];
    if let Some(own) = env.get("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()).map(Path::new) {
        all.extend([own.join("docker.sock"), own.join("podman/podman.sock")]);
    }
    all.push("/run/podman/podman.sock".into());
    Ok(all)
}

/// Whether somebody listens there.
pub fn is_there(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// The socket of the engine to use. Connects, and asks nothing. Blocks for as long as connecting to a local socket takes.
///
/// # Errors
/// [`NoEngine`] with what was tried.
pub fn find(set: Option<&Path>, env: &BTreeMap<String, String>) -> Result<PathBuf, NoEngine> {
    let mut tried = Vec::new();
    for socket in candidates(set, env)? {
        match UnixStream::connect(&socket) {
            Ok(_) => return Ok(socket),
            Err(error) => tried.push(format!("{}: {error}", socket.display())),
        }
    }
    Err(NoEngine(tried.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_comes_before_what_is_usual() {
        let env = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let names = |set: Option<&str>, pairs: &[(&str, &str)]| -> Vec<String> {
            let found = candidates(set.map(Path::new), &env(pairs)).expect("some");
            found.into_iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(names(Some("/a"), &[("DOCKER_HOST", "unix:///b")]), ["/a"]);
        assert_eq!(names(None, &[("DOCKER_HOST", "unix:///b"), ("XDG_RUNTIME_DIR", "/r")]), ["/b"]);
        assert_eq!(names(None, &[("XDG_RUNTIME_DIR", "/r")])[2..4], ["/r/docker.sock", "/r/podman/podman.sock"]);
        let remote = candidates(None, &env(&[("DOCKER_HOST", "tcp://u:p@host:1")])).expect_err("refused");
        assert!(!remote.to_string().contains("u:p"), "{remote}");
    }

    #[test]
    fn what_was_tried_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let none = find(Some(&dir.path().join("x.sock")), &BTreeMap::new()).expect_err("none");
        assert!(none.to_string().contains("x.sock") && none.to_string().contains("start Docker or Podman"), "{none}");
        let there = dir.path().join("y.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&there).expect("bound");
        assert_eq!(find(Some(&there), &BTreeMap::new()).as_deref(), Ok(there.as_path()));
    }
}
