//! `rules`, `only` and `except` as conditions.

use std::collections::BTreeMap;

use kici_engine::yaml::{Data, Node, Pos};

use crate::cel::{self, quote, unit};
use crate::source::{Fields, Report, items, texts};

/// When a job runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct When {
    /// The condition.
    pub condition: String,
    /// What `when` of its needs says, if not the usual.
    pub needs: Option<&'static str>,
}

/// Started by hand.
pub(super) const BY_HAND: &str = "event.kind == 'manual'";
const MANUAL: &str = "a job cannot wait for a click; it runs when the workflow is started by hand";

/// The first rule that holds decides.
pub(super) fn of_rules(node: &Node, path: &str, fixed: &BTreeMap<String, String>, report: &Report) -> When {
    let mut rules: Vec<(String, String)> = Vec::new();
    let mut needs = Vec::new();
    for (index, item) in items(node).into_iter().enumerate() {
        let rule = Fields::of(item, format!("{path}.{index}"), report);
        let condition = match rule.entry("if") {
            Some(entry) => {
                condition(entry.value.text().unwrap_or_default(), entry.value.span.start, &rule.at("if"), fixed, report)
                    .unwrap_or_else(|reason| {
                        rule.lose("if", format!("{reason}; the rule never holds"));
                        "false".to_owned()
                    })
            }
            None => "true".to_owned(),
        };
        let verdict = match rule.text("when") {
            Some("never") => "false",
            Some("manual") => {
                rule.lose("when", MANUAL);
                BY_HAND
            }
            Some("delayed") => {
                rule.lose("when", "a job does not wait for a time; it starts at once");
                "true"
            }
            other => {
                needs.push(needs_of(other));
                "true"
            }
        };
        rules.push((condition, verdict.to_owned()));
    }
    needs.dedup();
    let needs = match needs.as_slice() {
        [one] => *one,
        [] => None,
        _ => {
            report.lose(node.span.start, path, "rules that differ in `when`; all wait for success");
            None
        }
    };
    When { condition: first_match(&rules), needs }
}

/// What `when` of a job means for its needs.
pub(super) fn needs_of(when: Option<&str>) -> Option<&'static str> {
    match when {
        Some("always") => Some("always"),
        Some("on_failure") => Some("on-failure"),
        _ => None,
    }
}

fn first_match(rules: &[(String, String)]) -> String {
    let mut rest = "false".to_owned();
    for (condition, verdict) in rules.iter().rev() {
        rest = match (condition.as_str(), verdict.as_str(), rest.as_str()) {
            ("true", verdict, _) => verdict.to_owned(),
            ("false", ..) => rest,
            (condition, "true", "false") => condition.to_owned(),
            (condition, "true", rest) => format!("{} || {}", unit(condition), unit(rest)),
            (_, "false", "false") => rest,
            (condition, "false", "true") => format!("!{}", unit(condition)),
            (condition, "false", rest) => format!("!{} && {}", unit(condition), unit(rest)),
            (condition, verdict, "false") => format!("{} && {}", unit(condition), unit(verdict)),
            (condition, verdict, rest) => format!("{} ? {} : {}", unit(condition), unit(verdict), unit(rest)),
        };
    }
    rest
}

/// `only` or `except`: true where it holds.
pub(super) fn of_refs(
    node: &Node,
    path: &str,
    fixed: &BTreeMap<String, String>,
    report: &Report,
    only: bool,
) -> String {
    let refs = |node: &Node| {
        let any: Vec<String> =
            texts(node, path, report).iter().map(|text| of_ref(text, node.span.start, path, report)).collect();
        cel::any(&any)
    };
    let Data::Map(_) = node.data else { return refs(node) };
    let fields = Fields::of(node, path, report);
    let mut parts = Vec::new();
    if let Some(node) = fields.take("refs") {
        parts.push(refs(node));
    }
    if let Some(node) = fields.take("variables") {
        let any: Vec<String> = texts(node, &fields.at("variables"), report)
            .iter()
            .map(|text| {
                condition(text, node.span.start, &fields.at("variables"), fixed, report).unwrap_or_else(|reason| {
                    report.lose(node.span.start, fields.at("variables"), reason);
                    "false".to_owned()
                })
            })
            .collect();
        parts.push(cel::any(&any));
    }
    if parts.is_empty() {
        only.to_string()
    } else if only {
        cel::all(&parts)
    } else {
        cel::any(&parts)
    }
}

fn of_ref(text: &str, at: Pos, path: &str, report: &Report) -> String {
    let text = text.split('@').next().unwrap_or(text);
    let lost = |what: &str| {
        report.lose(at, path, format!("{what}; `{text}` never holds"));
        "false".to_owned()
    };
    match text {
        "branches" => "event.kind == 'push'".to_owned(),
        "tags" => "event.kind == 'tag'".to_owned(),
        "pushes" => "event.kind in ['push', 'tag']".to_owned(),
        "merge_requests" | "external_pull_requests" => "event.kind == 'pr'".to_owned(),
        "web" => BY_HAND.to_owned(),
        "schedules" => lost("schedules are not supported yet"),
        "api" | "triggers" | "pipelines" | "external" | "chat" => lost("there is no such event"),
        _ => match regex(text) {
            Some(Ok(regex)) => format!("(event.kind != 'pr') && {}.matches({})", cel::REF_NAME, quote(&regex)),
            Some(Err(reason)) => lost(&reason),
            None => format!("(event.kind != 'pr') && {} == {}", cel::REF_NAME, quote(text)),
        },
    }
}

/// The source of `/…/flags`; none for another text.
fn regex(text: &str) -> Option<Result<String, String>> {
    let rest = text.strip_prefix('/')?;
    let end = rest.rfind('/')?;
    let (source, flags) = (&rest[..end], &rest[end + 1..]);
    let source = source.replace("\\/", "/");
    let source = if flags.contains('i') { format!("(?i){source}") } else { source };
    Some(match regex::Regex::new(&source) {
        Ok(_) => Ok(source),
        Err(_) => Err(format!("`{text}` is not a regular expression here")),
    })
}

/// An expression of `rules: if`.
///
/// # Errors
/// Why it cannot be read.
pub(super) fn condition(
    text: &str,
    at: Pos,
    path: &str,
    fixed: &BTreeMap<String, String>,
    report: &Report,
) -> Result<String, String> {
    let mut parser = Parser { rest: text, at, path, fixed, report, depth: 0 };
    let condition = parser.or()?;
    parser.rest = parser.rest.trim_start();
    if parser.rest.is_empty() { Ok(condition) } else { Err(format!("`{text}` is not understood")) }
}

struct Parser<'a> {
    rest: &'a str,
    at: Pos,
    path: &'a str,
    fixed: &'a BTreeMap<String, String>,
    report: &'a Report,
    depth: usize,
}

/// One side of a comparison.
enum Side {
    Text(String),
    Null,
    Regex(String),
    Variable(String),
    Condition(String),
}

impl Parser<'_> {
    fn eat(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn or(&mut self) -> Result<String, String> {
        self.depth += 1;
        if self.depth > 20 {
            return Err("it is nested too deep".to_owned());
        }
        let mut parts = vec![self.and()?];
        while self.eat("||") {
            parts.push(self.and()?);
        }
        self.depth -= 1;
        Ok(cel::any(&parts))
    }

    fn and(&mut self) -> Result<String, String> {
        let mut parts = vec![self.compare()?];
        while self.eat("&&") {
            parts.push(self.compare()?);
        }
        Ok(cel::all(&parts))
    }

    fn compare(&mut self) -> Result<String, String> {
        let left = self.side()?;
        for operator in ["==", "!=", "=~", "!~"] {
            if self.eat(operator) {
                let right = self.side()?;
                return self.compared(left, operator, right);
            }
        }
        Ok(match left {
            Side::Condition(condition) => condition,
            other => format!("{} != ''", self.cel(&other)?),
        })
    }

    fn compared(&self, left: Side, operator: &str, right: Side) -> Result<String, String> {
        let (left, right) = match (left, right) {
            (constant @ (Side::Text(_) | Side::Null), variable @ Side::Variable(_)) => (variable, constant),
            other => other,
        };
        let negative = operator.starts_with('!');
        if operator.ends_with('~') {
            let source = match &right {
                Side::Regex(source) => source.clone(),
                Side::Variable(name) => match self.fixed.get(name).and_then(|text| regex(text)) {
                    Some(found) => found?,
                    None => return Err(format!("the expression in ${name} is not known")),
                },
                _ => return Err("what follows `=~` is no regular expression".to_owned()),
            };
            let matches = format!("{}.matches({})", unit_text(&self.cel(&left)?), quote(&source));
            return Ok(if negative { format!("!{matches}") } else { matches });
        }
        if let (Side::Variable(name), Side::Text(word)) = (&left, &right)
            && let Some(known) = special(name, word)
        {
            let known = known?;
            return Ok(if negative { format!("!{}", unit(&known)) } else { known });
        }
        Ok(format!("{} {operator} {}", unit_text(&self.cel(&left)?), self.cel(&right)?))
    }

    fn side(&mut self) -> Result<Side, String> {
        if self.eat("(") {
            let inner = self.or()?;
            return if self.eat(")") { Ok(Side::Condition(inner)) } else { Err("a bracket is not closed".to_owned()) };
        }
        if self.eat("null") {
            return Ok(Side::Null);
        }
        if self.eat("$") {
            let braced = self.eat("{");
            let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(self.rest.len());
            let (name, rest) = self.rest.split_at(end);
            self.rest = rest;
            if braced && !self.eat("}") {
                return Err("a name is not closed".to_owned());
            }
            return Ok(Side::Variable(name.to_owned()));
        }
        for mark in ['"', '\''] {
            if let Some(rest) = self.rest.strip_prefix(mark) {
                let end = rest.find(mark).ok_or("a text is not closed")?;
                self.rest = &rest[end + 1..];
                return Ok(Side::Text(rest[..end].to_owned()));
            }
        }
        if let Some(rest) = self.rest.strip_prefix('/') {
            let mut escaped = false;
            for (at, c) in rest.char_indices() {
                match c {
                    '\\' => escaped = !escaped,
                    '/' if !escaped => {
                        let flags =
                            rest[at + 1..].find(|c: char| !c.is_ascii_lowercase()).map_or(rest.len(), |n| at + 1 + n);
                        let source = regex(&format!("/{}", &rest[..flags])).ok_or("no regular expression")??;
                        self.rest = &rest[flags..];
                        return Ok(Side::Regex(source));
                    }
                    _ => escaped = false,
                }
            }
        }
        Err(format!("`{}` is not understood", self.rest.chars().take(30).collect::<String>()))
    }

    fn cel(&self, side: &Side) -> Result<String, String> {
        Ok(match side {
            Side::Text(text) if text.contains('$') => {
                return Err("a text with variables in it has no counterpart".to_owned());
            }
            Side::Text(text) => quote(text),
            Side::Null => "''".to_owned(),
            Side::Regex(_) => return Err("a regular expression stands alone".to_owned()),
            Side::Condition(condition) => condition.clone(),
            Side::Variable(name) => self.variable(name),
        })
    }

    fn variable(&self, name: &str) -> String {
        let known = match name {
            "CI_PIPELINE_SOURCE" => {
                "(event.kind == 'pr' ? 'merge_request_event' : (event.kind == 'manual' ? 'web' : 'push'))"
            }
            "CI_COMMIT_BRANCH" => cel::PUSHED_BRANCH,
            "CI_COMMIT_TAG" => cel::TAG,
            "CI_COMMIT_REF_NAME" | "CI_COMMIT_REF_SLUG" => cel::REF_NAME,
            "CI_DEFAULT_BRANCH" => cel::DEFAULT_BRANCH,
            "CI_MERGE_REQUEST_IID" | "CI_MERGE_REQUEST_ID" => cel::PR_NUMBER,
            "CI_MERGE_REQUEST_TARGET_BRANCH_NAME" => cel::BASE,
            "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME" => cel::HEAD,
            "CI_COMMIT_MESSAGE" | "CI_COMMIT_TITLE" => cel::MESSAGE,
            "CI_COMMIT_SHA" => "sha",
            "CI_PROJECT_PATH" | "CI_MERGE_REQUEST_PROJECT_PATH" | "CI_MERGE_REQUEST_SOURCE_PROJECT_PATH" => "repo",
            "GITLAB_USER_LOGIN" => cel::SENDER,
            "CI" | "GITLAB_CI" => "'true'",
            _ => "",
        };
        if !known.is_empty() {
            return known.to_owned();
        }
        match self.fixed.get(name) {
            Some(text) if !text.contains('$') => quote(text),
            _ if name.starts_with("CI_") || name.starts_with("GITLAB_") => {
                self.report.lose(self.at, self.path, format!("${name} is not known here and counts as empty"));
                "''".to_owned()
            }
            _ => format!("(has(vars.{name}) ? vars.{name} : '')"),
        }
    }
}

fn unit_text(text: &str) -> String {
    if text.starts_with('\'') { text.to_owned() } else { unit(text) }
}

/// Comparisons of a variable with a word of GitLab.
fn special(name: &str, word: &str) -> Option<Result<String, String>> {
    Some(Ok(match (name, word) {
        ("CI_PIPELINE_SOURCE", "push") => "event.kind in ['push', 'tag']".to_owned(),
        ("CI_PIPELINE_SOURCE", "merge_request_event" | "external_pull_request_event") => {
            "event.kind == 'pr'".to_owned()
        }
        ("CI_PIPELINE_SOURCE", "web") => BY_HAND.to_owned(),
        ("CI_PIPELINE_SOURCE", "schedule") => "event.kind == 'schedule'".to_owned(),
        // Such pipelines do not exist here.
        ("CI_PIPELINE_SOURCE", _) => "false".to_owned(),
        ("CI_PROJECT_NAMESPACE" | "CI_PROJECT_ROOT_NAMESPACE", owner) => {
            format!("repo.startsWith({})", quote(&format!("{owner}/")))
        }
        ("CI_PROJECT_NAME", project) => format!("repo.endsWith({})", quote(&format!("/{project}"))),
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use kici_engine::expr::Expr;

    use super::*;

    #[test]
    fn conditions_are_carried_over() {
        let fixed = BTreeMap::from([("MODE".to_owned(), "fast".to_owned()), ("RE".to_owned(), "/^x/".to_owned())]);
        for (theirs, ours) in [
            ("$CI_PIPELINE_SOURCE == \"merge_request_event\"", "event.kind == 'pr'"),
            ("$CI_PIPELINE_SOURCE != 'push'", "!(event.kind in ['push', 'tag'])"),
            (
                "$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH",
                "(event.kind == 'push' ? branch : '') == (has(event.default_branch) ? event.default_branch : '')",
            ),
            ("$CI_COMMIT_TAG", "(has(event.tag) ? event.tag : '') != ''"),
            (
                "$CI_COMMIT_TAG =~ /^v\\d+/i && $MODE == null",
                "((has(event.tag) ? event.tag : '').matches('(?i)^v\\\\d+')) && ('fast' == '')",
            ),
            (
                "$MODE !~ $RE || ($OWN && $CI)",
                "(!'fast'.matches('^x')) || (((has(vars.OWN) ? vars.OWN : '') != '') && ('true' != ''))",
            ),
            ("$CI_PIPELINE_SOURCE == 'parent_pipeline'", "false"),
        ] {
            let report = Report::default();
            let cel = condition(theirs, Pos::default(), "x", &fixed, &report).unwrap();
            assert_eq!(cel, ours, "{theirs}");
            Expr::parse(&cel).unwrap_or_else(|error| panic!("{cel}: {error}"));
            assert_eq!(report.losses(), []);
        }
        let report = Report::default();
        assert_eq!(condition("$CI_UNHEARD", Pos::default(), "x", &fixed, &report).as_deref(), Ok("'' != ''"));
        assert_eq!(report.losses().len(), 1);
        for bad in ["", "$A ==", "($A", "$A =~ 'x'", "x", &"(".repeat(50)] {
            assert!(condition(bad, Pos::default(), "x", &fixed, &Report::default()).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_first_rule_that_holds_decides() {
        let rules = |list: &[(&str, &str)]| {
            first_match(&list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<Vec<_>>())
        };
        assert_eq!(rules(&[]), "false");
        assert_eq!(rules(&[("a", "false"), ("true", "true")]), "!a");
        assert_eq!(rules(&[("a", "true"), ("b", "true")]), "a || b");
        assert_eq!(rules(&[("a", "false"), ("b", "true")]), "!a && b");
        assert_eq!(rules(&[("a", BY_HAND), ("true", "true")]), "a ? (event.kind == 'manual') : true");
    }
}
