//! What jobs keep and hand over: `actions/cache`, `actions/upload-artifact`, `actions/download-artifact`. There they are steps,
//! here they belong to the job: taken before its steps, kept after them.

use std::collections::BTreeMap;

use kici_engine::cache::{CachePath, artifact_pattern, check_artifact_name};
use kici_engine::yaml::{Node, Pos};

use super::expr::{Names, read_condition, template};
use super::parse::Expr;
use super::{conjuncts, status_of};
use crate::source::{Fields, entries, get, items};
use crate::target::{Map, Y};

/// What the steps of a job say about it.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) cache: Vec<Y>,
    pub(super) upload: Vec<Y>,
    pub(super) download: Vec<Y>,
}

/// Where the files of each artifact of the file lie in the workspace, by its name as written.
pub(super) fn roots(jobs: &Node) -> BTreeMap<String, String> {
    let steps = entries(jobs).iter().filter_map(|job| get(&job.value, "steps")).flat_map(items);
    let uploads = steps.filter(|step| {
        let uses = get(step, "uses").and_then(Node::text).unwrap_or_default();
        uses.split('@').next() == Some("actions/upload-artifact")
    });
    let root = |step: &Node| {
        let with = get(step, "with")?;
        let name = get(with, "name").and_then(Node::text).unwrap_or(DEFAULT_NAME);
        Some((name.to_owned(), root_of(&lines(get(with, "path").and_then(Node::text).unwrap_or_default()))))
    };
    uploads.filter_map(root).collect()
}

/// The name of an artifact that has none.
const DEFAULT_NAME: &str = "artifact";

/// The directory that the names in an artifact count from there: what its paths have in common, up to the first wildcard. A
/// path whose last part has an ending is taken for a file.
fn root_of(paths: &[String]) -> String {
    let folder = |path: &String| -> Vec<String> {
        let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        if let Some(wild) = parts.iter().position(|part| part.contains(['*', '?', '[', '{'])) {
            parts.truncate(wild);
        } else if parts.last().is_some_and(|last| last.chars().skip(1).any(|c| c == '.')) {
            parts.pop();
        }
        parts.into_iter().map(str::to_owned).collect()
    };
    let mut folders = paths.iter().map(folder);
    let first = folders.next().unwrap_or_default();
    let common = folders.fold(first, |known, other| {
        let same = known.iter().zip(&other).take_while(|(a, b)| a == b).count();
        known[..same].to_vec()
    });
    common.join("/")
}

/// The lines of a text with one path each.
fn lines(text: &str) -> Vec<String> {
    let line = |line: &str| {
        let line = line.trim();
        let line = line.strip_prefix("${{ github.workspace }}/").unwrap_or(line);
        line.strip_prefix("./").unwrap_or(line).trim_end_matches('/').to_owned()
    };
    text.lines().map(line).filter(|line| !line.is_empty()).collect()
}

/// A step that keeps or takes something.
pub(super) struct Keeper<'a, 'n> {
    pub(super) fields: &'a Fields<'n>,
    pub(super) from: Pos,
    pub(super) names: &'a mut Names,
}

impl Keeper<'_, '_> {
    /// True when the action is one of ours and came along, in whole or in part.
    pub(super) fn take(&mut self, action: &str, kept: &mut Kept) -> bool {
        let made = match action.split('@').next().unwrap_or_default() {
            "actions/cache" => self.cache(kept, None),
            "actions/cache/restore" => self.cache(kept, Some("the cache is saved as well when the job succeeds")),
            "actions/cache/save" => self.cache(kept, None),
            "actions/upload-artifact" => self.upload().map(|made| kept.upload.push(made)),
            "actions/download-artifact" => self.download().map(|made| kept.download.push(made)),
            _ => None,
        };
        if made.is_some() {
            // A name for people.
            let _ = self.fields.take("name");
        }
        made.is_some()
    }

    /// What is judged before any step has run.
    fn early(&self) -> Names {
        Names { agent: true, steps: BTreeMap::new(), ..self.names.clone() }
    }

    fn cache(&mut self, kept: &mut Kept, note: Option<&str>) -> Option<()> {
        let with = self.fields.fields("with")?;
        let names = self.early();
        let key = match template(with.text("key")?, &names) {
            Ok(key) => key,
            Err(reason) => {
                with.lose("key", reason);
                return None;
            }
        };
        let paths = self.paths(&with, "path", &names, |path| CachePath::parse(path).map(drop).map_err(|e| e.0));
        if paths.is_empty() {
            return None;
        }
        let mut cache = Map::default();
        cache.text("key", self.from, &key);
        cache.put("paths", self.from, Y::texts(paths));
        if let Some(text) = with.text("restore-keys") {
            let mut keys = Vec::new();
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
                match template(line, &names) {
                    Ok(text) => keys.push(text),
                    Err(reason) => with.lose("restore-keys", reason),
                }
            }
            cache.some("restore_keys", self.from, Y::texts(keys));
        }
        self.fields.lose("if", "a cache is always restored, and saved when the job succeeds");
        if let Some(id) = self.fields.text("id") {
            self.names.caches.insert(id.to_owned());
            self.fields.lose("id", "whether it was found is not told; who asks hears that it was not");
        }
        if let Some(note) = note {
            self.fields.lose("uses", note);
        }
        let known = kept.cache.iter().any(|one| matches!(one, Y::Map(one) if one.get("key") == cache.get("key")));
        if !known {
            kept.cache.push(Y::Map(cache));
        }
        Some(())
    }

    /// The lines of a key that can be kept.
    fn paths(
        &self,
        with: &Fields<'_>,
        key: &str,
        names: &Names,
        judge: impl Fn(&str) -> Result<(), String>,
    ) -> Vec<String> {
        let mut paths = Vec::new();
        for line in lines(with.text(key).unwrap_or_default()) {
            let made = match line.strip_prefix('!') {
                Some(_) => Err("files cannot be left out; name those that are wanted".to_owned()),
                None => template(&line, names),
            };
            let made = made.and_then(|path| if path.contains("${{") { Ok(path) } else { judge(&path).map(|()| path) });
            match made {
                Ok(path) => paths.push(path),
                Err(reason) => with.report().lose(self.from, with.at(key), format!("`{line}`: {reason}")),
            }
        }
        paths
    }

    /// A name, if it can be one.
    fn name(&self, with: &Fields<'_>, text: &str, names: &Names) -> Option<String> {
        let made = template(text, names).and_then(|name| {
            let judged = if name.contains("${{") { Ok(()) } else { check_artifact_name(&name) };
            judged.map(|()| name).map_err(|error| error.0)
        });
        match made {
            Ok(name) => Some(name),
            Err(reason) => {
                with.report().lose(self.from, with.at("name"), reason);
                None
            }
        }
    }

    fn upload(&mut self) -> Option<Y> {
        let with = self.fields.fields("with")?;
        let names = Names { agent: true, ..self.names.clone() };
        let name = self.name(&with, with.text("name").unwrap_or(DEFAULT_NAME), &names)?;
        let judge = |path: &str| artifact_pattern(path).map(drop).map_err(|error| error.0);
        let paths = self.paths(&with, "path", &names, judge);
        if paths.is_empty() {
            return None;
        }
        let mut upload = Map::default();
        upload.text("name", self.from, name);
        upload.put("paths", self.from, Y::texts(paths));
        match with.text("if-no-files-found") {
            Some("error") => upload.text("if_empty", self.from, "fail"),
            Some("ignore") => upload.text("if_empty", self.from, "ignore"),
            _ => {}
        }
        match with.text("retention-days").map(str::parse::<u32>) {
            Some(Ok(days)) if days > 0 => upload.text("expire_in", self.from, format!("{days}d")),
            None | Some(Ok(_)) => {}
            Some(Err(_)) => with.lose("retention-days", "no number"),
        }
        // How it is packed, and what would happen to one of the same name, which there is not.
        for key in ["compression-level", "overwrite"] {
            let _ = with.take(key);
        }
        if let Some(when) = self.when() {
            upload.text("when", self.from, when);
        }
        Some(Y::Map(upload))
    }

    /// After which end of the job, from the condition of the step.
    fn when(&self) -> Option<&'static str> {
        let entry = self.fields.entry("if")?;
        let read = entry.value.text().ok_or_else(|| "a text is expected".to_owned()).and_then(read_condition);
        let mut when = None;
        let mut whole = read.is_ok();
        let read = read.unwrap_or(Expr::Null);
        for part in conjuncts(&read) {
            match status_of(part) {
                Some(Some("on-failure")) => when = Some("failure"),
                Some(Some(_)) => when = when.or(Some("always")),
                Some(None) => {}
                None => whole = false,
            }
        }
        if !whole {
            self.fields.lose("if", "only how the job ended decides on an artifact; it is made whatever else this says");
        }
        when
    }

    fn download(&mut self) -> Option<Y> {
        let with = self.fields.fields("with")?;
        let elsewhere = ["run-id", "github-token", "repository"].iter().any(|key| with.take(key).is_some());
        if elsewhere {
            with.report().lose(self.from, with.at("run-id"), "artifacts of other runs cannot be taken");
            return None;
        }
        let Some(raw) = with.text("name") else {
            let reason = "all artifacts of a run cannot be taken at once; write each into `artifacts.download`";
            with.report().lose(self.from, with.at("name"), reason);
            return None;
        };
        let name = self.name(&with, raw, &self.early())?;
        let mut download = Map::default();
        download.text("name", self.from, name);
        let folder = lines(with.text("path").unwrap_or_default()).pop().unwrap_or_default();
        let folder = if folder == "." { String::new() } else { folder };
        let root = self.names.artifacts.get(raw);
        if root.is_some_and(|root| *root == folder) {
            // The names in the artifact say it here.
            return self.taken(download);
        }
        if root.is_none_or(|root| !root.is_empty()) {
            let shown = root.map_or_else(|| "their directory in the workspace".to_owned(), |root| format!("`{root}/`"));
            with.report().lose(
                self.from,
                with.at("path"),
                format!("the files come below {shown}, as they were uploaded"),
            );
        }
        if !folder.is_empty() {
            match template(&folder, &self.early()) {
                Ok(path) => download.text("path", self.from, path),
                Err(reason) => with.lose("path", reason),
            }
        }
        self.taken(download)
    }

    fn taken(&self, download: Map) -> Option<Y> {
        self.fields.lose("if", "an artifact that the job names is always taken");
        let _ = self.fields.take("id");
        Some(Y::Map(download))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_files_of_an_artifact_lie() {
        for (paths, root) in [
            ("test-results/", "test-results"),
            ("dist/*.tar.gz\ndist/*.deb", "dist"),
            ("out/app.log", "out"),
            ("a/b/c\na/b/d.txt", "a/b"),
            ("**/target", ""),
            ("./x\ny", ""),
            ("${{ github.workspace }}/coverage", "coverage"),
        ] {
            assert_eq!(root_of(&lines(paths)), root, "{paths}");
        }
    }
}
