//! The standard streams of a container.

use std::io;

use bytes::{Buf as _, Bytes, BytesMut};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};

/// What an engine puts in front of each piece: the stream, three zeros, the length (Docker Engine API, "Stream format").
const HEADER_BYTES: usize = 8;
/// Longest piece; engines send far less.
const MAX_PIECE_BYTES: usize = 16 * 1024 * 1024;

/// A piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Of standard output.
    Out(Bytes),
    /// Of standard error.
    Err(Bytes),
}

/// Cuts a stream into pieces.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    buffer: BytesMut,
}

impl Pieces {
    pub(crate) fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next whole piece, when there is one.
    pub(crate) fn next(&mut self) -> io::Result<Option<Chunk>> {
        let Some(header) = self.buffer.get(..HEADER_BYTES) else { return Ok(None) };
        let length = u32::from_be_bytes([header[4], header[5], header[6], header[7]]) as usize;
        let stream = header[0];
        if stream > 2 || header[1..4] != [0; 3] || length > MAX_PIECE_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the engine sent what is no piece of a stream"));
        }
        if self.buffer.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(HEADER_BYTES);
        let bytes = self.buffer.split_to(length).freeze();
        Ok(Some(if stream == 2 { Chunk::Err(bytes) } else { Chunk::Out(bytes) }))
    }
}

/// The standard streams of a running container, while it is attached to.
#[derive(Debug)]
pub struct Attached {
    /// Its standard input. Closed when this is dropped.
    pub input: Input,
    /// Its output.
    pub output: Output,
}

/// Standard input of a container.
#[derive(Debug)]
pub struct Input(WriteHalf<TokioIo<Upgraded>>);

impl Input {
    /// Writes all of it.
    ///
    /// # Errors
    /// When nobody reads any more.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes).await?;
        self.0.flush().await
    }

    /// Closes it.
    pub async fn close(mut self) {
        // Nobody is there any more, which is as good.
        let _ = self.0.shutdown().await;
    }
}

/// Output of a container.
#[derive(Debug)]
pub struct Output {
    from: ReadHalf<TokioIo<Upgraded>>,
    pieces: Pieces,
}

impl Output {
    /// The next piece; none at the end. May be dropped and called again.
    ///
    /// # Errors
    /// When the connection breaks or what comes cannot be understood.
    pub async fn next(&mut self) -> io::Result<Option<Chunk>> {
        loop {
            if let Some(chunk) = self.pieces.next()? {
                return Ok(Some(chunk));
            }
            if self.from.read_buf(self.pieces.buffer()).await? == 0 {
                return Ok(None);
            }
        }
    }
}

impl Attached {
    pub(crate) fn new(upgraded: Upgraded) -> Self {
        let (from, to) = tokio::io::split(TokioIo::new(upgraded));
        Self { input: Input(to), output: Output { from, pieces: Pieces::default() } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_put_together_however_they_come() {
        let wire = [&[1, 0, 0, 0, 0, 0, 0, 2][..], b"ab", &[2, 0, 0, 0, 0, 0, 0, 1], b"c"].concat();
        for step in 1..wire.len() {
            let (mut pieces, mut found) = (Pieces::default(), Vec::new());
            for part in wire.chunks(step) {
                pieces.buffer().extend_from_slice(part);
                while let Some(chunk) = pieces.next().expect("pieces") {
                    found.push(chunk);
                }
            }
            assert_eq!(found, [Chunk::Out("ab".into()), Chunk::Err("c".into())], "{step}");
        }
        let mut pieces = Pieces::default();
        pieces.buffer().extend_from_slice(b"HTTP/1.1 200");
        assert!(pieces.next().is_err());
    }
}
