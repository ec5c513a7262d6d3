//! The normalised event: what the matcher and expressions see, whichever forge it came from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::check::CheckMode;
use crate::state::words;

words! {
    /// What happened.
    EventKind("event kind") {
        /// Commits on a branch.
        Push = "push",
        /// A tag was pushed.
        Tag = "tag",
        /// A pull or merge request.
        Pr = "pr",
        /// A comment.
        Comment = "comment",
        /// A review.
        Review = "review",
        /// A comment in a review.
        ReviewComment = "review_comment",
        /// A release.
        Release = "release",
        /// `repository_dispatch`.
        Dispatch = "dispatch",
        /// Started by a person.
        Manual = "manual",
        /// A branch or tag was created.
        Create = "create",
        /// A branch or tag was deleted.
        Delete = "delete",
        /// A commit status.
        Status = "status",
        /// A foreign CI's run.
        WorkflowRun = "workflow_run",
        /// A fork.
        Fork = "fork",
        /// A star.
        Star = "star",
        /// A watch.
        Watch = "watch",
        /// A call to a generic source.
        Hook = "hook",
        /// Known to the forge but without a trigger of its own; only `webhook` triggers see it.
        Other = "other",
        /// Emitted on the internal bus; `raw_name` is its name, `repo` who emitted it.
        KiciEvent = "kici_event",
        /// A run ended; the payload has `workflow` and `status`, `repo` is the run's.
        WorkflowComplete = "workflow_complete",
        /// A job ended; the payload has `workflow`, `job` and `status`, `repo` is the run's.
        JobComplete = "job_complete",
        /// Several runs failed in a window; the payload has `workflows`, a list of names.
        WorkflowsFailedBatch = "workflows_failed_batch",
        /// A schedule fired; the payload has `cron` and `timezone`.
        Schedule = "schedule",
        /// An event of the system's own life; `raw_name` is its name.
        Lifecycle = "lifecycle",
    }
}

words! {
    /// Whether a pull request comes from a fork. `unknown` counts as a fork wherever trust is decided.
    ForkState("fork state") {
        /// From the same repository.
        No = "no",
        /// From a fork.
        Yes = "yes",
        /// The forge does not say.
        Unknown = "unknown",
    }
}

/// The files an event changed. Never a bare empty list: "none" and "not known" are different answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangedFiles {
    /// All of them.
    Known(Vec<String>),
    /// The first of them; the forge stopped listing.
    Truncated(Vec<String>),
    /// Why they are not known.
    Unavailable(String),
}

/// Who caused an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sender {
    /// Login; may be recycled by the forge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// The forge's immutable id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
}

/// One event, normalised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The forge's own name of the event, for `webhook` triggers (`push`, `check_run`, …).
    pub raw_name: String,
    /// The forge's action (`opened`, `created`, …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// Organisation.
    pub org: String,
    /// `github:<app>`, `generic:<org>:<source id>` or `local:<source id>`.
    pub routing_key: String,
    /// `github`, `generic` or `local`.
    pub provider: String,
    /// Name of the source that received it.
    pub source: String,
    /// `owner/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Full ref, `refs/heads/…` or `refs/tags/…`.
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    pub git_ref: Option<String>,
    /// The commit the event is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha: Option<String>,
    /// The branch pushed to, or the base of a pull request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_branch: Option<String>,
    /// The head branch of a pull request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_branch: Option<String>,
    /// Base commit of a pull request, or the commit before a push.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_sha: Option<String>,
    /// Tag name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Default branch of the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_branch: Option<String>,
    /// Whether a pull request comes from a fork.
    pub is_fork_pr: ForkState,
    /// Number of the pull request or issue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pr_number: Option<u64>,
    /// Who caused it.
    #[serde(default)]
    pub sender: Sender,
    /// Message of the head commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit_message: Option<String>,
    /// Inputs of a manual or dispatched run, validated.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub inputs: BTreeMap<String, Json>,
    /// For a manual run: the one workflow that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_workflow: Option<String>,
    /// What the run may change. Only a person who starts a run chooses it; it stays with the run and its repetitions.
    #[serde(default, skip_serializing_if = "CheckMode::is_apply")]
    pub check_mode: CheckMode,
    /// The forge's document.
    #[serde(default)]
    pub payload: Json,
    /// How many events led to this one.
    #[serde(default)]
    pub chain_depth: u32,
}

impl Event {
    /// The branch that `branch` means in expressions: the pushed branch, or the head of a pull request.
    pub fn branch(&self) -> Option<&str> {
        self.source_branch.as_deref().or(self.target_branch.as_deref())
    }

    /// A copy without the payload, which may be megabytes and is copied only where it is read.
    pub fn without_payload(&self) -> Self {
        Self {
            kind: self.kind,
            raw_name: self.raw_name.clone(),
            action: self.action.clone(),
            org: self.org.clone(),
            routing_key: self.routing_key.clone(),
            provider: self.provider.clone(),
            source: self.source.clone(),
            repo: self.repo.clone(),
            git_ref: self.git_ref.clone(),
            sha: self.sha.clone(),
            target_branch: self.target_branch.clone(),
            source_branch: self.source_branch.clone(),
            base_sha: self.base_sha.clone(),
            tag: self.tag.clone(),
            default_branch: self.default_branch.clone(),
            is_fork_pr: self.is_fork_pr,
            pr_number: self.pr_number,
            sender: self.sender.clone(),
            commit_message: self.commit_message.clone(),
            inputs: self.inputs.clone(),
            requested_workflow: self.requested_workflow.clone(),
            check_mode: self.check_mode,
            payload: Json::Null,
            chain_depth: self.chain_depth,
        }
    }
}
