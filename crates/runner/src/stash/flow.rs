//! Between the archives, which are made and read on threads of their own, and the network: a few pieces wait in between, the digest
//! is counted on the way.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::depot::Pieces;

/// Bytes of a piece.
const PIECE: usize = 256 * 1024;
/// Pieces that may wait.
const WAITING: usize = 8;

/// Digest and size of what went by.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter(Arc<Mutex<(Sha256, u64)>>);

impl Meter {
    pub(crate) fn count(&self, bytes: &[u8]) -> u64 {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.0.update(bytes);
        state.1 += bytes.len() as u64;
        state.1
    }

    /// SHA-256 (hex) and bytes.
    pub(crate) fn read(&self) -> (String, u64) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (hex::encode(state.0.clone().finalize()), state.1)
    }
}

/// What is written comes out of the stream, in pieces.
pub(crate) fn outward(max_bytes: u64) -> (Outward, Pieces, Meter) {
    let (sender, receiver) = mpsc::channel(WAITING);
    let meter = Meter::default();
    let writer = Outward { sender, piece: BytesMut::with_capacity(PIECE), meter: meter.clone(), max_bytes };
    (writer, ReceiverStream::new(receiver).boxed(), meter)
}

/// The writing end. What is dropped without [`Outward::close`] ends the stream with an error, so that half an archive is never
/// taken for a whole one.
pub(crate) struct Outward {
    sender: mpsc::Sender<Result<Bytes, io::Error>>,
    piece: BytesMut,
    meter: Meter,
    max_bytes: u64,
}

impl Outward {
    fn pass(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.piece, BytesMut::with_capacity(PIECE)).freeze();
        if self.meter.count(&piece) > self.max_bytes {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the archive is larger than is allowed"));
        }
        self.sender.blocking_send(Ok(piece)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Ends the stream well.
pub(crate) struct Closer(mpsc::Sender<Result<Bytes, io::Error>>, bool);

impl Closer {
    pub(crate) fn of(writer: &Outward) -> Self {
        Self(writer.sender.clone(), false)
    }

    pub(crate) fn close(mut self) {
        self.1 = true;
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        if !self.1 {
            // The receiver is gone when nobody wants to know.
            let _ = self.0.blocking_send(Err(io::Error::other("the archive was not completed")));
        }
    }
}

impl Write for Outward {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = bytes.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&bytes[..room]);
        if self.piece.len() == PIECE {
            self.pass()?;
        }
        Ok(room)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.pass()
    }
}

/// The reading end of a stream; the other one is to be driven by [`Inward::fill`].
pub(crate) struct Inward {
    receiver: mpsc::Receiver<Result<Bytes, io::Error>>,
    piece: Bytes,
    meter: Meter,
    max_bytes: u64,
}

/// A reader of at most `max_bytes`, and what fills it.
pub(crate) fn inward(max_bytes: u64) -> (Inward, mpsc::Sender<Result<Bytes, io::Error>>, Meter) {
    let (sender, receiver) = mpsc::channel(WAITING);
    let meter = Meter::default();
    (Inward { receiver, piece: Bytes::new(), meter: meter.clone(), max_bytes }, sender, meter)
}

/// Passes the pieces on until they end or nobody wants them.
pub(crate) async fn fill(mut pieces: Pieces, into: mpsc::Sender<Result<Bytes, io::Error>>) {
    while let Some(piece) = pieces.next().await {
        let failed = piece.is_err();
        if into.send(piece).await.is_err() || failed {
            return;
        }
    }
}

impl Read for Inward {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.blocking_recv() {
                None => return Ok(0),
                Some(piece) => self.piece = piece?,
            }
            if self.meter.count(&self.piece) > self.max_bytes {
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, "more came than was announced"));
            }
        }
        let length = buffer.len().min(self.piece.len());
        buffer[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}
