//! `run`.

use clap::Subcommand;
use kici_api::client::Client;
use kici_api::dto::runs::{
    CancelRun, FailureView, HandOverView, JobView, RerunRun, RunAccepted, RunDetail, RunFilter, RunView, StepView,
    TriggerRun,
};
use kici_engine::check::CheckMode;
use kici_engine::ids::{DeliveryRowId, RunId};
use kici_engine::time::Ts;
use serde::Serialize;

use super::run_logs::{self, Logs};
use super::{Context, pages};
use crate::args::{Paging, key_value, typed};
use crate::exit::Failure;
use crate::output::{Column, Output, fields, optional, status, text};

/// Runs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// List runs, newest first
    List {
        /// Only these statuses, comma separated
        #[arg(long)]
        status: Option<String>,
        /// Only this workflow
        #[arg(long)]
        workflow: Option<String>,
        /// Only this repository
        #[arg(long)]
        repo: Option<String>,
        /// Only this source
        #[arg(long)]
        source: Option<String>,
        /// Only this full ref
        #[arg(long = "ref")]
        git_ref: Option<String>,
        /// Only this commit
        #[arg(long)]
        sha: Option<String>,
        /// Only runs that this delivery started
        #[arg(long)]
        delivery: Option<DeliveryRowId>,
        /// Only runs created since: RFC 3339, or an age such as 2h or 7d
        #[arg(long)]
        since: Option<String>,
        #[command(flatten)]
        paging: Paging,
    },
    /// Show a run and its jobs
    Show {
        /// Its id
        run: RunId,
        /// With the steps of each job
        #[arg(long)]
        steps: bool,
    },
    /// List the artifacts of a run
    Artifacts {
        /// Its id
        run: RunId,
    },
    /// Print logs
    Logs(Logs),
    /// Wait for a run to end and tell what happens; exit 0 when it succeeds, 1 when not
    Watch {
        /// Its id
        run: RunId,
    },
    /// Cancel a run
    Cancel {
        /// Its id
        run: RunId,
        /// Run no cancel hooks, kill at once
        #[arg(long)]
        force: bool,
    },
    /// Repeat a run at the same commit
    Rerun {
        /// Its id
        run: RunId,
        /// Repeat only what did not succeed
        #[arg(long)]
        failed: bool,
    },
    /// Start a workflow that has a manual trigger
    Trigger {
        /// The source
        source: String,
        /// The workflow
        workflow: String,
        /// Branch, tag, full ref or commit [default: the default branch]
        #[arg(long = "ref")]
        git_ref: Option<String>,
        /// owner/name, for sources with several repositories
        #[arg(long)]
        repo: Option<String>,
        /// An input; may be given again. true, false and numbers are read as such
        #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
        input: Vec<(String, String)>,
        /// What may change: apply, check (only look for drift) or check-fail-on-drift
        #[arg(long, default_value = "apply", value_name = "MODE")]
        check_mode: CheckMode,
        /// The same key within 24 h gives the same run
        #[arg(long)]
        idempotency_key: Option<String>,
    },
}

/// A run with its steps.
#[derive(Serialize)]
struct Shown {
    run: RunView,
    jobs: Vec<JobView>,
    steps: Vec<StepView>,
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::List { status, workflow, repo, source, git_ref, sha, delivery, since, paging } => {
            let since = since.as_deref().map(|text| out.instant(text)).transpose()?;
            let filter = RunFilter { status, workflow, repo, source, git_ref, sha, delivery, since };
            let page = pages(&paging, |page| {
                let (client, filter) = (&client, &filter);
                async move { client.runs(filter, &page).await }
            });
            out.page(&page.await?, "no runs", &columns(out))?;
        }
        Verb::Show { run, steps } => show(out, &client, run, steps).await?,
        Verb::Artifacts { run } => return super::artifact::list(context, run).await,
        Verb::Logs(logs) => return run_logs::logs(out, &client, logs).await,
        Verb::Watch { run } => return run_logs::watch(out, &client, run).await,
        Verb::Cancel { run, force } => {
            let accepted = client.cancel_run(run, CancelRun { force }).await?;
            out.document(&accepted, |_| {
                fields(&[
                    ("run", accepted.run_id.to_string()),
                    ("status", accepted.status.to_string()),
                    ("agents told", accepted.agents_notified.to_string()),
                    ("out of contact", accepted.unreachable.join(", ")),
                    ("jobs not started", accepted.pending_cancelled.to_string()),
                ])
            })?;
        }
        Verb::Rerun { run, failed } => {
            started(out, &client.rerun(run, RerunRun { failed_only: failed }, None).await?)?;
        }
        Verb::Trigger { source, workflow, git_ref, repo, input, check_mode, idempotency_key } => {
            let inputs = typed("--input", &input)?;
            let request = TriggerRun { source, workflow, repo, git_ref, inputs, check_mode };
            started(out, &client.trigger_run(&request, idempotency_key.as_deref()).await?)?;
        }
    }
    Ok(0)
}

fn started(out: &Output, accepted: &RunAccepted) -> Result<(), Failure> {
    out.document(accepted, |_| accepted.run_id.to_string())?;
    out.say(format!("follow it with `kici-admin run logs -f {}`", accepted.run_id));
    Ok(())
}

fn columns(out: &Output) -> Vec<Column<'_, RunView>> {
    vec![
        ("RUN", Box::new(|r| text(r.id))),
        ("STATUS", Box::new(|r| status(r.status.as_str()))),
        ("WORKFLOW", Box::new(|r| text(&r.workflow))),
        ("REPOSITORY", Box::new(|r| text(&r.repo))),
        ("REF", Box::new(|r| text(r.git_ref.as_deref().map_or("-", short_ref)))),
        ("COMMIT", Box::new(|r| text(r.sha.get(..8).unwrap_or(&r.sha)))),
        ("TRIGGER", Box::new(|r| text(&r.trigger))),
        ("TOOK", Box::new(|r| text(out.took(r.started_at, r.finished_at)))),
        ("CREATED", Box::new(|r| text(out.time(Some(r.created_at))))),
    ]
}

fn short_ref(full: &str) -> &str {
    full.strip_prefix("refs/heads/").or_else(|| full.strip_prefix("refs/tags/")).unwrap_or(full)
}

async fn show(out: &Output, client: &Client, run: RunId, with_steps: bool) -> Result<(), Failure> {
    let detail = client.run(run).await?;
    if !with_steps {
        return out.document(&detail, |out| people(out, &detail, None));
    }
    let steps = client.steps(run, None).await?;
    let shown = Shown { run: detail.run.clone(), jobs: detail.jobs.clone(), steps };
    out.document(&shown, |out| people(out, &detail, Some(&shown.steps)))
}

fn people(out: &Output, detail: &RunDetail, steps: Option<&[StepView]>) -> String {
    let run = &detail.run;
    let time = |at: Option<Ts>| at.map(|at| out.time(Some(at))).unwrap_or_default();
    let head = fields(&[
        ("run", run.id.to_string()),
        ("name", run.name.clone()),
        ("status", run.status.to_string()),
        ("failure", run.failure.as_ref().map(failure).unwrap_or_default()),
        ("workflow", run.workflow.clone()),
        ("repository", run.repo.clone()),
        ("ref", run.git_ref.clone().unwrap_or_default()),
        ("commit", run.sha.clone()),
        ("trigger", format!("{} of source {}", run.trigger, run.source)),
        ("delivery", detail.delivery_id.map(|id| id.to_string()).unwrap_or_default()),
        ("check mode", Some(run.check_mode).filter(|mode| mode.is_check()).map(|m| m.to_string()).unwrap_or_default()),
        ("attempt", run.attempt.to_string()),
        ("repeats", run.parent_run_id.map(|id| id.to_string()).unwrap_or_default()),
        ("cancelled by", detail.cancelled_by.clone().unwrap_or_default()),
        ("created", time(Some(run.created_at))),
        ("started", time(run.started_at)),
        ("finished", time(run.finished_at)),
        ("took", run.started_at.map(|at| out.took(Some(at), run.finished_at)).unwrap_or_default()),
    ]);
    let columns: [Column<'_, JobView>; 6] = [
        ("JOB", Box::new(|j| text(&j.name))),
        ("STATUS", Box::new(|j| status(j.status.as_str()))),
        ("AGENT", Box::new(|j| optional(j.agent_id.as_ref()))),
        ("TRY", Box::new(|j| text(j.attempt))),
        ("TOOK", Box::new(|j| text(out.took(j.started_at, j.finished_at)))),
        (
            "WHY",
            Box::new(|j| {
                text(j.failure.as_ref().map(failure).or_else(|| j.routing_reason.clone()).unwrap_or_default())
            }),
        ),
    ];
    let mut people = format!("{head}\n{}", out.table(&detail.jobs, &columns));
    let earlier: Vec<(&JobView, &HandOverView)> =
        detail.jobs.iter().flat_map(|job| job.earlier.iter().map(move |once| (job, once))).collect();
    if !earlier.is_empty() {
        let columns: [Column<'_, (&JobView, &HandOverView)>; 5] = [
            ("EARLIER", Box::new(|(job, _)| text(&job.name))),
            ("EPOCH", Box::new(|(_, once)| text(once.epoch))),
            ("AGENT", Box::new(|(_, once)| text(&once.agent_id))),
            ("END", Box::new(|(_, once)| optional(once.outcome.as_ref()))),
            ("WHY", Box::new(|(_, once)| optional(once.reason.as_ref()))),
        ];
        people.push('\n');
        people.push_str(&out.table(&earlier, &columns));
    }
    if let Some(steps) = steps {
        let job =
            |step: &StepView| detail.jobs.iter().find(|job| job.id == step.job_id).map_or("", |job| job.name.as_str());
        let columns: [Column<'_, StepView>; 9] = [
            ("JOB", Box::new(|s| text(job(s)))),
            ("STEP", Box::new(|s| text(&s.name))),
            ("STATUS", Box::new(|s| status(s.status.as_str()))),
            ("EXIT", Box::new(|s| optional(s.exit_code.as_ref()))),
            ("TRY", Box::new(|s| text(s.attempt))),
            ("GROUP", Box::new(|s| optional(s.group.as_ref()))),
            ("CHECK", Box::new(|s| optional(s.check.as_ref()))),
            ("TOOK", Box::new(|s| text(out.took(s.started_at, s.finished_at)))),
            ("LINES", Box::new(|s| text(s.log.lines))),
        ];
        people.push('\n');
        people.push_str(&out.table(steps, &columns));
    }
    people
}

fn failure(failure: &FailureView) -> String {
    match &failure.message {
        Some(message) => format!("{message} ({}, {})", failure.class, failure.reason),
        None => format!("{} ({})", failure.reason, failure.class),
    }
}
