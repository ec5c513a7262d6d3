//! How jobs in containers end, and that nothing of them stays.

use kici_protocol::agent::JobCancel;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_11_a_step_over_its_limit_is_gone_with_all_it_started_before_the_next_one() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    let hostile =
        "trap '' TERM; setsid sh -c \"trap '' TERM; while :; do sleep 600; done\" & (setsid sleep 601 &) ; sleep 602";
    let first = Step { timeout_ms: Some(500), continue_on_error: true, ..script(hostile) };
    let second = script("ps | grep '[s]leep 60' || echo nothing runs");
    let (result, text) = site.run_offer(contained(&job(2, 1), vec![first, second], json!({})), 2).await;
    assert_eq!(result.state, "success", "{text}");
    says(&text, &["ran longer than its limit of 0.5 s", "nothing runs"]);
}

async fn cancel(site: &Site, job: &JobRef, force: bool) {
    let reason = "cancelled_by_user".to_owned();
    let cancel = JobCancel { job: Some(job.clone()), reason, force, grace_ms: 20_000 };
    site.fake.send(Down::JobCancel(cancel)).await;
}

async fn cancelled(kind: &str) {
    let Some(site) = Site::start(kind, &[]).await else { return };
    let text = "trap 'echo cleaned up; exit 1' TERM; echo up; while :; do sleep 0.05; done";
    let hook = serde_json::to_value(script("echo hook runs")).expect("JSON");
    site.send(contained(&job(2, 1), vec![script(text)], json!({"hooks": {"on_cancel": [hook]}}))).await;
    site.fake.logged(&job(2, 1), "step-0-0", " o up").await;
    cancel(&site, &job(2, 1), false).await;
    assert_eq!(site.fake.result(&job(2, 1)).await.state, "cancelled");
    says(&site.fake.sealed(&job(2, 1), "step-0-0").await.join("\n"), &["cleaned up"]);
    assert_eq!(site.fake.sealed(&job(2, 1), "hook_on_cancel--1-0").await, ["hook runs"]);
    site.nothing_left().await;
    site.send(contained(&job(3, 1), vec![script("trap '' TERM; echo up; sleep 600")], json!({}))).await;
    site.fake.logged(&job(3, 1), "step-0-0", " o up").await;
    cancel(&site, &job(3, 1), true).await;
    assert_eq!(site.fake.result(&job(3, 1)).await.state, "cancelled");
    site.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_gives_its_grace_and_ends_everything_in_docker() {
    cancelled("docker").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_gives_its_grace_and_ends_everything_in_podman() {
    cancelled("podman").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complaint_21_a_step_that_takes_more_memory_than_it_may_fails_as_that() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    let more = json!({"resources": {"requests": {}, "limits": {"memory_bytes": 64 << 20}}});
    let (result, text) = site.run(&["dd if=/dev/zero of=/dev/null bs=200M count=1; echo went on; exit 1"], more).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "oom_killed"), "{} {text}", result.message);
    says(&result.message, &["memory limit of 64 MiB"]);
    let evidence = result.evidence.expect("evidence");
    assert_eq!(evidence.memory_limit_bytes, Some(64 << 20));
    assert!(evidence.peak_memory_bytes.is_some_and(|peak| peak > 32 << 20), "{evidence:?}");
}

async fn killed_agent(kind: &str) {
    let Some(mut site) = Site::start(kind, &[]).await else { return };
    site.send(contained(&job(2, 1), vec![script("echo up; setsid sleep 600 & sleep 600")], json!({}))).await;
    site.fake.logged(&job(2, 1), "step-0-0", " o up").await;
    let left = site.left().await;
    assert_eq!((left.containers.len(), left.networks.len(), left.volumes.len()), (1, 1, 1), "{left:?}");
    site.agent.kill();
    // Without anybody's help: its first process hears that the agent is gone.
    let until = tokio::time::Instant::now() + LIMIT;
    while site.engine.inspect(&left.containers[0]).await.expect("looked at").running {
        assert!(tokio::time::Instant::now() < until, "the job goes on without its agent");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    site.restart();
    site.fake.registered().await;
    assert!(site.left().await.is_empty(), "before it takes work: {:?}", site.left().await);
    let result = site.fake.result(&job(2, 1)).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "agent_restarted"));
    let (result, text) = site.run_offer(contained(&job(3, 1), vec![script("echo again")], json!({})), 1).await;
    assert_eq!((result.state.as_str(), text.as_str()), ("success", "again\n"));
    site.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_25_what_a_killed_agent_leaves_is_gone_before_it_takes_work_again_in_docker() {
    killed_agent("docker").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_25_what_a_killed_agent_leaves_is_gone_before_it_takes_work_again_in_podman() {
    killed_agent("podman").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_is_taken_away_fails_the_job_and_says_so() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    site.send(contained(&job(2, 1), vec![script("echo up; sleep 600"), script("echo never")], json!({}))).await;
    site.fake.logged(&job(2, 1), "step-0-0", " o up").await;
    site.engine.kill(&site.left().await.containers[0]).await.expect("ended");
    let result = site.fake.result(&job(2, 1)).await;
    assert_eq!((result.state.as_str(), result.reason.as_str()), ("failed", "sandbox_failed"), "{}", result.message);
    says(&result.message, &["the container is gone"]);
    site.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_started_says_why_and_leaves_nothing() {
    let Some(site) = Site::start("docker", &[]).await else { return };
    let image = |n, image: &str, more: Json| {
        let mut spec = json!({"container": {"image": {"static": image}}});
        merge(&mut spec, more);
        contained(&job(n, 1), vec![script("echo never")], spec)
    };
    let (result, text) = site.run_offer(image(2, "localhost/kici-test/none:1", json!({})), 1).await;
    assert_eq!((result.reason.as_str(), text.as_str()), ("sandbox_failed", ""));
    says(&result.message, &["`localhost/kici-test/none:1` is not on this host", "pull: never"]);
    // Nobody listens there: what the engine says of its registry comes through.
    let pull = json!({"container": {"pull": "missing"}});
    let (result, _) = site.run_offer(image(3, "127.0.0.1:9/none:1", pull), 1).await;
    says(&result.message, &["fetching image `127.0.0.1:9/none:1`", "refused"]);
    let user = json!({"container": {"user": "nobody"}});
    let (result, _) = site.run_offer(image(4, BUSYBOX, user), 1).await;
    says(&result.message, &["nobody"]);
    site.nothing_left().await;
    // What the operator does not allow is no job for this agent; another one may take it.
    let privileged = json!({"container": {"options": {"privileged": true}}});
    site.send(image(5, BUSYBOX, privileged)).await;
    let (reason, detail) = rejected(&site.fake, &job(5, 1)).await;
    assert_eq!(reason, RejectReason::Unsupported);
    says(&detail, &["container_allow_privileged"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_without_an_engine_gives_the_job_back_before_any_work() {
    let dir = tempfile::tempdir().expect("a directory");
    let fake = Fake::start();
    let mut command = harness::command(&dir.path().join("state"));
    command.env("KICI_ORCHESTRATOR_URL", fake.url()).env("KICI_AGENT_TOKEN", token());
    command.env("KICI_CONTAINER_SOCKET", dir.path().join("none.sock"));
    let _agent = harness::Killed(command.spawn().expect("started"));
    fake.registered().await;
    fake.send(Down::JobOffer(contained(&job(2, 1), vec![script("echo never")], json!({})))).await;
    let (reason, detail) = rejected(&fake, &job(2, 1)).await;
    assert_eq!(reason, RejectReason::Unsupported);
    says(&detail, &["no container runtime on ", "none.sock", "kici:runtime:docker"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_without_a_container_get_that_of_the_agent_and_kept_ones_go_at_the_next_start() {
    let settings =
        [("KICI_EXECUTION_MODE", "container"), ("KICI_CONTAINER_IMAGE", BUSYBOX), ("KICI_DOCKER_KEEP_FAILED", "true")];
    let Some(mut site) = Site::start("docker", &settings).await else { return };
    let (result, text) = site.run_offer(offer(&job(2, 1), vec![script("pwd; echo $OF_IMAGE; exit 1")]), 1).await;
    assert_eq!(result.state, "failed");
    says(&text, &["/workspace\nthere\n"]);
    // A later job shows that the first one is cleaned up as far as it will be.
    let (result, _) = site.run_offer(offer(&job(3, 1), vec![script("true")]), 1).await;
    assert_eq!(result.state, "success");
    let left = site.left().await;
    assert!(!left.containers.is_empty(), "kept to be looked at");
    site.restart();
    site.fake.registered().await;
    assert!(site.left().await.is_empty());
}
