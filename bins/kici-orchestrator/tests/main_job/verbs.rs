//! What an operator types, against a real orchestrator and a real agent.

use std::process::Output;

use serde_json::Value as Json;

use crate::stack::{Stack, binary, clean, until};
use crate::surroundings::Repository;

const WORKFLOW: &str = r#"
name: ci
on: { push: {}, manual: { inputs: { who: { default: world } } } }
jobs:
  hello: { runs_on: default, checkout: false, run: 'echo "hello $INPUT_WHO"; [ "$INPUT_WHO" != nobody ] || sleep 600' }
"#;

fn admin(stack: &Stack, args: &[&str]) -> Output {
    clean(&binary("kici-admin"))
        .args(args)
        .env("KICI_ADMIN_URL", format!("http://{}", stack.address))
        .env("KICI_DATA_DIR", stack.data())
        .output()
        .unwrap()
}

/// What a command prints that must end with `code`.
#[track_caller]
fn ends(stack: &Stack, code: i32, args: &[&str]) -> String {
    let output = admin(stack, args);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "kici-admin {args:?}\n{out}\n{err}\n{}", stack.logs());
    if code == 0 { out } else { err }
}

#[track_caller]
fn json(stack: &Stack, args: &[&str]) -> Json {
    serde_json::from_str(&ends(stack, 0, &[args, &["-o", "json"]].concat())).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_verbs_of_an_operator_do_what_they_say_and_end_with_their_codes() {
    let stack = Stack::start(None).await;
    let repos = stack.dir.path().join("repos");
    Repository::create(&repos.join("app"), &[(".kici/workflows/ci.yaml", WORKFLOW)]);
    let (path, nowhere) = (repos.join("app").display().to_string(), repos.display().to_string());
    let refused = ends(&stack, 7, &["source", "add", "local", "app", &nowhere]);
    assert!(refused.contains("config.path") && refused.contains("holds no git repository"), "{refused}");
    ends(&stack, 0, &["source", "add", "local", "app", &path]);
    ends(&stack, 5, &["source", "add", "local", "app", &path]);
    assert!(ends(&stack, 0, &["source", "list"]).contains("app"));

    let token = json(&stack, &["agent-token", "create"]);
    let (id, secret) = (token["id"].as_str().unwrap(), token["token"].as_str().unwrap());
    let _agent = stack.start_agent("a1", secret, &[]).await;
    assert!(ends(&stack, 0, &["agent", "list"]).contains("a1"));

    let started = |args: &[&str]| json(&stack, args)["run_id"].as_str().unwrap().to_owned();
    let run = started(&["run", "trigger", "app", "ci", "--input", "who=you"]);
    assert_eq!(ends(&stack, 0, &["run", "logs", "-f", &run, "--job", "hello"]), "hello you\n");
    assert_eq!(json(&stack, &["run", "show", &run])["run"]["status"], "success");
    assert!(ends(&stack, 0, &["run", "list"]).contains(&run));
    let missing = ends(&stack, 4, &["run", "logs", &run, "--job", "hello", "--epoch", "9"]);
    assert!(missing.contains("no steps in epoch 9"), "{missing}");
    ends(&stack, 5, &["run", "cancel", &run]);
    ends(&stack, 64, &["run", "trigger", "app", "ci", "--input", "who=a", "--input", "who=b"]);
    ends(&stack, 7, &["run", "trigger", "app", "ci", "--input", "whom=a"]);

    let again = started(&["run", "rerun", &run]);
    assert_eq!(ends(&stack, 0, &["run", "logs", "-f", &again, "--job", "hello"]), "hello you\n");

    let stuck = started(&["run", "trigger", "app", "ci", "--input", "who=nobody"]);
    stack.speaks(stuck.parse().unwrap()).await;
    ends(&stack, 0, &["run", "cancel", &stuck]);
    assert!(ends(&stack, 0, &["run", "logs", "-f", &stuck]).contains("hello nobody"));
    ends(&stack, 1, &["run", "watch", &stuck]);
    assert_eq!(json(&stack, &["run", "show", &stuck])["run"]["status"], "cancelled");

    let delivery = json(&stack, &["source", "trigger", "app"])["delivery_id"].as_str().unwrap().to_owned();
    assert!(ends(&stack, 0, &["event", "list"]).contains(&delivery));
    let id_of = delivery.parse().unwrap();
    let settled = async || stack.client.delivery(id_of).await.ok().filter(|delivery| delivery.status != "received");
    until("the delivery to be processed", settled).await;
    assert!(ends(&stack, 0, &["event", "explain", &delivery]).contains("ci"));

    ends(&stack, 0, &["agent-token", "revoke", id, "--yes"]);
    ends(&stack, 4, &["agent-token", "revoke", id, "--yes"]);
    ends(&stack, 0, &["source", "remove", "app", "--yes"]);
    ends(&stack, 4, &["source", "remove", "app", "--yes"]);
}
