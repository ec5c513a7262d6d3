//! `environment`, `approval` and `secrets`.

use crate::expr::Scope;
use crate::lock::{Approval, ApprovalWhen, Approver, Environments, Secrets, Value};
use crate::yaml::{Core, Data, Node, shorten};

use super::keys::{self, KeySet};
use super::walk::Walk;

/// Most environments of one job.
const MAX_ENVIRONMENTS: usize = 16;
/// Most secrets of one job, step or workflow.
const MAX_SECRETS: usize = 256;
/// Most clauses of an approval.
const MAX_CLAUSES: usize = 16;
/// Longest reason, in characters.
const MAX_REASON_CHARS: usize = 500;

impl Walk<'_> {
    /// `environment`: a name, a list of names, or a map with `name` and `url`.
    pub(super) fn environment(&mut self, node: &Node, scope: &Scope) -> Environments {
        let mut environments = Environments::default();
        let names = match &node.data {
            Data::Map(_) => {
                let Some(fields) = self.fields(node, &keys::ENVIRONMENT, "`environment`") else { return environments };
                if let Some(entry) = fields.get("url") {
                    let scope = Scope { key: "url".to_owned(), ..scope.clone() };
                    environments.url = self.within("url", |walk| walk.template(&entry.value, &scope));
                }
                let Some(entry) = fields.get("name") else {
                    self.fault("K0101", node.span, "`environment` has no `name`")
                        .expected(["`name`, the name of an environment"]);
                    return environments;
                };
                &entry.value
            }
            _ => node,
        };
        let items = self.one_or_list(names, "the name of an environment").unwrap_or_default();
        if items.is_empty() && matches!(names.data, Data::List(_)) {
            self.fault("K0205", names.span, "`environment` names none").expected(["at least one name"]);
        }
        if !self.bounded(items.len(), MAX_ENVIRONMENTS, "environments", names.span) {
            return environments;
        }
        for item in items {
            let Some(name) = self.template(item, scope) else { continue };
            let legal = match &name {
                Value::Static { r#static } => is_context(r#static),
                Value::Template { .. } => true,
            };
            if !legal {
                self.fault("K0206", item.span, format!("`{}` is not a name for an environment", shorten(text(&name))))
                    .expected(["up to 64 letters, digits, `_`, `-` and `.`, starting with a letter or digit"]);
            } else if environments.names.contains(&name) {
                self.fault("K0304", item.span, format!("environment `{}` stands twice", text(&name)));
            } else {
                environments.names.push(name);
            }
        }
        environments
    }

    /// `secrets`: names, or variables with the secrets that go into them.
    pub(super) fn secrets(&mut self, node: &Node) -> Secrets {
        let mut secrets = Secrets::new();
        match &node.data {
            Data::Map(entries) => {
                if !self.bounded(entries.len(), MAX_SECRETS, "secrets", node.span) {
                    return secrets;
                }
                for entry in entries {
                    self.within(&entry.key, |walk| {
                        let legal = walk.variable(&entry.key, entry.span);
                        let reference = walk.secret_reference(&entry.value);
                        secrets.extend(reference.filter(|_| legal).map(|text| (entry.key.clone(), text)));
                    });
                }
            }
            _ => {
                let items = self.list(node, "names of secrets, or a map of variables").unwrap_or_default();
                if !self.bounded(items.len(), MAX_SECRETS, "secrets", node.span) {
                    return secrets;
                }
                for item in items {
                    let Some(name) = self.fixed(item, "the name of a secret") else { continue };
                    if name.contains(':') {
                        let bare = name.rsplit(':').next().unwrap_or_default();
                        self.fault(
                            "K0205",
                            item.span,
                            format!("`{}` does not say which variable gets it", shorten(name)),
                        )
                        .help(format!("write `secrets: {{ {bare}: \"{name}\" }}`"));
                    } else if self.variable(name, item.span)
                        && secrets.insert(name.to_owned(), name.to_owned()).is_some()
                    {
                        self.fault("K0304", item.span, format!("secret `{name}` stands twice"));
                    }
                }
            }
        }
        secrets
    }

    fn variable(&mut self, name: &str, span: crate::yaml::Span) -> bool {
        if name.starts_with("KICI_") {
            self.fault("K0604", span, format!("`{}`: names with `KICI_` are set by KiCI only", shorten(name)));
            return false;
        }
        if !is_name(name) {
            self.fault("K0206", span, format!("`{}` is not a name for an environment variable", shorten(name)))
                .expected(["letters, digits and `_`, not starting with a digit"]);
            return false;
        }
        true
    }

    /// `NAME` or `CONTEXT:NAME`.
    fn secret_reference(&mut self, node: &Node) -> Option<String> {
        let text = self.fixed(node, "the name of a secret")?;
        let (context, name) = text.split_once(':').map_or((None, text), |(context, name)| (Some(context), name));
        if !is_name(name) || context.is_some_and(|context| !is_context(context)) {
            self.fault("K0206", node.span, format!("`{}` is not the name of a secret", shorten(text)))
                .expected(["NAME", "ENVIRONMENT:NAME"])
                .help("the value of a secret never stands in a workflow");
            return None;
        }
        Some(text.to_owned())
    }

    /// `approval`: true, false or a map. None for false.
    pub(super) fn approval(&mut self, node: &Node, set: &KeySet, owner: &str) -> Option<Approval> {
        match (&node.data, node.core()) {
            (Data::Scalar(..), Some(Core::Bool(wanted))) => wanted.then(Approval::default),
            (Data::Map(_), _) => {
                let fields = self.fields(node, set, &format!("`approval` of {owner}"))?;
                let approvers = match fields.get("approvers") {
                    Some(entry) => self.within("approvers", |walk| walk.approvers(&entry.value, owner)),
                    None => Vec::new(),
                };
                let reason =
                    fields.get("reason").and_then(|entry| self.within("reason", |walk| walk.reason(&entry.value)));
                let timeout_ms =
                    fields.get("timeout").and_then(|entry| self.within("timeout", |walk| walk.duration(&entry.value)));
                let when = fields
                    .get("when")
                    .and_then(|entry| self.within("when", |walk| walk.word(&entry.value, &["always", "drift"])));
                let when = if when == Some("drift") { ApprovalWhen::Drift } else { ApprovalWhen::Always };
                Some(Approval { approvers, reason, timeout_ms, when })
            }
            _ => {
                self.mismatch("K0202", node, "true, false or a map with `approvers`");
                None
            }
        }
    }

    fn reason(&mut self, node: &Node) -> Option<String> {
        let text = self.fixed(node, "a text")?;
        let length = text.chars().count();
        if length > MAX_REASON_CHARS {
            self.fault("K0205", node.span, format!("the reason has {length} characters"))
                .expected([format!("at most {MAX_REASON_CHARS} characters")]);
            return None;
        }
        Some(text.to_owned())
    }

    fn approvers(&mut self, node: &Node, owner: &str) -> Vec<Approver> {
        let items = self.list(node, "clauses such as `{ team: release }`").unwrap_or_default();
        if items.is_empty() && matches!(node.data, Data::List(_)) {
            self.fault("K0205", node.span, format!("`approvers` of {owner} names nobody"))
                .help("leave it out, and any member who may approve can");
        }
        if !self.bounded(items.len(), MAX_CLAUSES, "clauses", node.span) {
            return Vec::new();
        }
        let mut approvers = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let clause = self.within(index.to_string(), |walk| walk.approver(item));
            if let Some(clause) = clause {
                if approvers.contains(&clause) {
                    self.fault("K0304", item.span, "the clause stands twice");
                } else {
                    approvers.push(clause);
                }
            }
        }
        approvers
    }

    fn approver(&mut self, node: &Node) -> Option<Approver> {
        let fields = self.fields(node, &keys::APPROVER, "a clause of `approvers`")?;
        match (fields.get("team"), fields.get("user")) {
            (Some(team), None) => self
                .within("team", |walk| walk.fixed(&team.value, "the name of a team"))
                .map(|n| Approver::Team(n.into())),
            (None, Some(user)) => self
                .within("user", |walk| walk.fixed(&user.value, "the name of a user"))
                .map(|n| Approver::User(n.into())),
            (Some(_), Some(user)) => {
                self.fault("K0103", user.span, "the clause has both `team` and `user`")
                    .help("write two clauses; both must then be met");
                None
            }
            (None, None) => {
                self.fault("K0101", node.span, "the clause names nobody").expected(["`team`", "`user`"]);
                None
            }
        }
    }
}

fn text(value: &Value) -> &str {
    match value {
        Value::Static { r#static: text } | Value::Template { template: text, .. } => text,
    }
}

fn is_name(name: &str) -> bool {
    name.len() <= 128
        && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`.
pub(super) fn is_context(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}
