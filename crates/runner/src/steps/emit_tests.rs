//! Steps that emit events.

use kici_engine::check::CheckResult;
use kici_engine::lock::{Action, Emit};

use super::tests::*;
use super::*;
use crate::ports::Emitted;

fn emits(event: Value, payload: Json) -> Step {
    let emit = Emit { event, payload, target_repos: vec!["acme/*".to_owned()] };
    Step { id: Some("told".to_owned()), action: Action::Emit(emit), ..script("") }
}

fn stored() -> Heard {
    Heard { emitted: Some(Emitted::Stored("evt_1".to_owned())), ..Heard::default() }
}

#[tokio::test]
async fn a_step_emits_its_document_with_its_values_and_keeps_secrets_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = Step { id: Some("v".into()), ..script("echo 'list=[1, 2]' >> $KICI_OUTPUT") };
    let payload = json!({
        "host": "${{ agent.os }}",
        "tries": 3,
        "list": "${{ from_json(steps.v.outputs.list) }}",
        "deep": [{"text": "at ${{ env.WHERE }}", "hidden": "${{ env.TOKEN }}"}, null],
    });
    let mut step = emits(template("ci-${{ agent.os }}"), payload);
    step.env.insert("WHERE".to_owned(), Value::fixed("home"));
    step.env.insert("TOKEN".to_owned(), Value::fixed("s3cr3t"));
    let after = Step {
        env: [("ID".to_owned(), template("${{ steps.told.outputs.event_id }}"))].into(),
        ..script("echo got $ID")
    };
    let job = job(&dir, vec![first, step, after]);
    let heard = stored();
    assert_eq!(go(&job, &heard).await.status, JobStatus::Success);
    let emissions = heard.emissions.lock().expect("lock").clone();
    assert_eq!(emissions.len(), 1);
    let sent = &emissions[0];
    assert_eq!((sent.step, sent.name.as_str(), &sent.target_repos), (1, "ci-linux", &vec!["acme/*".to_owned()]));
    let expected =
        json!({"host": "linux", "tries": 3, "list": [1, 2], "deep": [{"text": "at home", "hidden": "***"}, null]});
    assert_eq!(sent.payload, expected);
    let lines = log(&job);
    assert!(lines.iter().any(|line| line.contains("event `ci-linux` is stored as evt_1")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("got evt_1")), "{lines:?}");
    assert_eq!(heard.last(1).name, "emit ci-${{ agent.os }}");
}

#[tokio::test]
async fn a_refusal_fails_the_step_and_a_failure_that_is_allowed_does_not_fail_the_job() {
    for allowed in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let step = Step { continue_on_error: allowed, ..emits(Value::fixed("x"), json!({})) };
        let job = job(&dir, vec![step]);
        let heard = Heard { emitted: Some(Emitted::Refused("too deep".to_owned())), ..Heard::default() };
        let outcome = go(&job, &heard).await;
        assert_eq!(outcome.status, if allowed { JobStatus::Success } else { JobStatus::Failed });
        assert_eq!(heard.last(0).message, "event `x` was refused: too deep");
    }
}

#[tokio::test]
async fn an_event_that_nobody_takes_ends_with_the_limit_of_the_step_or_a_word_to_the_job() {
    let dir = tempfile::tempdir().expect("a directory");
    let step = Step { timeout_ms: Some(50), ..emits(Value::fixed("x"), json!({})) };
    let outcome = go(&job(&dir, vec![step]), &Heard::default()).await;
    assert_eq!(outcome.reason, Some(FailureReason::StepTimeout));

    let dir = tempfile::tempdir().expect("a directory");
    let job = job(&dir, vec![emits(Value::fixed("x"), json!({}))]);
    let (tx, mut stop) = watch::channel(Stop::Run);
    let heard = Heard::default();
    let tell = async {
        while heard.emissions.lock().expect("lock").is_empty() {
            tokio::task::yield_now().await;
        }
        tx.send_replace(Stop::Force { reason: FailureReason::CancelledByUser, message: "stop".to_owned() });
    };
    let (outcome, ()) = tokio::join!(run(&job, &heard, &mut stop), tell);
    assert_eq!(outcome.status, JobStatus::Cancelled);
}

#[tokio::test]
async fn looking_only_emits_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut job = job(&dir, vec![emits(Value::fixed("x"), json!({}))]);
    job.spec.check_mode = CheckMode::Check;
    let heard = stored();
    assert_eq!(go(&job, &heard).await.status, JobStatus::Success);
    assert!(heard.emissions.lock().expect("lock").is_empty());
    assert_eq!(heard.last(0).check, Some(CheckResult::NoCheck));
}
