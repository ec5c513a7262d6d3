//! How long a job may go on after a cancel. Pure.

use std::time::Duration;

use kici_engine::jobspec::JobSpec;
use kici_engine::lock::{Action, MAX_HOOK_MS, Step};

use crate::steps::AFTER_CANCEL_LIMIT;
use crate::steps::exec::TIMEOUT_GRACE;

/// The most that the steps and hooks may take that run after a cancel: the hooks of the step that runs now, then every step that
/// may ask to run, with its hooks and those of the job before it, then the hooks of the job. Nothing is tried again by then.
pub(super) fn after_cancel(spec: &JobSpec) -> Duration {
    let now = spec.steps.iter().map(|step| hooks(step.on_cancel.iter().chain(&step.cleanup))).max().unwrap_or_default();
    let before = hooks(&spec.hooks.before_step);
    let later = spec.steps.iter().filter(|step| may_run(spec, step));
    let later = later.map(|step| before + limit(step) + hooks(step.on_cancel.iter().chain(&step.cleanup)));
    now + later.sum::<Duration>() + hooks(spec.hooks.on_cancel.iter().chain(&spec.hooks.cleanup))
}

fn hooks<'a>(hooks: impl IntoIterator<Item = &'a Step>) -> Duration {
    let limit = |hook: &Step| Duration::from_millis(hook.timeout_ms.unwrap_or(MAX_HOOK_MS).min(MAX_HOOK_MS));
    hooks.into_iter().map(|hook| limit(hook) + TIMEOUT_GRACE).sum()
}

fn limit(step: &Step) -> Duration {
    let named = match &step.action {
        Action::WaitFor(wait) => Some(wait.timeout_ms),
        Action::Run(_) | Action::Check(_) | Action::Emit(_) => step.timeout_ms,
    };
    named.map_or(AFTER_CANCEL_LIMIT, Duration::from_millis).min(AFTER_CANCEL_LIMIT) + TIMEOUT_GRACE
}

/// Whether the condition of a step, or of a step file that it stands in, may hold then.
fn may_run(spec: &JobSpec, step: &Step) -> bool {
    let mut at = step.composite;
    let mut asks = step.condition.as_deref().is_some_and(asks);
    while let Some((used, found)) = at.and_then(|at| Some((at, spec.composites.get(at as usize)?))) {
        asks |= found.condition.as_deref().is_some_and(self::asks);
        at = found.parent.filter(|parent| *parent < used);
    }
    asks
}

/// Without one of these a condition also asks for a success. A job that failed before the cancel is a failure to its steps.
fn asks(condition: &str) -> bool {
    let not_success = condition.contains("success") && condition.contains(['!', '=']);
    not_success || ["always", "cancelled", "failure"].iter().any(|word| condition.contains(word))
}

#[cfg(test)]
mod tests {
    use kici_engine::lock::{Probe, SourceRef, WaitFor};
    use serde_json::json;

    use super::*;

    fn spec(steps: &[Step]) -> JobSpec {
        let composite = |condition, parent| json!({"if": condition, "parent": parent, "path": "x.yaml", "source": {"file": "ci.yaml", "line": 1}});
        let text = json!({
            "workflow": "ci", "job": "a", "env": {}, "variables": {}, "outputs": {}, "context": {}, "steps": steps,
            "composites": [composite(Some("always()"), None), composite(None, Some(0)), composite(None, None)],
        });
        serde_json::from_value(text).expect("a job")
    }

    fn step(condition: Option<&str>, seconds: u64) -> Step {
        let timeout_ms = Some(seconds * 1000);
        Step { condition: condition.map(str::to_owned), timeout_ms, ..Step::script(SourceRef::default(), "true") }
    }

    #[test]
    fn all_that_may_run_after_a_cancel_is_counted_with_its_hooks() {
        let inside = |at| Step { composite: Some(at), ..step(None, 7) };
        let hooked =
            |condition| Step { cleanup: vec![step(None, 2)], on_cancel: vec![step(None, 1)], ..step(condition, 3) };
        let probe = Probe::Run("true".into());
        let wait = Action::WaitFor(WaitFor { probe, interval_ms: 1, timeout_ms: 900_000 });
        // Each command may also take the ten seconds from TERM to KILL.
        for (steps, seconds) in [
            (vec![step(None, 3), step(Some("success()"), 3), step(Some("branch == 'x'"), 3)], 0),
            (vec![step(Some("always()"), 3), step(Some("cancelled()"), 4), step(Some("!success()"), 5)], 12 + 30),
            (vec![step(Some("failure()"), 900)], 300 + 10),
            (vec![Step { action: wait, ..step(Some("always()"), 3) }], 300 + 10),
            (vec![inside(0), inside(1), inside(2), inside(9)], 14 + 20),
            (vec![hooked(None), hooked(None)], 3 + 20),
            (vec![hooked(Some("always()")), hooked(Some("always()"))], 3 + 20 + 2 * (6 + 30)),
        ] {
            assert_eq!(after_cancel(&spec(&steps)), Duration::from_secs(seconds), "{steps:?}");
        }
        let mut job = spec(&[step(Some("always()"), 1), step(Some("always()"), 1)]);
        job.hooks.before_step = vec![step(None, 4)];
        job.hooks.after_step = vec![step(None, 5)];
        job.hooks.cleanup = vec![step(None, 6)];
        assert_eq!(after_cancel(&job), Duration::from_secs(2 * (5 + 20) + 16));
    }
}
