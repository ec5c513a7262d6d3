//! What a step does besides running a script, and when it is tried again.

use serde_json::Value as Json;

use crate::expr::Scope;
use crate::lock::{Action, Backoff, Check, Emit, Probe, StepRetry, Value, WaitFor};
use crate::yaml::{Core, Data, Entry, Node};

use super::keys;
use super::step::Around;
use super::walk::{Fields, Walk};

const DEFAULT_INTERVAL_MS: u64 = 5_000;
const DEFAULT_WAIT_MS: u64 = 10 * 60 * 1000;
const DEFAULT_DELAY_MS: u64 = 1_000;
const DEFAULT_MAX_DELAY_MS: u64 = 30_000;
const MAX_ATTEMPTS: i64 = 100;

impl Walk<'_> {
    pub(super) fn check(&mut self, fields: Fields<'_>, entry: &Entry, owner: &str) -> Option<Action> {
        let script = self.within("check", |walk| walk.script(&entry.value, "check"));
        let apply = match fields.get("apply") {
            Some(entry) => self.within("apply", |walk| walk.script(&entry.value, "apply")),
            None => {
                self.fault("K0101", entry.span, format!("{owner} has `check` but no `apply`"))
                    .expected(["`apply`, the script that repairs what `check` found"]);
                None
            }
        };
        let when_in_sync = fields
            .get("when_in_sync")
            .and_then(|entry| self.within("when_in_sync", |walk| walk.script(&entry.value, "when_in_sync")));
        let drift_exit_code = fields
            .get("drift_exit_code")
            .and_then(|entry| self.within("drift_exit_code", |walk| walk.int(&entry.value, 1, 255)))
            .and_then(|code| i32::try_from(code).ok());
        Some(Action::Check(Check { script: script?, apply: apply?, when_in_sync, drift_exit_code }))
    }

    pub(super) fn wait_for(
        &mut self,
        fields: Fields<'_>,
        entry: &Entry,
        owner: &str,
        before: &[String],
        around: &Around<'_>,
    ) -> Option<Action> {
        for (key, help) in
            [("timeout", "`wait_for` has its own `timeout`"), ("retry", "`wait_for` asks again by itself")]
        {
            if let Some(entry) = fields.get(key) {
                self.within(key, |walk| {
                    walk.fault("K0104", entry.span, format!("`{key}` beside `wait_for` in {owner} has no effect"))
                        .help(help);
                });
            }
        }
        self.within("wait_for", |walk| {
            let fields = walk.fields(&entry.value, &keys::WAIT_FOR, &format!("`wait_for` of {owner}"))?;
            let probe = match (fields.get("run"), fields.get("url")) {
                (Some(run), None) => walk.within("run", |walk| walk.script(&run.value, "run")).map(Probe::Run),
                (None, Some(url)) => {
                    let scope = around.scope("wait_for", before);
                    walk.within("url", |walk| walk.url(&url.value, &scope)).map(Probe::Url)
                }
                (Some(_), Some(url)) => {
                    walk.fault("K0103", url.span, format!("`wait_for` of {owner} has both `run` and `url`"))
                        .help("it asks one thing; keep one of them");
                    None
                }
                (None, None) => {
                    walk.fault("K0101", entry.span, format!("`wait_for` of {owner} asks nothing"))
                        .expected(["`run`, a script that exits with 0", "`url`, an address that answers with 2xx"]);
                    None
                }
            };
            let mut time = |key: &str, default: u64| match fields.get(key) {
                Some(entry) => walk.within(key, |walk| walk.duration(&entry.value)),
                None => Some(default),
            };
            let (interval, timeout) = (time("interval", DEFAULT_INTERVAL_MS), time("timeout", DEFAULT_WAIT_MS));
            Some(Action::WaitFor(WaitFor { probe: probe?, interval_ms: interval?, timeout_ms: timeout? }))
        })
    }

    pub(super) fn emit(
        &mut self,
        fields: Fields<'_>,
        entry: &Entry,
        owner: &str,
        before: &[String],
        around: &Around<'_>,
    ) -> Option<Action> {
        for (key, help) in [
            ("retry", "an event is sent until it is stored; what is refused once is refused again"),
            ("shell", "`emit` runs no script"),
            ("working_directory", "`emit` runs no script"),
        ] {
            if let Some(entry) = fields.get(key) {
                self.within(key, |walk| {
                    walk.fault("K0104", entry.span, format!("`{key}` beside `emit` in {owner} has no effect"))
                        .help(help);
                });
            }
        }
        self.within("emit", |walk| {
            let fields = walk.fields(&entry.value, &keys::EMIT, &format!("`emit` of {owner}"))?;
            let scope = around.scope("emit", before);
            let payload = match fields.get("payload") {
                Some(entry) => walk.within("payload", |walk| walk.document(&entry.value, &scope)),
                None => Some(Json::Object(Default::default())),
            };
            let target_repos = match fields.get("target") {
                Some(entry) => walk.within("target", |walk| walk.emit_target(&entry.value, owner)),
                None => Vec::new(),
            };
            let Some(entry) = fields.get("event") else {
                walk.fault("K0101", entry.span, format!("`emit` of {owner} has no `event`"))
                    .expected(["`event`, the name of the event"]);
                return None;
            };
            let event = walk.within("event", |walk| match walk.agent_template(&entry.value, &scope)? {
                Value::Static { .. } => walk.event_name(&entry.value).map(Value::fixed),
                template => Some(template),
            });
            Some(Action::Emit(Emit { event: event?, payload: payload?, target_repos }))
        })
    }

    fn emit_target(&mut self, node: &Node, owner: &str) -> Vec<String> {
        let Some(fields) = self.fields(node, &keys::EMIT_TARGET, &format!("`emit.target` of {owner}")) else {
            return Vec::new();
        };
        fields.get("repos").map(|entry| self.within("repos", |walk| walk.patterns(&entry.value))).unwrap_or_default()
    }

    /// A document whose texts are templates.
    pub(super) fn document(&mut self, node: &Node, scope: &Scope) -> Option<Json> {
        match &node.data {
            Data::Map(entries) => {
                let mut fields = serde_json::Map::new();
                for entry in entries {
                    let value = self.within(&entry.key, |walk| walk.document(&entry.value, scope));
                    fields.extend(value.map(|value| (entry.key.clone(), value)));
                }
                Some(Json::Object(fields))
            }
            Data::List(items) => {
                let read = |(at, item): (usize, &Node)| self.within(at.to_string(), |walk| walk.document(item, scope));
                Some(Json::Array(items.iter().enumerate().filter_map(read).collect()))
            }
            Data::Scalar(..) => match node.core() {
                Some(Core::Null) => Some(Json::Null),
                Some(Core::Bool(value)) => Some(Json::Bool(value)),
                Some(Core::Int(value)) => Some(Json::from(value)),
                Some(Core::Float(value)) => Some(Json::from(value)),
                _ => Some(Json::String(match self.template(node, scope)? {
                    Value::Static { r#static } => r#static,
                    Value::Template { template, .. } => template,
                })),
            },
        }
    }

    fn url(&mut self, node: &Node, scope: &Scope) -> Option<Value> {
        let value = self.agent_template(node, scope)?;
        if let Value::Static { r#static: text } = &value
            && !(text.starts_with("http://") || text.starts_with("https://"))
        {
            self.fault("K0205", node.span, format!("`{}` is not a web address", crate::yaml::shorten(text)))
                .expected(["an address with http:// or https://"]);
            return None;
        }
        Some(value)
    }

    /// `retry` of a step: how often in all, or a map.
    pub(super) fn step_retry(&mut self, node: &Node, owner: &str) -> Option<StepRetry> {
        let of = |attempts: i64| StepRetry {
            attempts: u32::try_from(attempts).unwrap_or(1),
            delay_ms: DEFAULT_DELAY_MS,
            backoff: Backoff::Exponential,
            max_delay_ms: DEFAULT_MAX_DELAY_MS,
            on_exit: Vec::new(),
        };
        if !matches!(node.data, Data::Map(_)) {
            return Some(of(self.int(node, 1, MAX_ATTEMPTS)?));
        }
        let fields = self.fields(node, &keys::STEP_RETRY, &format!("`retry` of {owner}"))?;
        let Some(attempts) = fields.get("attempts") else {
            self.fault("K0101", node.span, format!("`retry` of {owner} has no `attempts`"))
                .expected(["`attempts`, how often it is tried at most"]);
            return None;
        };
        let attempts = self.within("attempts", |walk| walk.int(&attempts.value, 1, MAX_ATTEMPTS));
        let mut retry = of(attempts.unwrap_or(1));
        if let Some(entry) = fields.get("delay") {
            retry.delay_ms = self.within("delay", |walk| walk.duration(&entry.value))?;
            retry.max_delay_ms = retry.max_delay_ms.max(retry.delay_ms);
        }
        if let Some(entry) = fields.get("max_delay") {
            let limit = self.within("max_delay", |walk| walk.duration(&entry.value))?;
            if limit < retry.delay_ms {
                self.fault("K0205", entry.value.span, format!("`max_delay` of {owner} is shorter than `delay`"))
                    .expected(["at least `delay`"]);
            }
            retry.max_delay_ms = limit;
        }
        if let Some(entry) = fields.get("backoff") {
            let word = self.within("backoff", |walk| walk.word(&entry.value, &["exponential", "fixed"]))?;
            retry.backoff = if word == "fixed" { Backoff::Fixed } else { Backoff::Exponential };
        }
        if let Some(entry) = fields.get("on_exit") {
            retry.on_exit = self.within("on_exit", |walk| walk.exit_codes(&entry.value));
        }
        attempts.map(|_| retry)
    }

    fn exit_codes(&mut self, node: &Node) -> Vec<i32> {
        let items = self.one_or_list(node, "an exit code").unwrap_or_default();
        if !self.bounded(items.len(), 255, "exit codes", node.span) {
            return Vec::new();
        }
        let codes: Vec<Option<i64>> = items.iter().map(|item| self.int(item, 1, 255)).collect();
        codes.into_iter().flatten().filter_map(|code| i32::try_from(code).ok()).collect()
    }
}
