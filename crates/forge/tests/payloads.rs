//! GitHub's published example payloads, and what generic and local sources make of their calls.

use std::fs;

use kici_engine::event::{Event, EventKind, ForkState};
use kici_engine::ids::SourceId;
use kici_forge::normalise::{BodyError, Normalised, action, event_name, normalise};
use kici_forge::{Extract, GenericConfig, GithubConfig, Headers, LocalConfig, Source, SourceConfig, Verification};
use serde_json::{Value, json};
use uuid::Uuid;

fn source(config: SourceConfig) -> Source {
    Source { id: SourceId::from_uuid(Uuid::nil()), org: "default".into(), name: "s".into(), version: 1, config }
}

fn github() -> Source {
    source(SourceConfig::Github(GithubConfig::new(7)))
}

fn payload(file: &str) -> Vec<u8> {
    fs::read(format!("{}/tests/data/github/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn files() -> Vec<String> {
    let folder = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/github")).unwrap();
    let names = folder.map(|f| f.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|n| n.ends_with(".json")).collect();
    names.sort();
    assert!(names.len() >= 28, "{names:?}");
    names
}

fn headers_for(file: &str) -> Headers {
    Headers::from_iter([("X-GitHub-Event", file.split('.').next().unwrap()), ("Content-Type", "application/json")])
}

fn github_event(file: &str) -> Box<Event> {
    match normalise(&github(), &headers_for(file), &payload(file)) {
        Ok(Normalised::Event(event)) => event,
        other => panic!("{file}: {other:?}"),
    }
}

#[test]
fn every_example_is_an_event_or_ignored_with_a_reason() {
    for file in files() {
        match normalise(&github(), &headers_for(&file), &payload(&file)) {
            Ok(Normalised::Event(event)) => {
                assert_eq!(event.raw_name, file.split('.').next().unwrap());
                assert_eq!(event.routing_key, "github:7");
                assert!(event.payload.is_object() && event.sender.user_id.is_some(), "{file}");
                let installation = file.starts_with("installation");
                assert_eq!(event.repo.is_some(), !installation, "{file}");
            }
            Ok(Normalised::Ignored(reason)) => assert!(file.starts_with("ping") && !reason.is_empty(), "{file}"),
            Err(error) => panic!("{file}: {error}"),
        }
    }
}

/// File, kind, action, ref, commit, target branch, pull request.
type Row = (
    &'static str,
    EventKind,
    Option<&'static str>,
    Option<&'static str>,
    Option<&'static str>,
    Option<&'static str>,
    Option<u64>,
);

#[test]
fn examples_mean_what_they_say() {
    let tag = Some("refs/tags/simple-tag");
    let head = Some("ec26c3e57ca3a959ca5aad62de7213c562f8c821");
    let commit = Some("6113728f27ae82c7b1a177c8d03f9e96e0adf246");
    let pull = Some("refs/pull/2/head");
    let master = Some("master");
    let table: &[Row] = &[
        ("push.noaction.0.json", EventKind::Tag, None, tag, commit, None, None),
        ("create.noaction.0.json", EventKind::Create, None, tag, None, None, None),
        ("delete.noaction.0.json", EventKind::Delete, None, tag, None, None, None),
        ("pull_request.opened.0.json", EventKind::Pr, Some("opened"), pull, head, master, Some(2)),
        ("pull_request.synchronize.22.json", EventKind::Pr, Some("synchronize"), pull, head, master, Some(2)),
        ("pull_request_review.submitted.0.json", EventKind::Review, Some("submitted"), pull, head, master, Some(2)),
        ("issue_comment.created.0.json", EventKind::Comment, Some("created"), None, None, None, Some(1)),
        ("release.published.0.json", EventKind::Release, Some("published"), Some("refs/tags/0.0.1"), None, None, None),
        ("status.noaction.0.json", EventKind::Status, None, None, commit, None, None),
        (
            "repository_dispatch.on-demand-test.0.json",
            EventKind::Dispatch,
            Some("on-demand-test"),
            Some("refs/heads/master"),
            None,
            master,
            None,
        ),
        (
            "workflow_dispatch.noaction.0.json",
            EventKind::Other,
            None,
            Some("refs/heads/main"),
            None,
            Some("main"),
            None,
        ),
        (
            "check_suite.completed.0.json",
            EventKind::Other,
            Some("completed"),
            Some("refs/heads/changes"),
            head,
            Some("changes"),
            None,
        ),
    ];
    for (file, kind, action, git_ref, sha, target, number) in table {
        let event = github_event(file);
        let got = (
            event.kind,
            event.action.as_deref(),
            event.git_ref.as_deref(),
            event.sha.as_deref(),
            event.target_branch.as_deref(),
            event.pr_number,
        );
        assert_eq!(got, (*kind, *action, *git_ref, *sha, *target, *number), "{file}");
    }
    let event = github_event("pull_request.opened.0.json");
    assert_eq!((event.is_fork_pr, event.branch()), (ForkState::No, Some("changes")));
    assert_eq!(event.sender.username.as_deref(), Some("Codertocat"));
    assert_eq!(event.sender.user_id.as_deref(), Some("21031067"));
}

#[test]
fn forms_carry_the_same_event() {
    for file in files() {
        let body = payload(&file);
        let form = form_urlencoded::Serializer::new(String::new())
            .append_pair("payload", std::str::from_utf8(&body).unwrap())
            .finish();
        let headers = Headers::from_iter([
            ("X-GitHub-Event", file.split('.').next().unwrap()),
            ("Content-Type", "application/x-www-form-urlencoded; charset=utf-8"),
        ]);
        let plain = normalise(&github(), &headers_for(&file), &body);
        assert_eq!(normalise(&github(), &headers, form.as_bytes()), plain, "{file}");
    }
    let headers =
        Headers::from_iter([("x-github-event", "push"), ("content-type", "application/x-www-form-urlencoded")]);
    assert_eq!(normalise(&github(), &headers, b"a=b"), Err(BodyError::NoPayload));
}

#[test]
fn damaged_bodies_are_errors_never_panics() {
    for file in files() {
        let body = payload(&file);
        let headers = headers_for(&file);
        for cut in (0..body.trim_ascii_end().len() - 1).step_by(499) {
            let cut_off = normalise(&github(), &headers, &body[..cut]);
            assert!(matches!(cut_off, Err(BodyError::NotJson(_))), "{file} {cut}");
            let mut flipped = body.clone();
            flipped[cut] ^= 1 << (cut % 8);
            // Some flips leave a document that still means something; none may panic.
            drop(normalise(&github(), &headers, &flipped));
            drop(action(&github(), &headers, &flipped));
        }
    }
    let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(normalise(&github(), &headers_for("push.x"), nested.as_bytes()), Err(BodyError::NotJson(_))));
    assert_eq!(normalise(&github(), &headers_for("push.x"), b"[]"), Err(BodyError::NotObject));
}

fn edited(file: &str, edit: impl Fn(&mut Value)) -> Result<Normalised, BodyError> {
    let mut json: Value = serde_json::from_slice(&payload(file)).unwrap();
    edit(&mut json);
    normalise(&github(), &headers_for(file), json.to_string().as_bytes())
}

fn event(result: Result<Normalised, BodyError>) -> Event {
    match result.unwrap() {
        Normalised::Event(event) => *event,
        Normalised::Ignored(reason) => panic!("{reason}"),
    }
}

#[test]
fn pushes_of_branches_deletions_and_other_refs() {
    const PUSH: &str = "push.noaction.0.json";
    let zero = "0".repeat(40);
    let branch = event(edited(PUSH, |p| p["ref"] = json!("refs/heads/feature/x")));
    assert_eq!((branch.kind, branch.target_branch.as_deref()), (EventKind::Push, Some("feature/x")));
    assert_eq!(branch.base_sha, Some(zero.clone()));

    let annotated = event(edited(PUSH, |p| p["head_commit"] = json!({"id": "a".repeat(40), "message": "m"})));
    assert_eq!((annotated.sha, annotated.commit_message), (Some("a".repeat(40)), Some("m".to_owned())));

    let gone = event(edited(PUSH, |p| {
        p["before"] = json!("b".repeat(40));
        p["after"] = json!(zero);
    }));
    assert_eq!((gone.kind, gone.sha, gone.base_sha), (EventKind::Delete, None, Some("b".repeat(40))));

    let notes = edited(PUSH, |p| p["ref"] = json!("refs/notes/commits"));
    assert_eq!(notes, Ok(Normalised::Ignored("`refs/notes/commits` is neither a branch nor a tag".into())));
    let missing = edited(PUSH, |p| p["after"] = Value::Null);
    assert_eq!(missing.unwrap_err().to_string(), "`push` event without `after`");
}

#[test]
fn fork_state_is_never_guessed() {
    const PR: &str = "pull_request.opened.0.json";
    let fork = event(edited(PR, |p| p["pull_request"]["head"]["repo"]["id"] = json!(1)));
    assert_eq!(fork.is_fork_pr, ForkState::Yes);
    let deleted = event(edited(PR, |p| p["pull_request"]["head"]["repo"] = Value::Null));
    assert_eq!(deleted.is_fork_pr, ForkState::Unknown);
    let comment = event(edited("issue_comment.created.0.json", |p| p["issue"]["pull_request"] = json!({"url": "x"})));
    assert_eq!(comment.is_fork_pr, ForkState::Unknown);
}

#[test]
fn unknown_events_are_ignored_by_name() {
    let headers = Headers::from_iter([("x-github-event", "brand_new")]);
    let ignored = normalise(&github(), &headers, b"{}");
    assert_eq!(ignored, Ok(Normalised::Ignored("unknown GitHub event `brand_new`".into())));
    assert!(matches!(normalise(&github(), &Headers::default(), b"{}"), Ok(Normalised::Ignored(_))));
    assert_eq!(event_name(&github(), &Headers::default(), b""), "unknown");
}

fn generic(edit: impl FnOnce(&mut GenericConfig)) -> Source {
    let mut config = GenericConfig::new(Verification::Bearer {});
    edit(&mut config);
    source(SourceConfig::Generic(Box::new(config)))
}

#[test]
fn generic_calls_are_mapped() {
    let path = |p: &str| Some(Extract::Path(p.to_owned()));
    let s = generic(|c| {
        c.action_from = path("$.kind");
        c.repo_from = path("$.repo.full");
        c.ref_from = path("$.refs[-1]");
        c.sha_from = Some(Extract::Header("X-Commit".into()));
        c.allowed_events = vec!["webhook".into(), "deploy".into()];
    });
    let body = br#"{"kind": 3, "repo": {"full": "o/r"}, "refs": ["a", "main"]}"#;
    let call = event(normalise(&s, &Headers::from_iter([("x-commit", "abc")]), body));
    assert_eq!((call.kind, call.raw_name.as_str(), call.action.as_deref()), (EventKind::Hook, "webhook", Some("3")));
    assert_eq!((call.repo.as_deref(), call.sha.as_deref()), (Some("o/r"), Some("abc")));
    assert_eq!((call.git_ref.as_deref(), call.branch()), (Some("refs/heads/main"), Some("main")));
    assert_eq!(call.routing_key, format!("generic:default:{}", Uuid::nil()));

    let named = Headers::from_iter([("X-Event-Type", "deploy")]);
    let bare = event(normalise(&s, &named, b""));
    assert_eq!((bare.raw_name.as_str(), bare.repo, bare.payload), ("deploy", None, json!({})));
    assert_eq!(event_name(&s, &named, b"no json"), "deploy");

    let other = normalise(&s, &Headers::from_iter([("x-event-type", "x")]), b"{}");
    assert!(matches!(other, Ok(Normalised::Ignored(r)) if r.contains("allowed_events")));
    assert!(matches!(normalise(&s, &named, b"plain text"), Err(BodyError::NotJson(_))));

    let form = Headers::from_iter([("content-type", "application/x-www-form-urlencoded")]);
    let form = event(normalise(&s, &form, b"kind=k&x=1"));
    assert_eq!((form.action.as_deref(), form.payload), (Some("k"), json!({"kind": "k", "x": "1"})));
}

#[test]
fn local_pushes() {
    let s = source(SourceConfig::Local(LocalConfig::new("/srv/x")));
    let zero = "0".repeat(40);
    let sha = "c".repeat(40);
    let body =
        json!({"ref": "refs/heads/main", "before": zero, "after": sha, "default_branch": "main", "message": "m"});
    let push = event(normalise(&s, &Headers::default(), body.to_string().as_bytes()));
    assert_eq!((push.kind, push.repo.as_deref(), push.sha.as_deref()), (EventKind::Push, Some("local/s"), Some(&*sha)));
    assert_eq!((push.default_branch.as_deref(), push.commit_message.as_deref()), (Some("main"), Some("m")));
    assert_eq!(push.provider, "local");

    let other = normalise(&s, &Headers::from_iter([("x-event-type", "pull")]), b"{}");
    assert!(matches!(other, Ok(Normalised::Ignored(_))));
    let missing = normalise(&s, &Headers::default(), b"{}").unwrap_err();
    assert_eq!(missing.to_string(), "`push` event without `ref`");
}
