//! `generate` and `invoke`: jobs that make jobs, and jobs that start workflows.

use serde_json::Value as Json;

use crate::labels::{MAX_MATCHERS, parse_term};
use crate::lock::{Allow, Generate, Invoke, Matcher, Step, Value};
use crate::yaml::{Core, Data, Entry, Node};

use super::job::Place;
use super::keys;
use super::scope::{self, JobNames};
use super::step::Around;
use super::walk::{Fields, Walk};

/// Most names in a list of `allow`.
const MAX_ALLOWED: usize = 256;
/// What a job may be; exactly one.
const BODIES: [&str; 4] = ["steps", "generate", "invoke", "run"];
/// Keys of a job that only an agent gives a meaning.
const OF_AGENT: [&str; 15] = [
    "artifacts",
    "cache",
    "checkout",
    "container",
    "env",
    "git_credentials",
    "grace_period",
    "hooks",
    "init",
    "outputs",
    "resources",
    "retry",
    "runs_on",
    "runs_on_all",
    "services",
];

impl Walk<'_> {
    /// The one key of a job that says what it does; others are faults.
    pub(super) fn body<'n>(&mut self, job: &str, fields: Fields<'n>) -> Option<&'n Entry> {
        let mut found = BODIES.into_iter().filter_map(|key| fields.get(key));
        let first = found.next()?;
        for second in found {
            let message = format!("job `{job}` has both `{}` and `{}`", first.key, second.key);
            let help = match (first.key.as_str(), second.key.as_str()) {
                ("steps", "run") => "`run` is the short form of one step; keep one of them",
                _ => "a job does one thing; keep one of them",
            };
            self.within(&second.key, |walk| {
                walk.fault("K0103", second.span, message).help(help);
            });
        }
        Some(first)
    }

    /// `generate`, with the step that writes the jobs.
    pub(super) fn generate(
        &mut self,
        entry: &Entry,
        fields: Fields<'_>,
        around: &Around<'_>,
    ) -> Option<(Generate, Step)> {
        let job = around.job;
        if around.place.member {
            self.within("generate", |walk| {
                walk.fault("K0605", entry.span, format!("job `{job}` was generated and may not generate others"));
            });
            return None;
        }
        for key in ["matrix", "runs_on_all"] {
            let Some(other) = fields.get(key) else { continue };
            self.within(key, |walk| {
                walk.fault("K0103", other.span, format!("job `{job}` has both `generate` and `{key}`"))
                    .help("one job makes the jobs of a group; give them a matrix instead");
            });
        }
        self.within("generate", |walk| {
            let owner = format!("`generate` of job `{job}`");
            let fields = walk.fields(&entry.value, &keys::GENERATE, &owner)?;
            let group = match fields.get("group") {
                Some(entry) => walk.within("group", |walk| walk.group_name(&entry.value)),
                None => Some(job.to_owned()),
            };
            let taken = group.iter().find(|group| around.place.known.generators(group).any(|other| other != job));
            if let Some(group) = taken {
                let place = fields.get("group").map_or(entry.span, |entry| entry.value.span);
                walk.fault("K0304", place, format!("group `{group}` is made by another job too"));
            }
            let allow = match fields.get("allow") {
                Some(entry) => walk.within("allow", |walk| walk.allow(&entry.value)),
                None => Allow::default(),
            };
            let shell = fields.get("shell").and_then(|entry| walk.within("shell", |walk| walk.shell(&entry.value)));
            let Some(run) = fields.get("run") else {
                walk.fault("K0101", entry.span, format!("{owner} has no `run`"))
                    .expected(["`run`, a script that writes `{\"jobs\": […]}` to $KICI_JOBS"]);
                return None;
            };
            let script = walk.within("run", |walk| walk.script(&run.value, "run"))?;
            let mut step = walk.bare_step(&run.value, script, around);
            step.shell = shell.or(step.shell);
            Some((Generate { group: group?, allow, members: None }, step))
        })
    }

    fn group_name(&mut self, node: &Node) -> Option<String> {
        let name = self.fixed(node, "the name of a group")?;
        if !super::is_job_name(name) {
            self.fault("K0206", node.span, format!("`{}` is not a name for a group", crate::yaml::shorten(name)))
                .expected(["up to 64 of a-z, 0-9, `_` and `-`, starting with a letter or digit"]);
            return None;
        }
        Some(name.to_owned())
    }

    fn allow(&mut self, node: &Node) -> Allow {
        let Some(fields) = self.fields(node, &keys::ALLOW, "`allow`") else { return Allow::default() };
        let mut names = |key: &str, what: &str| {
            let Some(entry) = fields.get(key) else { return Vec::new() };
            self.within(key, |walk| {
                let items = walk.one_or_list(&entry.value, what).unwrap_or_default();
                if !walk.bounded(items.len(), MAX_ALLOWED, "names", entry.value.span) {
                    return Vec::new();
                }
                items.iter().filter_map(|item| walk.fixed(item, what).map(str::to_owned)).collect()
            })
        };
        let (environments, secrets) = (names("environments", "an environment"), names("secrets", "a secret"));
        let runs_on = fields.get("runs_on").map(|entry| self.within("runs_on", |walk| walk.allowed(&entry.value)));
        Allow { environments, secrets, runs_on }
    }

    fn allowed(&mut self, node: &Node) -> Vec<Matcher> {
        let items = self.one_or_list(node, "a label").unwrap_or_default();
        if !self.bounded(items.len(), MAX_MATCHERS, "labels", node.span) {
            return Vec::new();
        }
        let mut allowed = Vec::new();
        for item in items {
            let Some(text) = self.fixed(item, "a label") else { continue };
            match parse_term(text) {
                Ok(term) if !term.exclude => allowed.push(term.matcher),
                Ok(_) => {
                    self.fault("K0504", item.span, "`!` has no meaning here: what is not listed is not allowed");
                }
                Err(error) => {
                    self.fault("K0504", item.span, error.to_string());
                }
            }
        }
        allowed
    }

    /// `invoke`; keys beside it that need an agent are faults.
    pub(super) fn invoke(
        &mut self,
        entry: &Entry,
        fields: Fields<'_>,
        job: &str,
        names: &JobNames,
        place: &Place<'_>,
    ) -> Option<Invoke> {
        for other in OF_AGENT.into_iter().filter_map(|key| fields.get(key)) {
            self.within(&other.key, |walk| {
                walk.fault(
                    "K0104",
                    other.span,
                    format!("`{}` beside `invoke` in job `{job}` has no effect", other.key),
                )
                .help("no agent runs it; say it in the workflow that is started");
            });
        }
        self.within("invoke", |walk| {
            let owner = format!("`invoke` of job `{job}`");
            let fields = walk.fields(&entry.value, &keys::INVOKE, &owner)?;
            let optional = match fields.get("optional") {
                Some(entry) => walk.within("optional", |walk| walk.bool(&entry.value)),
                None => Some(false),
            };
            let scope = scope::ready_job("invoke", place.inputs, names);
            let payload = match fields.get("payload") {
                Some(entry) => walk.within("payload", |walk| walk.document(&entry.value, &scope)),
                None => Some(Json::Object(Default::default())),
            };
            if let Some(entry) = fields.get("payload").filter(|entry| !matches!(entry.value.data, Data::Map(_))) {
                let null = entry.value.core() == Some(Core::Null);
                walk.within("payload", |walk| {
                    let fault = walk.mismatch("K0201", &entry.value, "a map");
                    if null {
                        fault.help("leave `payload` out");
                    }
                });
            }
            let Some(entry) = fields.get("event") else {
                walk.fault("K0101", entry.span, format!("{owner} has no `event`"))
                    .expected(["`event`, the name of an event that other workflows of the repository listen to"]);
                return None;
            };
            let event = walk.within("event", |walk| match walk.template(&entry.value, &scope)? {
                Value::Static { .. } => walk.event_name(&entry.value).map(Value::fixed),
                template => Some(template),
            });
            Some(Invoke { event: event?, payload: payload?, optional: optional? })
        })
    }
}
