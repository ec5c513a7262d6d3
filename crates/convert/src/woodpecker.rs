//! Woodpecker and Drone. <https://woodpecker-ci.org/docs/usage/workflow-syntax>, <https://docs.drone.io/yaml/docker/>
//!
//! A pipeline is one workspace that its steps share, so it becomes one job with steps; the pipelines of a Drone file become
//! the jobs of one workflow.

mod containers;
mod when;

use std::collections::BTreeSet;

use kici_engine::yaml::{Data, Document, Entry, Node, Pos};

use crate::source::{Fields, Report, entries, get, items, texts};
use crate::target::{Map, Y, job_name, variable};
use crate::variables::provide;
use crate::{Dialect, Options, cel, later};
use when::{Events, Place};

/// Converts a file.
///
/// # Errors
/// Why there is nothing to write.
pub(crate) fn convert(
    documents: &[Document],
    dialect: Dialect,
    stem: &str,
    options: &Options,
    report: &Report,
) -> Result<Y, String> {
    let mut pipelines: Vec<(&Node, String, String)> = Vec::new();
    let mut taken = Vec::new();
    for document in documents {
        let node = &document.root;
        let kind = get(node, "kind").and_then(Node::text).unwrap_or("pipeline");
        if kind != "pipeline" {
            report.lose(node.span.start, format!("kind: {kind}"), "secrets and signatures are not carried over");
            continue;
        }
        if entries(node).is_empty() {
            continue;
        }
        let name = get(node, "name").and_then(Node::text).filter(|_| dialect == Dialect::Drone).unwrap_or(stem);
        let ours = job_name(name, &taken);
        taken.push(ours.clone());
        pipelines.push((node, name.to_owned(), ours));
    }
    if pipelines.is_empty() {
        return Err("the file has no pipeline".to_owned());
    }
    let mut events = Events::default();
    let mut jobs = Map::default();
    for (node, name, ours) in &pipelines {
        let fields = Fields::of(node, if pipelines.len() > 1 { name.clone() } else { String::new() }, report);
        let pipeline = Pipeline { fields, dialect, pipelines: &pipelines, options, report, from: node.span.start };
        let job = pipeline.convert(&mut events);
        jobs.put(ours, node.span.start, Y::Map(job));
    }
    let from = documents.first().map_or_else(Pos::default, |document| document.root.span.start);
    let mut out = Map::default();
    out.text("name", from, stem);
    out.put("on", from, events.triggers(from));
    out.put("jobs", from, Y::Map(jobs));
    Ok(Y::Map(out))
}

struct Pipeline<'a> {
    fields: Fields<'a>,
    dialect: Dialect,
    pipelines: &'a [(&'a Node, String, String)],
    options: &'a Options,
    report: &'a Report,
    from: Pos,
}

impl Pipeline<'_> {
    fn convert(self, events: &mut Events) -> Map {
        let mut out = Map::default();
        let fields = &self.fields;
        // Anchors stand there; what they bring is seen where they are used. The name is that of the job.
        for key in ["kind", "type", "variables", "name"] {
            let _ = fields.take(key);
        }
        self.edges(&mut out);
        let place = Place { report: self.report, path: fields.at("when"), pipeline: true };
        let condition = match fields.take("when").or_else(|| fields.take("trigger")) {
            Some(node) => when::condition(node, &place, events).all(),
            None => {
                events.usual();
                "true".to_owned()
            }
        };
        if condition != "true" {
            out.text("if", self.from, condition);
        }
        let matrix = self.matrix(&mut out);
        self.runs_on(&mut out);
        self.clone_of(&mut out);
        let mut steps = Vec::new();
        let node = fields.take("steps").or_else(|| fields.take("pipeline"));
        let listed = self.listed(node);
        let contained = self.container(&mut out, &listed, &matrix);
        self.services(&mut out, &matrix);
        for (name, node) in &listed {
            steps.push(self.step(name, node, &matrix, contained));
        }
        out.put("steps", self.from, Y::List(steps));
        out
    }

    fn edges(&self, out: &mut Map) {
        let fields = &self.fields;
        // That a failed pipeline still has successors is said by the successors.
        let when = match fields.take("runs_on").map(|node| texts(node, &fields.at("runs_on"), self.report)) {
            Some(statuses) if statuses.contains(&"failure") && statuses.contains(&"success") => Some("always"),
            Some(statuses) if statuses.contains(&"failure") => Some("on-failure"),
            _ => None,
        };
        let Some(node) = fields.take("depends_on") else { return };
        let mut needs = Vec::new();
        for name in texts(node, &fields.at("depends_on"), self.report) {
            match self.pipelines.iter().find(|(_, known, _)| known == name) {
                Some((.., ours)) => {
                    let mut edge = Map::default();
                    edge.text("job", self.from, ours);
                    edge.text("when", self.from, when.unwrap_or("on-skip"));
                    needs.push(Y::Map(edge));
                }
                None => fields
                    .lose("depends_on", format!("`{name}` is not in this file; workflows do not wait for each other")),
            }
        }
        out.some("needs", self.from, Y::List(needs));
    }

    /// The names of the matrix; its values reach scripts under the same names.
    fn matrix(&self, out: &mut Map) -> BTreeSet<String> {
        let fields = &self.fields;
        let mut names = BTreeSet::new();
        let Some(node) = fields.take("matrix") else { return names };
        let mut matrix = Map::default();
        let (mut env, mut rows) = (Map::default(), Vec::new());
        for entry in entries(node) {
            if entry.key == "include" {
                for item in items(&entry.value) {
                    let mut row = Map::default();
                    for pair in entries(item) {
                        names.insert(variable(&pair.key));
                        row.text(&variable(&pair.key), pair.span.start, pair.value.text().unwrap_or_default());
                    }
                    rows.push(Y::Map(row));
                }
                continue;
            }
            names.insert(variable(&entry.key));
            let mut values = texts(&entry.value, &fields.at("matrix"), self.report);
            let mut seen = BTreeSet::new();
            values.retain(|value| seen.insert(*value));
            matrix.put(&variable(&entry.key), entry.span.start, Y::texts(values));
        }
        matrix.some("include", node.span.start, Y::List(rows));
        for name in &names {
            env.text(name, node.span.start, format!("${{{{ (has(matrix.{name}) ? matrix.{name} : '') }}}}"));
        }
        out.some("matrix", node.span.start, Y::Map(matrix));
        out.some("env", node.span.start, Y::Map(env));
        names
    }

    fn runs_on(&self, out: &mut Map) {
        let fields = &self.fields;
        let mut labels = Vec::new();
        if let Some(labels_) = fields.fields("labels") {
            for entry in labels_.rest() {
                match entry.value.text() {
                    // Two labels of Woodpecker's own say what the machine is.
                    Some(text) if entry.key == "platform" => labels.push(text.to_owned()),
                    Some(text) if !text.contains('$') => labels.push(format!("{}:{text}", entry.key)),
                    _ => labels_.lose(&entry.key, "a label that is computed"),
                }
            }
        }
        if let Some(node) = fields.take("platform") {
            match node.text() {
                Some(text) if !text.contains('$') => labels.push(text.to_owned()),
                Some(_) => fields.lose("platform", "a platform that is computed"),
                None => {
                    let platform = Fields::of(node, fields.at("platform"), self.report);
                    labels
                        .extend([platform.text("os"), platform.text("arch")].into_iter().flatten().map(str::to_owned));
                }
            }
        }
        if labels.is_empty() {
            labels.push(self.options.runs_on.clone());
        }
        let labels = if labels.len() == 1 { Y::Text(labels.remove(0)) } else { Y::texts(labels) };
        out.put("runs_on", self.from, labels);
    }

    fn clone_of(&self, out: &mut Map) {
        let fields = &self.fields;
        if fields.flag("skip_clone") == Some(true) {
            out.put("checkout", self.from, Y::Plain("false".into()));
            return;
        }
        let Some(node) = fields.take("clone") else { return };
        let simple = Fields::of(node, fields.at("clone"), self.report);
        if simple.flag("disable") == Some(true) {
            out.put("checkout", self.from, Y::Plain("false".into()));
        } else if let Some(depth) = simple.text("depth").and_then(|text| text.parse::<u32>().ok()) {
            let mut checkout = Map::default();
            checkout.put("depth", self.from, Y::Plain(depth.to_string()));
            out.put("checkout", self.from, Y::Map(checkout));
        }
        simple.lose_rest(later::reason("clone"));
    }

    /// The steps with their names, each after those that it depends on.
    fn listed<'n>(&self, node: Option<&'n Node>) -> Vec<(String, &'n Node)> {
        let Some(node) = node else { return Vec::new() };
        let mut all: Vec<(String, &Node)> = match &node.data {
            Data::Map(map) => map.iter().map(|Entry { key, value, .. }| (key.clone(), value)).collect(),
            _ => {
                let name = |item: &Node| get(item, "name").and_then(Node::text).unwrap_or("step").to_owned();
                items(node).into_iter().map(|item| (name(item), item)).collect()
            }
        };
        let mut done: Vec<(String, &Node)> = Vec::new();
        while !all.is_empty() {
            let waits = |node: &Node| -> bool {
                let needs = get(node, "depends_on").map(items).unwrap_or_default();
                needs.iter().filter_map(|need| need.text()).any(|need| all.iter().any(|(name, _)| name == need))
            };
            // A circle would wait for ever; then the order of the file holds.
            let next = all.iter().position(|(_, node)| !waits(node)).unwrap_or(0);
            done.push(all.remove(next));
        }
        done
    }

    fn step(&self, name: &str, node: &Node, matrix: &BTreeSet<String>, contained: bool) -> Y {
        let path = format!("{}.{name}", self.fields.at("steps"));
        let fields = Fields::of(node, path.clone(), self.report);
        let from = node.span.start;
        for key in ["name", "depends_on", "group"] {
            let _ = fields.take(key);
        }
        let commands = fields.take("commands").or_else(|| fields.take("command"));
        let Some(commands) = commands else {
            let image = fields.take("image").and_then(Node::text).unwrap_or("a plugin").to_owned();
            fields.lose("image", format!("`{image}` is a plugin: {}", later::reason("settings")));
            fields.lose_rest("it goes with its plugin");
            return Y::Note(format!("line {}: step `{name}` is not converted: it runs the plugin {image}", from.line));
        };
        if contained {
            let _ = (fields.take("image"), fields.take("pull"));
        } else {
            fields.lose("image", self.no_container());
        }
        let mut step = Map::default();
        step.text("name", from, name);
        if let Some(node) = fields.take("when") {
            let place = Place { report: self.report, path: fields.at("when"), pipeline: false };
            let made = when::condition(node, &place, &mut Events::default());
            let condition = made.of_step();
            if condition != "success()" {
                step.text("if", node.span.start, condition);
            }
        }
        match fields.text("failure") {
            Some("ignore") => step.put("continue_on_error", from, Y::Plain("true".into())),
            Some("fail") | None => {}
            Some(other) => fields.lose("failure", format!("`{other}` has no counterpart")),
        }
        let mut env = Map::default();
        if let Some(node) = fields.take("environment") {
            self.environment(node, &fields.at("environment"), &mut env, matrix);
        }
        if let Some(text) = fields.text("directory") {
            match text.contains('$') {
                true => fields.lose("directory", "a directory that is computed"),
                false => step.text("working_directory", from, text),
            }
        }
        let lines = texts(commands, &fields.at("commands"), self.report);
        let script: String = lines.iter().map(|line| unescaped(line.trim_end_matches('\n')) + "\n").collect();
        let script = provide(self.dialect, &script, &mut env, from, &fields.at("commands"), self.report);
        step.some("env", from, Y::Map(env));
        step.text("run", commands.span.start, script);
        Y::Map(step)
    }

    fn environment(&self, node: &Node, path: &str, env: &mut Map, matrix: &BTreeSet<String>) {
        let lose = |at: Pos, name: &str, reason: &str| self.report.lose(at, format!("{path}.{name}"), reason);
        let mut put = |name: &str, at: Pos, text: &str| match template(text, matrix) {
            _ if variable(name) != name => lose(at, name, "not a name for a variable"),
            Some(text) => env.text(name, at, text),
            None => lose(at, name, "a value that is computed"),
        };
        if let Data::List(list) = &node.data {
            for item in list {
                match item.text().and_then(|text| text.split_once('=')) {
                    Some((name, value)) => put(name, item.span.start, value),
                    None => lose(item.span.start, "", "no `NAME=value`"),
                }
            }
            return;
        }
        for entry in entries(node) {
            match entry.value.text() {
                Some(text) => put(&entry.key, entry.span.start, text),
                None if get(&entry.value, "from_secret").is_some() => {
                    lose(entry.span.start, &entry.key, later::SECRETS)
                }
                None => lose(entry.span.start, &entry.key, "a text is expected"),
            }
        }
    }
}

/// `$$` stands for `$` in Woodpecker's files.
fn unescaped(line: &str) -> String {
    line.replace("$${", "${").replace("$$", "$")
}

/// A text whose variables are of the matrix; none when another is in it.
fn template(text: &str, matrix: &BTreeSet<String>) -> Option<String> {
    let Some(at) = text.find("${") else { return Some(text.to_owned()) };
    let rest = &text[at + 2..];
    let end = rest.find('}')?;
    let name = &rest[..end];
    let value = if matrix.contains(name) {
        format!("${{{{ matrix.{name} }}}}")
    } else {
        let known = match name {
            "CI_COMMIT_BRANCH" | "DRONE_BRANCH" | "DRONE_COMMIT_BRANCH" => cel::REF_NAME,
            "CI_COMMIT_TAG" | "DRONE_TAG" => cel::TAG,
            "CI_COMMIT_SHA" | "DRONE_COMMIT" | "DRONE_COMMIT_SHA" => "sha",
            "CI_REPO_DEFAULT_BRANCH" => cel::DEFAULT_BRANCH,
            "CI_COMMIT_PULL_REQUEST" | "DRONE_PULL_REQUEST" => cel::PR_NUMBER,
            "CI_REPO" | "DRONE_REPO" => "repo",
            _ => return None,
        };
        format!("${{{{ {known} }}}}")
    };
    Some(format!("{}{value}{}", &text[..at], template(&rest[end + 1..], matrix)?))
}
