//! Triggers on what a forge tells besides pushes.

use crate::lock::Trigger;
use crate::yaml::{Data, Node};

use crate::compile::keys;
use crate::compile::walk::Walk;

/// Actions of pull requests (GitHub, webhook events and payloads, `pull_request`).
pub(super) const PULL_REQUEST_TYPES: [&str; 21] = [
    "assigned",
    "auto_merge_disabled",
    "auto_merge_enabled",
    "closed",
    "converted_to_draft",
    "demilestoned",
    "dequeued",
    "edited",
    "enqueued",
    "labeled",
    "locked",
    "milestoned",
    "opened",
    "ready_for_review",
    "reopened",
    "review_request_removed",
    "review_requested",
    "synchronize",
    "unassigned",
    "unlabeled",
    "unlocked",
];
pub(super) const DEFAULT_PULL_REQUEST_TYPES: [&str; 3] = ["opened", "synchronize", "reopened"];
/// What is done with comments, stars and releases, by the same document.
const COMMENT_TYPES: [&str; 3] = ["created", "deleted", "edited"];
const REVIEW_TYPES: [&str; 3] = ["dismissed", "edited", "submitted"];
const REVIEW_STATES: [&str; 5] = ["approved", "changes_requested", "commented", "dismissed", "pending"];
const RELEASE_TYPES: [&str; 7] =
    ["created", "deleted", "edited", "prereleased", "published", "released", "unpublished"];
const STAR_TYPES: [&str; 2] = ["created", "deleted"];
const WATCH_TYPES: [&str; 1] = ["started"];
const STATUS_STATES: [&str; 4] = ["error", "failure", "pending", "success"];
const RUN_TYPES: [&str; 3] = ["completed", "in_progress", "requested"];
const RUN_CONCLUSIONS: [&str; 9] = [
    "action_required",
    "cancelled",
    "failure",
    "neutral",
    "skipped",
    "stale",
    "startup_failure",
    "success",
    "timed_out",
];

impl Walk<'_> {
    /// A trigger on an event of a forge that has no commit to read the workflow from.
    pub(super) fn forge_trigger(&mut self, name: &str, node: &Node) -> Option<Trigger> {
        Some(match name {
            "comment" => self.comment(node)?,
            "review" => {
                self.fields(node, &keys::REVIEW, "`on.review`")?;
                Trigger::Review {
                    actions: self.words(node, "types", &REVIEW_TYPES, &[]),
                    states: self.words(node, "states", &REVIEW_STATES, &[]),
                }
            }
            "create" | "delete" => self.reference(name, node)?,
            "fork" => {
                self.fields(node, &keys::FORK, "`on.fork`")?;
                Trigger::Fork {}
            }
            "status" => Trigger::Status {
                contexts: self.filter(node, &keys::STATUS, name, "contexts")?,
                states: self.words(node, "states", &STATUS_STATES, &[]),
            },
            "workflow_run" => Trigger::WorkflowRun {
                workflows: self.filter(node, &keys::WORKFLOW_RUN, name, "workflows")?,
                actions: self.words(node, "types", &RUN_TYPES, &[]),
                conclusions: self.words(node, "conclusions", &RUN_CONCLUSIONS, &[]),
            },
            "webhook" => self.webhook(node)?,
            "dispatch" => self.dispatch(node)?,
            _ => self.with_types(name, node)?,
        })
    }

    fn with_types(&mut self, name: &str, node: &Node) -> Option<Trigger> {
        self.fields(node, &keys::TYPES, &format!("`on.{name}`"))?;
        let mut types = |known: &[&str], default: &[&str]| self.words(node, "types", known, default);
        Some(match name {
            "review_comment" => Trigger::ReviewComment { actions: types(&COMMENT_TYPES, &[]) },
            "release" => Trigger::Release { actions: types(&RELEASE_TYPES, &["published"]) },
            "star" => Trigger::Star { actions: types(&STAR_TYPES, &[]) },
            _ => Trigger::Watch { actions: types(&WATCH_TYPES, &[]) },
        })
    }

    fn comment(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::COMMENT, "`on.comment`")?;
        let actions = self.words(node, "types", &COMMENT_TYPES, &["created"]);
        let body = self.again(node, "body");
        let target = match fields.get("target") {
            Some(entry) => Some(self.within("target", |walk| walk.word(&entry.value, &["issue", "pr"]))?.to_owned()),
            None => None,
        };
        Some(Trigger::Comment { actions, target, body })
    }

    fn reference(&mut self, name: &str, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::REFS, &format!("`on.{name}`"))?;
        let ref_type = match fields.get("ref_type") {
            Some(entry) => {
                Some(self.within("ref_type", |walk| walk.word(&entry.value, &["branch", "tag"]))?.to_owned())
            }
            None => None,
        };
        let refs = self.again(node, "refs");
        Some(if name == "create" { Trigger::Create { ref_type, refs } } else { Trigger::Delete { ref_type, refs } })
    }

    fn webhook(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::WEBHOOK, "`on.webhook`")?;
        let events = self.names(fields, "events", "the forge's name of an event");
        let actions = self.names(fields, "types", "an action");
        let given = fields.get("events").map(|entry| &entry.value.data);
        if given.is_none() || matches!(given, Some(Data::List(items)) if items.is_empty()) {
            self.lacks(node, "webhook", "events", "`events`, the forge's names of events, such as `check_run`");
            return None;
        }
        Some(Trigger::Webhook { events, actions })
    }

    fn dispatch(&mut self, node: &Node) -> Option<Trigger> {
        let fields = self.fields(node, &keys::DISPATCH, "`on.dispatch`")?;
        let types = self.names(fields, "types", "a type");
        let inputs = match fields.get("inputs") {
            Some(entry) => self.within("inputs", |walk| walk.declared(&entry.value)),
            None => Default::default(),
        };
        Some(Trigger::Dispatch { types, manual: false, inputs })
    }
}
