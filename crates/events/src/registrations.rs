//! Registered workflows: those of default branches that an event without a commit of its own can start, and the events
//! that do.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kici_engine::comment::{Command, commands};
use kici_engine::event::{Event, EventKind};
use kici_engine::ids::SourceId;
use kici_engine::lock::Workflow;
use kici_engine::repository::Resolved;
use kici_engine::trigger::{Outcome, kind_name, match_workflow};
use kici_forge::{Forge, ForgeError};
use kici_store::model::{DeliveryStatus, ProcessedDelivery, RegisteredWorkflow, Registration, RegistrationSet};

use crate::compiled::Commit;
use crate::planner::{Decision, Matched, Planner, Retry, Work, from_stranger, outcome};
use crate::runs::{Cause, Origin, lock_form};
use crate::sources::OpenSource;

/// The longest wait for the head of a branch: after that the registered commit is better than none.
const HEAD_WAIT: Duration = Duration::from_secs(10);

/// The heads of branches, by source, repository and branch.
pub(crate) type Heads = HashMap<(SourceId, String, Option<String>), String>;

/// True for a push to the repository's default branch.
pub(crate) fn is_default_branch_push(event: &Event) -> bool {
    event.kind == EventKind::Push && event.default_branch.is_some() && event.default_branch == event.target_branch
}

/// The registrations that the workflows of a commit make. Of one that is not whole nothing is known to be gone.
fn set(
    source: &OpenSource,
    default_branch: Option<&str>,
    repo: &str,
    sha: &str,
    commit: &Commit,
    seen: Option<Vec<String>>,
) -> RegistrationSet {
    RegistrationSet {
        org: source.source.org.clone(),
        routing_key: source.source.routing_key(),
        source_id: source.source.id,
        repo: repo.to_owned(),
        sha: sha.to_owned(),
        default_branch: default_branch.map(str::to_owned),
        workflows: registrable(commit),
        keeps_others: !commit.is_whole(),
        seen,
    }
}

/// The commits that these registrations are from, each once.
fn commits_of<'a>(known: impl Iterator<Item = &'a Registration>) -> Vec<String> {
    known.map(|one| one.sha.clone()).collect::<BTreeSet<_>>().into_iter().collect()
}

/// A workflow that its lock document and its file disagree on is not registered: the stored form could not say so.
fn registrable(commit: &Commit) -> Vec<RegisteredWorkflow> {
    let sound = commit.resolved.workflows.iter().filter(|resolved| resolved.drift.is_none());
    sound.map(|resolved| registered(&resolved.workflow)).collect()
}

fn registered(workflow: &Workflow) -> RegisteredWorkflow {
    let lock = lock_form(workflow);
    let mut trigger_types: Vec<String> = workflow.triggers.iter().map(|t| kind_name(t).to_owned()).collect();
    trigger_types.sort_unstable();
    trigger_types.dedup();
    RegisteredWorkflow { name: workflow.name.clone(), lock_digest: lock.digest, lock_json: lock.json, trigger_types }
}

/// The trigger types that can listen to an event, besides `webhook`, which hears all.
fn listeners(kind: EventKind) -> Option<&'static str> {
    match kind {
        EventKind::Comment => Some("comment"),
        EventKind::Review => Some("review"),
        EventKind::ReviewComment => Some("review_comment"),
        EventKind::Release => Some("release"),
        EventKind::Dispatch | EventKind::Manual => Some("dispatch"),
        EventKind::Create => Some("create"),
        EventKind::Delete => Some("delete"),
        EventKind::Status => Some("status"),
        EventKind::WorkflowRun => Some("workflow_run"),
        EventKind::Fork => Some("fork"),
        EventKind::Star => Some("star"),
        EventKind::Watch => Some("watch"),
        EventKind::Hook => Some("generic_webhook"),
        // The first three have a commit of their own; the others come from the internal bus, not from a source.
        EventKind::Push
        | EventKind::Tag
        | EventKind::Pr
        | EventKind::Other
        | EventKind::KiciEvent
        | EventKind::WorkflowComplete
        | EventKind::JobComplete
        | EventKind::WorkflowsFailedBatch
        | EventKind::Schedule
        | EventKind::Lifecycle => None,
    }
}

/// What registered workflows are told.
pub(crate) struct Told<'a> {
    pub org: &'a str,
    pub request_id: &'a str,
    /// The same in the forms that different triggers listen to; the first that matches starts the workflow.
    pub events: &'a [Event],
}

/// A registered workflow that matches.
pub(crate) struct Candidate<'a> {
    pub registration: &'a Registration,
    workflow: Arc<Workflow>,
    event: &'a Event,
    trigger: usize,
    kind: String,
}

/// What to do while the forge does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Haste {
    /// Run the registered commit.
    Now,
    /// Try again later.
    CanWait,
}

/// What comes of the commands in a comment, which is told whether or not a workflow listens to comments too.
fn answers(event: &Event) -> Vec<String> {
    let answer = |command: &Command<'_>| {
        let verb = command.verb.as_str();
        match command.run {
            Some(run) => format!("`/kici {verb}`: `{run}` is no run of this pull request that waits for a decision"),
            None => format!("`/kici {verb}`: no run of this pull request waits for a decision"),
        }
    };
    commands(event).iter().map(answer).collect()
}

impl Planner {
    /// Events without a commit of their own: the registered workflows of default branches. A forge's event reaches the
    /// workflows of its repository, a generic source's those of the whole organisation.
    pub(crate) async fn registered(
        &self,
        work: &Work,
        source: &OpenSource,
        event: &Event,
    ) -> Result<ProcessedDelivery, Retry> {
        // Anybody may review what he has proposed himself, and a review starts with the rights of the default branch.
        if matches!(event.kind, EventKind::Review | EventKind::ReviewComment)
            && let Some(note) = from_stranger(event)
        {
            return Ok(outcome(work, DeliveryStatus::Skipped, note));
        }
        let own = source.source.routing_key();
        // What a forge tells of no repository reaches nobody; a generic source reaches the whole organisation.
        let scope = (event.kind != EventKind::Hook).then(|| (own.as_str(), event.repo.as_deref().unwrap_or_default()));
        let kinds: Vec<&str> = listeners(event.kind).into_iter().chain(["webhook"]).collect();
        let found = self.registry.listening(&work.org, scope, &kinds).await?;
        let answers = answers(event);
        if found.is_empty() {
            let nothing = format!("no registered workflow listens to `{}` events", event.raw_name);
            let note = if answers.is_empty() { nothing } else { answers.join("; ") };
            return Ok(outcome(work, DeliveryStatus::Processed, &note));
        }
        let mut decision = Decision::new(event);
        decision.notes = answers;
        let told = Told { org: &work.org, request_id: &work.request_id, events: std::slice::from_ref(event) };
        for registration in &found {
            let Some(candidate) = self.candidate(&mut decision, registration, &told).await? else { continue };
            self.run_candidate(&mut decision, &told, Cause::Delivery(work.id), candidate, Haste::Now).await?;
        }
        Ok(self.finish(work, decision, None))
    }

    /// What a push to the default branch makes of the repository's registrations, whatever else comes of it; none where nothing
    /// is to be written. A push that arrives late does not bring back what a later one has replaced: the forge is asked about
    /// a commit that is not the registered one, and the writer compares again what was registered then.
    ///
    /// # Errors
    /// [`Retry`] when the forge does not answer.
    #[allow(clippy::too_many_arguments, reason = "each is a part of the push that is looked at")]
    pub(crate) async fn refresh(
        &self,
        decision: &mut Decision,
        source: &OpenSource,
        event: &Event,
        repo: &str,
        sha: &str,
        commit: &Commit,
        forge: &dyn Forge,
    ) -> Result<Option<RegistrationSet>, Retry> {
        if !is_default_branch_push(event) {
            return Ok(None);
        }
        let (org, key) = (source.source.org.clone(), Some(source.source.routing_key()));
        let known = self.store.registration_list(org, key, None).await?;
        let seen = commits_of(known.iter().filter(|one| one.repo == repo));
        let set = set(source, event.default_branch.as_deref(), repo, sha, commit, Some(seen.clone()));
        let nothing = set.workflows.is_empty() && (set.keeps_others || seen.is_empty());
        if set.keeps_others && !seen.is_empty() {
            let kept = "the commit is not sound as a whole: workflows that it does not have stay registered";
            decision.notes.push(kept.to_owned());
        }
        if nothing {
            return Ok(None);
        }
        if seen != [sha.to_owned()] {
            match forge.head(repo, event.default_branch.as_deref()).await {
                Ok(head) if head.sha != sha => {
                    let newer = "the branch has a newer commit, whose workflows are the registered ones";
                    decision.notes.push(newer.to_owned());
                    return Ok(None);
                }
                Ok(_) => {}
                Err(error) if error.is_retryable() => return Err(error.into()),
                // A branch that the forge does not know is not known to have a newer commit.
                Err(_) => {}
            }
        }
        Ok(Some(set))
    }

    /// Matches a registered workflow; none when it does not match or may not start, which then stands in the trace.
    pub(crate) async fn candidate<'a>(
        &self,
        decision: &mut Decision,
        registration: &'a Registration,
        told: &Told<'a>,
    ) -> Result<Option<Candidate<'a>>, Retry> {
        let Some(workflow) = self.registry.workflow(&registration.lock_digest).await? else {
            decision.invalid = true;
            decision.refuse(format!("{}: its stored lock document is missing", registration.workflow_name));
            return Ok(None);
        };
        let mut last = None;
        for event in told.events {
            let found = match_workflow(&workflow, event, None);
            if let Outcome::Matched { trigger, kind, .. } = &found.outcome {
                let (trigger, kind) = (*trigger, kind.clone());
                decision.trace.workflow(found);
                if !registration.enabled {
                    decision.notes.push(format!("{}: disabled", registration.workflow_name));
                    return Ok(None);
                }
                return Ok(Some(Candidate { registration, workflow, event, trigger, kind }));
            }
            last = Some(found);
        }
        if let Some(found) = last {
            decision.trace.workflow(found);
        }
        Ok(None)
    }

    /// Plans the run of a registered workflow that matches.
    pub(crate) async fn run_candidate(
        &self,
        decision: &mut Decision,
        told: &Told<'_>,
        cause: Cause,
        candidate: Candidate<'_>,
        haste: Haste,
    ) -> Result<(), Retry> {
        let Candidate { registration, workflow, event, trigger, kind } = candidate;
        let Some((open, forge)) = self.owner(decision, registration).await? else { return Ok(()) };
        let Some((sha, git_ref)) = self.code_of(decision, registration, event, &open, &*forge, haste).await? else {
            return Ok(());
        };
        let event = self.as_seen(event, registration, &open, &sha);
        let origin = Origin {
            org: told.org,
            source: open.source.id,
            repo: &registration.repo,
            git_ref: git_ref.as_deref(),
            sha: &sha,
            cause,
            request_id: told.request_id,
            machine_id: open.source.local_repo().is_some().then_some(self.config.machine_id.as_str()),
        };
        let resolved = Resolved { workflow: Arc::unwrap_or_clone(workflow), drift: None };
        self.start(decision, origin, &resolved, &event, Matched { trigger, kind: &kind }, &*forge).await
    }

    /// The commit of a run and its ref; the definition is the registered one. A release, and a branch or tag that was made, is
    /// itself what runs, as on its forge; everything else runs the head of the default branch. None where that cannot be
    /// told, which then stands in the notes.
    async fn code_of(
        &self,
        decision: &mut Decision,
        registration: &Registration,
        event: &Event,
        open: &OpenSource,
        forge: &dyn Forge,
        haste: Haste,
    ) -> Result<Option<(String, Option<String>)>, Retry> {
        if matches!(event.kind, EventKind::Release | EventKind::Create)
            && let Some(git_ref) = &event.git_ref
        {
            return match forge.commit_of(&registration.repo, git_ref).await {
                Ok(sha) => Ok(Some((sha, Some(git_ref.clone())))),
                Err(error) if error.is_retryable() => Err(error.into()),
                Err(error) => {
                    let note = format!("{}: the commit of {git_ref} is not known: {error}", registration.workflow_name);
                    decision.refuse(note);
                    Ok(None)
                }
            };
        }
        let branch = registration.default_branch.as_deref();
        let git_ref = branch.map(|branch| format!("refs/heads/{branch}"));
        let key = (open.source.id, registration.repo.clone(), registration.default_branch.clone());
        if let Some(sha) = decision.heads.get(&key) {
            return Ok(Some((sha.clone(), git_ref)));
        }
        let late = |_| ForgeError::Unavailable {
            what: format!("the head of `{}`", registration.repo),
            problem: format!("no answer within {} s", HEAD_WAIT.as_secs()),
        };
        let asked = tokio::time::timeout(HEAD_WAIT, forge.head(&registration.repo, branch)).await;
        match asked.map_err(late).and_then(|head| head) {
            Ok(head) => {
                decision.heads.insert(key, head.sha.clone());
                Ok(Some((head.sha, git_ref)))
            }
            Err(error) if haste == Haste::CanWait && error.is_retryable() => Err(error.into()),
            Err(error) => {
                decision.notes.push(format!(
                    "{}: the head of the default branch is not known ({error}); the registered commit is used",
                    registration.workflow_name
                ));
                Ok(Some((registration.sha.clone(), git_ref)))
            }
        }
    }

    /// The event as the run sees it: what it does not say of the code is that of the default branch, and the source is the one
    /// that the code comes from.
    fn as_seen(&self, event: &Event, registration: &Registration, open: &OpenSource, sha: &str) -> Event {
        let mut seen = event.clone();
        seen.routing_key = open.source.routing_key();
        seen.provider = open.source.config.kind().as_str().to_owned();
        if seen.source.is_empty() {
            seen.source.clone_from(&open.source.name);
        }
        let branch = registration.default_branch.as_ref();
        if seen.git_ref.is_none() && seen.sha.is_none() {
            seen.git_ref = branch.map(|branch| format!("refs/heads/{branch}"));
            seen.target_branch = branch.cloned();
        }
        seen.sha.get_or_insert_with(|| sha.to_owned());
        seen.repo.get_or_insert_with(|| registration.repo.clone());
        if seen.default_branch.is_none() {
            seen.default_branch = branch.cloned();
        }
        seen
    }

    /// The source that a registration was read from; its credentials fetch the commit. None when it is gone.
    async fn owner(
        &self,
        decision: &mut Decision,
        registration: &Registration,
    ) -> Result<Option<(OpenSource, Arc<dyn Forge>)>, Retry> {
        let stored = self.store.source_by_id(registration.source_id).await?;
        let open = stored.and_then(|stored| self.sources.open(&stored).ok()).filter(|open| open.enabled);
        let Some(open) = open else {
            decision.refuse(format!("{}: its source was disabled or removed", registration.workflow_name));
            return Ok(None);
        };
        match self.sources.forge(&open) {
            Ok(forge) => Ok(Some((open, forge))),
            Err(error) => {
                decision.refuse(format!("{}: {error}", registration.workflow_name));
                Ok(None)
            }
        }
    }

    /// Reads the default branch of a source's repository and replaces its registrations; returns how many workflows it
    /// has. Used when a source is added, so that hooks work before the first push.
    ///
    /// # Errors
    /// [`Retry`] when the forge or the database does not answer.
    pub async fn register_default_branch(&self, source: &OpenSource, repo: &str) -> Result<usize, Retry> {
        let forge = self.sources.forge(source)?;
        let head = forge.head(repo, None).await?;
        let files = forge.workflows_at(repo, &head.sha).await?;
        let commit = self.commit(source, repo, &head.sha, &files);
        let set = set(source, head.branch.as_deref(), repo, &head.sha, &commit, None);
        let count = set.workflows.len();
        self.store.registrations_replace(set).await?;
        Ok(count)
    }
}
