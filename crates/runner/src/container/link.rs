//! The connection with the first process of a container: commands go in, their output and ends come back.

use std::collections::HashMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kici_containers::{Attached, Chunk};
use kici_sys::cgroup::Usage;
use kici_sys::init::wire::{self, Bytes, Left, Reply, Request, Start};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;

use super::calls::Calls;

/// How long the first process may take for its first word.
const HELLO: Duration = Duration::from_secs(30);
/// How long it may take to tell what was used.
const ASKED: Duration = Duration::from_secs(5);
/// Of its error output, the end that is kept.
const SAID_BYTES: usize = 4096;
const SIGKILL: i32 = 9;

/// How a command ended.
#[derive(Debug)]
pub struct Exited {
    status: ExitStatus,
    /// What it left in its files.
    pub back: Vec<(Bytes, Left)>,
}

struct Running {
    started: Option<oneshot::Sender<Result<(), String>>>,
    exit: watch::Sender<Option<Arc<Exited>>>,
    outputs: [Option<mpsc::UnboundedSender<Bytes>>; 2],
    /// Bytes of output that nobody has read yet.
    waiting: Arc<AtomicU32>,
}

#[derive(Default)]
struct State {
    running: HashMap<u32, Running>,
    killed: HashMap<u32, Vec<oneshot::Sender<u32>>>,
    used: Vec<oneshot::Sender<Usage>>,
    ready: Option<oneshot::Sender<Vec<(Bytes, Bytes)>>>,
    said: Vec<u8>,
}

/// What both ends of the connection share.
struct Shared {
    state: Mutex<State>,
    requests: mpsc::UnboundedSender<Bytes>,
    closed: watch::Sender<Option<String>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, request: &Request) {
        // Nobody takes it any more: then the connection is closed, which everybody sees who waits.
        let _ = self.requests.send(request.encode());
    }
}

/// The connection. The container ends when the last of its owners is dropped.
#[derive(Clone)]
pub struct Link {
    shared: Arc<Shared>,
    next: Arc<AtomicU32>,
    _open: mpsc::Sender<()>,
}

impl Link {
    /// Speaks to the first process of a container that was just started. Also returns the environment in there.
    ///
    /// # Errors
    /// In words, when it does not answer or is not ours.
    pub async fn open(attached: Attached, calls: Calls) -> Result<(Self, Vec<(Bytes, Bytes)>), String> {
        let (requests, to_write) = mpsc::unbounded_channel();
        let (open, is_open) = mpsc::channel(1);
        let shared = Arc::new(Shared { state: Mutex::default(), requests, closed: watch::Sender::new(None) });
        let (ready, is_ready) = oneshot::channel();
        shared.lock().ready = Some(ready);
        let Attached { input, output } = attached;
        let tasks = TaskTracker::new();
        tasks.spawn(write(input, to_write, is_open));
        tasks.spawn(read(output, Arc::clone(&shared), calls));
        shared.ask(&Request::Hello { version: wire::VERSION });
        let link = Self { shared, next: Arc::default(), _open: open };
        match tokio::time::timeout(HELLO, is_ready).await {
            Ok(Ok(env)) => Ok((link, env)),
            Ok(Err(_)) => Err(format!("the container ended at once{}", link.why())),
            Err(_) => Err("the container does not answer".to_owned()),
        }
    }

    /// Why there is no connection any more, behind a colon; nothing while there is one.
    fn why(&self) -> String {
        self.closed().map_or_else(String::new, |why| format!(": {why}"))
    }

    /// Why the connection is closed; none while it is open.
    pub fn closed(&self) -> Option<String> {
        self.shared.closed.borrow().clone()
    }

    /// Starts a command.
    ///
    /// # Errors
    /// In words, when it cannot be started.
    pub async fn start(&self, start: Start) -> Result<(Process, Stream, Stream), String> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (started, is_started) = oneshot::channel();
        let (exit, ended) = watch::channel(None);
        let waiting = Arc::new(AtomicU32::new(0));
        let (out, from_out) = mpsc::unbounded_channel();
        let (err, from_err) = mpsc::unbounded_channel();
        let running =
            Running { started: Some(started), exit, outputs: [Some(out), Some(err)], waiting: Arc::clone(&waiting) };
        self.shared.lock().running.insert(id, running);
        self.shared.ask(&Request::Start(Start { id, ..start }));
        let mut closed = self.shared.closed.subscribe();
        let answer = tokio::select! {
            answer = is_started => answer.unwrap_or_else(|_| Err("the container is gone".to_owned())),
            _ = closed.wait_for(Option::is_some) => Err(format!("the container is gone{}", self.why())),
        };
        if let Err(message) = answer {
            self.shared.lock().running.remove(&id);
            return Err(message);
        }
        let stream = |from| Stream {
            from,
            current: Vec::new(),
            at: 0,
            id,
            waiting: Arc::clone(&waiting),
            shared: Arc::clone(&self.shared),
        };
        let process = Process { id, ended, closed, link: self.clone() };
        Ok((process, stream(from_out), stream(from_err)))
    }

    /// Ends everything in the container but its first process. None when that is not answered in time.
    pub async fn kill_all(&self, limit: Duration) -> Option<u32> {
        self.kill(wire::ALL, limit).await
    }

    async fn kill(&self, id: u32, limit: Duration) -> Option<u32> {
        if self.closed().is_some() {
            return Some(0);
        }
        let (killed, count) = oneshot::channel();
        self.shared.lock().killed.entry(id).or_default().push(killed);
        self.shared.ask(&Request::Kill { id });
        let mut closed = self.shared.closed.subscribe();
        tokio::select! {
            count = count => Some(count.unwrap_or(0)),
            _ = closed.wait_for(Option::is_some) => Some(0),
            () = tokio::time::sleep(limit) => None,
        }
    }

    /// What was used so far, as far as it can be asked.
    pub async fn usage(&self) -> Usage {
        if self.closed().is_some() {
            return Usage::default();
        }
        let (used, answer) = oneshot::channel();
        self.shared.lock().used.push(used);
        self.shared.ask(&Request::Usage);
        tokio::time::timeout(ASKED, answer).await.ok().and_then(Result::ok).unwrap_or_default()
    }
}

async fn write(
    mut input: kici_containers::Input,
    mut frames: mpsc::UnboundedReceiver<Bytes>,
    mut is_open: mpsc::Receiver<()>,
) {
    loop {
        tokio::select! {
            biased;
            frame = frames.recv() => match frame {
                Some(frame) if input.write(&frame).await.is_ok() => {}
                _ => break,
            },
            _ = is_open.recv() => break,
        }
    }
    input.close().await;
}

/// Hears the first process until it is gone. Everything it says is taken as said by a stranger: what makes no sense ends the job.
async fn read(mut output: kici_containers::Output, shared: Arc<Shared>, mut calls: Calls) {
    let mut frames = Frames::default();
    let why = loop {
        match output.next().await {
            Ok(Some(Chunk::Out(bytes))) => {
                if let Err(why) = frames.push(&bytes, |reply| heard(&shared, &mut calls, reply)) {
                    break why;
                }
            }
            Ok(Some(Chunk::Err(bytes))) => {
                let said = &mut shared.lock().said;
                said.extend_from_slice(&bytes);
                let over = said.len().saturating_sub(SAID_BYTES);
                said.drain(..over);
            }
            Ok(None) => break "it ended".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    let said = String::from_utf8_lossy(&shared.lock().said).trim().to_owned();
    let why = if said.is_empty() { why } else { format!("{why}; it said: {said}") };
    shared.closed.send_replace(Some(why));
    // Whoever waits for an answer gets none.
    *shared.lock() = State::default();
}

#[derive(Default)]
struct Frames(Vec<u8>);

impl Frames {
    fn push(&mut self, bytes: &[u8], mut each: impl FnMut(Reply) -> Result<(), String>) -> Result<(), String> {
        const STRAY: &str = "something else than frames came out of it";
        self.0.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(size) = self.0.get(at..at + 4) {
            let size = u32::from_be_bytes([size[0], size[1], size[2], size[3]]) as usize;
            if size == 0 || size > wire::MAX_REPLY_BYTES {
                return Err(STRAY.to_owned());
            }
            let Some(frame) = self.0.get(at + 4..at + 4 + size) else { break };
            each(Reply::decode(frame).map_err(|_| STRAY.to_owned())?)?;
            at += 4 + size;
        }
        self.0.drain(..at);
        Ok(())
    }
}

fn heard(shared: &Arc<Shared>, calls: &mut Calls, reply: Reply) -> Result<(), String> {
    let mut state = shared.lock();
    match reply {
        Reply::Ready { version, env } => {
            if version != wire::VERSION {
                return Err(format!("its program is of version {version}, this agent's of {}", wire::VERSION));
            }
            state.ready.take().map(|ready| ready.send(env));
        }
        Reply::Started { id } => {
            state.running.get_mut(&id).and_then(|running| running.started.take()).map(|started| started.send(Ok(())));
        }
        Reply::NotStarted { id, message } => {
            let message = String::from_utf8_lossy(&message).into_owned();
            state.running.remove(&id).and_then(|running| running.started).map(|started| started.send(Err(message)));
        }
        Reply::Output { id, channel, bytes } => {
            let Some(running) = state.running.get_mut(&id) else { return Ok(()) };
            let Some(output) = running.outputs.get_mut(usize::from(channel).wrapping_sub(1)) else {
                return Err("output of a stream that does not exist came out of it".to_owned());
            };
            if bytes.is_empty() {
                *output = None;
                return Ok(());
            }
            let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let waiting = running.waiting.fetch_add(size, Ordering::Relaxed).saturating_add(size);
            if waiting > wire::WINDOW_BYTES {
                return Err("more output than was asked for came out of it".to_owned());
            }
            // Where nobody reads any more it is drained: a full pipe would hold its writer.
            if output.as_ref().is_none_or(|output| output.send(bytes).is_err()) {
                running.waiting.fetch_sub(size, Ordering::Relaxed);
                drop(state);
                shared.ask(&Request::Credit { id, bytes: size });
            }
        }
        Reply::Exit { id, status, back } => {
            if let Some(running) = state.running.get(&id) {
                let exited = Exited { status: ExitStatus::from_raw(status), back };
                running.exit.send_replace(Some(Arc::new(exited)));
            }
        }
        Reply::Killed { id, count } => {
            if id == wire::ALL {
                state.running.clear();
            } else {
                state.running.remove(&id);
            }
            for killed in state.killed.remove(&id).unwrap_or_default() {
                // Whoever asked does not wait any more.
                let _ = killed.send(count);
            }
        }
        Reply::Used { oom_kills, peak, limit } => {
            let some = |n: u64| (n > 0).then_some(n);
            let usage = Usage { oom_kills, peak_memory_bytes: some(peak), memory_limit_bytes: some(limit) };
            for used in state.used.drain(..) {
                let _ = used.send(usage);
            }
        }
        Reply::Call { call, words } => {
            let requests = shared.requests.clone();
            drop(state);
            calls.open(call, words, requests);
        }
        Reply::Input { call, bytes } => calls.input(call, bytes),
        Reply::HungUp { call } => calls.hung_up(call),
    }
    Ok(())
}

/// A command in a container. Dropping it ends nothing.
pub struct Process {
    id: u32,
    ended: watch::Receiver<Option<Arc<Exited>>>,
    closed: watch::Receiver<Option<String>>,
    link: Link,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Process {
    /// Waits until it has ended; a container that is gone counts as an end by SIGKILL.
    pub async fn exit(&mut self) -> ExitStatus {
        tokio::select! {
            biased;
            Ok(ended) = self.ended.wait_for(Option::is_some) => {
                ended.as_ref().map_or_else(|| ExitStatus::from_raw(SIGKILL), |ended| ended.status)
            }
            _ = self.closed.wait_for(Option::is_some) => ExitStatus::from_raw(SIGKILL),
        }
    }

    /// How it ended, once it has.
    pub fn exited(&self) -> Option<Arc<Exited>> {
        self.ended.borrow().clone()
    }

    /// SIGTERM to its process group.
    pub fn terminate(&self) {
        self.link.shared.ask(&Request::Terminate { id: self.id });
    }

    /// Ends it with all that it started, without waiting for that.
    pub fn discard(&self) {
        self.link.shared.ask(&Request::Kill { id: self.id });
    }

    /// Ends it with all that it started. None when that is not answered in time.
    pub async fn kill(&self, limit: Duration) -> Option<u32> {
        self.link.kill(self.id, limit).await
    }
}

/// Output of a command. What is read makes room for more.
pub struct Stream {
    from: mpsc::UnboundedReceiver<Bytes>,
    current: Bytes,
    at: usize,
    id: u32,
    waiting: Arc<AtomicU32>,
    shared: Arc<Shared>,
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.at == self.current.len() {
            match ready!(self.from.poll_recv(cx)) {
                Some(bytes) => (self.current, self.at) = (bytes, 0),
                None => return Poll::Ready(Ok(())),
            }
        }
        let n = into.remaining().min(self.current.len() - self.at);
        let (from, to) = (self.at, self.at + n);
        into.put_slice(&self.current[from..to]);
        self.at = to;
        let bytes = u32::try_from(n).unwrap_or(u32::MAX);
        self.waiting.fetch_sub(bytes, Ordering::Relaxed);
        self.shared.ask(&Request::Credit { id: self.id, bytes });
        Poll::Ready(Ok(()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // What nobody reads any more makes room too, else what still writes would stand still.
        self.from.close();
        let mut left = self.current.len() - self.at;
        while let Ok(bytes) = self.from.try_recv() {
            left += bytes.len();
        }
        if left > 0 {
            let bytes = u32::try_from(left).unwrap_or(u32::MAX);
            self.waiting.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.ask(&Request::Credit { id: self.id, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_put_together_and_anything_else_ends_the_connection() {
        let wire = [Reply::Started { id: 1 }.encode(), Reply::Killed { id: 2, count: 3 }.encode()].concat();
        for step in 1..wire.len() {
            let (mut frames, mut found) = (Frames::default(), Vec::new());
            for part in wire.chunks(step) {
                let pushed = frames.push(part, |reply| {
                    found.push(reply);
                    Ok(())
                });
                pushed.expect("frames");
            }
            assert_eq!(found, [Reply::Started { id: 1 }, Reply::Killed { id: 2, count: 3 }], "{step}");
        }
        // Acceptance T31: a step that prints what looks like a message does not make one.
        for stray in [&b"{\"status\":\"success\"}\n"[..], &[0, 0, 0, 0], &[0, 0, 0, 1, 99]] {
            assert!(Frames::default().push(stray, |_| Ok(())).is_err(), "{stray:?}");
        }
    }
}
