//! `cache` and `artifacts`.

use crate::cache::{
    BadText, CachePath, MAX_ARTIFACTS, MAX_CACHES, MAX_PATHS, MAX_RESTORE_KEYS, artifact_pattern, below,
    check_artifact_name, check_key,
};
use crate::expr::Scope;
use crate::lock::{Artifacts, Cache, Download, IfEmpty, KeepWhen, Upload, Value};
use crate::yaml::{Data, Node};

use super::keys::{self, nearest};
use super::step::Around;
use super::walk::{Fields, Walk};

/// How a text without expressions is judged; one with expressions is judged once it is rendered.
type Judge = fn(&str) -> Result<(), BadText>;

impl Walk<'_> {
    /// `cache`: a map or a list of them.
    pub(super) fn caches(&mut self, node: &Node, owner: &str, scope: &Scope) -> Vec<Cache> {
        let items = match &node.data {
            Data::Map(_) => std::slice::from_ref(node),
            Data::List(items) => items,
            Data::Scalar(..) => {
                self.mismatch("K0201", node, "a map with `key` and `paths`, or a list of them");
                return Vec::new();
            }
        };
        if !self.bounded(items.len(), MAX_CACHES, "caches", node.span) {
            return Vec::new();
        }
        let one = |(index, item): (usize, &Node)| {
            self.within(index.to_string(), |walk| walk.cache(item, &format!("`cache` of {owner}"), scope))
        };
        items.iter().enumerate().filter_map(one).collect()
    }

    fn cache(&mut self, node: &Node, owner: &str, scope: &Scope) -> Option<Cache> {
        let fields = self.fields(node, &keys::CACHE, owner)?;
        let key = self.required_text(node, fields, "key", owner, scope, check_key);
        let paths = self.required_list(node, fields, "paths", owner, scope, |text| CachePath::parse(text).map(drop));
        let restore_keys = match fields.get("restore_keys") {
            Some(entry) => self.within("restore_keys", |walk| {
                walk.stored_texts(&entry.value, ("a key", MAX_RESTORE_KEYS, "restore_keys"), scope, check_key)
            }),
            None => Vec::new(),
        };
        let when = fields
            .get("when")
            .and_then(|entry| self.within("when", |walk| walk.word(&entry.value, &["success", "always"])));
        let required = fields.get("required").and_then(|entry| self.within("required", |walk| walk.bool(&entry.value)));
        Some(Cache {
            key: key?,
            paths: paths?,
            restore_keys,
            when: if when == Some("always") { KeepWhen::Always } else { KeepWhen::Success },
            required: required.unwrap_or_default(),
            source: self.source(node),
        })
    }

    /// `artifacts` of a job.
    pub(super) fn artifacts(&mut self, node: &Node, around: &Around<'_>, ids: &[String]) -> Artifacts {
        let owner = around.owner();
        let Some(fields) = self.fields(node, &keys::ARTIFACTS, &format!("`artifacts` of {owner}")) else {
            return Artifacts::default();
        };
        let upload = match fields.get("upload") {
            Some(entry) => self.artifact_list(&entry.value, "upload", |walk, item| {
                walk.upload(item, &format!("`artifacts.upload` of {owner}"), &around.scope("artifacts", ids))
            }),
            None => Vec::new(),
        };
        let download = match fields.get("download") {
            Some(entry) => self.artifact_list(&entry.value, "download", |walk, item| {
                walk.download(item, &format!("`artifacts.download` of {owner}"), around)
            }),
            None => Vec::new(),
        };
        self.same_names(fields, &upload);
        Artifacts { upload, download }
    }

    fn artifact_list<T>(
        &mut self,
        node: &Node,
        key: &str,
        mut one: impl FnMut(&mut Self, &Node) -> Option<T>,
    ) -> Vec<T> {
        self.within(key, |walk| {
            let items = walk.list(node, "maps with `name`").unwrap_or_default();
            if !walk.bounded(items.len(), MAX_ARTIFACTS, "artifacts", node.span) {
                return Vec::new();
            }
            let each = |(index, item): (usize, &Node)| walk.within(index.to_string(), |walk| one(walk, item));
            items.iter().enumerate().filter_map(each).collect()
        })
    }

    fn upload(&mut self, node: &Node, owner: &str, scope: &Scope) -> Option<Upload> {
        let fields = self.fields(node, &keys::UPLOAD, owner)?;
        let name = self.required_text(node, fields, "name", owner, scope, check_artifact_name);
        let paths = self.required_list(node, fields, "paths", owner, scope, |text| artifact_pattern(text).map(drop));
        let expire_in_ms =
            fields.get("expire_in").and_then(|entry| self.within("expire_in", |walk| walk.duration(&entry.value)));
        let if_empty = fields
            .get("if_empty")
            .and_then(|entry| self.within("if_empty", |walk| walk.word(&entry.value, &["warn", "fail", "ignore"])));
        let when = fields
            .get("when")
            .and_then(|entry| self.within("when", |walk| walk.word(&entry.value, &["success", "failure", "always"])));
        Some(Upload {
            name: name?,
            paths: paths?,
            expire_in_ms,
            if_empty: match if_empty {
                Some("fail") => IfEmpty::Fail,
                Some("ignore") => IfEmpty::Ignore,
                _ => IfEmpty::Warn,
            },
            when: match when {
                Some("failure") => KeepWhen::Failure,
                Some("always") => KeepWhen::Always,
                _ => KeepWhen::Success,
            },
            source: self.source(node),
        })
    }

    fn download(&mut self, node: &Node, owner: &str, around: &Around<'_>) -> Option<Download> {
        let scope = around.scope("artifacts", &[]);
        let fields = self.fields(node, &keys::DOWNLOAD, owner)?;
        let name = self.required_text(node, fields, "name", owner, &scope, check_artifact_name);
        let from = fields.get("from").and_then(|entry| {
            self.within("from", |walk| {
                let from = walk.fixed(&entry.value, "the name of a job")?;
                let needed = || around.names.needs.keys().map(String::as_str);
                if !needed().any(|job| job == from) {
                    let suggestion = nearest(from, needed()).map(str::to_owned);
                    let message = format!("{owner} takes from job `{from}`, which is not in its `needs`");
                    walk.fault("K0307", entry.value.span, message)
                        .help("a job that is not needed may run later; add it to `needs`")
                        .replace(suggestion);
                    return None;
                }
                Some(from.to_owned())
            })
        });
        let path = fields.get("path").and_then(|entry| {
            self.within("path", |walk| walk.stored_text(&entry.value, &scope, |text| below(text).map(drop)))
        });
        if (fields.get("from").is_some() && from.is_none()) || (fields.get("path").is_some() && path.is_none()) {
            return None;
        }
        Some(Download { name: name?, from, path, source: self.source(node) })
    }

    /// Two uploads of one name: the second would fail, after all steps ran.
    fn same_names(&mut self, fields: Fields<'_>, uploads: &[Upload]) {
        let Some(Data::List(items)) = fields.get("upload").map(|entry| &entry.value.data) else { return };
        for (at, upload) in uploads.iter().enumerate().filter(|(_, upload)| matches!(upload.name, Value::Static { .. }))
        {
            if uploads[..at].iter().any(|earlier| earlier.name == upload.name) {
                let span = items.iter().find(|item| item.span.start.line == upload.source.line).map_or_else(
                    || fields.get("upload").map_or_else(Default::default, |entry| entry.value.span),
                    |item| item.span,
                );
                self.within("upload", |walk| {
                    walk.fault("K0303", span, "two artifacts of one job have the same name")
                        .help("an artifact is found by its name; give each its own");
                });
            }
        }
    }

    fn required_text(
        &mut self,
        node: &Node,
        fields: Fields<'_>,
        key: &str,
        owner: &str,
        scope: &Scope,
        judge: Judge,
    ) -> Option<Value> {
        match fields.get(key) {
            Some(entry) => self.within(key, |walk| walk.stored_text(&entry.value, scope, judge)),
            None => {
                self.fault("K0101", node.span, format!("{owner} has no `{key}`"));
                None
            }
        }
    }

    fn required_list(
        &mut self,
        node: &Node,
        fields: Fields<'_>,
        key: &str,
        owner: &str,
        scope: &Scope,
        judge: Judge,
    ) -> Option<Vec<Value>> {
        let Some(entry) = fields.get(key) else {
            self.fault("K0101", node.span, format!("{owner} has no `{key}`"));
            return None;
        };
        let before = self.errors;
        let values =
            self.within(key, |walk| walk.stored_texts(&entry.value, ("a path", MAX_PATHS, "paths"), scope, judge));
        if values.is_empty() && self.errors == before {
            self.within(key, |walk| {
                walk.fault("K0205", entry.value.span, format!("`{key}` of {owner} is empty"))
                    .expected(["at least one path"]);
            });
        }
        (self.errors == before).then_some(values)
    }

    fn stored_texts(
        &mut self,
        node: &Node,
        (of, most, what): (&str, usize, &str),
        scope: &Scope,
        judge: Judge,
    ) -> Vec<Value> {
        let items = self.one_or_list(node, of).unwrap_or_default();
        if !self.bounded(items.len(), most, what, node.span) {
            return Vec::new();
        }
        let one =
            |(index, item): (usize, &Node)| self.within(index.to_string(), |walk| walk.stored_text(item, scope, judge));
        items.iter().enumerate().filter_map(one).collect()
    }

    fn stored_text(&mut self, node: &Node, scope: &Scope, judge: Judge) -> Option<Value> {
        let value = self.agent_template(node, scope)?;
        if let Value::Static { r#static: text } = &value
            && let Err(error) = judge(text)
        {
            let leaves = text.starts_with('/') || text.split('/').any(|part| part == "..");
            let code = if leaves { "K0603" } else { "K0205" };
            let shown = crate::yaml::shorten(text).escape_debug().to_string();
            self.fault(code, node.span, format!("`{shown}`: {error}"));
            return None;
        }
        Some(value)
    }
}
