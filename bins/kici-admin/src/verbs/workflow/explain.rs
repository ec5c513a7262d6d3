//! `workflow explain`.

use std::path::{Path, PathBuf};

use clap::Args;
use kici_engine::event::{ChangedFiles, Event};
use kici_engine::ids::RunId;
use kici_engine::plan::{self, Planned, RunInfo, Scope};
use kici_engine::repository::{CONFIG_FILE, LOCK_FILE, RepositoryConfig, Resolved, ResolvedSet, read_config, resolve};
use kici_engine::trigger::{Outcome, WorkflowDecision, match_workflow, skip_ci};
use serde::Serialize;

use super::{Repository, event, files};
use crate::exit::{Failure, VERDICT};
use crate::output::{Output, printable};
use crate::verbs::event::decision_lines;

/// Why each trigger matches or not.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// The event: JSON with the fields that expressions see as `event`, or a forge's body with --kind; - is stdin
    event: PathBuf,
    #[command(flatten)]
    repository: Repository,
}

#[derive(Serialize)]
struct Report {
    /// Something would run.
    runs: bool,
    /// Why nothing is looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
    workflows: Vec<Explained>,
}

#[derive(Serialize)]
struct Explained {
    #[serde(flatten)]
    decision: WorkflowDecision,
    /// Why a workflow that matches makes no run.
    #[serde(skip_serializing_if = "Option::is_none")]
    declined: Option<String>,
    /// The jobs of its run.
    jobs: Vec<String>,
}

pub(super) fn run(out: &Output, explain: &Explain) -> Result<u8, Failure> {
    let event = event::load(&explain.event, explain.repository.kind.as_deref())?;
    let (config, set) = said_by(out, &explain.repository.repo)?;
    let changed = event::changed(&explain.repository, &event);
    let report = report(config, &set, &event, &changed);
    out.document(&report, |_| people(&report))?;
    Ok(if report.runs { 0 } else { VERDICT })
}

/// The settings and workflows of a repository, as an orchestrator reads them from a commit.
fn said_by(out: &Output, repo: &Path) -> Result<(RepositoryConfig, ResolvedSet), Failure> {
    let text = |name: &str| match std::fs::read_to_string(repo.join(name)) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(files::unreadable(&repo.join(name), &error)),
    };
    let config = text(CONFIG_FILE)?.map_or_else(|| Ok(RepositoryConfig::default()), |text| read_config(&text));
    let config = config.map_err(|error| Failure::new(VERDICT, error.to_string()))?;
    let set = resolve(config, &files::compile(out, repo)?, text(LOCK_FILE)?.as_deref());
    if let Some(error) = &set.corrupt {
        out.say(error.to_string());
    }
    if set.missing {
        out.say(format!("{CONFIG_FILE} says `lock: required`, and there is no {LOCK_FILE}"));
    }
    set.notes.iter().for_each(|note| out.say(note));
    Ok((config, set))
}

fn report(config: RepositoryConfig, set: &ResolvedSet, event: &Event, changed: &ChangedFiles) -> Report {
    if let Some(marker) = skip_ci(event).filter(|_| config.skip_ci) {
        let skipped = Some(format!("the head commit says {marker}"));
        return Report { runs: false, skipped, workflows: Vec::new() };
    }
    let workflows: Vec<Explained> = set.workflows.iter().map(|one| explained(one, event, changed)).collect();
    Report { runs: workflows.iter().any(|one| !one.jobs.is_empty()), skipped: None, workflows }
}

fn explained(resolved: &Resolved, event: &Event, changed: &ChangedFiles) -> Explained {
    let workflow = &resolved.workflow;
    let decision = match_workflow(workflow, event, Some(changed));
    let mut one = Explained { decision, declined: None, jobs: Vec::new() };
    if !matches!(one.decision.outcome, Outcome::Matched { .. }) {
        return one;
    }
    if let Some(drift) = &resolved.drift {
        one.declined = Some(format!("lock_drift: {drift}"));
        return one;
    }
    let repo = event.repo.as_deref().unwrap_or_default();
    let (git_ref, sha) = (event.git_ref.as_deref(), event.sha.as_deref().unwrap_or_default());
    let run = RunInfo { id: RunId::from_uuid(Default::default()), repo, git_ref, sha, attempt: 1 };
    match plan::plan_run(Scope { workflow, event, run }, &plan::Fleet::default()) {
        Ok(Planned::Run(plan)) => one.jobs = plan.jobs.into_iter().map(|job| job.name).collect(),
        Ok(Planned::Declined { reason }) => one.declined = Some(reason),
        Err(error) => one.declined = Some(error.to_string()),
    }
    one
}

fn people(report: &Report) -> String {
    if let Some(skipped) = &report.skipped {
        return format!("nothing runs: {}", printable(skipped));
    }
    let one = |one: &Explained| {
        let mut text = decision_lines(&one.decision);
        if let Some(reason) = &one.declined {
            text.push_str(&format!("  but makes no run: {}\n", printable(reason)));
        }
        if !one.jobs.is_empty() {
            text.push_str(&format!("  jobs: {}\n", printable(&one.jobs.join(", "))));
        }
        text
    };
    report.workflows.iter().map(one).collect::<Vec<_>>().join("\n")
}
