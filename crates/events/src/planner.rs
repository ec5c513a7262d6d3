//! One delivery, from its bytes to the runs it causes. Reads, decides, and returns everything that is to be written as one
//! value; the caller writes it in one transaction.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::event::{ChangedFiles, Event, EventKind, ForkState};
use kici_engine::ids::{DeliveryRowId, IdSource, RunId};
use kici_engine::lock::Workflow;
use kici_engine::plan::{Activation, Fleet, Planned, RunInfo, RunPlan, Scope, Start, plan_run, wants_hosts};
use kici_engine::repository::{CONFIG_FILE, LOCK_FILE, Resolved};
use kici_engine::requires::{self, Content, Verdict};
use kici_engine::state::FailureReason;
use kici_engine::time::Clock;
use kici_engine::trigger::{Outcome, match_workflow, run_inputs, skip_ci};
use kici_forge::normalise::{Normalised, normalise};
use kici_forge::{Forge, ForgeError, Headers, WorkflowFiles};
use kici_store::Store;
use kici_store::model::{DeliveryOutcome, DeliveryStatus, NewRun, ProcessedDelivery};
use tokio::time::Instant;

use crate::compiled::{Commit, CommitKey, CompileCache};
use crate::registrations::Heads;
use crate::registry::Registry;
use crate::runs::{Cause, Origin, RunMaker};
use crate::sources::{OpenSource, SourceBook};
use crate::trace::Trace;

/// A delivery to be processed.
#[derive(Clone, Debug)]
pub struct Work {
    /// Its row.
    pub id: DeliveryRowId,
    /// Organisation.
    pub org: String,
    /// The sender's name of the event.
    pub event: String,
    /// The request that brought it.
    pub request_id: String,
    /// Headers that were kept.
    pub headers: Headers,
    /// The raw body.
    pub body: Vec<u8>,
}

/// Why a delivery could not be processed this time. Trying again may help.
#[derive(Debug, thiserror::Error)]
pub enum Retry {
    /// The forge did not answer.
    #[error(transparent)]
    Forge(#[from] ForgeError),
    /// The database did not answer.
    #[error(transparent)]
    Store(#[from] kici_store::StoreError),
}

/// What a planner is made of.
#[derive(Clone)]
pub struct PlannerConfig {
    /// How long a job may wait for an agent; none waits for ever.
    pub queue_timeout: Option<Duration>,
    /// Compiled commits that are kept.
    pub cache_entries: usize,
    /// Identity of this machine: jobs of local sources run only here.
    pub machine_id: String,
    /// Most hosts that one `runs_on_all` job goes to.
    pub max_fanout_hosts: usize,
}

/// Decides what a delivery causes.
pub struct Planner {
    pub(crate) store: Store,
    pub(crate) sources: SourceBook,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) ids: Arc<dyn IdSource>,
    pub(crate) config: PlannerConfig,
    compiled: CompileCache,
    pub(crate) registry: Registry,
}

/// The parts of a decision that grow while it is made.
pub(crate) struct Decision {
    pub trace: Trace,
    pub runs: Vec<NewRun>,
    pub notes: Vec<String>,
    pub matched: u32,
    /// Why workflows that matched did not start though nothing that they say forbids it.
    pub refused: Vec<String>,
    pub invalid: bool,
    /// The lock document cannot be used.
    pub corrupt: bool,
    /// The heads of branches that were asked for.
    pub heads: Heads,
}

/// The trigger of a workflow that matches.
#[derive(Clone, Copy)]
pub(crate) struct Matched<'a> {
    /// Its place.
    pub trigger: usize,
    /// Its type.
    pub kind: &'a str,
}

impl Decision {
    pub(crate) fn new(event: &Event) -> Self {
        Self {
            trace: Trace::new(event),
            runs: Vec::new(),
            notes: Vec::new(),
            matched: 0,
            refused: Vec::new(),
            invalid: false,
            corrupt: false,
            heads: Heads::new(),
        }
    }
}

impl Decision {
    /// Notes why a workflow that should run does not.
    pub(crate) fn refuse(&mut self, why: String) {
        self.refused.push(why.clone());
        self.notes.push(why);
    }
}

impl Planner {
    /// A planner over these ports.
    pub fn new(
        store: Store,
        sources: SourceBook,
        clock: Arc<dyn Clock>,
        ids: Arc<dyn IdSource>,
        config: PlannerConfig,
    ) -> Self {
        let compiled = CompileCache::new(config.cache_entries);
        let registry = Registry::new(store.clone());
        Self { store, sources, clock, ids, config, compiled, registry }
    }

    /// Decides what `work`, a delivery of `source`, causes.
    ///
    /// # Errors
    /// [`Retry`] when a later attempt may succeed. What can never succeed is an outcome, not an error.
    pub async fn process(&self, work: &Work, source: &OpenSource) -> Result<ProcessedDelivery, Retry> {
        if !source.enabled {
            return Ok(outcome(work, DeliveryStatus::Skipped, "the source was disabled or removed"));
        }
        let event = match normalise(&source.source, &work.headers, &work.body) {
            Ok(Normalised::Event(event)) => *event,
            Ok(Normalised::Ignored(reason)) => return Ok(outcome(work, DeliveryStatus::Skipped, &reason)),
            // The bytes stay what they are: trying again cannot help.
            Err(error) => return Ok(failure(work, error.to_string())),
        };
        let decided = match event.kind {
            EventKind::Push | EventKind::Tag | EventKind::Pr => self.at_commit(work, source, &event).await,
            // GitHub tells it twice; an App without the event learns of no deletion, as of nothing it is not subscribed to.
            EventKind::Delete if event.provider == "github" && event.raw_name == "push" => Ok(outcome(
                work,
                DeliveryStatus::Skipped,
                "the ref was deleted; GitHub's `delete` event tells of that too",
            )),
            _ => self.registered(work, source, &event).await,
        };
        match decided {
            Ok(done) => Ok(with_event(done, &event)),
            Err(Retry::Forge(error)) if !error.is_retryable() => {
                Ok(with_event(failure(work, error.to_string()), &event))
            }
            Err(retry) => Err(retry),
        }
    }

    /// Push, tag and pull request: the workflows of the event's own commit.
    async fn at_commit(&self, work: &Work, source: &OpenSource, event: &Event) -> Result<ProcessedDelivery, Retry> {
        let (Some(repo), Some(sha)) = (event.repo.as_deref(), event.sha.as_deref()) else {
            return Ok(outcome(work, DeliveryStatus::Skipped, "the event names no repository or no commit"));
        };
        if event.kind == EventKind::Pr
            && let Some(note) = from_stranger(event)
        {
            return Ok(outcome(work, DeliveryStatus::Skipped, note));
        }
        let forge = self.sources.forge(source)?;
        let files = forge.workflows_at(repo, sha).await?;
        let mut event = event.clone();
        if event.commit_message.is_none() {
            event.commit_message.clone_from(&files.commit_message);
        }
        let mut decision = Decision::new(&event);
        let commit = self.compile(source, repo, sha, &files, &mut decision);
        // Whatever comes of the push: what is registered is what the default branch has.
        let registrations = self.refresh(&mut decision, source, &event, repo, sha, &commit, &*forge).await?;
        if let Some(marker) = skip_ci(&event).filter(|_| !commit.config.as_ref().is_ok_and(|config| !config.skip_ci)) {
            let note = format!("the head commit says {marker}");
            return Ok(ProcessedDelivery { registrations, ..outcome(work, DeliveryStatus::Skipped, &note) });
        }
        if let Some(status) = nothing_to_run(&commit, &files, sha, &mut decision) {
            return Ok(ProcessedDelivery { registrations, ..self.finish(work, decision, Some(status)) });
        }
        let origin = self.origin(work, source, &event, repo, sha);
        let mut changed = Changed { forge: &*forge, event: &event, files: None };
        for resolved in &commit.resolved.workflows {
            self.consider(&mut decision, origin, resolved, &event, &mut changed).await?;
        }
        Ok(ProcessedDelivery { registrations, ..self.finish(work, decision, None) })
    }

    /// What a commit says.
    pub(crate) fn commit(&self, source: &OpenSource, repo: &str, sha: &str, files: &WorkflowFiles) -> Arc<Commit> {
        let key = CommitKey { source: source.source.id, repo: repo.to_owned(), sha: sha.to_owned() };
        self.compiled.get(&key, files)
    }

    /// What a commit says; what is wrong with it goes into the decision.
    pub(crate) fn compile(
        &self,
        source: &OpenSource,
        repo: &str,
        sha: &str,
        files: &WorkflowFiles,
        decision: &mut Decision,
    ) -> Arc<Commit> {
        let commit = self.commit(source, repo, sha, files);
        decision.invalid |= commit.unread;
        decision.trace.skipped_files(&files.skipped);
        // Why the settings or the lock document are not read is said below.
        let told = |path: &str| path == CONFIG_FILE || (path == LOCK_FILE && commit.resolved.corrupt.is_some());
        let skipped = files.skipped.iter().filter(|skipped| !told(&skipped.path));
        decision.notes.extend(skipped.map(|skipped| format!("{}: {}", skipped.path, skipped.reason)));
        for (path, file) in commit.set.files.iter().filter(|(_, file)| file.has_errors()) {
            decision.invalid = true;
            let mut errors = file.diagnostics.iter().filter(|diagnostic| diagnostic.is_error());
            let first = errors.next().map(|diagnostic| diagnostic.message.as_str()).unwrap_or_default();
            let more = match errors.count() {
                0 => String::new(),
                count => format!("; and {count} more, which `kici-admin workflow validate` shows"),
            };
            decision.notes.push(format!("{path} is invalid: {first}{more}"));
        }
        decision.trace.files(&commit.set);
        if let Err(error) = &commit.config {
            decision.invalid = true;
            decision.notes.push(error.to_string());
        }
        if let Some(error) = &commit.resolved.corrupt {
            decision.corrupt = true;
            decision.notes.push(error.to_string());
        }
        decision.notes.extend(commit.resolved.notes.iter().cloned());
        commit
    }

    pub(crate) fn origin<'a>(
        &'a self,
        work: &'a Work,
        source: &'a OpenSource,
        event: &'a Event,
        repo: &'a str,
        sha: &'a str,
    ) -> Origin<'a> {
        Origin {
            org: &work.org,
            source: source.source.id,
            repo,
            git_ref: event.git_ref.as_deref(),
            sha,
            cause: Cause::Delivery(work.id),
            request_id: &work.request_id,
            machine_id: source.source.local_repo().is_some().then_some(self.config.machine_id.as_str()),
        }
    }

    /// Matches one workflow and plans its run if it matches.
    pub(crate) async fn consider(
        &self,
        decision: &mut Decision,
        origin: Origin<'_>,
        resolved: &Resolved,
        event: &Event,
        changed: &mut Changed<'_>,
    ) -> Result<(), Retry> {
        let workflow = &resolved.workflow;
        let began = Instant::now();
        let mut found = match_workflow(workflow, event, changed.files.as_ref());
        if found.outcome == Outcome::NeedsFiles {
            let files = changed.fetch().await;
            found = match_workflow(workflow, event, Some(files));
        }
        metrics::histogram!("kici_orch_trigger_match_duration_seconds").record(began.elapsed().as_secs_f64());
        if let Outcome::Matched { trigger, kind, note } = &found.outcome {
            decision.notes.extend(note.iter().map(|note| format!("{}: {note}", workflow.name)));
            let matched = Matched { trigger: *trigger, kind };
            self.start(decision, origin, resolved, event, matched, changed.forge).await?;
        }
        decision.trace.workflow(found);
        Ok(())
    }

    /// Plans the run of a workflow that matches, unless its requirements or inputs say no.
    pub(crate) async fn start(
        &self,
        decision: &mut Decision,
        origin: Origin<'_>,
        resolved: &Resolved,
        event: &Event,
        matched: Matched<'_>,
        forge: &dyn Forge,
    ) -> Result<(), Retry> {
        let workflow = &resolved.workflow;
        decision.matched += 1;
        match unmet(forge, origin.repo, origin.sha, workflow).await {
            None => {}
            Some(Unmet::No(reason)) => {
                decision.notes.push(format!("{}: {reason}", workflow.name));
                return Ok(());
            }
            Some(Unmet::Unknown(reason)) => {
                decision.refuse(format!("{}: {reason}", workflow.name));
                return Ok(());
            }
        }
        match run_inputs(workflow, matched.trigger, event) {
            Ok(inputs) if inputs == event.inputs => self.plan(decision, origin, resolved, event, matched.kind).await,
            Ok(inputs) => {
                let event = Event { inputs, ..event.clone() };
                self.plan(decision, origin, resolved, &event, matched.kind).await
            }
            Err(faults) => {
                let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
                decision.refuse(format!("{}: {}", workflow.name, faults.join("; ")));
                Ok(())
            }
        }
    }

    async fn plan(
        &self,
        decision: &mut Decision,
        origin: Origin<'_>,
        resolved: &Resolved,
        event: &Event,
        kind: &str,
    ) -> Result<(), Retry> {
        let workflow = &resolved.workflow;
        let id = RunId::mint(&*self.ids);
        let fleet = self.fleet(workflow).await?;
        let run = RunInfo { id, repo: origin.repo, git_ref: origin.git_ref, sha: origin.sha, attempt: 1 };
        match plan_run(Scope { workflow, event, run }, &fleet) {
            Ok(Planned::Run(mut plan)) => {
                if let Some(drift) = &resolved.drift {
                    fail_all(&mut plan, drift);
                    decision.notes.push(format!("{}: {drift}", workflow.name));
                }
                decision.notes.extend(plan.notes.iter().map(|note| format!("{}: {note}", workflow.name)));
                decision.runs.push(self.maker().run(id, origin, workflow, event, kind, plan));
            }
            Ok(Planned::Declined { reason }) => decision.notes.push(format!("{}: {reason}", workflow.name)),
            Err(error) => {
                decision.invalid = true;
                decision.refuse(error.to_string());
            }
        }
        Ok(())
    }

    /// The hosts that a workflow asks for; the roster is read only for one that does.
    pub(crate) async fn fleet(&self, workflow: &Workflow) -> Result<Fleet, kici_store::StoreError> {
        let max_hosts = self.config.max_fanout_hosts;
        if !wants_hosts(workflow) {
            return Ok(Fleet { hosts: Vec::new(), max_hosts });
        }
        let now = self.clock.now();
        // How they stand plays no part here: each is asked when its turn comes.
        let hosts = self.store.roster_list().await?.iter().map(|host| host.host(now, Duration::ZERO)).collect();
        Ok(Fleet { hosts, max_hosts })
    }

    pub(crate) fn maker(&self) -> RunMaker<'_> {
        RunMaker { clock: &*self.clock, ids: &*self.ids, queue_timeout: self.config.queue_timeout }
    }

    /// Closes a decision: `processed` if any run was made or nothing was invalid.
    pub(crate) fn finish(&self, work: &Work, decision: Decision, status: Option<DeliveryStatus>) -> ProcessedDelivery {
        let status = status.unwrap_or(match (decision.runs.is_empty(), decision.corrupt, decision.invalid) {
            (true, true, _) => DeliveryStatus::LockfileCorrupt,
            (true, false, true) => DeliveryStatus::WorkflowInvalid,
            _ => DeliveryStatus::Processed,
        });
        let note = (!decision.notes.is_empty()).then(|| decision.notes.join("; "));
        ProcessedDelivery {
            matched_count: decision.matched,
            trace: Some(decision.trace.into_json(note.as_deref())),
            runs: decision.runs,
            ..bare(work, DeliveryOutcome { status, error: None, note })
        }
    }
}

/// The changed files of an event, fetched when the first workflow asks.
pub(crate) struct Changed<'a> {
    pub forge: &'a dyn Forge,
    pub event: &'a Event,
    pub files: Option<ChangedFiles>,
}

impl Changed<'_> {
    async fn fetch(&mut self) -> &ChangedFiles {
        if self.files.is_none() {
            self.files = Some(self.forge.changed_files(self.event).await);
        }
        self.files.get_or_insert_with(|| ChangedFiles::Unavailable("not fetched".to_owned()))
    }
}

/// Why the requirements of a workflow keep it from running.
pub(crate) enum Unmet {
    /// One does not hold.
    No(String),
    /// Of one it cannot be told.
    Unknown(String),
}

impl Unmet {
    /// In words.
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::No(text) | Self::Unknown(text) => text,
        }
    }
}

/// The first requirement of a workflow on files of the commit that does not hold, or cannot be told, in words.
pub(crate) async fn unmet(forge: &dyn Forge, repo: &str, sha: &str, workflow: &Workflow) -> Option<Unmet> {
    for requirement in &workflow.requires {
        let content = match forge.file_at(repo, sha, &requirement.file, requires::MAX_FILE_BYTES).await {
            Ok(Some(bytes)) => Content::Bytes(bytes),
            Ok(None) => Content::Absent,
            Err(error) => Content::Unreadable(error.to_string()),
        };
        match requires::judge(requirement, &content) {
            Verdict::Holds => {}
            Verdict::Fails(why) => return Some(Unmet::No(format!("`requires` does not hold: {why}"))),
            Verdict::Unknown(why) => {
                return Some(Unmet::Unknown(format!("`requires` cannot be told, so there is no run: {why}")));
            }
        }
    }
    None
}

/// Why code of this pull request must not run, nor anything with rights at a stranger's word: strangers run only under a trust
/// policy, and there is none.
pub(crate) fn from_stranger(event: &Event) -> Option<&'static str> {
    match event.is_fork_pr {
        ForkState::No => None,
        ForkState::Unknown => Some("the forge does not say whether the pull request comes from a fork"),
        ForkState::Yes => Some("the pull request comes from a fork, and no trust policy allows those"),
    }
}

/// Why nothing of a commit can run, whatever its workflows say; a note goes with it.
fn nothing_to_run(
    commit: &Commit,
    files: &WorkflowFiles,
    sha: &str,
    decision: &mut Decision,
) -> Option<DeliveryStatus> {
    let short = sha.get(..12).unwrap_or(sha);
    if commit.config.is_err() {
        return Some(DeliveryStatus::WorkflowInvalid);
    }
    if commit.resolved.missing {
        decision.notes.push(format!(
            "commit {short} has no .kici/kici.lock.json and its config.yaml says `lock: required`; run `kici-admin \
             workflow compile`"
        ));
        return Some(DeliveryStatus::LockfileMissing);
    }
    let nothing = files.files.is_empty() && !commit.unread;
    if nothing && commit.resolved.workflows.is_empty() && commit.resolved.corrupt.is_none() {
        decision.notes.push(format!("no workflow files under .kici/workflows at commit {short}"));
        return Some(DeliveryStatus::LockfileMissing);
    }
    None
}

/// A run whose definition is in doubt shows up and does nothing.
fn fail_all(plan: &mut RunPlan, drift: &str) {
    for job in &mut plan.jobs {
        job.start = Start::Now(Activation::Fail { reason: FailureReason::LockDrift, message: drift.to_owned() });
    }
}

fn bare(work: &Work, outcome: DeliveryOutcome) -> ProcessedDelivery {
    ProcessedDelivery {
        id: work.id,
        outcome,
        matched_count: 0,
        repo: None,
        git_ref: None,
        sha: None,
        trace: None,
        runs: Vec::new(),
        registrations: None,
    }
}

pub(crate) fn outcome(work: &Work, status: DeliveryStatus, note: &str) -> ProcessedDelivery {
    let trace = Trace::without_event(&work.event).into_json(Some(note));
    let outcome = DeliveryOutcome { status, error: None, note: Some(note.to_owned()) };
    ProcessedDelivery { trace: Some(trace), ..bare(work, outcome) }
}

pub(crate) fn failure(work: &Work, error: String) -> ProcessedDelivery {
    let trace = Trace::without_event(&work.event).into_json(Some(&error));
    let outcome = DeliveryOutcome { status: DeliveryStatus::Failed, error: Some(error), note: None };
    ProcessedDelivery { trace: Some(trace), ..bare(work, outcome) }
}

fn with_event(mut done: ProcessedDelivery, event: &Event) -> ProcessedDelivery {
    done.repo.clone_from(&event.repo);
    done.git_ref.clone_from(&event.git_ref);
    done.sha.clone_from(&event.sha);
    done
}
