//! From a run's creation to its end.

use std::time::Duration;

use kici_engine::hosts::Fanout;
use kici_engine::state::{FailureClass, FailureReason, JobStatus, QueueStatus, RunStatus, StepStatus};
use kici_engine::time::Clock;
use kici_store::model::*;
use kici_store::testing::{TestStore, agent};

use crate::fixtures::{Plan, claim, enqueue, finish, result, start, status_of, statuses, step};

const SUCCESS: &[JobStatus] = &[JobStatus::Success];
const FAILURE: &[JobStatus] = &[JobStatus::Failed];

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_jobs_runs_to_its_end_with_outputs_handed_on() {
    TestStore::each(|t| async move {
        let plan = Plan::new("k").queued("build").job("test").needs("test", "build", SUCCESS);
        let created = plan.create(&t).await;
        assert!(created.created);
        assert_eq!((created.ready.len(), created.status), (1, RunStatus::Pending));

        let build = start(&t, "a1").await;
        assert_eq!((build.job_ref.epoch, build.job.status), (1, JobStatus::Queued));
        assert_eq!(build.run.event.payload, serde_json::json!({ "kept": true }));
        assert_eq!(build.run.event.commit_message.as_deref(), Some("Grüße \u{0} \u{1F980}"));
        assert_eq!(t.store.run_get(created.run_id).await.unwrap().unwrap().status, RunStatus::Running);
        t.clock.advance(Duration::from_micros(1_234_567));
        let effects = finish(&t, &build, JobStatus::Success).await;
        assert_eq!((effects.newly_queued.len(), effects.run_finished), (1, false));

        let test = start(&t, "a1").await;
        let need = &test.needs["build"];
        assert_eq!((need.status, need.outputs["v"].as_str()), (JobStatus::Success, "build"));
        let effects = finish(&t, &test, JobStatus::Success).await;
        assert!(effects.run_finished);
        let run = t.store.run_get(created.run_id).await.unwrap().unwrap();
        assert_eq!(run, effects.run);
        assert_eq!((run.status, run.finished_at), (RunStatus::Success, Some(t.clock.now())));
        let row = t.store.queue_get(test.job.id).await.unwrap().unwrap();
        assert_eq!((row.status, row.agent_id), (QueueStatus::Completed, Some(agent("a1"))));
        let history = t.store.dispatch_history(test.job.id).await.unwrap();
        assert_eq!(history[0].outcome.as_deref(), Some("completed"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_skips_what_needs_success_and_runs_what_needs_failure() {
    TestStore::each(|t| async move {
        let plan = Plan::new("k")
            .queued("build")
            .job("deploy")
            .job("after-deploy")
            .job("report")
            .needs("deploy", "build", SUCCESS)
            .needs("after-deploy", "deploy", SUCCESS)
            .needs("report", "build", FAILURE);
        let run = plan.create(&t).await.run_id;
        let build = start(&t, "a1").await;
        let effects = finish(&t, &build, JobStatus::Failed).await;
        assert_eq!(effects.finished_jobs.len(), 3);
        let jobs = t.store.jobs_of_run(run).await.unwrap();
        assert_eq!(jobs[0].failure_class, Some(FailureClass::User));
        assert_eq!(jobs[0].failure_message.as_deref(), Some("exit code 1\u{FFFD}"));
        assert_eq!(jobs[1].failure_message.as_deref(), Some("upstream_unmet: build (failed)"));
        assert_eq!(jobs[2].failure_message.as_deref(), Some("upstream_unmet: deploy (skipped)"));
        let report = start(&t, "a1").await;
        assert_eq!(report.job.name, "report");
        let effects = finish(&t, &report, JobStatus::Success).await;
        assert_eq!(
            (effects.run.status, effects.run.failure_reason),
            (RunStatus::Failed, Some(FailureReason::StepFailed))
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_jobs_all_end_at_creation_is_settled_at_once() {
    TestStore::each(|t| async move {
        let skipped = Plan::new("k").job("skip-a").job("skip-b").needs("skip-b", "skip-a", SUCCESS).create(&t).await;
        assert_eq!(skipped.status, RunStatus::Success);
        let empty = Plan::new("empty").create(&t).await;
        assert_eq!(empty.status, RunStatus::Success);
        let bad = Plan::new("bad").job("bad-expression").create(&t).await;
        let run = t.store.run_get(bad.run_id).await.unwrap().unwrap();
        assert_eq!((run.status, run.failure_reason), (RunStatus::Failed, Some(FailureReason::ExprError)));
        assert!(t.store.queue_selectors_pending().await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_dedup_or_request_key_adopts_the_first_run() {
    TestStore::each(|t| async move {
        let first = Plan::new("k").queued("a").create(&t).await;
        let again = Plan::new("k").queued("a").create(&t).await;
        assert_eq!((again.run_id, again.created), (first.run_id, false));
        let key = Some(("manual".to_owned(), "idem-1".to_owned()));
        let one = t.store.run_create(Plan::new("m1").queued("a").run(), key.clone(), enqueue()).await.unwrap();
        let two = t.store.run_create(Plan::new("m2").queued("a").run(), key, enqueue()).await.unwrap();
        assert_eq!((two.run_id, two.created), (one.run_id, false));
        assert_eq!(t.store.run_list(RunFilter::default(), Page::default()).await.unwrap().items.len(), 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_counts_once_from_the_owner_at_the_current_epoch() {
    TestStore::each(|t| async move {
        Plan::new("k").queued("a").create(&t).await;
        let job = start(&t, "a1").await;
        let mut stale = result(&job, JobStatus::Success);
        stale.job.epoch = 0;
        assert!(matches!(t.store.job_finish(stale, enqueue()).await.unwrap(), JobFinished::Stale));
        let mut forged = result(&job, JobStatus::Success);
        forged.agent_id = Some(agent("a2"));
        assert!(matches!(t.store.job_finish(forged, enqueue()).await.unwrap(), JobFinished::NotOwned));
        finish(&t, &job, JobStatus::Success).await;
        let again = t.store.job_finish(result(&job, JobStatus::Failed), enqueue()).await.unwrap();
        assert!(matches!(again, JobFinished::Duplicate(JobStatus::Success)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn max_parallel_lets_the_next_variant_go_when_one_ends() {
    TestStore::each(|t| async move {
        let mut plan = Plan::new("k");
        for name in ["t (1)", "t (2)", "t (3)"] {
            plan = plan.with(name, "t", |job| {
                job.max_parallel = Some(2);
                job.start = JobStart::Queued(crate::fixtures::entry("default"));
            });
        }
        let created = plan.create(&t).await;
        assert_eq!(created.ready.len(), 2);
        assert_eq!(status_of(&t, created.run_id, "t (3)").await, JobStatus::Pending);
        let job = start(&t, "a1").await;
        assert_eq!(finish(&t, &job, JobStatus::Success).await.newly_queued.len(), 1);
        assert_eq!(status_of(&t, created.run_id, "t (3)").await, JobStatus::Queued);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failure_fail_fast_starts_no_other_variant_and_lets_running_ones_end() {
    TestStore::each(|t| async move {
        let mut plan = Plan::new("k");
        for name in ["t (1)", "t (2)", "t (3)", "t (4)"] {
            plan = plan.with(name, "t", |job| (job.fail_fast, job.max_parallel) = (true, Some(3)));
        }
        let run = plan.create(&t).await.run_id;
        let first = start(&t, "a1").await;
        let second = start(&t, "a2").await;
        let third = claim(&t, "a3", 1).await.pop().unwrap();
        let effects = finish(&t, &first, JobStatus::Failed).await;
        // Only the one that was handed out and had not started must be taken back.
        assert_eq!(effects.to_stop.len(), 1);
        assert_eq!((effects.to_stop[0].job, effects.to_stop[0].started), (third.job_ref, false));
        use JobStatus::{Cancelled, Failed, Running, Skipped, Success};
        let now = async || statuses(&t, run).await.into_iter().map(|(_, s)| s).collect::<Vec<_>>();
        assert_eq!(now().await, [Failed, Running, Cancelled, Skipped]);
        let reasons: Vec<_> = effects.finished_jobs.iter().map(|job| job.reason).collect();
        assert!(reasons.contains(&Some(FailureReason::FailFast)), "{reasons:?}");
        let effects = finish(&t, &second, Success).await;
        assert_eq!((effects.run_finished, effects.run.status), (true, RunStatus::Failed));
        assert_eq!(now().await, [Failed, Success, Cancelled, Skipped]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_on_hosts_keep_their_pin_through_queue_rerun_and_results() {
    TestStore::each(|t| async move {
        let mut plan = Plan::new("k");
        for (index, host) in (0..).zip(["h1", "h2"]) {
            plan = plan.with(&format!("roll ({host})"), "roll", |job| {
                job.fanout = Some(Fanout { host: agent(host), index, total: 2 });
                job.max_parallel = Some(1);
            });
        }
        let always = [JobStatus::Success, JobStatus::Failed];
        let run = plan.job("after").needs("after", "roll", &always).create(&t).await.run_id;
        let pending = t.store.queue_selectors_pending().await.unwrap();
        assert_eq!(pending.len(), 1, "one at a time");
        assert_eq!(pending[0].pinned_agent_id, Some(agent("h1")));
        assert!(claim(&t, "h2", 5).await.is_empty(), "only its host may");
        let first = start(&t, "h1").await;
        finish(&t, &first, JobStatus::Success).await;
        let second = start(&t, "h2").await;
        finish(&t, &second, JobStatus::Failed).await;
        let after = claim(&t, "h1", 1).await.pop().unwrap();
        let results = after.needs["roll"].hosts.clone().unwrap();
        assert_eq!(results.summary.succeeded_hosts, ["h1"]);
        assert_eq!(results.summary.failed_hosts, ["h2"]);
        assert_eq!(results.by_host["h1"]["v"], "roll (h1)");
        finish(&t, &after, JobStatus::Failed).await;
        let Rerun::Planned(again) = t.store.run_rerun_plan(run, true).await.unwrap() else { panic!("it failed") };
        let hosts: Vec<_> = again.jobs.iter().map(|job| job.fanout.as_ref().map(|f| f.host.to_string())).collect();
        assert_eq!(hosts, [Some("h1".to_owned()), Some("h2".to_owned()), None]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_move_forward_only_and_close_with_their_job() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").create(&t).await.run_id;
        let job = start(&t, "a1").await;
        let now = t.clock.now();
        let write = |ordinal, status| step(&job, ordinal, status, now);
        let answers = t
            .store
            .step_upsert(vec![
                write(0, StepStatus::Running),
                write(0, StepStatus::Success),
                write(0, StepStatus::Running),
                write(1, StepStatus::Running),
                write(2, StepStatus::Pending),
            ])
            .await
            .unwrap();
        use StepWritten::{Applied, Unchanged};
        assert_eq!(answers, [Applied, Applied, Unchanged, Applied, Applied]);
        let mut stale = write(1, StepStatus::Success);
        stale.job.epoch += 1;
        assert_eq!(t.store.step_upsert(vec![stale]).await.unwrap(), [StepWritten::Stale]);
        finish(&t, &job, JobStatus::Failed).await;
        let steps = t.store.steps_of_run(run).await.unwrap();
        let found: Vec<_> = steps.iter().map(|s| s.status).collect();
        assert_eq!(found, [StepStatus::Success, StepStatus::Failed, StepStatus::Skipped]);
        assert_eq!(steps[0].started_at, Some(now));

        assert_eq!(t.store.logs_unsealed(10).await.unwrap(), [job.job_ref]);
        t.store.steps_sealed(job.job_ref, vec![("step-0-0".to_owned(), 7, 2)]).await.unwrap();
        assert!(t.store.logs_unsealed(10).await.unwrap().is_empty());
        let steps = t.store.steps_of_job(job.job.id, 1).await.unwrap();
        assert_eq!((steps[0].log_state, steps[0].log_bytes), (Some(LogState::Sealed), 7));
        assert_eq!(steps[1].log_state, None);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_keeps_its_start_and_its_log_whatever_it_was_before_and_ends_once() {
    use StepStatus::{Failed, Pending, Running, Success};
    use StepWritten::{Applied, Unchanged};
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").create(&t).await.run_id;
        let job = start(&t, "a1").await;
        let begun = t.clock.now().plus(Duration::from_secs(1));
        let ended = begun.plus(Duration::from_secs(1));
        let mut last = step(&job, 0, Success, ended);
        last.log_bytes = 9;
        let writes = vec![
            step(&job, 0, Pending, t.clock.now()),
            step(&job, 0, Running, begun),
            last,
            step(&job, 0, Failed, ended.plus(Duration::from_secs(1))),
            step(&job, 1, Success, ended),
            step(&job, 2, Pending, begun),
            step(&job, 2, Failed, ended),
        ];
        let answers = t.store.step_upsert(writes).await.unwrap();
        assert_eq!(answers, [Applied, Applied, Applied, Unchanged, Applied, Applied, Applied]);
        let steps = t.store.steps_of_run(run).await.unwrap();
        let found = |n: usize| (steps[n].status, steps[n].started_at, steps[n].finished_at, steps[n].log_state);
        assert_eq!(found(0), (Success, Some(begun), Some(ended), Some(LogState::Open)));
        assert_eq!(steps[0].log_bytes, 9);
        assert_eq!(found(1), (Success, Some(ended), Some(ended), Some(LogState::Open)), "its beginning was not told");
        assert_eq!(found(2), (Failed, Some(ended), Some(ended), Some(LogState::Open)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_of_another_delivery_or_agent_writes_nothing() {
    TestStore::each(|t| async move {
        let run = Plan::new("k").queued("a").create(&t).await.run_id;
        let job = start(&t, "a1").await;
        let report = |steps: Vec<StepWrite>, result: JobResult| t.store.job_report(steps, result, enqueue());
        let mut stale = (step(&job, 0, StepStatus::Success, t.clock.now()), result(&job, JobStatus::Success));
        stale.0.job.epoch += 1;
        stale.1.job.epoch += 1;
        let answer = report(vec![stale.0], stale.1).await.unwrap();
        assert!(matches!(answer, (steps, JobFinished::Stale) if steps == [StepWritten::Stale]));
        let mut foreign = result(&job, JobStatus::Success);
        foreign.agent_id = Some(agent("a2"));
        assert!(matches!(report(vec![], foreign).await.unwrap(), (_, JobFinished::NotOwned)));
        assert_eq!(status_of(&t, run, "a").await, JobStatus::Running);
        let steps = vec![step(&job, 0, StepStatus::Success, t.clock.now())];
        let (written, finished) = report(steps, result(&job, JobStatus::Success)).await.unwrap();
        assert_eq!(written, [StepWritten::Applied]);
        assert!(matches!(finished, JobFinished::Applied(_)));
        assert_eq!(t.store.run_get(run).await.unwrap().unwrap().status, RunStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rerun_repeats_all_jobs_or_those_that_failed_and_what_needs_them() {
    TestStore::each(|t| async move {
        let plan = Plan::new("k").queued("lint").queued("build").job("test").needs("test", "build", SUCCESS);
        let run = plan.create(&t).await.run_id;
        assert!(matches!(t.store.run_rerun_plan(run, false).await.unwrap(), Rerun::StillOpen(_)));
        for job in claim(&t, "a1", 5).await {
            t.store.job_start(job.job_ref, agent("a1"), Default::default()).await.unwrap();
            let status = if job.job.name == "build" { JobStatus::Failed } else { JobStatus::Success };
            finish(&t, &job, status).await;
        }
        let Rerun::Planned(again) = t.store.run_rerun_plan(run, true).await.unwrap() else { panic!() };
        assert_eq!((again.attempt, again.parent_run_id), (2, Some(run)));
        let created = t.store.run_create(*again, None, enqueue()).await.unwrap();
        assert_eq!(created.ready.len(), 1);
        let expected = [("lint", JobStatus::Success), ("build", JobStatus::Queued), ("test", JobStatus::Pending)];
        let found = statuses(&t, created.run_id).await;
        assert_eq!(found.iter().map(|(n, s)| (n.as_str(), *s)).collect::<Vec<_>>(), expected);
        let lint = &t.store.jobs_of_run(created.run_id).await.unwrap()[0];
        assert_eq!(lint.outputs["v"], "lint");
        let Rerun::Planned(all) = t.store.run_rerun_plan(run, false).await.unwrap() else { panic!() };
        assert!(all.jobs.iter().all(|job| matches!(job.start, JobStart::Pending)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_are_listed_newest_first_in_pages() {
    TestStore::each(|t| async move {
        for n in 0..5 {
            Plan::new(&format!("k{n}")).queued("a").create(&t).await;
            t.clock.advance(Duration::from_secs(u64::from(n == 2)));
        }
        let mut seen = Vec::new();
        let mut page = Page { limit: 2, after: None };
        loop {
            let listed = t.store.run_list(RunFilter::default(), page).await.unwrap();
            seen.extend(listed.items.into_iter().map(|run| run.dedup_key));
            let Some(next) = listed.next else { break };
            page.after = Some(next);
        }
        assert_eq!(seen, ["k4", "k3", "k2", "k1", "k0"]);
        let filter = RunFilter { statuses: vec![RunStatus::Failed], ..RunFilter::default() };
        assert!(t.store.run_list(filter, Page::default()).await.unwrap().items.is_empty());
        assert_eq!(t.store.runs_open(3).await.unwrap().len(), 3);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_nothing_moves_is_found_and_goes_on_or_ends_with_a_reason() {
    TestStore::each(|t| async move {
        let success = [JobStatus::Success];
        // No compiled workflow has such needs.
        let circle = Plan::new("circle").job("a").job("b").needs("a", "b", &success).needs("b", "a", &success);
        let circle = circle.create(&t).await.run_id;
        let waiting = Plan::new("waiting").queued("c").create(&t).await.run_id;
        let lost = Plan::new("lost").queued("d").create(&t).await.run_id;
        // A completion that was not carried out.
        t.sql(&format!(
            "DELETE FROM dispatch_queue WHERE run_id = '{0}'; UPDATE jobs SET status = 'success' WHERE run_id = '{0}'",
            lost.uuid()
        ))
        .await;
        t.clock.advance(Duration::from_secs(10));
        let found = t.store.runs_idle(t.clock.now(), 10).await.unwrap();
        assert_eq!(found, [circle, lost], "a run with a row in the queue moves by itself");
        assert!(t.store.runs_idle(t.clock.now().minus(Duration::from_secs(10)), 10).await.unwrap().is_empty());
        assert!(t.store.run_unstick(waiting, enqueue()).await.unwrap().is_none());
        let effects = t.store.run_unstick(lost, enqueue()).await.unwrap().unwrap();
        assert!(effects.run_finished);
        assert_eq!(effects.run.status, RunStatus::Success);
        let effects = t.store.run_unstick(circle, enqueue()).await.unwrap().unwrap();
        assert_eq!((effects.run.status, effects.finished_jobs.len()), (RunStatus::Failed, 2));
        let job = t.store.jobs_of_run(circle).await.unwrap().remove(0);
        assert_eq!(job.failure_reason, Some(FailureReason::NeedsDeadlock));
        assert_eq!(job.failure_message.as_deref(), Some("it needs b and nothing is left that could end them"));
        assert!(t.store.runs_idle(t.clock.now(), 10).await.unwrap().is_empty());
    })
    .await;
}
