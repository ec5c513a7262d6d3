//! Reading logs back, live or sealed, by line number.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

use kici_api::dto::logs::{LogLine, LogRange, LogStream};
use kici_blobs::{BlobError, Blobs, log as sealed};
use kici_engine::ids::RunId;
use kici_engine::time::Ts;
use kici_store::model::{LogState, Step};

use super::segment::{read_lines, segment_path};
use super::writer::{delivery_dir, read_mark};
use super::{LogKey, StepFile};

/// Bytes that one range reads at most.
const MAX_BYTES: usize = 1024 * 1024;
/// Places that are remembered so that a follower does not count lines from the start each time.
const MAX_MARKS: usize = 1024;

/// A log that cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogReadError {
    /// The segment.
    #[error("segment: {0}")]
    Io(#[from] io::Error),
    /// The sealed object.
    #[error(transparent)]
    Blob(#[from] BlobError),
}

/// Reads logs.
#[derive(Clone)]
pub(crate) struct LogReader {
    root: PathBuf,
    blobs: Blobs,
    marks: Arc<Mutex<Marks>>,
}

/// Byte offsets of lines in segments, as last read; the oldest makes room.
#[derive(Debug, Default)]
struct Marks {
    by_place: HashMap<(LogKey, StepFile, u64), u64>,
    oldest_first: VecDeque<(LogKey, StepFile, u64)>,
}

impl Marks {
    fn put(&mut self, place: (LogKey, StepFile, u64), offset: u64) {
        if self.by_place.insert(place.clone(), offset).is_none() {
            self.oldest_first.push_back(place);
        }
        while self.oldest_first.len() > MAX_MARKS {
            if let Some(oldest) = self.oldest_first.pop_front() {
                self.by_place.remove(&oldest);
            }
        }
    }
}

impl LogReader {
    /// Reads below `root` and from `blobs`.
    pub(crate) fn new(root: PathBuf, blobs: Blobs) -> Self {
        Self { root, blobs, marks: Arc::default() }
    }

    /// Lines from `from_seq` on. `over` is true when the job has ended, so that a step without any log is complete.
    ///
    /// # Errors
    /// [`LogReadError`].
    pub(crate) async fn range(
        &self,
        run: RunId,
        key: LogKey,
        step: &StepFile,
        from_seq: u64,
        limit: u32,
        over: bool,
    ) -> Result<LogRange, LogReadError> {
        if let Some(range) = self.live(key, step, from_seq, limit).await? {
            return Ok(range);
        }
        let object = object_key(run, key, step);
        match self.blobs.log_index(&object).await {
            Ok(index) => {
                let slice = self.blobs.read_log(&object, &index, from_seq, u64::from(limit), MAX_BYTES).await?;
                let lines = parse(&slice.bytes, from_seq);
                Ok(LogRange { next_seq: from_seq + slice.lines, lines, complete: slice.end })
            }
            Err(BlobError::NotFound(_)) => Ok(LogRange { lines: Vec::new(), next_seq: from_seq, complete: over }),
            Err(error) => Err(error.into()),
        }
    }

    /// True when nothing will be added to the log of a step.
    pub(crate) async fn is_complete(&self, step: &Step) -> bool {
        if step.log_state == Some(LogState::Sealed) || (step.status.is_terminal() && step.log_bytes == 0) {
            return true;
        }
        let dir = delivery_dir(&self.root, LogKey { job: step.job_id, epoch: step.epoch });
        StepFile::stored(&step.step_key).is_ok_and(|file| read_mark(&dir, &file).is_some())
    }

    /// From the segment; none when there is none (any more).
    async fn live(
        &self,
        key: LogKey,
        step: &StepFile,
        from_seq: u64,
        limit: u32,
    ) -> Result<Option<LogRange>, LogReadError> {
        let dir = delivery_dir(&self.root, key);
        let path = segment_path(&dir, step.as_str());
        let place = (key, step.clone(), from_seq);
        let known = self.marks.lock().unwrap_or_else(PoisonError::into_inner).by_place.get(&place).copied();
        let step = step.clone();
        let read = tokio::task::spawn_blocking(move || {
            // The mark is read first: what is then found at the end of the segment is all there is.
            let sealed = read_mark(&dir, &step).is_some();
            let found = read_segment(&path, known, from_seq, limit)?;
            Ok(found.map(|(data, end)| {
                let all = sealed && fs::metadata(&path).is_ok_and(|file| file.len() <= end);
                (data, end, all)
            }))
        });
        let read: io::Result<_> = read.await.map_err(io::Error::other)?;
        let Some((data, end, complete)) = read? else { return Ok(None) };
        let lines = parse(&data, from_seq);
        let next_seq = from_seq + lines.len() as u64;
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        marks.put((key, place.1, next_seq), end);
        Ok(Some(LogRange { complete, lines, next_seq }))
    }
}

/// Lines `from_seq..` of a segment and the offset behind them; `None` when the file is gone.
fn read_segment(path: &Path, known: Option<u64>, from_seq: u64, limit: u32) -> io::Result<Option<(Vec<u8>, u64)>> {
    let mut offset = known.unwrap_or(0);
    let mut skip = if known.is_some() { 0 } else { from_seq };
    loop {
        let mut data = match read_lines(path, offset, MAX_BYTES) {
            Ok(data) => data,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let ends = |count: u64| nth_end(&data, count);
        if skip > 0 {
            let skipped = ends(skip);
            offset += skipped.bytes as u64;
            skip -= skipped.lines;
            if data.is_empty() {
                return Ok(Some((data, offset)));
            }
            continue;
        }
        let kept = ends(u64::from(limit)).bytes;
        data.truncate(kept);
        return Ok(Some((data, offset + kept as u64)));
    }
}

struct Prefix {
    lines: u64,
    bytes: usize,
}

/// The prefix of `data` with up to `count` lines.
fn nth_end(data: &[u8], count: u64) -> Prefix {
    let mut prefix = Prefix { lines: 0, bytes: 0 };
    for (at, _) in data.iter().enumerate().filter(|(_, b)| **b == b'\n') {
        if prefix.lines == count {
            break;
        }
        prefix = Prefix { lines: prefix.lines + 1, bytes: at + 1 };
    }
    prefix
}

/// `<µs> <o|e|m> <text>` lines as the API gives them. A line that is none (it cannot come from our agents) is shown whole.
fn parse(data: &[u8], first: u64) -> Vec<LogLine> {
    let text = String::from_utf8_lossy(data);
    text.lines().zip(first..).map(|(line, seq)| parse_line(line, seq)).collect()
}

fn parse_line(line: &str, seq: u64) -> LogLine {
    let parsed = line.split_once(' ').and_then(|(micros, rest)| {
        let at = Ts::from_micros(micros.parse().ok()?);
        let (letter, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let mut letters = letter.chars();
        let stream = LogStream::from_letter(letters.next()?)?;
        letters.next().is_none().then(|| LogLine { seq, at, stream, text: text.to_owned() })
    });
    parsed.unwrap_or_else(|| LogLine { seq, at: Ts::from_micros(0), stream: LogStream::Meta, text: line.to_owned() })
}

/// Where a sealed log lies.
pub(super) fn object_key(run: RunId, key: LogKey, step: &StepFile) -> sealed::LogKey {
    sealed::LogKey { run, job: key.job, epoch: key.epoch, step: step.as_str().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_the_same_with_and_without_a_remembered_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.seg");
        let text: String = (0..5000).map(|n| format!("{n} o line {n} {}\n", "x".repeat(n % 700))).collect();
        std::fs::write(&path, &text).unwrap();
        let mut known = None;
        let mut seq = 0;
        loop {
            let fresh = read_segment(&path, None, seq, 700).unwrap().unwrap();
            let (data, end) = read_segment(&path, known, seq, 700).unwrap().unwrap();
            assert_eq!((&data, end), (&fresh.0, fresh.1));
            let lines = parse(&data, seq);
            if lines.is_empty() {
                break;
            }
            assert_eq!(lines[0].seq, seq);
            assert!(lines[0].text.starts_with(&format!("line {seq} ")));
            seq += lines.len() as u64;
            known = Some(end);
        }
        assert_eq!(seq, 5000);
        assert_eq!(read_segment(&path, None, 6000, 10).unwrap().unwrap().0, b"");
        assert!(read_segment(&dir.path().join("b"), None, 0, 10).unwrap().is_none());
    }

    #[test]
    fn lines_are_taken_apart_and_odd_ones_shown_whole() {
        let lines = parse(b"1700000000000000 e some text\n17 o \n17 o\nodd\n", 5);
        assert_eq!((lines[0].seq, lines[0].stream, lines[0].text.as_str()), (5, LogStream::Err, "some text"));
        assert_eq!((lines[1].text.as_str(), lines[2].text.as_str()), ("", ""));
        assert_eq!((lines[3].stream, lines[3].text.as_str()), (LogStream::Meta, "odd"));
    }
}
