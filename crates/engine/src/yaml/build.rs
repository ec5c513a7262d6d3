//! Builds trees from the events of the YAML parser.

use std::collections::{HashMap, HashSet};

use saphyr_parser::{Event, Parser, ScalarStyle, Span as Mark, StrInput, Tag};

use super::{Data, Entry, Fault, FaultKind, Lines, Node, Pos, Span, Style};

/// What a file may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the source.
    pub bytes: usize,
    /// Nesting of lists and maps.
    pub depth: usize,
    /// How many times the size of its source a file may have after its aliases are expanded.
    pub expansion: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 512 * 1024, depth: 32, expansion: 10 }
    }
}

/// One document of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Its content.
    pub root: Node,
    /// Whether there are faults in it, though it could be read to its end.
    pub faulty: bool,
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// The documents up to the first fault that stops the reading.
    pub documents: Vec<Document>,
    /// The faults.
    pub faults: Vec<Fault>,
}

/// Reads a file.
pub fn read(source: &str, limits: Limits) -> Reading {
    if source.len() > limits.bytes {
        let message = format!("the file has {} bytes, at most {} are read", source.len(), limits.bytes);
        return Reading { documents: Vec::new(), faults: vec![fault(FaultKind::TooLarge, first_character(), message)] };
    }
    // Editors do not show it, so it does not count in places either (YAML 1.2, 5.2).
    let source = source.strip_prefix('\u{feff}').unwrap_or(source);
    let faults = unprintable(source);
    if !faults.is_empty() {
        return Reading { documents: Vec::new(), faults };
    }
    let lines = Lines::new(source);
    let mut builder = Builder {
        parser: Parser::new_from_str(source),
        lines: &lines,
        limits,
        anchors: HashMap::new(),
        weight: 0,
        budget: source.len().max(1024) * limits.expansion,
        faults: Vec::new(),
    };
    let mut documents = Vec::new();
    if let Err(Stop) = builder.stream(&mut documents) {
        // The fault is recorded; what came before it is still of use.
    }
    Reading { documents, faults: builder.faults }
}

/// The characters that YAML does not allow (1.2, 5.1), one per line. The parser takes a NUL for the end of the file, and
/// others as text that nobody sees.
fn unprintable(source: &str) -> Vec<Fault> {
    let allowed = |c: char| match c {
        '\t' | '\n' | '\r' | '\u{85}' => true,
        '\u{fffe}' | '\u{ffff}' => false,
        c => !c.is_control(),
    };
    let mut faults = Vec::new();
    for (line, text) in (1..).zip(source.split('\n')) {
        if let Some((column, found)) = (1..).zip(text.chars()).find(|(_, c)| !allowed(*c)) {
            let message = format!("not valid YAML: a character that cannot be printed, U+{:04X}", u32::from(found));
            let mut fault = fault(FaultKind::Syntax, Span::on_line(line, column, 1), message);
            fault.help = Some("remove it, or write it as an escape in double quotes".to_owned());
            faults.push(fault);
        }
    }
    faults
}

fn first_character() -> Span {
    Span::on_line(1, 1, 1)
}

fn fault(kind: FaultKind, span: Span, message: impl Into<String>) -> Fault {
    Fault { kind, span, message: message.into(), help: None }
}

/// The rest cannot be read; the reason is among the faults.
struct Stop;

/// A node with its cost, so that an alias is charged for all that it copies.
#[derive(Clone)]
struct Weighed {
    node: Node,
    weight: usize,
    depth: usize,
}

struct Builder<'a> {
    parser: Parser<'a, StrInput<'a>>,
    lines: &'a Lines<'a>,
    limits: Limits,
    anchors: HashMap<usize, Weighed>,
    weight: usize,
    budget: usize,
    faults: Vec<Fault>,
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Mark), Stop> {
        match self.parser.next_event() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => {
                let mark = error.marker();
                let pos = Pos { line: mark.line() as u32, col: mark.col() as u32 + 1 };
                self.syntax(pos, error.info());
                Err(Stop)
            }
            None => Err(Stop),
        }
    }

    fn syntax(&mut self, pos: Pos, info: &str) {
        let line = self.lines.line(pos.line);
        let indentation = &line[..line.len() - line.trim_start().len()];
        if let Some(tab) = indentation.find('\t') {
            let span = Span::on_line(pos.line, indentation[..tab].chars().count() as u32 + 1, 1);
            let mut tab = fault(FaultKind::Tab, span, "a tab in the indentation");
            tab.help = Some("indent with spaces".to_owned());
            self.faults.push(tab);
            return;
        }
        let span = Span { start: pos, end: Pos { col: pos.col + 1, ..pos } };
        let mut syntax = fault(FaultKind::Syntax, span, format!("not valid YAML: {info}"));
        if line.trim_start().starts_with([']', '}']) && info.contains("indentation") {
            syntax.help = Some("indent the closing bracket more than the key it belongs to".to_owned());
        } else if info.contains("mapping values are not allowed") {
            syntax.help = Some("put a text with `: ` in quotes".to_owned());
        }
        self.faults.push(syntax);
    }

    fn stream(&mut self, documents: &mut Vec<Document>) -> Result<(), Stop> {
        loop {
            match self.next()?.0 {
                Event::StreamEnd => return Ok(()),
                Event::DocumentStart(_) => {
                    let before = self.faults.len();
                    let event = self.next()?;
                    let root = self.node(event, 0)?.node;
                    documents.push(Document { root, faulty: self.faults.len() > before });
                    self.anchors.clear();
                }
                _ => {}
            }
        }
    }

    fn span(&self, mark: Mark) -> Span {
        let pos = |marker: saphyr_parser::Marker| Pos { line: marker.line() as u32, col: marker.col() as u32 + 1 };
        let span = Span { start: pos(mark.start), end: pos(mark.end) };
        // An empty value has no characters; the place where it is missing has.
        if span.end <= span.start { Span { end: Pos { col: span.start.col + 1, ..span.start }, ..span } } else { span }
    }

    fn charge(&mut self, weight: usize, span: Span) -> Result<(), Stop> {
        self.weight += weight;
        if self.weight > self.budget {
            let message = format!("aliases expand the file to more than {} times its size", self.limits.expansion);
            self.faults.push(fault(FaultKind::Expansion, span, message));
            return Err(Stop);
        }
        Ok(())
    }

    fn deep(&mut self, depth: usize, span: Span) -> Result<(), Stop> {
        if depth > self.limits.depth {
            let message = format!("nested deeper than {} levels", self.limits.depth);
            self.faults.push(fault(FaultKind::TooDeep, span, message));
            return Err(Stop);
        }
        Ok(())
    }

    fn tag(&mut self, tag: Option<&Tag>, span: Span) {
        let Some(tag) = tag else { return };
        let name = if tag.is_yaml_core_schema() { format!("!!{}", tag.suffix) } else { tag.to_string() };
        let mut tagged = fault(FaultKind::Tag, span, format!("tag `{name}` is not allowed"));
        tagged.help = Some("remove the tag; put a string in quotes".to_owned());
        self.faults.push(tagged);
    }

    fn node(&mut self, (event, mark): (Event<'a>, Mark), depth: usize) -> Result<Weighed, Stop> {
        let span = self.span(mark);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.tag(tag.as_deref(), span);
                self.charge(text.len() + 1, span)?;
                let weight = text.len() + 1;
                // The parser writes `~` for a value that is absent.
                let absent = mark.is_empty() && text == "~";
                let text = if absent { String::new() } else { text.into_owned() };
                let node = Node { span, data: Data::Scalar(text, style_of(style)) };
                Ok(self.keep(anchor, Weighed { node, weight, depth: 0 }))
            }
            Event::SequenceStart(anchor, tag) => {
                self.tag(tag.as_deref(), span);
                self.deep(depth + 1, span)?;
                self.list(anchor, span, depth + 1)
            }
            Event::MappingStart(anchor, tag) => {
                self.tag(tag.as_deref(), span);
                self.deep(depth + 1, span)?;
                self.map(anchor, span, depth + 1)
            }
            Event::Alias(anchor) => self.alias(anchor, span, depth),
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd
            | Event::SequenceEnd
            | Event::MappingEnd => {
                self.faults.push(fault(FaultKind::Syntax, span, "not valid YAML: a value is missing"));
                Err(Stop)
            }
        }
    }

    fn keep(&mut self, anchor: usize, weighed: Weighed) -> Weighed {
        if anchor != 0 {
            self.anchors.insert(anchor, weighed.clone());
        }
        weighed
    }

    fn alias(&mut self, anchor: usize, span: Span, depth: usize) -> Result<Weighed, Stop> {
        let Some((weight, below)) = self.anchors.get(&anchor).map(|kept| (kept.weight, kept.depth)) else {
            self.faults.push(fault(FaultKind::Alias, span, "an anchor cannot contain an alias to itself"));
            return Err(Stop);
        };
        self.charge(weight, span)?;
        self.deep(depth + below, span)?;
        self.anchors.get(&anchor).cloned().ok_or(Stop)
    }

    fn list(&mut self, anchor: usize, span: Span, depth: usize) -> Result<Weighed, Stop> {
        self.charge(1, span)?;
        let (mut items, mut weight, mut below, mut end) = (Vec::new(), 1, 0, span.end);
        loop {
            let event = self.next()?;
            if event.0 == Event::SequenceEnd {
                end = end.max(self.span(event.1).start);
                break;
            }
            let item = self.node(event, depth)?;
            weight += item.weight;
            below = below.max(item.depth);
            items.push(item.node);
        }
        let node = Node { span: Span { end, ..span }, data: Data::List(items) };
        Ok(self.keep(anchor, Weighed { node, weight, depth: below + 1 }))
    }

    fn map(&mut self, anchor: usize, span: Span, depth: usize) -> Result<Weighed, Stop> {
        self.charge(1, span)?;
        let mut map = MapParts::default();
        let (mut weight, mut below, mut end) = (1, 0, span.end);
        loop {
            let event = self.next()?;
            if event.0 == Event::MappingEnd {
                end = end.max(self.span(event.1).start);
                break;
            }
            let key = self.node(event, depth)?;
            let event = self.next()?;
            let value = self.node(event, depth)?;
            weight += key.weight + value.weight;
            below = below.max(value.depth);
            self.entry(&mut map, key.node, value.node);
        }
        let node = Node { span: Span { end, ..span }, data: Data::Map(map.merged()) };
        Ok(self.keep(anchor, Weighed { node, weight, depth: below + 1 }))
    }

    fn entry(&mut self, map: &mut MapParts, key: Node, value: Node) {
        let Data::Scalar(name, style) = key.data else {
            let mut fault = fault(FaultKind::Key, key.span, "a key must be a plain word");
            fault.help = Some("put `${{ … }}` in quotes".to_owned());
            self.faults.push(fault);
            return;
        };
        if name == "<<" && style == Style::Plain {
            self.merge(map, value);
            return;
        }
        if !map.own.insert(name.clone()) {
            self.faults.push(fault(FaultKind::DuplicateKey, key.span, format!("duplicate key `{name}`")));
            return;
        }
        map.entries.push(Entry { key: name, span: key.span, value });
    }

    fn merge(&mut self, map: &mut MapParts, value: Node) {
        let span = value.span;
        let sources = match value.data {
            Data::List(items) => items,
            data => vec![Node { span, data }],
        };
        for source in sources {
            match source.data {
                Data::Map(entries) => map.merges.extend(entries),
                _ => self.faults.push(fault(FaultKind::Alias, source.span, "`<<` merges maps only")),
            }
        }
    }
}

/// A map while it is read: its own keys win over merged ones, earlier merges over later ones.
#[derive(Default)]
struct MapParts {
    entries: Vec<Entry>,
    own: HashSet<String>,
    merges: Vec<Entry>,
}

impl MapParts {
    fn merged(mut self) -> Vec<Entry> {
        for entry in self.merges {
            if self.own.insert(entry.key.clone()) {
                self.entries.push(entry);
            }
        }
        self.entries
    }
}

fn style_of(style: ScalarStyle) -> Style {
    match style {
        ScalarStyle::Plain => Style::Plain,
        ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted => Style::Quoted,
        ScalarStyle::Literal | ScalarStyle::Folded => Style::Block,
    }
}
