//! Checks of names when a workflow is compiled: a misspelt variable is an error in the file, not a surprise in a run.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::lock::Stage;

use super::{Expr, Part, Template, functions};

/// What an expression at some place of a file may name.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// True where the agent evaluates.
    pub agent: bool,
    /// The key, for messages: `runs_on`.
    pub key: String,
    /// The variables that exist here; each with its fields where they are known.
    pub variables: BTreeMap<&'static str, Shape>,
}

/// The known fields of a variable.
#[derive(Clone, Debug, Default)]
pub enum Shape {
    /// Anything goes.
    #[default]
    Open,
    /// A scalar: it has no fields.
    Leaf,
    /// Exactly these; shared, since the same variables exist at most places of a file.
    Fields(Arc<BTreeMap<String, Shape>>),
}

impl Shape {
    /// Exactly these fields.
    pub fn fields(fields: impl IntoIterator<Item = (String, Self)>) -> Self {
        Self::Fields(Arc::new(fields.into_iter().collect()))
    }
}

/// What is wrong with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Kind of the problem.
    pub kind: FindingKind,
    /// Byte in the checked text.
    pub offset: usize,
    /// Length of the name in bytes.
    pub length: usize,
    /// In words.
    pub message: String,
    /// What could have been meant.
    pub candidates: Vec<String>,
    /// The name as written.
    pub found: String,
}

/// Kinds of problems with names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// Known, but only on the agent or not at this place.
    Stage,
    /// Not known.
    Unknown,
    /// `secrets`.
    Secret,
}

/// Variables that only the agent has.
const AGENT_VARIABLES: [&str; 4] = ["agent", "env", "steps", "job"];
/// Every variable of the language.
const VARIABLES: [&str; 15] = [
    "event", "repo", "ref", "sha", "branch", "inputs", "vars", "matrix", "fanout", "needs", "run", "agent", "env",
    "steps", "job",
];
/// Variables of another system and where the same things are here.
const FOREIGN: [(&str, &str); 4] =
    [("github", "event"), ("runner", "agent"), ("gitea", "event"), ("strategy", "matrix")];
/// Names of CEL's types, which are values.
const TYPES: [&str; 10] = ["bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"];

/// Checks the names in an expression. Offsets count from its source.
pub fn check_expr(expr: &Expr, scope: &Scope) -> Vec<Finding> {
    let mut findings = Vec::new();
    for reference in expr.references() {
        findings.extend(check_variable(reference, scope));
    }
    for call in expr.calls() {
        let name = call.name.as_str();
        let agent_only = functions::AGENT_ONLY.contains(&name);
        let known = functions::KNOWN.contains(&name) || functions::KNOWN_MORE.contains(&name);
        let (kind, message) = match (known, agent_only, scope.agent) {
            (true, ..) | (_, true, true) => continue,
            (_, true, false) => {
                (FindingKind::Stage, format!("`{name}()` is only available on the agent, {}", scope.place()))
            }
            (false, false, _) => (FindingKind::Unknown, format!("unknown function `{name}`")),
        };
        let candidates = if kind == FindingKind::Unknown { functions_here(scope) } else { Vec::new() };
        let (offset, length) = (call.offset, name.len());
        findings.push(Finding { kind, offset, length, message, candidates, found: name.to_owned() });
    }
    findings.sort_by_key(|finding| finding.offset);
    findings
}

/// Checks the names in a template, and says who renders it. Offsets count from the template.
pub fn check_template(template: &Template, scope: &Scope) -> (Stage, Vec<Finding>) {
    let mut findings = Vec::new();
    let mut stage = Stage::Dispatch;
    for part in template.parts() {
        let Part::Expr { expr, offset } = part else { continue };
        if needs_agent(expr) {
            stage = Stage::Agent;
        }
        findings.extend(check_expr(expr, scope).into_iter().map(|f| Finding { offset: f.offset + offset, ..f }));
    }
    (stage, findings)
}

fn needs_agent(expr: &Expr) -> bool {
    expr.references().iter().any(|reference| AGENT_VARIABLES.contains(&reference.root.as_str()))
        || expr.calls().iter().any(|call| functions::AGENT_ONLY.contains(&call.name.as_str()))
}

fn functions_here(scope: &Scope) -> Vec<String> {
    let agent: &[&str] = if scope.agent { &functions::AGENT_ONLY } else { &[] };
    let all = functions::KNOWN.iter().chain(&functions::KNOWN_MORE).chain(agent);
    all.map(|name| (*name).to_owned()).collect()
}

impl Scope {
    fn place(&self) -> String {
        if self.agent {
            format!("and not in `{}`", self.key)
        } else {
            format!("but `{}` is evaluated at dispatch", self.key)
        }
    }
}

fn check_variable(reference: &super::Reference, scope: &Scope) -> Option<Finding> {
    let root = reference.root.as_str();
    let finding = |kind, message, candidates, found: &str, offset| {
        Some(Finding { kind, offset, length: found.len(), message, candidates, found: found.to_owned() })
    };
    if let Some(shape) = scope.variables.get(root) {
        let (depth, known) = unknown_field(shape, &reference.path)?;
        let field = reference.path[depth].as_str();
        let owner = std::iter::once(root).chain(reference.path[..depth].iter().map(String::as_str));
        let owner = owner.collect::<Vec<_>>().join(".");
        return finding(FindingKind::Unknown, format!("`{owner}` has no `{field}`"), known, field, reference.offset);
    }
    let at = reference.offset;
    if root == "secrets" {
        let message = "`secrets` is not available in expressions; list the name under `secrets:` and read the variable";
        return finding(FindingKind::Secret, message.to_owned(), Vec::new(), root, at);
    }
    if TYPES.contains(&root) {
        return None;
    }
    if AGENT_VARIABLES.contains(&root) && !scope.agent {
        let message = format!("'{root}' is only available on the agent, but '{}' is evaluated at dispatch", scope.key);
        return finding(FindingKind::Stage, message.replace('\'', "`"), Vec::new(), root, at);
    }
    if VARIABLES.contains(&root) {
        return finding(
            FindingKind::Stage,
            format!("`{root}` is not available in `{}`", scope.key),
            Vec::new(),
            root,
            at,
        );
    }
    let meant = FOREIGN.iter().find(|(word, _)| *word == root).map(|(_, ours)| *ours);
    let candidates = match meant.filter(|ours| scope.variables.contains_key(ours)) {
        Some(ours) => vec![ours.to_owned()],
        None => scope.variables.keys().map(|name| (*name).to_owned()).collect(),
    };
    finding(FindingKind::Unknown, format!("unknown variable `{root}`"), candidates, root, at)
}

/// The depth of the first key that is not there, and the keys that are.
fn unknown_field(shape: &Shape, path: &[String]) -> Option<(usize, Vec<String>)> {
    let mut shape = shape;
    for (depth, key) in path.iter().enumerate() {
        match shape {
            Shape::Open => return None,
            Shape::Leaf => return Some((depth, Vec::new())),
            Shape::Fields(fields) => match fields.get(key) {
                Some(next) => shape = next,
                None => return Some((depth, fields.keys().cloned().collect())),
            },
        }
    }
    None
}
