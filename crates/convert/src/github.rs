//! GitHub Actions. <https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-syntax>

mod containers;
mod expr;
mod kept;
mod matrix;
mod on;
mod parse;
mod steps;

use std::collections::BTreeMap;

use kici_engine::yaml::{Document, Node, Pos};

use crate::source::{Fields, Report, entries, get, texts};
use crate::target::{Map, Y, job_name, name, variable};
use crate::{Options, cel};
use expr::{Names, Need, condition, read_condition, template};
use parse::Expr;

/// Converts a workflow.
///
/// # Errors
/// Why there is nothing to write.
pub(crate) fn convert(documents: &[Document], stem: &str, options: &Options, report: &Report) -> Result<Y, String> {
    let node = crate::only(documents, report)?;
    let root = Fields::of(node, "", report);
    let mut out = Map::default();
    let title = root.text("name").and_then(name).unwrap_or_else(|| stem.to_owned());
    out.text("name", node.span.start, &title);
    let jobs = root.take("jobs").ok_or("the file has no `jobs`; it is an action or something else")?;
    let (triggers, inputs) = on::triggers(&root, report);
    let mut names = Names { workflow: title, inputs, artifacts: kept::roots(jobs), ..Names::default() };
    if let Some(entry) = root.entry("run-name") {
        match entry.value.text().map(|text| template(text, &names)) {
            Some(Ok(text)) => out.text("run_name", entry.span.start, text),
            Some(Err(reason)) => root.lose("run-name", reason),
            None => root.lose("run-name", "a text is expected"),
        }
    }
    out.put("on", root.entry("on").map_or(node.span.start, |entry| entry.span.start), triggers);
    if let Some(fields) = root.fields("env") {
        let env = env(&fields, &names);
        names.env = fixed(&env);
        out.some("env", node.span.start, Y::Map(env));
    }
    if let Some(entry) = root.entry("concurrency")
        && let Some(turns) = turns(&entry.value, "concurrency", &names, report)
    {
        out.put("concurrency", entry.span.start, turns);
    }
    let mut defaults = Defaults::default();
    if let Some(run) = root.fields("defaults").and_then(|fields| fields.fields("run")) {
        defaults = Defaults::of(&run, &Defaults::default());
    }
    // In the order of the file, so that needs can be renamed.
    let mut known: BTreeMap<String, Need> = BTreeMap::new();
    let mut taken = Vec::new();
    for entry in entries(jobs) {
        let ours = job_name(&entry.key, &taken);
        taken.push(ours.clone());
        let outputs = get(&entry.value, "outputs").map(entries).unwrap_or_default();
        let outputs = outputs.iter().map(|output| output.key.clone()).collect();
        known.insert(entry.key.clone(), Need { name: ours, outputs });
    }
    let mut written = Map::default();
    for entry in entries(jobs) {
        let names = Names { job: entry.key.clone(), ..names.clone() };
        let fields = Fields::of(&entry.value, format!("jobs.{}", entry.key), report);
        let job = Job { fields, names, known: &known, defaults: &defaults, options, report };
        let from = entry.span.start;
        written.put(&known[&entry.key].name, from, Y::Map(job.convert(from)));
    }
    out.put("jobs", node.span.start, Y::Map(written));
    Ok(Y::Map(out))
}

/// What steps do that say nothing else.
#[derive(Clone, Debug, Default)]
struct Defaults {
    shell: Option<String>,
    directory: Option<String>,
}

impl Defaults {
    fn of(run: &Fields<'_>, above: &Self) -> Self {
        Self {
            shell: run.text("shell").map(str::to_owned).or_else(|| above.shell.clone()),
            directory: run.text("working-directory").map(str::to_owned).or_else(|| above.directory.clone()),
        }
    }
}

/// The variables with values that need no expression.
fn fixed(env: &Map) -> BTreeMap<String, String> {
    let fixed = |(name, _, value): &(String, Pos, Y)| match value {
        Y::Text(text) if !text.contains("${{") => Some((name.clone(), text.clone())),
        _ => None,
    };
    env.0.iter().filter_map(fixed).collect()
}

/// Variables, those that the orchestrator can render by it and the others by the agent.
fn env(fields: &Fields<'_>, names: &Names) -> Map {
    let mut out = Map::default();
    for entry in fields.rest() {
        let from = entry.span.start;
        let Some(text) = entry.value.text() else {
            fields.lose(&entry.key, "a text is expected");
            continue;
        };
        let on_agent = || template(text, &Names { agent: true, ..names.clone() });
        match template(text, names).or_else(|_| on_agent()) {
            Ok(_) if variable(&entry.key) != entry.key => fields.lose(&entry.key, "not a name for a variable"),
            Ok(text) => out.text(&entry.key, from, text),
            Err(reason) => fields.lose(&entry.key, reason),
        }
    }
    out
}

/// `concurrency`, whose members wait there too; only one of them, which is told.
fn turns(node: &Node, path: &str, names: &Names, report: &Report) -> Option<Y> {
    let from = node.span.start;
    let group = |text: &str| match template(text, names) {
        Ok(group) => Some(group),
        Err(reason) => {
            report.lose(from, path, format!("{reason}; runs may overlap"));
            None
        }
    };
    if let Some(text) = node.text() {
        return Some(Y::Text(group(text)?));
    }
    let fields = Fields::of(node, path, report);
    let cancel = fields.take("cancel-in-progress");
    let group = group(fields.text("group")?)?;
    let mut out = Map::default();
    out.text("group", from, group);
    match cancel.and_then(Node::text) {
        Some("true") => out.put("cancel_in_progress", from, Y::Plain("true".into())),
        Some("false") | None => {}
        Some(_) => fields.lose("cancel-in-progress", "only true or false is possible; runs wait for each other"),
    }
    Some(Y::Map(out))
}

struct Job<'a> {
    fields: Fields<'a>,
    names: Names,
    known: &'a BTreeMap<String, Need>,
    defaults: &'a Defaults,
    options: &'a Options,
    report: &'a Report,
}

impl Job<'_> {
    fn convert(mut self, from: Pos) -> Map {
        let mut out = Map::default();
        if self.fields.take("uses").is_some() {
            self.fields.lose("uses", "reusable workflows are not supported yet");
            self.fields.lose_rest("the job is left out");
            return out;
        }
        if !self.strategy(&mut out, from) {
            // Its steps would ask for values that are not there.
            self.fields.lose_rest("the job is left out");
            return out;
        }
        if let Some(text) = self.fields.text("name") {
            match template(&one_line(text), &self.names) {
                Ok(text) => out.text("name", from, text),
                Err(reason) => self.fields.lose("name", reason),
            }
        }
        self.needs_and_condition(&mut out, from);
        self.runs_on(&mut out, from);
        if let Some(minutes) = self.fields.text("timeout-minutes") {
            match minutes.parse::<u32>() {
                Ok(minutes) if minutes > 0 => out.text("timeout", from, format!("{minutes}m")),
                _ => self.fields.lose("timeout-minutes", "no whole number of minutes"),
            }
        }
        if let Some(fields) = self.fields.fields("env") {
            let env = env(&fields, &self.names);
            self.names.env.extend(fixed(&env));
            out.some("env", from, Y::Map(env));
        }
        if let Some(entry) = self.fields.entry("concurrency")
            && let Some(turns) = turns(&entry.value, &self.fields.at("concurrency"), &self.names, self.report)
        {
            out.put("concurrency", from, turns);
        }
        self.containers(&mut out, from);
        let defaults = match self.fields.fields("defaults").and_then(|fields| fields.fields("run")) {
            Some(run) => Defaults::of(&run, self.defaults),
            None => self.defaults.clone(),
        };
        let steps = self.fields.take("steps");
        let made =
            steps.map(|node| steps::convert(node, &self.fields.at("steps"), &mut self.names, &defaults, self.report));
        let steps::Made { checkout, steps, kept } = made.unwrap_or_default();
        match checkout {
            Some(checkout) if !checkout.0.is_empty() => out.put("checkout", from, Y::Map(checkout)),
            Some(_) => {}
            None => out.put("checkout", from, Y::Plain("false".into())),
        }
        out.some("cache", from, Y::List(kept.cache));
        let mut artifacts = Map::default();
        artifacts.some("upload", from, Y::List(kept.upload));
        artifacts.some("download", from, Y::List(kept.download));
        out.some("artifacts", from, Y::Map(artifacts));
        if let Some(fields) = self.fields.fields("outputs") {
            let agent = Names { agent: true, ..self.names.clone() };
            let mut outputs = Map::default();
            for entry in fields.rest() {
                match entry
                    .value
                    .text()
                    .ok_or_else(|| "a text is expected".to_owned())
                    .and_then(|t| template(t, &agent))
                {
                    Ok(text) => outputs.text(&variable(&entry.key), entry.span.start, text),
                    Err(reason) => fields.lose(&entry.key, reason),
                }
            }
            out.some("outputs", from, Y::Map(outputs));
        }
        out.put("steps", from, Y::List(steps));
        out
    }

    /// False when the variants of the job cannot be told.
    fn strategy(&mut self, out: &mut Map, from: Pos) -> bool {
        let Some(fields) = self.fields.fields("strategy") else { return true };
        let Some(node) = fields.take("matrix") else { return true };
        match matrix::convert(node, &fields.at("matrix"), self.report) {
            Ok(table) => {
                self.names.matrix = table.keys;
                out.put("matrix", from, table.written);
            }
            Err(reason) => {
                fields.lose("matrix", reason);
                return false;
            }
        }
        if fields.flag("fail-fast").unwrap_or(true) {
            out.put("fail_fast", from, Y::Plain("true".into()));
        }
        if let Some(text) = fields.text("max-parallel") {
            match text.parse::<u32>() {
                Ok(n) if n > 0 => out.put("max_parallel", from, Y::Plain(n.to_string())),
                _ => fields.lose("max-parallel", "no number"),
            }
        }
        true
    }

    fn needs_and_condition(&mut self, out: &mut Map, from: Pos) {
        let needed: Vec<&str> = self
            .fields
            .take("needs")
            .map(|node| texts(node, &self.fields.at("needs"), self.report))
            .unwrap_or_default();
        for need in &needed {
            match self.known.get(*need) {
                Some(known) => drop(self.names.needs.insert((*need).to_owned(), known.clone())),
                None => self.fields.lose("needs", format!("there is no job `{need}`")),
            }
        }
        let mut when = None;
        if let Some(entry) = self.fields.entry("if") {
            let read = entry.value.text().ok_or_else(|| "a text is expected".to_owned()).and_then(read_condition);
            let made = read.and_then(|expr| {
                let mut rest = Vec::new();
                for part in conjuncts(&expr) {
                    match status_of(part) {
                        Some(found) => when = found.or(when),
                        None => rest.push(condition(part, &self.names)?),
                    }
                }
                Ok(rest)
            });
            match made {
                Ok(rest) if rest.is_empty() => {}
                Ok(rest) => out.text("if", entry.span.start, cel::all(&rest)),
                Err(reason) => {
                    self.fields.lose("if", format!("{reason}; the job is switched off"));
                    out.text("if", entry.span.start, "false");
                }
            }
        }
        let mut needs = Vec::new();
        for need in self.names.needs.values() {
            needs.push(match when {
                None => Y::Text(need.name.clone()),
                Some(when) => {
                    let mut edge = Map::default();
                    edge.text("job", from, &need.name);
                    edge.text("when", from, when);
                    Y::Map(edge)
                }
            });
        }
        out.some("needs", from, Y::List(needs));
        // What the plan renders cannot ask for results.
    }

    fn runs_on(&mut self, out: &mut Map, from: Pos) {
        let mut labels = Vec::new();
        let Some(entry) = self.fields.entry("runs-on") else {
            out.text("runs_on", from, &self.options.runs_on);
            return;
        };
        let path = self.fields.at("runs-on");
        let group;
        let node: Option<&Node> = if entries(&entry.value).is_empty() {
            Some(&entry.value)
        } else {
            group = Fields::of(&entry.value, path.clone(), self.report);
            group.take("labels")
        };
        for text in node.map(|node| texts(node, &path, self.report)).unwrap_or_default() {
            match template(text, &self.names) {
                Ok(text) => labels.push(text),
                Err(reason) => self.report.lose(entry.span.start, path.clone(), reason),
            }
        }
        if labels.is_empty() {
            labels.push(self.options.runs_on.clone());
        }
        let labels = if labels.len() == 1 { Y::Text(labels.remove(0)) } else { Y::texts(labels) };
        out.put("runs_on", entry.span.start, labels);
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The parts of `a && b && c`.
fn conjuncts(expr: &Expr) -> Vec<&Expr> {
    match expr {
        Expr::And(a, b) => [conjuncts(a), conjuncts(b)].concat(),
        other => vec![other],
    }
}

/// For a part of a condition that only asks how the needed jobs ended: what `when` of the needs says, if not the usual.
fn status_of(expr: &Expr) -> Option<Option<&'static str>> {
    let name = |expr: &Expr| match expr {
        Expr::Call(name, arguments) if arguments.is_empty() => Some(name.to_ascii_lowercase()),
        _ => None,
    };
    match expr {
        Expr::Not(inner) => matches!(name(inner)?.as_str(), "cancelled").then_some(Some("always")),
        call => match name(call)?.as_str() {
            "success" => Some(None),
            "always" => Some(Some("always")),
            "failure" => Some(Some("on-failure")),
            _ => None,
        },
    }
}
