//! Jobs.

use std::collections::BTreeMap;

use crate::expr::Scope;
use crate::lock::{Artifacts, Cache, Checkout, Hooks, Job, Need, Rule, Selector, Shell, SourceRef, Step, Value};
use crate::yaml::{Core, Data, Entry, Node};

use super::keys;
use super::matrix::matrix_keys;
use super::scope::{self, Inputs, JobNames, NeedNames};
use super::step::{Around, Steps};
use super::walk::{Fields, Walk};

/// `defaults` of a workflow.
#[derive(Clone, Debug, Default)]
pub(super) struct Defaults {
    pub(super) runs_on: Option<Selector>,
    /// `runs_on` is there but faulty: then its absence from a job is no further fault.
    pub(super) broken_runs_on: bool,
    pub(super) shell: Option<Shell>,
    pub(super) working_directory: Option<Value>,
    pub(super) timeout_ms: Option<u64>,
    pub(super) env: BTreeMap<String, Value>,
}

/// What the jobs of a workflow share.
pub(super) struct Place<'a> {
    pub(super) defaults: &'a Defaults,
    pub(super) inputs: &'a Inputs,
    pub(super) jobs: &'a [Entry],
}

/// A field of a job as written, before the job is compiled.
fn raw<'n>(job: &'n Node, key: &str) -> Option<&'n Node> {
    let Data::Map(entries) = &job.data else { return None };
    entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
}

/// What a job shows to those that need it.
fn need_names(jobs: &[Entry], name: &str) -> NeedNames {
    let Some(job) = jobs.iter().find(|entry| entry.key == name) else { return NeedNames::default() };
    let outputs = match raw(&job.value, "outputs").map(|node| &node.data) {
        Some(Data::Map(entries)) => entries.iter().map(|entry| entry.key.clone()).collect(),
        _ => Vec::new(),
    };
    NeedNames { outputs, hosts: raw(&job.value, "runs_on_all").is_some() }
}

impl Walk<'_> {
    /// The edges of a job, which matter also where the rest is faulty, and the job.
    pub(super) fn job(&mut self, entry: &Entry, place: &Place<'_>) -> (Vec<Need>, Option<Job>) {
        let Some(fields) = self.fields(&entry.value, &keys::JOB, &format!("job `{}`", entry.key)) else {
            return Default::default();
        };
        let needs = match fields.get("needs") {
            Some(needs) => self.within("needs", |walk| walk.needs(&needs.value, &entry.key, place.jobs)),
            None => Vec::new(),
        };
        let job = self.job_body(entry, fields, needs.clone(), place);
        (needs, job)
    }

    fn job_body(&mut self, entry: &Entry, fields: Fields<'_>, needs: Vec<Need>, place: &Place<'_>) -> Option<Job> {
        let name = entry.key.as_str();
        let names = JobNames {
            matrix: matrix_keys(fields.get("matrix").map(|entry| &entry.value)),
            hosts: fields.get("runs_on_all").is_some(),
            needs: needs.iter().map(|need| (need.job.clone(), need_names(place.jobs, &need.job))).collect(),
        };
        let around = Around { place, names: &names, job: name };
        let matrix = fields.get("matrix").and_then(|entry| {
            let scope = scope::workflow("matrix", place.inputs);
            self.within("matrix", |walk| walk.matrix(&entry.value, &scope))
        });
        let hosts = self.hosts(entry, fields);
        let runs_on = if fields.get("runs_on_all").is_some() {
            Some(Selector::default())
        } else {
            self.runs_on(entry, fields, &around)
        };
        let Steps { steps, groups, composites, ids } = self.job_steps(entry, fields, &around);
        let (max_parallel, fail_fast) = self.fan_out(fields, name);
        let mut env = place.defaults.env.clone();
        if let Some(entry) = fields.get("env") {
            let scope = scope::on_agent(scope::ready_job("env", place.inputs, &names));
            env.extend(self.within("env", |walk| walk.env(&entry.value, &scope, false)));
        }
        let timeout_ms = match fields.get("timeout") {
            Some(entry) => self.within("timeout", |walk| walk.duration(&entry.value)),
            None => place.defaults.timeout_ms,
        };
        let (rules, init, hooks) = self.around_steps(fields, &around, &ids);
        let (cache, artifacts) = self.kept(fields, &around, &ids);
        Some(Job {
            name: name.to_owned(),
            display_name: fields.get("name").and_then(|entry| {
                let scope = scope::planned_job("name", place.inputs, &names);
                self.within("name", |walk| walk.template(&entry.value, &scope))
            }),
            description: self.description(fields),
            source: SourceRef { file: self.file.to_owned(), line: entry.span.start.line },
            needs,
            matrix,
            runs_on_all: hosts.selector,
            on_unreachable: hosts.on_unreachable,
            include_uninitialized: hosts.include_uninitialized,
            max_parallel,
            fail_fast,
            condition: fields.get("if").and_then(|entry| {
                let scope = scope::ready_job("if", place.inputs, &names);
                self.within("if", |walk| walk.condition(&entry.value, &scope))
            }),
            env,
            checkout: match fields.get("checkout") {
                Some(entry) => self.within("checkout", |walk| walk.checkout(&entry.value)),
                None => Checkout::default(),
            },
            git_credentials: fields
                .get("git_credentials")
                .and_then(|entry| self.within("git_credentials", |walk| walk.git_credentials(&entry.value))),
            rules,
            init,
            cache,
            artifacts,
            hooks,
            outputs: self.outputs(fields, &around, &ids),
            timeout_ms,
            grace_period_ms: fields
                .get("grace_period")
                .and_then(|entry| self.within("grace_period", |walk| walk.duration(&entry.value))),
            concurrency: fields.get("concurrency").and_then(|entry| {
                let scope = scope::ready_job("concurrency", place.inputs, &names);
                self.within("concurrency", |walk| walk.concurrency(&entry.value, &scope))
            }),
            retry: fields.get("retry").and_then(|entry| self.within("retry", |walk| walk.retry(&entry.value))),
            runs_on: runs_on?,
            steps,
            groups,
            composites,
        })
    }

    /// What decides on the job, prepares it and follows it.
    fn around_steps(
        &mut self,
        fields: Fields<'_>,
        around: &Around<'_>,
        ids: &[String],
    ) -> (Vec<Rule>, Vec<Step>, Hooks) {
        let owner = around.owner();
        let rules = fields.get("rules").map_or_else(Vec::new, |entry| {
            let scope = scope::ready_job("rules", around.place.inputs, around.names);
            self.within("rules", |walk| walk.rules(&entry.value, &owner, &scope))
        });
        let init = fields.get("init").map_or_else(Vec::new, |entry| {
            let scope = around.scope("init", &[]);
            self.within("init", |walk| walk.init(&entry.value, &scope, around))
        });
        let hooks = fields.get("hooks").map_or_else(Hooks::default, |entry| {
            let scope = around.scope("hooks", ids);
            self.within("hooks", |walk| walk.hooks(&entry.value, &keys::JOB_HOOKS, &owner, &scope, around))
        });
        (rules, init, hooks)
    }

    /// The files that it restores, saves, takes and hands over.
    fn kept(&mut self, fields: Fields<'_>, around: &Around<'_>, ids: &[String]) -> (Vec<Cache>, Artifacts) {
        let cache = fields.get("cache").map_or_else(Vec::new, |entry| {
            let scope = around.scope("cache", &[]);
            self.within("cache", |walk| walk.caches(&entry.value, &around.owner(), &scope))
        });
        let artifacts = fields.get("artifacts").map_or_else(Artifacts::default, |entry| {
            self.within("artifacts", |walk| walk.artifacts(&entry.value, around, ids))
        });
        (cache, artifacts)
    }

    pub(super) fn description(&mut self, fields: Fields<'_>) -> Option<String> {
        let entry = fields.get("description")?;
        self.within("description", |walk| walk.fixed(&entry.value, "a text")).map(str::to_owned)
    }

    fn runs_on(&mut self, job: &Entry, fields: Fields<'_>, around: &Around<'_>) -> Option<Selector> {
        let defaults = around.place.defaults;
        if let Some(entry) = fields.get("runs_on") {
            let scope = scope::ready_job("runs_on", around.place.inputs, around.names);
            return self.within("runs_on", |walk| walk.selector(&entry.value, &scope));
        }
        if let Some(selector) = &defaults.runs_on {
            return Some(selector.clone());
        }
        // A misspelt or refused key says enough.
        let said = matches!(&job.value.data, Data::Map(entries) if entries.iter().any(|entry| {
            entry.key == "invoke" || keys::JOB.suggest(&entry.key) == Some("runs_on")
        }));
        if !said && !defaults.broken_runs_on {
            self.fault("K0101", job.span, format!("job `{}` has no `runs_on`", job.key))
                .help("add `runs_on: default`, or set it for all jobs under `defaults`");
        }
        None
    }

    fn job_steps(&mut self, job: &Entry, fields: Fields<'_>, around: &Around<'_>) -> Steps {
        match (fields.get("steps"), fields.get("run")) {
            (Some(_), Some(run)) => {
                let message = format!("job `{}` has both `steps` and `run`", job.key);
                self.fault("K0103", run.span, message).help("`run` is the short form of one step; keep one of them");
                Default::default()
            }
            (Some(steps), None) => self.within("steps", |walk| walk.steps(&steps.value, around)),
            (None, Some(run)) => {
                let script = self.within("run", |walk| walk.script(&run.value, "run"));
                let step = script.map(|script| self.bare_step(&run.value, script, around));
                Steps { steps: step.into_iter().collect(), ..Steps::default() }
            }
            (None, None) => {
                let said = matches!(&job.value.data, Data::Map(entries) if entries.iter().any(|entry| {
                    matches!(entry.key.as_str(), "generate" | "invoke")
                        || matches!(keys::JOB.suggest(&entry.key), Some("run" | "steps"))
                }));
                if !said {
                    self.fault("K0101", job.span, format!("job `{}` has no `steps`", job.key))
                        .expected(["`steps`, a list of scripts", "`run`, one script"]);
                }
                Default::default()
            }
        }
    }

    /// `max_parallel` and `fail_fast`, which only a matrix or hosts give a meaning.
    fn fan_out(&mut self, fields: Fields<'_>, job: &str) -> (Option<u32>, bool) {
        let fans = fields.get("matrix").is_some() || fields.get("runs_on_all").is_some();
        for key in ["max_parallel", "fail_fast"] {
            if let Some(entry) = fields.get(key).filter(|_| !fans) {
                let message = format!("`{key}` in job `{job}` has no effect without `matrix` or `runs_on_all`");
                self.within(key, |walk| {
                    walk.fault("K0104", entry.span, message).help("remove it, or add one of them");
                });
            }
        }
        let max_parallel = fields
            .get("max_parallel")
            .and_then(|entry| self.within("max_parallel", |walk| walk.int(&entry.value, 1, 4096)))
            .and_then(|limit| u32::try_from(limit).ok());
        let fail_fast =
            fields.get("fail_fast").and_then(|entry| self.within("fail_fast", |walk| walk.bool(&entry.value)));
        (max_parallel, fail_fast.unwrap_or_default())
    }

    fn checkout(&mut self, node: &Node) -> Checkout {
        match (&node.data, node.core()) {
            (Data::Scalar(..), Some(Core::Bool(enabled))) => Checkout { enabled, ..Checkout::default() },
            (Data::Map(_), _) => {
                let Some(fields) = self.fields(node, &keys::CHECKOUT, "`checkout`") else { return Checkout::default() };
                let depth = fields
                    .get("depth")
                    .and_then(|entry| self.within("depth", |walk| walk.int(&entry.value, 0, i64::from(u32::MAX))));
                let depth = depth.and_then(|depth| u32::try_from(depth).ok()).unwrap_or(1);
                Checkout { enabled: true, depth }
            }
            _ => {
                self.mismatch("K0202", node, "true, false or a map with `depth`");
                Checkout::default()
            }
        }
    }

    fn outputs(&mut self, fields: Fields<'_>, around: &Around<'_>, ids: &[String]) -> BTreeMap<String, Value> {
        let scope = scope::step("outputs", around.place.inputs, around.names, ids);
        if let Some(Data::Map(entries)) = fields.get("outputs").map(|entry| &entry.value.data) {
            self.outputs.extend(entries.iter().map(|entry| (around.job.to_owned(), entry.key.clone(), entry.span)));
        }
        self.outputs_in(fields, &scope)
    }

    /// `outputs` of a job or a step file.
    pub(super) fn outputs_in(&mut self, fields: Fields<'_>, scope: &Scope) -> BTreeMap<String, Value> {
        let mut outputs = BTreeMap::new();
        let Some(entry) = fields.get("outputs") else { return outputs };
        self.within("outputs", |walk| {
            for entry in walk.map(&entry.value).unwrap_or_default() {
                walk.within(&entry.key, |walk| {
                    let legal = super::is_job_name(&entry.key.to_ascii_lowercase()) || super::is_variable(&entry.key);
                    if !legal {
                        walk.fault("K0206", entry.span, format!("`{}` is not a name for an output", entry.key))
                            .expected(["up to 64 letters, digits, `_` and `-`"]);
                    }
                    if let Some(value) = walk.agent_template(&entry.value, scope) {
                        outputs.insert(entry.key.clone(), value);
                    }
                });
            }
        });
        outputs
    }
}
