//! `image` and `services` of a job.

use kici_engine::yaml::{Data, Node, Pos};

use super::job::{Job, Variables, filled};
use crate::containers::{container, image, name_of_image, service_name};
use crate::later;
use crate::source::{Fields, items};
use crate::target::{Map, Y};

impl Job<'_> {
    /// Writes the container of the job and its services.
    pub(super) fn containers(&self, out: &mut Map, variables: &Variables) {
        if let Some(entry) = self.fields.entry("image") {
            match self.image(&entry.value, "image", variables, out) {
                Ok((name, more)) => out.put("container", entry.span.start, container(name, entry.span.start, more)),
                Err(reason) => {
                    self.fields
                        .lose("image", format!("{reason}; the steps run on the agent itself, which needs their tools"));
                }
            }
        }
        let Some(node) = self.fields.take("services") else { return };
        let (mut written, mut taken) = (Map::default(), Vec::new());
        for item in items(node) {
            let from = item.span.start;
            let lose = |reason: String| self.around.report.lose(from, self.fields.at("services"), reason);
            match self.image(item, "services", variables, out) {
                Ok((name, mut more)) => {
                    let alias = more.0.iter().position(|(key, ..)| key == "alias").map(|at| more.0.remove(at));
                    let wanted = match alias {
                        Some((.., Y::Text(alias))) => alias,
                        _ => name_of_image(&name),
                    };
                    if !out.has("container") {
                        lose(format!("`{wanted}` is reached by its name only from a job with an image"));
                    }
                    if name.contains("dind") {
                        lose("an engine in a container needs rights that agents do not give to services".to_owned());
                    }
                    let wanted = service_name(&wanted, &taken);
                    taken.push(wanted.clone());
                    written.put(&wanted, from, container(name, from, more));
                }
                Err(reason) => lose(format!("{reason}; the service is not started")),
            }
        }
        out.some("services", self.from, Y::Map(written));
    }

    /// The image and what else is said; `alias` stands among it.
    fn image(&self, node: &Node, key: &str, variables: &Variables, out: &Map) -> Result<(String, Map), String> {
        if !self.around.options.containers {
            return Err(later::NO_CONTAINERS.to_owned());
        }
        let name = |text: &str| -> Result<String, String> {
            let known =
                filled(text, &variables.fixed, out, self.name).ok_or_else(|| format!("`{text}` is not known here"))?;
            image(&known).map(|()| known)
        };
        let from = node.span.start;
        let mut more = Map::default();
        // Services hear what the job hears.
        let mut env = if key == "services" { self.around.variables.env() } else { Map::default() };
        if key == "services" {
            env.0.extend(variables.env().0);
        }
        let made = if let Data::Map(_) = &node.data {
            let fields = Fields::of(node, self.fields.at(key), self.around.report);
            let made = name(fields.text("name").unwrap_or_default());
            let made = match made {
                Ok(made) => made,
                Err(reason) => {
                    fields.lose_rest("it goes with its image");
                    return Err(reason);
                }
            };
            match fields.take("pull_policy").and_then(Node::text) {
                Some("always") if key == "image" => more.text("pull", from, "always"),
                Some("never") if key == "image" => more.text("pull", from, "never"),
                // The usual, also of services.
                _ => {}
            }
            if let Some(docker) = fields.fields("docker")
                && let Some(user) = docker.text("user")
            {
                more.text("user", from, user);
            }
            if fields.take("entrypoint").is_some_and(|node| items(node).iter().any(|item| item.text() != Some(""))) {
                fields.lose("entrypoint", "the entry point of the image stays");
            }
            if let Some(own) = fields.fields("variables") {
                for (name, from, value) in Variables::of(Some(&own), variables).env().0 {
                    env.put(&name, from, value);
                }
            }
            if let Some(alias) = fields.text("alias") {
                let first = alias.split([',', ' ']).find(|part| !part.is_empty()).unwrap_or(alias);
                more.text("alias", from, first);
            }
            made
        } else {
            name(node.text().unwrap_or_default())?
        };
        more.some("env", Pos::default(), Y::Map(env));
        Ok((made, more))
    }
}
