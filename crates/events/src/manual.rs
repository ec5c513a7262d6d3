//! Runs that a person starts, and pushes that a person has sent.

use std::collections::BTreeMap;
use std::sync::Arc;

use kici_engine::check::CheckMode;
use kici_engine::event::{Event, EventKind, ForkState, Sender};
use kici_engine::ids::RunId;
use kici_engine::inputs;
use kici_engine::lock::Workflow;
use kici_engine::plan::{PlanError, Planned, RunInfo, Scope, plan_run};
use kici_engine::trigger::{declared_inputs, manual_trigger};
use kici_forge::ForgeError;
use kici_store::StoreError;
use kici_store::model::{Activate, CreatedRun};
use serde_json::Value as Json;

use crate::planner::Planner;
use crate::runs::{Cause, Origin};
use crate::sources::OpenSource;

/// What is to be started.
#[derive(Clone, Debug)]
pub struct Manual<'a> {
    /// The source to read the commit from.
    pub source: &'a OpenSource,
    /// `owner/name`; a local source has one repository.
    pub repo: Option<&'a str>,
    /// Name of the workflow.
    pub workflow: &'a str,
    /// Branch, tag or full ref; the default branch when none.
    pub git_ref: Option<&'a str>,
    /// As given, not validated.
    pub inputs: BTreeMap<String, Json>,
    /// What the run may change.
    pub check_mode: CheckMode,
    /// Who asks.
    pub actor: &'a str,
    /// Calls with the same key give the same run.
    pub request_key: Option<(String, String)>,
    /// The request.
    pub request_id: &'a str,
}

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum ManualError {
    /// The repository must be named.
    #[error("source `{0}` serves several repositories; name one as `repo` (owner/name)")]
    RepoNeeded(String),
    /// No such workflow at the commit.
    #[error("there is no workflow `{workflow}` at {sha}; there are: {known}")]
    UnknownWorkflow {
        /// What was asked for.
        workflow: String,
        /// Where it was looked for.
        sha: String,
        /// What there is.
        known: String,
    },
    /// The file of the workflow is invalid.
    #[error("workflow files at this commit are invalid: {0}")]
    Invalid(String),
    /// It cannot be started by hand.
    #[error("workflow `{0}` cannot be started by hand; add `manual: {{}}` to its `on`")]
    NotManual(String),
    /// Inputs that do not fit, one text each.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Inputs(Vec<inputs::InputError>),
    /// The workflow's condition is false.
    #[error("the workflow declines: {0}")]
    Declined(String),
    /// It cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The forge did not answer.
    #[error(transparent)]
    Forge(#[from] ForgeError),
    /// The database did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Planner {
    /// Starts a workflow by hand. `activate` decides on jobs whose needs are met.
    ///
    /// # Errors
    /// [`ManualError`]; then there is no run.
    pub async fn start_manual(
        &self,
        manual: Manual<'_>,
        activate: Arc<dyn Activate>,
    ) -> Result<CreatedRun, ManualError> {
        let repo = repo_of(&manual)?;
        let forge = self.sources.forge(manual.source)?;
        let head = forge.head(&repo, manual.git_ref).await?;
        let files = forge.workflows_at(&repo, &head.sha).await?;
        let git_ref = head.branch.as_ref().map(|branch| format!("refs/heads/{branch}"));
        let mut event = manual_event(&manual, &repo, git_ref, &head.sha, head.branch.as_deref());
        let workflow = self.find(&manual, &repo, &head.sha, &files, &event)?;
        let declared = manual_trigger(&workflow)
            .and_then(declared_inputs)
            .ok_or_else(|| ManualError::NotManual(workflow.name.clone()))?;
        event.inputs = inputs::validate(declared, &manual.inputs).map_err(ManualError::Inputs)?;
        if let Some(unmet) = crate::planner::unmet(&*forge, &repo, &head.sha, &workflow).await {
            return Err(ManualError::Declined(unmet.into_text()));
        }
        let id = RunId::mint(&*self.ids);
        let fleet = self.fleet(&workflow).await?;
        let run = RunInfo { id, repo: &repo, git_ref: event.git_ref.as_deref(), sha: &head.sha, attempt: 1 };
        let planned = plan_run(Scope { workflow: &workflow, event: &event, run }, &fleet)?;
        let plan = match planned {
            Planned::Run(plan) => plan,
            Planned::Declined { reason } => return Err(ManualError::Declined(reason)),
        };
        let source = &manual.source.source;
        let origin = Origin {
            org: &source.org,
            source: source.id,
            repo: &repo,
            git_ref: event.git_ref.as_deref(),
            sha: &head.sha,
            cause: Cause::Person,
            request_id: manual.request_id,
            machine_id: source.local_repo().is_some().then_some(self.config.machine_id.as_str()),
        };
        let run = self.maker().run(id, origin, &workflow, &event, "manual", plan);
        Ok(self.store.run_create(run, manual.request_key, activate).await?)
    }

    fn find(
        &self,
        manual: &Manual<'_>,
        repo: &str,
        sha: &str,
        files: &kici_forge::WorkflowFiles,
        event: &Event,
    ) -> Result<Workflow, ManualError> {
        let mut decision = crate::planner::Decision::new(event);
        let commit = self.compile(manual.source, repo, sha, files, &mut decision);
        let all: Vec<&Workflow> = commit.resolved.workflows.iter().map(|resolved| &resolved.workflow).collect();
        if let Some(found) = commit.resolved.workflows.iter().find(|found| found.workflow.name == manual.workflow) {
            // Somebody waits for the answer: better none than a run that fails at once.
            return match &found.drift {
                Some(drift) => Err(ManualError::Invalid(drift.clone())),
                None => Ok(found.workflow.clone()),
            };
        }
        if decision.invalid || decision.corrupt {
            return Err(ManualError::Invalid(decision.notes.join("; ")));
        }
        let mut known: Vec<&str> = all.iter().map(|workflow| workflow.name.as_str()).collect();
        known.sort_unstable();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Err(ManualError::UnknownWorkflow { workflow: manual.workflow.to_owned(), sha: sha.to_owned(), known })
    }
}

fn repo_of(manual: &Manual<'_>) -> Result<String, ManualError> {
    let source = &manual.source.source;
    match (source.local_repo(), manual.repo) {
        (Some(repo), _) => Ok(repo),
        (None, Some(repo)) => Ok(repo.to_owned()),
        (None, None) => Err(ManualError::RepoNeeded(source.name.clone())),
    }
}

fn manual_event(manual: &Manual<'_>, repo: &str, git_ref: Option<String>, sha: &str, branch: Option<&str>) -> Event {
    let source = &manual.source.source;
    Event {
        kind: EventKind::Manual,
        raw_name: "manual".to_owned(),
        action: None,
        org: source.org.clone(),
        routing_key: source.routing_key(),
        provider: source.config.kind().as_str().to_owned(),
        source: source.name.clone(),
        repo: Some(repo.to_owned()),
        git_ref,
        sha: Some(sha.to_owned()),
        target_branch: branch.map(str::to_owned),
        source_branch: None,
        base_sha: None,
        tag: None,
        default_branch: None,
        is_fork_pr: ForkState::No,
        pr_number: None,
        sender: Sender { username: Some(manual.actor.to_owned()), user_id: None },
        commit_message: None,
        inputs: BTreeMap::new(),
        requested_workflow: Some(manual.workflow.to_owned()),
        check_mode: manual.check_mode,
        payload: Json::Null,
        chain_depth: 0,
    }
}
