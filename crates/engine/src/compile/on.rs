//! `on`: what starts a workflow.

mod bus;
mod forge;
mod inputs;

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::condition::{Condition, MAX_CONDITIONS};
use crate::lock::{Conditions, Patterns, Trigger};
use crate::pattern::{MAX_PATTERNS, order_warnings};
use crate::yaml::{Core, Data, Node};

use super::keys::{self, KeySet};
use super::walk::{Fields, Walk};

/// Most alternatives of one workflow.
const MAX_TRIGGERS: usize = 64;
/// Events that say nothing without one of their keys, with that key and how to give it.
const INCOMPLETE: [(&str, &str, &str); 5] = [
    ("event", "name", "write `on: { event: { name: NAME } }`"),
    ("hook", "source", "write `on: { hook: { source: NAME } }`"),
    ("lifecycle", "events", "write `on: { lifecycle: { events: [job_failed] } }`"),
    ("schedule", "cron", "write `on: { schedule: { cron: \"0 3 * * *\" } }`"),
    ("webhook", "events", "write `on: { webhook: { events: [check_run] } }`"),
];

impl Walk<'_> {
    /// The triggers in file order: a word, a list of words, or a map of filters.
    pub(super) fn triggers(&mut self, node: &Node) -> Vec<Trigger> {
        let mut triggers = Vec::new();
        match &node.data {
            Data::Map(entries) => {
                let Some(fields) = self.fields(node, &keys::ON, "`on`") else { return triggers };
                for entry in entries {
                    if keys::ON.accepted.contains(&entry.key.as_str()) && fields.get(&entry.key).is_some() {
                        self.within(&entry.key, |walk| walk.alternatives(&entry.key, &entry.value, &mut triggers));
                    }
                }
            }
            _ => {
                for item in self.one_or_list(node, "an event").unwrap_or_default() {
                    self.short(item, &mut triggers);
                }
            }
        }
        if triggers.len() > MAX_TRIGGERS {
            let message = format!("{} triggers, at most {MAX_TRIGGERS} are allowed", triggers.len());
            self.fault("K0704", node.span, message);
        }
        triggers
    }

    /// `on: push`.
    fn short(&mut self, node: &Node, triggers: &mut Vec<Trigger>) {
        let Some(name) = self.fixed(node, "an event") else { return };
        let incomplete = INCOMPLETE.iter().find(|(event, ..)| *event == name);
        match (name, incomplete) {
            (_, Some((_, key, help))) => {
                self.fault("K0101", node.span, format!("`{name}` needs `{key}`")).help(*help);
            }
            _ if keys::ON.accepted.contains(&name) => {
                let nothing = Node { span: node.span, data: Data::Map(Vec::new()) };
                triggers.extend(self.trigger(name, &nothing));
            }
            _ if keys::ON.planned.contains(&name) => {
                self.fault("K0108", node.span, format!("event `{name}` is not supported yet"));
            }
            _ => {
                let suggestion = keys::ON.suggest(name);
                self.fault("K0501", node.span, format!("unknown event `{}`", crate::yaml::shorten(name)))
                    .expected(keys::ON.accepted.iter().copied())
                    .replace(suggestion);
            }
        }
    }

    /// One filter map, or a list of them of which the first that fits wins.
    fn alternatives(&mut self, name: &str, node: &Node, triggers: &mut Vec<Trigger>) {
        match &node.data {
            Data::List(items) if items.is_empty() => {
                self.mismatch("K0201", node, "a map of filters or a list of them");
            }
            Data::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    triggers.extend(self.within(index.to_string(), |walk| walk.trigger(name, item)));
                }
            }
            _ => triggers.extend(self.trigger(name, node)),
        }
    }

    fn trigger(&mut self, name: &str, node: &Node) -> Option<Trigger> {
        // `push:` with nothing below it means without filters.
        let nothing = Node { span: node.span, data: Data::Map(Vec::new()) };
        let node = if node.is_null() { &nothing } else { node };
        match name {
            "push" => Some(Trigger::Push {
                branches: self.filter(node, &keys::PUSH, name, "branches")?,
                paths: self.again(node, "paths"),
                repos: Patterns::new(),
            }),
            "pull_request" => Some(Trigger::Pr {
                branches: self.filter(node, &keys::PULL_REQUEST, name, "branches")?,
                actions: self.words(node, "types", &forge::PULL_REQUEST_TYPES, &forge::DEFAULT_PULL_REQUEST_TYPES),
                source_branches: self.again(node, "source_branches"),
                paths: self.again(node, "paths"),
                repos: Patterns::new(),
            }),
            "tag" => Some(Trigger::Tag { tags: self.filter(node, &keys::TAG, name, "tags")?, repos: Patterns::new() }),
            "manual" => self.manual(node),
            "hook" => self.hook(node),
            "event" => self.event(node),
            "workflow_complete" => self.workflow_complete(node),
            "job_complete" => self.job_complete(node),
            "lifecycle" => self.lifecycle(node),
            "schedule" => self.schedule(node),
            "workflows_failed_batch" => self.failed_batch(node),
            _ => self.forge_trigger(name, node),
        }
    }

    /// Checks the keys of a trigger, and reads its first list of patterns.
    fn filter(&mut self, node: &Node, set: &KeySet, name: &str, key: &str) -> Option<Patterns> {
        self.fields(node, set, &format!("`on.{name}`"))?;
        Some(self.again(node, key))
    }

    /// A list of patterns of a map whose keys are checked.
    fn again(&mut self, node: &Node, key: &str) -> Patterns {
        let Data::Map(entries) = &node.data else { return Patterns::new() };
        let Some(entry) = entries.iter().find(|entry| entry.key == key) else { return Patterns::new() };
        self.within(key, |walk| walk.patterns(&entry.value))
    }

    pub(super) fn patterns(&mut self, node: &Node) -> Patterns {
        let items = self.one_or_list(node, "a pattern").unwrap_or_default();
        if !self.bounded(items.len(), MAX_PATTERNS, "patterns", node.span) {
            return Patterns::new();
        }
        let mut patterns = Patterns::new();
        for item in items {
            let Some(text) = self.fixed(item, "a pattern") else { continue };
            if let Err(error) = self.library.memo.pattern(text.strip_prefix('!').unwrap_or(text)) {
                self.fault("K0502", item.span, error.to_string());
            }
            patterns.push(text.to_owned());
        }
        if patterns.len() == items.len() {
            for at in order_warnings(&patterns) {
                let message = format!("`{}` does not bring back what an exclusion before it removes", patterns[at]);
                self.fault("W0503", items[at].span, message)
                    .warning()
                    .help("the order of patterns has no effect; narrow the exclusion");
            }
        }
        patterns
    }

    /// A list of words of a map whose keys are checked; `default` where it is absent or empty.
    fn words(&mut self, node: &Node, key: &str, known: &[&str], default: &[&str]) -> Vec<String> {
        let defaults = || default.iter().map(|word| (*word).to_owned()).collect();
        let Data::Map(entries) = &node.data else { return defaults() };
        let Some(entry) = entries.iter().find(|entry| entry.key == key) else { return defaults() };
        self.within(key, |walk| {
            let items = walk.one_or_list(&entry.value, "a word").unwrap_or_default();
            if items.is_empty() {
                return defaults();
            }
            items.iter().filter_map(|item| walk.word(item, known)).map(str::to_owned).collect()
        })
    }

    /// A list of free names of a map whose keys are checked.
    fn names(&mut self, fields: Fields<'_>, key: &str, what: &str) -> Vec<String> {
        let Some(entry) = fields.get(key) else { return Vec::new() };
        self.within(key, |walk| {
            let items = walk.one_or_list(&entry.value, what).unwrap_or_default();
            if !walk.bounded(items.len(), MAX_PATTERNS, "names", entry.value.span) {
                return Vec::new();
            }
            items.iter().filter_map(|item| walk.fixed(item, what)).map(str::to_owned).collect()
        })
    }

    /// A key without which the trigger says nothing.
    fn lacks(&mut self, node: &Node, trigger: &str, key: &str, what: &str) {
        self.fault("K0101", node.span, format!("`on.{trigger}` has no `{key}`")).expected([what]);
    }

    fn match_and_not(&mut self, fields: Fields<'_>) -> (Conditions, Conditions) {
        let mut conditions = |key: &str| match fields.get(key) {
            Some(entry) => self.within(key, |walk| walk.conditions(&entry.value)),
            None => Conditions::new(),
        };
        (conditions("match"), conditions("not"))
    }

    fn hook(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::HOOK, "`on.hook`")?;
        let events = self.names(fields, "events", "an event");
        let (r#match, not) = self.match_and_not(fields);
        let Some(entry) = fields.get("source") else {
            self.lacks(node, "hook", "source", "`source`, the name of a generic source");
            return None;
        };
        let source = self.within("source", |walk| walk.fixed(&entry.value, "the name of a source"))?.to_owned();
        Some(Trigger::GenericWebhook { source, events, r#match, not })
    }

    /// JSONPath to a value, a list of values or `/regex/`.
    pub(super) fn conditions(&mut self, node: &Node) -> Conditions {
        let mut conditions = Conditions::new();
        let entries = self.map(node).unwrap_or_default();
        if !self.bounded(entries.len(), MAX_CONDITIONS, "conditions", node.span) {
            return conditions;
        }
        for entry in entries {
            self.within(&entry.key, |walk| {
                let Some(expected) = walk.json(&entry.value) else { return };
                if let Err(error) = Condition::compile(&entry.key, &expected) {
                    walk.fault("K0506", entry.span, error.to_string());
                    return;
                }
                conditions.insert(entry.key.clone(), expected);
            });
        }
        conditions
    }

    /// A scalar or a list of scalars as JSON.
    fn json(&mut self, node: &Node) -> Option<Json> {
        if let Data::List(items) = &node.data {
            return items.iter().map(|item| self.scalar(item)).collect::<Option<Vec<_>>>().map(Json::Array);
        }
        self.scalar(node)
    }

    fn scalar(&mut self, node: &Node) -> Option<Json> {
        Some(match (node.core(), node.text()) {
            (Some(Core::Null), _) => Json::Null,
            (Some(Core::Bool(value)), _) => Json::Bool(value),
            (Some(Core::Int(value)), _) => Json::from(value),
            (Some(Core::Float(value)), _) => Json::from(value),
            (Some(Core::Str), Some(_)) => Json::from(self.fixed(node, "a value")?),
            _ => {
                self.mismatch("K0202", node, "a plain value");
                return None;
            }
        })
    }

    fn manual(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::MANUAL, "`on.manual`")?;
        let inputs = match fields.get("inputs") {
            Some(entry) => self.within("inputs", |walk| walk.declared(&entry.value)),
            None => BTreeMap::new(),
        };
        Some(Trigger::Dispatch { types: Vec::new(), manual: true, inputs })
    }
}
