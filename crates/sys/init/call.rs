//! Calls of steps to their agent: `kici` and git's credential helper in the container talk to a socket of the first process, which
//! passes it on. Input goes up, output and an exit code come back.
//!
//! A caller sends its words as they stand in [`Reply::Call`], then its input as [`Reply::Input`]; it gets [`Request::Answer`] and
//! [`Request::Done`].

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::first::{Line, lock, say};
use crate::wire::{self, Reply, Request};

/// Where the socket is. `$KICI_SOCK` names another one.
const SOCKET: &str = "/run/kici/call.sock";
/// Longest frame of a caller, who is a step.
const MAX_CALL_BYTES: usize = 256 * 1024;
/// Calls at once.
const MAX_CALLS: usize = 64;
const READ_BYTES: usize = 16 * 1024;

/// The calls that are going on.
#[derive(Clone)]
pub struct Calls {
    line: Line,
    open: Arc<Mutex<HashMap<u32, UnixStream>>>,
    next: Arc<AtomicU32>,
}

impl Calls {
    pub fn new(line: Line) -> Self {
        Self { line, open: Arc::default(), next: Arc::default() }
    }

    /// Takes calls from now on. Without the socket there are none.
    pub fn listen(&self) {
        let dir = Path::new(SOCKET).parent().unwrap_or(Path::new("/"));
        let _ = std::fs::create_dir_all(dir);
        let Ok(listener) = UnixListener::bind(SOCKET) else { return };
        let calls = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let calls = calls.clone();
                thread::spawn(move || calls.serve(stream));
            }
        });
    }

    fn serve(&self, mut stream: UnixStream) {
        let words = wire::read(&mut stream, MAX_CALL_BYTES).ok().flatten().and_then(|frame| Reply::decode(&frame).ok());
        let (Some(Reply::Call { words, .. }), Ok(answers)) = (words, stream.try_clone()) else { return };
        let call = self.next.fetch_add(1, Ordering::Relaxed);
        {
            let mut open = lock(&self.open);
            if open.len() >= MAX_CALLS {
                return;
            }
            open.insert(call, answers);
        }
        say(&self.line, &Reply::Call { call, words });
        while let Ok(Some(frame)) = wire::read(&mut stream, MAX_CALL_BYTES) {
            let Ok(Reply::Input { bytes, .. }) = Reply::decode(&frame) else { break };
            say(&self.line, &Reply::Input { call, bytes });
        }
        if lock(&self.open).remove(&call).is_some() {
            say(&self.line, &Reply::HungUp { call });
        }
    }

    pub fn answer(&self, call: u32, channel: u8, bytes: &[u8]) {
        if let Some(to) = lock(&self.open).get_mut(&call) {
            // A caller that is gone is noticed where it is read.
            let _ = wire::write(to, &Request::Answer { call, channel, bytes: bytes.to_vec() }.encode());
        }
    }

    pub fn done(&self, call: u32, code: u8) {
        if let Some(mut to) = lock(&self.open).remove(&call) {
            let _ = wire::write(&mut to, &Request::Done { call, code }.encode());
            let _ = to.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Makes a call with this program's words, input and output.
pub fn run(words: Vec<OsString>) -> ExitCode {
    // `kici git with-write ... -- CMD` runs its command here, within the window that the agent holds open meanwhile.
    let inside = words.iter().position(|word| word == "--");
    let (own, command) = match inside {
        Some(at) => (words[..at].to_vec(), words[at + 1..].to_vec()),
        None => (words, Vec::new()),
    };
    let quiet = own.first().is_some_and(|word| word == "credential-helper");
    call(own, command).unwrap_or_else(|error| {
        if !quiet {
            eprintln!("kici: the agent cannot be reached: {error}");
        }
        ExitCode::FAILURE
    })
}

fn call(own: Vec<OsString>, command: Vec<OsString>) -> io::Result<ExitCode> {
    let socket = std::env::var_os("KICI_SOCK").unwrap_or_else(|| SOCKET.into());
    let mut stream = UnixStream::connect(socket)?;
    let words = own.into_iter().map(OsStringExt::into_vec).collect();
    wire::write(&mut stream, &Reply::Call { call: 0, words }.encode())?;
    let mut up = stream.try_clone()?;
    let input = move |bytes: Vec<u8>, up: &mut UnixStream| wire::write(up, &Reply::Input { call: 0, bytes }.encode());
    let mut command = command.into_iter();
    let mut program = command.next();
    if program.is_none() {
        thread::spawn(move || {
            let mut buffer = vec![0; READ_BYTES];
            let mut from = io::stdin().lock();
            while let Ok(n) = from.read(&mut buffer) {
                if input(buffer[..n].to_vec(), &mut up).is_err() || n == 0 {
                    break;
                }
            }
        });
    }
    let mut inner = None;
    loop {
        let frame = wire::read(&mut stream, wire::MAX_REQUEST_BYTES)?;
        let frame = frame.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        match Request::decode(&frame)? {
            // The word of the agent that the window is open.
            Request::Answer { channel: 3, .. } => {
                if let Some(program) = program.take() {
                    let status = std::process::Command::new(&program).args(command.by_ref()).status();
                    inner = Some(status.map_or_else(
                        |error| {
                            eprintln!("kici: cannot start `{}`: {error}", program.to_string_lossy());
                            127
                        },
                        code_of,
                    ));
                    // No input is left: the window closes.
                    wire::write(&mut stream, &Reply::Input { call: 0, bytes: Vec::new() }.encode())?;
                }
            }
            Request::Answer { channel: 2, bytes, .. } => io::stderr().write_all(&bytes)?,
            Request::Answer { bytes, .. } => {
                io::stdout().write_all(&bytes)?;
                io::stdout().flush()?;
            }
            Request::Done { code, .. } => return Ok(ExitCode::from(inner.unwrap_or(code))),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// As shells tell the end of a command.
fn code_of(status: std::process::ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}
