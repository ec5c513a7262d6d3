//! The steps of a job: scripts come along, actions do not.

use std::collections::BTreeMap;

use kici_engine::yaml::{Node, Pos};

use super::Defaults;
use super::expr::{self, Names, condition, read_condition, template};
use super::kept::{Keeper, Kept};
use super::parse::{Expr, Part, parse, parts};
use crate::Dialect;
use crate::later::SECRETS;
use crate::source::{Fields, Report, items};
use crate::target::{Map, Y, variable};
use crate::variables::{provide, renamed};

/// Files and facts that have another name here.
const RENAMED: [(&str, &str); 7] = [
    ("GITHUB_OUTPUT", "KICI_OUTPUT"),
    ("GITHUB_ENV", "KICI_ENV"),
    ("GITHUB_PATH", "KICI_PATH"),
    ("GITHUB_STEP_SUMMARY", "KICI_SUMMARY"),
    ("GITHUB_SHA", "KICI_SHA"),
    ("GITHUB_REF", "KICI_REF"),
    ("GITHUB_EVENT_PATH", "KICI_EVENT_PATH"),
];

/// What to do instead of an action, by the beginning of its name; the first that fits.
const ACTIONS: [(&str, &str); 9] = [
    ("actions/upload-artifact", "write `artifacts.upload` of the job by hand"),
    ("actions/download-artifact", "write `artifacts.download` of the job by hand"),
    ("actions/cache", "write `cache` of the job by hand"),
    ("Swatinem/rust-cache", "write `cache` of the job by hand, with the paths `target` and `~/.cargo/registry`"),
    ("actions/github-script", "there is no token of the forge in a job; call its API in a script"),
    ("docker/", "call `docker` in a script"),
    ("./", "actions of the repository are not run; put what it does into a script"),
    ("actions/setup-", "install the tool on the agent, or in a step"),
    ("", "actions are not run; write a `run` that does the same"),
];

/// What becomes of the steps of a job.
#[derive(Debug, Default)]
pub(super) struct Made {
    /// What is said of the checkout, where there is one.
    pub(super) checkout: Option<Map>,
    /// The scripts.
    pub(super) steps: Vec<Y>,
    /// What the job keeps and takes.
    pub(super) kept: Kept,
}

/// Converts the steps of a job.
pub(super) fn convert(node: &Node, path: &str, names: &mut Names, defaults: &Defaults, report: &Report) -> Made {
    let mut made = Made::default();
    for (index, item) in items(node).into_iter().enumerate() {
        let fields = Fields::of(item, format!("{path}.{index}"), report);
        let mut step = Step { fields, from: item.span.start, names, defaults, report };
        if let Some(action) = step.fields.text("uses") {
            let action = action.to_owned();
            if let Some(checkout) = step.checkout(&action) {
                made.checkout = Some(checkout);
                continue;
            }
            let mut keeper = Keeper { fields: &step.fields, from: step.from, names: &mut *step.names };
            if !keeper.take(&action, &mut made.kept) {
                made.steps.push(step.action(&action));
            }
        } else {
            made.steps.push(
                step.script().map_or_else(|| Y::Note(format!("line {}: not converted", item.span.start.line)), Y::Map),
            );
        }
    }
    made
}

struct Step<'a, 'n> {
    fields: Fields<'a>,
    from: Pos,
    names: &'n mut Names,
    defaults: &'n Defaults,
    report: &'n Report,
}

impl Step<'_, '_> {
    /// What is said of the checkout, when the step checks this repository out.
    fn checkout(&self, action: &str) -> Option<Map> {
        if action.split('@').next() != Some("actions/checkout") {
            return None;
        }
        let with = self.fields.fields("with");
        if with.as_ref().is_some_and(|with| with.take("repository").is_some()) {
            return None;
        }
        // A name for people, and a condition that nearly always holds for something that is done first.
        let _ = self.fields.take("name");
        self.fields.lose("if", "the checkout is always made");
        let mut out = Map::default();
        let Some(with) = with else { return Some(out) };
        // Nothing is left behind that could persist, and a fresh directory needs no cleaning.
        for key in ["persist-credentials", "clean", "set-safe-directory", "show-progress"] {
            let _ = with.take(key);
        }
        match with.text("fetch-depth").map(str::parse::<u32>) {
            Some(Ok(1)) | None => {}
            Some(Ok(depth)) => out.put("depth", self.from, Y::Plain(depth.to_string())),
            Some(Err(_)) => with.lose("fetch-depth", "no number"),
        }
        for (theirs, ours) in [("submodules", "submodules"), ("lfs", "lfs"), ("fetch-tags", "tags")] {
            match with.text(theirs) {
                Some("true" | "recursive") => out.put(ours, self.from, Y::Plain("true".into())),
                Some("false") | None => {}
                Some(_) => with.lose(theirs, "only true or false can be carried over"),
            }
        }
        for key in ["path", "ref"] {
            match with.text(key).filter(|text| !text.is_empty()).map(|text| template(text, self.names)) {
                Some(Ok(text)) if !text.is_empty() => out.text(key, self.from, text),
                Some(Err(reason)) => with.lose(key, reason),
                Some(Ok(_)) | None => {}
            }
        }
        Some(out)
    }

    fn action(&self, action: &str) -> Y {
        let reason = ACTIONS.iter().find(|(start, _)| action.starts_with(start)).map_or("", |(_, reason)| reason);
        self.fields.lose("uses", format!("`{action}`: {reason}"));
        self.fields.lose_rest("it goes with its action");
        Y::Note(format!("line {}: `uses: {action}` is not converted: {reason}", self.from.line))
    }

    fn script(&mut self) -> Option<Map> {
        let run = self.fields.text("run")?.to_owned();
        let mut out = Map::default();
        let agent = Names { agent: true, ..self.names.clone() };
        let id = self.fields.text("id").map(str::to_owned);
        if let Some(id) = &id {
            out.text("id", self.from, step_id(id));
        }
        if let Some(text) = self.fields.text("name") {
            match template(text, &agent) {
                Ok(text) => out.text("name", self.from, text),
                Err(reason) => self.fields.lose("name", reason),
            }
        }
        self.condition(&agent, &mut out);
        let shell = self.fields.text("shell").map(str::to_owned).or_else(|| self.defaults.shell.clone());
        let Ok(shell) = shell.as_deref().map(|text| shell_of(text, &agent)).transpose() else {
            self.fields.lose("shell", "no such shell here; the step is left out");
            self.fields.lose_rest("it goes with its step");
            return None;
        };
        let kind = shell.as_ref().map_or(Kind::Posix, |(kind, _)| *kind);
        if let Some((_, value)) = shell {
            out.put("shell", self.from, value);
        }
        if let Some(text) =
            self.fields.text("working-directory").map(str::to_owned).or_else(|| self.defaults.directory.clone())
        {
            match template(&text, &agent) {
                Ok(text) => out.text("working_directory", self.from, text),
                Err(reason) => self.fields.lose("working-directory", reason),
            }
        }
        let mut env = match self.fields.fields("env") {
            Some(fields) => super::env(&fields, &agent),
            None => Map::default(),
        };
        let lifted = self.lift(&run, kind, &agent, &mut env);
        let Some(script) = lifted else {
            self.fields.lose_rest("it goes with its step");
            return None;
        };
        let script = renamed(&script, &RENAMED);
        let path = self.fields.at("run");
        let script = match kind {
            Kind::Posix => provide(Dialect::Github, &script, &mut env, self.from, &path, self.report),
            _ => script,
        };
        out.some("env", self.from, Y::Map(env));
        self.limits(&mut out);
        out.text("run", self.fields.entry("run").map_or(self.from, |entry| entry.span.start), script);
        if let Some(id) = id {
            let ours = step_id(&id);
            self.names.steps.insert(id, ours);
        }
        Some(out)
    }

    fn condition(&self, agent: &Names, out: &mut Map) {
        let Some(entry) = self.fields.entry("if") else { return };
        let read = entry.value.text().ok_or_else(|| "a text is expected".to_owned()).and_then(read_condition);
        match read.and_then(|expr| condition(&expr, agent)) {
            Ok(text) => out.text("if", entry.span.start, text),
            Err(reason) => {
                self.fields.lose("if", format!("{reason}; the step is switched off"));
                out.text("if", entry.span.start, "false");
            }
        }
    }

    fn limits(&self, out: &mut Map) {
        if let Some(text) = self.fields.text("timeout-minutes") {
            match text.parse::<u32>() {
                Ok(minutes) if minutes > 0 => out.text("timeout", self.from, format!("{minutes}m")),
                _ => self.fields.lose("timeout-minutes", "no whole number of minutes"),
            }
        }
        if self.fields.flag("continue-on-error") == Some(true) {
            out.put("continue_on_error", self.from, Y::Plain("true".into()));
        }
    }

    /// The script with its expressions in variables; none where its language has no variables that we know.
    fn lift(&self, run: &str, kind: Kind, names: &Names, env: &mut Map) -> Option<String> {
        let mut out = String::new();
        let mut quotes = Quotes::default();
        let mut known: BTreeMap<&str, String> = BTreeMap::new();
        for part in parts(run) {
            let source = match part {
                Part::Text(text) => {
                    quotes.pass(text);
                    out.push_str(text);
                    continue;
                }
                Part::Expr(source) => source.trim(),
            };
            let name = match known.get(source) {
                Some(name) => name.clone(),
                None => match self.variable_of(source, names, env) {
                    Ok(Found::Variable(name)) => name,
                    Ok(Found::Text(text)) => {
                        out.push_str(&text);
                        continue;
                    }
                    Err(reason) => {
                        self.fields.lose("run", format!("`${{{{ {source} }}}}`: {reason}; it is empty"));
                        continue;
                    }
                },
            };
            known.insert(source, name.clone());
            match kind {
                Kind::PowerShell => out.push_str(&format!("${{env:{name}}}")),
                Kind::Other => {
                    self.fields.lose("run", "an expression in a script of this language; the step is left out");
                    return None;
                }
                Kind::Posix if quotes.single => out.push_str(&format!("'\"${{{name}}}\"'")),
                // A command that the matrix spells out is more than one word.
                Kind::Posix if quotes.command(&out) && source.starts_with("matrix.") => {
                    out.push_str(&format!("eval \"${{{name}}}\""));
                }
                Kind::Posix => out.push_str(&format!("${{{name}}}")),
            }
        }
        Some(out)
    }

    fn variable_of(&self, source: &str, names: &Names, env: &mut Map) -> Result<Found, String> {
        let expr = parse(source)?;
        if let Expr::Path(path) = &expr {
            let parts: Vec<&str> = path.iter().map(String::as_str).collect();
            match parts.as_slice() {
                ["matrix", rest @ ..] => {
                    let key = variable(&rest.join("_"));
                    if !names.matrix.contains_key(&key) && !names.open_matrix {
                        return Ok(Found::Text(String::new()));
                    }
                    return Ok(Found::Variable(format!("MATRIX_{}", key.to_ascii_uppercase())));
                }
                ["env", name] => return Ok(Found::Variable((*name).to_owned())),
                ["github", "sha"] => return Ok(Found::Variable("KICI_SHA".to_owned())),
                ["github", "ref"] => return Ok(Found::Variable("KICI_REF".to_owned())),
                ["github", "workspace"] => return Ok(Found::Variable("GITHUB_WORKSPACE".to_owned())),
                ["runner", "temp"] => return Ok(Found::Variable("RUNNER_TEMP".to_owned())),
                ["runner", "workspace"] => return Ok(Found::Text("..".to_owned())),
                ["secrets", ..] | ["github", "token"] => return Err(SECRETS.to_owned()),
                _ => {}
            }
        }
        let cel = expr::value(&expr, names)?;
        if let Some(text) = expr::literal(&cel.text) {
            return Ok(Found::Text(text));
        }
        let name = free_name(&expr, env);
        env.text(&name, self.from, format!("${{{{ {} }}}}", cel.as_text()));
        Ok(Found::Variable(name))
    }
}

enum Found {
    Variable(String),
    Text(String),
}

fn free_name(expr: &Expr, env: &Map) -> String {
    let word = match expr {
        Expr::Path(path) => path.last().map(|last| variable(last).to_ascii_uppercase()),
        _ => None,
    };
    let base = format!("ARG_{}", word.as_deref().unwrap_or("1"));
    let mut name = base.clone();
    let mut n = 1;
    while env.has(&name) {
        n += 1;
        name = format!("{}_{n}", base.trim_end_matches("_1"));
    }
    name
}

fn step_id(id: &str) -> String {
    let clean: String =
        id.chars().map(|c| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '_' }).collect();
    if clean.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') { clean } else { format!("_{clean}") }
}

/// How a script refers to variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Posix,
    PowerShell,
    Other,
}

fn shell_of(text: &str, names: &Names) -> Result<(Kind, Y), String> {
    let text = template(text, names)?;
    if text.contains("${{") {
        return Err("a shell that is computed".to_owned());
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    match words.as_slice() {
        ["bash"] => Ok((Kind::Posix, Y::Text("bash".into()))),
        ["sh"] => Ok((Kind::Posix, Y::Text("sh".into()))),
        ["pwsh" | "powershell"] => Ok((Kind::PowerShell, Y::Text("pwsh".into()))),
        ["python"] => Ok((Kind::Other, Y::Text("python".into()))),
        [program, ..] if text.contains("{0}") => {
            let kind = match *program {
                "bash" | "sh" | "zsh" | "dash" => Kind::Posix,
                "pwsh" => Kind::PowerShell,
                _ => Kind::Other,
            };
            let mut command = Map::default();
            command.put("command", Pos::default(), Y::texts(words));
            Ok((kind, Y::Map(command)))
        }
        _ => Err("no such shell".to_owned()),
    }
}

/// Where in a shell script one is.
#[derive(Debug, Default)]
struct Quotes {
    single: bool,
    double: bool,
}

impl Quotes {
    fn pass(&mut self, text: &str) {
        let mut chars = text.chars().peekable();
        let mut comment = false;
        let mut before = '\n';
        while let Some(c) = chars.next() {
            match c {
                '\n' => comment = false,
                _ if comment => {}
                '\\' if !self.single => drop(chars.next()),
                '\'' if !self.double => self.single = !self.single,
                '"' if !self.single => self.double = !self.double,
                '#' if !self.single && !self.double && before.is_whitespace() => comment = true,
                _ => {}
            }
            before = c;
        }
    }

    /// Whether a command begins here.
    fn command(&self, written: &str) -> bool {
        let line = written.rsplit('\n').next().unwrap_or_default().trim_end();
        !self.single
            && !self.double
            && (line.is_empty() || line.ends_with(['|', ';', '&', '(']) || line.ends_with(" then"))
    }
}
