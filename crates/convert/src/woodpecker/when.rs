//! `when` and `trigger` as triggers and conditions.

use std::collections::BTreeSet;

use kici_engine::yaml::{Data, Node, Pos};

use crate::cel::{self, quote, unit};
use crate::source::{Fields, Report, items, texts};
use crate::target::{Map, Y};

/// What starts the workflow.
#[derive(Debug, Default)]
pub(super) struct Events(BTreeSet<&'static str>);

impl Events {
    /// What starts a pipeline that says nothing.
    pub fn usual(&mut self) {
        self.0.extend(["push", "tag", "pull_request", "manual"]);
    }

    /// As `on`.
    pub fn triggers(&self, from: Pos) -> Y {
        let mut on = Map::default();
        for event in &self.0 {
            on.put(event, from, Y::Map(Map::default()));
        }
        // Something must be able to start it.
        if on.0.is_empty() {
            on.put("manual", from, Y::Map(Map::default()));
        }
        Y::Map(on)
    }
}

/// Where a `when` stands.
pub(super) struct Place<'a> {
    pub report: &'a Report,
    pub path: String,
    /// At a pipeline, not at a step.
    pub pipeline: bool,
}

/// When something runs: one of the conditions holds.
#[derive(Debug, Default)]
pub(super) struct Made(Vec<One>);

#[derive(Debug)]
struct One {
    parts: Vec<String>,
    /// Runs after a failure; runs after a success.
    status: (bool, bool),
}

impl Made {
    /// The condition of a pipeline.
    pub fn all(&self) -> String {
        let any: Vec<String> = self.0.iter().map(|one| cel::all(&one.parts)).collect();
        if any.is_empty() || any.contains(&"true".to_owned()) { "true".to_owned() } else { cel::any(&any) }
    }

    /// The condition of a step, which also asks how the steps before went.
    pub fn of_step(&self) -> String {
        let one = |one: &One| {
            let status = match one.status {
                (true, true) => "always()",
                (true, false) => "failure()",
                _ => "success()",
            };
            let rest = cel::all(&one.parts);
            if rest == "true" { status.to_owned() } else { format!("{status} && {}", unit(&rest)) }
        };
        let any: Vec<String> = self.0.iter().map(one).collect();
        if any.is_empty() { "success()".to_owned() } else { cel::any(&any) }
    }
}

/// Reads a `when`: a map, or a list of maps of which one must hold.
pub(super) fn condition(node: &Node, place: &Place<'_>, events: &mut Events) -> Made {
    let list: Vec<&Node> = match &node.data {
        Data::Map(_) => vec![node],
        _ => items(node),
    };
    let made = list.into_iter().map(|node| one(node, place, events)).collect();
    Made(made)
}

fn one(node: &Node, place: &Place<'_>, events: &mut Events) -> One {
    let fields = Fields::of(node, place.path.clone(), place.report);
    let mut parts = Vec::new();
    match fields.take("event") {
        Some(node) => {
            let kinds = event_names(node, &fields.at("event"), place.report);
            parts.push(of_events(&kinds, place, node.span.start, events));
        }
        None => events.usual(),
    }
    for (key, subject) in [("branch", cel::REF_NAME), ("ref", "ref")] {
        if let Some(node) = fields.take(key) {
            parts.push(matching(node, subject, &fields.at(key), place.report));
        }
    }
    if let Some(node) = fields.take("tag") {
        parts.push(matching(node, cel::TAG, &fields.at("tag"), place.report));
    }
    let mut status = (false, true);
    if let Some(node) = fields.take("status") {
        let words = texts(node, &fields.at("status"), place.report);
        if place.pipeline {
            fields.lose("status", "a pipeline does not ask how others went; needs do");
        } else {
            status = (words.contains(&"failure"), words.contains(&"success"));
        }
    }
    parts.retain(|part| part != "true");
    One { parts, status }
}

/// The names of events; an exclusion leaves the others.
fn event_names<'a>(node: &'a Node, path: &str, report: &'a Report) -> Vec<&'a str> {
    const ALL: [&str; 4] = ["push", "tag", "pull_request", "manual"];
    let Data::Map(_) = node.data else { return texts(node, path, report) };
    let fields = Fields::of(node, path, report);
    let mut names = match fields.take("include") {
        Some(node) => texts(node, &fields.at("include"), report),
        None => ALL.to_vec(),
    };
    if let Some(node) = fields.take("exclude") {
        let out = texts(node, &fields.at("exclude"), report);
        names.retain(|name| !out.contains(name));
    }
    names
}

fn of_events(names: &[&str], place: &Place<'_>, at: Pos, events: &mut Events) -> String {
    let mut kinds = Vec::new();
    for name in names {
        let (kind, trigger) = match *name {
            "push" => ("push", "push"),
            "tag" => ("tag", "tag"),
            "pull_request" => ("pr", "pull_request"),
            "manual" | "custom" => ("manual", "manual"),
            other => {
                let reason = format!("`{other}`: the event is not supported yet");
                place.report.lose(at, format!("{}.event", place.path), reason);
                continue;
            }
        };
        events.0.insert(trigger);
        kinds.push(quote(kind));
    }
    kinds.sort();
    kinds.dedup();
    match kinds.as_slice() {
        [] => "false".to_owned(),
        [one] => format!("event.kind == {one}"),
        many => format!("event.kind in [{}]", many.join(", ")),
    }
}

/// One of the patterns fits, and none that is excluded.
fn matching(node: &Node, subject: &str, path: &str, report: &Report) -> String {
    let any = |node: &Node| {
        let of = |text: &&str| match *text {
            "${CI_REPO_DEFAULT_BRANCH}" | "$CI_REPO_DEFAULT_BRANCH" | "${DRONE_REPO_BRANCH}" => {
                format!("{subject} == {}", cel::DEFAULT_BRANCH)
            }
            text if text.contains("${") => {
                report.lose(node.span.start, path, format!("`{text}` is not known here and never fits"));
                "false".to_owned()
            }
            text if text.contains(['*', '?', '[', '{']) => format!("glob({subject}, {})", quote(text)),
            text => format!("{subject} == {}", quote(text)),
        };
        cel::any(&texts(node, path, report).iter().map(of).collect::<Vec<_>>())
    };
    let Data::Map(_) = node.data else { return any(node) };
    let fields = Fields::of(node, path, report);
    let mut parts = Vec::new();
    if let Some(node) = fields.take("include") {
        parts.push(any(node));
    }
    if let Some(node) = fields.take("exclude") {
        parts.push(format!("!{}", unit(&any(node))));
    }
    cel::all(&parts)
}
