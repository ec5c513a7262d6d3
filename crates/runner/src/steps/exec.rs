//! One command: its output goes to a log, its end is waited for or brought about.

use std::io;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kici_engine::time::Clock;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::tree::{Pipes, Tree};
use crate::lines::{Channel, Lines, Splitter};
use crate::mask::Masker;
use crate::spool::StepLog;
use crate::stop::{Stop, stopped};

/// How long output is still read after the command ended while somebody it left behind holds the pipe.
const LINGER: Duration = Duration::from_secs(2);
/// From SIGTERM to SIGKILL when a limit in time is reached.
pub const TIMEOUT_GRACE: Duration = Duration::from_secs(10);
const READ_BYTES: usize = 64 * 1024;

/// Why a command is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It ended by itself.
    Exit(ExitStatus),
    /// Its own limit was reached.
    TimedOut,
    /// The limit of the job was reached.
    DeadlineReached,
    /// The job was told to stop.
    Stopped(Stop),
}

/// The bounds of a command.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Its own limit.
    pub timeout: Duration,
    /// When the job is over.
    pub deadline: Option<Instant>,
    /// The job is on its way out already: only a word that leaves no grace counts.
    pub after_stop: bool,
}

/// Follows a started command to its end. After any end but an exit of its own, no process of the tree is left; after that one
/// what the command left behind goes on, for later steps.
///
/// # Errors
/// When the log cannot be written.
pub async fn follow(
    tree: &mut Tree,
    pipes: Pipes,
    output: &mut Output<'_>,
    bounds: Bounds,
    stop: &mut watch::Receiver<Stop>,
) -> io::Result<Ended> {
    let ended = pump_and_supervise(tree, pipes, output, bounds, stop).await?;
    output.flush().await?;
    Ok(ended)
}

async fn pump_and_supervise(
    tree: &mut Tree,
    pipes: Pipes,
    output: &mut Output<'_>,
    bounds: Bounds,
    stop: &mut watch::Receiver<Stop>,
) -> io::Result<Ended> {
    let writing = AtomicBool::new(false);
    let pump = output.pump(pipes, &writing);
    tokio::pin!(pump);
    let mut pumped = None;
    let ended = {
        let supervise = supervise(tree, bounds, stop);
        tokio::pin!(supervise);
        loop {
            tokio::select! {
                ended = &mut supervise => break ended,
                done = &mut pump, if pumped.is_none() => pumped = Some(done),
            }
        }
    };
    let forced = matches!(ended, Ended::Stopped(Stop::Force { .. } | Stop::Abandon { .. }));
    while pumped.is_none() {
        match timeout(LINGER, &mut pump).await {
            Ok(done) => pumped = Some(done),
            // What was read and waits for room in the spool is not lost, unless nobody wants it any more.
            Err(_)
                if writing.load(Ordering::Relaxed) && !forced && (bounds.after_stop || *stop.borrow() == Stop::Run) => {
            }
            Err(_) => break,
        }
    }
    pumped.unwrap_or(Ok(()))?;
    Ok(ended)
}

async fn supervise(tree: &mut Tree, bounds: Bounds, stop: &mut watch::Receiver<Stop>) -> Ended {
    let limit = Instant::now() + bounds.timeout;
    let (until, late) = match bounds.deadline {
        Some(deadline) if deadline <= limit => (deadline, Ended::DeadlineReached),
        _ => (limit, Ended::TimedOut),
    };
    let (ended, grace) = tokio::select! {
        status = tree.command_exit() => return Ended::Exit(status),
        () = sleep_until(until) => (late, TIMEOUT_GRACE),
        stop = told(stop, bounds.after_stop) => { let grace = stop.grace(); (Ended::Stopped(stop), grace) }
    };
    let mut ended = ended;
    if !grace.is_zero() {
        tree.terminate();
        let kill = Instant::now() + grace;
        tokio::select! {
            _ = tree.command_exit() => {}
            () = sleep_until(kill) => {}
            now = stronger(stop, &ended) => ended = Ended::Stopped(now),
        }
    }
    tree.kill().await;
    ended
}

pub(super) async fn told(stop: &mut watch::Receiver<Stop>, after_stop: bool) -> Stop {
    if after_stop {
        let told = stop.wait_for(|stop| matches!(stop, Stop::Force { .. } | Stop::Abandon { .. })).await;
        let told = told.map(|stop| stop.clone());
        match told {
            Ok(stop) => stop,
            Err(_) => std::future::pending().await,
        }
    } else {
        stopped(stop).await
    }
}

/// Waits for a word that leaves no grace.
async fn stronger(stop: &mut watch::Receiver<Stop>, than: &Ended) -> Stop {
    let abandoned = matches!(than, Ended::Stopped(Stop::Abandon { .. }));
    let told = stop.wait_for(|stop| !abandoned && matches!(stop, Stop::Force { .. } | Stop::Abandon { .. })).await;
    let told = told.map(|stop| stop.clone());
    match told {
        Ok(stop) => stop,
        Err(_) => std::future::pending().await,
    }
}

/// Where the output of a command goes: cut into lines, masked, into the log of its step.
pub struct Output<'a> {
    log: &'a mut StepLog,
    masker: &'a Masker,
    clock: &'a dyn Clock,
    out: Splitter,
    err: Splitter,
    lines: Lines,
    tail: Option<Vec<u8>>,
}

/// Bytes of the end of a log that [`Output::with_tail`] remembers.
const TAIL_BYTES: usize = 4096;

impl<'a> Output<'a> {
    /// Into this log.
    pub fn new(log: &'a mut StepLog, masker: &'a Masker, clock: &'a dyn Clock) -> Self {
        let (out, err) = (Splitter::new(Channel::Out), Splitter::new(Channel::Err));
        Self { log, masker, clock, out, err, lines: Lines::default(), tail: None }
    }

    /// Also remembers the last lines, for [`Output::tail`].
    #[must_use]
    pub fn with_tail(mut self) -> Self {
        self.tail = Some(Vec::new());
        self
    }

    /// The texts of the last lines, masked.
    pub fn tail(&self) -> Vec<String> {
        let text = String::from_utf8_lossy(self.tail.as_deref().unwrap_or_default());
        text.lines().filter_map(|line| line.splitn(3, ' ').nth(2).map(str::to_owned)).collect()
    }

    fn remember(&mut self) {
        if let Some(tail) = &mut self.tail {
            tail.extend_from_slice(&self.lines.bytes);
            let over = tail.len().saturating_sub(TAIL_BYTES);
            let cut = if over == 0 {
                0
            } else {
                tail[over..].iter().position(|b| *b == b'\n').map_or(over, |at| over + at + 1)
            };
            tail.drain(..cut);
        }
    }

    async fn pump(&mut self, pipes: Pipes, writing: &AtomicBool) -> io::Result<()> {
        let Pipes { mut stdout, mut stderr } = pipes;
        let (mut out, mut err) = (vec![0; READ_BYTES], vec![0; READ_BYTES]);
        let (mut out_open, mut err_open) = (true, true);
        while out_open || err_open {
            let (from, bytes) = tokio::select! {
                n = read(&mut stdout, &mut out), if out_open => {
                    let n = n?;
                    out_open = n > 0;
                    (&mut self.out, &out[..n])
                }
                n = read(&mut stderr, &mut err), if err_open => {
                    let n = n?;
                    err_open = n > 0;
                    (&mut self.err, &err[..n])
                }
            };
            from.push(bytes, self.clock.now(), &self.masker.current(), &mut self.lines);
            self.remember();
            writing.store(true, Ordering::Relaxed);
            self.log.append(&self.lines).await?;
            writing.store(false, Ordering::Relaxed);
            self.lines.clear();
        }
        Ok(())
    }

    async fn flush(&mut self) -> io::Result<()> {
        self.lines.clear();
        let (now, mask) = (self.clock.now(), self.masker.current());
        self.out.flush(now, &mask, &mut self.lines);
        self.err.flush(now, &mask, &mut self.lines);
        self.remember();
        self.log.append(&self.lines).await
    }
}

async fn read(from: &mut (impl AsyncRead + Unpin), into: &mut [u8]) -> io::Result<usize> {
    from.read(into).await
}
