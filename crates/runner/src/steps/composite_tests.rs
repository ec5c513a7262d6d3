//! Step files whose steps do not all run.

use kici_engine::lock::{Action, Check};

use super::language_tests::{check, inside, named, used};
use super::tests::*;
use super::*;

#[tokio::test]
async fn a_step_file_in_sync_gives_its_outputs_and_one_that_only_looks_may_lack_them() {
    let changes = inside(0, "b", "echo w=8 >> $KICI_OUTPUT");
    let checks = Check { when_in_sync: Some("echo v=7 >> $KICI_OUTPUT".into()), ..check("true", "echo never") };
    let checks = Step { action: Action::Check(checks), ..inside(0, "a", "") };
    let outputs = [("v", "${{ steps.a.outputs.v }}")];
    let both = [("v", "${{ steps.a.outputs.v }}"), ("w", "${{ steps.b.outputs.w }}")];
    for (mode, steps, outputs, expected) in [
        (CheckMode::Apply, vec![checks.clone()], &outputs[..], "7 success"),
        (CheckMode::Apply, vec![checks.clone(), changes.clone()], &both[..], "7 success"),
        (CheckMode::Check, vec![checks, changes], &both[..], ""),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut job = job(&dir, [vec![named("first", "echo n=1 >> $KICI_OUTPUT")], steps].concat());
        let mut composite = used(".kici/steps/x.yaml", "up", outputs);
        composite.with = [("n".to_owned(), Value::fixed("1"))].into();
        job.spec.composites = vec![composite];
        job.spec.check_mode = mode;
        job.spec.outputs.insert("v".into(), template("${{ steps.up.outputs.v }} ${{ steps.up.status }}"));
        let outcome = go(&job, &Heard::default()).await;
        assert_eq!(outcome.status, JobStatus::Success, "{}", outcome.message);
        assert_eq!(outcome.outputs.get("v").map_or("", String::as_str), expected);
    }
}
