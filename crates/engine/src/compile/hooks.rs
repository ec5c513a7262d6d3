//! Hooks, which are steps with fewer keys, and rules.

use crate::expr::Scope;
use crate::lock::{Action, Hooks, MAX_HOOK_MS, Requirement, Rule, Step};
use crate::requires::MAX_REQUIREMENTS;
use crate::yaml::{Data, Node};

use super::keys::{self, KeySet};
use super::step::Around;
use super::walk::Walk;

/// Most hooks of one kind. The place of a hook in the list of steps counts on it.
const MAX_HOOKS: usize = 16;
/// Most rules of one job or workflow.
const MAX_RULES: usize = 64;

impl Walk<'_> {
    /// `hooks`: for each kind a script, a map or a list of them.
    pub(super) fn hooks(
        &mut self,
        node: &Node,
        kinds: &KeySet,
        owner: &str,
        scope: &Scope,
        around: &Around<'_>,
    ) -> Hooks {
        let mut hooks = Hooks::default();
        let Some(fields) = self.fields(node, kinds, &format!("`hooks` of {owner}")) else { return hooks };
        for kind in kinds.accepted {
            let Some(entry) = fields.get(kind) else { continue };
            let list = self.within(*kind, |walk| walk.hook_list(&entry.value, kind, scope, around));
            *match *kind {
                "on_success" => &mut hooks.on_success,
                "on_failure" => &mut hooks.on_failure,
                "on_cancel" => &mut hooks.on_cancel,
                "before_step" => &mut hooks.before_step,
                "after_step" => &mut hooks.after_step,
                _ => &mut hooks.cleanup,
            } = list;
        }
        hooks
    }

    fn hook_list(&mut self, node: &Node, kind: &str, scope: &Scope, around: &Around<'_>) -> Vec<Step> {
        let items = match &node.data {
            Data::Map(_) => std::slice::from_ref(node),
            _ => self.one_or_list(node, "a script").unwrap_or_default(),
        };
        if !self.bounded(items.len(), MAX_HOOKS, "hooks of one kind", node.span) {
            return Vec::new();
        }
        let hook = |(index, item): (usize, &Node)| {
            self.within(index.to_string(), |walk| walk.hook_step(item, kind, scope, around))
        };
        items.iter().enumerate().filter_map(hook).collect()
    }

    fn hook_step(&mut self, node: &Node, kind: &str, scope: &Scope, around: &Around<'_>) -> Option<Step> {
        let bare = |walk: &Self, run| Step { timeout_ms: None, ..walk.bare_step(node, run, around) };
        if let Data::Scalar(..) = node.data {
            let run = self.script(node, kind)?;
            return Some(bare(self, run));
        }
        let owner = format!("hook `{kind}`");
        if !matches!(node.data, Data::Map(_)) {
            self.mismatch("K0201", node, "a script or a map");
            return None;
        }
        let fields = self.fields(node, &keys::HOOK_STEP, &owner)?;
        let Some(entry) = fields.get("run") else {
            self.fault("K0101", node.span, format!("{owner} has no `run`")).expected(["`run`, a script"]);
            return None;
        };
        let run = self.within("run", |walk| walk.script(&entry.value, "run"));
        let mut step = bare(self, String::new());
        let scope_of = |key: &str| Scope { key: key.to_owned(), ..scope.clone() };
        self.command_fields(&mut step, fields, scope_of);
        if let (Some(ms), Some(entry)) = (step.timeout_ms, fields.get("timeout"))
            && ms > MAX_HOOK_MS
        {
            self.fault("K0205", entry.value.span, format!("{owner} may take 5m at most")).expected(["up to \"5m\""]);
        }
        Some(Step { action: Action::Run(run?), ..step })
    }

    /// `rules`: conditions that must all hold, each with a word for people.
    pub(super) fn rules(&mut self, node: &Node, owner: &str, scope: &Scope) -> Vec<Rule> {
        let items = self.list(node, "rules").unwrap_or_default();
        if !self.bounded(items.len(), MAX_RULES, "rules", node.span) {
            return Vec::new();
        }
        let rule = |(index, item): (usize, &Node)| self.within(index.to_string(), |walk| walk.rule(item, owner, scope));
        items.iter().enumerate().filter_map(rule).collect()
    }

    /// `requires`: tests on files of the commit.
    pub(super) fn requires(&mut self, node: &Node) -> Vec<Requirement> {
        let items = match &node.data {
            Data::Map(_) => std::slice::from_ref(node),
            _ => self.list(node, "tests on files").unwrap_or_default(),
        };
        if !self.bounded(items.len(), MAX_REQUIREMENTS, "requirements", node.span) {
            return Vec::new();
        }
        let test = |(index, item): (usize, &Node)| self.within(index.to_string(), |walk| walk.requirement(item));
        items.iter().enumerate().filter_map(test).collect()
    }

    fn requirement(&mut self, node: &Node) -> Option<Requirement> {
        let fields = self.fields(node, &keys::REQUIREMENT, "a requirement")?;
        let Some(entry) = fields.get("file") else {
            self.fault("K0101", node.span, "a requirement has no `file`")
                .expected(["`file`, a path from the root of the repository"]);
            return None;
        };
        let file = self.within("file", |walk| walk.repo_path(&entry.value));
        let exists = match fields.get("exists") {
            Some(entry) => self.within("exists", |walk| walk.bool(&entry.value))?,
            None => true,
        };
        let mut conditions = |key: &str| match fields.get(key) {
            Some(entry) => self.within(key, |walk| walk.conditions(&entry.value)),
            None => Default::default(),
        };
        let (r#match, not) = (conditions("match"), conditions("not"));
        if !exists && let Some(entry) = fields.get("match").or_else(|| fields.get("not")) {
            let message = format!("`{}` has no effect on a file that must not exist", entry.key);
            self.fault("K0104", entry.span, message).help("remove it, or `exists: false`");
        }
        Some(Requirement { file: file?, exists, r#match, not })
    }

    /// A path of the repository.
    fn repo_path(&mut self, node: &Node) -> Option<String> {
        let text = self.fixed(node, "a path")?;
        let bad = |piece: &str| piece.is_empty() || matches!(piece, "." | "..") || piece == ".git";
        let illegal = text.len() > 512 || text.contains(['\\', ':']) || text.chars().any(char::is_control);
        if illegal || text.split('/').any(bad) {
            self.fault("K0603", node.span, format!("`{}` is not a path of the repository", crate::yaml::shorten(text)))
                .expected(["a path from the root, without `..`"]);
            return None;
        }
        Some(text.to_owned())
    }

    fn rule(&mut self, node: &Node, owner: &str, scope: &Scope) -> Option<Rule> {
        let fields = self.fields(node, &keys::RULE, &format!("a rule of {owner}"))?;
        let Some(entry) = fields.get("if") else {
            self.fault("K0101", node.span, format!("a rule of {owner} has no `if`")).expected(["`if`, a condition"]);
            return None;
        };
        let condition = self.within("if", |walk| walk.condition(&entry.value, scope));
        let label = match fields.get("label") {
            Some(entry) => self.within("label", |walk| walk.fixed(&entry.value, "a text").map(str::to_owned)),
            None => condition.clone(),
        };
        Some(Rule { condition: condition?, label: label? })
    }
}
