//! The first process: what the agent asks for, and what it hears.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::call::Calls;
use crate::keeper::{self, EXIT, NOT_STARTED, STARTED};
use crate::proc_fs::{kill_below, parents};
use crate::sys::{self, SIGKILL, SIGTERM, send};
use crate::wire::{
    self, ALL, Bytes, Left, MAX_FILE_BYTES, MAX_REQUEST_BYTES, Reply, Request, Start, VERSION, WINDOW_BYTES,
};

/// Between two looks at a tree that is being ended.
const SWEEP: Duration = Duration::from_millis(2);
/// Looks at most: what survives them cannot be killed.
const MAX_SWEEPS: u32 = 2_500;
const READ_BYTES: usize = 32 * 1024;
/// Stands in a status for an end by SIGKILL.
const KILLED: i32 = SIGKILL;
/// O_NOFOLLOW | O_NONBLOCK, for files that a step may have swapped (open(2)); other architectures have other numbers.
#[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
pub const CAREFULLY: i32 = 0o100_000 | 0o4_000;
#[cfg(not(any(target_arch = "aarch64", target_arch = "arm")))]
pub const CAREFULLY: i32 = 0o400_000 | 0o4_000;

/// Where frames go out.
pub type Line = Arc<Mutex<io::Stdout>>;

pub fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends a frame. An agent that is gone is noticed where its frames are read.
pub fn say(line: &Line, reply: &Reply) {
    let _ = wire::write(&mut *lock(line), &reply.encode());
}

/// A command under its keeper.
struct Running {
    keeper: i32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    command: Option<i32>,
    /// Bytes of output that may still be sent.
    window: u32,
    /// The keeper is gone.
    is_over: bool,
}

impl Running {
    /// Takes of the window; none when nobody will ever read on.
    fn take(&self, want: usize) -> usize {
        let mut state = lock(&self.state);
        while state.window == 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let taken = want.min(state.window as usize);
        // It is at most the window, which is a u32.
        state.window -= taken as u32;
        taken
    }
}

#[derive(Default)]
struct All(Mutex<HashMap<u32, Arc<Running>>>);

impl All {
    fn get(&self, id: u32) -> Option<Arc<Running>> {
        lock(&self.0).get(&id).cloned()
    }

    fn keepers(&self) -> Vec<i32> {
        keepers(&lock(&self.0))
    }

    /// Ends what no keeper is above any more. Held meanwhile, so that no keeper begins that is not known yet.
    fn kill_strays(&self) {
        let all = lock(&self.0);
        kill_below(1, &keepers(&all));
    }
}

fn keepers(all: &HashMap<u32, Arc<Running>>) -> Vec<i32> {
    all.values().filter(|running| !lock(&running.state).is_over).map(|running| running.keeper).collect()
}

pub fn run() -> ExitCode {
    sys::hide();
    sys::ignore_children();
    let line: Line = Arc::new(Mutex::new(io::stdout()));
    let all = Arc::new(All::default());
    let calls = Calls::new(Arc::clone(&line));
    let mut input = io::stdin().lock();
    let code = loop {
        let request = match wire::read(&mut input, MAX_REQUEST_BYTES) {
            Ok(Some(frame)) => Request::decode(&frame),
            // The agent is gone, and with it the job.
            Ok(None) => break ExitCode::SUCCESS,
            Err(_) => break ExitCode::FAILURE,
        };
        match request {
            Ok(Request::Hello { .. }) => {
                let env = std::env::vars_os().map(|(name, value)| (name.into_vec(), value.into_vec())).collect();
                say(&line, &Reply::Ready { version: VERSION, env });
                calls.listen();
            }
            Ok(Request::Start(start)) => {
                let id = start.id;
                if let Err(message) = begin(start, &all, &line) {
                    say(&line, &Reply::NotStarted { id, message: message.into_bytes() });
                }
            }
            Ok(Request::Credit { id, bytes }) => {
                if let Some(running) = all.get(id) {
                    let mut state = lock(&running.state);
                    state.window = state.window.saturating_add(bytes);
                    running.changed.notify_all();
                }
            }
            Ok(Request::Terminate { id }) => {
                if let Some(command) = all.get(id).and_then(|running| lock(&running.state).command) {
                    send(-command, SIGTERM);
                }
            }
            Ok(Request::Kill { id }) => {
                let (all, line) = (Arc::clone(&all), Arc::clone(&line));
                thread::spawn(move || {
                    let count = if id == ALL { kill_all(&all) } else { kill_one(id, &all) };
                    say(&line, &Reply::Killed { id, count });
                });
            }
            Ok(Request::Usage) => say(&line, &usage()),
            Ok(Request::Answer { call, channel, bytes }) => calls.answer(call, channel, &bytes),
            Ok(Request::Done { call, code }) => calls.done(call, code),
            Err(_) => break ExitCode::FAILURE,
        }
    };
    send(-1, SIGKILL);
    code
}

fn begin(start: Start, all: &Arc<All>, line: &Line) -> Result<(), String> {
    let path = |bytes: &Bytes| Path::new(std::ffi::OsStr::from_bytes(bytes)).to_owned();
    for file in &start.files {
        make(&path(&file.path), file.mode, &file.content)?;
    }
    let (root, cwd) = (path(&start.root), path(&start.cwd));
    let named = cwd.strip_prefix(&root).unwrap_or(&cwd).display().to_string();
    let root = root.canonicalize().map_err(|error| format!("{}: {error}", root.display()))?;
    let cwd = cwd.canonicalize().map_err(|_| format!("working_directory `{named}` does not exist"))?;
    if !cwd.starts_with(&root) {
        return Err(format!("working_directory `{named}` lies outside the workspace"));
    }
    let (mine, theirs) = UnixStream::pair().map_err(|error| error.to_string())?;
    let commands: Vec<Vec<OsString>> =
        start.commands.into_iter().map(|words| words.into_iter().map(OsString::from_vec).collect()).collect();
    let env = start.env.into_iter().map(|(name, value)| (OsString::from_vec(name), OsString::from_vec(value)));
    let mut keeper = Command::new("/proc/self/exe");
    keeper.args(keeper::arguments(&commands)).env_clear().envs(env).current_dir(cwd);
    keeper.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::piped()).stderr(Stdio::piped());
    // From before it is there until it is known: whoever looks for strays meanwhile would take it for one.
    let mut known = lock(&all.0);
    let mut child = keeper.spawn().map_err(|error| format!("no process can be started: {error}"))?;
    // It holds our side of the socket, which would hide the end of the keeper.
    drop(keeper);
    let running = Arc::new(Running {
        keeper: i32::try_from(child.id()).map_err(|error| error.to_string())?,
        state: Mutex::new(State { window: WINDOW_BYTES, ..State::default() }),
        changed: Condvar::new(),
    });
    known.insert(start.id, Arc::clone(&running));
    drop(known);
    let id = start.id;
    if let Some(from) = child.stdout.take() {
        let (running, line) = (Arc::clone(&running), Arc::clone(line));
        thread::spawn(move || forward(from, id, 1, &running, &line));
    }
    if let Some(from) = child.stderr.take() {
        let (running, line) = (Arc::clone(&running), Arc::clone(line));
        thread::spawn(move || forward(from, id, 2, &running, &line));
    }
    let (all, line, back) = (Arc::clone(all), Arc::clone(line), start.back);
    thread::spawn(move || hear(mine, id, &running, &all, &line, back));
    Ok(())
}

fn make(path: &Path, mode: u32, content: &[u8]) -> Result<(), String> {
    let made = || -> io::Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        // What a step before may have put there is not followed.
        let _ = fs::remove_file(path);
        OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?.write_all(content)
    };
    made().map_err(|error| format!("{}: {error}", path.display()))
}

/// Sends the output of a command, as much at a time as the agent has room for.
fn forward(mut from: impl Read, id: u32, channel: u8, running: &Running, line: &Line) {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let mut rest = match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(n) => &buffer[..n],
        };
        while !rest.is_empty() {
            let (now, later) = rest.split_at(running.take(rest.len()));
            say(line, &Reply::Output { id, channel, bytes: now.to_vec() });
            rest = later;
        }
    }
    say(line, &Reply::Output { id, channel, bytes: Vec::new() });
}

/// Hears the keeper of a command until it is gone.
fn hear(mut from: UnixStream, id: u32, running: &Running, all: &All, line: &Line, back: Vec<Bytes>) {
    let mut back = Some(back);
    let mut exit = |status: i32| {
        if let Some(back) = back.take() {
            let back = back.into_iter().map(|path| (path.clone(), left(&path))).collect();
            say(line, &Reply::Exit { id, status, back });
        }
    };
    let mut tag = [0];
    while from.read_exact(&mut tag).is_ok() {
        let mut number = [0; 4];
        match tag[0] {
            STARTED if from.read_exact(&mut number).is_ok() => {
                lock(&running.state).command = Some(i32::from_be_bytes(number));
                say(line, &Reply::Started { id });
            }
            EXIT if from.read_exact(&mut number).is_ok() => exit(i32::from_be_bytes(number)),
            NOT_STARTED => {
                let mut message = Vec::new();
                let _ = (&mut from).take(4096).read_to_end(&mut message);
                say(line, &Reply::NotStarted { id, message });
                lock(&running.state).is_over = true;
                return;
            }
            _ => break,
        }
    }
    let command = {
        let mut state = lock(&running.state);
        state.is_over = true;
        state.command.take()
    };
    // A keeper that ends by itself leaves nothing; one that a step ended leaves its processes to us.
    all.kill_strays();
    if command.is_none() {
        // The agent waits for an answer to its start, not for an end.
        say(line, &Reply::NotStarted { id, message: b"killed by signal 9 as it began".to_vec() });
        return;
    }
    exit(KILLED);
}

fn left(path: &Bytes) -> Left {
    let path = Path::new(std::ffi::OsStr::from_bytes(path));
    match OpenOptions::new().read(true).custom_flags(CAREFULLY).open(path) {
        Ok(file) if file.metadata().is_ok_and(|meta| meta.is_file()) => {
            let mut content = Vec::new();
            match file.take(MAX_FILE_BYTES).read_to_end(&mut content) {
                Ok(_) => Left::Content(content),
                Err(_) => Left::Unreadable,
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Left::Gone,
        _ => Left::Unreadable,
    }
}

/// Ends a command with all that it started.
fn kill_one(id: u32, all: &All) -> u32 {
    let Some(running) = all.get(id) else { return 0 };
    let is_over = || lock(&running.state).is_over;
    let mut killed = 0;
    for _ in 0..MAX_SWEEPS {
        if is_over() {
            break;
        }
        killed += kill_below(running.keeper, &[]);
        thread::sleep(SWEEP);
    }
    if !is_over() {
        send(running.keeper, SIGKILL);
    }
    lock(&all.0).remove(&id);
    killed
}

/// Ends everything but this process.
fn kill_all(all: &All) -> u32 {
    let keepers = all.keepers();
    let count = parents().keys().filter(|pid| !keepers.contains(pid)).count();
    for _ in 0..MAX_SWEEPS {
        send(-1, SIGKILL);
        if parents().is_empty() {
            break;
        }
        thread::sleep(SWEEP);
    }
    lock(&all.0).clear();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// What the control group of the container counted, in version 2 or 1 of control groups.
fn usage() -> Reply {
    let number = |path: &str| fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let field = |path: &str, name: &str| {
        let text = fs::read_to_string(path).ok()?;
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
    };
    let both = |new: Option<u64>, old: Option<u64>| new.or(old).unwrap_or(0);
    let (new, old) = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory/memory");
    let limit = both(number(&format!("{new}.max")), number(&format!("{old}.limit_in_bytes")));
    Reply::Used {
        oom_kills: both(field(&format!("{new}.events"), "oom_kill"), field(&format!("{old}.oom_control"), "oom_kill")),
        peak: both(number(&format!("{new}.peak")), number(&format!("{old}.max_usage_in_bytes"))),
        // Version 1 says a number near 2^63 where there is none.
        limit: if limit > 1 << 60 { 0 } else { limit },
    }
}
