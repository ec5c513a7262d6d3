//! The event that a command on this machine works with: from a file, or from what git says about the repository.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use kici_engine::event::{ChangedFiles, Event, EventKind};
use kici_engine::ids::SourceId;
use kici_forge::normalise::{Normalised, blank, normalise};
use kici_forge::{GithubConfig, Headers, LocalConfig, Source, SourceConfig};
use serde_json::{Value as Json, json};

use super::Repository;
use super::files::unreadable;
use crate::args::distinct;
use crate::exit::{Failure, VERDICT};

/// Name of the source that events of this machine come from.
const SOURCE: &str = "local";

/// What a file says happened. `-` is stdin.
pub(super) fn load(path: &Path, kind: Option<&str>) -> Result<Event, Failure> {
    let bytes = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut bytes)?;
        bytes
    } else {
        std::fs::read(path).map_err(|error| unreadable(path, &error))?
    };
    let read = match kind {
        Some(kind) => github(kind, &bytes),
        None => normalised(&bytes),
    };
    read.map_err(|problem| Failure::usage(format!("{}: {problem}", path.display())))
}

/// A body as GitHub sends it.
fn github(kind: &str, bytes: &[u8]) -> Result<Event, String> {
    let source = source(SourceConfig::Github(GithubConfig::new(1)), "github");
    let headers = Headers::from_iter([("x-github-event", kind), ("content-type", "application/json")]);
    match normalise(&source, &headers, bytes) {
        Ok(Normalised::Event(event)) => Ok(*event),
        Ok(Normalised::Ignored(reason)) => Err(format!("such a delivery is ignored: {reason}")),
        Err(error) => Err(error.to_string()),
    }
}

fn source(config: SourceConfig, name: &str) -> Source {
    let id = SourceId::from_uuid(Default::default());
    Source { id, org: "default".to_owned(), name: name.to_owned(), version: 1, config }
}

/// A normalised event. What it leaves out is what an event of this machine has; a field that events do not have is a
/// mistake.
fn normalised(bytes: &[u8]) -> Result<Event, String> {
    let given: Json = serde_json::from_slice(bytes).map_err(|error| format!("not JSON: {error}"))?;
    let Json::Object(given) = given else { return Err("not a JSON object".to_owned()) };
    let Some(kind) = given.get("kind").and_then(Json::as_str) else {
        return Err("an event needs `kind`, such as push; give --kind for a body as GitHub sends it".to_owned());
    };
    let known = fields();
    if let Some(field) = given.keys().find(|field| !known.contains(*field)) {
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        return Err(format!("an event has no field `{field}`; it has: {}", known.join(", ")));
    }
    let mut whole = json!({
        "kind": kind, "raw_name": kind, "org": "default", "routing_key": format!("local:{SOURCE}"), "provider": "local",
        "source": SOURCE, "is_fork_pr": "no",
    });
    if let Json::Object(whole) = &mut whole {
        whole.extend(given);
    }
    serde_json::from_value(whole).map_err(|error| error.to_string())
}

/// The fields of an event, from a full one.
fn fields() -> BTreeSet<String> {
    let text = || Some(String::new());
    let mut event = this_machine(Path::new("/"), EventKind::Push);
    event.action = text();
    event.git_ref = text();
    event.sha = text();
    event.target_branch = text();
    event.source_branch = text();
    event.base_sha = text();
    event.tag = text();
    event.default_branch = text();
    event.pr_number = Some(0);
    event.commit_message = text();
    event.inputs.insert(String::new(), Json::Null);
    event.requested_workflow = text();
    match serde_json::to_value(event) {
        Ok(Json::Object(map)) => map.into_iter().map(|(name, _)| name).collect(),
        _ => BTreeSet::new(),
    }
}

fn this_machine(repo: &Path, kind: EventKind) -> Event {
    let config = SourceConfig::Local(LocalConfig::new(repo));
    let mut event = blank(&source(config, SOURCE), kind, kind.as_str());
    event.routing_key = format!("local:{SOURCE}");
    let folder = repo.file_name().map_or_else(|| "repository".into(), |name| name.to_string_lossy());
    event.repo = Some(format!("local/{folder}"));
    event
}

/// What `git push` of the present commit would tell, or a start by hand of it. A folder without git counts as an unnamed
/// commit of `main`.
pub(super) fn of_repository(repo: &Path, kind: EventKind) -> Event {
    let mut event = this_machine(repo, kind);
    let git = |arguments: &[&str]| git(repo, arguments);
    let default = git(&["symbolic-ref", "--quiet", "--short", "refs/remotes/origin/HEAD"])
        .and_then(|name| Some(name.strip_prefix("origin/")?.to_owned()))
        .or_else(|| git(&["config", "--get", "init.defaultBranch"]))
        .unwrap_or_else(|| "main".to_owned());
    let branch = git(&["symbolic-ref", "--quiet", "--short", "HEAD"]).unwrap_or_else(|| default.clone());
    event.git_ref = Some(format!("refs/heads/{branch}"));
    event.target_branch = Some(branch);
    event.default_branch = Some(default);
    event.sha = git(&["rev-parse", "--verify", "--quiet", "HEAD^{commit}"]);
    event.commit_message = git(&["log", "-1", "--format=%B"]).map(|text| text.trim_end().to_owned());
    event.sender.username = git(&["config", "--get", "user.name"]);
    event
}

/// The words of git, or nothing: everything here is known better by a real forge, and nothing of it is needed.
fn git(repo: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    command.arg("-C").arg(repo).args(arguments).env("GIT_OPTIONAL_LOCKS", "0").stdin(std::process::Stdio::null());
    // This program may be started by a hook, to which git tells another repository.
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"] {
        command.env_remove(name);
    }
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    (!text.is_empty()).then_some(text)
}

/// The files that the event changed: those that were given, else those that its payload lists.
pub(super) fn changed(repository: &Repository, event: &Event) -> ChangedFiles {
    if !repository.changed.is_empty() {
        return ChangedFiles::Known(repository.changed.clone());
    }
    let commits = event.payload.get("commits").and_then(Json::as_array);
    let Some(commits) = commits.filter(|commits| !commits.is_empty()) else {
        return ChangedFiles::Unavailable("the event does not list them; give --changed PATH".to_owned());
    };
    let lists = commits.iter().flat_map(|commit| ["added", "modified", "removed"].map(|key| commit.get(key)));
    let files = lists.flatten().filter_map(Json::as_array).flatten().filter_map(Json::as_str);
    ChangedFiles::Known(files.map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect())
}

/// `KEY=VALUE` arguments as inputs; their declaration makes other types of the texts.
///
/// # Errors
/// When one is given twice.
pub(super) fn inputs(given: &[(String, String)]) -> Result<BTreeMap<String, Json>, Failure> {
    let given = distinct("--input", given)?;
    Ok(given.into_iter().map(|(name, value)| (name.to_owned(), Json::String(value.to_owned()))).collect())
}

/// Nothing would run.
pub(super) fn nothing(text: impl Into<String>) -> Failure {
    Failure::new(VERDICT, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_in_a_file_may_be_short_but_not_misspelt() {
        let event = normalised(br#"{"kind": "push", "target_branch": "main"}"#).unwrap();
        assert_eq!((event.kind, event.raw_name.as_str(), event.branch()), (EventKind::Push, "push", Some("main")));
        for (text, want) in [
            ("[]", "not a JSON object"),
            ("{}", "give --kind"),
            (r#"{"kind": "push", "branch": "x"}"#, "no field `branch`; it has: action, base_sha,"),
            (r#"{"kind": "shove"}"#, "shove"),
        ] {
            let error = normalised(text.as_bytes()).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn a_body_of_github_is_normalised_as_a_delivery() {
        let body = br#"{"ref": "refs/heads/x", "after": "1111111111111111111111111111111111111111", "before": "0000000000000000000000000000000000000000", "repository": {"full_name": "o/r", "default_branch": "main"}, "commits": [{"added": ["b"], "modified": ["a"], "removed": []}]}"#;
        let event = github("push", body).unwrap();
        assert_eq!((event.repo.as_deref(), event.branch()), (Some("o/r"), Some("x")));
        let repository = Repository { repo: ".".into(), kind: None, changed: Vec::new() };
        assert_eq!(changed(&repository, &event), ChangedFiles::Known(vec!["a".into(), "b".into()]));
        assert!(github("push", b"{}").is_err());
    }
}
