//! A job with `invoke` waits for the runs that its event started (workflows-and-events R53). Nobody who listens is not the same as
//! somebody who was refused: the second never looks like a success.

use crate::state::{FailureReason, RunStatus};

/// Runs that a note or message names.
const NAMED: usize = 10;

/// A run that was started.
#[derive(Clone, Copy, Debug)]
pub struct Child<'a> {
    /// Its id, for people.
    pub id: &'a str,
    /// Its workflow.
    pub workflow: &'a str,
    /// Its status.
    pub status: RunStatus,
}

/// What is known of what a job started.
#[derive(Clone, Copy, Debug)]
pub struct Started<'a> {
    /// The event.
    pub event: &'a str,
    /// `owner/name` of the repository it is for.
    pub repo: &'a str,
    /// Everybody who listens was told.
    pub delivered: bool,
    /// Why something that should have started was refused.
    pub refused: Option<&'a str>,
    /// It is a success when nobody listens.
    pub optional: bool,
    /// What was started.
    pub runs: &'a [Child<'a>],
}

/// What the job does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It waits on, for this.
    Wait(String),
    /// It ends well.
    Success,
    /// It fails.
    Fail(FailureReason, String),
}

/// Judges a job that waits. It ends only once everything that it started has ended.
pub fn judge(started: &Started<'_>) -> Verdict {
    let Started { event, repo, .. } = started;
    if !started.delivered {
        return Verdict::Wait(format!("waits for the workflows of {repo} that listen to event `{event}`"));
    }
    let open: Vec<&Child<'_>> = started.runs.iter().filter(|run| !run.status.is_terminal()).collect();
    if !open.is_empty() {
        return Verdict::Wait(format!("waits for {}", named(&open, |run| format!("{} ({})", run.id, run.workflow))));
    }
    if let Some(why) = started.refused {
        return Verdict::Fail(FailureReason::InvokeRefused, format!("event `{event}`: {why}"));
    }
    let bad: Vec<&Child<'_>> = started.runs.iter().filter(|run| run.status != RunStatus::Success).collect();
    if !bad.is_empty() {
        let text = named(&bad, |run| format!("{} of `{}` ended as {}", run.id, run.workflow, run.status));
        return Verdict::Fail(FailureReason::InvokeFailed, text);
    }
    if started.runs.is_empty() && !started.optional {
        let text = format!(
            "no workflow of {repo} listens to event `{event}`; give one `on: {{ event: {{ name: {event} }} }}` on the default \
             branch, or say `optional: true`"
        );
        return Verdict::Fail(FailureReason::InvokeFailed, text);
    }
    Verdict::Success
}

fn named(runs: &[&Child<'_>], text: impl Fn(&Child<'_>) -> String) -> String {
    let mut all: Vec<String> = runs.iter().take(NAMED).map(|run| text(run)).collect();
    if runs.len() > NAMED {
        all.push(format!("and {} more", runs.len() - NAMED));
    }
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(statuses: &[RunStatus]) -> Vec<Child<'static>> {
        statuses.iter().map(|status| Child { id: "run_1", workflow: "deploy", status: *status }).collect()
    }

    fn of(delivered: bool, refused: Option<&str>, optional: bool, statuses: &[RunStatus]) -> Verdict {
        let runs = runs(statuses);
        judge(&Started { event: "go", repo: "acme/app", delivered, refused, optional, runs: &runs })
    }

    fn reason(verdict: Verdict) -> FailureReason {
        match verdict {
            Verdict::Fail(reason, _) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Trap T16 of workflows-and-events.
    #[test]
    fn a_refusal_is_never_green() {
        for optional in [false, true] {
            for ended in [&[][..], &[RunStatus::Success]] {
                let verdict = of(true, Some("too deep"), optional, ended);
                assert_eq!(reason(verdict), FailureReason::InvokeRefused);
            }
        }
    }

    #[test]
    fn it_waits_until_everything_has_ended() {
        assert!(matches!(of(false, None, true, &[]), Verdict::Wait(_)));
        let open = [RunStatus::Success, RunStatus::Running];
        assert_eq!(of(true, None, false, &open), Verdict::Wait("waits for run_1 (deploy)".to_owned()));
        // Also one that has failed, or been refused in part.
        assert!(matches!(of(true, Some("x"), false, &[RunStatus::Failed, RunStatus::Pending]), Verdict::Wait(_)));
    }

    #[test]
    fn the_end_of_the_runs_is_its_end() {
        assert_eq!(of(true, None, false, &[RunStatus::Success, RunStatus::Success]), Verdict::Success);
        for bad in [RunStatus::Failed, RunStatus::Cancelled] {
            let Verdict::Fail(reason, text) = of(true, None, true, &[RunStatus::Success, bad]) else { panic!("{bad}") };
            assert_eq!(reason, FailureReason::InvokeFailed);
            assert_eq!(text, format!("run_1 of `deploy` ended as {bad}"));
        }
        assert_eq!(of(true, None, true, &[]), Verdict::Success);
        assert_eq!(reason(of(true, None, false, &[])), FailureReason::InvokeFailed);
    }
}
