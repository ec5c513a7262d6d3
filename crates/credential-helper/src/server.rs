//! The socket of a job, at the agent. It carries calls of the job's steps to services; who may connect is checked by the
//! kernel's word on the peer.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value as Json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use zeroize::Zeroizing;

use crate::wire::{self, Call, Code, MAX_PATH_BYTES, Refusal, Reply};

/// Connections at once.
const MAX_CONNECTIONS: usize = 64;
/// How long an open call may take to come in as a whole, and its answer to go out.
const FRAME_LIMIT: Duration = Duration::from_secs(10);

/// Answers the calls of one name: `git` answers `git.get`.
#[async_trait]
pub trait Service: Send + Sync {
    /// A new caller.
    fn meet(&self) -> Box<dyn Conversation>;
}

/// One caller of a service, as long as it is connected.
#[async_trait]
pub trait Conversation: Send {
    /// Answers a call; `verb` is what follows the dot.
    ///
    /// # Errors
    /// A [`Refusal`] for the caller.
    async fn call(&mut self, verb: &str, body: Json) -> Result<Json, Refusal>;

    /// The caller is gone, or the job ends.
    async fn end(&mut self);
}

/// The services of a job by name.
pub type Services = BTreeMap<&'static str, Arc<dyn Service>>;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    /// The path is too long for a socket.
    #[error(
        "{0} is longer than the {MAX_PATH_BYTES} bytes that the path of a socket may have; set a shorter runtime_dir"
    )]
    TooLong(PathBuf),
    /// A directory or the socket.
    #[error("{path}: {error}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
}

/// An open socket. Dropping it closes it; [`Door::close`] also waits for the conversations to end.
#[derive(Debug)]
pub struct Door {
    dir: PathBuf,
    socket: PathBuf,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Door {
    /// Opens `dir/job.sock`. `dir` must not exist and becomes 0700, the socket 0600; only processes of the user `uid` are let in.
    ///
    /// # Errors
    /// [`DoorError`].
    pub fn open(dir: &Path, uid: u32, services: Services) -> Result<Self, DoorError> {
        let socket = dir.join("job.sock");
        if socket.as_os_str().len() > MAX_PATH_BYTES {
            return Err(DoorError::TooLong(socket));
        }
        let at = |path: &Path| {
            let path = path.to_owned();
            move |error| DoorError::Io { path, error }
        };
        std::fs::DirBuilder::new().mode(0o700).create(dir).map_err(at(dir))?;
        let listener = UnixListener::bind(&socket).map_err(at(&socket))?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).map_err(at(&socket))?;
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(accept(listener, uid, Arc::new(services), stop.clone(), tasks.clone()));
        Ok(Self { dir: dir.to_owned(), socket, stop, tasks })
    }

    /// Path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Lets nobody in any more, ends all conversations, and removes the directory.
    pub async fn close(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.cancel();
        // Gone already, or not ours to report: the path has no other use.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

async fn accept(
    listener: UnixListener,
    uid: u32,
    services: Arc<Services>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let seats = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let seat = tokio::select! {
            seat = Arc::clone(&seats).acquire_owned() => seat,
            () = stop.cancelled() => return,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Out of file descriptors, most likely.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        if !stream.peer_cred().is_ok_and(|peer| peer.uid() == uid) {
            continue;
        }
        let (services, stop) = (Arc::clone(&services), stop.clone());
        tasks.spawn(async move {
            converse(stream, &services, &stop).await;
            drop(seat);
        });
    }
}

async fn converse(mut stream: UnixStream, services: &Services, stop: &CancellationToken) {
    let mut met: BTreeMap<&'static str, Box<dyn Conversation>> = BTreeMap::new();
    loop {
        let call = tokio::select! {
            call = next(&mut stream) => call,
            () = stop.cancelled() => break,
        };
        let Ok(call) = call else { break };
        // A caller that goes away meanwhile is noticed with the next frame: what the call opened is then closed again.
        let answer = match route(&call.verb, services, &mut met) {
            Ok((conversation, verb)) => tokio::select! {
                answer = conversation.call(verb, call.body) => answer,
                () = stop.cancelled() => break,
            },
            Err(refusal) => Err(refusal),
        };
        let reply = answer.map_or_else(Reply::Error, Reply::Ok);
        let Ok(bytes) = wire::encode(&reply) else { break };
        if !matches!(tokio::time::timeout(FRAME_LIMIT, stream.write_all(&bytes)).await, Ok(Ok(()))) {
            break;
        }
    }
    for conversation in met.values_mut() {
        conversation.end().await;
    }
}

async fn next(stream: &mut UnixStream) -> io::Result<Call> {
    let mut head = [0; 4];
    // A caller may be silent for as long as its window is open.
    stream.read_exact(&mut head[..1]).await?;
    let rest = async {
        stream.read_exact(&mut head[1..]).await?;
        let mut bytes = Zeroizing::new(vec![0; wire::length(head)?]);
        stream.read_exact(&mut bytes).await?;
        Ok(serde_json::from_slice(&bytes)?)
    };
    tokio::time::timeout(FRAME_LIMIT, rest).await?
}

type Met = BTreeMap<&'static str, Box<dyn Conversation>>;

fn route<'m, 'v>(
    verb: &'v str,
    services: &Services,
    met: &'m mut Met,
) -> Result<(&'m mut Box<dyn Conversation>, &'v str), Refusal> {
    let unknown = || {
        let shown: String = verb.chars().filter(|c| !c.is_control()).take(40).collect();
        Refusal::new(Code::Usage, format!("this agent does not know `{shown}`"))
    };
    let (name, verb) = verb.split_once('.').ok_or_else(unknown)?;
    let (name, service) = services.get_key_value(name).ok_or_else(unknown)?;
    Ok((met.entry(*name).or_insert_with(|| service.meet()), verb))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::json;

    use super::*;
    use crate::client::{CallError, Connection};

    #[derive(Default)]
    struct Echo {
        ended: Arc<AtomicUsize>,
    }

    struct Talk(Arc<AtomicUsize>);

    #[async_trait]
    impl Service for Echo {
        fn meet(&self) -> Box<dyn Conversation> {
            Box::new(Talk(Arc::clone(&self.ended)))
        }
    }

    #[async_trait]
    impl Conversation for Talk {
        async fn call(&mut self, verb: &str, body: Json) -> Result<Json, Refusal> {
            match verb {
                "say" => Ok(body),
                "wait" => std::future::pending().await,
                _ => Err(Refusal::new(Code::Usage, "what?")),
            }
        }

        async fn end(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    const LIMIT: Duration = Duration::from_secs(10);

    fn door(uid: u32) -> (tempfile::TempDir, Door, Arc<AtomicUsize>) {
        let dir = tempfile::tempdir().unwrap();
        let echo = Echo::default();
        let ended = Arc::clone(&echo.ended);
        let services: Services = [("echo", Arc::new(echo) as Arc<dyn Service>)].into();
        let door = Door::open(&dir.path().join("d"), uid, services).unwrap();
        (dir, door, ended)
    }

    fn uid() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    async fn call(socket: PathBuf, verb: &'static str) -> Result<Json, CallError> {
        let call = move || Connection::open(&socket)?.call(verb, &json!({"a": 1}), LIMIT);
        tokio::task::spawn_blocking(call).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn calls_reach_their_service_and_unknown_ones_are_refused() {
        let (_dir, door, ended) = door(uid());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(door.socket()), mode(door.socket().parent().unwrap())), (0o600, 0o700));
        assert_eq!(call(door.socket().to_owned(), "echo.say").await.unwrap(), json!({"a": 1}));
        for verb in ["echo.shout", "other.say", "say", ""] {
            let error = call(door.socket().to_owned(), verb).await.unwrap_err();
            assert!(matches!(error, CallError::Refused(Refusal { code: Code::Usage, .. })), "{verb}: {error}");
        }
        let dir = door.socket().parent().unwrap().to_owned();
        door.close().await;
        assert_eq!(ended.load(Ordering::SeqCst), 2, "two conversations began and ended");
        assert!(!dir.exists());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn other_users_are_not_let_in() {
        let (_dir, door, _) = door(uid() + 1);
        assert!(matches!(call(door.socket().to_owned(), "echo.say").await, Err(CallError::Io(_))));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn closing_ends_calls_that_are_under_way() {
        let (_dir, door, ended) = door(uid());
        let socket = door.socket().to_owned();
        let waiting = TaskTracker::new().spawn(call(socket.clone(), "echo.wait"));
        while door.tasks.len() < 2 {
            tokio::task::yield_now().await;
        }
        door.close().await;
        assert!(waiting.await.unwrap().is_err());
        assert!(ended.load(Ordering::SeqCst) <= 1 && !socket.exists());
    }

    #[tokio::test]
    async fn a_path_that_is_too_long_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let error = Door::open(&dir.path().join("x".repeat(100)), uid(), Services::new()).unwrap_err().to_string();
        assert!(error.contains("runtime_dir"), "{error}");
    }
}
