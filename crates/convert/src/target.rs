//! What is written: a tree and its text.

use std::fmt::Write;

use kici_engine::yaml::Pos;

/// A value of the written file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Y {
    /// A string, quoted where it has to be.
    Text(String),
    /// A number or truth value.
    Plain(String),
    /// A list.
    List(Vec<Y>),
    /// A map.
    Map(Map),
    /// A comment, in a list.
    Note(String),
}

/// A map in the order of writing; each value knows where it comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Map(pub Vec<(String, Pos, Y)>);

impl Map {
    /// Adds a key, or gives it another value.
    pub fn put(&mut self, key: &str, from: Pos, value: Y) {
        match self.0.iter_mut().find(|(name, ..)| name == key) {
            Some(known) => (known.1, known.2) = (from, value),
            None => self.0.push((key.to_owned(), from, value)),
        }
    }

    /// Adds a text.
    pub fn text(&mut self, key: &str, from: Pos, text: impl Into<String>) {
        self.put(key, from, Y::Text(text.into()));
    }

    /// Adds a list or map that is not empty.
    pub fn some(&mut self, key: &str, from: Pos, value: Y) {
        let empty = match &value {
            Y::List(items) => items.is_empty(),
            Y::Map(map) => map.0.is_empty(),
            Y::Text(_) | Y::Plain(_) | Y::Note(_) => false,
        };
        if !empty {
            self.put(key, from, value);
        }
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Y> {
        self.0.iter().find(|(name, ..)| name == key).map(|(.., value)| value)
    }

    /// Whether a key is there.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }
}

impl Y {
    /// A list of texts.
    pub fn texts<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Self {
        Self::List(texts.into_iter().map(|text| Self::Text(text.into())).collect())
    }

    /// The file.
    pub fn render(&self) -> String {
        let mut out = String::new();
        self.block(&mut out, 0);
        out
    }

    fn block(&self, out: &mut String, indent: usize) {
        match self {
            Self::Map(map) => {
                for (key, _, value) in &map.0 {
                    let pad = " ".repeat(indent);
                    let _ = write!(out, "{pad}{}:", scalar(key, false));
                    value.after_key(out, indent);
                }
            }
            Self::List(items) => {
                for item in items {
                    let pad = " ".repeat(indent);
                    match item {
                        Self::Note(text) => {
                            let _ = writeln!(out, "{pad}# {}", one_line(text));
                        }
                        Self::Map(map) if !map.0.is_empty() => {
                            let mut inner = String::new();
                            item.block(&mut inner, indent + 2);
                            let _ = write!(out, "{pad}- {}", inner.trim_start());
                        }
                        other => {
                            let _ = write!(out, "{pad}-");
                            other.after_key(out, indent);
                        }
                    }
                }
            }
            other => other.after_key(out, indent),
        }
    }

    /// Writes a value behind `key:` or `-`.
    fn after_key(&self, out: &mut String, indent: usize) {
        match self {
            Self::Text(text) if is_block(text) => block_scalar(out, text, indent + 2),
            Self::Text(text) => {
                let _ = writeln!(out, " {}", scalar(text, false));
            }
            Self::Plain(text) => {
                let _ = writeln!(out, " {text}");
            }
            Self::Note(text) => {
                let _ = writeln!(out, " # {}", one_line(text));
            }
            other => match other.flow().filter(|flow| flow.len() <= 80) {
                Some(flow) => {
                    let _ = writeln!(out, " {flow}");
                }
                None => {
                    out.push('\n');
                    other.block(out, indent + 2);
                }
            },
        }
    }

    /// The form on one line; none where it needs several.
    fn flow(&self) -> Option<String> {
        match self {
            Self::Text(text) => (!is_block(text)).then(|| scalar(text, true)),
            Self::Plain(text) => Some(text.clone()),
            Self::Note(_) => None,
            Self::List(items) => {
                let items: Option<Vec<String>> = items.iter().map(Self::flow).collect();
                Some(format!("[{}]", items?.join(", ")))
            }
            Self::Map(map) if map.0.is_empty() => Some("{}".to_owned()),
            // Steps and jobs read better one key a line.
            Self::Map(map) if map.has("run") || map.has("steps") || map.0.len() > 3 => None,
            Self::Map(map) => {
                let pair =
                    |(key, _, value): &(String, Pos, Self)| Some(format!("{}: {}", scalar(key, true), value.flow()?));
                let pairs: Option<Vec<String>> = map.0.iter().map(pair).collect();
                Some(format!("{{ {} }}", pairs?.join(", ")))
            }
        }
    }
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Several lines of plain text are written as a block.
fn is_block(text: &str) -> bool {
    let printable =
        |c: char| c == '\n' || (!c.is_control() && !matches!(c, '\u{feff}' | '\u{85}' | '\u{2028}' | '\u{2029}'));
    text.trim_end_matches('\n').contains('\n') && text.chars().all(printable)
}

fn block_scalar(out: &mut String, text: &str, indent: usize) {
    let body = text.trim_end_matches('\n');
    let chomp = match text.len() - body.len() {
        0 => "-",
        1 => "",
        _ => "+",
    };
    // A first line that begins with a space would be taken for the indentation.
    let explicit = if body.trim_start_matches('\n').starts_with(' ') { "2" } else { "" };
    let _ = writeln!(out, " |{explicit}{chomp}");
    let pad = " ".repeat(indent);
    for line in body.split('\n') {
        let _ = if line.is_empty() { writeln!(out) } else { writeln!(out, "{pad}{line}") };
    }
    for _ in 1..(text.len() - body.len()) {
        out.push('\n');
    }
}

/// A string on one line, in quotes where it would be something else without.
fn scalar(text: &str, flow: bool) -> String {
    const FIRST: &str = "./_$~";
    const INSIDE: &str = " ./_-+=@%~^()$\\\"'<>|&;*?!:#";
    let plain_char = |c: char| c.is_alphanumeric() || INSIDE.contains(c) || (!flow && "{}[],".contains(c));
    let first = text.chars().next();
    let plain = first.is_some_and(|c| c.is_ascii_alphabetic() || (FIRST.contains(c) && text.len() > 1))
        && text.chars().all(plain_char)
        && !text.ends_with([' ', ':'])
        && !text.contains(": ")
        && !text.contains(" #")
        && !matches!(text.to_ascii_lowercase().as_str(), "null" | "true" | "false" | "yes" | "no" | "on" | "off");
    let looks_like_number = text.parse::<f64>().is_ok();
    if plain && !looks_like_number {
        return text.to_owned();
    }
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() || matches!(c, '\u{feff}' | '\u{2028}' | '\u{2029}') => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A name for a workflow, from any text.
pub(crate) fn name(text: &str) -> Option<String> {
    let clean: String =
        text.chars().map(|c| if c.is_ascii_alphanumeric() || " ._-".contains(c) { c } else { '-' }).take(100).collect();
    let clean = clean.trim_start_matches(|c: char| !c.is_ascii_alphanumeric()).trim_end().to_owned();
    (!clean.is_empty()).then_some(clean)
}

/// A name for a job, from any text; `taken` keeps names apart.
pub(crate) fn job_name(text: &str, taken: &[String]) -> String {
    let mut clean = String::new();
    for c in text.to_ascii_lowercase().chars() {
        let c = if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        if c != '-' || !clean.ends_with('-') {
            clean.push(c);
        }
    }
    let clean: String = clean.trim_start_matches(['-', '_']).trim_end_matches('-').chars().take(60).collect();
    let clean = if clean.is_empty() { "job".to_owned() } else { clean };
    let mut name = clean.clone();
    let mut n = 1;
    while taken.contains(&name) {
        n += 1;
        name = format!("{clean}-{n}");
    }
    name
}

/// A name of a variable, output or dimension.
pub(crate) fn variable(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(64).collect();
    if clean.starts_with(|c: char| c.is_ascii_digit()) || clean.is_empty() { format!("_{clean}") } else { clean }
}

#[cfg(test)]
mod tests {
    use kici_engine::yaml::{self, Data, Limits};
    use proptest::prelude::*;

    use super::*;

    fn back(text: &str) -> Option<String> {
        let mut map = Map::default();
        map.put("a", Pos::default(), Y::List(vec![Y::Text(text.to_owned())]));
        map.text("b", Pos::default(), text);
        let written = Y::Map(map).render();
        let reading = yaml::read(&written, Limits::default());
        assert_eq!(reading.faults, [], "{written}");
        let Data::Map(entries) = &reading.documents[0].root.data else { return None };
        let Data::List(items) = &entries[0].value.data else { return None };
        assert_eq!(items[0].text(), entries[1].value.text(), "{written}");
        items[0].text().map(str::to_owned)
    }

    #[test]
    fn every_text_is_read_back_as_it_was() {
        for text in [
            "",
            "a",
            "on",
            "3.10",
            "a: b",
            "- x",
            "a #b",
            "x\n",
            "a\nb",
            "a\nb\n",
            "a\nb\n\n",
            " a\n b",
            "\n\n a\nb",
            "\tx",
            "${{ a }}",
            "a\u{7}b",
            "\"q\"",
            "'",
            "&a",
            "*a",
            "!x",
            "%x",
            "~",
            "null",
            "[a]",
            "{a}",
            "a\r\nb",
            "key:",
            "a, b",
            "# x",
            "a\n\n\nb",
            "x  \ny",
        ] {
            assert_eq!(back(text).as_deref(), Some(text), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_back_as_it_was(text in "[ a-z0-9:#\\-\\[\\]{},&*!|>'\"%@`\n\t~.?é]{0,40}") {
            prop_assert_eq!(back(&text), Some(text));
        }
    }

    #[test]
    fn names_are_legal() {
        assert_eq!(name("  Build & test!"), Some("Build - test-".into()));
        assert_eq!(name("::"), None);
        assert_eq!(job_name("Build: Linux / x64", &[]), "build-linux-x64");
        assert_eq!(job_name("A", &["a".into(), "a-2".into()]), "a-3");
        assert_eq!(variable("python-version"), "python_version");
        assert_eq!(variable("3x"), "_3x");
    }
}
