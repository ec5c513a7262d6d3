//! From the bytes of a pipe to lines of a log: `<microseconds since the epoch> <o|e|m> <text>\n`.

use kici_engine::time::Ts;

use crate::mask::Mask;

/// A longer line is cut into several.
pub const MAX_LINE_BYTES: usize = 64 * 1024;

/// Who wrote a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Standard output of the command.
    Out,
    /// Standard error of the command.
    Err,
    /// The agent.
    Agent,
}

impl Channel {
    const fn letter(self) -> u8 {
        match self {
            Self::Out => b'o',
            Self::Err => b'e',
            Self::Agent => b'm',
        }
    }
}

/// Masked, finished lines.
#[derive(Debug, Default)]
pub struct Lines {
    /// The lines, each with its end.
    pub bytes: Vec<u8>,
    /// How many.
    pub count: u64,
}

impl Lines {
    /// A line of the agent; line ends inside `text` become spaces.
    pub fn say(&mut self, at: Ts, text: &str) {
        self.push(at, Channel::Agent, |out| out.extend(text.bytes().map(|b| if b == b'\n' { b' ' } else { b })));
    }

    /// Empties it and keeps its memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.count = 0;
    }

    fn push(&mut self, at: Ts, channel: Channel, text: impl FnOnce(&mut Vec<u8>)) {
        self.bytes.extend_from_slice(at.as_micros().to_string().as_bytes());
        self.bytes.extend_from_slice(&[b' ', channel.letter(), b' ']);
        let start = self.bytes.len();
        text(&mut self.bytes);
        if std::str::from_utf8(&self.bytes[start..]).is_err() {
            let clean = String::from_utf8_lossy(&self.bytes[start..]).into_owned();
            self.bytes.truncate(start);
            self.bytes.extend_from_slice(clean.as_bytes());
        }
        self.bytes.push(b'\n');
        self.count += 1;
    }
}

/// Cuts one pipe into lines. A value split over two reads is seen whole, since masking happens on whole lines; of a line that
/// is too long the end is held back until it cannot begin a value.
#[derive(Debug)]
pub struct Splitter {
    channel: Channel,
    open: Vec<u8>,
}

impl Splitter {
    /// For one pipe.
    pub fn new(channel: Channel) -> Self {
        Self { channel, open: Vec::new() }
    }

    /// Takes bytes as they were read at `at` and appends the lines that they finish.
    pub fn push(&mut self, mut bytes: &[u8], at: Ts, mask: &Mask, into: &mut Lines) {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            let (line, rest) = bytes.split_at(end);
            bytes = &rest[1..];
            if self.open.is_empty() {
                finish(self.channel, line, at, mask, into);
            } else {
                self.open.extend_from_slice(line);
                finish(self.channel, &self.open, at, mask, into);
                self.open.clear();
            }
        }
        self.open.extend_from_slice(bytes);
        if self.open.len() > MAX_LINE_BYTES {
            self.cut(at, mask, into);
        }
    }

    /// Ends the line that is open, if any.
    pub fn flush(&mut self, at: Ts, mask: &Mask, into: &mut Lines) {
        if !self.open.is_empty() {
            finish(self.channel, &self.open, at, mask, into);
            self.open.clear();
        }
    }

    fn cut(&mut self, at: Ts, mask: &Mask, into: &mut Lines) {
        let kept = last_segment(&self.open).len();
        self.open.drain(..self.open.len() - kept);
        if self.open.len() > MAX_LINE_BYTES {
            let mut taken = 0;
            into.push(at, self.channel, |out| taken = mask.mask_prefix(&self.open, out));
            self.open.drain(..taken);
        }
    }
}

fn finish(channel: Channel, line: &[u8], at: Ts, mask: &Mask, into: &mut Lines) {
    let line = last_segment(line);
    into.push(at, channel, |out| mask.mask(line, out));
}

/// A progress display rewrites its line after a carriage return: only what it showed last counts.
fn last_segment(line: &[u8]) -> &[u8] {
    let end = line.iter().rposition(|b| *b != b'\r').map_or(0, |at| at + 1);
    let start = line[..end].iter().rposition(|b| *b == b'\r').map_or(0, |at| at + 1);
    &line[start..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mask::Masker;

    const AT: Ts = Ts::from_micros(7);

    fn split(chunks: &[&[u8]], masker: &Masker) -> (String, u64) {
        let mut splitter = Splitter::new(Channel::Out);
        let mut lines = Lines::default();
        for chunk in chunks {
            splitter.push(chunk, AT, &masker.current(), &mut lines);
        }
        splitter.flush(AT, &masker.current(), &mut lines);
        (String::from_utf8(lines.bytes).expect("UTF-8"), lines.count)
    }

    #[test]
    fn lines_are_cut_collapsed_cleaned_and_flushed() {
        let none = Masker::default();
        let cases: [(&[&[u8]], &str, u64); 6] = [
            (&[b"a\nb\n"], "7 o a\n7 o b\n", 2),
            (&[b"a", b"b\r\n"], "7 o ab\n", 1),
            (&[b"10%\r50%\r100%\n"], "7 o 100%\n", 1),
            (&[b"no end"], "7 o no end\n", 1),
            (&[b"bad \xff byte\n\n"], "7 o bad \u{fffd} byte\n7 o \n", 2),
            (&[], "", 0),
        ];
        for (chunks, text, count) in cases {
            assert_eq!(split(chunks, &none), (text.to_owned(), count));
        }
    }

    #[test]
    fn a_long_line_is_cut_but_loses_nothing() {
        let long = vec![b'x'; 3 * MAX_LINE_BYTES + 5];
        let (text, count) = split(&[&long, b"\n"], &Masker::new(["some secret"]));
        assert!(count >= 2);
        assert_eq!(text.bytes().filter(|b| *b == b'x').count(), long.len());
    }

    proptest! {
        #[test]
        fn no_secret_gets_out_however_the_output_is_cut(
            head in "[ab\\n]{0,40}", tail in "[ab\\n]{0,40}", cuts in proptest::collection::vec(1_usize..9, 1..30),
            filler in prop_oneof![Just(0), MAX_LINE_BYTES - 40..MAX_LINE_BYTES + 40],
        ) {
            let secret = "s3cr3t-value";
            let text = format!("{head}{}{secret}{tail}{secret}", "x".repeat(filler));
            let mut chunks: Vec<&[u8]> = Vec::new();
            let mut rest = text.as_bytes();
            if rest.len() > 300 {
                let (first, last) = rest.split_at(rest.len() - 120);
                chunks.push(first);
                rest = last;
            }
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break; }
                let (first, last) = rest.split_at((*cut).min(rest.len()));
                chunks.push(first);
                rest = last;
            }
            let (out, _) = split(&chunks, &Masker::new([secret]));
            prop_assert!(!out.contains(secret));
            prop_assert_eq!(out.matches("***").count(), 2);
        }
    }
}
