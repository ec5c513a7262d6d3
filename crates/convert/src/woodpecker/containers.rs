//! Images of steps and services. There each step has a container of its own, here a job has one: it comes along where all steps
//! name the same image.

use std::collections::BTreeSet;

use kici_engine::yaml::{Data, Entry, Node};

use super::{Pipeline, template};
use crate::containers::{container, image, name_of_image, service_name};
use crate::later;
use crate::source::{Fields, get, items};
use crate::target::{Map, Y};

impl Pipeline<'_> {
    /// Writes the container that all scripts run in; true when there is one.
    pub(super) fn container(&self, out: &mut Map, steps: &[(String, &Node)], matrix: &BTreeSet<String>) -> bool {
        let scripts = || {
            let runs = |node: &&Node| get(node, "commands").or_else(|| get(node, "command")).is_some();
            steps.iter().map(|(_, node)| *node).filter(runs)
        };
        let mut images: Vec<&str> =
            scripts().map(|node| get(node, "image").and_then(Node::text).unwrap_or("")).collect();
        images.dedup();
        let [only] = images[..] else { return false };
        if only.is_empty() || !self.options.containers {
            return false;
        }
        let Some(name) = template(only, matrix).filter(|name| image(name).is_ok()) else { return false };
        let from = scripts().next().map_or(self.from, |node| node.span.start);
        let mut more = Map::default();
        if scripts().any(|node| matches!(get(node, "pull").and_then(Node::text), Some("true" | "always"))) {
            more.text("pull", from, "always");
        }
        out.put("container", from, container(name, from, more));
        true
    }

    /// Why the image of a step does not come along.
    pub(super) fn no_container(&self) -> &'static str {
        if self.options.containers {
            "the steps of a job share one container, and these name several images, or one that is no name here; the step runs \
             on the agent itself, which needs its tools"
        } else {
            later::NO_CONTAINERS
        }
    }

    pub(super) fn services(&self, out: &mut Map, matrix: &BTreeSet<String>) {
        let Some(node) = self.fields.take("services") else { return };
        let named: Vec<(String, &Node)> = match &node.data {
            Data::Map(map) => map.iter().map(|Entry { key, value, .. }| (key.clone(), value)).collect(),
            _ => {
                let name = |item: &Node| get(item, "name").and_then(Node::text).unwrap_or_default().to_owned();
                items(node).into_iter().map(|item| (name(item), item)).collect()
            }
        };
        let (mut written, mut taken) = (Map::default(), Vec::new());
        for (name, node) in named {
            let from = node.span.start;
            let path = format!("{}.{name}", self.fields.at("services"));
            let fields = Fields::of(node, path.clone(), self.report);
            for key in ["name", "pull"] {
                let _ = fields.take(key);
            }
            let of = fields.text("image").and_then(|text| template(text, matrix)).filter(|of| image(of).is_ok());
            let Some(of) = of.filter(|_| self.options.containers) else {
                let why = if self.options.containers { "its image is no name here" } else { later::NO_CONTAINERS };
                self.report.lose(from, path, format!("{why}; the service is not started"));
                fields.lose_rest("it goes with its service");
                continue;
            };
            let ours = service_name(if name.is_empty() { name_of_image(&of) } else { name.clone() }.as_str(), &taken);
            if !name.is_empty() && ours != name {
                self.report.lose(from, path.clone(), format!("its name is `{ours}` here"));
            }
            if !out.has("container") {
                self.report.lose(from, path.clone(), "it is reached by its name only where all steps have one image");
            }
            taken.push(ours.clone());
            let (mut more, mut env) = (Map::default(), Map::default());
            if let Some(node) = fields.take("environment") {
                self.environment(node, &fields.at("environment"), &mut env, matrix);
            }
            more.some("env", from, Y::Map(env));
            if out.has("container") {
                // All of them are open there.
                let _ = fields.take("ports");
            }
            written.put(&ours, from, container(of, from, more));
        }
        out.some("services", node.span.start, Y::Map(written));
    }
}
