//! `on`: what starts a workflow.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use crate::condition::{Condition, MAX_CONDITIONS};
use crate::inputs::check_declaration;
use crate::lock::{Conditions, Input, InputType, Patterns, Trigger};
use crate::pattern::{MAX_PATTERNS, Pattern, order_warnings};
use crate::yaml::{Core, Data, Node};

use super::keys::{self, KeySet};
use super::walk::Walk;

/// Most inputs of one trigger.
const MAX_INPUTS: usize = 100;
/// Most alternatives of one workflow.
const MAX_TRIGGERS: usize = 64;
/// Actions of pull requests (GitHub, webhook events and payloads, `pull_request`).
const PULL_REQUEST_TYPES: [&str; 21] = [
    "assigned",
    "auto_merge_disabled",
    "auto_merge_enabled",
    "closed",
    "converted_to_draft",
    "demilestoned",
    "dequeued",
    "edited",
    "enqueued",
    "labeled",
    "locked",
    "milestoned",
    "opened",
    "ready_for_review",
    "reopened",
    "review_request_removed",
    "review_requested",
    "synchronize",
    "unassigned",
    "unlabeled",
    "unlocked",
];
const DEFAULT_PULL_REQUEST_TYPES: [&str; 3] = ["opened", "synchronize", "reopened"];

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
        match name {
            "push" | "pull_request" | "tag" | "manual" => {
                let nothing = Node { span: node.span, data: Data::Map(Vec::new()) };
                triggers.extend(self.trigger(name, &nothing));
            }
            "hook" => {
                self.fault("K0101", node.span, "`hook` needs a `source`")
                    .help("write `on: { hook: { source: NAME } }`");
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
                actions: self.pull_request_types(node),
                source_branches: self.again(node, "source_branches"),
                paths: self.again(node, "paths"),
                repos: Patterns::new(),
            }),
            "tag" => Some(Trigger::Tag { tags: self.filter(node, &keys::TAG, name, "tags")?, repos: Patterns::new() }),
            "manual" => self.manual(node),
            _ => self.hook(node),
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
            if let Err(error) = Pattern::compile(text.strip_prefix('!').unwrap_or(text)) {
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

    fn pull_request_types(&mut self, node: &Node) -> Vec<String> {
        let defaults = || DEFAULT_PULL_REQUEST_TYPES.iter().map(|action| (*action).to_owned()).collect();
        let Data::Map(entries) = &node.data else { return defaults() };
        let Some(entry) = entries.iter().find(|entry| entry.key == "types") else { return defaults() };
        self.within("types", |walk| {
            let items = walk.one_or_list(&entry.value, "an action").unwrap_or_default();
            if items.is_empty() {
                return defaults();
            }
            items.iter().filter_map(|item| walk.word(item, &PULL_REQUEST_TYPES)).map(str::to_owned).collect()
        })
    }

    fn hook(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::HOOK, "`on.hook`")?;
        let mut events = Vec::new();
        if let Some(entry) = fields.get("events") {
            self.within("events", |walk| {
                for item in walk.one_or_list(&entry.value, "an event").unwrap_or_default() {
                    events.extend(walk.fixed(item, "an event").map(str::to_owned));
                }
            });
        }
        let conditions = |walk: &mut Self, key: &str| match fields.get(key) {
            Some(entry) => walk.within(key, |walk| walk.conditions(&entry.value)),
            None => Conditions::new(),
        };
        let (r#match, not) = (conditions(self, "match"), conditions(self, "not"));
        let Some(entry) = fields.get("source") else {
            self.fault("K0101", node.span, "`on.hook` has no `source`")
                .expected(["`source`, the name of a generic source"]);
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

    /// Inputs that are declared, by name.
    pub(super) fn declared(&mut self, node: &Node) -> BTreeMap<String, Input> {
        let mut inputs = BTreeMap::new();
        let entries = self.map(node).unwrap_or_default();
        if !self.bounded(entries.len(), MAX_INPUTS, "inputs", node.span) {
            return inputs;
        }
        for entry in entries {
            self.within(&entry.key, |walk| {
                if !super::is_variable(&entry.key) {
                    walk.fault("K0206", entry.span, format!("`{}` is not a name for an input", entry.key))
                        .expected(["letters, digits and `_`, not starting with a digit"]);
                }
                if let Some(input) = walk.input(&entry.key, &entry.value) {
                    inputs.insert(entry.key.clone(), input);
                }
            });
        }
        inputs
    }

    fn input(&mut self, name: &str, node: &Node) -> Option<Input> {
        let nothing = Node { span: node.span, data: Data::Map(Vec::new()) };
        let node = if node.is_null() { &nothing } else { node };
        let fields = self.fields(node, &keys::INPUT, &format!("input `{name}`"))?;
        let before = self.found;
        let r#type = match fields.get("type") {
            Some(entry) => self.within("type", |walk| walk.input_type(&entry.value)),
            None => Some(InputType::String),
        };
        let field = |walk: &mut Self, key: &str| {
            fields.get(key).and_then(|entry| walk.within(key, |walk| walk.scalar(&entry.value)))
        };
        let default = field(self, "default");
        let (min, max) = (field(self, "min"), field(self, "max"));
        let pattern = field(self, "pattern").and_then(|json| json.as_str().map(str::to_owned));
        let description = field(self, "description").and_then(|json| json.as_str().map(str::to_owned));
        let values = match fields.get("values") {
            Some(entry) => self.within("values", |walk| {
                let items = walk.list(&entry.value, "values").unwrap_or_default();
                items.iter().filter_map(|item| walk.scalar(item)).collect()
            }),
            None => Vec::new(),
        };
        let required = match fields.get("required") {
            Some(entry) => self.within("required", |walk| walk.bool(&entry.value)).unwrap_or_default(),
            None => default.is_none(),
        };
        for (key, bound) in [("min", &min), ("max", &max)] {
            if let (Some(bound), Some(entry)) = (bound, fields.get(key))
                && !bound.is_number()
            {
                self.within(key, |walk| {
                    walk.mismatch("K0202", &entry.value, "a number");
                });
            }
        }
        if self.found > before {
            return None;
        }
        let number = |json: Option<Json>| json.as_ref().and_then(Json::as_f64);
        let (min, max) = (number(min), number(max));
        let input = Input { r#type: r#type?, required, default, values, min, max, pattern, description };
        if let Err(error) = check_declaration(name, &input) {
            self.fault("K0505", node.span, error.to_string());
            return None;
        }
        Some(input)
    }

    fn input_type(&mut self, node: &Node) -> Option<InputType> {
        let words = ["string", "number", "integer", "boolean", "enum", "literal"];
        Some(match self.word(node, &words)? {
            "string" => InputType::String,
            "number" => InputType::Number,
            "integer" => InputType::Integer,
            "boolean" => InputType::Boolean,
            "enum" => InputType::Enum,
            _ => InputType::Literal,
        })
    }
}
