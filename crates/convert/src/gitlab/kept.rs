//! `cache`, `artifacts` and `dependencies` of a job, and what it does when it fails or others run.

use kici_engine::cache::{CachePath, artifact_pattern};
use kici_engine::yaml::{Data, Node, Pos};

use super::job::{Job, Variables, filled, timeout};
use crate::source::{Fields, entries, get, items, texts};
use crate::target::{Map, Y};

/// What others may take from a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    /// Its files, which are there once it has ended.
    Files,
    /// Its files, if it runs at all.
    Maybe,
    /// One for each of its variants.
    Several,
}

impl Product {
    /// What a job makes, if anything.
    pub(super) fn of(job: &Node) -> Option<Self> {
        get(job, "artifacts").and_then(|artifacts| get(artifacts, "paths"))?;
        let decided = ["rules", "only", "except"].iter().any(|key| get(job, key).is_some());
        let when = get(job, "when").and_then(Node::text);
        Some(match get(job, "parallel") {
            Some(_) => Self::Several,
            None if decided || !matches!(when, None | Some("on_success" | "always")) => Self::Maybe,
            None => Self::Files,
        })
    }
}

impl Job<'_> {
    pub(super) fn caches(&self, out: &mut Map, variables: &Variables) {
        let Some(node) = self.fields.take("cache") else { return };
        let items = match &node.data {
            Data::List(items) => items.iter().collect(),
            _ if node.is_null() => Vec::new(),
            _ => vec![node],
        };
        let made = items.into_iter().filter(|item| !entries(item).is_empty()).filter_map(|item| {
            let fields = Fields::of(item, self.fields.at("cache"), self.around.report);
            let made = self.cache(&fields, item.span.start, variables, out);
            if made.is_none() {
                fields.lose_rest("it goes with its cache");
            }
            made
        });
        let made: Vec<Y> = made.collect();
        out.some("cache", node.span.start, Y::List(made));
    }

    fn cache(&self, fields: &Fields<'_>, from: Pos, variables: &Variables, out: &Map) -> Option<Y> {
        let text = |text: &str| filled(text, &variables.fixed, out, self.name);
        let (mut key, mut open) = ("default".to_owned(), true);
        match fields.take("key") {
            Some(node) if entries(node).is_empty() => match node.text().map(|key| (key, text(key))) {
                Some((_, Some(known))) => key = known,
                Some((raw, None)) => {
                    fields.lose("key", format!("`{raw}` is not known here; the cache is left out"));
                    return None;
                }
                None => {}
            },
            Some(node) => {
                let by = Fields::of(node, fields.at("key"), self.around.report);
                let files = by.take("files").map(|node| texts(node, &by.at("files"), self.around.report));
                let quoted: Vec<String> =
                    files.unwrap_or_default().iter().map(|file| format!("'{}'", file.replace('\'', "\\'"))).collect();
                let prefix = by.text("prefix").map(text);
                if prefix == Some(None) {
                    by.lose("prefix", "a variable of it is not known here; it is left out");
                }
                let prefix = prefix.flatten().map(|prefix| format!("{prefix}-")).unwrap_or_default();
                key = format!("{prefix}${{{{ hash_files({}) }}}}", quoted.join(", "));
                open = quoted.is_empty();
                if open {
                    return None;
                }
            }
            None => {}
        }
        let mut paths = Vec::new();
        for raw in
            fields.take("paths").map(|node| texts(node, &fields.at("paths"), self.around.report)).unwrap_or_default()
        {
            match text(raw).map(|path| CachePath::parse(&path).map(|_| path)) {
                Some(Ok(path)) => paths.push(path),
                Some(Err(error)) => self.around.report.lose(from, fields.at("paths"), format!("`{raw}`: {error}")),
                None => self.around.report.lose(from, fields.at("paths"), format!("`{raw}` is not known here")),
            }
        }
        if paths.is_empty() {
            return None;
        }
        let mut cache = Map::default();
        if open {
            // There a cache is written again by each job; here an entry never changes, so each run adds one and takes the
            // newest.
            cache.text("key", from, format!("{key}-${{{{ run.id }}}}"));
            cache.put("paths", from, Y::texts(paths));
            cache.put("restore_keys", from, Y::texts([format!("{key}-")]));
        } else {
            cache.text("key", from, key);
            cache.put("paths", from, Y::texts(paths));
        }
        match fields.text("when") {
            Some("always") => cache.text("when", from, "always"),
            Some("on_success") | None => {}
            Some(_) => fields.lose("when", "a cache is saved after a success, or always"),
        }
        match fields.text("policy") {
            Some("pull-push") | None => {}
            Some("pull") => fields.lose("policy", "what is restored is saved as well when the job succeeds"),
            Some(_) => fields.lose("policy", "what is saved is restored as well"),
        }
        Some(Y::Map(cache))
    }

    /// What it hands over.
    pub(super) fn uploads(&self, out: &Map, variables: &Variables) -> Vec<Y> {
        let Some(fields) = self.fields.fields("artifacts") else { return Vec::new() };
        let from = self.fields.entry("artifacts").map_or(self.from, |entry| entry.span.start);
        if fields.take("reports").is_some() {
            fields.lose("reports", "reports are not read; files among them are kept when `paths` names them");
        }
        fields.lose("name", "its name here is that of the job");
        let mut paths = Vec::new();
        for raw in
            fields.take("paths").map(|node| texts(node, &fields.at("paths"), self.around.report)).unwrap_or_default()
        {
            let known = filled(raw, &variables.fixed, out, self.name);
            match known.map(|path| artifact_pattern(&path).map(|_| path)) {
                Some(Ok(path)) => paths.push(path),
                Some(Err(error)) => self.around.report.lose(from, fields.at("paths"), format!("`{raw}`: {error}")),
                None => self.around.report.lose(from, fields.at("paths"), format!("`{raw}` is not known here")),
            }
        }
        if paths.is_empty() {
            fields.lose_rest("it goes with its files");
            return Vec::new();
        }
        let mut upload = Map::default();
        let Some(name) = self.artifact_name(out) else {
            fields.lose("paths", "each variant needs an artifact of its own, and their values make no names");
            fields.lose_rest("it goes with its files");
            return Vec::new();
        };
        upload.text("name", from, name);
        upload.put("paths", from, Y::texts(paths));
        match fields.text("when") {
            Some("always") => upload.text("when", from, "always"),
            Some("on_failure") => upload.text("when", from, "failure"),
            _ => {}
        }
        match fields.text("expire_in").map(|text| (text, timeout(text))) {
            Some((_, Some(time))) => upload.text("expire_in", from, time),
            Some(("never", None)) => fields.lose("expire_in", "artifacts do not stay for ever; this has the usual age"),
            Some(_) => fields.lose("expire_in", "no duration that can be carried over"),
            None => {}
        }
        vec![Y::Map(upload)]
    }

    /// The name of the artifact of this job: its own, with the values of a variant.
    fn artifact_name(&self, out: &Map) -> Option<String> {
        let name = self.around.names[self.name].clone();
        let Some(Y::Map(matrix)) = out.get("matrix") else { return Some(name) };
        let legal = |value: &Y| matches!(value, Y::Text(text) if kici_engine::cache::check_artifact_name(text).is_ok());
        let mut keys: Vec<&String> = Vec::new();
        for (key, _, value) in &matrix.0 {
            let Y::List(values) = value else { return None };
            if key == "include" {
                for row in values {
                    let Y::Map(row) = row else { return None };
                    if !row.0.iter().all(|(.., value)| legal(value)) {
                        return None;
                    }
                    keys.extend(row.0.iter().map(|(key, ..)| key));
                }
            } else if values.iter().all(legal) {
                keys.push(key);
            } else {
                return None;
            }
        }
        keys.sort();
        keys.dedup();
        let part = |key: &&String| format!("-${{{{ has(matrix.{key}) ? matrix.{key} : '' }}}}");
        Some(name + &keys.iter().map(part).collect::<String>())
    }

    /// What it takes: artifacts that are surely there, and a step that takes those that may be.
    pub(super) fn downloads(&self, needed: &[String]) -> (Vec<Y>, Option<Y>) {
        let (fields, around) = (&self.fields, self.around);
        let mut wanted: Vec<String> = match fields.take("needs") {
            Some(node) => items(node).into_iter().filter_map(|item| self.artifacts_of(item)).collect(),
            None => around.earlier[self.name].clone(),
        };
        if let Some(node) = fields.take("dependencies") {
            let named = texts(node, &fields.at("dependencies"), around.report);
            wanted.retain(|name| named.contains(&name.as_str()));
        }
        let (mut sure, mut script) = (Vec::new(), String::new());
        for name in &wanted {
            let Some(product) = around.products.get(name) else { continue };
            let ours = &around.names[name];
            match product {
                Product::Files => {
                    let mut download = Map::default();
                    download.text("name", self.from, ours);
                    if needed.contains(name) {
                        download.text("from", self.from, ours);
                    }
                    sure.push(Y::Map(download));
                }
                Product::Maybe => {
                    script.push_str(&format!("kici artifact download {ours} || echo \"{ours} made nothing\"\n"))
                }
                Product::Several => {
                    around.report.lose(
                        self.from,
                        fields.at("dependencies"),
                        format!(
                            "each variant of `{name}` makes an artifact of its own; take those that are wanted by hand"
                        ),
                    );
                }
            }
        }
        let step = (!script.is_empty()).then(|| {
            let mut step = Map::default();
            step.text("name", self.from, "artifacts of earlier jobs");
            step.text("run", self.from, script);
            Y::Map(step)
        });
        (sure, step)
    }

    /// The job of an entry of `needs`, unless its files are not wanted.
    fn artifacts_of(&self, item: &Node) -> Option<String> {
        let name = match &item.data {
            Data::Map(_) if get(item, "artifacts").and_then(Node::text) == Some("false") => return None,
            Data::Map(_) => get(item, "job")?.text()?,
            _ => item.text()?,
        };
        Some(name.split(": [").next().unwrap_or(name).to_owned())
    }

    /// `retry` and `resource_group`.
    pub(super) fn turns(&self, out: &mut Map, variables: &Variables) {
        let fields = &self.fields;
        if let Some(text) = fields.text("resource_group") {
            match filled(text, &variables.fixed, out, self.name) {
                Some(group) => out.text("concurrency", self.from, group),
                None => {
                    fields.lose("resource_group", format!("`{text}` is not known here; runs of this job may overlap"))
                }
            }
        }
        let Some(node) = fields.take("retry") else { return };
        const ALL: [&str; 5] = ["lost", "infra", "timeout", "oom", "user"];
        let mut on: Vec<&str> = Vec::new();
        let max = if entries(node).is_empty() {
            on.extend(ALL);
            node.text()
        } else {
            let inner = Fields::of(node, fields.at("retry"), self.around.report);
            let named = inner.take("when").map(|node| texts(node, &inner.at("when"), self.around.report));
            for word in named.unwrap_or_else(|| vec!["always"]) {
                let classes: &[&str] = match word {
                    "always" => &ALL,
                    "script_failure" => &["user"],
                    "runner_system_failure" => &["lost", "infra"],
                    "stuck_or_timeout_failure" | "job_execution_timeout" => &["timeout"],
                    _ => &["infra"],
                };
                on.extend(classes);
            }
            if inner.take("exit_codes").is_some() {
                inner.lose("exit_codes", "exit codes of jobs are not told apart; every failure of a step counts");
                on.push("user");
            }
            inner.text("max")
        };
        match max.and_then(|text| text.parse::<u32>().ok()).filter(|max| *max <= 10) {
            Some(0) => {}
            Some(max) => {
                let on: Vec<&str> = ALL.into_iter().filter(|class| on.contains(class)).collect();
                let mut retry = Map::default();
                retry.put("attempts", self.from, Y::Plain(max.to_string()));
                retry.put("on", self.from, Y::texts(on));
                out.put("retry", self.from, Y::Map(retry));
            }
            None => fields.lose("retry", "no number that can be carried over"),
        }
    }
}
