//! The lock model: a workflow after compilation. The compiler writes it, the planner, the orchestrator and the agent read
//! it; other programs may produce it too. JSON, snake_case.
//!
//! A stored lock is never trusted to come from our compiler: [`crate::lock`] types only give it shape, limits are checked
//! again where a pattern or an expression is used.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hosts::{HostSelector, OnUnreachable};
use crate::state::{FailureClass, JobStatus};

mod cache;
mod container;
mod dynamic;
mod git;
mod protection;
mod step;
mod trigger;

pub use cache::{Artifacts, Cache, Download, IfEmpty, KeepWhen, Upload};
pub use container::{
    Amounts, Container, ContainerOptions, HARMLESS_CAPABILITIES, Health, MAX_PORTS, MAX_SERVICES, Port, Pull,
    RegistryCredentials, Resources, Service, is_image, service_variable,
};
pub use dynamic::{
    Allow, ForGenerated, Generate, GroupNeed, Invoke, MAX_GENERATED_BYTES, MAX_GENERATED_JOBS, MAX_STEP_FILE_BYTES,
};
pub use git::{CredentialMaterial, GitAccess, GitCredentials, MAX_NAMED, Material, NamedCredential};
pub use protection::{Approval, ApprovalWhen, Approver, Environments, Secrets};
pub use step::{
    Action, Backoff, Check, Composite, Emit, Group, Hooks, MAX_HOOK_MS, MAX_RUN_HOOKS_MS, Probe, RUN_HOOKS_JOB,
    Requirement, Rule, Step, StepRetry, WaitFor,
};
pub use trigger::{Conditions, Input, InputType, Patterns, Trigger};

/// The schema that this build writes.
pub const SCHEMA_VERSION: u32 = 1;
/// The oldest schema that this build still reads.
pub const BREAKING_FLOOR: u32 = 1;

/// A compiled set of workflows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LockDocument {
    /// Schema of this document.
    pub schema_version: u32,
    /// The oldest reader that understands everything in it.
    pub min_reader_version: u32,
    /// SHA-256 (hex) over the canonical JSON of `workflows`.
    pub content_hash: String,
    /// Who wrote it.
    pub generator: Generator,
    /// The workflows, in file order.
    pub workflows: Vec<Workflow>,
}

/// The program that wrote a lock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Generator {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// A place in a workflow file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SourceRef {
    /// Path from the root of the repository.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
}

/// One workflow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Workflow {
    /// Unique in its repository.
    pub name: String,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Title of a run, a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_name: Option<Value>,
    /// Where it is written.
    pub source: SourceRef,
    /// SHA-256 (hex) of `compile_version:` and the source with LF line ends.
    pub content_hash: String,
    /// What starts it; the first that matches wins.
    pub triggers: Vec<Trigger>,
    /// A CEL condition; false means no run.
    #[serde(default, rename = "if", skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// Files that the commit must have, or must not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requires: Vec<Requirement>,
    /// All must hold, else there is no run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    /// Environment of every step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
    /// Secrets in the environment of every step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: Secrets,
    /// Who must agree before any job runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<Approval>,
    /// Limit of the whole run, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// The group in which its runs take turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<Concurrency>,
    /// What generated jobs find; none where no job makes jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_generated: Option<ForGenerated>,
    /// The jobs, in file order.
    pub jobs: Vec<Job>,
}

/// When a template is rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// By the orchestrator, when the run is planned or the job becomes ready.
    Dispatch,
    /// By the agent, just before use.
    Agent,
}

/// A text that may hold `${{ … }}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", untagged)]
pub enum Value {
    /// As written.
    Static {
        /// The text.
        r#static: String,
    },
    /// Rendered by `crate::expr`.
    Template {
        /// The text with its `${{ … }}`.
        template: String,
        /// Where it is rendered.
        stage: Stage,
    },
}

impl Value {
    /// A text without expressions.
    pub fn fixed(text: impl Into<String>) -> Self {
        Self::Static { r#static: text.into() }
    }
}

/// A group of which only some may be active at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Concurrency {
    /// Name of the group, a template.
    pub group: Value,
    /// How many may be active at once.
    #[serde(default = "one")]
    pub max: u32,
    /// Older runs of the group are cancelled.
    #[serde(default)]
    pub cancel_in_progress: bool,
}

fn one() -> u32 {
    1
}

/// When a job that failed is tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Retry {
    /// How many more times, at most.
    pub attempts: u32,
    /// After a failure of one of these classes.
    pub on: Vec<FailureClass>,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Job {
    /// Its key; `[a-z0-9][a-z0-9_-]{0,63}`.
    pub name: String,
    /// What people see instead of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<Value>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Where it is written.
    pub source: SourceRef,
    /// The jobs it waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Need>,
    /// The groups of generated jobs it waits for, as far as they are not known; known ones are in `needs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs_groups: Vec<GroupNeed>,
    /// Its step makes other jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generate: Option<Generate>,
    /// It starts other workflows and has no steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invoke: Option<Invoke>,
    /// Which agents may run it; empty with `runs_on_all` and `invoke`.
    #[serde(default, skip_serializing_if = "Selector::is_empty")]
    pub runs_on: Selector,
    /// Once on each of these hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs_on_all: Option<HostSelector>,
    /// With `runs_on_all`: what becomes of it on a host that is out of contact.
    #[serde(default, skip_serializing_if = "OnUnreachable::is_default")]
    pub on_unreachable: OnUnreachable,
    /// With `runs_on_all`: also on hosts whose agent never registered.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub include_uninitialized: bool,
    /// Variants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matrix: Option<Matrix>,
    /// How many variants may run at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_parallel: Option<u32>,
    /// The first failing variant ends the others.
    #[serde(default)]
    pub fail_fast: bool,
    /// A CEL condition, evaluated when its needs are met; false means `skipped`.
    #[serde(default, rename = "if", skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
    /// All must hold when its needs are met, else it is `skipped` with their labels as the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    /// Environment of its steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
    /// Where it deploys to: brings rules, variables and secrets.
    #[serde(default, skip_serializing_if = "Environments::is_empty")]
    pub environments: Environments,
    /// Secrets in the environment of its steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: Secrets,
    /// Who must agree before it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<Approval>,
    /// Whether and how the commit is checked out.
    #[serde(default)]
    pub checkout: Checkout,
    /// The git credentials of its steps; absent is the default of [`GitCredentials`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub git_credentials: Option<GitCredentials>,
    /// The container of its steps; absent: they run on the agent's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
    /// Containers beside it, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub services: BTreeMap<String, Service>,
    /// What it needs and may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Named results for the jobs that need this one; templates over `steps`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, Value>,
    /// Limit from the start of the checkout, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// From TERM to KILL on cancel, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_period_ms: Option<u64>,
    /// The group in which it takes turns with other jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<Concurrency>,
    /// When it is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Commands that prepare it after the checkout and before the first step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub init: Vec<Step>,
    /// Files that are restored before the first step and saved after the last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<Cache>,
    /// Files that it takes from other jobs and hands over.
    #[serde(default, skip_serializing_if = "Artifacts::is_empty")]
    pub artifacts: Artifacts,
    /// Its steps, at least one but for the job of a workflow's hooks and one with `invoke`.
    pub steps: Vec<Step>,
    /// The groups that its steps form.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
    /// The uses of step files that its steps stand in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub composites: Vec<Composite>,
    /// What runs around its steps. Of the job named [`RUN_HOOKS_JOB`]: the hooks of the workflow.
    #[serde(default, skip_serializing_if = "Hooks::is_empty")]
    pub hooks: Hooks,
}

impl Job {
    /// A job without steps and with everything else as where nothing is written.
    pub fn bare(name: impl Into<String>, source: SourceRef, runs_on: Selector) -> Self {
        Self {
            name: name.into(),
            display_name: None,
            description: None,
            source,
            needs: Vec::new(),
            needs_groups: Vec::new(),
            generate: None,
            invoke: None,
            runs_on,
            runs_on_all: None,
            on_unreachable: OnUnreachable::default(),
            include_uninitialized: false,
            matrix: None,
            max_parallel: None,
            fail_fast: false,
            condition: None,
            rules: Vec::new(),
            env: BTreeMap::new(),
            environments: Environments::default(),
            secrets: Secrets::new(),
            approval: None,
            checkout: Checkout::default(),
            git_credentials: None,
            container: None,
            services: BTreeMap::new(),
            resources: None,
            outputs: BTreeMap::new(),
            timeout_ms: None,
            grace_period_ms: None,
            concurrency: None,
            retry: None,
            init: Vec::new(),
            cache: Vec::new(),
            artifacts: Artifacts::default(),
            steps: Vec::new(),
            groups: Vec::new(),
            composites: Vec::new(),
            hooks: Hooks::default(),
        }
    }

    /// Whether it is the job of a workflow's hooks.
    pub fn is_run_hooks(&self) -> bool {
        self.name == RUN_HOOKS_JOB
    }
}

/// One edge: a job, and the statuses of it that let the downstream run. Never empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Need {
    /// Key of the upstream job.
    pub job: String,
    /// Terminal statuses that satisfy the edge.
    pub run_on: Vec<JobStatus>,
    /// The group of generated jobs that the edge is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl Need {
    /// An edge that is written as one.
    pub fn on(job: impl Into<String>, run_on: impl Into<Vec<JobStatus>>) -> Self {
        Self { job: job.into(), run_on: run_on.into(), group: None }
    }
}

/// Which agents may run a job: all `labels` present, no `exclude` present.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Selector {
    /// Every one must hit a label of the agent.
    pub labels: Vec<Matcher>,
    /// None may hit a label of the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<Matcher>,
    /// Which of several agents that are free takes the job.
    #[serde(default, skip_serializing_if = "Pick::is_default")]
    pub pick: Pick,
}

/// Which of several free agents takes a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pick {
    /// The first by name: the same job goes to the same agent as long as that is free.
    #[default]
    Deterministic,
    /// Whichever the load says.
    Any,
}

impl Pick {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Selector {
    /// True when it asks for nothing and excludes nothing.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.exclude.is_empty()
    }
}

/// One condition on the labels of an agent. A matcher without a known kind is an error, never "any".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Matcher {
    /// This label. May hold `${{ … }}` until the job is planned.
    Exact {
        /// The label.
        value: String,
    },
    /// Any label that this anchored, case-insensitive regular expression matches.
    Regex {
        /// The expression, in the syntax of the `regex` crate.
        source: String,
    },
}

/// Variants of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Matrix {
    /// Written out.
    Table(MatrixTable),
    /// An expression that yields a table.
    Expr(String),
}

/// A matrix that is written out. Values keep their text in the file: `3.10` stays `3.10`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MatrixTable {
    /// Dimension to values.
    pub dimensions: BTreeMap<String, Vec<String>>,
    /// Extra variants, or extra keys of existing ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<BTreeMap<String, String>>,
    /// Variants to leave out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<BTreeMap<String, String>>,
}

/// How the commit is checked out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Checkout {
    /// False: no checkout, an empty workspace.
    pub enabled: bool,
    /// Commits of history; 0 is all.
    pub depth: u32,
    /// With the submodules, and theirs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub submodules: bool,
    /// With the files that lie in git LFS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lfs: bool,
    /// With all tags.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tags: bool,
    /// Below the workspace; the workspace itself otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<Value>,
    /// Another branch, tag or commit than the run's.
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    pub git_ref: Option<Value>,
}

impl Default for Checkout {
    fn default() -> Self {
        Self { enabled: true, depth: 1, submodules: false, lfs: false, tags: false, path: None, git_ref: None }
    }
}

/// The program that runs a script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Shell {
    /// `bash --noprofile --norc -eo pipefail FILE`.
    Bash,
    /// `sh -e FILE`.
    Sh,
    /// `pwsh -NoLogo -NoProfile -NonInteractive -File FILE`.
    Pwsh,
    /// `python3 FILE`.
    Python,
    /// This argument list; `{0}` is the script file.
    Command(Vec<String>),
}
