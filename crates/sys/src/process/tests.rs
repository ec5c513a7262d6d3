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
    let id = tree.id();
    drop(tree);
    assert!(!strays::lock().contains(&id), "keepers are not collected for ever");
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

#[tokio::test]
async fn what_lost_its_keeper_comes_to_us_and_is_ended() {
    adopt_strays().expect("allowed");
    let (mut tree, mut pipes) = Tree::spawn(&shell("setsid sleep 600 & echo up; sleep 600")).expect("spawned");
    let (mut other, _pipes) = Tree::spawn(&shell("exec sleep 600")).expect("spawned");
    let mut up = [0_u8; 3];
    pipes.stdout.read_exact(&mut up).await.expect("up");
    let below = descendants(tree.id());
    assert!(below.len() >= 2 && !may_have_strays(), "{below:?}");
    assert!(tree.id().signal(Signal::SIGKILL));
    tree.command_exit().await;
    assert!(may_have_strays());
    // Its pipe closes before its children become ours.
    tree.keeper.wait().await.expect("ours");
    assert!(kill_strays() >= 2);
    assert!(below.iter().all(|id| !id.is_alive()));
    assert!(other.is_alive(), "it has its keeper");
    other.kill().await;
}

mod confined {
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::cgroup::{Delegated, Limits};
    use crate::confine::{Calls, Confinement, Files, Reach, User};

    async fn run(spawn: &Spawn) -> (String, Option<i32>) {
        let (mut tree, mut pipes) = Tree::spawn(spawn).expect("spawned");
        let (mut out, mut err) = (String::new(), String::new());
        let (a, b) = tokio::join!(pipes.stdout.read_to_string(&mut out), pipes.stderr.read_to_string(&mut err));
        assert!(a.is_ok() && b.is_ok());
        let code = tree.command_exit().await.code();
        tree.kill().await;
        (out + &err, code)
    }

    fn with_calls(attach: bool) -> Confinement {
        let calls = Calls::new(std::process::id(), 0, attach).expect("a filter");
        Confinement { calls: Some(Arc::new(calls)), drop_capabilities: true, ..Confinement::default() }
    }

    #[tokio::test]
    async fn a_filtered_command_cannot_signal_us_its_keeper_or_everybody_and_cannot_mount() {
        let me = std::process::id();
        let script = format!(
            "kill -0 {me} || echo no agent; kill -9 $PPID || echo no keeper; kill -9 -$PPID || echo no keeper group; \
             kill -9 -1 || echo no everybody; mount -t tmpfs none /mnt || echo no mount; \
             sleep 60 & kill $! && echo own child; wait $!; grep CapBnd /proc/self/status"
        );
        let (said, _) = run(&Spawn { confine: with_calls(true), ..shell(&script) }).await;
        for word in ["no agent", "no keeper\n", "no keeper group", "no everybody", "no mount", "own child"] {
            assert!(said.contains(word), "{word}: {said}");
        }
        let bound = said.lines().find_map(|line| line.strip_prefix("CapBnd:\t")).expect("a set");
        let bound = u64::from_str_radix(bound, 16).expect("hexadecimal");
        assert_eq!(bound & (1 << 19 | 1 << 21), 0, "neither tracing nor administration: {bound:x}");
    }

    fn landlocked(dir: &Path, reach: Reach) -> Spawn {
        let files = Files::new(&reach).expect("this kernel has Landlock");
        let confine = Confinement { files: Some(Arc::new(files)), drop_capabilities: true, ..Confinement::default() };
        Spawn { cwd: dir.to_owned(), confine, ..shell("") }
    }

    #[tokio::test]
    async fn files_outside_of_the_reach_are_neither_written_nor_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().canonicalize().expect("there");
        let path = |name: &str| root.join(name);
        for name in ["state/job", "home/old", "outside"] {
            std::fs::create_dir_all(path(name)).expect("made");
        }
        for name in ["state/token", "outside/readable"] {
            std::fs::write(path(name), "text").expect("written");
        }
        let reach = Reach {
            writable: vec![path("home"), path("state/job"), "/dev".into(), "/no/such/directory".into()],
            hidden: vec![path("state")],
        };
        assert!(reach.exposed().is_empty());
        assert_eq!(Reach { writable: vec![root.clone()], ..reach.clone() }.exposed(), [path("state")]);
        let script = "echo a > state/job/new && mv state/job/new state/job/x && cat state/job/x && echo own works
            cat outside/readable > /dev/null && echo reads
            echo a > outside/new || echo not outside
            echo a > state/new || echo not the state
            cat state/token || echo not the token
            ln -s ../token state/job/link; cat state/job/link || echo not by a link
            mkdir -p home/.cache/x && echo a > home/.cache/x/y && echo home works
            cp /dev/null outside/readable || echo not emptied
            rm -f outside/readable || echo not removed";
        let spawn = Spawn { args: vec!["-c".into(), script.into()], ..landlocked(&root, reach) };
        let (said, _) = run(&spawn).await;
        let words =
            "own works,reads,not outside,not the state,not the token,not by a link,home works,not emptied,not removed";
        for word in words.split(',') {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert_eq!(std::fs::read_to_string(path("outside/readable")).expect("still there"), "text");
    }

    #[tokio::test]
    async fn a_confined_command_cannot_look_into_a_process_that_it_did_not_start() {
        let reach = Reach { writable: vec!["/dev".into()], ..Reach::default() };
        let mut other = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let script = format!("cat /proc/{}/environ || echo no environment", other.id());
        let spawn = Spawn { args: vec!["-c".into(), script.into()], ..landlocked(Path::new("/"), reach) };
        let (said, _) = run(&spawn).await;
        other.kill().and_then(|()| other.wait()).expect("ended");
        assert!(said.contains("no environment"), "{said}");
    }

    #[tokio::test]
    async fn another_user_has_its_own_ids_and_groups_and_no_capability() {
        if crate::host::uid() != 0 {
            // Only root can become somebody else; an agent that is not refuses the setting.
            return;
        }
        let user = User::named("nobody").expect("readable").expect("a user");
        let confine = Confinement { user: Some(Arc::new(user.clone())), ..with_calls(true) };
        let (said, _) = run(&Spawn { confine, ..shell("id -u; id -G; grep CapEff /proc/self/status") }).await;
        let groups: Vec<String> = user.groups.iter().map(u32::to_string).collect();
        assert_eq!(said, format!("{}\n{}\nCapEff:\t0000000000000000\n", user.uid, groups.join(" ")));
        assert_eq!(User::named("no-such-user").expect("readable"), None);
    }

    #[tokio::test]
    async fn a_group_is_ended_at_once_though_its_keeper_is_gone() {
        let Ok(place) = Delegated::find() else { return };
        if !place.kills() {
            return;
        }
        let job = place.job(&format!("test-{}", std::process::id()), &Limits::default()).expect("made");
        let group = Arc::new(job.command().expect("made"));
        let script = "setsid sleep 600 & setsid sleep 600 & echo up; sleep 600";
        let (mut tree, mut pipes) = Tree::spawn(&Spawn { group: Some(group), ..shell(script) }).expect("spawned");
        let mut up = [0_u8; 3];
        pipes.stdout.read_exact(&mut up).await.expect("up");
        let below = descendants(tree.id());
        assert!(below.len() >= 3, "{below:?}");
        assert!(tree.id().signal(Signal::SIGKILL));
        tree.command_exit().await;
        assert!(below.iter().all(|id| id.is_alive()), "nothing looks after them any more");
        assert!(tree.kill().await >= 3);
        while below.iter().any(|id| id.is_alive()) {
            tokio::task::yield_now().await;
        }
        drop(tree);
        job.end();
        let left: Vec<PathBuf> = std::fs::read_dir(place.dir())
            .expect("readable")
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.to_string_lossy().contains(&format!("test-{}", std::process::id())))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}
