use tokio::io::AsyncReadExt;

use super::*;

fn shell(script: &str) -> Spawn {
    Spawn {
        args: vec!["-c".into(), script.into()],
        env: vec![("PATH".into(), "/usr/bin:/bin".into()), ("A".into(), "1".into())],
        ..Spawn::new("/bin/sh", "/")
    }
}

#[tokio::test]
async fn output_and_exit_code_arrive_and_the_keeper_goes() {
    let (mut tree, mut pipes) = Tree::spawn(&shell("echo $A $B; echo two >&2; exit 3")).expect("spawned");
    let (mut out, mut err) = (String::new(), String::new());
    pipes.stdout.read_to_string(&mut out).await.expect("read");
    pipes.stderr.read_to_string(&mut err).await.expect("read");
    assert_eq!((out.as_str(), err.as_str()), ("1\n", "two\n"));
    assert_eq!(tree.command_exit().await.code(), Some(3));
    assert_eq!(tree.kill().await, 0);
    assert!(!tree.id().is_alive());
}

#[tokio::test]
async fn a_missing_program_is_an_error_of_the_spawn() {
    let error = Tree::spawn(&Spawn::new("/no/such/program", "/")).expect_err("not there");
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[tokio::test]
async fn a_double_forked_daemon_does_not_escape() {
    let script = "(setsid sh -c 'sleep 600 & sleep 600 & echo up; exec sleep 600' &) ; sleep 600";
    let (mut tree, mut pipes) = Tree::spawn(&shell(script)).expect("spawned");
    let mut up = [0_u8; 3];
    pipes.stdout.read_exact(&mut up).await.expect("the daemon is up");
    let below = descendants(tree.id());
    assert!(below.len() >= 3, "{below:?}");
    assert!(tree.kill().await >= 3);
    assert!(below.iter().all(|id| !id.is_alive()));
    assert!(!tree.is_alive());
}

#[tokio::test]
async fn the_command_may_end_before_what_it_started() {
    let (mut tree, mut pipes) = Tree::spawn(&shell("sleep 600 >/dev/null 2>&1 & exit 0")).expect("spawned");
    let mut out = String::new();
    pipes.stdout.read_to_string(&mut out).await.expect("the pipe closes though the keeper lives");
    assert!(tree.command_exit().await.success());
    assert!(tree.is_alive());
    assert_eq!(tree.kill().await, 1);
}

#[tokio::test]
async fn terminate_asks_and_a_signal_is_seen() {
    let (mut tree, _pipes) = Tree::spawn(&shell("exec sleep 600")).expect("spawned");
    tree.terminate();
    assert_eq!(tree.command_exit().await.signal(), Some(15));
}

#[tokio::test]
async fn leftovers_are_found_by_pid_and_start_time() {
    let (mut tree, mut pipes) = Tree::spawn(&shell("setsid sleep 600 & echo up; sleep 600")).expect("spawned");
    let mut up = [0_u8; 3];
    pipes.stdout.read_exact(&mut up).await.expect("up");
    let id = tree.id();
    assert_eq!(kill_leftovers(ProcessId { start: id.start + 1, ..id }), 0);
    assert!(kill_leftovers(id) >= 2);
    assert_eq!(tree.kill().await, 0);
}
