//! Places in a source text.

/// A place: line and column from 1, the column in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pos {
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub col: u32,
}

/// From a place to another; the end is exclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// First character.
    pub start: Pos,
    /// After the last character.
    pub end: Pos,
}

impl Span {
    /// A part of one line.
    pub fn on_line(line: u32, col: u32, length: u32) -> Self {
        Self { start: Pos { line, col }, end: Pos { line, col: col + length } }
    }
}

/// Translates between bytes and places.
#[derive(Debug)]
pub struct Lines<'a> {
    source: &'a str,
    starts: Vec<usize>,
}

impl<'a> Lines<'a> {
    /// Indexes a text.
    pub fn new(source: &'a str) -> Self {
        let mut starts = vec![0];
        starts.extend(source.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1));
        Self { source, starts }
    }

    /// A line without its line end; lines count from 1.
    pub fn line(&self, line: u32) -> &'a str {
        let index = (line as usize).saturating_sub(1);
        let Some(&start) = self.starts.get(index) else { return "" };
        let end = self.starts.get(index + 1).copied().unwrap_or(self.source.len());
        self.source[start..end].trim_end_matches(['\n', '\r'])
    }

    /// The byte of a place; past the end of a line it is the end of the line.
    pub fn byte(&self, pos: Pos) -> usize {
        let index = (pos.line as usize).saturating_sub(1);
        let Some(&start) = self.starts.get(index) else { return self.source.len() };
        let line = self.line(pos.line);
        let column = (pos.col as usize).saturating_sub(1);
        start + line.char_indices().nth(column).map_or(line.len(), |(byte, _)| byte)
    }

    /// The place of a byte.
    pub fn pos(&self, byte: usize) -> Pos {
        let byte = byte.min(self.source.len());
        let index = self.starts.partition_point(|start| *start <= byte).saturating_sub(1);
        let before = self.source.get(self.starts[index]..byte).unwrap_or_default();
        Pos { line: index as u32 + 1, col: before.chars().count() as u32 + 1 }
    }

    /// The text of a span.
    pub fn text(&self, span: Span) -> &'a str {
        let (start, end) = (self.byte(span.start), self.byte(span.end));
        self.source.get(start..end.max(start)).unwrap_or_default()
    }
}
