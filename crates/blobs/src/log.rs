//! Sealed logs of steps.
//!
//! The object is a row of independent zstd frames (RFC 8878), each of about 1,000 lines, so the whole is also one
//! stream that `zstdcat` reads. Beside it lies the index of the frames. To read some lines, the frames that hold them
//! are fetched and unpacked, nothing else.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use bytes::Bytes;
use futures::stream;
use kici_engine::ids::{JobId, RunId};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::error::BlobError;
use crate::store::Blobs;

/// Lines of a frame.
const FRAME_LINES: u64 = 1000;
/// A frame ends after this many bytes, even inside a line.
const FRAME_BYTES: usize = 1024 * 1024;
/// zstd's own default.
const LEVEL: i32 = 3;
/// Packed frames that may wait for the disk.
const IN_FLIGHT: usize = 4;
/// Largest index: 64 Mi lines, far beyond the cap on a step's log.
const MAX_INDEX: u64 = 8 * 1024 * 1024;

/// Which log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogKey {
    /// Its run.
    pub run: RunId,
    /// Its job.
    pub job: JobId,
    /// The dispatch epoch of the attempt.
    pub epoch: u32,
    /// Name of the step as a file name (`step--0`, `kind-owner-ordinal`).
    pub step: String,
}

impl LogKey {
    /// Key of the log's object.
    pub fn object(&self) -> String {
        format!("{}.log.zst", self.stem())
    }

    /// Key of its index.
    pub fn index(&self) -> String {
        format!("{}.log.idx", self.stem())
    }

    /// What all objects of a run's logs start with.
    pub fn run_prefix(run: RunId) -> String {
        format!("logs/{}", run.uuid())
    }

    fn stem(&self) -> String {
        format!("{}/{}/{}/{}", Self::run_prefix(self.run), self.job.uuid(), self.epoch, self.step)
    }
}

/// Where the frames of a log are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogIndex {
    /// Lines, a last one without its end included.
    pub lines: u64,
    /// Unpacked bytes.
    pub bytes: u64,
    /// Packed bytes.
    pub packed: u64,
    /// In order.
    pub frames: Vec<Frame>,
}

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Number of the line that its first byte belongs to, from 0. Usually that line starts here; where a line is longer
    /// than a frame, it started before.
    pub line: u64,
    /// Where it starts in the unpacked log, in bytes.
    pub offset: u64,
    /// Where it starts in the object, in bytes.
    pub frame_offset: u64,
}

/// Some lines of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSlice {
    /// Number of the first line.
    pub first_line: u64,
    /// How many lines.
    pub lines: u64,
    /// The lines with their ends.
    pub bytes: Bytes,
    /// The last line is longer than the limit and was cut.
    pub cut: bool,
    /// The log has no more lines.
    pub end: bool,
}

impl Blobs {
    /// Packs a finished segment file into an object and then stores its index, which makes it readable. Doing it again
    /// gives the same result.
    ///
    /// # Errors
    /// [`BlobError`]; the segment is untouched and may be sealed again.
    pub async fn seal_log(&self, key: &LogKey, segment: &Path) -> Result<LogIndex, BlobError> {
        let object = key.object();
        let (frames, received) = mpsc::channel::<Result<Bytes, io::Error>>(IN_FLIGHT);
        let segment = segment.to_owned();
        let work = tokio::task::spawn_blocking(move || {
            let packed = File::open(&segment).and_then(|file| {
                pack(BufReader::with_capacity(256 * 1024, file), |frame| {
                    let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
                    frames.blocking_send(Ok(frame.into())).map_err(gone)
                })
            });
            // A failure must also end the upload, or half a log would be stored as a whole one.
            if let Err(error) = &packed {
                drop(frames.blocking_send(Err(io::Error::new(error.kind(), error.to_string()))));
            }
            packed
        });
        let frames = stream::unfold(received, |mut r| async move { r.recv().await.map(|frame| (frame, r)) });
        let (packed, put) = futures::future::join(work, self.put_stream(&object, frames, u64::MAX)).await;
        put?;
        let index = packed.map_err(|e| BlobError::storage(&object, e))?.map_err(|e| BlobError::storage(&object, e))?;
        let json = serde_json::to_vec(&index).map_err(|e| BlobError::storage(&object, e))?;
        self.put(&key.index(), json.into()).await?;
        Ok(index)
    }

    /// The index of a sealed log.
    ///
    /// # Errors
    /// [`BlobError::NotFound`] when the log is not sealed.
    pub async fn log_index(&self, key: &LogKey) -> Result<LogIndex, BlobError> {
        let name = key.index();
        let json = self.get(&name, MAX_INDEX).await?;
        serde_json::from_slice(&json).map_err(|e| BlobError::damaged(&name, e))
    }

    /// Lines `from..` of a sealed log: at most `max_lines`, and at most `max_bytes` bytes, but always one line if there
    /// is one (cut to `max_bytes` if it alone is longer).
    ///
    /// # Errors
    /// [`BlobError`].
    pub async fn read_log(
        &self,
        key: &LogKey,
        index: &LogIndex,
        from: u64,
        max_lines: u64,
        max_bytes: usize,
    ) -> Result<LogSlice, BlobError> {
        let object = key.object();
        let mut picker = Picker { skip: 0, max_lines, max_bytes, lines: 0, out: Vec::new(), cut: false, done: false };
        // The frame before the first that starts at or after the line holds the line's first byte, unless the line
        // starts a frame; then it is skipped over.
        let start = index.frames.partition_point(|f| f.line < from).saturating_sub(1);
        if from < index.lines && max_lines > 0 {
            picker.skip = from - index.frames.get(start).map_or(0, |f| f.line);
            for at in start..index.frames.len() {
                let frame = self.frame(&object, index, at).await?;
                picker.take(&frame);
                if picker.done {
                    break;
                }
            }
            picker.finish();
        }
        let end = from.saturating_add(picker.lines) >= index.lines;
        Ok(LogSlice { first_line: from, lines: picker.lines, bytes: picker.out.into(), cut: picker.cut, end })
    }

    async fn frame(&self, object: &str, index: &LogIndex, at: usize) -> Result<Vec<u8>, BlobError> {
        let next = index.frames.get(at + 1);
        let (packed_end, end) = next.map_or((index.packed, index.bytes), |f| (f.frame_offset, f.offset));
        let frame = index.frames[at];
        let packed = self.get_range(object, frame.frame_offset..packed_end).await?;
        let size = usize::try_from(end.saturating_sub(frame.offset)).unwrap_or(usize::MAX).min(2 * FRAME_BYTES);
        let unpacked = zstd::bulk::decompress(&packed, size).map_err(|e| BlobError::damaged(object, e))?;
        if unpacked.len() == size { Ok(unpacked) } else { Err(BlobError::damaged(object, "a frame is too short")) }
    }
}

/// Picks lines out of the frames.
struct Picker {
    skip: u64,
    max_lines: u64,
    max_bytes: usize,
    lines: u64,
    out: Vec<u8>,
    cut: bool,
    done: bool,
}

impl Picker {
    fn take(&mut self, mut frame: &[u8]) {
        while !frame.is_empty() && !self.done {
            let length = frame.iter().position(|b| *b == b'\n').map_or(frame.len(), |end| end + 1);
            let (line, rest) = frame.split_at(length);
            let ends = line.ends_with(b"\n");
            if self.skip > 0 {
                self.skip -= u64::from(ends);
            } else {
                self.add(line, ends);
            }
            frame = rest;
        }
    }

    /// Adds a line or a part of one.
    fn add(&mut self, line: &[u8], ends: bool) {
        let room = self.max_bytes.saturating_sub(self.out.len());
        if line.len() > room {
            if self.lines == 0 {
                self.out.extend_from_slice(&line[..room]);
                self.cut = true;
                self.lines = 1;
            } else {
                // Parts of the unfinished line go again.
                let whole = self.out.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
                self.out.truncate(whole);
            }
            self.done = true;
            return;
        }
        self.out.extend_from_slice(line);
        if ends {
            self.lines += 1;
            self.done = self.lines >= self.max_lines;
        }
    }

    /// Counts a last line without its end.
    fn finish(&mut self) {
        if !self.done && !self.out.is_empty() && !self.out.ends_with(b"\n") {
            self.lines += 1;
        }
    }
}

/// Reads lines, hands out packed frames, returns the index.
fn pack(mut from: impl BufRead, mut put: impl FnMut(Vec<u8>) -> io::Result<()>) -> io::Result<LogIndex> {
    let mut packer = zstd::bulk::Compressor::new(LEVEL)?;
    let mut index = LogIndex::default();
    let mut frame = Vec::with_capacity(FRAME_BYTES);
    let (mut start, mut ended, mut in_frame) = (0u64, 0u64, 0u64);
    loop {
        let room = FRAME_BYTES - frame.len();
        let read = read_line(&mut from, &mut frame, room)?;
        if read > 0 && frame.ends_with(b"\n") {
            ended += 1;
            in_frame += 1;
        }
        let full = in_frame == FRAME_LINES || frame.len() >= FRAME_BYTES;
        if (full || read == 0) && !frame.is_empty() {
            index.frames.push(Frame { line: start, offset: index.bytes, frame_offset: index.packed });
            let packed = packer.compress(&frame)?;
            index.bytes += frame.len() as u64;
            index.packed += packed.len() as u64;
            index.lines = ended + u64::from(!frame.ends_with(b"\n"));
            put(packed)?;
            frame.clear();
            (start, in_frame) = (ended, 0);
        }
        if read == 0 {
            return Ok(index);
        }
    }
}

/// Appends up to `max` bytes, no further than the end of the line; 0 at the end of the file.
fn read_line(from: &mut impl BufRead, into: &mut Vec<u8>, max: usize) -> io::Result<usize> {
    let mut total = 0;
    while total < max {
        let buffer = from.fill_buf()?;
        if buffer.is_empty() {
            break;
        }
        let window = &buffer[..buffer.len().min(max - total)];
        let end = window.iter().position(|b| *b == b'\n');
        let take = end.map_or(window.len(), |end| end + 1);
        into.extend_from_slice(&window[..take]);
        from.consume(take);
        total += take;
        if end.is_some() {
            break;
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn key() -> LogKey {
        let uuid = Uuid::from_u128(7);
        LogKey { run: RunId::from_uuid(uuid), job: JobId::from_uuid(uuid), epoch: 2, step: "step--0".into() }
    }

    async fn sealed(text: &[u8]) -> (tempfile::TempDir, Blobs, LogIndex) {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::local(&dir.path().join("blobs")).unwrap();
        let segment = dir.path().join("a.seg");
        std::fs::write(&segment, text).unwrap();
        let index = blobs.seal_log(&key(), &segment).await.unwrap();
        assert_eq!(blobs.log_index(&key()).await.unwrap(), index);
        assert_eq!(blobs.seal_log(&key(), &segment).await.unwrap(), index);
        (dir, blobs, index)
    }

    fn lines_of(text: &[u8]) -> Vec<&[u8]> {
        text.split_inclusive(|b| *b == b'\n').collect()
    }

    #[tokio::test]
    async fn any_range_reads_the_same_as_the_segment() {
        let mut text: Vec<u8> = (0..3500).flat_map(|n| format!("{n} o line {n}\n").into_bytes()).collect();
        text.extend(vec![b'x'; 2 * FRAME_BYTES + 17]);
        text.extend(b"\nafter\nno end");
        let (_dir, blobs, index) = sealed(&text).await;
        let lines = lines_of(&text);
        assert_eq!((index.lines, index.bytes), (lines.len() as u64, text.len() as u64));
        assert!(index.frames.len() >= 6, "{:?}", index.frames);
        for from in [0u64, 1, 999, 1000, 1001, 1999, 3499, 3500, 3501, 3502, 3503, 9000] {
            for count in [1u64, 2, 1000, 1001, 10_000] {
                let slice = blobs.read_log(&key(), &index, from, count, usize::MAX).await.unwrap();
                let wanted = lines.iter().skip(from as usize).take(count as usize);
                let expected: Vec<u8> = wanted.clone().flat_map(|l| l.iter().copied()).collect();
                assert!(slice.bytes == expected, "{from}+{count}");
                assert_eq!(slice.lines, wanted.count() as u64, "{from}+{count}");
                assert_eq!(slice.end, from + slice.lines >= index.lines);
                assert!(!slice.cut);
            }
        }
    }

    #[tokio::test]
    async fn the_byte_limit_keeps_whole_lines_and_cuts_only_a_single_long_one() {
        let text = [&b"aaaa\nbbbb\n"[..], &vec![b'x'; FRAME_BYTES + 5], b"\nc\n"].concat();
        let (_dir, blobs, index) = sealed(&text).await;
        let read = async |from, max| blobs.read_log(&key(), &index, from, 100, max).await.unwrap();
        let table = [
            (0, 9, 1, 5, false),
            (0, 10, 2, 10, false),
            (0, 20, 2, 10, false),
            (2, 20, 1, 20, true),
            (3, 2, 1, 2, false),
        ];
        for (from, max, lines, bytes, cut) in table {
            let slice = read(from, max).await;
            assert_eq!((slice.lines, slice.bytes.len(), slice.cut), (lines, bytes, cut), "{from} {max}");
        }
        let slice = read(0, FRAME_BYTES + 3).await;
        assert_eq!((slice.lines, slice.bytes.len()), (2, 10), "the begun long line goes again");
    }

    #[tokio::test]
    async fn an_empty_log_is_a_log() {
        let (_dir, blobs, index) = sealed(b"").await;
        assert_eq!(index, LogIndex::default());
        let slice = blobs.read_log(&key(), &index, 0, 10, 10).await.unwrap();
        assert!(slice.end && slice.bytes.is_empty());
        assert!(blobs.exists(&key().object()).await.unwrap());
    }

    #[tokio::test]
    async fn the_object_is_one_zstd_stream_under_a_key_of_the_run() {
        let text: Vec<u8> = (0..2500).flat_map(|n| format!("{n}\n").into_bytes()).collect();
        let (_dir, blobs, _) = sealed(&text).await;
        let packed = blobs.get(&key().object(), u64::MAX).await.unwrap();
        assert_eq!(zstd::decode_all(&packed[..]).unwrap(), text);
        let listed = blobs.list(&LogKey::run_prefix(key().run), 10).await.unwrap();
        assert_eq!(listed.len(), 2);
    }

    #[tokio::test]
    async fn damage_and_a_missing_segment_are_told() {
        let (dir, blobs, index) = sealed(b"a\nb\n").await;
        let mut packed = blobs.get(&key().object(), 1000).await.unwrap().to_vec();
        packed.truncate(packed.len() / 2);
        blobs.put(&key().object(), packed.into()).await.unwrap();
        let read = blobs.read_log(&key(), &index, 0, 1, 10).await;
        assert!(matches!(read, Err(BlobError::Damaged { .. })), "{read:?}");
        let other = LogKey { step: "x".into(), ..key() };
        assert!(blobs.seal_log(&other, &dir.path().join("none")).await.is_err());
        assert!(matches!(blobs.log_index(&other).await, Err(BlobError::NotFound(_))));
        assert!(!blobs.exists(&other.object()).await.unwrap(), "nothing half-made is left");
    }
}
