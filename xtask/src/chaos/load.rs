//! The work: a repository whose workflows write down what they do, and pushes of it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kici_engine::ids::DeliveryRowId;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use super::site::Site;
use crate::dev::repo::{Repo, ZERO};

/// A step: it says in the judge's file that it begins, prints numbered lines with pauses, and says that it ended. The
/// directory above the workspace is named `<job>.<epoch>`. One short write to a file opened with O_APPEND is never torn.
const STEP: &str = r#"set -eu
          k=${PWD%/*}; k=${k##*/}
          echo "$k @STEP@ start" >> '@JUDGE@'
          n=0
          while [ $n -lt @LINES@ ]; do
            n=$((n + 1)); echo "line $n"
            if [ $((n % @EVERY@)) -eq 0 ]; then sleep @PAUSE@; fi
          done
          echo "$k @STEP@ end" >> '@JUDGE@'
"#;

/// How long a sender of webhooks waits before it tries again.
const AGAIN: Duration = Duration::from_millis(300);

/// What a job must have done when it succeeded: for each step the number of its lines.
pub(super) type Expected = Vec<u64>;

/// The jobs that one push starts, by workflow.
pub(super) struct Workload {
    pushes: usize,
}

/// A job of the workload.
struct Kind {
    name: &'static str,
    needs: &'static str,
    variants: usize,
    /// Lines, pause after every so many, and for how long in seconds.
    steps: &'static [(u64, u64, &'static str)],
}

const QUICK: &[(u64, u64, &str)] = &[(30, 1_000, "0")];
const TWO: &[(u64, u64, &str)] = &[(40, 20, "0.05"), (10, 1_000, "0")];
const SLOW: &[(u64, u64, &str)] = &[(120, 10, "0.3")];
const LOUD: &[(u64, u64, &str)] = &[(3_000, 1_500, "0.5")];

const WORKFLOWS: [(&str, &[Kind]); 4] = [
    ("fan", &[Kind { name: "small", needs: "", variants: 12, steps: QUICK }]),
    (
        "chain",
        &[
            Kind { name: "first", needs: "", variants: 1, steps: TWO },
            Kind { name: "second", needs: "first", variants: 1, steps: TWO },
            Kind { name: "third", needs: "second", variants: 1, steps: TWO },
        ],
    ),
    (
        "slow",
        &[
            Kind { name: "sleepy", needs: "", variants: 3, steps: SLOW },
            Kind { name: "loud", needs: "", variants: 1, steps: LOUD },
        ],
    ),
    (
        "gather",
        &[
            Kind { name: "part", needs: "", variants: 4, steps: QUICK },
            Kind { name: "whole", needs: "part", variants: 1, steps: QUICK },
        ],
    ),
];

/// A push that was accepted.
pub(super) struct Accepted {
    pub(super) id: DeliveryRowId,
}

impl Workload {
    /// At least this many jobs.
    pub(super) fn of(jobs: usize) -> Self {
        Self { pushes: jobs.div_ceil(Self::per_push()).max(1) }
    }

    pub(super) fn per_push() -> usize {
        WORKFLOWS.iter().flat_map(|(_, kinds)| kinds.iter()).map(|kind| kind.variants).sum()
    }

    pub(super) fn workflows() -> usize {
        WORKFLOWS.len()
    }

    /// What a job of this name in this workflow prints; none when there is no such job.
    pub(super) fn expected(workflow: &str, base_name: &str) -> Option<Expected> {
        let (_, kinds) = WORKFLOWS.iter().find(|(name, _)| *name == workflow)?;
        let kind = kinds.iter().find(|kind| kind.name == base_name)?;
        Some(kind.steps.iter().map(|(lines, _, _)| *lines).collect())
    }

    /// A repository with the workflows; their steps write to the file `judge` in `directory`.
    pub(super) fn repository(&self, directory: &Path) -> Result<Repo> {
        let template = directory.join("template");
        let folder = template.join(".kici/workflows");
        std::fs::create_dir_all(&folder)?;
        let judge = directory.join("judge");
        std::fs::write(&judge, "")?;
        for (name, kinds) in WORKFLOWS {
            std::fs::write(folder.join(format!("{name}.yaml")), workflow(name, kinds, &judge))?;
        }
        Repo::create(&template, &directory.join("repo"))
    }

    /// Sends the pushes, spread over `length`. Each is sent again until it is accepted, as forges do.
    pub(super) async fn send(&self, site: &Site, start: Instant, length: Duration) -> Result<Vec<Accepted>> {
        // No more than one start in a while waits for an answer, and a frozen server must not hold it for long.
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build()?;
        let url = format!("{}/webhooks/default/{}", site.server.url(), site.source);
        let body = json!({"ref": "refs/heads/main", "before": ZERO, "after": site.sha, "default_branch": "main"});
        let mut accepted = Vec::new();
        for number in 0..self.pushes {
            sleep_until(start + length.mul_f64(number as f64 / self.pushes as f64)).await;
            accepted.push(push(&http, &url, number, &body).await?);
        }
        Ok(accepted)
    }
}

async fn push(http: &reqwest::Client, url: &str, number: usize, body: &Value) -> Result<Accepted> {
    loop {
        let request = http.post(url).header("x-delivery-id", format!("chaos-{number}")).header("x-event-type", "push");
        match request.json(body).send().await {
            Ok(answer) if answer.status().is_success() => {
                // Accepted, but the answer may be cut off: the repetition names the same delivery.
                if let Ok(answer) = answer.json::<Value>().await {
                    let id = answer["delivery_id"].as_str().context("an answer without a delivery")?;
                    return Ok(Accepted { id: id.parse().context("the id of a delivery")? });
                }
            }
            Ok(answer) if answer.status().is_client_error() && answer.status() != 429 => {
                anyhow::bail!("a push was refused ({}): {}", answer.status(), answer.text().await.unwrap_or_default());
            }
            Ok(_) | Err(_) => {}
        }
        sleep(AGAIN).await;
    }
}

fn workflow(name: &str, kinds: &[Kind], judge: &Path) -> String {
    let mut text = format!("name: {name}\non: push\ndefaults: {{ runs_on: default }}\njobs:\n");
    for kind in kinds {
        text += &format!("  {}:\n    checkout: false\n", kind.name);
        if !kind.needs.is_empty() {
            text += &format!("    needs: {}\n", kind.needs);
        }
        if kind.variants > 1 {
            let values: Vec<String> = (0..kind.variants).map(|n| n.to_string()).collect();
            text += &format!("    matrix: {{ n: [{}] }}\n", values.join(", "));
        }
        text += "    steps:\n";
        for (step, (lines, every, pause)) in kind.steps.iter().enumerate() {
            let script = STEP
                .replace("@STEP@", &step.to_string())
                .replace("@LINES@", &lines.to_string())
                .replace("@EVERY@", &every.to_string())
                .replace("@PAUSE@", pause)
                .replace("@JUDGE@", &judge.display().to_string());
            text += &format!("      - run: |\n          {script}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workflows_compile_and_have_the_jobs_that_are_counted() {
        for (name, kinds) in WORKFLOWS {
            let text = workflow(name, kinds, Path::new("/tmp/judge"));
            let compiled = kici_engine::compile::compile_file(&format!(".kici/workflows/{name}.yaml"), &text);
            assert!(!compiled.has_errors(), "{text}\n{compiled:#?}");
        }
        assert_eq!(Workload::per_push(), 24);
        assert_eq!(Workload::of(1_000).pushes, 42);
        assert_eq!(Workload::expected("chain", "second"), Some(vec![40, 10]));
    }
}
