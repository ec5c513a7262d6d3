//! YAML 1.2 as a tree that remembers where everything stands.
//!
//! Core schema, so `on`, `yes` and `no` are plain strings and `3.10` keeps its text. Anchors, aliases and `<<` are expanded
//! within a budget; duplicate keys, custom tags and keys that are not scalars are faults. A fault that leaves a usable tree
//! does not stop the reading, so that one pass finds all of them.

mod build;
mod lines;

pub use build::{Document, Limits, Reading, read};
pub use lines::{Lines, Pos, Span};

/// A fault in the YAML itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Where.
    pub span: Span,
    /// In words.
    pub message: String,
    /// What to do instead.
    pub help: Option<String>,
}

/// Kinds of faults, each with its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Not YAML.
    Syntax,
    /// A tab in the indentation.
    Tab,
    /// A key twice in one map.
    DuplicateKey,
    /// A tag.
    Tag,
    /// An alias without an anchor, or a merge of something that is not a map.
    Alias,
    /// A key that is not a scalar.
    Key,
    /// Larger than the limits.
    TooLarge,
    /// Nested deeper than the limits.
    TooDeep,
    /// Aliases expand to too much.
    Expansion,
}

impl FaultKind {
    /// The diagnostic code.
    pub fn code(self) -> &'static str {
        match self {
            Self::Syntax => "K0001",
            Self::Tab => "K0002",
            Self::DuplicateKey => "K0003",
            Self::Tag => "K0004",
            Self::Alias => "K0005",
            Self::Key => "K0006",
            Self::TooLarge => "K0701",
            Self::TooDeep => "K0702",
            Self::Expansion => "K0703",
        }
    }
}

/// How a scalar is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Without quotes: may be null, a truth value or a number.
    Plain,
    /// In quotes: a string.
    Quoted,
    /// `|` or `>`: a string.
    Block,
}

/// A value and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Where it is written. For a value that an alias brings: where the anchor is.
    pub span: Span,
    /// What it is.
    pub data: Data,
}

/// What a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// A scalar, as written and without its quotes.
    Scalar(String, Style),
    /// A list.
    List(Vec<Node>),
    /// A map, in source order.
    Map(Vec<Entry>),
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key is written.
    pub span: Span,
    /// Its value.
    pub value: Node,
}

/// The type of a scalar in the core schema.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Core {
    /// `null`, `~` or nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// Anything else.
    Str,
}

impl Node {
    /// The text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.data {
            Data::Scalar(text, _) => Some(text),
            _ => None,
        }
    }

    /// The type of a scalar in the core schema (YAML 1.2.2, 10.3.2); none for lists and maps.
    pub fn core(&self) -> Option<Core> {
        match &self.data {
            Data::Scalar(text, Style::Plain) => Some(core(text)),
            Data::Scalar(..) => Some(Core::Str),
            _ => None,
        }
    }

    /// Whether it is null: absent, `~` or `null`.
    pub fn is_null(&self) -> bool {
        self.core() == Some(Core::Null)
    }

    /// What it is, for messages: `integer 30`, `a list`.
    pub fn describe(&self) -> String {
        match (&self.data, self.core()) {
            (Data::List(_), _) => "a list".to_owned(),
            (Data::Map(_), _) => "a map".to_owned(),
            (Data::Scalar(text, _), core) => match core {
                Some(Core::Null) => "nothing".to_owned(),
                Some(Core::Bool(_)) => format!("boolean {text}"),
                Some(Core::Int(_)) => format!("integer {text}"),
                Some(Core::Float(_)) => format!("number {text}"),
                _ if text.is_empty() => "an empty text".to_owned(),
                // In quotes, and another type without them.
                _ if self::core(text) != Core::Str => format!("the text \"{text}\""),
                _ => format!("`{}`", shorten(text)),
            },
        }
    }
}

/// The first line of a text, at most 40 characters.
pub(crate) fn shorten(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let mut short: String = line.chars().take(40).collect();
    if short.len() < text.trim_end().len() {
        short.push('…');
    }
    short
}

fn core(text: &str) -> Core {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Core::Null,
        "true" | "True" | "TRUE" => return Core::Bool(true),
        "false" | "False" | "FALSE" => return Core::Bool(false),
        _ => {}
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return Core::Str;
    }
    let radix = |prefix, base| digits.strip_prefix(prefix).and_then(|rest| i64::from_str_radix(rest, base).ok());
    if let Some(int) = radix("0x", 16).or_else(|| radix("0o", 8)) {
        return Core::Int(int);
    }
    if digits.bytes().all(|b| b.is_ascii_digit()) {
        return text.parse().map_or(Core::Float(f64::INFINITY), Core::Int);
    }
    let number = digits.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    match text.parse() {
        Ok(float) if number => Core::Float(float),
        _ => Core::Str,
    }
}

#[cfg(test)]
mod tests;
