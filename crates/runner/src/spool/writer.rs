//! Writing the log of one step: the head goes out live; beyond the limit the newest lines wait in a ring of files and follow a
//! marker when the step ends.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kici_engine::time::Ts;

use super::{Seal, Spool};
use crate::config::Pressure;
use crate::lines::Lines;

/// A full disk is tried again after this long.
const DISK_RETRY: Duration = Duration::from_secs(1);
/// Files that the newest half is kept in; the oldest goes as a whole.
const SEGMENTS: u64 = 16;

/// The writing end of the log of one step.
#[derive(Debug)]
pub struct StepLog {
    spool: Arc<Spool>,
    index: usize,
    file: Arc<File>,
    path: PathBuf,
    written: u64,
    lines: u64,
    tail: Option<Tail>,
    /// What was left out since the last line that was kept, for want of room: lines, bytes, and when it began.
    left_out: Option<(u64, u64, Ts)>,
    /// All that was left out for want of room: lines and bytes.
    missing: (u64, u64),
}

/// Counts a log that waits, until it goes on or nobody waits for it any more.
struct HeldBack(metrics::Gauge);

impl HeldBack {
    fn begin() -> Self {
        let gauge = metrics::gauge!("kici_agent_log_backpressure_active");
        gauge.increment(1.0);
        Self(gauge)
    }
}

impl Drop for HeldBack {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

#[derive(Debug)]
struct Tail {
    segments: VecDeque<Segment>,
    made: u64,
    dropped_bytes: u64,
    dropped_lines: u64,
}

#[derive(Debug)]
struct Segment {
    file: File,
    path: PathBuf,
    bytes: u64,
    lines: u64,
}

impl StepLog {
    pub(super) fn new(spool: Arc<Spool>, index: usize, file: Arc<File>, path: PathBuf) -> Self {
        Self { spool, index, file, path, written: 0, lines: 0, tail: None, left_out: None, missing: (0, 0) }
    }

    /// Appends finished lines. While too much is unacknowledged it waits, or leaves them out, as the limits say; while the disk
    /// is full it waits.
    ///
    /// # Errors
    /// When the file cannot be written for another reason than a full disk.
    pub async fn append(&mut self, lines: &Lines) -> io::Result<()> {
        let half = self.spool.limits.max_step_bytes / 2;
        let mut rest = lines.bytes.as_slice();
        let mut count = lines.count;
        if self.tail.is_none() {
            let fits = if half == 0 { rest.len() } else { whole_lines(rest, half.saturating_sub(self.written)) };
            let (head, over) = rest.split_at(fits);
            let head_lines = if over.is_empty() { count } else { newlines(head) };
            if self.spool.limits.pressure == Pressure::Drop && !self.has_room() {
                self.leave_out(count, rest);
                return Ok(());
            }
            self.wait_for_room().await;
            self.say_left_out().await?;
            self.write(head).await?;
            self.lines += head_lines;
            (rest, count) = (over, count - head_lines);
        }
        if !rest.is_empty() {
            self.keep(rest, count, half).await?;
        }
        Ok(())
    }

    /// Ends the log: what waited follows the marker, and the stream is sealed.
    ///
    /// # Errors
    /// When the rest cannot be written.
    pub async fn close(mut self, at: Ts) -> io::Result<Seal> {
        let mut seal = Seal::default();
        self.say_left_out().await?;
        (seal.missing_lines, seal.missing_bytes) = self.missing;
        if let Some(mut tail) = self.tail.take() {
            seal.missing_bytes += tail.dropped_bytes;
            seal.missing_lines += tail.dropped_lines;
            count_cut(tail.dropped_lines);
            if tail.dropped_lines > 0 {
                let mut marker = Lines::default();
                let (bytes, lines) = (tail.dropped_bytes, tail.dropped_lines);
                marker.say(at, &format!("[{lines} lines, {bytes} bytes left out: the log is over its limit]"));
                self.write(&marker.bytes).await?;
                self.lines += 1;
            }
            while let Some(segment) = tail.segments.pop_front() {
                self.copy(&segment).await?;
                self.lines += segment.lines;
                std::fs::remove_file(&segment.path)?;
            }
        }
        (seal.offset, seal.lines) = (self.written, self.lines);
        let text = serde_json::to_vec(&seal)?;
        while let Err(error) = std::fs::write(seal_path(&self.path), &text) {
            self.spool.ride_out(error).await?;
        }
        self.spool.lock().steps[self.index].seal = Some(seal);
        self.spool.more.notify_one();
        Ok(seal)
    }

    fn has_room(&self) -> bool {
        self.spool.unacked() < self.spool.limits.max_unacked_bytes
    }

    fn leave_out(&mut self, lines: u64, bytes: &[u8]) {
        let size = bytes.len() as u64;
        let left = self.left_out.get_or_insert_with(|| {
            metrics::counter!("kici_agent_log_backpressure_events_total").increment(1);
            (0, 0, time_of(bytes))
        });
        (left.0, left.1) = (left.0 + lines, left.1 + size);
        self.missing = (self.missing.0 + lines, self.missing.1 + size);
        metrics::counter!("kici_agent_log_lines_dropped_total", "mode" => "backpressure").increment(lines);
    }

    /// A line in the place of what was left out.
    async fn say_left_out(&mut self) -> io::Result<()> {
        let Some((lines, bytes, at)) = self.left_out.take() else { return Ok(()) };
        let mut marker = Lines::default();
        marker.say(at, &format!("[{lines} lines dropped, {bytes} bytes: the orchestrator did not take them in time]"));
        self.write(&marker.bytes).await?;
        self.lines += 1;
        Ok(())
    }

    async fn wait_for_room(&self) {
        if self.has_room() {
            return;
        }
        metrics::counter!("kici_agent_log_backpressure_events_total").increment(1);
        let _held_back = HeldBack::begin();
        self.room().await;
    }

    async fn room(&self) {
        loop {
            let room = self.spool.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            if self.has_room() {
                return;
            }
            room.await;
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.file.write_at(&bytes[done..], self.written + done as u64) {
                Ok(n) => done += n,
                Err(error) => self.spool.ride_out(error).await?,
            }
        }
        if !bytes.is_empty() {
            self.written += bytes.len() as u64;
            self.spool.lock().steps[self.index].written = self.written;
            self.spool.more.notify_one();
        }
        Ok(())
    }

    /// Adds to the newest half and lets go of its oldest part.
    async fn keep(&mut self, bytes: &[u8], lines: u64, half: u64) -> io::Result<()> {
        let tail = self.tail.get_or_insert_with(|| Tail {
            segments: VecDeque::new(),
            made: 0,
            dropped_bytes: 0,
            dropped_lines: 0,
        });
        let full = tail.segments.back().is_none_or(|last| last.bytes >= half / SEGMENTS);
        if full {
            let path = self.path.with_extension(format!("tail{}", tail.made));
            let file = loop {
                match File::options().read(true).append(true).create_new(true).open(&path) {
                    Ok(file) => break file,
                    Err(error) => self.spool.ride_out(error).await?,
                }
            };
            tail.made += 1;
            tail.segments.push_back(Segment { file, path, bytes: 0, lines: 0 });
        }
        if let Some(last) = tail.segments.back_mut() {
            let mut done = 0;
            while done < bytes.len() {
                match last.file.write(&bytes[done..]) {
                    Ok(n) => done += n,
                    Err(error) => self.spool.ride_out(error).await?,
                }
            }
            last.bytes += bytes.len() as u64;
            last.lines += lines;
        }
        while tail.segments.len() > 1 && tail.segments.iter().map(|s| s.bytes).sum::<u64>() > half {
            if let Some(oldest) = tail.segments.pop_front() {
                tail.dropped_bytes += oldest.bytes;
                tail.dropped_lines += oldest.lines;
                std::fs::remove_file(&oldest.path)?;
            }
        }
        Ok(())
    }

    async fn copy(&mut self, segment: &Segment) -> io::Result<()> {
        let mut from = File::open(&segment.path)?;
        let mut buffer = vec![0; 256 * 1024];
        loop {
            let n = from.read(&mut buffer)?;
            if n == 0 {
                return Ok(());
            }
            self.write(&buffer[..n]).await?;
        }
    }
}

/// A log that nobody closes, because what wrote it failed or was dropped, ends at what was written: an upload waits for the end
/// of every log that was opened.
impl Drop for StepLog {
    fn drop(&mut self) {
        if self.spool.lock().steps[self.index].seal.is_some() {
            return;
        }
        let (missing_lines, missing_bytes) = self.missing;
        let mut seal = Seal { offset: self.written, lines: self.lines, missing_bytes, missing_lines };
        if let Some(tail) = self.tail.take() {
            seal.missing_bytes += tail.dropped_bytes;
            seal.missing_lines += tail.dropped_lines;
            count_cut(tail.dropped_lines);
            for segment in tail.segments {
                seal.missing_bytes += segment.bytes;
                seal.missing_lines += segment.lines;
                // The directory goes with the job.
                let _ = std::fs::remove_file(&segment.path);
            }
        }
        let kept = serde_json::to_vec(&seal)
            .map_err(io::Error::from)
            .and_then(|text| std::fs::write(seal_path(&self.path), text));
        if let Err(error) = kept {
            tracing::warn!(log = %self.path.display(), %error, "the end of a log cannot be written down");
        }
        self.spool.lock().steps[self.index].seal = Some(seal);
        self.spool.more.notify_one();
    }
}

impl Spool {
    /// Waits out a full disk; any other error is returned.
    pub(crate) async fn ride_out(&self, error: io::Error) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                if !std::mem::replace(&mut self.lock().disk_full, true) {
                    tracing::error!(dir = %self.dir.display(), "the disk is full: commands are paused until there is room");
                }
                tokio::time::sleep(DISK_RETRY).await;
                self.lock().disk_full = false;
                Ok(())
            }
            _ => Err(error),
        }
    }
}

/// The stream that an earlier process left, ended as it wrote down or else at its last whole line.
pub(super) fn recover(path: &Path) -> io::Result<(Arc<File>, Seal)> {
    let mut file = File::options().read(true).write(true).open(path)?;
    if let Some(seal) = std::fs::read(seal_path(path)).ok().and_then(|text| serde_json::from_slice(&text).ok()) {
        return Ok((Arc::new(file), seal));
    }
    let mut seal = Seal::default();
    let mut at = 0;
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        if let Some(end) = buffer[..n].iter().rposition(|b| *b == b'\n') {
            seal.offset = at + end as u64 + 1;
        }
        seal.lines += newlines(&buffer[..n]);
        at += n as u64;
    }
    file.set_len(seal.offset)?;
    recover_tail(path, &file, &mut seal)?;
    std::fs::write(seal_path(path), serde_json::to_vec(&seal)?)?;
    Ok((Arc::new(file), seal))
}

/// The newest lines of a stream over its limit. How much the limit left out is not known any more, and said so.
fn recover_tail(path: &Path, file: &File, seal: &mut Seal) -> io::Result<()> {
    let prefix = format!("{}.tail", path.file_name().unwrap_or_default().to_string_lossy());
    let mut parts: Vec<(u64, PathBuf)> = std::fs::read_dir(path.parent().unwrap_or(path))?
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix(&prefix)?.parse().ok()?;
            Some((number, entry.path()))
        })
        .collect();
    parts.sort();
    if parts.is_empty() {
        return Ok(());
    }
    let mut rest = Lines::default();
    rest.say(Ts::from_micros(0), "[lines may be left out here: the log is over its limit and the agent was restarted]");
    for (_, part) in parts {
        let mut bytes = std::fs::read(&part)?;
        bytes.truncate(bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1));
        rest.count += newlines(&bytes);
        rest.bytes.extend_from_slice(&bytes);
        std::fs::remove_file(part)?;
        file.write_all_at(&rest.bytes, seal.offset)?;
        seal.offset += rest.bytes.len() as u64;
        seal.lines += rest.count;
        rest.clear();
    }
    Ok(())
}

/// Lines that the limit of the log left out.
fn count_cut(lines: u64) {
    metrics::counter!("kici_agent_log_lines_dropped_total", "mode" => "limit").increment(lines);
}

fn seal_path(path: &Path) -> PathBuf {
    path.with_extension("seal")
}

/// When the first line was written.
fn time_of(lines: &[u8]) -> Ts {
    let digits = lines.split(|b| *b == b' ').next().unwrap_or_default();
    Ts::from_micros(std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok()).unwrap_or_default())
}

fn newlines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|b| **b == b'\n').count() as u64
}

/// How many of the first `limit` bytes are whole lines.
fn whole_lines(bytes: &[u8], limit: u64) -> usize {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if bytes.len() <= limit {
        return bytes.len();
    }
    bytes[..limit].iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1)
}
