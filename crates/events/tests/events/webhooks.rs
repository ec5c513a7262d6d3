//! GitHub's published example payloads against each trigger: one that matches, and one that differs in one filter.

use std::fs;

use kici_store::model::DeliveryStatus;
use kici_store::testing::TestStore;
use serde_json::{Value as Json, json};

use crate::world::{World, call, private_key};

/// File, trigger that matches, trigger that does not, its type in the lock.
const TABLE: &[(&str, &str, &str, &str)] = &[
    ("issue_comment.created.0", "comment: { target: issue, body: \"You are*\" }", "comment: { target: pr }", "comment"),
    ("issue_comment.created.0", "comment", "comment: { body: \"/^\\\\/deploy/\" }", "comment"),
    ("pull_request_review.submitted.0", "review: { states: commented }", "review: { states: approved }", "review"),
    ("release.published.0", "release", "release: { types: [released] }", "release"),
    ("release.edited.6", "release: { types: edited }", "release", "release"),
    ("create.noaction.0", "create: { ref_type: tag, refs: simple-* }", "create: { ref_type: branch }", "create"),
    ("delete.noaction.0", "delete: { refs: simple-tag }", "delete: { refs: \"!simple-*\" }", "delete"),
    ("status.noaction.0", "status: { states: success, contexts: default }", "status: { states: failure }", "status"),
    (
        "repository_dispatch.on-demand-test.0",
        "dispatch: { types: on-demand-test, inputs: { unit: { type: boolean, default: true } } }",
        "dispatch: { types: other }",
        "dispatch",
    ),
    (
        "check_run.created.0",
        "webhook: { events: check_run, types: created }",
        "webhook: { events: check_suite }",
        "webhook",
    ),
    ("merge_group.checks_requested.0", "webhook: { events: [push, merge_group] }", "webhook: { events: x }", "webhook"),
    ("workflow_dispatch.noaction.0", "webhook: { events: workflow_dispatch }", "dispatch", "webhook"),
];

fn body(file: &str) -> Json {
    let path = format!("{}/../forge/tests/data/github/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let mut body: Json = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    body["repository"]["full_name"] = json!("acme/app");
    body["repository"]["default_branch"] = json!("main");
    body
}

/// The commit behind tags.
const TAGGED: &str = "7777777777777777777777777777777777777777";

fn tag(world: &World, name: &str, at: &str) {
    let mut state = world.github.state();
    state.repos.get_mut("acme/app").unwrap().tags.insert(name.to_owned(), at.to_owned());
}

fn workflow(name: &str, on: &str) -> String {
    let on = if on.contains(':') { format!("{{ {on} }}") } else { on.to_owned() };
    format!(
        "name: {name}\non: {on}\njobs: {{ a: {{ runs_on: default, run: 'true', env: {{ AT: \"${{{{ sha }}}}\" }} }} }}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_of_the_forge_starts_the_registered_workflow_that_asks_for_it_and_no_other() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        for (at, (file, yes, no, kind)) in TABLE.iter().enumerate() {
            let (yes, no) = (workflow("yes", yes), workflow("no", no));
            let sha = world.repository(&[(".kici/workflows/yes.yaml", &yes), (".kici/workflows/no.yaml", &no)]);
            assert_eq!(world.register("gh", "acme/app").await.len(), 2, "{yes}{no}");
            let event = file.split('.').next().unwrap();
            tag(&world, "simple-tag", TAGGED);
            // An annotated one: its object is not the commit.
            tag(&world, "0.0.1", &"6".repeat(40));
            let objects = std::collections::BTreeMap::from([("6".repeat(40), TAGGED.to_owned())]);
            world.github.state().repos.get_mut("acme/app").unwrap().tag_objects = objects;
            world.inbox.accept(call(event, &format!("d{at}"), &body(file))).await.unwrap();
            let (delivery, processed) = world.settle().await;
            assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::Processed, 1), "{file} {delivery:?}");
            let run = world.test.store.run_get(processed.runs[0].run_id).await.unwrap().unwrap();
            assert_eq!((run.workflow_name.as_str(), run.trigger_kind.as_str()), ("yes", *kind), "{file}");
            let (own, own_ref) = match event {
                "release" | "create" => (TAGGED.to_owned(), run.event.git_ref.as_deref()),
                _ => (sha, Some("refs/heads/main")),
            };
            assert_eq!((run.sha, run.git_ref.as_deref()), (own, own_ref), "{file}");
        }
    })
    .await;
}

/// R10: commands are answered, and start no workflow by themselves.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_in_a_comment_is_answered_and_starts_only_what_listens_to_comments() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let mut sent = body("issue_comment.created.0");
        sent["issue"]["pull_request"] = json!({"url": "x"});
        sent["comment"]["body"] = json!("fine\r\n/kici approve\r\n");
        world.inbox.accept(call("issue_comment", "d1", &sent)).await.unwrap();
        let (delivery, processed) = world.settle().await;
        let note = "`/kici approve`: no run of this pull request waits for a decision";
        assert_eq!((delivery.status, delivery.note.as_deref()), (DeliveryStatus::Processed, Some(note)));
        assert!(processed.runs.is_empty());
        world.repository(&[(".kici/workflows/a.yaml", &workflow("a", "comment"))]);
        world.register("gh", "acme/app").await;
        world.inbox.accept(call("issue_comment", "d2", &sent)).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!((processed.runs.len(), delivery.note.as_deref()), (1, Some(note)));
        sent["action"] = json!("edited");
        world.inbox.accept(call("issue_comment", "d3", &sent)).await.unwrap();
        assert!(world.settle().await.0.note.is_none_or(|note| !note.contains("/kici")));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inputs_of_a_dispatch_are_those_that_are_declared_and_a_wrong_one_starts_nothing() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let on = "dispatch: { inputs: { count: { type: integer }, env: { default: test } } }";
        world.repository(&[(".kici/workflows/a.yaml", &workflow("a", on))]);
        world.register("gh", "acme/app").await;
        let mut sent = body("repository_dispatch.on-demand-test.0");
        sent["client_payload"] = json!({"count": 3, "other": {"x": 1}});
        world.inbox.accept(call("repository_dispatch", "d1", &sent)).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!(processed.runs.len(), 1, "{delivery:?}");
        let run = world.test.store.run_get(processed.runs[0].run_id).await.unwrap().unwrap();
        assert_eq!(serde_json::to_value(&run.inputs).unwrap(), json!({"count": 3, "env": "test"}));
        sent["client_payload"] = json!({"count": "many"});
        world.inbox.accept(call("repository_dispatch", "d2", &sent)).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::Processed, 0));
        assert!(delivery.note.as_deref().unwrap().contains("a: input `count`"), "{delivery:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_branch_is_told_twice_by_github_and_starts_one_run() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", &workflow("a", "delete: { ref_type: branch }"))]);
        world.register("gh", "acme/app").await;
        let mut push = crate::world::push();
        push["ref"] = json!("refs/heads/old");
        push["after"] = json!("0".repeat(40));
        world.inbox.accept(call("push", "d1", &push)).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!((delivery.status, processed.runs.len()), (DeliveryStatus::Skipped, 0), "{delivery:?}");
        let mut deleted = body("delete.noaction.0");
        deleted["ref"] = json!("old");
        deleted["ref_type"] = json!("branch");
        world.inbox.accept(call("delete", "d2", &deleted)).await.unwrap();
        assert_eq!(world.settle().await.1.runs.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_review_of_a_strangers_pull_request_starts_nothing() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let both = [
            (".kici/workflows/a.yaml", workflow("a", "review")),
            (".kici/workflows/b.yaml", workflow("b", "webhook: { events: pull_request_review }")),
        ];
        world.repository(&both.each_ref().map(|(path, text)| (*path, text.as_str())));
        world.register("gh", "acme/app").await;
        let mut review = body("pull_request_review.submitted.0");
        review["pull_request"]["base"]["repo"]["id"] = json!(1);
        for (id, head, runs) in [("d1", json!(2), 0), ("d2", Json::Null, 0), ("d3", json!(1), 2)] {
            review["pull_request"]["head"]["repo"]["id"] = head;
            world.inbox.accept(call("pull_request_review", id, &review)).await.unwrap();
            let (delivery, processed) = world.settle().await;
            assert_eq!(processed.runs.len(), runs, "{delivery:?}");
            if runs == 0 {
                assert_eq!(delivery.status, DeliveryStatus::Skipped);
                assert!(delivery.note.unwrap().contains("fork"), "{id}");
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_is_told_apart_from_what_the_event_tells_of() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        let text = "on: { status: {}, review: {} }\nrun_name: \"${{ ref }} ${{ sha }} ${{ branch }} ${{ event.sha }}\"\njobs: { a: \
                    { runs_on: default, run: 'true' } }\n";
        let sha = world.repository(&[(".kici/workflows/a.yaml", text)]);
        world.register("gh", "acme/app").await;
        let mut review = body("pull_request_review.submitted.0");
        for side in ["base", "head"] {
            review["pull_request"][side]["repo"]["id"] = json!(1);
        }
        let status = body("status.noaction.0");
        for (event, body, theirs) in
            [("status", &status, &status["sha"]), ("pull_request_review", &review, &review["pull_request"]["head"]["sha"])]
        {
            world.inbox.accept(call(event, event, body)).await.unwrap();
            let (delivery, processed) = world.settle().await;
            assert_eq!(processed.runs.len(), 1, "{delivery:?}");
            let run = world.test.store.run_get(processed.runs[0].run_id).await.unwrap().unwrap();
            let theirs = theirs.as_str().unwrap();
            assert_eq!(run.run_name, format!("refs/heads/main {sha} main {theirs}"), "{event}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_without_its_tag_starts_nothing_and_says_so() {
    TestStore::each(|test| async move {
        let mut world = World::new(test).await;
        world.github_source(private_key()).await;
        world.repository(&[(".kici/workflows/a.yaml", &workflow("a", "release"))]);
        world.register("gh", "acme/app").await;
        world.inbox.accept(call("release", "d1", &body("release.published.0"))).await.unwrap();
        let (delivery, processed) = world.settle().await;
        assert_eq!(processed.runs.len(), 0);
        assert!(delivery.note.as_deref().unwrap().contains("a: the commit of refs/tags/"), "{delivery:?}");
    })
    .await;
}
