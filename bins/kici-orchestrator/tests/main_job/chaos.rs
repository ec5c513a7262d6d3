//! Death at random moments.

use std::fs;
use std::hash::{BuildHasher as _, Hasher as _};
use std::time::Duration;

use kici_engine::state::RunStatus;

use crate::stack::Stack;

const THREE: &str = r#"
on: push
defaults: { runs_on: default }
jobs:
  a: &job
    checkout: false
    outputs: { said: "${{ steps.last.outputs.said }}" }
    steps:
      - run: |
          echo "$KICI_JOB_NAME 1" >> "@JUDGE@"
          for n in $(seq 1 150); do echo "line $n"; sleep 0.01; done
      - id: last
        run: |
          echo "$KICI_JOB_NAME 2" >> "@JUDGE@"
          for n in $(seq 151 200); do echo "line $n"; done
          echo "said=$KICI_JOB_NAME" >> "$KICI_OUTPUT"
"#;

/// The other two jobs, each after the one before it.
fn workflow(judge: &str) -> String {
    let first = THREE.replace("&job", "").replace("@JUDGE@", judge);
    let body = first.split_once("  a:").unwrap().1.to_owned();
    let after = |name: &str, needs: &str| format!("  {name}:\n    needs: {needs}{body}");
    format!("{first}{}{}", after("b", "a"), after("c", "b"))
}

/// Small and repeatable (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}

#[allow(clippy::disallowed_methods, reason = "a failing seed can be given again")]
fn seed() -> u64 {
    let given = std::env::var("KICI_TEST_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| std::hash::RandomState::new().build_hasher().finish() | 1)
}

#[tokio::test]
async fn an_orchestrator_that_is_killed_ten_times_runs_each_step_once_and_loses_no_line() {
    let seed = seed();
    eprintln!("KICI_TEST_SEED={seed}");
    let mut random = Random(seed);
    let mut stack = Stack::start(None).await;
    let judge = stack.dir.path().join("judge");
    let token = stack.agent_token().await;
    let _agent = stack.start_agent("a1", token.token.expose(), &[]).await;
    let workflow = workflow(judge.to_str().unwrap());
    let repository = stack.repository("app", &[(".kici/workflows/three.yaml", &workflow)]).await;
    let run = stack.push_one(&repository, "app").await;
    let address = stack.address.clone();
    for _ in 0..10 {
        // Random moments are the point.
        tokio::time::sleep(Duration::from_millis(random.below(700))).await;
        stack.orchestrator.take().unwrap().kill();
        stack.start_orchestrator(&address).await;
    }
    let ended = stack.ended(run).await;
    assert_eq!(ended.run.status, RunStatus::Success, "{:#?}\n{}", ended.jobs, stack.logs());
    let expected: Vec<String> = (1..=200).map(|n| format!("line {n}")).collect();
    for job in ["a", "b", "c"] {
        assert_eq!(stack.log(run, job).await, expected, "job {job}\n{}", stack.logs());
    }
    assert_eq!(fs::read_to_string(judge).unwrap(), "a 1\na 2\nb 1\nb 2\nc 1\nc 2\n");
    for job in &ended.jobs {
        assert_eq!(job.outputs["said"], job.name, "{job:#?}");
    }
}
