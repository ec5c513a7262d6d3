//! Two orchestrators on one database: one leads, and the other one takes over.

use std::fs;
use std::process::Command;

use kici_api::dto::system::OrchestratorStatus;
use nix::sys::signal::Signal;

use crate::postgres::Server;
use crate::stack::{Stack, clean, until};

async fn status(stack: &Stack) -> Option<OrchestratorStatus> {
    stack.client.status().await.ok()
}

/// Runs of the work that one instance is enough for.
fn led(status: &OrchestratorStatus) -> u64 {
    status.reconcilers.iter().filter(|work| work.leader_only).map(|work| work.runs).sum()
}

async fn leads(stack: &Stack) -> OrchestratorStatus {
    until("leadership, and its work", async || {
        let status = status(stack).await?;
        (status.leader && led(&status) > 0).then_some(status)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_orchestrators_one_leads_and_the_other_takes_over_when_it_is_killed_or_stops() {
    let Some(server) = Server::new() else { return };
    let mut first = Stack::start(Some(server.url())).await;
    leads(&first).await;
    let mut second = Stack::unstarted(Some(server.url()));
    second.token.clone_from(&first.token);
    second.start_orchestrator("127.0.0.1:0").await;
    // It has been up for long enough that each of its own sweeps ran.
    let follower = until("the follower's own work", async || {
        let status = status(&second).await?;
        let own = status.reconcilers.iter().filter(|work| !work.leader_only);
        own.clone().all(|work| work.runs > 0).then_some(status)
    })
    .await;
    assert!(!follower.leader);
    assert_eq!(led(&follower), 0, "what one is enough for is done by one: {:#?}", follower.reconcilers);

    // Killed: its lease runs out.
    first.orchestrator.take().expect("it runs").kill();
    leads(&second).await;
    first.start_orchestrator("127.0.0.1:0").await;
    let returned = until("the first one's own work", async || {
        let status = status(&first).await?;
        status.reconcilers.iter().filter(|work| !work.leader_only).all(|work| work.runs > 0).then_some(status)
    })
    .await;
    assert!(!returned.leader && led(&returned) == 0);
    assert!(leads(&second).await.reconcilers.iter().all(|work| work.failures == 0));

    // Stopped in order: the lease is given back.
    let mut leaving = second.orchestrator.take().expect("it runs");
    leaving.signal(Signal::SIGTERM);
    assert_eq!(leaving.exit_code().await, Some(0), "{}", second.logs());
    leads(&first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stood_still_while_another_one_took_over_changes_nothing_and_follows() {
    let Some(server) = Server::new() else { return };
    let first = Stack::start(Some(server.url())).await;
    leads(&first).await;
    let mut second = Stack::unstarted(Some(server.url()));
    second.token.clone_from(&first.token);
    second.start_orchestrator("127.0.0.1:0").await;
    let frozen = first.orchestrator.as_ref().expect("it runs");
    frozen.signal(Signal::SIGSTOP);
    leads(&second).await;
    frozen.signal(Signal::SIGCONT);
    until("the first one to follow", async || status(&first).await.filter(|status| !status.leader)).await;
    assert!(leads(&second).await.leader);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_orchestrator_on_one_sqlite_file_is_refused_in_words() {
    let stack = Stack::start(None).await;
    let file = stack.data().join("db/kici.sqlite3");
    let run = |directory: &str, database: Option<String>| {
        let mut command: Command = clean(std::path::Path::new(env!("CARGO_BIN_EXE_kici-orchestrator")));
        command
            .env("KICI_DATA_DIR", stack.dir.path().join(directory))
            .env("KICI_SERVER_LISTEN", "127.0.0.1:0")
            .env("KICI_STARTUP_BACKOFF_MS", "0");
        if let Some(database) = database {
            command.env("KICI_DATABASE_URL", database);
        }
        let output = command.output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout),
        )
    };
    let (code, text) = run("other", Some(format!("sqlite:{}", file.display())));
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("is in use by another program; stop it first"), "{text}");
    // Nor may two share a data directory.
    let (code, text) = run("data", None);
    assert_eq!(code, Some(1), "{text}");
    assert!(fs::exists(&file).unwrap());
    assert!(stack.client.ready().await.unwrap().ready);
}
