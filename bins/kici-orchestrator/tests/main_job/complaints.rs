//! How such systems really fail, with real processes.

use std::collections::BTreeMap;
use std::fs;

use kici_engine::state::{FailureClass, JobStatus, RunStatus};
use nix::sys::signal::Signal;

use crate::stack::{Stack, until};

#[tokio::test]
async fn complaint_2_an_agent_that_is_stopped_again_and_again_under_load_keeps_no_job_and_runs_none_twice() {
    const WORK: &str = r#"
on: push
jobs:
  work:
    runs_on: default
    checkout: false
    matrix: { n: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] }
    run: echo "$KICI_JOB_ID" >> "@JUDGE@"; sleep 0.1
"#;
    let mut stack = Stack::unstarted(None);
    // In life nobody stops an agent a dozen times in a second; the oldest job would be given up.
    stack.variables = vec![("KICI_QUEUE_MAX_ATTEMPTS", "50")];
    stack.start_orchestrator("127.0.0.1:0").await;
    let token = stack.agent_token().await;
    let judge = stack.dir.path().join("judge");
    let workflow = WORK.replace("@JUDGE@", judge.to_str().unwrap());
    let repository = stack.repository("app", &[(".kici/workflows/w.yaml", &workflow)]).await;
    let mut runs = Vec::new();
    let more = [("KICI_SHUTDOWN_GRACE_MS", "50"), ("KICI_AGENT_MAX_CONCURRENCY", "3")];
    for turn in 0..12 {
        if turn % 3 == 0 {
            runs.push(stack.push_one(&repository, "app").await);
        }
        let mut agent = stack.start_agent("a1", token.token.expose(), &more).await;
        agent.signal(Signal::SIGTERM);
        assert_eq!(agent.exit_code().await, Some(0), "{}", stack.logs());
    }
    let _agent = stack.start_agent("a1", token.token.expose(), &more).await;
    let mut jobs = BTreeMap::new();
    for run in runs {
        for job in stack.ended(run).await.jobs {
            // What ran when the agent was told to stop is cancelled, and says so; nothing else ends badly.
            let told = job.failure.as_ref().is_some_and(|failure| failure.class == FailureClass::Cancelled);
            assert!(job.status == JobStatus::Success || told, "{job:#?}\n{}", stack.logs());
            jobs.insert(job.id.to_string(), job.status);
        }
    }
    let ran = fs::read_to_string(&judge).unwrap();
    let mut starts: BTreeMap<&str, u32> = BTreeMap::new();
    for line in ran.lines() {
        *starts.entry(line).or_default() += 1;
    }
    assert!(starts.values().all(|times| *times == 1), "{starts:?}");
    let succeeded = jobs.values().filter(|status| **status == JobStatus::Success).count();
    assert!(starts.len() >= succeeded, "{jobs:?}");
    let held = until("the queue to be empty", async || {
        let queue = stack.client.queue(&Default::default(), &Default::default()).await.ok()?;
        queue.items.is_empty().then_some(())
    });
    held.await;
}

#[tokio::test]
async fn complaint_8_a_job_that_kills_its_agent_is_lost_once_and_not_handed_out_again() {
    // Hardened steps may not signal their agent. The step's parent keeps its processes together; the agent is the parent of that.
    const DEADLY: &str = r#"
on: push
jobs:
  deadly:
    runs_on: default
    checkout: false
    run: |
      echo "$KICI_JOB_ID" >> "@JUDGE@"
      set -- $(cat /proc/$PPID/stat)
      kill -9 "$4"
      sleep 600
"#;
    let stack = Stack::start(None).await;
    let token = stack.agent_token().await;
    let judge = stack.dir.path().join("judge");
    let workflow = DEADLY.replace("@JUDGE@", judge.to_str().unwrap());
    let mut agent = stack.start_agent("a1", token.token.expose(), &[("KICI_HARDENING", "off")]).await;
    let repository = stack.repository("app", &[(".kici/workflows/w.yaml", &workflow)]).await;
    let run = stack.push_one(&repository, "app").await;
    assert_eq!(agent.exit_code().await, None, "a signal ended it");
    let agent = stack.start_agent("a1", token.token.expose(), &[("KICI_HARDENING", "off")]).await;
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Failed, "{}", stack.logs());
    let failure = ended.jobs[0].failure.as_ref().unwrap();
    assert_eq!((failure.class, ended.jobs[0].epoch), (FailureClass::Lost, 1), "{failure:?}");
    assert!(failure.message.as_ref().unwrap().contains("the agent was restarted"), "{failure:?}");
    assert_eq!(fs::read_to_string(judge).unwrap().lines().count(), 1);
    drop(agent);
}

#[tokio::test]
async fn the_status_of_background_work_is_visible_to_operators() {
    let stack = Stack::start(None).await;
    let status = until("every part to have run", async || {
        let status = stack.client.status().await.ok()?;
        status.reconcilers.iter().all(|part| part.runs > 0).then_some(status)
    });
    let status = status.await;
    assert!(status.leader && !status.drain.draining);
    let names: Vec<&str> = status.reconcilers.iter().map(|part| part.name.as_str()).collect();
    for name in ["dispatch_expired_acks", "dispatch_idle_runs", "dispatch_stale_jobs", "instance_heartbeat", "lease"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    assert!(status.reconcilers.iter().all(|part| part.failures == 0), "{status:#?}");
}
