//! `on`.

use std::collections::BTreeMap;

use kici_engine::yaml::{Data, Entry, Node, Pos};

use crate::cel::Ty;
use crate::later;
use crate::source::{Fields, Report, items, texts};
use crate::target::{Map, Y, variable};

/// The triggers, and the inputs of a start by hand.
pub(super) fn triggers(root: &Fields<'_>, report: &Report) -> (Y, BTreeMap<String, Ty>) {
    let mut on = Map::default();
    let mut inputs = BTreeMap::new();
    let Some(entry) = root.entry("on").or_else(|| root.entry("true")) else {
        report.lose(Pos { line: 1, col: 1 }, "on", "the file does not say when it runs; it is started by hand");
        on.put("manual", Pos::default(), Y::Map(Map::default()));
        return (Y::Map(on), inputs);
    };
    let mut events: Vec<(&str, Pos, Option<&Node>)> = Vec::new();
    match &entry.value.data {
        Data::Map(entries) => {
            events.extend(entries.iter().map(|Entry { key, span, value }| (key.as_str(), span.start, Some(value))));
        }
        _ => events.extend(items(&entry.value).iter().filter_map(|item| Some((item.text()?, item.span.start, None)))),
    }
    let nothing = Node { span: entry.value.span, data: Data::Map(Vec::new()) };
    for (event, at, node) in events {
        let fields = Fields::of(node.unwrap_or(&nothing), format!("on.{event}"), report);
        match event {
            "push" => push(&fields, at, &mut on, report),
            "pull_request" => {
                let mut filters = Map::default();
                if let Some(types) = fields.take("types") {
                    filters.some("types", at, Y::texts(texts(types, "on.pull_request.types", report)));
                }
                filters.some("branches", at, patterns(&fields, "branches", report));
                filters.some("paths", at, patterns(&fields, "paths", report));
                on.put("pull_request", at, Y::Map(filters));
            }
            "workflow_dispatch" => {
                let mut manual = Map::default();
                if let Some(declared) = fields.fields("inputs") {
                    manual.some("inputs", at, Y::Map(self::inputs(&declared, &mut inputs, report)));
                }
                on.put("manual", at, Y::Map(manual));
            }
            _ => {
                fields.lose_rest("it goes with its event");
                report.lose(at, format!("on.{event}"), later::reason(&format!("on.{event}")));
            }
        }
    }
    if on.0.is_empty() {
        report.lose(entry.span.start, "on", "nothing that starts it is supported; it is started by hand");
        on.put("manual", entry.span.start, Y::Map(Map::default()));
    }
    (Y::Map(on), inputs)
}

fn push(fields: &Fields<'_>, at: Pos, on: &mut Map, report: &Report) {
    let branches = patterns(fields, "branches", report);
    let tags = patterns(fields, "tags", report);
    let paths = patterns(fields, "paths", report);
    let empty = |list: &Y| *list == Y::List(Vec::new());
    // A filter on one of the two kinds of refs leaves the other out.
    let (any_branch, any_tag) = (empty(&branches), empty(&tags));
    if !any_branch || any_tag {
        let mut filters = Map::default();
        filters.some("branches", at, branches);
        filters.some("paths", at, paths);
        on.put("push", at, Y::Map(filters));
    }
    if !any_tag || any_branch {
        let mut filters = Map::default();
        filters.some("tags", at, tags);
        on.put("tag", at, Y::Map(filters));
    }
}

/// `key` and `key-ignore` as one list.
fn patterns(fields: &Fields<'_>, key: &str, report: &Report) -> Y {
    let mut out = Vec::new();
    for (key, ignore) in [(key.to_owned(), false), (format!("{key}-ignore"), true)] {
        let Some(node) = fields.take(&key) else { continue };
        for text in texts(node, &fields.at(&key), report) {
            let (out_, text) = match text.strip_prefix('!') {
                Some(rest) => (true, rest),
                None => (ignore, text),
            };
            out.push(format!("{}{}", if out_ { "!" } else { "" }, pattern(text)));
        }
    }
    Y::texts(out)
}

/// A pattern; one with `+` or `?`, which repeat there, becomes a regular expression.
fn pattern(text: &str) -> String {
    if !text.contains(['+', '?']) {
        return text.to_owned();
    }
    let mut out = String::from("/^");
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '*' if rest.starts_with('*') => {
                rest = &rest[1..];
                out.push_str(".*");
            }
            '*' => out.push_str("[^/]*"),
            '+' | '?' | '[' | ']' | '-' => out.push(c),
            c if c.is_ascii_alphanumeric() || c == '_' => out.push(c),
            c => {
                out.push('\\');
                out.push(c);
            }
        }
    }
    out + "$/"
}

fn inputs(fields: &Fields<'_>, known: &mut BTreeMap<String, Ty>, report: &Report) -> Map {
    let mut out = Map::default();
    for entry in fields.rest() {
        let at = entry.span.start;
        let input = Fields::of(&entry.value, fields.at(&entry.key), report);
        let mut made = Map::default();
        let (word, ty) = match input.text("type").unwrap_or("string") {
            "boolean" => ("boolean", Ty::Bool),
            "number" => ("number", Ty::Number),
            "choice" => ("enum", Ty::Text),
            "environment" => {
                input.later("type");
                ("string", Ty::Text)
            }
            _ => ("string", Ty::Text),
        };
        made.text("type", at, word);
        if let Some(options) = input.take("options") {
            made.some("values", at, Y::texts(texts(options, &input.at("options"), report)));
        }
        let default = input.text("default");
        if let Some(default) = default {
            let plain = matches!(ty, Ty::Bool | Ty::Number);
            made.put("default", at, if plain { Y::Plain(default.to_owned()) } else { Y::Text(default.to_owned()) });
        }
        match input.flag("required") {
            Some(true) if default.is_none() => made.put("required", at, Y::Plain("true".into())),
            _ if default.is_none() => made.put("required", at, Y::Plain("false".into())),
            _ => {}
        }
        if let Some(text) = input.text("description").filter(|text| !text.is_empty()) {
            made.text("description", at, text);
        }
        if let Some(message) = input.text("deprecationMessage") {
            input.lose("deprecationMessage", format!("inputs have no note on their end: {message}"));
        }
        known.insert(entry.key.clone(), ty);
        out.put(&variable(&entry.key), at, Y::Map(made));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_that_repeat_become_expressions() {
        assert_eq!(pattern("v*"), "v*");
        assert_eq!(pattern("v[0-9]+.[0-9]+"), "/^v[0-9]+\\.[0-9]+$/");
        assert_eq!(pattern("release/**?"), "/^release\\/.*?$/");
    }
}
