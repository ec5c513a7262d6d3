//! Generated jobs, jobs that wait for runs, and batches of failures.

use std::sync::Arc;
use std::time::Duration;

use kici_engine::event_name;
use kici_engine::ids::JobId;
use kici_engine::lock::Need;
use kici_engine::plan::JobKind;
use kici_engine::state::{FailureReason, JobStatus, RunStatus};
use kici_store::StoreError;
use kici_store::model::*;
use kici_store::testing::{TestIds, TestStore, agent};
use serde_json::json;

use crate::fixtures::{Plan, entry, result, start, status_of, statuses};

/// Sends everything to the queue, but for jobs named `gate`, and lets two jobs join.
#[derive(Debug)]
struct Joins;

impl Activate for Joins {
    fn activate(&self, job: &ReadyJob) -> Activation {
        match job.job.name.as_str() {
            "gate" => {
                let payload = json!({"v": 1});
                Activation::Invoke { event: "go".to_owned(), payload, slot: None, optional: false }
            }
            "held" => Activation::Hold { reason: "for a person".to_owned() },
            _ => Activation::Enqueue(entry("default")),
        }
    }

    fn expand(&self, made: &Generated) -> Result<Expansion, String> {
        assert_eq!(*made.lock_json, br#"{"name":"ci"}"#);
        let names: Vec<String> = serde_json::from_slice(&made.members_json).unwrap();
        if names.iter().any(|name| name == "refused") {
            return Err("a name that nobody may have".to_owned());
        }
        let jobs = names.iter().map(|name| NewJob {
            id: JobId::mint(&TestIds),
            name: name.clone(),
            base_name: name.clone(),
            job_index: 7,
            variant_label: None,
            matrix: None,
            fanout: None,
            display_name: name.clone(),
            max_parallel: None,
            fail_fast: false,
            timeout: None,
            kind: None,
            start: JobStart::Pending,
        });
        let need = |name: &String| {
            let need = Need { job: name.clone(), run_on: vec![JobStatus::Success], group: Some("g".to_owned()) };
            ("join".to_owned(), need)
        };
        Ok(Expansion {
            lock_digest: "d2".to_owned(),
            lock_json: br#"{"name":"ci2"}"#.to_vec(),
            jobs: jobs.collect(),
            needs: Vec::new(),
            gained: names.iter().map(need).collect(),
            group: "g".to_owned(),
        })
    }
}

fn joins() -> Arc<dyn Activate> {
    Arc::new(Joins)
}

fn generator(key: &str) -> NewRun {
    let mut run =
        Plan::new(key).with("plan", "plan", |job| job.kind = Some(JobKind::Generate)).job("join").job("end").run();
    run.needs.push(NewNeed {
        job_name: "join".to_owned(),
        upstream: whole_group("g"),
        run_on: vec![JobStatus::Success],
        group: Some("g".to_owned()),
        generator: Some("plan".to_owned()),
        resolved: false,
    });
    run.needs.push(NewNeed {
        job_name: "end".to_owned(),
        upstream: "join".to_owned(),
        run_on: vec![JobStatus::Success],
        group: None,
        generator: None,
        resolved: false,
    });
    run
}

fn report(job: &ClaimedJob, names: &[&str]) -> NewGenerated {
    let members_json = serde_json::to_vec(names).unwrap();
    NewGenerated {
        job: job.job_ref,
        agent_id: job.agent_id.clone(),
        digest: format!("members-{}", names.join("-")),
        members_json,
        count: u32::try_from(names.len()).unwrap(),
        wants_hosts: false,
    }
}

async fn end(t: &TestStore, job: &ClaimedJob, status: JobStatus) -> Effects {
    match t.store.job_finish(result(job, status), joins()).await.unwrap() {
        JobFinished::Applied(effects) => *effects,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_jobs_join_with_the_success_of_their_generator_and_only_then() {
    TestStore::each(|t| async move {
        let run = t.store.run_create(generator("k"), None, joins()).await.unwrap().run_id;
        let plan = start(&t, "a1").await;
        assert_eq!(plan.job.kind, Some(JobKind::Generate));
        // Whoever has not the job, or had it before, changes nothing.
        for (epoch, by) in [(0, "a1"), (1, "a2"), (2, "a1")] {
            let mut stale = report(&plan, &["x"]);
            (stale.job.epoch, stale.agent_id) = (epoch, agent(by));
            assert_eq!(t.store.generated_put(stale).await.unwrap(), Guarded::Lost, "{epoch} {by}");
        }
        for names in [&["refused"][..], &["one", "two"], &["one", "two"]] {
            assert_eq!(t.store.generated_put(report(&plan, names)).await.unwrap(), Guarded::Applied);
        }
        assert_eq!(t.store.generated_get(plan.job.id).await.unwrap(), Some(("members-one-two".to_owned(), 2)));
        assert_eq!(statuses(&t, run).await.len(), 3, "they have not joined yet");

        // The process that took the report is gone.
        let effects = end(&t, &plan, JobStatus::Success).await;
        assert_eq!(effects.newly_queued.len(), 2);
        let names: Vec<String> = statuses(&t, run).await.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["plan", "join", "end", "one", "two"]);
        assert_eq!(status_of(&t, run, "join").await, JobStatus::Pending);
        assert_eq!(t.store.run_get(run).await.unwrap().unwrap().lock_digest, "d2");
        assert_eq!(t.store.lock_document("d2".to_owned()).await.unwrap().as_deref(), Some(&br#"{"name":"ci2"}"#[..]));
        let (one, two) = (start(&t, "a1").await, start(&t, "a1").await);
        end(&t, &one, JobStatus::Success).await;
        assert_eq!(status_of(&t, run, "join").await, JobStatus::Pending, "another job of the group is open");
        end(&t, &two, JobStatus::Success).await;
        let join = start(&t, "a1").await;
        // The group shows what its jobs came to, under its name and under theirs.
        let shown: Vec<&str> = join.needs.keys().map(String::as_str).collect();
        assert_eq!(shown, ["g", "one", "two"]);
        assert_eq!((join.needs["g"].status, join.needs["g"].outputs["v"].as_str()), (JobStatus::Success, "two"));
        end(&t, &join, JobStatus::Failed).await;
        assert_eq!(t.store.run_get(run).await.unwrap().unwrap().status, RunStatus::Failed);

        // A repetition has the same jobs, and the generator is not asked again.
        for failed_only in [true, false] {
            let Rerun::Planned(again) = t.store.run_rerun_plan(run, failed_only).await.unwrap() else { panic!() };
            assert_eq!((again.jobs.len(), again.lock_digest.as_str()), (5, "d2"));
            assert!(matches!(again.jobs[0].start, JobStart::Succeeded { .. }), "{:?}", again.jobs[0]);
            let again = t.store.run_create(*again, None, joins()).await.unwrap().run_id;
            let open = statuses(&t, again).await.into_iter().filter(|(_, status)| *status == JobStatus::Queued).count();
            assert_eq!(open, if failed_only { 1 } else { 2 });
            t.store
                .run_cancel(
                    CancelRequest {
                        run_id: again,
                        by: "test".to_owned(),
                        reason: FailureReason::CancelledByUser,
                        force: true,
                    },
                    joins(),
                )
                .await
                .unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generator_without_jobs_or_with_bad_ones_fails_and_nothing_joins() {
    TestStore::each(|t| async move {
        for (names, want) in [(None, "reported no jobs"), (Some(&["refused"][..]), "nobody may have")] {
            let run = t.store.run_create(generator(want), None, joins()).await.unwrap().run_id;
            let plan = start(&t, "a1").await;
            if let Some(names) = names {
                t.store.generated_put(report(&plan, names)).await.unwrap();
            }
            end(&t, &plan, JobStatus::Success).await;
            let job = t.store.job_get(plan.job.id).await.unwrap().unwrap();
            assert_eq!((job.status, job.failure_reason), (JobStatus::Failed, Some(FailureReason::DynamicEval)));
            assert!(job.failure_message.unwrap().contains(want));
            assert_eq!(statuses(&t, run).await.len(), 3);
            assert_eq!(status_of(&t, run, "join").await, JobStatus::Skipped);
            assert_eq!(status_of(&t, run, "end").await, JobStatus::Skipped);
        }
        // An empty group meets the need at once, and shows as a success.
        let run = t.store.run_create(generator("empty"), None, joins()).await.unwrap().run_id;
        let plan = start(&t, "a1").await;
        t.store.generated_put(report(&plan, &[])).await.unwrap();
        end(&t, &plan, JobStatus::Success).await;
        assert_eq!(status_of(&t, run, "join").await, JobStatus::Queued);
        let join = start(&t, "a1").await;
        assert_eq!(join.needs["g"].status, JobStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_waits_for_runs_has_no_row_in_the_queue_and_ends_once() {
    TestStore::each(|t| async move {
        let run = Plan::new("k")
            .with("gate", "gate", |job| job.kind = Some(JobKind::Invoke))
            .job("held")
            .job("after")
            .needs("after", "gate", &[JobStatus::Success])
            .run();
        let run = t.store.run_create(run, None, joins()).await.unwrap().run_id;
        assert_eq!(status_of(&t, run, "gate").await, JobStatus::Running);
        assert_eq!(status_of(&t, run, "held").await, JobStatus::Held);
        assert!(t.store.queue_selectors_pending().await.unwrap().is_empty());
        let gates = t.store.gates_open(10).await.unwrap();
        assert_eq!((gates.len(), gates[0].delivered, gates[0].event_name.as_str()), (1, false, "go"));
        let event = t.store.event_claim(1, Duration::from_secs(60)).await.unwrap().pop().unwrap();
        assert!(t.store.gate_of_event(event.id).await.unwrap());
        assert_eq!((event.job_id, event.payload["v"].as_i64()), (Some(gates[0].job_id), Some(1)));
        let mut child = Plan::new("child").queued("work").run();
        child.chain_depth = 1;
        let child_id = child.id;
        let done = ProcessedEvent {
            id: event.id,
            outcome: EventOutcome::Done,
            matched_count: 1,
            note: None,
            trace: None,
            refused: Some("not this one".to_owned()),
            runs: vec![child],
        };
        assert!(t.store.event_process(done, joins()).await.unwrap().applied);
        let gate = t.store.gates_open(10).await.unwrap().remove(0);
        assert_eq!((gate.delivered, gate.refused.as_deref()), (true, Some("not this one")));
        assert_eq!(
            gate.runs.iter().map(|run| (run.id, run.status)).collect::<Vec<_>>(),
            [(child_id, RunStatus::Pending)]
        );
        t.store.gate_note(gate.run_id, gate.job_id, "waits for it".to_owned()).await.unwrap();

        let verdict = GateVerdict::Success { outputs: [("runs".to_owned(), child_id.to_string())].into() };
        let effects = t.store.gate_settle(run, gate.job_id, verdict.clone(), joins()).await.unwrap().unwrap();
        assert_eq!(effects.newly_queued.len(), 1);
        assert!(t.store.gate_settle(run, gate.job_id, verdict, joins()).await.unwrap().is_none());
        assert!(t.store.gates_open(10).await.unwrap().is_empty());
        let after = start(&t, "a1").await;
        assert_eq!((after.job.name.as_str(), &after.needs["gate"].outputs["runs"]), ("after", &child_id.to_string()));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_dead_or_gone_never_looks_as_if_nobody_had_listened() {
    TestStore::each(|t| async move {
        let run = t
            .store
            .run_create(
                Plan::new("k").with("gate", "gate", |job| job.kind = Some(JobKind::Invoke)).run(),
                None,
                joins(),
            )
            .await
            .unwrap()
            .run_id;
        let event = t.store.event_claim(1, Duration::from_secs(60)).await.unwrap().pop().unwrap();
        let done = ProcessedEvent {
            id: event.id,
            outcome: EventOutcome::Dead("no luck".to_owned(), "exhausted_retries"),
            matched_count: 0,
            note: None,
            trace: None,
            refused: None,
            runs: Vec::new(),
        };
        t.store.event_process(done, joins()).await.unwrap();
        let gate = t.store.gates_open(10).await.unwrap().remove(0);
        assert_eq!((gate.delivered, gate.refused.as_deref()), (true, Some("no luck")));
        t.sql("UPDATE job_gates SET refused = NULL").await;
        assert!(t.store.gates_open(10).await.unwrap()[0].refused.as_deref().unwrap().contains("is dead"));
        t.sql("DELETE FROM events").await;
        assert!(t.store.gates_open(10).await.unwrap()[0].refused.as_deref().unwrap().contains("is gone"));
        // A job that is cancelled meanwhile stays cancelled; nobody has it who would unwind it.
        let cancel =
            CancelRequest { run_id: run, by: "test".to_owned(), reason: FailureReason::CancelledByUser, force: false };
        t.store.run_cancel(cancel, joins()).await.unwrap();
        assert_eq!(status_of(&t, run, "gate").await, JobStatus::Cancelled);
        assert_eq!(t.store.gates_open(10).await.unwrap()[0].status, JobStatus::Cancelled);
        t.store.gate_settle(run, gate.job_id, GateVerdict::Ended, joins()).await.unwrap();
        assert!(t.store.gates_open(10).await.unwrap().is_empty());
    })
    .await;
}

async fn collector(t: &TestStore) {
    let source = t.store.source_create(crate::inbox::source("s", "generic:s")).await.unwrap();
    let trigger = json!({"type": "workflows_failed_batch", "accumulate_ms": 60_000, "workflows": ["ci", "!ci-*"]});
    let workflow = |name: &str| {
        json!({
            "name": name,
            "source": {"file": "a.yaml", "line": 1},
            "content_hash": "",
            "triggers": [trigger],
            "jobs": [],
        })
    };
    let registered = |name: &str| RegisteredWorkflow {
        name: name.to_owned(),
        lock_digest: format!("digest-{name}"),
        lock_json: serde_json::to_vec(&workflow(name)).unwrap(),
        trigger_types: vec!["workflows_failed_batch".to_owned()],
    };
    let set = RegistrationSet {
        org: "default".to_owned(),
        routing_key: "generic:s".to_owned(),
        source_id: source.id,
        repo: "o/r".to_owned(),
        sha: "b".repeat(40),
        default_branch: Some("main".to_owned()),
        keeps_others: false,
        seen: None,
        workflows: vec![registered("notify"), registered("ci")],
    };
    t.store.registrations_replace(set).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_told_together_once_and_never_to_those_who_failed() {
    TestStore::each(|t| async move {
        collector(&t).await;
        let source = t.store.source_list("default".to_owned()).await.unwrap().remove(0).id;
        let mut failed = 0;
        for (n, (kind, workflow, status)) in [
            ("push", "ci", JobStatus::Failed),
            ("push", "ci", JobStatus::Success),
            ("push", "other", JobStatus::Failed),
            // A notifier that fails tells nobody.
            ("workflow_complete", "ci", JobStatus::Failed),
            ("push", "ci", JobStatus::Failed),
        ]
        .into_iter()
        .enumerate()
        {
            let mut run = Plan::new(&format!("k{n}")).queued("a").run();
            (run.source_id, run.trigger_kind, run.workflow_name) = (source, kind.to_owned(), workflow.to_owned());
            run.repo = "o/other".to_owned();
            t.store.run_create(run, None, joins()).await.unwrap();
            let job = start(&t, "a1").await;
            end(&t, &job, status).await;
            failed += usize::from(n == 0 || n == 4);
        }
        assert_eq!(t.store.batches_close(10).await.unwrap(), 0, "the window is open");
        t.clock.advance(Duration::from_secs(60));
        assert_eq!(t.store.batches_close(10).await.unwrap(), 2);
        assert_eq!(t.store.batches_close(10).await.unwrap(), 0, "told once");
        let told = t.store.event_claim(10, Duration::from_secs(60)).await.unwrap();
        assert_eq!(told.len(), 2, "both who collect, each by itself");
        for event in told {
            assert_eq!(event.name, event_name::WORKFLOWS_FAILED_BATCH);
            assert!(event.registration_id.is_some());
            assert_eq!(event.payload["total"], failed);
            assert_eq!(event.payload["workflows"], json!(["ci"]));
            assert_eq!(event.payload["runs"].as_array().unwrap().len(), failed);
        }
    })
    .await;
}

/// Panics on its first call.
#[derive(Debug)]
struct Explodes(std::sync::atomic::AtomicBool);

impl Activate for Explodes {
    fn activate(&self, _: &ReadyJob) -> Activation {
        assert!(!self.0.swap(false, std::sync::atomic::Ordering::SeqCst), "on purpose");
        Activation::Enqueue(entry("default"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_transaction_read_that_was_undone_is_not_taken_for_stored() {
    TestStore::each(|t| async move {
        let activate: Arc<dyn Activate> = Arc::new(Explodes(true.into()));
        let lost = t.store.run_create(Plan::new("k").job("a").run(), None, activate.clone()).await.unwrap_err();
        assert!(matches!(lost, StoreError::Unavailable(_)), "{lost}");
        t.store.run_create(Plan::new("k").job("a").run(), None, activate).await.unwrap();
        t.store.close().await;
        let next = t.reopened().await;
        assert!(next.lock_document("d1".to_owned()).await.unwrap().is_some(), "a run without its workflow");
        next.close().await;
    })
    .await;
}
