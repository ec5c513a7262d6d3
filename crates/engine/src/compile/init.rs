//! `init`: what prepares a job before its first step.

use crate::expr::Scope;
use crate::lock::{Action, Step, Value};
use crate::yaml::{Core, Data, Node};

use super::keys;
use super::step::Around;
use super::walk::Walk;

/// Most commands of one job.
const MAX_COMMANDS: usize = 16;
const DEFAULT_TIMEOUT_MS: u64 = 600_000;

/// Installs the tools that the repository declares for mise and puts them on PATH.
const MISE: &str = r#"command -v mise >/dev/null || { echo "init: mise is not installed on this agent" >&2; exit 1; }
mise trust --yes --all >/dev/null 2>&1 || true
mise install --yes
mise bin-paths >> "$KICI_PATH"
"#;

/// The same where the repository declares tools, else nothing.
const AUTO: &str = r#"for file in mise.toml .mise.toml mise/config.toml .config/mise.toml .tool-versions; do
  [ -f "$file" ] || continue
  echo "init: $file declares tools"
  command -v mise >/dev/null || { echo "init: mise is not installed on this agent" >&2; exit 1; }
  mise trust --yes --all >/dev/null 2>&1 || true
  mise install --yes
  mise bin-paths >> "$KICI_PATH"
  exit 0
done
echo "init: no file declares tools"
"#;

impl Walk<'_> {
    /// `false`, a word, a map or a list of those.
    pub(super) fn init(&mut self, node: &Node, scope: &Scope, around: &Around<'_>) -> Vec<Step> {
        if node.core() == Some(Core::Bool(false)) {
            return Vec::new();
        }
        let items = match &node.data {
            Data::List(items) => items,
            _ => std::slice::from_ref(node),
        };
        if !self.bounded(items.len(), MAX_COMMANDS, "commands of `init`", node.span) {
            return Vec::new();
        }
        let command = |(index, item): (usize, &Node)| {
            self.within(index.to_string(), |walk| walk.init_command(item, scope, around))
        };
        items.iter().enumerate().filter_map(command).collect()
    }

    fn init_command(&mut self, node: &Node, scope: &Scope, around: &Around<'_>) -> Option<Step> {
        let bare = |walk: &Self, run: &str| Step {
            timeout_ms: Some(DEFAULT_TIMEOUT_MS),
            ..walk.bare_step(node, run.to_owned(), around)
        };
        if let Data::Scalar(..) = node.data {
            let script = match self.word(node, &["false", "auto", "mise"])? {
                "mise" => MISE,
                "auto" => AUTO,
                _ => {
                    self.fault("K0205", node.span, "`false` stands alone, not in a list");
                    return None;
                }
            };
            let name = node.text().map(Value::fixed);
            return Some(Step { name, shell: Some(crate::lock::Shell::Sh), ..bare(self, script) });
        }
        let fields = self.fields(node, &keys::INIT, &format!("`init` of job `{}`", around.job))?;
        let Some(entry) = fields.get("run") else {
            self.fault("K0101", node.span, format!("`init` of job `{}` has no `run`", around.job)).expected([
                "`run`, a script",
                "`auto`",
                "`mise`",
                "`false`",
            ]);
            return None;
        };
        let run = self.within("run", |walk| walk.script(&entry.value, "run"));
        let mut step = bare(self, "");
        let scope_of = |key: &str| Scope { key: key.to_owned(), ..scope.clone() };
        self.command_fields(&mut step, fields, scope_of);
        if let Some(entry) = fields.get("cache") {
            let owner = format!("`init` of job `{}`", around.job);
            step.cache = self.within("cache", |walk| walk.caches(&entry.value, &owner, &scope_of("cache")));
        }
        Some(Step { action: Action::Run(run?), ..step })
    }
}
