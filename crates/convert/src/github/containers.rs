//! `container` and `services` of a job.

use kici_engine::yaml::{Node, Pos};

use super::expr::template;
use super::{Job, env};
use crate::containers::{container, health, image, service_name};
use crate::later::{NO_CONTAINERS, SECRETS};
use crate::source::{Fields, entries, items};
use crate::target::{Map, Y};

impl Job<'_> {
    pub(super) fn containers(&self, out: &mut Map, from: Pos) {
        if !self.options.containers {
            for key in ["container", "services"] {
                self.fields.lose(key, NO_CONTAINERS);
            }
            return;
        }
        if let Some(entry) = self.fields.entry("container") {
            let place = entry.span.start;
            match self.image(&entry.value, "container", place) {
                Ok(Some((name, more))) => out.put("container", place, container(name, place, more)),
                Ok(None) => {}
                Err(reason) => self.fields.lose("container", format!("{reason}; the steps run on the agent itself")),
            }
        }
        let Some(services) = self.fields.fields("services") else { return };
        let (mut written, mut taken) = (Map::default(), Vec::new());
        for entry in services.rest() {
            let place = entry.span.start;
            let name = service_name(&entry.key, &taken);
            match self.image(&entry.value, &format!("services.{}", entry.key), place) {
                Ok(Some((of, more))) => {
                    if name != entry.key {
                        services.lose(&entry.key, format!("its name is `{name}` here"));
                    }
                    taken.push(name.clone());
                    written.put(&name, place, container(of, place, more));
                }
                Ok(None) => {}
                Err(reason) => services.lose(&entry.key, format!("{reason}; the service is not started")),
            }
        }
        out.some("services", from, Y::Map(written));
    }

    /// The image with what else is said of it; none where it is empty.
    fn image(&self, node: &Node, key: &str, from: Pos) -> Result<Option<(String, Map)>, String> {
        let name = |text: &str| -> Result<Option<String>, String> {
            let text = template(text.trim(), &self.names)?;
            if text.is_empty() {
                return Ok(None);
            }
            image(&text).map(|()| Some(text))
        };
        if let Some(text) = node.text() {
            return Ok(name(text)?.map(|name| (name, Map::default())));
        }
        let fields = Fields::of(node, self.fields.at(key), self.report);
        let Some(of) = fields.text("image") else { return Err("it has no image".to_owned()) };
        let made = match name(of) {
            Ok(Some(made)) => made,
            other => {
                fields.lose_rest("it goes with its image");
                return other.map(|_| None);
            }
        };
        let mut more = Map::default();
        if let Some(variables) = fields.fields("env") {
            more.some("env", from, Y::Map(env(&variables, &self.names)));
        }
        let is_service = key.starts_with("services");
        if is_service && let Some(node) = fields.take("ports") {
            let mut ports = Vec::new();
            for item in items(node) {
                let text = item.text().unwrap_or_default().trim_end_matches("/tcp");
                let legal =
                    text.split(':').count() <= 2 && text.split(':').all(|n| n.parse::<u16>().is_ok_and(|n| n > 0));
                if legal {
                    ports.push(text);
                } else {
                    self.report.lose(item.span.start, fields.at("ports"), format!("`{text}` is not a port here"));
                }
            }
            more.some("ports", from, Y::texts(ports));
        }
        if let Some(options) = fields.text("options") {
            let (asked, whole) = if is_service { health(options, from) } else { (None, false) };
            if let Some(asked) = asked {
                more.put("health", from, asked);
            }
            if !whole {
                fields.lose("options", "flags of `docker` are not passed on");
            }
        }
        if let Some(node) = fields.take("credentials").filter(|node| !entries(node).is_empty()) {
            self.report.lose(node.span.start, fields.at("credentials"), SECRETS);
        }
        Ok(Some((made, more)))
    }
}
