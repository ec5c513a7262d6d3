//! Processes that die.

use kici_api::dto::logs::{FollowEvent, FollowRequest};
use kici_engine::state::RunStatus;
use nix::sys::signal::Signal;

use crate::stack::{Stack, until};

const TALKATIVE: &str = r#"
on: push
jobs:
  talk:
    runs_on: default
    steps:
      - run: |
          for n in $(seq 1 300); do
            echo "line $n"
            if [ $((n % 100)) -eq 0 ]; then sleep 0.3; fi
          done
          until [ -e "$GO" ]; do sleep 0.02; done
          for n in $(seq 301 500); do echo "line $n"; done
        env: { GO: "@GO@" }
"#;

#[tokio::test]
async fn killing_the_orchestrator_in_the_middle_of_a_job_loses_no_line_and_the_job_succeeds() {
    let mut stack = Stack::start(None).await;
    let go = stack.dir.path().join("go");
    let workflow = TALKATIVE.replace("@GO@", go.to_str().unwrap());
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let repository = stack.repository("app", &[(".kici/workflows/talk.yaml", &workflow)]).await;
    let run = stack.push_one(&repository, "app").await;
    let mut follow = stack.client.follow(run, FollowRequest { follow: true, ..FollowRequest::default() });
    loop {
        match follow.next().await.unwrap().unwrap() {
            FollowEvent::Lines { step, .. } if step.starts_with("step-") => break,
            _ => {}
        }
    }
    drop(follow);

    stack.orchestrator.take().unwrap().kill();
    // The job goes on while nobody listens.
    std::fs::write(&go, "").unwrap();
    let address = stack.address.clone();
    stack.start_orchestrator(&address).await;

    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let expected: Vec<String> = (1..=500).map(|n| format!("line {n}")).collect();
    assert_eq!(stack.log(run, "talk").await, expected);
    assert_eq!(ended.jobs[0].epoch, 1, "the job was not handed out again");
}

#[tokio::test]
async fn a_delivery_that_was_accepted_before_a_crash_becomes_one_run() {
    let mut stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let workflow = "on: push\njobs: { a: { runs_on: default, run: 'true' } }\n";
    let repository = stack.repository("app", &[(".kici/workflows/a.yaml", workflow)]).await;
    let body = serde_json::json!({"ref": "refs/heads/main", "before": "0".repeat(40), "after": repository.head()});
    let url = format!("http://{}/webhooks/default/app", stack.address);
    let sent = stack.http.post(&url).header("x-delivery-id", "d1").json(&body).send().await.unwrap();
    assert_eq!(sent.status(), 202);
    stack.orchestrator.take().unwrap().kill();
    let address = stack.address.clone();
    stack.start_orchestrator(&address).await;
    // The sender did not get to know and sends again.
    let sent = stack.http.post(&url).header("x-delivery-id", "d1").json(&body).send().await.unwrap();
    assert_eq!(sent.json::<serde_json::Value>().await.unwrap()["duplicate"], true);
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let run = until("the run", async || {
        let runs = stack.client.runs(&Default::default(), &Default::default()).await.ok()?;
        runs.items.first().map(|run| run.id)
    })
    .await;
    assert_eq!(stack.ended(run).await.run.status, RunStatus::Success, "{}", stack.logs());
    let runs = stack.client.runs(&Default::default(), &Default::default()).await.unwrap();
    assert_eq!(runs.items.len(), 1);
}

#[tokio::test]
async fn a_revoked_token_ends_the_agent_for_good() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let mut agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let revoked = stack.client.revoke_agent_token(token.id).await.unwrap();
    assert_eq!(revoked.sessions_closed, 1);
    assert_eq!(agent.exit_code().await, Some(78), "{}", stack.logs());
    let mut again = stack.spawn_agent("a1", token.token.expose(), &[]);
    assert_eq!(again.exit_code().await, Some(78), "{}", stack.logs());
}

#[tokio::test]
async fn sigterm_stops_the_orchestrator_in_order() {
    let mut stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let mut orchestrator = stack.orchestrator.take().unwrap();
    orchestrator.signal(Signal::SIGTERM);
    assert_eq!(orchestrator.exit_code().await, Some(0), "{}", stack.logs());
}
