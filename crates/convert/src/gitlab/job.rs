//! One job of GitLab CI.

use std::collections::BTreeMap;

use kici_engine::duration;
use kici_engine::yaml::{Data, Node, Pos};

use super::{Around, rules};
use crate::Dialect;
use crate::cel;
use crate::source::{Fields, entries, items, texts};
use crate::target::{Map, Y, variable};
use crate::variables::provide;

/// Variables of the file or of a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Variables {
    /// Name and text of all, those of the file first.
    all: Vec<(String, Pos, String)>,
    /// The same by name, for conditions.
    pub fixed: BTreeMap<String, String>,
}

impl Variables {
    pub fn of(fields: Option<&Fields<'_>>, above: &Self) -> Self {
        let mut out = Self { all: Vec::new(), fixed: above.fixed.clone() };
        let Some(fields) = fields else { return out };
        for entry in fields.rest() {
            let from = entry.span.start;
            let text = match &entry.value.data {
                Data::Map(_) => {
                    let declared = Fields::of(&entry.value, fields.at(&entry.key), fields.report());
                    declared.text("value").unwrap_or_default().to_owned()
                }
                _ => entry.value.text().unwrap_or_default().to_owned(),
            };
            if variable(&entry.key) != entry.key || entry.key.starts_with("KICI_") {
                fields.lose(&entry.key, "not a name for a variable");
                continue;
            }
            out.fixed.insert(entry.key.clone(), text.clone());
            out.all.push((entry.key.clone(), from, text));
        }
        out
    }

    /// Those without other variables in them.
    pub fn env(&self) -> Map {
        let mut env = Map::default();
        for (name, from, text) in self.all.iter().filter(|(.., text)| !computed(text)) {
            env.text(name, *from, text.replace("$$", "$"));
        }
        env
    }

    /// Lines of shell that set the others.
    fn exports(&self) -> String {
        let line = |(name, _, text): &(String, Pos, String)| {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('`', "\\`").replace("$$", "\\$");
            format!("export {name}=\"{text}\"\n")
        };
        self.all.iter().filter(|(.., text)| computed(text)).map(line).collect()
    }
}

fn computed(text: &str) -> bool {
    text.replace("$$", "").contains('$') || text.contains("${{")
}

pub(super) struct Job<'a> {
    pub name: &'a str,
    pub fields: Fields<'a>,
    pub(super) around: &'a Around<'a>,
    pub from: Pos,
}

impl Job<'_> {
    pub fn convert(self) -> Map {
        let mut out = Map::default();
        let fields = &self.fields;
        if fields.take("trigger").is_some() {
            fields.later("trigger");
            fields.lose_rest("the job is left out");
            return out;
        }
        let Some(script) = fields.take("script") else {
            fields.lose_rest("the job has no script in this file and is left out");
            return out;
        };
        let variables = Variables::of(fields.fields("variables").as_ref(), self.around.variables);
        let _ = fields.take("stage");
        if *self.name != self.around.names[self.name] {
            out.text("name", self.from, self.name);
        }
        let when = self.when(&variables);
        let (downloads, taking) = self.downloads(&self.needs(&mut out, when.needs));
        if when.condition != "true" {
            out.text("if", self.from, &when.condition);
        }
        let mut env = variables.env();
        self.parallel(&mut out, &mut env);
        self.runs_on(&mut out, &variables);
        if let Some(text) = fields.text("timeout") {
            match timeout(text) {
                Some(text) => out.text("timeout", self.from, text),
                None => fields.later("timeout"),
            }
        }
        self.checkout(&mut out, &variables);
        self.containers(&mut out, &variables);
        self.turns(&mut out, &variables);
        self.caches(&mut out, &variables);
        let mut artifacts = Map::default();
        artifacts.some("upload", self.from, Y::List(self.uploads(&out, &variables)));
        artifacts.some("download", self.from, Y::List(downloads));
        out.some("artifacts", self.from, Y::Map(artifacts));
        let mut steps: Vec<Y> = taking.into_iter().collect();
        steps.extend(self.steps(script, &variables, &mut env));
        let steps = Y::List(steps);
        out.some("env", self.from, Y::Map(env));
        out.put("steps", self.from, steps);
        out
    }

    fn when(&self, variables: &Variables) -> rules::When {
        let (fields, report) = (&self.fields, self.around.report);
        if let Some(node) = fields.take("rules") {
            let _ = fields.take("when");
            return rules::of_rules(node, &fields.at("rules"), &variables.fixed, report);
        }
        let mut parts = Vec::new();
        match fields.take("only") {
            Some(node) => parts.push(rules::of_refs(node, &fields.at("only"), &variables.fixed, report, true)),
            // Without rules a job belongs to branches and tags.
            None if self.around.merge_requests => parts.push("event.kind != 'pr'".to_owned()),
            None => {}
        }
        if let Some(node) = fields.take("except") {
            let except = rules::of_refs(node, &fields.at("except"), &variables.fixed, report, false);
            parts.push(format!("!{}", cel::unit(&except)));
        }
        let when = fields.text("when");
        match when {
            Some("manual") => {
                fields.lose("when", "a job cannot wait for a click; it runs when the workflow is started by hand");
                parts.push(rules::BY_HAND.to_owned());
            }
            Some("delayed") => fields.lose("when", "a job does not wait for a time; it starts at once"),
            Some("never") => parts.push("false".to_owned()),
            _ => {}
        }
        rules::When { condition: cel::all(&parts), needs: rules::needs_of(when) }
    }

    /// A job that was left out by its rules does not exist there; here it is skipped, which must not stop others.
    fn needs(&self, out: &mut Map, when: Option<&str>) -> Vec<String> {
        let (fields, around) = (&self.fields, self.around);
        let mut needed: Vec<String> = Vec::new();
        match fields.take("needs") {
            None => needed.extend(around.before[self.name].iter().cloned()),
            Some(node) => {
                for item in items(node) {
                    let name = match &item.data {
                        Data::Map(_) => {
                            let need = Fields::of(item, fields.at("needs"), around.report);
                            let optional = need.flag("optional").unwrap_or_default();
                            // Artifacts are named where they are made.
                            let _ = need.take("artifacts");
                            let name = need.text("job").map(str::to_owned);
                            name.filter(|name| !optional || around.names.contains_key(name))
                        }
                        _ => item.text().map(str::to_owned),
                    };
                    let Some(name) = name else { continue };
                    // `job: [a, b]` is one variant of a job; here all of them are waited for.
                    let base = name.split(": [").next().unwrap_or(&name).to_owned();
                    if base != name {
                        around.report.lose(
                            item.span.start,
                            fields.at("needs"),
                            "one variant cannot be needed; all are",
                        );
                    }
                    if !around.names.contains_key(&base) {
                        around.report.lose(
                            item.span.start,
                            fields.at("needs"),
                            format!("there is no job `{base}` here"),
                        );
                    } else if !needed.contains(&base) {
                        needed.push(base);
                    }
                }
            }
        }
        let edges = needed.iter().map(|name| {
            let mut edge = Map::default();
            edge.text("job", self.from, &around.names[name]);
            edge.text("when", self.from, when.unwrap_or("on-skip"));
            Y::Map(edge)
        });
        out.some("needs", self.from, Y::List(edges.collect()));
        needed
    }

    fn parallel(&self, out: &mut Map, env: &mut Map) {
        let fields = &self.fields;
        let Some(node) = fields.take("parallel") else { return };
        let mut matrix = Map::default();
        if let Some(count) = node.text() {
            let Some(count) = count.parse::<u32>().ok().filter(|count| (1..=200).contains(count)) else {
                fields.lose("parallel", "no number from 1 to 200");
                return;
            };
            matrix.put("CI_NODE_INDEX", self.from, Y::texts((1..=count).map(|n| n.to_string())));
            env.text("CI_NODE_INDEX", self.from, "${{ matrix.CI_NODE_INDEX }}");
            env.text("CI_NODE_TOTAL", self.from, count.to_string());
        } else {
            let inner = Fields::of(node, fields.at("parallel"), self.around.report);
            let Some(list) = inner.take("matrix") else { return };
            let rows: Vec<Vec<(String, String)>> = items(list).iter().flat_map(|item| product(item)).collect();
            let mut names: Vec<&String> = rows.iter().flatten().map(|(name, _)| name).collect();
            names.sort();
            names.dedup();
            for name in names {
                let everywhere = rows.iter().all(|row| row.iter().any(|(key, _)| key == name));
                let value = if everywhere {
                    format!("matrix.{name}")
                } else {
                    format!("(has(matrix.{name}) ? matrix.{name} : '')")
                };
                env.text(name, self.from, format!("${{{{ {value} }}}}"));
            }
            let row = |row: &Vec<(String, String)>| {
                let mut map = Map::default();
                row.iter().for_each(|(key, value)| map.text(key, Pos::default(), value));
                Y::Map(map)
            };
            matrix.some("include", self.from, Y::List(rows.iter().map(row).collect()));
        }
        out.some("matrix", self.from, Y::Map(matrix));
    }

    fn runs_on(&self, out: &mut Map, variables: &Variables) {
        let fields = &self.fields;
        let mut labels = Vec::new();
        if let Some(node) = fields.take("tags") {
            for text in texts(node, &fields.at("tags"), self.around.report) {
                match filled(text, &variables.fixed, out, self.name) {
                    Some(label) => labels.push(label),
                    None => fields.lose("tags", format!("`{text}` is not known here")),
                }
            }
        }
        if labels.is_empty() {
            labels.push(self.around.options.runs_on.clone());
        }
        let labels = if labels.len() == 1 { Y::Text(labels.remove(0)) } else { Y::texts(labels) };
        out.put("runs_on", self.from, labels);
    }

    fn checkout(&self, out: &mut Map, variables: &Variables) {
        if variables.fixed.get("GIT_STRATEGY").map(String::as_str) == Some("none") {
            out.put("checkout", self.from, Y::Plain("false".into()));
            return;
        }
        let depth = variables.fixed.get("GIT_DEPTH").and_then(|text| text.parse::<u32>().ok());
        // The usual depth there is 20.
        let mut checkout = Map::default();
        checkout.put("depth", self.from, Y::Plain(depth.unwrap_or(20).to_string()));
        if variables.fixed.get("GIT_SUBMODULE_STRATEGY").is_some_and(|how| how != "none") {
            checkout.put("submodules", self.from, Y::Plain("true".into()));
        }
        out.put("checkout", self.from, Y::Map(checkout));
    }

    fn steps(&self, script: &Node, variables: &Variables, env: &mut Map) -> Vec<Y> {
        let (fields, report) = (&self.fields, self.around.report);
        let lines = |node: Option<&Node>, key: &str| -> String {
            let lines = node.map(|node| texts(node, &fields.at(key), report)).unwrap_or_default();
            lines.iter().map(|line| line.trim_end_matches('\n').to_owned() + "\n").collect()
        };
        let exports = format!("{}{}", self.around.variables.exports(), variables.exports());
        let body = lines(fields.take("before_script"), "before_script") + &lines(Some(script), "script");
        let mut step = Map::default();
        if let Some(entry) = fields.entry("allow_failure") {
            match entry.value.text() {
                Some("true") => step.put("continue_on_error", entry.span.start, Y::Plain("true".into())),
                Some("false") => {}
                _ => fields.lose("allow_failure", "exit codes are not told apart; every failure counts"),
            }
        }
        let path = fields.at("script");
        step.text(
            "run",
            script.span.start,
            provide(Dialect::Gitlab, &(exports.clone() + &body), env, self.from, &path, report),
        );
        let mut steps = vec![Y::Map(step)];
        if let Some(node) = fields.take("after_script") {
            let mut step = Map::default();
            step.text("name", node.span.start, "after_script");
            step.text("if", node.span.start, "always()");
            step.put("continue_on_error", node.span.start, Y::Plain("true".into()));
            let body = exports + &lines(Some(node), "after_script");
            step.text(
                "run",
                node.span.start,
                provide(Dialect::Gitlab, &body, env, self.from, &fields.at("after_script"), report),
            );
            steps.push(Y::Map(step));
        }
        steps
    }
}

/// Variables of GitLab that texts outside of scripts may hold.
const STANDARD: [(&str, &str); 8] = [
    ("CI_COMMIT_REF_SLUG", cel::REF_NAME),
    ("CI_COMMIT_REF_NAME", cel::REF_NAME),
    ("CI_COMMIT_BRANCH", cel::PUSHED_BRANCH),
    ("CI_COMMIT_TAG", cel::TAG),
    ("CI_COMMIT_SHA", "sha"),
    ("CI_DEFAULT_BRANCH", cel::DEFAULT_BRANCH),
    ("CI_PIPELINE_ID", "run.id"),
    ("CI_PROJECT_PATH", "repo"),
];

/// A text with its variables replaced by what is known of them; `job` is the name of the job.
pub(super) fn filled(text: &str, fixed: &BTreeMap<String, String>, out: &Map, job: &str) -> Option<String> {
    replaced(text, fixed, out, job, &mut 64)
}

/// `left` bounds variables that are made of each other.
fn replaced(text: &str, fixed: &BTreeMap<String, String>, out: &Map, job: &str, left: &mut u32) -> Option<String> {
    let Some(at) = text.find('$') else { return Some(text.to_owned()) };
    *left = left.checked_sub(1)?;
    let braced = text[at + 1..].starts_with('{');
    let rest = &text[at + 1 + usize::from(braced)..];
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
    let name = &rest[..end];
    let tail = if braced { rest[end..].strip_prefix('}')? } else { &rest[end..] };
    let in_matrix = match out.get("matrix") {
        Some(Y::Map(matrix)) => match matrix.get("include") {
            Some(Y::List(rows)) => rows.iter().all(|row| matches!(row, Y::Map(row) if row.has(name))),
            _ => matrix.has(name),
        },
        _ => false,
    };
    let value = if in_matrix {
        format!("${{{{ matrix.{name} }}}}")
    } else if let Some(known) = fixed.get(name) {
        replaced(known, fixed, out, job, left)?
    } else {
        match name {
            "CI_PROJECT_DIR" => ".".to_owned(),
            "CI_JOB_NAME" | "CI_JOB_NAME_SLUG" => job.to_owned(),
            _ => format!("${{{{ {} }}}}", STANDARD.iter().find(|(known, _)| *known == name)?.1),
        }
    };
    Some(format!("{}{value}{}", &text[..at], replaced(tail, fixed, out, job, left)?))
}

/// The combinations of one entry of `parallel: matrix`.
fn product(node: &Node) -> Vec<Vec<(String, String)>> {
    let mut rows = vec![Vec::new()];
    for entry in entries(node) {
        let values: Vec<String> =
            items(&entry.value).iter().filter_map(|item| item.text()).map(str::to_owned).collect();
        let name = variable(&entry.key);
        rows = rows
            .iter()
            .flat_map(|row| values.iter().map(|value| [row.clone(), vec![(name.clone(), value.clone())]].concat()))
            .take(256)
            .collect();
    }
    rows.retain(|row| !row.is_empty());
    rows
}

/// `1h 30m`, `3 hours 30 minutes`, `2 weeks` in our form.
pub(super) fn timeout(text: &str) -> Option<String> {
    let mut seconds: u64 = 0;
    let mut number = String::new();
    let mut unit = String::new();
    for c in text.chars().chain([' ', '0']) {
        if c.is_ascii_digit() {
            if !unit.is_empty() {
                let size = match unit.as_str() {
                    "s" | "sec" | "second" | "seconds" => 1,
                    "m" | "min" | "mins" | "minute" | "minutes" => 60,
                    "h" | "hr" | "hrs" | "hour" | "hours" => 3_600,
                    "d" | "day" | "days" => 86_400,
                    "w" | "week" | "weeks" => 7 * 86_400,
                    "mo" | "mos" | "month" | "months" => 30 * 86_400,
                    "y" | "yr" | "yrs" | "year" | "years" => 365 * 86_400,
                    _ => return None,
                };
                seconds = seconds.checked_add(number.parse::<u64>().ok()?.checked_mul(size)?)?;
                (number, unit) = (String::new(), String::new());
            }
            number.push(c);
        } else if c.is_ascii_alphabetic() {
            unit.push(c.to_ascii_lowercase());
        }
    }
    (seconds > 0).then(|| duration::format(std::time::Duration::from_secs(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read() {
        for (theirs, ours) in [
            ("3 hours 30 minutes", Some("3h30m")),
            ("1h 30m", Some("1h30m")),
            ("90m", Some("1h30m")),
            ("2 weeks", Some("14d")),
            ("soon", None),
            ("", None),
        ] {
            assert_eq!(timeout(theirs).as_deref(), ours, "{theirs}");
        }
    }
}
