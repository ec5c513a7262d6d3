//! Jobs.

use std::collections::BTreeMap;

use crate::expr::Scope;
use crate::lock::{
    Artifacts, Cache, Checkout, Container, Environments, Generate, Hooks, Invoke, Job, Retry, Rule, Selector, Shell,
    SourceRef, Step, Value,
};
use crate::yaml::{Core, Data, Entry, Node};

use super::keys;
use super::known::Known;
use super::matrix::matrix_keys;
use super::needs::Needs;
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
    pub(super) container: Option<Container>,
    pub(super) retry: Option<Retry>,
}

/// What the jobs of a workflow share.
pub(super) struct Place<'a> {
    pub(super) defaults: &'a Defaults,
    pub(super) inputs: &'a Inputs,
    pub(super) known: &'a Known,
    /// Its jobs are generated.
    pub(super) member: bool,
}

/// What the needed jobs and groups show.
fn need_names(needs: &Needs, known: &Known) -> BTreeMap<String, NeedNames> {
    let jobs = needs.jobs.iter().map(|need| (need.job.clone(), known.job(&need.job).cloned().unwrap_or_default()));
    let open = NeedNames { open: true, ..NeedNames::default() };
    jobs.chain(needs.groups.iter().map(|need| (need.group.clone(), open.clone()))).collect()
}

/// What a job does.
#[derive(Default)]
struct Body {
    steps: Steps,
    generate: Option<Generate>,
    invoke: Option<Invoke>,
}

impl Walk<'_> {
    /// The edges of a job, which matter also where the rest is faulty, and the job.
    pub(super) fn job(&mut self, entry: &Entry, place: &Place<'_>) -> (Needs, Option<Job>) {
        let Some(fields) = self.fields(&entry.value, &keys::JOB, &format!("job `{}`", entry.key)) else {
            return Default::default();
        };
        let needs = match fields.get("needs") {
            Some(needs) => self.within("needs", |walk| walk.needs(&needs.value, &entry.key, place.known)),
            None => Needs::default(),
        };
        let job = self.job_body(entry, fields, needs.clone(), place);
        (needs, job)
    }

    fn job_body(&mut self, entry: &Entry, fields: Fields<'_>, needs: Needs, place: &Place<'_>) -> Option<Job> {
        let name = entry.key.as_str();
        let names = JobNames {
            matrix: matrix_keys(fields.get("matrix").map(|entry| &entry.value)),
            hosts: fields.get("runs_on_all").is_some(),
            needs: need_names(&needs, place.known),
        };
        let around = Around { place, names: &names, job: name };
        let matrix = fields.get("matrix").and_then(|entry| {
            let scope = scope::workflow("matrix", place.inputs);
            self.within("matrix", |walk| walk.matrix(&entry.value, &scope))
        });
        let hosts = self.hosts(entry, fields);
        let runs_on = if fields.get("runs_on_all").is_some() || fields.get("invoke").is_some() {
            Some(Selector::default())
        } else {
            self.runs_on(entry, fields, &around)
        };
        let Body { steps: Steps { steps, groups, composites, ids }, generate, invoke } =
            self.job_body_of(entry, fields, &around);
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
        let container = match fields.get("container") {
            Some(entry) => {
                let scope = scope::ready_job("container", place.inputs, &names);
                self.within("container", |walk| walk.container(&entry.value, &scope))
            }
            None => place.defaults.container.clone().filter(|_| fields.get("invoke").is_none()),
        };
        let environments = fields.get("environment").map_or_else(Environments::default, |entry| {
            let scope = scope::ready_job("environment", place.inputs, &names);
            self.within("environment", |walk| walk.environment(&entry.value, &scope))
        });
        let secrets = fields.get("secrets").map(|entry| self.within("secrets", |walk| walk.secrets(&entry.value)));
        let approval = fields.get("approval").and_then(|entry| {
            self.within("approval", |walk| walk.approval(&entry.value, &keys::APPROVAL, &around.owner()))
        });
        Some(Job {
            name: name.to_owned(),
            display_name: fields.get("name").and_then(|entry| {
                let scope = scope::planned_job("name", place.inputs, &names);
                self.within("name", |walk| walk.template(&entry.value, &scope))
            }),
            description: self.description(fields),
            source: SourceRef { file: self.file.to_owned(), line: entry.span.start.line },
            needs: needs.jobs,
            needs_groups: needs.groups,
            generate,
            invoke,
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
            environments,
            secrets: secrets.unwrap_or_default(),
            approval,
            checkout: match fields.get("checkout") {
                Some(entry) => {
                    let scope = scope::ready_job("checkout", place.inputs, &names);
                    self.within("checkout", |walk| walk.checkout(&entry.value, &scope))
                }
                None => Checkout::default(),
            },
            git_credentials: fields
                .get("git_credentials")
                .and_then(|entry| self.within("git_credentials", |walk| walk.git_credentials(&entry.value))),
            container,
            services: fields.get("services").map_or_else(BTreeMap::new, |entry| {
                let scope = scope::ready_job("services", place.inputs, &names);
                self.within("services", |walk| walk.services(&entry.value, &scope))
            }),
            resources: fields
                .get("resources")
                .and_then(|entry| self.within("resources", |walk| walk.resources(&entry.value))),
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
            retry: match fields.get("retry") {
                Some(entry) => self.within("retry", |walk| walk.retry(&entry.value)),
                None => place.defaults.retry.clone().filter(|_| fields.get("invoke").is_none()),
            },
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
            keys::JOB.suggest(&entry.key) == Some("runs_on")
        }));
        if !said && !defaults.broken_runs_on {
            self.fault("K0101", job.span, format!("job `{}` has no `runs_on`", job.key))
                .help("add `runs_on: default`, or set it for all jobs under `defaults`");
        }
        None
    }

    fn job_body_of(&mut self, job: &Entry, fields: Fields<'_>, around: &Around<'_>) -> Body {
        let mut body = Body::default();
        let Some(entry) = self.body(&job.key, fields) else {
            let said = matches!(&job.value.data, Data::Map(entries) if entries.iter().any(|entry| {
                matches!(keys::JOB.suggest(&entry.key), Some("run" | "steps" | "generate" | "invoke"))
            }));
            if !said {
                self.fault("K0101", job.span, format!("job `{}` has no `steps`", job.key)).expected([
                    "`steps`, a list of scripts",
                    "`run`, one script",
                    "`generate`, a script that makes jobs",
                    "`invoke`, an event for other workflows",
                ]);
            }
            return body;
        };
        match entry.key.as_str() {
            "steps" => body.steps = self.within("steps", |walk| walk.steps(&entry.value, around)),
            "run" => {
                let script = self.within("run", |walk| walk.script(&entry.value, "run"));
                let step = script.map(|script| self.bare_step(&entry.value, script, around));
                body.steps.steps.extend(step);
            }
            "generate" => {
                if let Some((generate, step)) = self.generate(entry, fields, around) {
                    body.generate = Some(generate);
                    body.steps.steps.push(step);
                }
            }
            _ => body.invoke = self.invoke(entry, fields, &job.key, around.names, around.place),
        }
        body
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

    fn checkout(&mut self, node: &Node, scope: &Scope) -> Checkout {
        match (&node.data, node.core()) {
            (Data::Scalar(..), Some(Core::Bool(enabled))) => Checkout { enabled, ..Checkout::default() },
            (Data::Map(_), _) => {
                let Some(fields) = self.fields(node, &keys::CHECKOUT, "`checkout`") else { return Checkout::default() };
                let depth = fields
                    .get("depth")
                    .and_then(|entry| self.within("depth", |walk| walk.int(&entry.value, 0, i64::from(u32::MAX))));
                let mut flag = |key: &str| {
                    let entry = fields.get(key);
                    entry.and_then(|entry| self.within(key, |walk| walk.bool(&entry.value))).unwrap_or_default()
                };
                let (submodules, lfs, tags) = (flag("submodules"), flag("lfs"), flag("tags"));
                let scope_of = |key: &str| Scope { key: key.to_owned(), ..scope.clone() };
                Checkout {
                    enabled: true,
                    depth: depth.and_then(|depth| u32::try_from(depth).ok()).unwrap_or(1),
                    submodules,
                    lfs,
                    tags,
                    path: fields
                        .get("path")
                        .and_then(|entry| self.within("path", |walk| walk.directory(&entry.value, &scope_of("path")))),
                    git_ref: fields
                        .get("ref")
                        .and_then(|entry| self.within("ref", |walk| walk.git_ref(&entry.value, &scope_of("ref")))),
                }
            }
            _ => {
                self.mismatch("K0202", node, "true, false or a map with `depth`");
                Checkout::default()
            }
        }
    }

    /// A branch, tag or commit of the job's repository.
    fn git_ref(&mut self, node: &Node, scope: &Scope) -> Option<Value> {
        let value = self.template(node, scope)?;
        if let Value::Static { r#static: text } = &value
            && !is_ref(text)
        {
            self.fault("K0205", node.span, format!("`{}` is not a branch, tag or commit", crate::yaml::shorten(text)))
                .expected(["a name such as `main`, `refs/tags/v1` or a commit"]);
            return None;
        }
        Some(value)
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

/// What git takes as a name, without what could be read as an option or as more than one.
pub(crate) fn is_ref(text: &str) -> bool {
    (1..=255).contains(&text.len())
        && !text.starts_with(['-', '/', '.'])
        && !text.ends_with(['/', '.'])
        && !text.contains("..")
        && !text.contains("@{")
        && !text.contains("//")
        && text
            .chars()
            .all(|c| !c.is_control() && !c.is_whitespace() && !matches!(c, '~' | '^' | ':' | '?' | '*' | '[' | '\\'))
}
