//! GitHub's expressions as CEL.
//!
//! What differs: an unknown name is nothing there and an error here, so names are asked for first; values of a matrix are
//! texts here; comparisons of texts heed case here.

use std::collections::{BTreeMap, BTreeSet};

use super::parse::{Expr, Part, parse, parts};
use crate::cel::{self, Cel, Ty, quote, unit};
use crate::later::SECRETS;
use crate::target::variable;

/// What expressions of a place may name.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// The agent evaluates.
    pub agent: bool,
    /// `needs` may be asked.
    pub needs: BTreeMap<String, Need>,
    /// Keys of the matrix; true where every variant has it.
    pub matrix: BTreeMap<String, bool>,
    /// The matrix is computed: its keys are not known.
    pub open_matrix: bool,
    /// Inputs of a start by hand and what they are.
    pub inputs: BTreeMap<String, Ty>,
    /// Steps with an id before this one: as written, and here.
    pub steps: BTreeMap<String, String>,
    /// Variables with a value that is known and fixed.
    pub env: BTreeMap<String, String>,
    /// Name of the workflow.
    pub workflow: String,
    /// Key of the job.
    pub job: String,
    /// Ids of steps that restored a cache: whether there was one is not told here.
    pub caches: BTreeSet<String>,
    /// Where the files of each artifact lie in the workspace, by its name as written.
    pub artifacts: BTreeMap<String, String>,
}

/// A needed job.
#[derive(Clone, Debug, Default)]
pub(super) struct Need {
    /// Its name here.
    pub name: String,
    /// Its outputs, as written.
    pub outputs: BTreeSet<String>,
}

/// A template in our syntax, from one in GitHub's.
///
/// # Errors
/// Why it cannot be carried over.
pub(super) fn template(text: &str, names: &Names) -> Result<String, String> {
    let mut out = String::new();
    for part in parts(text) {
        match part {
            Part::Text(text) => out.push_str(text),
            Part::Expr(source) => {
                let cel = value(&parse(source)?, names)?;
                match literal(&cel.text) {
                    Some(fixed) => out.push_str(&fixed),
                    None => out.push_str(&format!("${{{{ {} }}}}", cel.as_text())),
                }
            }
        }
    }
    Ok(out)
}

/// The text of a literal without escapes.
pub(super) fn literal(cel: &str) -> Option<String> {
    let inner = cel.strip_prefix('\'')?.strip_suffix('\'')?;
    (!inner.contains(['\\', '\'']) && !inner.contains("${{")).then(|| inner.to_owned())
}

/// The expression of a condition, which may stand in `${{ }}` or not.
///
/// # Errors
/// Why it cannot be read.
pub(super) fn read_condition(text: &str) -> Result<Expr, String> {
    match parts(text.trim()).as_slice() {
        [Part::Expr(source)] => parse(source),
        [Part::Text(source)] => parse(source),
        // `${{ a }} && b` is what people write and GitHub reads as a text that is always true, but not what they mean.
        mixed => {
            let plain: String = mixed
                .iter()
                .map(|part| match part {
                    Part::Text(text) => (*text).to_owned(),
                    Part::Expr(e) => format!("({e})"),
                })
                .collect();
            parse(&plain)
        }
    }
}

/// The condition of an expression.
///
/// # Errors
/// Why it cannot be carried over.
pub(super) fn condition(expr: &Expr, names: &Names) -> Result<String, String> {
    match expr {
        Expr::Not(inner) => Ok(format!("!{}", unit(&condition(inner, names)?))),
        Expr::And(a, b) => Ok(cel::all(&[condition(a, names)?, condition(b, names)?])),
        Expr::Or(a, b) => Ok(cel::any(&[condition(a, names)?, condition(b, names)?])),
        other => Ok(value(other, names)?.truthy()),
    }
}

/// The value of an expression.
///
/// # Errors
/// Why it cannot be carried over.
pub(super) fn value(expr: &Expr, names: &Names) -> Result<Cel, String> {
    Ok(match expr {
        Expr::Text(text) => Cel::new(quote(text), Ty::Text),
        Expr::Number(number) => Cel::new(number.clone(), Ty::Number),
        Expr::Bool(flag) => Cel::bool(flag.to_string()),
        Expr::Null => Cel::new("''", Ty::Text),
        Expr::Path(path) => self::path(path, names)?,
        Expr::Call(name, arguments) => call(name, arguments, names)?,
        Expr::Compare(operator, a, b) => compare(operator, a, b, names)?,
        Expr::Not(_) => Cel::bool(condition(expr, names)?),
        Expr::Or(first, otherwise) => either(first, otherwise, names)?,
        Expr::And(a, b) => {
            let (left, right) = (value(a, names)?, value(b, names)?);
            if left.ty == Ty::Bool && right.ty == Ty::Bool {
                Cel::bool(cel::all(&[left.text, right.text]))
            } else {
                choose(
                    &left.truthy(),
                    &right,
                    &Cel::new(quote(if left.ty == Ty::Bool { "false" } else { "" }), Ty::Text),
                )
            }
        }
    })
}

/// `a || b`, and `a && b || c`, which is how a choice is written.
fn either(first: &Expr, otherwise: &Expr, names: &Names) -> Result<Cel, String> {
    let last = value(otherwise, names)?;
    if let Expr::And(when, then) = first {
        let then = value(then, names)?;
        let both = cel::all(&[condition(when, names)?, then.truthy()]);
        let asked = if then.truthy() == "true" { condition(when, names)? } else { both };
        if then.ty != Ty::Bool || last.ty != Ty::Bool {
            return Ok(choose(&asked, &then, &last));
        }
    }
    let left = value(first, names)?;
    if left.ty == Ty::Bool && last.ty == Ty::Bool {
        return Ok(Cel::bool(cel::any(&[left.text, last.text])));
    }
    Ok(choose(&left.truthy(), &left, &last))
}

fn choose(when: &str, then: &Cel, otherwise: &Cel) -> Cel {
    let (ty, a, b) = if then.ty == otherwise.ty {
        (then.ty, then.text.clone(), otherwise.text.clone())
    } else {
        let word = then.ty == Ty::Text && otherwise.ty == Ty::Text;
        (if word { Ty::Text } else { Ty::Word }, then.as_text(), otherwise.as_text())
    };
    Cel::new(format!("({when} ? {a} : {b})"), ty)
}

fn compare(operator: &str, a: &Expr, b: &Expr, names: &Names) -> Result<Cel, String> {
    if let Some(known) = special(operator, a, b, names).or_else(|| special(operator, b, a, names)) {
        return known;
    }
    let (left, right) = (value(a, names)?, value(b, names)?);
    let pair = match (left.ty, right.ty) {
        (l, r) if l == r => (left.text, right.text),
        (Ty::Any, Ty::Text | Ty::Bool | Ty::Number) | (Ty::Text | Ty::Bool | Ty::Number, Ty::Any) => {
            // Nothing and an empty text are equal there.
            if left.text == "''" || right.text == "''" {
                let any = if left.ty == Ty::Any { left } else { right };
                let none = format!("{} in [null, '']", any.text);
                return match operator {
                    "==" => Ok(Cel::bool(none)),
                    "!=" => Ok(Cel::bool(format!("!({none})"))),
                    _ => Err("a comparison with nothing has no counterpart".to_owned()),
                };
            }
            (left.text, right.text)
        }
        // Values of a matrix are texts, whatever they look like.
        _ if matches!(operator, "==" | "!=") => (left.as_text(), right.as_text()),
        _ => return Err("a comparison of a text with a number has no counterpart".to_owned()),
    };
    Ok(Cel::bool(format!("{} {operator} {}", unit(&pair.0), unit_literal(&pair.1))))
}

fn unit_literal(text: &str) -> String {
    if literal(text).is_some() { text.to_owned() } else { unit(text) }
}

/// Comparisons where not only the name differs but also the word.
fn special(operator: &str, a: &Expr, b: &Expr, names: &Names) -> Option<Result<Cel, String>> {
    let (Expr::Path(path), Expr::Text(word)) = (a, b) else { return None };
    if !matches!(operator, "==" | "!=") {
        return None;
    }
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let word = match path.as_slice() {
        ["github", "event_name"] => match word.as_str() {
            "workflow_dispatch" => "manual",
            "pull_request_target" => "pull_request",
            // A pushed tag is an event of its own here, with the raw name of a push.
            other => other,
        },
        ["github", "repository_owner"] => {
            let owned = format!("repo.startsWith({})", quote(&format!("{word}/")));
            return Some(Ok(Cel::bool(if operator == "==" { owned } else { format!("!{owned}") })));
        }
        ["github", "ref_type"] => {
            let tag = (word == "tag") == (operator == "==");
            return Some(Ok(Cel::bool(if tag { "event.kind == 'tag'" } else { "event.kind != 'tag'" })));
        }
        ["needs", _, "result"] | ["steps", _, "outcome" | "conclusion"] | ["job", "status"] => match word.as_str() {
            "failure" => "failed",
            other => other,
        },
        ["runner", "os"] => match word.as_str() {
            "Linux" => "linux",
            "macOS" => "macos",
            "Windows" => "windows",
            other => other,
        },
        ["runner", "arch"] => match word.as_str() {
            "X64" => "x86_64",
            "ARM64" => "aarch64",
            other => other,
        },
        _ => return None,
    };
    let left = match value(a, names) {
        Ok(left) => left,
        Err(error) => return Some(Err(error)),
    };
    Some(Ok(Cel::bool(format!("{} {operator} {}", left.text, quote(word)))))
}

fn path(path: &[String], names: &Names) -> Result<Cel, String> {
    let parts: Vec<&str> = path.iter().map(String::as_str).collect();
    let text = |text: &str| Ok(Cel::new(text, Ty::Text));
    let absent = |what: &str| Err(format!("`{what}` has no counterpart"));
    match parts.as_slice() {
        ["github", "event_name"] => text("event.raw_name"),
        ["github", "sha"] => text("sha"),
        ["github", "ref"] => text("ref"),
        ["github", "ref_name"] => text(cel::REF_NAME),
        ["github", "head_ref"] => text(cel::HEAD),
        ["github", "base_ref"] => text(cel::BASE),
        ["github", "repository"] => text("repo"),
        ["github", "actor" | "triggering_actor"] => text(cel::SENDER),
        ["github", "run_id"] => text("run.id"),
        ["github", "run_attempt"] => text("string(run.attempt)"),
        ["github", "workflow"] => text(&quote(&names.workflow)),
        ["github", "job"] => text(&quote(&names.job)),
        ["github", "server_url"] => text("'https://github.com'"),
        ["github", "event", "inputs", name] => input(name, names),
        ["github", "event", rest @ ..] if !rest.is_empty() => payload(rest),
        ["github", "token"] | ["secrets", ..] => Err(SECRETS.to_owned()),
        ["github", ..] => absent(&path.join(".")),
        ["matrix", key] => matrix(key, names),
        ["matrix", rest @ ..] if !rest.is_empty() => matrix(&rest.join("_"), names),
        ["inputs", name] => input(name, names),
        ["vars", name] => {
            let name = variable(name);
            Ok(Cel::new(format!("(has(vars.{name}) ? vars.{name} : '')"), Ty::Word))
        }
        ["env", name] => environment(name, names),
        ["needs", job, "result"] => text(&format!("{}.status", need(job, names)?.0)),
        ["needs", job, "outputs", output] => {
            let (at, need) = need(job, names)?;
            if !need.outputs.contains(*output) {
                return absent(&path.join("."));
            }
            let output = variable(output);
            Ok(Cel::new(format!("(has({at}.outputs.{output}) ? {at}.outputs.{output} : '')"), Ty::Word))
        }
        ["steps", id, rest @ ..] => step(id, rest, names),
        ["runner", "os"] if names.agent => text("agent.os"),
        ["runner", "arch"] if names.agent => text("agent.arch"),
        ["job", "status"] if names.agent => text("job.status"),
        _ => absent(&path.join(".")),
    }
}

fn matrix(key: &str, names: &Names) -> Result<Cel, String> {
    let name = variable(key);
    let cel = match names.matrix.get(&name) {
        Some(true) => format!("matrix.{name}"),
        Some(false) => format!("(has(matrix.{name}) ? matrix.{name} : '')"),
        None if names.open_matrix => format!("(has(matrix.{name}) ? matrix.{name} : '')"),
        // A key that no variant has is nothing.
        None => return Ok(Cel::new("''", Ty::Text)),
    };
    Ok(Cel::new(cel, Ty::Word))
}

fn input(name: &str, names: &Names) -> Result<Cel, String> {
    let ty = *names.inputs.get(name).ok_or_else(|| format!("input `{name}` is not declared for a start by hand"))?;
    let name = variable(name);
    let none = match ty {
        Ty::Bool => "false",
        Ty::Number => "0",
        _ => "''",
    };
    Ok(Cel::new(format!("(has(inputs.{name}) ? inputs.{name} : {none})"), ty))
}

fn environment(name: &str, names: &Names) -> Result<Cel, String> {
    if names.agent {
        return Ok(Cel::new(format!("({} in env ? env[{}] : '')", quote(name), quote(name)), Ty::Word));
    }
    match names.env.get(name) {
        Some(fixed) => Ok(Cel::new(quote(fixed), Ty::Text)),
        None => Err(format!("`env.{name}` is only known on the agent")),
    }
}

fn need<'a>(job: &str, names: &'a Names) -> Result<(String, &'a Need), String> {
    let need = names.needs.get(job).ok_or_else(|| format!("`needs.{job}` is not known here"))?;
    let plain = need.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !need.name.starts_with(|c: char| c.is_ascii_digit());
    let at = if plain { format!("needs.{}", need.name) } else { format!("needs[{}]", quote(&need.name)) };
    Ok((at, need))
}

fn step(id: &str, rest: &[&str], names: &Names) -> Result<Cel, String> {
    if names.caches.contains(id) && matches!(rest, ["outputs", ..]) {
        return Ok(Cel::new("''", Ty::Text));
    }
    let ours = names.steps.get(id).ok_or_else(|| format!("step `{id}` has no result here"))?;
    let plain = ours.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let at = if plain { format!("steps.{ours}") } else { format!("steps[{}]", quote(ours)) };
    match rest {
        ["outcome" | "conclusion"] => Ok(Cel::new(format!("{at}.status"), Ty::Text)),
        ["outputs", output] => Ok(Cel::new(
            format!("({} in {at}.outputs ? {at}.outputs[{}] : '')", quote(output), quote(output)),
            Ty::Word,
        )),
        _ => Err(format!("`steps.{id}.{}` has no counterpart", rest.join("."))),
    }
}

/// A place in GitHub's document; nothing where it is not there.
fn payload(rest: &[&str]) -> Result<Cel, String> {
    if rest.iter().any(|key| {
        key.chars().any(|c| !c.is_ascii_alphanumeric() && c != '_') || key.starts_with(|c: char| c.is_ascii_digit())
    }) {
        return Err("a list of the payload has no counterpart".to_owned());
    }
    let mut asked = Vec::new();
    let mut at = "event.payload".to_owned();
    for key in rest {
        at = format!("{at}.{key}");
        asked.push(format!("has({at})"));
    }
    Ok(Cel::new(format!("({} ? {at} : null)", asked.join(" && ")), Ty::Any))
}

fn call(name: &str, arguments: &[Expr], names: &Names) -> Result<Cel, String> {
    let texts = |names: &Names| -> Result<Vec<String>, String> {
        arguments.iter().map(|argument| Ok(value(argument, names)?.as_text())).collect()
    };
    let lower = name.to_ascii_lowercase();
    match (lower.as_str(), arguments) {
        ("success" | "failure" | "cancelled" | "always", []) if names.agent => Ok(Cel::bool(format!("{lower}()"))),
        ("contains", [list, item]) => contains(list, item, names),
        ("startswith" | "endswith", [_, _]) => {
            let texts = texts(names)?;
            let function = if lower == "startswith" { "startsWith" } else { "endsWith" };
            Ok(Cel::bool(format!("{}.{function}({})", unit_literal(&texts[0]), texts[1])))
        }
        ("format", [Expr::Text(form), rest @ ..]) => format(form, rest, names),
        ("fromjson", [Expr::Text(text)]) => json_literal(text),
        ("fromjson", [inner]) => Ok(Cel::new(format!("from_json({})", value(inner, names)?.as_text()), Ty::Any)),
        ("tojson", [inner]) => Ok(Cel::new(format!("to_json({})", value(inner, names)?.text), Ty::Text)),
        ("hashfiles", [_, ..]) if names.agent => {
            Ok(Cel::new(format!("hash_files({})", texts(names)?.join(", ")), Ty::Text))
        }
        _ => Err(format!("`{name}()` has no counterpart here")),
    }
}

fn contains(list: &Expr, item: &Expr, names: &Names) -> Result<Cel, String> {
    let (list, item) = (value(list, names)?, value(item, names)?);
    Ok(Cel::bool(match list.ty {
        Ty::List => format!("{} in {}", item.as_text(), list.text),
        Ty::Any => format!("string({}).contains({})", list.text, item.as_text()),
        _ => format!("{}.contains({})", unit_literal(&list.as_text()), item.as_text()),
    }))
}

fn format(form: &str, arguments: &[Expr], names: &Names) -> Result<Cel, String> {
    let mut pieces = Vec::new();
    let mut rest = form;
    while let Some(at) = rest.find('{') {
        let end = rest[at..].find('}').ok_or("`format` is not understood")? + at;
        let index: usize = rest[at + 1..end].parse().map_err(|_| "`format` is not understood")?;
        let argument = arguments.get(index).ok_or("`format` asks for an argument that is not there")?;
        if at > 0 {
            pieces.push(quote(&rest[..at]));
        }
        pieces.push(value(argument, names)?.as_text());
        rest = &rest[end + 1..];
    }
    if !rest.is_empty() || pieces.is_empty() {
        pieces.push(quote(rest));
    }
    Ok(Cel::new(if pieces.len() == 1 { pieces.remove(0) } else { format!("({})", pieces.join(" + ")) }, Ty::Text))
}

/// A list of texts that is written as JSON.
fn json_literal(text: &str) -> Result<Cel, String> {
    let inner = text.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let items: Option<Vec<String>> = inner.map(str::trim).filter(|inner| !inner.is_empty()).and_then(|inner| {
        let item = |item: &str| Some(quote(item.trim().strip_prefix('"')?.strip_suffix('"')?));
        inner.split(',').map(item).collect()
    });
    Ok(match items {
        Some(items) => Cel::new(format!("[{}]", items.join(", ")), Ty::List),
        None => Cel::new(format!("from_json({})", quote(text)), Ty::Any),
    })
}

#[cfg(test)]
mod tests {
    use kici_engine::expr::Expr as Ours;

    use super::*;

    fn names() -> Names {
        let mut names = Names { agent: true, workflow: "ci".into(), job: "b".into(), ..Names::default() };
        names.matrix = [("os".to_owned(), true), ("extra".to_owned(), false)].into();
        names.inputs = [("deep".to_owned(), Ty::Bool), ("env".to_owned(), Ty::Text)].into();
        names.needs.insert("A".into(), Need { name: "a".into(), outputs: ["v".to_owned()].into() });
        names.steps.insert("s".into(), "s".into());
        names
    }

    #[test]
    fn conditions_are_carried_over() {
        for (theirs, ours) in [
            ("github.event_name == 'workflow_dispatch'", "event.raw_name == 'manual'"),
            ("github.ref == 'refs/heads/main' && !cancelled()", "(ref == 'refs/heads/main') && (!(cancelled()))"),
            (
                "matrix.os == 'x' || matrix.extra",
                "(matrix.os == 'x') || (!((has(matrix.extra) ? matrix.extra : '') in ['', 'false', '0']))",
            ),
            ("${{ matrix.nothing }}", "false"),
            ("matrix.os == 3", "matrix.os == (string(3))"),
            ("inputs.deep", "(has(inputs.deep) ? inputs.deep : false)"),
            ("needs.A.result == 'failure'", "needs.a.status == 'failed'"),
            ("needs.A.outputs.v == 'true'", "(has(needs.a.outputs.v) ? needs.a.outputs.v : '') == 'true'"),
            ("steps.s.outcome != 'failure'", "steps.s.status != 'failed'"),
            ("runner.os == 'Linux'", "agent.os == 'linux'"),
            ("contains(matrix.os, 'ubuntu')", "matrix.os.contains('ubuntu')"),
            ("contains(fromJSON('[\"a\", \"b\"]'), matrix.os)", "matrix.os in ['a', 'b']"),
            ("startsWith(github.ref, 'refs/tags/')", "ref.startsWith('refs/tags/')"),
            ("github.repository_owner == 'me'", "repo.startsWith('me/')"),
            (
                "github.event.pull_request.draft == false",
                "(has(event.payload.pull_request) && has(event.payload.pull_request.draft) ? event.payload.pull_request.draft : null) == false",
            ),
        ] {
            let cel = condition(&read_condition(theirs).unwrap(), &names()).unwrap();
            assert_eq!(cel, ours, "{theirs}");
            Ours::parse(&cel).unwrap_or_else(|error| panic!("{cel}: {error}"));
        }
    }

    #[test]
    fn templates_are_carried_over() {
        for (theirs, ours) in [
            ("a-${{ matrix.os }}-b", "a-${{ matrix.os }}-b"),
            ("${{ github.workflow }}", "ci"),
            ("${{ inputs.deep && 'x' || 'y' }}", "${{ ((has(inputs.deep) ? inputs.deep : false) ? 'x' : 'y') }}"),
            ("${{ matrix.os || 'ubuntu' }}", "${{ (!(matrix.os in ['', 'false', '0']) ? matrix.os : 'ubuntu') }}"),
            ("${{ format('v{0}!', matrix.os) }}", "${{ ('v' + matrix.os + '!') }}"),
        ] {
            assert_eq!(template(theirs, &names()).as_deref(), Ok(ours), "{theirs}");
        }
        for lost in
            ["${{ secrets.X }}", "${{ github.token }}", "${{ steps.none.outputs.x }}", "${{ github.run_number }}"]
        {
            assert!(template(lost, &names()).is_err(), "{lost}");
        }
    }
}
