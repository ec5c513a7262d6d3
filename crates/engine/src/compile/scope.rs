//! What expressions may name at each place of a workflow.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::expr::{Scope, Shape};

/// The declared inputs of all triggers; a run has those of the trigger that started it.
pub(super) type Inputs = Vec<String>;

fn leaves<T: Into<String>>(names: impl IntoIterator<Item = T>) -> Shape {
    Shape::fields(names.into_iter().map(|name| (name.into(), Shape::Leaf)))
}

// What is the same at every place is made once.
static EVENT: LazyLock<Shape> = LazyLock::new(event);
static RUN: LazyLock<Shape> = LazyLock::new(|| leaves(["id", "attempt", "check_mode"]));
static FANOUT: LazyLock<Shape> = LazyLock::new(|| leaves(["host", "index", "total", "first", "last"]));
static JOB: LazyLock<Shape> = LazyLock::new(|| leaves(["status"]));
static STEP: LazyLock<Shape> =
    LazyLock::new(|| Shape::fields([("status".to_owned(), Shape::Leaf), ("outputs".to_owned(), Shape::Open)]));
static AGENT: LazyLock<Shape> = LazyLock::new(|| {
    let fixed = ["os", "arch", "host"].map(|name| (name.to_owned(), Shape::Leaf));
    Shape::fields(fixed.into_iter().chain([("labels".to_owned(), Shape::Open)]))
});

fn event() -> Shape {
    const LEAVES: [&str; 18] = [
        "kind",
        "raw_name",
        "action",
        "org",
        "routing_key",
        "provider",
        "source",
        "repo",
        "ref",
        "sha",
        "target_branch",
        "source_branch",
        "base_sha",
        "tag",
        "default_branch",
        "is_fork_pr",
        "pr_number",
        "commit_message",
    ];
    let mut fields: BTreeMap<String, Shape> = LEAVES.iter().map(|name| ((*name).to_owned(), Shape::Leaf)).collect();
    fields.insert("chain_depth".to_owned(), Shape::Leaf);
    fields.insert("requested_workflow".to_owned(), Shape::Leaf);
    fields.insert("check_mode".to_owned(), Shape::Leaf);
    fields.insert("sender".to_owned(), leaves(["username", "user_id"]));
    fields.insert("inputs".to_owned(), Shape::Open);
    fields.insert("payload".to_owned(), Shape::Open);
    Shape::fields(fields)
}

/// What exists everywhere: the event, the commit, the run.
pub(super) fn workflow(key: &str, inputs: &Inputs) -> Scope {
    let variables = BTreeMap::from([
        ("event", EVENT.clone()),
        ("repo", Shape::Leaf),
        ("ref", Shape::Leaf),
        ("sha", Shape::Leaf),
        ("branch", Shape::Leaf),
        ("inputs", leaves(inputs)),
        ("vars", Shape::Open),
        ("run", RUN.clone()),
    ]);
    Scope { agent: false, key: key.to_owned(), variables }
}

/// What a job adds.
#[derive(Clone, Debug, Default)]
pub(super) struct JobNames {
    /// The keys of its matrix; none where an expression yields them.
    pub(super) matrix: Option<Vec<String>>,
    /// It runs on hosts.
    pub(super) hosts: bool,
    /// The jobs it needs.
    pub(super) needs: BTreeMap<String, NeedNames>,
}

/// What a needed job shows.
#[derive(Clone, Debug, Default)]
pub(super) struct NeedNames {
    /// The outputs it declares.
    pub(super) outputs: Vec<String>,
    /// It runs on hosts.
    pub(super) hosts: bool,
    /// What outputs there are is not known: a group of generated jobs.
    pub(super) open: bool,
}

impl NeedNames {
    fn shape(&self) -> Shape {
        let outputs = if self.open { Shape::Open } else { leaves(&self.outputs) };
        let mut fields = BTreeMap::from([("status".to_owned(), Shape::Leaf), ("outputs".to_owned(), outputs)]);
        if self.hosts {
            let mut summary = BTreeMap::from([("total".to_owned(), Shape::Leaf)]);
            for list in ["succeeded_hosts", "failed_hosts", "skipped_hosts", "cancelled_hosts"] {
                summary.insert(list.to_owned(), Shape::Open);
            }
            fields.insert("by_host".to_owned(), Shape::Open);
            fields.insert("summary".to_owned(), Shape::fields(summary));
        }
        Shape::fields(fields)
    }
}

/// For keys that are rendered when the run is planned: the needs have no results yet.
pub(super) fn planned_job(key: &str, inputs: &Inputs, names: &JobNames) -> Scope {
    let mut scope = workflow(key, inputs);
    let matrix = names.matrix.as_ref().map_or(Shape::Open, leaves);
    scope.variables.insert("matrix", matrix);
    if names.hosts {
        scope.variables.insert("fanout", FANOUT.clone());
    }
    scope
}

/// For keys that are rendered when the needs of the job are met.
pub(super) fn ready_job(key: &str, inputs: &Inputs, names: &JobNames) -> Scope {
    let mut scope = planned_job(key, inputs, names);
    let needs = names.needs.iter().map(|(name, need)| (name.clone(), need.shape()));
    scope.variables.insert("needs", Shape::fields(needs));
    scope
}

/// What the agent knows before the first step.
pub(super) fn on_agent(mut scope: Scope) -> Scope {
    scope.agent = true;
    scope.variables.insert("agent", AGENT.clone());
    scope
}

/// For the keys of a step: the environment, the steps before it that have an id, and how the job is doing.
pub(super) fn step(key: &str, inputs: &Inputs, names: &JobNames, steps: &[String]) -> Scope {
    let mut scope = on_agent(ready_job(key, inputs, names));
    scope.variables.insert("env", Shape::Open);
    scope.variables.insert("steps", Shape::fields(steps.iter().map(|id| (id.clone(), STEP.clone()))));
    scope.variables.insert("job", JOB.clone());
    scope
}
