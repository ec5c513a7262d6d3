//! `runs_on_all` and the keys that go with it.

use crate::hosts::{HostMatcher, HostSelector, OnUnreachable};
use crate::labels::parse_term;
use crate::lock::Matcher;
use crate::yaml::{Data, Entry, Node};

use super::keys;
use super::walk::{Fields, Walk};

/// What a job says about hosts.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    pub(super) selector: Option<HostSelector>,
    pub(super) on_unreachable: OnUnreachable,
    pub(super) include_uninitialized: bool,
}

impl Walk<'_> {
    pub(super) fn hosts(&mut self, job: &Entry, fields: Fields<'_>) -> Hosts {
        let mut hosts = Hosts::default();
        let Some(all) = fields.get("runs_on_all") else {
            for key in ["on_unreachable", "include_uninitialized"] {
                let Some(entry) = fields.get(key) else { continue };
                let message = format!("`{key}` in job `{}` has no effect without `runs_on_all`", job.key);
                self.within(key, |walk| {
                    walk.fault("K0104", entry.span, message).help("remove it, or add `runs_on_all`");
                });
            }
            return hosts;
        };
        for key in ["runs_on", "matrix"] {
            let Some(entry) = fields.get(key) else { continue };
            let message = format!("job `{}` has both `runs_on_all` and `{key}`", job.key);
            self.within(key, |walk| {
                walk.fault("K0103", entry.span, message).help("keep one of them");
            });
        }
        hosts.selector = self.within("runs_on_all", |walk| walk.host_selector(&all.value));
        if let Some(entry) = fields.get("on_unreachable") {
            let word = self.within("on_unreachable", |walk| walk.word(&entry.value, &["hold", "skip", "fail"]));
            hosts.on_unreachable = match word {
                Some("skip") => OnUnreachable::Skip,
                Some("fail") => OnUnreachable::Fail,
                _ => OnUnreachable::Hold,
            };
        }
        if let Some(entry) = fields.get("include_uninitialized") {
            let flag = self.within("include_uninitialized", |walk| walk.bool(&entry.value));
            hosts.include_uninitialized = flag.unwrap_or_default();
        }
        if let Some(entry) = fields.get("max_parallel").filter(|_| hosts.on_unreachable == OnUnreachable::Hold) {
            let message = "a host that is out of contact keeps its place in `max_parallel` until it is back";
            self.within("max_parallel", |walk| {
                walk.fault("W0504", entry.span, message)
                    .help("say `on_unreachable: skip` or `fail`, or live with the wait")
                    .warning();
            });
        }
        hosts
    }

    /// A label, a list (all of them), or groups of which one must hold.
    fn host_selector(&mut self, node: &Node) -> Option<HostSelector> {
        let before = self.found;
        let mut selector = HostSelector::default();
        if let Data::Map(_) = node.data {
            let fields = self.fields(node, &keys::RUNS_ON_ALL, "`runs_on_all`")?;
            if let Some(entry) = fields.get("include") {
                self.within("include", |walk| walk.host_groups(&entry.value, &mut selector));
            }
            if let Some(entry) = fields.get("exclude") {
                self.within("exclude", |walk| {
                    let (labels, double) = walk.host_labels(&entry.value);
                    if !double.is_empty() {
                        walk.fault("K0504", entry.value.span, "`!` under `exclude` would exclude twice");
                    }
                    selector.exclude.extend(labels);
                });
            }
        } else {
            let (labels, exclude) = self.host_labels(node);
            selector = HostSelector { include: if labels.is_empty() { Vec::new() } else { vec![labels] }, exclude };
        }
        if self.found > before {
            return None;
        }
        if selector.include.is_empty() {
            self.fault("K0504", node.span, "`runs_on_all` asks for no label, every host would do")
                .expected(["at least one label, for example `role:web`"]);
            return None;
        }
        match HostMatcher::compile(&selector) {
            Ok(_) => Some(selector),
            Err(error) => {
                self.fault("K0504", node.span, error.to_string());
                None
            }
        }
    }

    fn host_groups(&mut self, node: &Node, selector: &mut HostSelector) {
        for group in self.list(node, "groups").unwrap_or_default() {
            let labels = match group.data {
                Data::Map(_) => {
                    let Some(fields) = self.fields(group, &keys::HOST_GROUP, "a group of `runs_on_all`") else {
                        continue;
                    };
                    let Some(all) = fields.get("all") else {
                        self.fault("K0101", group.span, "the group has no `all`").expected(["`all`, a list of labels"]);
                        continue;
                    };
                    &all.value
                }
                _ => group,
            };
            let (labels, exclude) = self.host_labels(labels);
            if labels.is_empty() {
                self.fault("K0504", group.span, "the group asks for no label").expected(["at least one label"]);
            }
            selector.include.push(labels);
            selector.exclude.extend(exclude);
        }
    }

    /// Labels that must hit, and those written with `!`.
    fn host_labels(&mut self, node: &Node) -> (Vec<Matcher>, Vec<Matcher>) {
        let (mut labels, mut exclude) = (Vec::new(), Vec::new());
        for item in self.one_or_list(node, "a label").unwrap_or_default() {
            // The hosts are settled when the run is planned, from the file alone: the same for every event.
            let Some(text) = self.fixed(item, "a label") else { continue };
            match parse_term(text) {
                Ok(term) if term.exclude => exclude.push(term.matcher),
                Ok(term) => labels.push(term.matcher),
                Err(error) => {
                    self.fault("K0504", item.span, error.to_string());
                }
            }
        }
        (labels, exclude)
    }
}
