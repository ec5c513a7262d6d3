//! Reading the source so that nothing gets lost in silence.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use kici_engine::yaml::{Core, Data, Entry, Node, Pos};

use crate::Loss;
use crate::later;

/// What is lost so far. Aliases and templates bring one place several times; it is told once.
#[derive(Debug, Default)]
pub struct Report {
    losses: RefCell<BTreeSet<Loss>>,
}

impl Report {
    /// Notes something that does not come along.
    pub fn lose(&self, at: Pos, key: impl Into<String>, reason: impl Into<String>) {
        let loss = Loss { line: at.line, column: at.col, key: key.into(), reason: reason.into() };
        self.losses.borrow_mut().insert(loss);
    }

    /// Everything that is lost, by place.
    pub fn losses(&self) -> Vec<Loss> {
        self.losses.borrow().iter().cloned().collect()
    }
}

/// The keys of a map. One that nobody took by the end is reported as lost, with the reason of `later`.
pub struct Fields<'a> {
    /// The keys that lead here, joined by dots.
    pub path: String,
    entries: Vec<(&'a Entry, Cell<bool>)>,
    report: &'a Report,
}

impl<'a> Fields<'a> {
    /// The keys of `node`; a node that is not a map is lost as a whole. Nothing (`key:`) is an empty map.
    pub fn of(node: &'a Node, path: impl Into<String>, report: &'a Report) -> Self {
        let path = path.into();
        let entries = match &node.data {
            Data::Map(entries) => entries.iter().map(|entry| (entry, Cell::new(false))).collect(),
            _ => {
                if !node.is_null() {
                    report.lose(node.span.start, path.clone(), format!("a map is expected, not {}", node.describe()));
                }
                Vec::new()
            }
        };
        Self { path, entries, report }
    }

    /// Where losses go.
    pub fn report(&self) -> &'a Report {
        self.report
    }

    /// The path of a key of this map.
    pub fn at(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a key; the caller answers for all that is in it. A key with nothing behind it is there.
    pub fn take(&self, key: &str) -> Option<&'a Node> {
        self.entry(key).map(|entry| &entry.value)
    }

    /// A key with its value, likewise.
    pub fn entry(&self, key: &str) -> Option<&'a Entry> {
        let (entry, taken) = self.entries.iter().find(|(entry, _)| entry.key == key)?;
        taken.set(true);
        Some(entry)
    }

    /// All keys that nobody took yet; the caller answers for them.
    pub fn rest(&self) -> Vec<&'a Entry> {
        let open = self.entries.iter().filter(|(_, taken)| !taken.replace(true));
        open.map(|(entry, _)| *entry).collect()
    }

    /// The text of a key; lists and maps are lost.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        let node = self.take(key)?;
        let text = node.text();
        if text.is_none() {
            self.lose(key, format!("a text is expected, not {}", node.describe()));
        }
        text
    }

    /// A truth value; another text is lost.
    pub fn flag(&self, key: &str) -> Option<bool> {
        let node = self.take(key)?;
        match (node.core(), node.text()) {
            (Some(Core::Bool(flag)), _) => Some(flag),
            (_, Some("true" | "yes" | "on")) => Some(true),
            (_, Some("false" | "no" | "off")) => Some(false),
            _ => {
                self.lose(key, "only true or false can be carried over");
                None
            }
        }
    }

    /// A key does not come along, for this reason.
    pub fn lose(&self, key: &str, reason: impl Into<String>) {
        if let Some(entry) = self.entry(key) {
            self.report.lose(entry.span.start, self.at(key), reason);
        }
    }

    /// What nobody took by now does not come along, for this reason.
    pub fn lose_rest(&self, reason: &str) {
        for entry in self.rest() {
            self.report.lose(entry.span.start, self.at(&entry.key), reason);
        }
    }

    /// A key does not come along, for the reason of the table.
    pub fn later(&self, key: &str) {
        self.lose(key, later::reason(&self.at(key)));
    }

    /// The map that a key holds.
    pub fn fields(&self, key: &str) -> Option<Fields<'a>> {
        self.take(key).map(|node| Fields::of(node, self.at(key), self.report))
    }
}

impl Drop for Fields<'_> {
    fn drop(&mut self) {
        for (entry, taken) in &self.entries {
            if !taken.get() {
                let key = self.at(&entry.key);
                let reason = later::reason(&key);
                self.report.lose(entry.span.start, key, reason);
            }
        }
    }
}

/// The items of a list, or the one item that stands instead of it; nested lists are flattened.
pub fn items(node: &Node) -> Vec<&Node> {
    match &node.data {
        Data::List(list) => list.iter().flat_map(items).collect(),
        _ if node.is_null() => Vec::new(),
        _ => vec![node],
    }
}

/// The texts of a list or of one item; what is no text is lost.
pub fn texts<'a>(node: &'a Node, path: &str, report: &Report) -> Vec<&'a str> {
    let text = |item: &&'a Node| match item.text() {
        Some(text) => Some(text),
        None => {
            report.lose(item.span.start, path, format!("a text is expected, not {}", item.describe()));
            None
        }
    };
    items(node).iter().filter_map(text).collect()
}

/// The entries of a map; none of anything else.
pub fn entries(node: &Node) -> &[Entry] {
    match &node.data {
        Data::Map(entries) => entries,
        _ => &[],
    }
}

/// The value of a key, without taking it.
pub fn get<'a>(node: &'a Node, key: &str) -> Option<&'a Node> {
    entries(node).iter().find(|entry| entry.key == key).map(|entry| &entry.value)
}
