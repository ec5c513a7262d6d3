//! `extends`, `!reference` and defaults: a job as it is after everything it is made of was merged.

use std::cell::RefCell;

use kici_engine::yaml::{Data, Entry, Node, Pos};

use crate::source::{Report, entries, get, items};

/// Deepest chain of templates and references, as GitLab's.
const MAX_DEPTH: usize = 11;

pub(super) struct Resolver<'a> {
    root: &'a Node,
    /// Places of lists that are `!reference`.
    tags: &'a [Pos],
    report: &'a Report,
    referred: RefCell<Vec<String>>,
}

impl<'a> Resolver<'a> {
    pub fn new(root: &'a Node, tags: &'a [Pos], report: &'a Report) -> Self {
        Self { root, tags, report, referred: RefCell::default() }
    }

    /// Whether a reference named a template.
    pub fn refers_to(&self, name: &str) -> bool {
        self.referred.borrow().iter().any(|known| known == name)
    }

    /// A map of these entries, references resolved.
    pub fn map(&self, list: Vec<Entry>) -> Node {
        self.node(&Node { span: self.root.span, data: Data::Map(list) })
    }

    /// A value with its references resolved.
    pub fn node(&self, node: &Node) -> Node {
        self.resolved(node, 0)
    }

    fn resolved(&self, node: &Node, depth: usize) -> Node {
        let data = match &node.data {
            Data::List(list) if self.tags.contains(&node.span.start) => {
                return self.referenced(node, list, depth);
            }
            Data::List(list) => Data::List(list.iter().map(|item| self.resolved(item, depth)).collect()),
            Data::Map(map) => Data::Map(
                map.iter().map(|entry| Entry { value: self.resolved(&entry.value, depth), ..entry.clone() }).collect(),
            ),
            scalar => scalar.clone(),
        };
        Node { span: node.span, data }
    }

    fn referenced(&self, node: &Node, keys: &[Node], depth: usize) -> Node {
        let keys: Vec<&str> = keys.iter().filter_map(Node::text).collect();
        let mut at = Some(self.root);
        for key in &keys {
            at = at.and_then(|node| get(node, key));
        }
        if let Some(first) = keys.first() {
            self.referred.borrow_mut().push((*first).to_owned());
        }
        match at {
            Some(found) if depth < MAX_DEPTH => self.resolved(found, depth + 1),
            _ => {
                let reason = "it refers to something that is not in this file";
                self.report.lose(node.span.start, format!("!reference {}", keys.join(".")), reason);
                Node { span: node.span, data: Data::List(Vec::new()) }
            }
        }
    }

    /// A job: defaults, then its templates, then its own keys. Names of templates that were used go into `used`.
    pub fn job(&self, name: &str, node: &Node, defaults: &[&Node], used: &mut Vec<String>) -> Node {
        let whole = self.extended(name, node, used, 0);
        // A default holds as a whole where the job does not name the key.
        let mut own: Vec<Entry> = entries(&whole).to_vec();
        for default in defaults.iter().rev() {
            for entry in entries(default) {
                if !own.iter().any(|mine| mine.key == entry.key) {
                    own.push(entry.clone());
                }
            }
        }
        self.node(&Node { span: node.span, data: Data::Map(own) })
    }

    fn extended(&self, name: &str, node: &Node, used: &mut Vec<String>, depth: usize) -> Node {
        let Some(parents) = get(node, "extends") else { return node.clone() };
        let mut merged = Node { span: node.span, data: Data::Map(Vec::new()) };
        for parent in items(parents) {
            let key = parent.text().unwrap_or_default();
            match get(self.root, key).filter(|_| depth < MAX_DEPTH && key != name) {
                Some(template) => {
                    used.push(key.to_owned());
                    let template = self.extended(key, template, used, depth + 1);
                    merged = merge(&merged, &template);
                }
                None => {
                    let reason = format!("{}: `{key}`", crate::later::reason("extends"));
                    self.report.lose(parent.span.start, format!("{name}.extends"), reason);
                }
            }
        }
        let own = entries(node).iter().filter(|entry| entry.key != "extends").cloned().collect();
        merge(&merged, &Node { span: node.span, data: Data::Map(own) })
    }
}

/// Maps are merged, everything else is replaced.
fn merge(below: &Node, above: &Node) -> Node {
    let (Data::Map(low), Data::Map(high)) = (&below.data, &above.data) else { return above.clone() };
    let mut out = low.clone();
    for entry in high {
        match out.iter_mut().find(|mine| mine.key == entry.key) {
            Some(mine) => {
                mine.value = merge(&mine.value, &entry.value);
                mine.span = entry.span;
            }
            None => out.push(entry.clone()),
        }
    }
    Node { span: above.span, data: Data::Map(out) }
}
