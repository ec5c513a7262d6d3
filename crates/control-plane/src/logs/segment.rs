//! The live log of one step: an append-only file of whole lines `<µs> <o|e|m> <text>\n`, addressed by byte offset.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;

/// What became of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Appended {
    /// The file grew to this length.
    Grown(u64),
    /// All of it was there already.
    Known,
    /// It begins beyond the end: the sender must go back.
    Gap,
}

/// An open segment.
#[derive(Debug)]
pub(super) struct Segment {
    file: File,
    len: u64,
    durable: u64,
}

impl Segment {
    /// Opens or creates the file. What is in it from an earlier process is made durable first, so that it may be
    /// acknowledged; a last line that was cut short by a crash is dropped, its sender still has it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
        let found = file.metadata()?.len();
        let len = whole_lines(&mut file, found)?;
        if len < found {
            file.set_len(len)?;
        }
        file.seek(SeekFrom::Start(len))?;
        file.sync_data()?;
        Ok(Self { file, len, durable: len })
    }

    /// Appends `data`, which stands at `offset` of the stream. On an error the file is as it was before.
    pub(super) fn append(&mut self, offset: u64, data: &Bytes) -> io::Result<Appended> {
        let end = offset + data.len() as u64;
        if offset > self.len {
            return Ok(Appended::Gap);
        }
        if end <= self.len {
            return Ok(Appended::Known);
        }
        // `offset <= len < end`, so the difference is below `data.len()`.
        let fresh = &data[(self.len - offset) as usize..];
        if let Err(error) = self.file.write_all(fresh) {
            // A half-written chunk would shift every offset after it.
            self.file.set_len(self.len)?;
            self.file.seek(SeekFrom::Start(self.len))?;
            return Err(error);
        }
        self.len = end;
        Ok(Appended::Grown(end))
    }

    /// Makes everything written durable and tells how much that is.
    pub(super) fn sync(&mut self) -> io::Result<u64> {
        if self.durable < self.len {
            if let Err(error) = self.file.sync_data() {
                // After a failed flush the system may forget what it could not write: a second flush would prove nothing.
                self.len = self.durable;
                self.file.set_len(self.len)?;
                self.file.seek(SeekFrom::Start(self.len))?;
                return Err(error);
            }
            self.durable = self.len;
        }
        Ok(self.durable)
    }

    /// Bytes that survive a crash.
    pub(super) fn durable(&self) -> u64 {
        self.durable
    }
}

/// Length of the prefix of `file` that ends with a line end.
fn whole_lines(file: &mut File, len: u64) -> io::Result<u64> {
    const BLOCK: u64 = 64 * 1024;
    let mut end = len;
    let mut block = Vec::new();
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        block.clear();
        file.seek(SeekFrom::Start(start))?;
        Read::by_ref(file).take(end - start).read_to_end(&mut block)?;
        if let Some(at) = block.iter().rposition(|b| *b == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

/// Reads whole lines from `offset` on, at most about `limit` bytes but at least one line if there is one.
pub(super) fn read_lines(path: &Path, offset: u64, limit: usize) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut data = Vec::new();
    Read::by_ref(&mut file).take(limit as u64).read_to_end(&mut data)?;
    while !data.is_empty() && !data.contains(&b'\n') {
        let read = Read::by_ref(&mut file).take(limit as u64).read_to_end(&mut data)?;
        if read == 0 {
            break;
        }
    }
    let whole = data.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    data.truncate(whole);
    Ok(data)
}

/// The segment of one step: `<root>/<job>/<epoch>/<step>.seg`.
pub(super) fn segment_path(dir: &Path, step_file: &str) -> PathBuf {
    dir.join(format!("{step_file}.seg"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_append_overlaps_repeats_or_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.seg");
        let mut segment = Segment::open(&path).unwrap();
        assert_eq!(segment.append(0, &Bytes::from_static(b"1 o a\n")).unwrap(), Appended::Grown(6));
        assert_eq!(segment.append(0, &Bytes::from_static(b"1 o a\n")).unwrap(), Appended::Known);
        assert_eq!(segment.append(7, &Bytes::from_static(b"x\n")).unwrap(), Appended::Gap);
        assert_eq!(segment.append(3, &Bytes::from_static(b" a\n2 o b\n")).unwrap(), Appended::Grown(12));
        assert_eq!(segment.durable(), 0);
        assert_eq!(segment.sync().unwrap(), 12);
        assert_eq!(read_lines(&path, 0, 1).unwrap(), b"1 o a\n");
    }

    #[test]
    fn a_line_that_a_crash_cut_short_is_dropped_at_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.seg");
        std::fs::write(&path, format!("{}\n1 o b\n2 o hal", "x".repeat(100_000))).unwrap();
        assert_eq!(Segment::open(&path).unwrap().durable(), 100_007);
        std::fs::write(&path, "x".repeat(100_000)).unwrap();
        assert_eq!(Segment::open(&path).unwrap().durable(), 0);
    }

    proptest! {
        #[test]
        fn any_order_of_resent_chunks_gives_the_stream_once(
            cuts in proptest::collection::vec(0usize..400, 1..30)
        ) {
            let stream: Vec<u8> = (0..100).flat_map(|n| format!("{n} o\n").into_bytes()).collect();
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s.seg");
            let mut segment = Segment::open(&path).unwrap();
            let mut len = 0;
            for cut in cuts {
                // The sender goes on from anywhere at or before what it was told, as after a reconnect.
                let start = cut.min(len);
                let end = (start + 100).min(stream.len());
                let chunk = Bytes::copy_from_slice(&stream[start..end]);
                if let Appended::Grown(to) = segment.append(start as u64, &chunk).unwrap() {
                    len = to as usize;
                }
            }
            segment.sync().unwrap();
            prop_assert_eq!(std::fs::read(&path).unwrap(), &stream[..len]);
        }
    }
}
