//! Signals of the system as words for the agent.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::Signal;

/// SIGTERM and SIGINT as [`Signal::Stop`], SIGUSR1 as [`Signal::Drain`].
///
/// # Errors
/// When a handler cannot be installed.
pub fn signals() -> io::Result<mpsc::Receiver<Signal>> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut drain = signal(SignalKind::user_defined1())?;
    let (tx, rx) = mpsc::channel(4);
    TaskTracker::new().spawn(async move {
        loop {
            let word = tokio::select! {
                _ = term.recv() => Signal::Stop,
                _ = int.recv() => Signal::Stop,
                _ = drain.recv() => Signal::Drain,
            };
            if tx.send(word).await.is_err() {
                return;
            }
        }
    });
    Ok(rx)
}
