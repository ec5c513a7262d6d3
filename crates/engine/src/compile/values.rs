//! Values that may hold expressions, and those that several keys share.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::expr::{Expr, ExprError, Finding, FindingKind, Part, Scope, Template, check_expr, check_template};
use crate::labels::{MAX_MATCHERS, parse_term};
use crate::lock::{Matcher, Pick, Selector, Shell, Stage, Value};
use crate::yaml::{Data, Node};

use super::keys::{self, nearest};
use super::walk::Walk;

impl Walk<'_> {
    /// A text with `${{ … }}`. Where the agent renders, everything is left to it.
    pub(super) fn template(&mut self, node: &Node, scope: &Scope) -> Option<Value> {
        let text = self.text(node, "a text")?;
        if !text.contains("${{") {
            return Some(Value::fixed(text));
        }
        let template = match Template::parse_with(text, |source| self.library.memo.expression(source)) {
            Ok(template) => template,
            Err(error) => {
                self.expression_fault(node, &error, 0);
                return None;
            }
        };
        for part in template.parts() {
            if let Part::Expr { expr, .. } = part {
                self.reads(expr);
            }
        }
        let (stage, findings) = check_template(&template, scope);
        self.findings(node, &findings)?;
        Some(Value::Template { template: text.to_owned(), stage })
    }

    /// [`Walk::template`] for a text that only the agent renders.
    pub(super) fn agent_template(&mut self, node: &Node, scope: &Scope) -> Option<Value> {
        Some(match self.template(node, scope)? {
            Value::Template { template, .. } => Value::Template { template, stage: Stage::Agent },
            fixed @ Value::Static { .. } => fixed,
        })
    }

    /// A bare expression that yields true or false.
    pub(super) fn condition(&mut self, node: &Node, scope: &Scope) -> Option<String> {
        let text = self.text(node, "a condition")?;
        if text.contains("${{") {
            let inner = text.trim().strip_prefix("${{").and_then(|rest| rest.strip_suffix("}}")).map(str::trim);
            let bare = inner.filter(|inner| !inner.contains("${{")).map(str::to_owned);
            let span = self.part(node, text.find("${{").unwrap_or(0), 3);
            let fault = self.fault("K0405", span, "`if` is an expression already, it takes no `${{ }}`");
            if let Some(bare) = bare {
                fault.help(format!("write `{bare}`"));
            }
            return None;
        }
        let source = text.trim();
        let lead = text.len() - text.trim_start().len();
        let expr = self.expression(node, source, lead, scope)?;
        Some(expr.source().to_owned())
    }

    /// The expression at `offset` of a scalar.
    pub(super) fn expression(&mut self, node: &Node, source: &str, offset: usize, scope: &Scope) -> Option<Arc<Expr>> {
        let expr = match self.library.memo.expression(source) {
            Ok(expr) => expr,
            Err(error) => {
                self.expression_fault(node, &error, offset);
                return None;
            }
        };
        self.reads(&expr);
        let findings: Vec<Finding> = check_expr(&expr, scope)
            .into_iter()
            .map(|found| Finding { offset: found.offset + offset, ..found })
            .collect();
        self.findings(node, &findings)?;
        Some(expr)
    }

    fn expression_fault(&mut self, node: &Node, error: &ExprError, shift: usize) {
        match error {
            ExprError::Syntax { message, offset } => {
                let span = self.part(node, offset + shift, 1);
                self.fault("K0401", span, format!("expression: {message}"));
            }
            ExprError::Limit(message) => {
                self.fault("K0404", node.span, format!("expression is too large: {message}"));
            }
            other => {
                self.fault("K0401", node.span, other.to_string());
            }
        }
    }

    /// Records what is wrong with names; none means nothing is.
    fn findings(&mut self, node: &Node, findings: &[Finding]) -> Option<()> {
        for finding in findings {
            let code = match finding.kind {
                FindingKind::Stage => "K0402",
                FindingKind::Unknown => "K0403",
                FindingKind::Secret => "K0602",
            };
            let span = self.part(node, finding.offset, finding.length);
            let suggestion = nearest(&finding.found, finding.candidates.iter().map(String::as_str)).map(str::to_owned);
            let message = format!("expression: {}", finding.message);
            let fault = self.fault(code, span, message);
            let fault = if suggestion.is_none() && !finding.candidates.is_empty() && finding.candidates.len() <= 16 {
                fault.expected(finding.candidates.iter().cloned())
            } else {
                fault
            };
            fault.suggest(suggestion);
        }
        findings.is_empty().then_some(())
    }

    /// `env`: names to texts. `agent` is true where the agent renders all of them.
    pub(super) fn env(&mut self, node: &Node, scope: &Scope, agent: bool) -> BTreeMap<String, Value> {
        let mut env = BTreeMap::new();
        for entry in self.map(node).unwrap_or_default() {
            self.within(&entry.key, |walk| {
                let name = entry.key.as_str();
                let legal = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                    && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
                if !legal {
                    walk.fault("K0206", entry.span, format!("`{name}` is not a name for an environment variable"))
                        .expected(["letters, digits and `_`, not starting with a digit"]);
                } else if name.starts_with("KICI_") {
                    walk.fault("K0604", entry.span, format!("`{name}`: names with `KICI_` are set by KiCI only"));
                }
                let value = if matches!(&entry.value.data, Data::Scalar(..)) && entry.value.text() == Some("") {
                    Some(Value::fixed(""))
                } else if agent {
                    walk.agent_template(&entry.value, scope)
                } else {
                    walk.template(&entry.value, scope)
                };
                if let Some(value) = value {
                    env.insert(entry.key.clone(), value);
                }
            });
        }
        env
    }

    /// `runs_on`.
    pub(super) fn selector(&mut self, node: &Node, scope: &Scope) -> Option<Selector> {
        let before = self.found;
        let mut selector = Selector::default();
        if let Data::Map(_) = node.data {
            let fields = self.fields(node, &keys::RUNS_ON, "`runs_on`")?;
            if let Some(entry) = fields.get("labels") {
                self.within("labels", |walk| walk.labels(&entry.value, scope, &mut selector));
            }
            if let Some(entry) = fields.get("pick") {
                let word = self.within("pick", |walk| walk.word(&entry.value, &["deterministic", "any"]));
                selector.pick = if word == Some("any") { Pick::Any } else { Pick::Deterministic };
            }
            if let Some(entry) = fields.get("exclude") {
                let mut excluded = Selector::default();
                self.within("exclude", |walk| walk.labels(&entry.value, scope, &mut excluded));
                selector.exclude.append(&mut excluded.labels);
                if let Some(double) = excluded.exclude.first() {
                    let shown = matcher_text(double);
                    self.fault("K0504", entry.value.span, format!("`!{shown}` under `exclude` would exclude twice"));
                }
            }
        } else {
            self.labels(node, scope, &mut selector);
        }
        if self.found > before {
            return None;
        }
        if selector.labels.is_empty() {
            self.fault("K0504", node.span, "`runs_on` asks for no label, every agent would do")
                .expected(["at least one label, for example `default`"]);
            return None;
        }
        Some(selector)
    }

    fn labels(&mut self, node: &Node, scope: &Scope, selector: &mut Selector) {
        let items = self.one_or_list(node, "a label").unwrap_or_default();
        if !self.bounded(items.len(), MAX_MATCHERS, "labels", node.span) {
            return;
        }
        for item in items {
            let Some(Value::Static { r#static: text } | Value::Template { template: text, .. }) =
                self.template(item, scope)
            else {
                continue;
            };
            match parse_term(&text) {
                Ok(term) if term.exclude => selector.exclude.push(term.matcher),
                Ok(term) => selector.labels.push(term.matcher),
                Err(error) => {
                    let suggestion = suggest_label(&text);
                    // A label may hold line breaks; a message is one line.
                    let message: String =
                        error.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
                    self.fault("K0504", item.span, message).replace(suggestion);
                }
            }
        }
    }

    /// `shell`.
    pub(super) fn shell(&mut self, node: &Node) -> Option<Shell> {
        if let Data::Scalar(..) = node.data {
            return Some(match self.word(node, &["bash", "sh", "pwsh", "python"])? {
                "bash" => Shell::Bash,
                "sh" => Shell::Sh,
                "pwsh" => Shell::Pwsh,
                _ => Shell::Python,
            });
        }
        let fields = self.fields(node, &keys::SHELL, "`shell`")?;
        let Some(entry) = fields.get("command") else {
            self.fault("K0101", node.span, "`shell` has no `command`").expected(["`command`, a list of words"]);
            return None;
        };
        self.within("command", |walk| {
            let mut words = Vec::new();
            for item in walk.list(&entry.value, "words")? {
                words.push(walk.script(item, "shell")?);
            }
            if !words.iter().any(|word| word.contains("{0}")) {
                walk.fault("K0205", entry.value.span, "the command does not name the script file")
                    .expected(["one word with `{0}`"]);
                return None;
            }
            Some(Shell::Command(words))
        })
    }

    /// A text that runs as a program: expressions in it would let the text of an event become code.
    pub(super) fn script(&mut self, node: &Node, key: &str) -> Option<String> {
        let text = self.text(node, "a script")?;
        let mut at = 0;
        while let Some(found) = text[at..].find("${{") {
            let open = at + found;
            let end = text[open..].find("}}").map_or(text.len(), |end| open + end + 2);
            let inner = text[open + 3..end].trim_end_matches("}}").trim();
            let name = variable_for(inner);
            let span = self.part(node, open, end - open);
            let shown = text[open..end].replace('`', "'");
            self.fault("K0601", span, format!("`{shown}` is not allowed inside `{key}` (script injection)"))
                .help(format!("set env: {name}: and use \"${name}\""));
            at = end;
        }
        if text.trim().is_empty() {
            self.fault("K0205", node.span, format!("`{key}` is empty"));
            return None;
        }
        (at == 0).then(|| text.to_owned())
    }

    /// `working_directory`.
    pub(super) fn directory(&mut self, node: &Node, scope: &Scope) -> Option<Value> {
        let value = self.agent_template(node, scope)?;
        if let Value::Static { r#static: text } = &value {
            let leaves = text.starts_with('/') || text.split(['/', '\\']).any(|piece| piece == "..");
            if leaves {
                self.fault("K0603", node.span, format!("`{text}` leaves the workspace"))
                    .expected(["a path below the workspace"]);
                return None;
            }
        }
        Some(value)
    }
}

fn matcher_text(matcher: &Matcher) -> &str {
    match matcher {
        Matcher::Exact { value } => value,
        Matcher::Regex { source } => source,
    }
}

/// A label with its illegal characters replaced, if that is all that is wrong.
fn suggest_label(text: &str) -> Option<String> {
    let repaired: String = text
        .trim()
        .to_ascii_lowercase()
        .chars()
        .map(|c| if c.is_whitespace() || c == ',' || c == '=' { '-' } else { c })
        .collect();
    (repaired != text && parse_term(&repaired).is_ok()).then_some(repaired)
}

/// A variable name for an expression: its last word in capitals, `event.payload.title` is `TITLE`.
fn variable_for(expression: &str) -> String {
    let mut words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let word = words.rfind(|word| !word.is_empty()).unwrap_or("VALUE");
    let name = word.to_ascii_uppercase();
    if name.starts_with(|c: char| c.is_ascii_digit()) { "VALUE".to_owned() } else { name }
}
