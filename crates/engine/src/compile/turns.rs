//! `concurrency` and `retry`: who takes turns, and what is tried again.

use crate::concurrency::MAX_GROUP_CHARS;
use crate::expr::Scope;
use crate::lock::{Concurrency, Retry, Value};
use crate::state::FailureClass;
use crate::yaml::{Core, Data, Node};

use super::keys;
use super::walk::Walk;

/// Most slots of a group.
const MAX_SLOTS: i64 = 1000;
/// Most repetitions of a job.
const MAX_ATTEMPTS: i64 = 10;
/// The classes that a repetition may help against.
const CLASSES: [FailureClass; 5] =
    [FailureClass::Lost, FailureClass::Infra, FailureClass::Timeout, FailureClass::Oom, FailureClass::User];

impl Walk<'_> {
    /// `concurrency`: the name of a group, or a map.
    pub(super) fn concurrency(&mut self, node: &Node, scope: &Scope) -> Option<Concurrency> {
        let Data::Map(_) = node.data else {
            let group = self.turn_group(node, scope)?;
            return Some(Concurrency { group, max: 1, cancel_in_progress: false });
        };
        let fields = self.fields(node, &keys::CONCURRENCY, "`concurrency`")?;
        let Some(entry) = fields.get("group") else {
            self.fault("K0101", node.span, "`concurrency` has no `group`")
                .expected(["`group`, a name for those that take turns"])
                .help("for example `group: \"deploy-${{ branch }}\"`");
            return None;
        };
        let group = self.within("group", |walk| walk.turn_group(&entry.value, scope));
        let max = match fields.get("max") {
            Some(entry) => self.within("max", |walk| walk.int(&entry.value, 1, MAX_SLOTS)),
            None => Some(1),
        };
        let cancel_in_progress = match fields.get("cancel_in_progress") {
            Some(entry) => self.within("cancel_in_progress", |walk| walk.bool(&entry.value)),
            None => Some(false),
        };
        Some(Concurrency { group: group?, max: u32::try_from(max?).ok()?, cancel_in_progress: cancel_in_progress? })
    }

    fn turn_group(&mut self, node: &Node, scope: &Scope) -> Option<Value> {
        let group = self.template(node, scope)?;
        if let Value::Static { r#static: text } = &group {
            let length = text.chars().count();
            if text.trim().is_empty() || length > MAX_GROUP_CHARS {
                self.fault("K0205", node.span, format!("the name of a group has {length} characters"))
                    .expected([format!("1 to {MAX_GROUP_CHARS} characters")]);
                return None;
            }
        }
        Some(group)
    }

    /// `retry`: a number, which is about lost agents only, or a map. None for 0.
    pub(super) fn retry(&mut self, node: &Node) -> Option<Retry> {
        let retry = match (&node.data, node.core()) {
            (Data::Map(_), _) => self.retry_map(node)?,
            (_, Some(Core::Int(_))) => Retry { attempts: self.attempts(node)?, on: vec![FailureClass::Lost] },
            _ => {
                self.mismatch("K0202", node, "a whole number or a map with `attempts`");
                return None;
            }
        };
        (retry.attempts > 0).then_some(retry)
    }

    fn retry_map(&mut self, node: &Node) -> Option<Retry> {
        let fields = self.fields(node, &keys::RETRY, "`retry`")?;
        let Some(entry) = fields.get("attempts") else {
            self.fault("K0101", node.span, "`retry` has no `attempts`")
                .expected(["`attempts`, how many more times the job is tried"]);
            return None;
        };
        let attempts = self.within("attempts", |walk| walk.attempts(&entry.value));
        let on = match fields.get("on") {
            Some(entry) => self.within("on", |walk| walk.classes(&entry.value)),
            None => Some(vec![FailureClass::Lost]),
        };
        Some(Retry { attempts: attempts?, on: on? })
    }

    fn attempts(&mut self, node: &Node) -> Option<u32> {
        self.int(node, 0, MAX_ATTEMPTS).and_then(|attempts| u32::try_from(attempts).ok())
    }

    fn classes(&mut self, node: &Node) -> Option<Vec<FailureClass>> {
        let words = CLASSES.map(FailureClass::as_str);
        let mut classes = Vec::new();
        for item in self.one_or_list(node, "a class of failure")? {
            let class: FailureClass = self.word(item, &words)?.parse().ok()?;
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
        if classes.is_empty() {
            self.fault("K0205", node.span, "`on` names no class of failure").expected(words);
            return None;
        }
        Some(classes)
    }
}
