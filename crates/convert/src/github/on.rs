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
    // Several of them are alternatives of one trigger.
    let mut webhooks = Vec::new();
    let scheduled = events.iter().any(|(event, ..)| *event == "schedule");
    let nothing = Node { span: entry.value.span, data: Data::Map(Vec::new()) };
    for (event, at, node) in events {
        if event == "schedule" {
            schedule(node, at, &mut on, report);
            continue;
        }
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
                    manual.some("inputs", at, Y::Map(self::inputs(&declared, &mut inputs, scheduled, report)));
                }
                on.put("manual", at, Y::Map(manual));
            }
            _ => match forge_event(event) {
                Some(known) => {
                    let filters = forge(event, known, &fields, at, report);
                    if known.name == "webhook" { webhooks.push(filters) } else { on.put(known.name, at, filters) }
                }
                None => {
                    fields.lose_rest("it goes with its event");
                    report.lose(at, format!("on.{event}"), later::reason(&format!("on.{event}")));
                }
            },
        }
    }
    on.some("webhook", entry.span.start, Y::List(webhooks));
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

fn schedule(node: Option<&Node>, at: Pos, on: &mut Map, report: &Report) {
    let mut times = Vec::new();
    for (index, item) in node.into_iter().flat_map(items).enumerate() {
        let fields = Fields::of(item, format!("on.schedule[{index}]"), report);
        let mut time = Map::default();
        if let Some(cron) = fields.text("cron") {
            time.text("cron", item.span.start, cron);
        }
        if let Some(zone) = fields.text("timezone") {
            time.text("timezone", item.span.start, zone);
        }
        fields.lose_rest("it has no counterpart");
        times.push(Y::Map(time));
    }
    on.put("schedule", at, Y::List(times));
}

/// An event that starts the same here: its name, and the types that it means without any.
#[derive(Clone, Copy)]
struct ForgeEvent {
    name: &'static str,
    types: &'static [&'static str],
}

const RELEASES: &[&str] = &["published", "unpublished", "created", "edited", "deleted", "prereleased", "released"];
const COMMENTS: &[&str] = &["created", "edited", "deleted"];
/// Events without a trigger of their own.
const BY_NAME: &[&str] = &[
    "branch_protection_rule",
    "check_run",
    "check_suite",
    "deployment",
    "deployment_status",
    "discussion",
    "discussion_comment",
    "gollum",
    "issues",
    "label",
    "merge_group",
    "milestone",
    "page_build",
    "public",
    "registry_package",
];

fn forge_event(event: &str) -> Option<ForgeEvent> {
    let (name, types): (&'static str, &'static [&'static str]) = match event {
        "issue_comment" => ("comment", COMMENTS),
        "pull_request_review" => ("review", &[]),
        "pull_request_review_comment" => ("review_comment", &[]),
        "release" => ("release", RELEASES),
        "create" => ("create", &[]),
        "delete" => ("delete", &[]),
        "fork" => ("fork", &[]),
        "status" => ("status", &[]),
        "watch" => ("watch", &[]),
        "workflow_run" => ("workflow_run", &[]),
        "repository_dispatch" => ("dispatch", &[]),
        other => {
            BY_NAME.iter().find(|name| **name == other)?;
            ("webhook", &[])
        }
    };
    Some(ForgeEvent { name, types })
}

fn forge(event: &str, known: ForgeEvent, fields: &Fields<'_>, at: Pos, report: &Report) -> Y {
    let mut filters = Map::default();
    if known.name == "webhook" {
        filters.some("events", at, Y::texts([event]));
    }
    let given = fields.take("types").map(|node| texts(node, &fields.at("types"), report)).unwrap_or_default();
    let meant = if given.is_empty() { known.types.to_vec() } else { given };
    filters.some("types", at, Y::texts(meant));
    if event == "workflow_run" {
        filters.some("workflows", at, patterns(fields, "workflows", report));
    }
    fields.lose_rest("it does not filter this event; ask for it in `if`");
    Y::Map(filters)
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

/// The inputs of runs by hand. None is required in a workflow that is `scheduled` too: its runs on time have none.
fn inputs(fields: &Fields<'_>, known: &mut BTreeMap<String, Ty>, scheduled: bool, report: &Report) -> Map {
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
            Some(true) if default.is_none() && scheduled => {
                let loss = "the workflow has a schedule too, whose runs have no inputs: it is optional here";
                input.lose("required", loss.to_owned());
                made.put("required", at, Y::Plain("false".into()));
            }
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
    fn events_of_the_forge_and_schedules_come_along() {
        let text = "on:\n  schedule: [{ cron: '0 3 * * *' }, { cron: '5 4 * * 1', timezone: Asia/Tokyo }]\n  issue_comment: { types: \
                    [created] }\n  release:\n  workflow_run: { workflows: [ci], types: [completed], branches: [main] }\n  \
                    check_run: { types: [completed] }\n  issues:\njobs: { a: { runs-on: x, steps: [{ run: 'true' }] } }\n";
        let converted = crate::convert(".github/workflows/a.yml", text, None, &crate::Options::default());
        let yaml = converted.text.unwrap();
        for part in ["schedule:", "Asia/Tokyo", "comment: { types: [created] }", "unpublished", "workflows: [ci]"] {
            assert!(yaml.contains(part), "{part}: {yaml}");
        }
        assert!(yaml.contains("check_run") && yaml.contains("issues"), "{yaml}");
        let lost: Vec<&str> = converted.losses.iter().map(|loss| loss.key.as_str()).collect();
        assert_eq!(lost, ["on.workflow_run.branches"]);
    }

    #[test]
    fn patterns_that_repeat_become_expressions() {
        assert_eq!(pattern("v*"), "v*");
        assert_eq!(pattern("v[0-9]+.[0-9]+"), "/^v[0-9]+\\.[0-9]+$/");
        assert_eq!(pattern("release/**?"), "/^release\\/.*?$/");
    }
}
