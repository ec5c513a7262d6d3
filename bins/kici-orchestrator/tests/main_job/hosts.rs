//! A job on all hosts, over the real wire.

use kici_api::dto::hosts::{DeclareHost, HostFilter, PreviewHosts};
use kici_engine::hosts::{HostStatus, OnUnreachable, Reach};
use kici_engine::ids::AgentId;
use kici_engine::state::{JobStatus, RunStatus};

use crate::stack::{Stack, until};

const ROLL: &str = r#"
name: roll
on: push
jobs:
  roll:
    runs_on_all: [default]
    include_uninitialized: true
    on_unreachable: skip
    max_parallel: 1
    checkout: false
    outputs: { at: "${{ steps.s.outputs.at }}" }
    steps:
      - id: s
        run: |
          echo "at=$KICI_FANOUT_HOST" >> "$KICI_OUTPUT"
          echo "host $KICI_FANOUT_HOST, $KICI_FANOUT_INDEX of $KICI_FANOUT_TOTAL"
  after:
    needs: roll
    runs_on: default
    checkout: false
    env:
      DONE: "${{ size(needs.roll.summary.succeeded_hosts) }}"
      FIRST: "${{ needs.roll.by_host['a1'].at }}"
    run: echo "done $DONE, first $FIRST"
"#;

#[tokio::test]
async fn a_job_runs_on_every_declared_host_and_the_one_behind_it_sees_each_result() {
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let _one = stack.start_agent("a1", token.token.expose(), &[]).await;
    let _two = stack.start_agent("a2", token.token.expose(), &[]).await;
    let away = AgentId::new("a9").unwrap();
    let request = DeclareHost { labels: Some(vec!["default".into()]), ..DeclareHost::default() };
    assert!(stack.client.declare_host(&away, &request).await.unwrap().1);
    let ready = HostFilter { selector: Some("default,status=ready".into()), ..HostFilter::default() };
    until("both hosts to be ready", async || (stack.client.hosts(&ready).await.ok()?.items.len() == 2).then_some(()))
        .await;
    let preview =
        PreviewHosts { selector: "default".into(), on_unreachable: OnUnreachable::Skip, include_uninitialized: true };
    let preview = stack.client.preview_hosts(&preview).await.unwrap();
    let effects: Vec<_> =
        preview.hosts.iter().map(|host| (host.id.as_str(), host.status, host.effect.clone())).collect();
    let expected = [
        ("a1", HostStatus::Ready, Reach::Run),
        ("a2", HostStatus::Ready, Reach::Run),
        ("a9", HostStatus::Unreachable, Reach::Skip),
    ];
    assert_eq!(effects, expected);

    let repository = stack.repository("app", &[(".kici/workflows/roll.yaml", ROLL)]).await;
    let run = stack.push_one(&repository, "app").await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let jobs: Vec<_> = ended.jobs.iter().map(|job| (job.name.as_str(), job.status)).collect();
    let expected = [
        ("roll (a1)", JobStatus::Success),
        ("roll (a2)", JobStatus::Success),
        ("roll (a9)", JobStatus::Skipped),
        ("after", JobStatus::Success),
    ];
    assert_eq!(jobs, expected);
    assert_eq!(stack.log(run, "roll (a2)").await, ["host a2, 1 of 3"]);
    assert_eq!(stack.log(run, "after").await, ["done 2, first a1"]);
}
